/*
 * What an operation needs for which something had to be computed again and again.
 *
 * Temporaries that go by age, nodes that go by a heuristic of noisy times, and inputs that stay locked
 * until the others are there too, can leave no room but for what is needed next: it is computed from
 * the beginning each time, which doubles from step to step of a recurrence. Once an operation has run
 * more than ROTOR_OFTEN times, everything is unlocked, and inputs are locked when all of an operation's
 * are in memory; they are gathered again if they are gone by then. What goes is what the new operation
 * does not need any more, and then what it needs last (Belady, A study of replacement algorithms for
 * a virtual-storage computer, IBM Systems Journal 5, 1966).
 */
#ifndef ROTOR_RECORDER_NEEDS_H
#define ROTOR_RECORDER_NEEDS_H

#include "recorder_private.h"

enum {
    ROTOR_MOST_LOSSES = 16 /* of inputs, before they are locked one by one again */
};

/* The inputs of a frame's operation; returns how many. */
int64_t rotor_recorder_operands(const rotor_recorder_t *self, int32_t op, const int32_t **inputs);
/* Inputs of a new operation are computed again from now on. */
void rotor_recorder_begin_needs(rotor_recorder_t *self);
/* An operation ran again for them. True if it is the first that did so too often. */
bool rotor_recorder_note_repeat(rotor_recorder_t *self, int32_t op);
/* Inputs were gone before all of an operation's were there. False if that was once too often: what two
 * of them need may exclude each other, and inputs are locked one by one again. */
bool rotor_recorder_may_gather_again(rotor_recorder_t *self);
/* *node: what goes next, -1 for nothing. For a wish, nothing goes that is needed. */
int rotor_recorder_needed_last(rotor_recorder_t *self, bool is_wish, int32_t *node);

#endif
