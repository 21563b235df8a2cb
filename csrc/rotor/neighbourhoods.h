/*
 * Keeps the classes of what is evicted for the engine: joins them when a storage goes, takes one out
 * that comes back, and sums those around a candidate. See eviction.h on what they are.
 */
#ifndef ROTOR_NEIGHBOURHOODS_H
#define ROTOR_NEIGHBOURHOODS_H

#include "eviction_private.h"

/* After a storage went out of memory. */
int rotor_neighbourhood_evicted(rotor_eviction_t *self, int32_t storage);
/* It comes back into memory and has a node. */
void rotor_neighbourhood_materialized(rotor_eviction_t *self, int32_t storage);
/* It is about to be removed. */
void rotor_neighbourhood_removing(rotor_eviction_t *self, int32_t storage);
/* Nanoseconds of the distinct classes of its evicted neighbours. */
int64_t rotor_neighbourhood_sum(rotor_eviction_t *self, int32_t storage);
/* Rebuilds all classes from what is evicted, without phantom connections. */
int rotor_neighbourhood_rebuild(rotor_eviction_t *self);

#endif
