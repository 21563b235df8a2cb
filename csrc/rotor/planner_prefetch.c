#include "planner_prefetch.h"

#include <string.h>

static int prefetch_arrays(rotor_prefetch_t *q, int64_t length, int64_t m, bool is_new) {
    return ROTOR_ARRAYS(is_new,
        ROTOR_ARRAY(q->peak, length), ROTOR_ARRAY(q->begin, length), ROTOR_ARRAY(q->first, length),
        ROTOR_ARRAY(q->next, length), ROTOR_ARRAY(q->ops, length), ROTOR_ARRAY(q->next_use, m));
}

void rotor_prefetch_free(rotor_prefetch_t *self) {
    (void)prefetch_arrays(self, 0, 0, false);
    memset(self, 0, sizeof(*self));
}

static int reserve(rotor_prefetch_t *q, const rotor_dataflow_t *graph, int64_t length) {
    if (length <= q->capacity && graph->storage_count <= q->storage_count) {
        return ROTOR_OK;
    }
    rotor_prefetch_free(q);
    int ret = prefetch_arrays(q, length, graph->storage_count, true);
    if (ret == ROTOR_OK) {
        q->capacity = length;
        q->storage_count = graph->storage_count;
    } else {
        rotor_prefetch_free(q);
    }
    return ret;
}

static bool touches(const rotor_dataflow_t *graph, int32_t item, int32_t s) {
    if (!rotor_item_is_run(graph, item)) {
        return rotor_item_storage(graph, item) == s;
    }
    bool found = graph->producer[s] == item;
    for (int32_t j = graph->input_start[item]; j < graph->input_start[item + 1] && !found; j++) {
        found = graph->inputs[j] == s;
    }
    return found;
}

static bool is_of_loss(const rotor_dataflow_t *graph, int32_t item) {
    return rotor_item_is_run(graph, item) && graph->phase[item] == ROTOR_PHASE_LOSS;
}

/* Moves the fetch at `at` below the time that leaves it done; that time, or when it begins if later. */
static int64_t move_fetch(rotor_prefetch_t *q, const rotor_dataflow_t *graph,
                          const rotor_link_t *link, int64_t budget, int32_t at, int64_t before,
                          const int32_t *ops) {
    bool is_run = rotor_item_is_run(graph, ops[at]);
    int32_t s = is_run ? graph->outputs[graph->output_start[ops[at]]]
                       : rotor_item_storage(graph, ops[at]);
    int64_t size = graph->bytes[s] + (is_run ? 0 : link->padding_bytes);
    int64_t ns = is_run ? graph->cost_ns[ops[at]] : rotor_link_read_ns(link, graph->bytes[s]);
    bool may_pass_loss = !is_run || graph->phase[ops[at]] == ROTOR_PHASE_FORWARD;
    int64_t done = rotor_min(before, q->begin[q->next_use[s] < 0 ? at : q->next_use[s]]);
    int64_t begin = done - ns;
    int32_t to = at;
    while (to > 0 && q->begin[to] > begin && !touches(graph, ops[to - 1], s) &&
           (may_pass_loss || !is_of_loss(graph, ops[to - 1])) &&
           q->peak[to - 1] + size <= budget) {
        to--;
        q->peak[to] += size;
    }
    q->next[at] = q->first[to];
    q->first[to] = at;
    return rotor_max(begin, q->begin[to]);
}

static void note_uses(rotor_prefetch_t *q, const rotor_dataflow_t *graph, int32_t item, int32_t at) {
    if (rotor_item_is_run(graph, item)) {
        for (int32_t j = graph->input_start[item]; j < graph->input_start[item + 1]; j++) {
            q->next_use[graph->inputs[j]] = at;
        }
    } else if (!rotor_item_is_fetch(graph, item)) {
        q->next_use[rotor_item_storage(graph, item)] = at;
    }
}

int rotor_prefetch(rotor_prefetch_t *self, const rotor_dataflow_t *graph, const rotor_link_t *link,
                   int64_t budget, rotor_program_t *program) {
    int64_t before = INT64_MAX;
    int64_t now = 0;
    int64_t count = 0;
    rotor_cost_t price;
    int ret = reserve(self, graph, program->length);
    if (ret != ROTOR_OK ||
        (ret = rotor_program_simulate(graph, link, program->ops, program->length, &price, NULL,
                                      self->peak, NULL)) != ROTOR_OK) {
        return ret;
    }
    for (int64_t k = 0; k < program->length; k++) {
        int32_t item = program->ops[k];
        self->begin[k] = now;
        self->first[k] = -1;
        now += rotor_item_is_run(graph, item) ? rotor_dataflow_run_ns(graph, item, true) : 0;
    }
    memset(self->next_use, -1, (size_t)graph->storage_count * sizeof(*self->next_use));
    for (int32_t k = (int32_t)program->length - 1; k >= 0; k--) {
        if (rotor_item_starts(graph, program->ops[k])) {
            before = move_fetch(self, graph, link, budget, k, before, program->ops);
        } else {
            note_uses(self, graph, program->ops[k], k);
        }
    }
    for (int32_t k = 0; k < (int32_t)program->length; k++) {
        for (int32_t fetch = self->first[k]; fetch >= 0; fetch = self->next[fetch]) {
            self->ops[count++] = program->ops[fetch];
        }
        if (!rotor_item_starts(graph, program->ops[k])) {
            self->ops[count++] = program->ops[k];
        }
    }
    memcpy(program->ops, self->ops, (size_t)count * sizeof(*self->ops));
    return ROTOR_OK;
}
