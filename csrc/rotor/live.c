#include "live.h"

#include <string.h>

#include "vector.h"

typedef struct {
    int64_t address;
    int64_t nbytes;
} block_t;

typedef struct {
    block_t *blocks; /* ascending, disjoint */
    int64_t count;
    int64_t capacity;
    int64_t live;
    int64_t elsewhere; /* allocated by other threads, less what they freed of these blocks */
} state_t;

/* The first of ascending addresses, `stride` numbers apart, that is not below one. */
static int64_t first_from(const int64_t *addresses, int64_t count, int64_t stride,
                          int64_t address) {
    int64_t low = 0;
    int64_t high = count;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (addresses[middle * stride] < address) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

static int64_t first_block(const state_t *state, int64_t address) {
    return state->count == 0 ? 0 : first_from(&state->blocks->address, state->count, 2, address);
}

/* Puts `with` blocks in the place of `count` others; there is room. */
static void replace_blocks(state_t *state, int64_t place, int64_t count, int64_t with) {
    memmove(state->blocks + place + with, state->blocks + place + count,
            (size_t)(state->count - place - count) * sizeof(*state->blocks));
    state->count += with - count;
}

static int begin_live(state_t *state, int64_t address, int64_t nbytes, bool knows_totals) {
    int64_t first = first_block(state, address);
    int64_t gone = 0;
    int64_t last;

    if (first > 0 && state->blocks[first - 1].address + state->blocks[first - 1].nbytes > address) {
        first--;
    }
    for (last = first; last < state->count && state->blocks[last].address < address + nbytes;
         last++) {
        gone += state->blocks[last].nbytes;
    }
    int ret = ROTOR_RESERVE(state->blocks, state->count, state->capacity, 1);
    if (ret != ROTOR_OK) {
        return ret;
    }
    replace_blocks(state, first, last - first, 1);
    state->blocks[first] = (block_t){address, nbytes};
    state->live += nbytes - gone;
    if (knows_totals) {
        state->elsewhere += gone;
    }
    return ROTOR_OK;
}

static void end_live(state_t *state, int64_t address, int64_t nbytes, bool is_resident) {
    int64_t place = first_block(state, address);
    if (place < state->count && state->blocks[place].address == address) {
        state->live -= state->blocks[place].nbytes;
        replace_blocks(state, place, 1, 0);
    } else if (!is_resident && nbytes <= state->elsewhere) {
        /* Another thread's. Else it is from before the first event, and the size that PyTorch
         * reports may be wrong. */
        state->elsewhere -= nbytes;
    }
}

int rotor_live_bytes(const rotor_live_events_t *events, const int64_t *resident,
                     int64_t resident_count, int64_t *live_bytes) {
    const int64_t *total = events->total;
    state_t state = {0};
    int ret = ROTOR_OK;

    for (int64_t k = 0; k < events->count && ret == ROTOR_OK; k++) {
        int64_t address = events->address[k];
        int64_t nbytes = events->nbytes[k];
        if (total != NULL && k > 0) {
            state.elsewhere += total[k] - total[k - 1] - nbytes;
        }
        if (nbytes > 0) {
            ret = begin_live(&state, address, nbytes, total != NULL);
        } else {
            int64_t place = first_from(resident, resident_count, 1, address);
            bool is_resident = place < resident_count && resident[place] == address;
            end_live(&state, address, -nbytes, is_resident);
        }
        live_bytes[k] = state.live + rotor_min(state.elsewhere, 0);
    }
    rotor_free(state.blocks);
    return ret;
}
