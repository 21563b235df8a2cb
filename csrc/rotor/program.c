#include "program.h"

#include <string.h>

#include "vector.h"

void rotor_program_init(rotor_program_t *self) { memset(self, 0, sizeof(*self)); }

void rotor_program_free(rotor_program_t *self) {
    rotor_free(self->ops);
    rotor_program_init(self);
}

int rotor_program_append(rotor_program_t *self, int32_t operation) {
    int ret = ROTOR_RESERVE(self->ops, self->length, self->capacity, 1);
    if (ret == ROTOR_OK) {
        self->ops[self->length++] = operation;
    }
    return ret;
}

int rotor_program_assign(rotor_program_t *self, const int32_t *ops, int64_t length) {
    self->length = 0;
    int ret = ROTOR_RESERVE(self->ops, self->length, self->capacity, length);
    if (ret == ROTOR_OK && length > 0) {
        memcpy(self->ops, ops, (size_t)length * sizeof(*ops));
        self->length = length;
    }
    return ret;
}

void rotor_pricer_init(rotor_pricer_t *self) { memset(self, 0, sizeof(*self)); }

void rotor_pricer_free(rotor_pricer_t *self) {
    rotor_free(self->made);
    rotor_free(self->last);
    rotor_free(self->ended);
    rotor_free(self->runs);
    rotor_free(self->next);
    rotor_free(self->needed);
    rotor_pricer_init(self);
}

static int program_reserve(rotor_pricer_t *self, const rotor_dataflow_t *graph, int64_t length) {
    int64_t m = graph->storage_count;
    int64_t n = graph->operation_count;
    int ret = ROTOR_OK;

    if (self->made == NULL) {
        self->made = rotor_malloc_array(m, sizeof(*self->made));
        self->last = rotor_malloc_array(m, sizeof(*self->last));
        self->needed = rotor_malloc_array(m, sizeof(*self->needed));
        self->runs = rotor_malloc_array(n, sizeof(*self->runs));
        self->next = rotor_malloc_array(n, sizeof(*self->next));
        if (self->made == NULL || self->last == NULL || self->needed == NULL ||
            self->runs == NULL || self->next == NULL) {
            ret = ROTOR_ERR_NO_MEMORY;
            goto out;
        }
    }
    ret = rotor_grow((void **)&self->ended, &self->capacity, length + 1, sizeof(*self->ended));
out:
    if (ret == ROTOR_ERR_NO_MEMORY) {
        rotor_pricer_free(self);
    }
    return ret;
}

static void end(rotor_pricer_t *self, const rotor_dataflow_t *graph, int32_t s) {
    self->ended[self->last[s]] += graph->bytes[s];
}

/* Notes what a run at position k makes and reads; the caller knows that the inputs are there. */
static void trace_run(rotor_pricer_t *self, const rotor_dataflow_t *graph, int32_t op, int32_t k) {
    for (int32_t j = graph->input_start[op]; j < graph->input_start[op + 1]; j++) {
        self->last[graph->inputs[j]] = k;
    }
    for (int32_t j = graph->output_start[op]; j < graph->output_start[op + 1]; j++) {
        int32_t s = graph->outputs[j];
        if (graph->pinned[s] && self->made[s] >= 0) {
            self->ended[k] += graph->bytes[s];
            continue;
        }
        if (self->made[s] >= 0) {
            end(self, graph, s);
        }
        self->made[s] = k;
        self->last[s] = k;
    }
}

static void begin_trace(rotor_pricer_t *self, const rotor_dataflow_t *graph, int64_t length) {
    for (int32_t s = 0; s < graph->storage_count; s++) {
        self->made[s] = -1;
    }
    memset(self->ended, 0, (size_t)length * sizeof(*self->ended));
}

static int finish_trace(rotor_pricer_t *self, const rotor_dataflow_t *graph, const int32_t *ops,
                        int64_t length, rotor_cost_t *price, int64_t *before, int64_t *peak) {
    int64_t live = 0;
    int64_t highest = 0;
    int64_t time = 0;
    for (int32_t s = 0; s < graph->storage_count; s++) {
        if (self->made[s] >= 0 && !graph->pinned[s]) {
            end(self, graph, s);
        }
    }
    for (int64_t k = 0; k < length; k++) {
        int32_t op = ops[k];
        int64_t most = live + graph->output_bytes[op] + graph->workspace_bytes[op];
        if (before != NULL) {
            before[k] = live;
        }
        if (peak != NULL) {
            peak[k] = most;
        }
        highest = rotor_max(highest, most);
        live += graph->output_bytes[op] - self->ended[k];
        if (graph->cost_ns[op] > INT64_MAX - time) {
            return ROTOR_ERR_OVERFLOW;
        }
        time += graph->cost_ns[op];
    }
    price->time_ns = time;
    price->peak_bytes = highest;
    return ROTOR_OK;
}

int rotor_pricer_price(rotor_pricer_t *self, const rotor_dataflow_t *graph, const int32_t *ops,
                       int64_t length, rotor_cost_t *price) {
    int ret = program_reserve(self, graph, length);
    if (ret != ROTOR_OK) {
        return ret;
    }
    begin_trace(self, graph, length);
    for (int64_t k = 0; k < length; k++) {
        trace_run(self, graph, ops[k], (int32_t)k);
    }
    return finish_trace(self, graph, ops, length, price, NULL, NULL);
}

static int report(rotor_fault_t *fault, enum rotor_fault kind, int64_t position, int32_t operation,
                  int32_t storage) {
    static const int statuses[] = {
        [ROTOR_FAULT_NONE] = ROTOR_OK,
        [ROTOR_FAULT_OPERATION] = ROTOR_ERR_BAD_OPERATION,
        [ROTOR_FAULT_INPUT] = ROTOR_ERR_NO_INPUT,
        [ROTOR_FAULT_PHASE] = ROTOR_ERR_BAD_OPERATION,
        [ROTOR_FAULT_ORDER] = ROTOR_ERR_BAD_OPERATION,
        [ROTOR_FAULT_ONCE] = ROTOR_ERR_TWICE,
        [ROTOR_FAULT_MISSING] = ROTOR_ERR_INCOMPLETE,
    };
    if (fault != NULL) {
        *fault = (rotor_fault_t){
            .kind = kind, .position = position, .operation = operation, .storage = storage};
    }
    return statuses[kind];
}

int rotor_program_simulate(const rotor_dataflow_t *graph, const int32_t *ops, int64_t length,
                           rotor_cost_t *price, int64_t *before, int64_t *peak,
                           rotor_fault_t *fault) {
    rotor_pricer_t pricer;
    int32_t phase = ROTOR_PHASE_FORWARD;
    int32_t flagged = -1;
    rotor_pricer_init(&pricer);
    report(fault, ROTOR_FAULT_NONE, -1, -1, -1);
    int ret = program_reserve(&pricer, graph, length);
    if (ret != ROTOR_OK) {
        goto out;
    }
    begin_trace(&pricer, graph, length);
    memset(pricer.runs, 0, (size_t)graph->operation_count * sizeof(*pricer.runs));
    for (int64_t k = 0; k < length; k++) {
        int32_t op = ops[k];
        enum rotor_fault kind = ROTOR_FAULT_NONE;
        int32_t storage = -1;
        if (op < 0 || op >= graph->operation_count) {
            ret = report(fault, ROTOR_FAULT_OPERATION, k, op, -1);
            goto out;
        }
        bool is_first = pricer.runs[op] == 0;
        if (!is_first && rotor_dataflow_once(graph, op)) {
            kind = ROTOR_FAULT_ONCE;
        } else if (is_first && graph->phase[op] < phase) {
            kind = ROTOR_FAULT_PHASE;
        } else if (is_first && graph->flags[op] != 0 && op < flagged) {
            kind = ROTOR_FAULT_ORDER;
        }
        for (int32_t j = graph->input_start[op];
             kind == ROTOR_FAULT_NONE && j < graph->input_start[op + 1]; j++) {
            if (pricer.made[graph->inputs[j]] < 0) {
                kind = ROTOR_FAULT_INPUT;
                storage = graph->inputs[j];
            }
        }
        if (kind != ROTOR_FAULT_NONE) {
            ret = report(fault, kind, k, op, storage);
            goto out;
        }
        if (is_first) {
            phase = graph->phase[op];
            flagged = graph->flags[op] != 0 ? op : flagged;
        }
        pricer.runs[op]++;
        trace_run(&pricer, graph, op, (int32_t)k);
    }
    for (int32_t op = 0; op < graph->operation_count; op++) {
        if (pricer.runs[op] == 0) {
            ret = report(fault, ROTOR_FAULT_MISSING, length, op, -1);
            goto out;
        }
    }
    ret = finish_trace(&pricer, graph, ops, length, price, before, peak);
out:
    rotor_pricer_free(&pricer);
    return ret;
}

/* The ends of the first runs of each phase: no operation of it may begin later. */
static void phase_ends(rotor_pricer_t *self, const rotor_dataflow_t *graph, const int32_t *ops,
                       int64_t length, int64_t ends[3]) {
    int32_t phase = ROTOR_PHASE_FORWARD;
    ends[0] = ends[1] = ends[2] = length;
    memset(self->runs, 0, (size_t)graph->operation_count * sizeof(*self->runs));
    for (int64_t k = 0; k < length; k++) {
        int32_t op = ops[k];
        if (self->runs[op]++ == 0 && graph->phase[op] > phase) {
            for (; phase < graph->phase[op]; phase++) {
                ends[phase] = k;
            }
        }
    }
}

/* True if the run of op at k makes something that a kept run reads. Pinned storages are live from
 * the first run on. */
static bool is_read(const rotor_pricer_t *self, const rotor_dataflow_t *graph, int32_t op,
                    bool is_first) {
    for (int32_t j = graph->output_start[op]; j < graph->output_start[op + 1]; j++) {
        int32_t s = graph->outputs[j];
        if (self->needed[s] && (is_first || !graph->pinned[s])) {
            return true;
        }
    }
    return false;
}

static void mark_kept(rotor_pricer_t *self, const rotor_dataflow_t *graph, int32_t op) {
    for (int32_t j = graph->output_start[op]; j < graph->output_start[op + 1]; j++) {
        self->needed[graph->outputs[j]] = 0;
    }
    for (int32_t j = graph->input_start[op]; j < graph->input_start[op + 1]; j++) {
        self->needed[graph->inputs[j]] = 1;
    }
}

int rotor_pricer_prune(rotor_pricer_t *self, const rotor_dataflow_t *graph,
                       rotor_program_t *program) {
    int32_t *ops = program->ops;
    int64_t ends[3];
    int64_t kept = program->length;
    int ret = program_reserve(self, graph, program->length);
    if (ret != ROTOR_OK) {
        return ret;
    }
    phase_ends(self, graph, ops, program->length, ends);
    memset(self->needed, 0, (size_t)graph->storage_count);
    for (int32_t op = 0; op < graph->operation_count; op++) {
        self->next[op] = -1;
    }
    for (int64_t k = program->length - 1; k >= 0; k--) {
        int32_t op = ops[k];
        bool is_first = --self->runs[op] == 0;
        bool may_begin_later = graph->flags[op] == 0 && self->next[op] >= 0 &&
                               self->next[op] < ends[graph->phase[op]];
        if (is_read(self, graph, op, is_first) || (is_first && !may_begin_later)) {
            mark_kept(self, graph, op);
            self->next[op] = (int32_t)k;
            ops[--kept] = op;
        }
    }
    program->length -= kept;
    memmove(ops, ops + kept, (size_t)program->length * sizeof(*ops));
    return ROTOR_OK;
}
