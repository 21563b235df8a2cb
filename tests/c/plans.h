/* Graphs and checks for the tests of the planner. */
#ifndef ROTOR_TESTS_PLANS_H
#define ROTOR_TESTS_PLANS_H

#include "dataflows.h"
#include "planner.h"
#include "testing.h"

static drawing_t drawing;
static bool with_tapes;
static bool with_homes;

static void build(rotor_dataflow_t *graph, int64_t layers, uint64_t seed) {
    if (with_tapes) {
        draw_tapes(&drawing, layers, seed);
    } else if (with_homes) {
        draw_homes(&drawing, layers, seed);
    } else {
        draw_training(&drawing, layers, seed);
    }
    rotor_dataflow_arrays_t arrays = arrays_of(&drawing);
    rotor_dataflow_init(graph);
    CHECK(rotor_dataflow_build(graph, &arrays) == ROTOR_OK);
}

static rotor_cost_t price_of(const rotor_dataflow_t *graph, const rotor_link_t *link,
                             const rotor_program_t *program) {
    rotor_cost_t cost = {0};
    CHECK(rotor_program_simulate(graph, link, program->ops, program->length, &cost, NULL, NULL,
                                 NULL) == ROTOR_OK);
    return cost;
}

/* The peak of the plain order, and the order. */
static int64_t in_order(const rotor_dataflow_t *graph, rotor_program_t *program) {
    program->length = 0;
    for (int32_t k = 0; k < graph->operation_count; k++) {
        CHECK(rotor_program_append(program, k) == ROTOR_OK);
    }
    return price_of(graph, NULL, program).peak_bytes;
}

/* A plan has the price that it says, within a budget. */
static void check_plan(const rotor_dataflow_t *graph, const rotor_link_t *link,
                       const rotor_plan_t *plan, int64_t budget) {
    rotor_cost_t again = price_of(graph, link, &plan->program);
    CHECK(again.time_ns == plan->cost.time_ns && again.peak_bytes == plan->cost.peak_bytes);
    CHECK(again.compute_ns == plan->cost.compute_ns && again.link_ns == plan->cost.link_ns);
    CHECK(again.peak_bytes <= budget);
    CHECK(link == NULL || again.host_bytes <= link->host_bytes);
}

static void free_plans(rotor_plan_t *plans, int64_t count) {
    for (int64_t k = 0; k < count; k++) {
        rotor_program_free(&plans[k].program);
    }
}

#endif
