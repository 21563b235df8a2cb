/* The recorder of a running program (its "book") as a Python object, for the files that bind it. */
#ifndef ROTOR_BIND_DTR_BOOK_H
#define ROTOR_BIND_DTR_BOOK_H

#include "support.h"
#include "recorder.h"

/*
 * The recorder (recorder.h), and the Python objects that go with its numbers: for
 * an operation the record that Python replays it from, for a node where its bytes are. That is a
 * weak reference to a storage that the program holds, or the storage itself for a temporary.
 *
 * Storages die whenever the garbage collector runs, which any allocation of a Python object may
 * start. Their callbacks only put the reference into a queue; py_book_forget_gone() tells the
 * book, and is called where no pointers into it and no numbers of nodes without a storage are held:
 * before an operator is read, before each choice of what to evict or to run again, and at the
 * beginning of the methods that say so. A live node may have lost its storage in between.
 */
typedef struct py_ref py_ref_t;

typedef struct {
    PyObject_HEAD rotor_recorder_t book;
    PyObject **records; /* by operation */
    int64_t record_capacity;
    PyObject **places; /* by node */
    int64_t place_capacity;
    PyObject **held; /* by node: sources that records need */
    int64_t held_capacity;
    PyObject **copies; /* by node: what holds its bytes in a second tier */
    int64_t copy_capacity;
    PyObject **guards; /* what is locked until the operation has finished */
    int64_t guard_count;
    int64_t guard_capacity;
    PyObject **garbage; /* to let go at the end of a call: that may run Python code */
    int64_t garbage_count;
    int64_t garbage_capacity;
    py_ref_t *first_gone; /* died, and not yet forgotten */
    py_ref_t *last_gone;
    bool is_borrowed; /* nothing may be forgotten: numbers of outputs are in use */
    PyObject *observer; /* None, or the listener that hears of everything */
} py_recorder_t;

/* Methods without arguments, with one, with more. */
#define RECORDER_NONE(name) {#name, py_recorder_##name, METH_NOARGS, name##_doc}
#define RECORDER_ONE(name) {#name, py_recorder_##name, METH_O, name##_doc}
#define RECORDER_SOME(name) {#name, PY_FASTCALL(py_recorder_##name), name##_doc}

static inline py_recorder_t *py_as_recorder(PyObject *object) { return (py_recorder_t *)object; }

/* -1 with a TypeError unless a call has `wanted` arguments. */
int py_book_expect(const char *name, Py_ssize_t count, Py_ssize_t wanted);
int py_book_read_int64(PyObject *object, int64_t *value);
/* -1 with a ValueError for what is not the number of a node. */
int py_book_read_node(py_recorder_t *self, PyObject *object, int32_t *node);

/* The storage of a node, a new reference; NULL without an exception where it is gone. */
PyObject *py_book_storage_of(py_recorder_t *self, int64_t node);
PyObject *py_book_node_list(const int32_t *nodes, int64_t count);
/* Empties a slot; the object goes at the end of the call. */
int py_book_discard(py_recorder_t *self, PyObject **slot);
/* Ends every call that may change the book: NULL with an exception on failure. */
PyObject *py_book_answer(py_recorder_t *self, int status, PyObject *result);

/* Notes that a storage died; runs nothing, allocates nothing. */
void py_book_note_gone(py_recorder_t *self, py_ref_t *ref);
/* Tells the book and the observer which storages died; -1 with an exception. */
int py_book_forget_gone(py_recorder_t *self);
/* Drops the queue of dead storages without forgetting their nodes. */
void py_book_clear_gone(py_recorder_t *self);
/* Holds the storage of a node until the operation has ended; borrowed, NULL without an exception
 * where it is gone, NULL with one where memory is short. */
PyObject *py_book_guard(py_recorder_t *self, int64_t node);

/* The same for the live outputs of an operation that are not in memory; -1 with an exception. */
int py_book_guard_outputs(py_recorder_t *self, int32_t op);

/* -1 with an exception while an operation has begun. */
int py_book_may_begin(const py_recorder_t *self);
PyObject *py_book_refuse_reentry(void); /* returns NULL */

/* The steps of py_book_answer(), for calls that change the book more than once. */
int py_book_settle(py_recorder_t *self);
void py_book_let_go(py_recorder_t *self);
int py_book_release_guards(py_recorder_t *self);
/* Room for the objects of so many more nodes and one more operation. */
int py_book_reserve(py_recorder_t *self, int64_t more);

/* The end of a new operation (rotor_recorder_finish): a status, or ROTOR_OK with an exception set.
 * py_book_reserve() has made room for the objects; `nodes` is written to. */
int py_book_complete(py_recorder_t *self, const rotor_completion_t *done, PyObject *const *places,
                     PyObject *record, int32_t *nodes);

/* A weak reference to a storage, with the numbers that the runtime keeps of it. */
struct py_ref {
    PyWeakReference reference;
    const PyObject *storage; /* its address: the key in the table of storages; dead once gone */
    int64_t node;
    py_ref_t *next_gone; /* owned: the queue holds what is in it */
    char is_gone;
    char is_foreign; /* in memory before the book began */
    char stays;      /* small integers: never evicted */
};

/* The arguments of an operator without its tensors, and their layouts. */
typedef struct {
    int64_t references;
    PyObject *args;   /* a tuple with Ellipsis in the place of each tensor */
    PyObject *kwargs; /* a dictionary, or NULL */
    int64_t count;    /* of tensors */
    PyObject *layouts[]; /* shape, stride, dtype, device of each */
} py_pattern_t;

void py_pattern_release(py_pattern_t *pattern);

/* Below 0 an accelerator's time is not known: before a first run, after it, and while events have
 * not passed. */
enum { COST_UNKNOWN = -1, COST_WAITS = -2, COST_RAN = -3 };

/* An accelerator's allocator may keep a rest of a segment with larger blocks, of up to as much. */
#define ROTOR_LARGE_BYTES (INT64_C(1) << 20)

/* The memory that an operator takes on arguments of one layout. */
typedef struct {
    PyObject_HEAD int64_t made_bytes;
    int64_t workspace_bytes;
    int64_t cost_ns; /* of an accelerator's time, from a run after its first ones */
    int64_t large_blocks; /* blocks of more than ROTOR_LARGE_BYTES; -1 while that is not known */
    char is_measured;
    py_pattern_t *pattern; /* NULL: not known, or not the same for all such arguments */
} py_needs_t;

/* A new reference to a storage; `gone` is called with it when the storage dies. */
PyObject *py_ref_make(PyTypeObject *type, PyObject *storage, PyObject *gone);
/* Methods about nodes, figures and limits. */
extern PyMethodDef py_book_queries[];

#endif
