#include "recorder_needs.h"

#include "eviction.h"
#include "eviction_pool.h"
#include "recorder_nodes.h"
#include "vector.h"

int64_t rotor_recorder_operands(const rotor_recorder_t *self, int32_t op, const int32_t **inputs) {
    bool is_new = op == ROTOR_NEW_OPERATION;
    *inputs = is_new ? self->inputs : self->records[op].items;
    return is_new ? self->input_count : self->records[op].input_count;
}

void rotor_recorder_begin_needs(rotor_recorder_t *self) {
    self->needs++;
    self->has_repeated = false;
    self->losses = 0;
}

bool rotor_recorder_note_repeat(rotor_recorder_t *self, int32_t op) {
    rotor_record_t *record = &self->records[op];
    record->repeats = record->needs == self->needs ? record->repeats + 1 : 1;
    record->needs = self->needs;
    bool is_first = record->repeats > ROTOR_OFTEN && !self->has_repeated && self->losses == 0 &&
                    !self->options.never_keep;
    self->has_repeated |= is_first;
    return is_first;
}

bool rotor_recorder_may_gather_again(rotor_recorder_t *self) {
    self->has_repeated = ++self->losses <= ROTOR_MOST_LOSSES;
    return self->has_repeated;
}

/* Numbers what a node is computed from, in the order in which it would be used. */
static int number_needs(rotor_recorder_t *self, int32_t node, uint32_t mark, int32_t *turn) {
    uint32_t *marks = self->eviction.marks;

    self->work_count = 0;
    int ret = rotor_push(&self->work, &self->work_count, &self->work_capacity, node);
    while (ret == ROTOR_OK && self->work_count > 0) {
        int32_t at = self->work[--self->work_count];
        if (marks[at] == mark) {
            continue;
        }
        marks[at] = mark;
        self->nodes[at].turn = (*turn)++;
        if (rotor_eviction_is(&self->eviction, at, ROTOR_MATERIAL)) {
            continue;
        }
        const rotor_record_t *record = &self->records[self->nodes[at].op];
        for (int32_t k = record->input_count - 1; k >= 0 && ret == ROTOR_OK; k--) {
            ret = rotor_push(&self->work, &self->work_count, &self->work_capacity,
                             record->items[k]);
        }
    }
    return ret;
}

static bool may_go(const rotor_recorder_t *self, int32_t node) {
    return self->nodes[node].op >= 0 && self->eviction.candidates[node].locks == 0 &&
           rotor_pool_may_hold(&self->eviction, node);
}

/* True if a node goes before another one; `mark`: of what is needed. */
static bool goes_before(const rotor_recorder_t *self, int32_t node, int32_t other, uint32_t mark) {
    const rotor_eviction_t *engine = &self->eviction;
    bool is_needed = engine->marks[node] == mark;
    bool is_temporary = rotor_recorder_node_is(self, node, ROTOR_NODE_TEMPORARY);
    if (is_needed != (engine->marks[other] == mark)) {
        return !is_needed;
    }
    if (is_needed) {
        return self->nodes[node].turn > self->nodes[other].turn;
    }
    if (is_temporary != rotor_recorder_node_is(self, other, ROTOR_NODE_TEMPORARY)) {
        return is_temporary;
    }
    return engine->candidates[node].last_access < engine->candidates[other].last_access;
}

/* Numbers all that the new operation needs. */
static int number_all(rotor_recorder_t *self, uint32_t mark) {
    int32_t turn = 0;
    int ret = ROTOR_OK;

    for (int64_t f = self->frame_count - 1; f >= 0; f--) {
        const rotor_recorder_frame_t *frame = &self->frames[f];
        const int32_t *inputs;
        int64_t count = rotor_recorder_operands(self, frame->op, &inputs);
        for (int32_t k = frame->at_pending; k < frame->last_pending && ret == ROTOR_OK; k++) {
            ret = number_needs(self, self->pending[k], mark, &turn);
        }
        for (int64_t k = 0; k < count && ret == ROTOR_OK; k++) {
            ret = number_needs(self, inputs[k], mark, &turn);
        }
    }
    return ret;
}

int rotor_recorder_needed_last(rotor_recorder_t *self, bool is_wish, int32_t *node) {
    *node = -1;
    uint32_t mark = rotor_eviction_mark(&self->eviction);
    int ret = number_all(self, mark);
    for (int32_t k = 0; k < self->node_count && ret == ROTOR_OK; k++) {
        if (self->nodes[k].state != 0 && may_go(self, k) &&
            (*node < 0 || goes_before(self, k, *node, mark))) {
            *node = k;
        }
    }
    if (is_wish && *node >= 0 && self->eviction.marks[*node] == mark) {
        *node = -1;
    }
    return ret;
}
