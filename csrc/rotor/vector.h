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

/* Puts a number into a list of distinct ones, or takes it out. at[number]: its place, -1 outside. */
static inline void rotor_list_hold(int32_t *list, int32_t *count, int32_t *at, int32_t number,
                                   bool is_in) {
    if (is_in && at[number] < 0) {
        at[number] = *count;
        list[(*count)++] = number;
    } else if (!is_in && at[number] >= 0) {
        int32_t last = list[--*count];
        list[at[number]] = last;
        at[last] = at[number];
        at[number] = -1;
    }
}

#endif
