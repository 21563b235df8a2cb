/* Walks over nodes and records; their answers are in `work`, and nothing else changes but marks. */
#include "recorder.h"
#include "vector.h"

int rotor_recorder_dependents(rotor_recorder_t *self, int32_t node) {
    uint32_t mark = rotor_eviction_mark(&self->eviction);
    uint32_t *marks = self->eviction.marks;
    int64_t found = 0;
    bool is_changed = true;

    self->work_count = 0;
    marks[node] = mark;
    /* Records are not in order of time, once their numbers are used again: until nothing changes. */
    while (is_changed) {
        is_changed = false;
        for (int64_t k = 0; k < self->record_count; k++) {
            const rotor_record_t *record = &self->records[k];
            bool is_after = false;
            for (int32_t i = 0; i < record->input_count && !is_after; i++) {
                is_after = marks[record->items[i]] == mark;
            }
            for (int32_t i = 0; is_after && i < record->output_count; i++) {
                int32_t output = record->items[record->input_count + i];
                if (output < 0 || marks[output] == mark) {
                    continue;
                }
                marks[output] = mark;
                is_changed = true;
                if (rotor_recorder_node_is(self, output, ROTOR_NODE_LIVE)) {
                    int ret = rotor_push(&self->work, &found, &self->work_capacity, output);
                    if (ret != ROTOR_OK) {
                        return ret;
                    }
                }
            }
        }
    }
    self->work_count = found;
    return ROTOR_OK;
}

enum rotor_writing rotor_recorder_writing(const rotor_recorder_t *self, int32_t node,
                                          bool is_differentiated, int32_t longest_chain) {
    const rotor_node_t *found = &self->nodes[node];
    return (found->state & ROTOR_NODE_SOURCE) != 0 ? ROTOR_WRITE_SOURCE
           : !is_differentiated                    ? ROTOR_WRITE_RESTORED
           : found->version >= longest_chain       ? ROTOR_WRITE_TOO_LONG
                                                   : ROTOR_WRITE_VERSION;
}

int rotor_recorder_copying(rotor_recorder_t *self, int32_t source, bool *is_worth) {
    int64_t bytes = self->nodes[source].bytes;
    int64_t computed = 0;
    int ret = rotor_recorder_dependents(self, source);
    for (int64_t k = 0; ret == ROTOR_OK && k < self->work_count; k++) {
        computed += self->nodes[self->work[k]].bytes;
    }
    *is_worth = ret == ROTOR_OK && rotor_recorder_node_is(self, source, ROTOR_NODE_LIVE) &&
                bytes > 0 && bytes + self->copied_bytes < computed;
    return ret;
}

int rotor_recorder_evicted(rotor_recorder_t *self) {
    self->work_count = 0;
    for (int32_t k = 0; k < self->node_count; k++) {
        if (rotor_recorder_node_is(self, k, ROTOR_NODE_LIVE) &&
            !rotor_recorder_is_material(self, k)) {
            int ret = rotor_push(&self->work, &self->work_count, &self->work_capacity, k);
            if (ret != ROTOR_OK) {
                return ret;
            }
        }
    }
    return ROTOR_OK;
}

int64_t rotor_recorder_footprint(const rotor_recorder_t *self) {
    int64_t bytes = rotor_eviction_footprint(&self->eviction) +
                    self->node_capacity * (int64_t)sizeof(*self->nodes) +
                    self->record_capacity * (int64_t)sizeof(*self->records) +
                    self->event_capacity * (int64_t)sizeof(*self->events) +
                    self->frame_capacity * (int64_t)sizeof(*self->frames) +
                    (self->input_capacity + self->pending_capacity + self->work_capacity) *
                        (int64_t)sizeof(int32_t);
    for (int64_t k = 0; k < self->record_count; k++) {
        const rotor_record_t *record = &self->records[k];
        bytes += record->input_count < 0
                     ? 0
                     : (record->input_count + 2 * record->output_count) * (int64_t)sizeof(int32_t);
    }
    return bytes;
}
