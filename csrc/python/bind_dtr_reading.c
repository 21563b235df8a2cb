#include "bind_dtr_private.h"

#include <string.h>

#include "vector.h"

enum { TAG_TENSOR = 1, TAG_LIST, TAG_INT, TAG_FLOAT, TAG_VALUE, TAG_NAME };

static inline PyObject *get(py_handler_t *self, PyObject *object, int name) {
    return PyObject_GetAttr(object, self->names[name]);
}

static inline PyObject *ask(py_handler_t *self, PyObject *object, int name) {
    return PyObject_CallMethodNoArgs(object, self->names[name]);
}

static int append(py_handler_t *self, int64_t value) {
    if (ROTOR_RESERVE(self->key, self->key_count, self->key_capacity, 1) != ROTOR_OK) {
        PyErr_NoMemory();
        return -1;
    }
    self->key[self->key_count++] = value;
    return 0;
}

static int append_all(py_handler_t *self, const int64_t *values, int64_t count) {
    if (ROTOR_RESERVE(self->key, self->key_count, self->key_capacity, count) != ROTOR_OK) {
        PyErr_NoMemory();
        return -1;
    }
    for (int64_t k = 0; k < count; k++) {
        self->key[self->key_count++] = values[k];
    }
    return 0;
}

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

static enum py_reading is_strided(py_handler_t *self, PyObject *tensor) {
    PyObject *layout = get(self, tensor, NAME_layout);
    if (layout == NULL) {
        return READ_ERROR;
    }
    bool is = layout == self->parts[PART_STRIDED];
    Py_DECREF(layout);
    return is ? READ_OK : READ_SLOW;
}

/* Without DLPack, or where it has no word for the tensor. */
static enum py_reading read_attributes(py_handler_t *self, py_input_t *input) {
    enum py_reading found = is_strided(self, input->tensor);
    if (found != READ_OK) {
        return found;
    }
    PyObject *shape = get(self, input->tensor, NAME_shape);
    if (shape == NULL) {
        PyErr_Clear(); /* a nested tensor: Python refuses it */
        return READ_SLOW;
    }
    PyObject *stride = ask(self, input->tensor, NAME_stride);
    PyObject *dtype = stride == NULL ? NULL : get(self, input->tensor, NAME_dtype);
    PyObject *is_cpu = dtype == NULL ? NULL : get(self, input->tensor, NAME_is_cpu);
    int is_complex = is_cpu == NULL ? -1 : PySequence_Contains(self->parts[PART_COMPLEX], dtype);
    if (is_complex >= 0) {
        input->is_cpu = is_cpu == Py_True;
        input->is_complex = is_complex;
        input->dims = (int32_t)PyTuple_GET_SIZE(shape);
    }
    found = is_complex < 0 || append(self, TAG_TENSOR | (int64_t)input->dims << 8) != 0 ||
                    append(self, (int64_t)(intptr_t)dtype | input->is_cpu) != 0
                ? READ_ERROR
                : READ_OK;
    input->first = self->key_count;
    if (found == READ_OK && (append_sizes(self, shape) != 0 || append_sizes(self, stride) != 0)) {
        found = READ_ERROR;
    }
    Py_XDECREF(shape);
    Py_XDECREF(stride);
    Py_XDECREF(dtype);
    Py_XDECREF(is_cpu);
    return found;
}

static enum py_reading read_tensor(py_handler_t *self, PyObject *tensor, bool is_written) {
    py_dl_tensor_t view;
    if (ROTOR_RESERVE(self->inputs, self->input_count, self->input_capacity, 1) != ROTOR_OK) {
        PyErr_NoMemory();
        return READ_ERROR;
    }
    py_input_t *input = &self->inputs[self->input_count++];
    *input = (py_input_t){.tensor = tensor, .is_written = is_written};
    if (self->exchange == NULL) {
        return read_attributes(self, input);
    }
    if (self->exchange->view(tensor, &view) != 0) {
        PyErr_Clear();
        return read_attributes(self, input);
    }
    if (view.dims > 0 && view.strides == NULL) {
        return read_attributes(self, input);
    }
    input->dims = view.dims;
    input->is_cpu = view.device_type == ROTOR_DL_CPU;
    input->is_complex = view.dtype_code == ROTOR_DL_COMPLEX;
    int64_t head[2] = {TAG_TENSOR | (int64_t)view.dims << 8,
                       (int64_t)view.dtype_code | (int64_t)view.dtype_bits << 8 |
                           (int64_t)view.dtype_lanes << 16 | (int64_t)view.device_type << 32};
    if (append_all(self, head, 2) != 0) {
        return READ_ERROR;
    }
    input->first = self->key_count;
    return append_all(self, view.shape, view.dims) == 0 &&
                   append_all(self, view.strides, view.dims) == 0
               ? READ_OK
               : READ_ERROR;
}

enum py_reading py_operator_is_plain(py_handler_t *self, PyObject *tensor) {
    py_dl_tensor_t view;
    if (self->exchange != NULL && self->device_type != 0) {
        if (self->exchange->view(tensor, &view) == 0) {
            return view.device_type == self->device_type &&
                           (self->is_cpu || view.device_index == self->device_index)
                       ? READ_OK
                       : READ_SLOW;
        }
        PyErr_Clear();
    }
    enum py_reading found = is_strided(self, tensor);
    if (found != READ_OK) {
        return found;
    }
    PyObject *where = get(self, tensor, self->is_cpu ? NAME_is_cpu : NAME_device);
    int is_here = where == NULL  ? -1
                  : self->is_cpu ? where == Py_True
                                 : PyObject_RichCompareBool(where, self->device, Py_EQ);
    Py_XDECREF(where);
    return is_here < 0 ? READ_ERROR : is_here ? READ_OK : READ_SLOW;
}

static bool is_tensor(py_handler_t *self, PyObject *value) {
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

static enum py_reading read_value(py_handler_t *self, const py_kernel_t *kernel, PyObject *value,
                                  bool is_written) {
    PyTypeObject *type = Py_TYPE(value);
    int status;

    if (value == Py_None || type == &PyBool_Type) {
        status = append(self, (int64_t)(intptr_t)value);
    } else if (type == &PyLong_Type) {
        int overflow;
        int64_t number = PyLong_AsLongLongAndOverflow(value, &overflow);
        if (overflow != 0) {
            return READ_SLOW;
        }
        status = append(self, TAG_INT) != 0 ? -1 : append(self, number);
    } else if (type == &PyFloat_Type) {
        int64_t bits = 0;
        if (kernel->sizes_by_value) {
            double number = PyFloat_AS_DOUBLE(value);
            memcpy(&bits, &number, sizeof(bits));
        }
        status = append(self, TAG_FLOAT) != 0 ? -1 : append(self, bits);
    } else if (is_tensor(self, value)) {
        return read_tensor(self, value, is_written);
    } else if (PyList_Check(value) || PyTuple_Check(value)) {
        if (append(self, TAG_LIST | (int64_t)PySequence_Fast_GET_SIZE(value) << 8) != 0) {
            return READ_ERROR;
        }
        for (Py_ssize_t k = 0; k < PySequence_Fast_GET_SIZE(value); k++) {
            enum py_reading found =
                read_value(self, kernel, PySequence_Fast_GET_ITEM(value, k), is_written);
            if (found != READ_OK) {
                return found;
            }
        }
        return READ_OK;
    } else {
        /* Settings such as data types count by value; generators, complex numbers by type. */
        Py_hash_t hash = 0;
        if ((type == &PyUnicode_Type || is_setting(self, type)) &&
            (hash = PyObject_Hash(value)) == -1) {
            return READ_ERROR;
        }
        status = append(self, TAG_VALUE) == 0 && append(self, (int64_t)(intptr_t)type) == 0
                     ? append(self, (int64_t)hash)
                     : -1;
    }
    return status == 0 ? READ_OK : READ_ERROR;
}

static bool writes_to(const py_kernel_t *kernel, Py_ssize_t position) {
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(kernel->written); k++) {
        if (PyLong_AsSsize_t(PyTuple_GET_ITEM(kernel->written, k)) == position) {
            return true;
        }
    }
    return false;
}

enum py_reading py_operator_read(py_handler_t *self, const py_kernel_t *kernel, PyObject *args,
                                 PyObject *kwargs) {
    enum py_reading found = READ_OK;

    if (append(self, (int64_t)(intptr_t)kernel->call) != 0) {
        return READ_ERROR;
    }
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(args) && found == READ_OK; k++) {
        found = read_value(self, kernel, PyTuple_GET_ITEM(args, k), writes_to(kernel, k));
    }
    if (kwargs != NULL) {
        Py_ssize_t at = 0;
        PyObject *name, *value;
        while (found == READ_OK && PyDict_Next(kwargs, &at, &name, &value)) {
            if (append(self, TAG_NAME) != 0 || append(self, (int64_t)PyObject_Hash(name)) != 0) {
                return READ_ERROR;
            }
            found = read_value(self, kernel, value, false);
        }
    }
    return found;
}

void py_operator_clear(py_handler_t *self) {
    while (self->input_count > 0) {
        py_input_t *input = &self->inputs[--self->input_count];
        Py_XDECREF(input->ref);
    }
    self->key_count = self->node_count = 0;
}

/* A number of the program that became a tensor just now: it counts from now on. */
static PyObject *adopt(py_handler_t *self, PyObject *storage, PyObject *key) {
    py_recorder_t *recorder = self->recorder;
    int32_t node;
    PyObject *nbytes = ask(self, storage, NAME_nbytes);
    int64_t bytes = nbytes == NULL ? -1 : PyLong_AsLongLong(nbytes);
    Py_XDECREF(nbytes);
    PyObject *ref = bytes < 0 ? NULL : py_ref_make(self->ref_type, storage, self->gone, key);
    if (ref == NULL || py_book_reserve(recorder, 1) != 0 ||
        PyDict_SetItem(self->table, key, ref) != 0) {
        Py_XDECREF(ref);
        return NULL;
    }
    if (rotor_recorder_source(&recorder->book, bytes, false, &node) != ROTOR_OK) {
        (void)PyDict_DelItem(self->table, key);
        Py_DECREF(ref);
        return PyErr_NoMemory();
    }
    recorder->places[node] = Py_NewRef(ref);
    ((py_ref_t *)ref)->node = node;
    if (py_book_settle(recorder) != 0) {
        Py_CLEAR(ref);
    }
    return ref;
}

static PyObject *ref_of(py_handler_t *self, PyObject *session, const py_input_t *input) {
    PyObject *storage = ask(self, input->tensor, NAME_untyped_storage);
    PyObject *key = storage == NULL ? NULL : PyObject_GetAttr(storage, self->parts[PART_KEY_NAME]);
    PyObject *ref = key == NULL ? NULL : PyDict_GetItemWithError(self->table, key);
    if (ref != NULL) {
        Py_INCREF(ref);
    } else if (key != NULL && !PyErr_Occurred()) {
        if (input->dims == 0 && self->is_cpu && input->is_cpu) {
            ref = adopt(self, storage, key);
        } else {
            ref = PyObject_CallMethodOneArg(session, self->names[NAME__ref_of], input->tensor);
        }
    }
    Py_XDECREF(key);
    Py_XDECREF(storage);
    if (ref != NULL && Py_TYPE(ref) != self->ref_type) {
        PyErr_SetString(PyExc_TypeError, "the table of storages holds StorageRef");
        Py_CLEAR(ref);
    }
    return ref;
}

enum py_reading py_operator_find(py_handler_t *self, PyObject *session) {
    const rotor_recorder_t *book = &self->recorder->book;
    int64_t round = ++self->round;

    if (ROTOR_RESERVE(self->nodes, 0, self->node_capacity, self->input_count) != ROTOR_OK) {
        PyErr_NoMemory();
        return READ_ERROR;
    }
    for (int64_t k = 0; k < self->input_count; k++) {
        PyObject *ref = ref_of(self, session, &self->inputs[k]);
        if (ref == NULL) {
            return READ_ERROR;
        }
        self->inputs[k].ref = ref;
        int64_t node = ((py_ref_t *)ref)->node;
        if (node < 0 || node >= book->node_count) {
            PyErr_SetString(PyExc_RuntimeError, "a storage has no number");
            return READ_ERROR;
        }
        int64_t before = self->mark_capacity;
        if (ROTOR_RESERVE(self->marks, node, self->mark_capacity, 1) != ROTOR_OK) {
            PyErr_NoMemory();
            return READ_ERROR;
        }
        if (before < self->mark_capacity) {
            memset(self->marks + before, 0,
                   (size_t)(self->mark_capacity - before) * sizeof(*self->marks));
        }
        if (self->marks[node] != round) {
            self->marks[node] = (int32_t)round;
            self->nodes[self->node_count++] = (int32_t)node;
        }
    }
    return READ_OK;
}

static PyObject *bits_of(py_handler_t *self, const py_input_t *input) {
    PyObject *conjugate =
        input->is_complex ? ask(self, input->tensor, NAME_is_conj) : Py_NewRef(Py_False);
    PyObject *negative = conjugate == NULL ? NULL : ask(self, input->tensor, NAME_is_neg);
    PyObject *result = NULL;
    if (negative != NULL) {
        result = conjugate == Py_False && negative == Py_False
                     ? Py_NewRef(Py_None)
                     : PyTuple_Pack(2, conjugate, negative);
    }
    Py_XDECREF(conjugate);
    Py_XDECREF(negative);
    return result;
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

PyObject *py_operator_spec(py_handler_t *self, const py_input_t *input) {
    const int64_t *sizes = self->key + input->first;
    PyObject *items[7] = {
        PyLong_FromLongLong(((py_ref_t *)input->ref)->node),
        sizes_of(sizes, input->dims),
        sizes_of(sizes + input->dims, input->dims),
        ask(self, input->tensor, NAME_storage_offset),
        get(self, input->tensor, NAME_dtype),
        input->is_cpu ? Py_NewRef(self->parts[PART_CPU]) : get(self, input->tensor, NAME_device),
        bits_of(self, input),
    };
    PyObject *spec = PyTuple_New(7);
    bool is_complete = spec != NULL;
    for (int k = 0; k < 7; k++) {
        is_complete = is_complete && items[k] != NULL;
    }
    for (int k = 0; k < 7; k++) {
        if (is_complete) {
            PyTuple_SET_ITEM(spec, k, items[k]);
        } else {
            Py_XDECREF(items[k]);
        }
    }
    if (!is_complete) {
        Py_CLEAR(spec);
    }
    return spec;
}

PyObject *py_operator_pattern(py_handler_t *self, PyObject *value, int64_t *at) {
    if (is_tensor(self, value)) {
        return py_operator_spec(self, &self->inputs[(*at)++]);
    }
    if (!PyList_Check(value) && !PyTuple_Check(value)) {
        return Py_NewRef(value);
    }
    PyObject *list = PyList_New(PySequence_Fast_GET_SIZE(value));
    for (Py_ssize_t k = 0; list != NULL && k < PyList_GET_SIZE(list); k++) {
        PyObject *item = py_operator_pattern(self, PySequence_Fast_GET_ITEM(value, k), at);
        if (item == NULL) {
            Py_CLEAR(list);
        } else {
            PyList_SET_ITEM(list, k, item);
        }
    }
    return list;
}
