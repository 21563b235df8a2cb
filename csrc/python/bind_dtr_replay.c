/* Running operations again: what Recall._replay does, for what the handler recorded on the CPU. */
#include "bind_dtr_handler.h"

#include "probe.h"

/* A record, as rotor_handler_run makes it (rotor.dtr.records.Record). */
enum {
    RECORD_OPERATOR,
    RECORD_ARGS,
    RECORD_KWARGS,
    RECORD_INDICES,
    RECORD_ORIGINS,
    RECORD_GRAD_ENABLED,
    RECORD_FLAGS,
    RECORD_GENERATOR,
    RECORD_STATE,
    RECORD_NEEDS,
    RECORD_COUNTED,
    RECORD_MODULE,
    RECORD_COUNT
};

/* A tensor argument, as rotor_handler_spec makes it. */
enum { SPEC_NODE, SPEC_SHAPE, SPEC_STRIDE, SPEC_OFFSET, SPEC_DTYPE, SPEC_DEVICE, SPEC_BITS };

static PyObject *tensor_of(rotor_handler_t *self, PyObject *spec) {
    int64_t node = PyLong_AsLongLong(PyTuple_GET_ITEM(spec, SPEC_NODE));
    PyObject *storage = rotor_recorder_storage_of(self->recorder, node);
    if (storage == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "the storage of an argument is gone");
        return NULL;
    }
    PyObject *sizes[3] = {self->zero, PyTuple_GET_ITEM(spec, SPEC_DTYPE),
                          PyTuple_GET_ITEM(spec, SPEC_DEVICE)};
    PyObject *tensor =
        PyObject_Vectorcall(self->parts[PART_EMPTY], sizes, 1, self->dtype_and_device);
    PyObject *placed = NULL;
    if (tensor != NULL) {
        PyObject *place[5] = {tensor, storage, PyTuple_GET_ITEM(spec, SPEC_OFFSET),
                              PyTuple_GET_ITEM(spec, SPEC_SHAPE),
                              PyTuple_GET_ITEM(spec, SPEC_STRIDE)};
        placed = PyObject_VectorcallMethod(self->names[NAME_set_], place, 5, NULL);
        Py_DECREF(tensor);
    }
    Py_DECREF(storage);
    PyObject *bits = PyTuple_GET_ITEM(spec, SPEC_BITS);
    if (placed != NULL && bits != Py_None) {
        PyObject *set = PyObject_CallFunctionObjArgs(self->parts[PART_UNCONJUGATED], placed,
                                                     PyTuple_GET_ITEM(bits, 0),
                                                     PyTuple_GET_ITEM(bits, 1), NULL);
        Py_SETREF(placed, set);
    }
    return placed;
}

/* An argument with tensors again. */
static PyObject *filled(rotor_handler_t *self, PyObject *value) {
    if (PyTuple_Check(value)) {
        return tensor_of(self, value);
    }
    if (!PyList_Check(value)) {
        return Py_NewRef(value);
    }
    PyObject *list = PyList_New(PyList_GET_SIZE(value));
    for (Py_ssize_t k = 0; list != NULL && k < PyList_GET_SIZE(value); k++) {
        PyObject *item = filled(self, PyList_GET_ITEM(value, k));
        if (item == NULL) {
            Py_CLEAR(list);
        } else {
            PyList_SET_ITEM(list, k, item);
        }
    }
    return list;
}

static int fill(rotor_handler_t *self, PyObject *record, PyObject **args, PyObject **kwargs) {
    PyObject *list = PyTuple_GET_ITEM(record, RECORD_ARGS);
    PyObject *names = PyTuple_GET_ITEM(record, RECORD_KWARGS);
    PyObject *name, *value;
    Py_ssize_t at = 0;

    *args = PyTuple_New(PyList_GET_SIZE(list));
    for (Py_ssize_t k = 0; *args != NULL && k < PyList_GET_SIZE(list); k++) {
        PyObject *item = filled(self, PyList_GET_ITEM(list, k));
        if (item == NULL) {
            return -1;
        }
        PyTuple_SET_ITEM(*args, k, item);
    }
    if (names == Py_None || *args == NULL) {
        return *args == NULL ? -1 : 0;
    }
    *kwargs = PyDict_New();
    while (*kwargs != NULL && PyDict_Next(names, &at, &name, &value)) {
        PyObject *item = filled(self, value);
        int ret = item == NULL ? -1 : PyDict_SetItem(*kwargs, name, item);
        Py_XDECREF(item);
        if (ret != 0) {
            return -1;
        }
    }
    return *kwargs == NULL ? -1 : 0;
}

/* The tensor of this number among the results, borrowed; NULL where there is none. */
static PyObject *result_at(rotor_handler_t *self, PyObject *results, int64_t *index) {
    if (PyList_Check(results) || PyTuple_Check(results)) {
        PyObject *found = NULL;
        for (Py_ssize_t k = 0; found == NULL && k < PySequence_Fast_GET_SIZE(results); k++) {
            found = result_at(self, PySequence_Fast_GET_ITEM(results, k), index);
        }
        return found;
    }
    if (!PyObject_TypeCheck(results, (PyTypeObject *)self->parts[PART_TENSOR_TYPE])) {
        return NULL;
    }
    return (*index)-- == 0 ? results : NULL;
}

static int64_t bytes_of(rotor_handler_t *self, PyObject *storage) {
    PyObject *nbytes = PyObject_CallMethodNoArgs(storage, self->names[NAME_nbytes]);
    int64_t bytes = nbytes == NULL ? -1 : PyLong_AsLongLong(nbytes);
    Py_XDECREF(nbytes);
    return bytes;
}

/* Gives a storage of the program its bytes again. */
static int refill(rotor_handler_t *self, PyObject *record, int32_t node, PyObject *made) {
    PyObject *storage = rotor_recorder_storage_of(self->recorder, node);
    PyObject *swapped = NULL;
    if (storage == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "the storage of a live node is gone");
        return -1;
    }
    int64_t before = bytes_of(self, storage);
    int64_t now = bytes_of(self, made);
    if (before >= 0 && now >= 0 && before != now) {
        PyObject *name =
            PyObject_GetAttr(PyTuple_GET_ITEM(record, RECORD_OPERATOR), self->names[NAME_name]);
        if (name != NULL) {
            PyErr_Format(PyExc_RuntimeError,
                         "%S made a storage of %lld bytes where it made %lld before: rotor cannot "
                         "run this program again",
                         name, (long long)now, (long long)before);
            Py_DECREF(name);
        }
    } else if (before >= 0 && now >= 0) {
        swapped = PyObject_CallMethodOneArg(storage, self->names[NAME__swap_data_ptr_], made);
    }
    Py_XDECREF(swapped);
    Py_DECREF(storage);
    return swapped == NULL ? -1 : 0;
}

/* Puts one result where its node's bytes belong. */
static int place_one(rotor_handler_t *self, PyObject *record, int32_t node, PyObject *results,
                     int64_t index) {
    recorder_object_t *recorder = self->recorder;
    PyObject *result = result_at(self, results, &index);
    PyObject *made = result == NULL ? NULL
                                    : PyObject_CallMethodNoArgs(
                                          result, self->names[NAME_untyped_storage]);
    int ret = -1;
    if (made == NULL) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_RuntimeError, "an operator made less than before");
        }
    } else if ((recorder->book.nodes[node].state & ROTOR_NODE_LIVE) != 0) {
        ret = refill(self, record, node, made);
    } else if ((ret = rotor_recorder_discard(recorder, &recorder->places[node])) == 0) {
        recorder->places[node] = Py_NewRef(made);
    }
    Py_XDECREF(made);
    return ret;
}

static int place(rotor_handler_t *self, PyObject *record, int32_t op, PyObject *results) {
    recorder_object_t *recorder = self->recorder;
    const rotor_recorder_t *book = &recorder->book;
    PyObject *indices = PyTuple_GET_ITEM(record, RECORD_INDICES);
    int ret = rotor_recorder_forget_gone(recorder);
    if (ret == 0) {
        ret = rotor_recorder_guard_outputs(recorder, op);
    }
    recorder->is_borrowed = true;
    for (int32_t k = 0; ret == 0 && k < book->records[op].output_count; k++) {
        int32_t node = book->records[op].items[book->records[op].input_count + k];
        if (node >= 0 && !rotor_recorder_is_material(book, node)) {
            ret = place_one(self, record, node, results,
                            PyLong_AsLongLong(PyTuple_GET_ITEM(indices, k)));
        }
    }
    recorder->is_borrowed = false;
    return ret;
}

static int set_grad_enabled(rotor_handler_t *self, PyObject *is_enabled) {
    PyObject *done = PyObject_CallOneArg(self->parts[PART_SET_GRAD_ENABLED], is_enabled);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Runs the operator of a record, below autograd and autocast, with its grad mode. */
static PyObject *run_again(rotor_handler_t *self, PyObject *record, PyObject *call,
                           int64_t *took) {
    PyObject *guards = PyObject_CallNoArgs(self->parts[PART_BELOW_AUTOGRAD]);
    PyObject *now = guards == NULL ? NULL : PyObject_CallNoArgs(self->parts[PART_GRAD_ENABLED]);
    PyObject *then = PyTuple_GET_ITEM(record, RECORD_GRAD_ENABLED);
    PyObject *args = NULL, *kwargs = NULL, *results = NULL;
    if (now == NULL || (now != then && set_grad_enabled(self, then) != 0)) {
        goto out;
    }
    int64_t start = rotor_clock_ns();
    if (fill(self, record, &args, &kwargs) == 0) {
        results = PyObject_Call(call, args, kwargs);
    }
    *took = rotor_clock_ns() - start;
    if (now != then) {
        PyObject *type, *value, *traceback;
        PyErr_Fetch(&type, &value, &traceback);
        if (set_grad_enabled(self, now) != 0) {
            Py_CLEAR(results);
            Py_XDECREF(type);
            Py_XDECREF(value);
            Py_XDECREF(traceback);
        } else {
            PyErr_Restore(type, value, traceback);
        }
    }
out:
    Py_XDECREF(args);
    Py_XDECREF(kwargs);
    Py_XDECREF(now);
    Py_XDECREF(guards);
    return results;
}

/* Whether this file runs a record; -1 with an exception. */
static int is_ours(rotor_handler_t *self, PyObject *record) {
    if (!PyTuple_CheckExact(record) || !self->is_cpu || !self->has_views ||
        self->is_verifying || PyTuple_GET_ITEM(record, RECORD_STATE) != Py_None) {
        return 0;
    }
    PyObject *origins = PyTuple_GET_ITEM(record, RECORD_ORIGINS);
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(origins); k++) {
        if (PyLong_AsLong(PyTuple_GET_ITEM(origins, k)) >= 0) {
            return 0;
        }
    }
    PyObject *flags = rotor_handler_flags(self);
    if (flags == NULL) {
        return -1;
    }
    PyObject *then = PyTuple_GET_ITEM(record, RECORD_FLAGS);
    int is_same = flags == then ? 1 : PyObject_RichCompareBool(flags, then, Py_EQ);
    Py_DECREF(flags);
    return is_same;
}

static int replay(rotor_handler_t *self, PyObject *session, int32_t op, PyObject *record) {
    rotor_recorder_t *book = &self->recorder->book;
    const rotor_needs_object_t *needs =
        (rotor_needs_object_t *)PyTuple_GET_ITEM(record, RECORD_NEEDS);
    int64_t bytes = rotor_recorder_replay_bytes(book, op);
    int64_t unknown =
        needs->workspace_bytes - PyLong_AsLongLong(PyTuple_GET_ITEM(record, RECORD_COUNTED));
    int64_t took = 0;
    int64_t thrashes = book->thrashes;

    if (rotor_handler_make_room(self, session, bytes + unknown,
                                bytes + (needs->is_measured ? unknown : 0)) != 0) {
        return -1;
    }
    PyObject *kernel =
        PyObject_GetAttr(PyTuple_GET_ITEM(record, RECORD_OPERATOR), self->names[NAME_kernel]);
    if (kernel == NULL || Py_TYPE(kernel) != self->kernel_type) {
        Py_XDECREF(kernel);
        PyErr_SetString(PyExc_TypeError, "an operator's kernel must be a Kernel");
        return -1;
    }
    PyObject *results = run_again(self, record, ((rotor_kernel_t *)kernel)->call, &took);
    Py_DECREF(kernel);
    if (results == NULL) {
        return -1;
    }
    int ret = place(self, record, op, results);
    Py_DECREF(results);
    if (ret != 0) {
        return -1;
    }
    int status = rotor_recorder_replayed(book, took);
    if (status != ROTOR_OK) {
        (void)rotor_raise_status(PyType_GetModule(Py_TYPE(self)), status);
        return -1;
    }
    if (rotor_recorder_settle(self->recorder) != 0) {
        return -1;
    }
    rotor_recorder_let_go(self->recorder);
    if (book->thrashes > thrashes) {
        PyObject *told = PyObject_CallMethodNoArgs(session, self->names[NAME__see_thrashing]);
        Py_XDECREF(told);
        ret = told == NULL ? -1 : 0;
    }
    return ret;
}

int rotor_handler_catch_up(rotor_handler_t *self, PyObject *session) {
    recorder_object_t *recorder = self->recorder;
    for (;;) {
        int32_t op = ROTOR_NEW_OPERATION;
        if (recorder->book.frame_count == 0) {
            PyErr_SetString(PyExc_RuntimeError, "no operation has begun");
            return -1;
        }
        if (rotor_recorder_forget_gone(recorder) != 0) {
            return -1;
        }
        int status = rotor_recorder_next(&recorder->book, &op);
        if (rotor_recorder_settle(recorder) != 0 || status != ROTOR_OK) {
            if (status != ROTOR_OK) {
                (void)rotor_raise_status(PyType_GetModule(Py_TYPE(self)), status);
            }
            return -1;
        }
        rotor_recorder_let_go(recorder);
        if (op < 0) {
            return 0;
        }
        PyObject *record = Py_NewRef(recorder->records[op]);
        int ret = is_ours(self, record);
        if (ret > 0) {
            ret = replay(self, session, op, record);
        } else if (ret == 0) {
            PyObject *done = PyObject_CallMethodOneArg(session, self->names[NAME__replay], record);
            Py_XDECREF(done);
            ret = done == NULL ? -1 : 0;
        }
        Py_DECREF(record);
        if (ret != 0) {
            return -1;
        }
    }
}
