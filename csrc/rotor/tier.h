/*
 * A file as a second tier of memory: one thread moves bytes between memory and the file, in the
 * order in which the transfers were begun. In a process that was forked from the one that opened the
 * tier, which has no such thread, reads are done when they are begun, and nothing is written.
 *
 * Without `buffered` nothing passes through the page cache, and nothing is copied: whole sectors of
 * a buffer go to and from the disk where they lie, and only the bytes before the first one and after
 * the last one go through two sectors of the tier. A buffer is therefore read to an address that
 * equals, modulo the sector, the one that it was written from.
 *
 * Functions that fail with ROTOR_ERR_IO give the errno of the failure in *error.
 */
#ifndef ROTOR_TIER_H
#define ROTOR_TIER_H

#include "core.h"

typedef struct rotor_tier rotor_tier_t;

/* A transfer; it must stay where it is from rotor_tier_begin() until rotor_tier_wait() is done. */
typedef struct rotor_transfer {
    /* input */
    bool writes;
    char *memory;
    int64_t bytes;
    int64_t offset; /* in the file, a multiple of the sector */
    /* output, once it is done */
    int error; /* 0, or an errno */
    uint64_t sum; /* checksum of the bytes that were moved */
    int64_t busy_ns;
    /* of the tier */
    bool is_done;
    struct rotor_transfer *next;
} rotor_transfer_t;

/*
 * Opens an empty file in a directory, and starts its thread. With NULL for a name it has none, and a
 * process that is killed leaves nothing. ROTOR_ERR_UNAVAILABLE if the file system moves nothing past
 * the page cache, and `buffered` is false.
 */
int rotor_tier_open(const char *directory, const char *name, bool buffered, rotor_tier_t **tier,
                    int *error);

/* Ends the thread after the transfers that were begun, and closes the file. May be called again. */
void rotor_tier_close(rotor_tier_t *tier);

/* Closes, and frees; NULL is allowed. No transfer may be waited for any more. */
void rotor_tier_free(rotor_tier_t *tier);

/* Bytes of a sector; 1 for a buffered file. */
int64_t rotor_tier_sector(const rotor_tier_t *tier);

/* Bytes of the file that a buffer takes, at any address. */
int64_t rotor_tier_room(int64_t sector, int64_t bytes);

/* Takes space on the disk for the first `bytes` of the file, so that no write lacks it later. */
int rotor_tier_reserve(rotor_tier_t *tier, int64_t bytes, int *error);

/*
 * Begins a transfer. ROTOR_ERR_UNAVAILABLE if the tier is closed, or if this is a write and the tier
 * belongs to the process that this one was forked from.
 */
int rotor_tier_begin(rotor_tier_t *tier, rotor_transfer_t *transfer);

/*
 * Waits for a transfer, at most for a time. ROTOR_ERR_INTERRUPTED: it is not done yet.
 * ROTOR_ERR_UNAVAILABLE: it never will be, in this process.
 */
int rotor_tier_wait(rotor_tier_t *tier, rotor_transfer_t *transfer, int64_t most_ns);

/*
 * Waits until nothing moves, as a process has to before it forks: memory that a disk writes to while
 * it is shared with a child may be lost on older kernels.
 */
void rotor_tier_drain(rotor_tier_t *tier);

#endif
