/*
 * The lower envelope of step functions that fall with memory, each given by its points: what the
 * frontier of an interval is made of (frontier.h, docs/algorithms/frontier.md).
 */
#ifndef ROTOR_ENVELOPE_H
#define ROTOR_ENVELOPE_H

#include "core.h"

typedef struct {
    int64_t bytes;
    int64_t excess;
} rotor_point_t;

/* A falling step function: bytes strictly ascending, excess strictly descending; between two points
 * that of the left one, nothing below the first. */
typedef struct {
    const rotor_point_t *points;
    int64_t count;
} rotor_points_t;

/* The last index in [low, high] whose bytes are at most m, where those at low are. */
static inline int64_t rotor_last_within(const rotor_point_t *points, int64_t low, int64_t high,
                                        int64_t m) {
    const rotor_point_t *base = points + low;
    int64_t count = high - low + 1;
    while (count > 1) {
        int64_t half = count / 2;
        base = base[half].bytes <= m ? base + half : base;
        count -= half;
    }
    return base - points;
}

typedef struct rotor_envelope_candidate rotor_envelope_candidate_t;
typedef struct rotor_envelope_entry rotor_envelope_entry_t;
typedef struct rotor_envelope_range rotor_envelope_range_t;

typedef struct {
    /* state: the candidates, and what envelope.c works with */
    rotor_envelope_candidate_t *candidates; /* [most] */
    int64_t candidate_count;
    rotor_envelope_entry_t *entries; /* a stack: those of the top range are the last ones */
    int64_t entry_count;
    int64_t entry_capacity;
    rotor_envelope_entry_t *scratch; /* [most] */
    int64_t *next;          /* [most] */
    rotor_envelope_range_t *ranges; /* a stack */
    int64_t range_count;
    int64_t range_capacity;
    /* output */
    rotor_point_t *points; /* [count] */
    int64_t count;
    int64_t capacity;
} rotor_envelope_t;

/* Room for `most` candidates. */
int rotor_envelope_init(rotor_envelope_t *self, int64_t most);
void rotor_envelope_free(rotor_envelope_t *self);

/* No candidates. */
void rotor_envelope_clear(rotor_envelope_t *self);

/*
 * One candidate: base + a(m - shift) + b(m) for need <= m <= limit; b(m) is 0 where b is NULL. It
 * borrows the points of a and b until the envelope is solved. Left out where no m fits.
 */
void rotor_envelope_add(rotor_envelope_t *self, const rotor_points_t *a, int64_t shift,
                        const rotor_points_t *b, int64_t base, int64_t need, int64_t limit);

/* Computes points[0 .. count - 1] from the candidates; ROTOR_ERR_NO_MEMORY. */
int rotor_envelope_solve(rotor_envelope_t *self);

#endif
