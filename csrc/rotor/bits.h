/*
 * Sets of small integers as bits, of which only the words between the first and the last that are
 * set are stored.
 */
#ifndef ROTOR_BITS_H
#define ROTOR_BITS_H

#include "core.h"

typedef struct {
    /* state */
    uint64_t *words;
    int32_t first; /* word 0 of `words` holds the elements from 64 * first on */
    int32_t count; /* of words */
    int32_t capacity;
} rotor_bits_t;

void rotor_bits_free(rotor_bits_t *self);

/* Makes room for the words of `first` .. `first + count - 1`: adding elements there cannot fail. */
int rotor_bits_cover(rotor_bits_t *self, int32_t first, int32_t count);
void rotor_bits_remove(rotor_bits_t *self, int32_t element);
/* Adds all elements of `other`. */
int rotor_bits_unite(rotor_bits_t *self, const rotor_bits_t *other);

static inline bool rotor_bits_has(const rotor_bits_t *self, int32_t element) {
    int32_t word = (element >> 6) - self->first;
    return word >= 0 && word < self->count && (self->words[word] >> (element & 63) & 1) != 0;
}

static inline int rotor_bits_add(rotor_bits_t *self, int32_t element) {
    int32_t word = element >> 6;
    if (word < self->first || word >= self->first + self->count) {
        int ret = rotor_bits_cover(self, word, 1);
        if (ret != ROTOR_OK) {
            return ret;
        }
    }
    self->words[word - self->first] |= UINT64_C(1) << (element & 63);
    return ROTOR_OK;
}

/* Makes it the set of the elements first * 64 .. (first + count) * 64 - 1 whose bit is set in `words`
 * (word 0 holds element 0 on). */
int rotor_bits_assign(rotor_bits_t *self, const uint64_t *words, int32_t first, int32_t count);

/* The least element that is at least `from`, or -1. */
int32_t rotor_bits_next(const rotor_bits_t *self, int32_t from);

#endif
