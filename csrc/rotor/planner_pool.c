#include "planner_pool.h"

#include <math.h>
#include <string.h>

#include "probe.h"

#define FEW_MOVES 2000
#define FIRST_STEP 0.2 /* of the peak, when looking for the least */
#define SLOW_STEP 0.06
#define LAST_STEP 0.002
#define MORE_WALKS 20000 /* over the number of operations */
#define MOST_MORE_WALKS 200
#define MOST_SLOW_OPERATIONS 1000
#define DOWN_SETTINGS 8
#define MOST_WORK 300000000 /* of looking for the least peak */
#define LONGEST 10          /* items of a walk per operation */
#define TIER_SETTINGS 24    /* fixed ones with a link */
#define MOST_WALKED 60000   /* operations of all walks with a link */
#define LEAST_WALKS 6
#define TIER_STEP 0.01  /* the last one with a link; the first is slow */
#define EVEN_RATE 1e18 /* bytes per second: every transfer takes 1 ns */
#define USUAL_ORDERS 2
#define BYTES_PER_NS 1000 /* where times follow from bytes */

static const double deferred_share[ROTOR_ORDERS] = {0.0, 0.5, 2.0, 4.0, HUGE_VAL};

/* True for an operation of the backward that makes nothing but pinned storages which nothing reads
 * (gradients of weights), and that reads less than `share` times the bytes that it makes. */
static bool may_wait(const rotor_dataflow_t *g, double share, int32_t op) {
    int64_t read = 0;
    if (g->phase[op] != ROTOR_PHASE_BACKWARD || g->flags[op] != 0 || g->output_bytes[op] == 0) {
        return false;
    }
    for (int32_t j = g->output_start[op]; j < g->output_start[op + 1]; j++) {
        int32_t s = g->outputs[j];
        if (!g->pinned[s] || g->user_start[s] < g->user_start[s + 1]) {
            return false;
        }
    }
    for (int32_t j = g->input_start[op]; j < g->input_start[op + 1]; j++) {
        read += g->bytes[g->inputs[j]];
    }
    return (double)read < share * (double)g->output_bytes[op];
}

/* The order of the graph with the operations that may wait at its end, in their order. */
static void defer(const rotor_dataflow_t *graph, double share, int32_t *order) {
    int32_t count = 0;
    for (int32_t pass = 0; pass < 2; pass++) {
        for (int32_t k = 0; k < graph->operation_count; k++) {
            if (may_wait(graph, share, k) == (pass == 1)) {
                order[count++] = k;
            }
        }
    }
}

int rotor_planner_begin(rotor_planner_t *self, const rotor_dataflow_t *graph,
                        const rotor_link_t *link, uint64_t seed, int64_t time_limit_ns,
                        const rotor_stop_t *whole) {
    memset(self, 0, sizeof(*self));
    self->graph = graph;
    self->link = self->greedy.tier.link = self->pricer.link = link;
    rotor_search_init(&self->search, link);
    self->stop =
        (rotor_stop_t){.callback = whole->callback,
                       .done = whole->done,
                       .total = whole->total,
                       .deadline_ns = time_limit_ns == 0 ? 0 : rotor_clock_ns() + time_limit_ns};
    rotor_random_init(&self->random, seed);
    for (int32_t k = 0; k < ROTOR_ORDERS; k++) {
        size_t size = (size_t)graph->operation_count * sizeof(*self->orders[k]);
        self->orders[k] = rotor_malloc_array(graph->operation_count, sizeof(*self->orders[k]));
        if (self->orders[k] == NULL) {
            return ROTOR_ERR_NO_MEMORY;
        }
        defer(graph, deferred_share[k], self->orders[k]);
        for (int32_t j = 0; j < k; j++) {
            if (self->orders[j] != NULL && memcmp(self->orders[j], self->orders[k], size) == 0) {
                rotor_free(self->orders[k]);
                self->orders[k] = NULL;
                break;
            }
        }
    }
    return ROTOR_OK;
}

void rotor_planner_end(rotor_planner_t *self) {
    for (int32_t k = 0; k < ROTOR_POOL; k++) {
        rotor_program_free(&self->pool[k].program);
    }
    rotor_program_free(&self->best.program);
    rotor_program_free(&self->least.program);
    rotor_program_free(&self->settled.program);
    rotor_program_free(&self->walked);
    rotor_greedy_free(&self->greedy);
    rotor_prefetch_free(&self->prefetch);
    rotor_pricer_free(&self->pricer);
    rotor_search_free(&self->search);
    for (int32_t k = 0; k < ROTOR_ORDERS; k++) {
        rotor_free(self->orders[k]);
    }
    memset(self, 0, sizeof(*self));
}

void rotor_planner_aim(rotor_planner_t *self, int64_t budget) {
    self->pool_count = 0;
    self->best.program.length = 0;
    self->budget = budget;
}

static int put(rotor_plan_t *plan, const rotor_program_t *program, rotor_cost_t cost) {
    int ret = rotor_program_assign(&plan->program, program->ops, program->length);
    plan->cost = ret == ROTOR_OK ? cost : plan->cost;
    return ret;
}

static bool is_faster(const rotor_cost_t *a, const rotor_cost_t *b) {
    return a->time_ns < b->time_ns || (a->time_ns == b->time_ns && a->link_ns < b->link_ns);
}

static int keep_least(rotor_planner_t *self, const rotor_program_t *program, rotor_cost_t cost) {
    rotor_cost_t least = self->least.cost;
    bool is_better = self->least.program.length == 0 || cost.peak_bytes < least.peak_bytes ||
                     (cost.peak_bytes == least.peak_bytes && cost.time_ns < least.time_ns);
    return is_better ? put(&self->least, program, cost) : ROTOR_OK;
}

int rotor_planner_take(const rotor_planner_t *self, rotor_plan_t *plan) {
    const rotor_plan_t *best = &self->best;
    bool is_better = best->program.length > 0 &&
                     (plan->program.length == 0 || is_faster(&best->cost, &plan->cost));
    return is_better ? put(plan, &best->program, best->cost) : ROTOR_OK;
}

/* Puts a program into the pool, which keeps one per time, sorted. */
static int keep_fast(rotor_planner_t *self, const rotor_program_t *program, rotor_cost_t cost) {
    int32_t at = 0;
    while (at < self->pool_count && self->pool[at].cost.time_ns < cost.time_ns) {
        at++;
    }
    if (at == ROTOR_POOL ||
        (at < self->pool_count && self->pool[at].cost.time_ns == cost.time_ns)) {
        return ROTOR_OK;
    }
    rotor_plan_t last = self->pool[ROTOR_POOL - 1];
    int ret = put(&last, program, cost);
    self->pool[ROTOR_POOL - 1] = last;
    if (ret != ROTOR_OK) {
        self->pool_count -= self->pool_count == ROTOR_POOL;
        return ret;
    }
    memmove(&self->pool[at + 1], &self->pool[at],
            (size_t)(ROTOR_POOL - 1 - at) * sizeof(self->pool[0]));
    self->pool[at] = last;
    self->pool_count += self->pool_count < ROTOR_POOL;
    return ROTOR_OK;
}

/* Keeps a program that is pruned. */
static int planner_keep(rotor_planner_t *self, const rotor_program_t *program) {
    rotor_cost_t cost = {0};
    /* Neither walks nor edits look at all that tapes hold. */
    int ret = self->graph->is_plain
                  ? rotor_pricer_price(&self->pricer, self->graph, program->ops, program->length,
                                       &cost)
                  : rotor_program_simulate(self->graph, NULL, program->ops, program->length, &cost,
                                           NULL, NULL, NULL);
    if (ret == ROTOR_ERR_NO_TAPE || ret == ROTOR_ERR_INFEASIBLE) {
        return ROTOR_OK; /* or too much in the tier */
    }
    ret = ret == ROTOR_OK ? keep_least(self, program, cost) : ret;
    if (ret != ROTOR_OK || cost.peak_bytes > self->budget) {
        return ret;
    }
    if (self->best.program.length == 0 || is_faster(&cost, &self->best.cost)) {
        ret = put(&self->best, program, cost);
    }
    return ret == ROTOR_OK ? keep_fast(self, program, cost) : ret;
}

int rotor_planner_offer(rotor_planner_t *self, rotor_program_t *program) {
    int ret = rotor_pricer_prune(&self->pricer, self->graph, program);
    return ret == ROTOR_OK ? planner_keep(self, program) : ret;
}

int rotor_planner_offer_orders(rotor_planner_t *self) {
    int ret = ROTOR_OK;
    for (int32_t k = 0; k < USUAL_ORDERS && ret == ROTOR_OK; k++) {
        if (self->orders[k] != NULL) {
            ret =
                rotor_program_assign(&self->walked, self->orders[k], self->graph->operation_count);
            ret = ret == ROTOR_OK ? rotor_planner_offer(self, &self->walked) : ret;
        }
    }
    return ret;
}

/* Leaves the program in `walked`, empty where the walk was given up. */
static int planner_walk(rotor_planner_t *self, int64_t limit, const rotor_setting_t *setting) {
    int64_t longest = LONGEST * (int64_t)self->graph->operation_count;
    rotor_program_t *walked = &self->walked;
    int ret = rotor_greedy_walk(&self->greedy, limit, setting, &self->random, longest, &self->stop,
                                walked);
    self->stop.done += self->stop.step;
    ret = ret == ROTOR_OK ? rotor_pricer_prune(&self->pricer, self->graph, walked) : ret;
    if (ret == ROTOR_OK && self->link != NULL) {
        ret = rotor_prefetch(&self->prefetch, self->graph, self->link, limit, walked);
    }
    if (ret == ROTOR_OK) {
        return planner_keep(self, walked);
    }
    walked->length = 0;
    return ret == ROTOR_ERR_INFEASIBLE ? ROTOR_OK : ret;
}

/* Setting number k of the fixed ones; with a link its slack leaves a part of the budget for fetches that
 * begin early. */
static void set_fixed(const rotor_planner_t *self, int32_t k, rotor_setting_t *setting) {
    static const double prices[] = {0.5, 0.1, 1.0, 0.25};
    static const double slacks[] = {1.0, 0.9, 0.8};
    rotor_setting_fixed(self->link == NULL ? k : k / 12, setting);
    if (self->link != NULL) {
        setting->transfer_price = prices[k % 4];
        setting->slack = slacks[k % 3];
    }
}

static void set_randomly(rotor_planner_t *self, rotor_setting_t *setting) {
    rotor_setting_random(&self->random, setting);
    if (self->link != NULL) {
        setting->transfer_price = rotor_random_unit(&self->random);
        setting->slack = 0.75 + 0.25 * rotor_random_unit(&self->random);
    }
}

/* With some fixed settings, then with random ones. */
static int walk_along(rotor_planner_t *self, const int32_t *order, int64_t limit,
                      int64_t fixed_count, int64_t random_count) {
    rotor_setting_t setting;
    int64_t count = fixed_count + rotor_max(random_count, 0);
    int ret = rotor_greedy_prepare(&self->greedy, self->graph, order);
    for (int64_t k = 0; k < count && ret == ROTOR_OK && !self->stop.is_over; k++) {
        if (k < fixed_count) {
            set_fixed(self, (int32_t)k, &setting);
        } else {
            set_randomly(self, &setting);
        }
        ret = planner_walk(self, limit, &setting);
    }
    return ret;
}

/* With fixed settings until the least peak is within the limit. */
static int walk_down(rotor_planner_t *self, int64_t limit) {
    int ret = ROTOR_OK;
    static const int32_t turns[ROTOR_ORDERS] = {1, 0, 2, 3, 4};
    for (int32_t turn = 0; turn < ROTOR_ORDERS && ret == ROTOR_OK; turn++) {
        int32_t order = turns[turn];
        rotor_setting_t setting;
        if (self->orders[order] == NULL || self->least.cost.peak_bytes <= limit) {
            continue;
        }
        ret = rotor_greedy_prepare(&self->greedy, self->graph, self->orders[order]);
        for (int32_t k = 0; k < DOWN_SETTINGS && ret == ROTOR_OK && !self->stop.is_over &&
                            self->least.cost.peak_bytes > limit;
             k++) {
            rotor_setting_fixed(k, &setting);
            ret = planner_walk(self, limit, &setting);
        }
    }
    return ret;
}

int rotor_planner_walks(rotor_planner_t *self, int64_t limit, int64_t random_count) {
    if (self->link != NULL) {
        int64_t most = rotor_max(LEAST_WALKS, MOST_WALKED / self->graph->operation_count);
        int64_t fixed = rotor_min(TIER_SETTINGS, most);
        return walk_along(self, self->orders[0], limit, fixed,
                          rotor_min(random_count, most - fixed));
    }
    bool has_two = self->orders[1] != NULL;
    int64_t second = has_two ? random_count / 2 : 0;
    int ret = walk_along(self, self->orders[0], limit, ROTOR_FIXED_SETTINGS, random_count - second);
    return ret == ROTOR_OK && has_two
               ? walk_along(self, self->orders[1], limit, ROTOR_FIXED_SETTINGS, second)
               : ret;
}

/* Brings a program within a limit, if that can be, and offers it. */
static int planner_repair(rotor_planner_t *self, int64_t limit, const int32_t *ops,
                          int64_t length) {
    int ret = rotor_program_assign(&self->walked, ops, length);
    if (ret == ROTOR_OK) {
        ret = rotor_search_improve(&self->search, self->graph, limit,
                                   rotor_random_next(&self->random), 0, &self->stop, &self->walked);
    }
    return ret == ROTOR_OK               ? rotor_planner_offer(self, &self->walked)
           : ret == ROTOR_ERR_INFEASIBLE ? ROTOR_OK
                                         : ret;
}

/* Random walks until one is within the limit; small graphs get many, and the slow kind. */
static int more_walks(rotor_planner_t *self, int64_t limit) {
    int64_t n = self->graph->operation_count;
    int64_t count = rotor_min(MOST_MORE_WALKS, MORE_WALKS / n + 4);
    int ret = ROTOR_OK;
    for (int32_t order = 0; order < ROTOR_ORDERS && ret == ROTOR_OK; order++) {
        if (self->orders[order] == NULL || self->least.cost.peak_bytes <= limit) {
            continue;
        }
        ret = rotor_greedy_prepare(&self->greedy, self->graph, self->orders[order]);
        if (ret == ROTOR_OK) {
            ret = planner_repair(self, limit, self->orders[order], n);
        }
        for (int64_t k = 0; k < count && ret == ROTOR_OK && !self->stop.is_over &&
                            self->least.cost.peak_bytes > limit;
             k++) {
            rotor_setting_t setting;
            rotor_setting_random(&self->random, &setting);
            setting.keeps_unused = k % 2 == 1 && n <= MOST_SLOW_OPERATIONS;
            setting.is_loose = k % 4 < 2;
            setting.slack = k % 8 < 6 ? 1.0 : 1.5;
            ret = planner_walk(self, limit, &setting);
            if (ret == ROTOR_OK && self->least.cost.peak_bytes > limit && k % 4 == 3 &&
                self->walked.length > 0) {
                ret = rotor_program_assign(&self->search.scratch, self->walked.ops,
                                           self->walked.length);
                if (ret == ROTOR_OK) {
                    ret = planner_repair(self, limit, self->search.scratch.ops,
                                         self->search.scratch.length);
                }
            }
        }
    }
    return ret;
}

/* One step of the descent without a link. */
static int lower_alone(rotor_planner_t *self, int64_t limit, double step) {
    int ret = walk_down(self, limit);
    if (ret == ROTOR_OK && self->least.cost.peak_bytes > limit) {
        ret = planner_repair(self, limit, self->least.program.ops, self->least.program.length);
    }
    if (ret == ROTOR_OK && self->least.cost.peak_bytes > limit && step <= SLOW_STEP) {
        ret = more_walks(self, limit);
    }
    return ret;
}

/* The same with a link. */
static int lower_by_tier(rotor_planner_t *self, int64_t limit) {
    int ret = planner_repair(self, limit, self->least.program.ops, self->least.program.length);
    return ret == ROTOR_OK && self->least.cost.peak_bytes > limit
               ? rotor_planner_walks(self, limit, 0)
               : ret;
}

static int descend(rotor_planner_t *self, int64_t least) {
    int64_t bound = 1;
    double step = self->link == NULL ? FIRST_STEP : SLOW_STEP;
    double last = self->link == NULL ? LAST_STEP : TIER_STEP;
    int ret = self->link == NULL ? rotor_dataflow_lower_bound(self->graph, &bound) : ROTOR_OK;
    bound = rotor_max(bound, least);
    while (ret == ROTOR_OK && step >= last && !self->stop.is_over &&
           self->least.cost.peak_bytes > self->budget) {
        int64_t before = self->least.cost.peak_bytes;
        int64_t limit = rotor_max(bound, before - rotor_max(1, (int64_t)(step * (double)before)));
        if (limit >= before) {
            break;
        }
        ret = self->link == NULL ? lower_alone(self, limit, step) : lower_by_tier(self, limit);
        if (self->least.cost.peak_bytes > limit) {
            step /= 2;
        }
    }
    return ret;
}

int rotor_planner_descend(rotor_planner_t *self, int64_t least) {
    if (self->stop.is_over) {
        return ROTOR_OK;
    }
    self->stop.most_work = self->stop.worked + MOST_WORK;
    int ret = descend(self, least);
    self->stop.most_work = 0;
    self->stop.until_next = 0; /* the time limit is looked at next */
    self->stop.is_over = false;
    return ret == ROTOR_OK ? rotor_stop_look(&self->stop, 0) : ret;
}

int rotor_planner_settle(rotor_planner_t *self) {
    rotor_planner_t bare;
    rotor_dataflow_t timed = *self->graph;
    rotor_link_t even = self->link == NULL ? (rotor_link_t){.latency_ns = 0} : *self->link;
    even.write_bytes_per_s = even.read_bytes_per_s = EVEN_RATE;
    even.latency_ns = 0;
    timed.cost_ns = rotor_malloc_array(timed.operation_count, sizeof(*timed.cost_ns));
    int ret = timed.cost_ns == NULL ? ROTOR_ERR_NO_MEMORY : ROTOR_OK;
    int begun = rotor_planner_begin(&bare, &timed, self->link == NULL ? NULL : &even, 0, 0,
                                    &self->stop);
    ret = ret == ROTOR_OK ? begun : ret;
    rotor_planner_aim(&bare, self->budget);
    for (int32_t pass = 0; pass < (self->link == NULL ? 2 : 1) && ret == ROTOR_OK; pass++) {
        rotor_dataflow_time_by_bytes(&timed, pass == 0 ? 0 : BYTES_PER_NS);
        ret = self->link == NULL ? rotor_planner_offer_orders(&bare)
                                 : rotor_planner_offer(&bare, &self->settled.program);
        if (ret == ROTOR_OK) {
            ret = rotor_planner_descend(&bare, 1);
        }
    }
    if (ret == ROTOR_OK) {
        rotor_plan_move(&bare.least, &self->settled);
    }
    rotor_planner_end(&bare);
    rotor_free(timed.cost_ns);
    return ret;
}

int rotor_planner_search_from(rotor_planner_t *self, int64_t moves, const rotor_program_t *start) {
    int ret = rotor_program_assign(&self->walked, start->ops, start->length);
    if (ret == ROTOR_OK) {
        ret = rotor_search_improve(&self->search, self->graph, self->budget,
                                   rotor_random_next(&self->random), moves, &self->stop,
                                   &self->walked);
    }
    if (ret == ROTOR_OK || ret == ROTOR_ERR_INFEASIBLE) {
        ret = rotor_planner_offer(self, &self->walked);
    }
    return ret;
}

int rotor_planner_search(rotor_planner_t *self, int64_t moves) {
    int ret = ROTOR_OK;
    int32_t starts = moves < FEW_MOVES ? 1 : self->pool_count < 4 ? self->pool_count : 4;
    int64_t each = rotor_min(moves / 10, FEW_MOVES + 50 * (int64_t)self->graph->operation_count);
    for (int32_t k = starts - 1; k > 0 && ret == ROTOR_OK && !self->stop.is_over; k--) {
        ret = rotor_planner_search_from(self, each, &self->pool[k].program);
        moves -= each;
    }
    if (ret == ROTOR_OK && self->pool_count > 0 && moves > 0 && !self->stop.is_over) {
        ret = rotor_planner_search_from(self, moves, &self->pool[0].program);
    }
    return ret;
}
