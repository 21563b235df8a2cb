/*
 * Edits of a program under change: runs that are added with what they need, removed with what is then
 * useless, and evictions. Evicting a storage over an idle gap means another run of its producer as late
 * in the gap as can be, with inputs that are kept or remade in turn; where the gap begins with the
 * making and nothing else is read in it, the run moves.
 */
#ifndef ROTOR_PLANNER_EDITS_H
#define ROTOR_PLANNER_EDITS_H

#include "planner_random.h"
#include "planner_sequence.h"

#define ROTOR_REGIONS 64 /* of equal width, of the slots */

typedef struct {
    /* state */
    rotor_slots_t slots;
    rotor_random_t random;
    int32_t budget;      /* units of slots */
    int32_t host_budget; /* of what the tier holds; INT32_MAX for any */
    double noise;        /* in the choice of what is evicted */
    int32_t added;    /* runs, by the move */
    int32_t crowded;  /* times that there was no empty slot, since the last layout */
    int32_t *pending; /* slots whose inputs are not settled */
    int64_t pending_count;
    int64_t pending_capacity;
    int32_t *suspects; /* slots whose item may be useless */
    int64_t suspect_count;
    int64_t suspect_capacity;
    int32_t region_width;
    int32_t region_start[ROTOR_REGIONS + 1]; /* in region_items */
    int32_t *region_items; /* storages that exist in a region of slots */
    int64_t region_capacity;
} rotor_edits_t;

/* The ways to relieve a slot w of a storage. */
enum rotor_relief { ROTOR_RUN_AGAIN, ROTOR_FETCH_LATER, ROTOR_WRITE_EARLIER, ROTOR_MOVE };

typedef struct {
    enum rotor_relief how;
    int32_t storage;
    int32_t ceiling; /* the run of its producer, or its fetch, goes below it, above w */
    double score;    /* cost per byte that it frees */
} rotor_edit_choice_t;

void rotor_edits_free(rotor_edits_t *self);
/* Lays out a valid program; the link of the slots is set before the first one. */
int rotor_edits_load(rotor_edits_t *self, const rotor_dataflow_t *graph,
                     const rotor_program_t *program);
/* Another move begins: nothing is pending. */
void rotor_edits_begin(rotor_edits_t *self);

/* Adds an item; the making before it of what it makes may be useless now. The inputs of a run are
 * settled by rotor_edits_place() only. */
int rotor_edits_add(rotor_edits_t *self, int32_t slot, int32_t item);
/* Removes an item; the makings of what it used may be useless now, and the write of a fetch. */
int rotor_edits_remove(rotor_edits_t *self, int32_t slot);
/* Removes what is known to be useless. */
int rotor_edits_remove_useless(rotor_edits_t *self);
/* Removes an item and what is then useless. */
int rotor_edits_delete(rotor_edits_t *self, int32_t slot);
/* True if the tier may hold s from its last use below slot `from` to slot `until`. */
bool rotor_edits_host_fits(const rotor_edits_t *self, int32_t s, int32_t from, int32_t until);
/* Makes sure that s is written below a slot: where it is not, its finish goes below slot `near`, after
 * its last use before. ROTOR_ERR_INFEASIBLE without an empty slot. */
int rotor_edits_write(rotor_edits_t *self, int32_t s, int32_t below, int32_t near);
/* Adds a run of op at an empty slot, and what it needs, to relieve slot w of `size` units.
 * ROTOR_ERR_INFEASIBLE where that takes too many runs. */
int rotor_edits_place(rotor_edits_t *self, int32_t slot, int32_t op, int32_t w, int32_t size);

/* The storages that may exist at a slot, from a random one on: *count of them are to be looked at, of
 * `total`, one after another around the end. */
const int32_t *rotor_edits_region(rotor_edits_t *self, int32_t w, int32_t *at, int32_t *count,
                                  int32_t *total);
/* True if running the producer of s again relieves w of at most `overflow`; *choice has its price. */
bool rotor_edits_judge(const rotor_edits_t *self, int32_t s, int32_t w, int32_t overflow,
                       rotor_edit_choice_t *choice);
int rotor_edits_evict(rotor_edits_t *self, const rotor_edit_choice_t *choice, int32_t w);
/* A run that may be removed, or -1: of a random operation, or next above `from` where it is >= 0. */
int32_t rotor_edits_repeated(rotor_edits_t *self, int32_t from);

#endif
