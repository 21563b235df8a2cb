/*
 * The storage to evict next: the candidates of an eviction, the costs of the published
 * heuristics, and the pool in the published order. The simulator replays logs with it, the recorder
 * of a running program asks it (recorder.h): it knows storages and the edges between them, and no
 * operations, names or budgets.
 *
 *     add, depend        a new storage (not in memory yet), and what it is computed from
 *     remove             a storage that nothing will ever need again; add() may give out its number again
 *     compute            more nanoseconds that its computation takes
 *     materialize        storages came into memory, in this order
 *     evict              one went out
 *     lock, unlock, pin  locked ones are in use; pinned ones stay
 *     touch              was read at this time
 *     forget_edges       nothing computes it any more, and nothing is computed from it
 *     detach             it is out of every neighbourhood
 *     choose             the one to evict at this time
 *
 * The pool holds the storages that are in memory, unlocked and unpinned, in the order in which they
 * became so. choose() scans it from its beginning, takes what costs no more than the best so far,
 * and stops at a cost of zero: the last of the cheapest wins. Costs are compared as the correctly
 * rounded quotients of exact integers.
 *
 * Evicted neighbourhoods. "Evicted" below means not in memory, so also storages that were added and
 * not computed yet. Two structures follow them, where the heuristic needs them:
 *   classes (classes.h)  union-find over evicted neighbours; a storage that comes back leaves its
 *                        class, which does not split (phantom connections, as published), and
 *                        links that aliases make are not seen, until the classes are rebuilt:
 *                        every `rebuild_every`-th time, 1 being exact, 0 never
 *   regions (regions.h)  for every storage in memory, what is evicted around it in either direction
 *
 * Kirisame et al., Dynamic Tensor Rematerialization, ICLR 2021.
 */
#ifndef ROTOR_EVICTION_H
#define ROTOR_EVICTION_H

#include "eviction_private.h"

/* Never fails. */
void rotor_eviction_init(rotor_eviction_t *self, const rotor_eviction_options_t *options);
void rotor_eviction_free(rotor_eviction_t *self);

int rotor_eviction_add(rotor_eviction_t *self, int64_t bytes, int32_t *storage);
/* Takes a storage in any state out of every list. Its number may come again from add(), and
 * what it took is used again: memory and time stay flat however many come and go. */
int rotor_eviction_remove(rotor_eviction_t *self, int32_t storage);
/* `child` is computed from `parent`; repeats and child == parent are allowed. */
int rotor_eviction_depend(rotor_eviction_t *self, int32_t child, int32_t parent);
int rotor_eviction_compute(rotor_eviction_t *self, int32_t storage, int64_t ns);

/* None of them may be in memory. They join the pool in order, unless locked or pinned. */
int rotor_eviction_materialize(rotor_eviction_t *self, const int32_t *storages, int64_t count);
/* It has to be in memory; its locks are dropped. */
int rotor_eviction_evict(rotor_eviction_t *self, int32_t storage);

void rotor_eviction_lock(rotor_eviction_t *self, int32_t storage);
/* The last unlock puts it at the end of the pool. */
int rotor_eviction_unlock(rotor_eviction_t *self, int32_t storage);
void rotor_eviction_pin(rotor_eviction_t *self, int32_t storage);
void rotor_eviction_touch(rotor_eviction_t *self, int32_t storage, int64_t now);
/* Drops its edges and the time of its computation, as if it was added now; its bytes, locks and last
 * access stay, and it stays pinned and in memory. */
int rotor_eviction_forget_edges(rotor_eviction_t *self, int32_t storage);
/* Cuts it off from its parents and children: it is out of every neighbourhood for good. */
void rotor_eviction_detach(rotor_eviction_t *self, int32_t storage);

/* *storage is -1 where nothing can go. */
int rotor_eviction_choose(rotor_eviction_t *self, int64_t now, int32_t *storage);
/* True if a storage that leaves memory is to come back from the tier (eviction_tier.h). */
bool rotor_eviction_prefers_tier(rotor_eviction_t *self, int32_t storage);

/* For callbacks and reports: nanoseconds of what is evicted after (ROTOR_CHILDREN) or before it,
 * by a new walk, and of the distinct classes of its evicted neighbours (0 without classes). */
int64_t rotor_eviction_around(rotor_eviction_t *self, int32_t storage,
                              enum rotor_direction direction);
int64_t rotor_eviction_class_sum(rotor_eviction_t *self, int32_t storage);

int64_t rotor_eviction_footprint(const rotor_eviction_t *self);

/* For walks over the storages: a number that no entry of `marks` has; `stack` has room for all. */
uint32_t rotor_eviction_mark(rotor_eviction_t *self);

#endif
