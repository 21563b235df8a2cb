/* The local search on one program, with a second tier or without. */
#ifndef ROTOR_PLANNER_SEARCH_H
#define ROTOR_PLANNER_SEARCH_H

#include "planner_clocks.h"
#include "planner_edits.h"
#include "planner_stop.h"

typedef struct {
    /* state */
    rotor_edits_t edits;
    rotor_clock_blocks_t clocks;
    int64_t value;   /* of the program that is kept: what the search makes small */
    int64_t longest; /* value beyond which a move is given up */
    double price;    /* of a transfer that nothing waits for, against one that all wait for */
    rotor_program_t scratch;
} rotor_search_t;

/* The link, NULL without a tier, outlives it. */
void rotor_search_init(rotor_search_t *self, const rotor_link_t *link);
void rotor_search_free(rotor_search_t *self);
/*
 * Improves a valid program by a number of moves, or by fewer: it ends once coolings from every heat gained
 * nothing. One above the budget is repaired first: ROTOR_ERR_INFEASIBLE where that fails; the program is
 * then as it was. The tier holds no more than its link says where the program begins so.
 */
int rotor_search_improve(rotor_search_t *self, const rotor_dataflow_t *graph, int64_t budget,
                         uint64_t seed, int64_t moves, rotor_stop_t *stop,
                         rotor_program_t *program);

#endif
