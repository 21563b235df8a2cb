#include "bound.h"

#include <stdlib.h>
#include <string.h>

#define MOST_WORK 100000000 /* elementary steps */
#define UNBOUNDED (INT64_MAX / 4)

/* A flow from nodes with more than they keep to nodes that lack some; arc k ^ 1 is k's reverse. */
typedef struct {
    int32_t node_count;
    int32_t arc_count;
    int32_t *first; /* arc of a node, -1: none */
    int32_t *next;  /* by arc, of the same node */
    int32_t *to;
    int64_t *left; /* by arc, what it may still take */
    int64_t *more; /* by node */
    int64_t *lack;
    int32_t *level;
    int32_t *at;    /* arc of a node that is tried next */
    int32_t *queue; /* of nodes; then the arcs of a path */
    int64_t work;   /* steps left */
} flow_t;

static int flow_arrays(flow_t *f, int64_t nodes, int64_t arcs, bool is_new) {
    return ROTOR_ARRAYS(is_new,
        ROTOR_ARRAY(f->first, nodes), ROTOR_ARRAY(f->next, arcs), ROTOR_ARRAY(f->to, arcs),
        ROTOR_ARRAY(f->left, arcs), ROTOR_ARRAY(f->more, nodes), ROTOR_ARRAY(f->lack, nodes),
        ROTOR_ARRAY(f->level, nodes), ROTOR_ARRAY(f->at, nodes), ROTOR_ARRAY(f->queue, nodes));
}

static int flow_init(flow_t *f, int64_t nodes, int64_t arcs) {
    *f = (flow_t){.node_count = (int32_t)nodes, .work = MOST_WORK};
    int ret = flow_arrays(f, nodes, arcs, true);
    if (ret == ROTOR_OK) {
        memset(f->first, -1, (size_t)nodes * sizeof(*f->first));
    }
    return ret;
}

static int32_t add_arc(flow_t *f, int32_t from, int32_t to, int64_t most) {
    int32_t arc = f->arc_count;
    for (int32_t k = 0; k < 2; k++) {
        int32_t node = k == 0 ? from : to;
        f->to[arc + k] = k == 0 ? to : from;
        f->left[arc + k] = k == 0 ? most : 0;
        f->next[arc + k] = f->first[node];
        f->first[node] = arc + k;
    }
    f->arc_count += 2;
    return arc;
}

/* Numbers the nodes by their distance from those that have more; false where none reached lacks. */
static bool flow_levels(flow_t *f) {
    int32_t count = 0;
    bool is_reached = false;
    for (int32_t v = 0; v < f->node_count; v++) {
        f->at[v] = f->first[v];
        f->level[v] = f->more[v] > 0 ? 0 : -1;
        if (f->more[v] > 0) {
            f->queue[count++] = v;
        }
    }
    f->work -= f->node_count;
    for (int32_t k = 0; k < count; k++) {
        int32_t v = f->queue[k];
        is_reached = is_reached || f->lack[v] > 0;
        for (int32_t arc = f->first[v]; arc >= 0; arc = f->next[arc], f->work--) {
            int32_t to = f->to[arc];
            if (f->left[arc] > 0 && f->level[to] < 0) {
                f->level[to] = f->level[v] + 1;
                f->queue[count++] = to;
            }
        }
    }
    return is_reached;
}

/* Sends what it can along the arcs of a path; returns how much. */
static int64_t send(flow_t *f, int32_t from, int32_t to, int32_t length) {
    int64_t amount = rotor_min(f->more[from], f->lack[to]);
    for (int32_t k = 0; k < length; k++) {
        amount = rotor_min(amount, f->left[f->queue[k]]);
    }
    for (int32_t k = 0; k < length; k++) {
        f->left[f->queue[k]] -= amount;
        f->left[f->queue[k] ^ 1] += amount;
    }
    f->work -= length;
    f->more[from] -= amount;
    f->lack[to] -= amount;
    return amount;
}

static int64_t send_from(flow_t *f, int32_t from) {
    int64_t sent = 0;
    int32_t length = 0;
    int32_t v = from;
    while (f->more[from] > 0) {
        if (f->lack[v] > 0) {
            sent += send(f, from, v, length);
            length = 0;
            v = from;
            continue;
        }
        int32_t arc = f->at[v];
        while (arc >= 0 && (f->left[arc] == 0 || f->level[f->to[arc]] != f->level[v] + 1)) {
            arc = f->next[arc];
            f->work--;
        }
        f->at[v] = arc;
        if (arc >= 0) {
            f->queue[length++] = arc;
            v = f->to[arc];
        } else if (length == 0) {
            break;
        } else {
            f->level[v] = -1;
            v = f->to[f->queue[--length] ^ 1];
        }
    }
    return sent;
}

/* Sends all that can be sent, while there is work left; returns how much. */
static int64_t flow_run(flow_t *f) {
    int64_t sent = 0;
    while (f->work > 0 && flow_levels(f)) {
        for (int32_t v = 0; v < f->node_count; v++) {
            sent += f->more[v] > 0 ? send_from(f, v) : 0;
        }
    }
    return sent;
}

typedef struct {
    int64_t bytes; /* that it needs for itself */
    int32_t operation;
    bool is_exact;
    int64_t bound; /* on what is live when it is the last to run */
} heavy_t;

static int by_need(const void *one, const void *other) {
    const heavy_t *a = one;
    const heavy_t *b = other;
    return a->bytes != b->bytes ? (a->bytes < b->bytes) - (a->bytes > b->bytes)
                                : a->operation - b->operation;
}

/* Nodes: two for each storage, its making and what follows; each operation; the ends. The arcs of a
 * storage's bytes come first, then those from the beginning to operations. */
typedef struct {
    const rotor_dataflow_t *graph;
    flow_t flow;
    int64_t *full; /* copy of `left` */
    heavy_t *heavy;
    int64_t value; /* of the flow */
} cuts_t;

static int32_t operation_node(const rotor_dataflow_t *g, int32_t k) {
    return 2 * g->storage_count + k;
}

static int cuts_init(cuts_t *c, const rotor_dataflow_t *g) {
    int32_t m = g->storage_count;
    int32_t n = g->operation_count;
    int64_t arcs = 2 * (3 * (int64_t)m + n + g->input_start[n] + g->output_start[n]);
    int32_t begin = 2 * m + n;
    uint8_t last = g->phase[n - 1];
    *c = (cuts_t){.graph = g};
    if (arcs > INT32_MAX) {
        return ROTOR_ERR_TOO_LARGE;
    }
    int ret = flow_init(&c->flow, (int64_t)begin + 2, arcs);
    c->full = rotor_malloc_array(arcs, sizeof(*c->full));
    c->heavy = rotor_malloc_array(n, sizeof(*c->heavy));
    if (ret != ROTOR_OK || c->full == NULL || c->heavy == NULL) {
        return ROTOR_ERR_NO_MEMORY;
    }
    flow_t *f = &c->flow;
    f->more[begin] = UNBOUNDED;
    f->lack[begin + 1] = UNBOUNDED;
    for (int32_t s = 0; s < m; s++) {
        (void)add_arc(f, 2 * s, 2 * s + 1, g->bytes[s]);
    }
    for (int32_t k = 0; k < n; k++) {
        bool is_gone = g->phase[k] < last && rotor_dataflow_once(g, k);
        (void)add_arc(f, begin, operation_node(g, k), is_gone ? UNBOUNDED : 0);
    }
    for (int32_t k = 0; k < n; k++) {
        c->heavy[k] = (heavy_t){.operation = k, .bytes = g->workspace_bytes[k] + g->output_bytes[k]};
        for (int32_t j = g->input_start[k]; j < g->input_start[k + 1]; j++) {
            c->heavy[k].bytes += g->bytes[g->inputs[j]];
            (void)add_arc(f, 2 * g->inputs[j] + 1, operation_node(g, k), UNBOUNDED);
        }
        for (int32_t j = g->output_start[k]; j < g->output_start[k + 1]; j++) {
            int32_t s = g->outputs[j];
            (void)add_arc(f, operation_node(g, k), 2 * s, UNBOUNDED);
            if (g->pinned[s]) {
                (void)add_arc(f, 2 * s + 1, begin + 1, UNBOUNDED);
                (void)add_arc(f, begin, 2 * s, g->phase[k] < last ? UNBOUNDED : 0);
            }
        }
    }
    qsort(c->heavy, (size_t)n, sizeof(*c->heavy), by_need);
    return ROTOR_OK;
}

static void cuts_free(cuts_t *c) {
    (void)flow_arrays(&c->flow, 0, 0, false);
    rotor_free(c->full);
    rotor_free(c->heavy);
}

/* Bytes of the flow through one storage. */
static int64_t flow_through(const cuts_t *c, int32_t s) { return c->flow.left[2 * s + 1]; }

/* At most what a heavy operation needs and the flow that its own storages have no part in: what passes
 * several of them is taken off for each. */
static int64_t estimate(const cuts_t *c, const heavy_t *heavy) {
    const rotor_dataflow_t *g = c->graph;
    int32_t k = heavy->operation;
    int64_t bound = heavy->bytes + c->value;
    for (int32_t j = g->input_start[k]; j < g->input_start[k + 1]; j++) {
        bound -= flow_through(c, g->inputs[j]);
    }
    for (int32_t j = g->output_start[k]; j < g->output_start[k + 1]; j++) {
        bound -= flow_through(c, g->outputs[j]);
    }
    return bound;
}

/* Closes a storage: the flow through it has to find other ways. */
static void close_storage(flow_t *f, int32_t s) {
    f->more[2 * s] = f->left[2 * s + 1];
    f->lack[2 * s + 1] = f->left[2 * s + 1];
    f->left[2 * s] = 0;
    f->left[2 * s + 1] = 0;
}

/* The same, with what passes several of them taken off once, and what finds other ways added. */
static int64_t exact(cuts_t *c, const heavy_t *heavy) {
    const rotor_dataflow_t *g = c->graph;
    flow_t *f = &c->flow;
    int32_t k = heavy->operation;
    int32_t begin = 2 * g->storage_count + g->operation_count;
    int64_t more = f->more[begin];
    int64_t lack = f->lack[begin + 1];
    int64_t bound = estimate(c, heavy);
    size_t size = (size_t)f->arc_count * sizeof(*f->left);
    memcpy(c->full, f->left, size);
    f->more[begin] = 0;
    f->lack[begin + 1] = 0;
    for (int32_t j = g->input_start[k]; j < g->input_start[k + 1]; j++) {
        close_storage(f, g->inputs[j]);
    }
    for (int32_t j = g->output_start[k]; j < g->output_start[k + 1]; j++) {
        close_storage(f, g->outputs[j]);
    }
    bound += flow_run(f);
    memcpy(f->left, c->full, size);
    for (int32_t v = 0; v < begin; v++) {
        f->more[v] = 0;
        f->lack[v] = 0;
    }
    f->more[begin] = more;
    f->lack[begin + 1] = lack;
    f->work -= f->arc_count;
    return bound;
}

/* The least of the bounds of the first heavy operations, whichever is the last to run. */
static int64_t least_bound(cuts_t *c, int32_t count, int64_t best) {
    for (int32_t k = 0; k < count; k++) {
        c->heavy[k].bound = estimate(c, &c->heavy[k]);
        c->heavy[k].is_exact = false;
    }
    for (;;) {
        heavy_t *least = &c->heavy[0];
        for (int32_t k = 1; k < count; k++) {
            least = c->heavy[k].bound < least->bound ? &c->heavy[k] : least;
        }
        c->flow.work -= count;
        /* More than the need with the whole flow it never is. */
        if (least->is_exact || c->flow.work <= 0 || least->bytes + c->value <= best) {
            return least->bound;
        }
        least->bound = exact(c, least);
        least->is_exact = true;
    }
}

int rotor_bound(const rotor_dataflow_t *graph, int64_t *bytes) {
    cuts_t c;
    int32_t n = graph->operation_count;
    int64_t pinned = 0;
    bool has_last = false;
    int ret = rotor_dataflow_lower_bound(graph, bytes);
    if (ret != ROTOR_OK || !graph->is_plain) {
        return ret;
    }
    for (int32_t s = 0; s < graph->storage_count; s++) {
        pinned += graph->pinned[s] ? graph->bytes[s] : 0;
    }
    ret = cuts_init(&c, graph);
    for (int32_t k = 0; k < n && ret == ROTOR_OK && c.flow.work > 0;) {
        int64_t need = c.heavy[k].bytes;
        if (need + pinned <= *bytes) {
            break;
        }
        for (; k < n && c.heavy[k].bytes == need; k++) {
            int32_t operation = c.heavy[k].operation;
            c.flow.left[2 * (graph->storage_count + operation)] = UNBOUNDED;
            has_last = has_last || graph->phase[operation] == graph->phase[n - 1];
        }
        c.value += flow_run(&c.flow);
        if (has_last && need + c.value > *bytes) {
            *bytes = rotor_max(*bytes, least_bound(&c, k, *bytes));
        }
    }
    cuts_free(&c);
    return ret == ROTOR_ERR_TOO_LARGE ? ROTOR_OK : ret;
}
