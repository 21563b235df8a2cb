/* A program with a second tier, from another program; and the least peak that the tier reaches. */
#ifndef ROTOR_PLANNER_JOINT_LEAST_H
#define ROTOR_PLANNER_JOINT_LEAST_H

#include "planner_search.h"

typedef struct {
    /* input */
    const rotor_dataflow_t *graph;
    const rotor_link_t *link;
    rotor_stop_t stop;
    /* state */
    rotor_search_t tiering;
    rotor_pricer_t pricer;
    rotor_random_t random;
    rotor_program_t work;
} rotor_joint_search_t;

void rotor_joint_search_init(rotor_joint_search_t *self, const rotor_dataflow_t *graph,
                             const rotor_link_t *link, uint64_t seed);
void rotor_joint_search_free(rotor_joint_search_t *self);
/* Searches within a budget from a program; leaves the result in `work`, empty where there is none. */
int rotor_joint_search_within(rotor_joint_search_t *self, int64_t budget,
                              const rotor_program_t *start, int64_t moves, rotor_cost_t *cost);

/*
 * Lowers a program of the least peak without the tier, by the tier and with equal times, until *peak is
 * `enough` or nothing is gained any more. Of `stop` the callback and its numbers count, no time limit.
 */
int rotor_joint_settle(const rotor_dataflow_t *graph, const rotor_link_t *link, int64_t enough,
                       const rotor_stop_t *stop, rotor_program_t *program, int64_t *peak);

#endif
