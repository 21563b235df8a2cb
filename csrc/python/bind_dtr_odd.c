/* What is unusual about an operator: writes, random numbers, sizes that depend on elements. */
#include "bind_dtr_private.h"

/* Calls a method of the session with a node, for its effect. */
static int ask_of_node(const py_run_t *run, const char *method, int64_t node) {
    return py_did(PyObject_CallMethod(run->session, method, "L", (long long)node));
}

/* Has a node in memory for good. */
static int restore(const py_run_t *run, int64_t node) {
    return py_did(PyObject_CallMethod(run->session, "_restore", "[L]", (long long)node));
}

int py_odd_keep(const py_run_t *run, int64_t node) { return ask_of_node(run, "_pin", node); }

static int protect(py_handler_t *self, py_run_t *run, const py_ref_t *ref) {
    const rotor_node_t *node = &self->recorder->book.nodes[ref->node];
    return node->needed > 0 || self->watches_writes
               ? ask_of_node(run, "_protect", ref->node)
               : 0;
}

static int prepare_write(py_handler_t *self, py_run_t *run, const py_ref_t *ref) {
    int ret = 0;
    switch (rotor_recorder_writing(&self->recorder->book, (int32_t)ref->node, run->grad_enabled,
                                   self->longest_chain)) {
    case ROTOR_WRITE_VERSION:
        return 0;
    case ROTOR_WRITE_SOURCE:
        break;
    case ROTOR_WRITE_RESTORED:
        ret = restore(run, ref->node);
        break;
    case ROTOR_WRITE_TOO_LONG:
        ret = ask_of_node(run, "_end_chain", ref->node);
        break;
    }
    run->is_recording = false;
    return ret == 0 ? protect(self, run, ref) : ret;
}

int py_odd_writes(py_handler_t *self, py_run_t *run) {
    bool reshapes = (run->kernel->traits & TRAIT_RESHAPES) != 0;
    int ret = 0;
    run->is_recording = run->is_recording && !reshapes;
    for (int64_t k = 0; k < self->input_count && ret == 0; k++) {
        const py_ref_t *ref = self->inputs[k].ref;
        if (reshapes && (ret = restore(run, ref->node)) == 0 &&
            self->recorder->book.eviction.has_tier) {
            ret = py_odd_keep(run, ref->node);
        }
        if (ret == 0 && (reshapes || self->inputs[k].is_hidden)) {
            ret = protect(self, run, ref);
        } else if (ret == 0 && self->inputs[k].is_written) {
            ret = prepare_write(self, run, ref);
        }
    }
    return ret;
}

int py_odd_generator(py_handler_t *self, py_run_t *run) {
    run->generator = PyObject_CallMethod(run->session, "_generator", "N", py_run_kwargs(run));
    PyObject *bytes =
        run->generator == NULL ? NULL : py_ask(self, run->session, _state_bytes, run->generator);
    run->kept_bytes = bytes == NULL ? -1 : PyLong_AsLongLong(bytes);
    Py_XDECREF(bytes);
    return run->kept_bytes < 0 ? -1 : 0;
}

int py_odd_varying(py_handler_t *self, py_run_t *run) {
    PyObject *needs = py_ask(self, run->session, _vary, run->kernel->operator_, run->args,
                             (PyObject *)run->needs);
    if (needs == NULL || needs == Py_None) {
        Py_XDECREF(needs);
        return needs == NULL ? -1 : 0;
    }
    if (Py_TYPE(needs) != self->needs_type) {
        Py_DECREF(needs);
        PyErr_SetString(PyExc_TypeError, "the needs of an operator must be Needs");
        return -1;
    }
    Py_SETREF(run->needs, (py_needs_t *)needs);
    run->varies = true;
    return 0;
}

int py_odd_note_varying(py_handler_t *self, const py_run_t *run) {
    return py_did(py_ask(self, run->session, _note_varying,
                         run->key == NULL ? Py_None : run->key, (PyObject *)run->needs));
}

bool py_lacks_needs(const py_handler_t *self, const py_run_t *run) {
    int64_t cost_ns = run->needs->cost_ns;
    return !run->needs->is_measured ||
           (!self->is_cpu && (cost_ns == COST_UNKNOWN || cost_ns == COST_RAN));
}

/* Runs it by a method of the session, which gives the results and a number; it may take the needs. */
static PyObject *call_by(py_run_t *run, PyObject *method, PyObject *needs, int64_t *number) {
    PyObject *kwargs = py_run_kwargs(run);
    PyObject *pair =
        kwargs == NULL ? NULL
                       : PyObject_CallMethodObjArgs(run->session, method, run->kernel->call,
                                                    run->args, kwargs, needs, NULL);
    PyObject *results = NULL;
    long long found;
    if (pair != NULL && PyArg_ParseTuple(pair, "OL", &results, &found)) {
        *number = found;
        Py_INCREF(results);
    }
    Py_XDECREF(kwargs);
    Py_XDECREF(pair);
    return results;
}

/* An operator from outside PyTorch ran: whether it can run again, and from which state. */
static int settle_custom(py_run_t *run, PyObject *results, PyObject *states) {
    PyObject *answer = PyObject_CallMethod(
        run->session, "_may_repeat", "OOONOOOO", run->key == NULL ? Py_None : run->key,
        run->kernel->operator_, run->args, py_run_kwargs(run), results, (PyObject *)run->needs,
        states, run->is_recording ? Py_True : Py_False);
    int may_repeat, has_drawn;
    int ret = answer != NULL && PyArg_ParseTuple(answer, "pp", &may_repeat, &has_drawn) ? 0 : -1;
    if (ret == 0) {
        run->is_recording = may_repeat != 0;
        if (!has_drawn) {
            Py_CLEAR(run->generator);
            Py_CLEAR(run->state);
            run->kept_bytes = 0;
        }
    }
    Py_XDECREF(answer);
    return ret;
}

PyObject *py_odd_call(py_handler_t *self, py_run_t *run) {
    bool is_custom = (run->kernel->traits & TRAIT_CUSTOM) != 0;
    PyObject *states = NULL, *results = NULL;
    int ret = 0;

    if (run->generator != NULL) {
        if ((run->state = py_ask(self, run->generator, get_state)) == NULL) {
            return NULL;
        }
        if (is_custom &&
            (states = py_ask(self, run->session, _states, run->generator, run->state)) == NULL) {
            return NULL;
        }
    }
    int64_t start = py_handler_now(self);
    if (!self->is_cpu && !run->varies && run->needs->cost_ns == COST_UNKNOWN) {
        /* Libraries of kernels take memory at a first call that no other one takes. */
        run->needs->cost_ns = COST_RAN;
        results = PyObject_Call(run->kernel->call, run->args, run->kwargs);
    } else if (run->varies || !run->needs->is_measured) {
        results = call_by(run, self->names[NAME__measure], NULL, &run->peak_bytes);
    } else if (py_lacks_needs(self, run)) {
        /* Its time on the device, which a launch does not show. */
        results = call_by(run, self->names[NAME__time], (PyObject *)run->needs,
                          &run->needs->cost_ns);
    } else {
        results = PyObject_Call(run->kernel->call, run->args, run->kwargs);
    }
    run->took_ns = run->needs->cost_ns >= 0 ? run->needs->cost_ns : py_handler_now(self) - start;
    if (results != NULL && !run->needs->is_measured) {
        ret = py_did(py_ask(self, run->session, _has_run, (PyObject *)run->needs,
                            run->state == NULL ? Py_None : run->state));
    }
    if (results != NULL && ret == 0 && is_custom) {
        ret = settle_custom(run, results, states);
    }
    Py_XDECREF(states);
    if (ret != 0) {
        Py_CLEAR(results);
    }
    return results;
}

/* (a, b) of each output that is new, or of each that was written to, as the observer takes them. */
static PyObject *pairs_of(const py_made_t *made, bool are_written) {
    PyObject *list = PyList_New(0);
    for (int64_t k = 0; list != NULL && k < made->count; k++) {
        if ((made->origins[k] >= 0) != are_written) {
            continue;
        }
        PyObject *pair = are_written
                             ? Py_BuildValue("ii", (int)made->origins[k], (int)made->nodes[k])
                             : Py_BuildValue("iL", (int)made->nodes[k], (long long)made->bytes[k]);
        py_append(&list, pair);
    }
    return list;
}

int py_odd_observe(py_handler_t *self, const py_run_t *run, const py_made_t *made,
                   bool is_recorded) {
    return py_did(PyObject_CallMethod(
        self->recorder->observer, "operation", "OLNNNO", run->kernel->name,
        (long long)run->took_ns, py_book_node_list(self->nodes, self->node_count),
        pairs_of(made, false), pairs_of(made, true), is_recorded ? Py_True : Py_False));
}
