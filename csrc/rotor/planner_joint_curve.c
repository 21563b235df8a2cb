#include "planner_joint.h"

#include <string.h>

#include "planner_tier.h"
#include "probe.h"

#define LOWER_STEP 0.06 /* of the peak, when looking for the least with the tier */
#define LEAST_STEP 0.01

typedef struct {
    const rotor_dataflow_t *graph;
    const rotor_link_t *link;
    const rotor_callback_t *callback;
    int64_t total;
    rotor_stop_t stop;
    rotor_tiering_t search;
    rotor_pricer_t pricer;
    rotor_random_t random;
    rotor_program_t work;
    rotor_program_t *programs; /* of the caller: those without the tier first */
    rotor_cost_t *costs;
    int64_t alone; /* their number */
    int64_t count;
} joint_curve_t;

static bool curve_goes_on(void *context, int64_t done, int64_t total) {
    const joint_curve_t *c = context;
    return rotor_ask(c->callback, rotor_min(done, total), c->total) == ROTOR_OK;
}

/* Searches within a budget from a program; leaves the result in `work`, empty where there is none. */
static int improve_within(joint_curve_t *c, int64_t budget, const rotor_program_t *start,
                          int64_t moves, rotor_cost_t *cost) {
    int ret = rotor_program_assign(&c->work, start->ops, start->length);
    if (ret == ROTOR_OK) {
        ret = rotor_tiering_improve(&c->search, c->graph, budget, rotor_random_next(&c->random),
                                    moves, &c->stop, &c->work);
    }
    if (ret == ROTOR_OK) {
        ret = rotor_pricer_prune(&c->pricer, c->graph, &c->work);
    }
    if (ret == ROTOR_OK) {
        ret = rotor_program_simulate(c->graph, c->link, c->work.ops, c->work.length, cost, NULL,
                                     NULL, NULL);
    }
    if (ret == ROTOR_ERR_INFEASIBLE || (ret == ROTOR_OK && cost->peak_bytes > budget)) {
        c->work.length = 0;
        ret = ROTOR_OK;
    }
    return ret;
}

/* The fastest program so far within a budget, NULL for none. */
static const rotor_program_t *fastest_within(const joint_curve_t *c, int64_t budget) {
    int64_t best = -1;
    for (int64_t k = 0; k < c->count; k++) {
        if (c->costs[k].peak_bytes <= budget &&
            (best < 0 || c->costs[k].time_ns < c->costs[best].time_ns)) {
            best = k;
        }
    }
    return best < 0 ? NULL : &c->programs[best];
}

/* The least peak to which the tier brings the program of the least one without it. */
static int find_bottom(joint_curve_t *c, int64_t *bottom) {
    rotor_program_t lowest;
    double step = LOWER_STEP;
    rotor_program_init(&lowest);
    int ret = rotor_program_assign(&lowest, c->programs[0].ops, c->programs[0].length);
    *bottom = c->costs[0].peak_bytes;
    while (ret == ROTOR_OK && step >= LEAST_STEP && !c->stop.is_over) {
        rotor_cost_t cost;
        int64_t budget = (int64_t)((1.0 - step) * (double)*bottom);
        ret = budget < 1 ? ROTOR_OK : improve_within(c, budget, &lowest, 0, &cost);
        if (ret == ROTOR_OK && budget >= 1 && c->work.length > 0) {
            *bottom = cost.peak_bytes;
            ret = rotor_program_assign(&lowest, c->work.ops, c->work.length);
        } else {
            step /= 2;
        }
    }
    rotor_program_free(&lowest);
    return ret;
}

/* One budget, from a program and from the fastest that fits already; the faster of both results is found,
 * where it is faster than that. */
static int joint_point(joint_curve_t *c, int64_t budget, const rotor_program_t *last,
                       int64_t moves) {
    const rotor_program_t *fits = fastest_within(c, budget);
    const rotor_program_t *starts[] = {last, fits};
    rotor_program_t *found = &c->programs[c->count];
    int64_t fastest = fits == NULL ? INT64_MAX : c->costs[fits - c->programs].time_ns;
    bool is_found = false;
    int ret = ROTOR_OK;
    for (int32_t k = 0; k < 2 && ret == ROTOR_OK; k++) {
        rotor_cost_t cost = {.time_ns = INT64_MAX};
        if (starts[k] == NULL || (k == 1 && starts[k] == last)) {
            continue;
        }
        ret = improve_within(c, budget, starts[k], moves, &cost);
        if (ret == ROTOR_OK && c->work.length > 0 && cost.time_ns < fastest) {
            fastest = cost.time_ns;
            c->costs[c->count] = cost;
            is_found = true;
            ret = rotor_program_assign(found, c->work.ops, c->work.length);
        }
    }
    c->count += is_found && ret == ROTOR_OK;
    return ret;
}

/* Downwards, each budget from the last one's program. */
static int joint_sweep(joint_curve_t *c, int64_t points, int64_t moves) {
    int64_t bottom = 0;
    int64_t top = c->costs[c->alone - 1].peak_bytes;
    int64_t last = c->alone - 1;
    int ret = find_bottom(c, &bottom);
    for (int64_t k = points - 2; k >= 0 && ret == ROTOR_OK && !c->stop.is_over; k--) {
        double share = (double)k / (double)(points - 1);
        int64_t budget = bottom + (int64_t)(share * (double)(top - bottom));
        int64_t before = c->count;
        ret = joint_point(c, budget, &c->programs[last], moves);
        last = c->count > before ? before : last;
        c->stop.done++;
    }
    return ret;
}

int rotor_joint_curve(const rotor_dataflow_t *graph, const rotor_link_t *link, int64_t points,
                      const rotor_planner_options_t *options, const rotor_callback_t *callback,
                      rotor_program_t *programs, rotor_cost_t *costs, int64_t *count) {
    rotor_planner_options_t alone = *options;
    int64_t began = options->time_limit_ns == 0 ? 0 : rotor_clock_ns();
    joint_curve_t c = {.graph = graph,
                       .link = link,
                       .callback = callback,
                       .total = 3 * points,
                       .programs = programs,
                       .costs = costs};
    rotor_callback_t part = {.keep_going = curve_goes_on, .context = &c};
    rotor_tiering_init(&c.search, link);
    rotor_pricer_init(&c.pricer);
    rotor_program_init(&c.work);
    rotor_random_init(&c.random, options->seed);
    c.pricer.link = link;
    alone.time_limit_ns = options->time_limit_ns / 2 + (options->time_limit_ns > 0);
    int ret = rotor_link_check(link);
    if (ret != ROTOR_OK || (ret = rotor_planner_curve(graph, points, &alone, &part, programs,
                                                      costs, &c.alone)) != ROTOR_OK) {
        goto out;
    }
    c.count = c.alone;
    c.stop = (rotor_stop_t){
        .callback = &part,
        .deadline_ns = options->time_limit_ns == 0 ? 0 : began + options->time_limit_ns,
        .done = 2 * points,
        .total = 3 * points};
    if (c.alone > 0 && points > 1) {
        ret = joint_sweep(&c, points, options->moves);
    }
    *count = c.count;
out:
    rotor_program_free(&c.work);
    rotor_pricer_free(&c.pricer);
    rotor_tiering_free(&c.search);
    return ret;
}
