#include "planner.h"

#include <string.h>

#include "planner_pool.h"

#define FEW_MOVES 2000    /* of each start, and of the program for a larger budget */
#define MORE_MOVES 20     /* of each start, per operation */
#define MOST_ROUNDS 6     /* of all starts */
#define SMALL 400         /* operations of a graph that is searched twice */
#define MANY_MOVES 100000 /* with which it is */

/* From the caller's program as it is, then repaired; ROTOR_ERR_INFEASIBLE where none is found. */
static int begin_from(rotor_planner_t *planner, const rotor_program_t *start) {
    int ret = ROTOR_OK;
    if (start != NULL &&
        ((ret = rotor_program_assign(&planner->walked, start->ops, start->length)) != ROTOR_OK ||
         (ret = rotor_planner_offer(planner, &planner->walked)) != ROTOR_OK)) {
        return ret;
    }
    if (planner->pool_count == 0) {
        ret = rotor_planner_settle(planner);
        if (ret == ROTOR_OK && planner->settled.cost.peak_bytes > planner->budget) {
            ret = ROTOR_ERR_INFEASIBLE;
        }
    }
    return ret == ROTOR_OK && start != NULL ? rotor_planner_search_from(planner, 0, start) : ret;
}

/* Without a link. */
static int plan_alone(const rotor_dataflow_t *graph, int64_t budget,
                      const rotor_planner_options_t *options, const rotor_stop_t *whole,
                      rotor_plan_t *plan) {
    rotor_planner_t planner;
    int ret = rotor_planner_begin(&planner, graph, NULL, options->seed, options->time_limit_ns, whole);
    planner.stop.step = 1;
    rotor_planner_aim(&planner, budget);
    if (ret != ROTOR_OK || (ret = rotor_planner_offer_orders(&planner)) != ROTOR_OK) {
        goto out;
    }
    if (planner.pool_count > 0) {
        goto found; /* nothing has to run twice */
    }
    if ((ret = begin_from(&planner, options->start)) == ROTOR_ERR_INFEASIBLE) {
        rotor_plan_move(&planner.settled, plan);
    }
    if (ret != ROTOR_OK) {
        goto out;
    }
    if ((planner.pool_count == 0 || options->random_runs > 0) &&
        ((ret = rotor_planner_walks(&planner, budget, options->random_runs)) != ROTOR_OK ||
         (ret = rotor_planner_descend(&planner, budget)) != ROTOR_OK)) {
        goto out;
    }
    if ((planner.pool_count == 0 &&
         (ret = rotor_planner_offer(&planner, &planner.settled.program)) != ROTOR_OK) ||
        (ret = rotor_planner_search(&planner, options->moves)) != ROTOR_OK) {
        goto out;
    }
found:
    rotor_plan_move(&planner.best, plan);
out:
    rotor_planner_end(&planner);
    return ret;
}

/* Where the search with a link begins: the plan without the tier, the plain order, the plan for a larger
 * budget, the caller's program, the best walks. */
enum { ALONE, PLAIN, ROOMY, GIVEN, WALKED, STARTS = WALKED + 3, FEW = 3 };

typedef struct {
    rotor_planner_t planner;
    rotor_plan_t starts[STARTS];
} joint_t;

/* Finds the starts beside the walks. */
static int find_starts(joint_t *c, const rotor_planner_options_t *options) {
    const rotor_dataflow_t *graph = c->planner.graph;
    rotor_planner_options_t fast = *options;
    rotor_plan_t *plain = &c->starts[PLAIN];
    int64_t budget = c->planner.budget;
    int ret = rotor_program_assign(&plain->program, c->planner.orders[0], graph->operation_count);
    if (ret == ROTOR_OK) {
        ret = rotor_pricer_price(&c->planner.pricer, graph, plain->program.ops,
                                 plain->program.length, &plain->cost);
    }
    fast.random_runs = 0;
    fast.moves = rotor_min(FEW_MOVES, options->moves);
    fast.start = NULL;
    if (ret == ROTOR_OK) {
        int64_t middle = budget + rotor_max(0, plain->cost.peak_bytes - budget) / 2;
        ret = plan_alone(graph, middle, &fast, &c->planner.stop, &c->starts[ROOMY]);
        ret = ret == ROTOR_ERR_INFEASIBLE ? ROTOR_OK : ret;
    }
    return ret == ROTOR_OK && options->start != NULL
               ? rotor_program_assign(&c->starts[GIVEN].program, options->start->ops,
                                      options->start->length)
               : ret;
}

static int walk_starts(joint_t *c, int64_t random_runs) {
    c->planner.pool_count = 0;
    int ret = rotor_planner_walks(&c->planner, c->planner.budget, random_runs);
    for (int32_t k = 0; k < STARTS - WALKED && k < c->planner.pool_count && ret == ROTOR_OK; k++) {
        const rotor_program_t *walked = &c->planner.pool[k].program;
        ret = rotor_program_assign(&c->starts[WALKED + k].program, walked->ops, walked->length);
    }
    return ret;
}

/*
 * The search from all starts a little, a few times where the graph is small, from the few best of these
 * programs, and from the best of all, or of these.
 */
static int search_starts(joint_t *c, int64_t moves, bool is_again) {
    rotor_planner_t *planner = &c->planner;
    int64_t enough = FEW_MOVES + MORE_MOVES * (int64_t)planner->graph->operation_count;
    int64_t rounds = rotor_max(1, rotor_min(MOST_ROUNDS, moves / 2 / (enough * WALKED)));
    int64_t each = rotor_min(moves / 10, enough);
    int64_t left = moves;
    int ret = ROTOR_OK;
    planner->pool_count = 0;
    for (int64_t k = 0; k < rounds * STARTS && ret == ROTOR_OK && !planner->stop.is_over; k++) {
        int64_t at = k % STARTS;
        /* Walks begin once where they are beside the others. */
        bool is_due = at < WALKED ? at > ALONE || !is_again : k < STARTS;
        if (c->starts[at].program.length > 0 && is_due) {
            ret = rotor_planner_search_from(planner, each, &c->starts[at].program);
            left -= each;
        }
    }
    each = left / (2 * FEW);
    for (int32_t k = 0; k < FEW && rounds > 1 && ret == ROTOR_OK && !planner->stop.is_over; k++) {
        if (k < planner->pool_count) {
            ret = rotor_planner_search_from(planner, each, &planner->pool[k].program);
            left -= each;
        }
    }
    const rotor_plan_t *last = is_again && planner->pool_count > 0 ? planner->pool : &planner->best;
    if (ret == ROTOR_OK && last->program.length > 0 && left > 0 && !planner->stop.is_over) {
        ret = rotor_planner_search_from(planner, left, &last->program);
    }
    return ret;
}

static bool has_actions(const rotor_dataflow_t *graph, const rotor_program_t *program) {
    for (int64_t k = 0; program != NULL && k < program->length; k++) {
        if (!rotor_item_is_run(graph, program->ops[k])) {
            return true;
        }
    }
    return false;
}

/* The plan without the tier; where there is none, what the tier brings within the budget. */
static int begin_alone(joint_t *c, const rotor_planner_options_t *options) {
    rotor_planner_options_t alone = *options;
    rotor_planner_t *planner = &c->planner;
    rotor_plan_t *start = &c->starts[ALONE];
    alone.time_limit_ns = options->time_limit_ns / 2 + (options->time_limit_ns > 0);
    alone.start = has_actions(planner->graph, options->start) ? NULL : options->start;
    int ret = plan_alone(planner->graph, planner->budget, &alone, &planner->stop, start);
    if (ret == ROTOR_ERR_INFEASIBLE) {
        rotor_plan_move(start, &planner->settled);
        ret = rotor_planner_settle(planner);
        rotor_plan_move(&planner->settled, start);
        if (ret == ROTOR_OK && start->cost.peak_bytes > planner->budget) {
            ret = ROTOR_ERR_INFEASIBLE;
        }
    }
    return ret == ROTOR_OK ? rotor_planner_offer(planner, &start->program) : ret;
}

/*
 * Small graphs are searched from the other starts first, and again from walks and without the program that
 * leaves the tier alone, to which the first search may keep.
 */
static int search_all(joint_t *c, const rotor_planner_options_t *options, int64_t moves, bool is_twice) {
    const rotor_plan_t *best = &c->planner.best;
    int ret = find_starts(c, options);
    if (ret == ROTOR_OK && is_twice &&
        ((ret = search_starts(c, moves, false)) != ROTOR_OK ||
         (best->program.length > 0 && !c->planner.graph->has_homes &&
          best->cost.time_ns <= c->planner.graph->total_cost_ns))) {
        return ret;
    }
    ret = ret == ROTOR_OK ? walk_starts(c, options->random_runs) : ret;
    return ret == ROTOR_OK ? search_starts(c, moves, is_twice) : ret;
}

static int plan_with_link(const rotor_dataflow_t *graph, int64_t budget,
                          const rotor_planner_options_t *options, rotor_stop_t *whole,
                          rotor_plan_t *plan) {
    joint_t c;
    int64_t parts = whole->total;
    int64_t moves = options->moves == 0 ? 0 : 2 * options->moves + 5 * graph->operation_count;
    bool is_twice = graph->operation_count <= SMALL && options->moves >= MANY_MOVES;
    memset(&c, 0, sizeof(c));
    whole->total += is_twice ? 2 * moves : moves;
    int ret = rotor_planner_begin(&c.planner, graph, options->link, options->seed,
                                  options->time_limit_ns, whole);
    rotor_planner_aim(&c.planner, budget);
    if (ret != ROTOR_OK || (ret = begin_alone(&c, options)) != ROTOR_OK) {
        goto out;
    }
    c.planner.stop.done = parts;
    c.planner.stop.step = 1;
    if (c.planner.best.program.length > 0 && !graph->has_homes &&
        c.planner.best.cost.compute_ns <= graph->total_cost_ns) {
        goto out; /* nothing has to run twice */
    }
    ret = search_all(&c, options, moves, is_twice);
    ret = ret == ROTOR_OK && c.planner.best.program.length == 0 ? ROTOR_ERR_INFEASIBLE : ret;
out:
    if (ret == ROTOR_OK || ret == ROTOR_ERR_INFEASIBLE) {
        rotor_plan_move(ret == ROTOR_OK ? &c.planner.best : &c.starts[ALONE], plan);
    }
    for (int32_t k = 0; k < STARTS; k++) {
        rotor_program_free(&c.starts[k].program);
    }
    rotor_planner_end(&c.planner);
    return ret;
}

int rotor_planner_plan(const rotor_dataflow_t *graph, int64_t budget,
                       const rotor_planner_options_t *options, const rotor_callback_t *callback,
                       rotor_plan_t *plan) {
    int ret = budget > 0 ? ROTOR_OK : ROTOR_ERR_BAD_BUDGET;
    rotor_stop_t whole = {.callback = callback,
                          .total = ROTOR_FIXED_SETTINGS + options->random_runs + options->moves};
    ret = ret == ROTOR_OK ? rotor_link_check_graph(options->link, graph) : ret;
    return ret != ROTOR_OK         ? ret
           : options->link == NULL ? plan_alone(graph, budget, options, &whole, plan)
                                   : plan_with_link(graph, budget, options, &whole, plan);
}
