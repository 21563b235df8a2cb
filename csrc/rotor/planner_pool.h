/* The programs found for one graph and one budget, and the ways to find more. */
#ifndef ROTOR_PLANNER_POOL_H
#define ROTOR_PLANNER_POOL_H

#include "planner_greedy.h"
#include "planner_prefetch.h"
#include "planner_search.h"

enum { ROTOR_POOL = 6, ROTOR_ORDERS = 5 };

typedef struct {
    /* input */
    const rotor_dataflow_t *graph;
    const rotor_link_t *link; /* NULL: without a second tier */
    /* state */
    rotor_greedy_t greedy;
    rotor_prefetch_t prefetch;
    rotor_pricer_t pricer;
    rotor_search_t search;
    rotor_random_t random;
    rotor_program_t walked;
    rotor_plan_t pool[ROTOR_POOL]; /* within the budget, fastest first, one per time */
    int32_t pool_count;
    int64_t budget;     /* of the pool */
    rotor_plan_t best;  /* the fastest within it, of these one with the fewest transfers; empty at first */
    rotor_plan_t least; /* the lowest peak that was reached; empty at first */
    rotor_plan_t settled; /* of rotor_planner_settle(); its time does not count */
    int32_t *orders[ROTOR_ORDERS]; /* that of the graph, then ones that defer more and more; NULL
                                    * where that is the same; from the third on for the least peak */
    rotor_stop_t stop;
} rotor_planner_t;

/* `time_limit_ns` is 0 for none; of `whole` the callback and its numbers count. */
int rotor_planner_begin(rotor_planner_t *self, const rotor_dataflow_t *graph,
                        const rotor_link_t *link, uint64_t seed, int64_t time_limit_ns,
                        const rotor_stop_t *whole);
void rotor_planner_end(rotor_planner_t *self);
/* Empties the pool and the best; from now on they take programs within `budget`. */
void rotor_planner_aim(rotor_planner_t *self, int64_t budget);
/* Takes over the best where it is faster than a plan, or as fast with fewer transfers, or that is empty. */
int rotor_planner_take(const rotor_planner_t *self, rotor_plan_t *plan);
/* Prunes and prices a valid program and keeps it where it is good. */
int rotor_planner_offer(rotor_planner_t *self, rotor_program_t *program);
/* Offers the programs without recomputation. */
int rotor_planner_offer_orders(rotor_planner_t *self);
/* Greedy walks within `limit` with the fixed settings and some random ones, along each order; with a link
 * along that of the graph, and fewer on large graphs. */
int rotor_planner_walks(rotor_planner_t *self, int64_t limit, int64_t random_count);
/*
 * Lowers the least peak by walks and repairs for limits that fall from the least peak so far, not
 * below `least`, until it is within the budget or nothing is gained any more.
 */
int rotor_planner_descend(rotor_planner_t *self, int64_t least);
/*
 * Descends into `settled` with equal times, then with times by bytes, and a seed of its own, until the peak
 * is within the budget or nothing is gained any more. Whether a budget can be kept so follows from bytes
 * alone, and larger ones can be kept too. With a link it begins from `settled`, as without, and transfers
 * take no time.
 */
int rotor_planner_settle(rotor_planner_t *self);
/* Searches within the budget from a program, which is repaired first where it is above. */
int rotor_planner_search_from(rotor_planner_t *self, int64_t moves, const rotor_program_t *start);
/* Searches from the pool. */
int rotor_planner_search(rotor_planner_t *self, int64_t moves);

#endif
