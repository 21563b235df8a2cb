#include "dataflow.h"

#include <string.h>

#define MOST_ITEMS (INT64_C(1) << 30)

void rotor_dataflow_init(rotor_dataflow_t *self) { memset(self, 0, sizeof(*self)); }

void rotor_dataflow_free(rotor_dataflow_t *self) {
    rotor_free(self->cost_ns);
    rotor_free(self->workspace_bytes);
    rotor_free(self->output_bytes);
    rotor_free(self->phase);
    rotor_free(self->flags);
    rotor_free(self->input_start);
    rotor_free(self->inputs);
    rotor_free(self->output_start);
    rotor_free(self->outputs);
    rotor_free(self->bytes);
    rotor_free(self->pinned);
    rotor_free(self->producer);
    rotor_free(self->user_start);
    rotor_free(self->users);
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

static int check_operation(const rotor_dataflow_arrays_t *a, int64_t k) {
    int ret = check_size(a->workspace_bytes[k]);
    if (ret != ROTOR_OK) {
        return ret;
    }
    if (a->cost_ns[k] < 0) {
        return ROTOR_ERR_NEGATIVE_TIME;
    }
    if (a->cost_ns[k] > ROTOR_MAX_VALUE) {
        return ROTOR_ERR_TOO_LARGE;
    }
    if (a->phase[k] < ROTOR_PHASE_FORWARD || a->phase[k] > ROTOR_PHASE_BACKWARD || a->flags[k] < 0 ||
        a->flags[k] > (ROTOR_ONCE | ROTOR_RANDOM)) {
        return ROTOR_ERR_BAD_OPERATION;
    }
    return ROTOR_OK;
}

static int dataflow_check(const rotor_dataflow_arrays_t *a) {
    int ret = ROTOR_OK;
    int64_t bytes = 0;
    int64_t workspace = 0;
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
        if (a->pinned[s] != 0 && a->pinned[s] != 1) {
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
        workspace = rotor_max(workspace, a->workspace_bytes[k]);
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
    g->cost_ns = rotor_malloc_array(n, sizeof(*g->cost_ns));
    g->workspace_bytes = rotor_malloc_array(n, sizeof(*g->workspace_bytes));
    g->output_bytes = rotor_malloc_array(n, sizeof(*g->output_bytes));
    g->phase = rotor_malloc_array(n, sizeof(*g->phase));
    g->flags = rotor_malloc_array(n, sizeof(*g->flags));
    g->input_start = rotor_malloc_array(n + 1, sizeof(*g->input_start));
    g->inputs = rotor_malloc_array(a->input_start[n], sizeof(*g->inputs));
    g->output_start = rotor_malloc_array(n + 1, sizeof(*g->output_start));
    g->outputs = rotor_malloc_array(a->output_start[n], sizeof(*g->outputs));
    g->bytes = rotor_malloc_array(m, sizeof(*g->bytes));
    g->pinned = rotor_malloc_array(m, sizeof(*g->pinned));
    g->producer = rotor_malloc_array(m, sizeof(*g->producer));
    g->user_start = rotor_calloc((size_t)m + 1, sizeof(*g->user_start));
    g->users = rotor_malloc_array(a->input_start[n], sizeof(*g->users));
    return g->cost_ns == NULL || g->workspace_bytes == NULL || g->output_bytes == NULL ||
                   g->phase == NULL || g->flags == NULL || g->input_start == NULL ||
                   g->inputs == NULL || g->output_start == NULL || g->outputs == NULL ||
                   g->bytes == NULL || g->pinned == NULL || g->producer == NULL ||
                   g->user_start == NULL || g->users == NULL
               ? ROTOR_ERR_NO_MEMORY
               : ROTOR_OK;
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
    g->output_bytes[k] = 0;
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
    }
    g->output_start[k + 1] = at;
    return ROTOR_OK;
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
        g.producer[s] = -1;
        g.total_bytes += g.bytes[s];
        scratch[s] = -1;
    }
    g.input_start[0] = 0;
    g.output_start[0] = 0;
    for (int32_t k = 0; k < g.operation_count; k++) {
        g.cost_ns[k] = arrays->cost_ns[k];
        g.workspace_bytes[k] = arrays->workspace_bytes[k];
        g.phase[k] = (uint8_t)arrays->phase[k];
        g.flags[k] = (uint8_t)(arrays->flags[k] | (g.phase[k] == ROTOR_PHASE_LOSS ? ROTOR_ONCE : 0));
        g.total_cost_ns += g.cost_ns[k];
        workspace = rotor_max(workspace, g.workspace_bytes[k]);
        if ((ret = add_inputs(&g, arrays, k, scratch)) != ROTOR_OK ||
            (ret = add_outputs(&g, arrays, k)) != ROTOR_OK) {
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

int rotor_dataflow_lower_bound(const rotor_dataflow_t *self, int64_t *bytes) {
    int64_t pinned[3] = {0, 0, 0}; /* by the phase that makes them */
    int64_t bound = 0;
    int64_t all = 0;
    for (int32_t s = 0; s < self->storage_count; s++) {
        if (self->pinned[s]) {
            pinned[self->phase[self->producer[s]]] += self->bytes[s];
            all += self->bytes[s];
        }
    }
    for (int32_t k = 0; k < self->operation_count; k++) {
        int32_t phase = self->phase[k];
        int64_t need = self->output_bytes[k] + self->workspace_bytes[k];
        int64_t before = 0; /* pinned in earlier phases, which are over when k first runs */
        for (int32_t p = 0; p < phase; p++) {
            before += pinned[p];
        }
        for (int32_t j = self->input_start[k]; j < self->input_start[k + 1]; j++) {
            int32_t s = self->inputs[j];
            bool counted = self->pinned[s] && self->phase[self->producer[s]] < phase;
            need += counted ? 0 : self->bytes[s];
        }
        bound = rotor_max(bound, need + before);
    }
    *bytes = rotor_max(bound, all);
    return ROTOR_OK;
}
