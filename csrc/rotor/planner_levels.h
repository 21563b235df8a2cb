/* Levels of memory by slot, in blocks: raised over a range, with their maximum, in little time. */
#ifndef ROTOR_PLANNER_LEVELS_H
#define ROTOR_PLANNER_LEVELS_H

#include "core.h"

#define ROTOR_BLOCK 64 /* slots */

typedef struct {
    /* state */
    int32_t block_count;
    int32_t block_capacity;
    int32_t *level;       /* by slot, less that of its block */
    int32_t *block_level;
    int32_t *block_most; /* of level */
    int64_t work;        /* elementary steps so far */
} rotor_levels_t;

void rotor_levels_free(rotor_levels_t *self);
/* Makes room for blocks of slots, all of level 0. */
int rotor_levels_reset(rotor_levels_t *self, int32_t block_count);

/* Adds to the levels of the slots from first to last; nothing when they are none. */
void rotor_levels_raise(rotor_levels_t *self, int32_t first, int32_t last, int32_t amount);

/* The highest level and, where it is not NULL, a slot that has it. */
int32_t rotor_levels_most(const rotor_levels_t *self, int32_t *slot);
/* The highest level of the slots from first to last; 0 when they are none. */
int32_t rotor_levels_most_within(const rotor_levels_t *self, int32_t first, int32_t last);

#endif
