#include "binding.h"

/* The Table type: a solved table of any solver. */

typedef struct {
    PyObject_HEAD
    PyObject *chain;
    void *table;
    const rotor_table_ops_t *ops;
} rotor_table_object_t;

PyObject *rotor_table_new(PyObject *module, PyObject *chain, void *table,
                          const rotor_table_ops_t *ops) {
    PyTypeObject *type = rotor_state(module)->table_type;
    rotor_table_object_t *self = (rotor_table_object_t *)type->tp_alloc(type, 0);
    if (self == NULL) {
        ops->release(table);
        return NULL;
    }
    self->chain = Py_NewRef(chain);
    self->table = table;
    self->ops = ops;
    return (PyObject *)self;
}

static void table_dealloc(PyObject *object) {
    rotor_table_object_t *self = (rotor_table_object_t *)object;
    PyTypeObject *type = Py_TYPE(object);
    if (self->ops != NULL) {
        self->ops->release(self->table);
    }
    Py_XDECREF(self->chain);
    type->tp_free(object);
    Py_DECREF(type);
}

PyDoc_STRVAR(table_sequence_doc,
             "sequence(budget, /)\n--\n\n"
             "The best schedule within a budget in bytes, as int32 pairs (kind, stage).");

static PyObject *table_sequence(PyObject *object, PyTypeObject *cls, PyObject *const *args,
                                Py_ssize_t nargs, PyObject *names) {
    PyObject *module = PyType_GetModule(cls);
    rotor_table_object_t *self = (rotor_table_object_t *)object;
    PyObject *answer = NULL;
    rotor_sequence_t sequence;
    int64_t minimum = 0;

    if (nargs != 1 || names != NULL) {
        return PyErr_Format(PyExc_TypeError, "sequence takes one positional argument");
    }
    long long budget = PyLong_AsLongLong(args[0]);
    if (budget == -1 && PyErr_Occurred()) {
        return NULL;
    }
    rotor_sequence_init(&sequence);
    int ret = self->ops->sequence(self->table, budget, &sequence, &minimum);
    if (ret == ROTOR_OK) {
        answer = rotor_ops_bytes(&sequence);
    } else if (ret == ROTOR_ERR_INFEASIBLE) {
        rotor_raise_infeasible(module, budget, minimum);
    } else {
        rotor_raise_status(module, ret);
    }
    rotor_sequence_free(&sequence);
    return answer;
}

PyDoc_STRVAR(table_curve_doc,
             "curve()\n--\n\n"
             "(bytes, nanoseconds) of the points of the curve as int64; None where the solver "
             "answers one budget only.");

static PyObject *table_curve(PyObject *object, PyObject *unused) {
    rotor_table_object_t *self = (rotor_table_object_t *)object;
    const int64_t *bytes = NULL;
    const int64_t *ns = NULL;
    int64_t count = 0;

    (void)unused;
    if (self->ops->curve == NULL) {
        Py_RETURN_NONE;
    }
    int ret = self->ops->curve(self->table, &count, &bytes, &ns);
    if (ret != ROTOR_OK) {
        return rotor_raise_status(PyType_GetModule(Py_TYPE(object)), ret);
    }
    PyObject *first = rotor_int64_bytes(bytes, count);
    PyObject *second = rotor_int64_bytes(ns, count);
    PyObject *answer = first == NULL || second == NULL ? NULL : PyTuple_Pack(2, first, second);
    Py_XDECREF(first);
    Py_XDECREF(second);
    return answer;
}

static PyMethodDef table_methods[] = {
    {"sequence", (PyCFunction)(void (*)(void))table_sequence,
     METH_METHOD | METH_FASTCALL | METH_KEYWORDS, table_sequence_doc},
    {"curve", table_curve, METH_NOARGS, table_curve_doc},
    {NULL, NULL, 0, NULL},
};

PyDoc_STRVAR(table_doc, "The solved table of a solver: answers budgets without solving again.");

static PyType_Slot table_slots[] = {
    {Py_tp_dealloc, table_dealloc},
    {Py_tp_methods, table_methods},
    {Py_tp_doc, (void *)table_doc},
    {0, NULL},
};

static PyType_Spec table_spec = {
    .name = "rotor._core.Table",
    .basicsize = sizeof(rotor_table_object_t),
    .flags =
        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = table_slots,
};

int rotor_add_solvers(PyObject *module) {
    PyTypeObject *type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &table_spec, NULL);
    if (type == NULL) {
        return -1;
    }
    rotor_state(module)->table_type = type;
    return PyModule_AddType(module, type);
}
