/* Graphs for the tests of programs and the planner. */
#ifndef ROTOR_TESTS_DATAFLOWS_H
#define ROTOR_TESTS_DATAFLOWS_H

#include <string.h>

#include "dataflow.h"

enum { MOST_OPS = 400, MOST_STORAGES = 800 };

typedef struct {
    int64_t cost[MOST_OPS];
    int64_t workspace[MOST_OPS];
    int64_t phase[MOST_OPS];
    int64_t flags[MOST_OPS];
    int64_t input_start[MOST_OPS + 1];
    int64_t inputs[4 * MOST_OPS];
    int64_t output_start[MOST_OPS + 1];
    int64_t outputs[4 * MOST_OPS];
    int64_t bytes[MOST_STORAGES];
    int64_t pinned[MOST_STORAGES];
    int64_t lazy[MOST_STORAGES];
    int64_t light[MOST_OPS];
    int64_t clock[MOST_OPS];
    bool has_tapes; /* lazy and light count */
    int64_t count;
    int64_t storages;
} drawing_t;

static inline rotor_dataflow_arrays_t arrays_of(const drawing_t *d) {
    return (rotor_dataflow_arrays_t){
        .operation_count = d->count,
        .storage_count = d->storages,
        .cost_ns = d->cost,
        .workspace_bytes = d->workspace,
        .phase = d->phase,
        .flags = d->flags,
        .input_start = d->input_start,
        .inputs = d->inputs,
        .output_start = d->output_start,
        .outputs = d->outputs,
        .storage_bytes = d->bytes,
        .pinned = d->pinned,
        .lazy = d->has_tapes ? d->lazy : NULL,
        .light_bytes = d->has_tapes ? d->light : NULL,
        .clock = d->clock,
    };
}

/* Adds an operation with up to three inputs (-1: none) and one output; returns its storage. */
static inline int64_t draw(drawing_t *d, int64_t phase, int64_t cost, int64_t bytes, int64_t a,
                           int64_t b, int64_t c) {
    int64_t k = d->count++;
    int64_t in[3] = {a, b, c};
    d->cost[k] = cost;
    d->phase[k] = phase;
    d->input_start[k + 1] = d->input_start[k];
    for (int j = 0; j < 3; j++) {
        if (in[j] >= 0) {
            d->inputs[d->input_start[k + 1]++] = in[j];
        }
    }
    d->outputs[d->output_start[k]] = d->storages;
    d->output_start[k + 1] = d->output_start[k] + 1;
    d->bytes[d->storages] = bytes;
    return d->storages++;
}

/* A network of layers with skips, a loss, and the backward with gradients that stay. */
static inline void draw_training(drawing_t *d, int64_t layers, uint64_t seed) {
    int64_t kept[MOST_OPS];
    memset(d, 0, sizeof(*d));
    for (int64_t k = 0; k < layers; k++) {
        seed = seed * UINT64_C(6364136223846793005) + 1442695040888963407;
        int64_t cost = 1 + (int64_t)(seed >> 60);
        int64_t bytes = 100 * (1 + (int64_t)(seed >> 50 & 7));
        kept[k] = draw(d, 0, cost, bytes, k > 0 ? kept[k - 1] : -1,
                       k > 2 && (seed >> 40 & 3) == 0 ? kept[k - 3] : -1, -1);
        d->workspace[d->count - 1] = (seed >> 30 & 7) == 0 ? 150 : 0;
        d->flags[d->count - 1] = (seed >> 33 & 7) == 0 ? 2 : 0;
    }
    int64_t gradient = draw(d, 1, 3, 40, kept[layers - 1], -1, -1);
    for (int64_t k = layers - 1; k >= 0; k--) {
        int64_t weight = draw(d, 2, 4, k % 6 == 0 ? 900 : 20, gradient, kept[k], -1);
        d->pinned[weight] = 1;
        gradient = draw(d, 2, 5, d->bytes[kept[k]], gradient, kept[k],
                        k > 0 && k % 2 == 0 ? kept[k - 1] : -1);
    }
}

/* Layers whose parameters are read from a second tier in both phases, and gradients that are written there. */
static inline void draw_homes(drawing_t *d, int64_t layers, uint64_t seed) {
    int64_t homes[MOST_OPS];
    int64_t kept[MOST_OPS];
    int64_t last = -1;
    memset(d, 0, sizeof(*d));
    for (int64_t k = 0; k < layers; k++) {
        homes[k] = draw(d, 0, 1 + (int64_t)(seed + 5 * (uint64_t)k) % 9, 40 + 30 * (k % 4), -1, -1, -1);
        d->clock[d->count - 1] = ROTOR_READS;
    }
    for (int64_t k = 0; k < layers; k++) {
        kept[k] = draw(d, 0, 2 + k % 5, 60 + 20 * (k % 3), k > 0 ? kept[k - 1] : -1, homes[k], -1);
    }
    int64_t gradient = draw(d, 1, 3, 40, kept[layers - 1], -1, -1);
    for (int64_t k = layers - 1; k >= 0; k--) {
        int64_t weight = draw(d, 2, 4, d->bytes[homes[k]], gradient, kept[k], -1);
        d->flags[d->count - 1] = ROTOR_ONCE;
        gradient = draw(d, 2, 5, d->bytes[kept[k]], gradient, kept[k], homes[k]);
        int64_t put = d->count++;
        d->phase[put] = 2;
        d->cost[put] = k % 3 == 0 ? 0 : 1 + k % 7;
        d->flags[put] = ROTOR_ONCE;
        d->clock[put] = ROTOR_WRITES;
        d->input_start[put + 1] = d->input_start[put];
        d->inputs[d->input_start[put + 1]++] = weight;
        if (last >= 0) {
            d->inputs[d->input_start[put + 1]++] = last;
        }
        d->output_start[put + 1] = d->output_start[put];
        last = weight;
    }
}

/* Appends a storage to the inputs or outputs of operation k. */
static inline void append_to(int64_t *start, int64_t *items, int64_t count, int64_t k, int64_t s) {
    memmove(items + start[k + 1] + 1, items + start[k + 1],
            (size_t)(start[count] - start[k + 1]) * sizeof(*items));
    items[start[k + 1]] = s;
    for (int64_t j = k + 1; j <= count; j++) {
        start[j]++;
    }
}

/* The same network, in which layers have tapes that their backwards read; the output is held. */
static inline void draw_tapes(drawing_t *d, int64_t layers, uint64_t seed) {
    draw_training(d, layers, seed);
    d->has_tapes = true;
    memcpy(d->light, d->workspace, sizeof(d->light));
    for (int64_t k = 0; k < layers; k++) {
        int64_t tape = d->storages++;
        d->bytes[tape] = 70 * (k % 4);
        d->lazy[tape] = 1;
        d->light[k] = k % 3 == 0 ? 90 : -(d->bytes[k] / 2);
        append_to(d->output_start, d->outputs, d->count, k, tape);
        append_to(d->input_start, d->inputs, d->count, 3 * layers - 2 * k, tape);
    }
    d->pinned[layers - 1] = 2;
    for (int64_t k = layers + 1; k < d->count; k += 2) {
        d->workspace[k] = d->light[k] = -15;
        d->flags[k + 1] = ROTOR_ONCE;
    }
}

#endif
