#include "replay.h"

#include <string.h>

#include "replay_tensors.h"
#include "vector.h"

/* Costs that are evaluated between two questions to the callback; an execution counts as 16. */
#define WORK_PER_QUESTION 65536

/* An execution that waits for its inputs. */
struct rotor_replay_frame {
    int32_t operation;
    int32_t tensor;        /* wanted; -1 for an operation without outputs */
    int32_t first_missing; /* in `missing`, where this frame's part ends the array */
    int32_t next_missing;
    bool is_model;
};

int rotor_replay_init(rotor_replay_t *self, const rotor_log_t *log,
                      const rotor_replay_options_t *options) {
    memset(self, 0, sizeof(*self));
    self->log = log;
    self->options = *options;
    self->clock = 1;
    self->failed_operation = -1;
    /* Banishing goes along the edges from pinned storages too. */
    self->options.eviction.keep_edges |= options->runtime == ROTOR_V1;
    rotor_eviction_init(&self->eviction, &self->options.eviction);
    if (options->budget_bytes <= 0) {
        return ROTOR_ERR_BAD_BUDGET;
    }
    switch (options->eviction.heuristic->numerator) {
    case ROTOR_CLASSES:
    case ROTOR_REGIONS:
    case ROTOR_ANCESTORS:
        return options->runtime == ROTOR_V1 ? ROTOR_ERR_BAD_HEURISTIC : ROTOR_OK;
    default:
        return ROTOR_OK;
    }
}

void rotor_replay_free(rotor_replay_t *self) {
    rotor_eviction_free(&self->eviction);
    rotor_free(self->events);
    rotor_free(self->storage_stats);
    rotor_free(self->operation_stats);
    rotor_free(self->tensors);
    rotor_free(self->storages);
    rotor_free(self->frames);
    rotor_free(self->missing);
    rotor_free(self->fresh);
    memset(self, 0, sizeof(*self));
}

/* Executing. */

static int ask(rotor_replay_t *self) {
    int64_t work = self->eviction.evaluations + 16 * self->executions;
    if (work < self->asked + WORK_PER_QUESTION) {
        return ROTOR_OK;
    }
    self->asked = work;
    return rotor_ask(self->callback, self->next_command, self->log->command_count);
}

static void replay_fail(rotor_replay_t *self, enum rotor_outcome outcome,
                        const rotor_replay_frame_t *frame) {
    self->outcome = outcome;
    self->failed_operation = frame->operation;
    self->failed_bytes = rotor_replay_graph(self)->operations[frame->operation].bytes;
}

/* Evicts until the outputs of an operation fit. */
static int replay_make_room(rotor_replay_t *self, const rotor_replay_frame_t *frame,
                            const rotor_operation_t *operation) {
    int64_t budget = self->options.budget_bytes;
    int ret = ROTOR_OK;

    if (self->memory <= budget - operation->bytes) {
        return ROTOR_OK;
    }
    ret = rotor_replay_note(self, ROTOR_EVENT_PRESSURE, frame->tensor,
                            self->memory + operation->bytes - budget);
    while (ret == ROTOR_OK && self->memory > budget - operation->bytes) {
        int32_t storage;
        ret = rotor_eviction_choose(&self->eviction, self->clock, &storage);
        if (ret != ROTOR_OK) {
            break;
        }
        if (storage < 0) {
            replay_fail(self, ROTOR_RUN_OOM, frame);
            break;
        }
        ret = rotor_replay_evict(self, storage);
        if (ret == ROTOR_OK) {
            ret = ask(self);
        }
    }
    return ret;
}

/* Marks the outputs as in memory: storages that came join the pool, siblings first. */
static int define_outputs(rotor_replay_t *self, const rotor_replay_frame_t *frame,
                          const rotor_operation_t *operation) {
    const rotor_graph_t *graph = rotor_replay_graph(self);
    int64_t repeated = 0;
    int64_t count = 0;
    int ret = ROTOR_OK;

    if ((ret = ROTOR_RESERVE(self->fresh, 0, self->fresh_capacity, operation->output_count)) !=
        ROTOR_OK) {
        return ret;
    }
    for (int32_t k = 0; k <= operation->output_count; k++) {
        int32_t tensor = operation->first_output + k;
        if (k == operation->output_count) {
            tensor = frame->tensor;
        } else if (tensor == frame->tensor) {
            continue;
        }
        if (tensor < 0) {
            continue;
        }
        int32_t storage = graph->tensors[tensor].storage;
        if (rotor_replay_has(self, tensor)) {
            repeated += graph->tensors[tensor].is_alias ? 0 : graph->storages[storage].bytes;
            continue;
        }
        self->tensors[tensor].flags |= ROTOR_TENSOR_DEFINED;
        rotor_replay_count_evicted(self, tensor, false);
        if (!rotor_eviction_is(&self->eviction, storage, ROTOR_MATERIAL) &&
            !graph->tensors[tensor].is_alias) {
            self->fresh[count++] = storage;
            rotor_replay_count_coming(self, storage);
        }
    }
    self->memory -= repeated;
    return rotor_eviction_materialize(&self->eviction, self->fresh, count);
}

static void count_execution(rotor_replay_t *self, const rotor_replay_frame_t *frame,
                            const rotor_operation_t *operation) {
    self->executions++;
    if (frame->is_model) {
        self->model_executions++;
        self->model_compute_ns += operation->cost_ns;
        if (operation->input_count == 0 && operation->cost_ns == 0) {
            self->const_bytes += operation->bytes;
        }
    } else {
        self->remats++;
        self->remat_compute_ns += operation->cost_ns;
    }
    if (self->options.stats) {
        self->operation_stats[frame->operation].executions++;
        self->operation_stats[frame->operation].executions_by_model += frame->is_model;
    }
}

static void count_bottleneck(rotor_replay_t *self, const rotor_operation_t *operation) {
    const rotor_graph_t *graph = rotor_replay_graph(self);
    int64_t around = operation->bytes;

    for (int32_t k = 0; k < operation->input_count; k++) {
        const rotor_tensor_t *input = &graph->tensors[graph->inputs[operation->first_input + k]];
        around += input->is_alias ? 0 : graph->storages[input->storage].bytes;
    }
    self->bottleneck_bytes = rotor_max(self->bottleneck_bytes, around);
}

/* The inputs are there and locked. */
static int execute(rotor_replay_t *self, const rotor_replay_frame_t *frame) {
    const rotor_operation_t *operation = &rotor_replay_graph(self)->operations[frame->operation];
    const int32_t *inputs = rotor_replay_graph(self)->inputs + operation->first_input;
    int ret;

    if (self->eviction.locked_bytes > self->max_locked_bytes) {
        self->max_locked_bytes = self->eviction.locked_bytes;
        self->max_locked_execution = self->executions;
    }
    if (self->executions == self->options.stop_at_execution) {
        replay_fail(self, ROTOR_RUN_STOPPED, frame);
        return ROTOR_OK;
    }
    if ((ret = replay_make_room(self, frame, operation)) != ROTOR_OK ||
        self->outcome != ROTOR_RUN_OK) {
        return ret;
    }
    if (__builtin_add_overflow(self->clock, operation->cost_ns, &self->clock) ||
        __builtin_add_overflow(self->memory, operation->bytes, &self->memory)) {
        return ROTOR_ERR_OVERFLOW;
    }
    self->max_memory = rotor_max(self->max_memory, self->memory);
    count_execution(self, frame, operation);
    if ((ret = define_outputs(self, frame, operation)) != ROTOR_OK ||
        (ret = rotor_replay_note(self, ROTOR_EVENT_COMPUTE, frame->tensor, operation->bytes)) !=
            ROTOR_OK) {
        return ret;
    }
    for (int32_t k = 0; k < operation->input_count; k++) {
        if ((ret = rotor_replay_unlock(self, inputs[k])) != ROTOR_OK) {
            return ret;
        }
    }
    if ((double)self->remat_compute_ns > self->options.remat_limit_ns) {
        replay_fail(self, ROTOR_RUN_THRASH, frame);
    } else {
        count_bottleneck(self, operation);
    }
    return ROTOR_OK;
}

/* Begins an execution: touches all inputs, locks the ones in memory, notes the others. */
static int replay_push(rotor_replay_t *self, int32_t index, int32_t tensor, bool is_model) {
    const rotor_operation_t *operation = &rotor_replay_graph(self)->operations[index];
    const int32_t *inputs = rotor_replay_graph(self)->inputs + operation->first_input;
    int ret = ROTOR_RESERVE(self->frames, self->frame_count, self->frame_capacity, 1);

    if (ret == ROTOR_OK) {
        ret = ROTOR_RESERVE(self->missing, self->missing_count, self->missing_capacity,
                            operation->input_count);
    }
    if (ret == ROTOR_OK) {
        ret = rotor_replay_note(self, ROTOR_EVENT_PENDING, tensor, operation->bytes);
    }
    if (ret != ROTOR_OK) {
        return ret;
    }
    self->frames[self->frame_count++] = (rotor_replay_frame_t){
        .operation = index,
        .tensor = tensor,
        .first_missing = (int32_t)self->missing_count,
        .next_missing = (int32_t)self->missing_count,
        .is_model = is_model,
    };
    for (int32_t k = 0; k < operation->input_count; k++) {
        int32_t storage = rotor_replay_storage(self, inputs[k]);
        if (rotor_eviction_is(&self->eviction, storage, ROTOR_DETACHED)) {
            return ROTOR_ERR_BAD_STATE;
        }
        if (self->options.runtime != ROTOR_V1 || self->storages[storage].references > 0) {
            rotor_eviction_touch(&self->eviction, storage, self->clock);
        }
        if (!rotor_replay_has(self, inputs[k])) {
            self->missing[self->missing_count++] = inputs[k];
        }
    }
    for (int32_t k = 0; k < operation->input_count; k++) {
        if (rotor_replay_has(self, inputs[k]) &&
            (ret = rotor_replay_lock(self, inputs[k])) != ROTOR_OK) {
            return ret;
        }
    }
    return ROTOR_OK;
}

/* Executes an operation, and before it all that its inputs need. */
static int materialize(rotor_replay_t *self, int32_t index, int32_t tensor, bool is_model) {
    int ret = replay_push(self, index, tensor, is_model);

    while (ret == ROTOR_OK && self->frame_count > 0 && self->outcome == ROTOR_RUN_OK) {
        rotor_replay_frame_t *frame = &self->frames[self->frame_count - 1];
        if (frame->next_missing < self->missing_count) {
            int32_t wanted = self->missing[frame->next_missing];
            if (rotor_replay_has(self, wanted)) {
                frame->next_missing++;
                ret = rotor_replay_lock(self, wanted);
            } else {
                ret = replay_push(self, rotor_replay_graph(self)->tensors[wanted].operation, wanted,
                                  false);
            }
            continue;
        }
        ret = execute(self, frame);
        if (ret == ROTOR_OK && self->outcome != ROTOR_RUN_STOPPED &&
            self->outcome != ROTOR_RUN_OOM) {
            self->missing_count = frame->first_missing;
            self->frame_count--;
            ret = ask(self);
        }
    }
    return ret;
}

/* Commands. */

static int compute(rotor_replay_t *self, int32_t index) {
    int ret = rotor_replay_make(self, index);
    if (ret != ROTOR_OK) {
        return ret;
    }
    const rotor_operation_t *operation = &rotor_replay_graph(self)->operations[index];
    ret =
        materialize(self, index, operation->output_count > 0 ? operation->first_output : -1, true);
    if (ret == ROTOR_OK && self->outcome == ROTOR_RUN_OK) {
        for (int32_t k = 0; k < operation->output_count; k++) {
            rotor_eviction_touch(&self->eviction,
                                 rotor_replay_storage(self, operation->first_output + k),
                                 self->clock);
        }
    }
    return ret;
}

static int pin_tensor(rotor_replay_t *self, int32_t tensor) {
    int ret = ROTOR_OK;
    if (rotor_eviction_is(&self->eviction, rotor_replay_storage(self, tensor), ROTOR_DETACHED)) {
        return ROTOR_ERR_BAD_STATE;
    }
    if (!rotor_replay_has(self, tensor)) {
        ret =
            materialize(self, rotor_replay_graph(self)->tensors[tensor].operation, tensor, false);
    }
    return ret == ROTOR_OK && self->outcome == ROTOR_RUN_OK
               ? rotor_replay_pin(self, rotor_replay_storage(self, tensor))
               : ret;
}

static int replay_release(rotor_replay_t *self, int32_t tensor) {
    int32_t storage = rotor_replay_storage(self, tensor);

    if (self->options.ignores_releases || --self->storages[storage].references != 0) {
        return ROTOR_OK;
    }
    switch (self->options.runtime) {
    case ROTOR_V1:
        return rotor_replay_try_to_banish(self, storage);
    case ROTOR_V2_EAGER:
        return rotor_eviction_is(&self->eviction, storage, ROTOR_MATERIAL) &&
                       !rotor_eviction_is(&self->eviction, storage, ROTOR_PINNED)
                   ? rotor_replay_evict(self, storage)
                   : ROTOR_OK;
    default:
        return ROTOR_OK;
    }
}

int rotor_replay_run(rotor_replay_t *self, const rotor_callback_t *callback) {
    int ret = self->status;

    self->callback = callback;
    while (ret == ROTOR_OK && self->outcome == ROTOR_RUN_OK &&
           self->next_command < self->log->command_count) {
        rotor_command_t command = self->log->commands[self->next_command];
        switch ((enum rotor_command_kind)command.kind) {
        case ROTOR_COMPUTE:
            ret = compute(self, command.index);
            break;
        case ROTOR_GET:
            self->storages[rotor_replay_storage(self, command.index)].references++;
            break;
        case ROTOR_PIN:
            ret = pin_tensor(self, command.index);
            break;
        case ROTOR_RELEASE:
            ret = replay_release(self, command.index);
            break;
        }
        self->next_command += ret == ROTOR_OK && self->outcome == ROTOR_RUN_OK;
    }
    self->status = ret;
    return ret;
}

bool rotor_replay_is_defined(const rotor_replay_t *self, int64_t tensor) {
    return tensor >= 0 && tensor < self->tensor_count && rotor_replay_has(self, (int32_t)tensor);
}

int64_t rotor_replay_locked(const rotor_replay_t *self, int32_t *storages) {
    int64_t count = 0;
    for (int64_t k = 0; k < self->eviction.count; k++) {
        if (rotor_eviction_is(&self->eviction, (int32_t)k, ROTOR_MATERIAL) &&
            (self->eviction.candidates[k].locks > 0 ||
             rotor_eviction_is(&self->eviction, (int32_t)k, ROTOR_PINNED))) {
            storages[count++] = (int32_t)k;
        }
    }
    return count;
}

int64_t rotor_replay_footprint(const rotor_replay_t *self) {
    return rotor_eviction_footprint(&self->eviction) +
           self->tensor_capacity * (int64_t)sizeof(*self->tensors) +
           self->storage_capacity * (int64_t)sizeof(*self->storages) +
           self->frame_capacity * (int64_t)sizeof(*self->frames) +
           self->missing_capacity * (int64_t)sizeof(*self->missing) +
           self->fresh_capacity * (int64_t)sizeof(*self->fresh) +
           self->event_capacity * (int64_t)sizeof(*self->events) +
           self->stats_capacity[0] * (int64_t)sizeof(*self->storage_stats) +
           self->stats_capacity[1] * (int64_t)sizeof(*self->operation_stats);
}
