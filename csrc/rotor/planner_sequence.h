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

#include "planner_slots.h"

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

#endif
