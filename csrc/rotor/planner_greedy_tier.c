#include "planner_greedy_tier.h"

#include <string.h>

void rotor_greedy_tier_free(rotor_greedy_tier_t *self) {
    const rotor_link_t *link = self->link;
    rotor_free(self->write_ns);
    rotor_free(self->read_ns);
    rotor_free(self->made_ns);
    rotor_free(self->remake_ns);
    rotor_free(self->is_written);
    rotor_free(self->is_away);
    rotor_free(self->is_padded);
    *self = (rotor_greedy_tier_t){.link = link};
}

int rotor_greedy_tier_prepare(rotor_greedy_tier_t *self, const rotor_dataflow_t *graph) {
    int64_t m = graph->storage_count;
    if (self->link == NULL) {
        return ROTOR_OK;
    }
    self->write_ns = rotor_malloc_array(m, sizeof(*self->write_ns));
    self->read_ns = rotor_malloc_array(m, sizeof(*self->read_ns));
    self->made_ns = rotor_malloc_array(m, sizeof(*self->made_ns));
    self->remake_ns = rotor_malloc_array(m, sizeof(*self->remake_ns));
    self->is_written = rotor_malloc_array(m, sizeof(*self->is_written));
    self->is_away = rotor_malloc_array(m, sizeof(*self->is_away));
    self->is_padded = rotor_malloc_array(m, sizeof(*self->is_padded));
    if (self->write_ns == NULL || self->read_ns == NULL || self->made_ns == NULL ||
        self->remake_ns == NULL || self->is_written == NULL || self->is_away == NULL ||
        self->is_padded == NULL) {
        return ROTOR_ERR_NO_MEMORY;
    }
    for (int32_t s = 0; s < m; s++) {
        bool moves = rotor_link_moves(self->link, graph, s);
        self->write_ns[s] = moves ? rotor_link_write_ns(self->link, graph->bytes[s]) : -1;
        self->read_ns[s] = moves ? rotor_link_read_ns(self->link, graph->bytes[s]) : -1;
    }
    return ROTOR_OK;
}

void rotor_greedy_tier_begin(rotor_greedy_tier_t *self, int32_t storage_count) {
    self->clock_ns = 0;
    self->writing_ns = 0;
    self->reading_ns = 0;
    if (self->link != NULL) {
        memset(self->is_written, 0, (size_t)storage_count);
        memset(self->is_away, 0, (size_t)storage_count);
        memset(self->is_padded, 0, (size_t)storage_count);
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
