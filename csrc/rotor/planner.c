#include "planner.h"

#include "planner_pool.h"

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

static void hand_over(rotor_program_t *from, rotor_program_t *to) {
    rotor_program_free(to);
    *to = *from;
    rotor_program_init(from);
}

int rotor_planner_plan(const rotor_dataflow_t *graph, int64_t budget,
                       const rotor_planner_options_t *options, const rotor_callback_t *callback,
                       rotor_program_t *program, rotor_cost_t *cost, int64_t *minimum) {
    rotor_planner_t planner;
    if (budget <= 0) {
        return ROTOR_ERR_BAD_BUDGET;
    }
    int ret = rotor_planner_begin(&planner, graph, options->seed, options->time_limit_ns, callback);
    planner.stop.step = 1;
    planner.stop.total = ROTOR_FIXED_SETTINGS + options->random_runs + options->moves;
    rotor_planner_aim(&planner, budget);
    if (ret != ROTOR_OK || (ret = rotor_planner_offer_orders(&planner)) != ROTOR_OK) {
        goto out;
    }
    if (planner.pool_count > 0) {
        goto found; /* nothing has to run twice */
    }
    if ((ret = begin_from(&planner, options->start)) == ROTOR_ERR_INFEASIBLE) {
        *minimum = planner.settled.cost.peak_bytes;
        hand_over(&planner.settled.program, program);
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
    hand_over(&planner.pool[0].program, program);
    *cost = planner.pool[0].cost;
out:
    rotor_planner_end(&planner);
    return ret;
}
