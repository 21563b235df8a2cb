#include "recorder_nodes.h"

#include "recorder_check.h"
#include "recorder_keeping.h"
#include "vector.h"

int rotor_recorder_tell(rotor_recorder_t *self, enum rotor_recorder_event_kind kind,
                        int32_t number) {
    int ret = ROTOR_RESERVE(self->events, self->event_count, self->event_capacity, 1);
    if (ret == ROTOR_OK) {
        self->events[self->event_count++] = (rotor_recorder_event_t){kind, number};
    }
    return ret;
}

void rotor_recorder_link_temporary(rotor_recorder_t *self, int32_t node) {
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

static void hold_bytes(rotor_recorder_t *self, int64_t bytes) {
    self->held_bytes += bytes;
    self->held_peak_bytes = rotor_max(self->held_peak_bytes, self->held_bytes);
}

static int forget_node(rotor_recorder_t *self, int32_t node) {
    int ret;
    rotor_recorder_unmark_kept(self, node);
    if (rotor_recorder_node_is(self, node, ROTOR_NODE_TEMPORARY)) {
        unlink_temporary(self, node);
        self->current_bytes -= self->nodes[node].bytes;
        if ((ret = rotor_recorder_tell(self, ROTOR_DROPPED, node)) != ROTOR_OK) {
            return ret;
        }
    }
    if (rotor_recorder_node_is(self, node, ROTOR_NODE_COPY)) {
        self->current_bytes -=
            rotor_recorder_is_material(self, node) ? self->nodes[node].bytes : 0;
        self->copied_bytes -= self->nodes[node].bytes;
    }
    self->nodes[node].state = 0;
    self->live_nodes--;
    if ((ret = rotor_recorder_tell(self, ROTOR_FORGOT_NODE, node)) != ROTOR_OK) {
        return ret;
    }
    return rotor_eviction_remove(&self->eviction, node);
}

static bool is_unused(const rotor_recorder_t *self, int32_t node) {
    return self->nodes[node].needed == 0 && !rotor_recorder_node_is(self, node, ROTOR_NODE_LIVE) &&
           self->eviction.candidates[node].locks ==
               (int32_t)rotor_recorder_node_is(self, node, ROTOR_NODE_KEPT);
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
        if (rotor_recorder_node_is(self, input, ROTOR_NODE_SOURCE)) {
            ret = rotor_recorder_tell(self, ROTOR_UNNEEDED, input);
        }
        if (ret == ROTOR_OK && is_unused(self, input)) {
            ret = rotor_push(&self->work, &self->work_count, &self->work_capacity, input);
        }
    }
    rotor_free(record->items);
    self->current_bytes -= record->kept_bytes;
    *record = (rotor_record_t){.input_count = -1, .output_count = self->unused_record};
    self->unused_record = op;
    self->live_records--;
    return ret == ROTOR_OK ? rotor_recorder_tell(self, ROTOR_FORGOT_OPERATION, op) : ret;
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

int rotor_recorder_forget_if_unused(rotor_recorder_t *self, int32_t node) {
    int ret;
    if (!is_unused(self, node)) {
        return ROTOR_OK;
    }
    self->work_count = 0;
    ret = rotor_push(&self->work, &self->work_count, &self->work_capacity, node);
    return ret == ROTOR_OK ? forget_work(self) : ret;
}

int rotor_recorder_new_node(rotor_recorder_t *self, int64_t bytes, uint8_t state, int32_t *node) {
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

int rotor_recorder_new_source(rotor_recorder_t *self, int64_t bytes, uint8_t state, int32_t *node) {
    int ret = rotor_recorder_new_node(self, bytes, (uint8_t)(state | ROTOR_NODE_SOURCE), node);
    if (ret == ROTOR_OK) {
        rotor_eviction_pin(&self->eviction, *node);
        ret = rotor_eviction_materialize(&self->eviction, node, 1);
    }
    return ret;
}

int rotor_recorder_leave_memory(rotor_recorder_t *self, int32_t node) {
    rotor_recorder_unmark_kept(self, node);
    if (rotor_recorder_node_is(self, node, ROTOR_NODE_TEMPORARY)) {
        unlink_temporary(self, node);
    }
    self->current_bytes -= self->nodes[node].bytes;
    return self->eviction.candidates[node].is_stored &&
                   rotor_eviction_prefers_tier(&self->eviction, node)
               ? rotor_eviction_leave(&self->eviction, node)
               : rotor_eviction_evict(&self->eviction, node);
}

int rotor_recorder_source(rotor_recorder_t *self, int64_t bytes, bool is_foreign, int32_t *node) {
    int ret = rotor_recorder_new_source(self, bytes, is_foreign ? ROTOR_NODE_FOREIGN : 0, node);
    if (ret == ROTOR_OK && !is_foreign) {
        rotor_recorder_count_bytes(self, bytes);
    }
    return rotor_recorder_settled(self, ret);
}

void rotor_recorder_resized(rotor_recorder_t *self, int32_t node, int64_t bytes) {
    rotor_recorder_count_bytes(self, bytes - self->nodes[node].bytes);
    hold_bytes(self, bytes - self->nodes[node].bytes);
    self->nodes[node].bytes = bytes;
}

int rotor_recorder_dead(rotor_recorder_t *self, int32_t node) {
    int ret = ROTOR_OK;

    self->nodes[node].state &= (uint8_t)~ROTOR_NODE_LIVE;
    self->held_bytes -= self->nodes[node].bytes;
    if (rotor_recorder_node_is(self, node, ROTOR_NODE_SOURCE)) {
        self->current_bytes -=
            rotor_recorder_is_material(self, node) ? self->nodes[node].bytes : 0;
    } else if (rotor_recorder_is_material(self, node)) {
        ret = rotor_recorder_leave_memory(self, node);
    }
    ret = ret == ROTOR_OK ? rotor_recorder_forget_if_unused(self, node) : ret;
    return rotor_recorder_settled(self, ret);
}

int rotor_recorder_changed(rotor_recorder_t *self, int32_t node) {
    if (!rotor_recorder_node_is(self, node, ROTOR_NODE_SOURCE) ||
        !self->eviction.candidates[node].is_stored) {
        return ROTOR_OK;
    }
    rotor_eviction_store(&self->eviction, node, false);
    return rotor_recorder_settled(self, rotor_recorder_tell(self, ROTOR_UNSTORED, node));
}

int rotor_recorder_pin(rotor_recorder_t *self, int32_t node, bool may_move) {
    bool was_kept = rotor_recorder_node_is(self, node, ROTOR_NODE_KEPT);
    int ret = ROTOR_OK;

    if (rotor_recorder_node_is(self, node, ROTOR_NODE_SOURCE)) {
        if (!may_move) {
            rotor_eviction_pin(&self->eviction, node);
            ret = rotor_recorder_changed(self, node);
        }
        return ret;
    }
    self->work_count = 0;
    rotor_recorder_unmark_kept(self, node);
    self->nodes[node].state |= ROTOR_NODE_SOURCE;
    if ((ret = leave_record(self, node)) != ROTOR_OK || (ret = forget_work(self)) != ROTOR_OK) {
        goto out;
    }
    rotor_eviction_pin(&self->eviction, node);
    if ((was_kept && (ret = rotor_eviction_unlock(&self->eviction, node)) != ROTOR_OK) ||
        (ret = rotor_eviction_forget_edges(&self->eviction, node)) != ROTOR_OK) {
        goto out;
    }
    if (self->nodes[node].needed > 0) {
        ret = rotor_recorder_tell(self, ROTOR_NEEDED, node);
    }
    if (ret == ROTOR_OK) {
        ret = may_move ? rotor_eviction_allow(&self->eviction, node)
                       : rotor_recorder_changed(self, node);
    }
out:
    return rotor_recorder_settled(self, ret);
}

int rotor_recorder_copied(rotor_recorder_t *self, int32_t source, int32_t *node) {
    int64_t bytes = self->nodes[source].bytes;
    bool is_foreign = (self->nodes[source].state & ROTOR_NODE_FOREIGN) != 0;
    bool may_move = self->eviction.candidates[source].may_move;
    int64_t held_before = self->held_bytes;
    int64_t peak_before = self->held_peak_bytes;
    int ret = rotor_recorder_source(self, bytes, is_foreign, node);
    if (ret != ROTOR_OK) {
        return ret;
    }
    /* Without a limit nothing would have been copied. */
    self->held_bytes = held_before;
    self->held_peak_bytes = peak_before;
    if (is_foreign) {
        rotor_recorder_count_bytes(self, bytes);
    }
    self->copied_bytes += bytes;
    self->nodes[source].state &= (uint8_t)~(ROTOR_NODE_LIVE | ROTOR_NODE_FOREIGN);
    self->nodes[source].state |= ROTOR_NODE_COPY;
    ret = rotor_eviction_allow(&self->eviction, source);
    if (ret == ROTOR_OK && may_move) {
        ret = rotor_eviction_allow(&self->eviction, *node);
    }
    return rotor_recorder_settled(self, ret);
}
