/*
 * Union-find over nodes that carry a sum of nanoseconds, as DTR's equivalence classes need it: the
 * caller says which root survives a union, and sums may be changed at any root. Path compression,
 * no ranks (published).
 */
#ifndef ROTOR_CLASSES_H
#define ROTOR_CLASSES_H

#include "core.h"

typedef struct {
    /* state */
    int64_t sum_ns; /* of a root's class */
    int32_t parent; /* itself for a root */
    uint32_t seen;  /* for walks: the mark of the last that came by */
} rotor_class_node_t;

typedef struct {
    /* state */
    rotor_class_node_t *nodes;
    int64_t count;
    int64_t capacity;
    uint32_t mark;
} rotor_classes_t;

void rotor_classes_free(rotor_classes_t *self);

/* A new class of one node. */
int rotor_classes_add(rotor_classes_t *self, int64_t ns, int32_t *node);

/* `steps` grows by one per node on the path, the root included. */
int32_t rotor_classes_root(rotor_classes_t *self, int32_t node, int64_t *steps);

/* A mark that no node has seen. */
uint32_t rotor_classes_mark(rotor_classes_t *self);

/* The class of root `from` joins that of root `into`, which stays a root. */
void rotor_classes_join(rotor_classes_t *self, int32_t from, int32_t into);

#endif
