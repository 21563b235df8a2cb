/* Running operations again, as Recall._replay does, where the handler recorded them on the CPU. */
#include "bind_dtr_private.h"

#include "probe.h"

/* A record, as py_operator_run makes it (rotor.dtr.records.Record). */
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
    RECORD_COUNT
};

/* A tensor argument, as py_operator_spec makes it. */
enum { SPEC_NODE, SPEC_SHAPE, SPEC_STRIDE, SPEC_OFFSET, SPEC_DTYPE, SPEC_DEVICE, SPEC_BITS };

PyObject *py_operator_flags(py_handler_t *self) {
    PyObject *readers = self->parts[PART_FLAGS];
    Py_ssize_t count = PyTuple_GET_SIZE(readers);
    Py_ssize_t watched = self->flags != NULL && self->is_cpu ? self->cpu_flags : count;
    PyObject *flags = NULL;
    for (Py_ssize_t k = 0; k < watched; k++) {
        PyObject *value = PyObject_CallNoArgs(PyTuple_GET_ITEM(readers, k));
        int is_same = value == NULL ? -1 : 0;
        if (is_same == 0 && flags == NULL && self->flags != NULL) {
            PyObject *last = PyTuple_GET_ITEM(self->flags, k);
            is_same = last == value ? 1 : PyObject_RichCompareBool(last, value, Py_EQ);
        }
        if (is_same < 0) {
            Py_XDECREF(value);
            Py_XDECREF(flags);
            return NULL;
        }
        if (is_same == 1) {
            Py_DECREF(value);
            continue;
        }
        if (flags == NULL) {
            flags = PyTuple_New(count);
            for (Py_ssize_t i = 0; flags != NULL && i < k; i++) {
                PyTuple_SET_ITEM(flags, i, Py_NewRef(PyTuple_GET_ITEM(self->flags, i)));
            }
            if (flags == NULL) {
                Py_DECREF(value);
                return NULL;
            }
        }
        PyTuple_SET_ITEM(flags, k, value);
    }
    if (flags != NULL) {
        for (Py_ssize_t k = watched; k < count; k++) {
            PyTuple_SET_ITEM(flags, k, Py_NewRef(PyTuple_GET_ITEM(self->flags, k)));
        }
        Py_XSETREF(self->flags, flags);
    }
    return Py_NewRef(self->flags);
}

int py_operator_make_room(py_handler_t *self, PyObject *session, int64_t bytes, int64_t least) {
    const rotor_recorder_t *book = &self->recorder->book;
    if (book->options.budget == ROTOR_UNLIMITED ||
        book->current_bytes <= book->options.budget - bytes) {
        return 0;
    }
    PyObject *wished = PyLong_FromLongLong(bytes);
    PyObject *needed = PyLong_FromLongLong(least);
    PyObject *done = wished == NULL || needed == NULL
                         ? NULL
                         : PyObject_CallMethodObjArgs(session, self->names[NAME__make_room], wished,
                                                      needed, NULL);
    Py_XDECREF(wished);
    Py_XDECREF(needed);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

static PyObject *tensor_of(py_handler_t *self, PyObject *spec) {
    int64_t node = PyLong_AsLongLong(PyTuple_GET_ITEM(spec, SPEC_NODE));
    PyObject *storage = py_book_storage_of(self->recorder, node);
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
static PyObject *filled(py_handler_t *self, PyObject *value) {
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

static int fill(py_handler_t *self, PyObject *record, PyObject **args, PyObject **kwargs) {
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

/* The tensor of this number among the results, borrowed; NULL for none. */
static PyObject *result_at(py_handler_t *self, PyObject *results, int64_t *index) {
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

static int64_t bytes_of(py_handler_t *self, PyObject *storage) {
    PyObject *nbytes = PyObject_CallMethodNoArgs(storage, self->names[NAME_nbytes]);
    int64_t bytes = nbytes == NULL ? -1 : PyLong_AsLongLong(nbytes);
    Py_XDECREF(nbytes);
    return bytes;
}

/* Gives a storage of the program its bytes again. */
static int refill(py_handler_t *self, PyObject *record, int32_t node, PyObject *made) {
    PyObject *storage = py_book_storage_of(self->recorder, node);
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
static int place_one(py_handler_t *self, PyObject *record, int32_t node, PyObject *results,
                     int64_t index) {
    py_recorder_t *recorder = self->recorder;
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
    } else if ((ret = py_book_discard(recorder, &recorder->places[node])) == 0) {
        recorder->places[node] = Py_NewRef(made);
    }
    Py_XDECREF(made);
    return ret;
}

static int place(py_handler_t *self, PyObject *record, int32_t op, PyObject *results) {
    py_recorder_t *recorder = self->recorder;
    const rotor_recorder_t *book = &recorder->book;
    PyObject *indices = PyTuple_GET_ITEM(record, RECORD_INDICES);
    int ret = py_book_forget_gone(recorder);
    if (ret == 0) {
        ret = py_book_guard_outputs(recorder, op);
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

static int set_grad_enabled(py_handler_t *self, PyObject *is_enabled) {
    PyObject *done = PyObject_CallOneArg(self->parts[PART_SET_GRAD_ENABLED], is_enabled);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Runs the operator of a record, below autograd and autocast, with its grad mode. */
static PyObject *run_again(py_handler_t *self, PyObject *record, PyObject *call, int64_t *took) {
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

/* 1 if this file runs a record, else 0; -1 with an exception. */
static int is_ours(py_handler_t *self, PyObject *record) {
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
    PyObject *flags = py_operator_flags(self);
    if (flags == NULL) {
        return -1;
    }
    PyObject *then = PyTuple_GET_ITEM(record, RECORD_FLAGS);
    int is_same = flags == then ? 1 : PyObject_RichCompareBool(flags, then, Py_EQ);
    Py_DECREF(flags);
    return is_same;
}

static int replay(py_handler_t *self, PyObject *session, int32_t op, PyObject *record) {
    rotor_recorder_t *book = &self->recorder->book;
    const py_needs_t *needs = (py_needs_t *)PyTuple_GET_ITEM(record, RECORD_NEEDS);
    int64_t bytes = rotor_recorder_replay_bytes(book, op);
    int64_t unknown =
        needs->workspace_bytes - PyLong_AsLongLong(PyTuple_GET_ITEM(record, RECORD_COUNTED));
    int64_t took = 0;
    int64_t thrashes = book->thrashes;

    if (py_operator_make_room(self, session, bytes + unknown,
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
    PyObject *results = run_again(self, record, ((py_kernel_t *)kernel)->call, &took);
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
        (void)py_raise_status(PyType_GetModule(Py_TYPE(self)), status);
        return -1;
    }
    if (py_book_settle(self->recorder) != 0) {
        return -1;
    }
    py_book_let_go(self->recorder);
    if (book->thrashes > thrashes) {
        PyObject *seen = PyObject_CallMethodNoArgs(session, self->names[NAME__see_thrashing]);
        Py_XDECREF(seen);
        ret = seen == NULL ? -1 : 0;
    }
    return ret;
}

int py_operator_catch_up(py_handler_t *self, PyObject *session) {
    py_recorder_t *recorder = self->recorder;
    for (;;) {
        int32_t op = ROTOR_NEW_OPERATION;
        if (recorder->book.frame_count == 0) {
            PyErr_SetString(PyExc_RuntimeError, "no operation has begun");
            return -1;
        }
        if (py_book_forget_gone(recorder) != 0) {
            return -1;
        }
        int status = rotor_recorder_next(&recorder->book, &op);
        if (py_book_settle(recorder) != 0 || status != ROTOR_OK) {
            if (status != ROTOR_OK) {
                (void)py_raise_status(PyType_GetModule(Py_TYPE(self)), status);
            }
            return -1;
        }
        py_book_let_go(recorder);
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
