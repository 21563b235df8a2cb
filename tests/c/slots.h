/* The invariants of a program under change, between two changes. */
#ifndef ROTOR_TESTS_SLOTS_H
#define ROTOR_TESTS_SLOTS_H

#include "planner_sequence.h"

static inline int32_t level_at(const rotor_levels_t *levels, int32_t slot) {
    return levels->level[slot] + levels->block_level[slot / ROTOR_BLOCK];
}

static inline const char *runs_fault(const rotor_slots_t *self) {
    int64_t time_ns = 0;
    int64_t runs = 0;
    int32_t items = self->link == NULL
                        ? self->graph->operation_count
                        : self->graph->operation_count + 2 * self->graph->storage_count;
    for (int32_t slot = 0; slot < self->slot_count; slot++) {
        if (self->op_at[slot] >= items) {
            return "an item has a number that the graph does not have";
        }
        runs += self->op_at[slot] >= 0 && rotor_item_is_run(self->graph, self->op_at[slot]);
    }
    for (int32_t op = 0; op < self->graph->operation_count; op++) {
        int32_t at = self->repeated_at[op];
        if ((self->runs[op] >= 2) != (at >= 0) || (at >= 0 && self->repeated[at] != op)) {
            return "`repeated` does not list the operations with two runs or more";
        }
        runs -= self->runs[op];
        time_ns += self->runs[op] * rotor_dataflow_run_ns(self->graph, op, self->link != NULL);
    }
    return runs != 0                  ? "`runs` does not count the runs in the slots"
           : time_ns != self->time_ns ? "time_ns is not the sum of the runs"
                                      : NULL;
}

static inline const char *events_fault(const rotor_slots_t *self) {
    const rotor_dataflow_t *graph = self->graph;
    int64_t events = 0;
    for (int32_t s = 0; s < graph->storage_count; s++) {
        const rotor_events_t *list = &self->events[s];
        int32_t actions = self->link == NULL ? 0 : self->moving.actions[s];
        /* What is at home is counted as if it had one. */
        events += list->count - (actions > 0 ? actions - rotor_dataflow_is_home(graph, s) : 0);
        for (int32_t k = 0; k < list->count; k++) {
            if (self->op_at[list->slots[k]] < 0 ||
                (k > 0 && list->slots[k - 1] >= list->slots[k])) {
                return "an event of a storage is in an empty slot or out of order";
            }
        }
        if (list->count > 0 && !rotor_slots_makes(self, s, 0)) {
            return "a storage is read before it is made";
        }
    }
    for (int32_t op = 0; op < graph->operation_count; op++) {
        int32_t uses = graph->input_start[op + 1] - graph->input_start[op];
        int32_t makes = graph->output_start[op + 1] - graph->output_start[op];
        events -= (int64_t)self->runs[op] * (uses + makes);
    }
    return events == 0 ? NULL : "the runs have other events than their inputs and outputs";
}

/* Levels are never negative, and block_most is the largest of each block. */
static inline const char *levels_fault(const rotor_slots_t *self) {
    const rotor_levels_t *levels = &self->levels;
    int32_t width = self->slot_count / self->block_count;
    for (int32_t block = 0; block < self->block_count; block++) {
        int32_t most = levels->level[block * width];
        for (int32_t slot = block * width; slot < (block + 1) * width; slot++) {
            most = levels->level[slot] > most ? levels->level[slot] : most;
            if (level_at(levels, slot) < 0) {
                return "a level is negative";
            }
        }
        if (most != levels->block_most[block]) {
            return "block_most is not the highest level of its block";
        }
    }
    return NULL;
}

/* The first invariant that does not hold, as a sentence; NULL where all do. */
static inline const char *slots_fault(const rotor_slots_t *self) {
    const char *fault = runs_fault(self);
    fault = fault == NULL ? events_fault(self) : fault;
    return fault == NULL ? levels_fault(self) : fault;
}

#endif
