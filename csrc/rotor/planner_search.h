/* The local search on one program. */
#ifndef ROTOR_PLANNER_SEARCH_H
#define ROTOR_PLANNER_SEARCH_H

#include "planner_edits.h"
#include "planner_stop.h"

typedef struct {
    /* state */
    rotor_edits_t edits;
    int64_t longest_ns; /* beyond it a move is given up */
    rotor_program_t scratch;
} rotor_search_t;

void rotor_search_init(rotor_search_t *self);
void rotor_search_free(rotor_search_t *self);
/*
 * Improves a valid program by a number of moves, or by fewer: it ends once coolings from every heat gained
 * nothing. One above the budget is repaired first: ROTOR_ERR_INFEASIBLE where that fails; the program is
 * then as it was.
 */
int rotor_search_improve(rotor_search_t *self, const rotor_dataflow_t *graph, int64_t budget,
                         uint64_t seed, int64_t moves, rotor_stop_t *stop,
                         rotor_program_t *program);

#endif
