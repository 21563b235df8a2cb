#include "support.h"

/* Calls a function, given as a reference, as the interpreter does between two instructions. */
static int call_pending(void *given) {
    PyObject *function = given;
    PyObject *result = PyObject_CallObject(function, NULL);
    if (result == NULL) {
        PyErr_WriteUnraisable(function);
    }
    Py_XDECREF(result);
    Py_DECREF(function);
    return 0;
}

PyDoc_STRVAR(call_in_main_thread_doc,
             "call_in_main_thread(function, /)\n--\n\n"
             "Have the main thread call a function before its next instruction; return whether it\n"
             "will.\n"
             "\n"
             "While the main thread runs no Python code, as in a backward, it calls the function as\n"
             "soon as it does again. An exception is reported as unraisable.");

static PyObject *py_call_in_main_thread(PyObject *module, PyObject *function) {
    Py_INCREF(function);
    if (Py_AddPendingCall(call_pending, function) != 0) {
        Py_DECREF(function);
        Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

PyDoc_STRVAR(versions_doc,
             "versions(owners, /)\n--\n\n"
             "Return a number of each class or dictionary in a tuple, which changes when an attribute\n"
             "of it or of its bases, or an entry, is set or deleted; None where the interpreter has\n"
             "yet to give one, and for dictionaries from Python 3.12 on.");

static uint64_t version_of(PyObject *owner) {
#if PY_VERSION_HEX < 0x030C0000
    if (PyDict_Check(owner)) {
        return ((PyDictObject *)owner)->ma_version_tag;
    }
#endif
    return PyType_Check(owner) ? ((PyTypeObject *)owner)->tp_version_tag : 0;
}

static PyObject *py_versions(PyObject *module, PyObject *owners) {
    Py_ssize_t count = PyTuple_Check(owners) ? PyTuple_GET_SIZE(owners) : 0;
    int are_valid = PyTuple_Check(owners);
    for (Py_ssize_t k = 0; k < count; k++) {
        PyObject *owner = PyTuple_GET_ITEM(owners, k);
        are_valid = are_valid && (PyType_Check(owner) || PyDict_Check(owner));
    }
    if (!are_valid) {
        return PyErr_Format(PyExc_TypeError, "owners must be a tuple of classes or dictionaries");
    }
    PyObject *versions = PyTuple_New(count);
    for (Py_ssize_t k = 0; versions != NULL && k < count; k++) {
        uint64_t found = version_of(PyTuple_GET_ITEM(owners, k));
        if (found == 0) {
            Py_DECREF(versions);
            Py_RETURN_NONE;
        }
        PyObject *version = PyLong_FromUnsignedLongLong(found);
        if (version == NULL) {
            Py_CLEAR(versions);
        } else {
            PyTuple_SET_ITEM(versions, k, version);
        }
    }
    return versions;
}

static PyMethodDef functions[] = {
    {"versions", py_versions, METH_O, versions_doc},
    {"call_in_main_thread", py_call_in_main_thread, METH_O, call_in_main_thread_doc},
    {NULL, NULL, 0, NULL},
};

int py_add_pending(PyObject *module) { return PyModule_AddFunctions(module, functions); }
