/*
 * The book of a program that runs under a budget: which values it has made, from what, which are in
 * memory, and what has to run again. It asks the engine (eviction.h) what to evict; it knows bytes
 * and nanoseconds, and nothing of tensors. Whoever runs operations does what it says.
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
 * Numbers of nodes and operations are given out anew when they are forgotten; the owner hears of it
 * from `events`, which it empties after each call.
 */
#ifndef ROTOR_RECORDER_H
#define ROTOR_RECORDER_H

#include "eviction.h"

#define ROTOR_NEW_OPERATION (-1)
#define ROTOR_NO_OPERATION (-2)
#define ROTOR_UNLIMITED INT64_MAX

enum rotor_node_state {
    ROTOR_NODE_USED = 1,
    ROTOR_NODE_LIVE = 2,
    ROTOR_NODE_SOURCE = 4,
    ROTOR_NODE_FOREIGN = 8, /* was in memory before the book began */
    ROTOR_NODE_TEMPORARY = 16,
    ROTOR_NODE_KEPT = 32, /* because it was computed again too often; has a lock for that */
    ROTOR_NODE_COPY = 64  /* of a source as it was before it was written to; nobody else has it */
};

enum {
    ROTOR_OFTEN = 8 /* what has run again so often is repeated */
};

typedef struct {
    int64_t bytes;
    int32_t op;       /* that makes it; -1 for a source */
    int32_t needed;   /* remembered operations that read it */
    int32_t version;  /* how often its storage was written to before */
    int32_t previous; /* among the temporaries */
    int32_t next;
    uint8_t state;
} rotor_node_t;

typedef struct {
    int32_t *items;      /* inputs, outputs (-1: forgotten), origins (-1: none) */
    int32_t input_count; /* -1 for an unused number */
    int32_t output_count;
    int32_t remembered; /* outputs that are */
    int64_t cost_ns;
    int64_t workspace_bytes;
    int64_t kept_bytes; /* that the record itself takes */
    int64_t replays;
} rotor_record_t;

/* What the owner has to know; number: of a node, or an operation. */
enum rotor_recorder_event_kind {
    ROTOR_FORGOT_OPERATION,
    ROTOR_FORGOT_NODE,
    ROTOR_NEEDED, /* a source: must be kept in memory from now on */
    ROTOR_UNNEEDED,
    ROTOR_LOCKED, /* must be kept in memory until the operation has finished */
    ROTOR_DROPPED /* a temporary, or the origin of a replayed write: free its memory */
};

typedef struct {
    enum rotor_recorder_event_kind kind;
    int32_t number;
} rotor_recorder_event_t;

typedef struct {
    int32_t op;
    int32_t first_pending; /* inputs to compute again, in `pending` */
    int32_t at_pending;
    int32_t last_pending;
} rotor_frame_t;

/* What happened in a stretch of the program. */
typedef struct {
    int64_t operations;
    int64_t base_ns;
    int64_t replays;
    int64_t repeats; /* those of operations that had run again ROTOR_OFTEN times before */
    int64_t repeat_ns;
} rotor_stretch_t;

typedef struct {
    rotor_eviction_options_t eviction;
    int64_t budget;         /* bytes, or ROTOR_UNLIMITED */
    bool mixes_temporaries; /* they are evicted when the heuristic says so, not first */
    bool never_keep;        /* thrashing is found, and nothing done */
} rotor_recorder_options_t;

typedef struct {
    rotor_recorder_options_t options;
    /* state; read only, but for event_count */
    rotor_eviction_t eviction;
    rotor_node_t *nodes; /* by the engine's numbers */
    int64_t node_count;
    int64_t node_capacity;
    rotor_record_t *records;
    int64_t record_count;
    int64_t record_capacity;
    int32_t unused_record; /* linked by output_count */
    rotor_recorder_event_t *events;
    int64_t event_count;
    int64_t event_capacity;
    rotor_frame_t *frames;
    int64_t frame_count;
    int64_t frame_capacity;
    int32_t *inputs; /* of the new operation */
    int64_t input_count;
    int64_t input_capacity;
    int32_t *pending;
    int64_t pending_count;
    int64_t pending_capacity;
    int32_t *work; /* scratch of walks over nodes */
    int64_t work_count;
    int64_t work_capacity;
    int32_t first_temporary;
    int32_t last_temporary;
    int64_t clock;         /* ns of operations run; begins at 1 */
    int64_t current_bytes; /* in memory above the level at the beginning */
    int64_t peak_bytes;
    int64_t live_nodes; /* remembered */
    int64_t live_records;
    int64_t evictions;
    int64_t operations;
    int64_t replays;
    int64_t base_ns;
    int64_t replay_ns;
    int64_t held_bytes;      /* of what the program holds, in memory or not */
    int64_t held_peak_bytes; /* with what operations take: the peak without any eviction */
    int64_t node_bytes_kept; /* of nodes that are ROTOR_NODE_KEPT */
    int64_t copied_bytes;    /* of nodes that are ROTOR_NODE_COPY */
    int64_t most_kept_bytes;
    bool had_to_give_up;     /* a kept node was evicted */
    int64_t thrashes;        /* how often thrashing was found */
    rotor_stretch_t stretch; /* the current one */
    rotor_stretch_t worst;   /* the last one that thrashed */
} rotor_recorder_t;

void rotor_recorder_init(rotor_recorder_t *self, const rotor_recorder_options_t *options);
void rotor_recorder_free(rotor_recorder_t *self);

/* A storage that nothing remembered makes. `is_foreign`: it is not counted until it goes. */
int rotor_recorder_source(rotor_recorder_t *self, int64_t bytes, bool is_foreign, int32_t *node);

/* A new operation; the inputs are distinct. */
int rotor_recorder_begin(rotor_recorder_t *self, const int32_t *inputs, int64_t count);
/* The operation to run again now, or ROTOR_NEW_OPERATION. */
int rotor_recorder_next(rotor_recorder_t *self, int32_t *op);
/* After the operation of next() ran. `cost_ns`: what it took. */
int rotor_recorder_replayed(rotor_recorder_t *self, int64_t cost_ns);
/* Whether replaying the operation of next() may write into the memory of this origin, which nobody
 * else needs now; otherwise it needs a copy. */
bool rotor_recorder_may_reuse(const rotor_recorder_t *self, int32_t origin);
/* Bytes that replaying an operation takes at most, its inputs aside. */
int64_t rotor_recorder_replay_bytes(const rotor_recorder_t *self, int32_t op);

/* Evicts one node so that `bytes` more may fit: *node is -1 when they fit, or -2 when they do not
 * and nothing is left. *is_temporary: the owner hears ROTOR_DROPPED. */
int rotor_recorder_make_room(rotor_recorder_t *self, int64_t bytes, int32_t *node);
/* `bytes` are in use for a moment beside what is counted. */
void rotor_recorder_reach(rotor_recorder_t *self, int64_t bytes);

/* The new operation ran. `recorded` of its first inputs are what it is computed from; -1: it is not
 * remembered, the outputs are sources. origins[k]: -1, or the input that output k overwrites; then
 * bytes[k] is ignored. *op is -1 where nothing is remembered. */
int rotor_recorder_finish(rotor_recorder_t *self, int64_t recorded, const int64_t *bytes,
                          const int32_t *origins, int64_t count, int64_t cost_ns,
                          int64_t workspace_bytes, int64_t kept_bytes, int32_t *nodes,
                          int32_t *op);
int rotor_recorder_abort(rotor_recorder_t *self);

/* The program dropped the storage of a live node. */
int rotor_recorder_dead(rotor_recorder_t *self, int32_t node);
/* A node in memory becomes a source. */
int rotor_recorder_pin(rotor_recorder_t *self, int32_t node);
/* A live source that operations need was copied: *node is the program's from now on, and the old
 * number is that of the copy, which goes when nothing needs it any more. */
int rotor_recorder_copied(rotor_recorder_t *self, int32_t source, int32_t *node);
/* Appends to `work` (emptied before) the live nodes that were computed from this one. */
int rotor_recorder_dependents(rotor_recorder_t *self, int32_t node);
/* Appends to `work` (emptied before) the live nodes that are not in memory. */
int rotor_recorder_evicted(rotor_recorder_t *self);
/* The size of a source changed. */
void rotor_recorder_resized(rotor_recorder_t *self, int32_t node, int64_t bytes);

/* Thrashing (recorder_keeping.c). An operation of the program took so long. */
void rotor_recorder_count_operation(rotor_recorder_t *self, int64_t cost_ns);
/* This one ran again: its outputs may be kept from now on. */
void rotor_recorder_count_replay(rotor_recorder_t *self, int32_t op, int64_t cost_ns);
/* The kept node to give up first, -1 for none. */
int32_t rotor_recorder_give_up(rotor_recorder_t *self);
/* A kept node leaves memory, with all its locks, or is forgotten. */
void rotor_recorder_unmark_kept(rotor_recorder_t *self, int32_t node);

static inline bool rotor_recorder_is_material(const rotor_recorder_t *self, int32_t node) {
    return rotor_eviction_is(&self->eviction, node, ROTOR_MATERIAL);
}

int64_t rotor_recorder_footprint(const rotor_recorder_t *self);

#endif
