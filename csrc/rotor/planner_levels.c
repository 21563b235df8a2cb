#include "planner_levels.h"

#include <string.h>

#define BLOCK ROTOR_BLOCK

static int level_arrays(rotor_levels_t *self, int64_t blocks, bool is_new) {
    return ROTOR_ARRAYS(is_new,
        ROTOR_ARRAY(self->level, blocks * BLOCK), ROTOR_ARRAY(self->block_level, blocks),
        ROTOR_ARRAY(self->block_most, blocks));
}

void rotor_levels_free(rotor_levels_t *self) {
    (void)level_arrays(self, 0, false);
    memset(self, 0, sizeof(*self));
}

int rotor_levels_reset(rotor_levels_t *self, int32_t block_count) {
    int ret = ROTOR_OK;
    if (block_count > self->block_capacity) {
        rotor_levels_free(self);
        self->block_capacity = (int32_t)((int64_t)block_count + block_count / 4);
        ret = level_arrays(self, self->block_capacity, true);
    }
    if (ret == ROTOR_OK) {
        self->block_count = block_count;
        memset(self->level, 0, (size_t)block_count * BLOCK * sizeof(*self->level));
        memset(self->block_level, 0, (size_t)block_count * sizeof(*self->block_level));
        memset(self->block_most, 0, (size_t)block_count * sizeof(*self->block_most));
    } else {
        rotor_levels_free(self);
    }
    return ret;
}

/* The highest level of a part of a block, less that of the block. */
static int32_t most_of_part(const rotor_levels_t *p, int32_t block, int32_t first, int32_t last) {
    const int32_t *level = p->level + (int64_t)block * BLOCK;
    int32_t most = level[first];
    for (int32_t k = first + 1; k <= last; k++) {
        most = level[k] > most ? level[k] : most;
    }
    return most;
}

static void raise_part(rotor_levels_t *p, int32_t block, int32_t first, int32_t last,
                       int32_t amount) {
    int32_t *level = p->level + (int64_t)block * BLOCK;
    for (int32_t k = first; k <= last; k++) {
        level[k] += amount;
    }
    p->block_most[block] = most_of_part(p, block, 0, BLOCK - 1);
}

void rotor_levels_raise(rotor_levels_t *self, int32_t first, int32_t last, int32_t amount) {
    if (first > last || amount == 0) {
        return;
    }
    int32_t low = first / BLOCK;
    int32_t high = last / BLOCK;
    self->work += 2 + (high - low) / 8;
    if (low == high) {
        raise_part(self, low, first % BLOCK, last % BLOCK, amount);
        return;
    }
    raise_part(self, low, first % BLOCK, BLOCK - 1, amount);
    for (int32_t b = low + 1; b < high; b++) {
        self->block_level[b] += amount;
    }
    raise_part(self, high, 0, last % BLOCK, amount);
}

int32_t rotor_levels_most(const rotor_levels_t *self, int32_t *slot) {
    int32_t most = self->block_most[0] + self->block_level[0];
    int32_t block = 0;
    for (int32_t b = 1; b < self->block_count; b++) {
        int32_t value = self->block_most[b] + self->block_level[b];
        if (value > most) {
            most = value;
            block = b;
        }
    }
    if (slot != NULL) {
        const int32_t *level = self->level + (int64_t)block * BLOCK;
        int32_t k = 0;
        while (level[k] != self->block_most[block]) {
            k++;
        }
        *slot = block * BLOCK + k;
    }
    return most;
}

int32_t rotor_levels_most_within(const rotor_levels_t *self, int32_t first, int32_t last) {
    int32_t low = first / BLOCK;
    int32_t high = last / BLOCK;
    if (first > last) {
        return 0;
    }
    if (low == high) {
        return most_of_part(self, low, first % BLOCK, last % BLOCK) + self->block_level[low];
    }
    int32_t most = most_of_part(self, low, first % BLOCK, BLOCK - 1) + self->block_level[low];
    int32_t end = most_of_part(self, high, 0, last % BLOCK) + self->block_level[high];
    most = end > most ? end : most;
    for (int32_t b = low + 1; b < high; b++) {
        int32_t value = self->block_most[b] + self->block_level[b];
        most = value > most ? value : most;
    }
    return most;
}
