/* The needs of an operator on arguments of one layout, by the key that was read. */
#include "bind_dtr_private.h"

#include <string.h>

static uint64_t hash_of(const int64_t *words, int64_t count) {
    uint64_t hash = (uint64_t)count;
    for (int64_t k = 0; k < count; k++) {
        hash = (hash ^ (uint64_t)words[k]) * UINT64_C(0x9e3779b97f4a7c15);
        hash ^= hash >> 29;
    }
    return hash;
}

static bool is_same(const py_recent_t *recent, uint64_t hash, const int64_t *words,
                    int64_t count) {
    size_t bytes = (size_t)count * sizeof(*words);
    return recent->key != NULL && recent->hash == hash &&
           (size_t)PyBytes_GET_SIZE(recent->key) == bytes &&
           memcmp(PyBytes_AS_STRING(recent->key), words, bytes) == 0;
}

static void note_recent(py_recent_t *recent, uint64_t hash, PyObject *key, py_needs_t *needs) {
    py_recent_t before = *recent;
    Py_INCREF((PyObject *)needs);
    *recent = (py_recent_t){.hash = hash, .key = Py_NewRef(key), .needs = needs};
    Py_XDECREF(before.key);
    Py_XDECREF((PyObject *)before.needs);
}

void py_needs_forget_recent(py_handler_t *self) {
    for (int k = 0; k < ROTOR_RECENT; k++) {
        Py_CLEAR(self->recent[k].key);
        Py_CLEAR(self->recent[k].needs);
    }
}

static int64_t bytes_read(py_handler_t *self) {
    int64_t sum = 0;
    for (int64_t k = 0; k < self->node_count; k++) {
        PyObject *storage = py_book_storage_of(self->recorder, self->nodes[k]);
        int64_t bytes = storage == NULL ? 0 : py_bytes_of(self, storage);
        Py_XDECREF(storage);
        if (bytes < 0) {
            return -1;
        }
        sum += bytes;
    }
    return sum;
}

static py_needs_t *guess(py_handler_t *self, const py_run_t *run) {
    int64_t bytes = bytes_read(self);
    return (py_needs_t *)(bytes < 0 ? NULL
                                    : PyObject_CallMethod(
                                          run->session, "_guess", "OOONL",
                                          run->key == NULL ? Py_None : run->key,
                                          run->kernel->operator_, run->args, py_run_kwargs(run),
                                          (long long)bytes));
}

int py_needs_find(py_handler_t *self, py_run_t *run) {
    bool is_kept = self->has_key && (run->kernel->traits & TRAIT_ODD) == 0;
    uint64_t hash = is_kept ? hash_of(self->key, self->key_count) : 0;
    py_recent_t *recent = &self->recent[hash % ROTOR_RECENT];

    if (is_kept && is_same(recent, hash, self->key, self->key_count)) {
        Py_INCREF((PyObject *)recent->needs);
        run->needs = recent->needs;
        return 0;
    }
    if (self->has_key) {
        run->key =
            PyBytes_FromStringAndSize((const char *)self->key, (Py_ssize_t)self->key_count * 8);
        if (run->key == NULL) {
            return -1;
        }
        PyObject *found = PyDict_GetItemWithError(self->needs, run->key);
        if (found == NULL && PyErr_Occurred()) {
            return -1;
        }
        run->needs = (py_needs_t *)Py_XNewRef(found);
    }
    if (run->needs == NULL && (run->needs = guess(self, run)) == NULL) {
        return -1;
    }
    if (Py_TYPE((PyObject *)run->needs) != self->needs_type) {
        PyErr_SetString(PyExc_TypeError, "the needs of an operator must be Needs");
        return -1;
    }
    if (is_kept) {
        note_recent(recent, hash, run->key, run->needs);
    }
    return 0;
}
