/* Chains for the tests: from a seed, or all stages alike. */
#ifndef ROTOR_TESTS_CHAINS_H
#define ROTOR_TESTS_CHAINS_H

#include <stdlib.h>

#include "chain.h"
#include "testing.h"

enum { MOST_STAGES = 400 };

typedef struct {
    int64_t values[9][MOST_STAGES + 1];
    rotor_chain_t source;
} draft_t;

static inline uint64_t next_random(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

/* From low to high, both included. */
static inline int64_t between(uint64_t *state, int64_t low, int64_t high) {
    return low + (int64_t)(next_random(state) % (uint64_t)(high - low + 1));
}

/* All stages alike: every size and time is `value`, xbar twice that, nothing held. */
static inline void draft_equal(draft_t *draft, int64_t n, int64_t value) {
    rotor_chain_t *s = &draft->source;
    for (size_t k = 0; k < 9; k++) {
        for (int64_t i = 0; i <= n; i++) {
            draft->values[k][i] = k == 3 ? 2 * value : value;
        }
    }
    memset(s, 0, sizeof(*s));
    s->n = n;
    s->forward_ns = draft->values[0];
    s->backward_ns = draft->values[1];
    s->x = draft->values[2];
    s->xbar = draft->values[3];
    s->fe_tmp = draft->values[4];
    s->fn_tmp = draft->values[5];
    s->b_tmp = draft->values[6];
    s->grad = draft->values[7];
    s->pgrad = draft->values[8];
    s->loss_tmp = value;
}

/* Every size up to `most`, each kind with a range of its own, zeros included. */
static inline void draft_random(draft_t *draft, int64_t n, int64_t most, uint64_t seed) {
    uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
    for (int k = 0; k < 8; k++) {
        next_random(&state);
    }
    draft_equal(draft, n, 0);
    for (size_t k = 0; k < 9; k++) {
        int64_t top = between(&state, 0, 3) == 0 ? 0 : between(&state, 0, most);
        for (int64_t i = 0; i <= n; i++) {
            draft->values[k][i] = between(&state, 0, top);
        }
    }
    for (int64_t i = 0; i < n; i++) {
        draft->values[3][i] += draft->values[2][i + 1];
        if (between(&state, 0, 3) == 0) {
            draft->values[6][i] = -between(&state, 0, draft->values[7][i]);
        }
    }
    draft->source.loss_tmp = between(&state, 0, most);
    draft->source.hold_output = between(&state, 0, 1) == 1;
}

/* A chain that is known to be right. */
static inline void chain_from(rotor_chain_t *chain, const draft_t *draft) {
    int64_t bad;
    CHECK(rotor_chain_init(chain, &draft->source, &bad) == ROTOR_OK);
}

/* A callback that stops at its n-th question. */
static inline bool stop_at(void *context, int64_t done, int64_t total) {
    int64_t *left = context;
    CHECK(done >= 0 && done <= total);
    *left -= 1;
    return *left > 0;
}

#endif
