/*
 * The caching allocator of PyTorch's accelerators (the native one of CUDA) as a function of the
 * allocations and frees of one stream: the bytes that it counts as allocated, and the bytes that it
 * takes from the device for them.
 *
 * Rules. A size is rounded up to a multiple of 512. Blocks up to 1 MiB come from the small pool,
 * others from the large one: the least free block that is large enough, of several the one at the
 * lowest address. Without one, memory is taken from the device:
 *   - ordinary segments: 2 MiB for the small pool; 20 MiB for blocks below 10 MiB, else the size
 *     rounded up to 2 MiB. The rest of a block is split off if it has at least 512 bytes (small
 *     pool) or more than 1 MiB (large pool): otherwise it stays with the block, and is counted.
 *   - expandable segments: a range of addresses per pool, mapped in pieces of 2 MiB (small) and 20
 *     MiB (large) at the lowest place where the block fits, free memory before it included. The
 *     rest is split off from 512 bytes on. Of free blocks that are large enough, the search goes on
 *     to larger ones while these could grow less.
 * Where the device has no more, all cached memory in whole segments (whole pieces) is given back to
 * it, and the allocation is tried once more. A freed block is joined with the free ones beside it.
 *
 * Segments are taken to lie at ascending addresses.
 */
#ifndef ROTOR_BLOCKS_H
#define ROTOR_BLOCKS_H

#include "core.h"

enum rotor_segments { ROTOR_SEGMENTS_ORDINARY, ROTOR_SEGMENTS_EXPANDABLE };

/* The event that gives cached memory back to the device (see rotor_blocks_replay). */
#define ROTOR_BLOCKS_RELEASE INT64_MIN

typedef struct {
    /* output */
    int64_t allocated; /* bytes of blocks that are in use */
    int64_t allocated_peak;
    int64_t requested; /* bytes that were asked for in them */
    int64_t requested_peak;
    int64_t reserved; /* bytes taken from the device */
    int64_t reserved_peak;
    int64_t reserved_small; /* of them for the small pool */
    int64_t retries; /* allocations that had cached memory given back first */
    int64_t refused; /* allocations that failed all the same */
} rotor_blocks_figures_t;

enum rotor_block_state {
    ROTOR_BLOCK_GONE,
    ROTOR_BLOCK_TAKEN,
    ROTOR_BLOCK_FREE,
    ROTOR_BLOCK_UNMAPPED
};

typedef struct {
    /* state */
    int64_t address;
    int64_t size;
    int64_t requested;
    int32_t previous; /* neighbours in its segment, or -1 */
    int32_t next;
    uint8_t state;
    uint8_t pool;
} rotor_block_t;

/* Blocks in an order, by number. */
typedef struct {
    int32_t *items;
    int64_t count;
    int64_t capacity;
} rotor_block_list_t;

typedef struct {
    /* state; read only */
    enum rotor_segments segments;
    int64_t capacity_bytes;
    int64_t next_address;
    rotor_block_t *blocks;
    int64_t block_count;
    int64_t block_capacity;
    int32_t unused;                 /* the first of the blocks that no longer exist, or -1 */
    rotor_block_list_t free[2];     /* per pool (small, large): by size, then address */
    rotor_block_list_t unmapped[2]; /* per pool: by address */
    rotor_blocks_figures_t figures;
} rotor_blocks_t;

/* An allocator of a device of so many bytes; 0: without an end. */
void rotor_blocks_init(rotor_blocks_t *self, enum rotor_segments segments, int64_t capacity_bytes);
void rotor_blocks_free(rotor_blocks_t *self);

/*
 * Allocates at least 1 byte; *block is its number for rotor_blocks_give(). ROTOR_ERR_INFEASIBLE
 * where the device has not enough (cached memory has then been given back), ROTOR_ERR_NEGATIVE_SIZE
 * below 1 byte, ROTOR_ERR_TOO_LARGE above ROTOR_MAX_VALUE.
 */
int rotor_blocks_take(rotor_blocks_t *self, int64_t bytes, int32_t *block);
void rotor_blocks_give(rotor_blocks_t *self, int32_t block);
/* Gives cached memory back to the device. */
int rotor_blocks_release(rotor_blocks_t *self);

/*
 * Replays events from an empty allocator. An event e >= 0 allocates e bytes (nothing for 0); the
 * event -1 - k frees what the k-th allocation (from 0, those of 0 bytes included) has made;
 * ROTOR_BLOCKS_RELEASE gives cached memory back. An allocation that is refused makes nothing.
 *
 * `levels` (may be NULL) has room for 2 x length numbers: allocated and reserved bytes after each
 * event. ROTOR_ERR_BAD_STATE for a free of what was not allocated, or was freed.
 */
int rotor_blocks_replay(enum rotor_segments segments, int64_t capacity_bytes,
                        const int64_t *events, int64_t length, int64_t *levels,
                        rotor_blocks_figures_t *figures);

/*
 * The same after a piece (0: none) that is allocated and freed, up to the first event after which
 * more than `most` bytes are reserved.
 */
int rotor_blocks_replay_after(enum rotor_segments segments, int64_t capacity_bytes, int64_t piece,
                              int64_t most, const int64_t *events, int64_t length,
                              int64_t *levels, rotor_blocks_figures_t *figures);

#endif
