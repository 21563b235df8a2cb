/*
 * The inner loop of a checksum, in the versions that processors have instructions for.
 */
#ifndef ROTOR_CHECKSUM_BLOCKS_H
#define ROTOR_CHECKSUM_BLOCKS_H

#include "core.h"

enum { ROTOR_CHECKSUM_LANES = 8, ROTOR_CHECKSUM_BLOCK = ROTOR_CHECKSUM_LANES * 8 };

typedef struct {
    /* state */
    uint64_t first[ROTOR_CHECKSUM_LANES];
    uint64_t second[ROTOR_CHECKSUM_LANES];
    uint64_t keys[ROTOR_CHECKSUM_LANES];
} rotor_checksum_lanes_t;

/*
 * Adds `count` blocks. Lane k of block i has the keys keys[k] + i * step[k] and the same with its
 * halves exchanged and its bits turned; the products are those of the NH family of hashes.
 */
typedef void (*rotor_checksum_blocks_t)(rotor_checksum_lanes_t *lanes, const unsigned char *data,
                                        size_t count);

/* The instructions that a version needs: any processor's, AVX2's, AVX-512's. */
typedef enum {
    ROTOR_CHECKSUM_PORTABLE,
    ROTOR_CHECKSUM_AVX2,
    ROTOR_CHECKSUM_AVX512,
    ROTOR_CHECKSUM_KINDS
} rotor_checksum_kind_t;

/* A version; NULL where this processor, or the compiler of this library, does not have it. */
rotor_checksum_blocks_t rotor_checksum_version(rotor_checksum_kind_t kind);

/* The fastest version that this processor has. All give the same sums. */
rotor_checksum_blocks_t rotor_checksum_fastest(void);

#endif
