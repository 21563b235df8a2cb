/*
 * The local search. A move removes something and makes room again, or makes room and removes what then
 * fits; what gets useless goes too. Room is made by evictions: a storage is made again or, with a link,
 * moved over an idle gap by a finish in it and a fetch late enough to be in memory for a short time, early
 * enough to be done when it is used. The clocks run once for each move, after the budget is kept again.
 */
#include "planner_search.h"

#include <math.h>
#include <string.h>

#include "planner_spans.h"

#define MOST_REPAIRS 24 /* evictions of one move */
#define ATTEMPTS 8      /* of bringing a program below the budget */
#define HEAT 0.3        /* of the mean time of an operation, at first */
#define CYCLE 100       /* moves of the first cooling per operation */
#define LINK_SHARE 50   /* a nanosecond of transfers counts as 1/50 */
#define RUN_SHARE 100   /* a nanosecond of runs as 1/100 more: plateaus have a slope */
#define SHIFT 80        /* slots that an action moves at most at random */

void rotor_search_init(rotor_search_t *self, const rotor_link_t *link) {
    memset(self, 0, sizeof(*self));
    self->edits.slots.link = link;
}

void rotor_search_free(rotor_search_t *self) {
    rotor_edits_free(&self->edits);
    rotor_clock_blocks_free(&self->clocks);
    rotor_program_free(&self->scratch);
}

/* Where the clock of computing ends at `makespan_ns`. */
static int64_t value_of(const rotor_search_t *q, int64_t makespan_ns) {
    const rotor_slots_t *p = &q->edits.slots;
    return p->link == NULL
               ? p->time_ns
               : makespan_ns + p->moving.link_ns / LINK_SHARE + p->time_ns / RUN_SHARE;
}

/* About when a slot begins, by the clocks that are kept and the runs that are there. */
static int64_t time_at(const rotor_search_t *q, int32_t slot) {
    return q->clocks.kept[slot / ROTOR_BLOCK].now + q->edits.slots.moving.before_ns[slot];
}

static int64_t work_of(const rotor_search_t *q) {
    return q->edits.slots.levels.work + q->clocks.work;
}

static int load(rotor_search_t *q, const rotor_dataflow_t *graph, const rotor_program_t *program) {
    int ret = rotor_edits_load(&q->edits, graph, program);
    if (ret == ROTOR_OK) {
        ret = rotor_clock_blocks_load(&q->clocks, &q->edits.slots);
    }
    if (ret == ROTOR_OK) {
        q->value = value_of(q, rotor_clock_blocks_try(&q->clocks, &q->edits.slots));
    }
    return ret;
}

/* The last slot from which a fetch of s is done before slot b, or a little earlier; above `low`. */
static int32_t fetch_slot(rotor_search_t *q, int32_t s, int32_t low, int32_t b) {
    const rotor_slots_t *p = &q->edits.slots;
    double u = rotor_random_unit(&q->edits.random);
    int64_t latest = time_at(q, b) - (int64_t)((double)p->moving.read_ns[s] * (1.0 + 2.0 * u * u));
    int32_t first = low + 1;
    int32_t last = b - 1;
    while (first < last) {
        int32_t middle = first + (last - first + 1) / 2;
        if (time_at(q, middle) <= latest) {
            first = middle;
        } else {
            last = middle - 1;
        }
    }
    int32_t slot = rotor_slots_empty_below(p, first + 1, low);
    slot = slot < 0 ? rotor_slots_empty_above(p, first, b) : slot;
    q->edits.crowded += slot < 0;
    return slot;
}

/* The first slot in which a write of s is done, about; between its last use below a slot and that. */
static int32_t written_slot(rotor_search_t *q, int32_t s, int32_t below) {
    const rotor_slots_t *p = &q->edits.slots;
    const rotor_events_t *events = &p->events[s];
    int32_t first = events->slots[rotor_events_below(events, below) - 1] + 1;
    if (rotor_random_below(&q->edits.random, 2) == 0) {
        return below - rotor_random_below(&q->edits.random, below - first + 1);
    }
    int32_t made = rotor_slots_begun(p, s, below);
    double u = rotor_random_unit(&q->edits.random);
    int64_t done = time_at(q, made) + p->graph->cost_ns[p->op_at[made]] +
                   (int64_t)((double)p->moving.write_ns[s] * (1.0 + 2.0 * u * u));
    int32_t last = below;
    while (first < last) {
        int32_t middle = first + (last - first) / 2;
        if (time_at(q, middle) >= done) {
            last = middle;
        } else {
            first = middle + 1;
        }
    }
    return first;
}

static int add_fetch(rotor_search_t *q, int32_t s, int32_t low, int32_t b) {
    int32_t slot = fetch_slot(q, s, low, b);
    return slot < 0 ? ROTOR_ERR_INFEASIBLE
                    : rotor_edits_add(&q->edits, slot,
                                      rotor_item_start(q->edits.slots.graph, s));
}

/* Moves the start of a transfer; ROTOR_ERR_INFEASIBLE where it would leave its phase. */
static int move_start(rotor_search_t *q, int32_t s, int32_t slot, int32_t to) {
    rotor_slots_t *p = &q->edits.slots;
    const rotor_dataflow_t *g = p->graph;
    int32_t item = p->op_at[slot];
    if (!rotor_item_is_run(g, item)) {
        int ret = rotor_slots_remove(p, slot);
        return ret == ROTOR_OK ? rotor_edits_add(&q->edits, to, item) : ret;
    }
    int32_t phase = g->phase[item];
    bool is_first = p->events[s].slots[0] == slot;
    if (is_first && (to < p->phase_start[phase] || to >= p->phase_start[phase + 1])) {
        return ROTOR_ERR_INFEASIBLE;
    }
    int ret = rotor_edits_add(&q->edits, to, item); /* readings always follow a making */
    return ret == ROTOR_OK ? rotor_slots_remove(p, slot) : ret;
}

/* The way to relieve w of s by the tier; false for none. */
static bool judge_move(const rotor_search_t *q, int32_t s, int32_t w, int32_t overflow,
                       rotor_edit_choice_t *choice) {
    const rotor_slots_t *p = &q->edits.slots;
    if (p->link == NULL || p->moving.read_ns[s] < 0) {
        return false;
    }
    const rotor_events_t *events = &p->events[s];
    int32_t fetch = rotor_item_start(p->graph, s);
    int32_t at = rotor_events_below(events, w);
    bool is_here = at < events->count && events->slots[at] == w;
    bool is_fetched = is_here && p->op_at[w] == fetch;
    if (!is_fetched &&
        (is_here || at == 0 || at >= events->count || rotor_slots_makes(p, s, at))) {
        return false;
    }
    if (at + is_fetched >= events->count) {
        return false;
    }
    int32_t until = events->slots[at + is_fetched];
    int32_t before = is_fetched ? w : events->slots[at - 1];
    bool ends_here = at + 1 < events->count && rotor_slots_makes(p, s, at + 1);
    double read = (double)p->moving.read_ns[s];
    double cost = 0.02 * read;
    double wait = read - (double)(time_at(q, until) - time_at(q, w));
    *choice = (rotor_edit_choice_t){.how = ROTOR_FETCH_LATER, .storage = s, .ceiling = until};
    bool is_later = is_fetched || p->op_at[before] == fetch;
    if (!is_later && ends_here && p->op_at[until] == rotor_item_finish(p->graph, s)) {
        wait = (double)(q->clocks.kept_written[s] - time_at(q, w));
        choice->how = ROTOR_WRITE_EARLIER;
    } else if (!is_later) {
        if (!rotor_edits_host_fits(&q->edits, s, w, until)) {
            return false;
        }
        double both = read + (p->moving.actions[s] > 0 ? 0.0 : (double)p->moving.write_ns[s]);
        wait = both - (double)(time_at(q, until) - time_at(q, before));
        cost = q->price * both;
        choice->how = ROTOR_MOVE;
    }
    choice->score =
        ((wait > 0 ? wait : 0) + cost + 1.0) / (double)rotor_min(p->size[s], overflow);
    return true;
}

static void consider(rotor_search_t *q, rotor_edit_choice_t *choice, rotor_edit_choice_t *best) {
    choice->score *= 1.0 - q->edits.noise * rotor_random_unit(&q->edits.random);
    if (best->storage < 0 || choice->score < best->score) {
        *best = *choice;
    }
}

/* The best way to relieve w; false for none. */
static bool choose(rotor_search_t *q, int32_t w, int32_t overflow, rotor_edit_choice_t *best) {
    int32_t at;
    int32_t looked;
    int32_t count;
    const int32_t *items = rotor_edits_region(&q->edits, w, &at, &looked, &count);
    best->storage = -1;
    q->edits.slots.levels.work += looked * 20;
    for (int32_t k = 0; k < looked; k++) {
        rotor_edit_choice_t choice;
        int32_t s = items[at];
        at = at + 1 == count ? 0 : at + 1;
        if (judge_move(q, s, w, overflow, &choice)) {
            consider(q, &choice, best);
        }
        if (rotor_edits_judge(&q->edits, s, w, overflow, &choice)) {
            consider(q, &choice, best);
        }
    }
    return best->storage >= 0;
}

static int relieve(rotor_search_t *q, const rotor_edit_choice_t *choice, int32_t w) {
    rotor_slots_t *p = &q->edits.slots;
    int32_t s = choice->storage;
    int ret = ROTOR_ERR_INFEASIBLE;
    if (choice->how == ROTOR_RUN_AGAIN) {
        return rotor_edits_evict(&q->edits, choice, w);
    }
    if (choice->how == ROTOR_FETCH_LATER) {
        int32_t slot = fetch_slot(q, s, w, choice->ceiling);
        int32_t at = rotor_events_below(&p->events[s], choice->ceiling);
        ret = slot < 0 ? ret : move_start(q, s, p->events[s].slots[at - 1], slot);
    } else {
        int32_t near = rotor_random_below(&q->edits.random, 3) > 0 ? w : written_slot(q, s, w);
        ret = rotor_edits_write(&q->edits, s, w, near);
        if (ret == ROTOR_OK && choice->how == ROTOR_MOVE) {
            ret = add_fetch(q, s, w, choice->ceiling);
        }
    }
    return ret == ROTOR_OK ? rotor_edits_remove_useless(&q->edits) : ret;
}

/* Relieves until the budget is kept. ROTOR_ERR_INFEASIBLE: not within the time that the move may take, or
 * not at all. */
static int repair(rotor_search_t *q, int32_t most_repairs) {
    rotor_slots_t *p = &q->edits.slots;
    for (int32_t k = 0; k < most_repairs; k++) {
        rotor_edit_choice_t choice;
        int32_t w = 0;
        int32_t most = rotor_levels_most(&p->levels, &w);
        p->levels.work += p->block_count / 4;
        if (p->time_ns > q->longest) {
            return ROTOR_ERR_INFEASIBLE;
        }
        if (most <= q->edits.budget) {
            return ROTOR_OK;
        }
        if (!choose(q, w, most - q->edits.budget, &choice)) {
            return ROTOR_ERR_INFEASIBLE;
        }
        int ret = relieve(q, &choice, w);
        if (ret != ROTOR_OK) {
            return ret;
        }
    }
    return ROTOR_ERR_INFEASIBLE;
}

/* The index of a random fetch or finish among the events of a random storage, and the storage; -1 for
 * none. */
static int32_t random_action(rotor_search_t *q, bool is_fetch, int32_t *storage) {
    const rotor_slots_t *p = &q->edits.slots;
    if (p->moving.list_count == 0) {
        return -1;
    }
    int32_t s = p->moving.list[rotor_random_below(&q->edits.random, p->moving.list_count)];
    const rotor_events_t *events = &p->events[s];
    int32_t item = is_fetch ? rotor_item_start(p->graph, s) : rotor_item_finish(p->graph, s);
    int32_t seen = 0;
    int32_t found = -1;
    for (int32_t k = 0; k < events->count; k++) {
        if (p->op_at[events->slots[k]] == item && rotor_random_below(&q->edits.random, ++seen) == 0) {
            found = k;
        }
    }
    *storage = s;
    return found;
}

/* A run that is repeated becomes fetches of what it makes. */
static int run_to_fetch(rotor_search_t *q) {
    rotor_slots_t *p = &q->edits.slots;
    const rotor_dataflow_t *g = p->graph;
    int32_t slot = rotor_edits_repeated(&q->edits, -1);
    if (slot < 0) {
        return ROTOR_ERR_INFEASIBLE;
    }
    int32_t op = p->op_at[slot];
    int ret = rotor_edits_remove(&q->edits, slot);
    for (int32_t j = g->output_start[op]; ret == ROTOR_OK && j < g->output_start[op + 1]; j++) {
        int32_t s = g->outputs[j];
        const rotor_events_t *events = &p->events[s];
        int32_t at = rotor_events_below(events, slot);
        if (g->pinned[s] || p->size[s] == 0 || at == 0 || at >= events->count ||
            rotor_slots_makes(p, s, at)) {
            continue;
        }
        int32_t until = events->slots[at];
        int32_t after = events->slots[at - 1];
        if (p->moving.read_ns[s] < 0 || !rotor_edits_host_fits(&q->edits, s, slot, until)) {
            return ROTOR_ERR_INFEASIBLE;
        }
        ret = rotor_edits_write(&q->edits, s, slot, written_slot(q, s, slot));
        if (ret == ROTOR_OK) {
            int32_t finish = rotor_slots_finish(p, s);
            ret = add_fetch(q, s, finish > after ? finish : after, until);
        }
    }
    return ret == ROTOR_OK ? rotor_edits_remove_useless(&q->edits) : ret;
}

static int fetch_to_run(rotor_search_t *q) {
    rotor_slots_t *p = &q->edits.slots;
    int32_t s;
    int32_t at = random_action(q, true, &s);
    if (at < 0 || rotor_dataflow_is_home(p->graph, s) ||
        rotor_dataflow_once(p->graph, p->graph->producer[s])) {
        return ROTOR_ERR_INFEASIBLE;
    }
    int32_t slot = p->events[s].slots[at];
    int32_t until = p->events[s].slots[at + 1];
    int32_t before = p->events[s].slots[at - 1];
    int ret = rotor_edits_remove(&q->edits, slot);
    int32_t target = rotor_slots_empty_below(p, until, before);
    if (target < 0) {
        q->edits.crowded++;
        return ROTOR_ERR_INFEASIBLE;
    }
    return ret == ROTOR_OK
               ? rotor_edits_place(&q->edits, target, p->graph->producer[s],
                                   before + (slot - before) / 2, p->size[s])
               : ret;
}

/* The slot of a random fetch that may go. */
static int32_t random_fetch(rotor_search_t *q) {
    const rotor_slots_t *p = &q->edits.slots;
    int32_t s;
    int32_t at = random_action(q, true, &s);
    int32_t slot = at < 0 ? -1 : p->events[s].slots[at];
    bool is_run = slot >= 0 && rotor_item_is_run(p->graph, p->op_at[slot]);
    return is_run && !rotor_slots_removable(p, slot) ? -1 : slot;
}

/* Removes a repeated run, without a link now and then two. */
static int delete_runs(rotor_search_t *q) {
    bool is_alone = q->edits.slots.link == NULL;
    int32_t count = 1 + (is_alone && rotor_random_below(&q->edits.random, 4) == 0);
    int32_t slot = -1;
    int ret = ROTOR_OK;
    for (int32_t k = 0; k < count && ret == ROTOR_OK; k++) {
        slot = rotor_edits_repeated(&q->edits, slot);
        if (slot < 0) {
            return k == 0 ? ROTOR_ERR_INFEASIBLE : ROTOR_OK;
        }
        ret = rotor_edits_delete(&q->edits, slot);
    }
    return ret;
}

static int delete_fetch(rotor_search_t *q) {
    int32_t slot = random_fetch(q);
    return slot < 0 ? ROTOR_ERR_INFEASIBLE : rotor_edits_delete(&q->edits, slot);
}

/* Another place for a fetch, or for the finish of an offload, between the events around it. */
static int shift(rotor_search_t *q, bool is_fetch) {
    rotor_slots_t *p = &q->edits.slots;
    int32_t s;
    int32_t at = random_action(q, is_fetch, &s);
    if (at < 0 || at + 1 >= p->events[s].count) {
        return ROTOR_ERR_INFEASIBLE;
    }
    int32_t slot = p->events[s].slots[at];
    int32_t before = at == 0 ? -1 : p->events[s].slots[at - 1];
    int32_t after = p->events[s].slots[at + 1];
    int32_t target;
    if (rotor_random_below(&q->edits.random, 3) > 0) {
        target = slot + rotor_random_below(&q->edits.random, 2 * SHIFT + 1) - SHIFT;
    } else {
        target = is_fetch ? fetch_slot(q, s, before, after) : written_slot(q, s, slot) - 1;
    }
    target = target <= before ? before : target >= after ? after - 1 : target;
    target = target < 0 ? 0 : target;
    int32_t empty = rotor_slots_empty_below(p, target + 1, before);
    empty = empty < 0 ? rotor_slots_empty_above(p, target, after) : empty;
    if (empty < 0) {
        q->edits.crowded++;
        return ROTOR_ERR_INFEASIBLE;
    }
    return move_start(q, s, slot, empty);
}

static int shift_fetch(rotor_search_t *q) { return shift(q, true); }

static int shift_finish(rotor_search_t *q) { return shift(q, false); }

/* Relieves somewhere, then removes runs and fetches while the budget is kept. */
static int relieve_and_delete(rotor_search_t *q) {
    rotor_slots_t *p = &q->edits.slots;
    rotor_random_t *random = &q->edits.random;
    rotor_edit_choice_t choice;
    int32_t w = rotor_random_below(random, p->slot_count);
    int ret = ROTOR_OK;
    if (!choose(q, w, q->edits.budget / 8 + 1, &choice)) {
        return ROTOR_ERR_INFEASIBLE;
    }
    if ((ret = relieve(q, &choice, w)) != ROTOR_OK) {
        return ret;
    }
    for (int32_t k = 0; k < (p->link == NULL ? 8 : 6); k++) {
        int64_t mark = p->change_count;
        bool is_near = p->link == NULL && k % 2 == 1;
        bool is_fetch = p->link != NULL && rotor_random_below(random, 2) == 0;
        int32_t from = is_near ? w - rotor_random_below(random, 64) / 2 : -1;
        int32_t slot = is_fetch ? random_fetch(q) : rotor_edits_repeated(&q->edits, from);
        if (slot < 0) {
            continue;
        }
        if ((ret = rotor_edits_delete(&q->edits, slot)) != ROTOR_OK) {
            return ret;
        }
        if (rotor_levels_most(&p->levels, NULL) > q->edits.budget) {
            rotor_slots_undo(p, mark);
        }
        p->levels.work += p->block_count / 4;
    }
    return ROTOR_OK;
}

static int try_move(rotor_search_t *q) {
    static int (*const moves[])(rotor_search_t *) = {
        run_to_fetch, fetch_to_run, delete_runs,       delete_fetch,
        shift_fetch,  shift_finish, relieve_and_delete};
    enum { MOVES = sizeof(moves) / sizeof(moves[0]) };
    rotor_random_t *random = &q->edits.random;
    bool is_alone = q->edits.slots.link == NULL;
    rotor_edits_begin(&q->edits);
    q->edits.noise = rotor_random_below(random, 3) == 0 ? 0.2 : 0.9;
    q->price = is_alone ? 0.0 : rotor_random_unit(random) * rotor_random_unit(random);
    /* Of programs without a link only runs are deleted, or relieved and deleted. */
    int ret = !is_alone                            ? moves[rotor_random_below(random, MOVES)](q)
              : rotor_random_below(random, 2) == 0 ? delete_runs(q)
                                                   : relieve_and_delete(q);
    return ret == ROTOR_OK ? repair(q, MOST_REPAIRS) : ret;
}

/* Takes the program as it is over, if it is good enough. */
static bool take(rotor_search_t *q) {
    rotor_slots_t *p = &q->edits.slots;
    if (q->edits.host_budget < INT32_MAX &&
        rotor_levels_most(&p->moving.host, NULL) > q->edits.host_budget) {
        return false;
    }
    int64_t value = value_of(q, rotor_clock_blocks_try(&q->clocks, p));
    if (value > q->longest || !rotor_spans_tapes_hold(p)) {
        return false;
    }
    rotor_clock_blocks_keep(&q->clocks, p);
    q->value = value;
    p->change_count = 0;
    return true;
}

static void take_back(rotor_search_t *q) {
    rotor_slots_undo(&q->edits.slots, 0);
    rotor_slots_settle(&q->edits.slots);
}

/* Brings a program that is above the budget below it, in a few attempts. */
static int repair_all(rotor_search_t *q, rotor_stop_t *stop) {
    bool is_alone = q->edits.slots.link == NULL;
    int ret = ROTOR_ERR_INFEASIBLE;
    q->longest = INT64_MAX;
    for (int32_t k = 0; k < ATTEMPTS && ret == ROTOR_ERR_INFEASIBLE && !stop->is_over; k++) {
        int64_t before = work_of(q);
        take_back(q);
        rotor_edits_begin(&q->edits);
        q->edits.noise = k % 2 == 0 ? 0.2 : 0.9;
        q->price = is_alone ? 0.0 : 0.1 + 0.5 * rotor_random_unit(&q->edits.random);
        ret = repair(q, (is_alone ? 2 : 4) * q->edits.slots.graph->operation_count);
        ret = ret == ROTOR_OK && !take(q) ? ROTOR_ERR_INFEASIBLE : ret;
        int seen = rotor_stop_look(stop, work_of(q) - before);
        ret = seen == ROTOR_OK ? ret : seen;
    }
    return ret;
}

/* One cooling: moves that may make the program longer, by less and less. */
static int cool(rotor_search_t *q, const rotor_dataflow_t *graph, int64_t moves, double heat,
                rotor_stop_t *stop, rotor_program_t *program, int64_t *best) {
    double hottest = heat * (double)graph->total_cost_ns / (double)graph->operation_count;
    for (int64_t k = 0; k < moves && !stop->is_over; k++) {
        int64_t before = work_of(q);
        double left = 1.0 - (double)k / (double)moves;
        double bonus = -hottest * left * left * log(1.0 - rotor_random_unit(&q->edits.random));
        q->longest = q->value + (int64_t)bonus;
        int ret = try_move(q);
        if (ret != ROTOR_OK && ret != ROTOR_ERR_INFEASIBLE) {
            return ret;
        }
        if (ret != ROTOR_OK || !take(q)) {
            take_back(q);
        } else if (q->value < *best) {
            *best = q->value;
            if ((ret = rotor_slots_store(&q->edits.slots, program)) != ROTOR_OK) {
                return ret;
            }
        }
        if ((q->edits.crowded > 200 &&
             ((ret = rotor_slots_store(&q->edits.slots, &q->scratch)) != ROTOR_OK ||
              (ret = load(q, graph, &q->scratch)) != ROTOR_OK)) ||
            (ret = rotor_stop_look(stop, work_of(q) - before + 50)) != ROTOR_OK) {
            return ret;
        }
        stop->done += stop->step;
    }
    return ROTOR_OK;
}

static int32_t units_of(int64_t bytes, int64_t unit) {
    return bytes / unit >= INT32_MAX ? INT32_MAX : (int32_t)(bytes / unit);
}

int rotor_search_improve(rotor_search_t *self, const rotor_dataflow_t *graph, int64_t budget,
                         uint64_t seed, int64_t moves, rotor_stop_t *stop,
                         rotor_program_t *program) {
    static const double heats[] = {1.0, 2.0, 0.5, 4.0};
    enum { HEATS = sizeof(heats) / sizeof(heats[0]) };
    int64_t cycle = rotor_max(2000, graph->operation_count * (int64_t)CYCLE);
    int ret = load(self, graph, program);
    if (ret != ROTOR_OK) {
        return ret;
    }
    rotor_slots_t *slots = &self->edits.slots;
    /* Coolings in a row that may gain nothing: once every heat, twice with a link. */
    int32_t most_barren = slots->link == NULL ? HEATS : 2 * HEATS;
    rotor_random_init(&self->edits.random, seed);
    self->edits.budget = units_of(budget, slots->unit);
    self->edits.host_budget =
        units_of(slots->link == NULL ? INT64_MAX : slots->link->host_bytes, slots->unit);
    if (rotor_levels_most(&slots->levels, NULL) > self->edits.budget) {
        if ((ret = repair_all(self, stop)) != ROTOR_OK) {
            return ret;
        }
        ret = rotor_slots_store(slots, program);
    }
    int64_t best = self->value;
    int32_t barren = 0;
    for (int32_t k = 0; ret == ROTOR_OK && moves > 0 && barren < most_barren && !stop->is_over; k++) {
        int64_t before = best;
        int64_t now = moves < cycle + cycle / 2 ? moves : cycle;
        ret = cool(self, graph, now, HEAT * heats[k % HEATS], stop, program, &best);
        moves -= now;
        cycle += cycle / 2;
        barren = best < before ? 0 : barren + 1;
        if (ret == ROTOR_OK && self->value > best) {
            ret = load(self, graph, program);
        }
    }
    return ret;
}
