#include "eviction_check.h"

static const char *check_pool(const rotor_eviction_t *self) {
    int64_t pooled = 0;
    for (int64_t k = 0; k < self->pool_length; k++) {
        int32_t storage = self->pool[k];
        pooled += storage >= 0;
        if (storage >= 0 && (storage >= self->count || self->candidates[storage].slot != k)) {
            return "a storage in the pool does not know its slot";
        }
    }
    if (pooled != self->pool_count) {
        return "pool_count is not the number of storages in the pool";
    }
    for (int32_t k = 0; k < self->count; k++) {
        bool is_removed = (self->states[k] & ROTOR_REMOVED) != 0;
        bool may_go = rotor_eviction_is_present(self, k) && !rotor_eviction_is_in_use(self, k);
        bool is_pooled = !is_removed && self->candidates[k].slot >= 0;
        if (is_pooled && (!may_go || self->pool[self->candidates[k].slot] != k)) {
            return "the pool holds a storage that may not be evicted";
        }
        if (may_go && !is_pooled && (self->states[k] & ROTOR_SMALL) == 0) {
            return "a storage that may be evicted is not in the pool";
        }
    }
    return NULL;
}

static const char *check_removed(const rotor_eviction_t *self) {
    int64_t flagged = 0;
    int64_t linked = 0;
    for (int64_t k = 0; k < self->count; k++) {
        flagged += (self->states[k] & ROTOR_REMOVED) != 0;
    }
    for (int32_t k = self->unused; k >= 0 && linked <= flagged; k = self->candidates[k].slot) {
        if ((self->states[k] & ROTOR_REMOVED) == 0) {
            return "a number that is in use is to be given out";
        }
        linked++;
    }
    return linked == flagged && flagged == self->removed_count
               ? NULL
               : "removed_count is not the number of removed storages";
}

static const char *check_sums(const rotor_eviction_t *self) {
    int64_t locked = 0;
    int64_t compute = 0;
    int64_t grown = 0;
    for (int32_t k = 0; k < self->count; k++) {
        const rotor_candidate_t *candidate = &self->candidates[k];
        bool is_locked = rotor_eviction_is_present(self, k) && rotor_eviction_is_in_use(self, k);
        locked += is_locked ? candidate->bytes : 0;
        compute += candidate->compute_ns;
        grown += (self->states[k] & ROTOR_GROWN) != 0;
        if (candidate->locks < 0) {
            return "a storage was unlocked more often than locked";
        }
    }
    return locked != self->locked_bytes        ? "locked_bytes is not the sum of what is in use"
           : compute != self->total_compute_ns ? "total_compute_ns is not the sum of compute_ns"
           : grown != self->grown              ? "grown is not the number of storages that grew"
                                               : NULL;
}

/* Every edge is in two lists: a sum over the edges in each must be the same. */
static const char *check_edges(const rotor_eviction_t *self) {
    uint64_t sums[2] = {0, 0};
    int64_t places = 0;
    for (int64_t k = 0; k < self->count; k++) {
        for (int way = 0; way < 2; way++) {
            rotor_neighbours_t list = self->candidates[k].neighbours[way];
            places += list.capacity;
            if (list.count > list.capacity || list.start + list.capacity > self->neighbour_count) {
                return "a list of neighbours leaves its place";
            }
            for (int32_t i = list.start; i < list.start + list.count; i++) {
                uint64_t from = (uint64_t)(way == ROTOR_CHILDREN ? k : self->neighbours[i]);
                uint64_t to = (uint64_t)(way == ROTOR_CHILDREN ? self->neighbours[i] : k);
                if ((self->states[self->neighbours[i]] & ROTOR_REMOVED) != 0) {
                    return "a removed storage is a neighbour";
                }
                sums[way] += (from * UINT64_C(0x9e3779b97f4a7c15) + 1) *
                             (to * UINT64_C(0xbf58476d1ce4e5b9) + 1);
            }
        }
    }
    if (places + self->neighbour_lost != self->neighbour_count) {
        return "neighbour_lost is not the number of places that no list has";
    }
    return sums[0] == sums[1] ? NULL : "an edge is known at one of its ends only";
}

static const char *check_neighbourhoods(const rotor_eviction_t *self) {
    for (int64_t k = 0; k < self->count; k++) {
        int32_t node = self->candidates[k].node;
        if (node >= 0 && ((self->states[k] & ROTOR_MATERIAL) != 0 || node >= self->classes.count)) {
            return "a storage in memory is in a class of evicted ones";
        }
    }
    for (int64_t k = 0; k < self->walked_capacity; k++) {
        if (self->walked[0][k] != 0 || self->walked[1][k] != 0) {
            return "a walk over the regions left its marks";
        }
    }
    return NULL;
}

static const char *check_tier(const rotor_eviction_t *self) {
    int64_t stored = 0;
    for (int64_t k = 0; k < self->count; k++) {
        const rotor_candidate_t *candidate = &self->candidates[k];
        stored += candidate->is_stored;
        if (candidate->is_away && (!candidate->is_stored || candidate->slot >= 0 ||
                                   (self->states[k] & ROTOR_MATERIAL) == 0)) {
            return "a storage is away that the tier does not have, or may be evicted";
        }
    }
    return (stored == 0) == (self->stored_bytes == 0) &&
                   (stored == 0 || self->stored_bytes <= self->link.host_bytes)
               ? NULL
               : "stored_bytes is not what the tier has";
}

const char *rotor_eviction_check(const rotor_eviction_t *self) {
    static const char *(*const checks[])(const rotor_eviction_t *) = {
        check_pool, check_removed, check_sums, check_edges, check_neighbourhoods,
        check_tier};
    const char *fault = NULL;
    for (size_t k = 0; fault == NULL && k < sizeof(checks) / sizeof(checks[0]); k++) {
        fault = checks[k](self);
    }
    return fault;
}
