/* Running operations again. */
#include "bind_dtr_private.h"

enum { MOST_GUESSED_BLOCKS = 4 };

static int64_t large_blocks_of(const py_needs_t *needs) {
    if (needs == NULL || needs->large_blocks >= 0) {
        return needs == NULL ? 0 : needs->large_blocks;
    }
    int64_t blocks = (needs->made_bytes + needs->workspace_bytes) / ROTOR_LARGE_BYTES;
    return blocks < MOST_GUESSED_BLOCKS ? blocks : MOST_GUESSED_BLOCKS;
}

int py_operator_ask_room(py_handler_t *self, PyObject *session, const py_needs_t *needs,
                         int64_t bytes, int64_t least) {
    int64_t blocks = large_blocks_of(needs);
    int64_t wished = bytes + self->slack_bytes * blocks;
    int ret = py_did(PyObject_CallMethod(session, "_make_room", "LL", (long long)wished,
                                         (long long)least));
    self->unread_blocks += blocks;
    return ret;
}

int py_operator_make_room(py_handler_t *self, PyObject *session, const py_needs_t *needs,
                          int64_t bytes, int64_t least) {
    const rotor_recorder_t *book = &self->recorder->book;
    int64_t blocks = large_blocks_of(needs);
    int64_t slack = self->slack_bytes * (self->unread_blocks + blocks);
    if (book->options.budget != ROTOR_UNLIMITED &&
        book->current_bytes > book->options.budget - bytes - slack) {
        return py_operator_ask_room(self, session, needs, bytes, least);
    }
    self->unread_blocks += blocks;
    return 0;
}

/* An operation that runs again, and the storages that it runs on. */
typedef struct {
    py_handler_t *handler;
    PyObject *session;
    const py_record_t *record;
    int32_t op;
    PyObject **storages; /* of its arguments */
    PyObject *results;
} again_t;

/* True if the operation writes to this node, and something else needs it as it is. */
static bool needs_copy(const again_t *again, int32_t node) {
    const rotor_recorder_t *book = &again->handler->recorder->book;
    const rotor_record_t *record = &book->records[again->op];
    const int32_t *outputs = record->items + record->input_count;
    const int32_t *origins = outputs + record->output_count;
    bool is_origin = false;
    for (int32_t k = 0; k < record->output_count; k++) {
        if (origins[k] == node) {
            is_origin = true;
            if (outputs[k] >= 0 && !rotor_recorder_is_material(book, outputs[k]) &&
                rotor_recorder_may_reuse(book, node)) {
                return false;
            }
        }
    }
    return is_origin;
}

static int find_storages(again_t *again) {
    py_handler_t *self = again->handler;
    const py_record_t *record = again->record;
    for (int64_t k = 0; k < record->pattern->count; k++) {
        int32_t node = record->arguments[k].node;
        for (int64_t i = 0; i < k && again->storages[k] == NULL; i++) {
            if (record->arguments[i].node == node) {
                again->storages[k] = Py_NewRef(again->storages[i]);
            }
        }
        if (again->storages[k] != NULL) {
            continue;
        }
        PyObject *storage = py_book_storage_of(self->recorder, node);
        if (storage == NULL) {
            PyErr_SetString(PyExc_RuntimeError, "the storage of an argument is gone");
            return -1;
        }
        if (needs_copy(again, node)) {
            PyObject *copy = PyObject_CallOneArg(self->parts[PART_COPY], storage);
            Py_SETREF(storage, copy);
        }
        if ((again->storages[k] = storage) == NULL) {
            return -1;
        }
    }
    return 0;
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

/* Gives a storage of the program its bytes again. */
static int refill(again_t *again, int32_t node, PyObject *made) {
    py_handler_t *self = again->handler;
    PyObject *storage = py_book_storage_of(self->recorder, node);
    if (storage == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "the storage of a live node is gone");
        return -1;
    }
    int64_t before = self->swaps ? py_bytes_of(self, storage) : 0;
    int64_t now = self->swaps ? py_bytes_of(self, made) : 0;
    int ret = -1;
    if (before >= 0 && now >= 0 && before != now) {
        PyErr_Format(PyExc_RuntimeError,
                     "%S made a storage of %lld bytes where it made %lld before: rotor cannot "
                     "run this program again",
                     again->record->kernel->name, (long long)now, (long long)before);
    } else if (before >= 0 && now >= 0) {
        ret = self->swaps ? py_did(PyObject_CallMethodOneArg(
                                storage, self->names[NAME__swap_data_ptr_], made))
                          : py_did(py_ask(self, self->bytes, give, storage, made));
    }
    Py_DECREF(storage);
    return ret;
}

/* Has the verifier compare what was made again. */
static int compare(again_t *again, int32_t k, int32_t node, PyObject *made, PyObject *result) {
    py_handler_t *self = again->handler;
    bool is_live = (self->recorder->book.nodes[node].state & ROTOR_NODE_LIVE) != 0;
    PyObject *storages = PyTuple_New((Py_ssize_t)again->record->pattern->count);
    for (int64_t i = 0; storages != NULL && i < again->record->pattern->count; i++) {
        PyTuple_SET_ITEM(storages, (Py_ssize_t)i, Py_NewRef(again->storages[i]));
    }
    return py_did(PyObject_CallMethod(self->verifier, "replayed", "OiiOOON", again->record, (int)k,
                                      (int)node, made, result == NULL ? Py_None : result,
                                      is_live ? Py_True : Py_False, storages));
}

/* What is now in the place of an output: of a result, or what was written to. A new reference. */
static PyObject *made_at(again_t *again, int32_t k, PyObject **result) {
    py_handler_t *self = again->handler;
    int64_t index = again->record->indices[k];
    if (index >= 0) {
        *result = result_at(self, again->results, &index);
        if (*result == NULL) {
            return PyErr_Format(PyExc_RuntimeError, "an operator made less than before");
        }
        return PyObject_CallMethodNoArgs(*result, self->names[NAME_untyped_storage]);
    }
    for (int64_t i = 0; i < again->record->pattern->count; i++) {
        if (again->record->arguments[i].node == again->record->origins[k]) {
            return Py_NewRef(again->storages[i]);
        }
    }
    return PyErr_Format(PyExc_RuntimeError,
                        "an operation wrote to what is not among its arguments");
}

/* Puts one result where its node's bytes belong. */
static int place_one(again_t *again, int32_t k, int32_t node) {
    py_recorder_t *recorder = again->handler->recorder;
    PyObject *result = NULL;
    PyObject *made = made_at(again, k, &result);
    int ret = made == NULL ? -1 : 0;
    if (ret == 0 && again->handler->verifier != Py_None) {
        ret = compare(again, k, node, made, result);
    }
    if (ret == 0 && (recorder->book.nodes[node].state & ROTOR_NODE_LIVE) != 0) {
        ret = refill(again, node, made);
    } else if (ret == 0 && (ret = py_book_discard(recorder, &recorder->places[node])) == 0) {
        recorder->places[node] = Py_NewRef(made);
    }
    Py_XDECREF(made);
    return ret;
}

static int place(again_t *again) {
    py_recorder_t *recorder = again->handler->recorder;
    const rotor_recorder_t *book = &recorder->book;
    int ret = py_book_forget_gone(recorder);
    if (ret == 0) {
        ret = py_book_guard_outputs(recorder, again->op);
    }
    recorder->is_borrowed = true;
    for (int32_t k = 0; ret == 0 && k < book->records[again->op].output_count; k++) {
        const rotor_record_t *record = &book->records[again->op];
        int32_t node = record->items[record->input_count + k];
        if (node >= 0 && !rotor_recorder_is_material(book, node)) {
            ret = place_one(again, k, node);
        }
    }
    recorder->is_borrowed = false;
    return ret;
}

static int set_grad_enabled(py_handler_t *self, PyObject *is_enabled) {
    return py_did(PyObject_CallOneArg(self->parts[PART_SET_GRAD_ENABLED], is_enabled));
}

/* The settings that an operation ran under, and those of now, to be set again. */
typedef struct {
    PyObject *guards; /* below autograd and autocast */
    PyObject *grad;   /* NULL: the same */
    PyObject *flags;
    PyObject *state;
} settings_t;

static int enter_flags(py_handler_t *self, const py_record_t *record, settings_t *now) {
    PyObject *flags = py_operator_flags(self, record->flag_count);
    int is_same = flags == NULL ? -1 : 1;
    for (int32_t k = 0; is_same == 1 && flags != record->flags && k < record->flag_count; k++) {
        is_same = PyObject_RichCompareBool(PyTuple_GET_ITEM(flags, k),
                                           PyTuple_GET_ITEM(record->flags, k), Py_EQ);
    }
    if (is_same == 0) {
        /* All of them, as they are now. */
        Py_XSETREF(flags, py_operator_flags(self, (int32_t)PyTuple_GET_SIZE(record->flags)));
        now->flags = flags;
        return flags == NULL ? -1
                             : py_did(PyObject_CallOneArg(self->parts[PART_WRITE_FLAGS],
                                                          record->flags));
    }
    Py_XDECREF(flags);
    return is_same < 0 ? -1 : 0;
}

static int enter_settings(py_handler_t *self, const py_record_t *record, settings_t *now) {
    int is_enabled = py_is_true(self->parts[PART_GRAD_ENABLED]);
    if (is_enabled < 0 ||
        (now->guards = PyObject_CallNoArgs(self->parts[PART_BELOW_AUTOGRAD])) == NULL) {
        return -1;
    }
    if (is_enabled != record->grad_enabled) {
        now->grad = Py_NewRef(is_enabled ? Py_True : Py_False);
        if (set_grad_enabled(self, record->grad_enabled ? Py_True : Py_False) != 0) {
            return -1;
        }
    }
    if (enter_flags(self, record, now) != 0) {
        return -1;
    }
    if (record->generator == Py_None) {
        return 0;
    }
    now->state = py_ask(self, record->generator, get_state);
    return now->state == NULL ? -1
                              : py_did(py_ask(self, record->generator, set_state, record->state));
}

/* Sets everything as it was; keeps the exception of before. */
static int leave_settings(py_handler_t *self, const py_record_t *record, settings_t *before) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    int ret = 0;
    if (before->state != NULL) {
        ret |= py_did(py_ask(self, record->generator, set_state, before->state));
    }
    if (before->flags != NULL) {
        ret |= py_did(PyObject_CallOneArg(self->parts[PART_WRITE_FLAGS], before->flags));
    }
    if (before->grad != NULL) {
        ret |= set_grad_enabled(self, before->grad);
    }
    Py_XDECREF(before->guards);
    Py_XDECREF(before->grad);
    Py_XDECREF(before->flags);
    Py_XDECREF(before->state);
    if (type != NULL) {
        PyErr_Restore(type, value, traceback);
        ret = -1;
    }
    return ret;
}

static PyObject *call_again(const py_record_t *record, PyObject *around, PyObject *args,
                            PyObject *kwargs) {
    return around == NULL ? PyObject_Call(record->kernel->replay, args, kwargs)
                          : PyObject_CallFunctionObjArgs(around, record->kernel->replay, args,
                                                         kwargs == NULL ? Py_None : kwargs, NULL);
}

PyObject *py_record_run(py_handler_t *self, const py_record_t *record, PyObject *const *storages,
                        PyObject *around, int64_t *took_ns) {
    settings_t settings = {0};
    PyObject *args = NULL, *kwargs = NULL, *results = NULL;
    int ret = enter_settings(self, record, &settings);
    int64_t start = py_handler_now(self);
    if (ret == 0 && (ret = py_record_fill(self, record, storages, &args, &kwargs)) == 0) {
        results = call_again(record, around, args, kwargs);
    }
    *took_ns =
        record->needs->cost_ns >= 0 ? record->needs->cost_ns : py_handler_now(self) - start;
    if (leave_settings(self, record, &settings) != 0) {
        Py_CLEAR(results);
    }
    Py_XDECREF(args);
    Py_XDECREF(kwargs);
    return results;
}

/* What running an operation again takes beside what the book knows. */
static int make_room(again_t *again) {
    py_handler_t *self = again->handler;
    const py_needs_t *needs = again->record->needs;
    int64_t bytes = rotor_recorder_replay_bytes(&self->recorder->book, again->op);
    int64_t unknown = needs->workspace_bytes - again->record->counted_bytes;
    if (!self->swaps) {
        /* Results come back by a copy: both are held once the workspace is gone. */
        bytes = rotor_max(bytes, 2 * (bytes - again->record->counted_bytes));
    }
    if (again->record->state != Py_None && self->is_cpu) {
        /* The generator's state of now, to be set again. */
        PyObject *nbytes = PyObject_GetAttr(again->record->state, self->names[NAME_nbytes]);
        bytes += nbytes == NULL ? 0 : PyLong_AsLongLong(nbytes);
        Py_XDECREF(nbytes);
        if (PyErr_Occurred()) {
            return -1;
        }
    }
    return py_operator_make_room(self, again->session, needs, bytes + unknown,
                                 bytes + (needs->is_measured ? unknown : 0));
}

/* Has nothing be read that an operation which failed may have written into; keeps its exception. */
static void forget_written(py_recorder_t *recorder) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    (void)rotor_recorder_failed(&recorder->book);
    (void)py_book_settle(recorder);
    PyErr_Restore(type, value, traceback);
}

static int run_again(again_t *again) {
    py_handler_t *self = again->handler;
    rotor_recorder_t *book = &self->recorder->book;
    int64_t took = 0;

    if (make_room(again) != 0 || find_storages(again) != 0) {
        return -1;
    }
    again->results = py_record_run(self, again->record, again->storages, NULL, &took);
    if (again->results == NULL || place(again) != 0) {
        forget_written(self->recorder);
        return -1;
    }
    Py_CLEAR(again->results);
    int status = rotor_recorder_replayed(book, took);
    if (py_check_status(self, status) != 0 || py_book_settle(self->recorder) != 0) {
        return -1;
    }
    py_book_let_go(self->recorder);
    if (book->thrashes == self->seen_thrashes) {
        return 0;
    }
    self->seen_thrashes = book->thrashes;
    return py_did(py_ask(self, again->session, _see_thrashing));
}

static int replay(py_handler_t *self, PyObject *session, int32_t op) {
    PyObject *object = Py_NewRef(self->recorder->records[op]);
    int ret = -1;
    if (Py_TYPE(object) != self->record_type) {
        PyErr_SetString(PyExc_TypeError, "the record of an operation must be a Record");
        Py_DECREF(object);
        return -1;
    }
    again_t again = {
        .handler = self, .session = session, .record = (py_record_t *)object, .op = op};
    int64_t count = again.record->pattern->count;
    again.storages = PyMem_Calloc((size_t)rotor_max(count, 1), sizeof(*again.storages));
    if (again.storages == NULL) {
        PyErr_NoMemory();
        goto out;
    }
    ret = run_again(&again);
    for (int64_t k = 0; k < count; k++) {
        Py_XDECREF(again.storages[k]);
    }
out:
    PyMem_Free(again.storages);
    Py_XDECREF(again.results);
    Py_DECREF(object);
    return ret;
}

/* Has Python fetch a node from the second tier; `storage`: the place of its bytes, or NULL. */
static int fetch_into(py_handler_t *self, PyObject *session, int32_t node, PyObject *storage) {
    py_recorder_t *recorder = self->recorder;
    PyObject *copy = Py_XNewRef(recorder->copies[node]);
    int64_t start = py_handler_now(self);
    PyObject *made = copy == NULL ? NULL
                                  : PyObject_CallMethod(session, "_fetch", "iOO", (int)node, copy,
                                                        storage == NULL ? Py_None : storage);
    int ret = made == NULL ? -1 : 0;
    if (copy == NULL && !PyErr_Occurred()) {
        PyErr_SetString(PyExc_RuntimeError, "the tier has lost a node");
    }
    if (ret == 0 && storage == NULL &&
        (ret = py_book_discard(recorder, &recorder->places[node])) == 0) {
        recorder->places[node] = Py_NewRef(made);
    }
    Py_XDECREF(made);
    Py_XDECREF(copy);
    if (ret != 0) {
        return -1;
    }
    int status = rotor_recorder_fetched(&recorder->book, py_handler_now(self) - start);
    return py_check_status(self, status) == 0 ? py_book_settle(recorder) : -1;
}

/* Brings the awaited node back. Its storage may have died since the book heard of deaths. */
static int fetch(py_handler_t *self, PyObject *session) {
    py_recorder_t *recorder = self->recorder;
    int32_t node = rotor_recorder_awaited(&recorder->book);
    bool has_storage =
        (recorder->book.nodes[node].state & (ROTOR_NODE_LIVE | ROTOR_NODE_COPY)) != 0;
    PyObject *storage = has_storage ? py_book_guard(recorder, node) : NULL;
    if (storage == NULL && PyErr_Occurred()) {
        return -1;
    }
    if (has_storage && storage == NULL) {
        return 0; /* It is forgotten, and asked for again. */
    }
    return fetch_into(self, session, node, storage);
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
        if (py_book_settle(recorder) != 0 || py_check_status(self, status) != 0) {
            return -1;
        }
        py_book_let_go(recorder);
        if (op == ROTOR_FETCH) {
            if (fetch(self, session) != 0) {
                return -1;
            }
            py_book_let_go(recorder);
            continue;
        }
        if (op < 0) {
            return 0;
        }
        if (replay(self, session, op) != 0) {
            return -1;
        }
    }
}
