/*
 * One line of a log: a flat JSON object, scanned in place. Strict JSON, and stricter: values
 * are strings, numbers, true, false, null or arrays of these; keys do not repeat; strings are valid
 * UTF-8 without null characters. What the scanner finds points into the line, or into a buffer of
 * its own where a string had escapes; both are valid until the next line.
 */
#ifndef ROTOR_LOG_JSON_H
#define ROTOR_LOG_JSON_H

#include "core.h"

/* The keys of log.h; others are read over. */
enum rotor_log_field {
    ROTOR_FIELD_ALIAS,
    ROTOR_FIELD_ANNOTATION,
    ROTOR_FIELD_ARGS,
    ROTOR_FIELD_DST,
    ROTOR_FIELD_INSTRUCTION,
    ROTOR_FIELD_MEMORY,
    ROTOR_FIELD_MUTATE,
    ROTOR_FIELD_NAME,
    ROTOR_FIELD_RESULT,
    ROTOR_FIELD_SRC,
    ROTOR_FIELD_TIME,
    ROTOR_FIELDS,
    ROTOR_FIELD_OTHER = ROTOR_FIELDS
};

enum rotor_json_kind {
    ROTOR_JSON_STRING,
    ROTOR_JSON_INTEGER,
    ROTOR_JSON_DECIMAL, /* has a fraction or an exponent */
    ROTOR_JSON_LITERAL, /* true, false, null */
    ROTOR_JSON_ARRAY
};

typedef struct {
    const char *text; /* a string without quotes and escapes, or a number as written */
    int32_t length;   /* of text; of an array, its entries */
    int32_t kind;
    int32_t first;    /* of an array, in rotor_log_line_t.items */
} rotor_json_value_t;

enum {
    ROTOR_MESSAGE_BYTES = 320,
    ROTOR_LINE_KEYS = 32,         /* other keys that a line may have */
    ROTOR_LINE_ITEMS = 1 << 20,   /* entries that the arrays of a line may have in all */
    ROTOR_LINE_BYTES = 64 << 20
};

typedef struct {
    /* output */
    rotor_json_value_t fields[ROTOR_FIELDS];
    uint32_t seen; /* bit f: field f was found */
    rotor_json_value_t *items;
    int64_t item_count;
    int64_t item_capacity;
    /* state */
    rotor_json_value_t keys[ROTOR_LINE_KEYS];
    int32_t key_count;
    char *unescaped;
    int64_t unescaped_length;
    int64_t unescaped_capacity;
    const char *begin;
    const char *at;
    const char *end;
    char *message;
} rotor_log_line_t;

void rotor_log_line_free(rotor_log_line_t *self);

/*
 * Scans a line of at most ROTOR_LINE_BYTES. text[length] must exist and be '\n' or '\r'.
 * ROTOR_ERR_FORMAT writes what was found and expected to `message` (ROTOR_MESSAGE_BYTES).
 */
int rotor_log_line_scan(rotor_log_line_t *self, const char *text, int64_t length, char *message);

static inline bool rotor_log_line_has(const rotor_log_line_t *self, enum rotor_log_field field) {
    return (self->seen >> field & 1) != 0;
}

/* Bytes beside the struct itself. */
int64_t rotor_log_line_footprint(const rotor_log_line_t *self);

const char *rotor_json_kind_name(int32_t kind);

/* Build a message: append texts, a text in quotes (cut when it is long), a number. What does not
 * fit is dropped. */
#define rotor_message_add(message, ...)                                                            \
    rotor_message_add_all((message), (const char *const[]){__VA_ARGS__, NULL})

void rotor_message_add_all(char *message, const char *const *words);
void rotor_message_quote(char *message, const char *text, int64_t length);
void rotor_message_number(char *message, int64_t number);

#endif
