#include "support.h"

#include "floating.h"
#include "revolve.h"

/* The solvers around the main ones: floating checkpoints, and Revolve. */

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

static PyMethodDef functions[] = {
    {"floating", py_floating, METH_VARARGS, floating_doc},
    {"floating_curve", py_floating_curve, METH_VARARGS, floating_curve_doc},
    {"revolve", py_revolve, METH_VARARGS, revolve_doc},
    {NULL, NULL, 0, NULL},
};

int py_add_classic(PyObject *module) { return PyModule_AddFunctions(module, functions); }
