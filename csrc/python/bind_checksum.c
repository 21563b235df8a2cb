#include "binding.h"

#include "checksum.h"

/* The numbers of a tuple; -1 with an exception set where there are too many, or no numbers. */
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

// checksum(address, item_bytes, sizes, strides, /) -> int
PyDoc_STRVAR(checksum_doc,
             "checksum(address, item_bytes, sizes, strides, /)\n--\n\n"
             "A checksum of 64 bits, as a signed number, of a strided array in memory.\n"
             "\n"
             "`address` is that of the first element, `strides` are in elements.");

static PyObject *checksum(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
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
    Py_END_ALLOW_THREADS
    if (ret != ROTOR_OK) {
        return rotor_raise_status(module, ret);
    }
    return PyLong_FromLongLong((long long)(int64_t)sum);
}

static PyMethodDef functions[] = {
    {"checksum", (PyCFunction)(void (*)(void))checksum, METH_FASTCALL, checksum_doc},
    {NULL, NULL, 0, NULL},
};

int rotor_add_checksum(PyObject *module) { return PyModule_AddFunctions(module, functions); }
