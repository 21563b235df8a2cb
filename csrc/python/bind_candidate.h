/* Costs of candidates from a Python function. */
#ifndef ROTOR_BIND_CANDIDATE_H
#define ROTOR_BIND_CANDIDATE_H

#include "support.h"
#include "replay.h"

typedef struct {
    PyObject *module;   /* borrowed */
    PyObject *callable; /* NULL: a published heuristic */
    PyObject *name;     /* for messages */
    int64_t now;
    bool has_classes;   /* whether the runtime keeps them */
} py_heuristic_t;

/* Asks for the cost of a candidate, the GIL being held. ROTOR_ERR_INTERRUPTED with an exception
 * where the function raises or gives something else than a real number. */
int py_call_heuristic(const py_heuristic_t *call, rotor_eviction_t *engine, int32_t storage,
                      double *cost);

#endif
