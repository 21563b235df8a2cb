/* The invariants of an eviction engine between two of its operations. */
#ifndef ROTOR_EVICTION_CHECK_H
#define ROTOR_EVICTION_CHECK_H

#include "eviction_private.h"

/* The first invariant that does not hold, as a sentence; NULL where all do. Takes time in proportion
 * to the storages and their edges. Meaningless after an operation that ran out of memory. */
const char *rotor_eviction_check(const rotor_eviction_t *self);

/*
 * Ends an operation with status `ret`. Builds with ROTOR_CHECKS (ROTOR_DEBUG=1, the C tests) check
 * after every operation of up to 8 storages, and of n more after every n / 8-th.
 */
static inline int rotor_eviction_settled(rotor_eviction_t *self, int ret) {
#ifdef ROTOR_CHECKS
    self->is_broken |= ret != ROTOR_OK;
    if (!self->is_broken && ++self->unchecked * 8 >= self->count) {
        self->unchecked = 0;
        ROTOR_ASSERT_HOLDS(rotor_eviction_check(self));
    }
#endif
    (void)self;
    return ret;
}

#endif
