#include "planner_greedy_tier.h"

#include <string.h>

static int tier_arrays(rotor_greedy_tier_t *self, int64_t m, bool is_new) {
    return ROTOR_ARRAYS(is_new,
        ROTOR_ARRAY(self->write_ns, m), ROTOR_ARRAY(self->read_ns, m),
        ROTOR_ARRAY(self->made_ns, m), ROTOR_ARRAY(self->remake_ns, m),
        ROTOR_ARRAY(self->is_written, m), ROTOR_ARRAY(self->is_away, m),
        ROTOR_ARRAY(self->is_padded, m));
}

void rotor_greedy_tier_free(rotor_greedy_tier_t *self) {
    const rotor_link_t *link = self->link;
    (void)tier_arrays(self, 0, false);
    *self = (rotor_greedy_tier_t){.link = link};
}

int rotor_greedy_tier_prepare(rotor_greedy_tier_t *self, const rotor_dataflow_t *graph) {
    if (self->link == NULL) {
        return ROTOR_OK;
    }
    if (tier_arrays(self, graph->storage_count, true) != ROTOR_OK) {
        return ROTOR_ERR_NO_MEMORY;
    }
    rotor_link_times(self->link, graph, self->write_ns, self->read_ns);
    return ROTOR_OK;
}

void rotor_greedy_tier_begin(rotor_greedy_tier_t *self, const rotor_dataflow_t *graph) {
    int32_t storage_count = graph->storage_count;
    self->clock_ns = 0;
    self->writing_ns = 0;
    self->reading_ns = 0;
    if (self->link != NULL) {
        memset(self->is_away, 0, (size_t)storage_count);
        memset(self->is_padded, 0, (size_t)storage_count);
        for (int32_t s = 0; s < storage_count; s++) {
            self->is_written[s] = rotor_dataflow_is_home(graph, s);
        }
    }
}

int64_t rotor_greedy_tier_transfers_ns(const rotor_greedy_tier_t *self, int32_t s) {
    return self->read_ns[s] + (self->is_written[s] ? 0 : self->write_ns[s]);
}

static int64_t write_end_ns(const rotor_greedy_tier_t *self, int32_t s) {
    return rotor_link_later(rotor_max(self->writing_ns, self->made_ns[s]), self->write_ns[s]);
}

int64_t rotor_greedy_tier_wait_ns(const rotor_greedy_tier_t *self, int32_t s) {
    return self->is_written[s] ? 0 : rotor_max(0, write_end_ns(self, s) - self->clock_ns);
}

void rotor_greedy_tier_write(rotor_greedy_tier_t *self, int32_t s) {
    self->writing_ns = write_end_ns(self, s);
    self->clock_ns = rotor_max(self->clock_ns, self->writing_ns);
    if (!self->link->duplex) {
        self->reading_ns = self->writing_ns;
    }
    self->is_written[s] = 1;
}

void rotor_greedy_tier_fetch(rotor_greedy_tier_t *self, int32_t s) {
    int64_t begin = rotor_max(self->reading_ns, self->clock_ns - self->read_ns[s]);
    self->reading_ns = rotor_link_later(begin, self->read_ns[s]);
    self->clock_ns = rotor_max(self->clock_ns, self->reading_ns);
    if (!self->link->duplex) {
        self->writing_ns = self->reading_ns;
    }
}
