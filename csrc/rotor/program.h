/*
 * Programs: operations of a graph in the order in which they run, with repeats, and the actions that
 * move storages to a second tier of memory and back.
 *
 * With n operations and m storages, an item k of a program is
 *   - the run of operation k, below n;
 *   - the finish of the offload of storage k - n, below n + m: computing waits for the write, which was
 *     asked for when the last run that makes the storage before the finish ended;
 *   - the start of the fetch of storage k - n - m, below n + 2 m.
 *
 * The sequence determines which storages are live. A storage is live from its making to the last use before it
 * is made again; one that is not used goes right after its making; a pinned one stays from its first
 * making to the end, and what a later run makes of it goes right after that run, or with its last use
 * (ROTOR_KEPT_FIRST). While an operation runs, everything live before it, its outputs and its workspace
 * are in memory; a tape that nothing reads is not made. The finish of an
 * offload is a use, the start of a fetch is a making. The speed of the link has no part in this.
 *
 * The tier holds a storage from the run whose result is written to the first use after its last fetch.
 *
 * A program is valid when
 *   - every operation runs at least once, those with ROTOR_ONCE exactly once;
 *   - the inputs of every run were made before it; and where one is a tape, what the run that made it read
 *     was not made again since;
 *   - the first runs are in the order of phases: forward, loss, backward;
 *   - the first runs of the operations with a flag (once, random) are in the order of the graph;
 *   - only storages move that rotor_link_moves(), each is written once, after it was made, and fetched
 *     after that; every fetch is used before the storage is made again;
 *   - the tier holds no more than the link's host_bytes at any moment.
 */
#ifndef ROTOR_PROGRAM_H
#define ROTOR_PROGRAM_H

#include "link.h"

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

static inline bool rotor_item_is_run(const rotor_dataflow_t *graph, int32_t item) {
    return item < graph->operation_count;
}

static inline bool rotor_item_is_fetch(const rotor_dataflow_t *graph, int32_t item) {
    return item >= graph->operation_count + graph->storage_count;
}

/* True for the start of a transfer from the tier: a fetch, or a run of ROTOR_READS. */
static inline bool rotor_item_starts(const rotor_dataflow_t *graph, int32_t item) {
    return rotor_item_is_run(graph, item) ? graph->clock[item] == ROTOR_READS
                                          : rotor_item_is_fetch(graph, item);
}

/* The storage that an action moves. */
static inline int32_t rotor_item_storage(const rotor_dataflow_t *graph, int32_t item) {
    int32_t number = item - graph->operation_count;
    return number < graph->storage_count ? number : number - graph->storage_count;
}

static inline int32_t rotor_item_finish(const rotor_dataflow_t *graph, int32_t storage) {
    return graph->operation_count + storage;
}

static inline int32_t rotor_item_fetch(const rotor_dataflow_t *graph, int32_t storage) {
    return graph->operation_count + graph->storage_count + storage;
}

/* The item that brings a storage from the tier. */
static inline int32_t rotor_item_start(const rotor_dataflow_t *graph, int32_t storage) {
    return rotor_dataflow_is_home(graph, storage) ? graph->producer[storage]
                                                  : rotor_item_fetch(graph, storage);
}

enum rotor_fault {
    ROTOR_FAULT_NONE,
    ROTOR_FAULT_OPERATION, /* the operation does not exist: ROTOR_ERR_BAD_OPERATION */
    ROTOR_FAULT_INPUT,     /* an input was not made yet: ROTOR_ERR_NO_INPUT */
    ROTOR_FAULT_PHASE,     /* first run after one of a later phase: ROTOR_ERR_BAD_OPERATION */
    ROTOR_FAULT_ORDER,     /* first run out of the order of flagged ones: ROTOR_ERR_BAD_OPERATION */
    ROTOR_FAULT_ONCE,      /* a second run of an operation that runs once: ROTOR_ERR_TWICE */
    ROTOR_FAULT_MISSING,   /* an operation never runs: ROTOR_ERR_INCOMPLETE */
    ROTOR_FAULT_LINK,      /* an action without a link: ROTOR_ERR_BAD_OPERATION */
    ROTOR_FAULT_FIXED,     /* an action on a storage that does not move: ROTOR_ERR_BAD_OPERATION */
    ROTOR_FAULT_NOT_MADE,  /* a finish before any making: ROTOR_ERR_NO_INPUT */
    ROTOR_FAULT_WRITTEN,   /* a second finish of a storage: ROTOR_ERR_TWICE */
    ROTOR_FAULT_NOT_WRITTEN, /* a fetch before the finish: ROTOR_ERR_NO_INPUT */
    ROTOR_FAULT_UNUSED,      /* a fetch that nothing uses: ROTOR_ERR_INCOMPLETE */
    ROTOR_FAULT_HOST,        /* the tier holds too much: ROTOR_ERR_INFEASIBLE */
    ROTOR_FAULT_TAPE         /* what a tape holds was made again: ROTOR_ERR_NO_TAPE */
};

typedef struct {
    /* output */
    enum rotor_fault kind;
    int64_t position;  /* in the program; its length where an operation is missing */
    int32_t operation; /* of an action: the one that makes the storage, -1 without a link */
    int32_t storage;   /* the input that is missing, or that an action moves, else -1 */
} rotor_fault_t;

typedef struct {
    /* output */
    int64_t time_ns; /* the clock of computing at the end */
    int64_t peak_bytes;
    int64_t compute_ns; /* of all runs; the rest of time_ns is waiting */
    int64_t link_ns;    /* of all transfers */
    int64_t host_bytes; /* the most that the tier holds */
} rotor_cost_t;

typedef struct {
    rotor_program_t program;
    rotor_cost_t cost;
} rotor_plan_t;

/* Leaves `from` empty; they may be one. */
void rotor_plan_move(rotor_plan_t *from, rotor_plan_t *to);

/*
 * Checks and prices a program; `link` is NULL for one without a second tier. `before` (bytes live when
 * each item begins) and `peak` (the most while it lasts) have `length` elements or are NULL; `fault`
 * (may be NULL) says what is wrong where the status is that of a fault.
 */
int rotor_program_simulate(const rotor_dataflow_t *graph, const rotor_link_t *link,
                           const int32_t *ops, int64_t length, rotor_cost_t *price, int64_t *before,
                           int64_t *peak, rotor_fault_t *fault);

/* What pricing keeps of each storage that moves. */
typedef struct {
    /* state; positions, -1 for none yet */
    int32_t *begun;    /* the run whose result is written */
    int32_t *finished; /* the finish of its offload */
    int32_t *unused;   /* the start of a fetch that nothing has used yet */
    int32_t *until;    /* the first use after the last fetch, else the finish */
    uint8_t *fetched;  /* true if its last making is a fetch */
    int64_t *ready;    /* the end of its fetch */
    int64_t *written;  /* the end of its write */
    int64_t *host;     /* per position: change of what the tier holds */
    int64_t capacity;
} rotor_moves_t;

/* Memory that repeated pricing needs. */
typedef struct {
    /* input */
    const rotor_link_t *link; /* NULL: runs alone */
    /* state */
    int32_t *made;   /* per storage: where it was made last, -1 */
    int32_t *last;   /* per storage: its last use since */
    int64_t *ended;  /* per position: bytes that go after it */
    int32_t *runs;   /* per operation */
    int32_t *next;   /* per operation: its next run, looking backwards */
    uint8_t *needed; /* per storage, looking backwards */
    uint8_t *copied; /* per storage: true once it is made again */
    uint8_t *light;  /* per position: a run that does not make its tape */
    int64_t capacity;
    int64_t light_capacity;
    rotor_moves_t moves;
} rotor_pricer_t;

/* Frees the memory; the link stays. */
void rotor_pricer_free(rotor_pricer_t *self);

/* Prices a program that is known to be valid, but perhaps for what the tier may hold. */
int rotor_pricer_price(rotor_pricer_t *self, const rotor_dataflow_t *graph, const int32_t *ops,
                       int64_t length, rotor_cost_t *price);

/*
 * Removes the runs and fetches that no later item needs, writes without a fetch, and second writes. The
 * program is valid, but for these; the result is valid, no slower, and its peak is no higher.
 */
int rotor_pricer_prune(rotor_pricer_t *self, const rotor_dataflow_t *graph,
                       rotor_program_t *program);

#endif
