#include "checksum.h"

#include "checksum_blocks.h"

#include <string.h>

enum { LANES = ROTOR_CHECKSUM_LANES, BLOCK = ROTOR_CHECKSUM_BLOCK, BUFFER = 4096 };

typedef struct {
    rotor_checksum_lanes_t lanes;
    rotor_checksum_blocks_t add_blocks;
    uint64_t length;
    size_t waiting;
    unsigned char buffer[BUFFER];
} checksum_t;

typedef struct {
    int64_t size;
    int64_t stride; /* bytes */
} dimension_t;

static const uint64_t golden = UINT64_C(0x9e3779b97f4a7c15);

/* The finaliser of MurmurHash3: a bijection in which every bit changes half of the others. */
static uint64_t mixed(uint64_t x) {
    x ^= x >> 33;
    x *= UINT64_C(0xff51afd7ed558ccd);
    x ^= x >> 33;
    x *= UINT64_C(0xc4ceb9fe1a85ec53);
    return x ^ (x >> 33);
}

static void checksum_begin(checksum_t *self) {
    memset(self, 0, offsetof(checksum_t, buffer));
    for (int k = 0; k < LANES; k++) {
        self->lanes.keys[k] = mixed(golden * (uint64_t)(k + 1));
    }
    self->add_blocks = rotor_checksum_fastest();
}

static void checksum_add(checksum_t *self, const unsigned char *data, size_t bytes) {
    self->length += bytes;
    if (self->waiting == 0 && bytes >= BUFFER) {
        size_t count = bytes / BLOCK;
        self->add_blocks(&self->lanes, data, count);
        data += count * BLOCK;
        bytes -= count * BLOCK;
    }
    while (bytes > 0) {
        size_t taken = BUFFER - self->waiting < bytes ? BUFFER - self->waiting : bytes;
        memcpy(self->buffer + self->waiting, data, taken);
        self->waiting += taken;
        data += taken;
        bytes -= taken;
        if (self->waiting == BUFFER) {
            self->add_blocks(&self->lanes, self->buffer, BUFFER / BLOCK);
            self->waiting = 0;
        }
    }
}

static uint64_t finish(checksum_t *self) {
    uint64_t sum = mixed(self->length + golden);
    size_t count = (self->waiting + BLOCK - 1) / BLOCK;
    memset(self->buffer + self->waiting, 0, count * BLOCK - self->waiting);
    self->add_blocks(&self->lanes, self->buffer, count);
    for (int k = 0; k < LANES; k++) {
        sum = mixed(sum ^ self->lanes.first[k]) + golden;
        sum = mixed(sum ^ self->lanes.second[k]) + golden;
    }
    return sum;
}

static void add_dimensions(checksum_t *self, const unsigned char *data, size_t run_bytes,
                           const dimension_t *dimensions, int rank) {
    if (rank == 0) {
        checksum_add(self, data, run_bytes);
        return;
    }
    for (int64_t i = 0; i < dimensions[0].size; i++) {
        add_dimensions(self, data + i * dimensions[0].stride, run_bytes, dimensions + 1, rank - 1);
    }
}

/* Puts in the dimensions that are read, largest strides first; how many, or -1: no elements. */
static int arrange(int64_t item_bytes, int rank, const int64_t *sizes, const int64_t *strides,
                   dimension_t *dimensions) {
    int count = 0;
    for (int k = 0; k < rank; k++) {
        if (sizes[k] == 0) {
            return -1;
        }
        if (sizes[k] == 1 || strides[k] == 0) {
            continue;
        }
        int at = count++;
        while (at > 0 && dimensions[at - 1].stride < strides[k] * item_bytes) {
            dimensions[at] = dimensions[at - 1];
            at--;
        }
        dimensions[at] = (dimension_t){sizes[k], strides[k] * item_bytes};
    }
    return count;
}

int rotor_checksum(const void *data, int64_t item_bytes, int rank, const int64_t *sizes,
                   const int64_t *strides, uint64_t *sum) {
    dimension_t dimensions[ROTOR_CHECKSUM_MAX_RANK];
    checksum_t state;

    if (rank < 0 || rank > ROTOR_CHECKSUM_MAX_RANK) {
        return ROTOR_ERR_BAD_LENGTH;
    }
    if (item_bytes < 1) {
        return ROTOR_ERR_NEGATIVE_SIZE;
    }
    for (int k = 0; k < rank; k++) {
        if (sizes[k] < 0 || strides[k] < 0) {
            return ROTOR_ERR_NEGATIVE_SIZE;
        }
    }
    checksum_begin(&state);
    int count = arrange(item_bytes, rank, sizes, strides, dimensions);
    if (count >= 0 && data == NULL) {
        return ROTOR_ERR_UNAVAILABLE;
    }
    if (count >= 0) {
        int64_t run_bytes = item_bytes;
        while (count > 0 && dimensions[count - 1].stride == run_bytes) {
            run_bytes *= dimensions[--count].size;
        }
        add_dimensions(&state, data, (size_t)run_bytes, dimensions, count);
    }
    *sum = finish(&state);
    return ROTOR_OK;
}
