/*
 * Persistent schedules on memory slots (Beaumont et al., hal-02352969, section 4), and the least
 * memory that a persistent schedule can do with.
 *
 * Bytes become slots in rotor_discretise() alone: what the schedule holds, x[j] and xbar[i], is
 * rounded up one by one, and what an operation needs beside that is rounded up as a whole. So m
 * slots left always are m * unit bytes left or more, and every schedule keeps the budget.
 *
 * The table holds, for each state (i, l) of chain.h, the excess time E(m) over that of running each
 * forward and backward of the interval once, for lo <= m <= hi: nothing fits below lo slots, from hi
 * slots on nothing is recomputed. (docs/algorithms/persistent.md)
 */
#ifndef ROTOR_PERSISTENT_H
#define ROTOR_PERSISTENT_H

#include "sequence.h"

/* The states (i, l), 0 <= i <= l <= n, as indices of an array: by i, then by l. */
static inline int64_t rotor_cells(int64_t n) { return (n + 1) * (n + 2) / 2; }
static inline int64_t rotor_cell(int64_t n, int64_t i, int64_t l) {
    return i * (n + 1) - i * (i - 1) / 2 + (l - i);
}

/* The choice of a solver in a state (i, l), i < l, with memory m in its own unit. */
typedef struct {
    int64_t j;      /* i: Fe(i) first, then state (i + 1, l); else the split */
    int64_t first;  /* memory of state (i + 1, l) or (j, l) */
    int64_t second; /* memory of state (i, j - 1) */
} rotor_choice_t;

typedef rotor_choice_t (*rotor_choose_t)(const void *solver, int64_t i, int64_t l, int64_t m);

/* Appends the schedule that a solver's choices make of state (0, n) with memory m. */
int rotor_persistent_walk(int64_t n, const void *solver, rotor_choose_t choose, int64_t m,
                          rotor_sequence_t *sequence);

typedef struct {
    /* input */
    const rotor_chain_t *chain; /* borrowed */
    int64_t budget;             /* bytes, x[0] not included: `slots` slots */
    int64_t slots;
    /* state */
    bool single;     /* values are float, else double */
    int32_t *lo;     /* [rotor_cells(n)]; slots + 1 where nothing fits */
    int32_t *hi;     /* same; slots + 1 where something is repeated with all slots */
    int64_t *offset; /* same; E(m) is values[offset + m - lo], lo <= m <= min(hi, slots) */
    int64_t *forward_need; /* same; (i, l): bytes that Fck(i) Fn(i+1) .. Fn(l-1) needs beside what
                              state (i, .) holds */
    int32_t *x;            /* [n + 1] slots */
    int32_t *xbar;         /* [n] slots */
    void *values;
    int64_t table_bytes; /* of values */
} rotor_persistent_t;

/* The type in which excess times are stored. */
enum rotor_precision {
    ROTOR_PRECISION_AUTO = 0, /* double where that table has at most ROTOR_DOUBLE_BYTES */
    ROTOR_PRECISION_SINGLE = 1,
    ROTOR_PRECISION_DOUBLE = 2
};

enum { ROTOR_DOUBLE_BYTES = 1 << 26, ROTOR_MAX_SLOTS = 1 << 28 };

/*
 * Fills the table for a budget in bytes that includes x[0]. Double is exact for excess times below
 * 2^53 ns. Single rounds; at most n splits, of two additions each, are behind a value: its
 * schedule's excess is at most (4 n + 2) 2^-24 of itself above the optimum on these slots.
 *
 * ROTOR_ERR_BAD_SLOTS (not in 1 .. ROTOR_MAX_SLOTS), _BAD_BUDGET (nothing left beside x[0]),
 * _TABLE_TOO_LARGE (values would pass max_table_bytes: known before they are allocated),
 * _NO_MEMORY, _INTERRUPTED, _OVERFLOW leave an empty table. A budget in which nothing fits is no
 * error here.
 */
int rotor_persistent_fill(rotor_persistent_t *self, const rotor_chain_t *chain, int64_t budget,
                          int64_t slots, enum rotor_precision precision, int64_t max_table_bytes,
                          const rotor_callback_t *callback);

void rotor_persistent_free(rotor_persistent_t *self);

/* E of state (i, l) with m slots, in ns; infinite where nothing fits. */
double rotor_persistent_excess(const rotor_persistent_t *self, int64_t i, int64_t l, int64_t m);

/* Appends the fastest schedule with all slots; ROTOR_ERR_INFEASIBLE where nothing fits. */
int rotor_persistent_trace(const rotor_persistent_t *self, rotor_sequence_t *sequence);

/*
 * Fill and trace, into an empty sequence. Where the table is single and the simulator finds its
 * schedule's excess above the table's by more than 2^-21 of itself, rounding adds up: the table is
 * filled again in double, unless that would pass max_table_bytes.
 */
int rotor_persistent_solve(const rotor_chain_t *chain, int64_t budget, int64_t slots,
                           enum rotor_precision precision, int64_t max_table_bytes,
                           const rotor_callback_t *callback, rotor_sequence_t *sequence);

/*
 * *minimum is the least budget (bytes, x[0] included) of any persistent schedule, exactly. With a
 * sequence, also appends a schedule within `budget`: Fe where the rest still fits after it, else
 * the first split that fits. It attains the minimum when the budget is the minimum; it is quick to
 * find, and not the fastest. ROTOR_ERR_INFEASIBLE where budget < *minimum. The table has
 * 8 rotor_cells(n) bytes, ROTOR_ERR_TABLE_TOO_LARGE says that this is more than max_table_bytes.
 */
int rotor_persistent_minimum(const rotor_chain_t *chain, int64_t max_table_bytes,
                             const rotor_callback_t *callback, int64_t *minimum, int64_t budget,
                             rotor_sequence_t *sequence);

#endif
