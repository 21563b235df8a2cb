#include "support.h"

#include <string.h>

static const char *const array_names[] = {
    "forward_ns", "backward_ns", "x", "xbar", "fe_tmp", "fn_tmp", "b_tmp", "grad", "pgrad",
    "once"};
enum { ARRAYS = 10 };

static PyObject *raise_chain(PyObject *module, int status, int64_t bad) {
    if (bad < 0) {
        return py_raise_status(module, status);
    }
    return PyErr_Format(PyExc_ValueError, "%s (entry %lld)", rotor_strerror(status),
                        (long long)bad);
}

static PyObject *py_chain_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *module = PyType_GetModule(type);
    PyObject *arrays[ARRAYS];
    Py_buffer views[ARRAYS];
    int count = 0;
    int hold_output;
    long long loss_tmp;
    py_chain_t *self = NULL;

    if (module == NULL || (kwargs != NULL && PyDict_GET_SIZE(kwargs) != 0)) {
        return PyErr_Format(PyExc_TypeError, "Chain takes positional arguments only");
    }
    if (!PyArg_ParseTuple(args, "OOOOOOOOOOLp:Chain", &arrays[0], &arrays[1], &arrays[2],
                          &arrays[3], &arrays[4], &arrays[5], &arrays[6], &arrays[7], &arrays[8],
                          &arrays[9], &loss_tmp, &hold_output)) {
        return NULL;
    }
    Py_ssize_t n = -1;
    for (; count < ARRAYS; count++) {
        bool longer = count == 2 || count == 7;
        if (py_get_int64(arrays[count], array_names[count], n + (n >= 0 && longer),
                         &views[count]) != 0) {
            goto out;
        }
        n = count == 0 ? views[0].shape[0] : n;
    }
    self = (py_chain_t *)type->tp_alloc(type, 0);
    if (self != NULL) {
        int64_t bad;
        rotor_chain_t source;
        memset(&source, 0, sizeof(source));
        source.n = n;
        source.forward_ns = views[0].buf;
        source.backward_ns = views[1].buf;
        source.x = views[2].buf;
        source.xbar = views[3].buf;
        source.fe_tmp = views[4].buf;
        source.fn_tmp = views[5].buf;
        source.b_tmp = views[6].buf;
        source.grad = views[7].buf;
        source.pgrad = views[8].buf;
        source.once = views[9].buf;
        source.loss_tmp = loss_tmp;
        source.hold_output = hold_output != 0;
        int ret = rotor_chain_init(&self->chain, &source, &bad);
        if (ret != ROTOR_OK) {
            raise_chain(module, ret, bad);
            Py_CLEAR(self);
        }
    }
out:
    while (count-- > 0) {
        PyBuffer_Release(&views[count]);
    }
    return (PyObject *)self;
}

static void py_chain_dealloc(PyObject *object) {
    rotor_chain_free(&((py_chain_t *)object)->chain);
    py_dealloc(object);
}

PyDoc_STRVAR(simulate_doc,
             "simulate(ops, /)\n--\n\n"
             "Price a sequence: (time_ns, peak_bytes, peaks, lives), the last two int64 bytearrays.");

static PyObject *py_chain_simulate(PyObject *object, PyTypeObject *cls, PyObject *const *args,
                                   Py_ssize_t nargs, PyObject *names) {
    PyObject *module = PyType_GetModule(cls);
    py_chain_t *self = (py_chain_t *)object;
    PyObject *peaks = NULL;
    PyObject *lives = NULL;
    PyObject *answer = NULL;
    rotor_result_t result;
    Py_buffer view;
    int ret;

    if (nargs != 1 || names != NULL) {
        return PyErr_Format(PyExc_TypeError, "simulate takes one positional argument");
    }
    if (PyObject_GetBuffer(args[0], &view, PyBUF_C_CONTIGUOUS) != 0) {
        return NULL;
    }
    if (view.len % (Py_ssize_t)sizeof(rotor_op_t) != 0) {
        PyErr_SetString(PyExc_ValueError, "operations are pairs of int32: kind, stage");
        goto out;
    }
    Py_ssize_t length = view.len / (Py_ssize_t)sizeof(rotor_op_t);
    peaks = PyByteArray_FromStringAndSize(NULL, length * (Py_ssize_t)sizeof(int64_t));
    lives = PyByteArray_FromStringAndSize(NULL, length * (Py_ssize_t)sizeof(int64_t));
    if (peaks == NULL || lives == NULL) {
        goto out;
    }
    int64_t *peaks_data = (int64_t *)(void *)PyByteArray_AS_STRING(peaks);
    int64_t *lives_data = (int64_t *)(void *)PyByteArray_AS_STRING(lives);
    Py_BEGIN_ALLOW_THREADS;
    ret = rotor_simulate(&self->chain, view.buf, length, &result, peaks_data, lives_data);
    Py_END_ALLOW_THREADS;
    if (ret == ROTOR_OK) {
        answer = Py_BuildValue("LLOO", (long long)result.time_ns, (long long)result.peak, peaks,
                               lives);
    } else if (result.failed_at >= 0) {
        py_raise_number(py_state(module)->invalid_sequence_error,
                        PyUnicode_FromString(rotor_strerror(ret)), result.failed_at);
    } else {
        py_raise_status(module, ret);
    }
out:
    PyBuffer_Release(&view);
    Py_XDECREF(peaks);
    Py_XDECREF(lives);
    return answer;
}

static PyObject *py_chain_ideal(PyObject *object, void *closure) {
    return PyLong_FromLongLong(rotor_chain_ideal_ns(&((py_chain_t *)object)->chain));
}

static PyMethodDef chain_methods[] = {
    {"simulate", (PyCFunction)(void (*)(void))py_chain_simulate,
     METH_METHOD | METH_FASTCALL | METH_KEYWORDS, simulate_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef chain_getset[] = {
    {"ideal_ns", py_chain_ideal, NULL, "Time without recomputation, ns.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyDoc_STRVAR(chain_doc, "The cost model of a chain, from int64 arrays (see rotor.chain.Chain).");

static PyType_Slot chain_slots[] = {
    {Py_tp_new, py_chain_new},    {Py_tp_dealloc, py_chain_dealloc}, {Py_tp_methods, chain_methods},
    {Py_tp_getset, chain_getset}, {Py_tp_doc, (void *)chain_doc},    {0, NULL},
};

int py_add_chain(PyObject *module) {
    return py_add_type(module, "rotor._core.Chain", sizeof(py_chain_t), 0, chain_slots,
                       &py_state(module)->chain_type);
}
