/* The type Record: an operation that may run again. */
#include "bind_dtr_private.h"

#include <structmember.h>

#include "core.h"

enum { LAYOUT_SHAPE, LAYOUT_STRIDE, LAYOUT_DTYPE, LAYOUT_DEVICE, LAYOUT_FIELDS };

/* Arguments that become others one by one, in order. */
typedef struct {
    py_handler_t *handler;
    const py_record_t *record;
    PyObject *const *storages;
    int64_t at; /* of the next tensor */
} filling_t;

/* What these arguments become; an exception leaves what there is for the caller to free. */
static int fill_all(filling_t *filling, PyObject *(*fill)(filling_t *, PyObject *), PyObject *args,
                    PyObject *kwargs, PyObject **to_args, PyObject **to_kwargs) {
    PyObject *name, *value;
    Py_ssize_t at = 0;
    *to_args = PyTuple_New(PyTuple_GET_SIZE(args));
    for (Py_ssize_t k = 0; *to_args != NULL && k < PyTuple_GET_SIZE(args); k++) {
        PyObject *item = fill(filling, PyTuple_GET_ITEM(args, k));
        if (item == NULL) {
            return -1;
        }
        PyTuple_SET_ITEM(*to_args, k, item);
    }
    if (kwargs == NULL || *to_args == NULL) {
        return *to_args == NULL ? -1 : 0;
    }
    *to_kwargs = PyDict_New();
    while (*to_kwargs != NULL && PyDict_Next(kwargs, &at, &name, &value)) {
        PyObject *item = fill(filling, value);
        int ret = item == NULL ? -1 : PyDict_SetItem(*to_kwargs, name, item);
        Py_XDECREF(item);
        if (ret != 0) {
            return -1;
        }
    }
    return *to_kwargs == NULL ? -1 : 0;
}

/* An argument with Ellipsis in the place of each tensor, and None in that of a hidden one. */
static PyObject *pattern_of(filling_t *filling, PyObject *value) {
    const py_handler_t *self = filling->handler;
    if (py_is_tensor(self, value)) {
        if (filling->at >= self->input_count) {
            return PyErr_Format(PyExc_RuntimeError,
                                "the arguments of an operator changed in its call");
        }
        bool is_hidden = self->inputs[filling->at++].is_hidden;
        return Py_NewRef(is_hidden ? Py_None : Py_Ellipsis);
    }
    if (!PyList_Check(value) && !PyTuple_Check(value)) {
        return Py_NewRef(value);
    }
    PyObject *list = PyList_New(0);
    PyObject *given;
    for (Py_ssize_t k = 0; list != NULL && (given = py_entry(value, k)) != NULL; k++) {
        py_append(&list, pattern_of(filling, given));
        Py_DECREF(given);
    }
    return list;
}

static PyObject *sizes_of(const int64_t *values, int64_t count) {
    PyObject *sizes = PyTuple_New((Py_ssize_t)count);
    for (int64_t k = 0; sizes != NULL && k < count; k++) {
        PyObject *size = PyLong_FromLongLong(values[k]);
        if (size == NULL) {
            Py_CLEAR(sizes);
        } else {
            PyTuple_SET_ITEM(sizes, (Py_ssize_t)k, size);
        }
    }
    return sizes;
}

static int make_layout(py_handler_t *self, const py_input_t *input, PyObject **layout) {
    const int64_t *sizes = self->key + input->first;
    layout[LAYOUT_SHAPE] = sizes_of(sizes, input->dims);
    layout[LAYOUT_STRIDE] = sizes_of(sizes + input->dims, input->dims);
    layout[LAYOUT_DTYPE] = PyObject_GetAttr(input->tensor, self->names[NAME_dtype]);
    layout[LAYOUT_DEVICE] = input->is_cpu
                                ? Py_NewRef(self->parts[PART_CPU])
                                : PyObject_GetAttr(input->tensor, self->names[NAME_device]);
    for (int k = 0; k < LAYOUT_FIELDS; k++) {
        if (layout[k] == NULL) {
            return -1;
        }
    }
    return 0;
}

static py_pattern_t *make_pattern(py_handler_t *self, const py_run_t *run, int64_t count) {
    py_pattern_t *pattern = PyMem_Calloc(
        1, sizeof(*pattern) + (size_t)count * LAYOUT_FIELDS * sizeof(PyObject *));
    if (pattern == NULL) {
        return (py_pattern_t *)PyErr_NoMemory();
    }
    pattern->references = 1;
    pattern->count = count;
    int ret = fill_all(&(filling_t){.handler = self}, pattern_of, run->args, run->kwargs,
                       &pattern->args, &pattern->kwargs);
    PyObject **layout = pattern->layouts;
    for (int64_t k = 0; k < self->input_count && ret == 0; k++) {
        if (!self->inputs[k].is_hidden) {
            ret = make_layout(self, &self->inputs[k], layout);
            layout += LAYOUT_FIELDS;
        }
    }
    if (ret != 0) {
        py_pattern_release(pattern);
        return NULL;
    }
    return pattern;
}

/* The pattern of arguments with this key, shared by all of them where they are the same. */
static py_pattern_t *pattern_for(py_handler_t *self, const py_run_t *run, int64_t count) {
    py_pattern_t *pattern = self->has_key && !self->has_values ? run->needs->pattern : NULL;
    if (pattern == NULL && (pattern = make_pattern(self, run, count)) == NULL) {
        return NULL;
    }
    if (self->has_key && !self->has_values) {
        if (run->needs->pattern == NULL) {
            run->needs->pattern = pattern;
        }
        pattern->references += 1;
    }
    return pattern;
}

static int bit_of(py_handler_t *self, PyObject *tensor, int name, int bit, int32_t *bits) {
    PyObject *is = PyObject_CallMethodNoArgs(tensor, self->names[name]);
    *bits |= is == Py_True ? bit : 0;
    Py_XDECREF(is);
    return is == NULL ? -1 : 0;
}

static int make_argument(py_handler_t *self, const py_input_t *input, py_argument_t *argument) {
    PyObject *offset =
        PyObject_CallMethodNoArgs(input->tensor, self->names[NAME_storage_offset]);
    *argument = (py_argument_t){.node = (int32_t)input->ref->node};
    argument->offset = offset == NULL ? -1 : PyLong_AsLongLong(offset);
    Py_XDECREF(offset);
    if (argument->offset < 0 ||
        (input->is_complex &&
         bit_of(self, input->tensor, NAME_is_conj, ARGUMENT_CONJUGATE, &argument->bits) != 0)) {
        return -1;
    }
    return bit_of(self, input->tensor, NAME_is_neg, ARGUMENT_NEGATIVE, &argument->bits);
}

py_record_t *py_record_make(py_handler_t *self, const py_run_t *run, const py_made_t *made) {
    int64_t count = 0;
    int64_t at = 0;
    for (int64_t k = 0; k < self->input_count; k++) {
        count += !self->inputs[k].is_hidden;
    }
    size_t head = (size_t)count * sizeof(py_argument_t);
    py_record_t *record = (py_record_t *)PyObject_Malloc(
        sizeof(*record) + head + 2 * (size_t)made->count * sizeof(int32_t));
    if (record == NULL) {
        return (py_record_t *)PyErr_NoMemory();
    }
    memset(record, 0, sizeof(*record));
    (void)PyObject_Init((PyObject *)record, self->record_type);
    record->flag_count = py_flags_of(self, run->kernel);
    record->output_count = (int32_t)made->count;
    record->indices = (int32_t *)(void *)((char *)record->arguments + head);
    record->origins = record->indices + made->count;
    record->grad_enabled = run->grad_enabled;
    record->counted_bytes = run->needs->is_measured ? run->needs->workspace_bytes : 0;
    record->kernel = (py_kernel_t *)Py_NewRef((PyObject *)(uintptr_t)run->kernel);
    record->needs = (py_needs_t *)Py_NewRef((PyObject *)run->needs);
    record->generator = Py_NewRef(run->generator == NULL ? Py_None : run->generator);
    record->state = Py_NewRef(run->generator == NULL ? Py_None : run->state);
    record->module = Py_NewRef(self->module == NULL ? Py_None : self->module);
    record->sums = Py_NewRef(Py_None);
    for (int64_t k = 0; k < made->count; k++) {
        record->indices[k] = made->indices[k];
        record->origins[k] = made->origins[k];
    }
    record->flags = py_operator_flags(self, record->flag_count);
    record->pattern = record->flags == NULL ? NULL : pattern_for(self, run, count);
    int ret = record->pattern == NULL ? -1 : 0;
    for (int64_t k = 0; k < self->input_count && ret == 0; k++) {
        if (!self->inputs[k].is_hidden) {
            ret = make_argument(self, &self->inputs[k], &record->arguments[at++]);
        }
    }
    if (ret != 0) {
        Py_CLEAR(record);
    }
    return record;
}

static PyObject *tensor_of(py_handler_t *self, const py_record_t *record, int64_t at,
                           PyObject *storage) {
    PyObject *const *layout = &record->pattern->layouts[at * LAYOUT_FIELDS];
    const py_argument_t *argument = &record->arguments[at];
    PyObject *sizes[3] = {self->zero, layout[LAYOUT_DTYPE], layout[LAYOUT_DEVICE]};
    PyObject *tensor =
        PyObject_Vectorcall(self->parts[PART_EMPTY], sizes, 1, self->dtype_and_device);
    PyObject *offset = tensor == NULL ? NULL : PyLong_FromLongLong(argument->offset);
    PyObject *placed = NULL;
    if (offset != NULL) {
        PyObject *place[5] = {tensor, storage, offset, layout[LAYOUT_SHAPE],
                              layout[LAYOUT_STRIDE]};
        placed = PyObject_VectorcallMethod(self->names[NAME_set_], place, 5, NULL);
    }
    Py_XDECREF(tensor);
    Py_XDECREF(offset);
    if (placed != NULL && argument->bits != 0) {
        PyObject *set = PyObject_CallFunctionObjArgs(
            self->parts[PART_UNCONJUGATED], placed,
            (argument->bits & ARGUMENT_CONJUGATE) != 0 ? Py_True : Py_False,
            (argument->bits & ARGUMENT_NEGATIVE) != 0 ? Py_True : Py_False, NULL);
        Py_SETREF(placed, set);
    }
    return placed;
}

/* An argument with tensors again. */
static PyObject *filled(filling_t *filling, PyObject *value) {
    if (value == Py_Ellipsis) {
        int64_t at = filling->at++;
        return tensor_of(filling->handler, filling->record, at, filling->storages[at]);
    }
    if (!PyList_Check(value)) {
        return Py_NewRef(value);
    }
    PyObject *list = PyList_New(0);
    for (Py_ssize_t k = 0; list != NULL && k < PyList_GET_SIZE(value); k++) {
        py_append(&list, filled(filling, PyList_GET_ITEM(value, k)));
    }
    return list;
}

int py_record_fill(py_handler_t *self, const py_record_t *record, PyObject *const *storages,
                   PyObject **args, PyObject **kwargs) {
    filling_t filling = {.handler = self, .record = record, .storages = storages};
    return fill_all(&filling, filled, record->pattern->args, record->pattern->kwargs, args, kwargs);
}

/* As Python sees it. */

static void py_record_dealloc(PyObject *object) {
    py_record_t *self = (py_record_t *)object;
    PyTypeObject *type = Py_TYPE(object);
    py_pattern_release(self->pattern);
    Py_XDECREF((PyObject *)self->kernel);
    Py_XDECREF((PyObject *)self->needs);
    Py_XDECREF(self->flags);
    Py_XDECREF(self->generator);
    Py_XDECREF(self->state);
    Py_XDECREF(self->module);
    Py_XDECREF(self->sums);
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyObject *py_record_operator(PyObject *object, void *closure) {
    return Py_NewRef(((py_record_t *)object)->kernel->operator_);
}

/* The numbers of its outputs; `closure`: NULL for the indices. */
static PyObject *py_record_numbers(PyObject *object, void *closure) {
    const py_record_t *self = (py_record_t *)object;
    PyObject *list = py_book_node_list(closure == NULL ? self->indices : self->origins,
                                       self->output_count);
    PyObject *tuple = list == NULL ? NULL : PyList_AsTuple(list);
    Py_XDECREF(list);
    return tuple;
}

static PyObject *py_record_inputs(PyObject *object, void *closure) {
    const py_record_t *self = (py_record_t *)object;
    PyObject *list = PyList_New(0);
    for (int64_t k = 0; list != NULL && k < self->pattern->count; k++) {
        PyObject *const *layout = &self->pattern->layouts[k * LAYOUT_FIELDS];
        py_append(&list, Py_BuildValue("iOO", (int)self->arguments[k].node, layout[LAYOUT_SHAPE],
                                       layout[LAYOUT_DTYPE]));
    }
    return list;
}

static PyGetSetDef record_getset[] = {
    {"operator", py_record_operator, NULL, "The operator that ran.", NULL},
    {"outputs", py_record_numbers, NULL,
     "Of each output: its index among the results, or -1 where the operation writes to its origin.",
     NULL},
    {"origins", py_record_numbers, NULL, "The nodes that it writes to; -1 for none.", (void *)1},
    {"inputs", py_record_inputs, NULL, "(node, shape, dtype) of each tensor argument.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef record_members[] = {
    {"flags", T_OBJECT, offsetof(py_record_t, flags), READONLY, "The backends' settings."},
    {"module", T_OBJECT, offsetof(py_record_t, module), READONLY,
     "Path of the module that ran it, empty for the outermost one; None: not noted."},
    {"sums", T_OBJECT, offsetof(py_record_t, sums), 0,
     "Checksums of what it made first, as far as that is new; None: not noted."},
    {NULL, 0, 0, 0, NULL},
};

PyDoc_STRVAR(record_doc, "An operation that may run again: operator and arguments, no tensor.");

static PyType_Slot record_slots[] = {
    {Py_tp_dealloc, py_record_dealloc},
    {Py_tp_members, record_members},
    {Py_tp_getset, record_getset},
    {Py_tp_doc, (void *)record_doc},
    {0, NULL},
};

int py_add_record(PyObject *module) {
    return py_add_type(module, "rotor._core.Record", sizeof(py_record_t),
                       Py_TPFLAGS_DISALLOW_INSTANTIATION, record_slots,
                       &py_state(module)->record_type);
}
