#include "bind_dtr_book.h"

#define NODE_METHOD(name, status_of)                                                               \
    static PyObject *py_recorder_##name(METHOD_ARGUMENTS) {                                        \
        py_recorder_t *self = py_as_recorder(object);                                              \
        int32_t node;                                                                              \
        if (py_book_expect(#name, count, 1, names) != 0 ||                                         \
            py_book_read_node(self, args[0], &node) != 0) {                                        \
            return NULL;                                                                           \
        }                                                                                          \
        return py_book_answer(self, type, status_of(&self->book, node), Py_NewRef(Py_None));       \
    }

PyDoc_STRVAR(dead_doc,
             "dead($self, node, /)\n--\n\nNote that the program dropped a live node's storage.");
NODE_METHOD(dead, rotor_recorder_dead)

PyDoc_STRVAR(pin_doc, "pin($self, node, may_move, /)\n--\n\n"
                      "Make a node in memory a source. may_move: the tier may take it.");

static PyObject *py_recorder_pin(METHOD_ARGUMENTS) {
    py_recorder_t *self = py_as_recorder(object);
    int32_t node;
    if (py_book_expect("pin", count, 2, names) != 0 ||
        py_book_read_node(self, args[0], &node) != 0) {
        return NULL;
    }
    int status = rotor_recorder_pin(&self->book, node, args[1] == Py_True);
    return py_book_answer(self, type, status, Py_NewRef(Py_None));
}

PyDoc_STRVAR(hold_doc, "hold($self, node, place, /)\n--\n\nSet the place of a node's bytes.");

static PyObject *py_recorder_hold(METHOD_ARGUMENTS) {
    py_recorder_t *self = py_as_recorder(object);
    int32_t node;
    if (py_book_expect("hold", count, 2, names) != 0 ||
        py_book_read_node(self, args[0], &node) != 0) {
        return NULL;
    }
    if (py_book_discard(self, &self->places[node]) != 0) {
        return NULL;
    }
    self->places[node] = args[1] == Py_None ? NULL : Py_NewRef(args[1]);
    return py_book_answer(self, type, ROTOR_OK, Py_NewRef(Py_None));
}

PyDoc_STRVAR(copied_doc,
             "copied($self, node, copy, /)\n--\n\n"
             "Note that a live source that is needed was copied; return its new number. "
             "The old one is the copy's.");

static PyObject *py_recorder_copied(METHOD_ARGUMENTS) {
    py_recorder_t *self = py_as_recorder(object);
    int32_t source;
    int32_t node = -1;
    if (py_book_expect("copied", count, 2, names) != 0 ||
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
    return py_book_answer(self, type, status, status == ROTOR_OK ? PyLong_FromLong(node) : NULL);
}

PyDoc_STRVAR(storage_doc, "storage($self, node, /)\n--\n\nReturn a node's storage, or None.");

static PyObject *py_recorder_storage(METHOD_ARGUMENTS) {
    py_recorder_t *self = py_as_recorder(object);
    int32_t node;
    if (py_book_expect("storage", count, 1, names) != 0 ||
        py_book_read_node(self, args[0], &node) != 0) {
        return NULL;
    }
    PyObject *storage = py_book_storage_of(self, node);
    return storage == NULL ? Py_NewRef(Py_None) : storage;
}

PyDoc_STRVAR(resized_doc,
             "resized($self, node, nbytes, /)\n--\n\nNote that a source's size changed.");

static PyObject *py_recorder_resized(METHOD_ARGUMENTS) {
    py_recorder_t *self = py_as_recorder(object);
    int32_t node;
    int64_t bytes;
    if (py_book_expect("resized", count, 2, names) != 0 ||
        py_book_read_node(self, args[0], &node) != 0 || py_book_read_int64(args[1], &bytes) != 0) {
        return NULL;
    }
    rotor_recorder_resized(&self->book, node, bytes);
    return py_book_answer(self, type, ROTOR_OK, Py_NewRef(Py_None));
}

PyDoc_STRVAR(reach_doc, "reach($self, nbytes, /)\n--\n\nCount bytes that are in use for a moment.");

static PyObject *py_recorder_reach(METHOD_ARGUMENTS) {
    py_recorder_t *self = py_as_recorder(object);
    int64_t bytes;
    if (py_book_expect("reach", count, 1, names) != 0 || py_book_read_int64(args[0], &bytes) != 0) {
        return NULL;
    }
    rotor_recorder_reach(&self->book, bytes);
    return py_book_answer(self, type, ROTOR_OK, Py_NewRef(Py_None));
}

PyDoc_STRVAR(dependents_doc, "dependents($self, node, /)\n--\n\n"
                             "Return the live nodes that were computed from this one.");

static PyObject *py_recorder_dependents(METHOD_ARGUMENTS) {
    py_recorder_t *self = py_as_recorder(object);
    int32_t node;
    if (py_book_expect("dependents", count, 1, names) != 0 || py_book_forget_gone(self) != 0 ||
        py_book_read_node(self, args[0], &node) != 0) {
        return NULL;
    }
    int status = rotor_recorder_dependents(&self->book, node);
    PyObject *list =
        py_book_node_list(self->book.work, status == ROTOR_OK ? self->book.work_count : 0);
    return py_book_answer(self, type, status, list);
}

PyDoc_STRVAR(is_worth_a_copy_doc,
             "is_worth_a_copy($self, node, /)\n--\n\n"
             "Return whether a live source that is about to change should be copied for what was "
             "computed from it.");

static PyObject *py_recorder_is_worth_a_copy(METHOD_ARGUMENTS) {
    py_recorder_t *self = py_as_recorder(object);
    int32_t node;
    bool is_worth = false;
    if (py_book_expect("is_worth_a_copy", count, 1, names) != 0 || py_book_forget_gone(self) != 0 ||
        py_book_read_node(self, args[0], &node) != 0) {
        return NULL;
    }
    int status = rotor_recorder_copying(&self->book, node, &is_worth);
    return py_book_answer(self, type, status, PyBool_FromLong(is_worth));
}

PyDoc_STRVAR(evicted_doc, "evicted($self, /)\n--\n\nReturn the live nodes that are not in memory.");

static PyObject *py_recorder_evicted(METHOD_ARGUMENTS) {
    py_recorder_t *self = py_as_recorder(object);
    if (py_book_expect("evicted", count, 0, names) != 0 || py_book_forget_gone(self) != 0) {
        return NULL;
    }
    int status = rotor_recorder_evicted(&self->book);
    PyObject *list =
        py_book_node_list(self->book.work, status == ROTOR_OK ? self->book.work_count : 0);
    return py_book_answer(self, type, status, list);
}

enum {
    NODE_NBYTES,
    NODE_IS_MATERIAL,
    NODE_IS_SOURCE,
    NODE_IS_LIVE,
    NODE_LOCKS,
    NODE_NEEDED,
    NODE_VERSION,
    NODE_RECORD,
    NODE_IS_AWAY,
    NODE_FIELDS
};

static PyStructSequence_Field node_fields[NODE_FIELDS + 1] = {
    [NODE_NBYTES] = {"nbytes", "Bytes of its storage."},
    [NODE_IS_MATERIAL] = {"is_material", "It is in memory."},
    [NODE_IS_SOURCE] = {"is_source", "No record makes it: it stays in memory."},
    [NODE_IS_LIVE] = {"is_live", "The program holds its storage."},
    [NODE_LOCKS] = {"locks", "Uses that keep it in memory now."},
    [NODE_NEEDED] = {"needed", "Records that read it."},
    [NODE_VERSION] = {"version", "How often its storage was written to before."},
    [NODE_RECORD] = {"record", "The record that makes it; None for a source."},
    [NODE_IS_AWAY] = {"is_away", "Only the second tier has its bytes."},
};

static PyStructSequence_Desc node_description = {
    .name = "rotor._core.NodeState",
    .doc = "The state of a node of a Recorder (csrc/rotor/recorder.h).",
    .fields = node_fields,
    .n_in_sequence = NODE_FIELDS,
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

static PyObject *py_recorder_describe(METHOD_ARGUMENTS) {
    py_recorder_t *self = py_as_recorder(object);
    rotor_recorder_t *book = &self->book;
    int32_t node;
    if (py_book_expect("describe", count, 1, names) != 0 ||
        py_book_read_node(self, args[0], &node) != 0) {
        return NULL;
    }
    const rotor_node_t *found = &book->nodes[node];
    PyObject *record = found->op >= 0 ? self->records[found->op] : NULL;
    PyObject *values[NODE_FIELDS] = {
        [NODE_NBYTES] = PyLong_FromLongLong(found->bytes),
        [NODE_IS_MATERIAL] = PyBool_FromLong(rotor_recorder_is_material(book, node)),
        [NODE_IS_SOURCE] = PyBool_FromLong((found->state & ROTOR_NODE_SOURCE) != 0),
        [NODE_IS_LIVE] = PyBool_FromLong((found->state & ROTOR_NODE_LIVE) != 0),
        [NODE_LOCKS] = PyLong_FromLong(book->eviction.candidates[node].locks),
        [NODE_NEEDED] = PyLong_FromLong(found->needed),
        [NODE_VERSION] = PyLong_FromLong(found->version),
        [NODE_RECORD] = Py_NewRef(record == NULL ? Py_None : record),
        [NODE_IS_AWAY] = PyBool_FromLong(rotor_recorder_is_away(book, node)),
    };
    PyObject *state = PyStructSequence_New(py_state(PyType_GetModule(type))->node_type);
    for (int k = 0; k < NODE_FIELDS; k++) {
        if (state != NULL) {
            PyStructSequence_SetItem(state, k, values[k]);
        } else {
            Py_XDECREF(values[k]);
        }
    }
    if (PyErr_Occurred()) {
        Py_CLEAR(state);
    }
    return state;
}

PyDoc_STRVAR(nodes_doc, "nodes($self, /)\n--\n\nReturn the numbers of all nodes.");

static PyObject *py_recorder_nodes(METHOD_ARGUMENTS) {
    rotor_recorder_t *book = &py_as_recorder(object)->book;
    if (py_book_expect("nodes", count, 0, names) != 0 ||
        py_book_forget_gone(py_as_recorder(object)) != 0) {
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

static PyObject *py_recorder_counters(METHOD_ARGUMENTS) {
    const rotor_recorder_t *book = &py_as_recorder(object)->book;
    if (py_book_expect("counters", count, 0, names) != 0 ||
        py_book_forget_gone(py_as_recorder(object)) != 0) {
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

static PyObject *py_recorder_reset(METHOD_ARGUMENTS) {
    rotor_recorder_t *book = &py_as_recorder(object)->book;
    if (py_book_expect("reset", count, 0, names) != 0 ||
        py_book_forget_gone(py_as_recorder(object)) != 0) {
        return NULL;
    }
    rotor_recorder_reset(book);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(limit_doc, "limit($self, budget, /)\n--\n\nSet the budget, bytes; -1 for none.");

static PyObject *py_recorder_limit(METHOD_ARGUMENTS) {
    py_recorder_t *self = py_as_recorder(object);
    int64_t budget;
    if (py_book_expect("limit", count, 1, names) != 0 ||
        py_book_read_int64(args[0], &budget) != 0) {
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

static PyObject *py_recorder_consider(METHOD_ARGUMENTS) {
    int sample;
    int ignore_small;
    if (py_book_expect("consider", count, 2, names) != 0 ||
        (sample = PyObject_IsTrue(args[0])) < 0 || (ignore_small = PyObject_IsTrue(args[1])) < 0) {
        return NULL;
    }
    rotor_recorder_consider(&py_as_recorder(object)->book, sample != 0, ignore_small != 0);
    Py_RETURN_NONE;
}

PyMethodDef py_book_queries[] = {
    RECORDER_METHOD(dead),       RECORDER_METHOD(pin),      RECORDER_METHOD(hold),
    RECORDER_METHOD(storage),    RECORDER_METHOD(resized),  RECORDER_METHOD(reach),
    RECORDER_METHOD(dependents), RECORDER_METHOD(is_worth_a_copy), RECORDER_METHOD(evicted),  RECORDER_METHOD(describe),
    RECORDER_METHOD(nodes),      RECORDER_METHOD(counters), RECORDER_METHOD(reset),
    RECORDER_METHOD(limit),      RECORDER_METHOD(consider), RECORDER_METHOD(copied),
    {NULL, NULL, 0, NULL},
};
