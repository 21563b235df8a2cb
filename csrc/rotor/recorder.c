#include "recorder.h"

#include <string.h>

#include "vector.h"

void rotor_recorder_init(rotor_recorder_t *self, const rotor_recorder_options_t *options) {
    memset(self, 0, sizeof(*self));
    self->options = *options;
    self->options.eviction.skip_unmade = true;
    self->clock = 1;
    self->unused_record = -1;
    self->first_temporary = self->last_temporary = -1;
    rotor_eviction_init(&self->eviction, &self->options.eviction);
}

void rotor_recorder_free(rotor_recorder_t *self) {
    for (int64_t k = 0; k < self->record_count; k++) {
        rotor_free(self->records[k].items);
    }
    rotor_eviction_free(&self->eviction);
    rotor_free(self->nodes);
    rotor_free(self->records);
    rotor_free(self->events);
    rotor_free(self->frames);
    rotor_free(self->inputs);
    rotor_free(self->pending);
    rotor_free(self->work);
    memset(self, 0, sizeof(*self));
}

/* Lists. */

static int tell(rotor_recorder_t *self, enum rotor_recorder_event_kind kind, int32_t number) {
    int ret = ROTOR_RESERVE(self->events, self->event_count, self->event_capacity, 1);
    if (ret == ROTOR_OK) {
        self->events[self->event_count++] = (rotor_recorder_event_t){kind, number};
    }
    return ret;
}

static int push(int32_t **items, int64_t *count, int64_t *capacity, int32_t item) {
    int ret = ROTOR_RESERVE(*items, *count, *capacity, 1);
    if (ret == ROTOR_OK) {
        (*items)[(*count)++] = item;
    }
    return ret;
}

static bool node_is(const rotor_recorder_t *self, int32_t node, int states) {
    return (self->nodes[node].state & states) != 0;
}

static void link_temporary(rotor_recorder_t *self, int32_t node) {
    rotor_node_t *nodes = self->nodes;
    nodes[node].state |= ROTOR_NODE_TEMPORARY;
    nodes[node].previous = self->last_temporary;
    nodes[node].next = -1;
    if (self->last_temporary >= 0) {
        nodes[self->last_temporary].next = node;
    } else {
        self->first_temporary = node;
    }
    self->last_temporary = node;
}

static void unlink_temporary(rotor_recorder_t *self, int32_t node) {
    rotor_node_t *nodes = self->nodes;
    int32_t previous = nodes[node].previous;
    int32_t next = nodes[node].next;
    nodes[node].state &= (uint8_t)~ROTOR_NODE_TEMPORARY;
    *(previous >= 0 ? &nodes[previous].next : &self->first_temporary) = next;
    *(next >= 0 ? &nodes[next].previous : &self->last_temporary) = previous;
}

static void count_bytes(rotor_recorder_t *self, int64_t bytes) {
    self->current_bytes += bytes;
    self->peak_bytes = rotor_max(self->peak_bytes, self->current_bytes);
}

static void hold_bytes(rotor_recorder_t *self, int64_t bytes) {
    self->held_bytes += bytes;
    self->held_peak_bytes = rotor_max(self->held_peak_bytes, self->held_bytes);
}

void rotor_recorder_reach(rotor_recorder_t *self, int64_t bytes) {
    self->peak_bytes = rotor_max(self->peak_bytes, self->current_bytes + bytes);
}

/* Forgetting. */

static int forget_node(rotor_recorder_t *self, int32_t node) {
    int ret;
    rotor_recorder_unmark_kept(self, node);
    if (node_is(self, node, ROTOR_NODE_TEMPORARY)) {
        unlink_temporary(self, node);
        self->current_bytes -= self->nodes[node].bytes;
        if ((ret = tell(self, ROTOR_DROPPED, node)) != ROTOR_OK) {
            return ret;
        }
    }
    if (node_is(self, node, ROTOR_NODE_COPY)) {
        self->current_bytes -= self->nodes[node].bytes;
        self->copied_bytes -= self->nodes[node].bytes;
    }
    self->nodes[node].state = 0;
    self->live_nodes--;
    if ((ret = tell(self, ROTOR_FORGOT_NODE, node)) != ROTOR_OK) {
        return ret;
    }
    return rotor_eviction_remove(&self->eviction, node);
}

static bool is_unused(const rotor_recorder_t *self, int32_t node) {
    return self->nodes[node].needed == 0 && !node_is(self, node, ROTOR_NODE_LIVE) &&
           self->eviction.candidates[node].locks == (int32_t)node_is(self, node, ROTOR_NODE_KEPT);
}

/* One output of an operation is not remembered any more. */
static int leave_record(rotor_recorder_t *self, int32_t node) {
    int32_t op = self->nodes[node].op;
    rotor_record_t *record = &self->records[op];
    int32_t *outputs = record->items + record->input_count;
    int ret = ROTOR_OK;

    for (int32_t k = 0; k < record->output_count; k++) {
        if (outputs[k] == node) {
            /* For the others it is made again all the same, and dropped. */
            outputs[k] = -1;
            record->workspace_bytes += self->nodes[node].bytes;
        }
    }
    self->nodes[node].op = -1;
    if (--record->remembered > 0) {
        return ROTOR_OK;
    }
    for (int32_t k = 0; k < record->input_count && ret == ROTOR_OK; k++) {
        int32_t input = record->items[k];
        if (--self->nodes[input].needed > 0) {
            continue;
        }
        if (node_is(self, input, ROTOR_NODE_SOURCE)) {
            ret = tell(self, ROTOR_UNNEEDED, input);
        }
        if (ret == ROTOR_OK && is_unused(self, input)) {
            ret = push(&self->work, &self->work_count, &self->work_capacity, input);
        }
    }
    rotor_free(record->items);
    self->current_bytes -= record->kept_bytes;
    *record = (rotor_record_t){.input_count = -1, .output_count = self->unused_record};
    self->unused_record = op;
    self->live_records--;
    return ret == ROTOR_OK ? tell(self, ROTOR_FORGOT_OPERATION, op) : ret;
}

/* Forgets what is in `work`, and what was remembered only for that. */
static int forget_work(rotor_recorder_t *self) {
    while (self->work_count > 0) {
        int32_t node = self->work[--self->work_count];
        int ret = self->nodes[node].op >= 0 ? leave_record(self, node) : ROTOR_OK;
        if (ret != ROTOR_OK || (ret = forget_node(self, node)) != ROTOR_OK) {
            return ret;
        }
    }
    return ROTOR_OK;
}

static int forget_if_unused(rotor_recorder_t *self, int32_t node) {
    int ret;
    if (!is_unused(self, node)) {
        return ROTOR_OK;
    }
    self->work_count = 0;
    ret = push(&self->work, &self->work_count, &self->work_capacity, node);
    return ret == ROTOR_OK ? forget_work(self) : ret;
}

/* Making nodes. */

static int new_node(rotor_recorder_t *self, int64_t bytes, uint8_t state, int32_t *node) {
    int ret = ROTOR_RESERVE(self->nodes, self->node_count, self->node_capacity, 1);
    if (ret != ROTOR_OK || (ret = rotor_eviction_add(&self->eviction, bytes, node)) != ROTOR_OK) {
        return ret;
    }
    self->node_count = rotor_max(self->node_count, *node + 1);
    self->nodes[*node] = (rotor_node_t){
        .bytes = bytes, .op = -1, .state = (uint8_t)(state | ROTOR_NODE_USED | ROTOR_NODE_LIVE)};
    self->live_nodes++;
    if ((state & ROTOR_NODE_FOREIGN) == 0) {
        hold_bytes(self, bytes);
    }
    return ROTOR_OK;
}

static int new_source(rotor_recorder_t *self, int64_t bytes, uint8_t state, int32_t *node) {
    int ret = new_node(self, bytes, (uint8_t)(state | ROTOR_NODE_SOURCE), node);
    if (ret == ROTOR_OK) {
        rotor_eviction_pin(&self->eviction, *node);
        ret = rotor_eviction_materialize(&self->eviction, node, 1);
    }
    return ret;
}

int rotor_recorder_source(rotor_recorder_t *self, int64_t bytes, bool is_foreign, int32_t *node) {
    int ret = new_source(self, bytes, is_foreign ? ROTOR_NODE_FOREIGN : 0, node);
    if (ret == ROTOR_OK && !is_foreign) {
        count_bytes(self, bytes);
    }
    return ret;
}

void rotor_recorder_resized(rotor_recorder_t *self, int32_t node, int64_t bytes) {
    count_bytes(self, bytes - self->nodes[node].bytes);
    hold_bytes(self, bytes - self->nodes[node].bytes);
    self->nodes[node].bytes = bytes;
}

/* Locking, and what has to run again. */

static int lock(rotor_recorder_t *self, int32_t node) {
    rotor_eviction_lock(&self->eviction, node);
    return tell(self, ROTOR_LOCKED, node);
}

static int unlock(rotor_recorder_t *self, int32_t node) {
    return rotor_eviction_unlock(&self->eviction, node);
}

/* Locks the inputs that are in memory, and notes the others. */
static int push_frame(rotor_recorder_t *self, int32_t op, const int32_t *inputs, int64_t count) {
    int64_t base = self->pending_count;
    int ret = ROTOR_RESERVE(self->frames, self->frame_count, self->frame_capacity, 1);

    if (ret == ROTOR_OK) {
        ret = ROTOR_RESERVE(self->pending, base, self->pending_capacity, count);
    }
    if (ret == ROTOR_OK) {
        ret = ROTOR_RESERVE(self->events, self->event_count, self->event_capacity, count);
    }
    if (ret != ROTOR_OK) {
        return ret;
    }
    for (int64_t k = 0; k < count; k++) {
        rotor_eviction_touch(&self->eviction, inputs[k], self->clock);
        if (rotor_recorder_is_material(self, inputs[k])) {
            (void)lock(self, inputs[k]);
        } else {
            self->pending[self->pending_count++] = inputs[k];
        }
    }
    self->frames[self->frame_count++] = (rotor_frame_t){
        .op = op,
        .first_pending = (int32_t)base,
        .at_pending = (int32_t)base,
        .last_pending = (int32_t)self->pending_count,
    };
    return ROTOR_OK;
}

int rotor_recorder_begin(rotor_recorder_t *self, const int32_t *inputs, int64_t count) {
    int ret = ROTOR_RESERVE(self->inputs, 0, self->input_capacity, count);
    if (ret != ROTOR_OK) {
        return ret;
    }
    if (count > 0) {
        memcpy(self->inputs, inputs, (size_t)count * sizeof(*inputs));
    }
    self->input_count = count;
    self->frame_count = self->pending_count = 0;
    return push_frame(self, ROTOR_NEW_OPERATION, self->inputs, count);
}

int rotor_recorder_next(rotor_recorder_t *self, int32_t *op) {
    for (;;) {
        rotor_frame_t *frame = &self->frames[self->frame_count - 1];
        if (frame->at_pending == frame->last_pending) {
            *op = frame->op;
            return ROTOR_OK;
        }
        int32_t node = self->pending[frame->at_pending];
        int ret;
        if (rotor_recorder_is_material(self, node)) {
            if ((ret = lock(self, node)) != ROTOR_OK) {
                return ret;
            }
            frame->at_pending++;
        } else {
            int32_t maker = self->nodes[node].op;
            const rotor_record_t *record = &self->records[maker];
            if ((ret = push_frame(self, maker, record->items, record->input_count)) != ROTOR_OK) {
                return ret;
            }
        }
    }
}

/* Unlocks the inputs of the last frame that it had locked, and drops the frame. */
static int pop_frame(rotor_recorder_t *self) {
    rotor_frame_t frame = self->frames[self->frame_count - 1];
    bool is_new = frame.op == ROTOR_NEW_OPERATION;
    const int32_t *inputs = is_new ? self->inputs : self->records[frame.op].items;
    int64_t count = is_new ? self->input_count : self->records[frame.op].input_count;
    int ret = ROTOR_OK;

    /* Those that were not computed again are the last of `pending`, in the order of the inputs. */
    int32_t missing = frame.at_pending;
    for (int64_t k = 0; k < count; k++) {
        if (missing < frame.last_pending && self->pending[missing] == inputs[k]) {
            missing++;
        } else {
            int status = unlock(self, inputs[k]);
            ret = ret == ROTOR_OK ? status : ret;
        }
    }
    self->frame_count--;
    self->pending_count = frame.first_pending;
    return ret;
}

int rotor_recorder_abort(rotor_recorder_t *self) {
    int ret = ROTOR_OK;
    while (self->frame_count > 0) {
        int status = pop_frame(self);
        ret = ret == ROTOR_OK ? status : ret;
    }
    return ret;
}

bool rotor_recorder_may_reuse(const rotor_recorder_t *self, int32_t origin) {
    return node_is(self, origin, ROTOR_NODE_TEMPORARY) &&
           self->eviction.candidates[origin].locks == 1;
}

int64_t rotor_recorder_replay_bytes(const rotor_recorder_t *self, int32_t op) {
    const rotor_record_t *record = &self->records[op];
    const int32_t *outputs = record->items + record->input_count;
    const int32_t *origins = outputs + record->output_count;
    int64_t bytes = record->workspace_bytes;

    for (int32_t k = 0; k < record->output_count; k++) {
        if (outputs[k] >= 0 && (origins[k] < 0 || !rotor_recorder_may_reuse(self, origins[k]))) {
            bytes += self->nodes[outputs[k]].bytes;
        }
    }
    return bytes;
}

static int leave_memory(rotor_recorder_t *self, int32_t node) {
    rotor_recorder_unmark_kept(self, node);
    if (node_is(self, node, ROTOR_NODE_TEMPORARY)) {
        unlink_temporary(self, node);
    }
    self->current_bytes -= self->nodes[node].bytes;
    return rotor_eviction_evict(&self->eviction, node);
}

int rotor_recorder_replayed(rotor_recorder_t *self, int64_t cost_ns) {
    int32_t op = self->frames[self->frame_count - 1].op;
    rotor_record_t *record = &self->records[op];
    const int32_t *outputs = record->items + record->input_count;
    const int32_t *origins = outputs + record->output_count;
    int ret = ROTOR_OK;

    rotor_recorder_reach(self, rotor_recorder_replay_bytes(self, op));
    self->clock += rotor_max(cost_ns, 1);
    self->replay_ns += cost_ns;
    self->replays++;
    for (int32_t k = 0; k < record->output_count && ret == ROTOR_OK; k++) {
        int32_t node = outputs[k];
        if (node < 0 || rotor_recorder_is_material(self, node)) {
            continue;
        }
        if (origins[k] >= 0 && rotor_recorder_may_reuse(self, origins[k])) {
            /* The lock of this frame is given back below. */
            ret = leave_memory(self, origins[k]);
            rotor_eviction_lock(&self->eviction, origins[k]);
            if (ret != ROTOR_OK || (ret = tell(self, ROTOR_DROPPED, origins[k])) != ROTOR_OK) {
                return ret;
            }
        }
        count_bytes(self, self->nodes[node].bytes);
        if (!node_is(self, node, ROTOR_NODE_LIVE)) {
            link_temporary(self, node);
        }
        ret = rotor_eviction_materialize(&self->eviction, &node, 1);
    }
    rotor_recorder_count_replay(self, op, cost_ns);
    int status = pop_frame(self);
    return ret == ROTOR_OK ? status : ret;
}

/* Room. */

/* The oldest temporary that may go; -1 for none. */
static int32_t free_temporary(const rotor_recorder_t *self) {
    int32_t node = self->options.mixes_temporaries ? -1 : self->first_temporary;
    while (node >= 0 && self->eviction.candidates[node].locks != 0) {
        node = self->nodes[node].next;
    }
    return node;
}

int rotor_recorder_make_room(rotor_recorder_t *self, int64_t bytes, int32_t *node) {
    int ret;

    *node = -1;
    if (self->options.budget == ROTOR_UNLIMITED ||
        self->current_bytes <= self->options.budget - bytes) {
        return ROTOR_OK;
    }
    *node = free_temporary(self);
    if (*node < 0 &&
        (ret = rotor_eviction_choose(&self->eviction, self->clock, node)) != ROTOR_OK) {
        return ret;
    }
    if (*node < 0 && (*node = rotor_recorder_give_up(self)) < 0) {
        *node = -2;
        return ROTOR_OK;
    }
    if (node_is(self, *node, ROTOR_NODE_TEMPORARY) &&
        (ret = tell(self, ROTOR_DROPPED, *node)) != ROTOR_OK) {
        return ret;
    }
    self->evictions++;
    ret = leave_memory(self, *node);
    return ret == ROTOR_OK ? forget_if_unused(self, *node) : ret;
}

/* Recording. */

static int new_record(rotor_recorder_t *self, int64_t inputs, int64_t outputs, int32_t *op) {
    int32_t *items = rotor_malloc_array(inputs + 2 * outputs, sizeof(*items));
    int32_t number = self->unused_record;
    int ret = items == NULL ? ROTOR_ERR_NO_MEMORY : ROTOR_OK;

    if (ret == ROTOR_OK && number < 0) {
        ret = ROTOR_RESERVE(self->records, self->record_count, self->record_capacity, 1);
    }
    if (ret != ROTOR_OK) {
        rotor_free(items);
        return ret;
    }
    if (number < 0) {
        number = (int32_t)self->record_count++;
    } else {
        self->unused_record = self->records[number].output_count;
    }
    self->records[number] = (rotor_record_t){
        .items = items, .input_count = (int32_t)inputs, .output_count = (int32_t)outputs};
    self->live_records++;
    *op = number;
    return ROTOR_OK;
}

/* The outputs of an operation that is not remembered. */
static int finish_sources(rotor_recorder_t *self, const int64_t *bytes, const int32_t *origins,
                          int64_t count, int32_t *nodes) {
    for (int64_t k = 0; k < count; k++) {
        int32_t origin = origins[k];
        int64_t size = origin >= 0 ? self->nodes[origin].bytes : bytes[k];
        int ret = new_source(self, size, 0, &nodes[k]);
        if (ret == ROTOR_OK && origin >= 0) {
            self->nodes[origin].state &= (uint8_t)~ROTOR_NODE_LIVE;
            self->held_bytes -= size;
            ret = leave_memory(self, origin);
        }
        if (ret != ROTOR_OK) {
            return ret;
        }
        count_bytes(self, size);
        if (origin >= 0 && (ret = forget_if_unused(self, origin)) != ROTOR_OK) {
            return ret;
        }
    }
    return ROTOR_OK;
}

static int finish_record(rotor_recorder_t *self, int64_t inputs, const int64_t *bytes,
                         const int32_t *origins, int64_t count, int64_t cost_ns, int32_t *nodes,
                         int32_t op) {
    rotor_record_t *record = &self->records[op];
    int32_t *outputs = record->items + inputs;
    int ret = ROTOR_OK;

    for (int64_t k = 0; k < inputs; k++) {
        int32_t input = self->inputs[k];
        record->items[k] = input;
        if (self->nodes[input].needed++ == 0 && node_is(self, input, ROTOR_NODE_SOURCE) &&
            (ret = tell(self, ROTOR_NEEDED, input)) != ROTOR_OK) {
            return ret;
        }
    }
    for (int64_t k = 0; k < count; k++) {
        int32_t origin = origins[k];
        int64_t size = origin >= 0 ? self->nodes[origin].bytes : bytes[k];
        if ((ret = new_node(self, size, 0, &nodes[k])) != ROTOR_OK) {
            return ret;
        }
        int32_t node = nodes[k];
        outputs[k] = node;
        outputs[count + k] = origin;
        self->nodes[node].op = op;
        self->nodes[node].version = origin >= 0 ? self->nodes[origin].version + 1 : 0;
        record->remembered++;
        ret = rotor_eviction_compute(&self->eviction, node, rotor_max(cost_ns, 1));
        for (int64_t i = 0; i < inputs && ret == ROTOR_OK; i++) {
            ret = rotor_eviction_depend(&self->eviction, node, self->inputs[i]);
        }
        if (ret == ROTOR_OK) {
            ret = rotor_eviction_materialize(&self->eviction, &node, 1);
        }
        if (ret == ROTOR_OK && origin >= 0) {
            /* The lock of the new operation is given back below. */
            self->nodes[origin].state &= (uint8_t)~ROTOR_NODE_LIVE;
            self->held_bytes -= size;
            ret = leave_memory(self, origin);
            rotor_eviction_lock(&self->eviction, origin);
        }
        if (ret != ROTOR_OK) {
            return ret;
        }
        rotor_eviction_touch(&self->eviction, node, self->clock);
        count_bytes(self, size);
    }
    return ROTOR_OK;
}

int rotor_recorder_finish(rotor_recorder_t *self, int64_t recorded, const int64_t *bytes,
                          const int32_t *origins, int64_t count, int64_t cost_ns,
                          int64_t workspace_bytes, int64_t kept_bytes, int32_t *nodes,
                          int32_t *op) {
    int64_t total = workspace_bytes;
    int ret;

    *op = -1;
    for (int64_t k = 0; k < count; k++) {
        total += origins[k] < 0 ? bytes[k] : 0;
    }
    rotor_recorder_reach(self, total);
    self->held_peak_bytes = rotor_max(self->held_peak_bytes, self->held_bytes + total);
    self->clock += rotor_max(cost_ns, 1);
    self->base_ns += cost_ns;
    self->operations++;
    rotor_recorder_count_operation(self, cost_ns);
    if (recorded < 0 || count == 0) {
        ret = pop_frame(self);
        return ret == ROTOR_OK ? finish_sources(self, bytes, origins, count, nodes) : ret;
    }
    if ((ret = new_record(self, recorded, count, op)) == ROTOR_OK) {
        self->records[*op].cost_ns = cost_ns;
        self->records[*op].workspace_bytes = workspace_bytes;
        self->records[*op].kept_bytes = kept_bytes;
        count_bytes(self, kept_bytes);
        ret = finish_record(self, recorded, bytes, origins, count, cost_ns, nodes, *op);
    }
    /* The outputs are candidates before the inputs are again, as in the published runtime. */
    int status = pop_frame(self);
    return ret == ROTOR_OK ? status : ret;
}

/* The program. */

int rotor_recorder_dead(rotor_recorder_t *self, int32_t node) {
    int ret = ROTOR_OK;

    self->nodes[node].state &= (uint8_t)~ROTOR_NODE_LIVE;
    self->held_bytes -= self->nodes[node].bytes;
    if (node_is(self, node, ROTOR_NODE_SOURCE)) {
        self->current_bytes -= self->nodes[node].bytes;
    } else if (rotor_recorder_is_material(self, node)) {
        ret = leave_memory(self, node);
    }
    return ret == ROTOR_OK ? forget_if_unused(self, node) : ret;
}

int rotor_recorder_pin(rotor_recorder_t *self, int32_t node) {
    int32_t again;
    int32_t locks =
        self->eviction.candidates[node].locks - (int32_t)node_is(self, node, ROTOR_NODE_KEPT);
    int64_t last_access = self->eviction.candidates[node].last_access;
    int ret = ROTOR_OK;

    if (node_is(self, node, ROTOR_NODE_SOURCE)) {
        return ROTOR_OK;
    }
    self->work_count = 0;
    rotor_recorder_unmark_kept(self, node);
    self->nodes[node].state |= ROTOR_NODE_SOURCE;
    if ((ret = leave_record(self, node)) != ROTOR_OK || (ret = forget_work(self)) != ROTOR_OK ||
        (ret = rotor_eviction_remove(&self->eviction, node)) != ROTOR_OK ||
        (ret = rotor_eviction_add(&self->eviction, self->nodes[node].bytes, &again)) != ROTOR_OK) {
        return ret;
    }
    /* The engine gives out first what was removed last: `again` is `node`, without its edges. */
    rotor_eviction_pin(&self->eviction, node);
    self->eviction.candidates[node].locks = locks;
    self->eviction.candidates[node].last_access = last_access;
    if ((ret = rotor_eviction_materialize(&self->eviction, &node, 1)) != ROTOR_OK) {
        return ret;
    }
    return self->nodes[node].needed > 0 ? tell(self, ROTOR_NEEDED, node) : ROTOR_OK;
}
