/*
 * Programs: operations of a graph in the order in which they run, with repeats.
 *
 * The sequence determines which storages are live. A storage is live from its making to the last use before it
 * is made again; one that is not used goes right after its making; a pinned one stays from its first
 * making to the end, and what a later run makes of it goes right after that run. While an operation
 * runs, everything live before it, all its outputs and its workspace are in memory.
 *
 * A program is valid when
 *   - every operation runs at least once, those with ROTOR_ONCE exactly once;
 *   - the inputs of every run were made before it;
 *   - the first runs are in the order of phases: forward, loss, backward;
 *   - the first runs of the operations with a flag (once, random) are in the order of the graph.
 */
#ifndef ROTOR_PROGRAM_H
#define ROTOR_PROGRAM_H

#include "dataflow.h"

typedef struct {
    /* state; read only */
    int32_t *ops;
    int64_t length;
    int64_t capacity;
} rotor_program_t;

void rotor_program_init(rotor_program_t *self);
void rotor_program_free(rotor_program_t *self);
int rotor_program_append(rotor_program_t *self, int32_t operation);
int rotor_program_assign(rotor_program_t *self, const int32_t *ops, int64_t length);

enum rotor_fault {
    ROTOR_FAULT_NONE,
    ROTOR_FAULT_OPERATION, /* the operation does not exist: ROTOR_ERR_BAD_OPERATION */
    ROTOR_FAULT_INPUT,     /* an input was not made yet: ROTOR_ERR_NO_INPUT */
    ROTOR_FAULT_PHASE,     /* first run after one of a later phase: ROTOR_ERR_BAD_OPERATION */
    ROTOR_FAULT_ORDER,     /* first run out of the order of flagged ones: ROTOR_ERR_BAD_OPERATION */
    ROTOR_FAULT_ONCE,      /* a second run of an operation that runs once: ROTOR_ERR_TWICE */
    ROTOR_FAULT_MISSING    /* an operation never runs: ROTOR_ERR_INCOMPLETE */
};

typedef struct {
    /* output */
    enum rotor_fault kind;
    int64_t position; /* in the program; its length where an operation is missing */
    int32_t operation;
    int32_t storage; /* the input that is missing, else -1 */
} rotor_fault_t;

typedef struct {
    /* output */
    int64_t time_ns;
    int64_t peak_bytes;
} rotor_cost_t;

/*
 * Checks and prices a program. `before` (bytes live when each operation begins) and `peak` (the most
 * while it runs) have `length` elements or are NULL; `fault` (may be NULL) says what is wrong where
 * the status is that of a fault.
 */
int rotor_program_simulate(const rotor_dataflow_t *graph, const int32_t *ops, int64_t length,
                           rotor_cost_t *price, int64_t *before, int64_t *peak,
                           rotor_fault_t *fault);

/* Memory that repeated pricing needs. */
typedef struct {
    /* state */
    int32_t *made;   /* per storage: where it was made last, -1 */
    int32_t *last;   /* per storage: its last use since */
    int64_t *ended;  /* per position: bytes that go after it */
    int32_t *runs;   /* per operation */
    int32_t *next;   /* per operation: its next run, looking backwards */
    uint8_t *needed; /* per storage, looking backwards */
    int64_t capacity;
} rotor_pricer_t;

void rotor_pricer_init(rotor_pricer_t *self);
void rotor_pricer_free(rotor_pricer_t *self);

/* Prices a program that is known to be valid. */
int rotor_pricer_price(rotor_pricer_t *self, const rotor_dataflow_t *graph, const int32_t *ops,
                       int64_t length, rotor_cost_t *price);

/* Removes the runs of a valid program that no later one needs; the result is valid, no slower, and
 * its peak is no higher. */
int rotor_pricer_prune(rotor_pricer_t *self, const rotor_dataflow_t *graph,
                       rotor_program_t *program);

#endif
