/*
 * What bind_candidate.c offers to bind_replay.c: costs of candidates from a Python function.
 */
#ifndef ROTOR_BIND_REPLAY_H
#define ROTOR_BIND_REPLAY_H

#include "binding.h"
#include "replay.h"

typedef struct {
    PyObject *module;   /* borrowed, as all here */
    PyObject *callable;
    PyObject *name;     /* of the heuristic, for messages */
    int64_t now;
    bool has_classes;   /* whether the runtime keeps them */
} rotor_call_t;

/* Asks for the cost of a candidate, the GIL being held. ROTOR_ERR_INTERRUPTED with an exception
 * where the function raises or gives something else than a real number. */
int rotor_call_heuristic(const rotor_call_t *call, rotor_eviction_t *engine, int32_t storage,
                         double *cost);

/* Adds the type Candidate and the function heuristics(). */
int rotor_add_candidate(PyObject *module);

#endif
