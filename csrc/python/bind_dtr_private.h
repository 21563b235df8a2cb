/* The handler of a program's operators, for the files that read arguments and run operators. */
#ifndef ROTOR_BIND_DTR_PRIVATE_H
#define ROTOR_BIND_DTR_PRIVATE_H

#include "bind_dtr_book.h"
#include "vector.h"

/* The names of Python that the handler asks tensors, storages, generators and sessions often for. The
 * methods of a session that begin with an underscore are what an operator needs of Python only
 * where something about it, its arguments or its results is unusual. */
#define HANDLER_NAMES(entry)                                                                       \
    entry(shape) entry(stride) entry(dtype) entry(layout) entry(device) entry(is_cpu)              \
        entry(is_neg) entry(is_conj) entry(storage_offset) entry(untyped_storage) entry(nbytes)    \
            entry(_swap_data_ptr_) entry(set_) entry(get_state) entry(set_state) entry(give)       \
                entry(__enter__) entry(__exit__)                                                   \
                    entry(_find_kernel) entry(_refuse_types) entry(_refuse_capture)                \
                        entry(_refuse_opaque) entry(_ref_of)                                       \
                            entry(_see_parts) entry(_see_thrashing) entry(_vary)                   \
                                entry(_note_varying) entry(_state_bytes) entry(_states)            \
                                    entry(_measure) entry(_time) entry(_has_run) entry(ran)        \
                                        entry(_use_count)

enum {
#define AS_ENUM(name) NAME_##name,
    HANDLER_NAMES(AS_ENUM)
#undef AS_ENUM
        NAME_COUNT
};

/* The parts of PyTorch that the handler uses: `rotor._pytorch.dispatch.handler_parts`, in this order. */
enum {
    PART_TENSOR_TYPE,
    PART_PLAIN_TYPES,
    PART_STRIDED,
    PART_IN_FUNCTIONS,
    PART_WITHOUT_FUNCTIONS,
    PART_GRAPH_TASK,
    PART_GRAD_ENABLED,
    PART_CPU,
    PART_DTYPES, /* DLPack's words for data types, by data type */
    PART_FLAGS,
    PART_WRITE_FLAGS,
    PART_PLAIN_FLAGS, /* how many of the flags matter to every operator */
    PART_CPU_FLAGS,   /* how many of the flags matter to the CPU */
    PART_SETTING_TYPES,
    PART_EMPTY,
    PART_SET_GRAD_ENABLED,
    PART_BELOW_AUTOGRAD, /* makes an object: below autograd and autocast while it lives */
    PART_UNCONJUGATED,
    PART_COPY,            /* of a storage */
    PART_IS_ENGINES,      /* whether only autograd's engine holds the first term of a sum */
    PART_SOLE_REFERENCES, /* to such a term, in Python; -1: never */
    PART_INTEGERS,        /* data types */
    PART_CAPTURING,       /* whether work is captured, or on another stream; None on the CPU */
    PART_EXCHANGE,        /* DLPack's capsule, or None */
    PART_COUNT
};

/* Bits of an operator: how it differs from one that computes new tensors from its arguments. */
enum py_trait {
    TRAIT_VIEW = 1,           /* reads no elements */
    TRAIT_FRESH = 2,          /* a view of a tensor that was just made */
    TRAIT_RANDOM = 4,         /* draws from a generator */
    TRAIT_CUSTOM = 8,         /* not PyTorch's own */
    TRAIT_VARIES = 16,        /* the sizes of its results depend on elements */
    TRAIT_RESHAPES = 32,      /* replaces or resizes storages */
    TRAIT_SIZES_BY_VALUE = 64, /* floats say how large its results are */
    TRAIT_POINTWISE = 128,    /* the precision of products does not matter */
    TRAIT_ODD = TRAIT_RANDOM | TRAIT_CUSTOM | TRAIT_VARIES | TRAIT_RESHAPES
};

/* The facts of an operator that the handler needs (rotor.dtr.operators). */
typedef struct {
    PyObject_HEAD PyObject *operator_; /* rotor.dtr.operators.Operator */
    PyObject *name;
    PyObject *call;
    PyObject *replay;        /* what runs again */
    PyObject *in_place;      /* of a sum, or None */
    PyObject *written_names; /* a tuple */
    uint64_t written;        /* by position */
    uint64_t hidden;         /* by position: written to, and not part of what is computed, */
    int32_t hidden_if;       /* where the argument of this position is true; -1: never */
    int32_t kept_if;         /* results stay where these two arguments are true; -1: never */
    int32_t traits;
} py_kernel_t;

/* DLPack 1: a tensor as C sees it, and the table of functions that a capsule holds. */
typedef struct {
    void *data;
    int32_t device_type;
    int32_t device_index;
    int32_t dims;
    uint8_t dtype_code;
    uint8_t dtype_bits;
    uint16_t dtype_lanes;
    int64_t *shape;
    int64_t *strides;
    uint64_t byte_offset;
} py_dl_tensor_t;

typedef struct {
    uint32_t major;
    uint32_t minor;
    void *previous;
    void (*unused[3])(void);
    int (*view)(void *tensor, py_dl_tensor_t *out); /* borrows; -1 with an exception */
    void (*current_stream)(void);
} py_dl_exchange_t;

enum { ROTOR_DL_CPU = 1, ROTOR_DL_COMPLEX = 5 };

/* A tensor among the arguments. */
typedef struct {
    PyObject *tensor;
    py_ref_t *ref;
    int64_t first; /* of its sizes and strides in the key */
    int32_t dims;
    bool is_written;
    bool is_hidden;
    bool is_cpu;
    bool is_complex;
} py_input_t;

/* The storages that an operator made or wrote to. */
typedef struct {
    PyObject **places; /* references */
    int64_t *bytes;
    int32_t *origins; /* -1 for what is new */
    int32_t *indices; /* among the results, -1 for what was written to */
    int32_t *nodes;
    int64_t count;
    int64_t capacity;
    int64_t largest;
} py_made_t;

/* References to storages by their addresses. */
typedef struct {
    py_ref_t **slots;
    size_t capacity; /* a power of two, or 0 */
    size_t count;
} py_ref_table_t;

/* One operator's needs, by the hash of its key: the last that had it. */
typedef struct {
    uint64_t hash;
    PyObject *key;
    py_needs_t *needs;
} py_recent_t;

enum { ROTOR_RECENT = 256 };

typedef struct {
    PyObject_HEAD
    py_recorder_t *recorder;
    PyTypeObject *ref_type;
    PyTypeObject *needs_type;
    PyTypeObject *kernel_type;
    PyTypeObject *record_type;
    PyObject *parts[PART_COUNT];
    PyObject *names[NAME_COUNT];
    py_ref_table_t table;
    PyObject *needs;   /* of operators, by signature */
    PyObject *kernels; /* by operator */
    PyObject *kept;    /* names of operators whose results stay */
    PyObject *device;  /* whose memory counts */
    PyObject *bytes;   /* gives storages their bytes (rotor.dtr.storages) */
    PyObject *verifier; /* compares what runs again, or None */
    PyObject *clock;   /* NULL or None: the system's */
    PyObject *flags;   /* of the backends, as they were last */
    PyObject *gone;    /* the callback of storages */
    PyObject *module;  /* path of the one that runs; NULL or None: not noted */
    PyObject *made;    /* weak references to all results; NULL or None: not noted */
    PyObject *zero;
    PyObject *dtype_and_device;       /* names */
    const py_dl_exchange_t *exchange; /* NULL: attributes are read */
    py_recent_t recent[ROTOR_RECENT];
    PyThread_type_lock lock; /* of what follows, and of the book */
    unsigned long owner;     /* thread that has it, 0 for none */
    int64_t depth;
    int32_t device_type; /* of DLPack */
    int32_t device_index;
    int32_t plain_flags;
    int32_t cpu_flags;
    int64_t block_bytes;
    int64_t small_bytes;
    int64_t seen_thrashes;
    int64_t slack_bytes;    /* that may be kept with a large block; 0: the allocator keeps none */
    int64_t unread_blocks; /* large ones made since the device's counter was read */
    int32_t longest_chain;
    int32_t sole_references;
    char is_cpu;
    char is_open;
    char swaps; /* bytes move without copies, and views work without bytes */
    char watches_writes; /* Python hears of every write to a source */
    bool is_busy;
    /* of the operator that runs */
    int64_t *key;
    int64_t key_count;
    int64_t key_capacity;
    bool has_key;
    bool has_values; /* arguments that the key does not tell apart */
    bool has_others; /* tensors without a strided storage */
    py_input_t *inputs;
    int64_t input_count;
    int64_t input_capacity;
    int32_t *nodes; /* distinct; hidden ones last */
    int64_t node_count;
    int64_t node_capacity;
    int64_t hidden_count;
    py_made_t outputs;
    int32_t *marks; /* by node: the round that saw it last */
    int64_t mark_capacity;
    int32_t round;
} py_handler_t;

/* An operator that runs. */
typedef struct {
    PyObject *session;
    const py_kernel_t *kernel;
    PyObject *args;
    PyObject *kwargs; /* NULL for none */
    py_needs_t *needs; /* owned */
    PyObject *key;     /* owned, or NULL: bytes */
    PyObject *generator;
    PyObject *state; /* of the generator before it */
    int64_t kept_bytes;
    int64_t took_ns;
    int64_t peak_bytes; /* that it took, -1 where it was not measured */
    bool is_recording;
    bool grad_enabled;
    bool varies;
    bool is_in_place; /* a sum into its first term */
} py_run_t;

/* A dictionary, a new reference. */
static inline PyObject *py_run_kwargs(const py_run_t *run) {
    return run->kwargs == NULL ? PyDict_New() : Py_NewRef(run->kwargs);
}

/* bind_dtr_table.c: references to storages. */
py_ref_t *py_table_find(const py_ref_table_t *table, const PyObject *storage); /* borrowed */
void py_table_remove(py_ref_table_t *table, const py_ref_t *ref);
void py_table_clear(py_ref_table_t *table);
/* The reference to a storage, borrowed, made and entered where there is none yet; *is_new says so.
 * NULL with an exception. */
py_ref_t *py_table_enter(py_handler_t *self, PyObject *storage, bool *is_new);
/* A storage that no operator makes: a source; borrowed, NULL with an exception. */
py_ref_t *py_handler_adopt(py_handler_t *self, PyObject *storage, int64_t bytes, bool is_foreign);
int64_t py_bytes_of(py_handler_t *self, PyObject *storage); /* -1 with an exception */

enum py_reading { READ_OK, READ_ODD, READ_ERROR };

/* bind_dtr_reading.c. Appends the arguments to key and inputs: 0, or -1 with an exception. */
int py_operator_read(py_handler_t *self, PyObject *session, const py_kernel_t *kernel,
                     PyObject *args, PyObject *kwargs);
/* READ_OK for a tensor that is strided, on the device that counts. */
enum py_reading py_tensor_look(py_handler_t *self, PyObject *tensor);
bool py_is_tensor(const py_handler_t *self, PyObject *value);
/* 1 if a tensor is strided, 0 if not; -1 with an exception. */
int py_tensor_is_strided(py_handler_t *self, PyObject *tensor);
/* The references of the inputs. */
int py_operator_find(py_handler_t *self, PyObject *session);
/* The distinct nodes of the inputs. */
int py_operator_number(py_handler_t *self);
/* Forgets what was read. */
void py_operator_clear(py_handler_t *self);

/* A tensor argument of an operation that may run again. */
typedef struct {
    int64_t offset;
    int32_t node;
    int32_t bits; /* ARGUMENT_CONJUGATE, ARGUMENT_NEGATIVE */
} py_argument_t;

enum { ARGUMENT_CONJUGATE = 1, ARGUMENT_NEGATIVE = 2 };

/* An operation that may run again: operator and arguments, without any tensor. */
typedef struct {
    PyObject_HEAD py_kernel_t *kernel;
    py_pattern_t *pattern; /* of its arguments */
    py_needs_t *needs;     /* what it takes, which may become known later */
    PyObject *flags;       /* of the backends, as they were */
    PyObject *generator;   /* None, or a random number generator, and its state before */
    PyObject *state;
    PyObject *module; /* path of the module that ran it; None: not noted */
    PyObject *sums;   /* None, or checksums of what it made first */
    int64_t counted_bytes; /* the part of its workspace that the book knows */
    int32_t flag_count;    /* that matter to it */
    int32_t output_count;
    bool grad_enabled;
    int32_t *indices; /* of its outputs among the results, -1 for what it writes to; behind */
    int32_t *origins; /* the arguments, in one block */
    py_argument_t arguments[];
} py_record_t;

/* bind_dtr_record.c. The record of what ran; NULL with an exception. */
py_record_t *py_record_make(py_handler_t *self, const py_run_t *run, const py_made_t *made);
/* The arguments with tensors on these storages, in the order of the record's arguments. */
int py_record_fill(py_handler_t *self, const py_record_t *record, PyObject *const *storages,
                   PyObject **args, PyObject **kwargs);

/* bind_dtr_settings.c: nanoseconds. */
int64_t py_handler_now(py_handler_t *self);
/* The backends' settings, the same object as long as they are the same; so many are read. */
PyObject *py_operator_flags(py_handler_t *self, int32_t count);
/* How many of them matter to an operator. */
int32_t py_flags_of(const py_handler_t *self, const py_kernel_t *kernel);

/* bind_dtr_replay.c. Evicts until so many bytes fit, at least `least`, and the slack of segments that
 * the allocator may keep with them. needs: of the operator, or NULL: it makes nothing. */
int py_operator_make_room(py_handler_t *self, PyObject *session, const py_needs_t *needs,
                          int64_t bytes, int64_t least);
/* The same, by the session in any case. */
int py_operator_ask_room(py_handler_t *self, PyObject *session, const py_needs_t *needs,
                         int64_t bytes, int64_t least);
/* Runs again what the operation that has begun needs. */
int py_operator_catch_up(py_handler_t *self, PyObject *session);
/* Runs the operator of a record on these storages, as it ran first; returns its results. around:
 * NULL, or what is called with the operator and its arguments instead. */
PyObject *py_record_run(py_handler_t *self, const py_record_t *record, PyObject *const *storages,
                        PyObject *around, int64_t *took_ns);

/* bind_dtr_odd.c: what is unusual about an operator. */

/* The written inputs before an operator begins: sources that are needed are copied, and so on. */
int py_odd_writes(py_handler_t *self, py_run_t *run);
/* The generator that an operator draws from, and what its state takes. */
int py_odd_generator(py_handler_t *self, py_run_t *run);
/* The needs of an operator with data-dependent results. */
int py_odd_varying(py_handler_t *self, py_run_t *run);
/* Runs it, with all that is unusual before and after. */
PyObject *py_odd_call(py_handler_t *self, py_run_t *run);
/* Whether the memory, or an accelerator's time, of such runs is still to be measured. */
bool py_lacks_needs(const py_handler_t *self, const py_run_t *run);
/* Notes the needs of an operator with data-dependent results. */
int py_odd_note_varying(py_handler_t *self, const py_run_t *run);
/* Has a node in memory for good. */
int py_odd_keep(const py_run_t *run, int64_t node);
/* Tells the observer of an operation. */
int py_odd_observe(py_handler_t *self, const py_run_t *run, const py_made_t *made,
                   bool is_recorded);

/* bind_dtr_needs.c. The needs of what was read; 0, or -1 with an exception. */
int py_needs_find(py_handler_t *self, py_run_t *run);
void py_needs_forget_recent(py_handler_t *self);

/* A method of a Python object, with arguments up to NULL. */
#define py_ask(self, object, name, ...)                                                            \
    PyObject_CallMethodObjArgs((object), (self)->names[NAME_##name], ##__VA_ARGS__, NULL)

/* Room for more elements behind `length` (vector.h); -1 with an exception. */
#define py_reserve(items, length, capacity, more)                                                  \
    (ROTOR_RESERVE(items, length, capacity, more) == ROTOR_OK ? 0 : (PyErr_NoMemory(), -1))

bool py_is_handler(PyObject *object);

/* Keeps other threads out; a thread may enter again. */
void py_handler_lock(py_handler_t *self);
void py_handler_unlock(py_handler_t *self);
/* Whatever happened to it, the operation that began has ended. Keeps the exception. */
void py_handler_abort(py_handler_t *self);

/* Runs one operator: session, func, types, args, kwargs. */
PyObject *py_operator_run(py_handler_t *self, PyObject *const *args);

#endif
