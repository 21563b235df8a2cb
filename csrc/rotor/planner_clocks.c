#include "planner_clocks.h"

#include <string.h>

static int clock_arrays(rotor_clock_blocks_t *self, int64_t slots, int64_t m, bool is_new) {
    int64_t blocks = slots / ROTOR_BLOCK + 1;
    return ROTOR_ARRAYS(is_new,
        ROTOR_ARRAY(self->kept, blocks), ROTOR_ARRAY(self->tried, blocks),
        ROTOR_ARRAY(self->kept_ready, slots), ROTOR_ARRAY(self->tried_ready, slots),
        ROTOR_ARRAY(self->kept_written, m), ROTOR_ARRAY(self->tried_written, m));
}

void rotor_clock_blocks_free(rotor_clock_blocks_t *self) {
    (void)clock_arrays(self, 0, 0, false);
    memset(self, 0, sizeof(*self));
}

int rotor_clock_blocks_load(rotor_clock_blocks_t *self, rotor_slots_t *slots) {
    if (slots->link == NULL) {
        return ROTOR_OK;
    }
    int32_t m = slots->graph->storage_count;
    int ret = ROTOR_OK;
    if (slots->slot_capacity > self->slot_capacity) {
        rotor_clock_blocks_free(self);
        self->slot_capacity = slots->slot_capacity;
        ret = clock_arrays(self, self->slot_capacity, m, true);
    }
    if (ret == ROTOR_OK) {
        self->kept[0] = (rotor_clocks_t){.now = 0};
        memset(self->kept_written, 0, (size_t)m * sizeof(*self->kept_written));
        slots->moving.first_changed = 0;
        (void)rotor_clock_blocks_try(self, slots);
        rotor_clock_blocks_keep(self, slots);
    } else {
        rotor_clock_blocks_free(self);
    }
    return ret;
}

typedef struct {
    rotor_clock_blocks_t *blocks;
    const rotor_slots_t *slots;
    rotor_clocks_t at;
} ticking_t;

/* True if a slot is in the part that runs again. */
static bool is_again(const rotor_clock_blocks_t *blocks, int32_t slot) {
    return slot >= blocks->first * ROTOR_BLOCK;
}

/* The slot of the run whose result the finish of s waits for. */
static int32_t begun_of(const rotor_slots_t *p, int32_t s) {
    return rotor_slots_begun(p, s, rotor_slots_finish(p, s));
}

static int64_t written_at(const ticking_t *c, int32_t s) {
    bool again = is_again(c->blocks, begun_of(c->slots, s));
    return (again ? c->blocks->tried_written : c->blocks->kept_written)[s];
}

static void tick_fetch(ticking_t *c, int32_t s, int32_t slot) {
    const rotor_slots_t *p = c->slots;
    c->blocks->tried_ready[slot] =
        rotor_clocks_fetch(&c->at, p->link, p->moving.read_ns[s], written_at(c, s));
}

/* True if the making in `slot` is the one whose result is written. */
static bool is_written(const rotor_slots_t *p, int32_t s, int32_t slot) {
    const rotor_events_t *events = &p->events[s];
    int32_t finish = rotor_item_finish(p->graph, s);
    if (p->moving.actions[s] == 0) {
        return false;
    }
    for (int32_t k = rotor_events_below(events, slot) + 1; k < events->count; k++) {
        int32_t item = p->op_at[events->slots[k]];
        if (item == finish) {
            return true;
        }
        if (item == p->graph->producer[s]) {
            return false;
        }
    }
    return false;
}

static void tick_run(ticking_t *c, int32_t op, int32_t slot) {
    const rotor_slots_t *p = c->slots;
    const rotor_dataflow_t *g = p->graph;
    for (int32_t j = g->input_start[op]; j < g->input_start[op + 1]; j++) {
        int32_t s = g->inputs[j];
        if (p->moving.actions[s] > 0) {
            int32_t at = rotor_events_below(&p->events[s], slot);
            int32_t before = p->events[s].slots[at - 1];
            if (rotor_item_starts(g, p->op_at[before])) {
                bool again = is_again(c->blocks, before);
                c->at.now = rotor_max(
                    c->at.now, (again ? c->blocks->tried_ready : c->blocks->kept_ready)[before]);
            }
        }
    }
    if (g->clock[op] == ROTOR_READS) {
        c->blocks->tried_ready[slot] = rotor_clocks_fetch(&c->at, p->link, g->cost_ns[op], 0);
        return;
    }
    if (g->clock[op] == ROTOR_WRITES) {
        rotor_clocks_put(&c->at, p->link, g->cost_ns[op]);
    }
    c->at.now = rotor_link_later(c->at.now, rotor_dataflow_run_ns(g, op, true));
    for (int32_t j = g->output_start[op]; j < g->output_start[op + 1]; j++) {
        int32_t s = g->outputs[j];
        if (is_written(p, s, slot)) {
            c->blocks->tried_written[s] =
                rotor_clocks_write(&c->at, p->link, p->moving.write_ns[s]);
        }
    }
}

static void tick(ticking_t *c, int32_t slot) {
    const rotor_slots_t *p = c->slots;
    int32_t item = p->op_at[slot];
    if (rotor_item_is_run(p->graph, item)) {
        tick_run(c, item, slot);
        return;
    }
    int32_t s = rotor_item_storage(p->graph, item);
    if (rotor_item_is_fetch(p->graph, item)) {
        tick_fetch(c, s, slot);
    } else {
        c->at.now = rotor_max(c->at.now, written_at(c, s));
    }
}

/* The clocks go on over a block. */
static void tick_block(ticking_t *c, int32_t block) {
    const rotor_moving_t *moving = &c->slots->moving;
    uint64_t tagged = moving->tagged[block];
    int64_t passed = 0;
    for (; tagged != 0; tagged &= tagged - 1) {
        int32_t slot = block * ROTOR_BLOCK + __builtin_ctzll(tagged);
        int32_t item = c->slots->op_at[slot];
        bool is_run = rotor_item_is_run(c->slots->graph, item);
        c->at.now = rotor_link_later(c->at.now, moving->before_ns[slot] - passed);
        passed = moving->before_ns[slot] + (is_run ? rotor_dataflow_run_ns(c->slots->graph, item, true) : 0);
        tick(c, slot);
        c->blocks->work += 4;
    }
    c->at.now = rotor_link_later(c->at.now, moving->block_ns[block] - passed);
}

int64_t rotor_clock_blocks_try(rotor_clock_blocks_t *self, const rotor_slots_t *slots) {
    if (slots->link == NULL) {
        return slots->time_ns;
    }
    int32_t count = slots->block_count;
    ticking_t c = {.blocks = self, .slots = slots};
    self->first = slots->moving.first_changed;
    if (self->first >= count) {
        return self->kept[count].now;
    }
    c.at = self->kept[self->first];
    for (int32_t block = self->first; block < count; block++) {
        self->tried[block] = c.at;
        tick_block(&c, block);
    }
    self->work += (count - self->first) / 2;
    self->tried[count] = c.at;
    return c.at.now;
}

void rotor_clock_blocks_keep(rotor_clock_blocks_t *self, rotor_slots_t *slots) {
    int64_t first = self->first;
    int64_t count = slots->link == NULL ? 0 : slots->block_count;
    if (first < count) {
        memcpy(self->kept + first, self->tried + first,
               (size_t)(count + 1 - first) * sizeof(*self->kept));
        memcpy(self->kept_ready + first * ROTOR_BLOCK, self->tried_ready + first * ROTOR_BLOCK,
               (size_t)(count - first) * ROTOR_BLOCK * sizeof(*self->kept_ready));
        for (int32_t k = 0; k < slots->moving.list_count; k++) {
            int32_t s = slots->moving.list[k];
            if (!rotor_dataflow_is_home(slots->graph, s) &&
                is_again(self, begun_of(slots, s))) {
                self->kept_written[s] = self->tried_written[s];
            }
        }
    }
    rotor_slots_settle(slots);
}
