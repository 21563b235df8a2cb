/*
 * The nodes of a recorder: made, in and out of memory, forgotten (recorder.h).
 */
#ifndef ROTOR_RECORDER_NODES_H
#define ROTOR_RECORDER_NODES_H

#include "recorder_private.h"

/* A storage that nothing remembered makes. `is_foreign`: it is not counted until it goes. */
int rotor_recorder_source(rotor_recorder_t *self, int64_t bytes, bool is_foreign, int32_t *node);

/* The program dropped the storage of a live node. */
int rotor_recorder_dead(rotor_recorder_t *self, int32_t node);
/* A node in memory becomes a source, which may move to the tier or stays in memory. One that is away
 * may become a source that may move. */
int rotor_recorder_pin(rotor_recorder_t *self, int32_t node, bool may_move);
/* A node in memory is about to be written to: the tier's copy of a source is dropped. */
int rotor_recorder_changed(rotor_recorder_t *self, int32_t node);
/* A live source that operations need was copied: *node is the program's from now on, and the old
 * number is that of the copy, which goes when nothing needs it any more. */
int rotor_recorder_copied(rotor_recorder_t *self, int32_t source, int32_t *node);
/* The size of a source changed. */
void rotor_recorder_resized(rotor_recorder_t *self, int32_t node, int64_t bytes);

/* Private to the recorder. */

static inline bool rotor_recorder_node_is(const rotor_recorder_t *self, int32_t node, int states) {
    return (self->nodes[node].state & states) != 0;
}

static inline void rotor_recorder_count_bytes(rotor_recorder_t *self, int64_t bytes) {
    self->current_bytes += bytes;
    self->peak_bytes = rotor_max(self->peak_bytes, self->current_bytes);
}

/* Appends an event for the owner. */
int rotor_recorder_tell(rotor_recorder_t *self, enum rotor_recorder_event_kind kind,
                        int32_t number);

/* A live node, not in memory; `state` is ROTOR_NODE_FOREIGN or 0. */
int rotor_recorder_new_node(rotor_recorder_t *self, int64_t bytes, uint8_t state, int32_t *node);
/* A live node in memory, which no operation makes. */
int rotor_recorder_new_source(rotor_recorder_t *self, int64_t bytes, uint8_t state, int32_t *node);
/* A node that came into memory becomes the youngest temporary. */
void rotor_recorder_link_temporary(rotor_recorder_t *self, int32_t node);
/* A node goes out of memory. */
int rotor_recorder_leave_memory(rotor_recorder_t *self, int32_t node);
/* Forgets a node that nothing needs, and what was remembered only for it. */
int rotor_recorder_forget_if_unused(rotor_recorder_t *self, int32_t node);

#endif
