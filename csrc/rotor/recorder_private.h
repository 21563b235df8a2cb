/*
 * The state of a recorder, which the files recorder*.c share. Users include recorder.h, fill in the
 * options, and only read the rest.
 */
#ifndef ROTOR_RECORDER_PRIVATE_H
#define ROTOR_RECORDER_PRIVATE_H

#include "eviction.h"
#include "eviction_tier.h"

#define ROTOR_NEW_OPERATION (-1)
#define ROTOR_FETCH (-3)
#define ROTOR_UNLIMITED INT64_MAX

enum rotor_node_state {
    ROTOR_NODE_USED = 1,
    ROTOR_NODE_LIVE = 2,
    ROTOR_NODE_SOURCE = 4,
    ROTOR_NODE_FOREIGN = 8, /* was in memory before the book began */
    ROTOR_NODE_TEMPORARY = 16,
    ROTOR_NODE_KEPT = 32, /* because it was computed again too often; has a lock for that */
    ROTOR_NODE_COPY =
        64 /* of a source as it was before it was written to; the recorder alone has it */
};

enum {
    ROTOR_OFTEN = 8 /* what has run again so often is repeated */
};

typedef struct {
    /* state; read only */
    int64_t bytes;
    int32_t op;       /* that makes it; -1 for a source */
    int32_t needed;   /* remembered operations that read it */
    int32_t version;  /* how often its storage was written to before */
    int32_t previous; /* among the temporaries */
    int32_t next;
    int32_t turn; /* recorder_needs.h: when it is needed */
    uint8_t state;
} rotor_node_t;

typedef struct {
    /* state; read only */
    int32_t *items;      /* inputs, outputs (-1: forgotten), origins (-1: none) */
    int32_t input_count; /* -1 for an unused number */
    int32_t output_count;
    int32_t remembered; /* outputs that are */
    int64_t cost_ns;
    int64_t workspace_bytes;
    int64_t kept_bytes; /* that the record itself takes */
    int64_t replays;
    int64_t needs;   /* number of the last ones that it ran again for */
    int64_t repeats; /* how often it did for them */
} rotor_record_t;

/* Events that the owner has to follow; number: of a node, or an operation. */
enum rotor_recorder_event_kind {
    ROTOR_FORGOT_OPERATION,
    ROTOR_FORGOT_NODE,
    ROTOR_NEEDED, /* a source: must be kept in memory from now on */
    ROTOR_UNNEEDED,
    ROTOR_LOCKED, /* must be kept in memory until the operation has finished */
    ROTOR_DROPPED, /* a temporary, or the origin of a replayed write: free its memory */
    ROTOR_UNSTORED /* the tier's copy of a node is of no use any more */
};

typedef struct {
    /* output */
    enum rotor_recorder_event_kind kind;
    int32_t number;
} rotor_recorder_event_t;

typedef struct {
    /* state */
    int32_t op;
    int32_t first_pending; /* inputs to compute again, in `pending` */
    int32_t at_pending;
    int32_t last_pending;
    bool is_locked; /* each input from when it is in memory; otherwise none, until all are */
} rotor_recorder_frame_t;

/* Counts of a stretch of the program. */
typedef struct {
    /* state */
    int64_t operations;
    int64_t base_ns;
    int64_t replays;
    int64_t repeats; /* those of operations that had run again ROTOR_OFTEN times before */
    int64_t repeat_ns;
} rotor_stretch_t;

typedef struct {
    /* input */
    rotor_eviction_options_t eviction;
    int64_t budget;         /* bytes, or ROTOR_UNLIMITED */
    bool mixes_temporaries; /* they are evicted when the heuristic says so, not first */
    bool never_keep;        /* thrashing is found, and nothing done */
} rotor_recorder_options_t;

typedef struct {
    /* input */
    rotor_recorder_options_t options;
    /* state; read only, but for event_count, which the owner sets to 0 */
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
    rotor_recorder_frame_t *frames;
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
    int64_t needs;           /* number of the new operation's */
    bool has_repeated;       /* for these needs, an operation ran again too often */
    int64_t losses;          /* of these needs: inputs that were gone before all were there */
    rotor_stretch_t stretch; /* the current one */
    rotor_stretch_t worst;   /* the last one that thrashed */
#ifdef ROTOR_CHECKS
    bool is_broken;    /* an operation has failed: nothing is checked any more */
    int64_t unchecked; /* operations since the last check */
#endif
} rotor_recorder_t;

static inline bool rotor_recorder_is_material(const rotor_recorder_t *self, int32_t node) {
    return rotor_eviction_is_present(&self->eviction, node);
}

/* True if only the tier has its bytes. */
static inline bool rotor_recorder_is_away(const rotor_recorder_t *self, int32_t node) {
    return self->eviction.candidates[node].is_away;
}

#endif
