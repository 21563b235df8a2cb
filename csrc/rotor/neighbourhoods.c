#include "neighbourhoods.h"

static void forget_roots_around(rotor_eviction_t *self, int32_t storage) {
    for (int way = 0; way < 2; way++) {
        rotor_neighbours_t list = self->candidates[storage].neighbours[way];
        for (int32_t k = list.start; k < list.start + list.count; k++) {
            self->candidates[self->neighbours[k]].roots_known = false;
        }
    }
}

/* Joins the classes of the evicted neighbours to that of an evicted storage, whose node is a root. */
static void join_neighbours(rotor_eviction_t *self, int32_t storage) {
    for (int way = ROTOR_PARENTS; way >= ROTOR_CHILDREN; way--) {
        rotor_neighbours_t list = self->candidates[storage].neighbours[way];
        for (int32_t k = list.start; k < list.start + list.count; k++) {
            int32_t other = self->neighbours[k];
            int32_t node = self->candidates[other].node;
            self->accesses++;
            if (node < 0 || other == storage || rotor_eviction_is(self, other, ROTOR_DETACHED)) {
                continue;
            }
            int32_t from = rotor_classes_root(&self->classes, node, &self->accesses);
            int32_t into = rotor_classes_root(&self->classes, self->candidates[storage].node,
                                              &self->accesses);
            if (from != into) {
                rotor_classes_join(&self->classes, from, into);
            }
        }
    }
}

int rotor_neighbourhood_rebuild(rotor_eviction_t *self) {
    self->classes.count = 0;
    self->changes = 0;
    for (int64_t k = 0; k < self->count; k++) {
        self->candidates[k].roots_known = false;
        self->candidates[k].node = -1;
    }
    for (int64_t k = 0; k < self->count; k++) {
        rotor_candidate_t *candidate = &self->candidates[k];
        if ((self->states[k] & (ROTOR_MATERIAL | ROTOR_DETACHED | ROTOR_REMOVED)) == 0) {
            bool is_computed = (self->states[k] & ROTOR_COMPUTED) != 0;
            if (!is_computed && self->options.skip_unmade) {
                continue;
            }
            int ret = rotor_classes_add(&self->classes, is_computed ? candidate->compute_ns : 0,
                                        &candidate->node);
            if (ret != ROTOR_OK) {
                return ret;
            }
            join_neighbours(self, (int32_t)k);
        }
    }
    return ROTOR_OK;
}

int rotor_neighbourhood_evicted(rotor_eviction_t *self, int32_t storage) {
    rotor_candidate_t *candidate = &self->candidates[storage];
    int ret = rotor_classes_add(&self->classes, candidate->compute_ns, &candidate->node);
    if (ret == ROTOR_OK) {
        join_neighbours(self, storage);
        forget_roots_around(self, storage);
    }
    return ret;
}

void rotor_neighbourhood_materialized(rotor_eviction_t *self, int32_t storage) {
    rotor_candidate_t *candidate = &self->candidates[storage];
    int32_t root = rotor_classes_root(&self->classes, candidate->node, &self->accesses);

    self->classes.nodes[root].sum_ns -= candidate->compute_ns;
    candidate->node = -1;
    self->changes++;
    forget_roots_around(self, storage);
}

/* The sum over the distinct classes of the evicted neighbours; remembers them when they are few. */
static int64_t walk_classes(rotor_eviction_t *self, rotor_candidate_t *candidate) {
    rotor_class_node_t *nodes = self->classes.nodes;
    uint32_t mark = rotor_classes_mark(&self->classes);
    int64_t sum = 0;
    int64_t found = 0;

    for (int way = ROTOR_PARENTS; way >= ROTOR_CHILDREN; way--) {
        rotor_neighbours_t list = candidate->neighbours[way];
        for (int32_t k = list.start; k < list.start + list.count; k++) {
            int32_t other = self->neighbours[k];
            int32_t node = self->candidates[other].node;
            self->accesses++;
            if (node < 0 || &self->candidates[other] == candidate ||
                rotor_eviction_is(self, other, ROTOR_DETACHED)) {
                continue;
            }
            int32_t root = rotor_classes_root(&self->classes, node, &self->accesses);
            if (nodes[root].seen != mark) {
                nodes[root].seen = mark;
                sum += nodes[root].sum_ns;
                if (found < 2) {
                    candidate->roots[found] = root;
                }
                found++;
            }
        }
    }
    candidate->roots_known = found <= 2 && !self->options.count_accesses;
    candidate->root_count = (int8_t)rotor_min(found, 2);
    return sum;
}

int64_t rotor_neighbourhood_sum(rotor_eviction_t *self, int32_t storage) {
    rotor_candidate_t *candidate = &self->candidates[storage];
    rotor_class_node_t *nodes = self->classes.nodes;
    int32_t *roots = candidate->roots;
    int64_t sum = 0;

    if (!candidate->roots_known) {
        return walk_classes(self, candidate);
    }
    for (int8_t k = 0; k < candidate->root_count; k++) {
        if (nodes[roots[k]].parent != roots[k]) {
            roots[k] = rotor_classes_root(&self->classes, roots[k], &self->accesses);
        }
    }
    if (candidate->root_count == 2 && roots[0] == roots[1]) {
        candidate->root_count = 1;
    }
    for (int8_t k = 0; k < candidate->root_count; k++) {
        sum += nodes[roots[k]].sum_ns;
    }
    return sum;
}

void rotor_neighbourhood_removing(rotor_eviction_t *self, int32_t storage) {
    const rotor_candidate_t *candidate = &self->candidates[storage];
    int32_t root = rotor_classes_root(&self->classes, candidate->node, &self->accesses);

    if (rotor_eviction_is(self, storage, ROTOR_COMPUTED)) {
        self->classes.nodes[root].sum_ns -= candidate->compute_ns;
    }
    self->changes++;
}
