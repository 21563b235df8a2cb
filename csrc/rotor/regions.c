#include "regions.h"

#include <string.h>

#include "vector.h"

int rotor_regions_reserve(rotor_eviction_t *engine) {
    int64_t before = engine->region_capacity;
    int ret = ROTOR_RESERVE(engine->regions, engine->count, engine->region_capacity, 1);
    if (ret != ROTOR_OK) {
        return ret;
    }
    memset(engine->regions + before, 0,
           (size_t)(engine->region_capacity - before) * sizeof(*engine->regions));
    before = engine->walked_capacity;
    for (int side = 0; side < 2; side++) {
        int64_t capacity = before;
        ret = ROTOR_RESERVE(engine->walked[side], engine->count / 64, capacity, 1);
        if (ret != ROTOR_OK) {
            return ret;
        }
        memset(engine->walked[side] + before, 0,
               (size_t)(capacity - before) * sizeof(*engine->walked[side]));
        engine->walked_capacity = side == 1 ? capacity : before;
    }
    return ROTOR_OK;
}

static void clear(rotor_region_t *region) {
    for (int way = 0; way < 2; way++) {
        rotor_bits_free(&region->interior[way]);
        rotor_bits_free(&region->frontier[way]);
    }
}

void rotor_regions_free(rotor_eviction_t *engine) {
    for (int64_t k = 0; k < engine->region_capacity; k++) {
        clear(&engine->regions[k]);
    }
    rotor_free(engine->walked[0]);
    rotor_free(engine->walked[1]);
    engine->walked[0] = engine->walked[1] = NULL;
    rotor_free(engine->regions);
    engine->regions = NULL;
    engine->region_capacity = 0;
}

/* Walks the evicted storages on one side of a storage. */
static int rebuild(rotor_eviction_t *engine, int32_t storage, enum rotor_direction way) {
    const rotor_candidate_t *candidates = engine->candidates;
    rotor_region_t *region = &engine->regions[storage];
    int64_t depth = 0;
    int64_t sum = 0;
    int64_t seen = 0;
    int32_t least = storage;
    int32_t most = storage;

    engine->stack[depth++] = storage;
    while (depth > 0) {
        int32_t at = engine->stack[--depth];
        rotor_neighbours_t list = candidates[at].neighbours[way];
        sum += candidates[at].compute_ns;
        seen += list.count;
        for (int32_t k = list.start; k < list.start + list.count; k++) {
            /* Without branches, which nothing could predict. */
            int32_t other = engine->neighbours[k];
            uint64_t bit = UINT64_C(1) << (other & 63);
            int is_material = engine->states[other] & ROTOR_MATERIAL;
            uint64_t *word = &engine->walked[is_material][other >> 6];
            engine->stack[depth] = other;
            depth += is_material == 0 && (*word & bit) == 0;
            *word |= bit;
            least = other < least ? other : least;
            most = other > most ? other : most;
        }
    }
    int32_t first = least >> 6;
    int32_t count = (most >> 6) - first + 1;
    engine->walked[1][storage >> 6] &= ~(UINT64_C(1) << (storage & 63));
    int ret = rotor_bits_assign(&region->interior[way], engine->walked[0], first, count);
    if (ret == ROTOR_OK) {
        ret = rotor_bits_assign(&region->frontier[way], engine->walked[1], first, count);
    }
    for (int side = 0; side < 2; side++) {
        memset(engine->walked[side] + first, 0, (size_t)count * sizeof(uint64_t));
    }
    engine->candidates[storage].around_ns[way] = sum - candidates[storage].compute_ns;
    region->epoch[way] = engine->region_epoch;
    engine->accesses += seen;
    return ret;
}

int rotor_regions_find(rotor_eviction_t *engine) {
    for (int32_t k = 0; k < engine->count; k++) {
        if (!rotor_eviction_is(engine, k, ROTOR_MATERIAL)) {
            engine->regions[k].epoch[ROTOR_CHILDREN] = engine->regions[k].epoch[ROTOR_PARENTS] = -1;
            continue;
        }
        for (int way = 0; way < 2; way++) {
            int ret = rebuild(engine, k, (enum rotor_direction)way);
            if (ret != ROTOR_OK) {
                return ret;
            }
        }
    }
    engine->has_regions = true;
    return ROTOR_OK;
}

void rotor_regions_linked(rotor_eviction_t *engine, int32_t child, int32_t parent) {
    if (!rotor_eviction_is(engine, child, ROTOR_MATERIAL) ||
        !rotor_eviction_is(engine, parent, ROTOR_MATERIAL)) {
        engine->region_epoch++;
    }
    engine->regions[parent].epoch[ROTOR_CHILDREN] = -1;
    engine->regions[child].epoch[ROTOR_PARENTS] = -1;
}

static bool is_empty(const rotor_bits_t *set) { return rotor_bits_next(set, 0) < 0; }

/* True if `edge`, which is in memory, lies on one side of `storage` by way of its interior. */
static bool is_next_to(const rotor_eviction_t *engine, int32_t edge, int32_t storage,
                       enum rotor_direction way) {
    const rotor_bits_t *interior = &engine->regions[storage].interior[way];
    rotor_neighbours_t list = engine->candidates[edge].neighbours[1 - way];

    for (int32_t k = list.start + list.count - 1; k >= list.start; k--) {
        int32_t other = engine->neighbours[k];
        if (other == storage || rotor_bits_has(interior, other)) {
            return true;
        }
    }
    return false;
}

/* The sum over the interior, from what its storages cost now. */
static int64_t sum_of(const rotor_eviction_t *engine, const rotor_bits_t *interior) {
    int64_t sum = 0;
    for (int32_t at = rotor_bits_next(interior, 0); at >= 0;
         at = rotor_bits_next(interior, at + 1)) {
        sum += engine->candidates[at].compute_ns;
    }
    return sum;
}

/*
 * The side of a storage that looks at one that came in. Where nothing evicted lies beyond the one
 * that came, it leaves the interior alone, and only what was reached through it leaves the frontier;
 * of several that came together, one may have been reached through another.
 */
static int update(rotor_eviction_t *engine, int32_t storage, int32_t arrived,
                  enum rotor_direction way, bool is_alone) {
    rotor_region_t *region = &engine->regions[storage];
    const rotor_region_t *beyond = &engine->regions[arrived];

    if (!is_alone || engine->options.count_accesses ||
        region->epoch[way] != engine->region_epoch || !is_empty(&beyond->interior[way])) {
        return rebuild(engine, storage, way);
    }
    if (rotor_bits_has(&region->interior[way], arrived)) {
        rotor_bits_remove(&region->interior[way], arrived);
        engine->candidates[storage].around_ns[way] -= engine->candidates[arrived].compute_ns;
        for (int32_t at = rotor_bits_next(&beyond->frontier[way], 0); at >= 0;
             at = rotor_bits_next(&beyond->frontier[way], at + 1)) {
            if (at != storage && !is_next_to(engine, at, storage, way)) {
                rotor_bits_remove(&region->frontier[way], at);
            }
        }
    }
    if (engine->grown > 0) {
        engine->candidates[storage].around_ns[way] = sum_of(engine, &region->interior[way]);
    }
    return rotor_bits_add(&region->frontier[way], arrived);
}

int rotor_regions_materialized(rotor_eviction_t *engine, const int32_t *storages, int64_t count) {
    int ret = ROTOR_OK;

    for (int64_t k = 0; k < count; k++) {
        if ((ret = rebuild(engine, storages[k], ROTOR_CHILDREN)) != ROTOR_OK ||
            (ret = rebuild(engine, storages[k], ROTOR_PARENTS)) != ROTOR_OK) {
            return ret;
        }
    }
    for (int64_t k = 0; k < count; k++) {
        for (int way = 0; way < 2; way++) {
            const rotor_bits_t *frontier = &engine->regions[storages[k]].frontier[way];
            for (int32_t at = rotor_bits_next(frontier, 0); at >= 0;
                 at = rotor_bits_next(frontier, at + 1)) {
                if ((ret = update(engine, at, storages[k], (enum rotor_direction)(1 - way),
                                  count == 1)) != ROTOR_OK) {
                    return ret;
                }
            }
        }
    }
    return ROTOR_OK;
}

/* Adds an evicted storage and its region on one side to the region of `at`. */
static int absorb(rotor_eviction_t *engine, int32_t at, int32_t evicted,
                  enum rotor_direction way) {
    const rotor_bits_t *added = &engine->regions[evicted].interior[way];
    rotor_bits_t *interior = &engine->regions[at].interior[way];
    rotor_bits_t *frontier = &engine->regions[at].frontier[way];
    int64_t sum = engine->candidates[at].around_ns[way];
    int ret = rotor_bits_cover(interior, added->first, added->count);

    if (ret != ROTOR_OK) {
        return ret;
    }
    for (int32_t k = 0; k < added->count; k++) {
        uint64_t *word = &interior->words[added->first + k - interior->first];
        uint64_t fresh = added->words[k] & ~*word;
        *word |= fresh;
        for (; fresh != 0; fresh &= fresh - 1) {
            sum += engine->candidates[(added->first + k) * 64 + __builtin_ctzll(fresh)].compute_ns;
            engine->accesses++;
        }
    }
    if (!rotor_bits_has(interior, evicted)) {
        if ((ret = rotor_bits_add(interior, evicted)) != ROTOR_OK) {
            return ret;
        }
        sum += engine->candidates[evicted].compute_ns;
        engine->accesses++;
    }
    engine->candidates[at].around_ns[way] = sum;
    if ((ret = rotor_bits_unite(frontier, &engine->regions[evicted].frontier[way])) != ROTOR_OK) {
        return ret;
    }
    rotor_bits_remove(frontier, evicted);
    rotor_bits_remove(frontier, at);
    return ROTOR_OK;
}

int rotor_regions_evicted(rotor_eviction_t *engine, int32_t storage) {
    rotor_region_t *region = &engine->regions[storage];

    /* Those around it may not be found from here: no region can be trusted any more. */
    if (region->epoch[ROTOR_CHILDREN] != engine->region_epoch ||
        region->epoch[ROTOR_PARENTS] != engine->region_epoch) {
        engine->region_epoch++;
    }
    for (int way = 0; way < 2; way++) {
        const rotor_bits_t *behind = &region->frontier[1 - way];
        for (int32_t at = rotor_bits_next(behind, 0); at >= 0;
             at = rotor_bits_next(behind, at + 1)) {
            int ret = absorb(engine, at, storage, (enum rotor_direction)way);
            if (ret != ROTOR_OK) {
                return ret;
            }
        }
    }
    clear(region);
    engine->candidates[storage].around_ns[ROTOR_CHILDREN] = 0;
    engine->candidates[storage].around_ns[ROTOR_PARENTS] = 0;
    return ROTOR_OK;
}

int rotor_regions_removing(rotor_eviction_t *engine, int32_t storage) {
    int ret = rebuild(engine, storage, ROTOR_CHILDREN);
    return ret == ROTOR_OK ? rebuild(engine, storage, ROTOR_PARENTS) : ret;
}

int rotor_regions_removed(rotor_eviction_t *engine, int32_t storage) {
    rotor_region_t *region = &engine->regions[storage];
    int ret = ROTOR_OK;

    for (int way = 0; way < 2 && ret == ROTOR_OK; way++) {
        const rotor_bits_t *frontier = &region->frontier[way];
        for (int32_t at = rotor_bits_next(frontier, 0); at >= 0 && ret == ROTOR_OK;
             at = rotor_bits_next(frontier, at + 1)) {
            ret = rebuild(engine, at, (enum rotor_direction)(1 - way));
        }
    }
    clear(region);
    region->epoch[ROTOR_CHILDREN] = region->epoch[ROTOR_PARENTS] = -1;
    return ret;
}

int64_t rotor_regions_footprint(const rotor_eviction_t *engine) {
    int64_t bytes = engine->region_capacity * (int64_t)sizeof(*engine->regions) +
                    engine->walked_capacity * 2 * (int64_t)sizeof(*engine->walked[0]);
    for (int64_t k = 0; k < engine->region_capacity; k++) {
        for (int way = 0; way < 2; way++) {
            bytes += engine->regions[k].interior[way].capacity * 8;
            bytes += engine->regions[k].frontier[way].capacity * 8;
        }
    }
    return bytes;
}
