/* The local search on one program with a second tier. */
#ifndef ROTOR_PLANNER_TIER_H
#define ROTOR_PLANNER_TIER_H

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
} rotor_tiering_t;

/* The link outlives it. */
void rotor_tiering_init(rotor_tiering_t *self, const rotor_link_t *link);
void rotor_tiering_free(rotor_tiering_t *self);
/*
 * Improves a valid program as rotor_search_improve() does, within what the link's tier may hold where the
 * program begins so.
 */
int rotor_tiering_improve(rotor_tiering_t *self, const rotor_dataflow_t *graph, int64_t budget,
                          uint64_t seed, int64_t moves, rotor_stop_t *stop,
                          rotor_program_t *program);

#endif
