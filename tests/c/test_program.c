#include "program.h"

#include "dataflows.h"
#include "testing.h"

static drawing_t drawing;

static void build(rotor_dataflow_t *graph) {
    rotor_dataflow_arrays_t arrays = arrays_of(&drawing);
    rotor_dataflow_init(graph);
    CHECK(rotor_dataflow_build(graph, &arrays) == ROTOR_OK);
}

/* a (100 bytes) -> b (50, workspace 30) -> c (10, pinned, backward) */
static void draw_three(void) {
    memset(&drawing, 0, sizeof(drawing));
    int64_t a = draw(&drawing, 0, 7, 100, -1, -1, -1);
    int64_t b = draw(&drawing, 0, 5, 50, a, a, -1);
    int64_t c = draw(&drawing, 2, 3, 10, b, -1, -1);
    drawing.workspace[1] = 30;
    drawing.pinned[c] = 1;
}

static void test_build(void) {
    rotor_dataflow_t graph;
    int64_t bound = 0;
    draw_three();
    build(&graph);
    CHECK(graph.operation_count == 3 && graph.storage_count == 3);
    CHECK(graph.input_start[2] == 1 && graph.inputs[0] == 0); /* twice read, once listed */
    CHECK(graph.user_start[1] == 1 && graph.users[0] == 1 && graph.producer[2] == 2);
    CHECK(graph.total_cost_ns == 15 && graph.total_bytes == 190);
    CHECK(rotor_dataflow_lower_bound(&graph, &bound) == ROTOR_OK && bound == 180);
    rotor_dataflow_free(&graph);
    rotor_dataflow_free(&graph);
}

static int build_with(void (*change)(drawing_t *)) {
    rotor_dataflow_t graph;
    draw_three();
    change(&drawing);
    rotor_dataflow_arrays_t arrays = arrays_of(&drawing);
    rotor_dataflow_init(&graph);
    int ret = rotor_dataflow_build(&graph, &arrays);
    CHECK(ret == ROTOR_OK || graph.operation_count == 0);
    rotor_dataflow_free(&graph);
    return ret;
}

static void no_operations(drawing_t *d) { d->count = 0; }
static void negative_cost(drawing_t *d) { d->cost[1] = -1; }
static void large_cost(drawing_t *d) { d->cost[1] = ROTOR_MAX_VALUE + 1; }
static void negative_size(drawing_t *d) { d->bytes[1] = -1; }
static void large_workspace(drawing_t *d) { d->workspace[1] = ROTOR_MAX_VALUE + 1; }
static void bad_phase(drawing_t *d) { d->phase[1] = 3; }
static void early_phase(drawing_t *d) { d->phase[0] = 2; }
static void bad_flag(drawing_t *d) { d->flags[1] = 4; }
static void bad_pinned(drawing_t *d) { d->pinned[1] = 3; }
static void low_workspace(drawing_t *d) { d->workspace[1] = -51; }
static drawing_t *set_tapes(drawing_t *d, int64_t lazy) {
    d->has_tapes = true;
    d->lazy[1] = lazy;
    return d;
}
static void pinned_tape(drawing_t *d) { set_tapes(d, 1)->pinned[1] = 1; }
static void bad_tape(drawing_t *d) { (void)set_tapes(d, 2); }
static void low_light(drawing_t *d) { set_tapes(d, 1)->light[1] = -1; }
static void large_light(drawing_t *d) {
    d->has_tapes = true;
    d->light[1] = ROTOR_MAX_VALUE + 1;
}
static void two_tapes(drawing_t *d) {
    set_tapes(d, 1)->lazy[3] = 1;
    d->outputs[2] = 3; /* b makes 1 and 3, c makes 2 */
    d->outputs[3] = 2;
    d->output_start[2] = 3;
    d->output_start[3] = 4;
    d->storages = 4;
}
static void unknown_input(drawing_t *d) { d->inputs[0] = 9; }
static void unknown_output(drawing_t *d) { d->outputs[2] = -1; }
static void late_input(drawing_t *d) { d->inputs[0] = 2; }
static void made_twice(drawing_t *d) { d->outputs[2] = 1; }
static void never_made(drawing_t *d) { d->storages = 4; }
static void bad_starts(drawing_t *d) { d->input_start[1] = 5; }

static void test_build_errors(void) {
    CHECK(build_with(no_operations) == ROTOR_ERR_BAD_LENGTH);
    CHECK(build_with(negative_cost) == ROTOR_ERR_NEGATIVE_TIME);
    CHECK(build_with(large_cost) == ROTOR_ERR_TOO_LARGE);
    CHECK(build_with(negative_size) == ROTOR_ERR_NEGATIVE_SIZE);
    CHECK(build_with(large_workspace) == ROTOR_ERR_TOO_LARGE);
    CHECK(build_with(bad_phase) == ROTOR_ERR_BAD_OPERATION);
    CHECK(build_with(early_phase) == ROTOR_ERR_BAD_OPERATION);
    CHECK(build_with(bad_flag) == ROTOR_ERR_BAD_OPERATION);
    CHECK(build_with(bad_pinned) == ROTOR_ERR_BAD_OPERATION);
    CHECK(build_with(low_workspace) == ROTOR_ERR_NEGATIVE_SIZE);
    CHECK(build_with(low_light) == ROTOR_ERR_NEGATIVE_SIZE);
    CHECK(build_with(large_light) == ROTOR_ERR_TOO_LARGE);
    CHECK(build_with(pinned_tape) == ROTOR_ERR_BAD_OPERATION);
    CHECK(build_with(bad_tape) == ROTOR_ERR_BAD_OPERATION);
    CHECK(build_with(two_tapes) == ROTOR_ERR_BAD_OPERATION);
    CHECK(build_with(unknown_input) == ROTOR_ERR_BAD_OPERATION);
    CHECK(build_with(unknown_output) == ROTOR_ERR_BAD_OPERATION);
    CHECK(build_with(late_input) == ROTOR_ERR_NO_INPUT);
    CHECK(build_with(made_twice) == ROTOR_ERR_TWICE);
    CHECK(build_with(never_made) == ROTOR_ERR_INCOMPLETE);
    CHECK(build_with(bad_starts) == ROTOR_ERR_BAD_LENGTH);
}

static void test_simulate(void) {
    static const int32_t ops[] = {0, 1, 0, 1, 2};
    static const int64_t expected_before[] = {0, 100, 0, 100, 50};
    static const int64_t expected_peak[] = {100, 180, 100, 180, 60};
    rotor_dataflow_t graph;
    rotor_cost_t cost;
    rotor_fault_t fault;
    int64_t before[5];
    int64_t peak[5];
    draw_three();
    build(&graph);
    CHECK(rotor_program_simulate(&graph, NULL, ops, 5, &cost, before, peak, &fault) == ROTOR_OK);
    CHECK(cost.time_ns == 27 && cost.peak_bytes == 180 && fault.kind == ROTOR_FAULT_NONE);
    CHECK(memcmp(before, expected_before, sizeof(before)) == 0);
    CHECK(memcmp(peak, expected_peak, sizeof(peak)) == 0);
    rotor_dataflow_free(&graph);
}

/* What is pinned stays: a second run has a copy for a moment. */
static void test_pinned(void) {
    static const int32_t ops[] = {0, 1, 2, 0, 1, 2};
    rotor_dataflow_t graph;
    rotor_cost_t cost;
    int64_t before[6];
    int64_t peak[6];
    draw_three();
    build(&graph);
    CHECK(rotor_program_simulate(&graph, NULL, ops, 6, &cost, before, peak, NULL) == ROTOR_OK);
    CHECK(before[3] == 10 && before[5] == 60 && peak[5] == 70);
    rotor_dataflow_free(&graph);
}

/* a (100, and a tape of 40) -> b, read by c with the tape: a run without it has another workspace. */
static void draw_tape(void) {
    draw_three();
    drawing.has_tapes = true;
    drawing.lazy[3] = 1;
    drawing.bytes[3] = 40;
    drawing.light[0] = 5;
    drawing.light[1] = 30;
    drawing.workspace[0] = 9;
    drawing.workspace[2] = -10;
    drawing.light[2] = -10;
    drawing.storages = 4;
    memcpy(drawing.outputs, (int64_t[]){0, 3, 1, 2}, 4 * sizeof(int64_t));
    memcpy(drawing.output_start, (int64_t[]){0, 2, 3, 4}, 4 * sizeof(int64_t));
    memcpy(drawing.inputs, (int64_t[]){0, 1, 3}, 3 * sizeof(int64_t));
    memcpy(drawing.input_start, (int64_t[]){0, 0, 1, 3}, 4 * sizeof(int64_t));
}

static void test_tape(void) {
    static const int32_t ops[] = {0, 1, 0, 2};
    static const int64_t expected_before[] = {0, 100, 50, 90};
    static const int64_t expected_peak[] = {105, 180, 199, 90};
    rotor_dataflow_t graph;
    rotor_cost_t cost;
    int64_t before[4];
    int64_t peak[4];
    int64_t bound = 0;
    draw_tape();
    build(&graph);
    CHECK(!graph.is_plain && graph.tape[0] == 3 && graph.tape[1] == -1 && graph.fixed[3] == 1);
    CHECK(rotor_program_simulate(&graph, NULL, ops, 4, &cost, before, peak, NULL) == ROTOR_OK);
    CHECK(memcmp(before, expected_before, sizeof(before)) == 0);
    CHECK(memcmp(peak, expected_peak, sizeof(peak)) == 0);
    CHECK(rotor_dataflow_lower_bound(&graph, &bound) == ROTOR_OK && bound == 180);
    rotor_dataflow_free(&graph);
}

static void expect(const rotor_dataflow_t *graph, const int32_t *ops, int64_t length, int status,
                   enum rotor_fault kind, int64_t position) {
    rotor_cost_t cost = {.time_ns = -1};
    rotor_fault_t fault;
    CHECK(rotor_program_simulate(graph, NULL, ops, length, &cost, NULL, NULL, &fault) == status);
    CHECK(fault.kind == kind && fault.position == position);
    CHECK(cost.time_ns == -1);
}

static void test_faults(void) {
    rotor_dataflow_t graph;
    draw_three();
    drawing.flags[0] = ROTOR_ONCE;
    drawing.flags[1] = ROTOR_RANDOM;
    build(&graph);
    expect(&graph, (const int32_t[]){9}, 1, ROTOR_ERR_BAD_OPERATION, ROTOR_FAULT_OPERATION, 0);
    expect(&graph, (const int32_t[]){0, -1}, 2, ROTOR_ERR_BAD_OPERATION, ROTOR_FAULT_OPERATION, 1);
    expect(&graph, (const int32_t[]){0, 2}, 2, ROTOR_ERR_NO_INPUT, ROTOR_FAULT_INPUT, 1);
    expect(&graph, (const int32_t[]){0, 1, 0}, 3, ROTOR_ERR_TWICE, ROTOR_FAULT_ONCE, 2);
    expect(&graph, (const int32_t[]){0, 1}, 2, ROTOR_ERR_INCOMPLETE, ROTOR_FAULT_MISSING, 2);
    expect(&graph, NULL, 0, ROTOR_ERR_INCOMPLETE, ROTOR_FAULT_MISSING, 0);
    rotor_dataflow_free(&graph);

    memset(&drawing, 0, sizeof(drawing));
    draw(&drawing, 0, 1, 1, -1, -1, -1);
    draw(&drawing, 0, 1, 1, -1, -1, -1);
    draw(&drawing, 2, 1, 1, -1, -1, -1);
    drawing.flags[0] = drawing.flags[1] = ROTOR_RANDOM;
    build(&graph);
    expect(&graph, (const int32_t[]){1, 0, 2}, 3, ROTOR_ERR_BAD_OPERATION, ROTOR_FAULT_ORDER, 1);
    expect(&graph, (const int32_t[]){0, 2, 1}, 3, ROTOR_ERR_BAD_OPERATION, ROTOR_FAULT_PHASE, 2);
    rotor_cost_t cost;
    CHECK(rotor_program_simulate(&graph, NULL, (const int32_t[]){0, 1, 0, 2, 1}, 5, &cost, NULL, NULL,
                                 NULL) == ROTOR_OK);
    CHECK(cost.time_ns == 5);
    rotor_dataflow_free(&graph);
}

/* Random runs go in; pruning leaves a valid program that costs no more. */
static void test_prune(void) {
    rotor_dataflow_t graph;
    rotor_pricer_t pricer = {.link = NULL};
    rotor_program_t program;
    rotor_program_init(&program);
    for (uint64_t seed = 1; seed < 40; seed++) {
        uint64_t state = seed;
        rotor_cost_t before;
        rotor_cost_t after;
        rotor_cost_t priced;
        draw_training(&drawing, 4 + (int64_t)(seed % 7), seed);
        build(&graph);
        program.length = 0;
        for (int32_t k = 0; k < graph.operation_count; k++) {
            CHECK(rotor_program_append(&program, k) == ROTOR_OK);
            state = state * UINT64_C(6364136223846793005) + 1442695040888963407;
            int32_t again = (int32_t)(state >> 33) % (k + 1);
            if (again >= 0 && !rotor_dataflow_once(&graph, again)) {
                CHECK(rotor_program_append(&program, again) == ROTOR_OK);
            }
        }
        CHECK(rotor_program_simulate(&graph, NULL, program.ops, program.length, &before, NULL, NULL,
                                     NULL) == ROTOR_OK);
        CHECK(rotor_pricer_prune(&pricer, &graph, &program) == ROTOR_OK);
        CHECK(rotor_program_simulate(&graph, NULL, program.ops, program.length, &after, NULL, NULL,
                                     NULL) == ROTOR_OK);
        CHECK(after.time_ns <= before.time_ns && after.peak_bytes <= before.peak_bytes);
        CHECK(rotor_pricer_price(&pricer, &graph, program.ops, program.length, &priced) ==
              ROTOR_OK);
        CHECK(priced.time_ns == after.time_ns && priced.peak_bytes == after.peak_bytes);
        rotor_pricer_free(&pricer);
        rotor_dataflow_free(&graph);
    }
    rotor_program_free(&program);
}

static void test_out_of_memory(void) {
    static const int32_t ops[] = {0, 1, 2};
    int64_t bound = 0;
    int ret = ROTOR_ERR_NO_MEMORY;
    draw_three();
    for (int64_t n = 1; ret != ROTOR_OK; n++) {
        rotor_dataflow_t graph;
        rotor_cost_t cost;
        rotor_dataflow_arrays_t arrays = arrays_of(&drawing);
        rotor_dataflow_init(&graph);
        rotor_testing_fail_after(n);
        ret = rotor_dataflow_build(&graph, &arrays);
        if (ret == ROTOR_OK) {
            ret = rotor_program_simulate(&graph, NULL, ops, 3, &cost, NULL, NULL, NULL);
        }
        if (ret == ROTOR_OK) {
            ret = rotor_dataflow_lower_bound(&graph, &bound);
        }
        rotor_testing_fail_after(0);
        CHECK(ret == ROTOR_OK || ret == ROTOR_ERR_NO_MEMORY);
        rotor_dataflow_free(&graph);
    }
}

static const test_case_t cases[] = {
    {"build", test_build},
    {"build_errors", test_build_errors},
    {"simulate", test_simulate},
    {"pinned", test_pinned},
    {"tape", test_tape},
    {"faults", test_faults},
    {"prune", test_prune},
    {"out_of_memory", test_out_of_memory},
};

TEST_MAIN(cases)
