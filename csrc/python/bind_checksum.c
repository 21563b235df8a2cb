#include "support.h"

#include <string.h>

#include "checksum.h"

/* The numbers of a tuple; -1 with an exception for too many, or for other objects. */
static int get_numbers(PyObject *tuple, int64_t *numbers) {
    if (!PyTuple_Check(tuple)) {
        PyErr_SetString(PyExc_TypeError, "sizes and strides must be tuples of int");
        return -1;
    }
    Py_ssize_t count = PyTuple_GET_SIZE(tuple);
    if (count > ROTOR_CHECKSUM_MAX_RANK) {
        PyErr_Format(PyExc_ValueError, "%zd dimensions, expected at most %d", count,
                     ROTOR_CHECKSUM_MAX_RANK);
        return -1;
    }
    for (Py_ssize_t k = 0; k < count; k++) {
        numbers[k] = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, k));
        if (numbers[k] == -1 && PyErr_Occurred()) {
            return -1;
        }
    }
    return (int)count;
}

PyDoc_STRVAR(checksum_doc,
             "checksum(address, item_bytes, sizes, strides, /)\n--\n\n"
             "Return a checksum of 64 bits, as a signed number, of a strided array in memory.\n"
             "\n"
             "`address` is that of the first element, `strides` are in elements.");

static PyObject *py_checksum(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    int64_t sizes[ROTOR_CHECKSUM_MAX_RANK];
    int64_t strides[ROTOR_CHECKSUM_MAX_RANK];
    uint64_t sum = 0;
    int ret;

    if (nargs != 4) {
        return PyErr_Format(PyExc_TypeError,
                            "checksum takes an address, bytes, sizes and strides");
    }
    void *data = PyLong_AsVoidPtr(args[0]);
    if (data == NULL && PyErr_Occurred()) {
        return NULL;
    }
    int64_t item_bytes = PyLong_AsLongLong(args[1]);
    if (item_bytes == -1 && PyErr_Occurred()) {
        return NULL;
    }
    int rank = get_numbers(args[2], sizes);
    int strided = rank < 0 ? -1 : get_numbers(args[3], strides);
    if (strided < 0) {
        return NULL;
    }
    if (rank != strided) {
        return PyErr_Format(PyExc_ValueError, "%d sizes and %d strides", rank, strided);
    }
    Py_BEGIN_ALLOW_THREADS
    ret = rotor_checksum(data, item_bytes, rank, sizes, strides, &sum);
    Py_END_ALLOW_THREADS if (ret != ROTOR_OK) { return py_raise_status(module, ret); }
    return PyLong_FromLongLong((long long)(int64_t)sum);
}

PyDoc_STRVAR(same_bytes_doc, "same_bytes(a, b, /)\n--\n\n"
                             "Return whether two buffers hold the same bytes.");

static PyObject *py_same_bytes(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    Py_buffer a;
    Py_buffer b;
    bool same;

    if (nargs != 2) {
        return PyErr_Format(PyExc_TypeError, "same_bytes takes two buffers");
    }
    if (PyObject_GetBuffer(args[0], &a, PyBUF_SIMPLE) != 0) {
        return NULL;
    }
    if (PyObject_GetBuffer(args[1], &b, PyBUF_SIMPLE) != 0) {
        PyBuffer_Release(&a);
        return NULL;
    }
    same = a.len == b.len && memcmp(a.buf, b.buf, (size_t)a.len) == 0;
    PyBuffer_Release(&a);
    PyBuffer_Release(&b);
    return PyBool_FromLong(same);
}

static PyMethodDef functions[] = {
    {"same_bytes", PY_FASTCALL(py_same_bytes), same_bytes_doc},
    {"checksum", PY_FASTCALL(py_checksum), checksum_doc},
    {NULL, NULL, 0, NULL},
};

int py_add_checksum(PyObject *module) { return PyModule_AddFunctions(module, functions); }
