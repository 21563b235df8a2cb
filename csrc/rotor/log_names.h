/*
 * The names of a log: a map from text to a tensor that remembers the order of first definition. An
 * open-addressing hash table over one block of characters; entries are never removed one by one.
 */
#ifndef ROTOR_LOG_NAMES_H
#define ROTOR_LOG_NAMES_H

#include "core.h"

typedef struct {
    int32_t start; /* in rotor_log_names_t.characters */
    int32_t length;
    uint32_t hash;
    int32_t tensor; /* -1: none yet */
} rotor_log_name_t;

typedef struct {
    uint32_t hash;
    int32_t entry; /* counted from 1; 0: empty */
} rotor_log_slot_t;

typedef struct {
    /* state */
    rotor_log_name_t *entries; /* in the order of their making */
    int64_t count;
    int64_t capacity;
    char *characters;
    int64_t character_count;
    int64_t character_capacity;
    rotor_log_slot_t *slots;
    int64_t slot_count; /* a power of two, at least twice the entries; or 0 */
} rotor_log_names_t;

void rotor_log_names_free(rotor_log_names_t *self);

/* The entry of a name, or -1. */
int32_t rotor_log_names_find(const rotor_log_names_t *self, const char *name, int64_t length);

/* The entry of a name, made (with tensor -1) where it does not exist. */
int rotor_log_names_intern(rotor_log_names_t *self, const char *name, int64_t length,
                           int32_t *entry);

static inline const char *rotor_log_names_text(const rotor_log_names_t *self, int32_t entry) {
    return self->characters + self->entries[entry].start;
}

int64_t rotor_log_names_footprint(const rotor_log_names_t *self);

#endif
