/*
 * The published heuristics as data, and their costs, which are compared as the correctly rounded
 * quotients of exact integers.
 *
 * A heuristic's cost is numerator / (bytes) / (staleness), each divisor where it has one.
 */
#ifndef ROTOR_HEURISTICS_H
#define ROTOR_HEURISTICS_H

#include <math.h>

#include "core.h"

/* The numerator of a cost. c: nanoseconds of the storage's own computation. */
enum rotor_numerator {
    ROTOR_ONE,         /* 1 */
    ROTOR_OWN,         /* c */
    ROTOR_CLASSES,     /* c and the sums of the distinct classes of its evicted neighbours */
    ROTOR_REGIONS,     /* c, what is evicted after it, and what is evicted before it */
    ROTOR_ANCESTORS,   /* c and what is evicted before it */
    ROTOR_UNION,       /* c and what is evicted after or before it, each storage once */
    ROTOR_LAST_ACCESS, /* the time of its last access */
    ROTOR_CHANCE,      /* nothing: one is drawn */
    ROTOR_CALLBACK     /* a cost from the caller's function */
};

/* The access from which staleness is measured. */
enum rotor_staleness {
    ROTOR_NO_STALENESS,
    ROTOR_LAST_USE,         /* its last access */
    ROTOR_NEIGHBOURHOOD_USE /* the latest access to it and to what is evicted around it */
};

typedef struct {
    /* input */
    const char *name;
    enum rotor_numerator numerator;
    bool by_bytes;
    enum rotor_staleness staleness;
} rotor_heuristic_t;

/* The published heuristics, and the 16 of the ablation; NULL behind the last. */
const rotor_heuristic_t *rotor_heuristic(int64_t index);
const rotor_heuristic_t *rotor_find_heuristic(const char *name);

/* A cost: numerator / (bytes * staleness), infinite where the denominator is not positive. */
typedef struct {
    int64_t numerator;
    int64_t bytes;     /* 1 where the heuristic does not divide by it */
    int64_t staleness; /* likewise */
    double estimate;   /* of the quotient */
} rotor_eviction_cost_t;

static inline rotor_eviction_cost_t rotor_eviction_cost(int64_t numerator, int64_t bytes,
                                                        int64_t staleness) {
    double denominator = (double)bytes * (double)staleness;
    return (rotor_eviction_cost_t){
        .numerator = numerator,
        .bytes = bytes,
        .staleness = staleness,
        .estimate =
            bytes <= 0 || staleness <= 0 ? HUGE_VAL : (double)numerator / denominator,
    };
}

/* The quotient, correctly rounded to a double. */
double rotor_eviction_cost_quotient(const rotor_eviction_cost_t *cost);

/* True if the rounded quotient of `a` is at most that of `b`. */
bool rotor_eviction_cost_at_most(const rotor_eviction_cost_t *a, const rotor_eviction_cost_t *b);

#endif
