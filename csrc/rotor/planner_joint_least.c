#include "planner_joint_least.h"

#include <string.h>

#include "planner_joint_walks.h"
#include "probe.h"

#define LOWER_STEP 0.06 /* of the peak */
#define LEAST_STEP 0.01
#define EVEN_RATE 1e18 /* bytes per second: every transfer takes 1 ns */

void rotor_joint_search_init(rotor_joint_search_t *self, const rotor_dataflow_t *graph,
                             const rotor_link_t *link, uint64_t seed) {
    memset(self, 0, sizeof(*self));
    self->graph = graph;
    self->link = link;
    rotor_search_init(&self->tiering, link);
    rotor_pricer_init(&self->pricer);
    rotor_program_init(&self->work);
    rotor_random_init(&self->random, seed);
    self->pricer.link = link;
}

void rotor_joint_search_free(rotor_joint_search_t *self) {
    rotor_program_free(&self->work);
    rotor_pricer_free(&self->pricer);
    rotor_search_free(&self->tiering);
}

int rotor_joint_search_within(rotor_joint_search_t *self, int64_t budget,
                              const rotor_program_t *start, int64_t moves, rotor_cost_t *cost) {
    int ret = rotor_program_assign(&self->work, start->ops, start->length);
    if (ret == ROTOR_OK) {
        ret = rotor_search_improve(&self->tiering, self->graph, budget,
                                    rotor_random_next(&self->random), moves, &self->stop,
                                    &self->work);
    }
    if (ret == ROTOR_OK) {
        ret = rotor_pricer_prune(&self->pricer, self->graph, &self->work);
    }
    if (ret == ROTOR_OK) {
        ret = rotor_program_simulate(self->graph, self->link, self->work.ops, self->work.length,
                                     cost, NULL, NULL, NULL);
    }
    if (ret == ROTOR_ERR_INFEASIBLE || (ret == ROTOR_OK && cost->peak_bytes > budget)) {
        self->work.length = 0;
        ret = ROTOR_OK;
    }
    return ret;
}

/* The same without moves, where that finds none from walks with the tier. */
static int bring_within(rotor_joint_search_t *q, int64_t budget, const rotor_program_t *start,
                        rotor_cost_t *cost) {
    rotor_joint_walks_t walks;
    int ret = rotor_joint_search_within(q, budget, start, 0, cost);
    if (ret != ROTOR_OK || q->work.length > 0) {
        return ret;
    }
    rotor_joint_walks_init(&walks, q->graph, q->link, budget);
    ret = rotor_joint_walks_run(&walks, 0, &q->random, &q->stop);
    if (ret == ROTOR_OK && walks.count > 0) {
        ret = rotor_joint_search_within(q, budget, &walks.best[0], 0, cost);
    }
    rotor_joint_walks_free(&walks);
    return ret;
}

/* Lowers the peak of a program by the tier until it is `enough`, or nothing is gained any more. */
static int lower_peak(rotor_joint_search_t *q, int64_t enough, rotor_program_t *program,
                      int64_t *peak) {
    double step = LOWER_STEP;
    int ret = ROTOR_OK;
    while (ret == ROTOR_OK && step >= LEAST_STEP && *peak > enough) {
        rotor_cost_t cost;
        int64_t budget = (int64_t)((1.0 - step) * (double)*peak);
        q->work.length = 0;
        ret = budget < 1 ? ROTOR_OK : bring_within(q, budget, program, &cost);
        if (ret == ROTOR_OK && q->work.length > 0) {
            *peak = cost.peak_bytes;
            ret = rotor_program_assign(program, q->work.ops, q->work.length);
        } else {
            step /= 2;
        }
    }
    return ret;
}

int rotor_joint_settle(const rotor_dataflow_t *graph, const rotor_link_t *link, int64_t enough,
                       const rotor_stop_t *stop, rotor_program_t *program, int64_t *peak) {
    rotor_dataflow_t timed = *graph;
    rotor_link_t even = *link;
    rotor_joint_search_t search;
    int ret = ROTOR_ERR_NO_MEMORY;
    even.write_bytes_per_s = EVEN_RATE;
    even.read_bytes_per_s = EVEN_RATE;
    even.latency_ns = 0;
    rotor_joint_search_init(&search, &timed, &even, 0);
    search.stop = (rotor_stop_t){
        .callback = stop->callback, .done = stop->done, .total = stop->total};
    timed.cost_ns = rotor_malloc_array(timed.operation_count, sizeof(*timed.cost_ns));
    if (timed.cost_ns != NULL) {
        rotor_dataflow_time_by_bytes(&timed, 0);
        ret = lower_peak(&search, enough, program, peak);
    }
    rotor_free(timed.cost_ns);
    rotor_joint_search_free(&search);
    return ret;
}
