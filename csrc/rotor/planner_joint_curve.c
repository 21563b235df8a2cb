#include "planner_joint.h"

#include <string.h>

#include "planner_joint_least.h"
#include "probe.h"

typedef struct {
    const rotor_callback_t *callback;
    int64_t total;
    rotor_joint_search_t search;
    rotor_program_t *programs; /* of the caller: those without the tier first */
    rotor_cost_t *costs;
    int64_t alone; /* their number */
    int64_t count;
} joint_curve_t;

static bool curve_goes_on(void *context, int64_t done, int64_t total) {
    const joint_curve_t *c = context;
    return rotor_ask(c->callback, rotor_min(done, total), c->total) == ROTOR_OK;
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
        ret = rotor_joint_search_within(&c->search, budget, starts[k], moves, &cost);
        if (ret == ROTOR_OK && c->search.work.length > 0 && cost.time_ns < fastest) {
            fastest = cost.time_ns;
            c->costs[c->count] = cost;
            is_found = true;
            ret = rotor_program_assign(found, c->search.work.ops, c->search.work.length);
        }
    }
    c->count += is_found && ret == ROTOR_OK;
    return ret;
}

static int keep_lowest(joint_curve_t *c, const rotor_program_t *lowest) {
    int64_t k = c->count++;
    int ret = rotor_program_assign(&c->programs[k], lowest->ops, lowest->length);
    return ret == ROTOR_OK ? rotor_program_simulate(c->search.graph, c->search.link, lowest->ops, lowest->length,
                                                    &c->costs[k], NULL, NULL, NULL)
                           : ret;
}

/* Downwards, each budget from the last one's program. */
static int joint_sweep(joint_curve_t *c, int64_t points, int64_t moves, int64_t bottom) {
    int64_t top = c->costs[c->alone - 1].peak_bytes;
    int64_t last = c->alone - 1;
    int ret = ROTOR_OK;
    for (int64_t k = points - 2; k >= 0 && ret == ROTOR_OK && !c->search.stop.is_over; k--) {
        double share = (double)k / (double)(points - 1);
        int64_t budget = bottom + (int64_t)(share * (double)(top - bottom));
        int64_t before = c->count;
        ret = joint_point(c, budget, &c->programs[last], moves);
        last = c->count > before ? before : last;
        c->search.stop.done++;
    }
    return ret;
}

int rotor_joint_curve(const rotor_dataflow_t *graph, const rotor_link_t *link, int64_t points,
                      const rotor_planner_options_t *options, const rotor_callback_t *callback,
                      rotor_program_t *programs, rotor_cost_t *costs, int64_t *count,
                      int64_t *least) {
    rotor_planner_options_t alone = *options;
    int64_t began = options->time_limit_ns == 0 ? 0 : rotor_clock_ns();
    joint_curve_t c = {
        .callback = callback, .total = 3 * points, .programs = programs, .costs = costs};
    rotor_callback_t part = {.keep_going = curve_goes_on, .context = &c};
    rotor_program_t lowest;
    rotor_program_init(&lowest);
    rotor_joint_search_init(&c.search, graph, link, options->seed);
    alone.time_limit_ns = options->time_limit_ns / 2 + (options->time_limit_ns > 0);
    int ret = graph->is_plain ? rotor_link_check(link) : ROTOR_ERR_BAD_OPERATION;
    if (ret != ROTOR_OK || (ret = rotor_planner_curve(graph, points, &alone, &part, programs,
                                                      costs, &c.alone, &lowest, least)) != ROTOR_OK) {
        goto out;
    }
    c.count = c.alone;
    c.search.stop = (rotor_stop_t){
        .callback = &part,
        .deadline_ns = options->time_limit_ns == 0 ? 0 : began + options->time_limit_ns,
        .done = 2 * points,
        .total = 3 * points};
    if (points > 1 &&
        (ret = rotor_joint_settle(graph, link, 1, &c.search.stop, &lowest, least)) == ROTOR_OK) {
        ret = keep_lowest(&c, &lowest);
    }
    if (c.alone > 0 && points > 1 && ret == ROTOR_OK) {
        ret = joint_sweep(&c, points, options->moves, *least);
    }
    *count = c.count;
out:
    rotor_program_free(&lowest);
    rotor_joint_search_free(&c.search);
    return ret;
}
