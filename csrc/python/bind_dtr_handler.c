/* The path of an operator of the program: read, begun, run, recorded. */
#include "bind_dtr_private.h"

#include <string.h>

/* Counts a result without a place in the session, such as a seed on the CPU: others of the operator
 * may still be evicted. Of a result in another layout, the inputs stay. */
static int take_odd(py_handler_t *self, py_run_t *run, PyObject *tensor) {
    if (py_did(py_ask(self, run->session, _refuse_opaque, tensor)) != 0) {
        return -1;
    }
    int is_strided = py_tensor_is_strided(self, tensor);
    int ret = is_strided < 0 ? -1 : py_did(py_ask(self, run->session, _see_parts, tensor));
    if (is_strided != 0) {
        return ret;
    }
    /* Tensors of other layouts cannot be evicted or computed again. */
    run->is_recording = false;
    for (int64_t k = 0; k < self->node_count && ret == 0; k++) {
        ret = py_odd_keep(run, self->nodes[k]);
    }
    return ret;
}

/* Lengths, offsets and sizes of batches: code below the operators reads such tensors by pointer, so
 * they are never evicted. Larger ones are known to the guard (rotor.dtr.guard). */
enum { MOST_INDEX_BYTES = 1 << 16 };

static int holds_integers(py_handler_t *self, PyObject *tensor) {
    PyObject *dtype = PyObject_GetAttr(tensor, self->names[NAME_dtype]);
    int ret = dtype == NULL ? -1 : PySequence_Contains(self->parts[PART_INTEGERS], dtype);
    Py_XDECREF(dtype);
    return ret;
}

/* index: among the results, -1 for what was written to; origin: -1 for what is new. */
static int add_made(py_made_t *made, PyObject *ref, int64_t bytes, int32_t index, int32_t origin) {
    int64_t grown;
#define GROW(items) (grown = made->capacity, py_reserve(made->items, made->count, grown, 1))
    if (GROW(places) != 0 || GROW(bytes) != 0 || GROW(origins) != 0 || GROW(indices) != 0 ||
        GROW(nodes) != 0) {
        return -1;
    }
#undef GROW
    made->capacity = grown;
    made->places[made->count] = Py_NewRef(ref);
    made->bytes[made->count] = bytes;
    made->indices[made->count] = index;
    made->origins[made->count++] = origin;
    made->largest = rotor_max(made->largest, bytes);
    return 0;
}

static int take_tensor(py_handler_t *self, py_run_t *run, PyObject *tensor, int32_t index,
                       py_made_t *made) {
    enum py_reading found = py_tensor_look(self, tensor);
    bool is_new;
    if (found != READ_OK) {
        return found == READ_ERROR ? -1 : take_odd(self, run, tensor);
    }
    PyObject *storage = PyObject_CallMethodNoArgs(tensor, self->names[NAME_untyped_storage]);
    py_ref_t *ref = storage == NULL ? NULL : py_table_enter(self, storage, &is_new);
    if (ref == NULL || !is_new) {
        Py_XDECREF(storage);
        return ref == NULL ? -1 : 0;
    }
    int64_t bytes = py_bytes_of(self, storage);
    Py_DECREF(storage);
    if (bytes < 0) {
        return -1;
    }
    int is_index = self->is_cpu && bytes <= MOST_INDEX_BYTES ? holds_integers(self, tensor) : 0;
    if (is_index < 0) {
        return -1;
    }
    ref->stays = is_index != 0;
    bytes = (bytes + self->block_bytes - 1) / self->block_bytes * self->block_bytes;
    return add_made(made, (PyObject *)ref, bytes, index, -1);
}

static int take_results(py_handler_t *self, py_run_t *run, PyObject *value, int32_t *index,
                        py_made_t *made) {
    if (py_is_tensor(self, value)) {
        return take_tensor(self, run, value, (*index)++, made);
    }
    if (PyList_Check(value) || PyTuple_Check(value)) {
        PyObject *item;
        for (Py_ssize_t k = 0; (item = py_entry(value, k)) != NULL; k++) {
            int ret = take_results(self, run, item, index, made);
            Py_DECREF(item);
            if (ret != 0) {
                return -1;
            }
        }
    }
    return 0;
}

/* A new version of each input that is written to and not a source. */
static int take_written(py_handler_t *self, const py_run_t *run, py_made_t *made) {
    const rotor_recorder_t *book = &self->recorder->book;
    int64_t first = made->count;
    if ((run->kernel->traits & TRAIT_RESHAPES) != 0) {
        return 0;
    }
    for (int64_t k = 0; k < self->input_count; k++) {
        py_ref_t *ref = self->inputs[k].ref;
        if (!self->inputs[k].is_written ||
            (book->nodes[ref->node].state & ROTOR_NODE_SOURCE) != 0) {
            continue;
        }
        bool is_known = false;
        for (int64_t i = first; i < made->count; i++) {
            is_known |= made->origins[i] == ref->node;
        }
        if (!is_known && add_made(made, (PyObject *)ref, book->nodes[ref->node].bytes, -1,
                                  (int32_t)ref->node) != 0) {
            return -1;
        }
    }
    return 0;
}

/* The sizes of storages that an operator may have changed. */
static int see_sizes(py_handler_t *self) {
    py_recorder_t *recorder = self->recorder;
    for (int64_t k = 0; k < self->input_count; k++) {
        enum py_reading found = py_tensor_look(self, self->inputs[k].tensor);
        int64_t node = self->inputs[k].ref->node;
        PyObject *storage = found == READ_OK ? py_book_storage_of(recorder, node) : NULL;
        int64_t bytes = storage == NULL ? 0 : py_bytes_of(self, storage);
        if (found == READ_ERROR || bytes < 0) {
            Py_XDECREF(storage);
            return -1;
        }
        if (storage != NULL) {
            bytes = (bytes + self->block_bytes - 1) / self->block_bytes * self->block_bytes;
            rotor_recorder_resized(&recorder->book, (int32_t)node, bytes);
        }
        Py_XDECREF(storage);
    }
    return 0;
}

/* Has the inputs in memory and room for the rest. */
static int prepare(py_handler_t *self, py_run_t *run) {
    rotor_recorder_t *book = &self->recorder->book;
    int status = rotor_recorder_begin(book, self->nodes, self->node_count);
    if (py_check_status(self, status) != 0 || py_book_settle(self->recorder) != 0) {
        return -1;
    }
    if (book->pending_count > 0 && py_operator_catch_up(self, run->session) != 0) {
        return -1;
    }
    if ((run->kernel->traits & (TRAIT_RANDOM | TRAIT_CUSTOM)) != 0 &&
        py_odd_generator(self, run) != 0) {
        return -1;
    }
    if ((run->kernel->traits & TRAIT_VARIES) != 0 && py_odd_varying(self, run) != 0) {
        return -1;
    }
    const py_needs_t *needs = run->needs;
    if (run->is_in_place) {
        return py_operator_make_room(self, run->session, NULL, 0, 0);
    }
    int64_t least = needs->made_bytes + run->kept_bytes;
    int64_t bytes = least + needs->workspace_bytes;
    /* A session hears of every operator that is not known. */
    return needs->is_measured
               ? py_operator_make_room(self, run->session, needs, bytes, bytes)
               : py_operator_ask_room(self, run->session, needs, bytes, least);
}

/* What it has made, and what running it took where that was measured. */
static void note_needs(const py_run_t *run, const py_made_t *made) {
    int64_t new_bytes = 0, large_blocks = 0;
    for (int64_t k = 0; k < made->count; k++) {
        new_bytes += made->origins[k] < 0 ? made->bytes[k] : 0;
        large_blocks += made->origins[k] < 0 && made->bytes[k] > ROTOR_LARGE_BYTES;
    }
    run->needs->large_blocks = rotor_max(run->needs->large_blocks, large_blocks);
    if (run->peak_bytes < 0) {
        run->needs->made_bytes = rotor_max(run->needs->made_bytes, new_bytes);
        return;
    }
    run->needs->made_bytes = new_bytes;
    run->needs->workspace_bytes = rotor_max(run->peak_bytes - new_bytes, 0);
    run->needs->large_blocks =
        large_blocks + (run->needs->workspace_bytes > ROTOR_LARGE_BYTES ? 1 : 0);
    run->needs->is_measured = true;
}

/* The verifier sees what an operator from outside PyTorch has made. */
static int show_verifier(py_handler_t *self, const py_run_t *run, const py_made_t *made,
                         PyObject *record) {
    if (self->verifier == Py_None || (run->kernel->traits & TRAIT_CUSTOM) == 0) {
        return 0;
    }
    PyObject *storages = PyList_New(0);
    for (int64_t k = 0; storages != NULL && k < made->count; k++) {
        if (made->origins[k] < 0 &&
            PyList_Append(storages, PyWeakref_GetObject(made->places[k])) != 0) {
            Py_CLEAR(storages);
        }
    }
    int ret = storages == NULL ? -1 : py_did(py_ask(self, self->verifier, ran, record, storages));
    Py_XDECREF(storages);
    return ret;
}

static int record_results(py_handler_t *self, py_run_t *run, py_made_t *made) {
    PyObject *record = NULL;
    int ret = -1;
    bool is_recorded =
        run->is_recording && made->count > 0 && made->largest > self->small_bytes;
    if (is_recorded && ((record = (PyObject *)py_record_make(self, run, made)) == NULL ||
                        show_verifier(self, run, made, record) != 0)) {
        goto out;
    }
    if (py_book_reserve(self->recorder, made->count) != 0) {
        goto out;
    }
    bool has_workspace = run->needs->is_measured && !run->is_in_place;
    rotor_completion_t done = {
        .recorded = is_recorded ? self->node_count - self->hidden_count : -1,
        .bytes = made->bytes,
        .origins = made->origins,
        .count = made->count,
        .cost_ns = run->took_ns,
        .workspace_bytes = has_workspace ? run->needs->workspace_bytes : 0,
        .kept_bytes = is_recorded ? run->kept_bytes : 0,
    };
    int status = py_book_complete(self->recorder, &done, made->places, record, made->nodes);
    if (py_check_status(self, status) != 0 || py_book_settle(self->recorder) != 0) {
        goto out;
    }
    for (int64_t k = 0; k < made->count; k++) {
        ((py_ref_t *)made->places[k])->node = made->nodes[k];
    }
    ret = self->recorder->observer == Py_None ? 0 : py_odd_observe(self, run, made, is_recorded);
    for (int64_t k = 0; k < made->count && ret == 0; k++) {
        if (((py_ref_t *)made->places[k])->stays && made->origins[k] < 0) {
            ret = py_odd_keep(run, made->nodes[k]);
        }
    }
out:
    Py_XDECREF(record);
    return ret;
}

static int complete(py_handler_t *self, py_run_t *run, PyObject *results) {
    py_made_t *made = &self->outputs;
    int32_t index = 0;
    int ret = -1;

    made->count = made->largest = 0;
    if (take_results(self, run, results, &index, made) == 0 &&
        ((run->kernel->traits & TRAIT_RESHAPES) == 0 || see_sizes(self) == 0) &&
        take_written(self, run, made) == 0) {
        note_needs(run, made);
        ret = record_results(self, run, made);
    }
    for (int64_t k = 0; k < made->count; k++) {
        if (ret != 0 && made->origins[k] < 0) {
            py_table_remove(&self->table, (py_ref_t *)made->places[k]);
        }
        Py_DECREF(made->places[k]);
    }
    return ret;
}

/* Sums below this size are not looked at. */
#define LEAST_IN_PLACE_BYTES 4096

/* 1 if this is a sum of autograd's engine whose first term nothing else holds: without a mode the
 * engine adds to it in place. -1 with an exception. */
static int is_accumulating(py_handler_t *self, const py_run_t *run) {
    const py_input_t *terms = self->inputs;
    if (run->kernel->in_place == Py_None || !run->needs->is_measured || run->kwargs != NULL ||
        self->input_count != 2 || PyTuple_GET_SIZE(run->args) != 2 ||
        terms[0].dims != terms[1].dims || Py_REFCNT(terms[0].tensor) != self->sole_references + 1) {
        return 0;
    }
    /* Data type, device, sizes and strides stand together in the key. */
    size_t words = (size_t)(1 + 2 * terms[0].dims);
    const rotor_node_t *node = &self->recorder->book.nodes[terms[0].ref->node];
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

/* What of the settings decides on recording; *in_backward: the engine runs it, without a graph. */
static int look_at_settings(py_handler_t *self, py_run_t *run, bool *in_backward) {
    int is_enabled = py_is_true(self->parts[PART_GRAD_ENABLED]);
    if (is_enabled < 0) {
        return -1;
    }
    run->grad_enabled = run->is_recording = is_enabled;
    *in_backward = false;
    if (!is_enabled) {
        PyObject *task = PyObject_CallNoArgs(self->parts[PART_GRAPH_TASK]);
        *in_backward = task != NULL && PyLong_AsLong(task) >= 0;
        Py_XDECREF(task);
        run->is_recording = !*in_backward;
    }
    return PyErr_Occurred() ? -1 : 0;
}

/* What of the operator and its arguments decides on recording. */
static int look_at_arguments(py_handler_t *self, py_run_t *run) {
    int32_t at = run->kernel->kept_if;
    if (self->has_others) {
        run->is_recording = false;
    }
    if (at >= 0 && at + 1 < PyTuple_GET_SIZE(run->args)) {
        int first = PyObject_IsTrue(PyTuple_GET_ITEM(run->args, at));
        int second = PyObject_IsTrue(PyTuple_GET_ITEM(run->args, at + 1));
        if (first < 0 || second < 0) {
            return -1;
        }
        run->is_recording = run->is_recording && !(first && second);
    }
    if (PySet_GET_SIZE(self->kept) > 0) {
        int is_kept = PySet_Contains(self->kept, run->kernel->name);
        if (is_kept < 0) {
            return -1;
        }
        run->is_recording = run->is_recording && !is_kept;
    }
    return 0;
}

static bool writes(const py_kernel_t *kernel) {
    return kernel->written != 0 || PyTuple_GET_SIZE(kernel->written_names) > 0 ||
           kernel->hidden != 0 || (kernel->traits & TRAIT_RESHAPES) != 0;
}

/* Has it read, and finds what it needs. */
static int get_ready(py_handler_t *self, py_run_t *run) {
    bool in_backward;
    if (look_at_settings(self, run, &in_backward) != 0 ||
        py_operator_read(self, run->session, run->kernel, run->args, run->kwargs) != 0 ||
        py_operator_find(self, run->session) != 0 || look_at_arguments(self, run) != 0 ||
        (writes(run->kernel) && py_odd_writes(self, run) != 0) ||
        py_operator_number(self) != 0 || py_needs_find(self, run) != 0) {
        return -1;
    }
    /* An observer hears of every sum as one that makes a new storage. */
    bool may_be = in_backward && self->recorder->observer == Py_None;
    int is_in_place = may_be ? is_accumulating(self, run) : 0;
    run->is_in_place = is_in_place == 1;
    return is_in_place < 0 ? -1 : 0;
}

static PyObject *call(py_handler_t *self, py_run_t *run) {
    const py_kernel_t *kernel = run->kernel;
    if ((kernel->traits & TRAIT_ODD) != 0 || py_lacks_needs(self, run)) {
        return py_odd_call(self, run);
    }
    int64_t start = py_handler_now(self);
    PyObject *results = PyObject_Call(run->is_in_place ? kernel->in_place : kernel->call,
                                      run->args, run->kwargs);
    run->took_ns = self->is_cpu ? py_handler_now(self) - start : run->needs->cost_ns;
    return results;
}

/* What it writes to differs from now on from what a second tier may have of it. */
static int drop_copies(py_handler_t *self, const py_run_t *run) {
    rotor_recorder_t *book = &self->recorder->book;
    bool reshapes = (run->kernel->traits & TRAIT_RESHAPES) != 0;
    int status = ROTOR_OK;
    if (!book->eviction.has_tier) {
        return 0;
    }
    for (int64_t k = 0; k < self->input_count && status == ROTOR_OK; k++) {
        const py_input_t *input = &self->inputs[k];
        if (input->is_written || input->is_hidden || reshapes || (run->is_in_place && k == 0)) {
            status = rotor_recorder_changed(book, (int32_t)input->ref->node);
        }
    }
    return py_check_status(self, status) == 0 && py_book_settle(self->recorder) == 0 ? 0 : -1;
}

static PyObject *run_operator(py_handler_t *self, py_run_t *run) {
    PyObject *results = NULL;
    if (get_ready(self, run) != 0 || py_book_may_begin(self->recorder) != 0) {
        return NULL;
    }
    if (prepare(self, run) == 0 && drop_copies(self, run) == 0) {
        results = call(self, run);
    }
    if (results == NULL || complete(self, run, results) != 0) {
        Py_CLEAR(results);
        py_handler_abort(self);
        return NULL;
    }
    if (run->varies && run->peak_bytes >= 0 && py_odd_note_varying(self, run) != 0) {
        Py_CLEAR(results);
    }
    return results;
}

/* A view: it runs as it is, where storages without bytes can have views. */
static PyObject *run_view(py_handler_t *self, const py_run_t *run) {
    if ((run->kernel->traits & TRAIT_FRESH) != 0 && PyTuple_GET_SIZE(run->args) > 0) {
        PyObject *tensor = PyTuple_GET_ITEM(run->args, 0);
        PyObject *storage =
            PyObject_CallMethodNoArgs(tensor, self->names[NAME_untyped_storage]);
        bool is_new = storage != NULL && py_table_find(&self->table, storage) == NULL;
        Py_XDECREF(storage);
        if (storage == NULL ||
            (is_new && py_did(py_ask(self, run->session, _see_parts, tensor)) != 0)) {
            return NULL;
        }
    }
    return PyObject_Call(run->kernel->call, run->args, run->kwargs);
}

static PyObject *run(py_handler_t *self, PyObject *const *args, const py_kernel_t *kernel) {
    py_run_t this = {
        .session = args[0],
        .kernel = kernel,
        .args = args[3],
        .kwargs = args[4] == Py_None || PyDict_GET_SIZE(args[4]) == 0 ? NULL : args[4],
        .peak_bytes = -1,
    };
    if ((kernel->traits & TRAIT_VIEW) != 0 && self->swaps) {
        return run_view(self, &this);
    }
    if (py_book_forget_gone(self->recorder) != 0) {
        return NULL;
    }
    int is_capturing =
        self->parts[PART_CAPTURING] == Py_None ? 0 : py_is_true(self->parts[PART_CAPTURING]);
    if (is_capturing != 0) {
        return is_capturing < 0 ? NULL : py_ask(self, args[0], _refuse_capture);
    }
    if (self->is_busy) {
        return py_book_refuse_reentry();
    }
    self->is_busy = true;
    PyObject *results = run_operator(self, &this);
    py_operator_clear(self);
    self->is_busy = false;
    Py_XDECREF((PyObject *)this.needs);
    Py_XDECREF(this.key);
    Py_XDECREF(this.generator);
    Py_XDECREF(this.state);
    py_book_let_go(self->recorder);
    return results;
}

/* The same where no mode sees the functions of PyTorch that the handler uses. */
static PyObject *run_without_functions(py_handler_t *self, PyObject *const *args,
                                       const py_kernel_t *kernel) {
    PyObject *context = PyObject_CallNoArgs(self->parts[PART_WITHOUT_FUNCTIONS]);
    if (context == NULL ||
        py_did(PyObject_CallMethodNoArgs(context, self->names[NAME___enter__])) != 0) {
        Py_XDECREF(context);
        return NULL;
    }
    PyObject *results = run(self, args, kernel);
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    int ret = py_did(py_ask(self, context, __exit__, Py_None, Py_None, Py_None));
    Py_DECREF(context);
    if (ret != 0) {
        Py_CLEAR(results);
    }
    if (type != NULL) {
        PyErr_Restore(type, value, traceback);
    }
    return results;
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

/* The kernel of an operator, a new reference; the first time Python makes it. */
static PyObject *kernel_of(py_handler_t *self, PyObject *session, PyObject *function) {
    PyObject *kernel = PyDict_GetItemWithError(self->kernels, function);
    if (kernel != NULL || PyErr_Occurred()) {
        return Py_XNewRef(kernel);
    }
    kernel = py_ask(self, session, _find_kernel, function);
    if (kernel != NULL && Py_TYPE(kernel) != self->kernel_type) {
        PyErr_SetString(PyExc_TypeError, "an operator's kernel must be a Kernel");
        Py_CLEAR(kernel);
    }
    return kernel;
}

/* Appends weak references to the tensors among results. */
static int note_made(const py_handler_t *self, PyObject *value) {
    if (py_is_tensor(self, value)) {
        PyObject *ref = PyWeakref_NewRef(value, NULL);
        /* One that exists was noted, or belongs to a tensor that no operator made. */
        int ret = ref == NULL ? -1 : Py_REFCNT(ref) > 1 ? 0 : PyList_Append(self->made, ref);
        Py_XDECREF(ref);
        return ret;
    }
    int ret = 0;
    if (PyList_Check(value) || PyTuple_Check(value)) {
        for (Py_ssize_t k = 0; k < PySequence_Fast_GET_SIZE(value) && ret == 0; k++) {
            ret = note_made(self, PySequence_Fast_GET_ITEM(value, k));
        }
    }
    return ret;
}

static PyObject *run_locked(py_handler_t *self, PyObject *const *args) {
    if (!are_known_types(self, args[2])) {
        PyObject *answer = py_ask(self, args[0], _refuse_types, args[2]);
        if (answer != Py_None) {
            return answer;
        }
        Py_DECREF(answer);
    }
    int in_functions = py_is_true(self->parts[PART_IN_FUNCTIONS]);
    PyObject *kernel = in_functions < 0 ? NULL : kernel_of(self, args[0], args[1]);
    if (kernel == NULL) {
        return NULL;
    }
    PyObject *results = in_functions
                            ? run_without_functions(self, args, (const py_kernel_t *)kernel)
                            : run(self, args, (const py_kernel_t *)kernel);
    Py_DECREF(kernel);
    if (results != NULL && self->made != NULL && PyList_Check(self->made) &&
        note_made(self, results) != 0) {
        Py_CLEAR(results);
    }
    return results;
}

PyObject *py_operator_run(py_handler_t *self, PyObject *const *args) {
    py_handler_lock(self);
    PyObject *results = run_locked(self, args);
    py_handler_unlock(self);
    return results;
}
