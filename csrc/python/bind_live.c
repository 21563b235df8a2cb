#include "support.h"

#include "live.h"

enum { ADDRESS, NBYTES, RESIDENT, TOTAL, COLUMNS };

PyDoc_STRVAR(live_bytes_doc,
             "live_bytes(address, nbytes, resident, total, /)\n--\n\n"
             "Return the live bytes after each event of an allocator, as bytes of int64.\n"
             "\n"
             "Arrays of int64: addresses; bytes, negative for freed blocks; ascending addresses of\n"
             "blocks whose release is counted elsewhere; totals of all threads, or None.");

static PyObject *py_live_bytes(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    static const char *const names[COLUMNS] = {"address", "nbytes", "resident", "total"};
    Py_buffer views[COLUMNS];
    int64_t *live = NULL;
    PyObject *answer = NULL;

    if (!py_are_counted("live_bytes", nargs, COLUMNS, COLUMNS)) {
        return NULL;
    }
    int wanted = args[TOTAL] == Py_None ? TOTAL : COLUMNS;
    if (py_get_arrays(args, names, wanted, views) != 0) {
        return NULL;
    }
    for (int k = NBYTES; k < wanted; k++) {
        if (k != RESIDENT &&
            py_check_length(&views[k], names[k], views[ADDRESS].shape[0]) != 0) {
            goto out;
        }
    }
    rotor_live_events_t events = {
        .address = views[ADDRESS].buf,
        .nbytes = views[NBYTES].buf,
        .total = wanted == TOTAL ? NULL : views[TOTAL].buf,
        .count = views[ADDRESS].shape[0],
    };
    live = rotor_malloc_array(events.count, sizeof(*live));
    if (live == NULL) {
        PyErr_NoMemory();
        goto out;
    }
    int ret;
    Py_BEGIN_ALLOW_THREADS
    ret = rotor_live_bytes(&events, views[RESIDENT].buf, views[RESIDENT].shape[0], live);
    Py_END_ALLOW_THREADS
    answer = ret == ROTOR_OK ? py_int64_bytes(live, events.count) : py_raise_status(module, ret);
out:
    rotor_free(live);
    py_release_arrays(views, wanted);
    return answer;
}

static PyMethodDef functions[] = {
    {"live_bytes", PY_FASTCALL(py_live_bytes), live_bytes_doc},
    {NULL, NULL, 0, NULL},
};

int py_add_live(PyObject *module) { return PyModule_AddFunctions(module, functions); }
