/* Fetches of a program, as early as they have to begin and as there is room. */
#ifndef ROTOR_PLANNER_PREFETCH_H
#define ROTOR_PLANNER_PREFETCH_H

#include "program.h"

typedef struct {
    /* state; by position but for next_use */
    int64_t *peak;    /* while the item lasts, with the fetches that were moved before it */
    int64_t *begin;   /* of the item, by the time of runs alone */
    int32_t *first;   /* the fetch that comes first before the item, -1 */
    int32_t *next;    /* of a fetch: that after it before the same item, -1 */
    int32_t *ops;
    int32_t *next_use; /* by storage, at or after the position that is looked at */
    int64_t capacity;
    int32_t storage_count;
} rotor_prefetch_t;

void rotor_prefetch_free(rotor_prefetch_t *self);
/*
 * Moves fetches of a valid program to where they are done in time, one after another, or as near to that as
 * their storages fit within the budget. The peak stays within the larger of budget and peak.
 */
int rotor_prefetch(rotor_prefetch_t *self, const rotor_dataflow_t *graph, const rotor_link_t *link,
                   int64_t budget, rotor_program_t *program);

#endif
