/* The book of a running program as a Python object: what the files that bind it share. */
#ifndef ROTOR_BIND_DTR_H
#define ROTOR_BIND_DTR_H

#include "binding.h"
#include "recorder.h"

/*
 * The book of a running program (recorder.h), and the Python objects that go with its numbers: for
 * an operation the record that Python replays it from, for a node where its bytes are. That is a
 * weak reference to a storage that the program holds, or the storage itself for a temporary.
 *
 * Storages die whenever the garbage collector runs, which any allocation of a Python object may
 * start. Their callbacks only put the reference into a queue; rotor_recorder_forget_gone() tells the
 * book, and is called where nobody holds pointers into it or numbers of nodes without a storage:
 * before an operator is read, before each choice of what to evict or to run again, and at the
 * beginning of the methods that say so. A live node may have lost its storage in between.
 */
typedef struct rotor_ref_object rotor_ref_object_t;

typedef struct {
    PyObject_HEAD rotor_recorder_t book;
    PyObject **records; /* by operation */
    int64_t record_capacity;
    PyObject **places; /* by node */
    int64_t place_capacity;
    PyObject **held; /* by node: sources that records need */
    int64_t held_capacity;
    PyObject **guards; /* what is locked until the operation has finished */
    int64_t guard_count;
    int64_t guard_capacity;
    PyObject **garbage; /* to let go at the end of a call: that may run Python code */
    int64_t garbage_count;
    int64_t garbage_capacity;
    rotor_ref_object_t *first_gone; /* died, and not yet forgotten */
    rotor_ref_object_t *last_gone;
    bool is_borrowed; /* nothing may be forgotten: numbers of outputs are in use */
    PyObject *observer; /* None, or the listener that hears of everything */
} recorder_object_t;

#define METHOD_ARGUMENTS                                                                          \
    PyObject *object, PyTypeObject *type, PyObject *const *args, Py_ssize_t count, PyObject *names

#define RECORDER_METHOD(name)                                                                     \
    {#name, (PyCFunction)(void (*)(void))recorder_##name,                                         \
     METH_METHOD | METH_FASTCALL | METH_KEYWORDS, name##_doc}

static inline recorder_object_t *rotor_as_recorder(PyObject *object) {
    return (recorder_object_t *)object;
}

/* -1 with a TypeError unless there are `wanted` positional arguments and no others. */
int rotor_recorder_expect(const char *name, Py_ssize_t count, Py_ssize_t wanted, PyObject *names);
int rotor_recorder_read_int64(PyObject *object, int64_t *value);
/* -1 with a ValueError for what is not the number of a node. */
int rotor_recorder_read_node(recorder_object_t *self, PyObject *object, int32_t *node);

/* The storage of a node, a new reference; NULL without an exception where it is gone. */
PyObject *rotor_recorder_storage_of(recorder_object_t *self, int64_t node);
PyObject *rotor_recorder_node_list(const int32_t *nodes, int64_t count);
/* Empties a slot; the object goes at the end of the call. */
int rotor_recorder_discard(recorder_object_t *self, PyObject **slot);
/* Ends every call that may change the book: NULL with an exception on failure. */
PyObject *rotor_recorder_answer(recorder_object_t *self, PyTypeObject *type, int status,
                                PyObject *result);

/* Notes that a storage died; runs nothing, allocates nothing. */
void rotor_recorder_note_gone(recorder_object_t *self, rotor_ref_object_t *ref);
/* Tells the book and the observer which storages died; -1 with an exception. */
int rotor_recorder_forget_gone(recorder_object_t *self);
/* Forgets nothing: drops the queue. */
void rotor_recorder_clear_gone(recorder_object_t *self);
/* Holds the storage of a node until the operation has ended; borrowed, NULL without an exception
 * where it is gone, NULL with one where memory is short. */
PyObject *rotor_recorder_guard(recorder_object_t *self, int64_t node);

/* The same for the live outputs of an operation that are not in memory; -1 with an exception. */
int rotor_recorder_guard_outputs(recorder_object_t *self, int32_t op);
/* Takes over a reference, and holds it as long. */
int rotor_recorder_keep(recorder_object_t *self, PyObject *storage);

/* The steps of that, for calls that change the book more than once. */
int rotor_recorder_settle(recorder_object_t *self);
void rotor_recorder_let_go(recorder_object_t *self);
int rotor_recorder_release_guards(recorder_object_t *self);
/* Room for the objects of so many more nodes and one more operation. */
int rotor_recorder_reserve(recorder_object_t *self, int64_t more);

/* How a new operation ended (rotor_recorder_finish); `nodes` is written to. */
typedef struct {
    int64_t recorded;
    const int64_t *bytes;
    const int32_t *origins;
    PyObject *const *places;
    int64_t count;
    int64_t cost_ns;
    int64_t workspace_bytes;
    int64_t kept_bytes;
    PyObject *record;
    int32_t *nodes;
} rotor_completion_t;

/* A status, or ROTOR_OK with an exception set. There is room for the objects. */
int rotor_recorder_complete(recorder_object_t *self, const rotor_completion_t *done);

/* A weak reference to a storage, with the numbers that the runtime keeps of it. */
struct rotor_ref_object {
    PyWeakReference reference;
    PyObject *key; /* in the table of storages */
    int64_t node;
    rotor_ref_object_t *next_gone; /* owned: the queue holds what is in it */
    char is_gone;
};

/* What an operator takes on arguments of one layout. */
typedef struct {
    PyObject_HEAD int64_t made_bytes;
    int64_t workspace_bytes;
    char is_measured;
} rotor_needs_object_t;

/* A new reference to a storage; `gone` is called with it when the storage dies. */
PyObject *rotor_ref_new(PyTypeObject *type, PyObject *storage, PyObject *gone, PyObject *key);
int rotor_add_dtr_types(PyObject *module);
int rotor_add_dtr_handler(PyObject *module, PyTypeObject *recorder);

/* Figures, and what can be asked without changing anything. */
extern PyMethodDef rotor_recorder_queries[];
/* What has to run again, and that it did. */
extern PyMethodDef rotor_recorder_repeats[];

#endif
