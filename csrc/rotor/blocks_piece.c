#include "blocks_piece.h"

static const int64_t unit = INT64_C(2) << 20;
static const int64_t least_piece = INT64_C(10) << 20;
static const int64_t small_segment = INT64_C(2) << 20;

static int64_t rounded(int64_t bytes) { return (bytes + unit - 1) / unit * unit; }

typedef struct {
    const int64_t *events;
    int64_t length;
    rotor_blocks_piece_t best;
} fitting_t;

/* The figures after a piece, up to the event after which more than `most` bytes are reserved. */
static int replay(const fitting_t *self, int64_t bytes, int64_t most,
                  rotor_blocks_figures_t *found) {
    return rotor_blocks_replay_after(ROTOR_SEGMENTS_ORDINARY, 0, bytes, most, self->events,
                                     self->length, NULL, found);
}

/* Tries the pieces from `begin` to `end`, which are multiples of 2 MiB. */
static int try_pieces(fitting_t *self, int64_t begin, int64_t end, int64_t step) {
    for (int64_t bytes = begin; bytes <= end; bytes += step) {
        rotor_blocks_figures_t found;
        int ret = replay(self, bytes, self->best.reserved_peak, &found);
        if (ret != ROTOR_OK) {
            return ret;
        }
        bool is_less = found.reserved_peak < self->best.reserved_peak;
        bool is_larger = found.reserved_peak == self->best.reserved_peak &&
                         self->best.bytes > 0 && bytes > self->best.bytes;
        if (is_less || is_larger) {
            self->best = (rotor_blocks_piece_t){bytes, found.reserved_peak,
                                                found.reserved_small / small_segment};
        }
    }
    return ROTOR_OK;
}

int rotor_blocks_fit(const int64_t *events, int64_t length, rotor_blocks_figures_t *without,
                     rotor_blocks_piece_t *piece) {
    enum { TRIES = 96 };
    rotor_blocks_figures_t plain;

    for (int64_t k = 0; k < length; k++) {
        if (events[k] == ROTOR_BLOCKS_RELEASE) {
            return ROTOR_ERR_BAD_STATE;
        }
    }
    fitting_t self = {.events = events, .length = length};
    int ret = replay(&self, 0, INT64_MAX, &plain);
    if (ret != ROTOR_OK) {
        return ret;
    }
    self.best = (rotor_blocks_piece_t){0, plain.reserved_peak,
                                       plain.reserved_small / small_segment};
    int64_t least = plain.allocated_peak - plain.reserved_small;
    int64_t begin = rotor_max(rounded(rotor_max(least, 1)), least_piece);
    int64_t end = plain.reserved_peak - plain.reserved_small;
    int64_t step = rounded(rotor_max((end - begin) / TRIES, 1));
    ret = try_pieces(&self, begin, end, step);
    if (ret == ROTOR_OK && step > unit && self.best.bytes > 0) {
        int64_t middle = self.best.bytes;
        int64_t finer = rounded(rotor_max(step / (TRIES / 4), 1));
        ret = try_pieces(&self, rotor_max(begin, middle - step + finer), middle - 1, finer);
    }
    if (ret != ROTOR_OK) {
        return ret;
    }
    *piece = self.best;
    if (without != NULL) {
        *without = plain;
    }
    return ROTOR_OK;
}
