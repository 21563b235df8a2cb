/*
 * The clocks of a program under change, kept at the beginning of every block of slots: after a change they
 * run again from the first block that changed, and only the tagged slots are looked at.
 */
#ifndef ROTOR_PLANNER_CLOCKS_H
#define ROTOR_PLANNER_CLOCKS_H

#include "planner_sequence.h"

typedef struct {
    /* state; what was kept, and beside it what was found last */
    int32_t slot_capacity;
    int32_t first; /* block from which on `tried` is */
    rotor_clocks_t *kept; /* by block, and at the end */
    rotor_clocks_t *tried;
    int64_t *kept_ready; /* by slot: the end of the fetch that starts there */
    int64_t *tried_ready;
    int64_t *kept_written; /* by storage: the end of its write, 0 at first */
    int64_t *tried_written;
    int64_t work; /* elementary steps so far */
} rotor_clock_blocks_t;

void rotor_clock_blocks_free(rotor_clock_blocks_t *self);
/* Makes room for a layout of slots, and keeps its clocks. */
int rotor_clock_blocks_load(rotor_clock_blocks_t *self, rotor_slots_t *slots);
/* The clock of computing at the end, with what changed since the clocks were kept. */
int64_t rotor_clock_blocks_try(rotor_clock_blocks_t *self, const rotor_slots_t *slots);
/* Keeps the clocks that were tried last, of the slots as they are. */
void rotor_clock_blocks_keep(rotor_clock_blocks_t *self, rotor_slots_t *slots);

#endif
