#include "planner_pool.h"

#include <math.h>
#include <string.h>

#include "planner_order.h"
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
#define LONGEST 10          /* runs of a walk per operation */
#define USUAL_ORDERS 2
#define BYTES_PER_NS 1000 /* where times follow from bytes */

static const double deferred_share[ROTOR_ORDERS] = {0.0, 0.5, 2.0, 4.0, HUGE_VAL};

int rotor_planner_begin(rotor_planner_t *self, const rotor_dataflow_t *graph, uint64_t seed,
                        int64_t time_limit_ns, const rotor_callback_t *callback) {
    memset(self, 0, sizeof(*self));
    self->graph = graph;
    rotor_search_init(&self->search, NULL);
    self->stop =
        (rotor_stop_t){.callback = callback,
                       .deadline_ns = time_limit_ns == 0 ? 0 : rotor_clock_ns() + time_limit_ns};
    rotor_random_init(&self->random, seed);
    for (int32_t k = 0; k < ROTOR_ORDERS; k++) {
        size_t size = (size_t)graph->operation_count * sizeof(*self->orders[k]);
        self->orders[k] = rotor_malloc_array(graph->operation_count, sizeof(*self->orders[k]));
        if (self->orders[k] == NULL) {
            return ROTOR_ERR_NO_MEMORY;
        }
        (void)rotor_order_defer(graph, deferred_share[k], self->orders[k]);
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
    rotor_program_free(&self->least.program);
    rotor_program_free(&self->settled.program);
    rotor_program_free(&self->walked);
    rotor_greedy_free(&self->greedy);
    rotor_pricer_free(&self->pricer);
    rotor_search_free(&self->search);
    for (int32_t k = 0; k < ROTOR_ORDERS; k++) {
        rotor_free(self->orders[k]);
    }
    memset(self, 0, sizeof(*self));
}

void rotor_planner_aim(rotor_planner_t *self, int64_t budget) {
    self->pool_count = 0;
    self->budget = budget;
}

static int keep_least(rotor_planner_t *self, const rotor_program_t *program, rotor_cost_t cost) {
    rotor_cost_t least = self->least.cost;
    bool is_better = self->least.program.length == 0 || cost.peak_bytes < least.peak_bytes ||
                     (cost.peak_bytes == least.peak_bytes && cost.time_ns < least.time_ns);
    if (!is_better) {
        return ROTOR_OK;
    }
    self->least.cost = cost;
    return rotor_program_assign(&self->least.program, program->ops, program->length);
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
    rotor_candidate_program_t last = self->pool[ROTOR_POOL - 1];
    int ret = rotor_program_assign(&last.program, program->ops, program->length);
    self->pool[ROTOR_POOL - 1] = last;
    if (ret != ROTOR_OK) {
        self->pool_count -= self->pool_count == ROTOR_POOL;
        return ret;
    }
    last.cost = cost;
    memmove(&self->pool[at + 1], &self->pool[at],
            (size_t)(ROTOR_POOL - 1 - at) * sizeof(self->pool[0]));
    self->pool[at] = last;
    self->pool_count += self->pool_count < ROTOR_POOL;
    return ROTOR_OK;
}

int rotor_planner_offer(rotor_planner_t *self, rotor_program_t *program) {
    rotor_cost_t cost = {0};
    int ret = rotor_pricer_prune(&self->pricer, self->graph, program);
    if (ret == ROTOR_OK && self->graph->is_plain) {
        ret = rotor_pricer_price(&self->pricer, self->graph, program->ops, program->length, &cost);
    } else if (ret == ROTOR_OK) {
        /* Neither walks nor edits look at all that tapes hold. */
        ret = rotor_program_simulate(self->graph, NULL, program->ops, program->length, &cost, NULL,
                                     NULL, NULL);
    }
    if (ret == ROTOR_ERR_NO_TAPE) {
        return ROTOR_OK;
    }
    if (ret != ROTOR_OK ||
        (ret = keep_least(self, program, cost)) != ROTOR_OK) {
        return ret;
    }
    return cost.peak_bytes <= self->budget ? keep_fast(self, program, cost) : ROTOR_OK;
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
    int ret = rotor_greedy_walk(&self->greedy, limit, setting, &self->random, longest, &self->stop,
                                &self->walked);
    self->stop.done += self->stop.step;
    if (ret == ROTOR_OK) {
        return rotor_planner_offer(self, &self->walked);
    }
    self->walked.length = 0;
    return ret == ROTOR_ERR_INFEASIBLE ? ROTOR_OK : ret;
}

/* With the fixed settings, then with random ones. */
static int walk_along(rotor_planner_t *self, const int32_t *order, int64_t limit,
                      int64_t random_count) {
    rotor_setting_t setting;
    int ret = rotor_greedy_prepare(&self->greedy, self->graph, order);
    for (int32_t k = 0; k < ROTOR_FIXED_SETTINGS && ret == ROTOR_OK && !self->stop.is_over; k++) {
        (void)rotor_setting_fixed(k, &setting);
        ret = planner_walk(self, limit, &setting);
    }
    for (int64_t k = 0; k < random_count && ret == ROTOR_OK && !self->stop.is_over; k++) {
        rotor_setting_random(&self->random, &setting);
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
            (void)rotor_setting_fixed(k, &setting);
            ret = planner_walk(self, limit, &setting);
        }
    }
    return ret;
}

int rotor_planner_walks(rotor_planner_t *self, int64_t limit, int64_t random_count) {
    bool has_two = self->orders[1] != NULL;
    int64_t second = has_two ? random_count / 2 : 0;
    int ret = walk_along(self, self->orders[0], limit, random_count - second);
    return ret == ROTOR_OK && has_two ? walk_along(self, self->orders[1], limit, second) : ret;
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
    for (int32_t order = 0; order < ROTOR_ORDERS; order++) {
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

static int descend(rotor_planner_t *self, int64_t least) {
    int64_t bound = 1;
    double step = FIRST_STEP;
    int ret = rotor_dataflow_lower_bound(self->graph, &bound);
    bound = rotor_max(bound, least);
    while (ret == ROTOR_OK && step >= LAST_STEP && !self->stop.is_over &&
           self->least.cost.peak_bytes > self->budget) {
        int64_t before = self->least.cost.peak_bytes;
        int64_t limit = rotor_max(bound, before - rotor_max(1, (int64_t)(step * (double)before)));
        if (limit >= before) {
            break;
        }
        ret = walk_down(self, limit);
        if (ret == ROTOR_OK && self->least.cost.peak_bytes > limit) {
            ret = planner_repair(self, limit, self->least.program.ops, self->least.program.length);
        }
        if (ret == ROTOR_OK && self->least.cost.peak_bytes > limit && step <= SLOW_STEP) {
            ret = more_walks(self, limit);
        }
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
    timed.cost_ns = rotor_malloc_array(timed.operation_count, sizeof(*timed.cost_ns));
    int ret = timed.cost_ns == NULL ? ROTOR_ERR_NO_MEMORY : ROTOR_OK;
    int begun = rotor_planner_begin(&bare, &timed, 0, 0, self->stop.callback);
    ret = ret == ROTOR_OK ? begun : ret;
    bare.stop.total = self->stop.total;
    rotor_planner_aim(&bare, self->budget);
    for (int32_t pass = 0; pass < 2 && ret == ROTOR_OK; pass++) {
        rotor_dataflow_time_by_bytes(&timed, pass == 0 ? 0 : BYTES_PER_NS);
        if ((ret = rotor_planner_offer_orders(&bare)) == ROTOR_OK) {
            ret = rotor_planner_descend(&bare, 1);
        }
    }
    if (ret == ROTOR_OK) {
        rotor_program_free(&self->settled.program);
        self->settled = bare.least;
        rotor_program_init(&bare.least.program);
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
