#include "replay_tensors.h"

#include "vector.h"

/* Trace and statistics. */

int rotor_replay_note(rotor_replay_t *self, enum rotor_event_kind kind, int32_t index,
                      int64_t bytes) {
    int ret;
    if (!self->options.trace) {
        return ROTOR_OK;
    }
    if (self->event_count >= self->options.max_events) {
        return ROTOR_ERR_TABLE_TOO_LARGE;
    }
    ret = ROTOR_RESERVE(self->events, self->event_count, self->event_capacity, 1);
    if (ret == ROTOR_OK) {
        self->events[self->event_count++] = (rotor_event_t){
            .clock = self->clock,
            .bytes = bytes,
            .memory = self->memory,
            .kind = kind,
            .index = index,
        };
    }
    return ret;
}

static int note_storage(rotor_replay_t *self, enum rotor_event_kind kind, int32_t storage) {
    return rotor_replay_note(self, kind, storage, self->eviction.candidates[storage].bytes);
}

void rotor_replay_count_coming(rotor_replay_t *self, int32_t storage) {
    if (self->options.stats) {
        rotor_storage_stats_t *stats = &self->storage_stats[storage];
        stats->materialized++;
        stats->first_clock = stats->first_clock < 0 ? self->clock : stats->first_clock;
        stats->last_clock = self->clock;
    }
}

static void count_going(rotor_replay_t *self, int32_t storage) {
    if (self->options.stats) {
        rotor_storage_stats_t *stats = &self->storage_stats[storage];
        stats->evicted++;
        stats->resident_ns += self->clock - stats->last_clock;
        stats->last_clock = self->clock;
    }
}

/* Tensors coming and going. */

void rotor_replay_count_evicted(rotor_replay_t *self, int32_t tensor, bool is_evicted) {
    const rotor_graph_t *graph = rotor_replay_graph(self);
    const rotor_operation_t *operation = &graph->operations[graph->tensors[tensor].operation];
    const int32_t *inputs = graph->inputs + operation->first_input;
    uint8_t *flags = &self->tensors[tensor].flags;

    if (self->options.runtime != ROTOR_V1 ||
        ((*flags & ROTOR_TENSOR_COUNTED) != 0) == is_evicted) {
        return;
    }
    *flags ^= ROTOR_TENSOR_COUNTED;
    uint32_t mark = rotor_eviction_mark(&self->eviction);
    self->eviction.marks[rotor_replay_storage(self, tensor)] = mark;
    for (int32_t k = 0; k < operation->input_count; k++) {
        int32_t storage = rotor_replay_storage(self, inputs[k]);
        if (self->eviction.marks[storage] != mark) {
            self->eviction.marks[storage] = mark;
            self->storages[storage].evicted_dependents += is_evicted ? 1 : -1;
        }
    }
}

int rotor_replay_evict(rotor_replay_t *self, int32_t storage) {
    int ret = rotor_eviction_evict(&self->eviction, storage);
    if (ret != ROTOR_OK) {
        return ret;
    }
    self->memory -= self->eviction.candidates[storage].bytes;
    self->evictions++;
    count_going(self, storage);
    for (int32_t t = rotor_replay_graph(self)->storages[storage].root; t >= 0;
         t = self->tensors[t].next) {
        self->tensors[t].flags &= (uint8_t)~ROTOR_TENSOR_DEFINED;
        rotor_replay_count_evicted(self, t, true);
    }
    return note_storage(self, ROTOR_EVENT_EVICT, storage);
}

int rotor_replay_lock(rotor_replay_t *self, int32_t tensor) {
    int32_t storage = rotor_replay_storage(self, tensor);
    rotor_eviction_lock(&self->eviction, storage);
    return self->eviction.candidates[storage].locks == 1
               ? note_storage(self, ROTOR_EVENT_LOCK, storage)
               : ROTOR_OK;
}

int rotor_replay_pin(rotor_replay_t *self, int32_t storage) {
    if (rotor_eviction_is(&self->eviction, storage, ROTOR_PINNED)) {
        return ROTOR_OK;
    }
    rotor_eviction_pin(&self->eviction, storage);
    return note_storage(self, ROTOR_EVENT_PIN, storage);
}

int rotor_replay_try_to_banish(rotor_replay_t *self, int32_t storage) {
    rotor_eviction_t *eviction = &self->eviction;
    int ret;

    if (rotor_eviction_is(eviction, storage, ROTOR_DETACHED) ||
        self->storages[storage].references > 0 || self->storages[storage].evicted_dependents > 0) {
        return ROTOR_OK;
    }
    if (rotor_eviction_is(eviction, storage, ROTOR_MATERIAL) &&
        (ret = rotor_replay_evict(self, storage)) != ROTOR_OK) {
        return ret;
    }
    for (int32_t t = rotor_replay_graph(self)->storages[storage].root; t >= 0;
         t = self->tensors[t].next) {
        rotor_replay_count_evicted(self, t, false);
    }
    rotor_eviction_detach(eviction, storage);
    rotor_neighbours_t children = eviction->candidates[storage].neighbours[ROTOR_CHILDREN];
    for (int32_t k = children.start; k < children.start + children.count; k++) {
        int32_t child = eviction->neighbours[k];
        if (child != storage && !rotor_eviction_is(eviction, child, ROTOR_DETACHED) &&
            (ret = rotor_replay_pin(self, child)) != ROTOR_OK) {
            return ret;
        }
    }
    return note_storage(self, ROTOR_EVENT_BANISH, storage);
}

int rotor_replay_unlock(rotor_replay_t *self, int32_t tensor) {
    int32_t storage = rotor_replay_storage(self, tensor);
    int ret = ROTOR_OK;

    if (self->eviction.candidates[storage].locks > 0) {
        ret = rotor_eviction_unlock(&self->eviction, storage);
        if (ret == ROTOR_OK && self->eviction.candidates[storage].locks == 0) {
            ret = note_storage(self, ROTOR_EVENT_UNLOCK, storage);
        }
    }
    return ret == ROTOR_OK && self->options.runtime == ROTOR_V1
               ? rotor_replay_try_to_banish(self, storage)
               : ret;
}

/* Making operations. */

static int replay_reserve(rotor_replay_t *self, const rotor_operation_t *operation) {
    int64_t tensors = operation->output_count;
    int ret = ROTOR_RESERVE(self->tensors, self->tensor_count, self->tensor_capacity, tensors);

    if (ret == ROTOR_OK) {
        ret = ROTOR_RESERVE(self->storages, self->eviction.count, self->storage_capacity, tensors);
    }
    if (ret == ROTOR_OK && self->options.stats) {
        ret = ROTOR_RESERVE(self->storage_stats, self->eviction.count, self->stats_capacity[0],
                            tensors);
    }
    if (ret == ROTOR_OK && self->options.stats) {
        ret = ROTOR_RESERVE(self->operation_stats, self->operation_count, self->stats_capacity[1],
                            1);
    }
    return ret;
}

static int make_tensor(rotor_replay_t *self, const rotor_operation_t *operation, int32_t tensor) {
    const rotor_graph_t *graph = rotor_replay_graph(self);
    int32_t storage = graph->tensors[tensor].storage;
    int32_t added;
    int ret = ROTOR_OK;

    self->tensors[tensor] = (rotor_replay_tensor_t){.next = -1};
    self->tensor_count++;
    if (!graph->tensors[tensor].is_alias) {
        ret = rotor_eviction_add(&self->eviction, graph->storages[storage].bytes, &added);
        if (ret != ROTOR_OK) {
            return ret;
        }
        self->storages[storage] = (rotor_replay_storage_t){.last_tensor = tensor};
        if (self->options.stats) {
            self->storage_stats[storage] = (rotor_storage_stats_t){.first_clock = -1};
        }
    } else {
        self->tensors[self->storages[storage].last_tensor].next = tensor;
    }
    int32_t before = self->storages[storage].last_tensor;
    self->storages[storage].last_tensor = tensor;
    self->storages[storage].references++;
    /* The cost of an operation counts once for a storage. */
    if (before == tensor || before < operation->first_output) {
        ret = rotor_eviction_compute(&self->eviction, storage, operation->cost_ns);
    }
    for (int32_t k = 0; k < operation->input_count && ret == ROTOR_OK; k++) {
        ret = rotor_eviction_depend(
            &self->eviction, storage,
            rotor_replay_storage(self, graph->inputs[operation->first_input + k]));
    }
    if (ret == ROTOR_OK) {
        rotor_replay_count_evicted(self, tensor, true);
    }
    return ret;
}

int rotor_replay_make(rotor_replay_t *self, int32_t index) {
    const rotor_operation_t *operation = &rotor_replay_graph(self)->operations[index];
    int ret = replay_reserve(self, operation);

    for (int32_t k = 0; k < operation->output_count && ret == ROTOR_OK; k++) {
        ret = make_tensor(self, operation, operation->first_output + k);
    }
    if (ret == ROTOR_OK) {
        if (self->options.stats) {
            self->operation_stats[self->operation_count] = (rotor_operation_stats_t){0};
        }
        self->operation_count++;
    }
    return ret;
}
