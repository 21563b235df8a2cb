#include "planner_greedy.h"

#include <math.h>
#include <string.h>

#include "vector.h"

void rotor_setting_fixed(int32_t k, rotor_setting_t *setting) {
    static const double powers[][3] = {
        {0.5, 1.0, 1.0}, {1.0, 1.0, 1.0}, {0.3, 0.7, 1.0}, {1.0, 0.5, 1.0},
        {0.0, 1.0, 1.0}, {2.0, 1.0, 1.0}, {1.0, 1.0, 0.7}, {1.0, 1.0, 0.0},
    };
    const int32_t count = (int32_t)(sizeof(powers) / sizeof(powers[0]));
    *setting = (rotor_setting_t){
        .size_power = powers[k % count][0],
        .distance_power = powers[k % count][1],
        .cost_power = powers[k % count][2],
        .slack = k / count == 1 ? 1.04 : 1.0,
        .neighbourhood = 1000,
        .keeps_tapes = k % 2 == 1,
    };
}

void rotor_setting_random(rotor_random_t *random, rotor_setting_t *setting) {
    static const int32_t sizes[] = {1, 4, 32, 1000};
    *setting = (rotor_setting_t){
        .size_power = 2.0 * rotor_random_unit(random),
        .distance_power = 1.5 * rotor_random_unit(random),
        .cost_power = 0.3 + rotor_random_unit(random),
        .noise = rotor_random_below(random, 4) == 0 ? 0.0 : 1.5 * rotor_random_unit(random),
        .slack = rotor_random_below(random, 2) == 0 ? 1.0 : 1.0 + 0.1 * rotor_random_unit(random),
        .neighbourhood = sizes[rotor_random_below(random, 4)],
        .is_reversed = rotor_random_below(random, 2) == 0,
        .is_loose = rotor_random_below(random, 4) == 0,
    };
    setting->keeps_tapes = setting->distance_power > 0.75;
}

static int greedy_arrays(rotor_greedy_t *g, int64_t n, int64_t m, int64_t uses, bool is_new) {
    return ROTOR_ARRAYS(is_new,
        ROTOR_ARRAY(g->positions, n), ROTOR_ARRAY(g->uses, uses), ROTOR_ARRAY(g->cursor, m),
        ROTOR_ARRAY(g->next_use, m), ROTOR_ARRAY(g->size_score, m), ROTOR_ARRAY(g->cost_log, m),
        ROTOR_ARRAY(g->distance_log, n + 2), ROTOR_ARRAY(g->log_table, n + 2),
        ROTOR_ARRAY(g->is_live, m), ROTOR_ARRAY(g->is_clean, m), ROTOR_ARRAY(g->is_kept, m),
        ROTOR_ARRAY(g->locks, m), ROTOR_ARRAY(g->live, m), ROTOR_ARRAY(g->slot, m),
        ROTOR_ARRAY(g->stamp, n), ROTOR_ARRAY(g->stack, m + n), ROTOR_ARRAY(g->frames, n + 1),
        ROTOR_ARRAY(g->frame_locks, n + 1), ROTOR_ARRAY(g->wants_tape, n + 1),
        ROTOR_ARRAY(g->visited, n + 1));
}

void rotor_greedy_free(rotor_greedy_t *self) {
    const rotor_link_t *link = self->tier.link;
    rotor_greedy_tier_free(&self->tier);
    (void)greedy_arrays(self, 0, 0, 0, false);
    memset(self, 0, sizeof(*self));
    self->tier.link = link;
}

static void sort_uses(rotor_greedy_t *g) {
    const rotor_dataflow_t *graph = g->graph;
    for (int32_t s = 0; s < graph->storage_count; s++) {
        g->cursor[s] = graph->user_start[s];
    }
    for (int32_t k = 0; k < graph->operation_count; k++) {
        int32_t op = g->order[k];
        g->positions[op] = k;
        for (int32_t j = graph->input_start[op]; j < graph->input_start[op + 1]; j++) {
            g->uses[g->cursor[graph->inputs[j]]++] = k;
        }
    }
}

int rotor_greedy_prepare(rotor_greedy_t *self, const rotor_dataflow_t *graph,
                         const int32_t *order) {
    int ret = ROTOR_OK;

    self->order = order;
    if (self->graph == NULL) {
        self->graph = graph;
        int64_t m = graph->storage_count;
        ret = greedy_arrays(self, graph->operation_count, m, graph->user_start[m], true);
        if (ret != ROTOR_OK ||
            (ret = rotor_greedy_tier_prepare(&self->tier, graph)) != ROTOR_OK) {
            goto out;
        }
        for (int32_t d = 0; d < graph->operation_count + 2; d++) {
            self->log_table[d] = (float)log((double)d + 1.0);
        }
    }
    sort_uses(self);
out:
    if (ret != ROTOR_OK) {
        rotor_greedy_free(self);
    }
    return ret;
}

/* Everything that reads s through evicted storages has another recompute cost now. */
static void invalidate(rotor_greedy_t *g, int32_t s) {
    const rotor_dataflow_t *graph = g->graph;
    int32_t depth = 0;
    g->stack[depth++] = s;
    while (depth > 0) {
        int32_t x = g->stack[--depth];
        g->work += 2 + graph->user_start[x + 1] - graph->user_start[x];
        for (int32_t j = graph->user_start[x]; j < graph->user_start[x + 1]; j++) {
            int32_t op = graph->users[j];
            for (int32_t i = graph->output_start[op]; i < graph->output_start[op + 1]; i++) {
                int32_t t = graph->outputs[i];
                if (!g->is_clean[t]) {
                    continue;
                }
                g->is_clean[t] = 0;
                if (!g->is_live[t]) {
                    g->stack[depth++] = t;
                }
            }
        }
    }
}

/* The time to remake s with the evicted storages that it needs. */
static int64_t greedy_remake_ns(rotor_greedy_t *g, int32_t s) {
    const rotor_dataflow_t *graph = g->graph;
    int32_t left = g->setting->neighbourhood;
    int32_t depth = 0;
    int64_t cost = 0;
    g->stamp_value++;
    g->stack[depth++] = graph->producer[s];
    g->stamp[graph->producer[s]] = g->stamp_value;
    while (depth > 0) {
        int32_t op = g->stack[--depth];
        cost += graph->cost_ns[op];
        g->work += 4 + graph->input_start[op + 1] - graph->input_start[op];
        if (--left <= 0) {
            break;
        }
        for (int32_t j = graph->input_start[op]; j < graph->input_start[op + 1]; j++) {
            int32_t t = graph->inputs[j];
            int32_t maker = graph->producer[t];
            if (g->is_live[t]) {
                continue;
            }
            g->is_clean[t] = 1;
            if (rotor_greedy_tier_is_away(&g->tier, t)) {
                cost += (int64_t)(g->setting->transfer_price * (double)g->tier.read_ns[t]);
            } else if (g->stamp[maker] != g->stamp_value) {
                g->stamp[maker] = g->stamp_value;
                g->stack[depth++] = maker;
            }
        }
    }
    return cost;
}

/* The cost of moving s and back where nothing waits for it. */
static int64_t transfers_cost(const rotor_greedy_t *g, int32_t s) {
    return (int64_t)(g->setting->transfer_price *
                     (double)rotor_greedy_tier_transfers_ns(&g->tier, s));
}

static float cost_log_of(const rotor_greedy_t *g, int64_t ns) {
    return (float)(g->setting->cost_power * log((double)ns + 1.0));
}

/* The logarithm of the cost of evicting s, by the way that is cheaper. */
static float greedy_cost(rotor_greedy_t *g, int32_t s) {
    int64_t ns = g->is_kept[s] ? INT64_MAX : greedy_remake_ns(g, s);
    g->is_clean[s] = 1;
    if (g->tier.link != NULL) {
        g->tier.remake_ns[s] = ns;
        ns = rotor_greedy_tier_moves(&g->tier, s) ? rotor_min(ns, transfers_cost(g, s)) : ns;
    }
    return cost_log_of(g, ns);
}

/* The same with the wait for the write, if evicted now. */
static float greedy_cost_now(const rotor_greedy_t *g, int32_t s) {
    bool moves = rotor_greedy_tier_moves(&g->tier, s);
    int64_t wait = moves ? rotor_greedy_tier_wait_ns(&g->tier, s) : 0;
    int64_t ns = wait == 0 ? 0 : transfers_cost(g, s);
    return wait == 0 || g->tier.remake_ns[s] <= ns
               ? g->cost_log[s]
               : cost_log_of(g, rotor_min(g->tier.remake_ns[s], ns + wait));
}

static void hold_candidate(rotor_greedy_t *g, int32_t s, bool is_in) {
    rotor_list_hold(g->live, &g->live_count, g->slot, s, is_in);
}

/* From now on s cannot be remade. */
static void greedy_keep(rotor_greedy_t *g, int32_t s) {
    g->is_kept[s] = 1;
    if (rotor_greedy_tier_moves(&g->tier, s)) {
        g->is_clean[s] = 0;
    } else {
        hold_candidate(g, s, false);
    }
}

static void greedy_release(rotor_greedy_t *g, int32_t s);

/* A tape holds what its run read, or does not any more. */
static void hold_inputs(rotor_greedy_t *g, int32_t s, int32_t change) {
    const rotor_dataflow_t *graph = g->graph;
    int32_t op = graph->producer[s];
    for (int32_t j = graph->input_start[op]; graph->lazy[s] && j < graph->input_start[op + 1]; j++) {
        g->locks[graph->inputs[j]] += change;
        if (change < 0) {
            greedy_release(g, graph->inputs[j]);
        }
    }
}

static void take_out(rotor_greedy_t *g, int32_t s) {
    hold_candidate(g, s, false);
    g->is_live[s] = 0;
    g->is_clean[s] = 0;
    g->live_bytes -= g->graph->bytes[s];
    if (g->tier.link != NULL && g->tier.is_padded[s]) {
        g->live_bytes -= g->tier.link->padding_bytes;
        g->tier.is_padded[s] = 0;
    }
    invalidate(g, s);
    hold_inputs(g, s, -1);
}

static void put_in(rotor_greedy_t *g, int32_t s) {
    g->is_live[s] = 1;
    g->is_clean[s] = 0;
    g->live_bytes += g->graph->bytes[s];
    if (g->tier.link != NULL) {
        g->tier.is_away[s] = 0;
        g->tier.made_ns[s] = g->tier.clock_ns;
    }
    bool may_go = !g->is_kept[s] || rotor_greedy_tier_moves(&g->tier, s);
    if (may_go && !g->graph->pinned[s] && (g->graph->bytes[s] > 0 || g->graph->lazy[s])) {
        hold_candidate(g, s, true);
    }
    invalidate(g, s);
    hold_inputs(g, s, 1);
}

static int32_t next_use(rotor_greedy_t *g, int32_t s) {
    int32_t next = g->next_use[s];
    if (next < g->now) {
        int32_t at = g->cursor[s];
        int32_t last = g->graph->user_start[s + 1];
        while (at < last && g->uses[at] < g->now) {
            at++;
        }
        g->cursor[s] = at;
        next = at < last ? g->uses[at] : g->graph->operation_count;
        g->next_use[s] = next;
    }
    return next;
}

static void append_item(rotor_greedy_t *g, int32_t item) {
    if (g->status == ROTOR_OK && g->program->length >= g->longest) {
        g->status = ROTOR_ERR_INFEASIBLE;
    }
    if (g->status == ROTOR_OK) {
        g->status = rotor_program_append(g->program, item);
    }
}

/* Takes s out, by way of the tier where that is cheaper than remaking it. */
static void greedy_evict(rotor_greedy_t *g, int32_t s) {
    bool moves = rotor_greedy_tier_moves(&g->tier, s);
    if (moves && transfers_cost(g, s) + rotor_greedy_tier_wait_ns(&g->tier, s) <
                     g->tier.remake_ns[s]) {
        if (!g->tier.is_written[s]) {
            rotor_greedy_tier_write(&g->tier, s);
            append_item(g, rotor_item_finish(g->graph, s));
        }
        g->tier.is_away[s] = 1;
    }
    take_out(g, s);
}

/* Evicts until `bytes` more fit in the limit, or nothing is left to evict. */
static void greedy_make_room(rotor_greedy_t *g, int64_t bytes) {
    while (g->live_bytes + bytes > g->limit) {
        float best_score = 0.0F;
        int32_t best = -1;
        g->work += g->live_count;
        for (int32_t k = 0; k < g->live_count; k++) {
            int32_t s = g->live[k];
            if (g->locks[s] > 0) {
                continue;
            }
            if (!g->is_clean[s]) {
                g->cost_log[s] = greedy_cost(g, s);
            }
            float cost = g->tier.link == NULL ? g->cost_log[s] : greedy_cost_now(g, s);
            float score = g->size_score[s] + g->distance_log[next_use(g, s) - g->now] - cost;
            if (best < 0 || score > best_score) {
                best = s;
                best_score = score;
            }
        }
        if (best < 0) {
            break;
        }
        greedy_evict(g, best);
    }
}

/*
 * True if nothing that can still be read needs s, which cannot be remade, again; what was made from it
 * and is live cannot be remade then either.
 */
static bool let_go(rotor_greedy_t *g, int32_t s) {
    const rotor_dataflow_t *graph = g->graph;
    int32_t unused = graph->operation_count;
    int32_t depth = 0;
    int32_t seen = 0; /* operations */
    bool is_free = true;
    g->stamp_value++;
    g->stack[depth++] = s;
    while (depth > 0 && is_free) {
        int32_t x = g->stack[--depth];
        for (int32_t j = graph->user_start[x]; j < graph->user_start[x + 1]; j++) {
            int32_t op = graph->users[j];
            if (g->stamp[op] == g->stamp_value) {
                continue;
            }
            g->stamp[op] = g->stamp_value;
            g->visited[seen++] = op;
            for (int32_t i = graph->output_start[op]; i < graph->output_start[op + 1]; i++) {
                int32_t t = graph->outputs[i];
                bool is_away = rotor_greedy_tier_is_away(&g->tier, t);
                if (!g->is_live[t] && !is_away) {
                    is_free = is_free && next_use(g, t) == unused && g->locks[t] == 0;
                    g->stack[depth++] = t;
                }
            }
        }
    }
    for (int32_t k = 0; is_free && k < seen; k++) {
        int32_t op = g->visited[k];
        for (int32_t i = graph->output_start[op]; i < graph->output_start[op + 1]; i++) {
            greedy_keep(g, graph->outputs[i]);
        }
    }
    return is_free;
}

/* Drops a storage that nothing will read. */
static void greedy_release(rotor_greedy_t *g, int32_t s) {
    bool is_empty = g->graph->bytes[s] == 0 && !g->graph->lazy[s];
    if (!g->is_live[s] || g->locks[s] > 0 || g->graph->pinned[s] || is_empty ||
        next_use(g, s) < g->graph->operation_count) {
        return;
    }
    bool is_home = g->tier.link != NULL && rotor_dataflow_is_home(g->graph, s);
    if (!is_home && (g->is_kept[s] ? let_go(g, s) : !g->setting->keeps_unused)) {
        take_out(g, s);
    } else if (g->is_kept[s] && g->tier.link != NULL && g->tier.is_written[s]) {
        g->tier.is_away[s] = 1;
        take_out(g, s);
    }
}

/* The bytes that a run of op needs, with its tape or without. */
static int64_t needed_bytes(const rotor_greedy_t *g, int32_t op, bool is_light) {
    const rotor_dataflow_t *graph = g->graph;
    int64_t needed = is_light ? graph->light_bytes[op] : graph->workspace_bytes[op];
    for (int32_t j = graph->output_start[op]; j < graph->output_start[op + 1]; j++) {
        int32_t s = graph->outputs[j];
        /* An output that is live already is made again: its old copy goes first. */
        bool is_replaced = g->is_live[s] && !graph->pinned[s];
        needed += is_replaced || (is_light && graph->lazy[s]) ? 0 : graph->bytes[s];
    }
    return needed;
}

/* True if the run of op does not make its tape: it need not, and the tape would take another's room. */
static bool runs_light(const rotor_greedy_t *g, int32_t op, bool is_planned, bool wants_tape) {
    int32_t s = g->graph->tape[op];
    return s >= 0 && !g->is_live[s] && !g->is_kept[s] && !wants_tape &&
           (!is_planned || (!g->setting->keeps_tapes &&
                            g->live_bytes + needed_bytes(g, op, false) > g->limit));
}

/* True if a run of op replaces a copy that a tape of another one holds. */
static bool takes_held(const rotor_greedy_t *g, int32_t op) {
    const rotor_dataflow_t *graph = g->graph;
    for (int32_t j = graph->output_start[op]; !graph->is_plain && j < graph->output_start[op + 1];
         j++) {
        int32_t s = graph->outputs[j];
        for (int32_t u = graph->user_start[s]; g->is_live[s] && u < graph->user_start[s + 1]; u++) {
            int32_t tape = graph->tape[graph->users[u]];
            if (tape >= 0 && g->is_live[tape] && graph->pinned[s] != ROTOR_KEPT) {
                return true;
            }
        }
    }
    return false;
}

static void run(rotor_greedy_t *g, int32_t op, bool is_planned, bool wants_tape) {
    const rotor_dataflow_t *graph = g->graph;
    bool is_light = runs_light(g, op, is_planned, wants_tape);
    greedy_make_room(g, needed_bytes(g, op, is_light));
    if (takes_held(g, op)) {
        g->status = ROTOR_ERR_INFEASIBLE;
    }
    append_item(g, op);
    if (is_planned) {
        g->now++;
    }
    g->tier.clock_ns += rotor_dataflow_run_ns(graph, op, g->tier.link != NULL);
    if (g->tier.link != NULL && graph->clock[op] == ROTOR_READS) {
        rotor_greedy_tier_fetch(&g->tier, graph->outputs[graph->output_start[op]]);
    }
    for (int32_t j = graph->output_start[op]; j < graph->output_start[op + 1]; j++) {
        int32_t s = graph->outputs[j];
        if (!g->is_live[s] && !(is_light && graph->lazy[s])) {
            put_in(g, s);
        }
    }
    for (int32_t j = graph->input_start[op]; j < graph->input_start[op + 1]; j++) {
        g->locks[graph->inputs[j]]--;
        greedy_release(g, graph->inputs[j]);
    }
    for (int32_t j = graph->output_start[op]; j < graph->output_start[op + 1]; j++) {
        greedy_release(g, graph->outputs[j]);
    }
}

/* Locks the inputs of the frame's operation that it has not locked yet: all, or the live ones that
 * were remade for it. */
static void lock_inputs(rotor_greedy_t *g, int32_t depth, uint64_t which) {
    const rotor_dataflow_t *graph = g->graph;
    int32_t op = g->frames[depth];
    int32_t first = graph->input_start[op];
    for (int32_t j = first; j < graph->input_start[op + 1]; j++) {
        uint64_t bit = UINT64_C(1) << ((j - first) & 63);
        if ((which & bit) != 0 && (g->frame_locks[depth] & bit) == 0) {
            g->locks[graph->inputs[j]]++;
        }
    }
    g->frame_locks[depth] |= which;
}

static void greedy_push_frame(rotor_greedy_t *g, int32_t depth, int32_t op, bool wants_tape) {
    const rotor_dataflow_t *graph = g->graph;
    bool locks_all = !g->setting->is_loose ||
                     graph->input_start[op + 1] - graph->input_start[op] > 64;
    g->frames[depth] = op;
    g->frame_locks[depth] = 0;
    g->wants_tape[depth] = wants_tape;
    if (locks_all) {
        lock_inputs(g, depth, UINT64_MAX);
    }
}

/* The index in graph->inputs of an input of op that is not there, or -1. */
static int32_t missing_input(const rotor_greedy_t *g, int32_t op) {
    const rotor_dataflow_t *graph = g->graph;
    int32_t first = graph->input_start[op];
    int32_t last = graph->input_start[op + 1];
    for (int32_t j = first; j < last; j++) {
        int32_t k = g->setting->is_reversed ? last - 1 - (j - first) : j;
        if (!g->is_live[graph->inputs[k]]) {
            return k;
        }
    }
    return -1;
}

/* Brings s back from the tier. */
static void greedy_fetch(rotor_greedy_t *g, int32_t s) {
    bool is_home = rotor_dataflow_is_home(g->graph, s);
    int64_t padding = is_home ? 0 : g->tier.link->padding_bytes;
    greedy_make_room(g, g->graph->bytes[s] + padding);
    append_item(g, rotor_item_start(g->graph, s));
    rotor_greedy_tier_fetch(&g->tier, s);
    put_in(g, s);
    g->tier.is_padded[s] = !is_home;
    g->live_bytes += padding;
}

static void greedy_begin(rotor_greedy_t *g, int64_t budget, const rotor_setting_t *setting,
                         rotor_random_t *random) {
    const rotor_dataflow_t *graph = g->graph;
    int32_t n = graph->operation_count;
    double limit = (double)budget * setting->slack;
    g->setting = setting;
    g->limit = setting->slack == 1.0 || limit > 0x1p62 ? budget : (int64_t)limit;
    g->live_bytes = 0;
    g->live_count = 0;
    g->now = 0;
    for (int32_t d = 0; d < n + 2; d++) {
        g->distance_log[d] = (float)setting->distance_power * g->log_table[d];
    }
    for (int32_t s = 0; s < graph->storage_count; s++) {
        double noise =
            setting->noise > 0.0 ? setting->noise * (rotor_random_unit(random) - 0.5) : 0.0;
        g->cursor[s] = graph->user_start[s];
        g->next_use[s] = -1;
        double freed = (double)rotor_dataflow_freed_bytes(graph, s);
        g->size_score[s] = (float)(setting->size_power * log(freed + 1.0) + noise);
        g->is_kept[s] = rotor_dataflow_once(graph, graph->producer[s]) ||
                        (g->tier.link != NULL && rotor_dataflow_is_home(graph, s));
        g->slot[s] = -1;
    }
    memset(g->is_live, 0, (size_t)graph->storage_count);
    memset(g->is_clean, 0, (size_t)graph->storage_count);
    memset(g->locks, 0, (size_t)graph->storage_count * sizeof(*g->locks));
    rotor_greedy_tier_begin(&g->tier, graph);
}

int rotor_greedy_walk(rotor_greedy_t *self, int64_t budget, const rotor_setting_t *setting,
                      rotor_random_t *random, int64_t longest, rotor_stop_t *stop,
                      rotor_program_t *program) {
    greedy_begin(self, budget, setting, random);
    program->length = 0;
    self->program = program;
    self->longest = longest;
    self->status = ROTOR_OK;
    for (int32_t k = 0; k < self->graph->operation_count; k++) {
        int32_t depth = 0;
        greedy_push_frame(self, 0, self->order[k], false);
        while (depth >= 0) {
            int32_t op = self->frames[depth];
            int32_t missing = missing_input(self, op);
            self->work = 10;
            if (missing >= 0) {
                int32_t bit = missing - self->graph->input_start[op];
                int32_t s = self->graph->inputs[missing];
                lock_inputs(self, depth, UINT64_C(1) << (bit & 63)); /* once it is live */
                if (!rotor_greedy_tier_is_away(&self->tier, s)) {
                    greedy_push_frame(self, ++depth, self->graph->producer[s], self->graph->lazy[s]);
                    continue;
                }
                greedy_fetch(self, s);
            } else {
                lock_inputs(self, depth, UINT64_MAX);
                run(self, op, depth == 0, self->wants_tape[depth]);
                depth--;
            }
            int ret = self->status;
            if (ret != ROTOR_OK || (ret = rotor_stop_look(stop, self->work)) != ROTOR_OK) {
                return ret;
            }
            if (stop->is_over) {
                return ROTOR_ERR_INFEASIBLE;
            }
        }
    }
    return ROTOR_OK;
}
