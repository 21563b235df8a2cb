/*
 * Schedules in which checkpoints float: the dynamic program on memory slots for weakly persistent
 * schedules (Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, hal-02352969).
 *
 * The class. A persistent schedule keeps every checkpointed x[b] until B(b). Here a checkpoint may
 * go earlier: it serves some stages, then its last use is an Fn(b) that frees it, and the stages
 * from b on are run again later from a checkpoint further left. What Fe(i) keeps, and x[i] with it,
 * stay until B(i). Checkpoints are used last in, first out. As a grammar, with S(b, s, l) for "x[b]
 * is there; do the stages s..l (l = n: and the loss), then hold nothing of them but the gradient of
 * x[s]", 0 <= b <= s <= l <= n, the sequences are those of S(0, 0, n):
 *
 *     S(n, n, n) -> L
 *     S(b, b, b) -> Fe(b) B(b)                              b < n
 *     S(b, b, l) -> Fe(b) S(b+1, b+1, l) B(b)               b < l
 *     S(b, s, l) -> Fn(b) S(b+1, s, l)                      b < s: the checkpoint moves on
 *     S(b, s, l) -> Fck(b) S(b+1, t+1, l) S(b, s, t)        s <= t < l: x[b] waits
 *
 * Persistent schedules are those in which every checkpoint that waits serves its own stage last.
 *
 * The recurrence. Time in excess of the forwards and backwards done once, on m slots; m counts x[b]
 * where b < s (the state owns it) and not where b = s (the conditions of chain.h):
 *
 *     O(b, b, l; m) = min { O(b+1, b+1, l; m - xbar[b]),
 *                           min over t: f[b] + T(b+1, t+1, l; m) + O(b, b, t; m) }
 *     O(b, s, l; m) = min { f[b] + T(b+1, s, l; m),
 *                           min over t: f[b] + T(b+1, t+1, l; m - x[b]) + O(b, s, t; m) }
 *     T(b, s, l; m) = O(b, s, l; m), or O(b, b, l; m - x[b]) where b = s
 *
 * each where its operation fits. n^3/6 states of n choices on M slots: time O(n^4 M / 24), memory
 * O(n^3 M / 6), less what rows that are constant at their ends save.
 */
#ifndef ROTOR_FLOATING_H
#define ROTOR_FLOATING_H

#include "chain.h"
#include "sequence.h"

/* Excess time of one state by slots: infeasible below `low`, values[count-1] from low+count-1 on. */
typedef struct {
    /* state */
    const int64_t *values;
    int32_t low;
    int32_t count;
    int64_t least; /* bytes that the state needs at least, exact: no slots */
} rotor_floating_row_t;

typedef struct {
    /* input */
    const rotor_chain_t *chain; /* borrowed: outlives the table */
    int64_t budget;             /* bytes, x[0] included */
    int64_t slots;              /* how many make budget - x[0] */
    /* state */
    int64_t room;               /* bytes that all slots make: max(budget - x[0], 1) */
    int64_t within;             /* slots that surely fit: slots, or 0 where budget <= x[0] */
    int64_t top;                /* slots that rows go to */
    int64_t table_bytes;        /* allocated so far */
    int64_t max_table_bytes;
    rotor_floating_row_t *rows;
    int64_t *x;                 /* [n + 1] in slots */
    int64_t *xbar;              /* [n] in slots */
    int64_t *scratch;           /* [top + 1] */
    void *chunks;               /* the rows' values */
    int64_t chunk_left;
} rotor_floating_t;

void rotor_floating_free(rotor_floating_t *self);

/*
 * Fills the table. ROTOR_ERR_BAD_SLOTS, _BAD_BUDGET; _INFEASIBLE when no schedule of the class
 * fits in budget (found before the slots are looked at), _TABLE_TOO_LARGE before more than
 * max_table_bytes are allocated, _OVERFLOW when times are too long to add up, _INTERRUPTED,
 * _NO_MEMORY. *minimum is the least budget of the class in bytes, x[0] included, on ROTOR_OK and
 * ROTOR_ERR_INFEASIBLE.
 */
int rotor_floating_solve(rotor_floating_t *self, const rotor_chain_t *chain, int64_t budget,
                         int64_t slots, int64_t max_table_bytes,
                         const rotor_callback_t *callback, int64_t *minimum);

/*
 * Appends a schedule whose simulated peak is within the solved budget: the fastest of the optimum
 * on `slots` slots, of those optima on up to n + 2 more that simulation shows to fit all the same
 * (every size was rounded up), and of a schedule of least memory in bytes, which exists where
 * slots are too coarse for any other. ROTOR_ERR_NO_MEMORY leaves the sequence as it was.
 */
int rotor_floating_sequence(const rotor_floating_t *self, rotor_sequence_t *sequence);

/*
 * Simulated bytes (x[0] included) and ns of the schedules found for every number of slots, the
 * least memory among them: ascending bytes, strictly descending ns. The caller frees both arrays
 * with rotor_free.
 */
int rotor_floating_curve(const rotor_floating_t *self, const rotor_callback_t *callback,
                         int64_t *count, int64_t **bytes, int64_t **ns);

#endif
