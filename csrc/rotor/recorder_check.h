/* The invariants of a recorder between two of its operations. */
#ifndef ROTOR_RECORDER_CHECK_H
#define ROTOR_RECORDER_CHECK_H

#include "recorder_private.h"

/* The first invariant that does not hold, as a sentence; NULL where all do. Takes time in proportion
 * to the nodes and records. Meaningless after an operation that ran out of memory. */
const char *rotor_recorder_check(const rotor_recorder_t *self);

/*
 * Ends an operation with status `ret`. Builds with ROTOR_CHECKS (ROTOR_DEBUG=1, the C tests) check
 * after every operation of up to 8 nodes, and of n more after every n / 8-th.
 */
static inline int rotor_recorder_settled(rotor_recorder_t *self, int ret) {
#ifdef ROTOR_CHECKS
    self->is_broken |= ret != ROTOR_OK;
    if (!self->is_broken && ++self->unchecked * 8 >= self->node_count) {
        self->unchecked = 0;
        ROTOR_ASSERT_HOLDS(rotor_recorder_check(self));
    }
#endif
    (void)self;
    return ret;
}

#endif
