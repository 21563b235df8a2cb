/*
 * A log that was read: a graph, and the commands on it. log.h says how logs are read, replay.h how
 * the commands are run.
 */
#ifndef ROTOR_LOG_COMMANDS_H
#define ROTOR_LOG_COMMANDS_H

#include "graph.h"

enum rotor_command_kind {
    ROTOR_COMPUTE = 0, /* an operation */
    ROTOR_GET = 1,     /* a tensor gains a reference */
    ROTOR_PIN = 2,     /* a tensor is rematerialized if need be, and pinned */
    ROTOR_RELEASE = 3  /* a tensor loses a reference */
};

typedef struct {
    /* state; read only */
    int32_t kind;
    int32_t index; /* of the operation or the tensor */
} rotor_command_t;

typedef struct rotor_log_reader rotor_log_reader_t;

typedef struct {
    /* state; read only */
    rotor_graph_t graph;
    rotor_command_t *commands;
    int64_t command_count;
    int64_t command_capacity;
    int64_t line_count;       /* lines read, empty ones included */
    int64_t start_count;      /* START annotations */
    int64_t backward_command; /* commands before the first BACKWARD annotation; without one before
                                * the first operation with "backward" in its name, -1 for none */
    int64_t ignored_releases; /* RELEASE of names that are not defined */
    int64_t output_bytes;     /* preallocate: of the storages that are referenced at the end */
    bool is_finished;
    rotor_log_reader_t *reader; /* private */
} rotor_log_t;

/* The fault of a log, in words. */
typedef struct {
    /* output */
    int64_t line;      /* from 1 */
    char message[320]; /* what was found, what was expected */
} rotor_log_error_t;

#endif
