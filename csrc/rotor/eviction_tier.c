#include "eviction_tier.h"

#include "eviction_check.h"
#include "eviction_pool.h"

void rotor_eviction_set_tier(rotor_eviction_t *self, const rotor_link_t *link, double weight) {
    self->link = *link;
    self->move_weight = weight;
    self->has_tier = true;
}

/* What a storage takes of the tier at most. */
static int64_t room_of(const rotor_eviction_t *self, int32_t storage) {
    int64_t bytes = self->candidates[storage].bytes;
    return bytes + (1 + bytes / ROTOR_PIECE_BYTES) * self->link.padding_bytes;
}

int rotor_eviction_allow(rotor_eviction_t *self, int32_t storage) {
    rotor_candidate_t *candidate = &self->candidates[storage];
    if (!self->has_tier || candidate->may_move || candidate->bytes <= 0 ||
        candidate->bytes < self->link.least_bytes) {
        return ROTOR_OK;
    }
    bool was_in_use = rotor_eviction_is_in_use(self, storage);
    candidate->may_move = true;
    if (rotor_eviction_is_present(self, storage) && was_in_use &&
        !rotor_eviction_is_in_use(self, storage)) {
        self->locked_bytes -= candidate->bytes;
    }
    return rotor_eviction_settled(self, rotor_pool_join(self, storage));
}

void rotor_eviction_store(rotor_eviction_t *self, int32_t storage, bool is_stored) {
    rotor_candidate_t *candidate = &self->candidates[storage];
    if (candidate->is_stored != is_stored) {
        candidate->is_stored = is_stored;
        self->stored_bytes += is_stored ? room_of(self, storage) : -room_of(self, storage);
    }
}

int rotor_eviction_leave(rotor_eviction_t *self, int32_t storage) {
    rotor_candidate_t *candidate = &self->candidates[storage];
    rotor_pool_leave(self, storage);
    if (rotor_eviction_is_in_use(self, storage)) {
        self->locked_bytes -= candidate->bytes;
    }
    candidate->locks = 0;
    candidate->is_away = true;
    return rotor_eviction_settled(self, ROTOR_OK);
}

int rotor_eviction_fetched(rotor_eviction_t *self, int32_t storage) {
    rotor_candidate_t *candidate = &self->candidates[storage];
    candidate->is_away = false;
    if (rotor_eviction_is_in_use(self, storage)) {
        self->locked_bytes += candidate->bytes;
    }
    return rotor_eviction_settled(self, rotor_pool_join(self, storage));
}

bool rotor_eviction_may_store(const rotor_eviction_t *self, int32_t storage) {
    const rotor_candidate_t *candidate = &self->candidates[storage];
    return self->has_tier && candidate->may_move &&
           (candidate->is_stored ||
            room_of(self, storage) <= self->link.host_bytes - self->stored_bytes);
}

int64_t rotor_eviction_move_ns(const rotor_eviction_t *self, int32_t storage) {
    const rotor_candidate_t *candidate = &self->candidates[storage];
    int64_t ns = rotor_link_read_ns(&self->link, candidate->bytes);
    if (!candidate->is_stored) {
        ns += rotor_link_write_ns(&self->link, candidate->bytes);
    }
    double weighted = self->move_weight * (double)ns;
    return weighted < (double)ROTOR_LINK_ENDLESS ? (int64_t)weighted : ROTOR_LINK_ENDLESS;
}
