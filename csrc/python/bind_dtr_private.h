/* The handler of a program's operators, for the files that read arguments and run operators. */
#ifndef ROTOR_BIND_DTR_PRIVATE_H
#define ROTOR_BIND_DTR_PRIVATE_H

#include "bind_dtr_book.h"

/* The names of Python that the handler asks tensors, storages and sessions for. */
#define HANDLER_NAMES(entry)                                                                      \
    entry(shape) entry(stride) entry(dtype) entry(layout) entry(device) entry(is_cpu)             \
        entry(is_neg) entry(is_conj) entry(storage_offset) entry(untyped_storage) entry(nbytes)   \
            entry(_ref_of) entry(_make_room) entry(_handle) entry(_complete_odd) entry(_replay)   \
                entry(_see_thrashing) entry(_swap_data_ptr_) entry(set_) entry(kernel)            \
                    entry(name) entry(__enter__) entry(__exit__)

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
    PART_COMPLEX,
    PART_FLAGS,
    PART_KEY_NAME,
    PART_CPU_FLAGS, /* how many of the flags matter to the CPU */
    PART_SETTING_TYPES,
    PART_EMPTY,
    PART_SET_GRAD_ENABLED,
    PART_BELOW_AUTOGRAD, /* makes an object: below autograd and autocast while it lives */
    PART_UNCONJUGATED,
    PART_IS_ENGINES,      /* whether only autograd's engine holds the first term of a sum */
    PART_SOLE_REFERENCES, /* to such a term, in Python; -1: never */
    PART_CAPTURING,       /* whether a CUDA graph is being captured; None on the CPU */
    PART_EXCHANGE,        /* DLPack's capsule, or None */
    PART_COUNT
};

/* The facts of an operator that the handler needs. */
typedef struct {
    PyObject_HEAD PyObject *operator_; /* rotor.dtr.operators.Operator */
    PyObject *call;
    PyObject *in_place; /* of a sum, or None */
    PyObject *written;  /* a tuple of positions */
    char is_view;
    char is_simple;
    char sizes_by_value; /* floats say how large its results are */
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

enum { ROTOR_DL_CPU = 1, ROTOR_DL_CUDA = 2, ROTOR_DL_COMPLEX = 5 };

/* A tensor among the arguments. */
typedef struct {
    PyObject *tensor; /* borrowed: the arguments hold it */
    PyObject *ref;
    int64_t first; /* of its sizes and strides in the key */
    int32_t dims;
    bool is_written;
    bool is_cpu;
    bool is_complex;
} py_input_t;

typedef struct {
    PyObject_HEAD
    py_recorder_t *recorder;
    PyTypeObject *ref_type;
    PyTypeObject *needs_type;
    PyTypeObject *kernel_type;
    PyObject *parts[PART_COUNT];
    PyObject *names[NAME_COUNT];
    PyObject *table; /* of storages: key to StorageRef */
    PyObject *needs; /* of operators, by signature */
    PyObject *kernels;
    PyObject *device;   /* whose memory counts */
    PyObject *flags;    /* of the backends, as they were last */
    PyObject *gone;     /* the method */
    PyObject *zero;
    PyObject *dtype_and_device;          /* names */
    const py_dl_exchange_t *exchange;    /* NULL: attributes are read */
    int32_t device_type;                 /* of DLPack */
    int32_t device_index;
    int32_t cpu_flags;
    int64_t block_bytes;
    int64_t small_bytes;
    int32_t longest_chain;
    int32_t sole_references;
    char is_cpu;
    char is_open;
    char is_verifying; /* Python runs operators again, and compares */
    char has_views;
    char watches_writes; /* Python wants to hear of every write to a source */
    bool is_busy;
    /* of the operator that runs */
    int64_t *key;
    int64_t key_count;
    int64_t key_capacity;
    py_input_t *inputs;
    int64_t input_count;
    int64_t input_capacity;
    int32_t *nodes; /* distinct */
    int64_t node_count;
    int64_t node_capacity;
    int32_t *marks; /* by node: the round that saw it last */
    int64_t mark_capacity;
    int32_t round;
} py_handler_t;

enum { ROTOR_FEW = 8 };

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
    PyObject *few_places[ROTOR_FEW];
    int64_t few_bytes[ROTOR_FEW];
    int32_t few_numbers[3 * ROTOR_FEW];
    void *blocks[3]; /* for more than a few */
} py_made_t;

void py_made_init(py_made_t *made);
void py_made_free(py_made_t *made);
/* index: among the results, -1 for what was written to; origin: -1 for what is new. */
int py_made_add(py_made_t *made, PyObject *ref, int64_t bytes, int32_t index, int32_t origin);
PyObject *py_numbers_of(const int32_t *numbers, int64_t count);

enum py_reading { READ_OK, READ_SLOW, READ_ERROR };

/* Appends the arguments to key and inputs. */
enum py_reading py_operator_read(py_handler_t *self, const py_kernel_t *kernel, PyObject *args,
                                 PyObject *kwargs);
/* READ_OK if a result may be handled: strided, on the device that counts. */
enum py_reading py_operator_is_plain(py_handler_t *self, PyObject *tensor);
/* The references of the inputs, and their distinct nodes. */
enum py_reading py_operator_find(py_handler_t *self, PyObject *session);
/* Forgets what was read. */
void py_operator_clear(py_handler_t *self);
/* The arguments with a tuple in the place of each tensor, to fill in when they are used again. */
PyObject *py_operator_pattern(py_handler_t *self, PyObject *args, int64_t *at);
/* (node, shape, stride, offset, dtype, device, bits) of a tensor. */
PyObject *py_operator_spec(py_handler_t *self, const py_input_t *input);

/* The backends' settings, the same object as long as they are the same. */
PyObject *py_operator_flags(py_handler_t *self);
/* Evicts until so many bytes fit, at least `least`. */
int py_operator_make_room(py_handler_t *self, PyObject *session, int64_t bytes, int64_t least);
/* Runs again what the operation that has begun needs. */
int py_operator_catch_up(py_handler_t *self, PyObject *session);

/* Runs one operator: session, func, types, args, kwargs. */
PyObject *py_operator_run(py_handler_t *self, PyObject *const *args);

#endif
