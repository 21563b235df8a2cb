/*
 * A program under change: items in slots with gaps between them, the memory of every slot, and a log
 * of changes that can be taken back.
 *
 * A storage's events are the slots where it is made or read, ascending. From a making to the last
 * reading before the next making its bytes count in every slot, the empty ones too: there the level
 * is never above that of the run before. Sizes are in units that keep all sums within int32, rounded
 * up, the budget rounded down.
 *
 * A run whose tape is not read before the next one has it not, and the workspace of a run without it.
 *
 * With a link, items may be actions of a second tier: uses and makings like others. `tagged` has the slots
 * where the clocks have more to do than to add the time of a run: actions, runs whose result is
 * written, the first uses of what is fetched. A storage has at most one finish.
 */
#ifndef ROTOR_PLANNER_SEQUENCE_H
#define ROTOR_PLANNER_SEQUENCE_H

#include "planner_levels.h"
#include "program.h"

typedef struct {
    /* state */
    int32_t *slots;
    int32_t count;
    int32_t capacity;
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

void rotor_slots_init(rotor_slots_t *self);
/* Frees the memory; the link stays. */
void rotor_slots_free(rotor_slots_t *self);

/* Lays out a valid program; may be called again with others of the same graph. */
int rotor_slots_load(rotor_slots_t *self, const rotor_dataflow_t *graph, const int32_t *ops,
                     int64_t length);
int rotor_slots_store(const rotor_slots_t *self, rotor_program_t *program);

/* Adds or removes an item and logs it. All inputs of a run that is added must have been made before the
 * slot, which must be empty; a run that is removed must be removable. A storage is made before its
 * finish, and fetches are after that. */
int rotor_slots_add(rotor_slots_t *self, int32_t slot, int32_t item);
int rotor_slots_remove(rotor_slots_t *self, int32_t slot);
/* Takes back all changes beyond the first `count`. Cannot fail. */
void rotor_slots_undo(rotor_slots_t *self, int64_t count);

/* True if the program stays valid without the run. */
bool rotor_slots_removable(const rotor_slots_t *self, int32_t slot);
/* True if it is removable and nothing uses what it makes, or if the action has no use. */
bool rotor_slots_useless(const rotor_slots_t *self, int32_t slot);
/* The empty slot next below `slot`, above `floor`; -1 for none. */
int32_t rotor_slots_empty_below(const rotor_slots_t *self, int32_t slot, int32_t floor);
int32_t rotor_slots_empty_above(const rotor_slots_t *self, int32_t slot, int32_t ceiling);

/* From now on `first_changed` is that of later changes. */
static inline void rotor_slots_settle(rotor_slots_t *self) {
    self->moving.first_changed = self->block_count;
}

/* The slot of the finish of s; -1 without any. */
int32_t rotor_slots_finish(const rotor_slots_t *self, int32_t s);

/* The last slot below another one where s is made by a run; there is one. */
int32_t rotor_slots_begun(const rotor_slots_t *self, int32_t s, int32_t below);

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
