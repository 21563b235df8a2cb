/*
 * Schedules of algorithmic differentiation: only activations x[i] are checkpoints, and what a stage
 * keeps for its backward lives from its Fe to the B that follows at once. As a grammar, with
 * S(i, l) for "x[i] is there; do the stages i..l (l = n: and the loss)":
 *
 *     S(i, i)     -> Fe(i) B(i)                            i < n
 *     S(n - 1, n) -> Fe(n-1) L B(n-1)
 *     S(n, n)     -> L
 *     S(i, l)     -> Fck(i) Fn(i+1) .. Fn(j-1) S(j, l) S(i, j-1)      i < j <= l
 *
 * Revolve (Griewank and Walther, Algorithm 799, TOMS 26(1), 2000) takes all stages for equal and
 * counts checkpoints; the heterogeneous form (Beaumont et al., hal-02352969, take it as reference)
 * knows times and bytes and is exact over the class.
 */
#ifndef ROTOR_REVOLVE_H
#define ROTOR_REVOLVE_H

#include "chain.h"
#include "sequence.h"

/*
 * The least number of forwards without a tape that reverse a chain of `stages` equal stages (>= 1)
 * with room for `checkpoints` (>= 0) activations beside the chain's input: with s = checkpoints + 1
 * and r the least number with C(s + r, s) >= stages, r * stages - C(s + r, r - 1).
 */
int64_t rotor_revolve_forwards(int64_t stages, int64_t checkpoints);

/*
 * Appends Revolve's schedule of n stages and a loss; the last stage and the loss are one leaf,
 * Fe(n-1) L B(n-1). ROTOR_ERR_BAD_LENGTH for n < 1, ROTOR_ERR_BAD_SLOTS for checkpoints < 0,
 * ROTOR_ERR_TOO_LARGE for more than 2^18 stages or 2^28 forwards, ROTOR_ERR_NO_MEMORY; the sequence
 * is then as it was.
 */
int rotor_revolve_schedule(int64_t n, int64_t checkpoints, rotor_sequence_t *sequence);

/*
 * The heterogeneous form, exact in bytes: for each interval (i, l) the Pareto frontier of memory
 * (counted as in chain.h) and time in excess of the forwards and backwards done once,
 *
 *     O(i, i; m) = 0 where Fe(i) and B(i) fit, or L;  O(n-1, n; m) = 0 where Fe(n-1) L B(n-1) fits
 *     O(i, l; m) = min over j where the forwards i..j-1 fit:
 *                  f[i] + .. + f[j-1] + O(j, l; m - x[j]) + O(i, j-1; m)
 *
 * n^3/6 sums of two falling step functions; one solve answers every budget.
 */
typedef struct {
    int64_t bytes;
    int64_t ns;
} rotor_revolve_point_t;

typedef struct {
    /* state */
    rotor_revolve_point_t *points; /* ascending bytes, strictly descending ns */
    int64_t count;
} rotor_revolve_frontier_t;

typedef struct {
    /* input */
    const rotor_chain_t *chain; /* borrowed: outlives the table */
    /* state */
    rotor_revolve_frontier_t *frontiers; /* [(n + 1)(n + 2) / 2] */
    int64_t *curve_bytes;                /* of the whole chain, x[0] included */
    int64_t *curve_ns;
    int64_t curve_count;
    int64_t table_bytes; /* allocated so far */
    int64_t max_table_bytes;
} rotor_revolve_t;

void rotor_revolve_init(rotor_revolve_t *self);
void rotor_revolve_free(rotor_revolve_t *self);

/*
 * Fills the table: ROTOR_ERR_TABLE_TOO_LARGE before more than max_table_bytes are allocated,
 * ROTOR_ERR_OVERFLOW when times are too long to add up, _INTERRUPTED, _NO_MEMORY; ROTOR_ERR_ONCE
 * where a stage but the last runs once, which no schedule of the class does.
 */
int rotor_revolve_solve(rotor_revolve_t *self, const rotor_chain_t *chain, int64_t max_table_bytes,
                        const rotor_callback_t *callback);

/*
 * Appends the fastest schedule of the class within budget (bytes, x[0] included).
 * ROTOR_ERR_INFEASIBLE where none fits; *minimum is the least budget, then and on ROTOR_OK.
 */
int rotor_revolve_sequence(const rotor_revolve_t *self, int64_t budget, rotor_sequence_t *sequence,
                           int64_t *minimum);

#endif
