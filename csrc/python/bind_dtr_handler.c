#include "bind_dtr_private.h"

#include <string.h>

#include "probe.h"
#include "vector.h"

typedef struct {
    PyObject *session;
    const py_kernel_t *kernel;
    PyObject *args;
    PyObject *kwargs; /* NULL for none */
    const py_needs_t *needs;
    bool is_recording;
    bool grad_enabled;
} run_t;

static int call_is_true(PyObject *function) {
    PyObject *answer = PyObject_CallNoArgs(function);
    int is_true = answer == NULL ? -1 : PyObject_IsTrue(answer);
    Py_XDECREF(answer);
    return is_true;
}

/* READ_OK if the handler can take the results in: strided, on the device that counts. */
static enum py_reading are_plain(py_handler_t *self, PyObject *value) {
    if (PyList_Check(value) || PyTuple_Check(value)) {
        for (Py_ssize_t k = 0; k < PySequence_Fast_GET_SIZE(value); k++) {
            enum py_reading found = are_plain(self, PySequence_Fast_GET_ITEM(value, k));
            if (found != READ_OK) {
                return found;
            }
        }
        return READ_OK;
    }
    if (!PyObject_TypeCheck(value, (PyTypeObject *)self->parts[PART_TENSOR_TYPE])) {
        return READ_OK;
    }
    return py_operator_is_plain(self, value);
}

static int take_storage(py_handler_t *self, PyObject *tensor, int32_t index, py_made_t *made) {
    PyObject *storage = PyObject_CallMethodNoArgs(tensor, self->names[NAME_untyped_storage]);
    PyObject *key = storage == NULL ? NULL : PyObject_GetAttr(storage, self->parts[PART_KEY_NAME]);
    PyObject *nbytes = NULL, *ref = NULL;
    int ret = -1;
    if (key == NULL) {
        goto out;
    }
    if (PyDict_GetItemWithError(self->table, key) != NULL) {
        ret = 0;
        goto out;
    }
    if (PyErr_Occurred() ||
        (nbytes = PyObject_CallMethodNoArgs(storage, self->names[NAME_nbytes])) == NULL ||
        (ref = py_ref_make(self->ref_type, storage, self->gone, key)) == NULL) {
        goto out;
    }
    int64_t bytes = PyLong_AsLongLong(nbytes);
    if (bytes < 0 || PyDict_SetItem(self->table, key, ref) != 0) {
        goto out;
    }
    bytes = (bytes + self->block_bytes - 1) / self->block_bytes * self->block_bytes;
    ret = py_made_add(made, ref, bytes, index, -1);
out:
    Py_XDECREF(storage);
    Py_XDECREF(key);
    Py_XDECREF(nbytes);
    Py_XDECREF(ref);
    return ret;
}

static int take_storages(py_handler_t *self, PyObject *value, int32_t *index, py_made_t *made) {
    if (PyList_Check(value) || PyTuple_Check(value)) {
        for (Py_ssize_t k = 0; k < PySequence_Fast_GET_SIZE(value); k++) {
            if (take_storages(self, PySequence_Fast_GET_ITEM(value, k), index, made) != 0) {
                return -1;
            }
        }
        return 0;
    }
    if (!PyObject_TypeCheck(value, (PyTypeObject *)self->parts[PART_TENSOR_TYPE])) {
        return 0;
    }
    return take_storage(self, value, (*index)++, made);
}

/* The written inputs: READ_SLOW where that takes more than a new version. */
static enum py_reading look_at_written(py_handler_t *self, run_t *run) {
    const rotor_recorder_t *book = &self->recorder->book;
    for (int64_t k = 0; k < self->input_count; k++) {
        if (!self->inputs[k].is_written) {
            continue;
        }
        const rotor_node_t *node = &book->nodes[((py_ref_t *)self->inputs[k].ref)->node];
        if ((node->state & ROTOR_NODE_SOURCE) != 0) {
            if (node->needed > 0 || self->watches_writes) {
                return READ_SLOW;
            }
            run->is_recording = false;
        } else if (!run->grad_enabled || node->version >= self->longest_chain) {
            return READ_SLOW;
        }
    }
    return READ_OK;
}

/* A new version of each input that is written to and not a source. */
static int take_written(py_handler_t *self, py_made_t *made) {
    const rotor_recorder_t *book = &self->recorder->book;
    int64_t first = made->count;
    for (int64_t k = 0; k < self->input_count; k++) {
        py_ref_t *ref = (py_ref_t *)self->inputs[k].ref;
        if (!self->inputs[k].is_written ||
            (book->nodes[ref->node].state & ROTOR_NODE_SOURCE) != 0) {
            continue;
        }
        bool is_known = false;
        for (int64_t i = first; i < made->count; i++) {
            is_known |= made->origins[i] == ref->node;
        }
        if (!is_known && py_made_add(made, (PyObject *)ref, book->nodes[ref->node].bytes, -1,
                                     (int32_t)ref->node) != 0) {
            return -1;
        }
    }
    return 0;
}

/* The tuple from which Python makes a `Record` when the operation has to run again. */
static PyObject *record_of(py_handler_t *self, const run_t *run, const py_made_t *made) {
    int64_t at = 0;
    PyObject *flags = py_operator_flags(self);
    PyObject *args = flags == NULL ? NULL : py_operator_pattern(self, run->args, &at);
    PyObject *kwargs = run->kwargs == NULL ? Py_NewRef(Py_None) : PyDict_New();
    PyObject *counted =
        PyLong_FromLongLong(run->needs->is_measured ? run->needs->workspace_bytes : 0);
    PyObject *indices = py_numbers_of(made->indices, made->count);
    PyObject *origins = py_numbers_of(made->origins, made->count);
    PyObject *record = NULL;
    if (args == NULL || kwargs == NULL || counted == NULL || indices == NULL || origins == NULL) {
        goto out;
    }
    if (run->kwargs != NULL) {
        Py_ssize_t position = 0;
        PyObject *name, *value;
        while (PyDict_Next(run->kwargs, &position, &name, &value)) {
            PyObject *item = py_operator_pattern(self, value, &at);
            int ret = item == NULL ? -1 : PyDict_SetItem(kwargs, name, item);
            Py_XDECREF(item);
            if (ret != 0) {
                goto out;
            }
        }
    }
    record = PyTuple_Pack(11, run->kernel->operator_, args, kwargs, indices, origins,
                          run->grad_enabled ? Py_True : Py_False, flags, Py_None, Py_None,
                          (PyObject *)run->needs, counted);
out:
    Py_XDECREF(flags);
    Py_XDECREF(args);
    Py_XDECREF(kwargs);
    Py_XDECREF(counted);
    Py_XDECREF(indices);
    Py_XDECREF(origins);
    return record;
}

static int raise_status(py_handler_t *self, int status) {
    if (status != ROTOR_OK) {
        (void)py_raise_status(PyType_GetModule(Py_TYPE(self)), status);
    }
    return PyErr_Occurred() ? -1 : 0;
}

/* Whatever happened to it, the operation that began has ended. Keeps the exception. */
static void abort_operation(py_handler_t *self) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    self->recorder->is_borrowed = false;
    (void)rotor_recorder_abort(&self->recorder->book);
    (void)py_book_release_guards(self->recorder);
    (void)py_book_settle(self->recorder);
    py_book_let_go(self->recorder);
    if (type != NULL) {
        PyErr_Restore(type, value, traceback);
    }
}

/* Has the inputs in memory and room for the rest. */
static int prepare(py_handler_t *self, const run_t *run) {
    rotor_recorder_t *book = &self->recorder->book;
    int status = rotor_recorder_begin(book, self->nodes, self->node_count);
    if (raise_status(self, status) != 0 || py_book_settle(self->recorder) != 0) {
        return -1;
    }
    if (book->pending_count > 0 && py_operator_catch_up(self, run->session) != 0) {
        return -1;
    }
    const py_needs_t *needs = run->needs;
    int64_t bytes = needs->made_bytes + needs->workspace_bytes;
    return py_operator_make_room(self, run->session, bytes,
                                 needs->is_measured ? bytes : needs->made_bytes);
}

static int complete(py_handler_t *self, const run_t *run, PyObject *results, int64_t took) {
    py_made_t made;
    int32_t index = 0;
    int ret = -1;
    PyObject *record = NULL;

    py_made_init(&made);
    if (take_storages(self, results, &index, &made) != 0 || take_written(self, &made) != 0) {
        goto out;
    }
    bool is_recorded = run->is_recording && made.count > 0 && made.largest > self->small_bytes;
    if (is_recorded && (record = record_of(self, run, &made)) == NULL) {
        goto out;
    }
    if (py_book_reserve(self->recorder, made.count) != 0) {
        goto out;
    }
    int status = py_book_complete(
        self->recorder,
        &(py_completion_t){
            .recorded = is_recorded ? self->node_count : -1,
            .bytes = made.bytes,
            .origins = made.origins,
            .places = made.places,
            .count = made.count,
            .cost_ns = took,
            .workspace_bytes = run->needs->is_measured ? run->needs->workspace_bytes : 0,
            .record = record,
            .nodes = made.nodes,
        });
    if (raise_status(self, status) != 0 || py_book_settle(self->recorder) != 0) {
        goto out;
    }
    for (int64_t k = 0; k < made.count; k++) {
        ((py_ref_t *)made.places[k])->node = made.nodes[k];
    }
    ret = 0;
out:
    Py_XDECREF(record);
    py_made_free(&made);
    return ret;
}

/* Results that Python has to take in; it reads the arguments again. */
static int complete_odd(py_handler_t *self, const run_t *run, PyObject *made, int64_t took) {
    py_operator_clear(self);
    self->is_busy = false;
    PyObject *done =
        PyObject_CallMethod(run->session, "_complete_odd", "OOOOLO", run->kernel->operator_,
                            run->args, run->kwargs == NULL ? Py_None : run->kwargs, made,
                            (long long)took, run->is_recording ? Py_True : Py_False);
    self->is_busy = true;
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Smaller sums are not worth the question. */
#define LEAST_IN_PLACE_BYTES 4096

/* 1 if this is a sum of autograd's engine whose first term nothing else holds: without a mode the
 * engine adds to it in place. -1 with an exception. */
static int is_accumulating(py_handler_t *self, const run_t *run) {
    const py_input_t *terms = self->inputs;
    if (run->kernel->in_place == Py_None || run->kwargs != NULL || self->input_count != 2 ||
        PyTuple_GET_SIZE(run->args) != 2 || terms[0].dims != terms[1].dims ||
        Py_REFCNT(terms[0].tensor) != self->sole_references) {
        return 0;
    }
    /* Data type, device, sizes and strides stand together in the key. */
    size_t words = (size_t)(1 + 2 * terms[0].dims);
    const rotor_node_t *node = &self->recorder->book.nodes[((py_ref_t *)terms[0].ref)->node];
    if (memcmp(self->key + terms[0].first - 1, self->key + terms[1].first - 1,
               words * sizeof(*self->key)) != 0 ||
        (node->state & ROTOR_NODE_SOURCE) == 0 || (node->state & ROTOR_NODE_FOREIGN) != 0 ||
        node->needed > 0 || node->bytes < LEAST_IN_PLACE_BYTES) {
        return 0;
    }
    PyObject *answer = PyObject_CallOneArg(self->parts[PART_IS_ENGINES], terms[0].tensor);
    int is_true = answer == NULL ? -1 : PyObject_IsTrue(answer);
    Py_XDECREF(answer);
    return is_true;
}

/* Runs an operator whose needs are known; *results is set where it has run. */
static enum py_reading run_known(py_handler_t *self, run_t *run, PyObject **results) {
    static const py_needs_t nothing = {.is_measured = true};
    PyObject *call = run->kernel->call;
    int in_backward = 0;
    enum py_reading found;
    int is_enabled = call_is_true(self->parts[PART_GRAD_ENABLED]);
    if (is_enabled < 0) {
        return READ_ERROR;
    }
    run->grad_enabled = run->is_recording = is_enabled;
    if (!is_enabled) {
        PyObject *task = PyObject_CallNoArgs(self->parts[PART_GRAPH_TASK]);
        in_backward = task != NULL && PyLong_AsLong(task) >= 0;
        Py_XDECREF(task);
        if (PyErr_Occurred()) {
            return READ_ERROR;
        }
        run->is_recording = !in_backward;
    }
    if ((found = py_operator_find(self, run->session)) != READ_OK ||
        (found = look_at_written(self, run)) != READ_OK) {
        return found;
    }
    if (in_backward) {
        int is_in_place = is_accumulating(self, run);
        if (is_in_place < 0) {
            return READ_ERROR;
        }
        if (is_in_place) {
            call = run->kernel->in_place;
            run->needs = &nothing;
        }
    }
    if (prepare(self, run) != 0) {
        goto fail;
    }
    int64_t start = rotor_clock_ns();
    PyObject *made = PyObject_Call(call, run->args, run->kwargs);
    int64_t took = rotor_clock_ns() - start;
    if (made == NULL) {
        goto fail;
    }
    found = are_plain(self, made);
    if (found == READ_SLOW) {
        found = complete_odd(self, run, made, took) == 0 ? READ_OK : READ_ERROR;
    } else if (found == READ_OK && complete(self, run, made, took) != 0) {
        found = READ_ERROR;
    }
    if (found == READ_ERROR) {
        Py_DECREF(made);
        goto fail;
    }
    *results = made;
    return READ_OK;
fail:
    abort_operation(self);
    return READ_ERROR;
}

static enum py_reading run_operator(py_handler_t *self, run_t *run, PyObject **results) {
    enum py_reading found = py_operator_read(self, run->kernel, run->args, run->kwargs);
    if (found != READ_OK) {
        return found;
    }
    PyObject *key = PyBytes_FromStringAndSize(
        (const char *)self->key, (Py_ssize_t)(self->key_count * (int64_t)sizeof(*self->key)));
    PyObject *needs =
        key == NULL ? NULL : Py_XNewRef(PyDict_GetItemWithError(self->needs, key));
    Py_XDECREF(key);
    if (needs == NULL) {
        return PyErr_Occurred() ? READ_ERROR : READ_SLOW;
    }
    found = READ_SLOW;
    if (Py_TYPE(needs) == self->needs_type &&
        (!self->is_cpu || ((py_needs_t *)needs)->is_measured)) {
        run->needs = (py_needs_t *)needs;
        found = run_known(self, run, results);
    }
    Py_DECREF(needs);
    return found;
}

static bool are_known_types(py_handler_t *self, PyObject *types) {
    PyObject *plain = self->parts[PART_PLAIN_TYPES];
    if (!PyTuple_Check(types) && !PyList_Check(types)) {
        return false;
    }
    for (Py_ssize_t k = 0; k < PySequence_Fast_GET_SIZE(types); k++) {
        bool is_plain = false;
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(plain); i++) {
            is_plain |= PyTuple_GET_ITEM(plain, i) == PySequence_Fast_GET_ITEM(types, k);
        }
        if (!is_plain) {
            return false;
        }
    }
    return true;
}

static PyObject *run(py_handler_t *self, PyObject *const *args, PyObject *kernel) {
    PyObject *kwargs = args[4] == Py_None || PyDict_GET_SIZE(args[4]) == 0 ? NULL : args[4];
    PyObject *results = NULL;
    enum py_reading found = READ_SLOW;
    run_t of = {
        .session = args[0], .kernel = (py_kernel_t *)kernel, .args = args[3], .kwargs = kwargs};
    if (of.kernel->is_view && self->has_views) {
        return PyObject_Call(of.kernel->call, of.args, kwargs);
    }
    if (py_book_forget_gone(self->recorder) != 0) {
        return NULL;
    }
    int is_capturing =
        self->parts[PART_CAPTURING] == Py_None ? 0 : call_is_true(self->parts[PART_CAPTURING]);
    if (is_capturing < 0) {
        return NULL;
    }
    if (of.kernel->is_simple && self->recorder->observer == Py_None && !self->is_busy && !is_capturing) {
        self->is_busy = true;
        found = run_operator(self, &of, &results);
        py_operator_clear(self);
        self->is_busy = false;
        py_book_let_go(self->recorder);
    }
    return found != READ_SLOW
               ? results
               : PyObject_CallMethodObjArgs(args[0], self->names[NAME__handle], args[1], args[2],
                                            args[3], args[4], NULL);
}

/* The same where no mode sees the functions of PyTorch that the handler uses. */
static PyObject *run_without_functions(py_handler_t *self, PyObject *const *args,
                                       PyObject *kernel) {
    PyObject *context = PyObject_CallNoArgs(self->parts[PART_WITHOUT_FUNCTIONS]);
    PyObject *entered =
        context == NULL ? NULL : PyObject_CallMethodNoArgs(context, self->names[NAME___enter__]);
    if (entered == NULL) {
        Py_XDECREF(context);
        return NULL;
    }
    Py_DECREF(entered);
    PyObject *results = run(self, args, kernel);
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *left = PyObject_CallMethodObjArgs(context, self->names[NAME___exit__], Py_None,
                                                Py_None, Py_None, NULL);
    Py_DECREF(context);
    if (left == NULL) {
        Py_CLEAR(results);
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(traceback);
        return NULL;
    }
    Py_DECREF(left);
    PyErr_Restore(type, value, traceback);
    return results;
}

PyObject *py_operator_run(py_handler_t *self, PyObject *const *args) {
    PyObject *kernel = PyDict_GetItemWithError(self->kernels, args[1]);
    if (kernel == NULL && PyErr_Occurred()) {
        return NULL;
    }
    if (kernel == NULL || !are_known_types(self, args[2])) {
        return PyObject_CallMethodObjArgs(args[0], self->names[NAME__handle], args[1], args[2],
                                          args[3], args[4], NULL);
    }
    int in_functions = call_is_true(self->parts[PART_IN_FUNCTIONS]);
    if (in_functions < 0) {
        return NULL;
    }
    Py_INCREF(kernel);
    PyObject *results =
        in_functions ? run_without_functions(self, args, kernel) : run(self, args, kernel);
    Py_DECREF(kernel);
    return results;
}
