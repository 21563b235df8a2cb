#include "blocks_early.h"

enum { WINDOW = 128, MOST_EVENTS = 20 * 1000 * 1000 };

static const int64_t largest_small = INT64_C(1) << 20;
static const int64_t distances[] = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64};

typedef struct {
    const rotor_positioned_events_t *orders;
    int64_t order_count;
    int64_t position_count;
    int64_t border;
    int64_t piece;
    int64_t most;
    rotor_early_block_t *blocks;
    int64_t block_count;
    int64_t replayed; /* events, in all */
    /* Memory for the events of one order, with those of early blocks. */
    int64_t *events;
    int64_t *starts;
    int64_t *numbers; /* of the allocations, by their numbers before */
    int32_t *made;
} early_search_t;

/* Writes the events of an order and of the early blocks; returns their number. */
static int64_t merge(early_search_t *self, const rotor_positioned_events_t *order) {
    int64_t taken[ROTOR_MOST_EARLY_BLOCKS];
    int64_t length = 0;
    int64_t made = 0;
    int64_t own = 0;
    int64_t k = 0;

    for (int64_t p = 0; p <= self->position_count; p++) {
        int64_t end = p < self->position_count ? order->starts[p] : order->length;
        for (; k < end; k++) {
            int64_t event = order->events[k];
            if (event >= 0) {
                self->numbers[own++] = made++;
            } else {
                event = -1 - self->numbers[-1 - event];
            }
            self->events[length++] = event;
        }
        self->starts[p] = length;
        for (int64_t b = 0; b < self->block_count; b++) {
            if (self->blocks[b].end == p) {
                self->events[length++] = -1 - taken[b];
            }
        }
        for (int64_t b = 0; b < self->block_count; b++) {
            if (self->blocks[b].begin == p) {
                taken[b] = made++;
                self->events[length++] = self->blocks[b].bytes;
            }
        }
    }
    return length;
}

/* Finds the first position with an allocation that does not fit, in any order: `position_count`
 * if all fit. */
static int find_failure(early_search_t *self, int64_t *position) {
    *position = self->position_count;
    for (int64_t k = 0; k < self->order_count; k++) {
        rotor_blocks_figures_t figures;
        int64_t replayed;
        int64_t length = merge(self, &self->orders[k]);
        int ret = rotor_blocks_replay_after(ROTOR_SEGMENTS_ORDINARY, 0, self->piece, self->most,
                                            self->events, length, NULL, self->made, &replayed,
                                            &figures);
        if (ret != ROTOR_OK) {
            return ret;
        }
        self->replayed += replayed;
        if (figures.reserved_peak > self->most) {
            int64_t p = 0;
            while (p + 1 < self->position_count && self->starts[p + 1] < replayed) {
                p++;
            }
            *position = rotor_min(*position, p);
        }
    }
    return ROTOR_OK;
}

static bool is_known(const early_search_t *self, rotor_early_block_t block) {
    for (int64_t k = 0; k < self->block_count; k++) {
        const rotor_early_block_t *other = &self->blocks[k];
        if (other->begin == block.begin && other->end == block.end &&
            other->bytes == block.bytes) {
            return true;
        }
    }
    return false;
}

/* Tries to allocate a block early, from each distance; keeps the best in *best, *reached. */
static int try_block(early_search_t *self, int64_t end, int64_t bytes, rotor_early_block_t *best,
                     int64_t *reached) {
    for (size_t d = 0; d < sizeof(distances) / sizeof(*distances); d++) {
        rotor_early_block_t block = {end - distances[d], end, bytes};
        bool crosses = block.begin <= self->border && end >= self->border;
        if (block.begin < 0 || crosses || is_known(self, block)) {
            continue;
        }
        int64_t position;
        self->blocks[self->block_count++] = block;
        int ret = find_failure(self, &position);
        self->block_count--;
        if (ret != ROTOR_OK) {
            return ret;
        }
        if (position > *reached) {
            *reached = position;
            *best = block;
        }
        if (*reached == self->position_count || self->replayed > MOST_EVENTS) {
            break;
        }
    }
    return ROTOR_OK;
}

/* Finds the block with which the first failure comes latest, after *reached. */
static int find_block(early_search_t *self, int64_t failure, rotor_early_block_t *best,
                      int64_t *reached) {
    const rotor_positioned_events_t *order = &self->orders[0];
    for (int64_t end = failure; end > rotor_max(failure - WINDOW, 0); end--) {
        int64_t stop = end + 1 < self->position_count ? order->starts[end + 1] : order->length;
        for (int64_t k = order->starts[end]; k < stop; k++) {
            if (order->events[k] <= largest_small) {
                continue;
            }
            int ret = try_block(self, end, order->events[k], best, reached);
            if (ret != ROTOR_OK || *reached == self->position_count ||
                self->replayed > MOST_EVENTS) {
                return ret;
            }
        }
    }
    return ROTOR_OK;
}

static bool are_valid(const rotor_positioned_events_t *order, int64_t position_count) {
    int64_t before = 0;
    for (int64_t p = 0; p < position_count; p++) {
        if (order->starts[p] < before || order->starts[p] > order->length) {
            return false;
        }
        before = order->starts[p];
    }
    int64_t made = 0;
    for (int64_t k = 0; k < order->length; k++) {
        int64_t event = order->events[k];
        if (event < 0 && (event == ROTOR_BLOCKS_RELEASE || -1 - event >= made)) {
            return false;
        }
        made += event >= 0;
    }
    return true;
}

int rotor_blocks_search_early(const rotor_positioned_events_t *orders, int64_t order_count,
                              int64_t position_count, int64_t border, int64_t piece, int64_t most,
                              rotor_early_block_t *blocks, int64_t *count) {
    int64_t longest = 0;
    for (int64_t k = 0; k < order_count; k++) {
        if (!are_valid(&orders[k], position_count)) {
            return ROTOR_ERR_BAD_STATE;
        }
        longest = rotor_max(longest, orders[k].length);
    }
    longest += 2 * ROTOR_MOST_EARLY_BLOCKS;
    early_search_t self = {.orders = orders,
                           .order_count = order_count,
                           .position_count = position_count,
                           .border = border,
                           .piece = piece,
                           .most = most,
                           .blocks = blocks};
    self.events = rotor_malloc_array(longest, sizeof(*self.events));
    self.starts = rotor_malloc_array(position_count + 1, sizeof(*self.starts));
    self.numbers = rotor_malloc_array(longest, sizeof(*self.numbers));
    self.made = rotor_malloc_array(longest, sizeof(*self.made));
    int ret = ROTOR_ERR_NO_MEMORY;
    if (self.events == NULL || self.starts == NULL || self.numbers == NULL || self.made == NULL) {
        goto out;
    }
    int64_t failure;
    *count = -1;
    ret = find_failure(&self, &failure);
    while (ret == ROTOR_OK && failure < position_count &&
           self.block_count < ROTOR_MOST_EARLY_BLOCKS && self.replayed <= MOST_EVENTS) {
        rotor_early_block_t best;
        int64_t reached = failure;
        ret = find_block(&self, failure, &best, &reached);
        if (ret != ROTOR_OK || reached == failure) {
            break;
        }
        self.blocks[self.block_count++] = best;
        failure = reached;
    }
    if (ret == ROTOR_OK && failure == position_count) {
        *count = self.block_count;
    }
out:
    rotor_free(self.events);
    rotor_free(self.starts);
    rotor_free(self.numbers);
    rotor_free(self.made);
    return ret;
}
