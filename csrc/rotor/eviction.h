/*
 * Which storage to evict next: the candidates of an eviction, the costs of the published
 * heuristics, and the pool in the published order. The simulator replays logs with it, the planner
 * plans captured graphs with it, the runtime asks it while a program runs: it knows storages and the
 * edges between them, and nothing of operations, names or budgets.
 *
 *     add, depend        a new storage (not in memory yet), and what it is computed from
 *     remove             a storage that nothing will ever need again; its number is given out anew
 *     compute            more nanoseconds that its computation takes
 *     materialize        storages came into memory, in this order
 *     evict              one went out
 *     lock, unlock, pin  locked ones are in use; pinned ones stay
 *     touch              was read at this time
 *     choose             the one to evict at this time
 *
 * The pool holds the storages that are in memory, unlocked and unpinned, in the order in which they
 * became so. choose() scans it from its beginning, takes what costs no more than the best so far,
 * and stops at a cost of zero: the last of the cheapest wins. Costs are compared as the correctly
 * rounded quotients of exact integers.
 *
 * Evicted neighbourhoods. "Evicted" below means not in memory, so also storages that were added and
 * not computed yet. Two structures follow them, where the heuristic needs them:
 *   classes (classes.h)  union-find over evicted neighbours; a storage that comes back leaves its
 *                        class, which does not split (phantom connections, as published), and
 *                        links that aliases make are not seen, until the classes are rebuilt:
 *                        every `rebuild_every`-th time, 1 being exact, 0 never
 *   regions (regions.h)  for every storage in memory, what is evicted around it in either direction
 *
 * Kirisame et al., Dynamic Tensor Rematerialization, ICLR 2021.
 */
#ifndef ROTOR_EVICTION_H
#define ROTOR_EVICTION_H

#include "bits.h"
#include "classes.h"
#include "heuristics.h"

typedef struct rotor_eviction rotor_eviction_t;

typedef struct {
    const rotor_heuristic_t *heuristic;
    uint64_t seed;
    int64_t rebuild_every;  /* classes: see above */
    bool sample;            /* look at about 2 sqrt(n) of n candidates, in strides of random length */
    bool ignore_small;      /* never pool what is below 1 % of the mean bytes added so far */
    bool keep_edges;        /* also those from pinned storages and repeats, which decide nothing */
    bool count_accesses;    /* follow the published algorithms literally, to count what they read */
    bool skip_unmade;       /* classes: only what was in memory once is ever evicted */
    /* ROTOR_CALLBACK: the cost of a candidate; a status other than ROTOR_OK stops the choice. */
    int (*cost)(void *context, rotor_eviction_t *engine, int32_t storage, double *cost);
    void *context;
} rotor_eviction_options_t;

/* A piece of rotor_eviction_t.neighbours. */
typedef struct {
    int32_t start;
    int32_t count;
    int32_t capacity;
} rotor_neighbours_t;

/* One storage. Read only. */
typedef struct {
    int64_t bytes;
    int64_t compute_ns;
    int64_t last_access;
    int64_t around_ns[2];      /* regions: evicted after it, and before it */
    int32_t locks;
    int32_t slot;              /* in the pool, -1 outside */
    int32_t node;              /* classes: -1 while in memory */
    int32_t roots[2];          /* classes: of its evicted neighbours, while roots_known */
    int8_t root_count;
    bool roots_known;
    rotor_neighbours_t neighbours[2]; /* its children, its parents */
} rotor_candidate_t;

/* What `states` says of a storage. */
enum rotor_state {
    ROTOR_MATERIAL = 1, /* in memory */
    ROTOR_PINNED = 2,
    ROTOR_DETACHED = 4,
    ROTOR_COMPUTED = 8, /* was in memory once */
    ROTOR_SMALL = 16,
    ROTOR_GROWN = 32, /* costs more than when it was evicted */
    ROTOR_REMOVED = 64
};

enum rotor_direction { ROTOR_CHILDREN = 0, ROTOR_PARENTS = 1 };

/* What is evicted around a storage that is in memory, and the storages in memory next to that. */
typedef struct {
    rotor_bits_t interior[2];
    rotor_bits_t frontier[2];
    int64_t epoch[2]; /* engine's region_epoch while a walk would find the same, else -1 */
} rotor_region_t;

struct rotor_eviction {
    rotor_eviction_options_t options;
    /* state; read only */
    rotor_candidate_t *candidates;
    int64_t count; /* numbers given out, those of removed storages included */
    int64_t capacity;
    int32_t unused; /* the removed storage to give out next, -1 for none; linked by slot */
    int64_t removed_count;
    int64_t added_count;
    uint8_t *states;
    int64_t state_capacity;
    int32_t *neighbours;
    int64_t neighbour_count;
    int64_t neighbour_capacity;
    int64_t neighbour_lost; /* places of lists that moved or went away */
    int32_t *pool; /* storages in order, -1 where one has left */
    int64_t pool_length;
    int64_t pool_capacity;
    int64_t pool_count; /* of storages */
    int64_t bytes_added; /* sum over all storages ever */
    int64_t locked_bytes; /* in memory, and locked or pinned */
    int64_t evaluations;
    int64_t accesses; /* with count_accesses */
    int64_t total_compute_ns;
    rotor_classes_t classes;
    int64_t changes; /* since the classes were rebuilt that did not reach them */
    rotor_region_t *regions; /* one per storage, where the heuristic needs them */
    int64_t region_capacity;
    int64_t region_epoch;
    int64_t grown; /* storages that cost more than when they were evicted */
    uint64_t *walked[2]; /* scratch: what a walk found evicted and in memory, zero between walks */
    int64_t walked_capacity;
    int32_t *stack; /* scratch of the walks, one entry per storage */
    uint32_t *marks; /* of the walk that saw a storage last, one entry per storage */
    int64_t scratch_capacity;
    uint32_t mark;
    uint64_t random;
};

/* Never fails. */
void rotor_eviction_init(rotor_eviction_t *self, const rotor_eviction_options_t *options);
void rotor_eviction_free(rotor_eviction_t *self);

int rotor_eviction_add(rotor_eviction_t *self, int64_t bytes, int32_t *storage);
/* Takes a storage out of every list, whatever its state. Its number may come again from add(), and
 * what it took is used again: memory and time stay flat however many come and go. */
int rotor_eviction_remove(rotor_eviction_t *self, int32_t storage);
/* `child` is computed from `parent`; repeats and child == parent are allowed. */
int rotor_eviction_depend(rotor_eviction_t *self, int32_t child, int32_t parent);
int rotor_eviction_compute(rotor_eviction_t *self, int32_t storage, int64_t ns);

/* None of them may be in memory. They join the pool in order, unless locked or pinned. */
int rotor_eviction_materialize(rotor_eviction_t *self, const int32_t *storages, int64_t count);
/* It has to be in memory; its locks are dropped. */
int rotor_eviction_evict(rotor_eviction_t *self, int32_t storage);

void rotor_eviction_lock(rotor_eviction_t *self, int32_t storage);
/* The last unlock puts it at the end of the pool. */
int rotor_eviction_unlock(rotor_eviction_t *self, int32_t storage);
void rotor_eviction_pin(rotor_eviction_t *self, int32_t storage);
void rotor_eviction_touch(rotor_eviction_t *self, int32_t storage, int64_t now);
/* Cuts it off from its parents and children: it is out of every neighbourhood for good. */
void rotor_eviction_detach(rotor_eviction_t *self, int32_t storage);

/* *storage is -1 where the pool is empty. */
int rotor_eviction_choose(rotor_eviction_t *self, int64_t now, int32_t *storage);

/* For callbacks and reports: nanoseconds of what is evicted after (ROTOR_CHILDREN) or before it,
 * walked anew, and of the distinct classes of its evicted neighbours (0 without classes). */
int64_t rotor_eviction_around(rotor_eviction_t *self, int32_t storage,
                              enum rotor_direction direction);
int64_t rotor_eviction_class_sum(rotor_eviction_t *self, int32_t storage);

int64_t rotor_eviction_footprint(const rotor_eviction_t *self);

/* For walks over the storages: a number that no entry of `marks` has; `stack` has room for all. */
uint32_t rotor_eviction_mark(rotor_eviction_t *self);

static inline bool rotor_eviction_is(const rotor_eviction_t *self, int32_t storage, int states) {
    return (self->states[storage] & states) != 0;
}

#endif
