#include "support.h"

#include "floating.h"
#include "frontier.h"
#include "persistent.h"
#include "revolve.h"

/* The exact solver: a solved table answers budgets without solving again. */

typedef struct {
    PyObject_HEAD
    PyObject *chain; /* kept alive: the table borrows it */
    rotor_frontier_t table;
} py_table_t;

static void py_table_dealloc(PyObject *object) {
    py_table_t *self = (py_table_t *)object;
    rotor_frontier_free(&self->table);
    Py_XDECREF(self->chain);
    py_dealloc(object);
}

PyDoc_STRVAR(table_sequence_doc,
             "sequence(budget, /)\n--\n\n"
             "Return the best schedule within a budget in bytes, as int32 pairs (kind, stage).");

static PyObject *py_table_sequence(PyObject *object, PyObject *argument) {
    PyObject *module = PyType_GetModule(Py_TYPE(object));
    rotor_sequence_t sequence;
    int64_t minimum = 0;

    long long budget = PyLong_AsLongLong(argument);
    if (budget == -1 && PyErr_Occurred()) {
        return NULL;
    }
    rotor_sequence_init(&sequence);
    int ret = rotor_frontier_sequence(&((py_table_t *)object)->table, budget, &sequence, &minimum);
    if (ret == ROTOR_ERR_INFEASIBLE) {
        py_raise_infeasible(module, budget, minimum);
    }
    return py_schedule(module, ret, false, &sequence);
}

PyDoc_STRVAR(table_curve_doc,
             "curve()\n--\n\nReturn (bytes, nanoseconds) of the points of the curve as int64.");

static PyObject *py_table_curve(PyObject *object, PyObject *unused) {
    const rotor_frontier_t *table = &((py_table_t *)object)->table;
    return py_points(table->curve_bytes, table->curve_ns, table->curve_count);
}

static PyMethodDef table_methods[] = {
    {"sequence", py_table_sequence, METH_O, table_sequence_doc},
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

static PyObject *solve_table(PyObject *module, PyObject *args, bool drops_tapes) {
    PyTypeObject *type = py_state(module)->table_type;
    py_chain_t *chain;
    long long max_table_bytes;
    PyObject *progress;
    py_watch_t watch;

    if (!PyArg_ParseTuple(args, "O!LO", py_state(module)->chain_type, &chain, &max_table_bytes,
                          &progress)) {
        return NULL;
    }
    py_table_t *self = (py_table_t *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->chain = Py_NewRef(chain);
    py_watch_begin(&watch, progress);
    int ret = rotor_frontier_solve(&self->table, &chain->chain, drops_tapes, max_table_bytes,
                                   &watch.callback);
    py_watch_end(&watch);
    if (ret != ROTOR_OK) {
        Py_DECREF(self);
        return py_raise_status(module, ret);
    }
    return (PyObject *)self;
}

PyDoc_STRVAR(frontier_doc, "frontier(chain, max_table_bytes, progress, /)\n--\n\n"
                           "Return the table of all optimal persistent schedules.");

static PyObject *py_frontier(PyObject *module, PyObject *args) {
    return solve_table(module, args, false);
}

PyDoc_STRVAR(heterogeneous_doc,
             "griewank_heterogeneous(chain, max_table_bytes, progress, /)\n--\n\n"
             "Return the table of all optimal adjoint schedules, whose tapes never wait.");

static PyObject *py_griewank_heterogeneous(PyObject *module, PyObject *args) {
    return solve_table(module, args, true);
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

/* Floating checkpoints, and Revolve. */

static PyObject *solve_floating(PyObject *module, PyObject *args, bool wants_curve) {
    py_chain_t *chain;
    long long budget, slots, max_table_bytes;
    PyObject *progress, *answer;
    py_watch_t watch;
    rotor_floating_t table;
    rotor_sequence_t sequence;
    int64_t count = 0, minimum = 0;
    int64_t *bytes = NULL, *ns = NULL;

    if (!PyArg_ParseTuple(args, "O!LLLO", py_state(module)->chain_type, &chain, &budget, &slots,
                          &max_table_bytes, &progress)) {
        return NULL;
    }
    rotor_sequence_init(&sequence);
    py_watch_begin(&watch, progress);
    int ret = rotor_floating_solve(&table, &chain->chain, budget, slots, max_table_bytes,
                                   &watch.callback, &minimum);
    if (ret == ROTOR_OK) {
        ret = wants_curve ? rotor_floating_curve(&table, &watch.callback, &count, &bytes, &ns)
                          : rotor_floating_sequence(&table, &sequence);
        rotor_floating_free(&table);
    }
    py_watch_end(&watch);
    if (ret == ROTOR_ERR_INFEASIBLE) {
        py_raise_infeasible(module, budget, minimum);
    }
    if (!wants_curve || ret != ROTOR_OK) {
        return py_schedule(module, ret, false, &sequence);
    }
    answer = py_points(bytes, ns, count);
    rotor_free(bytes);
    rotor_free(ns);
    return answer;
}

PyDoc_STRVAR(
    floating_doc,
    "floating(chain, budget, slots, max_table_bytes, progress, /)\n--\n\n"
    "Return the best floating schedule within a budget in bytes, as int32 pairs (kind, stage).");

static PyObject *py_floating(PyObject *module, PyObject *args) {
    return solve_floating(module, args, false);
}

PyDoc_STRVAR(
    floating_curve_doc,
    "floating_curve(chain, budget, slots, max_table_bytes, progress, /)\n--\n\n"
    "Return (bytes, nanoseconds), int64: simulated schedules of one table, up to a budget.");

static PyObject *py_floating_curve(PyObject *module, PyObject *args) {
    return solve_floating(module, args, true);
}

PyDoc_STRVAR(
    revolve_doc,
    "revolve(stages, checkpoints, /)\n--\n\n"
    "Return Revolve's schedule with a number of checkpoints, as int32 pairs (kind, stage).");

static PyObject *py_revolve(PyObject *module, PyObject *args) {
    long long stages;
    long long checkpoints;
    rotor_sequence_t sequence;
    int ret;

    if (!PyArg_ParseTuple(args, "LL", &stages, &checkpoints)) {
        return NULL;
    }
    rotor_sequence_init(&sequence);
    Py_BEGIN_ALLOW_THREADS;
    ret = rotor_revolve_schedule(stages, checkpoints, &sequence);
    Py_END_ALLOW_THREADS;
    return py_schedule(module, ret, false, &sequence);
}

static PyMethodDef solver_functions[] = {
    {"floating", py_floating, METH_VARARGS, floating_doc},
    {"floating_curve", py_floating_curve, METH_VARARGS, floating_curve_doc},
    {"revolve", py_revolve, METH_VARARGS, revolve_doc},
    {"frontier", py_frontier, METH_VARARGS, frontier_doc},
    {"griewank_heterogeneous", py_griewank_heterogeneous, METH_VARARGS, heterogeneous_doc},
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
