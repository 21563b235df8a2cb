/*
 * Replays the commands of a log under a budget: the runtimes of simrd.
 *
 * The clock starts at 1 and advances by the costs of executions only. An operation of the model is
 * made and executed by its COMPUTE command; tensors that were evicted and are needed again are
 * rematerialized by executing their operation again. Before an execution, storages are evicted until
 * all its outputs fit beside what is in memory. Nothing recurses: the depth of a rematerialization is
 * bounded by memory only.
 *
 * Runtimes: what a RELEASE that leaves a storage without references does.
 *   V1     banishing: frees it for good once nothing evicted depends on it, and pins its children
 *   V2     nothing
 *   V2E    eager: evicts it, so that it may be rematerialized
 * The published V2Optimized and V2EagerOptimized decide as V2 and V2E do.
 *
 * Running out of memory and thrashing are outcomes, not errors: see `outcome`.
 */
#ifndef ROTOR_REPLAY_H
#define ROTOR_REPLAY_H

#include "replay_private.h"

/* ROTOR_ERR_BAD_HEURISTIC where V1 is asked for classes or regions, ROTOR_ERR_BAD_BUDGET for a
 * budget that is not positive. The log has to outlive the replay, and may grow between runs. */
int rotor_replay_init(rotor_replay_t *self, const rotor_log_t *log,
                      const rotor_replay_options_t *options);
void rotor_replay_free(rotor_replay_t *self);

/*
 * Runs the commands that the log has and that were not run. ROTOR_OK with outcome ROTOR_RUN_OK means
 * that all were; after another outcome, or another status, the state can be read and no run
 * continues. The callback is asked now and then with (commands done, all).
 */
int rotor_replay_run(rotor_replay_t *self, const rotor_callback_t *callback);

bool rotor_replay_is_defined(const rotor_replay_t *self, int64_t tensor);

/* Counts the storages that are in memory and locked or pinned; `storages` has room for all. */
int64_t rotor_replay_locked(const rotor_replay_t *self, int32_t *storages);

int64_t rotor_replay_footprint(const rotor_replay_t *self);

#endif
