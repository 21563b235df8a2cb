#include "bind_candidate.h"

#include <math.h>
#include <string.h>

typedef struct {
    PyObject_HEAD
    py_log_t *log;
    py_heuristic_t call;
    PyObject *progress; /* borrowed, of a run that holds the GIL */
    rotor_heuristic_t heuristic;
    rotor_replay_t replay;
    bool is_running; /* read and changed with the GIL held */
    bool has_ended;  /* with an exception, or an outcome other than ok */
} py_replay_t;

static int call_heuristic(void *context, rotor_eviction_t *engine, int32_t storage, double *cost) {
    py_replay_t *self = context;

    if (self->call.callable == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "the heuristic has been collected");
        return ROTOR_ERR_INTERRUPTED;
    }
    self->call.now = self->replay.clock;
    return py_call_heuristic(&self->call, engine, storage, cost);
}

/* The callback of a run that holds the GIL. */
static bool replay_goes_on(void *context, int64_t done, int64_t total) {
    return py_goes_on(((const py_replay_t *)context)->progress, done, total);
}

/* The Replay type. */

static int check_log_is_still(const py_log_t *log) {
    if (log->is_feeding) {
        PyErr_SetString(PyExc_RuntimeError,
                        "the log is being fed by another thread, wait until it is done");
        return -1;
    }
    return 0;
}

static int check_is_still(const py_replay_t *self) {
    if (self->is_running) {
        PyErr_SetString(PyExc_RuntimeError, "this Replay is being run, wait until it is done");
        return -1;
    }
    return 0;
}

/* Fills in the heuristic of `self`; -1 with an exception. */
static int set_heuristic(py_replay_t *self, PyObject *heuristic,
                         rotor_eviction_options_t *options) {
    if (PyUnicode_Check(heuristic)) {
        const char *name = PyUnicode_AsUTF8(heuristic);
        if (name == NULL) {
            return -1;
        }
        options->heuristic = rotor_find_heuristic(name);
        if (options->heuristic != NULL && options->heuristic->numerator != ROTOR_CALLBACK) {
            self->call.name = Py_NewRef(heuristic);
            return 0;
        }
        PyErr_Format(PyExc_ValueError, "no heuristic is named %R", heuristic);
        return -1;
    }
    if (!PyCallable_Check(heuristic)) {
        PyErr_Format(PyExc_TypeError, "heuristic must be a name or a callable, got %R", heuristic);
        return -1;
    }
    self->call.name = PyObject_GetAttrString(heuristic, "__name__");
    if (self->call.name == NULL || !PyUnicode_Check(self->call.name)) {
        PyErr_Clear();
        Py_XSETREF(self->call.name, PyType_GetName(Py_TYPE(heuristic)));
    }
    self->heuristic.name = self->call.name == NULL ? NULL : PyUnicode_AsUTF8(self->call.name);
    if (self->heuristic.name == NULL) {
        return -1;
    }
    self->heuristic.numerator = ROTOR_CALLBACK;
    self->call.callable = Py_NewRef(heuristic);
    options->heuristic = &self->heuristic;
    options->cost = call_heuristic;
    options->context = self;
    return 0;
}

static PyObject *py_replay_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *module = PyType_GetModule(type);
    py_log_t *log;
    PyObject *heuristic;
    PyObject *seed;
    int runtime;
    int ignores_releases;
    int sample;
    int ignore_small;
    int count_accesses;
    int stats;
    int trace;
    rotor_replay_options_t options = {.trace = false};

    if (!py_has_no_names("Replay", kwargs) ||
        !PyArg_ParseTuple(args, "O!ipLdOO!LpppppLL:Replay", py_state(module)->log_type, &log,
                          &runtime, &ignores_releases, &options.budget_bytes, &options.remat_limit_ns,
                          &heuristic, &PyLong_Type, &seed, &options.eviction.rebuild_every,
                          &sample, &ignore_small, &count_accesses, &stats, &trace,
                          &options.max_events, &options.stop_at_execution)) {
        return NULL;
    }
    options.eviction.seed = PyLong_AsUnsignedLongLong(seed);
    if (options.eviction.seed == (uint64_t)-1 && PyErr_Occurred()) {
        return NULL;
    }
    if (runtime < ROTOR_V1 || runtime > ROTOR_V2_EAGER) {
        return PyErr_Format(PyExc_ValueError, "runtime must be 0, 1 or 2, got %d", runtime);
    }
    if (options.eviction.rebuild_every < 0) {
        return PyErr_Format(PyExc_ValueError, "rebuild_every must not be negative, got %lld",
                            (long long)options.eviction.rebuild_every);
    }
    if (options.max_events < 1) {
        return PyErr_Format(PyExc_ValueError, "max_events must be positive, got %lld",
                            (long long)options.max_events);
    }
    if (isnan(options.remat_limit_ns) || options.remat_limit_ns < 0) {
        return PyErr_Format(PyExc_ValueError, "remat_limit_ns must not be negative or NaN");
    }
    if (check_log_is_still(log) != 0) {
        return NULL;
    }
    py_replay_t *self = (py_replay_t *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->log = (py_log_t *)Py_NewRef(log);
    self->call.module = module;
    self->call.has_classes = runtime != ROTOR_V1;
    options.runtime = (enum rotor_runtime)runtime;
    options.ignores_releases = ignores_releases != 0;
    options.stats = stats != 0;
    options.trace = trace != 0;
    options.eviction.sample = sample != 0;
    options.eviction.ignore_small = ignore_small != 0;
    options.eviction.count_accesses = count_accesses != 0;
    if (set_heuristic(self, heuristic, &options.eviction) != 0) {
        Py_DECREF(self);
        return NULL;
    }
    int ret = rotor_replay_init(&self->replay, &log->log, &options);
    if (ret == ROTOR_ERR_BAD_HEURISTIC) {
        PyErr_Format(PyExc_ValueError, "%s: %R", rotor_strerror(ret), self->call.name);
    } else if (ret != ROTOR_OK) {
        py_raise_status(module, ret);
    }
    if (ret != ROTOR_OK) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static int py_replay_traverse(PyObject *object, visitproc visit, void *arg) {
    py_replay_t *self = (py_replay_t *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->log);
    Py_VISIT(self->call.callable);
    return 0;
}

static int py_replay_clear(PyObject *object) {
    Py_CLEAR(((py_replay_t *)object)->call.callable);
    return 0;
}

static void py_replay_dealloc(PyObject *object) {
    py_replay_t *self = (py_replay_t *)object;
    PyObject_GC_UnTrack(object);
    rotor_replay_free(&self->replay);
    Py_XDECREF(self->log);
    Py_XDECREF(self->call.name);
    py_dealloc(object);
}

static PyObject *raise_run(py_replay_t *self, int status) {
    const rotor_replay_t *replay = &self->replay;

    if (PyErr_Occurred()) {
        return NULL;
    }
    if (status == ROTOR_ERR_TABLE_TOO_LARGE) {
        return PyErr_Format(PyExc_MemoryError,
                            "the trace is longer than max_events = %lld events, at command %lld of "
                            "%lld; raise max_events, replay a shorter log, or do without the trace",
                            (long long)replay->options.max_events,
                            (long long)replay->next_command,
                            (long long)replay->log->command_count);
    }
    if (status == ROTOR_ERR_BAD_STATE) {
        const rotor_graph_t *graph = &replay->log->graph;
        rotor_command_t command = replay->log->commands[replay->next_command];
        int32_t name = command.kind == ROTOR_COMPUTE ? graph->operations[command.index].name
                                                     : graph->tensors[command.index].name;
        return PyErr_Format(PyExc_ValueError, "%s: command %lld, of %s", rotor_strerror(status),
                            (long long)replay->next_command, graph->names + name);
    }
    return py_raise_status(self->call.module, status);
}

PyDoc_STRVAR(run_doc,
             "run(progress=None, /)\n--\n\n"
             "Run the commands of the log that were not run yet; `progress` is called with "
             "(commands done, all).");

static PyObject *py_replay_run(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    py_replay_t *self = (py_replay_t *)object;
    PyObject *progress = nargs == 1 && args[0] != Py_None ? args[0] : NULL;
    int ret;

    if (nargs > 1) {
        return PyErr_Format(PyExc_TypeError, "run takes at most one argument");
    }
    if (check_is_still(self) != 0 || check_log_is_still(self->log) != 0) {
        return NULL;
    }
    if (self->has_ended) {
        return PyErr_Format(PyExc_RuntimeError, "this Replay has ended, make another one");
    }
    self->is_running = true;
    self->log->readers++;
    if (self->replay.options.eviction.heuristic == &self->heuristic) {
        rotor_callback_t callback = {replay_goes_on, self};
        self->progress = progress;
        ret = rotor_replay_run(&self->replay, &callback);
        self->progress = NULL;
    } else {
        py_watch_t watch;
        py_watch_begin(&watch, progress);
        ret = rotor_replay_run(&self->replay, &watch.callback);
        py_watch_end(&watch);
    }
    self->log->readers--;
    self->is_running = false;
    self->has_ended = ret != ROTOR_OK || self->replay.outcome != ROTOR_RUN_OK;
    if (ret != ROTOR_OK) {
        return raise_run(self, ret);
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(is_defined_doc, "is_defined(tensor, /)\n--\n\nReturn whether a tensor is in memory.");

static PyObject *py_replay_is_defined(PyObject *object, PyObject *tensor) {
    py_replay_t *self = (py_replay_t *)object;
    long long index = PyLong_AsLongLong(tensor);

    if ((index == -1 && PyErr_Occurred()) || check_is_still(self) != 0) {
        return NULL;
    }
    return PyBool_FromLong(rotor_replay_is_defined(&self->replay, index));
}

PyDoc_STRVAR(locked_doc, "locked()\n--\n\n"
                         "Return the storages that are in memory and locked or pinned, int64.");

static PyObject *py_replay_locked(PyObject *object, PyObject *unused) {
    py_replay_t *self = (py_replay_t *)object;
    if (check_is_still(self) != 0) {
        return NULL;
    }
    int32_t *storages = rotor_malloc_array(self->replay.eviction.count, sizeof(*storages));
    if (storages == NULL) {
        return PyErr_NoMemory();
    }
    PyObject *answer = py_wide_bytes(storages, rotor_replay_locked(&self->replay, storages));
    rotor_free(storages);
    return answer;
}

static PyObject *array_or_none(const py_replay_t *self, bool exists, const void *array,
                               int64_t count, size_t size) {
    if (check_is_still(self) != 0) {
        return NULL;
    }
    if (!exists) {
        Py_RETURN_NONE;
    }
    return PyByteArray_FromStringAndSize(array, (Py_ssize_t)count * (Py_ssize_t)size);
}

PyDoc_STRVAR(
    events_doc,
    "events()\n--\n\n"
    "Return the trace, as records of int64 clock, bytes, memory and int32 kind, index; None "
    "without one.");

static PyObject *py_replay_events(PyObject *object, PyObject *unused) {
    py_replay_t *self = (py_replay_t *)object;
    const rotor_replay_t *replay = &self->replay;
    return array_or_none(self, replay->options.trace, replay->events, replay->event_count,
                         sizeof(*replay->events));
}

PyDoc_STRVAR(storage_stats_doc,
             "storage_stats()\n--\n\n"
             "Return of every storage made: int64 materialized, evicted, first_clock, last_clock, "
             "resident_ns; None where they were not asked for.");

static PyObject *py_replay_storage_stats(PyObject *object, PyObject *unused) {
    py_replay_t *self = (py_replay_t *)object;
    const rotor_replay_t *replay = &self->replay;
    return array_or_none(self, replay->options.stats, replay->storage_stats,
                         replay->eviction.count, sizeof(*replay->storage_stats));
}

PyDoc_STRVAR(
    operation_stats_doc,
    "operation_stats()\n--\n\n"
    "Return of every operation made: int64 executions, executions_by_model; None where they were "
    "not asked for.");

static PyObject *py_replay_operation_stats(PyObject *object, PyObject *unused) {
    py_replay_t *self = (py_replay_t *)object;
    const rotor_replay_t *replay = &self->replay;
    return array_or_none(self, replay->options.stats, replay->operation_stats,
                         replay->operation_count, sizeof(*replay->operation_stats));
}

/* A number of the replay; `closure`: twice its offset, and 1 for an int32. */
static PyObject *py_replay_get(PyObject *object, void *closure) {
    py_replay_t *self = (py_replay_t *)object;
    uintptr_t place = (uintptr_t)closure;
    const char *field = (const char *)&self->replay + place / 2;
    int64_t wide;
    int32_t narrow;

    if (check_is_still(self) != 0) {
        return NULL;
    }
    if (place % 2 == 1) {
        memcpy(&narrow, field, sizeof(narrow));
        return PyLong_FromLong(narrow);
    }
    memcpy(&wide, field, sizeof(wide));
    return PyLong_FromLongLong(wide);
}

static PyObject *py_replay_footprint(PyObject *object, void *closure) {
    py_replay_t *self = (py_replay_t *)object;
    return check_is_still(self) != 0
               ? NULL
               : PyLong_FromLongLong(rotor_replay_footprint(&self->replay));
}

#define RESULT(name, field, doc)                                                                   \
    {name, py_replay_get, NULL, doc,                                                               \
     (void *)(uintptr_t)(2 * offsetof(rotor_replay_t, field) +                                     \
                         (sizeof(((rotor_replay_t *)0)->field) == sizeof(int32_t)))}

static PyGetSetDef replay_getset[] = {
    RESULT("outcome", outcome, "0 ok, 1 out of memory, 2 thrash, 3 stopped."),
    RESULT("clock", clock, "The clock, ns; it starts at 1."),
    RESULT("memory", memory, "Bytes in memory."),
    RESULT("max_memory", max_memory, "The most bytes that were in memory."),
    RESULT("model_compute_ns", model_compute_ns, "Time of the model's executions, ns."),
    RESULT("remat_compute_ns", remat_compute_ns, "Time of rematerializing executions, ns."),
    RESULT("const_bytes", const_bytes, "Bytes of operations without inputs that cost nothing."),
    RESULT("bottleneck_bytes", bottleneck_bytes,
           "The largest outputs and inputs of one operation."),
    RESULT("evictions", evictions, "Evictions, eager releases included."),
    RESULT("remats", remats, "Rematerializing executions."),
    RESULT("model_executions", model_executions, "Executions by the model."),
    RESULT("executions", executions, "Executions; at a failure, of those before it."),
    RESULT("next_command", next_command, "Commands done; at a failure, the one that failed."),
    RESULT("max_locked_bytes", max_locked_bytes, "The most bytes that were locked or pinned."),
    RESULT("max_locked_execution", max_locked_execution, "Executions done when that was so first."),
    RESULT("failed_operation", failed_operation, "Being executed when the run ended so, else -1."),
    RESULT("failed_bytes", failed_bytes, "Bytes of its outputs."),
    RESULT("evaluations", eviction.evaluations, "Evaluations of the heuristic."),
    RESULT("accesses", eviction.accesses, "Accesses to storages' data, where they are counted."),
    RESULT("locked_bytes", eviction.locked_bytes, "Bytes that are locked or pinned."),
    RESULT("pool_count", eviction.pool_count, "Storages that could be evicted."),
    RESULT("storage_count", eviction.count, "Storages made."),
    {"footprint_bytes", py_replay_footprint, NULL, "Bytes that the replay itself takes.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef replay_methods[] = {
    {"run", (PyCFunction)(void (*)(void))py_replay_run, METH_FASTCALL, run_doc},
    {"is_defined", py_replay_is_defined, METH_O, is_defined_doc},
    {"locked", py_replay_locked, METH_NOARGS, locked_doc},
    {"events", py_replay_events, METH_NOARGS, events_doc},
    {"storage_stats", py_replay_storage_stats, METH_NOARGS, storage_stats_doc},
    {"operation_stats", py_replay_operation_stats, METH_NOARGS, operation_stats_doc},
    {NULL, NULL, 0, NULL},
};

PyDoc_STRVAR(replay_doc, "A log replayed under a budget (see rotor.simrd.simulate).");

static PyType_Slot replay_slots[] = {
    {Py_tp_new, py_replay_new},           {Py_tp_dealloc, py_replay_dealloc},
    {Py_tp_traverse, py_replay_traverse}, {Py_tp_clear, py_replay_clear},
    {Py_tp_methods, replay_methods},      {Py_tp_getset, replay_getset},
    {Py_tp_doc, (void *)replay_doc},      {0, NULL},
};

int py_add_replay(PyObject *module) {
    return py_add_type(module, "rotor._core.Replay", sizeof(py_replay_t), Py_TPFLAGS_HAVE_GC,
                       replay_slots, NULL);
}
