/*
 * Sequences of operations on a chain, and the one function that says what each operation needs, makes
 * and frees: rotor_step(). Every figure reported for a schedule comes from rotor_simulate().
 *
 *   Fn(i)   forward without a tape; its input is freed (x[0], an input inside xbar[i-1], and one
 *           that a live xbar[i] was recorded from, stay)
 *   Fck(i)  forward without a tape; its input is kept
 *   Fe(i)   forward that keeps xbar[i] (its output included), and its input
 *   L       the loss: the gradient of x[n] appears; a plain x[n] that the caller does not hold goes
 *   B(i)    backward: needs xbar[i], x[i] and the gradient of x[i+1], frees all three (x[i] where it
 *           is not part of xbar[i-1]), makes the gradient of x[i] and pgrad[i]
 *
 * An operation that makes an x that is in memory already replaces it when it is done. x[0] is held from
 * the beginning to the end and counted. With hold_output the output is counted once from the moment
 * it exists to the end, also while the xbar[n-1] of the first pass contains it.
 */
#ifndef ROTOR_SEQUENCE_H
#define ROTOR_SEQUENCE_H

#include "chain.h"

enum rotor_kind { ROTOR_FN = 0, ROTOR_FCK = 1, ROTOR_FE = 2, ROTOR_LOSS = 3, ROTOR_B = 4 };

typedef struct {
    int32_t kind;
    int32_t stage; /* n for the loss */
} rotor_op_t;

typedef struct {
    /* state; read only */
    rotor_op_t *ops;
    int64_t length;
    int64_t capacity;
} rotor_sequence_t;

/* An empty sequence; never fails. */
void rotor_sequence_init(rotor_sequence_t *self);
void rotor_sequence_free(rotor_sequence_t *self);
/* ROTOR_ERR_NO_MEMORY leaves the sequence as it was. */
int rotor_sequence_append(rotor_sequence_t *self, enum rotor_kind kind, int64_t stage);
/* Fck(i) Fn(i+1) .. Fn(j-1); nothing when j <= i. */
int rotor_sequence_append_forward(rotor_sequence_t *self, int64_t i, int64_t j);

/* The contents of memory between two operations. */
typedef struct {
    /* input */
    const rotor_chain_t *chain;
    /* state */
    int64_t live;      /* bytes */
    int64_t gradient;  /* the index whose gradient is in memory, n+1 before the loss */
    int output;        /* which copy of x[n] is the model's output */
    uint8_t *has_x;    /* [n + 1] there as a plain activation */
    uint8_t *has_xbar; /* [n] */
    uint8_t *has_run;  /* [n] Fe was done */
} rotor_memory_t;

int rotor_memory_init(rotor_memory_t *self, const rotor_chain_t *chain);
void rotor_memory_free(rotor_memory_t *self);

/* Price of one operation. */
typedef struct {
    /* output */
    int64_t time_ns;
    int64_t peak; /* bytes live at its worst moment */
    int64_t live; /* bytes live after it */
} rotor_price_t;

/*
 * Runs one operation: ROTOR_ERR_BAD_OPERATION, _NO_INPUT, _NO_TAPE, _NO_GRADIENT, _TWICE or _ONCE
 * leave the memory as it was.
 */
int rotor_step(rotor_memory_t *self, rotor_op_t op, rotor_price_t *price);

typedef struct {
    /* output */
    int64_t time_ns;
    int64_t peak;     /* bytes, x[0] included */
    int64_t failed_at; /* index of the operation that was refused; length when it is incomplete; or -1 */
} rotor_result_t;

/*
 * Prices the whole sequence. `peaks` and `lives`, [length] each or NULL, receive the timeline: the
 * worst moment of each operation and what is live after it. On a refused operation the status of
 * rotor_step(), ROTOR_ERR_INCOMPLETE when the backward of stage 0 never comes; result->failed_at
 * says where.
 */
int rotor_simulate(const rotor_chain_t *chain, const rotor_op_t *ops, int64_t length,
                   rotor_result_t *result, int64_t *peaks, int64_t *lives);

#endif
