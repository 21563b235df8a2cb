/*
 * The recorder of a program that runs under a budget (its "book"): the values that were made, from
 * which inputs, which of them are in memory, and which operations have to run again. It asks the
 * engine (eviction.h) which value to evict; it knows bytes and nanoseconds, and no tensors. Its
 * owner runs the operations as it says.
 *
 * A node is one version of a storage. A source has no recipe: it was there before, or its recipe
 * was given up (pinned); it stays in memory. Any other node is the output of one operation, which is
 * remembered with its inputs for as long as one of its outputs is. A node is remembered while the
 * program holds its storage (it is live) or a remembered operation reads it (it is needed). One that
 * is not live any more leaves memory at once; when it is computed again, as an input of something
 * else, it stays as a temporary, and temporaries are the first to be evicted, oldest first
 * (unless the options mix them with the rest).
 *
 * An operation of the program:
 *     begin(inputs)                 locks them
 *     while next() = an operation:  that has to run again, whose inputs are in memory and locked;
 *         make_room(...), run it, replayed()
 *     make_room(...), run the new operation
 *     finish(outputs)               unlocks the inputs; the outputs are live
 * abort() instead of going on unlocks everything. The order in which inputs are locked, computed
 * again and unlocked is that of the published runtime, without recursion.
 *
 * Writing in place: an output may have an origin, the input whose storage it takes over. The origin
 * leaves memory, and stays remembered where an operation needs it. Sources take no new version:
 * before one is written to, dependents() says which live nodes were computed from it: pin them, or
 * copy the source and say so by copied(): operations that read it read the copy from then on.
 *
 * Thrashing: where repeating what was repeated often before takes more time than the program itself,
 * what the program holds of it stays in memory (kept), in half of the budget, and in half of the rest
 * each time that this is found again. Kept nodes are evicted when nothing else is left; from then on
 * no more are kept than the others.
 *
 * With a second tier of memory (eviction_tier.h), a node may also leave memory to the tier, a source too
 * that an operation has made. make_room() then says that its bytes have to be written first, unless
 * the tier has them; moved() follows. Where it is needed again, next() says ROTOR_FETCH. A node keeps
 * its bytes in the tier until it is forgotten or, for a source, written to (changed), or until the
 * tier is full, and something has to go there that cannot be computed again.
 *
 * Numbers of nodes and operations are given out again when they are forgotten; `events`, which the
 * owner empties after each call, say so.
 */
#ifndef ROTOR_RECORDER_H
#define ROTOR_RECORDER_H

#include "recorder_nodes.h"

void rotor_recorder_init(rotor_recorder_t *self, const rotor_recorder_options_t *options);
void rotor_recorder_free(rotor_recorder_t *self);

/* A new operation; the inputs are distinct. */
int rotor_recorder_begin(rotor_recorder_t *self, const int32_t *inputs, int64_t count);
/* The operation to run again now, or ROTOR_NEW_OPERATION; ROTOR_FETCH: the node of
 * rotor_recorder_awaited() is to be fetched. */
int rotor_recorder_next(rotor_recorder_t *self, int32_t *op);
int32_t rotor_recorder_awaited(const rotor_recorder_t *self);
/* After the awaited node was fetched, which took `cost_ns`. */
int rotor_recorder_fetched(rotor_recorder_t *self, int64_t cost_ns);
/* After the operation of next() ran. `cost_ns`: what it took. */
int rotor_recorder_replayed(rotor_recorder_t *self, int64_t cost_ns);
/* After it failed, before abort(): origins that it may have written into leave memory. */
int rotor_recorder_failed(rotor_recorder_t *self);
/* True if replaying the operation of next() may write into the memory of this origin, which nothing
 * else needs now; otherwise it needs a copy. */
bool rotor_recorder_may_reuse(const rotor_recorder_t *self, int32_t origin);
/* Bytes that replaying an operation takes at most, its inputs aside. */
int64_t rotor_recorder_replay_bytes(const rotor_recorder_t *self, int32_t op);

/* Evicts one node so that `bytes` more may fit: *node is -1 when they fit, or -2 when they do not
 * and nothing is left. Of a temporary the owner hears ROTOR_DROPPED. *is_moving: it is still in
 * memory, until it is written to the tier and moved(). With no more than `enough` bytes in
 * memory, what the operation that has begun needs stays, where something had to be computed too often
 * for it (recorder_needs.h). */
int rotor_recorder_make_room(rotor_recorder_t *self, int64_t bytes, int64_t enough, int32_t *node,
                             bool *is_moving);
int rotor_recorder_moved(rotor_recorder_t *self, int32_t node);
/* `bytes` are in use for a moment beside what is counted. */
void rotor_recorder_reach(rotor_recorder_t *self, int64_t bytes);

/* What a new operation took, and its outputs. */
typedef struct {
    /* input */
    int64_t recorded; /* so many of its first inputs are what it is computed from; -1: it is not
                       * remembered, the outputs are sources */
    const int64_t *bytes;
    const int32_t *origins; /* -1, or the input that the output overwrites: its bytes are ignored */
    int64_t count;
    int64_t cost_ns;
    int64_t workspace_bytes;
    int64_t kept_bytes;
} rotor_completion_t;

/* The new operation ran. *op is -1 where nothing is remembered. */
int rotor_recorder_finish(rotor_recorder_t *self, const rotor_completion_t *done, int32_t *nodes,
                          int32_t *op);
int rotor_recorder_abort(rotor_recorder_t *self);

/* Counts and times begin at zero again; peaks at what is in use. */
void rotor_recorder_reset(rotor_recorder_t *self);
/* From the next choice on: another budget; other candidates (eviction_private.h). Small storages
 * that were passed over stay so until they are used again. */
void rotor_recorder_limit(rotor_recorder_t *self, int64_t budget);
void rotor_recorder_consider(rotor_recorder_t *self, bool sample, bool ignore_small);

/* What a write to a node takes first. */
enum rotor_writing {
    ROTOR_WRITE_VERSION,  /* nothing: the operation's output is a new version */
    ROTOR_WRITE_SOURCE,   /* dependents of a source have to be seen to */
    ROTOR_WRITE_RESTORED, /* it is in memory and a source from now on: targets of optimizers and
                           * initialisations live long, and a version for every step would keep all
                           * that it was computed from */
    ROTOR_WRITE_TOO_LONG  /* the same, because as many versions came before as are allowed */
};
enum rotor_writing rotor_recorder_writing(const rotor_recorder_t *self, int32_t node,
                                          bool is_differentiated, int32_t longest_chain);
/* *is_worth: a source that is about to change should be copied for what was computed from it,
 * because that takes more memory; the copies that there are count with it. */
int rotor_recorder_copying(rotor_recorder_t *self, int32_t source, bool *is_worth);

/* Appends to `work` (emptied before) the live nodes that were computed from this one. */
int rotor_recorder_dependents(rotor_recorder_t *self, int32_t node);
/* Appends to `work` (emptied before) the live nodes that are not in memory. */
int rotor_recorder_evicted(rotor_recorder_t *self);
int64_t rotor_recorder_footprint(const rotor_recorder_t *self);

#endif
