/* The memory that the allocator of blocks.h should have before some events. */
#ifndef ROTOR_BLOCKS_PIECE_H
#define ROTOR_BLOCKS_PIECE_H

#include "blocks.h"

/* A piece of memory that is taken from the device before some events, and what these need then. */
typedef struct {
    /* output */
    int64_t bytes; /* 0: no piece makes them need less */
    int64_t reserved_peak;
    int64_t small_segments;
} rotor_blocks_piece_t;

/*
 * Finds the piece of ordinary segments that lets some events reserve least: it is allocated and
 * freed before them, so that blocks above 1 MiB lie in one segment instead of many, each with a rest
 * that suits nothing else. Of equal pieces, the largest: the events take less by themselves then.
 * Sizes are tried from what is allocated at most up to what is reserved without a piece, at most
 * 96 of them, and around the best; the least of all of them is not searched. Events give no cached
 * memory back: ROTOR_ERR_BAD_STATE. `without` (may be NULL) has the figures without a piece.
 */
int rotor_blocks_fit(const int64_t *events, int64_t length, rotor_blocks_figures_t *without,
                     rotor_blocks_piece_t *piece);

#endif
