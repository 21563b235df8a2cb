#include "support.h"

#include <string.h>

#include "probe.h"

py_state_t *py_state(PyObject *module) { return (py_state_t *)PyModule_GetState(module); }

PyObject *py_raise_status(PyObject *module, int status) {
    if (PyErr_Occurred()) {
        return NULL;
    }
    switch (status) {
    case ROTOR_ERR_NO_MEMORY:
    case ROTOR_ERR_TABLE_TOO_LARGE:
        PyErr_SetString(PyExc_MemoryError, rotor_strerror(status));
        break;
    case ROTOR_ERR_INTERRUPTED:
        PyErr_SetString(PyExc_KeyboardInterrupt, rotor_strerror(status));
        break;
    case ROTOR_ERR_OVERFLOW:
        PyErr_SetString(PyExc_OverflowError, rotor_strerror(status));
        break;
    case ROTOR_ERR_INFEASIBLE:
        PyErr_SetString(py_state(module)->infeasible_error, rotor_strerror(status));
        break;
    case ROTOR_ERR_BAD_OPERATION:
    case ROTOR_ERR_NO_INPUT:
    case ROTOR_ERR_NO_TAPE:
    case ROTOR_ERR_NO_GRADIENT:
    case ROTOR_ERR_TWICE:
    case ROTOR_ERR_ONCE:
    case ROTOR_ERR_INCOMPLETE:
        PyErr_SetString(py_state(module)->invalid_sequence_error, rotor_strerror(status));
        break;
    case ROTOR_ERR_IO:
    case ROTOR_ERR_UNAVAILABLE:
        PyErr_SetString(PyExc_OSError, rotor_strerror(status));
        break;
    default:
        PyErr_SetString(PyExc_ValueError, rotor_strerror(status));
    }
    return NULL;
}

PyObject *py_raise_infeasible(PyObject *module, int64_t budget, int64_t minimum) {
    PyObject *message = PyUnicode_FromFormat(
        "no schedule fits in a budget of %lld bytes; the least that one fits in is %lld bytes",
        (long long)budget, (long long)minimum);
    return py_raise_number(py_state(module)->infeasible_error, message, minimum);
}

PyObject *py_raise_number(PyObject *type, PyObject *message, int64_t number) {
    PyObject *error =
        message == NULL ? NULL : PyObject_CallFunction(type, "OL", message, (long long)number);
    if (error != NULL) {
        PyErr_SetObject(type, error);
        Py_DECREF(error);
    }
    Py_XDECREF(message);
    return NULL;
}

int py_get_int64(PyObject *object, const char *name, Py_buffer *view) {
    if (PyObject_GetBuffer(object, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0) {
        return -1;
    }
    const char *format = view->format == NULL ? "B" : view->format;
    bool is_int64 = view->itemsize == 8 && (format[0] == 'q' || format[0] == 'l') && !format[1];
    if (view->ndim != 1 || !is_int64) {
        PyErr_Format(PyExc_TypeError, "%s must be a one-dimensional array of int64", name);
        PyBuffer_Release(view);
        return -1;
    }
    return 0;
}

int py_get_arrays(PyObject *const *objects, const char *const *names, int count, Py_buffer *views) {
    for (int k = 0; k < count; k++) {
        if (py_get_int64(objects[k], names[k], &views[k]) != 0) {
            py_release_arrays(views, k);
            return -1;
        }
    }
    return 0;
}

void py_release_arrays(Py_buffer *views, int count) {
    while (count-- > 0) {
        PyBuffer_Release(&views[count]);
    }
}

int py_check_length(const Py_buffer *view, const char *name, Py_ssize_t expected) {
    if (view->shape[0] != expected) {
        PyErr_Format(PyExc_ValueError, "%s has %zd entries, expected %zd", name, view->shape[0],
                     expected);
        return -1;
    }
    return 0;
}

bool py_has_no_names(const char *name, PyObject *kwargs) {
    if (kwargs != NULL && PyDict_GET_SIZE(kwargs) != 0) {
        PyErr_Format(PyExc_TypeError, "%s takes positional arguments only", name);
        return false;
    }
    return true;
}

PyObject *py_int64_bytes(const int64_t *values, int64_t count) {
    return PyByteArray_FromStringAndSize((const char *)values,
                                         (Py_ssize_t)count * (Py_ssize_t)sizeof(*values));
}

PyObject *py_wide_bytes(const int32_t *values, int64_t count) {
    PyObject *bytes = py_int64_bytes(NULL, count);
    for (int64_t k = 0; bytes != NULL && k < count; k++) {
        ((int64_t *)(void *)PyByteArray_AS_STRING(bytes))[k] = values[k];
    }
    return bytes;
}

PyObject *py_text(const char *text) {
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
}

bool py_goes_on(PyObject *progress, int64_t done, int64_t total) {
    return PyErr_CheckSignals() == 0 &&
           (progress == NULL ||
            py_did(PyObject_CallFunction(progress, "LL", (long long)done, (long long)total)) == 0);
}

static bool watch_goes_on(void *context, int64_t done, int64_t total) {
    py_watch_t *watch = context;
    int64_t now = rotor_clock_ns();

    if (now < watch->next_ns) {
        return true;
    }
    watch->next_ns = now + 50000000;
    PyEval_RestoreThread(watch->saved);
    bool go = py_goes_on(watch->progress, done, total);
    watch->saved = PyEval_SaveThread();
    return go;
}

void py_watch_begin(py_watch_t *watch, PyObject *progress) {
    watch->callback.keep_going = watch_goes_on;
    watch->callback.context = watch;
    watch->progress = progress == Py_None ? NULL : progress;
    watch->next_ns = rotor_clock_ns() + 50000000;
    watch->saved = PyEval_SaveThread();
}

void py_watch_end(py_watch_t *watch) { PyEval_RestoreThread(watch->saved); }

bool py_are_counted(const char *method, Py_ssize_t nargs, Py_ssize_t least, Py_ssize_t most) {
    if (nargs >= least && nargs <= most) {
        return true;
    }
    PyErr_Format(PyExc_TypeError, "%s takes %zd to %zd positional arguments, got %zd", method,
                 least, most, nargs);
    return false;
}

bool py_get_integer(PyObject *object, const char *what, int64_t least, int64_t most,
                    int64_t *integer) {
    PyObject *number = PyBool_Check(object) ? NULL : PyNumber_Index(object);
    int overflow;

    if (number == NULL) {
        if (!PyErr_Occurred()) {
            PyErr_Format(PyExc_TypeError, "%s must be an integer, got %R", what, object);
        }
        return false;
    }
    *integer = PyLong_AsLongLongAndOverflow(number, &overflow);
    bool fits = overflow == 0 && *integer >= least && *integer <= most;
    if (!fits) {
        PyErr_Format(PyExc_ValueError, "%s is %S, expected an integer from %lld to %lld", what,
                     number, (long long)least, (long long)most);
    }
    Py_DECREF(number);
    return fits;
}

int py_read_link(PyObject *given, rotor_link_t *link) {
    long long latency, host, least, padding;
    int duplex;
    if (!PyArg_ParseTuple(given, "ddLpLLL:link", &link->write_bytes_per_s, &link->read_bytes_per_s,
                          &latency, &duplex, &host, &least, &padding)) {
        return ROTOR_OK;
    }
    link->latency_ns = latency;
    link->duplex = duplex != 0;
    link->host_bytes = host == -1 ? INT64_MAX : host;
    link->least_bytes = least;
    link->padding_bytes = padding;
    return rotor_link_check(link);
}

PyObject *py_schedule(PyObject *module, int status, bool may_lack, rotor_sequence_t *sequence) {
    bool is_lacking = may_lack && status == ROTOR_ERR_INFEASIBLE;
    Py_ssize_t size = (Py_ssize_t)sequence->length * (Py_ssize_t)sizeof(*sequence->ops);
    PyObject *answer =
        status == ROTOR_OK ? PyByteArray_FromStringAndSize((const char *)sequence->ops, size)
        : is_lacking       ? Py_NewRef(Py_None)
                           : py_raise_status(module, status);
    rotor_sequence_free(sequence);
    return answer;
}

PyObject *py_points(const int64_t *bytes, const int64_t *ns, int64_t count) {
    return Py_BuildValue("NN", py_int64_bytes(bytes, count), py_int64_bytes(ns, count));
}

void py_append(PyObject **list, PyObject *item) {
    if (item == NULL || PyList_Append(*list, item) != 0) {
        Py_CLEAR(*list);
    }
    Py_XDECREF(item);
}

int py_check_status(void *object, int status) {
    if (status != ROTOR_OK) {
        (void)py_raise_status(PyType_GetModule(Py_TYPE(object)), status);
    }
    return PyErr_Occurred() ? -1 : 0;
}

PyObject *py_none(void *object, int status) {
    return py_check_status(object, status) == 0 ? Py_NewRef(Py_None) : NULL;
}

int py_did(PyObject *result) {
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

int py_is_true(PyObject *function) {
    PyObject *answer = PyObject_CallNoArgs(function);
    int is_true = answer == NULL ? -1 : PyObject_IsTrue(answer);
    Py_XDECREF(answer);
    return is_true;
}

int py_add_type(PyObject *module, const char *name, size_t size, unsigned long flags,
                PyType_Slot *slots, PyTypeObject **kept) {
    PyType_Spec spec = {
        .name = name,
        .basicsize = (int)size,
        .flags = (unsigned int)(Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | flags),
        .slots = slots,
    };
    PyTypeObject *type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &spec, NULL);
    int ret = type == NULL ? -1 : PyModule_AddType(module, type);
    if (kept != NULL) {
        *kept = type;
    } else {
        Py_XDECREF(type);
    }
    return ret;
}

void py_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    if (PyType_IS_GC(type)) {
        PyObject_GC_UnTrack(object);
    }
    if (type->tp_clear != NULL) {
        (void)type->tp_clear(object);
    }
    type->tp_free(object);
    Py_DECREF(type);
}
