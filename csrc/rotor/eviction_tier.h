/*
 * A second tier of memory beside eviction: storages that may move there and come back.
 *
 * Without a tier a storage that leaves memory has to be computed again, and a pinned one cannot leave.
 * With a tier, the time to bring one back is the smaller of the time of computing it again and of the
 * weighted time of its move: a fetch, and a write before it unless the tier has its bytes already.
 * A pinned storage that may move is a candidate too, at the cost of its move.
 *
 * A storage that is away is in memory for its neighbours: what is computed from it needs a fetch, and
 * nothing that was computed before it.
 *
 *     allow    it may move from now on
 *     store    the tier has its bytes, or has them no more
 *     leave    it went out of memory; the tier has its bytes
 *     fetched  it came back
 */
#ifndef ROTOR_EVICTION_TIER_H
#define ROTOR_EVICTION_TIER_H

#include "eviction_private.h"

/* Owners write a storage in pieces of so many bytes, each with the link's padding in the tier. */
#define ROTOR_PIECE_BYTES (INT64_C(1) << 19)

/* From now on there is a tier. Of the link, host_bytes bounds what it holds. */
void rotor_eviction_set_tier(rotor_eviction_t *self, const rotor_link_t *link, double weight);

int rotor_eviction_allow(rotor_eviction_t *self, int32_t storage);
void rotor_eviction_store(rotor_eviction_t *self, int32_t storage, bool is_stored);
/* It has to be in memory, and stored; its locks are dropped. */
int rotor_eviction_leave(rotor_eviction_t *self, int32_t storage);
/* It has to be away. */
int rotor_eviction_fetched(rotor_eviction_t *self, int32_t storage);

/* True if it may move, and the tier has its bytes or room for them. */
bool rotor_eviction_may_store(const rotor_eviction_t *self, int32_t storage);
/* The weighted time of the move of a storage and of its return. */
int64_t rotor_eviction_move_ns(const rotor_eviction_t *self, int32_t storage);

#endif
