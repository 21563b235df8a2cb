/* The references to storages that a session knows. */
#include "bind_dtr_private.h"

static size_t slot_of(const py_ref_table_t *table, const PyObject *storage) {
    uint64_t hash = (uint64_t)(uintptr_t)storage * UINT64_C(0x9e3779b97f4a7c15);
    return (size_t)(hash >> 20) & (table->capacity - 1);
}

/* The slot of a storage, or the free one where it belongs. */
static size_t find_slot(const py_ref_table_t *table, const PyObject *storage) {
    size_t at = slot_of(table, storage);
    while (table->slots[at] != NULL && table->slots[at]->storage != storage) {
        at = (at + 1) & (table->capacity - 1);
    }
    return at;
}

py_ref_t *py_table_find(const py_ref_table_t *table, const PyObject *storage) {
    return table->capacity == 0 ? NULL : table->slots[find_slot(table, storage)];
}

static int table_grow(py_ref_table_t *table) {
    py_ref_table_t grown = {.capacity = table->capacity == 0 ? 256 : 2 * table->capacity,
                        .count = table->count};
    grown.slots = PyMem_Calloc(grown.capacity, sizeof(py_ref_t *));
    if (grown.slots == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t k = 0; k < table->capacity; k++) {
        if (table->slots[k] != NULL) {
            grown.slots[find_slot(&grown, table->slots[k]->storage)] = table->slots[k];
        }
    }
    PyMem_Free(table->slots);
    *table = grown;
    return 0;
}

static int table_add(py_ref_table_t *table, py_ref_t *ref) {
    if (2 * (table->count + 1) > table->capacity && table_grow(table) != 0) {
        return -1;
    }
    size_t at = find_slot(table, ref->storage);
    table->count += table->slots[at] == NULL;
    Py_INCREF((PyObject *)ref);
    Py_XSETREF(table->slots[at], ref);
    return 0;
}

void py_table_remove(py_ref_table_t *table, const py_ref_t *ref) {
    if (table->capacity == 0) {
        return;
    }
    size_t mask = table->capacity - 1;
    size_t hole = find_slot(table, ref->storage);
    py_ref_t *removed = table->slots[hole];
    if (removed != ref) {
        return;
    }
    /* Those behind it move up, so that no search ends too early. */
    for (size_t at = (hole + 1) & mask; table->slots[at] != NULL; at = (at + 1) & mask) {
        size_t wanted = slot_of(table, table->slots[at]->storage);
        if (((at - wanted) & mask) >= ((at - hole) & mask)) {
            table->slots[hole] = table->slots[at];
            hole = at;
        }
    }
    table->slots[hole] = NULL;
    table->count--;
    Py_DECREF((PyObject *)removed);
}

void py_table_clear(py_ref_table_t *table) {
    py_ref_table_t before = *table;
    *table = (py_ref_table_t){0};
    for (size_t k = 0; k < before.capacity; k++) {
        Py_XDECREF((PyObject *)before.slots[k]);
    }
    PyMem_Free(before.slots);
}

py_ref_t *py_table_enter(py_handler_t *self, PyObject *storage, bool *is_new) {
    py_ref_t *ref = py_table_find(&self->table, storage);
    *is_new = ref == NULL;
    if (ref != NULL) {
        return ref;
    }
    ref = (py_ref_t *)py_ref_make(self->ref_type, storage, self->gone);
    if (ref == NULL) {
        return NULL;
    }
    int ret = table_add(&self->table, ref);
    Py_DECREF((PyObject *)ref);
    return ret == 0 ? ref : NULL;
}

int64_t py_bytes_of(py_handler_t *self, PyObject *storage) {
    PyObject *nbytes = PyObject_CallMethodNoArgs(storage, self->names[NAME_nbytes]);
    int64_t bytes = nbytes == NULL ? -1 : PyLong_AsLongLong(nbytes);
    Py_XDECREF(nbytes);
    return bytes;
}

py_ref_t *py_handler_adopt(py_handler_t *self, PyObject *storage, int64_t bytes,
                           bool is_foreign) {
    py_recorder_t *recorder = self->recorder;
    bool is_new;
    int32_t node;
    py_ref_t *ref = py_table_enter(self, storage, &is_new);
    if (ref == NULL || !is_new) {
        return ref;
    }
    int status = ROTOR_OK;
    if (py_book_reserve(recorder, 1) != 0 ||
        (status = rotor_recorder_source(&recorder->book, bytes, is_foreign, &node)) != ROTOR_OK) {
        py_table_remove(&self->table, ref);
        return status == ROTOR_OK ? NULL : (py_ref_t *)PyErr_NoMemory();
    }
    recorder->places[node] = Py_NewRef((PyObject *)ref);
    ref->node = node;
    ref->is_foreign = is_foreign;
    if (py_book_settle(recorder) != 0) {
        return NULL;
    }
    if (recorder->observer != Py_None) {
        int64_t size = py_bytes_of(self, storage);
        if (size < 0 || py_did(PyObject_CallMethod(recorder->observer, "constant", "iL", (int)node,
                                                   (long long)size)) != 0) {
            return NULL;
        }
    }
    return ref;
}
