#include "support.h"

#include "blocks_piece.h"

static PyObject *as_dict(const rotor_blocks_figures_t *figures) {
    return Py_BuildValue(
        "{s:L,s:L,s:L,s:L,s:L,s:L,s:L,s:L,s:L}", "allocated_bytes", (long long)figures->allocated,
        "allocated_peak_bytes", (long long)figures->allocated_peak, "requested_bytes",
        (long long)figures->requested, "requested_peak_bytes",
        (long long)figures->requested_peak, "reserved_bytes", (long long)figures->reserved,
        "reserved_peak_bytes", (long long)figures->reserved_peak, "reserved_small_bytes",
        (long long)figures->reserved_small, "retries",
        (long long)figures->retries, "refused", (long long)figures->refused);
}

PyDoc_STRVAR(replay_blocks_doc,
             "replay_blocks(events, expandable, capacity_bytes, levels, /)\n--\n\n"
             "Return the bytes that the caching allocator counts in a sequence of events.\n"
             "\n"
             "An event e >= 0 allocates e bytes, -1 - k frees the k-th allocation,\n"
             "BLOCKS_RELEASE gives cached memory back. With `levels`, also the allocated and\n"
             "reserved bytes after each event.");

static PyObject *py_replay_blocks(PyObject *module, PyObject *args) {
    PyObject *events_object;
    PyObject *levels = NULL;
    PyObject *figures_object = NULL;
    PyObject *answer = NULL;
    Py_buffer events;
    rotor_blocks_figures_t figures;
    long long capacity;
    int expandable;
    int wants_levels;
    int ret;

    if (!PyArg_ParseTuple(args, "OpLp:replay_blocks", &events_object, &expandable, &capacity,
                          &wants_levels) ||
        py_get_int64(events_object, "events", &events) != 0) {
        return NULL;
    }
    Py_ssize_t length = events.shape[0];
    if (wants_levels) {
        levels = py_int64_bytes(NULL, 2 * length);
        if (levels == NULL) {
            goto out;
        }
    }
    int64_t *rows = wants_levels ? (int64_t *)PyByteArray_AS_STRING(levels) : NULL;
    Py_BEGIN_ALLOW_THREADS;
    ret = rotor_blocks_replay(expandable ? ROTOR_SEGMENTS_EXPANDABLE : ROTOR_SEGMENTS_ORDINARY,
                              capacity, events.buf, length, rows, &figures);
    Py_END_ALLOW_THREADS;
    if (ret != ROTOR_OK) {
        py_raise_status(module, ret);
        goto out;
    }
    figures_object = as_dict(&figures);
    if (figures_object != NULL) {
        answer = PyTuple_Pack(2, figures_object, levels == NULL ? Py_None : levels);
    }
out:
    Py_XDECREF(figures_object);
    Py_XDECREF(levels);
    PyBuffer_Release(&events);
    return answer;
}

PyDoc_STRVAR(fit_piece_doc,
             "fit_piece(events, /)\n--\n\n"
             "Return the piece, taken before some events, with which they reserve least.\n"
             "\n"
             "Events as of replay_blocks, without BLOCKS_RELEASE, in ordinary segments.");

static PyObject *py_fit_piece(PyObject *module, PyObject *argument) {
    Py_buffer events;
    rotor_blocks_figures_t without;
    rotor_blocks_piece_t piece;
    int ret;

    if (py_get_int64(argument, "events", &events) != 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS;
    ret = rotor_blocks_fit(events.buf, events.shape[0], &without, &piece);
    Py_END_ALLOW_THREADS;
    PyBuffer_Release(&events);
    if (ret != ROTOR_OK) {
        return py_raise_status(module, ret);
    }
    return Py_BuildValue("{s:L,s:L,s:L,s:L}", "bytes", (long long)piece.bytes,
                         "reserved_peak_bytes", (long long)piece.reserved_peak, "small_segments",
                         (long long)piece.small_segments, "without_bytes",
                         (long long)without.reserved_peak);
}

static PyMethodDef functions[] = {
    {"fit_piece", py_fit_piece, METH_O, fit_piece_doc},
    {"replay_blocks", py_replay_blocks, METH_VARARGS, replay_blocks_doc},
    {NULL, NULL, 0, NULL},
};

int py_add_blocks(PyObject *module) {
    PyObject *release = PyLong_FromLongLong(ROTOR_BLOCKS_RELEASE);
    int ret = release == NULL ? -1 : PyModule_AddObjectRef(module, "BLOCKS_RELEASE", release);
    Py_XDECREF(release);
    return ret == 0 ? PyModule_AddFunctions(module, functions) : ret;
}
