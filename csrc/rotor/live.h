/*
 * Live blocks of a memory, from the events that its allocator reports to one thread.
 *
 * A block that other threads free counts as freed once a new block overlaps it. Where the totals of
 * all threads are known, it counts as freed as soon as their total has fallen by more than the
 * others had allocated, although the block itself remains unknown.
 */
#ifndef ROTOR_LIVE_H
#define ROTOR_LIVE_H

#include "core.h"

typedef struct {
    const int64_t *address;
    const int64_t *nbytes; /* > 0: allocated, else freed */
    const int64_t *total;  /* of all threads, from an unknown level; NULL: not known */
    int64_t count;
} rotor_live_events_t;

/* Live bytes after each event, above the level before the first one. The release of blocks at the
 * `resident_count` ascending addresses of `resident`, from before the first event, is counted
 * elsewhere. After a failure, `live_bytes` holds anything. */
int rotor_live_bytes(const rotor_live_events_t *events, const int64_t *resident,
                     int64_t resident_count, int64_t *live_bytes);

#endif
