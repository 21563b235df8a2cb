#include "support.h"

#include <structmember.h>

#include "bound.h"
#include "checksum.h"
#include "planner.h"

_Static_assert(sizeof(long long) == sizeof(int64_t), "PyArg_ParseTuple reads int64 as L");

typedef struct {
    PyObject_HEAD
    rotor_dataflow_t graph;
    uint64_t sum; /* of all arrays but the times */
} py_dataflow_t;

/* In the order of the arguments. */
#define DATAFLOW_ARRAYS(entry)                                                                     \
    entry(cost_ns) entry(workspace_bytes) entry(phase) entry(flags) entry(input_start)             \
        entry(inputs) entry(output_start) entry(outputs) entry(storage_bytes) entry(pinned)        \
            entry(fixed) entry(lazy) entry(light_bytes) entry(clock)

#define AS_TEXT(name) #name,
static const char *const array_names[] = {DATAFLOW_ARRAYS(AS_TEXT)};
#undef AS_TEXT
enum { ARRAYS = 14 };

static int64_t last_of(const Py_buffer *view) {
    return ((const int64_t *)view->buf)[view->shape[0] - 1];
}

/* Lengths that do not follow from each other, and the ends of the lists of inputs and outputs. */
static int check_lengths(const Py_buffer *views) {
    Py_ssize_t n = views[0].shape[0];
    for (int k = 1; k < ARRAYS; k++) {
        Py_ssize_t expected = k < 4 || k >= 12   ? n
                              : k == 4 || k == 6 ? n + 1
                              : k >= 9           ? views[8].shape[0]
                                                 : views[k].shape[0];
        if (py_check_length(&views[k], array_names[k], expected) != 0) {
            return -1;
        }
    }
    if (last_of(&views[4]) != views[5].shape[0] || last_of(&views[6]) != views[7].shape[0]) {
        PyErr_SetString(PyExc_ValueError, "input_start and output_start must end with the number "
                                          "of inputs and of outputs");
        return -1;
    }
    return 0;
}

static int sum_arrays(const Py_buffer *views, uint64_t *sum) {
    static const int64_t stride = 1;
    int ret = ROTOR_OK;
    *sum = 0;
    for (int k = 1; k < ARRAYS && ret == ROTOR_OK; k++) {
        int64_t size = views[k].shape[0];
        uint64_t one = 0;
        ret = rotor_checksum(views[k].buf, sizeof(int64_t), 1, &size, &stride, &one);
        *sum = (*sum ^ one) * UINT64_C(0x9e3779b97f4a7c15) + (uint64_t)size;
    }
    return ret;
}

static PyObject *py_dataflow_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    Py_buffer views[ARRAYS];
    py_dataflow_t *self = NULL;

    if (!py_has_no_names("Dataflow", kwargs) ||
        !py_are_counted("Dataflow", PyTuple_GET_SIZE(args), ARRAYS, ARRAYS) ||
        py_get_arrays(&PyTuple_GET_ITEM(args, 0), array_names, ARRAYS, views) != 0) {
        return NULL;
    }
    if (check_lengths(views) != 0) {
        goto out;
    }
    self = (py_dataflow_t *)type->tp_alloc(type, 0);
    if (self != NULL) {
        rotor_dataflow_arrays_t source = {.operation_count = views[0].shape[0],
                                          .storage_count = views[8].shape[0]};
        int at = 0;
#define TAKE(name) source.name = views[at++].buf;
        DATAFLOW_ARRAYS(TAKE)
#undef TAKE
        int ret = rotor_dataflow_build(&self->graph, &source);
        ret = ret == ROTOR_OK ? sum_arrays(views, &self->sum) : ret;
        if (ret == ROTOR_ERR_BAD_LENGTH) {
            PyErr_SetString(PyExc_ValueError, "a graph needs at least one operation, at most 2^30, "
                                              "and lists that begin where the last one ended");
            Py_CLEAR(self);
        } else if (ret != ROTOR_OK) {
            py_raise_status(PyType_GetModule(type), ret);
            Py_CLEAR(self);
        }
    }
out:
    py_release_arrays(views, ARRAYS);
    return (PyObject *)self;
}

static void py_dataflow_dealloc(PyObject *object) {
    rotor_dataflow_free(&((py_dataflow_t *)object)->graph);
    py_dealloc(object);
}

static const char *const fault_texts[] = {
    [ROTOR_FAULT_OPERATION] = "the graph has no operation of this number",
    [ROTOR_FAULT_INPUT] = "an input of the operation was not made before it",
    [ROTOR_FAULT_PHASE] = "the operation runs for the first time after one of a later phase",
    [ROTOR_FAULT_ORDER] =
        "operations that are random or run once must first run in the order of the graph",
    [ROTOR_FAULT_ONCE] = "the operation may run once only",
    [ROTOR_FAULT_MISSING] = "the program ends before every operation of the graph has run",
    [ROTOR_FAULT_LINK] = "the program moves a storage to a second tier, and no link was given",
    [ROTOR_FAULT_FIXED] =
        "the storage does not move: it is pinned, fixed, too small, or made by the loss",
    [ROTOR_FAULT_NOT_MADE] = "the offload of the storage is finished before it is made",
    [ROTOR_FAULT_WRITTEN] = "the offload of the storage is finished a second time, once is enough",
    [ROTOR_FAULT_NOT_WRITTEN] = "the storage is fetched before its offload is finished",
    [ROTOR_FAULT_UNUSED] = "the storage is fetched, and nothing reads it before it is made again",
    [ROTOR_FAULT_HOST] = "the second tier holds more than the host_bytes of the link",
    [ROTOR_FAULT_TAPE] = "a tape is read after something that it holds was made again",
};

static PyObject *raise_fault(PyObject *module, int status, const rotor_fault_t *fault) {
    if (fault->kind == ROTOR_FAULT_NONE) {
        return py_raise_status(module, status);
    }
    const char *text = fault_texts[fault->kind];
    int operation = fault->operation;
    PyObject *message =
        fault->storage >= 0
            ? PyUnicode_FromFormat("%s: storage %d of operation %d", text, (int)fault->storage, operation)
            : PyUnicode_FromFormat("%s: operation %d", text, operation);
    return py_raise_number(py_state(module)->invalid_sequence_error, message, fault->position);
}

/* Borrows a program, an array of int32, and its length; -1 with an exception on failure. */
static int64_t get_program(PyObject *given, Py_buffer *view) {
    if (PyObject_GetBuffer(given, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0) {
        return -1;
    }
    if (view->itemsize != (Py_ssize_t)sizeof(int32_t)) {
        PyErr_SetString(PyExc_TypeError, "a program must be an array of int32");
        PyBuffer_Release(view);
        return -1;
    }
    return view->len / (Py_ssize_t)sizeof(int32_t);
}

PyDoc_STRVAR(simulate_doc,
             "simulate(ops, link=None, /)\n--\n\n"
             "Check and price a program of int32, with a link as read_link() reads it: (time_ns, "
             "peak_bytes, before, peaks, compute_ns, link_ns, host_bytes), the third and fourth "
             "int64 bytearrays.");

static int read_link(PyObject *self, PyObject *given, rotor_link_t *link) {
    if (!PyTuple_Check(given)) {
        PyErr_SetString(PyExc_TypeError, "a link must be a tuple of seven numbers");
        return -1;
    }
    return py_check_status(self, py_read_link(given, link));
}

static PyObject *py_dataflow_simulate(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    PyObject *module = PyType_GetModule(Py_TYPE(object));
    py_dataflow_t *self = (py_dataflow_t *)object;
    PyObject *before = NULL;
    PyObject *peaks = NULL;
    PyObject *answer = NULL;
    rotor_cost_t price = {0};
    rotor_fault_t fault;
    rotor_link_t link;
    bool has_link = nargs == 2 && args[1] != Py_None;
    Py_buffer view;
    int ret;

    if (!py_are_counted("simulate", nargs, 1, 2) ||
        (has_link && read_link(object, args[1], &link) != 0)) {
        return NULL;
    }
    int64_t length = get_program(args[0], &view);
    if (length < 0) {
        return NULL;
    }
    before = py_int64_bytes(NULL, length);
    peaks = py_int64_bytes(NULL, length);
    if (before == NULL || peaks == NULL) {
        goto out;
    }
    int64_t *before_data = (int64_t *)(void *)PyByteArray_AS_STRING(before);
    int64_t *peaks_data = (int64_t *)(void *)PyByteArray_AS_STRING(peaks);
    Py_BEGIN_ALLOW_THREADS;
    ret = rotor_program_simulate(&self->graph, has_link ? &link : NULL, view.buf, length, &price,
                                 before_data, peaks_data, &fault);
    Py_END_ALLOW_THREADS;
    if (ret == ROTOR_OK) {
        answer = Py_BuildValue("LLOOLLL", (long long)price.time_ns, (long long)price.peak_bytes,
                               before, peaks, (long long)price.compute_ns,
                               (long long)price.link_ns, (long long)price.host_bytes);
    } else {
        raise_fault(module, ret, &fault);
    }
out:
    Py_XDECREF(before);
    Py_XDECREF(peaks);
    PyBuffer_Release(&view);
    return answer;
}

PyDoc_STRVAR(lower_bound_doc,
             "lower_bound(moves, /)\n--\n\n"
             "Return the bytes below which the peak of no program lies; `moves`: with a second tier.");

static PyObject *py_dataflow_lower_bound(PyObject *object, PyObject *moves) {
    const rotor_dataflow_t *graph = &((py_dataflow_t *)object)->graph;
    int64_t bytes = 0;
    int ret = moves == Py_True ? rotor_dataflow_lower_bound(graph, &bytes)
                               : rotor_bound(graph, &bytes);
    return ret == ROTOR_OK ? PyLong_FromLongLong(bytes)
                           : py_raise_status(PyType_GetModule(Py_TYPE(object)), ret);
}

static PyObject *program_bytes(const rotor_program_t *program) {
    return PyByteArray_FromStringAndSize(
        (const char *)program->ops,
        (Py_ssize_t)program->length * (Py_ssize_t)sizeof(*program->ops));
}

PyDoc_STRVAR(
    plan_doc,
    "plan(budget, random_runs, moves, seed, time_limit_ns, progress, start=None, link=None, /)\n"
    "--\n\n"
    "Return (program, minimum, least): the best program found within a budget in bytes, as int32; "
    "None where none was found, and then the least peak that was reached, and its program. The "
    "search begins from the program `start`, of int32. With a link, as simulate() takes it, programs "
    "may use a second tier.");

/* Checks a program of int32 and copies it. */
static int read_program(PyObject *module, const rotor_dataflow_t *graph, const rotor_link_t *link,
                        PyObject *given, rotor_program_t *program) {
    rotor_fault_t fault = {.kind = ROTOR_FAULT_NONE};
    rotor_cost_t price;
    Py_buffer view;
    int64_t length = get_program(given, &view);
    if (length < 0) {
        return -1;
    }
    int ret = rotor_program_simulate(graph, link, view.buf, length, &price, NULL, NULL, &fault);
    if (ret == ROTOR_OK) {
        ret = rotor_program_assign(program, view.buf, length);
    }
    PyBuffer_Release(&view);
    if (ret != ROTOR_OK) {
        raise_fault(module, ret, &fault);
    }
    return ret == ROTOR_OK ? 0 : -1;
}

static PyObject *py_dataflow_plan(PyObject *object, PyObject *args) {
    PyObject *module = PyType_GetModule(Py_TYPE(object));
    py_dataflow_t *self = (py_dataflow_t *)object;
    rotor_planner_options_t options = {.start = NULL};
    rotor_plan_t plan;
    rotor_program_t start;
    py_watch_t watch;
    PyObject *progress;
    PyObject *begin = Py_None;
    PyObject *given = Py_None;
    PyObject *answer = NULL;
    rotor_link_t link;
    int64_t budget;

    if (!PyArg_ParseTuple(args, "LLLKLO|OO:plan", &budget, &options.random_runs, &options.moves,
                          &options.seed, &options.time_limit_ns, &progress, &begin, &given) ||
        (given != Py_None && read_link(object, given, &link) != 0)) {
        return NULL;
    }
    options.link = given == Py_None ? NULL : &link;
    rotor_program_init(&plan.program);
    rotor_program_init(&start);
    if (begin != Py_None) {
        if (read_program(module, &self->graph, options.link, begin, &start) != 0) {
            goto out;
        }
        options.start = &start;
    }
    py_watch_begin(&watch, progress);
    int ret = rotor_planner_plan(&self->graph, budget, &options, &watch.callback, &plan);
    py_watch_end(&watch);
    if (ret == ROTOR_OK) {
        answer = Py_BuildValue("NLO", program_bytes(&plan.program), plan.cost.peak_bytes, Py_None);
    } else if (ret == ROTOR_ERR_INFEASIBLE) {
        answer = Py_BuildValue("OLN", Py_None, plan.cost.peak_bytes, program_bytes(&plan.program));
    } else {
        py_raise_status(module, ret);
    }
out:
    rotor_program_free(&plan.program);
    rotor_program_free(&start);
    return answer;
}

PyDoc_STRVAR(curve_doc,
             "curve(points, random_runs, moves, seed, time_limit_ns, progress, link=None, /)\n--\n\n"
             "Return (programs, bytes): those found for budgets in equal steps, ascending, as int32 "
             "each, with a link programs with a second tier after those; and the least budget that "
             "plan() accepts, 0 for one point.");

static PyObject *program_list(const rotor_plan_t *plans, int64_t count) {
    PyObject *list = PyList_New(0);
    for (int64_t k = 0; list != NULL && k < count; k++) {
        py_append(&list, program_bytes(&plans[k].program));
    }
    return list;
}

static PyObject *py_dataflow_curve(PyObject *object, PyObject *args) {
    PyObject *module = PyType_GetModule(Py_TYPE(object));
    py_dataflow_t *self = (py_dataflow_t *)object;
    rotor_planner_options_t options = {.start = NULL};
    rotor_plan_t lowest = {.cost = {.peak_bytes = 0}};
    py_watch_t watch;
    PyObject *progress;
    PyObject *given = Py_None;
    PyObject *answer = NULL;
    rotor_link_t link;
    int64_t points;
    int64_t count = 0;

    if (!PyArg_ParseTuple(args, "LLLKLO|O:curve", &points, &options.random_runs, &options.moves,
                          &options.seed, &options.time_limit_ns, &progress, &given) ||
        (given != Py_None && read_link(object, given, &link) != 0)) {
        return NULL;
    }
    if (points < 1) {
        return PyErr_Format(PyExc_ValueError, "points = %lld, expected at least 1",
                            (long long)points);
    }
    options.link = given == Py_None ? NULL : &link;
    rotor_plan_t *plans = rotor_calloc((size_t)points, 2 * sizeof(*plans));
    if (plans == NULL) {
        return PyErr_NoMemory();
    }
    py_watch_begin(&watch, progress);
    int ret = rotor_planner_curve(&self->graph, points, &options, &watch.callback, plans, &count,
                                  &lowest);
    py_watch_end(&watch);
    answer = ret == ROTOR_OK
                 ? Py_BuildValue("NL", program_list(plans, count), lowest.cost.peak_bytes)
                 : py_raise_status(module, ret);
    for (int64_t k = 0; k < 2 * points; k++) {
        rotor_program_free(&plans[k].program);
    }
    rotor_program_free(&lowest.program);
    rotor_free(plans);
    return answer;
}

static PyMethodDef dataflow_methods[] = {
    {"simulate", PY_FASTCALL(py_dataflow_simulate), simulate_doc},
    {"lower_bound", py_dataflow_lower_bound, METH_O, lower_bound_doc},
    {"plan", py_dataflow_plan, METH_VARARGS, plan_doc},
    {"curve", py_dataflow_curve, METH_VARARGS, curve_doc},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef dataflow_members[] = {
    {"sum", T_ULONGLONG, offsetof(py_dataflow_t, sum), READONLY,
     "Checksum of all but the times: graphs of one sum have the same least peak."},
    {"is_plain", T_BOOL, offsetof(py_dataflow_t, graph.is_plain), READONLY,
     "No tapes, no negative workspaces, no storage whose first copy alone stays."},
    {NULL, 0, 0, 0, NULL},
};

PyDoc_STRVAR(dataflow_doc,
             "Dataflow(cost_ns, workspace_bytes, phase, flags, input_start, inputs, output_start, "
             "outputs, storage_bytes, pinned, fixed, lazy, light_bytes, clock, /)\n--\n\n"
             "A graph of operations on storages, for programs and the planner.");

static PyType_Slot dataflow_slots[] = {
    {Py_tp_new, py_dataflow_new},
    {Py_tp_dealloc, py_dataflow_dealloc},
    {Py_tp_methods, dataflow_methods},
    {Py_tp_members, dataflow_members},
    {Py_tp_doc, (void *)dataflow_doc},
    {0, NULL},
};

int py_add_planner(PyObject *module) {
    return py_add_type(module, "rotor._core.Dataflow", sizeof(py_dataflow_t), 0, dataflow_slots,
                       NULL);
}
