#include "log_names.h"

#include <string.h>

#include "vector.h"

void rotor_log_names_free(rotor_log_names_t *self) {
    rotor_free(self->entries);
    rotor_free(self->characters);
    rotor_free(self->slots);
    memset(self, 0, sizeof(*self));
}

int64_t rotor_log_names_footprint(const rotor_log_names_t *self) {
    return self->capacity * (int64_t)sizeof(*self->entries) + self->character_capacity +
           self->slot_count * (int64_t)sizeof(*self->slots);
}

static inline uint64_t mix(uint64_t hash, uint64_t word) {
    hash = (hash ^ word) * UINT64_C(0x9e3779b97f4a7c15);
    return hash ^ hash >> 32;
}

static inline uint32_t hash_of(const char *name, int64_t length) {
    uint64_t hash = (uint64_t)length;
    uint64_t word = 0;
    for (; length >= 8; length -= 8, name += 8) {
        memcpy(&word, name, 8);
        hash = mix(hash, word);
    }
    word = 0;
    if (length >= 4) {
        uint32_t front;
        uint32_t back;
        memcpy(&front, name, 4);
        memcpy(&back, name + length - 4, 4);
        word = (uint64_t)front << 32 | back;
    } else {
        for (int64_t k = 0; k < length; k++) {
            word = word << 8 | (uint8_t)name[k];
        }
    }
    return (uint32_t)mix(mix(hash, word), 0);
}

/* The slot that holds the name, or the empty one where it belongs. */
static inline int64_t probe(const rotor_log_names_t *self, const char *name, int64_t length,
                            uint32_t hash) {
    int64_t mask = self->slot_count - 1;
    int64_t at = (int64_t)hash & mask;
    for (; self->slots[at].entry != 0; at = (at + 1) & mask) {
        const rotor_log_slot_t *slot = &self->slots[at];
        if (slot->hash == hash) {
            const rotor_log_name_t *entry = &self->entries[slot->entry - 1];
            if (entry->length == length &&
                memcmp(self->characters + entry->start, name, (size_t)length) == 0) {
                break;
            }
        }
    }
    return at;
}

static int grow_slots(rotor_log_names_t *self) {
    int64_t slot_count = rotor_max(64, self->slot_count * 2);
    rotor_log_slot_t *slots = rotor_calloc((size_t)slot_count, sizeof(*slots));
    if (slots == NULL) {
        return ROTOR_ERR_NO_MEMORY;
    }
    for (int64_t k = 0; k < self->count; k++) {
        int64_t at = (int64_t)self->entries[k].hash & (slot_count - 1);
        while (slots[at].entry != 0) {
            at = (at + 1) & (slot_count - 1);
        }
        slots[at] = (rotor_log_slot_t){.hash = self->entries[k].hash, .entry = (int32_t)(k + 1)};
    }
    rotor_free(self->slots);
    self->slots = slots;
    self->slot_count = slot_count;
    return ROTOR_OK;
}

int32_t rotor_log_names_find(const rotor_log_names_t *self, const char *name, int64_t length) {
    if (self->slot_count == 0) {
        return -1;
    }
    return self->slots[probe(self, name, length, hash_of(name, length))].entry - 1;
}

int rotor_log_names_intern(rotor_log_names_t *self, const char *name, int64_t length,
                           int32_t *entry) {
    uint32_t hash = hash_of(name, length);
    int ret;

    if ((self->count + 1) * 2 > self->slot_count && (ret = grow_slots(self)) != ROTOR_OK) {
        return ret;
    }
    int64_t at = probe(self, name, length, hash);
    if (self->slots[at].entry != 0) {
        *entry = self->slots[at].entry - 1;
        return ROTOR_OK;
    }
    if ((ret = ROTOR_RESERVE(self->entries, self->count, self->capacity, 1)) != ROTOR_OK ||
        (ret = ROTOR_RESERVE(self->characters, self->character_count, self->character_capacity,
                             length + 1)) != ROTOR_OK) {
        return ret;
    }
    if (length > 0) {
        memcpy(self->characters + self->character_count, name, (size_t)length);
    }
    self->entries[self->count] = (rotor_log_name_t){.start = (int32_t)self->character_count,
                                                    .length = (int32_t)length,
                                                    .hash = hash,
                                                    .tensor = -1};
    self->character_count += length;
    self->slots[at] = (rotor_log_slot_t){.hash = hash, .entry = (int32_t)(self->count + 1)};
    *entry = (int32_t)self->count++;
    return ROTOR_OK;
}
