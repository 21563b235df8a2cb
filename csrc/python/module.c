#include "binding.h"

#include <string.h>
#include <time.h>

rotor_state_t *rotor_state(PyObject *module) { return (rotor_state_t *)PyModule_GetState(module); }

PyObject *rotor_raise_status(PyObject *module, int status) {
    if (PyErr_Occurred()) {
        return NULL;
    }
    switch (status) {
    case ROTOR_ERR_NO_MEMORY:
    case ROTOR_ERR_TABLE_TOO_LARGE:
        PyErr_SetString(PyExc_MemoryError, rotor_strerror(status));
        break;
    case ROTOR_ERR_INTERRUPTED:
        PyErr_SetString(PyExc_KeyboardInterrupt, rotor_strerror(status));
        break;
    case ROTOR_ERR_OVERFLOW:
        PyErr_SetString(PyExc_OverflowError, rotor_strerror(status));
        break;
    case ROTOR_ERR_INFEASIBLE:
        PyErr_SetString(rotor_state(module)->infeasible_error, rotor_strerror(status));
        break;
    case ROTOR_ERR_BAD_OPERATION:
    case ROTOR_ERR_NO_INPUT:
    case ROTOR_ERR_NO_TAPE:
    case ROTOR_ERR_NO_GRADIENT:
    case ROTOR_ERR_TWICE:
    case ROTOR_ERR_ONCE:
    case ROTOR_ERR_INCOMPLETE:
        PyErr_SetString(rotor_state(module)->invalid_sequence_error, rotor_strerror(status));
        break;
    case ROTOR_ERR_IO:
    case ROTOR_ERR_UNAVAILABLE:
        PyErr_SetString(PyExc_OSError, rotor_strerror(status));
        break;
    default:
        PyErr_SetString(PyExc_ValueError, rotor_strerror(status));
    }
    return NULL;
}

PyObject *rotor_raise_infeasible(PyObject *module, int64_t budget, int64_t minimum) {
    PyObject *message = PyUnicode_FromFormat(
        "no schedule fits in a budget of %lld bytes; the least that one fits in is %lld bytes",
        (long long)budget, (long long)minimum);
    PyObject *type = rotor_state(module)->infeasible_error;
    PyObject *error =
        message == NULL ? NULL : PyObject_CallFunction(type, "OL", message, (long long)minimum);
    if (error != NULL) {
        PyErr_SetObject(type, error);
        Py_DECREF(error);
    }
    Py_XDECREF(message);
    return NULL;
}

int rotor_get_int64(PyObject *object, const char *name, Py_ssize_t length, Py_buffer *view) {
    if (PyObject_GetBuffer(object, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0) {
        return -1;
    }
    const char *format = view->format == NULL ? "B" : view->format;
    bool is_int64 = view->itemsize == 8 && (format[0] == 'q' || format[0] == 'l') && !format[1];
    if (view->ndim != 1 || !is_int64) {
        PyErr_Format(PyExc_TypeError, "%s must be a one-dimensional array of int64", name);
        goto fail;
    }
    if (length >= 0 && view->shape[0] != length) {
        PyErr_Format(PyExc_ValueError, "%s has %zd entries, expected %zd", name, view->shape[0],
                     length);
        goto fail;
    }
    return 0;
fail:
    PyBuffer_Release(view);
    return -1;
}

PyObject *rotor_int64_bytes(const int64_t *values, int64_t count) {
    return PyByteArray_FromStringAndSize((const char *)values,
                                         (Py_ssize_t)count * (Py_ssize_t)sizeof(*values));
}

PyObject *rotor_ops_bytes(const rotor_sequence_t *sequence) {
    return PyByteArray_FromStringAndSize(
        (const char *)sequence->ops,
        (Py_ssize_t)sequence->length * (Py_ssize_t)sizeof(*sequence->ops));
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static bool keep_going(void *context, int64_t done, int64_t total) {
    rotor_watch_t *watch = context;
    int64_t now = now_ns();
    bool go;

    if (now < watch->next_ns) {
        return true;
    }
    watch->next_ns = now + 50000000;
    PyEval_RestoreThread(watch->saved);
    go = PyErr_CheckSignals() == 0;
    if (go && watch->progress != NULL) {
        PyObject *answer =
            PyObject_CallFunction(watch->progress, "LL", (long long)done, (long long)total);
        go = answer != NULL;
        Py_XDECREF(answer);
    }
    watch->saved = PyEval_SaveThread();
    return go;
}

void rotor_watch_begin(rotor_watch_t *watch, PyObject *progress) {
    watch->callback.keep_going = keep_going;
    watch->callback.context = watch;
    watch->progress = progress == Py_None ? NULL : progress;
    watch->next_ns = now_ns() + 50000000;
    watch->saved = PyEval_SaveThread();
}

void rotor_watch_end(rotor_watch_t *watch) { PyEval_RestoreThread(watch->saved); }

static int load_errors(PyObject *module) {
    rotor_state_t *state = rotor_state(module);
    PyObject *errors = PyImport_ImportModule("rotor.errors");
    if (errors == NULL) {
        return -1;
    }
    state->infeasible_error = PyObject_GetAttrString(errors, "InfeasibleError");
    state->invalid_sequence_error = PyObject_GetAttrString(errors, "InvalidSequenceError");
    state->malformed_log_error = PyObject_GetAttrString(errors, "MalformedLogError");
    Py_DECREF(errors);
    return state->infeasible_error == NULL || state->invalid_sequence_error == NULL ||
                   state->malformed_log_error == NULL
               ? -1
               : 0;
}

PyDoc_STRVAR(same_bytes_doc, "same_bytes(a, b, /)\n--\n\n"
                             "Whether two buffers hold the same bytes.");

static PyObject *same_bytes(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    Py_buffer a;
    Py_buffer b;
    bool same;

    (void)module;
    if (nargs != 2) {
        return PyErr_Format(PyExc_TypeError, "same_bytes takes two buffers");
    }
    if (PyObject_GetBuffer(args[0], &a, PyBUF_SIMPLE) != 0) {
        return NULL;
    }
    if (PyObject_GetBuffer(args[1], &b, PyBUF_SIMPLE) != 0) {
        PyBuffer_Release(&a);
        return NULL;
    }
    same = a.len == b.len && memcmp(a.buf, b.buf, (size_t)a.len) == 0;
    PyBuffer_Release(&a);
    PyBuffer_Release(&b);
    return PyBool_FromLong(same);
}

static PyMethodDef functions[] = {
    {"same_bytes", (PyCFunction)(void (*)(void))same_bytes, METH_FASTCALL, same_bytes_doc},
    {NULL, NULL, 0, NULL},
};

static int execute(PyObject *module) {
    if (load_errors(module) != 0 || PyModule_AddFunctions(module, functions) != 0 ||
        rotor_add_chain(module) != 0 || rotor_add_solvers(module) != 0 ||
        rotor_add_classic(module) != 0 || rotor_add_probe(module) != 0 ||
        rotor_add_log(module) != 0 || rotor_add_replay(module) != 0 ||
        rotor_add_planner(module) != 0 || rotor_add_dtr(module) != 0 ||
        rotor_add_checksum(module) != 0) {
        return -1;
    }
    return 0;
}

static int traverse(PyObject *module, visitproc visit, void *arg) {
    rotor_state_t *state = rotor_state(module);
    Py_VISIT(state->infeasible_error);
    Py_VISIT(state->invalid_sequence_error);
    Py_VISIT(state->malformed_log_error);
    Py_VISIT(state->chain_type);
    Py_VISIT(state->table_type);
    Py_VISIT(state->log_type);
    Py_VISIT(state->candidate_type);
    Py_VISIT(state->ref_type);
    Py_VISIT(state->needs_type);
    Py_VISIT(state->recorder_type);
    Py_VISIT(state->kernel_type);
    return 0;
}

static int clear(PyObject *module) {
    rotor_state_t *state = rotor_state(module);
    Py_CLEAR(state->infeasible_error);
    Py_CLEAR(state->invalid_sequence_error);
    Py_CLEAR(state->malformed_log_error);
    Py_CLEAR(state->chain_type);
    Py_CLEAR(state->table_type);
    Py_CLEAR(state->log_type);
    Py_CLEAR(state->candidate_type);
    Py_CLEAR(state->ref_type);
    Py_CLEAR(state->needs_type);
    Py_CLEAR(state->recorder_type);
    Py_CLEAR(state->kernel_type);
    return 0;
}

static void release(void *module) { (void)clear((PyObject *)module); }

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, execute},
    {0, NULL},
};

PyDoc_STRVAR(documentation, "The C core of rotor: chains, sequences, solvers, probes.");

struct PyModuleDef rotor_module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "rotor._core",
    .m_doc = documentation,
    .m_size = sizeof(rotor_state_t),
    .m_slots = slots,
    .m_traverse = traverse,
    .m_clear = clear,
    .m_free = release,
};

PyMODINIT_FUNC PyInit__core(void);

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&rotor_module_def); }
