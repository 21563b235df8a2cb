/* The local search on one program. */
#ifndef ROTOR_PLANNER_SEARCH_H
#define ROTOR_PLANNER_SEARCH_H

#include "planner_sequence.h"
#include "planner_stop.h"
#include "planner_random.h"

typedef struct {
    /* state */
    rotor_slots_t slots;
    rotor_random_t random;
    int32_t budget;     /* units of slots */
    int64_t longest_ns; /* beyond it a move is given up */
    double noise;
    int32_t added;    /* runs, by the move */
    int32_t crowded;  /* times that there was no empty slot, since the last layout */
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

#endif
