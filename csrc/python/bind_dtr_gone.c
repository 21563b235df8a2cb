/* Storages that died: noted by callbacks, which run at any allocation, and forgotten later. */
#include "bind_dtr.h"

void rotor_recorder_note_gone(recorder_object_t *self, rotor_ref_object_t *ref) {
    if (ref->is_gone) {
        return;
    }
    ref->is_gone = 1;
    Py_INCREF((PyObject *)ref);
    if (self->last_gone == NULL) {
        self->first_gone = ref;
    } else {
        self->last_gone->next_gone = ref;
    }
    self->last_gone = ref;
}

static rotor_ref_object_t *take_gone(recorder_object_t *self) {
    rotor_ref_object_t *ref = self->first_gone;
    if (ref != NULL) {
        self->first_gone = ref->next_gone;
        ref->next_gone = NULL;
        if (self->first_gone == NULL) {
            self->last_gone = NULL;
        }
    }
    return ref;
}

void rotor_recorder_clear_gone(recorder_object_t *self) {
    rotor_ref_object_t *ref;
    while ((ref = take_gone(self)) != NULL) {
        Py_DECREF((PyObject *)ref);
    }
}

static int forget(recorder_object_t *self, int64_t node) {
    int status = rotor_recorder_dead(&self->book, (int32_t)node);
    if (rotor_recorder_settle(self) != 0) {
        return -1;
    }
    if (status != ROTOR_OK) {
        (void)rotor_raise_status(PyType_GetModule(Py_TYPE(self)), status);
        return -1;
    }
    rotor_recorder_let_go(self);
    if (self->observer == Py_None) {
        return 0;
    }
    PyObject *heard = PyObject_CallMethod(self->observer, "released", "L", (long long)node);
    Py_XDECREF(heard);
    return heard == NULL ? -1 : 0;
}

int rotor_recorder_forget_gone(recorder_object_t *self) {
    const rotor_recorder_t *book = &self->book;
    rotor_ref_object_t *ref;
    int ret = 0;
    while (ret == 0 && !self->is_borrowed && (ref = take_gone(self)) != NULL) {
        int64_t node = ref->node;
        /* The number may be another node's by now. */
        if (node >= 0 && node < book->node_count &&
            (book->nodes[node].state & ROTOR_NODE_LIVE) != 0 &&
            self->places[node] == (PyObject *)ref) {
            ret = forget(self, node);
        }
        Py_DECREF((PyObject *)ref);
    }
    return ret;
}

PyObject *rotor_recorder_guard(recorder_object_t *self, int64_t node) {
    PyObject *storage = rotor_recorder_storage_of(self, node);
    if (storage != NULL && rotor_recorder_keep(self, storage) != 0) {
        return NULL;
    }
    return storage;
}

int rotor_recorder_guard_outputs(recorder_object_t *self, int32_t op) {
    const rotor_recorder_t *book = &self->book;
    const rotor_record_t *record = &book->records[op];
    const int32_t *outputs = record->items + record->input_count;
    for (int32_t k = 0; k < record->output_count; k++) {
        int32_t node = outputs[k];
        if (node < 0 || rotor_recorder_is_material(book, node) ||
            (book->nodes[node].state & ROTOR_NODE_LIVE) == 0) {
            continue;
        }
        if (rotor_recorder_guard(self, node) == NULL) {
            if (!PyErr_Occurred()) {
                PyErr_SetString(PyExc_RuntimeError, "the storage of a live node is gone");
            }
            return -1;
        }
    }
    return 0;
}
