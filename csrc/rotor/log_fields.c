#include "log_reader.h"

#include <string.h>

int rotor_log_fail_all(rotor_log_reader_t *reader, const char *const *words) {
    reader->error.message[0] = '\0';
    rotor_message_add_all(reader->error.message, words);
    return ROTOR_ERR_FORMAT;
}

int rotor_log_fail_about(rotor_log_reader_t *reader, const char *before, const char *text,
                         int64_t length, const char *after) {
    (void)rotor_log_fail(reader, before);
    rotor_message_quote(reader->error.message, text, length);
    rotor_message_add(reader->error.message, after);
    return ROTOR_ERR_FORMAT;
}

int rotor_log_fail_undefined(rotor_log_reader_t *reader, const rotor_json_value_t *name) {
    (void)rotor_log_fail_about(reader, "the name ", name->text, name->length, " in ");
    rotor_message_add(reader->error.message, reader->instruction,
                      " is not defined; expected one that an earlier line defines");
    return ROTOR_ERR_FORMAT;
}

static const char *const field_names[ROTOR_FIELDS] = {
    "ALIAS", "ANNOTATION", "ARGS", "DST", "INSTRUCTION", "MEMORY",
    "MUTATE", "NAME", "RESULT", "SRC", "TIME"};

int rotor_log_get_field(rotor_log_reader_t *reader, enum rotor_log_field field,
                        const rotor_json_value_t **value) {
    *value = &reader->line.fields[field];
    return rotor_log_line_has(&reader->line, field)
               ? ROTOR_OK
               : rotor_log_fail(reader, "the line has no ", field_names[field],
                                "; expected it in ", reader->instruction);
}

int rotor_log_fail_kind(rotor_log_reader_t *reader, enum rotor_log_field field,
                        const rotor_json_value_t *value, const char *expected) {
    (void)rotor_log_fail(reader, field_names[field], " in ", reader->instruction, " has ",
                         rotor_json_kind_name(value->kind));
    if (value->kind != ROTOR_JSON_ARRAY) {
        rotor_message_add(reader->error.message, ", ");
        rotor_message_quote(reader->error.message, value->text, value->length);
    }
    rotor_message_add(reader->error.message, "; expected ", expected);
    return ROTOR_ERR_FORMAT;
}

int rotor_log_get_string(rotor_log_reader_t *reader, enum rotor_log_field field,
                         const rotor_json_value_t **value) {
    int ret = rotor_log_get_field(reader, field, value);
    return ret == ROTOR_OK && (*value)->kind != ROTOR_JSON_STRING
               ? rotor_log_fail_kind(reader, field, *value, "a string")
               : ret;
}

int rotor_log_get_array(rotor_log_reader_t *reader, enum rotor_log_field field, int64_t least,
                        const rotor_json_value_t **value) {
    int ret = rotor_log_get_field(reader, field, value);
    if (ret == ROTOR_OK && (*value)->kind != ROTOR_JSON_ARRAY) {
        return rotor_log_fail_kind(reader, field, *value, "an array");
    }
    return ret == ROTOR_OK && (*value)->length < least
               ? rotor_log_fail(reader, field_names[field], " in ", reader->instruction,
                                " is empty; expected one entry or more")
               : ret;
}

int rotor_log_to_integer(rotor_log_reader_t *reader, enum rotor_log_field field,
                         const rotor_json_value_t *value, int64_t least, int64_t most,
                         int64_t *integer) {
    bool is_text = value->kind == ROTOR_JSON_STRING || value->kind == ROTOR_JSON_INTEGER;
    bool is_negative = is_text && value->length > 0 && value->text[0] == '-';
    int64_t number = 0;
    int32_t k = is_negative ? 1 : 0;

    if (!is_text || k == value->length) {
        return rotor_log_fail_kind(reader, field, value, "an integer");
    }
    for (; k < value->length; k++) {
        int digit = value->text[k] - '0';
        if (digit < 0 || digit > 9) {
            return rotor_log_fail_kind(reader, field, value, "an integer");
        }
        number = number > ROTOR_MAX_VALUE ? number : number * 10 + digit;
    }
    number = is_negative ? -number : number;
    if (number >= least && number <= most) {
        *integer = number;
        return ROTOR_OK;
    }
    (void)rotor_log_fail(reader, field_names[field], " in ", reader->instruction, " is ");
    rotor_message_quote(reader->error.message, value->text, value->length);
    rotor_message_add(reader->error.message, number < least ? ", too small" : ", too large",
                      "; expected an integer from ");
    rotor_message_number(reader->error.message, least);
    rotor_message_add(reader->error.message, " to ");
    rotor_message_number(reader->error.message, most);
    return ROTOR_ERR_FORMAT;
}

int rotor_log_get_amount(rotor_log_reader_t *reader, enum rotor_log_field field, int64_t *amount) {
    const rotor_json_value_t *value;
    int ret = rotor_log_get_field(reader, field, &value);
    return ret == ROTOR_OK
               ? rotor_log_to_integer(reader, field, value, 0, ROTOR_MAX_VALUE, amount)
               : ret;
}
