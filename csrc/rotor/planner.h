/*
 * The planner: from a graph and a budget to a program, and from a graph to its curve.
 *
 * Candidates come from an offline greedy that knows every next use (walk the graph in order, evict by
 * score, recompute on demand) with fixed and random settings and several orders of the operations,
 * and from a local search on sequences. rotor_program_simulate alone decides.
 *
 * Effort is counted in greedy runs and in moves of the search: a seed gives one answer. A time limit
 * only cuts short; the best so far is then the answer.
 */
#ifndef ROTOR_PLANNER_H
#define ROTOR_PLANNER_H

#include "program.h"

typedef struct {
    /* input */
    int64_t random_runs; /* greedy runs with random settings, beside the fixed ones */
    int64_t moves;       /* of the local search, per budget */
    uint64_t seed;
    int64_t time_limit_ns; /* 0: none; ends the work, never an error */
    /* A valid program to begin from, which is repaired where it is above the budget; NULL: none.
     * Without random runs no walk follows where it fits. */
    const rotor_program_t *start;
} rotor_planner_options_t;

/*
 * The best program found within a budget. ROTOR_ERR_INFEASIBLE when none is, which follows from bytes
 * alone: `program` is then the one of the least peak, and *minimum that peak: no smaller budget is
 * accepted, and every larger one is. ROTOR_ERR_BAD_BUDGET for a budget
 * that is not positive; ROTOR_ERR_INTERRUPTED when the callback stops the work.
 */
int rotor_planner_plan(const rotor_dataflow_t *graph, int64_t budget,
                       const rotor_planner_options_t *options, const rotor_callback_t *callback,
                       rotor_program_t *program, rotor_cost_t *price, int64_t *minimum);

/*
 * Programs for `points` budgets, equal steps from *least, the least budget that is accepted and that
 * `lowest` keeps, to the peak without recomputation: downwards, each begun from its neighbour, then upwards. `programs` and `costs` have
 * `points` elements, the programs initialised; *count of them are set, by ascending budget. A time
 * limit may leave out low budgets. points is at least 1; one leaves *least at 0 and `lowest` alone.
 */
int rotor_planner_curve(const rotor_dataflow_t *graph, int64_t points,
                        const rotor_planner_options_t *options, const rotor_callback_t *callback,
                        rotor_program_t *programs, rotor_cost_t *costs, int64_t *count,
                        rotor_program_t *lowest, int64_t *least);

#endif
