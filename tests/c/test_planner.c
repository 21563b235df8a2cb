#include "planner_pool.h"
#include "planner_spans.h"
#include "plans.h"
#include "slots.h"

static void test_plans_are_valid_and_fit(void) {
    rotor_planner_options_t options = {.random_runs = 5, .moves = 3000, .seed = 1};
    int32_t feasible = 0;
    for (uint64_t seed = 1; seed < 30; seed++) {
        rotor_dataflow_t graph;
        rotor_plan_t plan = {.cost = {0}};
        build(&graph, 3 + (int64_t)(seed % 20), seed);
        int64_t budget = in_order(&graph, &plan.program) * (int64_t)(75 + seed) / 105;
        int ret = rotor_planner_plan(&graph, budget, &options, NULL, &plan);
        if (ret == ROTOR_ERR_INFEASIBLE) {
            CHECK(plan.cost.peak_bytes > budget);
            budget = plan.cost.peak_bytes;
            ret = rotor_planner_plan(&graph, budget, &options, NULL, &plan);
        } else {
            feasible++;
        }
        CHECK(ret == ROTOR_OK);
        check_plan(&graph, NULL, &plan, budget);
        rotor_program_free(&plan.program);
        rotor_dataflow_free(&graph);
    }
    CHECK(feasible > 15);
}

static void test_a_start_is_repaired(void) {
    for (uint64_t seed = 1; seed < 12; seed++) {
        rotor_planner_options_t options = {.random_runs = 2, .moves = 500, .seed = 1};
        rotor_dataflow_t graph;
        rotor_program_t start;
        rotor_plan_t plan = {.cost = {0}};
        rotor_program_init(&start);
        build(&graph, 6 + (int64_t)seed, seed);
        int64_t most = in_order(&graph, &start);
        CHECK(rotor_planner_plan(&graph, 1, &options, NULL, &plan) == ROTOR_ERR_INFEASIBLE);
        int64_t budget = (plan.cost.peak_bytes + most) / 2;
        options.start = &start;
        options.random_runs = 0;
        CHECK(rotor_planner_plan(&graph, budget, &options, NULL, &plan) == ROTOR_OK);
        CHECK(plan.cost.peak_bytes <= budget);
        CHECK(start.length == graph.operation_count);
        rotor_program_free(&start);
        rotor_program_free(&plan.program);
        rotor_dataflow_free(&graph);
    }
}

static int64_t level_of(const rotor_slots_t *slots, int32_t slot) {
    const rotor_dataflow_t *g = slots->graph;
    int64_t level = 0;
    for (int32_t s = 0; s < g->storage_count; s++) {
        const rotor_events_t *events = &slots->events[s];
        for (int32_t k = 0; k < events->count; k++) {
            if (!rotor_slots_makes(slots, s, k)) {
                continue;
            }
            int32_t end = events->slots[k];
            for (int32_t j = k + 1; j < events->count && !rotor_slots_makes(slots, s, j); j++) {
                end = events->slots[j];
            }
            if (g->lazy[s] && end == events->slots[k]) {
                continue;
            }
            end = g->pinned[s] && k == 0           ? slots->slot_count
                  : g->pinned[s] == ROTOR_KEPT ? events->slots[k]
                                               : end;
            level += events->slots[k] <= slot && slot <= end ? slots->size[s] : 0;
            level += g->lazy[s] && slot == events->slots[k] ? slots->tape_more[g->producer[s]] : 0;
        }
    }
    int32_t op = slots->op_at[slot];
    return level + (op >= 0 ? slots->workspace[op] : 0);
}

static void check_levels(const rotor_slots_t *slots) {
    int64_t most = 0;
    int32_t at = 0;
    for (int32_t k = 0; k < slots->slot_count; k++) {
        int64_t level = level_of(slots, k);
        CHECK(level_at(&slots->levels, k) == level);
        most = rotor_max(most, level);
    }
    CHECK(rotor_levels_most(&slots->levels, &at) == most && level_of(slots, at) == most);
    CHECK(rotor_levels_most_within(&slots->levels, 0, slots->slot_count - 1) == most);
    CHECK(rotor_levels_most_within(&slots->levels, 3, 2) == 0);
}

/* Runs are added and removed at random: levels and validity stay right, and undoing restores all. */
static void test_slots(void) {
    for (uint64_t seed = 1; seed < 12; seed++) {
        rotor_dataflow_t graph;
        rotor_program_t program;
        rotor_program_t other;
        rotor_slots_t slots = {.link = NULL};
        rotor_random_t random;
        rotor_cost_t cost;
        rotor_program_init(&program);
        rotor_program_init(&other);
        rotor_random_init(&random, seed);
        build(&graph, 12, seed);
        int64_t peak = in_order(&graph, &program);
        CHECK(rotor_slots_load(&slots, &graph, program.ops, program.length) == ROTOR_OK);
        CHECK(slots.unit == 1 && rotor_levels_most(&slots.levels, NULL) == peak);
        check_levels(&slots);
        for (int32_t k = 0; k < 200; k++) {
            int32_t slot = rotor_random_below(&random, slots.slot_count);
            int32_t op = rotor_random_below(&random, graph.operation_count);
            int32_t first = slots.op_at[slot] >= 0 ? -1 : 0;
            for (int32_t j = 0; first == 0 && j < slots.slot_count; j++) {
                first = slots.op_at[j] == op ? j : 0;
            }
            if (first < 0 && rotor_slots_removable(&slots, slot)) {
                bool useless = rotor_slots_useless(&slots, slot);
                int32_t before = rotor_levels_most(&slots.levels, NULL);
                CHECK(rotor_slots_remove(&slots, slot) == ROTOR_OK);
                CHECK(!useless || rotor_levels_most(&slots.levels, NULL) <= before);
            } else if (first > 0 && first < slot && !rotor_dataflow_once(&graph, op)) {
                CHECK(rotor_slots_add(&slots, slot, op) == ROTOR_OK);
            }
            CHECK(rotor_slots_store(&slots, &other) == ROTOR_OK);
            int ret = rotor_program_simulate(&graph, NULL, other.ops, other.length, &cost, NULL,
                                             NULL, NULL);
            CHECK(rotor_spans_tapes_hold(&slots) == (ret != ROTOR_ERR_NO_TAPE));
            if (ret == ROTOR_ERR_NO_TAPE) {
                CHECK(with_tapes);
                rotor_slots_undo(&slots, slots.change_count - 1);
                continue;
            }
            CHECK(ret == ROTOR_OK);
            CHECK(cost.time_ns == slots.time_ns);
            CHECK(cost.peak_bytes == rotor_levels_most(&slots.levels, NULL));
            CHECK(slots_fault(&slots) == NULL);
        }
        check_levels(&slots);
        CHECK(slots.change_count > 20);
        rotor_slots_undo(&slots, 0);
        check_levels(&slots);
        CHECK(slots_fault(&slots) == NULL);
        int32_t *broken[] = {&slots.runs[0], &slots.levels.block_most[0], &slots.op_at[0],
                             &slots.repeated_at[1], &slots.events[0].slots[0]};
        for (size_t k = 0; k < sizeof(broken) / sizeof(broken[0]); k++) {
            int32_t was = *broken[k];
            *broken[k] = slots.slot_count - 1 - was;
            CHECK(slots_fault(&slots) != NULL);
            *broken[k] = was;
        }
        slots.time_ns++;
        CHECK(slots_fault(&slots) != NULL);
        CHECK(rotor_slots_store(&slots, &other) == ROTOR_OK);
        CHECK(other.length == program.length &&
              memcmp(other.ops, program.ops, (size_t)program.length * sizeof(int32_t)) == 0);
        rotor_slots_free(&slots);
        rotor_program_free(&program);
        rotor_program_free(&other);
        rotor_dataflow_free(&graph);
    }
}

enum { POINTS = 7 };

static void test_curve(void) {
    rotor_planner_options_t options = {.random_runs = 2, .moves = 500, .seed = 1};
    rotor_dataflow_t graph;
    rotor_plan_t plans[POINTS];
    rotor_plan_t lowest = {.cost = {0}};
    rotor_plan_t refused = {.cost = {0}};
    int64_t count = 0;
    memset(plans, 0, sizeof(plans));
    build(&graph, 15, 3);
    CHECK(rotor_planner_curve(&graph, 0, &options, NULL, plans, &count, &lowest) ==
          ROTOR_ERR_BAD_LENGTH);
    CHECK(rotor_planner_curve(&graph, POINTS, &options, NULL, plans, &count, &lowest) == ROTOR_OK);
    CHECK(count == POINTS && plans[count - 1].cost.time_ns == graph.total_cost_ns);
    CHECK(rotor_planner_plan(&graph, 1, &options, NULL, &refused) == ROTOR_ERR_INFEASIBLE);
    int64_t least = lowest.cost.peak_bytes;
    CHECK(refused.cost.peak_bytes == least && refused.program.length == lowest.program.length);
    CHECK(rotor_planner_plan(&graph, least, &options, NULL, &refused) == ROTOR_OK);
    check_plan(&graph, NULL, &refused, least);
    for (int64_t k = 0; k < count; k++) {
        check_plan(&graph, NULL, &plans[k], INT64_MAX);
    }
    rotor_program_free(&refused.program);
    rotor_program_free(&lowest.program);
    free_plans(plans, POINTS);
    rotor_dataflow_free(&graph);
}

static bool stop_at(void *context, int64_t done, int64_t total) {
    (void)done;
    (void)total;
    return --*(int64_t *)context > 0;
}

static void test_interrupted(void) {
    rotor_planner_options_t options = {.random_runs = 50, .moves = 10000000, .seed = 1};
    rotor_dataflow_t graph;
    rotor_plan_t plan = {.cost = {0}};
    int64_t left = 3;
    rotor_callback_t callback = {stop_at, &left};
    build(&graph, 60, 5);
    int64_t budget = in_order(&graph, &plan.program) * 9 / 10;
    rotor_program_free(&plan.program);
    CHECK(rotor_planner_plan(&graph, budget, &options, &callback, &plan) == ROTOR_ERR_INTERRUPTED);
    CHECK(plan.program.ops == NULL && left == 0);
    CHECK(rotor_planner_plan(&graph, 0, &options, NULL, &plan) == ROTOR_ERR_BAD_BUDGET);
    options.time_limit_ns = 50000000;
    CHECK(rotor_planner_plan(&graph, budget, &options, NULL, &plan) == ROTOR_OK);
    rotor_program_free(&plan.program);
    rotor_dataflow_free(&graph);
}

/* Nothing is asked after an interruption, wherever it comes. */
static void test_interrupted_anywhere(void) {
    rotor_planner_options_t options = {.random_runs = 2, .moves = 1000, .seed = 1};
    rotor_dataflow_t graph;
    rotor_plan_t plan = {.cost = {0}};
    int ret = ROTOR_ERR_INTERRUPTED;
    int64_t calls = 0;
    build(&graph, 20, 5);
    while (ret == ROTOR_ERR_INTERRUPTED) {
        int64_t left = calls += calls / 4 + 1;
        rotor_callback_t callback = {stop_at, &left};
        ret = rotor_planner_plan(&graph, 1, &options, &callback, &plan);
        CHECK(left == 0 || (ret == ROTOR_ERR_INFEASIBLE && left > 0));
        rotor_program_free(&plan.program);
    }
    CHECK(calls > 20);
    rotor_dataflow_free(&graph);
}

static void test_out_of_memory(void) {
    rotor_planner_options_t options = {.random_runs = 2, .moves = 50, .seed = 1};
    rotor_dataflow_t graph;
    rotor_plan_t plans[POINTS];
    rotor_plan_t plan = {.cost = {0}};
    int64_t count = 0;
    int ret = ROTOR_ERR_NO_MEMORY;
    memset(plans, 0, sizeof(plans));
    build(&graph, 6, 9);
    for (int64_t n = 1; ret != ROTOR_OK; n++) {
        rotor_testing_fail_after(n);
        ret = rotor_planner_curve(&graph, POINTS, &options, NULL, plans, &count, &plan);
        rotor_testing_fail_after(0);
        CHECK(ret == ROTOR_OK || ret == ROTOR_ERR_NO_MEMORY);
        CHECK(ret == ROTOR_OK || plans[0].program.ops == NULL);
    }
    free_plans(plans, POINTS);
    ret = ROTOR_ERR_NO_MEMORY;
    int64_t budget = in_order(&graph, &plan.program) * 7 / 10;
    for (int64_t n = 1; ret == ROTOR_ERR_NO_MEMORY; n++) {
        rotor_testing_fail_after(n);
        ret = rotor_planner_plan(&graph, budget, &options, NULL, &plan);
        rotor_testing_fail_after(0);
        CHECK(ret == ROTOR_OK || ret == ROTOR_ERR_INFEASIBLE || ret == ROTOR_ERR_NO_MEMORY);
    }
    rotor_program_free(&plan.program);
    rotor_dataflow_free(&graph);
}

static void test_tapes(void) {
    with_tapes = true;
    test_plans_are_valid_and_fit();
    test_slots();
    with_tapes = false;
}

static const test_case_t cases[] = {
    {"plans_are_valid_and_fit", test_plans_are_valid_and_fit},
    {"a_start_is_repaired", test_a_start_is_repaired},
    {"slots", test_slots},
    {"tapes", test_tapes},
    {"curve", test_curve},
    {"interrupted", test_interrupted},
    {"interrupted_anywhere", test_interrupted_anywhere},
    {"out_of_memory", test_out_of_memory},
};

TEST_MAIN(cases)
