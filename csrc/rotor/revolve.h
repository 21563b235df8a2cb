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
 * knows times and bytes: frontier.h is exact over the class.
 */
#ifndef ROTOR_REVOLVE_H
#define ROTOR_REVOLVE_H

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

#endif
