/* Nodes in a second tier of memory, as rotor.dtr.recall moves and fetches them. */
#include "bind_dtr_book.h"

PyDoc_STRVAR(set_tier_doc,
             "set_tier($self, link, weight, /)\n--\n\n"
             "Let nodes move to a tier behind a link (rotor.graph.Link.core), where a move of that "
             "weight takes less time than computing again.");

static PyObject *py_recorder_set_tier(METHOD_ARGUMENTS) {
    py_recorder_t *self = py_as_recorder(object);
    rotor_link_t link;
    if (py_book_expect("set_tier", count, 2, names) != 0) {
        return NULL;
    }
    double weight = PyFloat_AsDouble(args[1]);
    if (weight == -1.0 && PyErr_Occurred()) {
        return NULL;
    }
    if (!PyTuple_Check(args[0]) || !(weight >= 0)) {
        PyErr_SetString(PyExc_TypeError, "set_tier() takes a tuple, and a weight of 0 at least");
        return NULL;
    }
    int status = py_read_link(args[0], &link);
    if (PyErr_Occurred()) {
        return NULL;
    }
    if (status == ROTOR_OK) {
        rotor_eviction_set_tier(&self->book.eviction, &link, weight);
    }
    return py_book_answer(self, type, status, Py_NewRef(Py_None));
}

PyDoc_STRVAR(moved_doc, "moved($self, node, copy, /)\n--\n\n"
                        "Note that a node was written to the tier, which `copy` holds there, and "
                        "leaves memory.");

static PyObject *py_recorder_moved(METHOD_ARGUMENTS) {
    py_recorder_t *self = py_as_recorder(object);
    int32_t node;
    if (py_book_expect("moved", count, 2, names) != 0 ||
        py_book_read_node(self, args[0], &node) != 0 || py_book_reserve(self, 0) != 0 ||
        py_book_discard(self, &self->copies[node]) != 0) {
        return NULL;
    }
    self->copies[node] = Py_NewRef(args[1]);
    int status = rotor_recorder_moved(&self->book, node);
    return py_book_answer(self, type, status, Py_NewRef(Py_None));
}

PyDoc_STRVAR(forget_copies_doc, "forget_copies($self, /)\n--\n\n"
                                "Let go of everything in the tier, at the end of a session.");

static PyObject *py_recorder_forget_copies(METHOD_ARGUMENTS) {
    py_recorder_t *self = py_as_recorder(object);
    if (py_book_expect("forget_copies", count, 0, names) != 0) {
        return NULL;
    }
    for (int64_t k = 0; k < self->copy_capacity; k++) {
        if (py_book_discard(self, &self->copies[k]) != 0) {
            return NULL;
        }
    }
    return py_book_answer(self, type, ROTOR_OK, Py_NewRef(Py_None));
}

PyMethodDef py_book_moves[] = {
    RECORDER_METHOD(set_tier),
    RECORDER_METHOD(moved),
    RECORDER_METHOD(forget_copies),
    {NULL, NULL, 0, NULL},
};
