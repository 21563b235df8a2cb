#include "support.h"

#include "frontier.h"
#include "persistent.h"

/* The Table type: a solved table of any solver. */

typedef struct {
    PyObject_HEAD
    PyObject *chain;
    void *table;
    const py_table_ops_t *ops;
} py_table_t;

PyObject *py_table_new(PyObject *module, PyObject *chain, void *table, const py_table_ops_t *ops) {
    PyTypeObject *type = py_state(module)->table_type;
    py_table_t *self = (py_table_t *)type->tp_alloc(type, 0);
    if (self == NULL) {
        ops->release(table);
        return NULL;
    }
    self->chain = Py_NewRef(chain);
    self->table = table;
    self->ops = ops;
    return (PyObject *)self;
}

static void py_table_dealloc(PyObject *object) {
    py_table_t *self = (py_table_t *)object;
    if (self->ops != NULL) {
        self->ops->release(self->table);
    }
    Py_XDECREF(self->chain);
    py_dealloc(object);
}

PyDoc_STRVAR(table_sequence_doc,
             "sequence(budget, /)\n--\n\n"
             "Return the best schedule within a budget in bytes, as int32 pairs (kind, stage).");

static PyObject *py_table_sequence(PyObject *object, PyTypeObject *cls, PyObject *const *args,
                                   Py_ssize_t nargs, PyObject *names) {
    PyObject *module = PyType_GetModule(cls);
    py_table_t *self = (py_table_t *)object;
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
    if (ret == ROTOR_ERR_INFEASIBLE) {
        py_raise_infeasible(module, budget, minimum);
    }
    return py_schedule(module, ret, false, &sequence);
}

PyDoc_STRVAR(
    table_curve_doc,
    "curve()\n--\n\n"
    "Return (bytes, nanoseconds) of the points of the curve as int64; None where the solver "
    "answers one budget only.");

static PyObject *py_table_curve(PyObject *object, PyObject *unused) {
    py_table_t *self = (py_table_t *)object;
    const int64_t *bytes = NULL;
    const int64_t *ns = NULL;
    int64_t count = 0;

    if (self->ops->curve == NULL) {
        Py_RETURN_NONE;
    }
    int ret = self->ops->curve(self->table, &count, &bytes, &ns);
    if (ret != ROTOR_OK) {
        return py_raise_status(PyType_GetModule(Py_TYPE(object)), ret);
    }
    return py_points(bytes, ns, count);
}

static PyMethodDef table_methods[] = {
    {"sequence", (PyCFunction)(void (*)(void))py_table_sequence,
     METH_METHOD | METH_FASTCALL | METH_KEYWORDS, table_sequence_doc},
    {"curve", py_table_curve, METH_NOARGS, table_curve_doc},
    {NULL, NULL, 0, NULL},
};

PyDoc_STRVAR(table_doc, "The solved table of a solver: answers budgets without solving again.");

static PyType_Slot table_slots[] = {
    {Py_tp_dealloc, py_table_dealloc},
    {Py_tp_methods, table_methods},
    {Py_tp_doc, (void *)table_doc},
    {0, NULL},
};

/* The exact solver. */

static void frontier_release(void *table) {
    rotor_frontier_free(table);
    rotor_free(table);
}

static int frontier_sequence(const void *table, int64_t budget, rotor_sequence_t *sequence,
                             int64_t *minimum) {
    return rotor_frontier_sequence(table, budget, sequence, minimum);
}

static int frontier_curve(const void *table, int64_t *count, const int64_t **bytes,
                          const int64_t **ns) {
    const rotor_frontier_t *frontier = table;
    *count = frontier->curve_count;
    *bytes = frontier->curve_bytes;
    *ns = frontier->curve_ns;
    return ROTOR_OK;
}

static const py_table_ops_t frontier_ops = {
    .release = frontier_release, .sequence = frontier_sequence, .curve = frontier_curve};

PyDoc_STRVAR(frontier_doc, "frontier(chain, max_table_bytes, progress, /)\n--\n\n"
                           "Return the table of all optimal persistent schedules.");

static PyObject *py_frontier(PyObject *module, PyObject *args) {
    py_chain_t *chain;
    long long max_table_bytes;
    PyObject *progress;
    py_watch_t watch;

    if (!PyArg_ParseTuple(args, "O!LO:frontier", py_state(module)->chain_type, &chain,
                          &max_table_bytes, &progress)) {
        return NULL;
    }
    rotor_frontier_t *table = rotor_malloc(sizeof(*table));
    if (table == NULL) {
        return PyErr_NoMemory();
    }
    py_watch_begin(&watch, progress);
    int ret = rotor_frontier_solve(table, &chain->chain, max_table_bytes, &watch.callback);
    py_watch_end(&watch);
    if (ret != ROTOR_OK) {
        rotor_free(table);
        return py_raise_status(module, ret);
    }
    return py_table_new(module, (PyObject *)chain, table, &frontier_ops);
}

/* Memory slots, and the least memory. */

PyDoc_STRVAR(
    persistent_doc,
    "persistent(chain, budget, slots, max_table_bytes, progress, /)\n--\n\n"
    "Return the best persistent schedule on memory slots within a budget in bytes, as int32 pairs "
    "(kind, stage); None where none fits on these slots.");

static PyObject *py_persistent(PyObject *module, PyObject *args) {
    py_chain_t *chain;
    long long budget;
    long long slots;
    long long max_table_bytes;
    PyObject *progress;
    rotor_sequence_t sequence;
    py_watch_t watch;

    if (!PyArg_ParseTuple(args, "O!LLLO:persistent", py_state(module)->chain_type, &chain, &budget,
                          &slots, &max_table_bytes, &progress)) {
        return NULL;
    }
    rotor_sequence_init(&sequence);
    py_watch_begin(&watch, progress);
    int ret = rotor_persistent_solve(&chain->chain, budget, slots, ROTOR_PRECISION_AUTO,
                                     max_table_bytes, &watch.callback, &sequence);
    py_watch_end(&watch);
    return py_schedule(module, ret, true, &sequence);
}

PyDoc_STRVAR(
    persistent_minimum_doc,
    "persistent_minimum(chain, budget, max_table_bytes, progress, /)\n--\n\n"
    "Return (minimum, schedule): the least budget in bytes of any persistent schedule, and a "
    "schedule within `budget`, None where that is below it.");

static PyObject *py_persistent_minimum(PyObject *module, PyObject *args) {
    py_chain_t *chain;
    long long budget;
    long long max_table_bytes;
    PyObject *progress;
    rotor_sequence_t sequence;
    py_watch_t watch;
    int64_t minimum = 0;

    if (!PyArg_ParseTuple(args, "O!LLO:persistent_minimum", py_state(module)->chain_type, &chain,
                          &budget, &max_table_bytes, &progress)) {
        return NULL;
    }
    rotor_sequence_init(&sequence);
    py_watch_begin(&watch, progress);
    int ret = rotor_persistent_minimum(&chain->chain, max_table_bytes, &watch.callback, &minimum,
                                       budget, &sequence);
    py_watch_end(&watch);
    PyObject *schedule = py_schedule(module, ret, true, &sequence);
    return schedule == NULL ? NULL : Py_BuildValue("LN", (long long)minimum, schedule);
}

static PyMethodDef solver_functions[] = {
    {"frontier", py_frontier, METH_VARARGS, frontier_doc},
    {"persistent", py_persistent, METH_VARARGS, persistent_doc},
    {"persistent_minimum", py_persistent_minimum, METH_VARARGS, persistent_minimum_doc},
    {NULL, NULL, 0, NULL},
};

int py_add_solvers(PyObject *module) {
    int ret = py_add_type(module, "rotor._core.Table", sizeof(py_table_t),
                          Py_TPFLAGS_DISALLOW_INSTANTIATION, table_slots,
                          &py_state(module)->table_type);
    return ret == 0 ? PyModule_AddFunctions(module, solver_functions) : ret;
}
