#include "graph.h"
#include "testing.h"

static int append(rotor_graph_t *graph, int64_t cost, int64_t bytes, int64_t alias) {
    int32_t inputs[2] = {0, 0};
    rotor_output_t outputs[2] = {{"a", 1, bytes, -1}, {"b", 1, 7, alias}};
    return rotor_graph_append(graph, "op", 2, cost, inputs, 2, outputs, 2);
}

static void test_append(void) {
    rotor_graph_t graph = {.operation_count = 0};
    rotor_output_t source = {"in", 2, 100, -1};
    CHECK(rotor_graph_append(&graph, "source", 6, 0, NULL, 0, &source, 1) == ROTOR_OK);
    CHECK(append(&graph, 5, 30, 1) == ROTOR_OK);
    CHECK(append(&graph, 5, 30, -1) == ROTOR_OK);
    CHECK(graph.operation_count == 3 && graph.tensor_count == 5 && graph.storage_count == 4);
    CHECK(graph.operations[1].bytes == 30 && graph.operations[2].bytes == 37);
    CHECK(graph.tensors[2].is_alias && graph.tensors[2].storage == 0);
    CHECK(graph.tensors[4].storage == 3 && graph.storages[3].root == 4);
    CHECK(strcmp(graph.names + graph.operations[2].name, "op") == 0);
    CHECK(strcmp(graph.names + graph.tensors[0].name, "in") == 0);
    CHECK(rotor_graph_footprint(&graph) > 0);
    rotor_graph_free(&graph);
}

static void test_errors_change_nothing(void) {
    rotor_graph_t graph = {.operation_count = 0};
    rotor_output_t source = {"in", 2, 100, -1};
    CHECK(append(&graph, 5, 30, -1) == ROTOR_ERR_BAD_OPERATION); /* no input 0 yet */
    CHECK(rotor_graph_append(&graph, "source", 6, 0, NULL, 0, &source, 1) == ROTOR_OK);
    CHECK(append(&graph, 1, 30, 2) == ROTOR_ERR_BAD_OPERATION);
    CHECK(append(&graph, 1, 30, -2) == ROTOR_ERR_BAD_OPERATION);
    CHECK(graph.operation_count == 1 && graph.tensor_count == 1 && graph.input_count == 0);
    rotor_graph_free(&graph);
}

static void test_out_of_memory(void) {
    rotor_graph_t graph = {.operation_count = 0};
    rotor_output_t source = {"in", 2, 100, -1};
    for (int64_t n = 1; n < 20; n++) {
        int ret = ROTOR_OK;
        rotor_testing_fail_after(n);
        ret = rotor_graph_append(&graph, "source", 6, 0, NULL, 0, &source, 1);
        for (int k = 0; k < 40 && ret == ROTOR_OK; k++) {
            int64_t before = graph.operation_count;
            ret = append(&graph, 5, 30, -1);
            CHECK(ret == ROTOR_OK || (ret == ROTOR_ERR_NO_MEMORY &&
                                      graph.operation_count == before));
        }
        rotor_testing_fail_after(0);
        rotor_graph_free(&graph);
    }
}

static const test_case_t cases[] = {
    {"append", test_append},
    {"errors_change_nothing", test_errors_change_nothing},
    {"out_of_memory", test_out_of_memory},
};

TEST_MAIN(cases)
