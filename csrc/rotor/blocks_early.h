/* Blocks that a program allocates before the runs that need them, so that no hole is in their way. */
#ifndef ROTOR_BLOCKS_EARLY_H
#define ROTOR_BLOCKS_EARLY_H

#include "blocks.h"

/* A block of memory that is taken before the events of one position, and given back before those
 * of a later one, whose allocations find it free. */
typedef struct {
    int64_t begin;
    int64_t end;
    int64_t bytes;
} rotor_early_block_t;

/* Events of a program (see rotor_blocks_replay), and where those of each position begin. */
typedef struct {
    /* input */
    const int64_t *events;
    int64_t length;
    const int64_t *starts; /* ascending, one per position, at most `length` */
} rotor_positioned_events_t;

enum { ROTOR_MOST_EARLY_BLOCKS = 4 };

/*
 * Searches early blocks with which events reserve at most `most` bytes after a piece of `piece`
 * bytes (see rotor_blocks_fit), for each of several orders of the allocations within a position.
 * Added one after the other, each is the one with which the first allocation that does not fit
 * comes latest: a block above 1 MiB that is allocated shortly before that one, tried at up to 64
 * positions earlier. Those of one side of the position `border` stay there.
 *
 * `blocks` has room for ROTOR_MOST_EARLY_BLOCKS; *count is their number if they suffice, and -1 if
 * none were found. The search ends after a fixed number of replayed events.
 */
int rotor_blocks_search_early(const rotor_positioned_events_t *orders, int64_t order_count,
                              int64_t position_count, int64_t border, int64_t piece, int64_t most,
                              rotor_early_block_t *blocks, int64_t *count);

#endif
