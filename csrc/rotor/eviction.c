#include "eviction.h"

#include <string.h>

#include "eviction_check.h"
#include "eviction_pool.h"
#include "eviction_tier.h"
#include "neighbourhoods.h"
#include "regions.h"
#include "vector.h"

/* Fewer lost places never make the lists of neighbours compact themselves, nor fewer nodes the
 * classes. */
#define LEAST_LOST 1024

static bool needs_classes(const rotor_eviction_t *self) {
    return self->options.heuristic->numerator == ROTOR_CLASSES ||
           self->options.heuristic->numerator == ROTOR_CALLBACK;
}

static bool needs_regions(const rotor_eviction_t *self) {
    return self->options.heuristic->numerator == ROTOR_REGIONS ||
           self->options.heuristic->numerator == ROTOR_ANCESTORS;
}

void rotor_eviction_init(rotor_eviction_t *self, const rotor_eviction_options_t *options) {
    memset(self, 0, sizeof(*self));
    self->options = *options;
    self->has_regions = needs_regions(self) && !options->late_regions;
    self->random = options->seed;
    self->unused = -1;
}

void rotor_eviction_free(rotor_eviction_t *self) {
    rotor_regions_free(self);
    rotor_classes_free(&self->classes);
    rotor_free(self->candidates);
    rotor_free(self->states);
    rotor_free(self->neighbours);
    rotor_free(self->pool);
    rotor_free(self->stack);
    rotor_free(self->marks);
    memset(self, 0, sizeof(*self));
}

/* SplitMix64 (Steele, Lea, Flood, OOPSLA 2014). */
static uint64_t draw(rotor_eviction_t *self) {
    uint64_t z = self->random += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

/* Uniform in 0 .. n - 1. */
static int64_t draw_below(rotor_eviction_t *self, int64_t n) {
    uint64_t range = (uint64_t)n;
    uint64_t excess = (UINT64_MAX % range + 1) % range;
    uint64_t z;

    do {
        z = draw(self);
    } while (z > UINT64_MAX - excess);
    return (int64_t)(z % range);
}

static int reserve_scratch(rotor_eviction_t *self) {
    int64_t capacity = self->scratch_capacity;
    int64_t twin = capacity;
    int ret = ROTOR_RESERVE(self->stack, self->count, twin, 1);

    if (ret == ROTOR_OK) {
        ret = ROTOR_RESERVE(self->marks, self->count, self->scratch_capacity, 1);
    }
    if (ret == ROTOR_OK && self->scratch_capacity > capacity) {
        memset(self->marks + capacity, 0,
               (size_t)(self->scratch_capacity - capacity) * sizeof(*self->marks));
    }
    return ret;
}

uint32_t rotor_eviction_mark(rotor_eviction_t *self) {
    if (self->mark == UINT32_MAX) {
        memset(self->marks, 0, (size_t)self->scratch_capacity * sizeof(*self->marks));
        self->mark = 0;
    }
    return ++self->mark;
}

int rotor_eviction_add(rotor_eviction_t *self, int64_t bytes, int32_t *storage) {
    int32_t node = -1;
    int32_t number = self->unused;
    int ret = ROTOR_OK;

    if (number < 0 &&
        ((ret = ROTOR_RESERVE(self->candidates, self->count, self->capacity, 1)) != ROTOR_OK ||
         (ret = reserve_scratch(self)) != ROTOR_OK ||
         (ret = ROTOR_RESERVE(self->states, self->count, self->state_capacity, 1)) != ROTOR_OK ||
         (needs_regions(self) && (ret = rotor_regions_reserve(self)) != ROTOR_OK))) {
        return ret;
    }
    if (needs_classes(self) && !self->options.skip_unmade &&
        (ret = rotor_classes_add(&self->classes, 0, &node)) != ROTOR_OK) {
        return ret;
    }
    if (number < 0) {
        number = (int32_t)self->count++;
    } else {
        self->unused = self->candidates[number].slot;
        self->removed_count--;
    }
    self->bytes_added += bytes;
    self->added_count++;
    self->candidates[number] = (rotor_candidate_t){.bytes = bytes, .slot = -1, .node = node};
    self->states[number] =
        bytes < self->bytes_added / self->added_count / 100 ? (uint8_t)ROTOR_SMALL : 0;
    *storage = number;
    return rotor_eviction_settled(self, ROTOR_OK);
}

/* Appends to a list, which moves to the end of all lists when it is full. */
static int append_neighbour(rotor_eviction_t *self, rotor_neighbours_t *list, int32_t storage) {
    if (list->count == list->capacity) {
        int32_t capacity = list->capacity == 0 ? 2 : 2 * list->capacity;
        int ret = ROTOR_RESERVE(self->neighbours, self->neighbour_count, self->neighbour_capacity,
                                capacity);
        if (ret != ROTOR_OK) {
            return ret;
        }
        int32_t start = (int32_t)self->neighbour_count;
        if (list->count > 0) {
            memcpy(self->neighbours + start, self->neighbours + list->start,
                   (size_t)list->count * sizeof(*self->neighbours));
        }
        self->neighbour_lost += list->capacity;
        list->start = start;
        list->capacity = capacity;
        self->neighbour_count += capacity;
    }
    self->neighbours[list->start + list->count++] = storage;
    return ROTOR_OK;
}

int rotor_eviction_depend(rotor_eviction_t *self, int32_t child, int32_t parent) {
    rotor_neighbours_t *parents = &self->candidates[child].neighbours[ROTOR_PARENTS];
    rotor_neighbours_t *children = &self->candidates[parent].neighbours[ROTOR_CHILDREN];
    int ret;

    if (!self->options.count_accesses && !self->options.keep_edges &&
        (child == parent || rotor_eviction_is(self, parent, ROTOR_PINNED) ||
         (parents->count > 0 &&
          self->neighbours[parents->start + parents->count - 1] == parent))) {
        return ROTOR_OK;
    }
    if ((ret = append_neighbour(self, parents, parent)) != ROTOR_OK) {
        return ret;
    }
    self->candidates[child].roots_known = false;
    self->candidates[parent].roots_known = false;
    self->changes += !rotor_eviction_is(self, child, ROTOR_MATERIAL) &&
                     !rotor_eviction_is(self, parent, ROTOR_MATERIAL);
    if (self->has_regions && rotor_eviction_is(self, child, ROTOR_COMPUTED)) {
        rotor_regions_linked(self, child, parent);
    }
    return rotor_eviction_settled(self, append_neighbour(self, children, child));
}

int rotor_eviction_compute(rotor_eviction_t *self, int32_t storage, int64_t ns) {
    /* Sums over regions count a storage twice at most. */
    if (ns > INT64_MAX / 4 - self->total_compute_ns) {
        return ROTOR_ERR_OVERFLOW;
    }
    self->total_compute_ns += ns;
    self->candidates[storage].compute_ns += ns;
    if ((self->states[storage] & (ROTOR_MATERIAL | ROTOR_COMPUTED)) == ROTOR_COMPUTED) {
        self->grown += !rotor_eviction_is(self, storage, ROTOR_GROWN);
        self->states[storage] |= ROTOR_GROWN;
        self->changes++;
    }
    return rotor_eviction_settled(self, ROTOR_OK);
}

/* In use, or not. */

void rotor_eviction_lock(rotor_eviction_t *self, int32_t storage) {
    rotor_candidate_t *candidate = &self->candidates[storage];
    if (candidate->locks++ == 0) {
        rotor_pool_leave(self, storage);
        if (rotor_pool_may_hold(self, storage)) {
            self->locked_bytes += candidate->bytes;
        }
    }
    (void)rotor_eviction_settled(self, ROTOR_OK);
}

int rotor_eviction_unlock(rotor_eviction_t *self, int32_t storage) {
    rotor_candidate_t *candidate = &self->candidates[storage];
    if (--candidate->locks == 0 && rotor_pool_may_hold(self, storage)) {
        self->locked_bytes -= candidate->bytes;
    }
    return rotor_eviction_settled(self, rotor_pool_join(self, storage));
}

void rotor_eviction_pin(rotor_eviction_t *self, int32_t storage) {
    rotor_candidate_t *candidate = &self->candidates[storage];
    rotor_pool_leave(self, storage);
    if (rotor_pool_may_hold(self, storage) && candidate->locks == 0) {
        self->locked_bytes += candidate->bytes;
    }
    self->states[storage] |= ROTOR_PINNED;
    candidate->may_move = false;
    (void)rotor_eviction_settled(self, ROTOR_OK);
}

void rotor_eviction_touch(rotor_eviction_t *self, int32_t storage, int64_t now) {
    self->candidates[storage].last_access = now;
}

int64_t rotor_eviction_class_sum(rotor_eviction_t *self, int32_t storage) {
    return needs_classes(self) ? rotor_neighbourhood_sum(self, storage) : 0;
}

/* Coming and going. */

int rotor_eviction_materialize(rotor_eviction_t *self, const int32_t *storages, int64_t count) {
    int ret = ROTOR_OK;

    for (int64_t k = 0; k < count; k++) {
        rotor_candidate_t *candidate = &self->candidates[storages[k]];
        self->states[storages[k]] |= ROTOR_MATERIAL;
        if (!candidate->is_away && rotor_eviction_is_in_use(self, storages[k])) {
            self->locked_bytes += candidate->bytes;
        }
        if (needs_classes(self) && candidate->node >= 0) {
            rotor_neighbourhood_materialized(self, storages[k]);
        }
    }
    if (self->has_regions &&
        (ret = rotor_regions_materialized(self, storages, count)) != ROTOR_OK) {
        goto out;
    }
    for (int64_t k = 0; k < count; k++) {
        self->states[storages[k]] |= ROTOR_COMPUTED;
        if (rotor_eviction_is(self, storages[k], ROTOR_GROWN)) {
            self->states[storages[k]] &= (uint8_t)~ROTOR_GROWN;
            self->grown--;
        }
        if ((ret = rotor_pool_join(self, storages[k])) != ROTOR_OK) {
            break;
        }
    }
out:
    return rotor_eviction_settled(self, ret);
}

int rotor_eviction_evict(rotor_eviction_t *self, int32_t storage) {
    rotor_candidate_t *candidate = &self->candidates[storage];

    rotor_pool_leave(self, storage);
    if (rotor_eviction_is_in_use(self, storage)) {
        self->locked_bytes -= candidate->bytes;
    }
    candidate->locks = 0;
    self->states[storage] &= (uint8_t)~ROTOR_MATERIAL;
    return rotor_eviction_settled(self, self->has_regions ? rotor_regions_evicted(self, storage)
                                        : needs_classes(self)
                                            ? rotor_neighbourhood_evicted(self, storage)
                                            : ROTOR_OK);
}

/* Removing. */

static void drop_neighbour(rotor_eviction_t *self, int32_t of, int way, int32_t storage) {
    rotor_neighbours_t *list = &self->candidates[of].neighbours[way];
    int32_t kept = list->start;

    for (int32_t k = list->start; k < list->start + list->count; k++) {
        if (self->neighbours[k] != storage) {
            self->neighbours[kept++] = self->neighbours[k];
        }
    }
    list->count = kept - list->start;
    self->candidates[of].roots_known = false;
}

static int compact_neighbours(rotor_eviction_t *self) {
    int64_t used = self->neighbour_count - self->neighbour_lost;
    int64_t at = 0;
    int32_t *moved = rotor_malloc_array(rotor_max(used, 1), sizeof(*moved));

    if (moved == NULL) {
        return ROTOR_ERR_NO_MEMORY;
    }
    for (int64_t k = 0; k < self->count; k++) {
        for (int way = 0; way < 2; way++) {
            rotor_neighbours_t *list = &self->candidates[k].neighbours[way];
            if (list->capacity > 0) {
                memcpy(moved + at, self->neighbours + list->start,
                       (size_t)list->count * sizeof(*moved));
                list->start = (int32_t)at;
                at += list->capacity;
            }
        }
    }
    rotor_free(self->neighbours);
    self->neighbours = moved;
    self->neighbour_count = at;
    self->neighbour_capacity = rotor_max(used, 1);
    self->neighbour_lost = 0;
    return ROTOR_OK;
}

int rotor_eviction_remove(rotor_eviction_t *self, int32_t storage) {
    rotor_candidate_t *candidate = &self->candidates[storage];
    int ret = ROTOR_OK;

    /* Steps that may fail come first. */
    if (self->neighbour_lost > 2 * (self->neighbour_count - self->neighbour_lost) + LEAST_LOST &&
        (ret = compact_neighbours(self)) != ROTOR_OK) {
        return ret;
    }
    if (self->has_regions && (ret = rotor_regions_removing(self, storage)) != ROTOR_OK) {
        return ret;
    }
    rotor_pool_leave(self, storage);
    if (rotor_eviction_is_present(self, storage) && rotor_eviction_is_in_use(self, storage)) {
        self->locked_bytes -= candidate->bytes;
    }
    rotor_eviction_store(self, storage, false);
    if (candidate->node >= 0) {
        rotor_neighbourhood_removing(self, storage);
    }
    for (int way = 0; way < 2; way++) {
        rotor_neighbours_t *list = &candidate->neighbours[way];
        for (int32_t k = list->start; k < list->start + list->count; k++) {
            if (self->neighbours[k] != storage) {
                drop_neighbour(self, self->neighbours[k], 1 - way, storage);
            }
        }
        self->neighbour_lost += list->capacity;
    }
    self->grown -= rotor_eviction_is(self, storage, ROTOR_GROWN);
    self->total_compute_ns -= candidate->compute_ns;
    *candidate = (rotor_candidate_t){.slot = self->unused, .node = -1};
    self->states[storage] = ROTOR_REMOVED;
    self->unused = storage;
    self->removed_count++;
    if (self->has_regions) {
        ret = rotor_regions_removed(self, storage);
    } else if (self->classes.count > 4 * self->count + LEAST_LOST) {
        ret = rotor_neighbourhood_rebuild(self);
    }
    return rotor_eviction_settled(self, ret);
}

int rotor_eviction_forget_edges(rotor_eviction_t *self, int32_t storage) {
    rotor_candidate_t before = self->candidates[storage];
    bool is_pinned = rotor_eviction_is(self, storage, ROTOR_PINNED);
    bool is_material = rotor_eviction_is(self, storage, ROTOR_MATERIAL);
    int ret;

    /* The number that was removed last is given out first. */
    if ((ret = rotor_eviction_remove(self, storage)) != ROTOR_OK ||
        (ret = rotor_eviction_add(self, before.bytes, &storage)) != ROTOR_OK) {
        return ret;
    }
    self->candidates[storage].locks = before.locks;
    self->candidates[storage].last_access = before.last_access;
    if (is_pinned) {
        rotor_eviction_pin(self, storage);
    }
    self->candidates[storage].may_move = before.may_move;
    self->candidates[storage].is_away = before.is_away;
    rotor_eviction_store(self, storage, before.is_stored);
    return is_material ? rotor_eviction_materialize(self, &storage, 1) : ROTOR_OK;
}

void rotor_eviction_detach(rotor_eviction_t *self, int32_t storage) {
    self->states[storage] |= ROTOR_DETACHED;
}

/* Choosing. */

/* The sum of what is evicted on one side, each storage once; storages with the mark `seen`, of an
 * earlier walk, are left out. */
static int64_t eviction_walk(rotor_eviction_t *self, int32_t storage, enum rotor_direction way,
                             uint32_t seen, int64_t *last_access) {
    int64_t depth = 0;
    int64_t sum = 0;
    uint32_t mark = rotor_eviction_mark(self);

    self->marks[storage] = mark;
    self->stack[depth++] = storage;
    while (depth > 0) {
        int32_t at = self->stack[--depth];
        rotor_neighbours_t list = self->candidates[at].neighbours[way];
        for (int32_t k = list.start; k < list.start + list.count; k++) {
            int32_t other = self->neighbours[k];
            const rotor_candidate_t *candidate = &self->candidates[other];
            if (rotor_eviction_is(self, other, ROTOR_DETACHED)) {
                continue;
            }
            self->accesses++;
            if (self->marks[other] == mark || rotor_eviction_is(self, other, ROTOR_MATERIAL)) {
                continue;
            }
            if (self->marks[other] != seen) {
                sum += candidate->compute_ns;
            }
            *last_access = rotor_max(*last_access, candidate->last_access);
            self->marks[other] = mark;
            self->stack[depth++] = other;
        }
    }
    return sum;
}

int64_t rotor_eviction_around(rotor_eviction_t *self, int32_t storage,
                              enum rotor_direction direction) {
    int64_t last = 0;
    return eviction_walk(self, storage, direction, rotor_eviction_mark(self), &last);
}

/* Whether a heuristic weighs the time that bringing a storage back takes. */
static bool weighs_time(const rotor_eviction_t *self) {
    enum rotor_numerator numerator = self->options.heuristic->numerator;
    return numerator == ROTOR_OWN || numerator == ROTOR_CLASSES || numerator == ROTOR_REGIONS ||
           numerator == ROTOR_ANCESTORS || numerator == ROTOR_UNION;
}

/* The numerator of a cost without a tier; *since: the access from which staleness counts. */
static int64_t numerator_of(rotor_eviction_t *self, int32_t storage, int64_t *since) {
    const rotor_candidate_t *candidate = &self->candidates[storage];
    int64_t own = candidate->compute_ns;

    switch (self->options.heuristic->numerator) {
    case ROTOR_OWN:
    case ROTOR_CALLBACK:
        return own;
    case ROTOR_CLASSES:
        return own + rotor_neighbourhood_sum(self, storage);
    case ROTOR_REGIONS:
        return own + candidate->around_ns[ROTOR_CHILDREN] + candidate->around_ns[ROTOR_PARENTS];
    case ROTOR_ANCESTORS:
        return own + candidate->around_ns[ROTOR_PARENTS];
    case ROTOR_UNION:
        own += eviction_walk(self, storage, ROTOR_CHILDREN, rotor_eviction_mark(self), since);
        return own + eviction_walk(self, storage, ROTOR_PARENTS, self->mark, since);
    case ROTOR_LAST_ACCESS:
        return candidate->last_access;
    case ROTOR_ONE:
    case ROTOR_CHANCE:
        break;
    }
    return 1;
}

bool rotor_eviction_prefers_tier(rotor_eviction_t *self, int32_t storage) {
    int64_t since = 0;
    if (!rotor_eviction_may_store(self, storage)) {
        return false;
    }
    return rotor_eviction_is(self, storage, ROTOR_PINNED) ||
           rotor_eviction_move_ns(self, storage) <
               (weighs_time(self) ? numerator_of(self, storage, &since)
                                  : self->candidates[storage].compute_ns);
}

static int eviction_cost(rotor_eviction_t *self, int32_t storage, int64_t now,
                         rotor_eviction_cost_t *cost) {
    const rotor_heuristic_t *heuristic = self->options.heuristic;
    const rotor_candidate_t *candidate = &self->candidates[storage];
    int64_t since = candidate->last_access;

    if (heuristic->numerator == ROTOR_CALLBACK) {
        double value = 0;
        int ret = self->options.cost(self->options.context, self, storage, &value);
        *cost = (rotor_eviction_cost_t){.numerator = value != 0, .bytes = 1, .staleness = 1};
        cost->estimate = value;
        return ret;
    }
    int64_t numerator = numerator_of(self, storage, &since);
    if (weighs_time(self) && rotor_eviction_may_store(self, storage)) {
        int64_t move = rotor_eviction_move_ns(self, storage);
        bool is_pinned = rotor_eviction_is(self, storage, ROTOR_PINNED);
        numerator = is_pinned ? move : rotor_min(numerator, move);
    }
    *cost = rotor_eviction_cost(numerator, heuristic->by_bytes ? candidate->bytes : 1,
                                heuristic->staleness == ROTOR_NO_STALENESS ? 1 : now - since);
    return ROTOR_OK;
}

/* In the pool, and not only there because the tier could take it if it had room. */
static bool can_go(const rotor_eviction_t *self, int32_t storage) {
    return storage >= 0 && (!rotor_eviction_is(self, storage, ROTOR_PINNED) ||
                            rotor_eviction_may_store(self, storage));
}

/* One by chance, or the next in the pool that can go. */
static int32_t draw_storage(rotor_eviction_t *self) {
    int64_t first = draw_below(self, self->pool_count);
    for (int64_t k = 0; k < self->pool_count; k++) {
        int32_t storage = self->pool[(first + k) % self->pool_count];
        if (can_go(self, storage)) {
            return storage;
        }
    }
    return -1;
}

/* The last of the cheapest of every `stride`-th candidate from the first on; strides of random
 * length up to `stride` where it is above 1. */
static int scan(rotor_eviction_t *self, int64_t now, int64_t stride, int32_t *storage) {
    rotor_eviction_cost_t best = {.estimate = HUGE_VAL, .bytes = 0};
    bool is_callback = self->options.heuristic->numerator == ROTOR_CALLBACK;

    *storage = -1;
    for (int64_t k = 0; k < self->pool_length;
         k += stride == 1 ? 1 : 1 + draw_below(self, stride)) {
        rotor_eviction_cost_t cost;
        int ret;
        if (!can_go(self, self->pool[k])) {
            continue;
        }
        self->evaluations++;
        self->accesses++;
        if ((ret = eviction_cost(self, self->pool[k], now, &cost)) != ROTOR_OK) {
            return ret;
        }
        if (*storage < 0 || (is_callback ? cost.estimate <= best.estimate
                                         : rotor_eviction_cost_at_most(&cost, &best))) {
            best = cost;
            *storage = self->pool[k];
        }
        if (cost.numerator == 0 && cost.estimate == 0) {
            break;
        }
    }
    return ROTOR_OK;
}

int rotor_eviction_choose(rotor_eviction_t *self, int64_t now, int32_t *storage) {
    int64_t stride = 1;

    *storage = -1;
    if (self->pool_count == 0) {
        return ROTOR_OK;
    }
    if (needs_regions(self) && !self->has_regions) {
        int ret = rotor_regions_find(self);
        if (ret != ROTOR_OK) {
            return ret;
        }
    }
    if (self->options.heuristic->numerator == ROTOR_CHANCE) {
        rotor_pool_compact(self);
        self->evaluations++;
        self->accesses++;
        *storage = draw_storage(self);
        return ROTOR_OK;
    }
    if (needs_classes(self) && self->options.rebuild_every > 0 &&
        self->changes >= self->options.rebuild_every) {
        int ret = rotor_neighbourhood_rebuild(self);
        if (ret != ROTOR_OK) {
            return ret;
        }
    }
    if (self->options.sample) {
        rotor_pool_compact(self);
        while ((stride + 1) * (stride + 1) <= self->pool_count) {
            stride++;
        }
    }
    return scan(self, now, stride, storage);
}

int64_t rotor_eviction_footprint(const rotor_eviction_t *self) {
    return self->capacity * (int64_t)sizeof(*self->candidates) +
           self->state_capacity * (int64_t)sizeof(*self->states) +
           self->neighbour_capacity * (int64_t)sizeof(*self->neighbours) +
           self->pool_capacity * (int64_t)sizeof(*self->pool) +
           self->scratch_capacity * (int64_t)(sizeof(*self->stack) + sizeof(*self->marks)) +
           self->classes.capacity * (int64_t)sizeof(*self->classes.nodes) +
           rotor_regions_footprint(self);
}
