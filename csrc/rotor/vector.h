/*
 * Growable arrays: `ROTOR_RESERVE(items, length, capacity, more)` makes room for `more` elements
 * behind `length`, doubling, and evaluates to a status; on failure the array is as it was.
 */
#ifndef ROTOR_VECTOR_H
#define ROTOR_VECTOR_H

#include "core.h"

/* Moves *items to a block of at least `needed` elements of `size` bytes; a no-op when it has
 * room. ROTOR_ERR_OVERFLOW beyond 2^31 - 2 elements: they are indexed with int32. */
int rotor_grow(void **items, int64_t *capacity, int64_t needed, size_t size);

#define ROTOR_RESERVE(items, length, capacity, more)                                         \
    ((length) + (more) <= (capacity)                                                         \
         ? ROTOR_OK                                                                          \
         : rotor_grow((void **)&(items), &(capacity), (length) + (more), sizeof(*(items))))

/* Appends one element, doubling; on failure the array is as it was. */
static inline int rotor_push(int32_t **items, int64_t *count, int64_t *capacity, int32_t item) {
    int ret = ROTOR_RESERVE(*items, *count, *capacity, 1);
    if (ret == ROTOR_OK) {
        (*items)[(*count)++] = item;
    }
    return ret;
}

#endif
