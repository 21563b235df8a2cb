#include "planner_clocks.h"
#include "planner_pool.h"
#include "plans.h"
#include "slots.h"

static const rotor_link_t plain = {.write_bytes_per_s = 1e11,
                                   .read_bytes_per_s = 1e11,
                                   .host_bytes = INT64_MAX,
                                   .least_bytes = 1,
                                   .padding_bytes = 7};

/* The clocks, levels and host bytes of the slots against those of the simulator, where it is valid. */
static bool agrees(const rotor_slots_t *slots, rotor_clock_blocks_t *clocks) {
    rotor_program_t program;
    rotor_cost_t cost = {0};
    rotor_program_init(&program);
    CHECK(slots_fault(slots) == NULL);
    CHECK(rotor_slots_store(slots, &program) == ROTOR_OK);
    int ret = rotor_program_simulate(slots->graph, slots->link, program.ops, program.length, &cost,
                                     NULL, NULL, NULL);
    if (ret == ROTOR_OK) {
        CHECK(rotor_clock_blocks_try(clocks, slots) == cost.time_ns);
        CHECK(slots->moving.link_ns == cost.link_ns && slots->time_ns == cost.compute_ns);
        CHECK(rotor_levels_most(&slots->levels, NULL) == cost.peak_bytes);
        CHECK(rotor_levels_most(&slots->moving.host, NULL) == cost.host_bytes);
    }
    rotor_program_free(&program);
    return ret == ROTOR_OK;
}

/* An item that may go into an empty slot, -1 for none. */
static int32_t any_item(const rotor_slots_t *slots, int32_t slot, rotor_random_t *random) {
    const rotor_dataflow_t *g = slots->graph;
    int32_t s = rotor_random_below(random, g->storage_count);
    int32_t finish = rotor_slots_finish(slots, s);
    if (rotor_random_below(random, 2) == 0) {
        int32_t op = rotor_random_below(random, g->operation_count);
        bool is_ready = !rotor_dataflow_once(g, op) && g->flags[op] == 0;
        for (int32_t j = g->input_start[op]; j < g->input_start[op + 1]; j++) {
            is_ready = is_ready && rotor_events_below(&slots->events[g->inputs[j]], slot) > 0;
        }
        for (int32_t j = g->output_start[op]; j < g->output_start[op + 1]; j++) {
            is_ready = is_ready && rotor_events_below(&slots->events[g->outputs[j]], slot) > 0;
        }
        return is_ready ? op : -1;
    }
    if (slots->moving.read_ns[s] < 0 || rotor_dataflow_is_home(g, s) || rotor_events_below(&slots->events[s], slot) == 0) {
        return -1;
    }
    return finish < 0      ? rotor_item_finish(g, s)
           : finish < slot ? rotor_item_fetch(g, s)
                           : -1;
}

static bool may_go(const rotor_slots_t *slots, int32_t slot) {
    const rotor_dataflow_t *g = slots->graph;
    int32_t item = slots->op_at[slot];
    if (item < 0 || rotor_item_is_run(g, item)) {
        return item >= 0 && rotor_slots_removable(slots, slot);
    }
    return rotor_item_is_fetch(g, item) ||
           slots->moving.actions[rotor_item_storage(g, item)] == 1;
}

static void test_slots(void) {
    int32_t valid = 0;
    for (uint64_t seed = 1; seed < 40; seed++) {
        rotor_dataflow_t graph;
        rotor_program_t program;
        rotor_slots_t slots = {.link = NULL};
        rotor_clock_blocks_t clocks = {.kept = NULL};
        rotor_random_t random;
        rotor_link_t link = plain;
        link.duplex = seed % 2 == 0;
        link.latency_ns = (int64_t)(seed % 3);
        rotor_program_init(&program);
        rotor_random_init(&random, seed);
        build(&graph, 5 + (int64_t)(seed % 20), seed);
        (void)in_order(&graph, &program);
        slots.link = &link;
        CHECK(rotor_slots_load(&slots, &graph, program.ops, program.length) == ROTOR_OK);
        CHECK(rotor_clock_blocks_load(&clocks, &slots) == ROTOR_OK);
        for (int32_t k = 0; k < 300; k++) {
            int32_t slot = rotor_random_below(&random, slots.slot_count);
            if (slots.op_at[slot] < 0) {
                int32_t item = any_item(&slots, slot, &random);
                CHECK(item < 0 || rotor_slots_add(&slots, slot, item) == ROTOR_OK);
            } else if (may_go(&slots, slot)) {
                CHECK(rotor_slots_remove(&slots, slot) == ROTOR_OK);
            }
            if (k % 10 == 0 && agrees(&slots, &clocks)) {
                valid++;
                if (rotor_random_below(&random, 2) == 0) {
                    rotor_clock_blocks_keep(&clocks, &slots);
                    slots.change_count = 0;
                } else {
                    rotor_slots_undo(&slots, 0);
                    rotor_slots_settle(&slots);
                    CHECK(agrees(&slots, &clocks));
                }
            }
        }
        rotor_clock_blocks_free(&clocks);
        rotor_slots_free(&slots);
        CHECK(slots.link == &link);
        rotor_program_free(&program);
        rotor_dataflow_free(&graph);
    }
    CHECK(valid > 100);
}

/* Never slower than without the tier, within the budget and what the tier may hold; a seed gives one
 * program. */
static void test_plans(void) {
    int32_t faster = 0;
    for (uint64_t seed = 1; seed < 16; seed++) {
        rotor_planner_options_t options = {.random_runs = 2, .moves = 3000, .seed = seed};
        rotor_dataflow_t graph;
        rotor_plan_t plans[3];
        rotor_link_t link = plain;
        link.duplex = seed % 3 == 0;
        link.host_bytes = seed % 4 == 0 ? 600 : INT64_MAX;
        memset(plans, 0, sizeof(plans));
        build(&graph, 6 + (int64_t)seed, seed);
        int64_t most = in_order(&graph, &plans[0].program);
        CHECK(rotor_planner_plan(&graph, 1, &options, NULL, &plans[0]) == ROTOR_ERR_INFEASIBLE);
        int64_t budget = plans[0].cost.peak_bytes + (most - plans[0].cost.peak_bytes) / 4;
        CHECK(rotor_planner_plan(&graph, budget, &options, NULL, &plans[0]) == ROTOR_OK);
        options.link = &link;
        for (int k = 1; k < 3; k++) {
            CHECK(rotor_planner_plan(&graph, budget, &options, NULL, &plans[k]) == ROTOR_OK);
            check_plan(&graph, &link, &plans[k], budget);
            CHECK(plans[k].cost.time_ns <= plans[0].cost.time_ns);
        }
        CHECK(plans[1].program.length == plans[2].program.length &&
              memcmp(plans[1].program.ops, plans[2].program.ops,
                     (size_t)plans[1].program.length * sizeof(*plans[1].program.ops)) == 0);
        faster += plans[1].cost.time_ns < plans[0].cost.time_ns;
        options.start = &plans[1].program;
        CHECK(rotor_planner_plan(&graph, budget, &options, NULL, &plans[2]) == ROTOR_OK);
        CHECK(plans[2].cost.time_ns <= plans[1].cost.time_ns);
        free_plans(plans, 3);
        rotor_dataflow_free(&graph);
    }
    CHECK(faster >= 8);
}

/* Plans in which parameters are read again have the simulator's price, and the clocks of the search. */
static void test_homes(void) {
    int32_t repeated = 0;
    with_homes = true;
    test_slots();
    for (uint64_t seed = 1; seed < 16; seed++) {
        rotor_planner_options_t options = {.random_runs = 2, .moves = 3000, .seed = seed};
        rotor_dataflow_t graph;
        rotor_plan_t plan = {.cost = {0}};
        rotor_link_t link = plain;
        link.duplex = seed % 3 == 0;
        options.link = &link;
        build(&graph, 4 + (int64_t)seed, seed);
        int64_t most = in_order(&graph, &plan.program);
        CHECK(rotor_planner_plan(&graph, 1, &options, NULL, &plan) == ROTOR_ERR_INFEASIBLE);
        int64_t budget = plan.cost.peak_bytes + (most - plan.cost.peak_bytes) / 4;
        CHECK(rotor_planner_plan(&graph, budget, &options, NULL, &plan) == ROTOR_OK);
        check_plan(&graph, &link, &plan, budget);
        for (int64_t k = 0, gets = 0; k < plan.program.length; k++) {
            int32_t item = plan.program.ops[k];
            gets += rotor_item_is_run(&graph, item) && graph.clock[item] == ROTOR_READS;
            repeated += gets == 5 + (int64_t)seed;
        }
        rotor_program_free(&plan.program);
        rotor_dataflow_free(&graph);
    }
    with_homes = false;
    CHECK(repeated > 0);
}

/* An operation that reads has one output and nothing else; one that writes runs once and has none. */
static void test_wrong_clocks(void) {
    rotor_dataflow_t graph;
    draw_homes(&drawing, 3, 1);
    rotor_dataflow_arrays_t arrays = arrays_of(&drawing);
    rotor_dataflow_init(&graph);
    drawing.clock[4] = ROTOR_READS; /* it has inputs */
    CHECK(rotor_dataflow_build(&graph, &arrays) == ROTOR_ERR_BAD_OPERATION);
    drawing.clock[4] = ROTOR_WRITES; /* it has an output */
    CHECK(rotor_dataflow_build(&graph, &arrays) == ROTOR_ERR_BAD_OPERATION);
    drawing.clock[4] = 3;
    CHECK(rotor_dataflow_build(&graph, &arrays) == ROTOR_ERR_BAD_OPERATION);
    drawing.clock[4] = ROTOR_COMPUTES;
    drawing.pinned[0] = 1;
    CHECK(rotor_dataflow_build(&graph, &arrays) == ROTOR_ERR_BAD_OPERATION);
}

static int64_t sum_of(const rotor_program_t *program) {
    int64_t sum = 0;
    for (int64_t k = 0; k < program->length; k++) {
        sum += (program->ops[k] + 1) * (int64_t)(program->ops[k] + 7);
    }
    return sum;
}

/* A walk with a link is a valid program of runs and moves, and stays so when its fetches go earlier: the
 * items are the same, the peak is within the budget, and it mostly waits less. */
static void test_walks(void) {
    int32_t moved = 0;
    int32_t sooner = 0;
    int32_t later = 0;
    for (uint64_t seed = 1; seed < 60; seed++) {
        rotor_dataflow_t graph;
        rotor_program_t program;
        rotor_greedy_t greedy = {.graph = NULL};
        rotor_prefetch_t prefetch = {.capacity = 0};
        rotor_random_t random;
        rotor_setting_t setting;
        rotor_stop_t stop = {.callback = NULL};
        rotor_link_t link = plain;
        rotor_pricer_t pricer = {.link = NULL};
        int32_t order[4096];
        link.duplex = seed % 2 == 0;
        rotor_program_init(&program);
        rotor_random_init(&random, seed);
        build(&graph, 10 + (int64_t)(seed % 20), seed);
        int64_t budget = in_order(&graph, &program) * 2 / 3;
        CHECK(graph.operation_count <= 4096);
        memcpy(order, program.ops, (size_t)program.length * sizeof(*order));
        rotor_setting_random(&random, &setting);
        setting.transfer_price = 0.25 * (double)(seed % 4);
        setting.slack = 0.9;
        greedy.tier.link = pricer.link = &link;
        CHECK(rotor_greedy_prepare(&greedy, &graph, order) == ROTOR_OK);
        int ret = rotor_greedy_walk(&greedy, budget, &setting, &random, 40000, &stop, &program);
        CHECK(ret == ROTOR_OK || ret == ROTOR_ERR_INFEASIBLE);
        if (ret == ROTOR_OK) {
            CHECK(rotor_pricer_prune(&pricer, &graph, &program) == ROTOR_OK);
            rotor_cost_t cost = price_of(&graph, &link, &program);
            int64_t sum = sum_of(&program);
            int64_t length = program.length;
            CHECK(rotor_prefetch(&prefetch, &graph, &link, budget, &program) == ROTOR_OK);
            CHECK(sum_of(&program) == sum && program.length == length);
            rotor_cost_t early = price_of(&graph, &link, &program);
            CHECK(early.peak_bytes <= (cost.peak_bytes > budget ? cost.peak_bytes : budget));
            CHECK(early.compute_ns == cost.compute_ns && early.link_ns == cost.link_ns);
            moved += cost.link_ns > 0;
            sooner += early.time_ns < cost.time_ns;
            later += early.time_ns > cost.time_ns;
        }
        rotor_greedy_free(&greedy);
        CHECK(greedy.tier.link == &link);
        rotor_prefetch_free(&prefetch);
        rotor_pricer_free(&pricer);
        rotor_program_free(&program);
        rotor_dataflow_free(&graph);
    }
    CHECK(moved >= 30);
    CHECK(sooner >= 20 && later <= sooner / 10);
}

/* The walks alone, without any search, beat recomputation; a seed gives one answer. */
static void test_starts(void) {
    int32_t faster = 0;
    for (uint64_t seed = 1; seed < 16; seed++) {
        rotor_planner_options_t options = {.random_runs = 4, .moves = 0, .seed = seed};
        rotor_dataflow_t graph;
        rotor_plan_t plan = {.cost = {0}};
        int64_t times[2] = {-1, -1};
        build(&graph, 20 + (int64_t)seed, seed);
        int64_t budget = in_order(&graph, &plan.program) * 2 / 3;
        bool fits = rotor_planner_plan(&graph, budget, &options, NULL, &plan) == ROTOR_OK;
        for (int32_t turn = 0; turn < 2; turn++) {
            rotor_planner_t planner;
            rotor_stop_t whole = {.callback = NULL};
            CHECK(rotor_planner_begin(&planner, &graph, &plain, seed, 0, &whole) == ROTOR_OK);
            rotor_planner_aim(&planner, budget);
            CHECK(rotor_planner_walks(&planner, budget, 10) == ROTOR_OK);
            for (int32_t k = 0; k < planner.pool_count; k++) {
                check_plan(&graph, &plain, &planner.pool[k], budget);
                CHECK(k == 0 || planner.pool[k].cost.time_ns > planner.pool[k - 1].cost.time_ns);
            }
            times[turn] = planner.pool_count > 0 ? planner.best.cost.time_ns : 0;
            rotor_planner_end(&planner);
        }
        CHECK(times[0] == times[1]);
        faster += times[0] > 0 && (!fits || times[0] < plan.cost.time_ns);
        rotor_program_free(&plan.program);
        rotor_dataflow_free(&graph);
    }
    CHECK(faster >= 8);
}

static bool stop_after(void *context, int64_t done, int64_t total) {
    int64_t *left = context;
    CHECK(done <= total);
    return (*left)-- > 0;
}

static void test_interrupted(void) {
    rotor_planner_options_t options = {
        .link = &plain, .random_runs = 2, .moves = 100000, .seed = 3};
    rotor_dataflow_t graph;
    rotor_plan_t plan = {.cost = {0}};
    build(&graph, 40, 5);
    int64_t budget = in_order(&graph, &plan.program) / 2;
    for (int64_t calls = 0; calls < 400; calls += 40) {
        int64_t left = calls;
        rotor_callback_t callback = {.keep_going = stop_after, .context = &left};
        int ret = rotor_planner_plan(&graph, budget, &options, &callback, &plan);
        CHECK(ret == ROTOR_ERR_INTERRUPTED || (ret == ROTOR_OK && left >= 0));
    }
    options.time_limit_ns = 1;
    int ret = rotor_planner_plan(&graph, budget, &options, NULL, &plan);
    CHECK(ret == ROTOR_OK || ret == ROTOR_ERR_INFEASIBLE);
    rotor_program_free(&plan.program);
    rotor_dataflow_free(&graph);
}

static void test_infeasible(void) {
    rotor_planner_options_t options = {.link = &plain, .random_runs = 1, .moves = 200};
    rotor_dataflow_t graph;
    rotor_plan_t plan = {.cost = {0}};
    rotor_link_t wrong = plain;
    build(&graph, 10, 2);
    CHECK(rotor_planner_plan(&graph, 1, &options, NULL, &plan) == ROTOR_ERR_INFEASIBLE);
    CHECK(plan.cost.peak_bytes > 1);
    CHECK(price_of(&graph, &plain, &plan.program).peak_bytes == plan.cost.peak_bytes);
    CHECK(rotor_planner_plan(&graph, 0, &options, NULL, &plan) == ROTOR_ERR_BAD_BUDGET);
    wrong.latency_ns = -1;
    options.link = &wrong;
    CHECK(rotor_planner_plan(&graph, 1, &options, NULL, &plan) == ROTOR_ERR_NEGATIVE_TIME);
    rotor_program_free(&plan.program);
    rotor_dataflow_free(&graph);
}

enum { POINTS = 5 };

static void test_curve(void) {
    rotor_planner_options_t options = {.link = &plain, .random_runs = 1, .moves = 300, .seed = 2};
    int ret = ROTOR_ERR_NO_MEMORY;
    for (int64_t n = 0; n < 2 || ret == ROTOR_ERR_NO_MEMORY; n++) {
        rotor_dataflow_t graph;
        rotor_plan_t plans[2 * POINTS];
        rotor_plan_t lowest = {.cost = {0}};
        int64_t count = 0;
        int64_t joint = 0;
        build(&graph, n == 0 ? 30 : 6, 7);
        memset(plans, 0, sizeof(plans));
        rotor_testing_fail_after(n == 0 ? 0 : n * 7);
        ret = rotor_planner_curve(&graph, POINTS, &options, NULL, plans, &count, &lowest);
        rotor_testing_fail_after(0);
        CHECK(ret == ROTOR_OK || (n > 0 && ret == ROTOR_ERR_NO_MEMORY));
        for (int64_t k = 0; k < count && ret == ROTOR_OK; k++) {
            check_plan(&graph, &plain, &plans[k], INT64_MAX);
            joint += plans[k].cost.link_ns > 0;
        }
        CHECK(n > 0 || joint > 0);
        rotor_program_free(&lowest.program);
        free_plans(plans, ret == ROTOR_OK ? 2 * POINTS : 0);
        rotor_dataflow_free(&graph);
    }
}

static void test_out_of_memory(void) {
    rotor_planner_options_t options = {.link = &plain, .random_runs = 0, .moves = 200, .seed = 1};
    rotor_dataflow_t graph;
    rotor_plan_t plan = {.cost = {0}};
    int ret = ROTOR_ERR_NO_MEMORY;
    build(&graph, 8, 4);
    int64_t budget = in_order(&graph, &plan.program) * 3 / 5;
    for (int64_t n = 1; ret == ROTOR_ERR_NO_MEMORY; n++) {
        rotor_testing_fail_after(n);
        ret = rotor_planner_plan(&graph, budget, &options, NULL, &plan);
        rotor_testing_fail_after(0);
    }
    CHECK(ret == ROTOR_OK);
    rotor_program_free(&plan.program);
    rotor_dataflow_free(&graph);
}

static const test_case_t cases[] = {
    {"slots", test_slots},
    {"walks", test_walks},
    {"starts", test_starts},
    {"plans", test_plans},
    {"homes", test_homes}, {"wrong_clocks", test_wrong_clocks},
    {"curve", test_curve},
    {"interrupted", test_interrupted}, {"infeasible", test_infeasible},
    {"out_of_memory", test_out_of_memory},
};

TEST_MAIN(cases)
