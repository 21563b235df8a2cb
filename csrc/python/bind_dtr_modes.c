/* The modes that PyTorch calls: of operators, and of functions that read without them. */
#include "bind_dtr_private.h"

#include <structmember.h>

typedef struct {
    /* Of operators: the Handler. Of functions: those, to what is called with their arguments. */
    PyObject_HEAD PyObject *used;
} py_mode_t;

static PyObject *py_mode_used(PyObject *object, void *closure) {
    PyObject *used = ((py_mode_t *)object)->used;
    return Py_NewRef(used == NULL ? Py_None : used);
}

static int py_mode_traverse(PyObject *object, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(((py_mode_t *)object)->used);
    return 0;
}

static int py_mode_clear(PyObject *object) {
    Py_CLEAR(((py_mode_t *)object)->used);
    return 0;
}

/* OperatorMode */

static PyObject *py_dispatch(PyObject *object, PyObject *const *args, Py_ssize_t count) {
    py_handler_t *handler = (py_handler_t *)((py_mode_t *)object)->used;
    if (!py_are_counted("__torch_dispatch__", count, 3, 4)) {
        return NULL;
    }
    if (handler == NULL) {
        return PyErr_Format(PyExc_RuntimeError, "the session has no handler");
    }
    PyObject *all[5] = {object, args[0], args[1], args[2], count == 4 ? args[3] : Py_None};
    if (!PyTuple_Check(all[3]) || (all[4] != Py_None && !PyDict_Check(all[4]))) {
        return PyErr_Format(PyExc_TypeError, "args must be a tuple, kwargs a dictionary or None");
    }
    return py_operator_run(handler, all);
}

PyDoc_STRVAR(dispatch_doc, "__torch_dispatch__($self, func, types, args, kwargs=None, /)\n--\n\n"
                           "Run one operator of the program.");

static PyMethodDef operator_mode_methods[] = {
    {"__torch_dispatch__", PY_FASTCALL(py_dispatch), dispatch_doc},
    {NULL, NULL, 0, NULL},
};

static int py_mode_set_handler(PyObject *object, PyObject *value, void *closure) {
    if (value == NULL || !py_is_handler(value)) {
        PyErr_SetString(PyExc_TypeError, "the handler of a mode must be a Handler");
        return -1;
    }
    Py_XSETREF(((py_mode_t *)object)->used, Py_NewRef(value));
    return 0;
}

static PyGetSetDef operator_mode_getset[] = {
    {"handler", py_mode_used, py_mode_set_handler, "Runs the operators.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyDoc_STRVAR(operator_mode_doc, "OperatorMode()\n--\n\n"
                                "Base of a mode of operators that a Handler runs.");

/* FunctionMode */

static PyObject *py_call_function(PyObject *object, PyObject *const *args, Py_ssize_t count) {
    PyObject *watched = ((py_mode_t *)object)->used;
    if (!py_are_counted("__torch_function__", count, 3, 4)) {
        return NULL;
    }
    PyObject *kwargs =
        count == 4 && args[3] != Py_None && PyDict_Check(args[3]) && PyDict_GET_SIZE(args[3]) > 0
            ? args[3]
            : NULL;
    PyObject *before = watched == NULL ? NULL : PyDict_GetItemWithError(watched, args[0]);
    if (before == NULL && PyErr_Occurred()) {
        return NULL;
    }
    if (before != NULL) {
        Py_INCREF(before);
        int ret = py_did(PyObject_CallFunctionObjArgs(before, args[2],
                                                      kwargs == NULL ? Py_None : kwargs, NULL));
        Py_DECREF(before);
        if (ret != 0) {
            return NULL;
        }
    }
    if (!PyTuple_Check(args[2])) {
        return PyErr_Format(PyExc_TypeError, "args must be a tuple");
    }
    return PyObject_Call(args[0], args[2], kwargs);
}

PyDoc_STRVAR(function_doc, "__torch_function__($self, func, types, args, kwargs=None, /)\n--\n\n"
                           "Call one function of PyTorch.");

static PyMethodDef function_mode_methods[] = {
    {"__torch_function__", PY_FASTCALL(py_call_function), function_doc},
    {NULL, NULL, 0, NULL},
};

static int py_mode_set_watched(PyObject *object, PyObject *value, void *closure) {
    if (value == NULL || !PyDict_Check(value)) {
        PyErr_SetString(PyExc_TypeError, "the watched functions must be a dictionary");
        return -1;
    }
    Py_XSETREF(((py_mode_t *)object)->used, Py_NewRef(value));
    return 0;
}

static PyGetSetDef function_mode_getset[] = {
    {"watched", py_mode_used, py_mode_set_watched,
     "What is called with (args, kwargs) before each of these functions.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyDoc_STRVAR(function_mode_doc, "FunctionMode()\n--\n\n"
                                "Base of a mode of functions that acts before some of them.");

static int add_mode(PyObject *module, const char *name, PyMethodDef *methods, PyGetSetDef *getset,
                    const char *doc) {
    PyType_Slot slots[] = {
        {Py_tp_methods, methods},
        {Py_tp_getset, getset},
        {Py_tp_traverse, py_mode_traverse},
        {Py_tp_clear, py_mode_clear},
        {Py_tp_dealloc, py_dealloc},
        {Py_tp_doc, (void *)(uintptr_t)doc},
        {0, NULL},
    };
    return py_add_type(module, name, sizeof(py_mode_t), Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
                       slots, NULL);
}

int py_add_modes(PyObject *module) {
    int ret = add_mode(module, "rotor._core.OperatorMode", operator_mode_methods,
                       operator_mode_getset, operator_mode_doc);
    return ret == 0 ? add_mode(module, "rotor._core.FunctionMode", function_mode_methods,
                               function_mode_getset, function_mode_doc)
                    : ret;
}
