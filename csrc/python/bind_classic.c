#include "support.h"

#include "floating.h"
#include "revolve.h"

/* The solvers around the main ones: floating checkpoints, and Griewank's two. */

typedef struct {
    py_chain_t *chain;
    long long budget;
    long long slots;
    long long max_table_bytes;
    PyObject *progress;
} floating_args_t;

/* Solves and returns true, or sets the exception. */
static bool solve_floating(PyObject *module, PyObject *args, floating_args_t *a, py_watch_t *watch,
                           rotor_floating_t *table) {
    int64_t minimum = 0;

    if (!PyArg_ParseTuple(args, "O!LLLO", py_state(module)->chain_type, &a->chain, &a->budget,
                          &a->slots, &a->max_table_bytes, &a->progress)) {
        return false;
    }
    py_watch_begin(watch, a->progress);
    int ret = rotor_floating_solve(table, &a->chain->chain, a->budget, a->slots,
                                   a->max_table_bytes, &watch->callback, &minimum);
    py_watch_end(watch);
    if (ret == ROTOR_ERR_INFEASIBLE) {
        py_raise_infeasible(module, a->budget, minimum);
    } else if (ret != ROTOR_OK) {
        py_raise_status(module, ret);
    }
    return ret == ROTOR_OK;
}

PyDoc_STRVAR(
    floating_doc,
    "floating(chain, budget, slots, max_table_bytes, progress, /)\n--\n\n"
    "Return the best floating schedule within a budget in bytes, as int32 pairs (kind, stage).");

static PyObject *py_floating(PyObject *module, PyObject *args) {
    floating_args_t a;
    py_watch_t watch;
    rotor_floating_t table;
    rotor_sequence_t sequence;

    if (!solve_floating(module, args, &a, &watch, &table)) {
        return NULL;
    }
    rotor_sequence_init(&sequence);
    py_watch_begin(&watch, a.progress);
    int ret = rotor_floating_sequence(&table, &sequence);
    rotor_floating_free(&table);
    py_watch_end(&watch);
    return py_schedule(module, ret, false, &sequence);
}

PyDoc_STRVAR(
    floating_curve_doc,
    "floating_curve(chain, budget, slots, max_table_bytes, progress, /)\n--\n\n"
    "Return (bytes, nanoseconds), int64: simulated schedules of one table, up to a budget.");

static PyObject *py_floating_curve(PyObject *module, PyObject *args) {
    floating_args_t a;
    py_watch_t watch;
    rotor_floating_t table;
    int64_t count = 0;
    int64_t *bytes = NULL;
    int64_t *ns = NULL;

    if (!solve_floating(module, args, &a, &watch, &table)) {
        return NULL;
    }
    py_watch_begin(&watch, a.progress);
    int ret = rotor_floating_curve(&table, &watch.callback, &count, &bytes, &ns);
    rotor_floating_free(&table);
    py_watch_end(&watch);
    if (ret != ROTOR_OK) {
        return py_raise_status(module, ret);
    }
    PyObject *answer = py_points(bytes, ns, count);
    rotor_free(bytes);
    rotor_free(ns);
    return answer;
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

static void heterogeneous_release(void *table) {
    rotor_revolve_free(table);
    rotor_free(table);
}

static int heterogeneous_sequence(const void *table, int64_t budget, rotor_sequence_t *sequence,
                                  int64_t *minimum) {
    return rotor_revolve_sequence(table, budget, sequence, minimum);
}

static int heterogeneous_curve(const void *table, int64_t *count, const int64_t **bytes,
                               const int64_t **ns) {
    const rotor_revolve_t *self = table;
    *count = self->curve_count;
    *bytes = self->curve_bytes;
    *ns = self->curve_ns;
    return ROTOR_OK;
}

static const py_table_ops_t heterogeneous_ops = {
    .release = heterogeneous_release,
    .sequence = heterogeneous_sequence,
    .curve = heterogeneous_curve,
};

PyDoc_STRVAR(heterogeneous_doc,
             "griewank_heterogeneous(chain, max_table_bytes, progress, /)\n--\n\n"
             "Return the solved table of the heterogeneous adjoint schedules, for every budget.");

static PyObject *py_griewank_heterogeneous(PyObject *module, PyObject *args) {
    PyObject *object;
    long long max_table_bytes;
    PyObject *progress;
    py_watch_t watch;

    if (!PyArg_ParseTuple(args, "O!LO", py_state(module)->chain_type, &object, &max_table_bytes,
                          &progress)) {
        return NULL;
    }
    rotor_revolve_t *table = rotor_malloc(sizeof(*table));
    if (table == NULL) {
        return py_raise_status(module, ROTOR_ERR_NO_MEMORY);
    }
    py_watch_begin(&watch, progress);
    int ret = rotor_revolve_solve(table, &((py_chain_t *)object)->chain, max_table_bytes,
                                  &watch.callback);
    py_watch_end(&watch);
    if (ret != ROTOR_OK) {
        rotor_free(table);
        return py_raise_status(module, ret);
    }
    return py_table_new(module, object, table, &heterogeneous_ops);
}

static PyMethodDef functions[] = {
    {"floating", py_floating, METH_VARARGS, floating_doc},
    {"floating_curve", py_floating_curve, METH_VARARGS, floating_curve_doc},
    {"griewank_heterogeneous", py_griewank_heterogeneous, METH_VARARGS, heterogeneous_doc},
    {"revolve", py_revolve, METH_VARARGS, revolve_doc},
    {NULL, NULL, 0, NULL},
};

int py_add_classic(PyObject *module) { return PyModule_AddFunctions(module, functions); }
