/* Small chains on fixed arrays: written down by a test, or drawn. */
#ifndef ROTOR_TESTS_WORLDS_H
#define ROTOR_TESTS_WORLDS_H

#include "chain.h"
#include "testing.h"

enum { WORLD_STAGES = 14 };

typedef struct {
    int64_t values[9][WORLD_STAGES + 1];
    rotor_chain_t chain;
} world_t;

static inline int world_init(world_t *w, int64_t n, int64_t loss_tmp, bool hold_output) {
    int64_t bad;
    rotor_chain_t source = {.n = n,
                            .forward_ns = w->values[0],
                            .backward_ns = w->values[1],
                            .x = w->values[2],
                            .xbar = w->values[3],
                            .fe_tmp = w->values[4],
                            .fn_tmp = w->values[5],
                            .b_tmp = w->values[6],
                            .grad = w->values[7],
                            .pgrad = w->values[8],
                            .loss_tmp = loss_tmp,
                            .hold_output = hold_output};
    return rotor_chain_init(&w->chain, &source, &bad);
}

static uint64_t seed;

/* From 0 to high, both included. */
static inline int64_t draw(int64_t high) {
    seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (int64_t)((seed >> 33) % (uint64_t)(high + 1));
}

/* Each kind of size and time with a range of its own: zeros, ties, and huge ones. */
static inline int random_world(world_t *w, int64_t n) {
    static const int64_t tops[] = {0, 1, 4, 40, 1000000, ROTOR_MAX_VALUE / 4};
    for (int a = 0; a < 9; a++) {
        int64_t top = tops[draw(5)];
        bool same = draw(4) == 0;
        int64_t value = draw(top);
        for (int64_t i = 0; i <= n; i++) {
            w->values[a][i] = same ? value : draw(top);
        }
    }
    for (int64_t i = 0; i < n; i++) {
        if (draw(2) == 0) {
            w->values[6][i] = -draw(w->values[7][i]);
        }
    }
    int64_t loss_tmp = -draw(w->values[7][n]);
    bool hold_output = draw(1) == 1;
    return world_init(w, n, loss_tmp, hold_output);
}

#endif
