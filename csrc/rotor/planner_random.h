/* Random numbers of the planner: a seed gives one sequence on every machine. */
#ifndef ROTOR_PLANNER_RANDOM_H
#define ROTOR_PLANNER_RANDOM_H

#include "core.h"

/* xorshift64*. */
typedef struct {
    /* state */
    uint64_t state;
} rotor_random_t;

static inline void rotor_random_init(rotor_random_t *self, uint64_t seed) {
    uint64_t z = seed + UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    z ^= z >> 31;
    self->state = z == 0 ? 1 : z;
}

static inline uint64_t rotor_random_next(rotor_random_t *self) {
    uint64_t x = self->state;
    x ^= x >> 12;
    x ^= x << 25;
    x ^= x >> 27;
    self->state = x;
    return x * UINT64_C(0x2545F4914F6CDD1D);
}

/* Below n, which is positive. */
static inline int32_t rotor_random_below(rotor_random_t *self, int32_t n) {
    return (int32_t)((rotor_random_next(self) >> 33) * (uint64_t)n >> 31);
}

/* In [0, 1). */
static inline double rotor_random_unit(rotor_random_t *self) {
    return (double)(rotor_random_next(self) >> 11) * 0x1p-53;
}

#endif
