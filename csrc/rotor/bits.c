#include "bits.h"

#include <string.h>

void rotor_bits_free(rotor_bits_t *self) {
    rotor_free(self->words);
    memset(self, 0, sizeof(*self));
}

int rotor_bits_cover(rotor_bits_t *self, int32_t first, int32_t count) {
    int32_t begin = self->count == 0 || first < self->first ? first : self->first;
    int32_t old_end = self->first + self->count;
    int32_t end = self->count == 0 || first + count > old_end ? first + count : old_end;
    int32_t length = end - begin;

    if (count == 0 || (self->count > 0 && begin == self->first && end == old_end)) {
        return ROTOR_OK;
    }
    if (length > self->capacity) {
        int32_t wanted = length + length / 2 + 2;
        uint64_t *moved = rotor_realloc(self->words, (size_t)wanted * sizeof(*moved));
        if (moved == NULL) {
            return ROTOR_ERR_NO_MEMORY;
        }
        self->words = moved;
        self->capacity = wanted;
    }
    if (self->count == 0) {
        memset(self->words, 0, (size_t)length * sizeof(*self->words));
    } else {
        int32_t shift = self->first - begin;
        memmove(self->words + shift, self->words, (size_t)self->count * sizeof(*self->words));
        memset(self->words, 0, (size_t)shift * sizeof(*self->words));
        memset(self->words + shift + self->count, 0,
               (size_t)(length - shift - self->count) * sizeof(*self->words));
    }
    self->first = begin;
    self->count = length;
    return ROTOR_OK;
}

int rotor_bits_assign(rotor_bits_t *self, const uint64_t *words, int32_t first, int32_t count) {
    int ret;

    while (count > 0 && words[first] == 0) {
        first++;
        count--;
    }
    while (count > 0 && words[first + count - 1] == 0) {
        count--;
    }
    self->count = 0;
    if ((ret = rotor_bits_cover(self, first, count)) == ROTOR_OK && count > 0) {
        memcpy(self->words, words + first, (size_t)count * sizeof(*words));
    }
    return ret;
}

void rotor_bits_remove(rotor_bits_t *self, int32_t element) {
    if (rotor_bits_has(self, element)) {
        self->words[(element >> 6) - self->first] &= ~(UINT64_C(1) << (element & 63));
    }
}

int rotor_bits_unite(rotor_bits_t *self, const rotor_bits_t *other) {
    int ret = rotor_bits_cover(self, other->first, other->count);
    if (ret != ROTOR_OK) {
        return ret;
    }
    for (int32_t k = 0; k < other->count; k++) {
        self->words[other->first + k - self->first] |= other->words[k];
    }
    return ROTOR_OK;
}

int32_t rotor_bits_next(const rotor_bits_t *self, int32_t from) {
    int32_t word = (from >> 6) - self->first;
    uint64_t left;

    if (word < 0) {
        word = 0;
        from = self->first * 64;
    }
    if (word >= self->count) {
        return -1;
    }
    left = self->words[word] >> (from & 63) << (from & 63);
    while (left == 0) {
        if (++word == self->count) {
            return -1;
        }
        left = self->words[word];
    }
    return (self->first + word) * 64 + __builtin_ctzll(left);
}
