/*
 * Shared by all files of the binding, which knows no algorithm: it parses, borrows buffers,
 * releases the GIL, calls librotor, and raises through py_raise_status().
 */
#ifndef ROTOR_SUPPORT_H
#define ROTOR_SUPPORT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Python gives functions of a kind the same parameters; few need them all. */
#pragma GCC diagnostic ignored "-Wunused-parameter"

#include "chain.h"
#include "link.h"
#include "log.h"
#include "sequence.h"

/* The state of the module: classes of rotor.errors, and types that more than one file needs. */
#define PY_STATE_OBJECTS(entry)                                                                    \
    entry(PyObject, infeasible_error) entry(PyObject, invalid_sequence_error)                      \
        entry(PyObject, malformed_log_error) entry(PyTypeObject, chain_type)                       \
            entry(PyTypeObject, table_type) entry(PyTypeObject, log_type)                          \
                entry(PyTypeObject, candidate_type) entry(PyTypeObject, ref_type)                  \
                    entry(PyTypeObject, needs_type) entry(PyTypeObject, recorder_type)             \
                        entry(PyTypeObject, kernel_type) entry(PyTypeObject, node_type)                  \
                            entry(PyTypeObject, record_type)                       \
                                entry(PyTypeObject, transfer_type)

typedef struct {
#define AS_FIELD(type, name) type *name;
    PY_STATE_OBJECTS(AS_FIELD)
#undef AS_FIELD
} py_state_t;

py_state_t *py_state(PyObject *module);

/* Sets the exception for a status that carries no figures and returns NULL. Keeps an exception that
 * is set already (a signal handler's, a progress callback's). */
PyObject *py_raise_status(PyObject *module, int status);

/* InfeasibleError(message, minimum_bytes); returns NULL. */
PyObject *py_raise_infeasible(PyObject *module, int64_t budget, int64_t minimum);

/* Sets the exception type(message, number) and returns NULL; takes over the message, NULL after an error. */
PyObject *py_raise_number(PyObject *type, PyObject *message, int64_t number);

/* A chain as a Python object; the struct lives as long as the object. */
typedef struct {
    PyObject_HEAD
    rotor_chain_t chain;
} py_chain_t;

/* Borrows one-dimensional C-contiguous buffers of int64 ('q' or 'l'). -1 with an exception on failure. */
int py_get_int64(PyObject *object, const char *name, Py_buffer *view);
int py_get_arrays(PyObject *const *objects, const char *const *names, int count, Py_buffer *views);
void py_release_arrays(Py_buffer *views, int count);
int py_check_length(const Py_buffer *view, const char *name, Py_ssize_t expected);

/* False with a TypeError where a constructor of this name got arguments by name. */
bool py_has_no_names(const char *name, PyObject *kwargs);

/* A bytearray that holds `count` int64, which numpy.frombuffer reads; the same of int32. */
PyObject *py_int64_bytes(const int64_t *values, int64_t count);
PyObject *py_wide_bytes(const int32_t *values, int64_t count);

/* Text in UTF-8, as far as it is. */
PyObject *py_text(const char *text);

/*
 * A callback for long computations that run without the GIL: looks for signals, and calls
 * `progress(done, total)` when it is not NULL, about every 0.05 s.
 *
 *     py_watch_t watch;
 *     py_watch_begin(&watch, progress);        (releases the GIL)
 *     status = rotor_x_solve(..., &watch.callback, ...);
 *     py_watch_end(&watch);                    (takes it again)
 */
typedef struct {
    rotor_callback_t callback;
    PyObject *progress; /* borrowed, NULL for none */
    PyThreadState *saved;
    int64_t next_ns;
} py_watch_t;

/* Looks for signals and calls `progress`, NULL for none; false with an exception. */
bool py_goes_on(PyObject *progress, int64_t done, int64_t total);

void py_watch_begin(py_watch_t *watch, PyObject *progress);
void py_watch_end(py_watch_t *watch);

/*
 * A log as a Python object. It may be replayed by many threads at once, or fed by one: `readers`
 * and `is_feeding` are read and changed with the GIL held.
 */
typedef struct {
    PyObject_HEAD
    rotor_log_t log;
    int32_t readers;
    bool is_feeding;
} py_log_t;

/* Drops the result of a call that was made for its effect: 0, or -1 with an exception. */
int py_did(PyObject *result);
/* A question without arguments: 1, 0, or -1 with an exception. */
int py_is_true(PyObject *function);

/* For lists of the objects that `self` holds: `#define X_OBJECTS(entry) entry(field) ...`. */
#define PY_VISIT_FIELD(field) Py_VISIT(self->field);
#define PY_CLEAR_FIELD(field) Py_CLEAR(self->field);
#define PY_HOLD_FIELD(field) self->field = Py_NewRef(field);

#define PY_FASTCALL(function) (PyCFunction)(void (*)(void)) function, METH_FASTCALL

/* The entry at a place of a list or tuple, a new reference, or NULL past its end. A list may change
 * whenever Python code runs: loops over one end here, and hold what they look at. */
static inline PyObject *py_entry(PyObject *sequence, Py_ssize_t k) {
    return k < PySequence_Fast_GET_SIZE(sequence)
               ? Py_NewRef(PySequence_Fast_GET_ITEM(sequence, k))
               : NULL;
}

/* True if a method got `least` to `most` arguments, else a TypeError. */
bool py_are_counted(const char *method, Py_ssize_t nargs, Py_ssize_t least, Py_ssize_t most);

/* An integer from least to most; bools are refused. False with an exception. */
bool py_get_integer(PyObject *object, const char *what, int64_t least, int64_t most,
                    int64_t *integer);

/* Reads (write_bytes_per_s, read_bytes_per_s, latency_ns, duplex, host_bytes, least_bytes,
 * padding_bytes), a tuple; host_bytes is -1 for any. A status; ROTOR_OK with an exception where a
 * number cannot be read. */
int py_read_link(PyObject *given, rotor_link_t *link);

/* What a solver answers: the schedule, None where `may_lack` and none fits, or NULL with the
 * exception of the status. Frees the sequence. */
PyObject *py_schedule(PyObject *module, int status, bool may_lack, rotor_sequence_t *sequence);
/* (bytes, ns) of a curve, int64 each. */
PyObject *py_points(const int64_t *bytes, const int64_t *ns, int64_t count);

/* Appends an item and drops the reference to it; clears *list where that is NULL, or fails. */
void py_append(PyObject **list, PyObject *item);

/* Sets the exception of a status, for an object of the module; -1 where one is set. */
int py_check_status(void *object, int status);
/* None; NULL where an exception is set. */
PyObject *py_none(void *object, int status);

/* Adds an immutable type to the module, with flags beside the usual ones, and keeps a reference
 * where `kept`, of the state, is not NULL. */
int py_add_type(PyObject *module, const char *name, size_t size, unsigned long flags,
                PyType_Slot *slots, PyTypeObject **kept);
/* Frees an object that holds nothing but what its tp_clear lets go of: the end of a tp_dealloc. */
void py_dealloc(PyObject *object);

/* Each area adds its functions and types to the module, in this order. */
#define PY_AREAS(entry)                                                                            \
    entry(chain) entry(solvers) entry(probe) entry(timing) entry(log) entry(log_writer)            \
    entry(candidate) entry(replay) entry(planner) entry(recorder) entry(node_state)                \
    entry(dtr_types) entry(kernel) entry(record) entry(handler) entry(modes)                       \
    entry(checksum) entry(blocks) entry(tier) entry(pending) entry(live)

#define AS_DECLARATION(area) int py_add_##area(PyObject *module);
PY_AREAS(AS_DECLARATION)
#undef AS_DECLARATION

#endif
