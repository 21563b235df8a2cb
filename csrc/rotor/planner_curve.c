#include "planner.h"

#include <string.h>

#include "planner_pool.h"
#include "probe.h"

typedef struct {
    rotor_planner_t planner;
    const rotor_planner_options_t *options;
    int64_t points;
    int64_t bottom;
    int64_t top;
    rotor_plan_t *plans; /* of the caller: by budget, empty where none was found; from `count` on empty */
    int64_t count;
} curve_t;

static int64_t budget_of(const curve_t *c, int64_t k) {
    if (c->points == 1) {
        return c->top;
    }
    double share = (double)k / (double)(c->points - 1);
    return k == c->points - 1 ? c->top
                              : c->bottom + (int64_t)(share * (double)(c->top - c->bottom));
}

/* The programs without recomputation, and the least peak. */
static int find_ends(curve_t *c) {
    rotor_planner_t *planner = &c->planner;
    rotor_planner_aim(planner, INT64_MAX);
    int ret = rotor_planner_offer_orders(planner);
    if (ret != ROTOR_OK ||
        (ret = rotor_planner_take(planner, &c->plans[c->points - 1])) != ROTOR_OK) {
        return ret;
    }
    c->top = planner->pool[0].cost.peak_bytes;
    if (c->points == 1) {
        return ROTOR_OK;
    }
    rotor_planner_aim(planner, 1);
    if ((ret = rotor_planner_settle(planner)) == ROTOR_OK) {
        c->bottom = planner->settled.cost.peak_bytes;
        rotor_planner_aim(planner, c->bottom);
        ret = rotor_program_assign(&planner->walked, planner->settled.program.ops,
                                   planner->settled.program.length);
        ret = ret == ROTOR_OK ? rotor_planner_offer(planner, &planner->walked) : ret;
    }
    return ret == ROTOR_OK ? rotor_planner_take(planner, &c->plans[0]) : ret;
}

/* Point k, begun from the program at point `from` and, downwards, from walks. */
static int point(curve_t *c, int64_t k, int64_t from, bool is_down) {
    rotor_planner_t *planner = &c->planner;
    int64_t moves = c->options->moves;
    int ret = ROTOR_OK;
    rotor_planner_aim(planner, budget_of(c, k));
    if (is_down) {
        ret = rotor_planner_walks(planner, planner->budget, c->options->random_runs);
    }
    for (int32_t pass = 0; pass < 2 && ret == ROTOR_OK; pass++) {
        const rotor_program_t *start = &c->plans[pass == 0 ? from : k].program;
        if (start->length > 0) {
            ret = rotor_planner_search_from(planner, is_down ? moves / 4 : 0, start);
        }
    }
    if (ret == ROTOR_OK && planner->pool_count > 0) {
        ret = rotor_planner_search_from(planner, moves, &planner->pool[0].program);
    }
    return ret == ROTOR_OK ? rotor_planner_take(planner, &c->plans[k]) : ret;
}

/* Without a link; then leaves no gaps. */
static int sweep_alone(curve_t *c) {
    rotor_stop_t *stop = &c->planner.stop;
    int ret = find_ends(c);
    int64_t last = c->points - 1;
    for (int64_t k = last - 1; k >= 0 && ret == ROTOR_OK && !stop->is_over; k--) {
        stop->done = last - k;
        ret = point(c, k, k + 1, true);
    }
    for (int64_t k = 1; k < last && ret == ROTOR_OK && !stop->is_over; k++) {
        stop->done = last + k;
        ret = point(c, k, k - 1, false);
    }
    for (int64_t k = 0; k < c->points; k++) {
        rotor_plan_move(&c->plans[k], &c->plans[c->count]);
        c->count += c->plans[c->count].program.length > 0;
    }
    return ret;
}

/* The fastest plan so far within a budget, NULL for none. */
static const rotor_plan_t *fastest_within(const curve_t *c, int64_t budget) {
    const rotor_plan_t *best = NULL;
    for (int64_t k = 0; k < c->count; k++) {
        const rotor_plan_t *plan = &c->plans[k];
        if (plan->cost.peak_bytes <= budget &&
            (best == NULL || plan->cost.time_ns < best->cost.time_ns)) {
            best = plan;
        }
    }
    return best;
}

/* One budget, from a program and from the fastest that fits already; what is faster than that is another
 * plan. */
static int tier_point(curve_t *c, int64_t budget, const rotor_plan_t *last) {
    const rotor_plan_t *fits = fastest_within(c, budget);
    rotor_plan_t *found = &c->plans[c->count];
    rotor_planner_aim(&c->planner, budget);
    int ret = rotor_planner_search_from(&c->planner, c->options->moves, &last->program);
    if (ret == ROTOR_OK && fits != NULL && fits != last) {
        ret = rotor_planner_search_from(&c->planner, c->options->moves, &fits->program);
    }
    found->program.length = 0;
    ret = ret == ROTOR_OK ? rotor_planner_take(&c->planner, found) : ret;
    c->count += ret == ROTOR_OK && found->program.length > 0 &&
                (fits == NULL || found->cost.time_ns < fits->cost.time_ns);
    return ret;
}

/* With a link: the least peak, then downwards, each budget from the last one's program. */
static int sweep_with_link(curve_t *c) {
    rotor_planner_t *planner = &c->planner;
    int64_t last = c->count - 1;
    rotor_planner_aim(planner, 1);
    int ret = rotor_planner_settle(planner);
    if (ret != ROTOR_OK) {
        return ret;
    }
    rotor_plan_t *lowest = &c->plans[c->count++];
    ret = rotor_program_assign(&lowest->program, planner->settled.program.ops,
                               planner->settled.program.length);
    if (ret == ROTOR_OK) {
        ret = rotor_pricer_price(&planner->pricer, planner->graph, lowest->program.ops,
                                 lowest->program.length, &lowest->cost);
    }
    c->bottom = planner->settled.cost.peak_bytes;
    for (int64_t k = c->points - 2; k >= 0 && ret == ROTOR_OK && !planner->stop.is_over; k--) {
        int64_t before = c->count;
        ret = tier_point(c, budget_of(c, k), &c->plans[last]);
        last = c->count > before ? before : last;
        planner->stop.done++;
    }
    return ret;
}

int rotor_planner_curve(const rotor_dataflow_t *graph, int64_t points,
                        const rotor_planner_options_t *options, const rotor_callback_t *callback,
                        rotor_plan_t *plans, int64_t *count, rotor_plan_t *lowest) {
    const rotor_link_t *link = options->link;
    int64_t limit = options->time_limit_ns;
    int64_t began = limit == 0 ? 0 : rotor_clock_ns();
    int64_t most = (link == NULL ? 1 : 2) * points;
    rotor_stop_t whole = {.callback = callback, .total = most + points};
    curve_t c;
    memset(&c, 0, sizeof(c));
    c.options = options;
    c.points = points;
    c.plans = plans;
    int ret = points < 1 ? ROTOR_ERR_BAD_LENGTH : rotor_link_check_graph(link, graph);
    if (ret != ROTOR_OK ||
        (ret = rotor_planner_begin(&c.planner, graph, NULL, options->seed,
                                   link == NULL ? limit : limit / 2 + (limit > 0), &whole)) !=
            ROTOR_OK ||
        (ret = sweep_alone(&c)) != ROTOR_OK) {
        goto out;
    }
    if (link != NULL && points > 1) {
        rotor_plan_t settled = {.program = {.length = 0}};
        rotor_plan_move(&c.planner.settled, &settled);
        rotor_planner_end(&c.planner);
        whole.done = 2 * points;
        ret = rotor_planner_begin(&c.planner, graph, link, options->seed, 0, &whole);
        c.planner.stop.deadline_ns = began + limit;
        rotor_plan_move(&settled, &c.planner.settled);
        ret = ret == ROTOR_OK ? sweep_with_link(&c) : ret;
    }
out:
    if (ret == ROTOR_OK) {
        *count = c.count;
        rotor_plan_move(&c.planner.settled, lowest);
    }
    for (int64_t k = 0; ret != ROTOR_OK && k < most; k++) {
        rotor_program_free(&plans[k].program);
    }
    rotor_planner_end(&c.planner);
    return ret;
}
