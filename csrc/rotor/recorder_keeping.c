#include "recorder_keeping.h"

/* A stretch ends after so many operations of the program, or so many that ran again. */
#define STRETCH_OPERATIONS 128
#define STRETCH_REPLAYS 4096
/* Fewer repeats in a stretch never count as thrashing. */
#define LEAST_REPEATS 64

static bool is_thrashing(const rotor_stretch_t *stretch) {
    return stretch->repeats >= LEAST_REPEATS && stretch->repeat_ns > stretch->base_ns;
}

static void end_stretch(rotor_recorder_t *self) {
    if (is_thrashing(&self->stretch)) {
        self->thrashes++;
        self->worst = self->stretch;
        if (!self->had_to_give_up) {
            self->most_kept_bytes += (self->options.budget - self->most_kept_bytes) / 2;
        }
    }
    self->stretch = (rotor_stretch_t){0};
}

void rotor_recorder_count_operation(rotor_recorder_t *self, int64_t cost_ns) {
    self->stretch.operations++;
    self->stretch.base_ns += cost_ns;
    if (self->stretch.operations >= STRETCH_OPERATIONS) {
        end_stretch(self);
    }
}

static bool may_keep(const rotor_recorder_t *self, int32_t node) {
    return node >= 0 && rotor_recorder_is_material(self, node) &&
           (self->nodes[node].state & (ROTOR_NODE_LIVE | ROTOR_NODE_SOURCE | ROTOR_NODE_KEPT)) ==
               ROTOR_NODE_LIVE &&
           self->nodes[node].bytes <= self->most_kept_bytes - self->node_bytes_kept;
}

void rotor_recorder_count_replay(rotor_recorder_t *self, int32_t op, int64_t cost_ns) {
    rotor_record_t *record = &self->records[op];
    const int32_t *outputs = record->items + record->input_count;

    self->stretch.replays++;
    if (++record->replays > ROTOR_OFTEN) {
        self->stretch.repeats++;
        self->stretch.repeat_ns += cost_ns;
    }
    if (self->stretch.replays >= STRETCH_REPLAYS) {
        end_stretch(self);
    }
    if (self->thrashes == 0 || record->replays < ROTOR_OFTEN || self->options.never_keep) {
        return;
    }
    for (int32_t k = 0; k < record->output_count; k++) {
        int32_t node = outputs[k];
        if (may_keep(self, node)) {
            self->nodes[node].state |= ROTOR_NODE_KEPT;
            self->node_bytes_kept += self->nodes[node].bytes;
            rotor_eviction_lock(&self->eviction, node);
        }
    }
}

void rotor_recorder_unmark_kept(rotor_recorder_t *self, int32_t node) {
    if ((self->nodes[node].state & ROTOR_NODE_KEPT) != 0) {
        self->nodes[node].state &= (uint8_t)~ROTOR_NODE_KEPT;
        self->node_bytes_kept -= self->nodes[node].bytes;
    }
}

int32_t rotor_recorder_give_up(rotor_recorder_t *self) {
    double least = 0;
    int32_t found = -1;

    for (int64_t k = 0; self->node_bytes_kept > 0 && k < self->node_count; k++) {
        const rotor_node_t *node = &self->nodes[k];
        if ((node->state & ROTOR_NODE_KEPT) == 0 || self->eviction.candidates[k].locks != 1) {
            continue;
        }
        const rotor_record_t *record = &self->records[node->op];
        double spared = (double)record->replays * (double)record->cost_ns / (double)node->bytes;
        if (found < 0 || spared < least) {
            least = spared;
            found = (int32_t)k;
        }
    }
    if (found >= 0) {
        /* Otherwise they would take turns. */
        self->had_to_give_up = true;
        self->most_kept_bytes = self->node_bytes_kept - self->nodes[found].bytes;
    }
    return found;
}
