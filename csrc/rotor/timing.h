/*
 * Repeated measurements of a time: their median, and when enough of them were taken. The clocks are
 * those of probe.h.
 */
#ifndef ROTOR_TIMING_H
#define ROTOR_TIMING_H

#include "core.h"

/*
 * The median of `count` times, rounded to the nearest ns, a half to the even one, and whether its
 * standard error is at most rel_tolerance times the median, which fewer than three samples never
 * tell. ROTOR_ERR_BAD_LENGTH without samples, ROTOR_ERR_NO_MEMORY.
 *
 * The number of samples below the true median is binomial with standard deviation sqrt(count) / 2:
 * the sorted samples at that distance from the middle, to the nearest rank, lie about one standard
 * error from it, for any distribution. Half of the distance between them is taken.
 */
int rotor_timing_median(const int64_t *samples, int64_t count, double rel_tolerance,
                        int64_t *median_ns, bool *is_stable);

/* The rule by which repeats end. */
typedef struct {
    /* input */
    int64_t min_repeats; /* fewer are not stable */
    int64_t max_repeats;
    int64_t most_ns;      /* no further repeat begins when they took so long */
    bool min_comes_first; /* min_repeats are taken all the same */
} rotor_timing_rule_t;

/* True if `count` repeats, at least one, are enough, which took `spent_ns` so far. */
bool rotor_timing_is_enough(const rotor_timing_rule_t *rule, int64_t count, bool is_stable,
                            int64_t spent_ns);

#endif
