/*
 * The cost model of a chain of n stages and a loss (docs/memory-model.md).
 *
 * Sizes are bytes, times nanoseconds, all int64. Stage i = 0..n-1 maps x[i] to x[i+1]; the loss is
 * "stage" n. Fe(i) keeps xbar[i], its output x[i+1] included; B(i) turns the gradient of x[i+1]
 * into the gradient of x[i] and makes pgrad[i] bytes of parameter gradients that stay to the end.
 *
 * The functions rotor_chain_need_*() state what each operation needs in a dynamic program over
 * intervals:
 * state (i, l), 0 <= i <= l <= n, is the processing of stages i..l (l = n: with the loss) from x[i]
 * held to the gradient of x[i] made. Its memory m excludes x[i] and everything held by the states
 * around it, and includes the gradient of x[l+1] that arrives (none for l = n), the parameter
 * gradients of the stages after l, and the output x[n] where the caller holds it and it exists.
 */
#ifndef ROTOR_CHAIN_H
#define ROTOR_CHAIN_H

#include "core.h"

/* More bytes or ns than any schedule may have: the price of what must not or cannot be done. */
#define ROTOR_NEVER (INT64_MAX / 4)

typedef struct {
    /* input */
    int64_t n;
    int64_t *forward_ns;  /* [n] */
    int64_t *backward_ns; /* [n] */
    int64_t *x;           /* [n + 1] */
    int64_t *xbar;        /* [n] */
    int64_t *fe_tmp;      /* [n] temporaries of Fe above what is held and xbar */
    int64_t *fn_tmp;      /* [n] temporaries of Fn and Fck above what is held and x[i+1] */
    int64_t *b_tmp;       /* [n] peak of B above its start, less grad[i]; >= -grad[i] */
    int64_t *grad;        /* [n + 1] gradient of x[i] */
    int64_t *pgrad;       /* [n] */
    int64_t *once;        /* [n] not 0: runs forward once, by Fe; NULL in a source: none does */
    int64_t loss_tmp;
    bool hold_output;
    /* state */
    int64_t *forward_sum; /* [n + 1] forward_sum[i] = sum of forward_ns[k], k < i */
    int64_t *pgrad_after; /* [n + 1] pgrad_after[l] = sum of pgrad[k], k > l */
    int64_t *block;       /* the one allocation that all arrays lie in */
} rotor_chain_t;

/*
 * Copies the arrays of `source` (its input part; the state part is not read) into a new chain and
 * checks them: ROTOR_ERR_BAD_LENGTH, _NEGATIVE_SIZE, _NEGATIVE_TIME, _BACKWARD_TMP, _TOO_LARGE,
 * _OVERFLOW. On failure *bad is the index of the wrong entry in its array, or -1.
 */
int rotor_chain_init(rotor_chain_t *self, const rotor_chain_t *source, int64_t *bad);
void rotor_chain_free(rotor_chain_t *self);

/* Time of the schedule without recomputation, ns: a lower bound for every schedule. */
int64_t rotor_chain_ideal_ns(const rotor_chain_t *self);

/* True if the times of all schedules stay below ROTOR_NEVER: between two backwards no stage runs
 * twice. */
bool rotor_chain_times_fit(const rotor_chain_t *self);

/* Bytes held throughout state (i, l): arriving gradient, parameter gradients, output. */
int64_t rotor_chain_held(const rotor_chain_t *self, int64_t l);

/* m that Fe(i) needs in state (i, l), 0 <= i <= l, i < n. */
int64_t rotor_chain_need_fe(const rotor_chain_t *self, int64_t i, int64_t l);

/*
 * m that Fck(i) followed by Fn(i+1) .. Fn(k) needs at its operation k, i <= k < n, in state (i, l):
 * the need of a split at j is the maximum over k = i .. j-1. ROTOR_NEVER where k runs once: its one
 * run is Fe, which no split comes before.
 */
int64_t rotor_chain_need_fn(const rotor_chain_t *self, int64_t i, int64_t l, int64_t k);

/* m that B(i) needs at the end of state (i, l), where Fe(i) was run at its start; i < n. */
int64_t rotor_chain_need_b(const rotor_chain_t *self, int64_t i, int64_t l);

/* m that Fe(i) and B(i) need, which is the larger of both. */
int64_t rotor_chain_need_tape(const rotor_chain_t *self, int64_t i, int64_t l);

/* m that the loss needs, which is state (n, n). */
int64_t rotor_chain_need_loss(const rotor_chain_t *self);

/*
 * Bytes to slots, rounded up: the least k with k * budget >= bytes * slots. Negative sizes round
 * up too (towards zero). budget > 0, 0 < slots <= 2^31, |bytes| <= 2^62; INT64_MAX where the
 * result would pass it.
 */
int64_t rotor_discretise(int64_t bytes, int64_t budget, int64_t slots);

#endif
