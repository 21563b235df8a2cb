#include "planner_spans.h"

/* The size of a storage from event `at` on, as the making at or before it left it. */
static int32_t span_size(const rotor_slots_t *p, int32_t s, int32_t at) {
    const rotor_events_t *events = &p->events[s];
    if (p->link == NULL || p->moving.actions[s] == 0) {
        return p->size[s];
    }
    while (at >= 0 && !rotor_slots_makes(p, s, at)) {
        at--;
    }
    bool is_fetch = at >= 0 && rotor_item_is_fetch(p->graph, p->op_at[events->slots[at]]);
    return p->size[s] + (is_fetch ? p->moving.padding : 0);
}

/* The last use after event `at`, a making, and before the next one; its own slot where there is none. */
static int32_t last_use(const rotor_slots_t *p, int32_t s, int32_t at) {
    while (rotor_slots_read_after(p, s, at)) {
        at++;
    }
    return p->events[s].slots[at];
}

/* The run at event `at` has its tape s, or not any more. */
static void raise_tape(rotor_slots_t *p, int32_t s, int32_t at, int32_t sign) {
    int32_t slot = p->events[s].slots[at];
    rotor_levels_raise(&p->levels, slot, slot,
                       sign * (p->size[s] + p->tape_more[p->graph->producer[s]]));
}

/* Event `at` of a tape is put or will be taken. Readings after a making that comes were those of the making
 * before it. */
static void apply_tape(rotor_slots_t *p, int32_t s, int32_t at, int32_t sign) {
    const int32_t *slots = p->events[s].slots;
    bool is_making = rotor_slots_makes(p, s, at);
    bool is_inside = rotor_slots_read_after(p, s, at);
    if (is_making != is_inside) {
        return;
    }
    int32_t before = is_making ? -sign : sign; /* of the making before it */
    if (rotor_slots_makes(p, s, at - 1)) {
        raise_tape(p, s, at - 1, before);
    }
    rotor_levels_raise(&p->levels, slots[at - 1] + 1, slots[at], before * p->size[s]);
    if (is_making) {
        raise_tape(p, s, at, sign);
    }
}

/* The same of a storage whose first copy stays. */
static void apply_copy(rotor_slots_t *p, int32_t s, int32_t at, int32_t sign) {
    const int32_t *slots = p->events[s].slots;
    bool is_making = rotor_slots_makes(p, s, at);
    int32_t made = at;
    while (!rotor_slots_makes(p, s, made) || (is_making && made == at && at > 0)) {
        made--;
    }
    int32_t size = sign * p->size[s];
    if (is_making && at == 0) {
        bool is_again = p->events[s].count > 1;
        rotor_levels_raise(&p->levels, slots[0], is_again ? slots[1] - 1 : p->slot_count - 1, size);
        if (is_again) {
            rotor_levels_raise(&p->levels, slots[1], last_use(p, s, 1), size);
        }
    } else if (is_making && made == 0) {
        rotor_levels_raise(&p->levels, slots[at], last_use(p, s, at), size);
    } else if (is_making && rotor_slots_read_after(p, s, at)) {
        rotor_levels_raise(&p->levels, slots[at - 1] + 1, slots[at] - 1, -size);
    } else if (is_making) {
        rotor_levels_raise(&p->levels, slots[at], slots[at], size);
    } else if (made > 0 && !rotor_slots_read_after(p, s, at)) {
        rotor_levels_raise(&p->levels, slots[at - 1] + 1, slots[at], size);
    }
}

/* The change of the level by event `at` of s, a reading or a making; times `sign`. */
static void apply_use(rotor_slots_t *p, int32_t s, int32_t at, int32_t sign) {
    const rotor_events_t *events = &p->events[s];
    if (!p->graph->pinned[s] && !rotor_slots_read_after(p, s, at)) {
        rotor_levels_raise(&p->levels, events->slots[at - 1] + 1, events->slots[at],
                           sign * span_size(p, s, at - 1));
    }
}

static void apply_make(rotor_slots_t *p, int32_t s, int32_t at, int32_t sign) {
    const rotor_events_t *events = &p->events[s];
    int32_t slot = events->slots[at];
    int32_t size = span_size(p, s, at);
    if (p->graph->pinned[s]) {
        if (at > 0) {
            rotor_levels_raise(&p->levels, slot, slot, sign * size);
        } else if (events->count > 1) {
            rotor_levels_raise(&p->levels, slot, events->slots[1] - 1, sign * size);
            rotor_levels_raise(&p->levels, events->slots[1], events->slots[1], sign * size);
        } else {
            rotor_levels_raise(&p->levels, slot, p->slot_count - 1, sign * size);
        }
    } else if (rotor_slots_read_after(p, s, at)) {
        int32_t before = span_size(p, s, at - 1);
        rotor_levels_raise(&p->levels, events->slots[at - 1] + 1, slot - 1, -sign * before);
        rotor_levels_raise(&p->levels, slot, last_use(p, s, at), sign * (size - before));
    } else {
        rotor_levels_raise(&p->levels, slot, slot, sign * size);
    }
}

void rotor_spans_apply(rotor_slots_t *self, int32_t s, int32_t at, int32_t sign) {
    if (self->graph->lazy[s]) {
        apply_tape(self, s, at, sign);
    } else if (self->graph->pinned[s] == ROTOR_KEPT_FIRST) {
        apply_copy(self, s, at, sign);
    } else if (rotor_slots_makes(self, s, at)) {
        apply_make(self, s, at, sign);
    } else {
        apply_use(self, s, at, sign);
    }
}

/* True unless an input of operation op is made again between a making of its tape and the last reading of
 * that. */
static bool holds_tape(const rotor_slots_t *p, int32_t op) {
    const rotor_dataflow_t *g = p->graph;
    int32_t s = g->tape[op];
    for (int32_t k = 0; s >= 0 && k < p->events[s].count; k++) {
        if (!rotor_slots_makes(p, s, k) || !rotor_slots_read_after(p, s, k)) {
            continue;
        }
        int32_t from = p->events[s].slots[k];
        int32_t until = last_use(p, s, k);
        for (int32_t j = g->input_start[op]; j < g->input_start[op + 1]; j++) {
            int32_t t = g->inputs[j];
            const rotor_events_t *events = &p->events[t];
            for (int32_t i = rotor_events_below(events, from + 1);
                 g->pinned[t] != ROTOR_KEPT && i < events->count && events->slots[i] < until; i++) {
                if (rotor_slots_makes(p, t, i)) {
                    return false;
                }
            }
        }
    }
    return true;
}

/* The same of all tapes that the runs of an operation make, read, or are held by. */
static bool hold_tapes_of(const rotor_slots_t *p, int32_t op) {
    const rotor_dataflow_t *g = p->graph;
    bool holds = holds_tape(p, op);
    for (int32_t j = g->input_start[op]; holds && j < g->input_start[op + 1]; j++) {
        holds = !g->lazy[g->inputs[j]] || holds_tape(p, g->producer[g->inputs[j]]);
    }
    for (int32_t j = g->output_start[op]; j < g->output_start[op + 1]; j++) {
        int32_t s = g->outputs[j];
        for (int32_t u = g->user_start[s]; holds && u < g->user_start[s + 1]; u++) {
            holds = holds_tape(p, g->users[u]);
        }
    }
    return holds;
}

bool rotor_spans_tapes_hold(const rotor_slots_t *self) {
    for (int64_t k = 0; !self->graph->is_plain && k < self->change_count; k++) {
        int32_t item = self->changes[k].item;
        if (!hold_tapes_of(self, item < 0 ? -1 - item : item)) {
            return false;
        }
    }
    return true;
}
