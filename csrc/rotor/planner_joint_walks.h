/* Greedy walks with a second tier: programs from which the joint search begins. */
#ifndef ROTOR_PLANNER_JOINT_WALKS_H
#define ROTOR_PLANNER_JOINT_WALKS_H

#include "planner_greedy.h"
#include "planner_prefetch.h"

enum { ROTOR_JOINT_WALKS = 3 };

typedef struct {
    /* input */
    const rotor_dataflow_t *graph;
    const rotor_link_t *link;
    int64_t budget;
    /* state */
    rotor_greedy_t greedy;
    rotor_prefetch_t prefetch;
    rotor_pricer_t pricer;
    rotor_program_t walked;
    rotor_program_t best[ROTOR_JOINT_WALKS]; /* within the budget, fastest first */
    int64_t best_ns[ROTOR_JOINT_WALKS];
    int32_t count;
} rotor_joint_walks_t;

void rotor_joint_walks_init(rotor_joint_walks_t *self, const rotor_dataflow_t *graph,
                            const rotor_link_t *link, int64_t budget);
void rotor_joint_walks_free(rotor_joint_walks_t *self);
/*
 * Walks with fixed settings and `random_count` random ones, fewer on large graphs; leaves the best programs.
 */
int rotor_joint_walks_run(rotor_joint_walks_t *self, int64_t random_count, rotor_random_t *random,
                          rotor_stop_t *stop);

#endif
