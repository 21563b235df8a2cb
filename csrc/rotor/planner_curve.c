#include "planner.h"

#include <string.h>

#include "planner_pool.h"

typedef struct {
    rotor_planner_t planner;
    int64_t points;
    int64_t bottom;
    int64_t top;
    int64_t moves;
    int64_t random_runs;
    rotor_candidate_program_t *found; /* by budget, ascending; empty where none was found */
} curve_t;

static int64_t budget_of(const curve_t *c, int64_t k) {
    if (c->points == 1) {
        return c->top;
    }
    double share = (double)k / (double)(c->points - 1);
    return k == c->points - 1 ? c->top
                              : c->bottom + (int64_t)(share * (double)(c->top - c->bottom));
}

/* Takes over the best of the pool where it is better than the program so far. */
static int take_best(curve_t *c, int64_t k) {
    rotor_candidate_program_t *found = &c->found[k];
    const rotor_candidate_program_t *best = &c->planner.pool[0];
    if (c->planner.pool_count == 0 ||
        (found->program.length > 0 && found->cost.time_ns <= best->cost.time_ns)) {
        return ROTOR_OK;
    }
    found->cost = best->cost;
    return rotor_program_assign(&found->program, best->program.ops, best->program.length);
}

/* The programs without recomputation, and the least peak. */
static int find_ends(curve_t *c) {
    rotor_planner_t *planner = &c->planner;
    rotor_planner_aim(planner, INT64_MAX);
    int ret = rotor_planner_offer_orders(planner);
    if (ret != ROTOR_OK || (ret = take_best(c, c->points - 1)) != ROTOR_OK) {
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
    return ret == ROTOR_OK ? take_best(c, 0) : ret;
}

/* Point k, begun from the program at point `from` and, downwards, from walks. */
static int point(curve_t *c, int64_t k, int64_t from, bool is_down) {
    rotor_planner_t *planner = &c->planner;
    int ret = ROTOR_OK;
    rotor_planner_aim(planner, budget_of(c, k));
    if (is_down) {
        ret = rotor_planner_walks(planner, planner->budget, c->random_runs);
    }
    for (int32_t pass = 0; pass < 2 && ret == ROTOR_OK; pass++) {
        const rotor_candidate_program_t *start = &c->found[pass == 0 ? from : k];
        if (start->program.length > 0) {
            ret = rotor_planner_search_from(planner, is_down ? c->moves / 4 : 0, &start->program);
        }
    }
    if (ret == ROTOR_OK && planner->pool_count > 0) {
        ret = rotor_planner_search_from(planner, c->moves, &planner->pool[0].program);
    }
    return ret == ROTOR_OK ? take_best(c, k) : ret;
}

static int curve_sweep(curve_t *c) {
    int ret = find_ends(c);
    int64_t last = c->points - 1;
    for (int64_t k = last - 1; k >= 0 && ret == ROTOR_OK && !c->planner.stop.is_over; k--) {
        c->planner.stop.done = last - k;
        ret = point(c, k, k + 1, true);
    }
    for (int64_t k = 1; k < last && ret == ROTOR_OK && !c->planner.stop.is_over; k++) {
        c->planner.stop.done = last + k;
        ret = point(c, k, k - 1, false);
    }
    return ret;
}

int rotor_planner_curve(const rotor_dataflow_t *graph, int64_t points,
                        const rotor_planner_options_t *options, const rotor_callback_t *callback,
                        rotor_program_t *programs, rotor_cost_t *costs, int64_t *count,
                        rotor_program_t *lowest, int64_t *least) {
    curve_t c;
    if (points < 1) {
        return ROTOR_ERR_BAD_LENGTH;
    }
    memset(&c, 0, sizeof(c));
    c.points = points;
    c.moves = options->moves;
    c.random_runs = options->random_runs;
    int ret =
        rotor_planner_begin(&c.planner, graph, options->seed, options->time_limit_ns, callback);
    c.planner.stop.total = 2 * points;
    c.found = rotor_calloc((size_t)points, sizeof(*c.found));
    if (c.found == NULL) {
        ret = ROTOR_ERR_NO_MEMORY;
    }
    if (ret != ROTOR_OK || (ret = curve_sweep(&c)) != ROTOR_OK) {
        goto out;
    }
    *count = 0;
    *least = c.bottom;
    rotor_program_free(lowest);
    *lowest = c.planner.settled.program;
    rotor_program_init(&c.planner.settled.program);
    for (int64_t k = 0; k < points; k++) {
        if (c.found[k].program.length > 0) {
            rotor_program_free(&programs[*count]);
            programs[*count] = c.found[k].program;
            costs[(*count)++] = c.found[k].cost;
            rotor_program_init(&c.found[k].program);
        }
    }
out:
    for (int64_t k = 0; c.found != NULL && k < points; k++) {
        rotor_program_free(&c.found[k].program);
    }
    rotor_free(c.found);
    rotor_planner_end(&c.planner);
    return ret;
}
