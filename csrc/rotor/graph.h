/*
 * A graph of operations on tensors, which the reader of logs makes and the simulator replays.
 *
 *   storage   bytes of memory; born with its root tensor
 *   tensor    a view of one storage, made by one operation; the first tensor of a storage is its
 *             root, the others are aliases and have no bytes of their own
 *   operation a cost in nanoseconds, input tensors (in order, repeats kept) and output tensors
 *
 * Indices count up from 0 in the order of making; the outputs of an operation are consecutive
 * tensors. A graph only grows, and every input is older than the operation that reads it.
 */
#ifndef ROTOR_GRAPH_H
#define ROTOR_GRAPH_H

#include "core.h"

typedef struct {
    int64_t cost_ns;
    int64_t bytes; /* of the storages that it makes */
    int32_t first_input; /* in rotor_graph_t.inputs */
    int32_t input_count;
    int32_t first_output; /* a tensor */
    int32_t output_count;
    int32_t name; /* in rotor_graph_t.names */
} rotor_operation_t;

typedef struct {
    int32_t storage;
    int32_t operation;
    int32_t name; /* in rotor_graph_t.names */
    bool is_alias;
} rotor_tensor_t;

typedef struct {
    int64_t bytes;
    int32_t root; /* a tensor */
} rotor_storage_t;

typedef struct {
    /* state; read only */
    rotor_operation_t *operations;
    int64_t operation_count;
    int64_t operation_capacity;
    rotor_tensor_t *tensors;
    int64_t tensor_count;
    int64_t tensor_capacity;
    rotor_storage_t *storages;
    int64_t storage_count;
    int64_t storage_capacity;
    int32_t *inputs; /* tensors */
    int64_t input_count;
    int64_t input_capacity;
    char *names; /* zero-terminated strings, one after another */
    int64_t names_length;
    int64_t names_capacity;
} rotor_graph_t;

/* An output of a new operation: a fresh storage of `bytes` where alias is -1, else a view of the
 * storage of input number `alias` (bytes are then ignored). */
typedef struct {
    /* input */
    const char *name;
    int64_t name_length;
    int64_t bytes;
    int64_t alias;
} rotor_output_t;

void rotor_graph_free(rotor_graph_t *self);

/*
 * Appends an operation, whose cost and bytes are from 0 to ROTOR_MAX_VALUE. ROTOR_ERR_BAD_OPERATION
 * where an input or alias does not exist; the graph is then as it was.
 */
int rotor_graph_append(rotor_graph_t *self, const char *name, int64_t name_length,
                       int64_t cost_ns, const int32_t *inputs, int64_t input_count,
                       const rotor_output_t *outputs, int64_t output_count);

/* Bytes that the graph itself takes in memory. */
int64_t rotor_graph_footprint(const rotor_graph_t *self);

#endif
