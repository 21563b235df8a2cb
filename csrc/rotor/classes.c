#include "classes.h"

#include <string.h>

#include "vector.h"

void rotor_classes_free(rotor_classes_t *self) {
    rotor_free(self->nodes);
    memset(self, 0, sizeof(*self));
}

int rotor_classes_add(rotor_classes_t *self, int64_t ns, int32_t *node) {
    int ret = ROTOR_RESERVE(self->nodes, self->count, self->capacity, 1);
    if (ret != ROTOR_OK) {
        return ret;
    }
    *node = (int32_t)self->count++;
    self->nodes[*node] = (rotor_class_node_t){.parent = *node, .sum_ns = ns};
    return ROTOR_OK;
}

int32_t rotor_classes_root(rotor_classes_t *self, int32_t node, int64_t *steps) {
    rotor_class_node_t *nodes = self->nodes;
    int32_t root = node;

    ++*steps;
    while (nodes[root].parent != root) {
        root = nodes[root].parent;
        ++*steps;
    }
    while (nodes[node].parent != root) {
        int32_t next = nodes[node].parent;
        nodes[node].parent = root;
        node = next;
    }
    return root;
}

uint32_t rotor_classes_mark(rotor_classes_t *self) {
    if (self->mark == UINT32_MAX) {
        for (int64_t k = 0; k < self->count; k++) {
            self->nodes[k].seen = 0;
        }
        self->mark = 0;
    }
    return ++self->mark;
}

void rotor_classes_join(rotor_classes_t *self, int32_t from, int32_t into) {
    self->nodes[from].parent = into;
    self->nodes[into].sum_ns += self->nodes[from].sum_ns;
}
