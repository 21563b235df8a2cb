/* The slots of a program under change, as planner_sequence.h lays them out. */
#ifndef ROTOR_PLANNER_SLOTS_H
#define ROTOR_PLANNER_SLOTS_H

#include "planner_levels.h"
#include "program.h"

typedef struct {
    /* state */
    int32_t *slots;
    int32_t count;
    int64_t capacity;
} rotor_events_t;

typedef struct {
    /* state */
    int32_t slot;
    int32_t item; /* -1 - item where it was removed */
} rotor_change_t;

/* What a link adds to the slots. */
typedef struct {
    /* state */
    int32_t padding;    /* of a fetch, units */
    int32_t *actions;   /* by storage, their number */
    int32_t *list;      /* storages with actions */
    int32_t *list_at;   /* by storage, in list, -1 */
    int32_t list_count;
    int64_t *write_ns;  /* by storage; -1 where it does not move */
    int64_t *read_ns;
    int64_t link_ns;     /* of all transfers */
    int32_t block_capacity;
    int32_t *tags;       /* by slot: reasons for its bit in tagged */
    uint64_t *tagged;    /* by block, a bit for each slot */
    int64_t *before_ns;  /* by slot: of the runs below it in its block */
    int64_t *block_ns;   /* by block: of its runs */
    rotor_levels_t host; /* what the tier holds */
    int32_t first_changed; /* block, since rotor_slots_settle() */
} rotor_moving_t;

typedef struct {
    /* input */
    const rotor_link_t *link; /* NULL: runs alone; set before the first rotor_slots_load() */
    const rotor_dataflow_t *graph;
    /* state */
    int64_t unit;
    int32_t *size;      /* of storages, units */
    int32_t *workspace; /* of operations, units; without the tape */
    int32_t *tape_more; /* what the workspace of a run with its tape has more, units */
    int32_t slot_count;
    int32_t slot_capacity;
    int32_t *op_at; /* by slot, -1: empty */
    int32_t block_count;
    rotor_levels_t levels;
    rotor_moving_t moving;
    rotor_events_t *events; /* by storage */
    int32_t *runs;          /* by operation */
    int32_t *repeated;      /* operations with two runs or more */
    int32_t repeated_count;
    int32_t *repeated_at; /* in repeated, -1 */
    int32_t phase_start[4]; /* slots: first runs of phase p lie in [p], below [p + 1] */
    int64_t time_ns;
    rotor_change_t *changes;
    int64_t change_count;
    int64_t change_capacity;
} rotor_slots_t;

/* The number of events of a storage below a slot: the index of the first that is not. */
static inline int32_t rotor_events_below(const rotor_events_t *self, int32_t slot) {
    int32_t low = 0;
    int32_t high = self->count;
    while (low < high) {
        int32_t middle = low + (high - low) / 2;
        if (self->slots[middle] < slot) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

/* True if event k of storage s is a making. */
static inline bool rotor_slots_makes(const rotor_slots_t *self, int32_t s, int32_t k) {
    int32_t item = self->op_at[self->events[s].slots[k]];
    return item == self->graph->producer[s] || item == rotor_item_fetch(self->graph, s);
}

/* True if event k of storage s is followed by a reading of what is there. */
static inline bool rotor_slots_read_after(const rotor_slots_t *self, int32_t s, int32_t k) {
    return k + 1 < self->events[s].count && !rotor_slots_makes(self, s, k + 1);
}

#endif
