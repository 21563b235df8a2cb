/*
 * A graph of operations at the level of storages, which programs run and the planner plans.
 *
 * Every storage is made by one operation; what exists before and after the step (parameters,
 * inputs) is no storage. An operation reads storages, makes storages, and needs a workspace while it
 * runs, which may be negative where outputs come to be as inputs go, down to minus their bytes. The
 * operations are numbered in an order in which every input is made before it is read and which keeps
 * the phases: forward, loss, backward.
 *
 * An operation may have one lazy output, its tape: a run makes it only where something reads it before
 * the next run, and has another workspace where nothing does. A tape holds the inputs of its making.
 */
#ifndef ROTOR_DATAFLOW_H
#define ROTOR_DATAFLOW_H

#include "core.h"

enum rotor_phase { ROTOR_PHASE_FORWARD = 0, ROTOR_PHASE_LOSS = 1, ROTOR_PHASE_BACKWARD = 2 };

enum rotor_operation_flag {
    ROTOR_ONCE = 1,  /* it must run exactly once; operations of the loss always have it */
    ROTOR_RANDOM = 2 /* it may run again, with its own random state */
};

/* The clock on which the time of an operation passes, where a program has a link to a second tier. */
enum rotor_clock {
    ROTOR_COMPUTES = 0,
    ROTOR_READS = 1, /* of the tier: its one output is ready at the end, and may be read again */
    ROTOR_WRITES = 2 /* to the tier, once the write that was asked for before is done */
};

enum rotor_kept {
    ROTOR_KEPT = 1,      /* once made, kept to the end; later copies go at once */
    ROTOR_KEPT_FIRST = 2 /* its first copy is kept to the end; later ones go with their last use */
};

/* The arrays that a graph is built from; each `*_start` has operation_count + 1 elements. */
typedef struct {
    /* input */
    int64_t operation_count;
    int64_t storage_count;
    const int64_t *cost_ns;
    const int64_t *workspace_bytes;
    const int64_t *phase;
    const int64_t *flags;
    const int64_t *input_start;
    const int64_t *inputs;
    const int64_t *output_start;
    const int64_t *outputs;
    const int64_t *storage_bytes;
    const int64_t *pinned; /* enum rotor_kept, or 0 */
    const int64_t *fixed;  /* 1: never moved to a second tier; NULL: none */
    const int64_t *lazy;   /* 1: the tape of its operation; NULL: none */
    const int64_t *light_bytes; /* workspace of a run without its tape; NULL: as with it */
    const int64_t *clock;       /* enum rotor_clock; NULL: all compute */
} rotor_dataflow_arrays_t;

typedef struct {
    /* state, from the arrays; read only */
    int32_t operation_count;
    int32_t storage_count;
    int64_t *cost_ns;
    int64_t *workspace_bytes;
    int64_t *light_bytes;  /* workspace of a run that does not make its tape */
    int64_t *output_bytes; /* of all outputs of an operation */
    int32_t *tape;         /* the lazy output of an operation, -1 for none */
    uint8_t *phase;
    uint8_t *flags;
    uint8_t *clock;
    int32_t *input_start;
    int32_t *inputs; /* each once */
    int32_t *output_start;
    int32_t *outputs;
    int64_t *bytes;
    uint8_t *pinned;
    uint8_t *fixed;
    uint8_t *lazy;
    int32_t *producer;   /* of a storage */
    int32_t *user_start; /* by storage */
    int32_t *users;      /* operations, ascending */
    int64_t total_cost_ns; /* every operation once */
    int64_t total_bytes;   /* all storages and the largest workspace */
    bool has_homes; /* some operation reads from the tier */
    bool is_plain;  /* no tapes, no negative workspaces, none of ROTOR_KEPT_FIRST */
} rotor_dataflow_t;

void rotor_dataflow_init(rotor_dataflow_t *self);
void rotor_dataflow_free(rotor_dataflow_t *self);

/*
 * Builds a graph. ROTOR_ERR_BAD_LENGTH without operations, or with more than 2^30 of anything;
 * ROTOR_ERR_NEGATIVE_SIZE (a workspace below minus the outputs of its run too), ROTOR_ERR_NEGATIVE_TIME,
 * ROTOR_ERR_TOO_LARGE (ROTOR_MAX_VALUE), ROTOR_ERR_OVERFLOW (sums); ROTOR_ERR_BAD_OPERATION for an index,
 * phase or flag out of range, for a phase after a later one, and for a second tape of an operation or one
 * that is pinned; for one that reads and has inputs, flags, or another output than one that is neither pinned
 * nor a tape, or that writes and has outputs, or may run again;
 * ROTOR_ERR_NO_INPUT for an input that no earlier operation makes; ROTOR_ERR_TWICE for a storage
 * made twice; ROTOR_ERR_INCOMPLETE for a storage that no operation makes.
 */
int rotor_dataflow_build(rotor_dataflow_t *self, const rotor_dataflow_arrays_t *arrays);

/*
 * Bytes below which no program can stay, in any order: the largest, over operations, of what is live
 * in the first run at least. These are its inputs, outputs and workspace; pinned storages that are
 * made before in every order; and storages that are made before, cannot be made again, and are read
 * after it in every order (those of the loss). Of several operations that make pinned storages, the
 * one that runs last has those of the others beside it. A first run may be one without its tape. Large
 * graphs are looked at in part.
 */
int rotor_dataflow_lower_bound(const rotor_dataflow_t *self, int64_t *bytes);

/* The bytes that may go with s: of a tape, those of what it holds too, but for what is pinned. */
int64_t rotor_dataflow_freed_bytes(const rotor_dataflow_t *self, int32_t storage);

/* Sets all times to 1 ns and those of the bytes made, none where `bytes_per_ns` is 0. */
void rotor_dataflow_time_by_bytes(rotor_dataflow_t *self, int64_t bytes_per_ns);

/* True for a storage that is at home in the second tier: an operation that reads makes it. */
static inline bool rotor_dataflow_is_home(const rotor_dataflow_t *self, int32_t storage) {
    return self->clock[self->producer[storage]] == ROTOR_READS;
}

/* The time of a run on the clock of computing. */
static inline int64_t rotor_dataflow_run_ns(const rotor_dataflow_t *self, int32_t operation,
                                            bool has_link) {
    return has_link && self->clock[operation] != ROTOR_COMPUTES ? 0 : self->cost_ns[operation];
}

static inline bool rotor_dataflow_once(const rotor_dataflow_t *self, int32_t operation) {
    return (self->flags[operation] & ROTOR_ONCE) != 0;
}

#endif
