#include "graph.h"

#include <string.h>

#include "vector.h"

void rotor_graph_free(rotor_graph_t *self) {
    rotor_free(self->operations);
    rotor_free(self->tensors);
    rotor_free(self->storages);
    rotor_free(self->inputs);
    rotor_free(self->names);
    memset(self, 0, sizeof(*self));
}

static int graph_check(const rotor_graph_t *self, const int32_t *inputs, int64_t input_count,
                       const rotor_output_t *outputs, int64_t output_count) {
    for (int64_t k = 0; k < input_count; k++) {
        if (inputs[k] < 0 || inputs[k] >= self->tensor_count) {
            return ROTOR_ERR_BAD_OPERATION;
        }
    }
    for (int64_t k = 0; k < output_count; k++) {
        if (outputs[k].alias < -1 || outputs[k].alias >= input_count) {
            return ROTOR_ERR_BAD_OPERATION;
        }
    }
    return ROTOR_OK;
}

static int32_t add_name(rotor_graph_t *self, const char *name, int64_t length) {
    int32_t at = (int32_t)self->names_length;
    if (length > 0) {
        memcpy(self->names + at, name, (size_t)length);
    }
    self->names[at + length] = '\0';
    self->names_length += length + 1;
    return at;
}

int rotor_graph_append(rotor_graph_t *self, const char *name, int64_t name_length,
                       int64_t cost_ns, const int32_t *inputs, int64_t input_count,
                       const rotor_output_t *outputs, int64_t output_count) {
    int64_t characters = name_length + 1;
    int ret = graph_check(self, inputs, input_count, outputs, output_count);
    if (ret != ROTOR_OK) {
        return ret;
    }
    for (int64_t k = 0; k < output_count; k++) {
        characters += outputs[k].name_length + 1;
    }
    if ((ret = ROTOR_RESERVE(self->operations, self->operation_count, self->operation_capacity,
                             1)) != ROTOR_OK ||
        (ret = ROTOR_RESERVE(self->tensors, self->tensor_count, self->tensor_capacity,
                             output_count)) != ROTOR_OK ||
        (ret = ROTOR_RESERVE(self->storages, self->storage_count, self->storage_capacity,
                             output_count)) != ROTOR_OK ||
        (ret = ROTOR_RESERVE(self->inputs, self->input_count, self->input_capacity,
                             input_count)) != ROTOR_OK ||
        (ret = ROTOR_RESERVE(self->names, self->names_length, self->names_capacity,
                             characters)) != ROTOR_OK) {
        return ret;
    }

    rotor_operation_t *operation = &self->operations[self->operation_count];
    *operation = (rotor_operation_t){
        .cost_ns = cost_ns,
        .first_input = (int32_t)self->input_count,
        .input_count = (int32_t)input_count,
        .first_output = (int32_t)self->tensor_count,
        .output_count = (int32_t)output_count,
        .name = add_name(self, name, name_length),
    };
    for (int64_t k = 0; k < input_count; k++) {
        self->inputs[self->input_count++] = inputs[k];
    }
    for (int64_t k = 0; k < output_count; k++) {
        rotor_tensor_t *tensor = &self->tensors[self->tensor_count];
        bool is_alias = outputs[k].alias >= 0;
        int32_t storage = is_alias ? self->tensors[inputs[outputs[k].alias]].storage
                                   : (int32_t)self->storage_count;
        *tensor = (rotor_tensor_t){
            .storage = storage,
            .operation = (int32_t)self->operation_count,
            .name = add_name(self, outputs[k].name, outputs[k].name_length),
            .is_alias = is_alias,
        };
        if (!is_alias) {
            self->storages[self->storage_count++] = (rotor_storage_t){
                .bytes = outputs[k].bytes, .root = (int32_t)self->tensor_count};
            operation->bytes += outputs[k].bytes;
        }
        self->tensor_count++;
    }
    self->operation_count++;
    return ROTOR_OK;
}

int64_t rotor_graph_footprint(const rotor_graph_t *self) {
    return self->operation_capacity * (int64_t)sizeof(*self->operations) +
           self->tensor_capacity * (int64_t)sizeof(*self->tensors) +
           self->storage_capacity * (int64_t)sizeof(*self->storages) +
           self->input_capacity * (int64_t)sizeof(*self->inputs) + self->names_capacity;
}
