/*
 * A lower bound on the peak of every program of a graph without a second tier, by minimum cuts.
 *
 * Take all operations that need at least some bytes for themselves. When the last run of any of them
 * ends, what is still to be made must follow from storages that are live then, without these
 * operations: the live ones, with the pinned ones that exist, separate them from the pinned ones
 * that do not. The least such cut, beside what the one that runs needs, is live, whichever it is. As
 * one of them is of the last phase, all operations of earlier phases have run: those that run once
 * are gone, and what is pinned there exists.
 */
#ifndef ROTOR_BOUND_H
#define ROTOR_BOUND_H

#include "dataflow.h"

/* Bytes below which no program can stay: at least rotor_dataflow_lower_bound(), at more expense
 * where the graph is plain. Large graphs are looked at in part. */
int rotor_bound(const rotor_dataflow_t *graph, int64_t *bytes);

#endif
