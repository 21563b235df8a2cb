#include "link.h"

#include <math.h>

#include "dataflows.h"
#include "program.h"
#include "testing.h"

static drawing_t drawing;

static const rotor_link_t plain = {.write_bytes_per_s = 1e10,
                                   .read_bytes_per_s = 5e9,
                                   .host_bytes = INT64_MAX,
                                   .least_bytes = 1};

static void test_check(void) {
    rotor_link_t link = plain;
    CHECK(rotor_link_check(&link) == ROTOR_OK);
    link.write_bytes_per_s = 0;
    CHECK(rotor_link_check(&link) == ROTOR_ERR_NEGATIVE_SIZE);
    link = plain;
    link.read_bytes_per_s = NAN;
    CHECK(rotor_link_check(&link) == ROTOR_ERR_NEGATIVE_SIZE);
    link = plain;
    link.latency_ns = -1;
    CHECK(rotor_link_check(&link) == ROTOR_ERR_NEGATIVE_TIME);
    link.latency_ns = ROTOR_MAX_VALUE + 1;
    CHECK(rotor_link_check(&link) == ROTOR_ERR_TOO_LARGE);
    link = plain;
    link.host_bytes = -1;
    CHECK(rotor_link_check(&link) == ROTOR_ERR_NEGATIVE_SIZE);
    link = plain;
    link.least_bytes = -1;
    CHECK(rotor_link_check(&link) == ROTOR_ERR_NEGATIVE_SIZE);
    link = plain;
    link.padding_bytes = ROTOR_MAX_VALUE + 1;
    CHECK(rotor_link_check(&link) == ROTOR_ERR_TOO_LARGE);
}

static void test_transfers(void) {
    rotor_link_t link = plain;
    rotor_clocks_t clocks = {.now = 5};
    link.latency_ns = 3;
    CHECK(rotor_link_write_ns(&link, 100) == 13);
    CHECK(rotor_link_write_ns(&link, 101) == 14); /* rounded up */
    CHECK(rotor_link_read_ns(&link, 100) == 23);
    CHECK(rotor_clocks_write(&clocks, &link, 13) == 18);
    CHECK(rotor_clocks_fetch(&clocks, &link, 23, 0) == 41); /* after the write */
    clocks.now = 50;
    CHECK(rotor_clocks_fetch(&clocks, &link, 23, 60) == 83); /* after it was written */
    CHECK(clocks.link_ns == 59);
    link.duplex = true;
    clocks = (rotor_clocks_t){.now = 5};
    CHECK(rotor_clocks_write(&clocks, &link, 13) == 18);
    CHECK(rotor_clocks_fetch(&clocks, &link, 23, 0) == 28);
    link.write_bytes_per_s = 1e-300;
    for (int k = 0; k < 4096; k++) {
        (void)rotor_clocks_write(&clocks, &link, rotor_link_write_ns(&link, ROTOR_MAX_VALUE));
    }
    CHECK(clocks.write_free == ROTOR_LINK_ENDLESS && clocks.link_ns == ROTOR_LINK_ENDLESS);
}

static void build(rotor_dataflow_t *graph) {
    rotor_dataflow_arrays_t arrays = arrays_of(&drawing);
    rotor_dataflow_init(graph);
    CHECK(rotor_dataflow_build(graph, &arrays) == ROTOR_OK);
}

/* a (100 bytes, 7 ns) -> b (50, 5 ns) -> c, which reads both (10, pinned, 3 ns, backward) */
static void draw_three(void) {
    memset(&drawing, 0, sizeof(drawing));
    int64_t a = draw(&drawing, 0, 7, 100, -1, -1, -1);
    int64_t b = draw(&drawing, 0, 5, 50, a, -1, -1);
    int64_t c = draw(&drawing, 2, 3, 10, a, b, -1);
    drawing.pinned[c] = 1;
}

static void test_program(void) {
    static const int32_t items[] = {0, 1, 3, 6, 2};
    static const int64_t expected[] = {0, 100, 150, 50, 162};
    rotor_dataflow_t graph;
    rotor_link_t link = plain;
    rotor_cost_t cost;
    rotor_fault_t fault;
    int64_t before[5];
    int64_t peak[5];
    draw_three();
    build(&graph);
    CHECK(rotor_item_is_run(&graph, 2) && !rotor_item_is_run(&graph, 3));
    CHECK(rotor_item_finish(&graph, 1) == 4 && rotor_item_fetch(&graph, 1) == 7);
    CHECK(rotor_item_storage(&graph, 4) == 1 && rotor_item_storage(&graph, 7) == 1);
    CHECK(rotor_item_is_fetch(&graph, 6) && !rotor_item_is_fetch(&graph, 5));
    link.padding_bytes = 12;
    CHECK(rotor_program_simulate(&graph, &link, items, 5, &cost, before, peak, &fault) ==
          ROTOR_OK);
    CHECK(cost.time_ns == 40 && cost.compute_ns == 15 && cost.link_ns == 30);
    CHECK(cost.peak_bytes == 172 && cost.host_bytes == 100 && peak[4] == 172);
    CHECK(memcmp(before, expected, sizeof(before)) == 0);
    link.write_bytes_per_s = -1;
    CHECK(rotor_program_simulate(&graph, &link, items, 5, &cost, NULL, NULL, NULL) ==
          ROTOR_ERR_NEGATIVE_SIZE);
    rotor_dataflow_free(&graph);
}

static void expect(const rotor_dataflow_t *graph, const rotor_link_t *link, const int32_t *items,
                   int64_t length, int status, enum rotor_fault kind, int64_t position) {
    rotor_cost_t cost = {.time_ns = -1};
    rotor_fault_t fault;
    CHECK(rotor_program_simulate(graph, link, items, length, &cost, NULL, NULL, &fault) == status);
    CHECK(fault.kind == kind && fault.position == position && cost.time_ns == -1);
}

static void test_faults(void) {
    rotor_dataflow_t graph;
    rotor_link_t link = plain;
    int64_t fixed[MOST_STORAGES] = {0};
    draw_three();
    build(&graph);
    expect(&graph, NULL, (const int32_t[]){0, 3}, 2, ROTOR_ERR_BAD_OPERATION, ROTOR_FAULT_LINK, 1);
    expect(&graph, &link, (const int32_t[]){9}, 1, ROTOR_ERR_BAD_OPERATION, ROTOR_FAULT_OPERATION,
           0);
    expect(&graph, &link, (const int32_t[]){0, 1, 6, 3, 2}, 5, ROTOR_ERR_NO_INPUT,
           ROTOR_FAULT_NOT_WRITTEN, 2);
    expect(&graph, &link, (const int32_t[]){3, 0, 1, 2}, 4, ROTOR_ERR_NO_INPUT,
           ROTOR_FAULT_NOT_MADE, 0);
    expect(&graph, &link, (const int32_t[]){0, 3, 3, 1, 2}, 5, ROTOR_ERR_TWICE,
           ROTOR_FAULT_WRITTEN, 2);
    expect(&graph, &link, (const int32_t[]){0, 3, 6, 0, 1, 2}, 6, ROTOR_ERR_INCOMPLETE,
           ROTOR_FAULT_UNUSED, 2);
    expect(&graph, &link, (const int32_t[]){0, 3, 1, 2, 6}, 5, ROTOR_ERR_INCOMPLETE,
           ROTOR_FAULT_UNUSED, 4);
    expect(&graph, &link, (const int32_t[]){0, 1, 2, 5}, 4, ROTOR_ERR_BAD_OPERATION,
           ROTOR_FAULT_FIXED, 3);
    link.host_bytes = 99;
    expect(&graph, &link, (const int32_t[]){0, 1, 3, 6, 2}, 5, ROTOR_ERR_INFEASIBLE,
           ROTOR_FAULT_HOST, 0);
    link = plain;
    link.least_bytes = 101;
    expect(&graph, &link, (const int32_t[]){0, 3}, 2, ROTOR_ERR_BAD_OPERATION, ROTOR_FAULT_FIXED,
           1);
    rotor_dataflow_free(&graph);
    rotor_dataflow_arrays_t arrays = arrays_of(&drawing);
    arrays.fixed = fixed;
    fixed[0] = 2;
    CHECK(rotor_dataflow_build(&graph, &arrays) == ROTOR_ERR_BAD_OPERATION);
    fixed[0] = 1;
    CHECK(rotor_dataflow_build(&graph, &arrays) == ROTOR_OK);
    expect(&graph, &plain, (const int32_t[]){0, 3}, 2, ROTOR_ERR_BAD_OPERATION, ROTOR_FAULT_FIXED,
           1);
    rotor_dataflow_free(&graph);
}

static int32_t below(uint64_t *state, int64_t n) {
    *state = *state * UINT64_C(6364136223846793005) + 1442695040888963407;
    return (int32_t)((int64_t)(*state >> 33) % n);
}

/* A storage that operation k reads, if it reads any, or any at all. */
static int32_t soon_or_any(const rotor_dataflow_t *graph, int32_t k, uint64_t *state) {
    if (k < graph->operation_count && graph->input_start[k + 1] > graph->input_start[k] &&
        below(state, 3) > 0) {
        return graph->inputs[graph->input_start[k] +
                             below(state, graph->input_start[k + 1] - graph->input_start[k])];
    }
    return below(state, graph->storage_count);
}

/* Runs again, writes and fetches, each only where it is allowed; some have no use, and where `twice`
 * some writes come twice. */
static void draw_program(const rotor_dataflow_t *graph, const rotor_link_t *link, uint64_t seed,
                         bool twice, rotor_program_t *program) {
    uint8_t made[MOST_STORAGES] = {0};
    uint8_t written[MOST_STORAGES] = {0};
    program->length = 0;
    for (int32_t k = 0; k < graph->operation_count; k++) {
        CHECK(rotor_program_append(program, k) == ROTOR_OK);
        for (int32_t j = graph->output_start[k]; j < graph->output_start[k + 1]; j++) {
            made[graph->outputs[j]] = 1;
        }
        for (int32_t tries = below(&seed, 4); tries > 0; tries--) {
            int32_t s = soon_or_any(graph, k + 1, &seed);
            int32_t again = below(&seed, k + 1);
            int32_t kind = below(&seed, 3);
            if (kind == 0 && !rotor_dataflow_once(graph, again)) {
                CHECK(rotor_program_append(program, again) == ROTOR_OK);
            } else if (kind == 1 && made[s] && (twice || !written[s]) &&
                       rotor_link_moves(link, graph, s)) {
                CHECK(rotor_program_append(program, rotor_item_finish(graph, s)) == ROTOR_OK);
                written[s] = 1;
            } else if (kind == 2 && written[s]) {
                CHECK(rotor_program_append(program, rotor_item_fetch(graph, s)) == ROTOR_OK);
            }
        }
    }
}

static void test_prune(void) {
    rotor_dataflow_t graph;
    rotor_pricer_t pricer = {.link = NULL};
    rotor_program_t program;
    rotor_link_t link = plain;
    int32_t actions = 0;
    rotor_program_init(&program);
    pricer.link = &link;
    link.write_bytes_per_s = 1e11;
    link.read_bytes_per_s = 1e11;
    for (uint64_t seed = 1; seed < 200; seed++) {
        rotor_cost_t before;
        rotor_cost_t after;
        rotor_cost_t priced;
        rotor_fault_t fault;
        link.duplex = seed % 2 == 0;
        draw_training(&drawing, 4 + (int64_t)(seed % 7), seed);
        build(&graph);
        draw_program(&graph, &link, seed, seed % 3 == 0, &program);
        CHECK(rotor_pricer_price(&pricer, &graph, program.ops, program.length, &before) ==
              ROTOR_OK);
        CHECK(rotor_pricer_prune(&pricer, &graph, &program) == ROTOR_OK);
        CHECK(rotor_program_simulate(&graph, &link, program.ops, program.length, &after, NULL,
                                     NULL, &fault) == ROTOR_OK);
        CHECK(after.compute_ns <= before.compute_ns && after.peak_bytes <= before.peak_bytes);
        CHECK(seed % 3 == 0 || after.time_ns <= before.time_ns);
        CHECK(seed % 3 == 0 || after.link_ns <= before.link_ns);
        CHECK(rotor_pricer_price(&pricer, &graph, program.ops, program.length, &priced) ==
              ROTOR_OK);
        CHECK(memcmp(&priced, &after, sizeof(priced)) == 0);
        for (int64_t k = 0; k < program.length; k++) {
            actions += !rotor_item_is_run(&graph, program.ops[k]);
        }
        rotor_pricer_free(&pricer);
        CHECK(pricer.link == &link);
        rotor_dataflow_free(&graph);
    }
    CHECK(actions > 100);
    rotor_program_free(&program);
}

static void test_out_of_memory(void) {
    static const int32_t items[] = {0, 1, 3, 6, 2};
    rotor_dataflow_t graph;
    int ret = ROTOR_ERR_NO_MEMORY;
    draw_three();
    build(&graph);
    for (int64_t n = 1; ret != ROTOR_OK; n++) {
        rotor_cost_t cost = {.time_ns = -1};
        rotor_testing_fail_after(n);
        ret = rotor_program_simulate(&graph, &plain, items, 5, &cost, NULL, NULL, NULL);
        rotor_testing_fail_after(0);
        CHECK(ret == (cost.time_ns < 0 ? ROTOR_ERR_NO_MEMORY : ROTOR_OK));
    }
    rotor_dataflow_free(&graph);
}

static const test_case_t cases[] = {
    {"check", test_check},   {"transfers", test_transfers}, {"program", test_program},
    {"faults", test_faults}, {"prune", test_prune},         {"out_of_memory", test_out_of_memory},
};

TEST_MAIN(cases)
