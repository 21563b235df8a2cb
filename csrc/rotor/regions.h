/*
 * Keeps, for every storage in memory, what is evicted around it: `interior` is evicted and reachable
 * through evicted storages only, `frontier` is in memory and next to it or to its interior;
 * around_ns of the candidate is the sum over the interior. One of each per direction.
 *
 * As published, sums are those of the moment when a storage was absorbed, and what a new operation
 * adds to the graph is seen when a region is rebuilt. Pinned storages, which are never chosen, are
 * left out of frontiers unless accesses are counted.
 *
 * A storage that comes into memory when all before it is in memory, as after an execution, only
 * moves from the interiors to the frontiers of the storages after it: their regions are not walked
 * again where a walk would find what is known. `epoch` tells; it is lost when an operation makes an alias, which
 * links storages that were computed before.
 */
#ifndef ROTOR_REGIONS_H
#define ROTOR_REGIONS_H

#include "eviction_private.h"

/* Room for the regions of all storages. */
int rotor_regions_reserve(rotor_eviction_t *engine);
void rotor_regions_free(rotor_eviction_t *engine);

/* Finds the regions of all storages in memory, which are kept from then on (late_regions). */
int rotor_regions_find(rotor_eviction_t *engine);

/* A dependence was added between two storages that were both computed before. */
void rotor_regions_linked(rotor_eviction_t *engine, int32_t child, int32_t parent);
/* After the storage went out: those around it absorb its region and itself. */
int rotor_regions_evicted(rotor_eviction_t *engine, int32_t storage);
/* After the storages came in (before they are marked as computed): rebuilds their regions, and the
 * sides that look at them of the regions around them. */
int rotor_regions_materialized(rotor_eviction_t *engine, const int32_t *storages, int64_t count);

/* Around the removal of a storage: before, the storages in memory that look at it or through it are
 * noted; after, when its edges are gone, their regions are rebuilt. */
int rotor_regions_removing(rotor_eviction_t *engine, int32_t storage);
int rotor_regions_removed(rotor_eviction_t *engine, int32_t storage);

int64_t rotor_regions_footprint(const rotor_eviction_t *engine);

#endif
