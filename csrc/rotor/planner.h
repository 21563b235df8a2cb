/*
 * The planner: from a graph and a budget to a program, and from a graph to its curve.
 *
 * Candidates come from an offline greedy that knows every next use (walk the graph in order, evict by
 * score, recompute on demand) with fixed and random settings and several orders of the operations,
 * and from a local search on sequences. rotor_program_simulate alone decides.
 *
 * With a link to a second tier storages are kept, made again, or moved, as is fastest. The program without
 * the tier is found first, so that the answer is never slower. The search begins from it, from one for a
 * larger budget, from the plain order, which the tier brings within the budget, and from the best greedy
 * walks with the tier.
 *
 * Effort is counted in greedy runs and in moves of the search: a seed gives one answer. A time limit
 * only cuts short; the best so far is then the answer.
 */
#ifndef ROTOR_PLANNER_H
#define ROTOR_PLANNER_H

#include "program.h"

typedef struct {
    /* input */
    const rotor_link_t *link; /* NULL: without a second tier */
    int64_t random_runs;      /* greedy runs with random settings, beside the fixed ones */
    int64_t moves;            /* of the local search, per budget */
    uint64_t seed;
    int64_t time_limit_ns; /* 0: none; ends the work, never an error */
    /* A valid program to begin from, which is repaired where it is above the budget; NULL: none.
     * Without random runs no walk follows where it fits. */
    const rotor_program_t *start;
} rotor_planner_options_t;

/*
 * The best program found within a budget. ROTOR_ERR_INFEASIBLE when none is, which follows from bytes
 * alone: `plan` is then the one of the least peak: no smaller budget is accepted, and every larger one is.
 * ROTOR_ERR_BAD_BUDGET for a budget that is not positive; ROTOR_ERR_INTERRUPTED when the callback stops
 * the work; ROTOR_ERR_BAD_OPERATION for a graph that is not plain, with a link.
 */
int rotor_planner_plan(const rotor_dataflow_t *graph, int64_t budget,
                       const rotor_planner_options_t *options, const rotor_callback_t *callback,
                       rotor_plan_t *plan);

/*
 * Programs for `points` budgets, equal steps from the least budget that is accepted to the peak without
 * recomputation: downwards, each begun from its neighbour, then upwards. `plans` has `points` elements,
 * twice as many with a link, empty at first; *count of them are set, by ascending budget. `lowest` is the
 * plan of the least budget. A time limit may leave out low budgets. points is at least 1; one leaves
 * `lowest` alone. With a link the programs with the tier come last, for budgets from the least with it;
 * some may beat others in both peak and time.
 */
int rotor_planner_curve(const rotor_dataflow_t *graph, int64_t points,
                        const rotor_planner_options_t *options, const rotor_callback_t *callback,
                        rotor_plan_t *plans, int64_t *count, rotor_plan_t *lowest);

#endif
