#include "planner_sequence.h"

#include <string.h>

#include "planner_spans.h"
#include "vector.h"

#define BLOCK ROTOR_BLOCK
#define SPACING 4 /* slots per run */

static int graph_arrays(rotor_slots_t *p, int64_t n, int64_t m, bool is_new) {
    return ROTOR_ARRAYS(is_new,
        ROTOR_ARRAY(p->size, m), ROTOR_ARRAY(p->workspace, n), ROTOR_ARRAY(p->tape_more, n),
        ROTOR_ARRAY(p->events, m), ROTOR_ARRAY(p->runs, n), ROTOR_ARRAY(p->repeated, n),
        ROTOR_ARRAY(p->repeated_at, n));
}

static int moving_arrays(rotor_moving_t *moving, int64_t m, bool is_new) {
    return ROTOR_ARRAYS(is_new,
        ROTOR_ARRAY(moving->actions, m), ROTOR_ARRAY(moving->list, m),
        ROTOR_ARRAY(moving->list_at, m), ROTOR_ARRAY(moving->write_ns, m),
        ROTOR_ARRAY(moving->read_ns, m));
}

static int block_arrays(rotor_moving_t *moving, int64_t blocks, bool is_new) {
    return ROTOR_ARRAYS(is_new,
        ROTOR_ARRAY(moving->tags, blocks * BLOCK), ROTOR_ARRAY(moving->tagged, blocks),
        ROTOR_ARRAY(moving->before_ns, blocks * BLOCK), ROTOR_ARRAY(moving->block_ns, blocks));
}

void rotor_slots_free(rotor_slots_t *self) {
    const rotor_link_t *link = self->link;
    for (int32_t s = 0; self->events != NULL && s < self->graph->storage_count; s++) {
        rotor_free(self->events[s].slots);
    }
    (void)graph_arrays(self, 0, 0, false);
    (void)moving_arrays(&self->moving, 0, false);
    (void)block_arrays(&self->moving, 0, false);
    rotor_levels_free(&self->moving.host);
    rotor_levels_free(&self->levels);
    rotor_free(self->op_at);
    rotor_free(self->changes);
    memset(self, 0, sizeof(*self));
    self->link = link;
}

/* All storages at once, and what their fetches add. */
static int64_t most_bytes(const rotor_dataflow_t *graph, const rotor_link_t *link) {
    int64_t most = INT64_MAX / 4;
    int64_t padding = link == NULL ? 0 : link->padding_bytes;
    bool is_small = padding == 0 || graph->storage_count < most / padding;
    return graph->total_bytes + (is_small ? graph->storage_count * padding : most);
}

static int moving_allocate(rotor_slots_t *p, const rotor_dataflow_t *graph) {
    rotor_moving_t *moving = &p->moving;
    int64_t m = graph->storage_count;
    if (moving_arrays(moving, m, true) != ROTOR_OK) {
        return ROTOR_ERR_NO_MEMORY;
    }
    rotor_link_times(p->link, graph, moving->write_ns, moving->read_ns);
    moving->padding = (int32_t)((p->link->padding_bytes + p->unit - 1) / p->unit);
    return ROTOR_OK;
}

/* The number of actions of a storage changes; the list has the storages with any. */
static void count_actions(rotor_moving_t *moving, int32_t s, int32_t change) {
    moving->actions[s] += change;
    rotor_list_hold(moving->list, &moving->list_count, moving->list_at, s, moving->actions[s] > 0);
}

static int moving_reset(rotor_slots_t *p) {
    rotor_moving_t *moving = &p->moving;
    if (p->block_count > moving->block_capacity) {
        int64_t capacity = p->block_count + p->block_count / 4;
        (void)block_arrays(moving, 0, false);
        moving->block_capacity = 0;
        if (block_arrays(moving, capacity, true) != ROTOR_OK) {
            return ROTOR_ERR_NO_MEMORY;
        }
        moving->block_capacity = (int32_t)capacity;
    }
    size_t slots = (size_t)p->slot_count;
    size_t blocks = (size_t)p->block_count;
    memset(moving->tags, 0, slots * sizeof(*moving->tags));
    memset(moving->tagged, 0, blocks * sizeof(*moving->tagged));
    memset(moving->before_ns, 0, slots * sizeof(*moving->before_ns));
    memset(moving->block_ns, 0, blocks * sizeof(*moving->block_ns));
    for (int32_t s = 0; s < p->graph->storage_count; s++) {
        moving->actions[s] = 0;
        moving->list_at[s] = -1;
    }
    moving->list_count = 0;
    moving->link_ns = 0;
    moving->first_changed = 0;
    for (int32_t s = 0; s < p->graph->storage_count; s++) {
        if (rotor_dataflow_is_home(p->graph, s)) {
            count_actions(moving, s, 1); /* it is always in the tier */
        }
    }
    return rotor_levels_reset(&moving->host, p->block_count);
}

static int32_t slot_units(const rotor_slots_t *p, int64_t bytes) {
    return (int32_t)((bytes + (bytes > 0 ? p->unit - 1 : 0)) / p->unit); /* up, also from below zero */
}

static int allocate_graph(rotor_slots_t *p, const rotor_dataflow_t *graph) {
    int64_t n = graph->operation_count;
    int64_t m = graph->storage_count;
    p->graph = graph;
    p->unit = most_bytes(graph, p->link) / (INT64_C(1) << 28) + 1;
    if ((p->link != NULL && moving_allocate(p, graph) != ROTOR_OK) ||
        graph_arrays(p, n, m, true) != ROTOR_OK) {
        return ROTOR_ERR_NO_MEMORY;
    }
    for (int64_t s = 0; s < m; s++) {
        p->size[s] = slot_units(p, graph->bytes[s]);
    }
    for (int64_t k = 0; k < n; k++) {
        bool has_tape = graph->tape[k] >= 0;
        p->workspace[k] = slot_units(p, has_tape ? graph->light_bytes[k] : graph->workspace_bytes[k]);
        p->tape_more[k] = slot_units(p, graph->workspace_bytes[k]) - p->workspace[k];
    }
    return ROTOR_OK;
}

static int allocate_slots(rotor_slots_t *p, int64_t length) {
    int64_t count = (length * SPACING + 2 * BLOCK) / BLOCK * BLOCK;
    if (count > INT32_MAX / 4) {
        return ROTOR_ERR_OVERFLOW;
    }
    if (count > p->slot_capacity) {
        int64_t capacity = count + count / 4 / BLOCK * BLOCK;
        rotor_free(p->op_at);
        p->slot_capacity = 0;
        p->op_at = rotor_malloc_array(capacity, sizeof(*p->op_at));
        if (p->op_at == NULL) {
            return ROTOR_ERR_NO_MEMORY;
        }
        p->slot_capacity = (int32_t)capacity;
    }
    p->slot_count = (int32_t)count;
    p->block_count = (int32_t)(count / BLOCK);
    return rotor_levels_reset(&p->levels, p->block_count);
}

static int32_t earlier(int32_t a, int32_t b) { return a < b ? a : b; }

/* slots_prepare() has made room. */
static void insert_event(rotor_events_t *events, int32_t at, int32_t slot) {
    memmove(events->slots + at + 1, events->slots + at,
            (size_t)(events->count - at) * sizeof(*events->slots));
    events->slots[at] = slot;
    events->count++;
}

static void delete_event(rotor_events_t *events, int32_t at) {
    events->count--;
    memmove(events->slots + at, events->slots + at + 1,
            (size_t)(events->count - at) * sizeof(*events->slots));
}

static void tag(rotor_slots_t *p, int32_t slot, int32_t sign) {
    rotor_moving_t *moving = &p->moving;
    uint64_t bit = UINT64_C(1) << (slot % BLOCK);
    moving->tags[slot] += sign;
    if (moving->tags[slot] > 0) {
        moving->tagged[slot / BLOCK] |= bit;
    } else {
        moving->tagged[slot / BLOCK] &= ~bit;
    }
}

/* Marks, or unmarks, the slots where the clocks have to do with s, and what the tier holds of it. */
static void mark_moves(rotor_slots_t *p, int32_t s, int32_t sign) {
    const rotor_events_t *events = &p->events[s];
    int32_t n = p->graph->operation_count;
    int32_t made = -1;
    int32_t begun = -1;
    int32_t until = -1;
    bool is_home = rotor_dataflow_is_home(p->graph, s);
    if (p->link == NULL || p->moving.actions[s] == 0) {
        return;
    }
    for (int32_t k = 0; k < events->count; k++) {
        int32_t slot = events->slots[k];
        int32_t item = p->op_at[slot];
        bool is_start = item >= n ? rotor_item_is_fetch(p->graph, item)
                                  : is_home && item == p->graph->producer[s];
        if (item < n && !is_start) {
            made = item == p->graph->producer[s] ? slot : made;
        } else if (is_start) {
            tag(p, slot, sign);
            until = k + 1 < events->count ? events->slots[k + 1] : slot;
            tag(p, until, sign);
        } else {
            begun = made;
            until = slot;
            tag(p, slot, sign);
            tag(p, begun, sign);
        }
    }
    if (begun >= 0) {
        rotor_levels_raise(&p->moving.host, begun, until, sign * p->size[s]);
        p->moving.first_changed = earlier(p->moving.first_changed, begun / BLOCK);
    }
}

static void put_event(rotor_slots_t *p, int32_t s, int32_t slot, int32_t actions) {
    int32_t at = rotor_events_below(&p->events[s], slot);
    mark_moves(p, s, -1);
    if (actions != 0) {
        count_actions(&p->moving, s, actions);
    }
    insert_event(&p->events[s], at, slot);
    rotor_spans_apply(p, s, at, 1);
    mark_moves(p, s, 1);
}

static void take_event(rotor_slots_t *p, int32_t s, int32_t slot, int32_t actions) {
    int32_t at = rotor_events_below(&p->events[s], slot);
    mark_moves(p, s, -1);
    rotor_spans_apply(p, s, at, -1);
    delete_event(&p->events[s], at);
    if (actions != 0) {
        count_actions(&p->moving, s, -actions);
    }
    mark_moves(p, s, 1);
}

/* Adds to the time of the runs in a slot. */
static void spend(rotor_slots_t *p, int32_t slot, int64_t ns) {
    rotor_moving_t *moving = &p->moving;
    int32_t block = slot / BLOCK;
    if (p->link == NULL) {
        return;
    }
    for (int32_t k = slot + 1; k < (block + 1) * BLOCK; k++) {
        moving->before_ns[k] += ns;
    }
    moving->block_ns[block] += ns;
    moving->first_changed = earlier(moving->first_changed, block);
}

static void count_runs(rotor_slots_t *p, int32_t op, int32_t change) {
    p->runs[op] += change;
    rotor_list_hold(p->repeated, &p->repeated_count, p->repeated_at, op, p->runs[op] >= 2);
    p->time_ns += change * rotor_dataflow_run_ns(p->graph, op, p->link != NULL);
}

/* A run that reads from the tier or writes to it comes or goes. */
static void count_transfer(rotor_slots_t *p, int32_t slot, int32_t op, int32_t sign) {
    if (p->link != NULL && p->graph->clock[op] != ROTOR_COMPUTES) {
        p->moving.link_ns += sign * p->graph->cost_ns[op];
        tag(p, slot, sign);
    }
}

static int grow_events(rotor_events_t *events) {
    return ROTOR_RESERVE(events->slots, events->count, events->capacity, 1);
}

/* Makes sure that adding an item cannot fail half-way. */
static int slots_prepare(rotor_slots_t *p, int32_t item) {
    const rotor_dataflow_t *g = p->graph;
    int ret = ROTOR_OK;
    if (!rotor_item_is_run(g, item)) {
        return grow_events(&p->events[rotor_item_storage(g, item)]);
    }
    for (int32_t j = g->input_start[item]; j < g->input_start[item + 1] && ret == ROTOR_OK; j++) {
        ret = grow_events(&p->events[g->inputs[j]]);
    }
    for (int32_t j = g->output_start[item]; j < g->output_start[item + 1] && ret == ROTOR_OK;
         j++) {
        ret = grow_events(&p->events[g->outputs[j]]);
    }
    return ret;
}

static int64_t action_ns(const rotor_slots_t *p, int32_t item) {
    int32_t s = rotor_item_storage(p->graph, item);
    return rotor_item_is_fetch(p->graph, item) ? p->moving.read_ns[s] : p->moving.write_ns[s];
}

static void slots_put(rotor_slots_t *p, int32_t slot, int32_t item) {
    const rotor_dataflow_t *g = p->graph;
    p->op_at[slot] = item;
    if (!rotor_item_is_run(g, item)) {
        p->moving.link_ns += action_ns(p, item);
        put_event(p, rotor_item_storage(g, item), slot, 1);
        return;
    }
    count_runs(p, item, 1);
    spend(p, slot, rotor_dataflow_run_ns(g, item, p->link != NULL));
    count_transfer(p, slot, item, 1);
    rotor_levels_raise(&p->levels, slot, slot, p->workspace[item]);
    for (int32_t j = g->input_start[item]; j < g->input_start[item + 1]; j++) {
        put_event(p, g->inputs[j], slot, 0);
    }
    for (int32_t j = g->output_start[item]; j < g->output_start[item + 1]; j++) {
        put_event(p, g->outputs[j], slot, 0);
    }
}

static void slots_take(rotor_slots_t *p, int32_t slot) {
    const rotor_dataflow_t *g = p->graph;
    int32_t item = p->op_at[slot];
    if (!rotor_item_is_run(g, item)) {
        take_event(p, rotor_item_storage(g, item), slot, 1);
        p->moving.link_ns -= action_ns(p, item);
        p->op_at[slot] = -1;
        return;
    }
    for (int32_t j = g->output_start[item]; j < g->output_start[item + 1]; j++) {
        take_event(p, g->outputs[j], slot, 0);
    }
    for (int32_t j = g->input_start[item]; j < g->input_start[item + 1]; j++) {
        take_event(p, g->inputs[j], slot, 0);
    }
    rotor_levels_raise(&p->levels, slot, slot, -p->workspace[item]);
    spend(p, slot, -rotor_dataflow_run_ns(g, item, p->link != NULL));
    count_transfer(p, slot, item, -1);
    count_runs(p, item, -1);
    p->op_at[slot] = -1;
}

int rotor_slots_add(rotor_slots_t *self, int32_t slot, int32_t item) {
    int ret = ROTOR_RESERVE(self->changes, self->change_count, self->change_capacity, 1);
    if (ret == ROTOR_OK && (ret = slots_prepare(self, item)) == ROTOR_OK) {
        self->changes[self->change_count++] =
            (rotor_change_t){.slot = slot, .item = item};
        slots_put(self, slot, item);
    }
    return ret;
}

int rotor_slots_remove(rotor_slots_t *self, int32_t slot) {
    int ret = ROTOR_RESERVE(self->changes, self->change_count, self->change_capacity, 1);
    if (ret == ROTOR_OK) {
        self->changes[self->change_count++] =
            (rotor_change_t){.slot = slot, .item = -1 - self->op_at[slot]};
        slots_take(self, slot);
    }
    return ret;
}

void rotor_slots_undo(rotor_slots_t *self, int64_t count) {
    while (self->change_count > count) {
        rotor_change_t change = self->changes[--self->change_count];
        if (change.item >= 0) {
            slots_take(self, change.slot);
        } else {
            slots_put(self, change.slot, -1 - change.item);
        }
    }
}

bool rotor_slots_removable(const rotor_slots_t *self, int32_t slot) {
    const rotor_dataflow_t *g = self->graph;
    int32_t op = self->op_at[slot];
    if (self->runs[op] < 2) {
        return false;
    }
    for (int32_t j = g->output_start[op]; j < g->output_start[op + 1]; j++) {
        int32_t s = g->outputs[j];
        const rotor_events_t *events = &self->events[s];
        int32_t at = rotor_events_below(events, slot);
        if (at > 0) {
            continue;
        }
        if (g->flags[op] != 0 || !rotor_slots_makes(self, s, 1) ||
            events->slots[1] >= self->phase_start[g->phase[op] + 1]) {
            return false;
        }
    }
    return true;
}

/* True for a fetch that nothing uses, and for a finish without a fetch after it. */
static bool is_action_useless(const rotor_slots_t *p, int32_t slot) {
    int32_t s = rotor_item_storage(p->graph, p->op_at[slot]);
    const rotor_events_t *events = &p->events[s];
    int32_t at = rotor_events_below(events, slot);
    if (rotor_item_is_fetch(p->graph, p->op_at[slot])) {
        return !rotor_slots_read_after(p, s, at);
    }
    return p->moving.actions[s] < 2;
}

bool rotor_slots_useless(const rotor_slots_t *self, int32_t slot) {
    const rotor_dataflow_t *g = self->graph;
    int32_t op = self->op_at[slot];
    if (!rotor_item_is_run(g, op)) {
        return is_action_useless(self, slot);
    }
    if (!rotor_slots_removable(self, slot)) {
        return false;
    }
    for (int32_t j = g->output_start[op]; j < g->output_start[op + 1]; j++) {
        int32_t s = g->outputs[j];
        int32_t at = rotor_events_below(&self->events[s], slot);
        if (rotor_slots_read_after(self, s, at) && !(g->pinned[s] == ROTOR_KEPT && at > 0)) {
            return false;
        }
    }
    return true;
}

int32_t rotor_slots_finish(const rotor_slots_t *self, int32_t s) {
    const rotor_events_t *events = &self->events[s];
    int32_t item = rotor_item_finish(self->graph, s);
    for (int32_t k = 0; self->moving.actions[s] > 0 && k < events->count; k++) {
        if (self->op_at[events->slots[k]] == item) {
            return events->slots[k];
        }
    }
    return -1;
}

int32_t rotor_slots_begun(const rotor_slots_t *self, int32_t s, int32_t below) {
    const rotor_events_t *events = &self->events[s];
    int32_t k = rotor_events_below(events, below) - 1;
    while (k > 0 && self->op_at[events->slots[k]] != self->graph->producer[s]) {
        k--;
    }
    return events->slots[k];
}

int32_t rotor_slots_empty_below(const rotor_slots_t *self, int32_t slot, int32_t floor) {
    for (int32_t k = slot - 1; k > floor; k--) {
        if (self->op_at[k] < 0) {
            return k;
        }
    }
    return -1;
}

int32_t rotor_slots_empty_above(const rotor_slots_t *self, int32_t slot, int32_t ceiling) {
    for (int32_t k = slot + 1; k < ceiling; k++) {
        if (self->op_at[k] < 0) {
            return k;
        }
    }
    return -1;
}

static void find_phases(rotor_slots_t *p, const int32_t *ops, int64_t length) {
    int32_t phase = 0;
    p->phase_start[0] = 0;
    p->phase_start[1] = p->phase_start[2] = p->phase_start[3] = p->slot_count;
    memset(p->runs, 0, (size_t)p->graph->operation_count * sizeof(*p->runs));
    for (int64_t k = 0; k < length; k++) {
        if (rotor_item_is_run(p->graph, ops[k]) && p->runs[ops[k]]++ == 0) {
            for (; phase < p->graph->phase[ops[k]]; phase++) {
                p->phase_start[phase + 1] = (int32_t)k * SPACING;
            }
        }
    }
}

int rotor_slots_load(rotor_slots_t *self, const rotor_dataflow_t *graph, const int32_t *ops,
                     int64_t length) {
    int ret = ROTOR_OK;
    if (self->graph == NULL && (ret = allocate_graph(self, graph)) != ROTOR_OK) {
        goto fail;
    }
    if ((ret = allocate_slots(self, length)) != ROTOR_OK) {
        goto fail;
    }
    for (int32_t k = 0; k < self->slot_count; k++) {
        self->op_at[k] = -1;
    }
    if (self->link != NULL && (ret = moving_reset(self)) != ROTOR_OK) {
        goto fail;
    }
    for (int32_t s = 0; s < graph->storage_count; s++) {
        self->events[s].count = 0;
    }
    find_phases(self, ops, length);
    self->repeated_count = 0;
    self->change_count = 0;
    self->time_ns = 0;
    for (int32_t op = 0; op < graph->operation_count; op++) {
        self->runs[op] = 0;
        self->repeated_at[op] = -1;
    }
    for (int64_t k = 0; k < length; k++) {
        if ((ret = slots_prepare(self, ops[k])) != ROTOR_OK) {
            goto fail;
        }
        slots_put(self, (int32_t)k * SPACING + SPACING - 1, ops[k]);
    }
    return ROTOR_OK;
fail:
    rotor_slots_free(self);
    return ret;
}

int rotor_slots_store(const rotor_slots_t *self, rotor_program_t *program) {
    program->length = 0;
    for (int32_t k = 0; k < self->slot_count; k++) {
        if (self->op_at[k] >= 0) {
            int ret = rotor_program_append(program, self->op_at[k]);
            if (ret != ROTOR_OK) {
                return ret;
            }
        }
    }
    return ROTOR_OK;
}
