#include "log_writer.h"

#include <string.h>

#include "vector.h"

void rotor_log_writer_init(rotor_log_writer_t *self) { memset(self, 0, sizeof(*self)); }

void rotor_log_writer_free(rotor_log_writer_t *self) {
    rotor_free(self->text);
    rotor_log_writer_init(self);
}

/* Writes at most this many bytes: `length` characters as a JSON string, quotes included. */
static inline int64_t most_quoted(int64_t length) { return 6 * length + 2; }

/* `room` is what all parts of a line may take; it was reserved. */
static int writer_begin(rotor_log_writer_t *self, int64_t room) {
    enum { KEYS = 128 }; /* the keys, braces and numbers of any line, and its end */
    if (room > INT32_MAX - KEYS) {
        return ROTOR_ERR_OVERFLOW;
    }
    return ROTOR_RESERVE(self->text, self->length, self->capacity, room + KEYS);
}

static void writer_put(rotor_log_writer_t *self, const char *text) {
    size_t length = strlen(text);
    memcpy(self->text + self->length, text, length);
    self->length += (int64_t)length;
}

static void put_string(rotor_log_writer_t *self, rotor_name_t name) {
    static const char digits[] = "0123456789abcdef";
    static const char short_escapes[] = "\"\"\\\\\bb\ff\nn\rr\tt";
    char *to = self->text + self->length;

    *to++ = '"';
    for (int64_t k = 0; k < name.length; k++) {
        uint8_t c = (uint8_t)name.text[k];
        if (c >= 0x20 && c != '"' && c != '\\') {
            *to++ = (char)c;
            continue;
        }
        const char *escape = short_escapes;
        while (*escape != '\0' && (uint8_t)*escape != c) {
            escape += 2;
        }
        *to++ = '\\';
        if (*escape != '\0') {
            *to++ = escape[1];
        } else {
            memcpy(to, "u00", 3);
            to[3] = digits[c >> 4];
            to[4] = digits[c & 15];
            to += 5;
        }
    }
    *to++ = '"';
    self->length = to - self->text;
}

static void put_integer(rotor_log_writer_t *self, int64_t number) {
    char digits[24];
    char *first = digits + sizeof(digits) - 1;
    uint64_t rest = number < 0 ? 0 - (uint64_t)number : (uint64_t)number;

    *first = '\0';
    do {
        *--first = (char)('0' + rest % 10);
        rest /= 10;
    } while (rest != 0);
    if (number < 0) {
        *--first = '-';
    }
    writer_put(self, first);
}

static void put_names(rotor_log_writer_t *self, const rotor_name_t *names, int64_t count) {
    writer_put(self, "[");
    for (int64_t k = 0; k < count; k++) {
        if (k > 0) {
            writer_put(self, ",");
        }
        put_string(self, names[k]);
    }
    writer_put(self, "]");
}

/* Of all names, quoted and separated; sums of that many characters stay within int64. */
static int64_t most_of_names(const rotor_name_t *names, int64_t count) {
    int64_t most = 2;
    for (int64_t k = 0; k < count; k++) {
        most += most_quoted(names[k].length) + 1;
    }
    return most;
}

int rotor_log_write_name(rotor_log_writer_t *self, const char *instruction, rotor_name_t name) {
    int ret = writer_begin(self, most_quoted(name.length));
    if (ret == ROTOR_OK) {
        writer_put(self, "{\"INSTRUCTION\":\"");
        writer_put(self, instruction);
        writer_put(self, "\",\"NAME\":");
        put_string(self, name);
        writer_put(self, "}\n");
    }
    return ret;
}

static int write_number(rotor_log_writer_t *self, const char *before, int64_t number,
                        const char *between, rotor_name_t name) {
    int ret = writer_begin(self, most_quoted(name.length));
    if (ret == ROTOR_OK) {
        writer_put(self, before);
        put_integer(self, number);
        writer_put(self, between);
        put_string(self, name);
        writer_put(self, "}\n");
    }
    return ret;
}

int rotor_log_write_memory(rotor_log_writer_t *self, rotor_name_t name, int64_t bytes) {
    return write_number(self, "{\"INSTRUCTION\":\"MEMORY\",\"MEMORY\":\"", bytes, "\",\"NAME\":",
                        name);
}

int rotor_log_write_alias(rotor_log_writer_t *self, rotor_name_t name, int64_t alias) {
    return write_number(self, "{\"ALIAS\":\"", alias, "\",\"INSTRUCTION\":\"ALIAS\",\"NAME\":",
                        name);
}

int rotor_log_write_annotate(rotor_log_writer_t *self, rotor_name_t annotation) {
    int ret = writer_begin(self, most_quoted(annotation.length));
    if (ret == ROTOR_OK) {
        writer_put(self, "{\"ANNOTATION\":");
        put_string(self, annotation);
        writer_put(self, ",\"INSTRUCTION\":\"ANNOTATE\"}\n");
    }
    return ret;
}

int rotor_log_write_copy(rotor_log_writer_t *self, rotor_name_t destination, rotor_name_t source,
                         bool rebinds) {
    int ret = writer_begin(self, most_quoted(destination.length) + most_quoted(source.length));
    if (ret == ROTOR_OK) {
        writer_put(self, "{\"DST\":");
        put_string(self, destination);
        writer_put(self, rebinds ? ",\"INSTRUCTION\":\"COPY_FROM\",\"SRC\":"
                                 : ",\"INSTRUCTION\":\"COPY\",\"SRC\":");
        put_string(self, source);
        writer_put(self, "}\n");
    }
    return ret;
}

int rotor_log_write_call(rotor_log_writer_t *self, rotor_name_t name, const rotor_name_t *args,
                         int64_t arg_count, const rotor_name_t *results, int64_t result_count,
                         int64_t time_ns) {
    int ret = writer_begin(self, most_quoted(name.length) + most_of_names(args, arg_count) +
                                     most_of_names(results, result_count));
    if (ret == ROTOR_OK) {
        writer_put(self, "{\"ARGS\":");
        put_names(self, args, arg_count);
        writer_put(self, ",\"INSTRUCTION\":\"CALL\",\"NAME\":");
        put_string(self, name);
        writer_put(self, ",\"RESULT\":");
        put_names(self, results, result_count);
        writer_put(self, ",\"TIME\":\"");
        put_integer(self, time_ns);
        writer_put(self, "\"}\n");
    }
    return ret;
}

int rotor_log_write_mutate(rotor_log_writer_t *self, rotor_name_t name, const rotor_name_t *args,
                           int64_t arg_count, const int64_t *mutated, int64_t mutated_count,
                           int64_t time_ns) {
    enum { MOST_DIGITS = 21 };
    int ret = writer_begin(self, most_quoted(name.length) + most_of_names(args, arg_count) +
                                     mutated_count * MOST_DIGITS);
    if (ret == ROTOR_OK) {
        writer_put(self, "{\"ARGS\":");
        put_names(self, args, arg_count);
        writer_put(self, ",\"INSTRUCTION\":\"MUTATE\",\"MUTATE\":[");
        for (int64_t k = 0; k < mutated_count; k++) {
            writer_put(self, k > 0 ? "," : "");
            put_integer(self, mutated[k]);
        }
        writer_put(self, "],\"NAME\":");
        put_string(self, name);
        writer_put(self, ",\"TIME\":\"");
        put_integer(self, time_ns);
        writer_put(self, "\"}\n");
    }
    return ret;
}
