#include "planner_edits.h"

#include <string.h>

#include "vector.h"

#define MOST_SCANNED 192 /* storages that one choice looks at */
#define MOST_ADDED 48    /* runs that one eviction adds */

void rotor_edits_free(rotor_edits_t *self) {
    const rotor_link_t *link = self->slots.link;
    rotor_slots_free(&self->slots);
    rotor_free(self->pending);
    rotor_free(self->suspects);
    rotor_free(self->region_items);
    memset(self, 0, sizeof(*self));
    self->slots.link = link;
}

/* The last region in which s exists. */
static int32_t last_region(const rotor_edits_t *q, int32_t s) {
    const rotor_events_t *events = &q->slots.events[s];
    int32_t last = q->slots.graph->pinned[s] ? q->slots.slot_count - 1
                                             : events->slots[events->count - 1];
    return last / q->region_width;
}

/* Which storages exist at all in which part of the slots: of each region, the end and then the start. */
static int build_regions(rotor_edits_t *q) {
    const rotor_events_t *events = q->slots.events;
    int32_t m = q->slots.graph->storage_count;
    int64_t total = 0;
    q->region_width = q->slots.slot_count / ROTOR_REGIONS + 1;
    memset(q->region_start, 0, sizeof(q->region_start));
    for (int32_t s = 0; s < m; s++) {
        int32_t last = last_region(q, s);
        for (int32_t r = events[s].slots[0] / q->region_width; r <= last; r++) {
            q->region_start[r]++;
            total++;
        }
    }
    int ret = rotor_grow((void **)&q->region_items, &q->region_capacity, total,
                         sizeof(*q->region_items));
    for (int32_t r = 1; ret == ROTOR_OK && r <= ROTOR_REGIONS; r++) {
        q->region_start[r] += q->region_start[r - 1];
    }
    for (int32_t s = m - 1; ret == ROTOR_OK && s >= 0; s--) {
        int32_t last = last_region(q, s);
        for (int32_t r = events[s].slots[0] / q->region_width; r <= last; r++) {
            q->region_items[--q->region_start[r]] = s;
        }
    }
    return ret;
}

int rotor_edits_load(rotor_edits_t *self, const rotor_dataflow_t *graph,
                     const rotor_program_t *program) {
    int ret = rotor_slots_load(&self->slots, graph, program->ops, program->length);
    self->crowded = 0;
    return ret == ROTOR_OK ? build_regions(self) : ret;
}

void rotor_edits_begin(rotor_edits_t *self) {
    self->added = 0;
    self->suspect_count = 0;
    self->pending_count = 0;
}

static int suspect(rotor_edits_t *q, int32_t slot) {
    return rotor_push(&q->suspects, &q->suspect_count, &q->suspect_capacity, slot);
}

/* What an action at `slot` that came or went may leave useless: the making before it, the finish. */
static int suspect_after_action(rotor_edits_t *q, int32_t s, int32_t slot) {
    const rotor_slots_t *p = &q->slots;
    int32_t at = rotor_events_below(&p->events[s], slot);
    int32_t finish = rotor_slots_finish(p, s);
    int ret = at > 0 && rotor_slots_makes(p, s, at - 1) ? suspect(q, p->events[s].slots[at - 1])
                                                        : ROTOR_OK;
    return ret == ROTOR_OK && finish >= 0 ? suspect(q, finish) : ret;
}

bool rotor_edits_host_fits(const rotor_edits_t *self, int32_t s, int32_t from, int32_t until) {
    const rotor_slots_t *p = &self->slots;
    if (self->host_budget == INT32_MAX || rotor_dataflow_is_home(p->graph, s)) {
        return true;
    }
    int32_t at = rotor_events_below(&p->events[s], from);
    int32_t first = at > 0 ? p->events[s].slots[0] : from;
    int32_t held = p->moving.actions[s] > 0 ? 0 : p->size[s];
    return rotor_levels_most_within(&p->moving.host, first, until) + held <= self->host_budget;
}

int rotor_edits_write(rotor_edits_t *self, int32_t s, int32_t below, int32_t near) {
    rotor_slots_t *p = &self->slots;
    int32_t finish = rotor_slots_finish(p, s);
    int ret = ROTOR_OK;
    if ((finish >= 0 && finish < below) || rotor_dataflow_is_home(p->graph, s)) {
        return ROTOR_OK;
    }
    int32_t at = rotor_events_below(&p->events[s], below);
    int32_t after = at > 0 ? p->events[s].slots[at - 1] : below;
    near = near <= after ? after + 1 : near > below ? below : near;
    int32_t slot = rotor_slots_empty_below(p, near, after);
    slot = slot < 0 ? rotor_slots_empty_above(p, near - 1, below) : slot;
    if (slot < 0) {
        self->crowded++;
        return ROTOR_ERR_INFEASIBLE;
    }
    if (finish >= 0) {
        ret = rotor_slots_remove(p, finish);
    }
    return ret == ROTOR_OK ? rotor_edits_add(self, slot, rotor_item_finish(p->graph, s)) : ret;
}

int rotor_edits_remove(rotor_edits_t *q, int32_t slot) {
    rotor_slots_t *p = &q->slots;
    const rotor_dataflow_t *g = p->graph;
    int32_t op = p->op_at[slot];
    int ret = rotor_slots_remove(p, slot);
    if (ret == ROTOR_OK && !rotor_item_is_run(g, op)) {
        return suspect_after_action(q, rotor_item_storage(g, op), slot);
    }
    for (int32_t j = g->input_start[op]; ret == ROTOR_OK && j < g->input_start[op + 1]; j++) {
        int32_t s = g->inputs[j];
        const rotor_events_t *events = &p->events[s];
        int32_t at = rotor_events_below(events, slot);
        bool is_read = at < events->count && !rotor_slots_makes(p, s, at);
        if (at > 0 && !is_read && rotor_slots_makes(p, s, at - 1)) {
            ret = suspect(q, events->slots[at - 1]);
        }
    }
    return ret;
}

int rotor_edits_remove_useless(rotor_edits_t *q) {
    int ret = ROTOR_OK;
    while (ret == ROTOR_OK && q->suspect_count > 0) {
        int32_t slot = q->suspects[--q->suspect_count];
        if (q->slots.op_at[slot] >= 0 && rotor_slots_useless(&q->slots, slot)) {
            ret = rotor_edits_remove(q, slot);
        }
    }
    return ret;
}

int rotor_edits_add(rotor_edits_t *q, int32_t slot, int32_t op) {
    rotor_slots_t *p = &q->slots;
    const rotor_dataflow_t *g = p->graph;
    int ret = rotor_slots_add(p, slot, op);
    q->added++;
    if (ret == ROTOR_OK && !rotor_item_is_run(g, op)) {
        return suspect_after_action(q, rotor_item_storage(g, op), slot);
    }
    for (int32_t j = g->output_start[op]; ret == ROTOR_OK && j < g->output_start[op + 1]; j++) {
        int32_t s = g->outputs[j];
        int32_t at = rotor_events_below(&p->events[s], slot);
        if (at > 0 && rotor_slots_makes(p, s, at - 1)) {
            ret = suspect(q, p->events[s].slots[at - 1]);
            break;
        }
    }
    return ret == ROTOR_OK ? rotor_push(&q->pending, &q->pending_count, &q->pending_capacity, slot)
                           : ret;
}

/* Any slot after the last use of s below a slot. */
static int32_t between(rotor_edits_t *q, int32_t s, int32_t below) {
    const rotor_events_t *events = &q->slots.events[s];
    int32_t after = events->slots[rotor_events_below(events, below) - 1];
    return below - rotor_random_below(&q->random, below - after);
}

/* Fetches input s in slot `target`, below the run at `slot`; true if that is good to try. */
static bool settle_by_fetch(rotor_edits_t *q, int32_t slot, int32_t target, int32_t s, int *ret) {
    rotor_slots_t *p = &q->slots;
    const rotor_dataflow_t *g = p->graph;
    if (p->link == NULL || p->moving.read_ns[s] < 0) {
        return false;
    }
    int32_t finish = rotor_slots_finish(p, s);
    bool is_written = (finish >= 0 && finish < target) || rotor_dataflow_is_home(g, s);
    if (!is_written && !rotor_dataflow_once(g, g->producer[s]) &&
        rotor_random_below(&q->random, 4) > 0) {
        return false;
    }
    if (!rotor_edits_host_fits(q, s, target, slot)) {
        return false;
    }
    *ret = is_written ? ROTOR_OK : rotor_edits_write(q, s, target, between(q, s, target));
    if (*ret == ROTOR_OK) {
        *ret = rotor_edits_add(q, target, rotor_item_start(g, s));
    }
    return true;
}

/* Input s of the run at `slot`, which would have to be kept for it over slot w or without room:
 * remakes it where that is better. */
static int settle_input(rotor_edits_t *q, int32_t slot, int32_t s, int32_t w, int32_t size) {
    rotor_slots_t *p = &q->slots;
    const rotor_dataflow_t *g = p->graph;
    const rotor_events_t *events = &p->events[s];
    int32_t at = rotor_events_below(events, slot);
    bool is_live = rotor_slots_read_after(p, s, at);
    int32_t op = g->producer[s];
    bool may_fetch = p->link != NULL && p->moving.read_ns[s] >= 0;
    int ret = ROTOR_OK;
    if (is_live || g->pinned[s] || (rotor_dataflow_once(g, op) && !may_fetch)) {
        return ROTOR_OK;
    }
    int32_t before = events->slots[at - 1];
    bool passes = before < w && w < slot;
    if (passes && 4 * (int64_t)p->size[s] <= size && rotor_random_below(&q->random, 2) == 0) {
        return ROTOR_OK;
    }
    if (!passes && (slot - before <= 1 ||
                    rotor_levels_most_within(&p->levels, before + 1, slot - 1) <= q->budget)) {
        return ROTOR_OK;
    }
    int32_t target = rotor_slots_empty_below(p, slot, passes ? w : before);
    if (target < 0) {
        q->crowded++;
        return ROTOR_OK;
    }
    if (settle_by_fetch(q, slot, target, s, &ret)) {
        return ret == ROTOR_ERR_INFEASIBLE ? ROTOR_OK : ret;
    }
    return rotor_dataflow_once(g, op) ? ROTOR_OK : rotor_edits_add(q, target, op);
}

int rotor_edits_place(rotor_edits_t *q, int32_t slot, int32_t op, int32_t w, int32_t size) {
    rotor_slots_t *p = &q->slots;
    const rotor_dataflow_t *g = p->graph;
    int32_t most_added = q->added + MOST_ADDED;
    q->pending_count = 0;
    int ret = rotor_edits_add(q, slot, op);
    while (ret == ROTOR_OK && q->pending_count > 0) {
        int32_t at = q->pending[--q->pending_count];
        int32_t maker = p->op_at[at];
        for (int32_t j = g->input_start[maker];
             ret == ROTOR_OK && j < g->input_start[maker + 1]; j++) {
            ret = settle_input(q, at, g->inputs[j], w, size);
        }
        if (q->added > most_added) {
            return ROTOR_ERR_INFEASIBLE;
        }
    }
    return ret == ROTOR_OK ? rotor_edits_remove_useless(q) : ret;
}

/* True if the run that made s at `made` could move beyond w: nothing that it makes is read up to w. */
static bool may_move(const rotor_slots_t *p, int32_t s, int32_t made, int32_t w, int32_t *ceiling,
                     int64_t *freed) {
    const rotor_dataflow_t *g = p->graph;
    int32_t op = g->producer[s];
    for (int32_t j = g->output_start[op]; j < g->output_start[op + 1]; j++) {
        int32_t t = g->outputs[j];
        const rotor_events_t *events = &p->events[t];
        int32_t at = rotor_events_below(events, made) + 1;
        bool is_later_pinned = g->pinned[t] == ROTOR_KEPT && at > 1;
        if (is_later_pinned || at >= events->count) {
            *freed += g->pinned[t] && at == 1 ? p->size[t] : 0;
            continue;
        }
        if (events->slots[at] <= w) {
            return false;
        }
        if (g->pinned[t] || !rotor_slots_makes(p, t, at)) {
            *freed += p->size[t];
        }
        *ceiling = events->slots[at] < *ceiling ? events->slots[at] : *ceiling;
    }
    bool is_first = rotor_events_below(&p->events[s], made) == 0;
    if (is_first && g->flags[op] != 0) {
        return false;
    }
    if (is_first && *ceiling > p->phase_start[g->phase[op] + 1]) {
        *ceiling = p->phase_start[g->phase[op] + 1];
    }
    return *ceiling > w + 1;
}

/* The costs of a run of op between w and `ceiling` beside its own time, and the bytes that it keeps
 * live over w. */
static void inputs_of(const rotor_slots_t *p, int32_t op, int32_t w, int32_t ceiling,
                      int64_t *cost, int64_t *kept) {
    const rotor_dataflow_t *g = p->graph;
    for (int32_t j = g->input_start[op]; j < g->input_start[op + 1]; j++) {
        int32_t t = g->inputs[j];
        const rotor_events_t *events = &p->events[t];
        int32_t at = rotor_events_below(events, ceiling);
        bool is_live = g->pinned[t] || (at < events->count && !rotor_slots_makes(p, t, at)) ||
                       events->slots[at - 1] > w;
        if (!is_live) {
            *kept += p->size[t];
            *cost += g->cost_ns[g->producer[t]];
        }
    }
}

/* The tape that is live over w and holds s, which then cannot go alone; -1 for none. */
static int32_t holder_of(const rotor_slots_t *p, int32_t s, int32_t w) {
    const rotor_dataflow_t *g = p->graph;
    for (int32_t u = g->user_start[s]; !g->is_plain && u < g->user_start[s + 1]; u++) {
        int32_t tape = g->tape[g->users[u]];
        const rotor_events_t *events = tape < 0 ? NULL : &p->events[tape];
        int32_t at = tape < 0 ? 0 : rotor_events_below(events, w);
        if (at > 0 && at < events->count && !rotor_slots_makes(p, tape, at)) {
            return tape;
        }
    }
    return -1;
}

bool rotor_edits_judge(const rotor_edits_t *q, int32_t s, int32_t w, int32_t overflow,
                  rotor_edit_choice_t *choice) {
    const rotor_slots_t *p = &q->slots;
    const rotor_dataflow_t *g = p->graph;
    int32_t holder = holder_of(p, s, w);
    if (holder >= 0) {
        return p->size[s] > 0 && !g->pinned[s] && rotor_edits_judge(q, holder, w, overflow, choice);
    }
    const rotor_events_t *events = &p->events[s];
    int32_t op = g->producer[s];
    int32_t at = rotor_events_below(events, w);
    int32_t size = p->size[s];
    if (g->lazy[s]) {
        size = (int32_t)((rotor_dataflow_freed_bytes(g, s) + p->unit - 1) / p->unit);
    }
    int64_t cost = 0;
    int64_t kept = 0;
    int64_t freed = 0;
    bool is_fetched = p->link != NULL && rotor_dataflow_is_home(g, s);
    if (at == 0 || size == 0 || rotor_dataflow_once(g, op) || is_fetched ||
        (at < events->count && events->slots[at] == w)) {
        return false;
    }
    bool is_read = at < events->count && !rotor_slots_makes(p, s, at);
    int32_t made = events->slots[at - 1];
    int32_t ceiling = p->slot_count;
    if (g->pinned[s] ? at > 1 : !is_read) {
        return false;
    }
    if (p->op_at[made] == op && may_move(p, s, made, w, &ceiling, &freed)) {
        int64_t remakes = 0;
        inputs_of(p, op, w, ceiling, &remakes, &kept);
        if (freed > kept) {
            double useful = (double)rotor_min(freed - kept, overflow);
            *choice = (rotor_edit_choice_t){
                .storage = s, .ceiling = ceiling, .score = 0.02 * (double)g->cost_ns[op] / useful};
            return true;
        }
    }
    if (g->pinned[s]) {
        return false;
    }
    cost = g->cost_ns[op];
    inputs_of(p, op, w, events->slots[at], &cost, &kept);
    *choice =
        (rotor_edit_choice_t){.storage = s,
                          .ceiling = events->slots[at],
                          .score = (double)(cost + 1) / (double)rotor_min(size, overflow)};
    return true;
}

const int32_t *rotor_edits_region(rotor_edits_t *self, int32_t w, int32_t *at, int32_t *count,
                                  int32_t *total) {
    int32_t region = w / self->region_width;
    *total = self->region_start[region + 1] - self->region_start[region];
    *count = *total < MOST_SCANNED ? *total : MOST_SCANNED;
    *at = *total > *count ? rotor_random_below(&self->random, *total) : 0;
    return self->region_items + self->region_start[region];
}

int rotor_edits_evict(rotor_edits_t *q, const rotor_edit_choice_t *choice, int32_t w) {
    rotor_slots_t *p = &q->slots;
    const rotor_dataflow_t *g = p->graph;
    int32_t s = choice->storage;
    int32_t slot;
    if (g->pinned[s]) {
        int32_t most = choice->ceiling - w - 1;
        int32_t reach = rotor_random_below(&q->random, 2) == 0 && most > 256 ? 256 : most;
        slot = rotor_slots_empty_above(p, w + rotor_random_below(&q->random, reach),
                                       choice->ceiling);
    } else {
        slot = rotor_slots_empty_below(p, choice->ceiling, w);
    }
    if (slot < 0) {
        q->crowded++;
        return ROTOR_ERR_INFEASIBLE;
    }
    return rotor_edits_place(q, slot, g->producer[s], w, p->size[s]);
}

int32_t rotor_edits_repeated(rotor_edits_t *q, int32_t from) {
    rotor_slots_t *p = &q->slots;
    const rotor_dataflow_t *g = p->graph;
    if (p->repeated_count == 0) {
        return -1;
    }
    if (from >= 0) {
        int32_t last = from + 256 < p->slot_count ? from + 256 : p->slot_count;
        for (int32_t k = from; k < last; k++) {
            if (p->op_at[k] >= 0 && p->runs[p->op_at[k]] > 1 && rotor_slots_removable(p, k)) {
                return k;
            }
        }
        return -1;
    }
    int32_t op = p->repeated[rotor_random_below(&q->random, p->repeated_count)];
    if (g->output_start[op] == g->output_start[op + 1]) {
        return -1;
    }
    int32_t s = g->outputs[g->output_start[op]];
    int32_t wanted = rotor_random_below(&q->random, p->runs[op]);
    for (int32_t k = 0; k < p->events[s].count; k++) {
        int32_t slot = p->events[s].slots[k];
        if (p->op_at[slot] == op && wanted-- == 0) {
            return rotor_slots_removable(p, slot) ? slot : -1;
        }
    }
    return -1;
}

int rotor_edits_delete(rotor_edits_t *q, int32_t slot) {
    int ret = rotor_edits_remove(q, slot);
    return ret == ROTOR_OK ? rotor_edits_remove_useless(q) : ret;
}
