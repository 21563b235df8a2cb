/* The invariants of a program under change, between two changes. */
#ifndef ROTOR_PLANNER_SEQUENCE_CHECK_H
#define ROTOR_PLANNER_SEQUENCE_CHECK_H

#include "planner_sequence.h"

/* The first invariant that does not hold, as a sentence; NULL where all do. */
const char *rotor_slots_check(const rotor_slots_t *self);

#endif
