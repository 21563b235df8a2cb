#include "planner.h"

#include "planner_pool.h"

int rotor_planner_plan(const rotor_dataflow_t *graph, int64_t budget,
                       const rotor_planner_options_t *options, const rotor_callback_t *callback,
                       rotor_program_t *program, rotor_cost_t *cost, int64_t *minimum) {
    rotor_planner_t planner;
    int64_t bound = 0;
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
    if (options->start != NULL &&
        (ret = rotor_planner_search_from(&planner, 0, options->start)) != ROTOR_OK) {
        goto out;
    }
    bool needs_walks = planner.pool_count == 0 || options->random_runs > 0;
    if (needs_walks && ((ret = rotor_dataflow_lower_bound(graph, &bound)) != ROTOR_OK ||
                        (bound <= budget &&
                         (ret = rotor_planner_walks(&planner, budget, options->random_runs)) !=
                             ROTOR_OK) ||
                        (ret = rotor_planner_descend(&planner, true)) != ROTOR_OK)) {
        goto out;
    }
    if ((ret = rotor_planner_search(&planner, options->moves)) != ROTOR_OK) {
        goto out;
    }
    if (planner.pool_count == 0) {
        *minimum = planner.least.cost.peak_bytes;
        ret = ROTOR_ERR_INFEASIBLE;
        goto out;
    }
found:
    rotor_program_free(program);
    *program = planner.pool[0].program;
    rotor_program_init(&planner.pool[0].program);
    *cost = planner.pool[0].cost;
out:
    rotor_planner_end(&planner);
    return ret;
}
