#include "eviction_pool.h"

#include "vector.h"

/* Fewer tombstones than this never make the pool compact itself. */
#define LEAST_TOMBSTONES 64

void rotor_pool_leave(rotor_eviction_t *self, int32_t storage) {
    rotor_candidate_t *candidate = &self->candidates[storage];
    if (candidate->slot >= 0) {
        self->pool[candidate->slot] = -1;
        candidate->slot = -1;
        self->pool_count--;
    }
}

void rotor_pool_compact(rotor_eviction_t *self) {
    int64_t length = 0;
    for (int64_t k = 0; k < self->pool_length; k++) {
        int32_t storage = self->pool[k];
        if (storage >= 0) {
            self->candidates[storage].slot = (int32_t)length;
            self->pool[length++] = storage;
        }
    }
    self->pool_length = length;
}

int rotor_pool_join(rotor_eviction_t *self, int32_t storage) {
    rotor_candidate_t *candidate = &self->candidates[storage];
    int ret;

    if (!rotor_pool_may_hold(self, storage) || candidate->locks > 0 || candidate->slot >= 0 ||
        (self->options.ignore_small && rotor_eviction_is(self, storage, ROTOR_SMALL))) {
        return ROTOR_OK;
    }
    if (self->pool_length > 2 * self->pool_count + LEAST_TOMBSTONES) {
        rotor_pool_compact(self);
    }
    if ((ret = ROTOR_RESERVE(self->pool, self->pool_length, self->pool_capacity, 1)) != ROTOR_OK) {
        return ret;
    }
    candidate->slot = (int32_t)self->pool_length;
    self->pool[self->pool_length++] = storage;
    self->pool_count++;
    return ROTOR_OK;
}
