#include "support.h"

#include "timing.h"

PyDoc_STRVAR(
    stable_median_doc,
    "stable_median(samples, rel_tolerance, /)\n--\n\n"
    "Return (median, is_stable) of a sequence of times in ns: the median to the nearest ns, and\n"
    "whether its standard error is at most `rel_tolerance` times the median.");

static PyObject *py_stable_median(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    int64_t *samples = NULL;
    PyObject *tuple = NULL;
    PyObject *answer = NULL;
    int64_t median = 0;
    bool is_stable = false;

    if (!py_are_counted("stable_median", nargs, 2, 2)) {
        return NULL;
    }
    double tolerance = PyFloat_AsDouble(args[1]);
    if ((tolerance == -1.0 && PyErr_Occurred()) ||
        (tuple = PySequence_Tuple(args[0])) == NULL) {
        goto out;
    }
    Py_ssize_t count = PyTuple_GET_SIZE(tuple);
    if ((samples = rotor_malloc_array(count, sizeof(*samples))) == NULL) {
        PyErr_NoMemory();
        goto out;
    }
    for (Py_ssize_t k = 0; k < count; k++) {
        if (!py_get_integer(PyTuple_GET_ITEM(tuple, k), "a sample", -INT64_MAX / 2,
                            INT64_MAX / 2, &samples[k])) {
            goto out;
        }
    }
    int ret = rotor_timing_median(samples, count, tolerance, &median, &is_stable);
    if (ret == ROTOR_ERR_BAD_LENGTH) {
        PyErr_SetString(PyExc_ValueError, "a median needs at least one sample, got none");
    } else if (ret != ROTOR_OK) {
        py_raise_status(module, ret);
    } else {
        answer = Py_BuildValue("LN", (long long)median, PyBool_FromLong(is_stable));
    }
out:
    rotor_free(samples);
    Py_XDECREF(tuple);
    return answer;
}

PyDoc_STRVAR(are_enough_doc,
             "repeats_are_enough(count, is_stable, spent_ns, min_repeats, max_repeats, most_ns, "
             "min_comes_first)\n--\n\n"
             "Return whether `count` repeats end a measurement, which took `spent_ns` so far.");

static PyObject *py_repeats_are_enough(PyObject *module, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"count",       "is_stable", "spent_ns",        "min_repeats",
                            "max_repeats", "most_ns",   "min_comes_first", NULL};
    long long count, spent, least, most, most_ns;
    int is_stable, min_comes_first;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "LpLLLLp:repeats_are_enough", names, &count,
                                     &is_stable, &spent, &least, &most, &most_ns,
                                     &min_comes_first)) {
        return NULL;
    }
    rotor_timing_rule_t rule = {.min_repeats = least,
                                .max_repeats = most,
                                .most_ns = most_ns,
                                .min_comes_first = min_comes_first != 0};
    return PyBool_FromLong(rotor_timing_is_enough(&rule, count, is_stable != 0, spent));
}

static PyMethodDef functions[] = {
    {"stable_median", PY_FASTCALL(py_stable_median), stable_median_doc},
    {"repeats_are_enough", (PyCFunction)(void (*)(void))py_repeats_are_enough,
     METH_VARARGS | METH_KEYWORDS, are_enough_doc},
    {NULL, NULL, 0, NULL},
};

int py_add_timing(PyObject *module) { return PyModule_AddFunctions(module, functions); }
