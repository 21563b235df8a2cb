/*
 * The exact solver of persistent schedules: one solve answers every budget.
 *
 * For each state (i, l) of the recurrence (chain.h; Beaumont et al., hal-02352969, section 4) the
 * table holds the Pareto frontier of memory m (int64 bytes) against excess time E (int64 ns), the
 * time above that of running each forward and backward of the interval once:
 *
 *   leaf (i, i)     E = 0                                 from max(need_fe, need_b); need_loss for n
 *   Fe(i) first     E = E(i+1, l)(m - xbar[i])            from max(need_fe, need_b)
 *   split at j      E = sum of forward_ns[i..j-1] + E(j, l)(m - x[j]) + E(i, j-1)(m),
 *                   i < j <= l                            from max of need_fn(k), i <= k < j
 *
 * with the needs of chain.h, so that state (0, n) is exactly what the simulator measures. Points of
 * other states that no optimal schedule of (0, n) can ask for are left out. Choices are not stored:
 * a traceback computes them again. (docs/algorithms/frontier.md)
 */
#ifndef ROTOR_FRONTIER_H
#define ROTOR_FRONTIER_H

#include "envelope.h"
#include "sequence.h"

typedef struct {
    /* input */
    const rotor_chain_t *chain; /* borrowed */
    int64_t max_table_bytes;
    bool drops_tapes; /* schedules of algorithmic differentiation alone (revolve.h) */
    /* state */
    rotor_points_t *frontiers; /* [rotor_cells(n)]; that of (0, n) falls to 0 */
    void *chunks;              /* list of the allocations that the points lie in */
    int64_t table_bytes;       /* of frontiers and chunks */
    int64_t *curve_bytes;      /* [curve_count] budgets, x[0] included */
    int64_t *curve_ns;         /* [curve_count] times */
    int64_t curve_count;
} rotor_frontier_t;

/*
 * Solves a chain, which must live as long as the table. With `drops_tapes` the table has no Fe(i) first
 * but that of state (n - 1, n): a tape lives from its Fe to the B that follows, but for the loss, at once.
 * ROTOR_ERR_TABLE_TOO_LARGE when the table would pass max_table_bytes (checked before each allocation),
 * _NO_MEMORY, _INTERRUPTED, _OVERFLOW (n times the forward times passes 2^62 ns); the table is then empty.
 * ROTOR_ERR_ONCE where tapes are dropped and a stage but the last runs once. The callback is asked at
 * every interval.
 */
int rotor_frontier_solve(rotor_frontier_t *self, const rotor_chain_t *chain, bool drops_tapes,
                         int64_t max_table_bytes, const rotor_callback_t *callback);

void rotor_frontier_free(rotor_frontier_t *self);

/*
 * Appends the fastest schedule within budget bytes, x[0] included; among equals the one that takes
 * Fe first, then the least j. ROTOR_ERR_INFEASIBLE sets *minimum, the least budget. On failure the
 * sequence may have grown.
 */
int rotor_frontier_sequence(const rotor_frontier_t *self, int64_t budget,
                            rotor_sequence_t *sequence, int64_t *minimum);

#endif
