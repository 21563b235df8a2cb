/* What the files of the planner share. */
#ifndef ROTOR_PLANNER_PRIVATE_H
#define ROTOR_PLANNER_PRIVATE_H

#include "planner.h"
#include "planner_sequence.h"

/* Numbers for a seed (xorshift64*). */
typedef struct {
    uint64_t state;
} rotor_random_t;

static inline void rotor_random_init(rotor_random_t *self, uint64_t seed) {
    uint64_t z = seed + UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    z ^= z >> 31;
    self->state = z == 0 ? 1 : z;
}

static inline uint64_t rotor_random_next(rotor_random_t *self) {
    uint64_t x = self->state;
    x ^= x >> 12;
    x ^= x << 25;
    x ^= x >> 27;
    self->state = x;
    return x * UINT64_C(0x2545F4914F6CDD1D);
}

/* Below n, which is positive. */
static inline int32_t rotor_random_below(rotor_random_t *self, int32_t n) {
    return (int32_t)((rotor_random_next(self) >> 33) * (uint64_t)n >> 31);
}

/* In [0, 1). */
static inline double rotor_random_unit(rotor_random_t *self) {
    return (double)(rotor_random_next(self) >> 11) * 0x1p-53;
}

/* When to stop: asks the callback and the clock once in a while. */
typedef struct {
    const rotor_callback_t *callback;
    int64_t deadline_ns; /* 0: none */
    int64_t done;
    int64_t total;
    int64_t step; /* that one walk or move adds to done */
    int64_t until_next; /* units of work before the next look */
    int64_t worked;
    int64_t most_work; /* 0: any */
    bool is_over;      /* the time limit has passed, or the work is done */
} rotor_stop_t;

/* Counts `work` elementary steps. ROTOR_ERR_INTERRUPTED when the callback says stop; sets is_over. */
int rotor_stop_look(rotor_stop_t *self, int64_t work);

/* One walk of the greedy. Scores are size^a * distance^b / cost^c; the largest goes. */
typedef struct {
    double size_power;
    double distance_power;
    double cost_power;
    double noise;         /* in the logarithm of each storage's size, at most */
    double slack;         /* factor on the budget that the walk keeps */
    int32_t neighbourhood; /* evicted operations that a recompute cost counts at most */
    bool keeps_unused;    /* what has no further use stays until its memory is needed */
    bool is_reversed;     /* evicted inputs are remade last first */
    bool is_loose;        /* what is there may be evicted while other inputs are remade */
} rotor_setting_t;

typedef struct {
    const rotor_dataflow_t *graph;
    const int32_t *order;
    int32_t *positions;  /* of operations in the order */
    int32_t *uses;       /* as graph->users, positions in the order, ascending by storage */
    int32_t *cursor;     /* per storage, in uses */
    int32_t *next_use;   /* per storage, of the walk; the number of operations where there is none */
    float *size_score;
    float *cost_log;     /* of remaking it; valid where is_clean */
    float *distance_log; /* by distance */
    float *log_table;
    uint8_t *is_live;
    uint8_t *is_clean;
    uint8_t *is_kept; /* it cannot be remade: it stays until nothing needs it */
    int32_t *locks;
    int32_t *live; /* evictable storages that are live */
    int32_t live_count;
    int32_t *slot; /* of a storage in live */
    int32_t *stamp; /* per operation */
    int32_t stamp_value;
    int32_t *stack; /* of operations or storages */
    int32_t *frames; /* operations that are being prepared */
    uint64_t *frame_locks; /* which of their inputs they have locked */
    int32_t *visited; /* operations met by one visit */
    int64_t live_bytes;
    int64_t limit;
    int64_t work; /* elementary steps since the last look */
    int32_t now;
    const rotor_setting_t *setting;
} rotor_greedy_t;

void rotor_greedy_init(rotor_greedy_t *self);
void rotor_greedy_free(rotor_greedy_t *self);
/* Prepares walks along an order, which must outlive them; may be called again with another order. */
int rotor_greedy_prepare(rotor_greedy_t *self, const rotor_dataflow_t *graph,
                         const int32_t *order);
/*
 * Walks once and leaves the program, not pruned yet, whose peak may be above the budget.
 * ROTOR_ERR_INFEASIBLE when it grows beyond `longest` runs.
 */
int rotor_greedy_walk(rotor_greedy_t *self, int64_t budget, const rotor_setting_t *setting,
                      rotor_random_t *random, int64_t longest, rotor_stop_t *stop,
                      rotor_program_t *program);

/* Setting number k of the fixed ones; false beyond the last. */
enum { ROTOR_FIXED_SETTINGS = 16 };
bool rotor_setting_fixed(int32_t k, rotor_setting_t *setting);
void rotor_setting_random(rotor_random_t *random, rotor_setting_t *setting);

/* The local search on one program. */
typedef struct {
    rotor_slots_t slots;
    rotor_random_t random;
    int32_t budget; /* units of slots */
    int64_t longest_ns; /* beyond it a move is given up */
    double noise;
    int32_t added;   /* runs, by the move */
    int32_t crowded; /* times that there was no empty slot, since the last layout */
    int32_t *pending; /* slots whose inputs are not settled */
    int64_t pending_count;
    int64_t pending_capacity;
    int32_t *suspects; /* slots whose run may be useless */
    int64_t suspect_count;
    int64_t suspect_capacity;
    int32_t region_width;
    int32_t *region_start;
    int32_t *region_items; /* storages that exist in a region of slots */
    int64_t region_capacity;
    rotor_program_t scratch;
} rotor_search_t;

void rotor_search_init(rotor_search_t *self);
void rotor_search_free(rotor_search_t *self);
/*
 * Improves a valid program by a number of moves. One above the budget is repaired first:
 * ROTOR_ERR_INFEASIBLE where that fails; the program is then as it was.
 */
int rotor_search_improve(rotor_search_t *self, const rotor_dataflow_t *graph, int64_t budget,
                         uint64_t seed, int64_t moves, rotor_stop_t *stop,
                         rotor_program_t *program);

/* The work on one graph: what its budgets share. */
enum { ROTOR_POOL = 6 };

typedef struct {
    rotor_program_t program;
    rotor_cost_t cost;
} rotor_candidate_program_t;

typedef struct {
    const rotor_dataflow_t *graph;
    rotor_greedy_t greedy;
    rotor_pricer_t pricer;
    rotor_search_t search;
    rotor_random_t random;
    rotor_program_t walked;
    rotor_candidate_program_t pool[ROTOR_POOL]; /* within the budget, fastest first */
    int32_t pool_count;
    int64_t budget; /* of the pool */
    rotor_candidate_program_t least; /* the lowest peak that was reached; empty at first */
    int32_t *orders[2]; /* that of the graph, and one that defers; NULL where that is the same */
    rotor_stop_t stop;
} rotor_planner_t;

/*
 * The order of the graph with those operations of the backward at its end, in their order, that make
 * nothing but pinned storages which nothing reads, of more than twice the bytes that they read
 * (gradients of weights that are larger than activations). False where there are none.
 */
bool rotor_order_defer(const rotor_dataflow_t *graph, int32_t *order);

int rotor_planner_begin(rotor_planner_t *self, const rotor_dataflow_t *graph,
                        const rotor_planner_options_t *options,
                        const rotor_callback_t *callback);
void rotor_planner_end(rotor_planner_t *self);
/* Empties the pool; from now on it takes programs within `budget`. */
void rotor_planner_aim(rotor_planner_t *self, int64_t budget);
/* Prunes and prices a valid program and keeps it where it is good. */
int rotor_planner_offer(rotor_planner_t *self, rotor_program_t *program);
/* Offers the programs without recomputation. */
int rotor_planner_offer_orders(rotor_planner_t *self);
/* Greedy walks within `limit` with the fixed settings and some random ones, along each order. */
int rotor_planner_walks(rotor_planner_t *self, int64_t limit, int64_t random_count);
/*
 * Lowers the least peak by walks and repairs for limits that fall from the least peak so far, until
 * there is no progress; where `is_enough`, not below the budget.
 */
int rotor_planner_descend(rotor_planner_t *self, bool is_enough);
/* Searches within the budget from a program, which is repaired first where it is above. */
int rotor_planner_search_from(rotor_planner_t *self, int64_t moves,
                              const rotor_program_t *start);
/* Searches from the pool. */
int rotor_planner_search(rotor_planner_t *self, int64_t moves);

#endif
