/*
 * The pool of an eviction: the storages that may go, in the order in which they came to be so.
 */
#ifndef ROTOR_EVICTION_POOL_H
#define ROTOR_EVICTION_POOL_H

#include "eviction_private.h"

/* In memory, and neither pinned nor kept from moving. */
static inline bool rotor_pool_may_hold(const rotor_eviction_t *self, int32_t storage) {
    return rotor_eviction_is_present(self, storage) &&
           (!rotor_eviction_is(self, storage, ROTOR_PINNED) ||
            self->candidates[storage].may_move);
}

/* Appends a storage that may go and is not locked; does nothing for others. */
int rotor_pool_join(rotor_eviction_t *self, int32_t storage);
void rotor_pool_leave(rotor_eviction_t *self, int32_t storage);
/* Closes the gaps that storages left. */
void rotor_pool_compact(rotor_eviction_t *self);

#endif
