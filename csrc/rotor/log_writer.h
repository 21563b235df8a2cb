/*
 * Writes logs in the format that log.h reads: one function per instruction, each appends one line
 * to a buffer that the caller empties when it likes. Keys are in alphabetical order and numbers
 * are strings, as in the published logs; names are written as JSON strings (UTF-8 in, quotes,
 * backslashes and control characters escaped).
 */
#ifndef ROTOR_LOG_WRITER_H
#define ROTOR_LOG_WRITER_H

#include "core.h"

typedef struct {
    /* state; `text` and `length` are the caller's to read and to empty */
    char *text;
    int64_t length;
    int64_t capacity;
} rotor_log_writer_t;

typedef struct {
    /* input */
    const char *text;
    int64_t length;
} rotor_name_t;

void rotor_log_writer_init(rotor_log_writer_t *self);
void rotor_log_writer_free(rotor_log_writer_t *self);

/* All return ROTOR_OK, ROTOR_ERR_NO_MEMORY or ROTOR_ERR_OVERFLOW; on failure nothing was written. */
/* CONSTANT, RELEASE or PIN. */
int rotor_log_write_name(rotor_log_writer_t *self, const char *instruction, rotor_name_t name);
int rotor_log_write_memory(rotor_log_writer_t *self, rotor_name_t name, int64_t bytes);
int rotor_log_write_alias(rotor_log_writer_t *self, rotor_name_t name, int64_t alias);
int rotor_log_write_call(rotor_log_writer_t *self, rotor_name_t name, const rotor_name_t *args,
                         int64_t arg_count, const rotor_name_t *results, int64_t result_count,
                         int64_t time_ns);
int rotor_log_write_mutate(rotor_log_writer_t *self, rotor_name_t name, const rotor_name_t *args,
                           int64_t arg_count, const int64_t *mutated, int64_t mutated_count,
                           int64_t time_ns);
/* COPY, or COPY_FROM where `rebinds`. */
int rotor_log_write_copy(rotor_log_writer_t *self, rotor_name_t destination, rotor_name_t source,
                         bool rebinds);
int rotor_log_write_annotate(rotor_log_writer_t *self, rotor_name_t annotation);

#endif
