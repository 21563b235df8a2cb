#include "recorder.h"

#include <string.h>

#include "recorder_check.h"
#include "recorder_keeping.h"
#include "recorder_needs.h"
#include "vector.h"

void rotor_recorder_init(rotor_recorder_t *self, const rotor_recorder_options_t *options) {
    memset(self, 0, sizeof(*self));
    self->options = *options;
    self->options.eviction.skip_unmade = true;
    self->options.eviction.late_regions = true;
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

void rotor_recorder_reset(rotor_recorder_t *self) {
    self->operations = self->evictions = self->replays = 0;
    self->base_ns = self->replay_ns = 0;
    self->peak_bytes = self->current_bytes;
    self->held_peak_bytes = self->held_bytes;
}

void rotor_recorder_limit(rotor_recorder_t *self, int64_t budget) { self->options.budget = budget; }

void rotor_recorder_consider(rotor_recorder_t *self, bool sample, bool ignore_small) {
    self->eviction.options.sample = sample;
    self->eviction.options.ignore_small = ignore_small;
}

void rotor_recorder_reach(rotor_recorder_t *self, int64_t bytes) {
    self->peak_bytes = rotor_max(self->peak_bytes, self->current_bytes + bytes);
}

/* Locking, and what has to run again. */

static int lock_node(rotor_recorder_t *self, int32_t node) {
    rotor_eviction_lock(&self->eviction, node);
    return rotor_recorder_tell(self, ROTOR_LOCKED, node);
}

/* Notes the inputs of the last frame that are not in memory, and may lock the others. */
static int gather_operands(rotor_recorder_t *self) {
    rotor_recorder_frame_t *frame = &self->frames[self->frame_count - 1];
    const int32_t *inputs;
    int64_t count = rotor_recorder_operands(self, frame->op, &inputs);
    int ret = ROTOR_RESERVE(self->pending, frame->first_pending, self->pending_capacity, count);

    if (ret == ROTOR_OK) {
        ret = ROTOR_RESERVE(self->events, self->event_count, self->event_capacity, count);
    }
    if (ret != ROTOR_OK) {
        return ret;
    }
    self->pending_count = frame->first_pending;
    for (int64_t k = 0; k < count; k++) {
        rotor_eviction_touch(&self->eviction, inputs[k], self->clock);
        if (!rotor_recorder_is_material(self, inputs[k])) {
            self->pending[self->pending_count++] = inputs[k];
        } else if (frame->is_locked) {
            (void)lock_node(self, inputs[k]);
        }
    }
    frame->at_pending = frame->first_pending;
    frame->last_pending = (int32_t)self->pending_count;
    return ROTOR_OK;
}

static int open_frame(rotor_recorder_t *self, int32_t op) {
    int ret = ROTOR_RESERVE(self->frames, self->frame_count, self->frame_capacity, 1);
    if (ret != ROTOR_OK) {
        return ret;
    }
    self->frames[self->frame_count++] = (rotor_recorder_frame_t){
        .op = op,
        .first_pending = (int32_t)self->pending_count,
        .is_locked = !self->has_repeated,
    };
    if ((ret = gather_operands(self)) != ROTOR_OK) {
        self->frame_count--;
    }
    return ret;
}

/* The inputs of the last frame have been in memory. Locks them if they are now; otherwise they are
 * gathered again. */
static int lock_operands(rotor_recorder_t *self) {
    rotor_recorder_frame_t *frame = &self->frames[self->frame_count - 1];
    const int32_t *inputs;
    int64_t count = rotor_recorder_operands(self, frame->op, &inputs);
    int ret = ROTOR_RESERVE(self->events, self->event_count, self->event_capacity, count);

    if (ret != ROTOR_OK) {
        return ret;
    }
    for (int64_t k = 0; k < count; k++) {
        if (!rotor_recorder_is_material(self, inputs[k])) {
            frame->is_locked = !rotor_recorder_may_gather_again(self);
            return gather_operands(self);
        }
    }
    for (int64_t k = 0; k < count; k++) {
        (void)lock_node(self, inputs[k]);
    }
    frame->is_locked = true;
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
    rotor_recorder_begin_needs(self);
    return rotor_recorder_settled(self, open_frame(self, ROTOR_NEW_OPERATION));
}

int rotor_recorder_next(rotor_recorder_t *self, int32_t *op) {
    for (;;) {
        rotor_recorder_frame_t *frame = &self->frames[self->frame_count - 1];
        bool is_whole = frame->at_pending == frame->last_pending;
        int ret;
        if (is_whole && frame->is_locked) {
            *op = frame->op;
            return rotor_recorder_settled(self, ROTOR_OK);
        }
        if (is_whole) {
            if ((ret = lock_operands(self)) != ROTOR_OK) {
                return ret;
            }
            continue;
        }
        int32_t node = self->pending[frame->at_pending];
        if (rotor_recorder_is_away(self, node)) {
            *op = ROTOR_FETCH;
            return rotor_recorder_settled(self, ROTOR_OK);
        }
        if (rotor_recorder_is_material(self, node)) {
            if (frame->is_locked && (ret = lock_node(self, node)) != ROTOR_OK) {
                return ret;
            }
            frame->at_pending++;
        } else if ((ret = open_frame(self, self->nodes[node].op)) != ROTOR_OK) {
            return ret;
        }
    }
}

int32_t rotor_recorder_awaited(const rotor_recorder_t *self) {
    return self->pending[self->frames[self->frame_count - 1].at_pending];
}

/* Counts the bytes of a node that came back from the tier. */
static int recorder_take_back(rotor_recorder_t *self, int32_t node) {
    rotor_recorder_count_bytes(self, self->nodes[node].bytes);
    if (!rotor_recorder_node_is(self, node, ROTOR_NODE_LIVE | ROTOR_NODE_SOURCE)) {
        rotor_recorder_link_temporary(self, node);
    }
    return rotor_eviction_fetched(&self->eviction, node);
}

int rotor_recorder_fetched(rotor_recorder_t *self, int64_t cost_ns) {
    self->clock += rotor_max(cost_ns, 1);
    return rotor_recorder_settled(self, recorder_take_back(self, rotor_recorder_awaited(self)));
}

/* Unlocks the inputs of the last frame that it had locked, and drops the frame. */
static int close_frame(rotor_recorder_t *self) {
    rotor_recorder_frame_t frame = self->frames[self->frame_count - 1];
    const int32_t *inputs;
    int64_t count = rotor_recorder_operands(self, frame.op, &inputs);
    int ret = ROTOR_OK;

    /* Inputs that were not computed again are the last of `pending`, in their order. */
    int32_t missing = frame.at_pending;
    for (int64_t k = 0; k < count && frame.is_locked; k++) {
        if (missing < frame.last_pending && self->pending[missing] == inputs[k]) {
            missing++;
        } else {
            int status = rotor_eviction_unlock(&self->eviction, inputs[k]);
            ret = ret == ROTOR_OK ? status : ret;
        }
    }
    self->frame_count--;
    self->pending_count = frame.first_pending;
    return ret;
}

static int close_frames(rotor_recorder_t *self) {
    int ret = ROTOR_OK;
    while (self->frame_count > 0) {
        int status = close_frame(self);
        ret = ret == ROTOR_OK ? status : ret;
    }
    return ret;
}

int rotor_recorder_abort(rotor_recorder_t *self) {
    return rotor_recorder_settled(self, close_frames(self));
}

bool rotor_recorder_may_reuse(const rotor_recorder_t *self, int32_t origin) {
    return rotor_recorder_node_is(self, origin, ROTOR_NODE_TEMPORARY) &&
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

/* Takes the origin of a replayed write from memory; the lock of this frame stays. */
static int drop_origin(rotor_recorder_t *self, int32_t origin) {
    int ret = rotor_recorder_leave_memory(self, origin);
    rotor_eviction_lock(&self->eviction, origin);
    return ret == ROTOR_OK ? rotor_recorder_tell(self, ROTOR_DROPPED, origin) : ret;
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
            if ((ret = drop_origin(self, origins[k])) != ROTOR_OK) {
                return rotor_recorder_settled(self, ret);
            }
        }
        if (rotor_recorder_is_away(self, node)) {
            ret = recorder_take_back(self, node);
            continue;
        }
        rotor_recorder_count_bytes(self, self->nodes[node].bytes);
        if (!rotor_recorder_node_is(self, node, ROTOR_NODE_LIVE)) {
            rotor_recorder_link_temporary(self, node);
        }
        ret = rotor_eviction_materialize(&self->eviction, &node, 1);
    }
    rotor_recorder_count_replay(self, op, cost_ns);
    bool starts_anew = rotor_recorder_note_repeat(self, op);
    int status = starts_anew ? close_frames(self) : close_frame(self);
    ret = ret == ROTOR_OK ? status : ret;
    if (starts_anew && ret == ROTOR_OK) {
        /* Nothing stays locked for an operation that is far away. */
        ret = open_frame(self, ROTOR_NEW_OPERATION);
    }
    return rotor_recorder_settled(self, ret);
}

int rotor_recorder_failed(rotor_recorder_t *self) {
    const rotor_record_t *record = &self->records[self->frames[self->frame_count - 1].op];
    const int32_t *origins = record->items + record->input_count + record->output_count;
    int ret = ROTOR_OK;

    for (int32_t k = 0; k < record->output_count; k++) {
        if (origins[k] >= 0 && rotor_recorder_may_reuse(self, origins[k])) {
            int status = drop_origin(self, origins[k]);
            ret = ret == ROTOR_OK ? status : ret;
        }
    }
    return rotor_recorder_settled(self, ret);
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

/* Drops the tier's copy of a node that is in memory, or can be computed again; false for none. */
static int reclaim(rotor_recorder_t *self, bool *is_found) {
    int32_t found = -1;

    for (int32_t k = 0; k < self->node_count && self->eviction.stored_bytes > 0; k++) {
        if (self->nodes[k].state == 0 || !self->eviction.candidates[k].is_stored) {
            continue;
        }
        bool is_away = rotor_recorder_is_away(self, k);
        if (!is_away || self->nodes[k].op >= 0) {
            found = k;
        }
        if (!is_away) {
            break;
        }
    }
    *is_found = found >= 0;
    if (found < 0) {
        return ROTOR_OK;
    }
    if (rotor_recorder_is_away(self, found)) {
        int ret = rotor_eviction_fetched(&self->eviction, found);
        if (ret != ROTOR_OK ||
            (ret = rotor_eviction_evict(&self->eviction, found)) != ROTOR_OK) {
            return ret;
        }
    }
    rotor_eviction_store(&self->eviction, found, false);
    return rotor_recorder_tell(self, ROTOR_UNSTORED, found);
}

/* What goes next where no temporary can: where the tier is full of what need not be there, that makes
 * room for what has to be. */
static int choose_node(rotor_recorder_t *self, int32_t *node) {
    bool may_retry = true;
    int ret;
    while ((ret = rotor_eviction_choose(&self->eviction, self->clock, node)) == ROTOR_OK &&
           *node < 0 && self->eviction.pool_count > 0 && may_retry) {
        if ((ret = reclaim(self, &may_retry)) != ROTOR_OK) {
            return ret;
        }
    }
    return ret;
}

int rotor_recorder_make_room(rotor_recorder_t *self, int64_t bytes, int64_t enough, int32_t *node,
                             bool *is_moving) {
    int ret;

    *node = -1;
    *is_moving = false;
    if (self->options.budget == ROTOR_UNLIMITED ||
        self->current_bytes <= self->options.budget - bytes) {
        return ROTOR_OK;
    }
    bool is_wish = self->current_bytes <= enough;
    if (self->has_repeated && self->frame_count > 0) {
        ret = rotor_recorder_needed_last(self, is_wish, node);
        if (ret != ROTOR_OK || (*node < 0 && is_wish)) {
            *node = -2;
            return ret;
        }
    }
    if (*node < 0 && (*node = free_temporary(self)) < 0 &&
        (ret = choose_node(self, node)) != ROTOR_OK) {
        return ret;
    }
    *is_moving = *node >= 0 && !self->eviction.candidates[*node].is_stored &&
                 !rotor_recorder_node_is(self, *node, ROTOR_NODE_TEMPORARY) &&
                 rotor_eviction_prefers_tier(&self->eviction, *node);
    if (*is_moving) {
        return ROTOR_OK;
    }
    if (*node < 0 && (*node = rotor_recorder_give_up(self)) < 0) {
        *node = -2;
        return ROTOR_OK;
    }
    if (rotor_recorder_node_is(self, *node, ROTOR_NODE_TEMPORARY) &&
        (ret = rotor_recorder_tell(self, ROTOR_DROPPED, *node)) != ROTOR_OK) {
        return ret;
    }
    self->evictions++;
    ret = rotor_recorder_leave_memory(self, *node);
    ret = ret == ROTOR_OK ? rotor_recorder_forget_if_unused(self, *node) : ret;
    return rotor_recorder_settled(self, ret);
}

int rotor_recorder_moved(rotor_recorder_t *self, int32_t node) {
    rotor_eviction_store(&self->eviction, node, true);
    self->evictions++;
    self->current_bytes -= self->nodes[node].bytes;
    return rotor_recorder_settled(self, rotor_eviction_leave(&self->eviction, node));
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
        goto out;
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
    items = NULL;
out:
    rotor_free(items);
    return ret;
}

/* The bytes of output k. */
static int64_t size_of(const rotor_recorder_t *self, const rotor_completion_t *done, int64_t k) {
    int32_t origin = done->origins[k];
    return origin >= 0 ? self->nodes[origin].bytes : done->bytes[k];
}

/* The program's storage is the new version's. */
static int leave_origin(rotor_recorder_t *self, int32_t origin) {
    self->nodes[origin].state &= (uint8_t)~ROTOR_NODE_LIVE;
    self->held_bytes -= self->nodes[origin].bytes;
    return rotor_recorder_leave_memory(self, origin);
}

/* The outputs of an operation that is not remembered. */
static int finish_sources(rotor_recorder_t *self, const rotor_completion_t *done, int32_t *nodes) {
    for (int64_t k = 0; k < done->count; k++) {
        int32_t origin = done->origins[k];
        int64_t size = size_of(self, done, k);
        int ret = rotor_recorder_new_source(self, size, 0, &nodes[k]);
        if (ret == ROTOR_OK && origin >= 0) {
            ret = leave_origin(self, origin);
        }
        if (ret != ROTOR_OK) {
            return ret;
        }
        rotor_recorder_count_bytes(self, size);
        if ((ret = rotor_eviction_allow(&self->eviction, nodes[k])) != ROTOR_OK ||
            (origin >= 0 && (ret = rotor_recorder_forget_if_unused(self, origin)) != ROTOR_OK)) {
            return ret;
        }
    }
    return ROTOR_OK;
}

static int finish_record(rotor_recorder_t *self, const rotor_completion_t *done, int32_t *nodes,
                         int32_t op) {
    rotor_record_t *record = &self->records[op];
    int32_t *outputs = record->items + done->recorded;
    int ret = ROTOR_OK;

    for (int64_t k = 0; k < done->recorded; k++) {
        int32_t input = self->inputs[k];
        record->items[k] = input;
        if (self->nodes[input].needed++ == 0 &&
            rotor_recorder_node_is(self, input, ROTOR_NODE_SOURCE) &&
            (ret = rotor_recorder_tell(self, ROTOR_NEEDED, input)) != ROTOR_OK) {
            return ret;
        }
    }
    for (int64_t k = 0; k < done->count; k++) {
        int32_t origin = done->origins[k];
        int64_t size = size_of(self, done, k);
        if ((ret = rotor_recorder_new_node(self, size, 0, &nodes[k])) != ROTOR_OK) {
            return ret;
        }
        int32_t node = nodes[k];
        outputs[k] = node;
        outputs[done->count + k] = origin;
        self->nodes[node].op = op;
        self->nodes[node].version = origin >= 0 ? self->nodes[origin].version + 1 : 0;
        record->remembered++;
        ret = rotor_eviction_compute(&self->eviction, node, rotor_max(done->cost_ns, 1));
        for (int64_t i = 0; i < done->recorded && ret == ROTOR_OK; i++) {
            ret = rotor_eviction_depend(&self->eviction, node, self->inputs[i]);
        }
        if (ret == ROTOR_OK) {
            ret = rotor_eviction_materialize(&self->eviction, &node, 1);
        }
        ret = ret == ROTOR_OK ? rotor_eviction_allow(&self->eviction, node) : ret;
        if (ret == ROTOR_OK && origin >= 0) {
            /* The lock of the new operation is given back below. */
            ret = leave_origin(self, origin);
            rotor_eviction_lock(&self->eviction, origin);
        }
        if (ret != ROTOR_OK) {
            return ret;
        }
        rotor_eviction_touch(&self->eviction, node, self->clock);
        rotor_recorder_count_bytes(self, size);
    }
    return ROTOR_OK;
}

int rotor_recorder_finish(rotor_recorder_t *self, const rotor_completion_t *done, int32_t *nodes,
                          int32_t *op) {
    int64_t total = done->workspace_bytes;
    int ret;

    *op = -1;
    for (int64_t k = 0; k < done->count; k++) {
        total += done->origins[k] < 0 ? done->bytes[k] : 0;
    }
    rotor_recorder_reach(self, total);
    self->held_peak_bytes = rotor_max(self->held_peak_bytes, self->held_bytes + total);
    self->clock += rotor_max(done->cost_ns, 1);
    self->base_ns += done->cost_ns;
    self->operations++;
    rotor_recorder_count_operation(self, done->cost_ns);
    if (done->recorded < 0 || done->count == 0) {
        ret = close_frame(self);
        ret = ret == ROTOR_OK ? finish_sources(self, done, nodes) : ret;
        return rotor_recorder_settled(self, ret);
    }
    if ((ret = new_record(self, done->recorded, done->count, op)) == ROTOR_OK) {
        self->records[*op].cost_ns = done->cost_ns;
        self->records[*op].workspace_bytes = done->workspace_bytes;
        self->records[*op].kept_bytes = done->kept_bytes;
        rotor_recorder_count_bytes(self, done->kept_bytes);
        ret = finish_record(self, done, nodes, *op);
    }
    /* The outputs are candidates before the inputs are again, as in the published runtime. */
    int status = close_frame(self);
    return rotor_recorder_settled(self, ret == ROTOR_OK ? status : ret);
}
