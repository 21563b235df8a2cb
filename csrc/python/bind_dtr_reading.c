#include "bind_dtr_private.h"

#include <string.h>

enum { TAG_TENSOR = 1, TAG_LIST, TAG_INT, TAG_FLOAT, TAG_VALUE, TAG_NAME };

static inline PyObject *get(py_handler_t *self, PyObject *object, int name) {
    return PyObject_GetAttr(object, self->names[name]);
}

static int append_all(py_handler_t *self, const int64_t *values, int64_t count) {
    if (py_reserve(self->key, self->key_count, self->key_capacity, count) != 0) {
        return -1;
    }
    for (int64_t k = 0; k < count; k++) {
        self->key[self->key_count++] = values[k];
    }
    return 0;
}

static int append(py_handler_t *self, int64_t value) { return append_all(self, &value, 1); }

static int append_sizes(py_handler_t *self, PyObject *sizes) {
    if (sizes == NULL || !PyTuple_Check(sizes)) {
        if (sizes != NULL) {
            PyErr_SetString(PyExc_TypeError, "the sizes of a tensor must be a tuple");
        }
        return -1;
    }
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(sizes); k++) {
        int64_t value = PyLong_AsLongLong(PyTuple_GET_ITEM(sizes, k));
        if ((value == -1 && PyErr_Occurred()) || append(self, value) != 0) {
            return -1;
        }
    }
    return 0;
}

int py_tensor_is_strided(py_handler_t *self, PyObject *tensor) {
    PyObject *layout = get(self, tensor, NAME_layout);
    int is = layout == NULL ? -1 : layout == self->parts[PART_STRIDED];
    Py_XDECREF(layout);
    return is;
}

/* The session's reference to a tensor's storage, a new one; NULL, without an exception, for none. */
static py_ref_t *known_ref(py_handler_t *self, PyObject *tensor) {
    PyObject *storage = PyObject_CallMethodNoArgs(tensor, self->names[NAME_untyped_storage]);
    py_ref_t *ref = storage == NULL ? NULL : py_table_find(&self->table, storage);
    Py_XINCREF((PyObject *)ref);
    Py_XDECREF(storage);
    PyErr_Clear(); /* tensors of other layouts have no storage */
    return ref;
}

/* Whether DLPack, which refuses a tensor without bytes, may be asked. */
static bool has_bytes(py_handler_t *self, const py_ref_t *ref) {
    const rotor_recorder_t *book = &self->recorder->book;
    return ref == NULL || ref->node < 0 || ref->node >= book->node_count ||
           rotor_recorder_is_material(book, (int32_t)ref->node);
}

/* DLPack's words for a data type and a device, or a number for what has none. */
static int kind_of(py_handler_t *self, PyObject *dtype, PyObject *device, int64_t *kind) {
    PyObject *word = PyDict_GetItemWithError(self->parts[PART_DTYPES], dtype);
    int is_here = word == NULL ? 0 : PyObject_RichCompareBool(device, self->device, Py_EQ);
    if (is_here > 0) {
        *kind = PyLong_AsLongLong(word) | (int64_t)self->device_type << 32 |
                (int64_t)self->device_index << 48;
    } else if (is_here == 0 && !PyErr_Occurred()) {
        /* The type of numbers stays readable. */
        int64_t code = word == NULL ? 0 : PyLong_AsLongLong(word) & 0xff;
        *kind = (int64_t)(((uint64_t)(uintptr_t)dtype ^ (uint64_t)PyObject_Hash(device)) << 8) | code;
    }
    return PyErr_Occurred() ? -1 : 0;
}

/* Without DLPack, or where it has no word for the tensor: evicted, or without a place in a session. */
static int read_attributes(py_handler_t *self, PyObject *session, py_input_t *input) {
    int is_strided;
    /* What is evicted was looked at when it was made. */
    if ((has_bytes(self, input->ref) &&
         py_did(py_ask(self, session, _refuse_opaque, input->tensor)) != 0) ||
        (is_strided = py_tensor_is_strided(self, input->tensor)) < 0) {
        return -1;
    }
    if (!is_strided) {
        self->input_count--;
        Py_DECREF(input->tensor);
        self->has_others = true;
        self->has_key = false;
        return 0;
    }
    PyObject *shape = get(self, input->tensor, NAME_shape);
    PyObject *stride = shape == NULL ? NULL : py_ask(self, input->tensor, stride);
    PyObject *dtype = stride == NULL ? NULL : get(self, input->tensor, NAME_dtype);
    PyObject *device = dtype == NULL ? NULL : get(self, input->tensor, NAME_device);
    PyObject *is_cpu = device == NULL ? NULL : get(self, input->tensor, NAME_is_cpu);
    int64_t kind = 0;
    int ret = is_cpu == NULL ? -1 : kind_of(self, dtype, device, &kind);
    if (ret == 0) {
        input->is_cpu = is_cpu == Py_True;
        input->is_complex = (kind & 0xff) == ROTOR_DL_COMPLEX;
        input->dims = (int32_t)PyTuple_GET_SIZE(shape);
        int64_t head[2] = {TAG_TENSOR | (int64_t)input->dims << 8, kind};
        ret = append_all(self, head, 2);
        input->first = self->key_count;
    }
    if (ret == 0 && (append_sizes(self, shape) != 0 || append_sizes(self, stride) != 0)) {
        ret = -1;
    }
    Py_XDECREF(shape);
    Py_XDECREF(stride);
    Py_XDECREF(dtype);
    Py_XDECREF(device);
    Py_XDECREF(is_cpu);
    return ret;
}

static int read_tensor(py_handler_t *self, PyObject *session, PyObject *tensor, bool is_written,
                       bool is_hidden) {
    py_dl_tensor_t view;
    if (py_reserve(self->inputs, self->input_count, self->input_capacity, 1) != 0) {
        return -1;
    }
    py_input_t *input = &self->inputs[self->input_count++];
    *input = (py_input_t){
        .tensor = Py_NewRef(tensor), .is_written = is_written && !is_hidden, .is_hidden = is_hidden};
    input->ref = known_ref(self, tensor);
    if (self->exchange == NULL || !has_bytes(self, input->ref) ||
        self->exchange->view(tensor, &view) != 0 || (view.dims > 0 && view.strides == NULL)) {
        PyErr_Clear();
        return read_attributes(self, session, input);
    }
    input->dims = view.dims;
    input->is_cpu = view.device_type == ROTOR_DL_CPU;
    input->is_complex = view.dtype_code == ROTOR_DL_COMPLEX;
    int64_t head[2] = {TAG_TENSOR | (int64_t)view.dims << 8,
                       (int64_t)view.dtype_code | (int64_t)view.dtype_bits << 8 |
                           (int64_t)view.dtype_lanes << 16 | (int64_t)view.device_type << 32 |
                           (int64_t)view.device_index << 48};
    if (append_all(self, head, 2) != 0) {
        return -1;
    }
    input->first = self->key_count;
    return append_all(self, view.shape, view.dims) == 0 &&
                   append_all(self, view.strides, view.dims) == 0
               ? 0
               : -1;
}

enum py_reading py_tensor_look(py_handler_t *self, PyObject *tensor) {
    py_dl_tensor_t view;
    if (self->exchange != NULL && self->device_type != 0) {
        if (self->exchange->view(tensor, &view) == 0) {
            return view.device_type == self->device_type &&
                           (self->is_cpu || view.device_index == self->device_index)
                       ? READ_OK
                       : READ_ODD;
        }
        PyErr_Clear();
    }
    int is_strided = py_tensor_is_strided(self, tensor);
    PyObject *shape = is_strided > 0 ? get(self, tensor, NAME_shape) : NULL;
    if (shape == NULL) {
        PyErr_Clear(); /* a nested tensor */
        return is_strided < 0 ? READ_ERROR : READ_ODD;
    }
    Py_DECREF(shape);
    PyObject *where = get(self, tensor, self->is_cpu ? NAME_is_cpu : NAME_device);
    int is_here = where == NULL  ? -1
                  : self->is_cpu ? where == Py_True
                                 : PyObject_RichCompareBool(where, self->device, Py_EQ);
    Py_XDECREF(where);
    return is_here < 0 ? READ_ERROR : is_here ? READ_OK : READ_ODD;
}

bool py_is_tensor(const py_handler_t *self, PyObject *value) {
    PyTypeObject *tensor_type = (PyTypeObject *)self->parts[PART_TENSOR_TYPE];
    return Py_TYPE(value) == tensor_type || PyType_IsSubtype(Py_TYPE(value), tensor_type);
}

static bool is_setting(py_handler_t *self, const PyTypeObject *type) {
    PyObject *types = self->parts[PART_SETTING_TYPES];
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(types); k++) {
        if (PyTuple_GET_ITEM(types, k) == (const PyObject *)type) {
            return true;
        }
    }
    return false;
}

/* Settings such as data types count by value; generators, complex numbers by type. */
static int read_other(py_handler_t *self, PyObject *value) {
    PyTypeObject *type = Py_TYPE(value);
    Py_hash_t hash = 0;
    if (type == &PyUnicode_Type || is_setting(self, type)) {
        if ((hash = PyObject_Hash(value)) == -1) {
            return -1;
        }
    } else {
        self->has_values = true;
    }
    int64_t words[3] = {TAG_VALUE, (int64_t)(intptr_t)type, (int64_t)hash};
    return append_all(self, words, 3);
}

static int read_value(py_handler_t *self, PyObject *session, const py_kernel_t *kernel,
                      PyObject *value, bool is_written, bool is_hidden) {
    PyTypeObject *type = Py_TYPE(value);

    if (value == Py_None || type == &PyBool_Type) {
        return append(self, (int64_t)(intptr_t)value);
    }
    if (py_is_tensor(self, value)) {
        return read_tensor(self, session, value, is_written, is_hidden);
    }
    if (type == &PyLong_Type) {
        int overflow;
        int64_t words[2] = {TAG_INT, PyLong_AsLongLongAndOverflow(value, &overflow)};
        self->has_key = self->has_key && overflow == 0;
        return append_all(self, words, 2);
    }
    if (type == &PyFloat_Type) {
        int64_t words[2] = {TAG_FLOAT, 0};
        double number = PyFloat_AS_DOUBLE(value);
        if ((kernel->traits & TRAIT_SIZES_BY_VALUE) != 0) {
            memcpy(&words[1], &number, sizeof(number));
        }
        self->has_values = true;
        return append_all(self, words, 2);
    }
    if (!PyList_Check(value) && !PyTuple_Check(value)) {
        return read_other(self, value);
    }
    if (append(self, TAG_LIST | (int64_t)PySequence_Fast_GET_SIZE(value) << 8) != 0) {
        return -1;
    }
    PyObject *item;
    for (Py_ssize_t k = 0; (item = py_entry(value, k)) != NULL; k++) {
        int ret = read_value(self, session, kernel, item, is_written, is_hidden);
        Py_DECREF(item);
        if (ret != 0) {
            return -1;
        }
    }
    return 0;
}

int py_operator_read(py_handler_t *self, PyObject *session, const py_kernel_t *kernel,
                     PyObject *args, PyObject *kwargs) {
    uint64_t hidden = 0;
    if (kernel->hidden_if >= 0 && kernel->hidden_if < PyTuple_GET_SIZE(args)) {
        int is_true = PyObject_IsTrue(PyTuple_GET_ITEM(args, kernel->hidden_if));
        if (is_true < 0) {
            return -1;
        }
        hidden = is_true ? kernel->hidden : 0;
    }
    self->has_key = true;
    self->has_values = self->has_others = false;
    if (append(self, (int64_t)(intptr_t)kernel->call) != 0) {
        return -1;
    }
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(args); k++) {
        if (read_value(self, session, kernel, PyTuple_GET_ITEM(args, k),
                       k < 64 && (kernel->written >> k & 1) != 0,
                       k < 64 && (hidden >> k & 1) != 0) != 0) {
            return -1;
        }
    }
    if (kwargs != NULL) {
        Py_ssize_t at = 0;
        PyObject *name, *value;
        while (PyDict_Next(kwargs, &at, &name, &value)) {
            Py_INCREF(name);
            Py_INCREF(value);
            int64_t words[2] = {TAG_NAME, (int64_t)PyObject_Hash(name)};
            int is_written = PySequence_Contains(kernel->written_names, name);
            int ret = is_written < 0 || append_all(self, words, 2) != 0
                          ? -1
                          : read_value(self, session, kernel, value, is_written, false);
            Py_DECREF(name);
            Py_DECREF(value);
            if (ret != 0) {
                return -1;
            }
        }
    }
    return 0;
}

void py_operator_clear(py_handler_t *self) {
    while (self->input_count > 0) {
        py_input_t *input = &self->inputs[--self->input_count];
        Py_XDECREF((PyObject *)input->ref);
        Py_DECREF(input->tensor);
    }
    self->key_count = self->node_count = self->hidden_count = 0;
}

static py_ref_t *ref_of(py_handler_t *self, PyObject *session, const py_input_t *input) {
    PyObject *storage =
        PyObject_CallMethodNoArgs(input->tensor, self->names[NAME_untyped_storage]);
    py_ref_t *ref = storage == NULL ? NULL : py_table_find(&self->table, storage);
    if (ref != NULL) {
        Py_INCREF((PyObject *)ref);
    } else if (storage != NULL && input->dims == 0 && self->is_cpu && input->is_cpu) {
        /* A number of the program that became a tensor just now: it counts from now on. */
        int64_t bytes = py_bytes_of(self, storage);
        ref = bytes < 0 ? NULL : py_handler_adopt(self, storage, bytes, false);
        Py_XINCREF((PyObject *)ref);
    } else if (storage != NULL) {
        ref = (py_ref_t *)py_ask(self, session, _ref_of, input->tensor);
    }
    Py_XDECREF(storage);
    if (ref != NULL && Py_TYPE((PyObject *)ref) != self->ref_type) {
        PyErr_SetString(PyExc_TypeError, "a session's _ref_of() returns a StorageRef");
        Py_CLEAR(ref);
    }
    return ref;
}

int py_operator_find(py_handler_t *self, PyObject *session) {
    for (int64_t k = 0; k < self->input_count; k++) {
        py_input_t *input = &self->inputs[k];
        if (input->ref == NULL && (input->ref = ref_of(self, session, input)) == NULL) {
            return -1;
        }
    }
    return 0;
}

static int reserve_marks(py_handler_t *self, int64_t node) {
    int64_t before = self->mark_capacity;
    if (py_reserve(self->marks, node, self->mark_capacity, 1) != 0) {
        return -1;
    }
    if (before < self->mark_capacity) {
        memset(self->marks + before, 0,
               (size_t)(self->mark_capacity - before) * sizeof(*self->marks));
    }
    return 0;
}

int py_operator_number(py_handler_t *self) {
    const rotor_recorder_t *book = &self->recorder->book;

    if (py_reserve(self->nodes, 0, self->node_capacity, self->input_count) != 0) {
        return -1;
    }
    self->node_count = self->hidden_count = 0;
    self->round++;
    /* A hidden input is one however else the operator uses it: such nodes come last. */
    for (int is_hidden = 1; is_hidden >= 0; is_hidden--) {
        for (int64_t k = 0; k < self->input_count; k++) {
            int64_t node = self->inputs[k].ref->node;
            if (self->inputs[k].is_hidden != is_hidden) {
                continue;
            }
            if (node < 0 || node >= book->node_count) {
                PyErr_SetString(PyExc_RuntimeError, "a storage has no number");
                return -1;
            }
            if (reserve_marks(self, node) != 0) {
                return -1;
            }
            if (self->marks[node] != self->round) {
                self->marks[node] = self->round;
                self->nodes[self->node_count++] = (int32_t)node;
                self->hidden_count += is_hidden;
            }
        }
    }
    for (int64_t k = 0; k < self->hidden_count; k++) {
        int32_t node = self->nodes[0];
        memmove(self->nodes, self->nodes + 1,
                (size_t)(self->node_count - 1) * sizeof(*self->nodes));
        self->nodes[self->node_count - 1] = node;
    }
    return 0;
}
