#include "bind_candidate.h"

#include <math.h>

/* The argument of a Python heuristic: `engine` is NULL outside the call. */

typedef struct {
    PyObject_HEAD
    rotor_eviction_t *engine;
    int64_t now;
    int32_t storage;
    bool has_classes;
} py_candidate_t;

enum candidate_field {
    CANDIDATE_STORAGE,
    CANDIDATE_BYTES,
    CANDIDATE_COMPUTE,
    CANDIDATE_LAST_ACCESS,
    CANDIDATE_NOW,
    CANDIDATE_STALENESS,
    CANDIDATE_AFTER,
    CANDIDATE_BEFORE,
    CANDIDATE_CLASSES
};

static PyObject *py_candidate_get(PyObject *object, void *closure) {
    py_candidate_t *self = (py_candidate_t *)object;
    rotor_eviction_t *engine = self->engine;

    if (engine == NULL) {
        return PyErr_Format(PyExc_RuntimeError,
                            "a Candidate can be read only while the heuristic is being called");
    }
    const rotor_candidate_t *candidate = &engine->candidates[self->storage];
    enum candidate_field field = (enum candidate_field)(uintptr_t)closure;
    if (field == CANDIDATE_CLASSES && !self->has_classes) {
        return PyErr_Format(PyExc_ValueError, "class_ns needs classes of evicted storages, which "
                            "runtime V1 does not keep");
    }
    switch (field) {
    case CANDIDATE_STORAGE:
        return PyLong_FromLong(self->storage);
    case CANDIDATE_BYTES:
        return PyLong_FromLongLong(candidate->bytes);
    case CANDIDATE_COMPUTE:
        return PyLong_FromLongLong(candidate->compute_ns);
    case CANDIDATE_LAST_ACCESS:
        return PyLong_FromLongLong(candidate->last_access);
    case CANDIDATE_NOW:
        return PyLong_FromLongLong(self->now);
    case CANDIDATE_STALENESS:
        return PyLong_FromLongLong(self->now - candidate->last_access);
    case CANDIDATE_AFTER:
        return PyLong_FromLongLong(rotor_eviction_around(engine, self->storage, ROTOR_CHILDREN));
    case CANDIDATE_BEFORE:
        return PyLong_FromLongLong(rotor_eviction_around(engine, self->storage, ROTOR_PARENTS));
    default:
        return PyLong_FromLongLong(rotor_eviction_class_sum(engine, self->storage));
    }
}

#define CANDIDATE_GETTER(name, field, doc)                                                         \
    {name, py_candidate_get, NULL, doc, (void *)(uintptr_t)field}

static PyGetSetDef candidate_getset[] = {
    CANDIDATE_GETTER("storage", CANDIDATE_STORAGE, "Number of the storage in the log."),
    CANDIDATE_GETTER("bytes", CANDIDATE_BYTES, "Size of the storage, bytes."),
    CANDIDATE_GETTER("compute_ns", CANDIDATE_COMPUTE,
                     "Time of the operations that make its tensors, each once, ns."),
    CANDIDATE_GETTER("last_access", CANDIDATE_LAST_ACCESS, "When it was last read or made, ns."),
    CANDIDATE_GETTER("now", CANDIDATE_NOW, "The clock, ns."),
    CANDIDATE_GETTER("staleness", CANDIDATE_STALENESS, "now - last_access, ns."),
    CANDIDATE_GETTER("evicted_after_ns", CANDIDATE_AFTER,
                     "Compute time of what depends on it through evicted storages, ns."),
    CANDIDATE_GETTER("evicted_before_ns", CANDIDATE_BEFORE,
                     "Compute time of what it depends on through evicted storages, ns."),
    CANDIDATE_GETTER("class_ns", CANDIDATE_CLASSES,
                     "Compute time of the distinct classes of its evicted neighbours, ns."),
    {NULL, NULL, NULL, NULL, NULL},
};

PyDoc_STRVAR(candidate_doc,
             "A storage that may be evicted, as a Python heuristic sees it during its call.");

static PyType_Slot candidate_slots[] = {
    {Py_tp_dealloc, py_dealloc},
    {Py_tp_getset, candidate_getset},
    {Py_tp_doc, (void *)candidate_doc},
    {0, NULL},
};

/* Calling a Python heuristic. */

static int read_cost(PyObject *name, PyObject *answer, double *cost) {
    const PyNumberMethods *numbers = Py_TYPE(answer)->tp_as_number;

    if (numbers == NULL || (numbers->nb_float == NULL && numbers->nb_index == NULL)) {
        PyErr_Format(PyExc_TypeError, "heuristic %R returned %R, expected a real number",
                     name, answer);
        return -1;
    }
    *cost = PyFloat_AsDouble(answer);
    if (*cost == -1.0 && PyErr_Occurred()) {
        if (PyLong_Check(answer) && PyErr_ExceptionMatches(PyExc_OverflowError)) {
            PyErr_Format(PyExc_ValueError,
                         "heuristic %R returned an integer that is too large for a double",
                         name);
        }
        return -1;
    }
    if (isnan(*cost)) {
        PyErr_Format(PyExc_ValueError, "heuristic %R returned NaN, expected a real number",
                     name);
        return -1;
    }
    return 0;
}

int py_call_heuristic(const py_heuristic_t *call, rotor_eviction_t *engine, int32_t storage,
                      double *cost) {
    PyTypeObject *type = py_state(call->module)->candidate_type;
    PyObject *answer = NULL;
    int ret = ROTOR_ERR_INTERRUPTED;

    py_candidate_t *candidate = (py_candidate_t *)type->tp_alloc(type, 0);
    if (candidate == NULL || PyErr_CheckSignals() != 0) {
        goto out;
    }
    candidate->engine = engine;
    candidate->storage = storage;
    candidate->now = call->now;
    candidate->has_classes = call->has_classes;
    answer = PyObject_CallOneArg(call->callable, (PyObject *)candidate);
    candidate->engine = NULL;
    if (answer != NULL && read_cost(call->name, answer, cost) == 0) {
        ret = ROTOR_OK;
    }
out:
    Py_XDECREF(answer);
    Py_XDECREF(candidate);
    return ret;
}

PyDoc_STRVAR(
    heuristics_doc,
    "heuristics()\n--\n\n"
    "Return (name, needs) of every heuristic; needs has \"classes\", \"regions\", \"chance\".");

static PyObject *py_heuristics(PyObject *module, PyObject *unused) {
    PyObject *list = PyList_New(0);
    const rotor_heuristic_t *heuristic;

    for (int64_t i = 0; list != NULL && (heuristic = rotor_heuristic(i)) != NULL; i++) {
        const char *need = heuristic->numerator == ROTOR_CLASSES     ? "classes"
                           : heuristic->numerator == ROTOR_REGIONS   ? "regions"
                           : heuristic->numerator == ROTOR_ANCESTORS ? "regions"
                           : heuristic->numerator == ROTOR_CHANCE    ? "chance"
                                                                     : NULL;
        PyObject *entry = need == NULL ? Py_BuildValue("s()", heuristic->name)
                                       : Py_BuildValue("s(s)", heuristic->name, need);
        py_append(&list, entry);
    }
    return list;
}

static PyMethodDef candidate_functions[] = {
    {"heuristics", py_heuristics, METH_NOARGS, heuristics_doc},
    {NULL, NULL, 0, NULL},
};

int py_add_candidate(PyObject *module) {
    int ret = py_add_type(module, "rotor._core.Candidate", sizeof(py_candidate_t),
                          Py_TPFLAGS_DISALLOW_INSTANTIATION, candidate_slots,
                          &py_state(module)->candidate_type);
    return ret == 0 ? PyModule_AddFunctions(module, candidate_functions) : ret;
}
