/*
 * The local search. A move removes a repeated run and makes room again by evicting, or evicts and
 * removes what then fits; what gets useless goes too.
 */
#include "planner_search.h"

#include <math.h>
#include <string.h>

#include "planner_spans.h"

#define MOST_REPAIRS 24 /* evictions of one move */
#define ATTEMPTS 8      /* of bringing a program below the budget */
#define HEAT 0.3        /* of the mean time of an operation, at first */
#define CYCLE 100       /* moves of the first cooling per operation */
#define MOST_BARREN 4  /* coolings in a row that gain nothing, once every heat */

void rotor_search_init(rotor_search_t *self) { memset(self, 0, sizeof(*self)); }

void rotor_search_free(rotor_search_t *self) {
    rotor_edits_free(&self->edits);
    rotor_program_free(&self->scratch);
    rotor_search_init(self);
}

/* Evicts until the budget is kept. ROTOR_ERR_INFEASIBLE: not within the time that the move may take,
 * or not at all. */
static int search_repair(rotor_search_t *q, int32_t most_repairs) {
    rotor_slots_t *p = &q->edits.slots;
    for (int32_t k = 0; k < most_repairs; k++) {
        rotor_edit_choice_t choice;
        int32_t w = 0;
        int32_t most = rotor_levels_most(&p->levels, &w);
        p->levels.work += p->block_count / 4;
        if (p->time_ns > q->longest_ns) {
            return ROTOR_ERR_INFEASIBLE;
        }
        if (most <= q->edits.budget) {
            return ROTOR_OK;
        }
        if (!rotor_edits_choose(&q->edits, w, most - q->edits.budget, &choice)) {
            return ROTOR_ERR_INFEASIBLE;
        }
        int ret = rotor_edits_evict(&q->edits, &choice, w);
        if (ret != ROTOR_OK) {
            return ret;
        }
    }
    return ROTOR_ERR_INFEASIBLE;
}

static int move_delete(rotor_search_t *q) {
    int ret = ROTOR_OK;
    int32_t count = 1 + (rotor_random_below(&q->edits.random, 4) == 0);
    int32_t slot = -1;
    for (int32_t k = 0; k < count && ret == ROTOR_OK; k++) {
        slot = rotor_edits_repeated(&q->edits, k == 0 ? -1 : slot);
        if (slot < 0) {
            return k == 0 ? ROTOR_ERR_INFEASIBLE : search_repair(q, MOST_REPAIRS);
        }
        ret = rotor_edits_delete(&q->edits, slot);
    }
    return ret == ROTOR_OK ? search_repair(q, MOST_REPAIRS) : ret;
}

/* Evicts something somewhere, then removes runs while the budget is kept. */
static int move_evict(rotor_search_t *q) {
    rotor_slots_t *p = &q->edits.slots;
    rotor_edit_choice_t choice;
    int32_t w = rotor_random_below(&q->edits.random, p->slot_count);
    int64_t limit = q->longest_ns;
    int ret = ROTOR_OK;
    if (!rotor_edits_choose(&q->edits, w, q->edits.budget / 8 + 1, &choice)) {
        return ROTOR_ERR_INFEASIBLE;
    }
    if ((ret = rotor_edits_evict(&q->edits, &choice, w)) != ROTOR_OK) {
        return ret;
    }
    for (int32_t k = 0; k < 8; k++) {
        int64_t mark = p->change_count;
        int32_t slot =
            rotor_edits_repeated(&q->edits, k % 2 == 0 ? -1 : w - rotor_random_below(&q->edits.random, 64) / 2);
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
    q->longest_ns = limit;
    return search_repair(q, MOST_REPAIRS);
}

static int try_move(rotor_search_t *q) {
    rotor_edits_begin(&q->edits);
    q->edits.noise = rotor_random_below(&q->edits.random, 3) == 0 ? 0.2 : 0.9;
    int ret = rotor_random_below(&q->edits.random, 2) == 0 ? move_delete(q) : move_evict(q);
    return ret == ROTOR_OK && !rotor_spans_tapes_hold(&q->edits.slots) ? ROTOR_ERR_INFEASIBLE : ret;
}

static int keep_best(rotor_search_t *q, rotor_program_t *program, int64_t *best_ns) {
    *best_ns = q->edits.slots.time_ns;
    return rotor_slots_store(&q->edits.slots, program);
}

static int reload(rotor_search_t *q, const rotor_dataflow_t *graph) {
    int ret = rotor_slots_store(&q->edits.slots, &q->scratch);
    return ret == ROTOR_OK ? rotor_edits_load(&q->edits, graph, &q->scratch) : ret;
}

/* Brings a program that is above the budget below it, in a few attempts. */
static int repair_all(rotor_search_t *q, rotor_stop_t *stop) {
    rotor_slots_t *p = &q->edits.slots;
    int ret = ROTOR_ERR_INFEASIBLE;
    q->longest_ns = INT64_MAX;
    for (int32_t k = 0; k < ATTEMPTS && ret == ROTOR_ERR_INFEASIBLE && !stop->is_over; k++) {
        int64_t before = p->levels.work;
        rotor_slots_undo(p, 0);
        rotor_edits_begin(&q->edits);
        q->edits.noise = k % 2 == 0 ? 0.2 : 0.9;
        ret = search_repair(q, 2 * p->graph->operation_count);
        ret = ret == ROTOR_OK && !rotor_spans_tapes_hold(p) ? ROTOR_ERR_INFEASIBLE : ret;
        int seen = rotor_stop_look(stop, p->levels.work - before);
        ret = seen == ROTOR_OK ? ret : seen;
    }
    return ret;
}

/* One cooling: moves that may make the program longer, by less and less. */
static int cool(rotor_search_t *q, const rotor_dataflow_t *graph, int64_t moves,
                double heat, rotor_stop_t *stop, rotor_program_t *program, int64_t *best_ns) {
    rotor_slots_t *p = &q->edits.slots;
    double hottest = heat * (double)graph->total_cost_ns / (double)graph->operation_count;
    int ret = ROTOR_OK;
    for (int64_t k = 0; k < moves && !stop->is_over; k++) {
        int64_t before = p->levels.work;
        double left = 1.0 - (double)k / (double)moves;
        double bonus = -hottest * left * left * log(1.0 - rotor_random_unit(&q->edits.random));
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
        if ((q->edits.crowded > 200 && (ret = reload(q, graph)) != ROTOR_OK) ||
            (ret = rotor_stop_look(stop, p->levels.work - before + 50)) != ROTOR_OK) {
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
    int ret = rotor_edits_load(&self->edits, graph, program);
    if (ret != ROTOR_OK) {
        return ret;
    }
    int64_t limit = budget / self->edits.slots.unit;
    rotor_random_init(&self->edits.random, seed);
    self->edits.budget = limit > INT32_MAX ? INT32_MAX : (int32_t)limit;
    if (rotor_levels_most(&self->edits.slots.levels, NULL) > self->edits.budget) {
        if ((ret = repair_all(self, stop)) != ROTOR_OK) {
            return ret;
        }
        self->edits.slots.change_count = 0;
        ret = keep_best(self, program, &best_ns);
    } else {
        best_ns = self->edits.slots.time_ns;
    }
    int32_t barren = 0;
    for (int32_t k = 0; ret == ROTOR_OK && moves > 0 && barren < MOST_BARREN && !stop->is_over; k++) {
        int64_t before = best_ns;
        int64_t now = moves < cycle + cycle / 2 ? moves : cycle;
        ret = cool(self, graph, now, HEAT * heats[k % HEATS], stop, program, &best_ns);
        moves -= now;
        cycle += cycle / 2;
        barren = best_ns < before ? 0 : barren + 1;
        if (ret == ROTOR_OK && self->edits.slots.time_ns > best_ns) {
            ret = rotor_edits_load(&self->edits, graph, program);
        }
    }
    return ret;
}
