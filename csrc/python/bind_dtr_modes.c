/* The modes that PyTorch calls: of operators, and of functions that read without them. */
#include "bind_dtr_private.h"

#include <structmember.h>

/* OperatorMode */

typedef struct {
    PyObject_HEAD PyObject *handler;
} py_operator_mode_t;

static PyObject *py_dispatch(PyObject *object, PyObject *const *args, Py_ssize_t count) {
    py_handler_t *handler = (py_handler_t *)((py_operator_mode_t *)object)->handler;
    if (!py_are_counted("__torch_dispatch__", count, 3, 4)) {
        return NULL;
    }
    if (handler == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "the session has no handler");
        return NULL;
    }
    PyObject *all[5] = {object, args[0], args[1], args[2], count == 4 ? args[3] : Py_None};
    if (!PyTuple_Check(all[3]) || (all[4] != Py_None && !PyDict_Check(all[4]))) {
        PyErr_SetString(PyExc_TypeError, "args must be a tuple, kwargs a dictionary or None");
        return NULL;
    }
    return py_operator_run(handler, all);
}

PyDoc_STRVAR(dispatch_doc, "__torch_dispatch__($self, func, types, args, kwargs=None, /)\n--\n\n"
                           "Run one operator of the program.");

static PyMethodDef operator_mode_methods[] = {
    {"__torch_dispatch__", PY_FASTCALL(py_dispatch), dispatch_doc},
    {NULL, NULL, 0, NULL},
};

static PyObject *py_mode_handler(PyObject *object, void *closure) {
    PyObject *handler = ((py_operator_mode_t *)object)->handler;
    (void)closure;
    return Py_NewRef(handler == NULL ? Py_None : handler);
}

static int py_mode_set_handler(PyObject *object, PyObject *value, void *closure) {
    py_operator_mode_t *self = (py_operator_mode_t *)object;
    (void)closure;
    if (value == NULL || !py_is_handler(value)) {
        PyErr_SetString(PyExc_TypeError, "the handler of a mode must be a Handler");
        return -1;
    }
    Py_XSETREF(self->handler, Py_NewRef(value));
    return 0;
}

static PyGetSetDef operator_mode_getset[] = {
    {"handler", py_mode_handler, py_mode_set_handler, "Runs the operators.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static int py_operator_mode_traverse(PyObject *object, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(((py_operator_mode_t *)object)->handler);
    return 0;
}

static int py_operator_mode_clear(PyObject *object) {
    Py_CLEAR(((py_operator_mode_t *)object)->handler);
    return 0;
}

PyDoc_STRVAR(operator_mode_doc, "OperatorMode()\n--\n\n"
                                "Base of a mode of operators that a Handler runs.");

static PyType_Slot operator_mode_slots[] = {
    {Py_tp_methods, operator_mode_methods},
    {Py_tp_getset, operator_mode_getset},
    {Py_tp_traverse, py_operator_mode_traverse},
    {Py_tp_clear, py_operator_mode_clear},
    {Py_tp_dealloc, py_dealloc},
    {Py_tp_doc, (void *)operator_mode_doc},
    {0, NULL},
};

static PyType_Spec operator_mode_spec = {
    .name = "rotor._core.OperatorMode",
    .basicsize = sizeof(py_operator_mode_t),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = operator_mode_slots,
};

/* FunctionMode */

typedef struct {
    PyObject_HEAD PyObject *watched; /* functions: to what is called with their arguments first */
} py_function_mode_t;

static PyObject *py_call_function(PyObject *object, PyObject *const *args, Py_ssize_t count) {
    PyObject *watched = ((py_function_mode_t *)object)->watched;
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
        PyErr_SetString(PyExc_TypeError, "args must be a tuple");
        return NULL;
    }
    return PyObject_Call(args[0], args[2], kwargs);
}

PyDoc_STRVAR(function_doc, "__torch_function__($self, func, types, args, kwargs=None, /)\n--\n\n"
                           "Call one function of PyTorch.");

static PyMethodDef function_mode_methods[] = {
    {"__torch_function__", PY_FASTCALL(py_call_function), function_doc},
    {NULL, NULL, 0, NULL},
};

static PyObject *py_mode_watched(PyObject *object, void *closure) {
    PyObject *watched = ((py_function_mode_t *)object)->watched;
    (void)closure;
    return Py_NewRef(watched == NULL ? Py_None : watched);
}

static int py_mode_set_watched(PyObject *object, PyObject *value, void *closure) {
    (void)closure;
    if (value == NULL || !PyDict_Check(value)) {
        PyErr_SetString(PyExc_TypeError, "the watched functions must be a dictionary");
        return -1;
    }
    Py_XSETREF(((py_function_mode_t *)object)->watched, Py_NewRef(value));
    return 0;
}

static PyGetSetDef function_mode_getset[] = {
    {"watched", py_mode_watched, py_mode_set_watched,
     "What is called with (args, kwargs) before each of these functions.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static int py_function_mode_traverse(PyObject *object, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(((py_function_mode_t *)object)->watched);
    return 0;
}

static int py_function_mode_clear(PyObject *object) {
    Py_CLEAR(((py_function_mode_t *)object)->watched);
    return 0;
}

PyDoc_STRVAR(function_mode_doc, "FunctionMode()\n--\n\n"
                                "Base of a mode of functions that acts before some of them.");

static PyType_Slot function_mode_slots[] = {
    {Py_tp_methods, function_mode_methods},
    {Py_tp_getset, function_mode_getset},
    {Py_tp_traverse, py_function_mode_traverse},
    {Py_tp_clear, py_function_mode_clear},
    {Py_tp_dealloc, py_dealloc},
    {Py_tp_doc, (void *)function_mode_doc},
    {0, NULL},
};

static PyType_Spec function_mode_spec = {
    .name = "rotor._core.FunctionMode",
    .basicsize = sizeof(py_function_mode_t),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = function_mode_slots,
};

int py_add_modes(PyObject *module) {
    int ret = py_add_type(module, &operator_mode_spec, NULL);
    return ret == 0 ? py_add_type(module, &function_mode_spec, NULL) : ret;
}
