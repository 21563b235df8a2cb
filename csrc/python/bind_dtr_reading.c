#include "bind_dtr_handler.h"

#include <string.h>

#include "vector.h"

enum { TAG_TENSOR = 1, TAG_LIST, TAG_INT, TAG_FLOAT, TAG_VALUE, TAG_NAME };

static inline PyObject *get(rotor_handler_t *self, PyObject *object, int name) {
    return PyObject_GetAttr(object, self->names[name]);
}

static inline PyObject *ask(rotor_handler_t *self, PyObject *object, int name) {
    return PyObject_CallMethodNoArgs(object, self->names[name]);
}

static int append(rotor_handler_t *self, int64_t value) {
    if (ROTOR_RESERVE(self->key, self->key_count, self->key_capacity, 1) != ROTOR_OK) {
        PyErr_NoMemory();
        return -1;
    }
    self->key[self->key_count++] = value;
    return 0;
}

static int append_sizes(rotor_handler_t *self, PyObject *sizes) {
    if (!PyTuple_Check(sizes)) {
        PyErr_SetString(PyExc_TypeError, "the sizes of a tensor must be a tuple");
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

enum rotor_reading rotor_handler_is_strided(rotor_handler_t *self, PyObject *tensor) {
    PyObject *layout = get(self, tensor, NAME_layout);
    if (layout == NULL) {
        return READ_ERROR;
    }
    bool is_strided = layout == self->parts[PART_STRIDED];
    Py_DECREF(layout);
    return is_strided ? READ_OK : READ_SLOW;
}

static enum rotor_reading read_tensor(rotor_handler_t *self, PyObject *tensor, bool is_written) {
    enum rotor_reading found = rotor_handler_is_strided(self, tensor);
    if (found != READ_OK) {
        return found;
    }
    if (ROTOR_RESERVE(self->inputs, self->input_count, self->input_capacity, 1) != ROTOR_OK) {
        PyErr_NoMemory();
        return READ_ERROR;
    }
    rotor_input_t *input = &self->inputs[self->input_count++];
    *input = (rotor_input_t){.tensor = tensor, .is_written = is_written};
    input->shape = get(self, tensor, NAME_shape);
    input->stride = input->shape == NULL ? NULL : ask(self, tensor, NAME_stride);
    input->dtype = input->stride == NULL ? NULL : get(self, tensor, NAME_dtype);
    PyObject *is_cpu = input->dtype == NULL ? NULL : get(self, tensor, NAME_is_cpu);
    if (is_cpu == NULL) {
        return READ_ERROR;
    }
    input->is_cpu = is_cpu == Py_True;
    Py_DECREF(is_cpu);
    return append(self, TAG_TENSOR | (int64_t)PyTuple_GET_SIZE(input->shape) << 8) == 0 &&
                   append(self, (int64_t)(intptr_t)input->dtype | input->is_cpu) == 0 &&
                   append_sizes(self, input->shape) == 0 && append_sizes(self, input->stride) == 0
               ? READ_OK
               : READ_ERROR;
}

static bool is_tensor(rotor_handler_t *self, PyObject *value) {
    PyTypeObject *tensor_type = (PyTypeObject *)self->parts[PART_TENSOR_TYPE];
    return Py_TYPE(value) == tensor_type || PyType_IsSubtype(Py_TYPE(value), tensor_type);
}

static enum rotor_reading read_value(rotor_handler_t *self, const rotor_kernel_t *kernel,
                                     PyObject *value, bool is_written) {
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
            enum rotor_reading found =
                read_value(self, kernel, PySequence_Fast_GET_ITEM(value, k), is_written);
            if (found != READ_OK) {
                return found;
            }
        }
        return READ_OK;
    } else {
        /* Settings: data types, layouts, devices, names; generators and other numbers by type. */
        Py_hash_t hash = 0;
        if (!PyComplex_Check(value) && type->tp_hash != NULL &&
            type->tp_hash != PyObject_HashNotImplemented) {
            hash = PyObject_Hash(value);
            if (hash == -1) {
                PyErr_Clear();
            }
        }
        status = append(self, TAG_VALUE) == 0 && append(self, (int64_t)(intptr_t)type) == 0
                     ? append(self, (int64_t)hash)
                     : -1;
    }
    return status == 0 ? READ_OK : READ_ERROR;
}

static bool writes_to(const rotor_kernel_t *kernel, Py_ssize_t position) {
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(kernel->written); k++) {
        if (PyLong_AsSsize_t(PyTuple_GET_ITEM(kernel->written, k)) == position) {
            return true;
        }
    }
    return false;
}

enum rotor_reading rotor_handler_read(rotor_handler_t *self, const rotor_kernel_t *kernel,
                                      PyObject *args, PyObject *kwargs) {
    enum rotor_reading found = READ_OK;

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

void rotor_handler_clear(rotor_handler_t *self) {
    while (self->input_count > 0) {
        rotor_input_t *input = &self->inputs[--self->input_count];
        Py_XDECREF(input->shape);
        Py_XDECREF(input->stride);
        Py_XDECREF(input->dtype);
        Py_XDECREF(input->ref);
    }
    self->key_count = self->node_count = 0;
}

/* A number of the program that became a tensor just now: it counts from now on. */
static PyObject *adopt(rotor_handler_t *self, PyObject *storage, PyObject *key) {
    recorder_object_t *recorder = self->recorder;
    int32_t node;
    PyObject *nbytes = ask(self, storage, NAME_nbytes);
    int64_t bytes = nbytes == NULL ? -1 : PyLong_AsLongLong(nbytes);
    Py_XDECREF(nbytes);
    PyObject *gone = bytes < 0 ? NULL : PyObject_GetAttrString((PyObject *)self, "gone");
    PyObject *ref = gone == NULL ? NULL : rotor_ref_new(self->ref_type, storage, gone, key);
    Py_XDECREF(gone);
    if (ref == NULL || rotor_recorder_reserve(recorder, 1) != 0 ||
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
    ((rotor_ref_object_t *)ref)->node = node;
    if (rotor_recorder_settle(recorder) != 0) {
        Py_CLEAR(ref);
    }
    return ref;
}

static PyObject *ref_of(rotor_handler_t *self, PyObject *session, const rotor_input_t *input) {
    PyObject *storage = ask(self, input->tensor, NAME_untyped_storage);
    PyObject *key = storage == NULL ? NULL : PyObject_GetAttr(storage, self->parts[PART_KEY_NAME]);
    PyObject *ref = key == NULL ? NULL : PyDict_GetItemWithError(self->table, key);
    if (ref != NULL) {
        Py_INCREF(ref);
    } else if (key != NULL && !PyErr_Occurred()) {
        if (PyTuple_GET_SIZE(input->shape) == 0 && self->is_cpu && input->is_cpu) {
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

enum rotor_reading rotor_handler_find(rotor_handler_t *self, PyObject *session) {
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
        int64_t node = ((rotor_ref_object_t *)ref)->node;
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

static PyObject *bits_of(rotor_handler_t *self, const rotor_input_t *input) {
    PyObject *conjugate = Py_NewRef(Py_False);
    PyObject *negative = ask(self, input->tensor, NAME_is_neg);
    int is_complex =
        negative == NULL ? -1 : PySequence_Contains(self->parts[PART_COMPLEX], input->dtype);
    if (is_complex == 1) {
        Py_SETREF(conjugate, ask(self, input->tensor, NAME_is_conj));
    }
    PyObject *result = NULL;
    if (conjugate != NULL && is_complex >= 0) {
        result = conjugate == Py_False && negative == Py_False
                     ? Py_NewRef(Py_None)
                     : PyTuple_Pack(2, conjugate, negative);
    }
    Py_XDECREF(conjugate);
    Py_XDECREF(negative);
    return result;
}

PyObject *rotor_handler_spec(rotor_handler_t *self, const rotor_input_t *input) {
    PyObject *spec = PyTuple_New(7);
    PyObject *node = PyLong_FromLongLong(((rotor_ref_object_t *)input->ref)->node);
    PyObject *offset = ask(self, input->tensor, NAME_storage_offset);
    PyObject *device =
        input->is_cpu ? Py_NewRef(self->parts[PART_CPU]) : get(self, input->tensor, NAME_device);
    PyObject *bits = offset == NULL ? NULL : bits_of(self, input);
    if (spec == NULL || node == NULL || offset == NULL || device == NULL || bits == NULL) {
        Py_XDECREF(spec);
        Py_XDECREF(node);
        Py_XDECREF(offset);
        Py_XDECREF(device);
        Py_XDECREF(bits);
        return NULL;
    }
    PyTuple_SET_ITEM(spec, 0, node);
    PyTuple_SET_ITEM(spec, 1, Py_NewRef(input->shape));
    PyTuple_SET_ITEM(spec, 2, Py_NewRef(input->stride));
    PyTuple_SET_ITEM(spec, 3, offset);
    PyTuple_SET_ITEM(spec, 4, Py_NewRef(input->dtype));
    PyTuple_SET_ITEM(spec, 5, device);
    PyTuple_SET_ITEM(spec, 6, bits);
    return spec;
}

PyObject *rotor_handler_pattern(rotor_handler_t *self, PyObject *value, int64_t *at) {
    if (is_tensor(self, value)) {
        return rotor_handler_spec(self, &self->inputs[(*at)++]);
    }
    if (!PyList_Check(value) && !PyTuple_Check(value)) {
        return Py_NewRef(value);
    }
    PyObject *list = PyList_New(PySequence_Fast_GET_SIZE(value));
    for (Py_ssize_t k = 0; list != NULL && k < PyList_GET_SIZE(list); k++) {
        PyObject *item = rotor_handler_pattern(self, PySequence_Fast_GET_ITEM(value, k), at);
        if (item == NULL) {
            Py_CLEAR(list);
        } else {
            PyList_SET_ITEM(list, k, item);
        }
    }
    return list;
}
