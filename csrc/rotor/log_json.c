#include "log_json.h"

#include <stdio.h>
#include <string.h>

#include "vector.h"

enum { QUOTED_BYTES = 40 };

void rotor_log_line_free(rotor_log_line_t *self) {
    rotor_free(self->items);
    rotor_free(self->unescaped);
    memset(self, 0, sizeof(*self));
}

int64_t rotor_log_line_footprint(const rotor_log_line_t *self) {
    return self->unescaped_capacity + self->item_capacity * (int64_t)sizeof(*self->items);
}

const char *rotor_json_kind_name(int32_t kind) {
    static const char *const names[] = {"a string", "an integer", "a decimal number",
                                        "true, false or null", "an array"};
    return names[kind];
}

static void line_add(char *message, const char *text, size_t length) {
    size_t used = strlen(message);
    size_t room = (size_t)ROTOR_MESSAGE_BYTES - 1 - used;
    length = length < room ? length : room;
    memcpy(message + used, text, length);
    message[used + length] = '\0';
}

void rotor_message_add_all(char *message, const char *const *words) {
    for (; *words != NULL; words++) {
        line_add(message, *words, strlen(*words));
    }
}

void rotor_message_quote(char *message, const char *text, int64_t length) {
    int64_t shown = rotor_min(length, QUOTED_BYTES);
    while (shown < length && shown > 0 && ((uint8_t)text[shown] & 0xc0) == 0x80) {
        shown--;
    }
    line_add(message, "\"", 1);
    for (int64_t k = 0; k < shown; k++) {
        uint8_t c = (uint8_t)text[k];
        if (c < 0x20 || c == 0x7f) {
            char code[8];
            snprintf(code, sizeof(code), "\\x%02x", (unsigned)c);
            rotor_message_add(message, code);
        } else {
            line_add(message, text + k, 1);
        }
    }
    rotor_message_add(message, shown < length ? "...\"" : "\"");
}

void rotor_message_number(char *message, int64_t number) {
    char digits[24];
    snprintf(digits, sizeof(digits), "%lld", (long long)number);
    rotor_message_add(message, digits);
}

static int line_fail(const rotor_log_line_t *self, const char *expected) {
    self->message[0] = '\0';
    rotor_message_add(self->message, "expected ", expected, ", found ");
    if (self->at >= self->end) {
        rotor_message_add(self->message, "the end of the line");
    } else {
        rotor_message_quote(self->message, self->at, self->end - self->at);
    }
    rotor_message_add(self->message, " at column ");
    rotor_message_number(self->message, self->at - self->begin + 1);
    return ROTOR_ERR_FORMAT;
}

static inline void skip_blanks(rotor_log_line_t *self) {
    while (*self->at == ' ' || *self->at == '\t') {
        self->at++;
    }
}

static inline bool is_digit(char c) { return c >= '0' && c <= '9'; }

/* The bytes of the UTF-8 sequence at `text`, 0 where it is none. Stops at the end of a line. */
static int utf8_length(const char *text) {
    const uint8_t *u = (const uint8_t *)text;
    uint32_t code;
    int length = u[0] < 0x80 ? 1 : u[0] < 0xc2 ? 0 : u[0] < 0xe0 ? 2 : u[0] < 0xf0 ? 3 : 4;

    if (u[0] > 0xf4) {
        return 0;
    }
    code = length < 2 ? u[0] : u[0] & (0xffU >> (length + 1));
    for (int k = 1; k < length; k++) {
        if ((u[k] & 0xc0) != 0x80) {
            return 0;
        }
        code = code << 6 | (u[k] & 0x3f);
    }
    if (length == 3 && (code < 0x800 || (code >= 0xd800 && code <= 0xdfff))) {
        return 0;
    }
    return length == 4 && (code < 0x10000 || code > 0x10ffff) ? 0 : length;
}

static char *put_utf8(char *to, uint32_t code) {
    if (code < 0x80) {
        *to++ = (char)code;
        return to;
    }
    if (code < 0x800) {
        *to++ = (char)(0xc0 | code >> 6);
    } else {
        if (code < 0x10000) {
            *to++ = (char)(0xe0 | code >> 12);
        } else {
            *to++ = (char)(0xf0 | code >> 18);
            *to++ = (char)(0x80 | (code >> 12 & 0x3f));
        }
        *to++ = (char)(0x80 | (code >> 6 & 0x3f));
    }
    *to++ = (char)(0x80 | (code & 0x3f));
    return to;
}

/* Four hexadecimal digits at `text`, or -1. */
static int32_t hexadecimal(const char *text) {
    int32_t code = 0;
    for (int k = 0; k < 4; k++) {
        char c = text[k];
        int32_t digit = is_digit(c)               ? c - '0'
                        : (c >= 'a' && c <= 'f') ? c - 'a' + 10
                        : (c >= 'A' && c <= 'F') ? c - 'A' + 10
                                                 : -1;
        if (digit < 0) {
            return -1;
        }
        code = code << 4 | digit;
    }
    return code;
}

/* Reads the escape that a backslash at self->at begins; moves behind it. */
static int scan_escape(rotor_log_line_t *self, char **to) {
    static const char *const plain = "\"\"\\\\//b\bf\fn\nr\rt\t";
    char c = self->at[1];
    for (const char *p = plain; *p != '\0'; p += 2) {
        if (c == *p) {
            *(*to)++ = p[1];
            self->at += 2;
            return ROTOR_OK;
        }
    }
    int32_t code = c == 'u' ? hexadecimal(self->at + 2) : -1;
    if (code < 0) {
        return line_fail(self, "an escape of JSON");
    }
    if (code == 0) {
        return line_fail(self, "no null character in a string");
    }
    int taken = 6;
    if (code >= 0xd800 && code <= 0xdfff) {
        bool pair = code <= 0xdbff && self->at[6] == '\\' && self->at[7] == 'u';
        int32_t low = pair ? hexadecimal(self->at + 8) : -1;
        if (low < 0xdc00 || low > 0xdfff) {
            return line_fail(self, "both halves of a surrogate pair");
        }
        code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
        taken = 12;
    }
    *to = put_utf8(*to, (uint32_t)code);
    self->at += taken;
    return ROTOR_OK;
}

/* The rest of a string that has more than plain characters; self->at is at the first of those. */
static int scan_rich_string(rotor_log_line_t *self, const char *start, rotor_json_value_t *value) {
    int64_t longest = self->end - self->begin;
    if (self->unescaped_capacity < longest) {
        int ret = ROTOR_RESERVE(self->unescaped, 0, self->unescaped_capacity, longest);
        if (ret != ROTOR_OK) {
            return ret;
        }
    }
    char *first = self->unescaped + self->unescaped_length;
    char *to = first;
    memcpy(to, start, (size_t)(self->at - start));
    to += self->at - start;
    while (*self->at != '"') {
        uint8_t c = (uint8_t)*self->at;
        if (c == '\\') {
            int ret = scan_escape(self, &to);
            if (ret != ROTOR_OK) {
                return ret;
            }
            continue;
        }
        if (c < 0x20) {
            return line_fail(self, self->at >= self->end ? "a closing quote"
                                                         : "control characters to be escaped");
        }
        int length = utf8_length(self->at);
        if (length == 0) {
            return line_fail(self, "UTF-8");
        }
        memcpy(to, self->at, (size_t)length);
        to += length;
        self->at += length;
    }
    *value = (rotor_json_value_t){
        .text = first, .length = (int32_t)(to - first), .kind = ROTOR_JSON_STRING};
    self->unescaped_length = to - self->unescaped;
    self->at++;
    return ROTOR_OK;
}

/* Characters of a string that stand for themselves: not quotes, backslashes, control characters or
 * parts of longer UTF-8 sequences. */
static const uint8_t plain_characters[256] = {
#define ROW 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1
    [0x20] = 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, ROW, ROW,
    1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1, ROW, ROW,
#undef ROW
};

static inline int scan_string(rotor_log_line_t *self, rotor_json_value_t *value) {
    const char *start = ++self->at;
    const char *at = start;
    while (plain_characters[(uint8_t)*at]) {
        at++;
    }
    self->at = at;
    if (*at != '"') {
        return scan_rich_string(self, start, value);
    }
    self->at++;
    value->text = start;
    value->length = (int32_t)(at - start);
    value->kind = ROTOR_JSON_STRING;
    return ROTOR_OK;
}

static int scan_digits(rotor_log_line_t *self) {
    if (!is_digit(*self->at)) {
        return line_fail(self, "a digit");
    }
    while (is_digit(*self->at)) {
        self->at++;
    }
    return ROTOR_OK;
}

static int scan_number(rotor_log_line_t *self, rotor_json_value_t *value) {
    const char *start = self->at;
    int ret;

    value->kind = ROTOR_JSON_INTEGER;
    self->at += *self->at == '-';
    if (*self->at == '0' && is_digit(self->at[1])) {
        return line_fail(self, "a number without leading zeros");
    }
    if ((ret = scan_digits(self)) != ROTOR_OK) {
        return ret;
    }
    if (*self->at == '.') {
        value->kind = ROTOR_JSON_DECIMAL;
        self->at++;
        if ((ret = scan_digits(self)) != ROTOR_OK) {
            return ret;
        }
    }
    if (*self->at == 'e' || *self->at == 'E') {
        value->kind = ROTOR_JSON_DECIMAL;
        self->at++;
        self->at += *self->at == '-' || *self->at == '+';
        if ((ret = scan_digits(self)) != ROTOR_OK) {
            return ret;
        }
    }
    value->text = start;
    value->length = (int32_t)(self->at - start);
    return ROTOR_OK;
}

static int scan_scalar(rotor_log_line_t *self, rotor_json_value_t *value) {
    static const char *const literals[] = {"true", "false", "null"};
    if (*self->at == '"') {
        return scan_string(self, value);
    }
    if (*self->at == '-' || is_digit(*self->at)) {
        return scan_number(self, value);
    }
    for (int k = 0; k < 3; k++) {
        int64_t length = (int64_t)strlen(literals[k]);
        if (self->end - self->at >= length &&
            memcmp(self->at, literals[k], (size_t)length) == 0) {
            *value = (rotor_json_value_t){
                .text = self->at, .length = (int32_t)length, .kind = ROTOR_JSON_LITERAL};
            self->at += length;
            return ROTOR_OK;
        }
    }
    return line_fail(self, "a string, a number or a flat array of them");
}

static int scan_array(rotor_log_line_t *self, rotor_json_value_t *value) {
    int64_t first = self->item_count;
    int ret;

    self->at++;
    skip_blanks(self);
    if (*self->at == ']') {
        self->at++;
    } else {
        for (bool more = true; more;) {
            if (self->item_count >= ROTOR_LINE_ITEMS) {
                return line_fail(self, "at most 1048576 entries in the arrays of a line");
            }
            if ((ret = ROTOR_RESERVE(self->items, self->item_count, self->item_capacity, 1)) !=
                    ROTOR_OK ||
                (ret = scan_scalar(self, &self->items[self->item_count])) != ROTOR_OK) {
                return ret;
            }
            self->item_count++;
            skip_blanks(self);
            more = *self->at == ',';
            if (!more && *self->at != ']') {
                return line_fail(self, "a comma or ] in an array");
            }
            self->at++;
            skip_blanks(self);
        }
    }
    *value = (rotor_json_value_t){.length = (int32_t)(self->item_count - first),
                                  .kind = ROTOR_JSON_ARRAY,
                                  .first = (int32_t)first};
    return ROTOR_OK;
}

static inline enum rotor_log_field find_field(const char *key, int32_t length) {
#define IS(name) (memcmp(key, name, sizeof(name) - 1) == 0)
    switch (length) {
    case 3:
        return IS("DST") ? ROTOR_FIELD_DST : IS("SRC") ? ROTOR_FIELD_SRC : ROTOR_FIELD_OTHER;
    case 4:
        return IS("NAME")   ? ROTOR_FIELD_NAME
               : IS("ARGS") ? ROTOR_FIELD_ARGS
               : IS("TIME") ? ROTOR_FIELD_TIME
                            : ROTOR_FIELD_OTHER;
    case 5:
        return IS("ALIAS") ? ROTOR_FIELD_ALIAS : ROTOR_FIELD_OTHER;
    case 6:
        return IS("MEMORY")   ? ROTOR_FIELD_MEMORY
               : IS("RESULT") ? ROTOR_FIELD_RESULT
               : IS("MUTATE") ? ROTOR_FIELD_MUTATE
                              : ROTOR_FIELD_OTHER;
    case 10:
        return IS("ANNOTATION") ? ROTOR_FIELD_ANNOTATION : ROTOR_FIELD_OTHER;
    case 11:
        return IS("INSTRUCTION") ? ROTOR_FIELD_INSTRUCTION : ROTOR_FIELD_OTHER;
    default:
        return ROTOR_FIELD_OTHER;
    }
#undef IS
}

static int fail_key(const rotor_log_line_t *self, const rotor_json_value_t *key,
                    const char *what) {
    self->message[0] = '\0';
    rotor_message_add(self->message, "the key ");
    rotor_message_quote(self->message, key->text, key->length);
    rotor_message_add(self->message, what);
    return ROTOR_ERR_FORMAT;
}

static const char *const repeats = " stands twice in the line; expected every key once";

static int note_other_key(rotor_log_line_t *self, const rotor_json_value_t *key) {
    for (int32_t k = 0; k < self->key_count; k++) {
        if (self->keys[k].length == key->length &&
            memcmp(self->keys[k].text, key->text, (size_t)key->length) == 0) {
            return fail_key(self, key, repeats);
        }
    }
    if (self->key_count == ROTOR_LINE_KEYS) {
        return fail_key(self, key, " is one too many; expected at most 32 unknown keys in a line");
    }
    self->keys[self->key_count++] = *key;
    return ROTOR_OK;
}

static int scan_member(rotor_log_line_t *self) {
    rotor_json_value_t key;
    rotor_json_value_t other;
    int64_t item_count = self->item_count;
    int ret;

    if (*self->at != '"') {
        return line_fail(self, "a key in double quotes");
    }
    if ((ret = scan_string(self, &key)) != ROTOR_OK) {
        return ret;
    }
    enum rotor_log_field field = find_field(key.text, key.length);
    rotor_json_value_t *value = &other;
    if (field != ROTOR_FIELD_OTHER) {
        if (rotor_log_line_has(self, field)) {
            return fail_key(self, &key, repeats);
        }
        self->seen |= 1U << field;
        value = &self->fields[field];
    } else if ((ret = note_other_key(self, &key)) != ROTOR_OK) {
        return ret;
    }
    skip_blanks(self);
    if (*self->at != ':') {
        return line_fail(self, "a colon after the key");
    }
    self->at++;
    skip_blanks(self);
    ret = *self->at == '[' ? scan_array(self, value) : scan_scalar(self, value);
    if (field == ROTOR_FIELD_OTHER) {
        self->item_count = item_count;
    }
    return ret;
}

int rotor_log_line_scan(rotor_log_line_t *self, const char *text, int64_t length, char *message) {
    int ret;

    self->seen = 0;
    self->item_count = 0;
    self->key_count = 0;
    self->unescaped_length = 0;
    self->begin = text;
    self->at = text;
    self->end = text + length;
    self->message = message;
    skip_blanks(self);
    if (*self->at != '{') {
        return line_fail(self, "a JSON object");
    }
    self->at++;
    skip_blanks(self);
    if (*self->at == '}') {
        self->at++;
    } else {
        for (bool more = true; more;) {
            if ((ret = scan_member(self)) != ROTOR_OK) {
                return ret;
            }
            skip_blanks(self);
            more = *self->at == ',';
            if (!more && *self->at != '}') {
                return line_fail(self, "a comma or }");
            }
            self->at++;
            if (more) {
                skip_blanks(self);
            }
        }
    }
    skip_blanks(self);
    return self->at == self->end ? ROTOR_OK
                                 : line_fail(self, "the end of the line after the object");
}
