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

PyDoc_STRVAR(class_versions_doc,
             "class_versions(classes, /)\n--\n\n"
             "Return a number of each class in a tuple, which changes when an attribute of it or of\n"
             "its bases is set or deleted; None where the interpreter has yet to give one.");

static PyObject *py_class_versions(PyObject *module, PyObject *classes) {
    if (!PyTuple_Check(classes)) {
        return PyErr_Format(PyExc_TypeError, "classes must be a tuple of type");
    }
    Py_ssize_t count = PyTuple_GET_SIZE(classes);
    for (Py_ssize_t k = 0; k < count; k++) {
        PyObject *one = PyTuple_GET_ITEM(classes, k);
        if (!PyType_Check(one)) {
            return PyErr_Format(PyExc_TypeError, "classes must be a tuple of type");
        }
        if (((PyTypeObject *)one)->tp_version_tag == 0) {
            Py_RETURN_NONE;
        }
    }
    PyObject *versions = PyTuple_New(count);
    for (Py_ssize_t k = 0; versions != NULL && k < count; k++) {
        PyTypeObject *one = (PyTypeObject *)PyTuple_GET_ITEM(classes, k);
        PyObject *version = PyLong_FromUnsignedLong(one->tp_version_tag);
        if (version == NULL) {
            Py_CLEAR(versions);
        } else {
            PyTuple_SET_ITEM(versions, k, version);
        }
    }
    return versions;
}

static PyMethodDef functions[] = {
    {"class_versions", py_class_versions, METH_O, class_versions_doc},
    {"call_in_main_thread", py_call_in_main_thread, METH_O, call_in_main_thread_doc},
    {NULL, NULL, 0, NULL},
};

int py_add_pending(PyObject *module) { return PyModule_AddFunctions(module, functions); }
