/* The clock of a session (the system's, or one in Python that tests set), and the settings of
 * PyTorch's backends that operations are repeated under. */
#include "bind_dtr_private.h"

#include "probe.h"

int64_t py_handler_now(py_handler_t *self) {
    if (self->clock == NULL || self->clock == Py_None) {
        return rotor_clock_ns();
    }
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *now = PyObject_CallNoArgs(self->clock);
    int64_t ns = now == NULL ? 0 : PyLong_AsLongLong(now);
    Py_XDECREF(now);
    if (PyErr_Occurred()) {
        PyErr_WriteUnraisable(self->clock);
    }
    PyErr_Restore(type, value, traceback);
    return ns;
}

PyObject *py_operator_flags(py_handler_t *self, int32_t watched) {
    PyObject *readers = self->parts[PART_FLAGS];
    Py_ssize_t count = PyTuple_GET_SIZE(readers);
    PyObject *flags = NULL;
    if (self->flags == NULL) {
        watched = (int32_t)count;
    }
    for (Py_ssize_t k = 0; k < watched; k++) {
        PyObject *value = PyObject_CallNoArgs(PyTuple_GET_ITEM(readers, k));
        int is_same = value == NULL ? -1 : 0;
        if (is_same == 0 && flags == NULL && self->flags != NULL) {
            PyObject *last = PyTuple_GET_ITEM(self->flags, k);
            is_same = last == value ? 1 : PyObject_RichCompareBool(last, value, Py_EQ);
        }
        if (is_same < 0) {
            Py_XDECREF(value);
            Py_XDECREF(flags);
            return NULL;
        }
        if (is_same == 1) {
            Py_DECREF(value);
            continue;
        }
        if (flags == NULL) {
            flags = PyTuple_New(count);
            for (Py_ssize_t i = 0; flags != NULL && i < k; i++) {
                PyTuple_SET_ITEM(flags, i, Py_NewRef(PyTuple_GET_ITEM(self->flags, i)));
            }
            if (flags == NULL) {
                Py_DECREF(value);
                return NULL;
            }
        }
        PyTuple_SET_ITEM(flags, k, value);
    }
    if (flags != NULL) {
        for (Py_ssize_t k = watched; k < count; k++) {
            PyTuple_SET_ITEM(flags, k, Py_NewRef(PyTuple_GET_ITEM(self->flags, k)));
        }
        Py_XSETREF(self->flags, flags);
    }
    return Py_NewRef(self->flags);
}

int32_t py_flags_of(const py_handler_t *self, const py_kernel_t *kernel) {
    return (kernel->traits & TRAIT_POINTWISE) != 0 ? self->plain_flags
           : self->is_cpu                          ? self->cpu_flags
                                                   : (int32_t)PyTuple_GET_SIZE(self->parts[PART_FLAGS]);
}
