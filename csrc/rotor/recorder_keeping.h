/* Thrashing: when it is found, and which nodes stay in memory because of it (recorder.h). */
#ifndef ROTOR_RECORDER_KEEPING_H
#define ROTOR_RECORDER_KEEPING_H

#include "recorder_private.h"

/* An operation of the program took so long. */
void rotor_recorder_count_operation(rotor_recorder_t *self, int64_t cost_ns);
/* This one ran again: its outputs may be kept from now on. */
void rotor_recorder_count_replay(rotor_recorder_t *self, int32_t op, int64_t cost_ns);
/* The kept node to give up first, -1 for none. */
int32_t rotor_recorder_give_up(rotor_recorder_t *self);
/* A kept node leaves memory, with all its locks, or is forgotten. */
void rotor_recorder_unmark_kept(rotor_recorder_t *self, int32_t node);

#endif
