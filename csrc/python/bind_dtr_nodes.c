#include "bind_dtr_book.h"

PyDoc_STRVAR(pin_doc, "pin($self, node, may_move, /)\n--\n\n"
                      "Make a node in memory a source. may_move: the tier may take it.");

static PyObject *py_recorder_pin(PyObject *object, PyObject *const *args, Py_ssize_t count) {
    py_recorder_t *self = py_as_recorder(object);
    int32_t node;
    if (py_book_expect("pin", count, 2) != 0 ||
        py_book_read_node(self, args[0], &node) != 0) {
        return NULL;
    }
    int status = rotor_recorder_pin(&self->book, node, args[1] == Py_True);
    return py_book_answer(self, status, Py_NewRef(Py_None));
}

PyDoc_STRVAR(hold_doc, "hold($self, node, place, /)\n--\n\nSet the place of a node's bytes.");

static PyObject *py_recorder_hold(PyObject *object, PyObject *const *args, Py_ssize_t count) {
    py_recorder_t *self = py_as_recorder(object);
    int32_t node;
    if (py_book_expect("hold", count, 2) != 0 ||
        py_book_read_node(self, args[0], &node) != 0) {
        return NULL;
    }
    if (py_book_discard(self, &self->places[node]) != 0) {
        return NULL;
    }
    self->places[node] = args[1] == Py_None ? NULL : Py_NewRef(args[1]);
    return py_book_answer(self, ROTOR_OK, Py_NewRef(Py_None));
}

PyDoc_STRVAR(copied_doc,
             "copied($self, node, copy, /)\n--\n\n"
             "Note that a live source that is needed was copied; return its new number. "
             "The old one is the copy's.");

static PyObject *py_recorder_copied(PyObject *object, PyObject *const *args, Py_ssize_t count) {
    py_recorder_t *self = py_as_recorder(object);
    int32_t source;
    int32_t node = -1;
    if (py_book_expect("copied", count, 2) != 0 ||
        py_book_read_node(self, args[0], &source) != 0 || py_book_reserve(self, 1) != 0) {
        return NULL;
    }
    const rotor_node_t *found = &self->book.nodes[source];
    if ((found->state & (ROTOR_NODE_SOURCE | ROTOR_NODE_LIVE)) !=
            (ROTOR_NODE_SOURCE | ROTOR_NODE_LIVE) ||
        found->needed == 0) {
        return PyErr_Format(PyExc_ValueError, "node %d is no live source that is needed",
                            (int)source);
    }
    int status = rotor_recorder_copied(&self->book, source, &node);
    if (status == ROTOR_OK) {
        if (py_book_discard(self, &self->held[source]) != 0) {
            return NULL;
        }
        self->places[node] = self->places[source];
        self->places[source] = Py_NewRef(args[1]);
    }
    return py_book_answer(self, status, status == ROTOR_OK ? PyLong_FromLong(node) : NULL);
}

PyDoc_STRVAR(storage_doc, "storage($self, node, /)\n--\n\nReturn a node's storage, or None.");

static PyObject *py_recorder_storage(PyObject *object, PyObject *argument) {
    py_recorder_t *self = py_as_recorder(object);
    int32_t node;
    if (py_book_read_node(self, argument, &node) != 0) {
        return NULL;
    }
    PyObject *storage = py_book_storage_of(self, node);
    return storage == NULL ? Py_NewRef(Py_None) : storage;
}

PyDoc_STRVAR(resized_doc,
             "resized($self, node, nbytes, /)\n--\n\nNote that a source's size changed.");

static PyObject *py_recorder_resized(PyObject *object, PyObject *const *args, Py_ssize_t count) {
    py_recorder_t *self = py_as_recorder(object);
    int32_t node;
    int64_t bytes;
    if (py_book_expect("resized", count, 2) != 0 ||
        py_book_read_node(self, args[0], &node) != 0 || py_book_read_int64(args[1], &bytes) != 0) {
        return NULL;
    }
    rotor_recorder_resized(&self->book, node, bytes);
    return py_book_answer(self, ROTOR_OK, Py_NewRef(Py_None));
}

PyDoc_STRVAR(reach_doc, "reach($self, nbytes, /)\n--\n\nCount bytes that are in use for a moment.");

static PyObject *py_recorder_reach(PyObject *object, PyObject *argument) {
    py_recorder_t *self = py_as_recorder(object);
    int64_t bytes;
    if (py_book_read_int64(argument, &bytes) != 0) {
        return NULL;
    }
    rotor_recorder_reach(&self->book, bytes);
    return py_book_answer(self, ROTOR_OK, Py_NewRef(Py_None));
}

/* The nodes that a walk has found. */
static PyObject *work_list(py_recorder_t *self, int status) {
    int64_t count = status == ROTOR_OK ? self->book.work_count : 0;
    return py_book_answer(self, status, py_book_node_list(self->book.work, count));
}

PyDoc_STRVAR(dependents_doc, "dependents($self, node, /)\n--\n\n"
                             "Return the live nodes that were computed from this one.");

static PyObject *py_recorder_dependents(PyObject *object, PyObject *argument) {
    py_recorder_t *self = py_as_recorder(object);
    int32_t node;
    if (py_book_forget_gone(self) != 0 || py_book_read_node(self, argument, &node) != 0) {
        return NULL;
    }
    return work_list(self, rotor_recorder_dependents(&self->book, node));
}

PyDoc_STRVAR(is_worth_a_copy_doc,
             "is_worth_a_copy($self, node, /)\n--\n\n"
             "Return whether a live source that is about to change should be copied for what was "
             "computed from it.");

static PyObject *py_recorder_is_worth_a_copy(PyObject *object, PyObject *argument) {
    py_recorder_t *self = py_as_recorder(object);
    int32_t node;
    bool is_worth = false;
    if (py_book_forget_gone(self) != 0 || py_book_read_node(self, argument, &node) != 0) {
        return NULL;
    }
    int status = rotor_recorder_copying(&self->book, node, &is_worth);
    return py_book_answer(self, status, PyBool_FromLong(is_worth));
}

PyDoc_STRVAR(evicted_doc, "evicted($self, /)\n--\n\nReturn the live nodes that are not in memory.");

static PyObject *py_recorder_evicted(PyObject *object, PyObject *unused) {
    py_recorder_t *self = py_as_recorder(object);
    if (py_book_forget_gone(self) != 0) {
        return NULL;
    }
    return work_list(self, rotor_recorder_evicted(&self->book));
}

static PyStructSequence_Field node_fields[] = {
    {"nbytes", "Bytes of its storage."},
    {"is_material", "It is in memory."},
    {"is_source", "No record makes it: it stays in memory."},
    {"is_live", "The program holds its storage."},
    {"locks", "Uses that keep it in memory now."},
    {"needed", "Records that read it."},
    {"version", "How often its storage was written to before."},
    {"record", "The record that makes it; None for a source."},
    {"is_away", "Only the second tier has its bytes."},
    {NULL, NULL},
};

static PyStructSequence_Desc node_description = {
    .name = "rotor._core.NodeState",
    .doc = "The state of a node of a Recorder (csrc/rotor/recorder.h).",
    .fields = node_fields,
    .n_in_sequence = sizeof(node_fields) / sizeof(node_fields[0]) - 1,
};

int py_add_node_state(PyObject *module) {
    PyTypeObject *type = PyStructSequence_NewType(&node_description);
    if (type == NULL) {
        return -1;
    }
    type->tp_flags |= Py_TPFLAGS_IMMUTABLETYPE;
    py_state(module)->node_type = type;
    return PyModule_AddType(module, type);
}

PyDoc_STRVAR(describe_doc, "describe($self, node, /)\n--\n\nReturn the state of a node.");

static PyObject *py_recorder_describe(PyObject *object, PyObject *argument) {
    py_recorder_t *self = py_as_recorder(object);
    rotor_recorder_t *book = &self->book;
    int32_t node;
    if (py_book_read_node(self, argument, &node) != 0) {
        return NULL;
    }
    const rotor_node_t *found = &book->nodes[node];
    PyObject *record = found->op >= 0 ? self->records[found->op] : NULL;
    PyObject *values = Py_BuildValue(
        "LNNNiiiON", (long long)found->bytes,
        PyBool_FromLong(rotor_recorder_is_material(book, node)),
        PyBool_FromLong((found->state & ROTOR_NODE_SOURCE) != 0),
        PyBool_FromLong((found->state & ROTOR_NODE_LIVE) != 0),
        (int)book->eviction.candidates[node].locks, (int)found->needed, (int)found->version,
        record == NULL ? Py_None : record, PyBool_FromLong(rotor_recorder_is_away(book, node)));
    PyTypeObject *type = py_state(PyType_GetModule(Py_TYPE(object)))->node_type;
    PyObject *state = values == NULL ? NULL : PyObject_CallOneArg((PyObject *)type, values);
    Py_XDECREF(values);
    return state;
}

PyDoc_STRVAR(nodes_doc, "nodes($self, /)\n--\n\nReturn the numbers of all nodes.");

static PyObject *py_recorder_nodes(PyObject *object, PyObject *unused) {
    rotor_recorder_t *book = &py_as_recorder(object)->book;
    if (py_book_forget_gone(py_as_recorder(object)) != 0) {
        return NULL;
    }
    PyObject *list = PyList_New(0);
    for (int64_t k = 0; list != NULL && k < book->node_count; k++) {
        if (book->nodes[k].state != 0) {
            py_append(&list, PyLong_FromLongLong(k));
        }
    }
    return list;
}

PyDoc_STRVAR(counters_doc,
             "counters($self, /)\n--\n\nReturn figures by name; bytes and nanoseconds.");

static PyObject *py_recorder_counters(PyObject *object, PyObject *unused) {
    const rotor_recorder_t *book = &py_as_recorder(object)->book;
    if (py_book_forget_gone(py_as_recorder(object)) != 0) {
        return NULL;
    }
    return Py_BuildValue(
        "{sLsLsLsLsLsLsLsLsLsLsLsLsLsLsLsLsLsLsLsLsL}", "current_bytes",
        (long long)book->current_bytes, "peak_bytes", (long long)book->peak_bytes, "operations",
        (long long)book->operations, "evictions", (long long)book->evictions, "rematerializations",
        (long long)book->replays, "base_ns", (long long)book->base_ns, "remat_ns",
        (long long)book->replay_ns, "nodes", (long long)book->live_nodes, "records",
        (long long)book->live_records, "footprint_bytes",
        (long long)rotor_recorder_footprint(book), "clock_ns", (long long)book->clock,
        "locked_bytes", (long long)book->eviction.locked_bytes, "held_peak_bytes",
        (long long)book->held_peak_bytes, "kept_bytes", (long long)book->node_bytes_kept,
        "copied_bytes", (long long)book->copied_bytes, "thrashes", (long long)book->thrashes,
        "worst_operations", (long long)book->worst.operations, "worst_base_ns",
        (long long)book->worst.base_ns, "stored_bytes", (long long)book->eviction.stored_bytes,
        "worst_repeats", (long long)book->worst.repeats,
        "worst_repeat_ns", (long long)book->worst.repeat_ns);
}

PyDoc_STRVAR(reset_doc, "reset($self, /)\n--\n\nBegin counts and times at zero again.");

static PyObject *py_recorder_reset(PyObject *object, PyObject *unused) {
    rotor_recorder_t *book = &py_as_recorder(object)->book;
    if (py_book_forget_gone(py_as_recorder(object)) != 0) {
        return NULL;
    }
    rotor_recorder_reset(book);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(limit_doc, "limit($self, budget, /)\n--\n\nSet the budget, bytes; -1 for none.");

static PyObject *py_recorder_limit(PyObject *object, PyObject *argument) {
    py_recorder_t *self = py_as_recorder(object);
    int64_t budget;
    if (py_book_read_int64(argument, &budget) != 0) {
        return NULL;
    }
    rotor_recorder_limit(&self->book, budget < 0 ? ROTOR_UNLIMITED : budget);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(
    consider_doc,
    "consider($self, sample, ignore_small, /)\n--\n\n"
    "Set which candidates the next choice looks at; small storages that are passed over stay so "
    "until they are used again.");

static PyObject *py_recorder_consider(PyObject *object, PyObject *const *args, Py_ssize_t count) {
    int sample;
    int ignore_small;
    if (py_book_expect("consider", count, 2) != 0 ||
        (sample = PyObject_IsTrue(args[0])) < 0 || (ignore_small = PyObject_IsTrue(args[1])) < 0) {
        return NULL;
    }
    rotor_recorder_consider(&py_as_recorder(object)->book, sample != 0, ignore_small != 0);
    Py_RETURN_NONE;
}

PyMethodDef py_book_queries[] = {
    RECORDER_SOME(pin), RECORDER_SOME(hold), RECORDER_ONE(storage), RECORDER_SOME(resized),
    RECORDER_ONE(reach), RECORDER_ONE(dependents), RECORDER_ONE(is_worth_a_copy),
    RECORDER_NONE(evicted), RECORDER_ONE(describe), RECORDER_NONE(nodes), RECORDER_NONE(counters),
    RECORDER_NONE(reset), RECORDER_ONE(limit), RECORDER_SOME(consider), RECORDER_SOME(copied),
    {NULL, NULL, 0, NULL},
};
