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

// call_in_main_thread(function, /) -> bool
PyDoc_STRVAR(call_in_main_thread_doc,
             "call_in_main_thread(function, /)\n--\n\n"
             "Have the main thread call a function before its next instruction; return whether it\n"
             "will.\n"
             "\n"
             "While the main thread runs no Python code, as in a backward, it calls the function as\n"
             "soon as it does again. An exception is reported as unraisable.");

static PyObject *py_call_in_main_thread(PyObject *module, PyObject *function) {
    (void)module;
    Py_INCREF(function);
    if (Py_AddPendingCall(call_pending, function) != 0) {
        Py_DECREF(function);
        Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

static PyMethodDef functions[] = {
    {"call_in_main_thread", py_call_in_main_thread, METH_O, call_in_main_thread_doc},
    {NULL, NULL, 0, NULL},
};

int py_add_pending(PyObject *module) { return PyModule_AddFunctions(module, functions); }
