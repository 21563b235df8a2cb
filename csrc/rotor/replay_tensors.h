/*
 * The tensors of a replay (replay.h): made, locked, pinned, evicted, banished; and the notes of
 * it. Private to the replay.
 */
#ifndef ROTOR_REPLAY_TENSORS_H
#define ROTOR_REPLAY_TENSORS_H

#include "replay_private.h"

/* Flags of tensors. */
enum { ROTOR_TENSOR_DEFINED = 1, ROTOR_TENSOR_COUNTED = 2 /* among the evicted dependents */ };

static inline const rotor_graph_t *rotor_replay_graph(const rotor_replay_t *self) {
    return &self->log->graph;
}

static inline int32_t rotor_replay_storage(const rotor_replay_t *self, int32_t tensor) {
    return rotor_replay_graph(self)->tensors[tensor].storage;
}

static inline bool rotor_replay_has(const rotor_replay_t *self, int32_t tensor) {
    return (self->tensors[tensor].flags & ROTOR_TENSOR_DEFINED) != 0;
}

/* Adds an event to the trace, if one is kept. */
int rotor_replay_note(rotor_replay_t *self, enum rotor_event_kind kind, int32_t index,
                      int64_t bytes);
/* A storage comes into memory: counts it where statistics are kept. */
void rotor_replay_count_coming(rotor_replay_t *self, int32_t storage);
/* V1: a tensor came or went; counts it with the storages that it is computed from. */
void rotor_replay_count_evicted(rotor_replay_t *self, int32_t tensor, bool is_evicted);

/* Makes the tensors of an operation that is met for the first time; none is in memory. */
int rotor_replay_make(rotor_replay_t *self, int32_t operation);

int rotor_replay_evict(rotor_replay_t *self, int32_t storage);
int rotor_replay_lock(rotor_replay_t *self, int32_t tensor);
/* V1 tries to banish its storage then. */
int rotor_replay_unlock(rotor_replay_t *self, int32_t tensor);
int rotor_replay_pin(rotor_replay_t *self, int32_t storage);
/* V1: frees a storage for good, when nothing refers to it and nothing evicted depends on it. */
int rotor_replay_try_to_banish(rotor_replay_t *self, int32_t storage);

#endif
