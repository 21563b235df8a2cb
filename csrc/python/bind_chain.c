#include "support.h"

/* In the order of the arguments. */
#define CHAIN_ARRAYS(entry)                                                                        \
    entry(forward_ns) entry(backward_ns) entry(x) entry(xbar) entry(fe_tmp) entry(fn_tmp)          \
        entry(b_tmp) entry(grad) entry(pgrad) entry(once)

enum { ARRAYS = 10 };

static PyObject *raise_chain(PyObject *module, int status, int64_t bad) {
    if (bad < 0) {
        return py_raise_status(module, status);
    }
    return PyErr_Format(PyExc_ValueError, "%s (entry %lld)", rotor_strerror(status),
                        (long long)bad);
}

static PyObject *py_chain_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
#define AS_TEXT(name) #name,
    static const char *const names[] = {CHAIN_ARRAYS(AS_TEXT)};
#undef AS_TEXT
    Py_buffer views[ARRAYS];
    rotor_chain_t source = {.n = 0};
    int64_t bad;
    py_chain_t *self = NULL;

    if (!py_has_no_names("Chain", kwargs) ||
        !py_are_counted("Chain", PyTuple_GET_SIZE(args), ARRAYS + 2, ARRAYS + 2)) {
        return NULL;
    }
    source.loss_tmp = PyLong_AsLongLong(PyTuple_GET_ITEM(args, ARRAYS));
    int holds = PyErr_Occurred() ? -1 : PyObject_IsTrue(PyTuple_GET_ITEM(args, ARRAYS + 1));
    source.hold_output = holds == 1;
    if (holds < 0 || py_get_arrays(&PyTuple_GET_ITEM(args, 0), names, ARRAYS, views) != 0) {
        return NULL;
    }
    source.n = views[0].shape[0];
    for (int k = 1; k < ARRAYS; k++) {
        bool longer = k == 2 || k == 7;
        if (py_check_length(&views[k], names[k], source.n + longer) != 0) {
            goto out;
        }
    }
    int at = 0;
#define TAKE(name) source.name = views[at++].buf;
    CHAIN_ARRAYS(TAKE)
#undef TAKE
    self = (py_chain_t *)type->tp_alloc(type, 0);
    int ret = self == NULL ? ROTOR_OK : rotor_chain_init(&self->chain, &source, &bad);
    if (ret != ROTOR_OK) {
        raise_chain(PyType_GetModule(type), ret, bad);
        Py_CLEAR(self);
    }
out:
    py_release_arrays(views, ARRAYS);
    return (PyObject *)self;
}

static void py_chain_dealloc(PyObject *object) {
    rotor_chain_free(&((py_chain_t *)object)->chain);
    py_dealloc(object);
}

PyDoc_STRVAR(simulate_doc,
             "simulate(ops, /)\n--\n\n"
             "Price a sequence: (time_ns, peak_bytes, peaks, lives), the last two int64 bytearrays.");

static PyObject *py_chain_simulate(PyObject *object, PyObject *argument) {
    PyObject *module = PyType_GetModule(Py_TYPE(object));
    py_chain_t *self = (py_chain_t *)object;
    PyObject *peaks = NULL;
    PyObject *lives = NULL;
    PyObject *answer = NULL;
    rotor_result_t result;
    Py_buffer view;
    int ret;

    if (PyObject_GetBuffer(argument, &view, PyBUF_C_CONTIGUOUS) != 0) {
        return NULL;
    }
    if (view.len % (Py_ssize_t)sizeof(rotor_op_t) != 0) {
        PyErr_SetString(PyExc_ValueError, "operations are pairs of int32: kind, stage");
        goto out;
    }
    Py_ssize_t length = view.len / (Py_ssize_t)sizeof(rotor_op_t);
    peaks = py_int64_bytes(NULL, length);
    lives = py_int64_bytes(NULL, length);
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
    {"simulate", py_chain_simulate, METH_O, simulate_doc},
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
