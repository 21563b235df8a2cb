#include "planner_joint_walks.h"

#include <string.h>

#define MOST_WALKED 60000 /* operations of all walks */
#define LEAST_WALKS 6
#define LONGEST 10 /* items of a walk per operation */

void rotor_joint_walks_init(rotor_joint_walks_t *self, const rotor_dataflow_t *graph,
                            const rotor_link_t *link, int64_t budget) {
    memset(self, 0, sizeof(*self));
    self->graph = graph;
    self->link = link;
    self->budget = budget;
    self->greedy.tier.link = link;
    self->pricer.link = link;
}

void rotor_joint_walks_free(rotor_joint_walks_t *self) {
    rotor_greedy_free(&self->greedy);
    rotor_prefetch_free(&self->prefetch);
    rotor_pricer_free(&self->pricer);
    rotor_program_free(&self->walked);
    for (int32_t k = 0; k < ROTOR_JOINT_WALKS; k++) {
        rotor_program_free(&self->best[k]);
    }
}

/* Keeps the program that was walked if it is one of the fastest, one per time. */
static void keep_walked(rotor_joint_walks_t *w, int64_t time_ns) {
    int32_t at = w->count;
    for (int32_t k = 0; k < w->count; k++) {
        if (w->best_ns[k] == time_ns) {
            return;
        }
    }
    while (at > 0 && time_ns < w->best_ns[at - 1]) {
        at--;
    }
    if (at == ROTOR_JOINT_WALKS) {
        return;
    }
    rotor_program_t last = w->best[ROTOR_JOINT_WALKS - 1];
    size_t moved = (size_t)(ROTOR_JOINT_WALKS - 1 - at);
    memmove(&w->best[at + 1], &w->best[at], moved * sizeof(w->best[0]));
    memmove(&w->best_ns[at + 1], &w->best_ns[at], moved * sizeof(w->best_ns[0]));
    w->best[at] = w->walked;
    w->best_ns[at] = time_ns;
    w->walked = last;
    w->count += w->count < ROTOR_JOINT_WALKS;
}

/* One walk, whose slack leaves a part of the budget for fetches that begin early. */
static int walk_within(rotor_joint_walks_t *w, const rotor_setting_t *setting, rotor_random_t *random,
                       rotor_stop_t *stop) {
    int64_t longest = LONGEST * (int64_t)w->graph->operation_count;
    rotor_cost_t price = {0};
    int ret = rotor_greedy_walk(&w->greedy, w->budget, setting, random, longest, stop, &w->walked);
    if (ret == ROTOR_OK) {
        ret = rotor_pricer_prune(&w->pricer, w->graph, &w->walked);
    }
    if (ret == ROTOR_OK) {
        ret = rotor_prefetch(&w->prefetch, w->graph, w->link, w->budget, &w->walked);
    }
    if (ret == ROTOR_OK) {
        ret = rotor_pricer_price(&w->pricer, w->graph, w->walked.ops, w->walked.length, &price);
    }
    if (ret != ROTOR_OK) {
        return ret == ROTOR_ERR_INFEASIBLE ? ROTOR_OK : ret; /* too long, or too much in the tier */
    }
    if (price.peak_bytes <= w->budget) {
        keep_walked(w, price.time_ns);
    }
    return ROTOR_OK;
}

int rotor_joint_walks_run(rotor_joint_walks_t *self, int64_t random_count, rotor_random_t *random,
                          rotor_stop_t *stop) {
    static const double prices[] = {0.5, 0.1, 1.0, 0.25};
    static const double slacks[] = {1.0, 0.9, 0.8};
    enum { PRICES = sizeof(prices) / sizeof(prices[0]), SLACKS = sizeof(slacks) / sizeof(slacks[0]) };
    int64_t n = self->graph->operation_count;
    int64_t most = rotor_max(LEAST_WALKS, MOST_WALKED / n);
    int64_t fixed = rotor_min(PRICES * SLACKS * 2, most);
    int64_t count = fixed + rotor_min(random_count, most - fixed);
    int32_t *order = rotor_malloc_array(n, sizeof(*order));
    int ret = ROTOR_ERR_NO_MEMORY;
    if (order == NULL) {
        goto out;
    }
    for (int32_t op = 0; op < (int32_t)n; op++) {
        order[op] = op;
    }
    ret = rotor_greedy_prepare(&self->greedy, self->graph, order);
    for (int64_t k = 0; k < count && ret == ROTOR_OK && !stop->is_over; k++) {
        rotor_setting_t setting;
        if (k < fixed) {
            (void)rotor_setting_fixed((int32_t)(k / (PRICES * SLACKS)), &setting);
            setting.transfer_price = prices[k % PRICES];
            setting.slack = slacks[k % SLACKS];
        } else {
            rotor_setting_random(random, &setting);
            setting.transfer_price = rotor_random_unit(random);
            setting.slack = 0.75 + 0.25 * rotor_random_unit(random);
        }
        ret = walk_within(self, &setting, random, stop);
    }
out:
    rotor_free(order);
    return ret;
}
