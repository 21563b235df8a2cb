#include "bind_dtr_book.h"

PyDoc_STRVAR(source_doc, "source($self, nbytes, is_foreign, place, /)\n--\n\n"
                         "Add a storage that nothing recorded makes; return its number.");

static PyObject *py_recorder_source(METHOD_ARGUMENTS) {
    py_recorder_t *self = py_as_recorder(object);
    int64_t bytes;
    int32_t node = -1;
    if (py_book_expect("source", count, 3, names) != 0 ||
        py_book_read_int64(args[0], &bytes) != 0 || py_book_forget_gone(self) != 0 ||
        py_book_reserve(self, 1) != 0) {
        return NULL;
    }
    int status = rotor_recorder_source(&self->book, bytes, args[1] == Py_True, &node);
    if (status == ROTOR_OK) {
        self->places[node] = Py_NewRef(args[2]);
    }
    return py_book_answer(self, type, status, status == ROTOR_OK ? PyLong_FromLong(node) : NULL);
}

PyDoc_STRVAR(begin_doc, "begin($self, nodes, /)\n--\n\n"
                        "Begin an operation with these distinct inputs, which are locked.");

static PyObject *py_recorder_begin(METHOD_ARGUMENTS) {
    py_recorder_t *self = py_as_recorder(object);
    int32_t few[64];
    int32_t *nodes = few;
    PyObject *result = NULL;
    if (py_book_expect("begin", count, 1, names) != 0) {
        return NULL;
    }
    PyObject *inputs = PySequence_Tuple(args[0]);
    if (inputs == NULL) {
        return NULL;
    }
    if (py_book_forget_gone(self) != 0 || py_book_may_begin(self) != 0) {
        goto out;
    }
    Py_ssize_t length = PyTuple_GET_SIZE(inputs);
    if (length > 64 && (nodes = PyMem_Malloc((size_t)length * sizeof(*nodes))) == NULL) {
        PyErr_NoMemory();
        goto out;
    }
    for (Py_ssize_t k = 0; k < length; k++) {
        if (py_book_read_node(self, PyTuple_GET_ITEM(inputs, k), &nodes[k]) != 0) {
            goto out;
        }
    }
    int status = rotor_recorder_begin(&self->book, nodes, length);
    result = py_book_answer(self, type, status, Py_NewRef(Py_None));
out:
    if (nodes != few) {
        PyMem_Free(nodes);
    }
    Py_DECREF(inputs);
    return result;
}

PyDoc_STRVAR(
    make_room_doc,
    "make_room($self, nbytes, enough, /)\n--\n\n"
    "Return None where so many bytes fit; False where they do not and nothing can go, or only "
    "what is needed soon where no more than enough bytes are in memory; else "
    "(storage, node, is_moving) to evict now, and ask again. is_moving: the bytes have to be "
    "written to the second tier before, and moved() follows.");

static PyObject *py_recorder_make_room(METHOD_ARGUMENTS) {
    py_recorder_t *self = py_as_recorder(object);
    int64_t bytes, enough;
    int32_t node = 0;
    bool is_moving = false;
    if (py_book_expect("make_room", count, 2, names) != 0 ||
        py_book_read_int64(args[0], &bytes) != 0 || py_book_read_int64(args[1], &enough) != 0) {
        return NULL;
    }
    for (;;) {
        if (py_book_forget_gone(self) != 0) {
            return NULL;
        }
        int status = rotor_recorder_make_room(&self->book, bytes, enough, &node, &is_moving);
        if (status != ROTOR_OK) {
            return py_book_answer(self, type, status, NULL);
        }
        if (node < 0) {
            return py_book_answer(self, type, status, Py_NewRef(node == -1 ? Py_None : Py_False));
        }
        PyObject *place = node < self->place_capacity ? self->places[node] : NULL;
        bool is_copy = (self->book.nodes[node].state & ROTOR_NODE_COPY) != 0;
        if (place != NULL && (is_copy || PyWeakref_Check(place))) {
            PyObject *storage = py_book_storage_of(self, node);
            PyObject *result =
                storage == NULL ? NULL
                                : Py_BuildValue("NiN", storage, (int)node,
                                                PyBool_FromLong(is_moving));
            if (result == NULL && !PyErr_Occurred()) {
                PyErr_SetString(PyExc_RuntimeError, "the storage of a live node is gone");
            }
            return py_book_answer(self, type, status, result);
        }
        if (py_book_settle(self) != 0) {
            return NULL;
        }
        py_book_let_go(self);
    }
}

PyDoc_STRVAR(finish_doc,
             "finish($self, recorded, nbytes, origins, cost_ns, workspace_bytes, kept_bytes, "
             "places, record, /)\n--\n\n"
             "Record the new operation, which ran; return the numbers of its outputs.");

static PyObject *py_recorder_finish(METHOD_ARGUMENTS) {
    py_recorder_t *self = py_as_recorder(object);
    int64_t recorded, cost, workspace, kept;
    int64_t bytes[64];
    int32_t origins[64];
    int32_t nodes[64];
    int64_t *all_bytes = bytes;
    int32_t *all_origins = origins;
    int32_t *all_nodes = nodes;
    PyObject *result = NULL;

    if (py_book_expect("finish", count, 8, names) != 0 ||
        py_book_read_int64(args[0], &recorded) != 0 || py_book_read_int64(args[3], &cost) != 0 ||
        py_book_read_int64(args[4], &workspace) != 0 || py_book_read_int64(args[5], &kept) != 0) {
        return NULL;
    }
    /* Making a weak reference may run the garbage collector, and thereby any code. */
    PyObject *places = PySequence_Tuple(args[6]);
    if (places == NULL) {
        return NULL;
    }
    Py_ssize_t length = PyTuple_GET_SIZE(places);
    if (!PyList_Check(args[1]) || !PyList_Check(args[2]) || PyList_GET_SIZE(args[1]) != length ||
        PyList_GET_SIZE(args[2]) != length) {
        PyErr_SetString(PyExc_TypeError, "nbytes, origins, places must be lists of one length");
        goto out;
    }
    if (py_book_reserve(self, length) != 0) {
        goto out;
    }
    if (self->book.frame_count != 1 || recorded > self->book.input_count) {
        PyErr_SetString(PyExc_RuntimeError, "no new operation is about to finish");
        goto out;
    }
    if (length > 64) {
        all_bytes = PyMem_Malloc((size_t)length * sizeof(*all_bytes));
        all_origins = PyMem_Malloc((size_t)length * sizeof(*all_origins));
        all_nodes = PyMem_Malloc((size_t)length * sizeof(*all_nodes));
        if (all_bytes == NULL || all_origins == NULL || all_nodes == NULL) {
            PyErr_NoMemory();
            goto out;
        }
    }
    for (Py_ssize_t k = 0; k < length; k++) {
        int64_t origin;
        if (py_book_read_int64(PyList_GET_ITEM(args[1], k), &all_bytes[k]) != 0 ||
            py_book_read_int64(PyList_GET_ITEM(args[2], k), &origin) != 0) {
            goto out;
        }
        all_origins[k] = (int32_t)origin;
    }
    int status = py_book_complete(self, &(py_completion_t){
                                            .recorded = recorded,
                                            .bytes = all_bytes,
                                            .origins = all_origins,
                                            .places = PySequence_Fast_ITEMS(places),
                                            .count = length,
                                            .cost_ns = cost,
                                            .workspace_bytes = workspace,
                                            .kept_bytes = kept,
                                            .record = args[7],
                                            .nodes = all_nodes,
                                        });
    if (status == ROTOR_OK && !PyErr_Occurred()) {
        result = py_book_node_list(all_nodes, length);
    }
    result = py_book_answer(self, type, status, result);
out:
    if (all_bytes != bytes) {
        PyMem_Free(all_bytes);
        PyMem_Free(all_origins);
        PyMem_Free(all_nodes);
    }
    Py_DECREF(places);
    return result;
}

PyDoc_STRVAR(abort_doc, "abort($self, /)\n--\n\nGive up the operation that has begun.");

static PyObject *py_recorder_abort(METHOD_ARGUMENTS) {
    py_recorder_t *self = py_as_recorder(object);
    if (py_book_expect("abort", count, 0, names) != 0) {
        return NULL;
    }
    self->is_borrowed = false;
    int status = rotor_recorder_abort(&self->book);
    return py_book_release_guards(self) != 0
               ? NULL
               : py_book_answer(self, type, status, Py_NewRef(Py_None));
}

static PyMethodDef recorder_methods[] = {
    RECORDER_METHOD(source), RECORDER_METHOD(begin), RECORDER_METHOD(make_room),
    RECORDER_METHOD(finish), RECORDER_METHOD(abort), {NULL, NULL, 0, NULL},
};

static PyObject *py_recorder_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {
        "heuristic",         "budget",     "seed", "sample", "ignore_small", "rebuild_every",
        "mixes_temporaries", "never_keep", NULL};
    const char *heuristic;
    long long budget;
    unsigned long long seed = 0;
    long long rebuild_every = 16;
    int sample = 0;
    int ignore_small = 0;
    int mixes_temporaries = 0;
    int never_keep = 0;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "sL|KppLpp", names, &heuristic, &budget, &seed,
                                     &sample, &ignore_small, &rebuild_every, &mixes_temporaries,
                                     &never_keep)) {
        return NULL;
    }
    if (rebuild_every < 0) {
        return PyErr_Format(PyExc_ValueError, "rebuild_every must not be negative, got %lld",
                            rebuild_every);
    }
    rotor_recorder_options_t options = {
        .budget = budget < 0 ? ROTOR_UNLIMITED : budget,
        .mixes_temporaries = mixes_temporaries != 0,
        .never_keep = never_keep != 0,
        .eviction = {.heuristic = rotor_find_heuristic(heuristic),
                     .seed = seed,
                     .rebuild_every = rebuild_every,
                     .sample = sample != 0,
                     .ignore_small = ignore_small != 0},
    };
    if (options.eviction.heuristic == NULL) {
        PyErr_Format(PyExc_ValueError, "unknown heuristic '%s'", heuristic);
        return NULL;
    }
    py_recorder_t *self = (py_recorder_t *)type->tp_alloc(type, 0);
    if (self != NULL) {
        rotor_recorder_init(&self->book, &options);
        self->observer = Py_NewRef(Py_None);
    }
    return (PyObject *)self;
}

static int py_recorder_traverse(PyObject *object, visitproc visit, void *arg) {
    py_recorder_t *self = py_as_recorder(object);
    Py_VISIT(Py_TYPE(object));
    for (int64_t k = 0; k < self->record_capacity; k++) {
        Py_VISIT(self->records[k]);
    }
    for (int64_t k = 0; k < self->place_capacity; k++) {
        Py_VISIT(self->places[k]);
    }
    for (int64_t k = 0; k < self->held_capacity; k++) {
        Py_VISIT(self->held[k]);
    }
    for (int64_t k = 0; k < self->copy_capacity; k++) {
        Py_VISIT(self->copies[k]);
    }
    for (int64_t k = 0; k < self->guard_count; k++) {
        Py_VISIT(self->guards[k]);
    }
    for (py_ref_t *ref = self->first_gone; ref != NULL; ref = ref->next_gone) {
        Py_VISIT((PyObject *)ref);
    }
    Py_VISIT(self->observer);
    return 0;
}

static int py_recorder_clear(PyObject *object) {
    py_recorder_t *self = py_as_recorder(object);
    for (int64_t k = 0; k < self->record_capacity; k++) {
        Py_CLEAR(self->records[k]);
    }
    for (int64_t k = 0; k < self->place_capacity; k++) {
        Py_CLEAR(self->places[k]);
    }
    for (int64_t k = 0; k < self->held_capacity; k++) {
        Py_CLEAR(self->held[k]);
    }
    for (int64_t k = 0; k < self->copy_capacity; k++) {
        Py_CLEAR(self->copies[k]);
    }
    while (self->guard_count > 0) {
        Py_CLEAR(self->guards[--self->guard_count]);
    }
    py_book_clear_gone(self);
    Py_CLEAR(self->observer);
    py_book_let_go(self);
    return 0;
}

static void py_recorder_dealloc(PyObject *object) {
    py_recorder_t *self = py_as_recorder(object);
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    (void)py_recorder_clear(object);
    rotor_recorder_free(&self->book);
    PyMem_Free(self->records);
    PyMem_Free(self->places);
    PyMem_Free(self->held);
    PyMem_Free(self->copies);
    PyMem_Free(self->guards);
    PyMem_Free(self->garbage);
    type->tp_free(object);
    Py_DECREF(type);
}

PyDoc_STRVAR(recorder_doc,
             "Recorder(heuristic, budget, seed=0, sample=False, ignore_small=False, "
             "rebuild_every=16, mixes_temporaries=False, never_keep=False)\n--\n\n"
             "The recorder of a program that runs under a budget (csrc/rotor/recorder.h).");

static PyType_Slot recorder_slots[] = {
    {Py_tp_new, py_recorder_new},
    {Py_tp_dealloc, py_recorder_dealloc},
    {Py_tp_traverse, py_recorder_traverse},
    {Py_tp_clear, py_recorder_clear},
    {Py_tp_methods, recorder_methods},
    {Py_tp_doc, (void *)recorder_doc},
    {0, NULL},
};

int py_add_recorder(PyObject *module) {
    PyTypeObject **kept = &py_state(module)->recorder_type;
    if (py_add_type(module, "rotor._core.Recorder", sizeof(py_recorder_t),
                    Py_TPFLAGS_HAVE_GC, recorder_slots, kept) != 0) {
        return -1;
    }
    PyTypeObject *type = *kept;
    int ret = 0;
    PyMethodDef *tables[] = {py_book_queries, py_book_repeats, py_book_moves};
    for (int k = 0; k < 3; k++) {
        for (PyMethodDef *method = tables[k]; ret == 0 && method->ml_name != NULL; method++) {
            PyObject *made = PyDescr_NewMethod(type, method);
            ret = made == NULL ? -1 : PyDict_SetItemString(type->tp_dict, method->ml_name, made);
            Py_XDECREF(made);
        }
    }
    PyType_Modified(type);
    if (ret == 0) {
        ret = PyModule_AddIntConstant(module, "PIECE_BYTES", ROTOR_PIECE_BYTES);
    }
    return ret == 0 ? PyModule_AddIntConstant(module, "OFTEN", ROTOR_OFTEN) : -1;
}
