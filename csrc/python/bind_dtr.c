#include "bind_dtr_book.h"

PyDoc_STRVAR(source_doc, "source($self, nbytes, is_foreign, place, /)\n--\n\n"
                         "Add a storage that nothing recorded makes; return its number.");

static PyObject *py_recorder_source(PyObject *object, PyObject *const *args, Py_ssize_t count) {
    py_recorder_t *self = py_as_recorder(object);
    int64_t bytes;
    int32_t node = -1;
    if (py_book_expect("source", count, 3) != 0 ||
        py_book_read_int64(args[0], &bytes) != 0 || py_book_forget_gone(self) != 0 ||
        py_book_reserve(self, 1) != 0) {
        return NULL;
    }
    int status = rotor_recorder_source(&self->book, bytes, args[1] == Py_True, &node);
    if (status == ROTOR_OK) {
        self->places[node] = Py_NewRef(args[2]);
    }
    return py_book_answer(self, status, status == ROTOR_OK ? PyLong_FromLong(node) : NULL);
}

PyDoc_STRVAR(begin_doc, "begin($self, nodes, /)\n--\n\n"
                        "Begin an operation with these distinct inputs, which are locked.");

static PyObject *py_recorder_begin(PyObject *object, PyObject *argument) {
    py_recorder_t *self = py_as_recorder(object);
    int32_t *nodes = NULL;
    PyObject *result = NULL;
    PyObject *inputs = PySequence_Tuple(argument);
    if (inputs == NULL) {
        return NULL;
    }
    if (py_book_forget_gone(self) != 0 || py_book_may_begin(self) != 0) {
        goto out;
    }
    Py_ssize_t length = PyTuple_GET_SIZE(inputs);
    if ((nodes = PyMem_New(int32_t, (size_t)length)) == NULL) {
        PyErr_NoMemory();
        goto out;
    }
    for (Py_ssize_t k = 0; k < length; k++) {
        if (py_book_read_node(self, PyTuple_GET_ITEM(inputs, k), &nodes[k]) != 0) {
            goto out;
        }
    }
    int status = rotor_recorder_begin(&self->book, nodes, length);
    result = py_book_answer(self, status, Py_NewRef(Py_None));
out:
    PyMem_Free(nodes);
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

static PyObject *py_recorder_make_room(PyObject *object, PyObject *const *args, Py_ssize_t count) {
    py_recorder_t *self = py_as_recorder(object);
    int64_t bytes, enough;
    int32_t node = 0;
    bool is_moving = false;
    if (py_book_expect("make_room", count, 2) != 0 ||
        py_book_read_int64(args[0], &bytes) != 0 || py_book_read_int64(args[1], &enough) != 0) {
        return NULL;
    }
    for (;;) {
        if (py_book_forget_gone(self) != 0) {
            return NULL;
        }
        int status = rotor_recorder_make_room(&self->book, bytes, enough, &node, &is_moving);
        if (status != ROTOR_OK) {
            return py_book_answer(self, status, NULL);
        }
        if (node < 0) {
            return py_book_answer(self, status, Py_NewRef(node == -1 ? Py_None : Py_False));
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
            return py_book_answer(self, status, result);
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

static PyObject *py_recorder_finish(PyObject *object, PyObject *const *args, Py_ssize_t count) {
    py_recorder_t *self = py_as_recorder(object);
    int64_t recorded, cost, workspace, kept;
    int64_t *bytes = NULL;
    int32_t *origins = NULL;
    int32_t *nodes = NULL;
    PyObject *result = NULL;

    if (py_book_expect("finish", count, 8) != 0 ||
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
    bytes = PyMem_New(int64_t, (size_t)length);
    origins = PyMem_New(int32_t, (size_t)length);
    nodes = PyMem_New(int32_t, (size_t)length);
    if (bytes == NULL || origins == NULL || nodes == NULL) {
        PyErr_NoMemory();
        goto out;
    }
    for (Py_ssize_t k = 0; k < length; k++) {
        int64_t origin;
        if (py_book_read_int64(PyList_GET_ITEM(args[1], k), &bytes[k]) != 0 ||
            py_book_read_int64(PyList_GET_ITEM(args[2], k), &origin) != 0) {
            goto out;
        }
        origins[k] = (int32_t)origin;
    }
    rotor_completion_t done = {.recorded = recorded,
                               .bytes = bytes,
                               .origins = origins,
                               .count = length,
                               .cost_ns = cost,
                               .workspace_bytes = workspace,
                               .kept_bytes = kept};
    int status = py_book_complete(self, &done, PySequence_Fast_ITEMS(places), args[7], nodes);
    if (status == ROTOR_OK && !PyErr_Occurred()) {
        result = py_book_node_list(nodes, length);
    }
    result = py_book_answer(self, status, result);
out:
    PyMem_Free(bytes);
    PyMem_Free(origins);
    PyMem_Free(nodes);
    Py_DECREF(places);
    return result;
}

PyDoc_STRVAR(abort_doc, "abort($self, /)\n--\n\nGive up the operation that has begun.");

static PyObject *py_recorder_abort(PyObject *object, PyObject *unused) {
    py_recorder_t *self = py_as_recorder(object);
    self->is_borrowed = false;
    int status = rotor_recorder_abort(&self->book);
    return py_book_release_guards(self) != 0
               ? NULL
               : py_book_answer(self, status, Py_NewRef(Py_None));
}

/* The operation that has to run again. */

PyDoc_STRVAR(next_doc,
             "next($self, /)\n--\n\n"
             "Return the record of the operation to run again now, or None: the inputs are "
             "in memory.");

static PyObject *py_recorder_next(PyObject *object, PyObject *unused) {
    py_recorder_t *self = py_as_recorder(object);
    int32_t op = ROTOR_NEW_OPERATION;
    if (self->book.frame_count == 0) {
        return PyErr_Format(PyExc_RuntimeError, "no operation has begun");
    }
    if (py_book_forget_gone(self) != 0) {
        return NULL;
    }
    int status = rotor_recorder_next(&self->book, &op);
    PyObject *record = op >= 0 ? self->records[op] : Py_None;
    return py_book_answer(self, status, Py_XNewRef(record));
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

static PyObject *py_recorder_wanted(PyObject *object, PyObject *unused) {
    py_recorder_t *self = py_as_recorder(object);
    rotor_recorder_t *book = &self->book;
    int32_t op;
    if ((op = replaying(self)) < 0 || py_book_forget_gone(self) != 0) {
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

static PyObject *py_recorder_replay_bytes(PyObject *object, PyObject *unused) {
    py_recorder_t *self = py_as_recorder(object);
    int32_t op;
    if ((op = replaying(self)) < 0) {
        return NULL;
    }
    return PyLong_FromLongLong(rotor_recorder_replay_bytes(&self->book, op));
}

PyDoc_STRVAR(replayed_doc,
             "replayed($self, cost_ns, /)\n--\n\n"
             "Note that the operation that next() gave has run and its outputs are placed; "
             "return how often thrashing was found until now.");

static PyObject *py_recorder_replayed(PyObject *object, PyObject *argument) {
    py_recorder_t *self = py_as_recorder(object);
    int64_t cost;
    if (py_book_read_int64(argument, &cost) != 0 || replaying(self) < 0) {
        return NULL;
    }
    self->is_borrowed = false;
    int status = rotor_recorder_replayed(&self->book, cost);
    return py_book_answer(self, status, PyLong_FromLongLong(self->book.thrashes));
}

/* Nodes in a second tier of memory, as rotor.dtr.recall moves and fetches them. */

PyDoc_STRVAR(set_tier_doc,
             "set_tier($self, link, weight, /)\n--\n\n"
             "Let nodes move to a tier behind a link (rotor.graph.Link.core), where a move of that "
             "weight takes less time than computing again.");

static PyObject *py_recorder_set_tier(PyObject *object, PyObject *const *args, Py_ssize_t count) {
    py_recorder_t *self = py_as_recorder(object);
    rotor_link_t link;
    if (py_book_expect("set_tier", count, 2) != 0) {
        return NULL;
    }
    double weight = PyFloat_AsDouble(args[1]);
    if (weight == -1.0 && PyErr_Occurred()) {
        return NULL;
    }
    if (!PyTuple_Check(args[0]) || !(weight >= 0)) {
        return PyErr_Format(PyExc_TypeError,
                            "set_tier() takes a tuple, and a weight of 0 at least");
    }
    int status = py_read_link(args[0], &link);
    if (PyErr_Occurred()) {
        return NULL;
    }
    if (status == ROTOR_OK) {
        rotor_eviction_set_tier(&self->book.eviction, &link, weight);
    }
    return py_book_answer(self, status, Py_NewRef(Py_None));
}

PyDoc_STRVAR(moved_doc, "moved($self, node, copy, /)\n--\n\n"
                        "Note that a node was written to the tier, which `copy` holds there, and "
                        "leaves memory.");

static PyObject *py_recorder_moved(PyObject *object, PyObject *const *args, Py_ssize_t count) {
    py_recorder_t *self = py_as_recorder(object);
    int32_t node;
    if (py_book_expect("moved", count, 2) != 0 ||
        py_book_read_node(self, args[0], &node) != 0 || py_book_reserve(self, 0) != 0 ||
        py_book_discard(self, &self->copies[node]) != 0) {
        return NULL;
    }
    self->copies[node] = Py_NewRef(args[1]);
    int status = rotor_recorder_moved(&self->book, node);
    return py_book_answer(self, status, Py_NewRef(Py_None));
}

PyDoc_STRVAR(forget_copies_doc, "forget_copies($self, /)\n--\n\n"
                                "Let go of everything in the tier, at the end of a session.");

static PyObject *py_recorder_forget_copies(PyObject *object, PyObject *unused) {
    py_recorder_t *self = py_as_recorder(object);
    for (int64_t k = 0; k < self->copy_capacity; k++) {
        if (py_book_discard(self, &self->copies[k]) != 0) {
            return NULL;
        }
    }
    return py_book_answer(self, ROTOR_OK, Py_NewRef(Py_None));
}

static PyMethodDef recorder_methods[] = {
    RECORDER_SOME(source), RECORDER_ONE(begin), RECORDER_SOME(make_room), RECORDER_SOME(finish),
    RECORDER_NONE(abort), RECORDER_NONE(next), RECORDER_NONE(wanted), RECORDER_NONE(replay_bytes),
    RECORDER_ONE(replayed), RECORDER_SOME(set_tier), RECORDER_SOME(moved),
    RECORDER_NONE(forget_copies), {NULL, NULL, 0, NULL},
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

/* Its arrays of objects, and their lengths. */
#define RECORDER_ARRAYS(entry)                                                                     \
    entry(records, record_capacity) entry(places, place_capacity) entry(held, held_capacity)       \
        entry(copies, copy_capacity) entry(guards, guard_count)

static int py_recorder_traverse(PyObject *object, visitproc visit, void *arg) {
    py_recorder_t *self = py_as_recorder(object);
    Py_VISIT(Py_TYPE(object));
#define VISIT_ALL(items, length)                                                                   \
    for (int64_t k = 0; k < self->length; k++) {                                                   \
        Py_VISIT(self->items[k]);                                                                  \
    }
    RECORDER_ARRAYS(VISIT_ALL)
#undef VISIT_ALL
    for (py_ref_t *ref = self->first_gone; ref != NULL; ref = ref->next_gone) {
        Py_VISIT((PyObject *)ref);
    }
    Py_VISIT(self->observer);
    return 0;
}

static int py_recorder_clear(PyObject *object) {
    py_recorder_t *self = py_as_recorder(object);
#define CLEAR_ALL(items, length)                                                                   \
    for (int64_t k = 0; k < self->length; k++) {                                                   \
        Py_CLEAR(self->items[k]);                                                                  \
    }
    RECORDER_ARRAYS(CLEAR_ALL)
#undef CLEAR_ALL
    self->guard_count = 0;
    py_book_clear_gone(self);
    Py_CLEAR(self->observer);
    py_book_let_go(self);
    return 0;
}

static void py_recorder_dealloc(PyObject *object) {
    py_recorder_t *self = py_as_recorder(object);
    PyObject_GC_UnTrack(object);
    (void)py_recorder_clear(object);
    rotor_recorder_free(&self->book);
#define FREE(items, length) rotor_free(self->items);
    RECORDER_ARRAYS(FREE)
#undef FREE
    rotor_free(self->garbage);
    PyTypeObject *type = Py_TYPE(object);
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
    for (PyMethodDef *method = py_book_queries; ret == 0 && method->ml_name != NULL; method++) {
        PyObject *made = PyDescr_NewMethod(type, method);
        ret = made == NULL ? -1 : PyDict_SetItemString(type->tp_dict, method->ml_name, made);
        Py_XDECREF(made);
    }
    PyType_Modified(type);
    if (ret == 0) {
        ret = PyModule_AddIntConstant(module, "PIECE_BYTES", ROTOR_PIECE_BYTES);
    }
    return ret == 0 ? PyModule_AddIntConstant(module, "OFTEN", ROTOR_OFTEN) : -1;
}
