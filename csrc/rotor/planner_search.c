/*
 * The local search. A move removes a repeated run and makes room again by evicting, or evicts and
 * removes what then fits; what gets useless goes too. Evicting a storage over an idle gap means
 * another run of its producer as late in the gap as can be, with inputs that are kept or remade in
 * turn; where the gap begins with the making and nothing else is read in it, the run moves.
 */
#include "planner_search.h"

#include <math.h>
#include <string.h>

#include "vector.h"

#define MOST_SCANNED 192  /* storages that one choice looks at */
#define MOST_ADDED 48     /* runs that one eviction adds */
#define MOST_REPAIRS 24   /* evictions of one move */
#define REGIONS 64
#define ATTEMPTS 8 /* of bringing a program below the budget */
#define HEAT 0.3 /* of the mean time of an operation, at first */
#define CYCLE 100 /* moves of the first cooling per operation */

void rotor_search_init(rotor_search_t *self) { memset(self, 0, sizeof(*self)); }

void rotor_search_free(rotor_search_t *self) {
    rotor_slots_free(&self->slots);
    rotor_free(self->pending);
    rotor_free(self->suspects);
    rotor_free(self->region_start);
    rotor_free(self->region_items);
    rotor_program_free(&self->scratch);
    rotor_search_init(self);
}

/* Which storages exist at all in which part of the slots. */
static int build_regions(rotor_search_t *q) {
    const rotor_slots_t *p = &q->slots;
    int32_t m = p->graph->storage_count;
    int64_t total = 0;
    q->region_width = p->slot_count / REGIONS + 1;
    if (q->region_start == NULL) {
        q->region_start = rotor_malloc_array(REGIONS + 1, sizeof(*q->region_start));
        if (q->region_start == NULL) {
            return ROTOR_ERR_NO_MEMORY;
        }
    }
    for (int32_t pass = 0; pass < 2; pass++) {
        for (int32_t r = REGIONS; pass == 1 && r > 0; r--) {
            q->region_start[r] = q->region_start[r - 1];
        }
        if (pass == 0) {
            memset(q->region_start, 0, (REGIONS + 1) * sizeof(*q->region_start));
        }
        for (int32_t s = 0; s < m; s++) {
            const rotor_events_t *events = &p->events[s];
            int32_t last = p->graph->pinned[s] ? p->slot_count - 1
                                               : events->slots[events->count - 1];
            for (int32_t r = events->slots[0] / q->region_width; r <= last / q->region_width;
                 r++) {
                if (pass == 0) {
                    q->region_start[r]++;
                } else {
                    q->region_items[q->region_start[r + 1]++] = s;
                }
            }
        }
        if (pass == 0) {
            for (int32_t r = 0; r <= REGIONS; r++) {
                int32_t count = q->region_start[r];
                q->region_start[r] = (int32_t)total;
                total += count;
            }
            int ret = rotor_grow((void **)&q->region_items, &q->region_capacity, total,
                                 sizeof(*q->region_items));
            if (ret != ROTOR_OK) {
                return ret;
            }
        }
    }
    return ROTOR_OK;
}

static int load(rotor_search_t *q, const rotor_dataflow_t *graph, const rotor_program_t *program) {
    int ret = rotor_slots_load(&q->slots, graph, program->ops, program->length);
    q->crowded = 0;
    return ret == ROTOR_OK ? build_regions(q) : ret;
}

static int suspect(rotor_search_t *q, int32_t slot) {
    return rotor_push(&q->suspects, &q->suspect_count, &q->suspect_capacity, slot);
}

/* Removes a run; the makings of its inputs may be useless now. */
static int remove_run(rotor_search_t *q, int32_t slot) {
    rotor_slots_t *p = &q->slots;
    const rotor_dataflow_t *g = p->graph;
    int32_t op = p->op_at[slot];
    int ret = rotor_slots_remove(p, slot);
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

static int remove_useless(rotor_search_t *q) {
    int ret = ROTOR_OK;
    while (ret == ROTOR_OK && q->suspect_count > 0) {
        int32_t slot = q->suspects[--q->suspect_count];
        if (q->slots.op_at[slot] >= 0 && rotor_slots_useless(&q->slots, slot)) {
            ret = remove_run(q, slot);
        }
    }
    return ret;
}

/* Adds a run; the making before it of what it makes may be useless now. */
static int add_run(rotor_search_t *q, int32_t slot, int32_t op) {
    rotor_slots_t *p = &q->slots;
    const rotor_dataflow_t *g = p->graph;
    int ret = rotor_slots_add(p, slot, op);
    q->added++;
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

/* Input s of the run at `slot`, which would have to be kept for it over slot w or without room:
 * remakes it where that is better. */
static int settle_input(rotor_search_t *q, int32_t slot, int32_t s, int32_t w, int32_t size) {
    rotor_slots_t *p = &q->slots;
    const rotor_dataflow_t *g = p->graph;
    const rotor_events_t *events = &p->events[s];
    int32_t at = rotor_events_below(events, slot);
    bool is_live = at + 1 < events->count && !rotor_slots_makes(p, s, at + 1);
    int32_t op = g->producer[s];
    if (is_live || g->pinned[s] || rotor_dataflow_once(g, op)) {
        return ROTOR_OK;
    }
    int32_t before = events->slots[at - 1];
    bool passes = before < w && w < slot;
    if (passes && 4 * (int64_t)p->size[s] <= size && rotor_random_below(&q->random, 2) == 0) {
        return ROTOR_OK;
    }
    if (!passes && (slot - before <= 1 ||
                    rotor_slots_most_within(p, before + 1, slot - 1) <= q->budget)) {
        return ROTOR_OK;
    }
    int32_t target = rotor_slots_empty_below(p, slot, passes ? w : before);
    if (target < 0) {
        q->crowded++;
        return ROTOR_OK;
    }
    return add_run(q, target, op);
}

/* Adds a run of op at an empty slot, and the runs that it needs, to relieve slot w. */
static int search_place(rotor_search_t *q, int32_t slot, int32_t op, int32_t w, int32_t size) {
    rotor_slots_t *p = &q->slots;
    const rotor_dataflow_t *g = p->graph;
    int32_t most_added = q->added + MOST_ADDED;
    q->pending_count = 0;
    int ret = add_run(q, slot, op);
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
    return ret == ROTOR_OK ? remove_useless(q) : ret;
}

typedef struct {
    int32_t storage;
    int32_t ceiling; /* the run of its producer goes below it, above w */
    double score;    /* cost per byte that it frees */
} search_choice_t;

/* True if the run that made s at `made` could move beyond w: nothing that it makes is read up to w. */
static bool may_move(const rotor_slots_t *p, int32_t s, int32_t made, int32_t w, int32_t *ceiling,
                     int64_t *freed) {
    const rotor_dataflow_t *g = p->graph;
    int32_t op = g->producer[s];
    for (int32_t j = g->output_start[op]; j < g->output_start[op + 1]; j++) {
        int32_t t = g->outputs[j];
        const rotor_events_t *events = &p->events[t];
        int32_t at = rotor_events_below(events, made) + 1;
        bool is_later_pinned = g->pinned[t] && at > 1;
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

/* True if evicting s relieves w; *choice has its price. */
static bool judge(const rotor_search_t *q, int32_t s, int32_t w, int32_t overflow,
                  search_choice_t *choice) {
    const rotor_slots_t *p = &q->slots;
    const rotor_dataflow_t *g = p->graph;
    const rotor_events_t *events = &p->events[s];
    int32_t op = g->producer[s];
    int32_t at = rotor_events_below(events, w);
    int64_t cost = 0;
    int64_t kept = 0;
    int64_t freed = 0;
    if (at == 0 || p->size[s] == 0 || rotor_dataflow_once(g, op) ||
        (at < events->count && events->slots[at] == w)) {
        return false;
    }
    bool is_read = at < events->count && !rotor_slots_makes(p, s, at);
    int32_t made = events->slots[at - 1];
    int32_t ceiling = p->slot_count;
    if (g->pinned[s] ? at > 1 : !is_read) {
        return false;
    }
    if (rotor_slots_makes(p, s, at - 1) && may_move(p, s, made, w, &ceiling, &freed)) {
        int64_t remakes = 0;
        inputs_of(p, op, w, ceiling, &remakes, &kept);
        if (freed > kept) {
            double useful = (double)rotor_min(freed - kept, overflow);
            *choice = (search_choice_t){
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
        (search_choice_t){.storage = s,
                          .ceiling = events->slots[at],
                          .score = (double)(cost + 1) / (double)rotor_min(p->size[s], overflow)};
    return true;
}

/* The storage to evict over w; false for none. */
static bool search_choose(rotor_search_t *q, int32_t w, int32_t overflow, search_choice_t *best) {
    rotor_slots_t *p = &q->slots;
    int32_t region = w / q->region_width;
    const int32_t *items = q->region_items + q->region_start[region];
    int32_t count = q->region_start[region + 1] - q->region_start[region];
    int32_t looked = count < MOST_SCANNED ? count : MOST_SCANNED;
    int32_t at = count > looked ? rotor_random_below(&q->random, count) : 0;
    bool found = false;
    p->work += looked * 20;
    for (int32_t k = 0; k < looked; k++) {
        search_choice_t choice;
        int32_t s = items[at];
        at = at + 1 == count ? 0 : at + 1;
        if (judge(q, s, w, overflow, &choice)) {
            choice.score *= 1.0 - q->noise * rotor_random_unit(&q->random);
            if (!found || choice.score < best->score) {
                *best = choice;
                found = true;
            }
        }
    }
    return found;
}

static int evict(rotor_search_t *q, const search_choice_t *choice, int32_t w) {
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
    return search_place(q, slot, g->producer[s], w, p->size[s]);
}

/* Evicts until the budget is kept. ROTOR_ERR_INFEASIBLE: not within the time that the move may take,
 * or not at all. */
static int search_repair(rotor_search_t *q, int32_t most_repairs) {
    rotor_slots_t *p = &q->slots;
    for (int32_t k = 0; k < most_repairs; k++) {
        search_choice_t choice;
        int32_t w = 0;
        int32_t most = rotor_slots_most(p, &w);
        p->work += p->block_count / 4;
        if (p->time_ns > q->longest_ns) {
            return ROTOR_ERR_INFEASIBLE;
        }
        if (most <= q->budget) {
            return ROTOR_OK;
        }
        if (!search_choose(q, w, most - q->budget, &choice)) {
            return ROTOR_ERR_INFEASIBLE;
        }
        int ret = evict(q, &choice, w);
        if (ret != ROTOR_OK) {
            return ret;
        }
    }
    return ROTOR_ERR_INFEASIBLE;
}

/* A run that may be removed, or -1: of a random operation, or next above `from` where it is >= 0. */
static int32_t repeated_run(rotor_search_t *q, int32_t from) {
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
        if (rotor_slots_makes(p, s, k) && wanted-- == 0) {
            int32_t slot = p->events[s].slots[k];
            return rotor_slots_removable(p, slot) ? slot : -1;
        }
    }
    return -1;
}

static int delete_run(rotor_search_t *q, int32_t slot) {
    int ret = remove_run(q, slot);
    return ret == ROTOR_OK ? remove_useless(q) : ret;
}

static int move_delete(rotor_search_t *q) {
    int ret = ROTOR_OK;
    int32_t count = 1 + (rotor_random_below(&q->random, 4) == 0);
    int32_t slot = -1;
    for (int32_t k = 0; k < count && ret == ROTOR_OK; k++) {
        slot = repeated_run(q, k == 0 ? -1 : slot);
        if (slot < 0) {
            return k == 0 ? ROTOR_ERR_INFEASIBLE : search_repair(q, MOST_REPAIRS);
        }
        ret = delete_run(q, slot);
    }
    return ret == ROTOR_OK ? search_repair(q, MOST_REPAIRS) : ret;
}

/* Evicts something somewhere, then removes runs while the budget is kept. */
static int move_evict(rotor_search_t *q) {
    rotor_slots_t *p = &q->slots;
    search_choice_t choice;
    int32_t w = rotor_random_below(&q->random, p->slot_count);
    int64_t limit = q->longest_ns;
    int ret = ROTOR_OK;
    if (!search_choose(q, w, q->budget / 8 + 1, &choice)) {
        return ROTOR_ERR_INFEASIBLE;
    }
    if ((ret = evict(q, &choice, w)) != ROTOR_OK) {
        return ret;
    }
    for (int32_t k = 0; k < 8; k++) {
        int64_t mark = p->change_count;
        int32_t slot =
            repeated_run(q, k % 2 == 0 ? -1 : w - rotor_random_below(&q->random, 64) / 2);
        if (slot < 0) {
            continue;
        }
        if ((ret = delete_run(q, slot)) != ROTOR_OK) {
            return ret;
        }
        if (rotor_slots_most(p, NULL) > q->budget) {
            rotor_slots_undo(p, mark);
        }
        p->work += p->block_count / 4;
    }
    q->longest_ns = limit;
    return search_repair(q, MOST_REPAIRS);
}

static int try_move(rotor_search_t *q) {
    q->added = 0;
    q->suspect_count = 0;
    q->pending_count = 0;
    q->noise = rotor_random_below(&q->random, 3) == 0 ? 0.2 : 0.9;
    return rotor_random_below(&q->random, 2) == 0 ? move_delete(q) : move_evict(q);
}

static int keep_best(rotor_search_t *q, rotor_program_t *program, int64_t *best_ns) {
    *best_ns = q->slots.time_ns;
    return rotor_slots_store(&q->slots, program);
}

static int reload(rotor_search_t *q, const rotor_dataflow_t *graph) {
    int ret = rotor_slots_store(&q->slots, &q->scratch);
    return ret == ROTOR_OK ? load(q, graph, &q->scratch) : ret;
}

/* Brings a program that is above the budget below it, in a few attempts. */
static int repair_all(rotor_search_t *q, rotor_stop_t *stop) {
    rotor_slots_t *p = &q->slots;
    int ret = ROTOR_ERR_INFEASIBLE;
    q->longest_ns = INT64_MAX;
    for (int32_t k = 0; k < ATTEMPTS && ret == ROTOR_ERR_INFEASIBLE && !stop->is_over; k++) {
        int64_t before = p->work;
        rotor_slots_undo(p, 0);
        q->added = 0;
        q->suspect_count = 0;
        q->noise = k % 2 == 0 ? 0.2 : 0.9;
        ret = search_repair(q, 2 * p->graph->operation_count);
        int seen = rotor_stop_look(stop, p->work - before);
        ret = seen == ROTOR_OK ? ret : seen;
    }
    return ret;
}

/* One cooling: moves that may make the program longer, by less and less. */
static int cool(rotor_search_t *q, const rotor_dataflow_t *graph, int64_t moves,
                double heat, rotor_stop_t *stop, rotor_program_t *program, int64_t *best_ns) {
    rotor_slots_t *p = &q->slots;
    double hottest = heat * (double)graph->total_cost_ns / (double)graph->operation_count;
    int ret = ROTOR_OK;
    for (int64_t k = 0; k < moves && !stop->is_over; k++) {
        int64_t before = p->work;
        double left = 1.0 - (double)k / (double)moves;
        double bonus = -hottest * left * left * log(1.0 - rotor_random_unit(&q->random));
        q->longest_ns = p->time_ns + (int64_t)bonus;
        ret = try_move(q);
        if (ret == ROTOR_OK && p->time_ns <= q->longest_ns) {
            p->change_count = 0;
            if (p->time_ns < *best_ns &&
                (ret = keep_best(q, program, best_ns)) != ROTOR_OK) {
                return ret;
            }
        } else if (ret == ROTOR_OK || ret == ROTOR_ERR_INFEASIBLE) {
            rotor_slots_undo(p, 0);
        } else {
            return ret;
        }
        if ((q->crowded > 200 && (ret = reload(q, graph)) != ROTOR_OK) ||
            (ret = rotor_stop_look(stop, p->work - before + 50)) != ROTOR_OK) {
            return ret;
        }
        stop->done += stop->step;
    }
    return ROTOR_OK;
}

int rotor_search_improve(rotor_search_t *self, const rotor_dataflow_t *graph, int64_t budget,
                         uint64_t seed, int64_t moves, rotor_stop_t *stop,
                         rotor_program_t *program) {
    static const double heats[] = {1.0, 2.0, 0.5, 4.0};
    enum { HEATS = sizeof(heats) / sizeof(heats[0]) };
    int64_t best_ns = INT64_MAX;
    int64_t cycle = rotor_max(2000, graph->operation_count * (int64_t)CYCLE);
    int ret = load(self, graph, program);
    if (ret != ROTOR_OK) {
        return ret;
    }
    int64_t limit = budget / self->slots.unit;
    rotor_random_init(&self->random, seed);
    self->budget = limit > INT32_MAX ? INT32_MAX : (int32_t)limit;
    if (rotor_slots_most(&self->slots, NULL) > self->budget) {
        if ((ret = repair_all(self, stop)) != ROTOR_OK) {
            return ret;
        }
        self->slots.change_count = 0;
        ret = keep_best(self, program, &best_ns);
    } else {
        best_ns = self->slots.time_ns;
    }
    for (int32_t k = 0; ret == ROTOR_OK && moves > 0 && !stop->is_over; k++) {
        int64_t now = moves < cycle + cycle / 2 ? moves : cycle;
        ret = cool(self, graph, now, HEAT * heats[k % HEATS], stop, program, &best_ns);
        moves -= now;
        cycle += cycle / 2;
        if (ret == ROTOR_OK && self->slots.time_ns > best_ns) {
            ret = load(self, graph, program);
        }
    }
    return ret;
}
