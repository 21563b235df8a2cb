/*
 * A 64-bit checksum of the bits of a strided array, for comparing what an operation made with what
 * it makes when it runs again.
 *
 * Every word is multiplied with keys of its own position: a changed bit, a swapped pair, changed
 * signs all give another sum, but for one case in about 2^64. It is no defence against an attacker.
 * Elements are read in the order of memory, so that an array without gaps is read as one run; two
 * arrays compare only where their sizes and strides are the same.
 */
#ifndef ROTOR_CHECKSUM_H
#define ROTOR_CHECKSUM_H

#include "core.h"

enum { ROTOR_CHECKSUM_MAX_RANK = 64 };

/*
 * The checksum of an array.
 *
 * data        its first element; may be NULL for an array without elements
 * item_bytes  bytes of an element, at least 1
 * rank        dimensions, 0 .. ROTOR_CHECKSUM_MAX_RANK
 * sizes       elements per dimension, not negative
 * strides     distances in elements, not negative; dimensions of stride 0 are read once
 *
 * ROTOR_ERR_BAD_LENGTH for a rank out of range, ROTOR_ERR_NEGATIVE_SIZE for a negative size or
 * stride or item_bytes below 1, ROTOR_ERR_UNAVAILABLE for elements at NULL.
 */
int rotor_checksum(const void *data, int64_t item_bytes, int rank, const int64_t *sizes,
                   const int64_t *strides, uint64_t *sum);

#endif
