#include "dataflow.h"

#include <stdlib.h>
#include <string.h>

#define MOST_ITEMS (INT64_C(1) << 30)

void rotor_dataflow_init(rotor_dataflow_t *self) { memset(self, 0, sizeof(*self)); }

static int dataflow_arrays(rotor_dataflow_t *g, int64_t n, int64_t m, int64_t inputs, int64_t outputs,
                           bool is_new) {
    return ROTOR_ARRAYS(is_new,
        ROTOR_ARRAY(g->cost_ns, n), ROTOR_ARRAY(g->workspace_bytes, n),
        ROTOR_ARRAY(g->light_bytes, n), ROTOR_ARRAY(g->output_bytes, n), ROTOR_ARRAY(g->tape, n),
        ROTOR_ARRAY(g->phase, n), ROTOR_ARRAY(g->flags, n), ROTOR_ARRAY(g->clock, n),
        ROTOR_ARRAY(g->input_start, n + 1),
        ROTOR_ARRAY(g->inputs, inputs), ROTOR_ARRAY(g->output_start, n + 1),
        ROTOR_ARRAY(g->outputs, outputs), ROTOR_ARRAY(g->bytes, m), ROTOR_ARRAY(g->pinned, m),
        ROTOR_ARRAY(g->fixed, m), ROTOR_ARRAY(g->lazy, m), ROTOR_ARRAY(g->producer, m),
        ROTOR_ARRAY(g->user_start, m + 1), ROTOR_ARRAY(g->users, inputs));
}

void rotor_dataflow_free(rotor_dataflow_t *self) {
    (void)dataflow_arrays(self, 0, 0, 0, 0, false);
    rotor_dataflow_init(self);
}

static int check_size(int64_t bytes) {
    return bytes < 0                 ? ROTOR_ERR_NEGATIVE_SIZE
           : bytes > ROTOR_MAX_VALUE ? ROTOR_ERR_TOO_LARGE
                                     : ROTOR_OK;
}

static int check_starts(const int64_t *start, int64_t count) {
    if (start[0] != 0 || start[count] > MOST_ITEMS) {
        return ROTOR_ERR_BAD_LENGTH;
    }
    for (int64_t k = 0; k < count; k++) {
        if (start[k + 1] < start[k]) {
            return ROTOR_ERR_BAD_LENGTH;
        }
    }
    return ROTOR_OK;
}

/* The workspace of a run of operation k that does not make its tape. */
static int64_t light_of(const rotor_dataflow_arrays_t *a, int64_t k) {
    return a->light_bytes == NULL ? a->workspace_bytes[k] : a->light_bytes[k];
}

static int check_operation(const rotor_dataflow_arrays_t *a, int64_t k) {
    if (a->cost_ns[k] < 0) {
        return ROTOR_ERR_NEGATIVE_TIME;
    }
    if (a->cost_ns[k] > ROTOR_MAX_VALUE || a->workspace_bytes[k] > ROTOR_MAX_VALUE ||
        light_of(a, k) > ROTOR_MAX_VALUE) {
        return ROTOR_ERR_TOO_LARGE;
    }
    if (a->phase[k] < ROTOR_PHASE_FORWARD || a->phase[k] > ROTOR_PHASE_BACKWARD || a->flags[k] < 0 ||
        a->flags[k] > (ROTOR_ONCE | ROTOR_RANDOM) ||
        (a->clock != NULL && (a->clock[k] < ROTOR_COMPUTES || a->clock[k] > ROTOR_WRITES))) {
        return ROTOR_ERR_BAD_OPERATION;
    }
    return ROTOR_OK;
}

static int dataflow_check(const rotor_dataflow_arrays_t *a) {
    int ret = ROTOR_OK;
    int64_t bytes = 0;
    int64_t cost = 0;
    if (a->operation_count < 1 || a->operation_count > MOST_ITEMS || a->storage_count < 0 ||
        a->storage_count > MOST_ITEMS) {
        return ROTOR_ERR_BAD_LENGTH;
    }
    if ((ret = check_starts(a->input_start, a->operation_count)) != ROTOR_OK ||
        (ret = check_starts(a->output_start, a->operation_count)) != ROTOR_OK) {
        return ret;
    }
    for (int64_t s = 0; s < a->storage_count; s++) {
        if ((ret = check_size(a->storage_bytes[s])) != ROTOR_OK) {
            return ret;
        }
        bool is_lazy = a->lazy != NULL && a->lazy[s] != 0;
        if (a->pinned[s] < 0 || a->pinned[s] > (is_lazy ? 0 : ROTOR_KEPT_FIRST) ||
            (is_lazy && a->lazy[s] != 1) ||
            (a->fixed != NULL && a->fixed[s] != 0 && a->fixed[s] != 1)) {
            return ROTOR_ERR_BAD_OPERATION;
        }
        bytes += a->storage_bytes[s];
        if (bytes > INT64_MAX / 4) {
            return ROTOR_ERR_OVERFLOW;
        }
    }
    for (int64_t k = 0; k < a->operation_count; k++) {
        if ((ret = check_operation(a, k)) != ROTOR_OK) {
            return ret;
        }
        if (k > 0 && a->phase[k] < a->phase[k - 1]) {
            return ROTOR_ERR_BAD_OPERATION;
        }
        cost += a->cost_ns[k];
        if (cost > INT64_MAX / 4) {
            return ROTOR_ERR_OVERFLOW;
        }
    }
    return ROTOR_OK;
}

static int dataflow_allocate(rotor_dataflow_t *g, const rotor_dataflow_arrays_t *a) {
    int64_t n = a->operation_count;
    int64_t m = a->storage_count;
    g->operation_count = (int32_t)n;
    g->storage_count = (int32_t)m;
    return dataflow_arrays(g, n, m, a->input_start[n], a->output_start[n], true);
}

/* Inputs of operation k, each once: `seen[s]` is the last operation that was found to read s. */
static int add_inputs(rotor_dataflow_t *g, const rotor_dataflow_arrays_t *a, int32_t k,
                      int32_t *seen) {
    int32_t at = g->input_start[k];
    for (int64_t j = a->input_start[k]; j < a->input_start[k + 1]; j++) {
        int64_t s = a->inputs[j];
        if (s < 0 || s >= g->storage_count) {
            return ROTOR_ERR_BAD_OPERATION;
        }
        if (g->producer[s] < 0) {
            return ROTOR_ERR_NO_INPUT;
        }
        if (seen[s] != k) {
            seen[s] = k;
            g->inputs[at++] = (int32_t)s;
            g->user_start[s + 1]++;
        }
    }
    g->input_start[k + 1] = at;
    return ROTOR_OK;
}

static int add_outputs(rotor_dataflow_t *g, const rotor_dataflow_arrays_t *a, int32_t k) {
    int32_t at = g->output_start[k];
    int64_t light = g->light_bytes[k];
    g->output_bytes[k] = 0;
    g->tape[k] = -1;
    for (int64_t j = a->output_start[k]; j < a->output_start[k + 1]; j++) {
        int64_t s = a->outputs[j];
        if (s < 0 || s >= g->storage_count) {
            return ROTOR_ERR_BAD_OPERATION;
        }
        if (g->producer[s] >= 0) {
            return ROTOR_ERR_TWICE;
        }
        g->producer[s] = k;
        g->outputs[at++] = (int32_t)s;
        g->output_bytes[k] += g->bytes[s];
        if (g->lazy[s]) {
            if (g->tape[k] >= 0) {
                return ROTOR_ERR_BAD_OPERATION;
            }
            g->tape[k] = (int32_t)s;
            light -= g->bytes[s];
        }
    }
    g->output_start[k + 1] = at;
    g->is_plain = g->is_plain && g->workspace_bytes[k] >= 0 && g->tape[k] < 0;
    return rotor_min(g->workspace_bytes[k], light) < -g->output_bytes[k] ? ROTOR_ERR_NEGATIVE_SIZE
                                                                         : ROTOR_OK;
}

/* True unless operation k reads or writes, and is no such operation. */
static bool suits_clock(rotor_dataflow_t *g, int32_t k) {
    int32_t inputs = g->input_start[k + 1] - g->input_start[k];
    int32_t outputs = g->output_start[k + 1] - g->output_start[k];
    if (g->clock[k] == ROTOR_COMPUTES) {
        return true;
    }
    if (g->clock[k] == ROTOR_WRITES) {
        return outputs == 0 && rotor_dataflow_once(g, k);
    }
    if (inputs > 0 || outputs != 1 || g->flags[k] != 0) {
        return false;
    }
    int32_t s = g->outputs[g->output_start[k]];
    g->fixed[s] = 1;
    g->has_homes = true;
    return !g->pinned[s] && !g->lazy[s];
}

static void add_users(rotor_dataflow_t *g, int32_t *cursor) {
    for (int32_t s = 0; s < g->storage_count; s++) {
        g->user_start[s + 1] += g->user_start[s];
        cursor[s] = g->user_start[s];
    }
    for (int32_t k = 0; k < g->operation_count; k++) {
        for (int32_t j = g->input_start[k]; j < g->input_start[k + 1]; j++) {
            g->users[cursor[g->inputs[j]]++] = k;
        }
    }
}

int rotor_dataflow_build(rotor_dataflow_t *self, const rotor_dataflow_arrays_t *arrays) {
    rotor_dataflow_t g;
    int32_t *scratch = NULL;
    int64_t workspace = 0;
    int ret = dataflow_check(arrays);
    if (ret != ROTOR_OK) {
        return ret;
    }
    rotor_dataflow_init(&g);
    g.is_plain = true;
    if ((ret = dataflow_allocate(&g, arrays)) != ROTOR_OK) {
        goto out;
    }
    scratch = rotor_malloc_array(g.storage_count, sizeof(*scratch));
    if (scratch == NULL) {
        ret = ROTOR_ERR_NO_MEMORY;
        goto out;
    }
    for (int32_t s = 0; s < g.storage_count; s++) {
        g.bytes[s] = arrays->storage_bytes[s];
        g.pinned[s] = (uint8_t)arrays->pinned[s];
        g.lazy[s] = arrays->lazy != NULL ? (uint8_t)arrays->lazy[s] : 0;
        g.fixed[s] = g.lazy[s] || (arrays->fixed != NULL && arrays->fixed[s]);
        g.is_plain = g.is_plain && g.pinned[s] != ROTOR_KEPT_FIRST;
        g.producer[s] = -1;
        g.total_bytes += g.bytes[s];
        scratch[s] = -1;
    }
    g.input_start[0] = 0;
    g.output_start[0] = 0;
    for (int32_t k = 0; k < g.operation_count; k++) {
        g.cost_ns[k] = arrays->cost_ns[k];
        g.workspace_bytes[k] = arrays->workspace_bytes[k];
        g.light_bytes[k] = light_of(arrays, k);
        g.phase[k] = (uint8_t)arrays->phase[k];
        g.flags[k] = (uint8_t)(arrays->flags[k] | (g.phase[k] == ROTOR_PHASE_LOSS ? ROTOR_ONCE : 0));
        g.clock[k] = arrays->clock != NULL ? (uint8_t)arrays->clock[k] : ROTOR_COMPUTES;
        g.total_cost_ns += g.cost_ns[k];
        workspace = rotor_max(workspace, rotor_max(g.workspace_bytes[k], g.light_bytes[k]));
        if ((ret = add_inputs(&g, arrays, k, scratch)) != ROTOR_OK ||
            (ret = add_outputs(&g, arrays, k)) != ROTOR_OK) {
            goto out;
        }
        if (!suits_clock(&g, k)) {
            ret = ROTOR_ERR_BAD_OPERATION;
            goto out;
        }
    }
    g.total_bytes += workspace;
    for (int32_t s = 0; s < g.storage_count; s++) {
        if (g.producer[s] < 0) {
            ret = ROTOR_ERR_INCOMPLETE;
            goto out;
        }
    }
    add_users(&g, scratch);
    rotor_dataflow_free(self);
    *self = g;
    rotor_dataflow_init(&g);
out:
    rotor_free(scratch);
    rotor_dataflow_free(&g);
    return ret;
}

/* What a lower bound needs to know about the first run of an operation. */
typedef struct {
    const rotor_dataflow_t *graph;
    uint8_t *place;   /* per operation, against the one in question: BEFORE, AFTER or 0 */
    int32_t *stack;   /* of operations */
    int32_t *lasting; /* storages that are pinned, or made once */
    int32_t lasting_count;
    int64_t lasting_bytes;
    int64_t work; /* elementary steps left for looking at orders */
} bound_t;

enum { BEFORE = 1, AFTER = 2 };

#define MOST_BOUND_WORK 100000000

static int bound_arrays(bound_t *b, int64_t n, int64_t m, bool is_new) {
    return ROTOR_ARRAYS(is_new,
        ROTOR_ARRAY(b->place, n), ROTOR_ARRAY(b->stack, n), ROTOR_ARRAY(b->lasting, m));
}

static int bound_init(bound_t *b, const rotor_dataflow_t *graph) {
    *b = (bound_t){.graph = graph, .work = MOST_BOUND_WORK};
    if (bound_arrays(b, graph->operation_count, graph->storage_count, true) != ROTOR_OK) {
        return ROTOR_ERR_NO_MEMORY;
    }
    for (int32_t s = 0; s < graph->storage_count; s++) {
        if (graph->pinned[s] || rotor_dataflow_once(graph, graph->producer[s])) {
            b->lasting[b->lasting_count++] = s;
            b->lasting_bytes += graph->bytes[s];
        }
    }
    return ROTOR_OK;
}

static int32_t reach(bound_t *b, int32_t op, int32_t depth, uint8_t place) {
    if (b->place[op] == 0) {
        b->place[op] = place;
        b->stack[depth++] = op;
    }
    return depth;
}

/* Finds the operations whose first run is before the first run of k in every order, or after it. */
static void find_places(bound_t *b, int32_t k) {
    const rotor_dataflow_t *g = b->graph;
    int32_t depth = 0;
    for (int32_t op = 0; op < g->operation_count; op++) {
        b->place[op] = g->phase[op] < g->phase[k] ? BEFORE : g->phase[op] > g->phase[k] ? AFTER : 0;
    }
    b->work -= g->operation_count;
    if (b->work <= 0) {
        return; /* the phases alone */
    }
    b->place[k] = BEFORE;
    b->stack[depth++] = k;
    while (depth > 0) {
        int32_t op = b->stack[--depth];
        b->work -= 1 + g->input_start[op + 1] - g->input_start[op];
        for (int32_t j = g->input_start[op]; j < g->input_start[op + 1]; j++) {
            depth = reach(b, g->producer[g->inputs[j]], depth, BEFORE);
        }
    }
    b->stack[depth++] = k;
    while (depth > 0) {
        int32_t op = b->stack[--depth];
        for (int32_t j = g->output_start[op]; j < g->output_start[op + 1]; j++) {
            int32_t s = g->outputs[j];
            b->work -= 1 + g->user_start[s + 1] - g->user_start[s];
            for (int32_t u = g->user_start[s]; u < g->user_start[s + 1]; u++) {
                depth = reach(b, g->users[u], depth, AFTER);
            }
        }
    }
    b->place[k] = 0;
}

static bool is_read_by(const rotor_dataflow_t *g, int32_t k, int32_t s) {
    for (int32_t j = g->input_start[k]; j < g->input_start[k + 1]; j++) {
        if (g->inputs[j] == s) {
            return true;
        }
    }
    return false;
}

/* Bytes beside k's own that are live in its first run: pinned ones that exist already, and ones that
 * cannot be made again and are read later. */
static int64_t bytes_beside(bound_t *b, int32_t k) {
    const rotor_dataflow_t *g = b->graph;
    int64_t bytes = 0;
    find_places(b, k);
    for (int32_t i = 0; i < b->lasting_count; i++) {
        int32_t s = b->lasting[i];
        bool is_live = g->pinned[s];
        if (b->place[g->producer[s]] != BEFORE || is_read_by(g, k, s)) {
            continue;
        }
        for (int32_t u = g->user_start[s]; u < g->user_start[s + 1] && !is_live; u++) {
            is_live = b->place[g->users[u]] == AFTER;
        }
        bytes += is_live ? g->bytes[s] : 0;
    }
    return bytes;
}

/* An operation of the last phase that makes pinned storages. */
typedef struct {
    int64_t pinned_bytes;    /* of what it makes */
    int64_t transient_bytes; /* of its run beside pinned storages */
} maker_t;

static int by_transient_bytes(const void *one, const void *other) {
    int64_t a = ((const maker_t *)one)->transient_bytes;
    int64_t b = ((const maker_t *)other)->transient_bytes;
    return (a < b) - (a > b);
}

/* The least that a run needs beside its inputs and all its outputs: with its tape, or without. */
static int64_t least_workspace(const rotor_dataflow_t *g, int32_t k) {
    int64_t tape = g->tape[k] < 0 ? 0 : g->bytes[g->tape[k]];
    return rotor_min(g->workspace_bytes[k], g->light_bytes[k] - tape);
}

static maker_t maker_of(const rotor_dataflow_t *g, int32_t k) {
    maker_t maker = {.transient_bytes = least_workspace(g, k)};
    for (int32_t j = g->input_start[k]; j < g->input_start[k + 1]; j++) {
        maker.transient_bytes += g->pinned[g->inputs[j]] ? 0 : g->bytes[g->inputs[j]];
    }
    for (int32_t j = g->output_start[k]; j < g->output_start[k + 1]; j++) {
        int32_t s = g->outputs[j];
        int64_t *bytes = g->pinned[s] ? &maker.pinned_bytes : &maker.transient_bytes;
        *bytes += g->bytes[s];
    }
    return maker;
}

static bool makes_pinned(const rotor_dataflow_t *g, int32_t k) {
    for (int32_t j = g->output_start[k]; j < g->output_start[k + 1]; j++) {
        if (g->pinned[g->outputs[j]]) {
            return true;
        }
    }
    return false;
}

/* Bytes while the last one of any set of makers runs for the first time, whichever that is: the
 * others' pinned storages exist then. The sets that matter are those of the largest runs. */
static int bytes_of_makers(const rotor_dataflow_t *g, int64_t *bytes) {
    int64_t pinned = 0;
    int32_t count = 0;
    uint8_t last = ROTOR_PHASE_FORWARD;
    maker_t *makers = rotor_malloc_array(g->operation_count, sizeof(*makers));
    if (makers == NULL) {
        return ROTOR_ERR_NO_MEMORY;
    }
    for (int32_t s = 0; s < g->storage_count; s++) {
        if (g->pinned[s] && g->phase[g->producer[s]] > last) {
            last = g->phase[g->producer[s]];
        }
    }
    for (int32_t k = 0; k < g->operation_count; k++) {
        if (makes_pinned(g, k)) {
            maker_t maker = maker_of(g, k);
            if (g->phase[k] == last) {
                makers[count++] = maker;
            } else {
                pinned += maker.pinned_bytes;
            }
        }
    }
    qsort(makers, (size_t)count, sizeof(*makers), by_transient_bytes);
    *bytes = pinned;
    for (int32_t i = 0; i < count; i++) {
        pinned += makers[i].pinned_bytes;
        *bytes = rotor_max(*bytes, pinned + makers[i].transient_bytes);
    }
    rotor_free(makers);
    return ROTOR_OK;
}

int rotor_dataflow_lower_bound(const rotor_dataflow_t *self, int64_t *bytes) {
    bound_t b;
    int64_t bound = 0;
    int ret = bound_init(&b, self);
    if (ret != ROTOR_OK || (ret = bytes_of_makers(self, &bound)) != ROTOR_OK) {
        goto out;
    }
    for (int32_t k = self->operation_count - 1; k >= 0; k--) {
        int64_t need = self->output_bytes[k] + least_workspace(self, k);
        for (int32_t j = self->input_start[k]; j < self->input_start[k + 1]; j++) {
            need += self->bytes[self->inputs[j]];
        }
        bound = rotor_max(bound, need);
        if (need + b.lasting_bytes > bound) {
            bound = rotor_max(bound, need + bytes_beside(&b, k));
        }
    }
    *bytes = bound;
out:
    (void)bound_arrays(&b, 0, 0, false);
    return ret;
}

int64_t rotor_dataflow_freed_bytes(const rotor_dataflow_t *self, int32_t storage) {
    int64_t bytes = self->bytes[storage];
    int32_t op = self->producer[storage];
    for (int32_t j = self->input_start[op]; self->lazy[storage] && j < self->input_start[op + 1];
         j++) {
        int32_t s = self->inputs[j];
        bytes += self->pinned[s] ? 0 : self->bytes[s];
    }
    return bytes;
}

void rotor_dataflow_time_by_bytes(rotor_dataflow_t *self, int64_t bytes_per_ns) {
    self->total_cost_ns = 0;
    for (int32_t k = 0; k < self->operation_count; k++) {
        self->cost_ns[k] = 1 + (bytes_per_ns == 0 ? 0 : self->output_bytes[k] / bytes_per_ns);
        self->total_cost_ns += self->cost_ns[k];
    }
}
