#include "program.h"

#include <string.h>

#include "vector.h"

void rotor_program_init(rotor_program_t *self) { memset(self, 0, sizeof(*self)); }

void rotor_program_free(rotor_program_t *self) {
    rotor_free(self->ops);
    rotor_program_init(self);
}

void rotor_plan_move(rotor_plan_t *from, rotor_plan_t *to) {
    if (from != to) {
        rotor_program_free(&to->program);
        *to = *from;
        rotor_program_init(&from->program);
    }
}

int rotor_program_append(rotor_program_t *self, int32_t operation) {
    return rotor_push(&self->ops, &self->length, &self->capacity, operation);
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

static int pricer_arrays(rotor_pricer_t *self, int64_t n, int64_t m, bool is_new) {
    return ROTOR_ARRAYS(is_new,
        ROTOR_ARRAY(self->made, m), ROTOR_ARRAY(self->last, m), ROTOR_ARRAY(self->needed, m),
        ROTOR_ARRAY(self->copied, m), ROTOR_ARRAY(self->runs, n), ROTOR_ARRAY(self->next, n));
}

static int moves_arrays(rotor_moves_t *moves, int64_t m, bool is_new) {
    return ROTOR_ARRAYS(is_new,
        ROTOR_ARRAY(moves->begun, m), ROTOR_ARRAY(moves->finished, m),
        ROTOR_ARRAY(moves->unused, m), ROTOR_ARRAY(moves->until, m),
        ROTOR_ARRAY(moves->fetched, m), ROTOR_ARRAY(moves->ready, m),
        ROTOR_ARRAY(moves->written, m));
}

void rotor_pricer_free(rotor_pricer_t *self) {
    const rotor_link_t *link = self->link;
    (void)pricer_arrays(self, 0, 0, false);
    (void)moves_arrays(&self->moves, 0, false);
    rotor_free(self->ended);
    rotor_free(self->light);
    rotor_free(self->moves.host);
    memset(self, 0, sizeof(*self));
    self->link = link;
}

static int moves_reserve(rotor_moves_t *moves, int64_t m, int64_t length) {
    if (moves->begun == NULL && moves_arrays(moves, m, true) != ROTOR_OK) {
        return ROTOR_ERR_NO_MEMORY;
    }
    return rotor_grow((void **)&moves->host, &moves->capacity, length + 2, sizeof(*moves->host));
}

static int program_reserve(rotor_pricer_t *self, const rotor_dataflow_t *graph, int64_t length) {
    int64_t m = graph->storage_count;
    int64_t n = graph->operation_count;
    int ret = self->made == NULL ? pricer_arrays(self, n, m, true) : ROTOR_OK;
    if (ret != ROTOR_OK) {
        goto out;
    }
    ret = rotor_grow((void **)&self->ended, &self->capacity, length + 1, sizeof(*self->ended));
    if (ret == ROTOR_OK) {
        ret = rotor_grow((void **)&self->light, &self->light_capacity, length + 1,
                         sizeof(*self->light));
    }
    if (ret == ROTOR_OK && self->link != NULL) {
        ret = n + 2 * m <= INT32_MAX ? moves_reserve(&self->moves, m, length) : ROTOR_ERR_OVERFLOW;
    }
out:
    if (ret == ROTOR_ERR_NO_MEMORY) {
        rotor_pricer_free(self);
    }
    return ret;
}

/* The bytes of a storage as it was made last. */
static int64_t made_bytes(const rotor_pricer_t *self, const rotor_dataflow_t *graph, int32_t s) {
    bool is_padded = self->link != NULL && self->moves.fetched[s];
    return graph->bytes[s] + (is_padded ? self->link->padding_bytes : 0);
}

static void end(rotor_pricer_t *self, const rotor_dataflow_t *graph, int32_t s) {
    if (graph->lazy[s] && self->last[s] == self->made[s]) {
        self->light[self->made[s]] = 1;
        return;
    }
    self->ended[self->last[s]] += made_bytes(self, graph, s);
}

static void trace_use(rotor_pricer_t *self, int32_t s, int32_t k) {
    self->last[s] = k;
    if (self->link != NULL && self->moves.unused[s] >= 0) {
        self->moves.unused[s] = -1;
        self->moves.until[s] = k;
    }
}

/* True if the copy that was made last goes with its last use. */
static bool goes(const rotor_pricer_t *self, const rotor_dataflow_t *graph, int32_t s) {
    return !graph->pinned[s] || (graph->pinned[s] == ROTOR_KEPT_FIRST && self->copied[s]);
}

static void trace_making(rotor_pricer_t *self, const rotor_dataflow_t *graph, int32_t s, int32_t k,
                         bool is_fetch) {
    bool is_copy = self->made[s] >= 0;
    if (is_copy && graph->pinned[s] == ROTOR_KEPT) {
        self->ended[k] += graph->bytes[s];
        return;
    }
    if (is_copy && goes(self, graph, s)) {
        end(self, graph, s);
    }
    self->copied[s] = is_copy;
    self->made[s] = k;
    self->last[s] = k;
    if (self->link != NULL) {
        self->moves.fetched[s] = is_fetch;
        self->moves.unused[s] = is_fetch ? k : -1;
    }
}

/* Notes what the item at position k makes and uses; the caller knows that the inputs are there. */
static void trace_item(rotor_pricer_t *self, const rotor_dataflow_t *graph, int32_t item,
                       int32_t k) {
    if (!rotor_item_is_run(graph, item)) {
        int32_t s = rotor_item_storage(graph, item);
        if (rotor_item_is_fetch(graph, item)) {
            trace_making(self, graph, s, k, true);
        } else {
            self->moves.begun[s] = self->made[s];
            self->moves.finished[s] = k;
            self->moves.until[s] = k;
            trace_use(self, s, k);
        }
        return;
    }
    for (int32_t j = graph->input_start[item]; j < graph->input_start[item + 1]; j++) {
        trace_use(self, graph->inputs[j], k);
    }
    for (int32_t j = graph->output_start[item]; j < graph->output_start[item + 1]; j++) {
        trace_making(self, graph, graph->outputs[j], k, false);
    }
}

static void begin_trace(rotor_pricer_t *self, const rotor_dataflow_t *graph, int64_t length) {
    for (int32_t s = 0; s < graph->storage_count; s++) {
        self->made[s] = -1;
    }
    memset(self->copied, 0, (size_t)graph->storage_count);
    memset(self->ended, 0, (size_t)length * sizeof(*self->ended));
    memset(self->light, 0, (size_t)length);
    for (int32_t s = 0; self->link != NULL && s < graph->storage_count; s++) {
        self->moves.begun[s] = -1;
        self->moves.finished[s] = -1;
        self->moves.unused[s] = -1;
        self->moves.fetched[s] = 0;
    }
}

/* The bytes that the item at position k adds; a run's workspace goes with it. */
static int64_t added_bytes(const rotor_pricer_t *self, const rotor_dataflow_t *graph, int32_t item,
                           int64_t k, int64_t *workspace) {
    *workspace = 0;
    if (rotor_item_is_run(graph, item)) {
        bool is_light = self->light[k];
        *workspace = is_light ? graph->light_bytes[item] : graph->workspace_bytes[item];
        return graph->output_bytes[item] - (is_light ? graph->bytes[graph->tape[item]] : 0);
    }
    return rotor_item_is_fetch(graph, item)
               ? graph->bytes[rotor_item_storage(graph, item)] + self->link->padding_bytes
               : 0;
}

/* The clocks go on over the item at position k. */
static void pass(rotor_pricer_t *self, const rotor_dataflow_t *graph, int32_t item, int32_t k,
                 rotor_clocks_t *clocks) {
    rotor_moves_t *moves = &self->moves;
    if (!rotor_item_is_run(graph, item)) {
        int32_t s = rotor_item_storage(graph, item);
        if (rotor_item_is_fetch(graph, item)) {
            moves->ready[s] = rotor_clocks_fetch(
                clocks, self->link, rotor_link_read_ns(self->link, graph->bytes[s]),
                moves->written[s]);
        } else {
            clocks->now = rotor_max(clocks->now, moves->written[s]);
        }
        return;
    }
    for (int32_t j = graph->input_start[item]; j < graph->input_start[item + 1]; j++) {
        clocks->now = rotor_max(clocks->now, moves->ready[graph->inputs[j]]);
    }
    if (graph->clock[item] == ROTOR_READS) {
        moves->ready[graph->outputs[graph->output_start[item]]] =
            rotor_clocks_fetch(clocks, self->link, graph->cost_ns[item], 0);
        return;
    }
    if (graph->clock[item] == ROTOR_WRITES) {
        rotor_clocks_put(clocks, self->link, graph->cost_ns[item]);
    }
    clocks->now = rotor_link_later(clocks->now, rotor_dataflow_run_ns(graph, item, true));
    for (int32_t j = graph->output_start[item]; j < graph->output_start[item + 1]; j++) {
        int32_t s = graph->outputs[j];
        moves->ready[s] = 0;
        if (moves->begun[s] == k) {
            moves->written[s] = rotor_clocks_write(
                clocks, self->link, rotor_link_write_ns(self->link, graph->bytes[s]));
        }
    }
}

static int run_clocks(rotor_pricer_t *self, const rotor_dataflow_t *graph, const int32_t *ops,
                      int64_t length, rotor_cost_t *price) {
    rotor_clocks_t clocks = {.now = 0};
    memset(self->moves.ready, 0, (size_t)graph->storage_count * sizeof(*self->moves.ready));
    for (int64_t k = 0; k < length; k++) {
        pass(self, graph, ops[k], (int32_t)k, &clocks);
    }
    price->time_ns = clocks.now;
    price->link_ns = clocks.link_ns;
    return rotor_max(clocks.now, clocks.link_ns) < ROTOR_LINK_ENDLESS ? ROTOR_OK
                                                                      : ROTOR_ERR_OVERFLOW;
}

/* The most that the tier holds, and where it first holds more than it may: -1 for nowhere. */
static int64_t price_host(rotor_pricer_t *self, const rotor_dataflow_t *graph, int64_t length,
                          rotor_cost_t *price) {
    const rotor_moves_t *moves = &self->moves;
    int64_t held = 0;
    int64_t above = -1;
    memset(moves->host, 0, (size_t)(length + 2) * sizeof(*moves->host));
    for (int32_t s = 0; s < graph->storage_count; s++) {
        if (moves->begun[s] >= 0) {
            moves->host[moves->begun[s]] += graph->bytes[s];
            moves->host[moves->until[s] + 1] -= graph->bytes[s];
        }
    }
    price->host_bytes = 0;
    for (int64_t k = 0; k < length; k++) {
        held += moves->host[k];
        price->host_bytes = rotor_max(price->host_bytes, held);
        above = above < 0 && held > self->link->host_bytes ? k : above;
    }
    return above;
}

static int finish_trace(rotor_pricer_t *self, const rotor_dataflow_t *graph, const int32_t *ops,
                        int64_t length, rotor_cost_t *price, int64_t *before, int64_t *peak) {
    int64_t live = 0;
    int64_t highest = 0;
    int64_t time = 0;
    for (int32_t s = 0; s < graph->storage_count; s++) {
        if (self->made[s] >= 0 && goes(self, graph, s)) {
            end(self, graph, s);
        }
    }
    for (int64_t k = 0; k < length; k++) {
        int32_t item = ops[k];
        bool is_run = rotor_item_is_run(graph, item);
        int64_t workspace;
        int64_t added = added_bytes(self, graph, item, k, &workspace);
        int64_t most = live + added + workspace;
        if (before != NULL) {
            before[k] = live;
        }
        if (peak != NULL) {
            peak[k] = most;
        }
        highest = rotor_max(highest, most);
        live += added - self->ended[k];
        int64_t ns = is_run ? rotor_dataflow_run_ns(graph, item, self->link != NULL) : 0;
        if (ns > INT64_MAX - time) {
            return ROTOR_ERR_OVERFLOW;
        }
        time += ns;
    }
    *price = (rotor_cost_t){.time_ns = time, .peak_bytes = highest, .compute_ns = time};
    return self->link == NULL ? ROTOR_OK : run_clocks(self, graph, ops, length, price);
}

int rotor_pricer_price(rotor_pricer_t *self, const rotor_dataflow_t *graph, const int32_t *ops,
                       int64_t length, rotor_cost_t *price) {
    int ret = program_reserve(self, graph, length);
    if (ret != ROTOR_OK) {
        return ret;
    }
    begin_trace(self, graph, length);
    for (int64_t k = 0; k < length; k++) {
        trace_item(self, graph, ops[k], (int32_t)k);
    }
    ret = finish_trace(self, graph, ops, length, price, NULL, NULL);
    if (ret == ROTOR_OK && self->link != NULL) {
        (void)price_host(self, graph, length, price);
    }
    return ret;
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
        [ROTOR_FAULT_LINK] = ROTOR_ERR_BAD_OPERATION,
        [ROTOR_FAULT_FIXED] = ROTOR_ERR_BAD_OPERATION,
        [ROTOR_FAULT_NOT_MADE] = ROTOR_ERR_NO_INPUT,
        [ROTOR_FAULT_WRITTEN] = ROTOR_ERR_TWICE,
        [ROTOR_FAULT_NOT_WRITTEN] = ROTOR_ERR_NO_INPUT,
        [ROTOR_FAULT_UNUSED] = ROTOR_ERR_INCOMPLETE,
        [ROTOR_FAULT_HOST] = ROTOR_ERR_INFEASIBLE,
        [ROTOR_FAULT_TAPE] = ROTOR_ERR_NO_TAPE,
    };
    if (fault != NULL) {
        *fault = (rotor_fault_t){
            .kind = kind, .position = position, .operation = operation, .storage = storage};
    }
    return statuses[kind];
}

/* What is known of the items so far while a program is checked. */
typedef struct {
    const rotor_dataflow_t *graph;
    rotor_pricer_t pricer;
    int32_t phase;   /* of the last first run */
    int32_t flagged; /* the last first run with a flag */
} check_t;

/* True unless s is a tape and something that the run that made it read was made again since. */
static bool holds_inputs(const check_t *c, int32_t s) {
    const rotor_dataflow_t *graph = c->graph;
    const int32_t *made = c->pricer.made;
    int32_t op = graph->producer[s];
    for (int32_t j = graph->input_start[op]; graph->lazy[s] && j < graph->input_start[op + 1]; j++) {
        if (made[graph->inputs[j]] > made[s]) {
            return false;
        }
    }
    return true;
}

static enum rotor_fault check_run(const check_t *c, int32_t op, int32_t *storage,
                                  int64_t *position) {
    const rotor_dataflow_t *graph = c->graph;
    bool is_first = c->pricer.runs[op] == 0;
    if (!is_first && rotor_dataflow_once(graph, op)) {
        return ROTOR_FAULT_ONCE;
    }
    if (is_first && graph->phase[op] < c->phase) {
        return ROTOR_FAULT_PHASE;
    }
    if (is_first && graph->flags[op] != 0 && op < c->flagged) {
        return ROTOR_FAULT_ORDER;
    }
    for (int32_t j = graph->input_start[op]; j < graph->input_start[op + 1]; j++) {
        int32_t s = graph->inputs[j];
        if (c->pricer.made[s] < 0 || !holds_inputs(c, s)) {
            *storage = s;
            return c->pricer.made[s] < 0 ? ROTOR_FAULT_INPUT : ROTOR_FAULT_TAPE;
        }
    }
    for (int32_t j = graph->output_start[op];
         c->pricer.link != NULL && j < graph->output_start[op + 1]; j++) {
        int32_t s = graph->outputs[j];
        if (c->pricer.moves.unused[s] >= 0) {
            *storage = s;
            *position = c->pricer.moves.unused[s];
            return ROTOR_FAULT_UNUSED;
        }
    }
    return ROTOR_FAULT_NONE;
}

static enum rotor_fault check_action(const check_t *c, int32_t item, int64_t *position) {
    const rotor_moves_t *moves = &c->pricer.moves;
    int32_t s = rotor_item_storage(c->graph, item);
    if (!rotor_link_moves(c->pricer.link, c->graph, s)) {
        return ROTOR_FAULT_FIXED;
    }
    if (rotor_item_is_fetch(c->graph, item)) {
        if (moves->finished[s] < 0) {
            return ROTOR_FAULT_NOT_WRITTEN;
        }
        *position = moves->unused[s] >= 0 ? moves->unused[s] : *position;
        return moves->unused[s] >= 0 ? ROTOR_FAULT_UNUSED : ROTOR_FAULT_NONE;
    }
    return c->pricer.made[s] < 0      ? ROTOR_FAULT_NOT_MADE
           : moves->finished[s] >= 0 ? ROTOR_FAULT_WRITTEN
                                      : ROTOR_FAULT_NONE;
}

static int check_item(check_t *c, int32_t item, int64_t k, rotor_fault_t *fault) {
    const rotor_dataflow_t *graph = c->graph;
    int64_t items = graph->operation_count + 2 * (int64_t)graph->storage_count;
    enum rotor_fault kind = ROTOR_FAULT_NONE;
    int32_t storage = -1;
    int32_t op = item;
    int64_t position = k;
    if (item < 0 || item >= items) {
        return report(fault, ROTOR_FAULT_OPERATION, k, item, -1);
    }
    if (rotor_item_is_run(graph, item)) {
        kind = check_run(c, item, &storage, &position);
    } else {
        storage = rotor_item_storage(graph, item);
        op = graph->producer[storage];
        kind = c->pricer.link == NULL ? ROTOR_FAULT_LINK : check_action(c, item, &position);
    }
    if (kind != ROTOR_FAULT_NONE) {
        return report(fault, kind, position, op, storage);
    }
    if (rotor_item_is_run(graph, item) && c->pricer.runs[item]++ == 0) {
        c->phase = graph->phase[item];
        c->flagged = graph->flags[item] != 0 ? item : c->flagged;
    }
    trace_item(&c->pricer, graph, item, (int32_t)k);
    return ROTOR_OK;
}

/* What is wrong at the end of the items: operations that are missing, fetches without a use. */
static int check_end(const check_t *c, int64_t length, rotor_fault_t *fault) {
    const rotor_dataflow_t *graph = c->graph;
    int32_t first = -1;
    for (int32_t op = 0; op < graph->operation_count; op++) {
        if (c->pricer.runs[op] == 0) {
            return report(fault, ROTOR_FAULT_MISSING, length, op, -1);
        }
    }
    for (int32_t s = 0; c->pricer.link != NULL && s < graph->storage_count; s++) {
        const int32_t *unused = c->pricer.moves.unused;
        if (unused[s] >= 0 && (first < 0 || unused[s] < unused[first])) {
            first = s;
        }
    }
    return first < 0 ? ROTOR_OK
                     : report(fault, ROTOR_FAULT_UNUSED, c->pricer.moves.unused[first],
                              graph->producer[first], first);
}

static int check_host(check_t *c, const int32_t *ops, int64_t length, rotor_cost_t *price,
                      rotor_fault_t *fault) {
    const rotor_dataflow_t *graph = c->graph;
    int64_t k = price_host(&c->pricer, graph, length, price);
    if (k < 0) {
        return ROTOR_OK;
    }
    int32_t storage = -1;
    for (int32_t j = graph->output_start[ops[k]]; j < graph->output_start[ops[k] + 1]; j++) {
        storage = c->pricer.moves.begun[graph->outputs[j]] == k ? graph->outputs[j] : storage;
    }
    return report(fault, ROTOR_FAULT_HOST, k, ops[k], storage);
}

int rotor_program_simulate(const rotor_dataflow_t *graph, const rotor_link_t *link,
                           const int32_t *ops, int64_t length, rotor_cost_t *price, int64_t *before,
                           int64_t *peak, rotor_fault_t *fault) {
    check_t c = {.graph = graph, .phase = ROTOR_PHASE_FORWARD, .flagged = -1};
    rotor_cost_t found = {0};
    c.pricer.link = link;
    report(fault, ROTOR_FAULT_NONE, -1, -1, -1);
    int ret = link == NULL ? ROTOR_OK : rotor_link_check(link);
    if (ret != ROTOR_OK || (ret = program_reserve(&c.pricer, graph, length)) != ROTOR_OK) {
        goto out;
    }
    begin_trace(&c.pricer, graph, length);
    memset(c.pricer.runs, 0, (size_t)graph->operation_count * sizeof(*c.pricer.runs));
    for (int64_t k = 0; k < length; k++) {
        if ((ret = check_item(&c, ops[k], k, fault)) != ROTOR_OK) {
            goto out;
        }
    }
    if ((ret = check_end(&c, length, fault)) != ROTOR_OK ||
        (ret = finish_trace(&c.pricer, graph, ops, length, &found, before, peak)) != ROTOR_OK ||
        (link != NULL && (ret = check_host(&c, ops, length, &found, fault)) != ROTOR_OK)) {
        goto out;
    }
    *price = found;
out:
    rotor_pricer_free(&c.pricer);
    return ret;
}

/* The ends of the first runs of each phase: no operation of it may begin later. Counts runs, and
 * finishes in `finished`. */
static void phase_ends(rotor_pricer_t *self, const rotor_dataflow_t *graph, const int32_t *ops,
                       int64_t length, int64_t ends[3]) {
    int32_t phase = ROTOR_PHASE_FORWARD;
    ends[0] = ends[1] = ends[2] = length;
    memset(self->runs, 0, (size_t)graph->operation_count * sizeof(*self->runs));
    for (int64_t k = 0; k < length; k++) {
        int32_t op = ops[k];
        if (!rotor_item_is_run(graph, op)) {
            self->moves.finished[rotor_item_storage(graph, op)] +=
                !rotor_item_is_fetch(graph, op);
        } else if (self->runs[op]++ == 0 && graph->phase[op] > phase) {
            for (; phase < graph->phase[op]; phase++) {
                ends[phase] = k;
            }
        }
    }
}

/* True if the run of op at k makes something that a kept run reads. Storages of ROTOR_KEPT are read
 * as the first run made them. */
static bool is_read(const rotor_pricer_t *self, const rotor_dataflow_t *graph, int32_t op,
                    bool is_first) {
    for (int32_t j = graph->output_start[op]; j < graph->output_start[op + 1]; j++) {
        int32_t s = graph->outputs[j];
        if (self->needed[s] && (is_first || graph->pinned[s] != ROTOR_KEPT)) {
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

/* True if an action has a use: a fetch that something reads, the first finish of what is fetched. */
static bool keeps_action(rotor_pricer_t *self, const rotor_dataflow_t *graph, int32_t item) {
    int32_t s = rotor_item_storage(graph, item);
    if (rotor_item_is_fetch(graph, item)) {
        bool is_kept = self->needed[s];
        self->moves.fetched[s] |= is_kept;
        self->needed[s] = 0;
        return is_kept;
    }
    bool is_kept = --self->moves.finished[s] == 0 && self->moves.fetched[s];
    self->needed[s] |= is_kept;
    return is_kept;
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
    if (self->link != NULL) {
        memset(self->moves.finished, 0,
               (size_t)graph->storage_count * sizeof(*self->moves.finished));
        memset(self->moves.fetched, 0, (size_t)graph->storage_count);
    }
    phase_ends(self, graph, ops, program->length, ends);
    memset(self->needed, 0, (size_t)graph->storage_count);
    for (int32_t op = 0; op < graph->operation_count; op++) {
        self->next[op] = -1;
    }
    for (int64_t k = program->length - 1; k >= 0; k--) {
        int32_t op = ops[k];
        if (!rotor_item_is_run(graph, op)) {
            if (keeps_action(self, graph, op)) {
                ops[--kept] = op;
            }
            continue;
        }
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
