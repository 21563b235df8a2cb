#include "planner_sequence.h"

#include <string.h>

#include "vector.h"

#define BLOCK 64
#define SPACING 4 /* slots per run */

void rotor_slots_init(rotor_slots_t *self) { memset(self, 0, sizeof(*self)); }

void rotor_slots_free(rotor_slots_t *self) {
    if (self->events != NULL) {
        for (int32_t s = 0; s < self->graph->storage_count; s++) {
            rotor_free(self->events[s].slots);
        }
    }
    rotor_free(self->events);
    rotor_free(self->size);
    rotor_free(self->workspace);
    rotor_free(self->op_at);
    rotor_free(self->level);
    rotor_free(self->block_level);
    rotor_free(self->block_most);
    rotor_free(self->runs);
    rotor_free(self->repeated);
    rotor_free(self->repeated_at);
    rotor_free(self->changes);
    rotor_slots_init(self);
}

static int allocate_graph(rotor_slots_t *p, const rotor_dataflow_t *graph) {
    int64_t n = graph->operation_count;
    int64_t m = graph->storage_count;
    p->graph = graph;
    p->unit = graph->total_bytes / (INT64_C(1) << 28) + 1;
    p->size = rotor_malloc_array(m, sizeof(*p->size));
    p->workspace = rotor_malloc_array(n, sizeof(*p->workspace));
    p->events = rotor_calloc((size_t)m, sizeof(*p->events));
    p->runs = rotor_malloc_array(n, sizeof(*p->runs));
    p->repeated = rotor_malloc_array(n, sizeof(*p->repeated));
    p->repeated_at = rotor_malloc_array(n, sizeof(*p->repeated_at));
    if (p->size == NULL || p->workspace == NULL || p->events == NULL || p->runs == NULL ||
        p->repeated == NULL || p->repeated_at == NULL) {
        return ROTOR_ERR_NO_MEMORY;
    }
    for (int64_t s = 0; s < m; s++) {
        p->size[s] = (int32_t)((graph->bytes[s] + p->unit - 1) / p->unit);
    }
    for (int64_t k = 0; k < n; k++) {
        p->workspace[k] = (int32_t)((graph->workspace_bytes[k] + p->unit - 1) / p->unit);
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
        rotor_free(p->level);
        rotor_free(p->block_level);
        rotor_free(p->block_most);
        p->slot_capacity = 0;
        p->op_at = rotor_malloc_array(capacity, sizeof(*p->op_at));
        p->level = rotor_malloc_array(capacity, sizeof(*p->level));
        p->block_level = rotor_malloc_array(capacity / BLOCK, sizeof(*p->block_level));
        p->block_most = rotor_malloc_array(capacity / BLOCK, sizeof(*p->block_most));
        if (p->op_at == NULL || p->level == NULL || p->block_level == NULL ||
            p->block_most == NULL) {
            return ROTOR_ERR_NO_MEMORY;
        }
        p->slot_capacity = (int32_t)capacity;
    }
    p->slot_count = (int32_t)count;
    p->block_count = (int32_t)(count / BLOCK);
    return ROTOR_OK;
}

static void refresh(rotor_slots_t *p, int32_t block) {
    const int32_t *level = p->level + (int64_t)block * BLOCK;
    int32_t most = level[0];
    for (int32_t k = 1; k < BLOCK; k++) {
        most = level[k] > most ? level[k] : most;
    }
    p->block_most[block] = most;
}

static void raise_part(rotor_slots_t *p, int32_t block, int32_t first, int32_t last,
                       int32_t amount) {
    int32_t *level = p->level + (int64_t)block * BLOCK;
    for (int32_t k = first; k <= last; k++) {
        level[k] += amount;
    }
    refresh(p, block);
}

/* Adds to the levels of the slots from first to last; nothing when they are none. */
static void raise_levels(rotor_slots_t *p, int32_t first, int32_t last, int32_t amount) {
    if (first > last || amount == 0) {
        return;
    }
    int32_t low = first / BLOCK;
    int32_t high = last / BLOCK;
    p->work += 2 + (high - low) / 8;
    if (low == high) {
        raise_part(p, low, first % BLOCK, last % BLOCK, amount);
        return;
    }
    raise_part(p, low, first % BLOCK, BLOCK - 1, amount);
    for (int32_t b = low + 1; b < high; b++) {
        p->block_level[b] += amount;
    }
    raise_part(p, high, 0, last % BLOCK, amount);
}

int32_t rotor_slots_level(const rotor_slots_t *self, int32_t slot) {
    return self->level[slot] + self->block_level[slot / BLOCK];
}

int32_t rotor_slots_most(const rotor_slots_t *self, int32_t *slot) {
    int32_t most = self->block_most[0] + self->block_level[0];
    int32_t block = 0;
    for (int32_t b = 1; b < self->block_count; b++) {
        int32_t value = self->block_most[b] + self->block_level[b];
        if (value > most) {
            most = value;
            block = b;
        }
    }
    if (slot != NULL) {
        const int32_t *level = self->level + (int64_t)block * BLOCK;
        int32_t k = 0;
        while (level[k] != self->block_most[block]) {
            k++;
        }
        *slot = block * BLOCK + k;
    }
    return most;
}

static int32_t most_of_part(const rotor_slots_t *p, int32_t block, int32_t first, int32_t last) {
    const int32_t *level = p->level + (int64_t)block * BLOCK;
    int32_t most = level[first];
    for (int32_t k = first + 1; k <= last; k++) {
        most = level[k] > most ? level[k] : most;
    }
    return most + p->block_level[block];
}

int32_t rotor_slots_most_within(const rotor_slots_t *self, int32_t first, int32_t last) {
    int32_t low = first / BLOCK;
    int32_t high = last / BLOCK;
    if (first > last) {
        return 0;
    }
    if (low == high) {
        return most_of_part(self, low, first % BLOCK, last % BLOCK);
    }
    int32_t most = most_of_part(self, low, first % BLOCK, BLOCK - 1);
    int32_t end = most_of_part(self, high, 0, last % BLOCK);
    most = end > most ? end : most;
    for (int32_t b = low + 1; b < high; b++) {
        int32_t value = self->block_most[b] + self->block_level[b];
        most = value > most ? value : most;
    }
    return most;
}

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

/* The change of the level by event `at` of s, a reading or a making; times `sign`. */
static void apply_use(rotor_slots_t *p, int32_t s, int32_t at, int32_t sign) {
    const rotor_events_t *events = &p->events[s];
    bool is_inside = at + 1 < events->count && !rotor_slots_makes(p, s, at + 1);
    if (!p->graph->pinned[s] && !is_inside) {
        raise_levels(p, events->slots[at - 1] + 1, events->slots[at], sign * p->size[s]);
    }
}

static void apply_make(rotor_slots_t *p, int32_t s, int32_t at, int32_t sign) {
    const rotor_events_t *events = &p->events[s];
    int32_t slot = events->slots[at];
    int32_t amount = sign * p->size[s];
    if (p->graph->pinned[s]) {
        if (at > 0) {
            raise_levels(p, slot, slot, amount);
        } else if (events->count > 1) {
            raise_levels(p, slot, events->slots[1] - 1, amount);
            raise_levels(p, events->slots[1], events->slots[1], amount);
        } else {
            raise_levels(p, slot, p->slot_count - 1, amount);
        }
    } else if (at + 1 < events->count && !rotor_slots_makes(p, s, at + 1)) {
        raise_levels(p, events->slots[at - 1] + 1, slot - 1, -amount);
    } else {
        raise_levels(p, slot, slot, amount);
    }
}

static void count_runs(rotor_slots_t *p, int32_t op, int32_t change) {
    p->runs[op] += change;
    if (p->runs[op] >= 2 && p->repeated_at[op] < 0) {
        p->repeated_at[op] = p->repeated_count;
        p->repeated[p->repeated_count++] = op;
    } else if (p->runs[op] < 2 && p->repeated_at[op] >= 0) {
        int32_t last = p->repeated[--p->repeated_count];
        p->repeated[p->repeated_at[op]] = last;
        p->repeated_at[last] = p->repeated_at[op];
        p->repeated_at[op] = -1;
    }
    p->time_ns += change * p->graph->cost_ns[op];
}

/* Makes sure that adding a run of op cannot fail half-way. */
static int slots_prepare(rotor_slots_t *p, int32_t op) {
    const rotor_dataflow_t *g = p->graph;
    for (int32_t pass = 0; pass < 2; pass++) {
        const int32_t *start = pass == 0 ? g->input_start : g->output_start;
        const int32_t *list = pass == 0 ? g->inputs : g->outputs;
        for (int32_t j = start[op]; j < start[op + 1]; j++) {
            rotor_events_t *events = &p->events[list[j]];
            int64_t capacity = events->capacity;
            int ret = rotor_grow((void **)&events->slots, &capacity, (int64_t)events->count + 1,
                                 sizeof(*events->slots));
            if (ret != ROTOR_OK) {
                return ret;
            }
            events->capacity = (int32_t)capacity;
        }
    }
    return ROTOR_OK;
}

static void slots_put(rotor_slots_t *p, int32_t slot, int32_t op) {
    const rotor_dataflow_t *g = p->graph;
    p->op_at[slot] = op;
    count_runs(p, op, 1);
    raise_levels(p, slot, slot, p->workspace[op]);
    for (int32_t j = g->input_start[op]; j < g->input_start[op + 1]; j++) {
        int32_t s = g->inputs[j];
        int32_t at = rotor_events_below(&p->events[s], slot);
        insert_event(&p->events[s], at, slot);
        apply_use(p, s, at, 1);
    }
    for (int32_t j = g->output_start[op]; j < g->output_start[op + 1]; j++) {
        int32_t s = g->outputs[j];
        int32_t at = rotor_events_below(&p->events[s], slot);
        insert_event(&p->events[s], at, slot);
        apply_make(p, s, at, 1);
    }
}

static void slots_take(rotor_slots_t *p, int32_t slot) {
    const rotor_dataflow_t *g = p->graph;
    int32_t op = p->op_at[slot];
    for (int32_t j = g->output_start[op]; j < g->output_start[op + 1]; j++) {
        int32_t s = g->outputs[j];
        int32_t at = rotor_events_below(&p->events[s], slot);
        apply_make(p, s, at, -1);
        delete_event(&p->events[s], at);
    }
    for (int32_t j = g->input_start[op]; j < g->input_start[op + 1]; j++) {
        int32_t s = g->inputs[j];
        int32_t at = rotor_events_below(&p->events[s], slot);
        apply_use(p, s, at, -1);
        delete_event(&p->events[s], at);
    }
    raise_levels(p, slot, slot, -p->workspace[op]);
    count_runs(p, op, -1);
    p->op_at[slot] = -1;
}

int rotor_slots_add(rotor_slots_t *self, int32_t slot, int32_t operation) {
    int ret = ROTOR_RESERVE(self->changes, self->change_count, self->change_capacity, 1);
    if (ret == ROTOR_OK && (ret = slots_prepare(self, operation)) == ROTOR_OK) {
        self->changes[self->change_count++] =
            (rotor_change_t){.slot = slot, .operation = operation};
        slots_put(self, slot, operation);
    }
    return ret;
}

int rotor_slots_remove(rotor_slots_t *self, int32_t slot) {
    int ret = ROTOR_RESERVE(self->changes, self->change_count, self->change_capacity, 1);
    if (ret == ROTOR_OK) {
        self->changes[self->change_count++] =
            (rotor_change_t){.slot = slot, .operation = -1 - self->op_at[slot]};
        slots_take(self, slot);
    }
    return ret;
}

void rotor_slots_undo(rotor_slots_t *self, int64_t count) {
    while (self->change_count > count) {
        rotor_change_t change = self->changes[--self->change_count];
        if (change.operation >= 0) {
            slots_take(self, change.slot);
        } else {
            slots_put(self, change.slot, -1 - change.operation);
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

bool rotor_slots_useless(const rotor_slots_t *self, int32_t slot) {
    const rotor_dataflow_t *g = self->graph;
    int32_t op = self->op_at[slot];
    if (!rotor_slots_removable(self, slot)) {
        return false;
    }
    for (int32_t j = g->output_start[op]; j < g->output_start[op + 1]; j++) {
        int32_t s = g->outputs[j];
        int32_t at = rotor_events_below(&self->events[s], slot);
        bool is_read = at + 1 < self->events[s].count && !rotor_slots_makes(self, s, at + 1);
        if (is_read && !(g->pinned[s] && at > 0)) {
            return false;
        }
    }
    return true;
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
        if (p->runs[ops[k]]++ == 0) {
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
        self->level[k] = 0;
    }
    memset(self->block_level, 0, (size_t)self->block_count * sizeof(*self->block_level));
    memset(self->block_most, 0, (size_t)self->block_count * sizeof(*self->block_most));
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
