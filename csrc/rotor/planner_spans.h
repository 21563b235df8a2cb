/* The slots over which the copies of storages are live, as events come and go; and what tapes hold. */
#ifndef ROTOR_PLANNER_SPANS_H
#define ROTOR_PLANNER_SPANS_H

#include "planner_slots.h"

/* Changes the levels by event `at` of s, which was put (sign 1) or will be taken (-1): uses and makings are
 * told from what is there. */
void rotor_spans_apply(rotor_slots_t *self, int32_t s, int32_t at, int32_t sign);

/* True if every tape that the changes touch is read while what it holds is the same copy. */
bool rotor_spans_tapes_hold(const rotor_slots_t *self);

#endif
