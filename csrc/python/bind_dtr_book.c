#include "bind_dtr_book.h"

#include <string.h>

#include "vector.h"

static int grow_objects(PyObject ***items, int64_t *capacity, int64_t needed) {
    int64_t before = *capacity;
    if (needed <= before) {
        return 0;
    }
    if (rotor_grow((void **)items, capacity, needed, sizeof(**items)) != ROTOR_OK) {
        PyErr_NoMemory();
        return -1;
    }
    memset(*items + before, 0, (size_t)(*capacity - before) * sizeof(**items));
    return 0;
}

int py_book_discard(py_recorder_t *self, PyObject **slot) {
    if (*slot == NULL) {
        return 0;
    }
    if (grow_objects(&self->garbage, &self->garbage_capacity, self->garbage_count + 1) != 0) {
        return -1;
    }
    self->garbage[self->garbage_count++] = *slot;
    *slot = NULL;
    return 0;
}

void py_book_let_go(py_recorder_t *self) {
    while (self->garbage_count > 0) {
        PyObject *object = self->garbage[--self->garbage_count];
        self->garbage[self->garbage_count] = NULL;
        Py_DECREF(object);
    }
}

PyObject *py_book_storage_of(py_recorder_t *self, int64_t node) {
    PyObject *place = node < self->place_capacity ? self->places[node] : NULL;
    if (place != NULL && PyWeakref_Check(place)) {
        place = PyWeakref_GetObject(place);
        place = place == Py_None ? NULL : place;
    }
    return Py_XNewRef(place);
}

/* Takes over a reference until the operation has ended. */
static int hold_guard(py_recorder_t *self, PyObject *storage) {
    if (grow_objects(&self->guards, &self->guard_capacity, self->guard_count + 1) != 0) {
        Py_DECREF(storage);
        return -1;
    }
    self->guards[self->guard_count++] = storage;
    return 0;
}

int py_book_settle(py_recorder_t *self) {
    rotor_recorder_t *book = &self->book;
    int ret = 0;

    for (int64_t k = 0; k < book->event_count && ret == 0; k++) {
        int32_t number = book->events[k].number;
        PyObject *storage;
        switch (book->events[k].kind) {
        case ROTOR_FORGOT_OPERATION:
            ret = py_book_discard(self, &self->records[number]);
            break;
        case ROTOR_FORGOT_NODE:
            ret = py_book_discard(self, &self->places[number]);
            if (ret == 0) {
                ret = py_book_discard(self, &self->held[number]);
            }
            if (ret == 0) {
                ret = py_book_discard(self, &self->copies[number]);
            }
            break;
        case ROTOR_NEEDED:
            if (self->held[number] == NULL) {
                self->held[number] = py_book_storage_of(self, number);
            }
            break;
        case ROTOR_UNNEEDED:
            ret = py_book_discard(self, &self->held[number]);
            break;
        case ROTOR_LOCKED:
            /* A temporary has to go when the book says so; its place holds it until then. */
            storage = self->places[number] != NULL && PyWeakref_Check(self->places[number])
                          ? py_book_storage_of(self, number)
                          : NULL;
            if (storage != NULL) {
                ret = hold_guard(self, storage);
            }
            break;
        case ROTOR_DROPPED:
            ret = py_book_discard(self, &self->places[number]);
            break;
        case ROTOR_UNSTORED:
            ret = py_book_discard(self, &self->copies[number]);
            break;
        }
    }
    book->event_count = 0;
    return ret;
}

int py_book_release_guards(py_recorder_t *self) {
    int ret = 0;
    while (self->guard_count > 0 && ret == 0) {
        ret = py_book_discard(self, &self->guards[--self->guard_count]);
    }
    return ret;
}

PyObject *py_book_answer(py_recorder_t *self, int status, PyObject *result) {
    if (py_book_settle(self) != 0 || status != ROTOR_OK || result == NULL) {
        Py_CLEAR(result);
        (void)py_check_status(self, status);
    }
    py_book_let_go(self);
    return result;
}

int py_book_reserve(py_recorder_t *self, int64_t more) {
    int64_t nodes = self->book.node_count + more;
    return grow_objects(&self->places, &self->place_capacity, nodes) == 0 &&
                   grow_objects(&self->held, &self->held_capacity, nodes) == 0 &&
                   grow_objects(&self->copies, &self->copy_capacity, nodes) == 0 &&
                   grow_objects(&self->records, &self->record_capacity,
                                self->book.record_count + 1) == 0
               ? 0
               : -1;
}

int py_book_read_int64(PyObject *object, int64_t *value) {
    /* No __index__ is called, which might change the book or a list that is being read. */
    if (!PyLong_Check(object)) {
        PyErr_Format(PyExc_TypeError, "expected an int, got %R", object);
        return -1;
    }
    *value = PyLong_AsLongLong(object);
    return *value == -1 && PyErr_Occurred() ? -1 : 0;
}

int py_book_read_node(py_recorder_t *self, PyObject *object, int32_t *node) {
    int64_t value;
    if (py_book_read_int64(object, &value) != 0) {
        return -1;
    }
    if (value < 0 || value >= self->book.node_count || self->book.nodes[value].state == 0) {
        PyErr_Format(PyExc_ValueError, "there is no node %lld", (long long)value);
        return -1;
    }
    *node = (int32_t)value;
    return 0;
}

int py_book_expect(const char *name, Py_ssize_t count, Py_ssize_t wanted) {
    if (count == wanted) {
        return 0;
    }
    PyErr_Format(PyExc_TypeError, "%s() takes %zd positional arguments", name, wanted);
    return -1;
}

PyObject *py_book_refuse_reentry(void) {
    PyErr_SetString(PyExc_RuntimeError,
                    "a session of rotor.dtr was used while one of its operations runs, from a "
                    "finalizer or an observer: leave that to the program itself");
    return NULL;
}

int py_book_may_begin(const py_recorder_t *self) {
    return self->book.frame_count == 0 || py_book_refuse_reentry() != NULL ? 0 : -1;
}

int py_book_complete(py_recorder_t *self, const rotor_completion_t *done, PyObject *const *places,
                     PyObject *record, int32_t *nodes) {
    int32_t op = -1;
    int status = rotor_recorder_finish(&self->book, done, nodes, &op);
    if (status != ROTOR_OK || py_book_release_guards(self) != 0 || py_book_settle(self) != 0) {
        return status;
    }
    for (int64_t k = 0; k < done->count; k++) {
        /* An origin's storage is the new version's. */
        if (done->origins[k] >= 0 && py_book_discard(self, &self->places[done->origins[k]]) != 0) {
            return status;
        }
    }
    for (int64_t k = 0; k < done->count; k++) {
        self->places[nodes[k]] = Py_NewRef(places[k]);
    }
    if (op >= 0) {
        self->records[op] = Py_NewRef(record);
    }
    return status;
}

PyObject *py_book_node_list(const int32_t *nodes, int64_t count) {
    PyObject *list = PyList_New(0);
    for (int64_t k = 0; list != NULL && k < count; k++) {
        py_append(&list, PyLong_FromLong(nodes[k]));
    }
    return list;
}

/* Storages that died: callbacks note them, which run at any allocation; calls forget them later. */

void py_book_note_gone(py_recorder_t *self, py_ref_t *ref) {
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

static py_ref_t *take_gone(py_recorder_t *self) {
    py_ref_t *ref = self->first_gone;
    if (ref != NULL) {
        self->first_gone = ref->next_gone;
        ref->next_gone = NULL;
        if (self->first_gone == NULL) {
            self->last_gone = NULL;
        }
    }
    return ref;
}

void py_book_clear_gone(py_recorder_t *self) {
    py_ref_t *ref;
    while ((ref = take_gone(self)) != NULL) {
        Py_DECREF((PyObject *)ref);
    }
}

static int forget(py_recorder_t *self, int64_t node) {
    int status = rotor_recorder_dead(&self->book, (int32_t)node);
    if (py_book_settle(self) != 0 || py_check_status(self, status) != 0) {
        return -1;
    }
    py_book_let_go(self);
    if (self->observer == Py_None) {
        return 0;
    }
    return py_did(PyObject_CallMethod(self->observer, "released", "L", (long long)node));
}

int py_book_forget_gone(py_recorder_t *self) {
    const rotor_recorder_t *book = &self->book;
    py_ref_t *ref;
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

PyObject *py_book_guard(py_recorder_t *self, int64_t node) {
    PyObject *storage = py_book_storage_of(self, node);
    if (storage != NULL && hold_guard(self, storage) != 0) {
        return NULL;
    }
    return storage;
}

int py_book_guard_outputs(py_recorder_t *self, int32_t op) {
    const rotor_recorder_t *book = &self->book;
    const rotor_record_t *record = &book->records[op];
    const int32_t *outputs = record->items + record->input_count;
    for (int32_t k = 0; k < record->output_count; k++) {
        int32_t node = outputs[k];
        if (node < 0 || rotor_recorder_is_material(book, node) ||
            (book->nodes[node].state & ROTOR_NODE_LIVE) == 0) {
            continue;
        }
        if (py_book_guard(self, node) == NULL) {
            if (!PyErr_Occurred()) {
                PyErr_SetString(PyExc_RuntimeError, "the storage of a live node is gone");
            }
            return -1;
        }
    }
    return 0;
}
