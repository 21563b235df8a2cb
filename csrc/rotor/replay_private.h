/*
 * The state of a replay, which replay.c and replay_tensors.c share. Users include replay.h, fill in
 * the options, and read the results.
 */
#ifndef ROTOR_REPLAY_PRIVATE_H
#define ROTOR_REPLAY_PRIVATE_H

#include "eviction.h"
#include "log_commands.h"

enum rotor_runtime { ROTOR_V1 = 0, ROTOR_V2 = 1, ROTOR_V2_EAGER = 2 };

enum rotor_outcome {
    ROTOR_RUN_OK = 0,
    ROTOR_RUN_OOM = 1,    /* the budget cannot hold an execution: the rest is locked or pinned */
    ROTOR_RUN_THRASH = 2, /* rematerializations took more than remat_limit_ns */
    ROTOR_RUN_STOPPED = 3 /* stop_at_execution was reached */
};

enum rotor_event_kind {
    ROTOR_EVENT_COMPUTE = 0, /* index: tensor; bytes: of the operation */
    ROTOR_EVENT_EVICT = 1,   /* index: storage; bytes: its own, as in all below */
    ROTOR_EVENT_LOCK = 2,    /* index: storage */
    ROTOR_EVENT_UNLOCK = 3,  /* index: storage */
    ROTOR_EVENT_PENDING = 4, /* index: tensor whose inputs are being made */
    ROTOR_EVENT_PIN = 5,     /* index: storage */
    ROTOR_EVENT_BANISH = 6,  /* index: storage */
    ROTOR_EVENT_PRESSURE = 7 /* index: tensor; bytes: by how much it would go over the budget */
};

typedef struct {
    /* output */
    int64_t clock;
    int64_t bytes;
    int64_t memory; /* after the event */
    int32_t kind;
    int32_t index;
} rotor_event_t;

/* Counts of one storage (with options.stats). */
typedef struct {
    /* output */
    int64_t materialized; /* times it came into memory */
    int64_t evicted;
    int64_t first_clock; /* of its first coming, -1 for never */
    int64_t last_clock;  /* of its last coming or going */
    int64_t resident_ns; /* time spent in memory */
} rotor_storage_stats_t;

/* Counts of one operation (with options.stats). */
typedef struct {
    /* output */
    int64_t executions;
    int64_t executions_by_model; /* 0 or 1 */
} rotor_operation_stats_t;

typedef struct {
    /* input */
    enum rotor_runtime runtime;
    bool ignores_releases;     /* no-dealloc: RELEASE commands are skipped */
    int64_t budget_bytes;      /* INT64_MAX: none */
    double remat_limit_ns;     /* INFINITY: none */
    int64_t stop_at_execution; /* stops inside this execution (from 0), before it runs; -1: never */
    bool stats;
    bool trace;
    int64_t max_events; /* of the trace; ROTOR_ERR_TABLE_TOO_LARGE beyond */
    rotor_eviction_options_t eviction;
} rotor_replay_options_t;

typedef struct rotor_replay_frame rotor_replay_frame_t;

typedef struct {
    /* state */
    int32_t next; /* tensor of the same storage, -1 for none */
    uint8_t flags;
} rotor_replay_tensor_t;

typedef struct {
    /* state */
    int32_t references;
    int32_t evicted_dependents; /* V1 */
    int32_t last_tensor;
} rotor_replay_storage_t;

typedef struct {
    /* input */
    const rotor_log_t *log;
    rotor_replay_options_t options;
    /* output; read only */
    enum rotor_outcome outcome;
    int64_t clock;
    int64_t memory;
    int64_t max_memory;
    int64_t model_compute_ns;
    int64_t remat_compute_ns;
    int64_t const_bytes;      /* of operations without inputs that cost nothing */
    int64_t bottleneck_bytes; /* the largest outputs and inputs of one operation */
    int64_t evictions;
    int64_t remats; /* rematerializing executions */
    int64_t model_executions;
    int64_t executions;           /* of both kinds; at a failure, of those before it */
    int64_t next_command;         /* commands done; at a failure, the one that failed */
    int64_t max_locked_bytes;     /* locked or pinned storages, at its largest ... */
    int64_t max_locked_execution; /* ... when this many executions were done */
    int32_t failed_operation;     /* being executed when the run ended so, else -1 */
    int64_t failed_bytes;         /* of its outputs */
    rotor_event_t *events;
    int64_t event_count;
    int64_t event_capacity;
    rotor_storage_stats_t *storage_stats;
    rotor_operation_stats_t *operation_stats;
    rotor_eviction_t eviction;
    /* state */
    int64_t operation_count; /* made so far */
    int64_t tensor_count;
    rotor_replay_tensor_t *tensors;
    int64_t tensor_capacity;
    rotor_replay_storage_t *storages; /* as many as eviction.count */
    int64_t storage_capacity;
    rotor_replay_frame_t *frames;
    int64_t frame_count;
    int64_t frame_capacity;
    int32_t *missing; /* inputs that the frames have yet to make */
    int64_t missing_count;
    int64_t missing_capacity;
    int32_t *fresh; /* storages that an execution brings into memory */
    int64_t fresh_capacity;
    int64_t stats_capacity[2];
    int status; /* of the last run */
    const rotor_callback_t *callback;
    int64_t asked; /* work done when the callback was asked last */
} rotor_replay_t;

#endif
