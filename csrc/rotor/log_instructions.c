#include "log_reader.h"

#include <string.h>

#include "vector.h"

/* Sums of a whole log stay below this, so that a replay cannot overflow int64. */
static const int64_t most_in_all = INT64_C(1) << 61;

/* The entry of a name that is bound to a tensor. */
static int get_entry(rotor_log_reader_t *reader, const rotor_json_value_t *name, int32_t *entry) {
    *entry = rotor_log_names_find(&reader->names, name->text, name->length);
    return *entry < 0 ? rotor_log_fail_undefined(reader, name) : ROTOR_OK;
}

static int reserve_commands(rotor_log_t *self, int64_t count) {
    return ROTOR_RESERVE(self->commands, self->command_count, self->command_capacity, count);
}

static void log_append(rotor_log_t *self, enum rotor_command_kind kind, int32_t index) {
    self->commands[self->command_count++] =
        (rotor_command_t){.kind = (int32_t)kind, .index = index};
}

/* Appends an operation and its COMPUTE; leaves room for `more` commands after it. */
static int append_operation(rotor_log_t *self, const char *name, int64_t name_length,
                            int64_t output_count, int64_t more) {
    rotor_log_reader_t *reader = self->reader;
    rotor_graph_t *graph = &self->graph;
    int64_t total_bytes = reader->total_bytes;
    int ret;

    for (int64_t k = 0; k < output_count; k++) {
        total_bytes += reader->outputs[k].alias < 0 ? reader->outputs[k].bytes : 0;
        if (total_bytes > most_in_all) {
            return rotor_log_fail(reader, "the sizes of the log add up to more than 2^61 bytes; "
                                          "expected less");
        }
    }
    if (reader->total_ns + reader->time_ns > most_in_all) {
        return rotor_log_fail(reader,
                              "the times of the log add up to more than 2^61 ns; expected less");
    }
    if ((ret = reserve_commands(self, 1 + more)) != ROTOR_OK ||
        (ret = ROTOR_RESERVE(reader->references, graph->tensor_count, reader->reference_capacity,
                             output_count)) != ROTOR_OK ||
        (ret = rotor_graph_append(graph, name, name_length, reader->time_ns, reader->inputs,
                                  reader->input_count, reader->outputs, output_count)) !=
            ROTOR_OK) {
        return ret;
    }
    reader->total_bytes = total_bytes;
    reader->total_ns += reader->time_ns;
    const rotor_operation_t *operation = &graph->operations[graph->operation_count - 1];
    for (int64_t k = 0; k < output_count; k++) {
        reader->references[operation->first_output + k] = 1;
    }
    if (self->backward_command < 0 && strstr(graph->names + operation->name, "backward") != NULL) {
        self->backward_command = self->command_count;
    }
    log_append(self, ROTOR_COMPUTE, (int32_t)(graph->operation_count - 1));
    return ROTOR_OK;
}

/* A CONSTANT or CALL whose followers are complete. */
static int complete(rotor_log_t *self) {
    rotor_log_reader_t *reader = self->reader;
    bool is_constant = reader->pending == ROTOR_PENDING_CONSTANT;
    for (int64_t k = 0; k < reader->result_count; k++) {
        int32_t entry = reader->results[k];
        reader->outputs[k].name = rotor_log_names_text(&reader->names, entry);
        reader->outputs[k].name_length = reader->names.entries[entry].length;
    }
    int ret = append_operation(self, reader->text, reader->text_length, reader->result_count,
                               is_constant);
    if (ret != ROTOR_OK) {
        return ret;
    }
    int32_t first = self->graph.operations[self->graph.operation_count - 1].first_output;
    for (int64_t k = 0; k < reader->result_count; k++) {
        reader->names.entries[reader->results[k]].tensor = first + (int32_t)k;
    }
    if (is_constant) {
        log_append(self, ROTOR_PIN, first);
    }
    reader->pending = ROTOR_PENDING_NONE;
    return ROTOR_OK;
}

static int keep_text(rotor_log_reader_t *reader, const char *text, int64_t length) {
    int ret = ROTOR_RESERVE(reader->text, 0, reader->text_capacity, length + 1);
    if (ret == ROTOR_OK) {
        memcpy(reader->text, text, (size_t)length);
        reader->text_length = length;
    }
    return ret;
}

/* Makes the entry of a name that the pending operation will define. */
static int expect_result(rotor_log_reader_t *reader, const rotor_json_value_t *name) {
    int64_t known = reader->names.count;
    int32_t entry;
    int ret;

    if (name->kind != ROTOR_JSON_STRING) {
        return rotor_log_fail_kind(reader, ROTOR_FIELD_RESULT, name, "strings");
    }
    if ((ret = ROTOR_RESERVE(reader->results, reader->result_count, reader->result_capacity,
                             1)) != ROTOR_OK ||
        (ret = ROTOR_RESERVE(reader->outputs, reader->result_count, reader->output_capacity,
                             1)) != ROTOR_OK ||
        (ret = rotor_log_names_intern(&reader->names, name->text, name->length, &entry)) !=
            ROTOR_OK) {
        return ret;
    }
    if (entry < known) {
        return rotor_log_fail_about(reader, "the result ", name->text, name->length,
                                    reader->names.entries[entry].tensor < 0
                                        ? " stands twice in RESULT; expected names that differ"
                                        : " is defined already; expected a new name");
    }
    reader->results[reader->result_count++] = entry;
    return ROTOR_OK;
}

static void expect_followers(rotor_log_reader_t *reader, enum rotor_log_pending pending) {
    reader->pending = pending;
    reader->expects_alias = false;
    reader->next_result = 0;
}

static int read_constant(rotor_log_t *self) {
    rotor_log_reader_t *reader = self->reader;
    const rotor_json_value_t *name;
    int ret = rotor_log_get_string(reader, ROTOR_FIELD_NAME, &name);

    reader->input_count = 0;
    reader->result_count = 0;
    reader->time_ns = 0;
    if (ret == ROTOR_OK && (ret = keep_text(reader, "constant", 8)) == ROTOR_OK &&
        (ret = expect_result(reader, name)) == ROTOR_OK) {
        expect_followers(reader, ROTOR_PENDING_CONSTANT);
    }
    return ret;
}

/* Name, time and arguments, as CALL and MUTATE have them. */
static int read_operation(rotor_log_reader_t *reader, int64_t least_args,
                          const rotor_json_value_t **name, const rotor_json_value_t **args) {
    int32_t entry;
    int ret;

    if ((ret = rotor_log_get_string(reader, ROTOR_FIELD_NAME, name)) != ROTOR_OK ||
        (ret = rotor_log_get_array(reader, ROTOR_FIELD_ARGS, least_args, args)) != ROTOR_OK ||
        (ret = rotor_log_get_amount(reader, ROTOR_FIELD_TIME, &reader->time_ns)) != ROTOR_OK ||
        (ret = ROTOR_RESERVE(reader->inputs, 0, reader->input_capacity, (*args)->length)) !=
            ROTOR_OK) {
        return ret;
    }
    reader->input_count = (*args)->length;
    for (int32_t k = 0; k < (*args)->length; k++) {
        const rotor_json_value_t *arg = &reader->line.items[(*args)->first + k];
        if (arg->kind != ROTOR_JSON_STRING) {
            return rotor_log_fail_kind(reader, ROTOR_FIELD_ARGS, arg, "strings");
        }
        if ((ret = get_entry(reader, arg, &entry)) != ROTOR_OK) {
            return ret;
        }
        reader->inputs[k] = reader->names.entries[entry].tensor;
    }
    return ROTOR_OK;
}

static int read_call(rotor_log_t *self) {
    rotor_log_reader_t *reader = self->reader;
    const rotor_json_value_t *name;
    const rotor_json_value_t *args;
    const rotor_json_value_t *results;
    int ret = read_operation(reader, 0, &name, &args);

    if (ret != ROTOR_OK ||
        (ret = rotor_log_get_array(reader, ROTOR_FIELD_RESULT, 1, &results)) != ROTOR_OK ||
        (ret = keep_text(reader, name->text, name->length)) != ROTOR_OK) {
        return ret;
    }
    reader->result_count = 0;
    for (int32_t k = 0; k < results->length; k++) {
        if ((ret = expect_result(reader, &reader->line.items[results->first + k])) != ROTOR_OK) {
            return ret;
        }
    }
    expect_followers(reader, ROTOR_PENDING_CALL);
    return ROTOR_OK;
}

void rotor_log_describe_pending(rotor_log_reader_t *reader) {
    char *message = reader->error.message;
    int32_t entry = reader->results[reader->next_result];
    rotor_message_add(message, "expected ", reader->expects_alias ? "ALIAS of " : "MEMORY of ");
    rotor_message_quote(message, rotor_log_names_text(&reader->names, entry),
                        reader->names.entries[entry].length);
    if (reader->pending == ROTOR_PENDING_CONSTANT) {
        rotor_message_add(message, ", a CONSTANT");
        return;
    }
    rotor_message_add(message, ", result ");
    rotor_message_number(message, reader->next_result + 1);
    rotor_message_add(message, " of ");
    rotor_message_number(message, reader->result_count);
    rotor_message_add(message, " of CALL ");
    rotor_message_quote(message, reader->text, reader->text_length);
}

/* True if MEMORY or ALIAS is what has to come, of the right name. */
static int check_follower(rotor_log_reader_t *reader, bool is_alias) {
    const rotor_json_value_t *name;
    int ret = rotor_log_get_string(reader, ROTOR_FIELD_NAME, &name);
    if (ret != ROTOR_OK) {
        return ret;
    }
    if (reader->pending == ROTOR_PENDING_NONE) {
        (void)rotor_log_fail(reader, reader->instruction, " of ");
        rotor_message_quote(reader->error.message, name->text, name->length);
        rotor_message_add(reader->error.message,
                          " follows nothing that needs it; expected it after CONSTANT (MEMORY) or "
                          "CALL (MEMORY and ALIAS of every result in order)");
        return ROTOR_ERR_FORMAT;
    }
    int32_t entry = reader->results[reader->next_result];
    if (is_alias == reader->expects_alias &&
        name->length == reader->names.entries[entry].length &&
        memcmp(name->text, rotor_log_names_text(&reader->names, entry), (size_t)name->length) ==
            0) {
        return ROTOR_OK;
    }
    (void)rotor_log_fail(reader, "found ", reader->instruction, " of ");
    rotor_message_quote(reader->error.message, name->text, name->length);
    rotor_message_add(reader->error.message, ", ");
    rotor_log_describe_pending(reader);
    return ROTOR_ERR_FORMAT;
}

static int read_memory(rotor_log_t *self) {
    rotor_log_reader_t *reader = self->reader;
    int64_t bytes = 0;
    int ret = check_follower(reader, false);

    if (ret != ROTOR_OK ||
        (ret = rotor_log_get_amount(reader, ROTOR_FIELD_MEMORY, &bytes)) != ROTOR_OK) {
        return ret;
    }
    reader->outputs[reader->next_result] = (rotor_output_t){.bytes = bytes, .alias = -1};
    if (reader->pending == ROTOR_PENDING_CONSTANT) {
        return complete(self);
    }
    reader->expects_alias = true;
    return ROTOR_OK;
}

static int read_alias(rotor_log_t *self) {
    rotor_log_reader_t *reader = self->reader;
    const rotor_json_value_t *value;
    int ret = check_follower(reader, true);

    if (ret != ROTOR_OK ||
        (ret = rotor_log_get_field(reader, ROTOR_FIELD_ALIAS, &value)) != ROTOR_OK) {
        return ret;
    }
    if ((ret = rotor_log_to_integer(reader, ROTOR_FIELD_ALIAS, value, -1, reader->input_count - 1,
                                    &reader->outputs[reader->next_result].alias)) != ROTOR_OK) {
        rotor_message_add(reader->error.message, ": -1, or an index of the ARGS of CALL ");
        rotor_message_quote(reader->error.message, reader->text, reader->text_length);
        return ret;
    }
    reader->expects_alias = false;
    reader->next_result++;
    return reader->next_result == reader->result_count ? complete(self) : ROTOR_OK;
}

static void rebind(rotor_log_t *self, int32_t entry, int32_t tensor) {
    int32_t *bound = &self->reader->names.entries[entry].tensor;
    self->reader->references[*bound]--;
    log_append(self, ROTOR_RELEASE, *bound);
    *bound = tensor;
}

/* Checks the indices of a MUTATE and prepares its outputs: copies of the arguments' storages. */
static int prepare_mutated(rotor_log_t *self, const rotor_json_value_t *args,
                           const rotor_json_value_t *mutated) {
    rotor_log_reader_t *reader = self->reader;
    const rotor_json_value_t *items = reader->line.items;
    int64_t length = args->length;
    int ret;

    /* A flag per argument, then the names. */
    for (int32_t k = 0; k < args->length; k++) {
        length += items[args->first + k].length + 1;
    }
    if ((ret = ROTOR_RESERVE(reader->text, 0, reader->text_capacity, length)) != ROTOR_OK ||
        (ret = ROTOR_RESERVE(reader->outputs, 0, reader->output_capacity, mutated->length)) !=
            ROTOR_OK ||
        (ret = ROTOR_RESERVE(reader->results, 0, reader->result_capacity, mutated->length)) !=
            ROTOR_OK) {
        return ret;
    }
    memset(reader->text, 0, (size_t)args->length);
    char *to = reader->text + args->length;
    for (int32_t k = 0; k < mutated->length; k++) {
        const rotor_json_value_t *item = &items[mutated->first + k];
        int64_t index;
        if ((ret = rotor_log_to_integer(reader, ROTOR_FIELD_MUTATE, item, 0,
                                        (int64_t)args->length - 1, &index)) != ROTOR_OK) {
            rotor_message_add(reader->error.message, ": an index of ARGS");
            return ret;
        }
        if (reader->text[index] != 0) {
            return rotor_log_fail_about(reader, "the index ", item->text, item->length,
                                        " stands twice in MUTATE; expected every index once");
        }
        reader->text[index] = 1;
        const rotor_json_value_t *arg = &items[args->first + index];
        memcpy(to, arg->text, (size_t)arg->length);
        to[arg->length] = '$';
        int32_t storage = self->graph.tensors[reader->inputs[index]].storage;
        reader->outputs[k] = (rotor_output_t){.name = to,
                                              .name_length = arg->length + 1,
                                              .bytes = self->graph.storages[storage].bytes,
                                              .alias = -1};
        reader->results[k] = rotor_log_names_find(&reader->names, arg->text, arg->length);
        to += arg->length + 1;
    }
    return ROTOR_OK;
}

static int read_mutate(rotor_log_t *self) {
    rotor_log_reader_t *reader = self->reader;
    const rotor_json_value_t *name;
    const rotor_json_value_t *args;
    const rotor_json_value_t *mutated;
    int ret = read_operation(reader, 1, &name, &args);

    if (ret != ROTOR_OK ||
        (ret = rotor_log_get_array(reader, ROTOR_FIELD_MUTATE, 1, &mutated)) != ROTOR_OK ||
        (ret = prepare_mutated(self, args, mutated)) != ROTOR_OK ||
        (ret = append_operation(self, name->text, name->length, mutated->length,
                                mutated->length)) != ROTOR_OK) {
        return ret;
    }
    int32_t first = self->graph.operations[self->graph.operation_count - 1].first_output;
    for (int32_t k = 0; k < mutated->length; k++) {
        rebind(self, reader->results[k], first + k);
    }
    return ROTOR_OK;
}

static int bind_copy(rotor_log_t *self, bool rebinds) {
    rotor_log_reader_t *reader = self->reader;
    const rotor_json_value_t *destination;
    const rotor_json_value_t *source;
    int32_t from;
    int32_t to;
    int ret;

    if ((ret = rotor_log_get_string(reader, ROTOR_FIELD_SRC, &source)) != ROTOR_OK ||
        (ret = rotor_log_get_string(reader, ROTOR_FIELD_DST, &destination)) != ROTOR_OK ||
        (ret = reserve_commands(self, 2)) != ROTOR_OK ||
        (ret = get_entry(reader, source, &from)) != ROTOR_OK ||
        (ret = rebinds ? get_entry(reader, destination, &to)
                       : rotor_log_names_intern(&reader->names, destination->text,
                                                destination->length, &to)) != ROTOR_OK) {
        return ret;
    }
    int32_t tensor = reader->names.entries[from].tensor;
    if (rebinds) {
        rebind(self, to, tensor);
    }
    reader->names.entries[to].tensor = tensor;
    reader->references[tensor]++;
    log_append(self, ROTOR_GET, tensor);
    return ROTOR_OK;
}

static int read_copy(rotor_log_t *self) { return bind_copy(self, false); }

static int read_copy_from(rotor_log_t *self) { return bind_copy(self, true); }

static int read_release(rotor_log_t *self) {
    rotor_log_reader_t *reader = self->reader;
    const rotor_json_value_t *name;
    int ret = rotor_log_get_string(reader, ROTOR_FIELD_NAME, &name);

    if (ret != ROTOR_OK || (ret = reserve_commands(self, 1)) != ROTOR_OK) {
        return ret;
    }
    int32_t entry = rotor_log_names_find(&reader->names, name->text, name->length);
    if (entry < 0) {
        self->ignored_releases++;
        return ROTOR_OK;
    }
    rebind(self, entry, reader->names.entries[entry].tensor);
    return ROTOR_OK;
}

static int read_pin(rotor_log_t *self) {
    rotor_log_reader_t *reader = self->reader;
    const rotor_json_value_t *name;
    int32_t entry;
    int ret = rotor_log_get_string(reader, ROTOR_FIELD_NAME, &name);

    if (ret != ROTOR_OK || (ret = reserve_commands(self, 1)) != ROTOR_OK ||
        (ret = get_entry(reader, name, &entry)) != ROTOR_OK) {
        return ret;
    }
    log_append(self, ROTOR_PIN, reader->names.entries[entry].tensor);
    return ROTOR_OK;
}

static bool is_text(const rotor_json_value_t *value, const char *text) {
    size_t length = strlen(text);
    return (size_t)value->length == length && memcmp(value->text, text, length) == 0;
}

static void forget(rotor_log_t *self) {
    rotor_graph_free(&self->graph);
    rotor_log_names_free(&self->reader->names);
    self->command_count = 0;
    self->backward_command = -1;
    self->reader->is_backward_noted = false;
    self->ignored_releases = 0;
    self->reader->total_ns = 0;
    self->reader->total_bytes = 0;
}

static int read_annotate(rotor_log_t *self) {
    const rotor_json_value_t *annotation;
    int ret = rotor_log_get_string(self->reader, ROTOR_FIELD_ANNOTATION, &annotation);
    if (ret != ROTOR_OK) {
        return ret;
    }
    if (is_text(annotation, "START")) {
        self->start_count++;
        if (self->reader->cut_at_start) {
            forget(self);
        }
    } else if (is_text(annotation, "BACKWARD") && !self->reader->is_backward_noted) {
        self->reader->is_backward_noted = true;
        self->backward_command = self->command_count;
    }
    return ROTOR_OK;
}

/* The most frequent first. */
static const struct {
    const char *name;
    int32_t length;
    int (*read)(rotor_log_t *self);
} instructions[] = {
    {"CALL", 4, read_call},         {"MEMORY", 6, read_memory},
    {"ALIAS", 5, read_alias},       {"RELEASE", 7, read_release},
    {"COPY", 4, read_copy},         {"CONSTANT", 8, read_constant},
    {"MUTATE", 6, read_mutate},     {"COPY_FROM", 9, read_copy_from},
    {"ANNOTATE", 8, read_annotate}, {"PIN", 3, read_pin},
};

int rotor_log_read_instruction(rotor_log_t *self) {
    enum { ALL = sizeof(instructions) / sizeof(instructions[0]) };
    rotor_log_reader_t *reader = self->reader;
    const rotor_json_value_t *value;
    int kind = 0;

    reader->instruction = "every line";
    int ret = rotor_log_get_string(reader, ROTOR_FIELD_INSTRUCTION, &value);
    if (ret != ROTOR_OK) {
        return ret;
    }
    while (kind < ALL &&
           (value->length != instructions[kind].length ||
            memcmp(value->text, instructions[kind].name, (size_t)value->length) != 0)) {
        kind++;
    }
    if (kind == ALL) {
        return rotor_log_fail_about(reader, "the instruction ", value->text, value->length,
                                    " is unknown; expected CONSTANT, MEMORY, ALIAS, CALL, MUTATE, "
                                    "COPY, COPY_FROM, RELEASE, PIN or ANNOTATE");
    }
    reader->instruction = instructions[kind].name;
    if (reader->pending != ROTOR_PENDING_NONE && instructions[kind].read != read_memory &&
        instructions[kind].read != read_alias) {
        (void)rotor_log_fail(reader, "found ", reader->instruction, ", ");
        rotor_log_describe_pending(reader);
        return ROTOR_ERR_FORMAT;
    }
    return instructions[kind].read(self);
}
