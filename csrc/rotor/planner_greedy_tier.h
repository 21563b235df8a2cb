/* The second tier as a greedy walk sees it: what moves, what is there, and the queues of the link. */
#ifndef ROTOR_PLANNER_GREEDY_TIER_H
#define ROTOR_PLANNER_GREEDY_TIER_H

#include "link.h"

typedef struct {
    /* input */
    const rotor_link_t *link; /* NULL: without a tier; set before rotor_greedy_tier_prepare() */
    /* state, by storage */
    int64_t *write_ns; /* -1 where it does not move */
    int64_t *read_ns;
    int64_t *made_ns;    /* on the clock of the walk */
    int64_t *remake_ns;  /* as the walk computed it last; INT64_MAX where it cannot be remade */
    uint8_t *is_written; /* it is in the tier */
    uint8_t *is_away;    /* it is fetched when it is needed next */
    uint8_t *is_padded;  /* it was fetched */
    /* state */
    int64_t clock_ns;   /* of computing */
    int64_t writing_ns; /* when the queue of writes is empty */
    int64_t reading_ns; /* the same where the link is not duplex */
} rotor_greedy_tier_t;

/* Frees the memory; the link stays. */
void rotor_greedy_tier_free(rotor_greedy_tier_t *self);
/* All of these do nothing without a link. */
int rotor_greedy_tier_prepare(rotor_greedy_tier_t *self, const rotor_dataflow_t *graph);
void rotor_greedy_tier_begin(rotor_greedy_tier_t *self, const rotor_dataflow_t *graph);

static inline bool rotor_greedy_tier_moves(const rotor_greedy_tier_t *self, int32_t s) {
    return self->link != NULL && self->write_ns[s] >= 0;
}

static inline bool rotor_greedy_tier_is_away(const rotor_greedy_tier_t *self, int32_t s) {
    return self->link != NULL && self->is_away[s];
}

/* The time of moving s there, where it is not yet, and back. */
int64_t rotor_greedy_tier_transfers_ns(const rotor_greedy_tier_t *self, int32_t s);
/* The time until s is written. */
int64_t rotor_greedy_tier_wait_ns(const rotor_greedy_tier_t *self, int32_t s);
/* Waits for the write of s, which is not there yet. */
void rotor_greedy_tier_write(rotor_greedy_tier_t *self, int32_t s);
/* Fetches s, as early as its read has to begin to be done now. */
void rotor_greedy_tier_fetch(rotor_greedy_tier_t *self, int32_t s);

#endif
