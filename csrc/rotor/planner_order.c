#include "planner_order.h"

static bool may_wait(const rotor_dataflow_t *g, double share, int32_t op) {
    int64_t read = 0;
    if (g->phase[op] != ROTOR_PHASE_BACKWARD || g->flags[op] != 0 || g->output_bytes[op] == 0) {
        return false;
    }
    for (int32_t j = g->output_start[op]; j < g->output_start[op + 1]; j++) {
        int32_t s = g->outputs[j];
        if (!g->pinned[s] || g->user_start[s] < g->user_start[s + 1]) {
            return false;
        }
    }
    for (int32_t j = g->input_start[op]; j < g->input_start[op + 1]; j++) {
        read += g->bytes[g->inputs[j]];
    }
    return (double)read < share * (double)g->output_bytes[op];
}

bool rotor_order_defer(const rotor_dataflow_t *graph, double share, int32_t *order) {
    int32_t count = 0;
    for (int32_t k = 0; k < graph->operation_count; k++) {
        if (!may_wait(graph, share, k)) {
            order[count++] = k;
        }
    }
    bool is_another = count < graph->operation_count;
    for (int32_t k = 0; k < graph->operation_count; k++) {
        if (may_wait(graph, share, k)) {
            order[count++] = k;
        }
    }
    return is_another;
}
