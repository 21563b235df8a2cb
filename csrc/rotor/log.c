#include "log.h"

#include <string.h>

#include "log_reader.h"
#include "vector.h"

_Static_assert(sizeof(((rotor_log_error_t *)0)->message) == ROTOR_MESSAGE_BYTES,
               "messages of lines are those of logs");

enum { LINES_PER_QUESTION = 4096 };

int rotor_log_init(rotor_log_t *self, bool cut_at_start) {
    memset(self, 0, sizeof(*self));
    self->backward_command = -1;
    self->reader = rotor_calloc(1, sizeof(*self->reader));
    if (self->reader == NULL) {
        return ROTOR_ERR_NO_MEMORY;
    }
    self->reader->cut_at_start = cut_at_start;
    return ROTOR_OK;
}

void rotor_log_free(rotor_log_t *self) {
    rotor_log_reader_t *reader = self->reader;
    if (reader != NULL) {
        rotor_log_line_free(&reader->line);
        rotor_log_names_free(&reader->names);
        rotor_free(reader->references);
        rotor_free(reader->rest);
        rotor_free(reader->text);
        rotor_free(reader->inputs);
        rotor_free(reader->results);
        rotor_free(reader->outputs);
        rotor_free(reader);
    }
    rotor_graph_free(&self->graph);
    rotor_free(self->commands);
    memset(self, 0, sizeof(*self));
}

/* After a failure the log takes nothing more. */
static int give_up(rotor_log_t *self, int status, int64_t line, rotor_log_error_t *error) {
    rotor_log_reader_t *reader = self->reader;
    if (status == ROTOR_ERR_OVERFLOW) {
        status = rotor_log_fail(reader,
                                "the log is too large; expected at most 2147483646 commands, "
                                "tensors, arguments and characters of names");
    } else if (status != ROTOR_ERR_FORMAT) {
        (void)rotor_log_fail(reader, "an earlier piece of the log was not read: ");
        rotor_message_add(reader->error.message, rotor_strerror(status));
    }
    reader->is_broken = true;
    reader->error.line = line;
    *error = reader->error;
    return status;
}

static int refuse(const rotor_log_t *self, rotor_log_error_t *error) {
    *error = self->reader->error;
    if (!self->reader->is_broken) {
        error->line = self->line_count;
        error->message[0] = '\0';
        rotor_message_add(error->message, "the log has ended already; expected nothing more");
    }
    return ROTOR_ERR_FORMAT;
}

static int read_line(rotor_log_t *self, const char *text, int64_t length) {
    rotor_log_reader_t *reader = self->reader;

    if (length > ROTOR_LINE_BYTES) {
        return rotor_log_fail(reader, "the line is too long; expected at most 64 MiB");
    }
    if (self->line_count == 0 && length >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0) {
        text += 3;
        length -= 3;
    }
    length -= length > 0 && text[length - 1] == '\r';
    if (text[0] != '{') {
        int64_t blanks = 0;
        while (blanks < length && (text[blanks] == ' ' || text[blanks] == '\t')) {
            blanks++;
        }
        if (blanks == length) {
            self->line_count++;
            return ROTOR_OK;
        }
    }
    int ret = rotor_log_line_scan(&reader->line, text, length, reader->error.message);
    if (ret == ROTOR_OK) {
        ret = rotor_log_read_instruction(self);
    }
    self->line_count += ret == ROTOR_OK;
    return ret;
}

static int log_keep(rotor_log_reader_t *reader, const char *text, int64_t length) {
    if (reader->rest_length + length > ROTOR_LINE_BYTES + 4) {
        return rotor_log_fail(reader, "the line is too long; expected at most 64 MiB");
    }
    int ret = ROTOR_RESERVE(reader->rest, reader->rest_length, reader->rest_capacity, length + 1);
    if (ret == ROTOR_OK) {
        memcpy(reader->rest + reader->rest_length, text, (size_t)length);
        reader->rest_length += length;
        reader->rest[reader->rest_length] = '\n';
    }
    return ret;
}

static int read_rest(rotor_log_t *self) {
    int64_t length = self->reader->rest_length;
    self->reader->rest_length = 0;
    return read_line(self, self->reader->rest, length);
}

int rotor_log_feed(rotor_log_t *self, const char *text, int64_t length,
                   const rotor_callback_t *callback, rotor_log_error_t *error) {
    rotor_log_reader_t *reader = self->reader;
    int64_t until_question = LINES_PER_QUESTION;
    int ret = ROTOR_OK;

    if (reader->is_broken || self->is_finished) {
        return refuse(self, error);
    }
    for (int64_t at = 0; at < length && ret == ROTOR_OK;) {
        const char *end = memchr(text + at, '\n', (size_t)(length - at));
        int64_t taken = end == NULL ? length - at : end - (text + at);
        if (end == NULL || reader->rest_length > 0) {
            ret = log_keep(reader, text + at, taken);
            if (ret == ROTOR_OK && end != NULL) {
                ret = read_rest(self);
            }
        } else {
            ret = read_line(self, text + at, taken);
        }
        at += taken + 1;
        if (ret == ROTOR_OK && --until_question == 0) {
            until_question = LINES_PER_QUESTION;
            ret = rotor_ask(callback, rotor_min(at, length), length);
        }
    }
    return ret == ROTOR_OK ? ROTOR_OK : give_up(self, ret, self->line_count + 1, error);
}

static bool is_output(const rotor_log_t *self, int64_t entry) {
    int32_t tensor = self->reader->names.entries[entry].tensor;
    return tensor >= 0 && self->reader->references[tensor] > 0;
}

static int pin_outputs(rotor_log_t *self) {
    const rotor_log_names_t *names = &self->reader->names;
    int64_t count = 0;
    for (int64_t k = 0; k < names->count; k++) {
        count += is_output(self, k);
    }
    int ret = ROTOR_RESERVE(self->commands, self->command_count, self->command_capacity, count);
    if (ret != ROTOR_OK) {
        return ret;
    }
    for (int64_t k = 0; k < names->count; k++) {
        if (is_output(self, k)) {
            self->commands[self->command_count++] =
                (rotor_command_t){.kind = ROTOR_PIN, .index = names->entries[k].tensor};
        }
    }
    return ROTOR_OK;
}

static int sum_outputs(rotor_log_t *self) {
    const rotor_log_names_t *names = &self->reader->names;
    uint8_t *counted = rotor_calloc((size_t)self->graph.storage_count, 1);
    if (counted == NULL) {
        return ROTOR_ERR_NO_MEMORY;
    }
    for (int64_t k = 0; k < names->count; k++) {
        if (is_output(self, k)) {
            int32_t storage = self->graph.tensors[names->entries[k].tensor].storage;
            self->output_bytes += counted[storage] ? 0 : self->graph.storages[storage].bytes;
            counted[storage] = 1;
        }
    }
    rotor_free(counted);
    return ROTOR_OK;
}

int rotor_log_finish(rotor_log_t *self, enum rotor_output_condition condition,
                     rotor_log_error_t *error) {
    rotor_log_reader_t *reader = self->reader;
    int64_t line = self->line_count + 1;
    int ret = ROTOR_OK;

    if (reader->is_broken || self->is_finished) {
        return refuse(self, error);
    }
    if (reader->rest_length > 0) {
        ret = read_rest(self);
    }
    if (ret == ROTOR_OK && reader->pending != ROTOR_PENDING_NONE) {
        line = self->line_count;
        ret = rotor_log_fail(reader, "the log ends here, ");
        rotor_log_describe_pending(reader);
    }
    if (ret == ROTOR_OK && condition == ROTOR_REMATERIALIZE) {
        ret = pin_outputs(self);
    } else if (ret == ROTOR_OK && condition == ROTOR_PREALLOCATE) {
        ret = sum_outputs(self);
    }
    if (ret != ROTOR_OK) {
        return give_up(self, ret, line, error);
    }
    self->is_finished = true;
    return ROTOR_OK;
}

int32_t rotor_log_lookup(const rotor_log_t *self, const char *name, int64_t length) {
    int32_t entry = rotor_log_names_find(&self->reader->names, name, length);
    return entry < 0 ? -1 : self->reader->names.entries[entry].tensor;
}

int64_t rotor_log_references(const rotor_log_t *self, int32_t tensor) {
    return self->reader->references[tensor];
}

int64_t rotor_log_footprint(const rotor_log_t *self) {
    const rotor_log_reader_t *reader = self->reader;
    return (int64_t)sizeof(*reader) + rotor_graph_footprint(&self->graph) +
           self->command_capacity * (int64_t)sizeof(*self->commands) +
           rotor_log_line_footprint(&reader->line) + rotor_log_names_footprint(&reader->names) +
           reader->rest_capacity + reader->text_capacity +
           (reader->reference_capacity + reader->input_capacity + reader->result_capacity) *
               (int64_t)sizeof(int32_t) +
           reader->output_capacity * (int64_t)sizeof(*reader->outputs);
}
