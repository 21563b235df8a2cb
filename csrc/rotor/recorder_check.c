#include "recorder_check.h"

#include "eviction_check.h"

static bool is_used(const rotor_recorder_t *self, int64_t node) {
    return node >= 0 && node < self->node_count && self->nodes[node].state != 0;
}

static const char *check_record(const rotor_recorder_t *self, int64_t op) {
    const rotor_record_t *record = &self->records[op];
    const int32_t *outputs = record->items + record->input_count;
    int32_t remembered = 0;
    for (int32_t k = 0; k < record->input_count; k++) {
        if (!is_used(self, record->items[k]) || self->nodes[record->items[k]].needed < 1) {
            return "an operation reads a node that is not remembered";
        }
    }
    for (int32_t k = 0; k < record->output_count; k++) {
        if (outputs[k] >= 0 && (!is_used(self, outputs[k]) || self->nodes[outputs[k]].op != op)) {
            return "an output does not know the operation that makes it";
        }
        remembered += outputs[k] >= 0;
    }
    return remembered > 0 && remembered == record->remembered
               ? NULL
               : "remembered is not the number of remembered outputs";
}

static const char *check_records(const rotor_recorder_t *self) {
    int64_t records = 0;
    int64_t inputs = 0;
    const char *fault = NULL;
    for (int64_t op = 0; op < self->record_count && fault == NULL; op++) {
        if (self->records[op].input_count >= 0) {
            records++;
            inputs += self->records[op].input_count;
            fault = check_record(self, op);
        }
    }
    for (int64_t k = 0; k < self->node_count; k++) {
        inputs -= is_used(self, k) ? self->nodes[k].needed : 0;
    }
    return fault != NULL                   ? fault
           : records != self->live_records ? "live_records is not the number of records"
           : inputs != 0 ? "needed is not the number of operations that read a node"
                         : NULL;
}

static const char *check_node(const rotor_recorder_t *self, int32_t node) {
    int state = self->nodes[node].state;
    bool is_material = rotor_recorder_is_material(self, node);
    bool is_source = (state & ROTOR_NODE_SOURCE) != 0;
    if (is_source
            ? self->nodes[node].op >= 0 || (!is_material && !rotor_recorder_is_away(self, node))
            : self->nodes[node].op < 0 || self->records[self->nodes[node].op].input_count < 0) {
        return "a node is neither a source in memory nor made by an operation";
    }
    if ((state & ROTOR_NODE_TEMPORARY) != 0 && (!is_material || (state & ROTOR_NODE_LIVE) != 0)) {
        return "a temporary is not in memory, or the program holds it";
    }
    if ((state & ROTOR_NODE_KEPT) != 0 &&
        (!is_material || self->eviction.candidates[node].locks < 1)) {
        return "a node that is kept is not locked in memory";
    }
    return NULL;
}

static const char *check_nodes(const rotor_recorder_t *self) {
    int64_t nodes = 0;
    int64_t kept = 0;
    int64_t copied = 0;
    int64_t temporaries = 0;
    const char *fault = NULL;
    for (int32_t k = 0; k < self->node_count && fault == NULL; k++) {
        int state = self->nodes[k].state;
        if (state != 0) {
            nodes++;
            kept += (state & ROTOR_NODE_KEPT) != 0 ? self->nodes[k].bytes : 0;
            copied += (state & ROTOR_NODE_COPY) != 0 ? self->nodes[k].bytes : 0;
            temporaries += (state & ROTOR_NODE_TEMPORARY) != 0;
            fault = check_node(self, k);
        }
    }
    int32_t previous = -1;
    for (int32_t k = self->first_temporary; k >= 0 && temporaries >= 0; k = self->nodes[k].next) {
        temporaries--;
        if (self->nodes[k].previous != previous) {
            return "the list of temporaries is not linked both ways";
        }
        previous = k;
    }
    return fault != NULL                      ? fault
           : nodes != self->live_nodes        ? "live_nodes is not the number of nodes"
           : kept != self->node_bytes_kept    ? "node_bytes_kept is not the sum of kept nodes"
           : copied != self->copied_bytes     ? "copied_bytes is not the sum of copies"
           : temporaries != 0                 ? "a temporary is not in the list of temporaries"
           : previous != self->last_temporary ? "the list of temporaries has another end"
                                              : NULL;
}

const char *rotor_recorder_check(const rotor_recorder_t *self) {
    const char *fault = rotor_eviction_check(&self->eviction);
    fault = fault == NULL ? check_nodes(self) : fault;
    return fault == NULL ? check_records(self) : fault;
}
