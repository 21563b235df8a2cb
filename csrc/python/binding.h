/*
 * What the files of the binding share. The binding knows no algorithm: it parses, borrows buffers,
 * releases the GIL, calls librotor, and raises through rotor_raise_status().
 */
#ifndef ROTOR_BINDING_H
#define ROTOR_BINDING_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "chain.h"
#include "log.h"
#include "sequence.h"

typedef struct {
    PyObject *infeasible_error;       /* rotor.errors.InfeasibleError */
    PyObject *invalid_sequence_error; /* rotor.errors.InvalidSequenceError */
    PyObject *malformed_log_error;    /* rotor.errors.MalformedLogError */
    PyTypeObject *chain_type;
    PyTypeObject *table_type;
    PyTypeObject *log_type;
    PyTypeObject *candidate_type;
    PyTypeObject *ref_type;   /* of storages */
    PyTypeObject *needs_type; /* of operators */
    PyTypeObject *recorder_type;
    PyTypeObject *kernel_type;
} rotor_state_t;

extern struct PyModuleDef rotor_module_def;

rotor_state_t *rotor_state(PyObject *module);

/* Sets the exception for a status that carries no figures and returns NULL. Keeps an exception that
 * is set already (a signal handler's, a progress callback's). */
PyObject *rotor_raise_status(PyObject *module, int status);

/* InfeasibleError(message, minimum_bytes); returns NULL. */
PyObject *rotor_raise_infeasible(PyObject *module, int64_t budget, int64_t minimum);

/* A chain as a Python object; the struct lives as long as the object. */
typedef struct {
    PyObject_HEAD
    rotor_chain_t chain;
} rotor_chain_object_t;

/*
 * Borrows a one-dimensional C-contiguous buffer of int64 ('q' or 'l') with `length` elements, or of
 * any length when it is -1. Release with PyBuffer_Release. -1 with an exception on failure.
 */
int rotor_get_int64(PyObject *object, const char *name, Py_ssize_t length, Py_buffer *view);

/* A bytearray that holds `count` int64 (or int32 pairs for operations): numpy.frombuffer reads it. */
PyObject *rotor_int64_bytes(const int64_t *values, int64_t count);
PyObject *rotor_ops_bytes(const rotor_sequence_t *sequence);

/*
 * A callback for long computations that run without the GIL: looks for signals, and calls
 * `progress(done, total)` when it is not NULL, about every 0.05 s.
 *
 *     rotor_watch_t watch;
 *     rotor_watch_begin(&watch, progress);        (releases the GIL)
 *     status = rotor_x_solve(..., &watch.callback, ...);
 *     rotor_watch_end(&watch);                    (takes it again)
 */
typedef struct {
    rotor_callback_t callback;
    PyObject *progress; /* borrowed, NULL for none */
    PyThreadState *saved;
    int64_t next_ns;
} rotor_watch_t;

void rotor_watch_begin(rotor_watch_t *watch, PyObject *progress);
void rotor_watch_end(rotor_watch_t *watch);

/*
 * A solved table as a Python object (rotor._core.Table): it keeps the chain object alive, and calls
 * these functions of its solver with the GIL held (they are fast) except `release`.
 */
typedef struct {
    void (*release)(void *table);
    /* Appends a schedule within budget; ROTOR_ERR_INFEASIBLE sets *minimum to the least budget. */
    int (*sequence)(const void *table, int64_t budget, rotor_sequence_t *sequence,
                    int64_t *minimum);
    /* Borrowed arrays of *count points, ascending bytes and descending ns; NULL: no curve. */
    int (*curve)(const void *table, int64_t *count, const int64_t **bytes, const int64_t **ns);
} rotor_table_ops_t;

/* Takes ownership of `table`, also when it fails. */
PyObject *rotor_table_new(PyObject *module, PyObject *chain, void *table,
                          const rotor_table_ops_t *ops);

/*
 * A log as a Python object. It may be replayed by many threads at once, or fed by one: `readers` and
 * `is_feeding` are read and changed with the GIL held.
 */
typedef struct {
    PyObject_HEAD
    rotor_log_t log;
    int32_t readers;
    bool is_feeding;
} rotor_log_object_t;

/* Each area adds its functions and types to the module. */
int rotor_add_chain(PyObject *module);
int rotor_add_solvers(PyObject *module);
int rotor_add_classic(PyObject *module);
int rotor_add_probe(PyObject *module);
int rotor_add_checksum(PyObject *module);
int rotor_add_log(PyObject *module);
int rotor_add_replay(PyObject *module);
int rotor_add_planner(PyObject *module);
int rotor_add_dtr(PyObject *module);

#endif
