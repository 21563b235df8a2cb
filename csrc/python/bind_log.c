#include "support.h"

#include <string.h>

/* None, or NULL with the exception of a status. */
static PyObject *log_answer(PyObject *object, int status, const rotor_log_error_t *error) {
    if (status == ROTOR_ERR_FORMAT) {
        PyObject *type = py_state(PyType_GetModule(Py_TYPE(object)))->malformed_log_error;
        return py_raise_number(type, py_text(error->message), error->line);
    }
    return py_none(object, status);
}

static rotor_log_t *log_of(PyObject *object) { return &((py_log_t *)object)->log; }

static PyObject *py_log_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    int cut_at_start;

    if (!py_has_no_names("Log", kwargs) || !PyArg_ParseTuple(args, "p:Log", &cut_at_start)) {
        return NULL;
    }
    PyObject *self = type->tp_alloc(type, 0);
    if (self != NULL) {
        int ret = rotor_log_init(log_of(self), cut_at_start != 0);
        if (ret != ROTOR_OK) {
            py_raise_status(PyType_GetModule(type), ret);
            Py_CLEAR(self);
        }
    }
    return self;
}

static void py_log_dealloc(PyObject *object) {
    rotor_log_free(log_of(object));
    py_dealloc(object);
}

/* True if no thread changes the log now. */
static bool may_read(PyObject *object) {
    if (((py_log_t *)object)->is_feeding) {
        PyErr_SetString(PyExc_RuntimeError, "the log is being fed; wait until feed has returned");
        return false;
    }
    return true;
}

static bool may_change(PyObject *object) {
    if (((py_log_t *)object)->readers > 0) {
        PyErr_SetString(PyExc_RuntimeError,
                        "the log is being replayed; feed it when no replay runs");
        return false;
    }
    return may_read(object);
}

PyDoc_STRVAR(log_feed_doc, "feed(data, progress=None, /)\n--\n\n"
                           "Read the next piece of a log, of any length.\n"
                           "\n"
                           "``progress(done, total)`` is called now and then, in bytes of `data`.");

static PyObject *py_log_feed(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    py_log_t *self = (py_log_t *)object;
    PyObject *progress = nargs > 1 && args[1] != Py_None ? args[1] : NULL;
    rotor_log_error_t error;
    py_watch_t watch;
    Py_buffer view;

    if (!py_are_counted("feed", nargs, 1, 2)) {
        return NULL;
    }
    if (progress != NULL && !PyCallable_Check(progress)) {
        return PyErr_Format(PyExc_TypeError, "progress must be callable or None, got %R",
                            progress);
    }
    if (PyObject_GetBuffer(args[0], &view, PyBUF_SIMPLE) != 0) {
        return NULL;
    }
    if (!may_change(object)) {
        PyBuffer_Release(&view);
        return NULL;
    }
    self->is_feeding = true;
    py_watch_begin(&watch, progress);
    int ret = rotor_log_feed(&self->log, view.buf, view.len, &watch.callback, &error);
    py_watch_end(&watch);
    self->is_feeding = false;
    PyBuffer_Release(&view);
    return log_answer(object, ret, &error);
}

PyDoc_STRVAR(log_finish_doc, "finish(condition, /)\n--\n\n"
                             "End the log: 0 pins what is referenced, 1 sums its bytes up, 2\n"
                             "leaves it.");

static PyObject *py_log_finish(PyObject *object, PyObject *argument) {
    rotor_log_error_t error;
    int64_t condition;

    if (!py_get_integer(argument, "condition", ROTOR_REMATERIALIZE, ROTOR_LEAVE, &condition) ||
        !may_change(object)) {
        return NULL;
    }
    int ret =
        rotor_log_finish(log_of(object), (enum rotor_output_condition)condition, &error);
    return log_answer(object, ret, &error);
}

PyDoc_STRVAR(log_lookup_doc, "lookup(name, /)\n--\n\n"
                             "Return the tensor that a name is bound to now, or -1.");

static PyObject *py_log_lookup(PyObject *object, PyObject *argument) {
    Py_ssize_t length;

    if (!PyUnicode_Check(argument)) {
        return PyErr_Format(PyExc_TypeError, "name must be a str, got %R", argument);
    }
    const char *name = PyUnicode_AsUTF8AndSize(argument, &length);
    if (name == NULL || !may_read(object)) {
        return NULL;
    }
    return PyLong_FromLong(rotor_log_lookup(log_of(object), name, length));
}

static bool get_index(PyObject *object, PyObject *argument, const char *what,
                      const int64_t *count, int64_t *index) {
    Py_ssize_t given = PyNumber_AsSsize_t(argument, PyExc_IndexError);
    if ((given == -1 && PyErr_Occurred()) || !may_read(object)) {
        return false;
    }
    if (given < 0 || given >= *count) {
        PyErr_Format(PyExc_IndexError, "%s %zd does not exist, the log has %lld", what, given,
                     (long long)*count);
        return false;
    }
    *index = given;
    return true;
}

PyDoc_STRVAR(log_references_doc, "references(tensor, /)\n--\n\n"
                                 "Return the references that a tensor holds from names by now.");

static PyObject *py_log_references(PyObject *object, PyObject *argument) {
    int64_t tensor;
    if (!get_index(object, argument, "tensor", &log_of(object)->graph.tensor_count, &tensor)) {
        return NULL;
    }
    return PyLong_FromLongLong(rotor_log_references(log_of(object), (int32_t)tensor));
}

PyDoc_STRVAR(log_operation_name_doc, "operation_name(operation, /)\n--\n\n"
                                     "Return the name of an operation; \"constant\" of constants.");

static PyObject *py_log_operation_name(PyObject *object, PyObject *argument) {
    const rotor_graph_t *graph = &log_of(object)->graph;
    int64_t index;
    if (!get_index(object, argument, "operation", &graph->operation_count, &index)) {
        return NULL;
    }
    return py_text(graph->names + graph->operations[index].name);
}

PyDoc_STRVAR(log_tensor_name_doc, "tensor_name(tensor, /)\n--\n\n"
                                  "Return the name under which a tensor was made.");

static PyObject *py_log_tensor_name(PyObject *object, PyObject *argument) {
    const rotor_graph_t *graph = &log_of(object)->graph;
    int64_t index;
    if (!get_index(object, argument, "tensor", &graph->tensor_count, &index)) {
        return NULL;
    }
    return py_text(graph->names + graph->tensors[index].name);
}

/* A number within each item of an array. */
typedef struct {
    size_t offset;
    size_t size; /* of an int64_t, an int32_t, a bool */
} column_t;

#define COLUMN(type, field) {offsetof(type, field), sizeof(((type *)0)->field)}

static int64_t number_at(const char *place, size_t size) {
    return size == sizeof(int64_t)   ? *(const int64_t *)(const void *)place
           : size == sizeof(int32_t) ? *(const int32_t *)(const void *)place
                                     : *(const bool *)(const void *)place;
}

/* A tuple of bytearrays of int64, one for each column of `count` items that are `stride` bytes apart. */
static PyObject *columns_of(PyObject *object, const void *items, int64_t count, size_t stride,
                            const column_t *columns, int width) {
    PyObject *answer = may_read(object) ? PyTuple_New(width) : NULL;
    for (int k = 0; answer != NULL && k < width; k++) {
        PyObject *column = py_int64_bytes(NULL, count);
        if (column == NULL) {
            Py_CLEAR(answer);
            break;
        }
        PyTuple_SET_ITEM(answer, k, column);
        int64_t *to = (int64_t *)(void *)PyByteArray_AS_STRING(column);
        const char *from = (const char *)items + columns[k].offset;
        for (int64_t i = 0; i < count; i++) {
            to[i] = number_at(from + (size_t)i * stride, columns[k].size);
        }
    }
    return answer;
}

PyDoc_STRVAR(log_operations_doc,
             "operations()\n--\n\n"
             "Return columns of int64: cost_ns, bytes, first_input, input_count,\n"
             "first_output, output_count.");

static PyObject *py_log_operations(PyObject *object, PyObject *unused) {
    static const column_t columns[] = {
        COLUMN(rotor_operation_t, cost_ns),      COLUMN(rotor_operation_t, bytes),
        COLUMN(rotor_operation_t, first_input),  COLUMN(rotor_operation_t, input_count),
        COLUMN(rotor_operation_t, first_output), COLUMN(rotor_operation_t, output_count)};
    const rotor_graph_t *graph = &log_of(object)->graph;
    return columns_of(object, graph->operations, graph->operation_count,
                      sizeof(*graph->operations), columns, 6);
}

PyDoc_STRVAR(log_tensors_doc, "tensors()\n--\n\n"
                              "Return columns of int64: storage, operation, is_alias.");

static PyObject *py_log_tensors(PyObject *object, PyObject *unused) {
    static const column_t columns[] = {COLUMN(rotor_tensor_t, storage),
                                       COLUMN(rotor_tensor_t, operation),
                                       COLUMN(rotor_tensor_t, is_alias)};
    const rotor_graph_t *graph = &log_of(object)->graph;
    return columns_of(object, graph->tensors, graph->tensor_count, sizeof(*graph->tensors),
                      columns, 3);
}

PyDoc_STRVAR(log_storages_doc, "storages()\n--\n\n"
                               "Return columns of int64: bytes, root.");

static PyObject *py_log_storages(PyObject *object, PyObject *unused) {
    static const column_t columns[] = {COLUMN(rotor_storage_t, bytes),
                                       COLUMN(rotor_storage_t, root)};
    const rotor_graph_t *graph = &log_of(object)->graph;
    return columns_of(object, graph->storages, graph->storage_count, sizeof(*graph->storages),
                      columns, 2);
}

PyDoc_STRVAR(log_inputs_doc,
             "inputs()\n--\n\n"
             "Return the tensors that operations read, as int64; see `operations`.");

static PyObject *py_log_inputs(PyObject *object, PyObject *unused) {
    const rotor_graph_t *graph = &log_of(object)->graph;
    return may_read(object) ? py_wide_bytes(graph->inputs, graph->input_count) : NULL;
}

PyDoc_STRVAR(log_commands_doc,
             "commands()\n--\n\n"
             "Return pairs of int64: kind (0 compute, 1 get, 2 pin, 3 release), and the\n"
             "index of an operation or a tensor.");

static PyObject *py_log_commands(PyObject *object, PyObject *unused) {
    const rotor_log_t *log = log_of(object);
    _Static_assert(sizeof(*log->commands) == 2 * sizeof(int32_t), "a command is a pair of int32");
    return may_read(object)
               ? py_wide_bytes((const int32_t *)(const void *)log->commands, 2 * log->command_count)
               : NULL;
}

/* An int64 of the log; `closure` is its offset. */
static PyObject *py_log_count(PyObject *object, void *closure) {
    if (!may_read(object)) {
        return NULL;
    }
    int64_t value;
    memcpy(&value, (const char *)log_of(object) + (size_t)(uintptr_t)closure, sizeof(value));
    return PyLong_FromLongLong(value);
}

static PyObject *py_log_is_finished(PyObject *object, void *closure) {
    return may_read(object) ? PyBool_FromLong(log_of(object)->is_finished) : NULL;
}

static PyObject *py_log_footprint(PyObject *object, void *closure) {
    return may_read(object) ? PyLong_FromLongLong(rotor_log_footprint(log_of(object))) : NULL;
}

static PyMethodDef log_methods[] = {
    {"feed", PY_FASTCALL(py_log_feed), log_feed_doc},
    {"finish", py_log_finish, METH_O, log_finish_doc},
    {"lookup", py_log_lookup, METH_O, log_lookup_doc},
    {"references", py_log_references, METH_O, log_references_doc},
    {"operation_name", py_log_operation_name, METH_O, log_operation_name_doc},
    {"tensor_name", py_log_tensor_name, METH_O, log_tensor_name_doc},
    {"operations", py_log_operations, METH_NOARGS, log_operations_doc},
    {"inputs", py_log_inputs, METH_NOARGS, log_inputs_doc},
    {"tensors", py_log_tensors, METH_NOARGS, log_tensors_doc},
    {"storages", py_log_storages, METH_NOARGS, log_storages_doc},
    {"commands", py_log_commands, METH_NOARGS, log_commands_doc},
    {NULL, NULL, 0, NULL},
};

#define COUNT(name, field, text)                                                                   \
    {name, py_log_count, NULL, text, (void *)(uintptr_t)offsetof(rotor_log_t, field)}

static PyGetSetDef log_getset[] = {
    COUNT("line_count", line_count, "Lines read, empty ones included."),
    COUNT("start_count", start_count, "START annotations."),
    COUNT("backward_command", backward_command, "Commands before the backward, -1 for none."),
    COUNT("ignored_releases", ignored_releases, "RELEASE of names that are not defined."),
    COUNT("output_bytes", output_bytes, "Bytes that are referenced at the end, where summed."),
    COUNT("command_count", command_count, "Commands."),
    COUNT("operation_count", graph.operation_count, "Operations."),
    COUNT("tensor_count", graph.tensor_count, "Tensors."),
    COUNT("storage_count", graph.storage_count, "Storages."),
    {"is_finished", py_log_is_finished, NULL, "Whether the log has ended.", NULL},
    {"footprint_bytes", py_log_footprint, NULL, "Bytes that the log takes in memory.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyDoc_STRVAR(log_doc, "Reads a log piece by piece (see rotor.simrd.parse).");

static PyType_Slot log_slots[] = {
    {Py_tp_new, py_log_new},    {Py_tp_dealloc, py_log_dealloc}, {Py_tp_methods, log_methods},
    {Py_tp_getset, log_getset}, {Py_tp_doc, (void *)log_doc},    {0, NULL},
};

int py_add_log(PyObject *module) {
    return py_add_type(module, "rotor._core.Log", sizeof(py_log_t), 0, log_slots,
                       &py_state(module)->log_type);
}
