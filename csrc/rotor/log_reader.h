/*
 * The state of the reader of logs, and what reads one line. Private to log.c, log_fields.c and
 * log_instructions.c.
 */
#ifndef ROTOR_LOG_READER_H
#define ROTOR_LOG_READER_H

#include "log_commands.h"
#include "log_json.h"
#include "log_names.h"

enum rotor_log_pending { ROTOR_PENDING_NONE, ROTOR_PENDING_CONSTANT, ROTOR_PENDING_CALL };

struct rotor_log_reader {
    /* state */
    rotor_log_line_t line;
    rotor_log_names_t names;
    int32_t *references; /* of tensors */
    int64_t reference_capacity;
    char *rest; /* of a line whose end has not come yet */
    int64_t rest_length;
    int64_t rest_capacity;
    /* A CONSTANT or CALL whose followers have not all come; its results have entries already. */
    enum rotor_log_pending pending;
    bool expects_alias;
    int64_t next_result;
    int64_t time_ns;
    char *text; /* the name of the operation, or the names of what a MUTATE makes */
    int64_t text_length;
    int64_t text_capacity;
    int32_t *inputs; /* tensors */
    int64_t input_count;
    int64_t input_capacity;
    int32_t *results; /* entries of names */
    int64_t result_count;
    int64_t result_capacity;
    rotor_output_t *outputs;
    int64_t output_capacity;
    int64_t total_ns;
    int64_t total_bytes;
    const char *instruction; /* of the line, for messages */
    bool cut_at_start;
    bool is_backward_noted; /* by an annotation, which goes before the names of operations */
    bool is_broken;
    rotor_log_error_t error;
};

/* Reads the line that was scanned last. ROTOR_ERR_FORMAT writes the message; on failure the graph
 * and the commands are as they were. */
int rotor_log_read_instruction(rotor_log_t *self);

/* Appends to the message which follower of the pending CONSTANT or CALL has to come. */
void rotor_log_describe_pending(rotor_log_reader_t *reader);

/* Write the message and return ROTOR_ERR_FORMAT: texts; words around a text in quotes; a name that
 * is not defined; a value of the wrong kind. */
#define rotor_log_fail(reader, ...)                                                                \
    rotor_log_fail_all((reader), (const char *const[]){__VA_ARGS__, NULL})

int rotor_log_fail_all(rotor_log_reader_t *reader, const char *const *words);
int rotor_log_fail_about(rotor_log_reader_t *reader, const char *before, const char *text,
                         int64_t length, const char *after);
int rotor_log_fail_undefined(rotor_log_reader_t *reader, const rotor_json_value_t *name);
int rotor_log_fail_kind(rotor_log_reader_t *reader, enum rotor_log_field field,
                        const rotor_json_value_t *value, const char *expected);

/* A field of the line: of any kind; a string; an array of `least` entries or more.
 * ROTOR_ERR_FORMAT, with a message, where it is not there or something else. */
int rotor_log_get_field(rotor_log_reader_t *reader, enum rotor_log_field field,
                        const rotor_json_value_t **value);
int rotor_log_get_string(rotor_log_reader_t *reader, enum rotor_log_field field,
                         const rotor_json_value_t **value);
int rotor_log_get_array(rotor_log_reader_t *reader, enum rotor_log_field field, int64_t least,
                        const rotor_json_value_t **value);

/* The integer of a value, bare or in a string, from least to most; a field from 0 to
 * ROTOR_MAX_VALUE. */
int rotor_log_to_integer(rotor_log_reader_t *reader, enum rotor_log_field field,
                         const rotor_json_value_t *value, int64_t least, int64_t most,
                         int64_t *integer);
int rotor_log_get_amount(rotor_log_reader_t *reader, enum rotor_log_field field, int64_t *amount);

#endif
