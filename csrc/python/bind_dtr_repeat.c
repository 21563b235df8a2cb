/* The operation that has to run again, as Recall._replay asks for it. */
#include "bind_dtr_book.h"

PyDoc_STRVAR(next_doc,
             "next($self, /)\n--\n\n"
             "Return the record of the operation to run again now, or None: the inputs are "
             "in memory.");

static PyObject *py_recorder_next(METHOD_ARGUMENTS) {
    py_recorder_t *self = py_as_recorder(object);
    int32_t op = ROTOR_NEW_OPERATION;
    if (py_book_expect("next", count, 0, names) != 0) {
        return NULL;
    }
    if (self->book.frame_count == 0) {
        PyErr_SetString(PyExc_RuntimeError, "no operation has begun");
        return NULL;
    }
    if (py_book_forget_gone(self) != 0) {
        return NULL;
    }
    int status = rotor_recorder_next(&self->book, &op);
    PyObject *record = op >= 0 ? self->records[op] : Py_None;
    return py_book_answer(self, type, status, Py_XNewRef(record));
}

static int32_t replaying(py_recorder_t *self) {
    int32_t op = self->book.frame_count > 0 ? self->book.frames[self->book.frame_count - 1].op
                                            : ROTOR_NEW_OPERATION;
    if (op < 0) {
        PyErr_SetString(PyExc_RuntimeError, "no operation is being run again");
    }
    return op;
}

PyDoc_STRVAR(wanted_doc,
             "wanted($self, /)\n--\n\n"
             "Return (index, node, storage, may_reuse) of the outputs of the operation that "
             "next() gave that are not in memory; storage is None for what the "
             "program has dropped. Until replayed() or abort() nothing is forgotten.");

static PyObject *py_recorder_wanted(METHOD_ARGUMENTS) {
    py_recorder_t *self = py_as_recorder(object);
    rotor_recorder_t *book = &self->book;
    int32_t op;
    if (py_book_expect("wanted", count, 0, names) != 0 || (op = replaying(self)) < 0 ||
        py_book_forget_gone(self) != 0) {
        return NULL;
    }
    const rotor_record_t *record = &book->records[op];
    const int32_t *outputs = record->items + record->input_count;
    const int32_t *origins = outputs + record->output_count;
    self->is_borrowed = true;
    PyObject *list = py_book_guard_outputs(self, op) == 0 ? PyList_New(0) : NULL;
    for (int32_t k = 0; list != NULL && k < record->output_count; k++) {
        int32_t node = outputs[k];
        if (node < 0 || rotor_recorder_is_material(book, node)) {
            continue;
        }
        bool may_reuse = origins[k] >= 0 && rotor_recorder_may_reuse(book, origins[k]);
        bool is_live = (book->nodes[node].state & ROTOR_NODE_LIVE) != 0;
        PyObject *storage = is_live ? py_book_storage_of(self, node) : Py_NewRef(Py_None);
        PyObject *item = Py_BuildValue("iiNN", (int)k, (int)node, storage,
                                       PyBool_FromLong(may_reuse));
        py_append(&list, item);
    }
    return list;
}

PyDoc_STRVAR(replay_bytes_doc,
             "replay_bytes($self, /)\n--\n\n"
             "Return the bytes that running the operation that next() gave takes.");

static PyObject *py_recorder_replay_bytes(METHOD_ARGUMENTS) {
    py_recorder_t *self = py_as_recorder(object);
    int32_t op;
    if (py_book_expect("replay_bytes", count, 0, names) != 0 || (op = replaying(self)) < 0) {
        return NULL;
    }
    return PyLong_FromLongLong(rotor_recorder_replay_bytes(&self->book, op));
}

PyDoc_STRVAR(replayed_doc,
             "replayed($self, cost_ns, /)\n--\n\n"
             "Note that the operation that next() gave has run and its outputs are placed; "
             "return how often thrashing was found until now.");

static PyObject *py_recorder_replayed(METHOD_ARGUMENTS) {
    py_recorder_t *self = py_as_recorder(object);
    int64_t cost;
    if (py_book_expect("replayed", count, 1, names) != 0 ||
        py_book_read_int64(args[0], &cost) != 0 || replaying(self) < 0) {
        return NULL;
    }
    self->is_borrowed = false;
    int status = rotor_recorder_replayed(&self->book, cost);
    return py_book_answer(self, type, status, PyLong_FromLongLong(self->book.thrashes));
}

PyMethodDef py_book_repeats[] = {
    RECORDER_METHOD(next),     RECORDER_METHOD(wanted), RECORDER_METHOD(replay_bytes),
    RECORDER_METHOD(replayed), {NULL, NULL, 0, NULL},
};
