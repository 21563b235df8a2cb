/*
 * The offline greedy: one walk along an order of the graph gives one program. With a link, what is evicted
 * is made again or moved to the tier, as is cheaper; it is fetched where it is needed.
 */
#ifndef ROTOR_PLANNER_GREEDY_H
#define ROTOR_PLANNER_GREEDY_H

#include "planner_greedy_tier.h"
#include "planner_random.h"
#include "planner_stop.h"
#include "program.h"

/* One walk of the greedy. Scores are size^a * distance^b / cost^c; the largest goes. */
typedef struct {
    /* input */
    double size_power;
    double distance_power;
    double cost_power;
    double noise;          /* in the logarithm of each storage's size, at most */
    double slack;          /* factor on the budget that the walk keeps */
    double transfer_price; /* cost of a transfer over its time, where nothing waits for it */
    int32_t neighbourhood; /* evicted operations that a recompute cost counts at most */
    bool keeps_unused;     /* what has no further use stays until its memory is needed */
    bool is_reversed;      /* evicted inputs are remade last first */
    bool is_loose;         /* live inputs may be evicted while others are remade */
    bool keeps_tapes;      /* a planned run makes its tape where others have to go for it */
} rotor_setting_t;

typedef struct {
    /* input, of rotor_greedy_prepare() and rotor_greedy_walk() */
    const rotor_dataflow_t *graph;
    const int32_t *order;
    rotor_greedy_tier_t tier; /* its link is set before the first rotor_greedy_prepare() */
    /* state */
    int32_t *positions; /* of operations in the order */
    int32_t *uses;      /* as graph->users, positions in the order, ascending by storage */
    int32_t *cursor;    /* per storage, in uses */
    int32_t *next_use;  /* per storage, of the walk; the number of operations for none */
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
    int32_t *slot;  /* of a storage in live */
    int32_t *stamp; /* per operation */
    int32_t stamp_value;
    int32_t *stack;        /* of operations or storages */
    int32_t *frames;       /* operations that are being prepared */
    uint64_t *frame_locks; /* which of their inputs they have locked */
    uint8_t *wants_tape;   /* of a frame: its tape is what was missing */
    int32_t *visited;      /* operations met by one visit */
    int64_t live_bytes;
    int64_t limit;
    int64_t work; /* elementary steps since the last look */
    int32_t now;
    const rotor_setting_t *setting;
    rotor_program_t *program;
    int64_t longest;
    int status; /* of the actions that were added */
} rotor_greedy_t;

/* Frees the memory; the link stays. */
void rotor_greedy_free(rotor_greedy_t *self);
/* Prepares walks along an order, which must outlive them; may be called again with another order. */
int rotor_greedy_prepare(rotor_greedy_t *self, const rotor_dataflow_t *graph, const int32_t *order);
/*
 * Walks once and leaves the program, not pruned yet, whose peak may be above the budget.
 * ROTOR_ERR_INFEASIBLE when it grows beyond `longest` items.
 */
int rotor_greedy_walk(rotor_greedy_t *self, int64_t budget, const rotor_setting_t *setting,
                      rotor_random_t *random, int64_t longest, rotor_stop_t *stop,
                      rotor_program_t *program);

/* Setting number k of the fixed ones. */
enum { ROTOR_FIXED_SETTINGS = 16 };
void rotor_setting_fixed(int32_t k, rotor_setting_t *setting);
void rotor_setting_random(rotor_random_t *random, rotor_setting_t *setting);

#endif
