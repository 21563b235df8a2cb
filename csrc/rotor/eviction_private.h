/*
 * The state of an eviction engine, which eviction.c, regions.c and neighbourhoods.c share. Users
 * include eviction.h, fill in the options, and only read the rest.
 */
#ifndef ROTOR_EVICTION_PRIVATE_H
#define ROTOR_EVICTION_PRIVATE_H

#include "bits.h"
#include "classes.h"
#include "heuristics.h"
#include "link.h"

typedef struct rotor_eviction rotor_eviction_t;

typedef struct {
    /* input */
    const rotor_heuristic_t *heuristic;
    uint64_t seed;
    int64_t rebuild_every; /* classes: see above */
    bool sample;         /* look at about 2 sqrt(n) of n candidates, in strides of random length */
    bool ignore_small;   /* never pool what is below 1 % of the mean bytes added so far */
    bool keep_edges;     /* also those from pinned storages and repeats, which decide nothing */
    bool count_accesses; /* follow the published algorithms literally, to count what they read */
    bool skip_unmade;    /* classes: only what was in memory once is ever evicted */
    bool late_regions;   /* regions: none before the first choice; for owners that link and cost a
                          * storage only before it is in memory */
    /* ROTOR_CALLBACK: the cost of a candidate; a status other than ROTOR_OK stops the choice. */
    int (*cost)(void *context, rotor_eviction_t *engine, int32_t storage, double *cost);
    void *context;
} rotor_eviction_options_t;

/* A piece of rotor_eviction_t.neighbours. */
typedef struct {
    /* state */
    int32_t start;
    int32_t count;
    int32_t capacity;
} rotor_neighbours_t;

/* One storage. Read only. */
typedef struct {
    /* state; read only */
    int64_t bytes;
    int64_t compute_ns;
    int64_t last_access;
    int64_t around_ns[2]; /* regions: evicted after it, and before it */
    int32_t locks;
    int32_t slot;     /* in the pool, -1 outside */
    int32_t node;     /* classes: -1 while in memory */
    int32_t roots[2]; /* classes: of its evicted neighbours, while roots_known */
    int8_t root_count;
    bool roots_known;
    bool may_move;  /* to the tier, also where it is pinned */
    bool is_stored; /* the tier has its bytes */
    bool is_away;   /* only the tier has them: for its neighbours it is in memory */
    rotor_neighbours_t neighbours[2]; /* its children, its parents */
} rotor_candidate_t;

/* Bits of `states`, of a storage. */
enum rotor_state {
    ROTOR_MATERIAL = 1, /* in memory, or in the tier (is_away) */
    ROTOR_PINNED = 2,
    ROTOR_DETACHED = 4,
    ROTOR_COMPUTED = 8, /* was in memory once */
    ROTOR_SMALL = 16,
    ROTOR_GROWN = 32, /* costs more than when it was evicted */
    ROTOR_REMOVED = 64
};

enum rotor_direction { ROTOR_CHILDREN = 0, ROTOR_PARENTS = 1 };

/* The evicted storages around one that is in memory, and the storages in memory next to them. */
typedef struct {
    /* state */
    rotor_bits_t interior[2];
    rotor_bits_t frontier[2];
    int64_t epoch[2]; /* engine's region_epoch while a walk would find the same, else -1 */
} rotor_region_t;

struct rotor_eviction {
    /* input */
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
    int64_t neighbour_lost; /* places of lists that moved or were dropped */
    int32_t *pool;          /* storages in order, -1 where one has left */
    int64_t pool_length;
    int64_t pool_capacity;
    int64_t pool_count;   /* of storages */
    int64_t bytes_added;  /* sum over all storages ever */
    int64_t locked_bytes; /* in memory, and locked or pinned */
    int64_t evaluations;
    int64_t accesses; /* with count_accesses */
    int64_t total_compute_ns;
    rotor_classes_t classes;
    int64_t changes;         /* since the classes were rebuilt that did not reach them */
    rotor_region_t *regions; /* one per storage, where the heuristic needs them */
    int64_t region_capacity;
    int64_t region_epoch;
    bool has_regions;    /* they are kept from now on */
    int64_t grown;       /* storages that cost more than when they were evicted */
    uint64_t *walked[2]; /* scratch: what a walk found evicted and in memory, zero between walks */
    int64_t walked_capacity;
    int32_t *stack;  /* scratch of the walks, one entry per storage */
    uint32_t *marks; /* of the walk that saw a storage last, one entry per storage */
    int64_t scratch_capacity;
    uint32_t mark;
    uint64_t random;
    rotor_link_t link; /* to the tier */
    bool has_tier;
    double move_weight;   /* of a move's time against that of computing */
    int64_t stored_bytes; /* at most, with what the tier needs beside them */
#ifdef ROTOR_CHECKS
    bool is_broken;    /* an operation has failed: nothing is checked any more */
    int64_t unchecked; /* operations since the last check */
#endif
};

static inline bool rotor_eviction_is(const rotor_eviction_t *self, int32_t storage, int states) {
    return (self->states[storage] & states) != 0;
}

/* In memory, as its owner sees it. */
static inline bool rotor_eviction_is_present(const rotor_eviction_t *self, int32_t storage) {
    return rotor_eviction_is(self, storage, ROTOR_MATERIAL) &&
           !self->candidates[storage].is_away;
}

/* Locked, or pinned and not allowed to move. */
static inline bool rotor_eviction_is_in_use(const rotor_eviction_t *self, int32_t storage) {
    const rotor_candidate_t *candidate = &self->candidates[storage];
    return candidate->locks > 0 ||
           (rotor_eviction_is(self, storage, ROTOR_PINNED) && !candidate->may_move);
}

#endif
