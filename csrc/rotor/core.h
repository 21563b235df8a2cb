/*
 * Foundations of librotor: status codes, allocation, interruption.
 *
 * Every function of the library that can fail returns an `int` status: ROTOR_OK (0) or one of the
 * negative codes below. On any other status than ROTOR_OK the outputs are as they were before the
 * call, unless a header says otherwise. The library keeps no global state (a testing build counts
 * allocations, see below), never prints, never exits, and knows nothing of Python.
 *
 * Pseudo-objects: `rotor_X_init` prepares a struct so that `rotor_X_free` may always be called,
 * also after a failed init; `rotor_X_free` leaves an empty struct that may be freed again. Without a
 * `rotor_X_init`, zeros are an empty struct.
 */
#ifndef ROTOR_CORE_H
#define ROTOR_CORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum rotor_status {
    ROTOR_OK = 0,
    ROTOR_ERR_NO_MEMORY = -1,        /* an allocation failed */
    ROTOR_ERR_INTERRUPTED = -2,      /* keep_going said stop */
    ROTOR_ERR_OVERFLOW = -3,         /* a sum of sizes or times leaves int64 */
    ROTOR_ERR_BAD_LENGTH = -10,      /* a chain needs at least one stage */
    ROTOR_ERR_NEGATIVE_SIZE = -11,   /* a size is below zero */
    ROTOR_ERR_NEGATIVE_TIME = -12,   /* a time is below zero */
    ROTOR_ERR_BACKWARD_TMP = -13,    /* backward_tmp[i] is below -grad[i] */
    ROTOR_ERR_TOO_LARGE = -14,       /* a size or time is above ROTOR_MAX_VALUE */
    ROTOR_ERR_BAD_SLOTS = -15,       /* the number of memory slots is not positive */
    ROTOR_ERR_BAD_BUDGET = -16,      /* the budget is not positive */
    ROTOR_ERR_INFEASIBLE = -20,      /* no schedule of the solver's class fits the budget */
    ROTOR_ERR_TABLE_TOO_LARGE = -21, /* the solver's table would pass the bound given by the caller */
    ROTOR_ERR_BAD_OPERATION = -30,   /* unknown kind, or a stage that the chain does not have */
    ROTOR_ERR_NO_INPUT = -31,        /* an operation needs an activation that is not there */
    ROTOR_ERR_NO_TAPE = -32,         /* a backward needs what Fe keeps, and it is not there */
    ROTOR_ERR_NO_GRADIENT = -33,     /* a backward needs a gradient that is not there */
    ROTOR_ERR_TWICE = -34,           /* Fe over a live one, a second loss, a second backward */
    ROTOR_ERR_ONCE = -36,           /* a forward of a stage that runs once, by Fe */
    ROTOR_ERR_INCOMPLETE = -35,      /* the sequence ends before the backward of stage 0 */
    ROTOR_ERR_IO = -40,              /* a file could not be read or was not understood */
    ROTOR_ERR_UNAVAILABLE = -41,     /* this machine does not offer what was asked for */
    ROTOR_ERR_FORMAT = -50,          /* a log is malformed; a message says where and how */
    ROTOR_ERR_BAD_HEURISTIC = -51,   /* the runtime cannot serve the heuristic */
    ROTOR_ERR_BAD_STATE = -52        /* a command asks for a tensor that cannot be made any more */
};

/* The largest size (bytes) or time (ns) of one entry: sums of 2^20 of them stay within int64. */
#define ROTOR_MAX_VALUE (INT64_C(1) << 42)

/* A sentence for any status; never NULL. */
const char *rotor_strerror(int status);

/* malloc and friends, which never ask for zero bytes. NULL when memory is short. */
void *rotor_malloc(size_t size);
void *rotor_calloc(size_t count, size_t size);
void *rotor_realloc(void *block, size_t size);
void rotor_free(void *block);

/* The bytes of count elements of `size` each, or ROTOR_ERR_OVERFLOW. */
int rotor_array_bytes(int64_t count, size_t size, size_t *bytes);

/* malloc of count elements of `size` bytes; NULL when memory is short or the product overflows. */
void *rotor_malloc_array(int64_t count, size_t size);

/* The same for a part of a table that may take `most` bytes and has *taken, to which it adds:
 * ROTOR_ERR_TABLE_TOO_LARGE beyond them. `place` is the address of the pointer to it. */
int rotor_malloc_part(int64_t count, size_t size, int64_t most, int64_t *taken, void *place);

/* Arrays that come and go together. */
typedef struct {
    void *place; /* of the pointer to the first element */
    int64_t count;
    size_t size;
} rotor_array_t;

#define ROTOR_ARRAY(items, count) {&(items), (count), sizeof(*(items))}

/* Allocates all of them, zeroed, or frees them; evaluates to a status. Where memory is short the ones that
 * it has none for are NULL, and the caller frees all. */
#define ROTOR_ARRAYS(is_new, ...)                                   \
    rotor_arrays((is_new), (const rotor_array_t[]){__VA_ARGS__},    \
                 sizeof((const rotor_array_t[]){__VA_ARGS__}) / sizeof(rotor_array_t))

int rotor_arrays(bool is_new, const rotor_array_t *arrays, size_t count);

#ifdef ROTOR_TESTING
/* Makes the n-th allocation from now on fail (1 = the next), and all after it; 0 = none fails. */
void rotor_testing_fail_after(int64_t n);
/* Allocations that are live now. */
int64_t rotor_testing_live(void);
#endif

/* In builds with checks: stops the process where `fault`, a sentence, is not NULL. */
#ifdef ROTOR_CHECKS
#include <assert.h>
#define ROTOR_ASSERT_HOLDS(fault) assert((fault) == NULL)
#endif

/*
 * Asked once per row of a long computation; returns false to stop it (ROTOR_ERR_INTERRUPTED).
 * `done` of `total` units of work are done. A NULL callback pointer, or a NULL keep_going, never
 * stops.
 */
typedef struct {
    /* input */
    bool (*keep_going)(void *context, int64_t done, int64_t total);
    void *context;
} rotor_callback_t;

int rotor_ask(const rotor_callback_t *callback, int64_t done, int64_t total);

static inline int64_t rotor_max(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t rotor_min(int64_t a, int64_t b) { return a < b ? a : b; }

#endif
