#include "link.h"

#include <math.h>

#define NS_PER_S 1e9
#define LONGEST (INT64_C(1) << 50) /* of one transfer: 13 days */

static int check_rate(double bytes_per_s) {
    return bytes_per_s > 0.0 && isfinite(bytes_per_s) ? ROTOR_OK : ROTOR_ERR_NEGATIVE_SIZE;
}

static int check_bytes(int64_t bytes, int64_t most) {
    return bytes < 0 ? ROTOR_ERR_NEGATIVE_SIZE : bytes > most ? ROTOR_ERR_TOO_LARGE : ROTOR_OK;
}

int rotor_link_check(const rotor_link_t *self) {
    int ret = check_rate(self->write_bytes_per_s);
    if (ret != ROTOR_OK || (ret = check_rate(self->read_bytes_per_s)) != ROTOR_OK) {
        return ret;
    }
    if (self->latency_ns < 0) {
        return ROTOR_ERR_NEGATIVE_TIME;
    }
    if (self->latency_ns > ROTOR_MAX_VALUE) {
        return ROTOR_ERR_TOO_LARGE;
    }
    if ((ret = check_bytes(self->host_bytes, INT64_MAX)) != ROTOR_OK ||
        (ret = check_bytes(self->least_bytes, ROTOR_MAX_VALUE)) != ROTOR_OK) {
        return ret;
    }
    return check_bytes(self->padding_bytes, ROTOR_MAX_VALUE);
}

int rotor_link_check_graph(const rotor_link_t *self, const rotor_dataflow_t *graph) {
    return self == NULL       ? ROTOR_OK
           : graph->is_plain ? rotor_link_check(self)
                             : ROTOR_ERR_BAD_OPERATION;
}

bool rotor_link_moves(const rotor_link_t *self, const rotor_dataflow_t *graph, int32_t storage) {
    return !graph->pinned[storage] && !graph->fixed[storage] && graph->bytes[storage] > 0 &&
           graph->bytes[storage] >= self->least_bytes &&
           graph->phase[graph->producer[storage]] != ROTOR_PHASE_LOSS;
}

static int64_t transfer_ns(const rotor_link_t *link, int64_t bytes, double bytes_per_s) {
    double ns = ceil((double)bytes * NS_PER_S / bytes_per_s);
    return link->latency_ns + (ns < (double)LONGEST ? (int64_t)ns : LONGEST);
}

int64_t rotor_link_write_ns(const rotor_link_t *self, int64_t bytes) {
    return transfer_ns(self, bytes, self->write_bytes_per_s);
}

int64_t rotor_link_read_ns(const rotor_link_t *self, int64_t bytes) {
    return transfer_ns(self, bytes, self->read_bytes_per_s);
}

void rotor_link_times(const rotor_link_t *self, const rotor_dataflow_t *graph, int64_t *write_ns,
                      int64_t *read_ns) {
    for (int32_t s = 0; s < graph->storage_count; s++) {
        bool moves = rotor_link_moves(self, graph, s);
        write_ns[s] = moves ? rotor_link_write_ns(self, graph->bytes[s]) : -1;
        read_ns[s] = moves ? rotor_link_read_ns(self, graph->bytes[s]) : -1;
        if (rotor_dataflow_is_home(graph, s)) {
            write_ns[s] = 0;
            read_ns[s] = graph->cost_ns[graph->producer[s]];
        }
    }
}

int64_t rotor_clocks_write(rotor_clocks_t *self, const rotor_link_t *link, int64_t ns) {
    self->write_free = rotor_link_later(rotor_max(self->write_free, self->now), ns);
    self->link_ns = rotor_link_later(self->link_ns, ns);
    if (!link->duplex) {
        self->read_free = self->write_free;
    }
    return self->write_free;
}

int64_t rotor_clocks_fetch(rotor_clocks_t *self, const rotor_link_t *link, int64_t ns,
                           int64_t written) {
    self->read_free = rotor_link_later(rotor_max(rotor_max(self->read_free, self->now), written), ns);
    self->link_ns = rotor_link_later(self->link_ns, ns);
    if (!link->duplex) {
        self->write_free = self->read_free;
    }
    return self->read_free;
}

void rotor_clocks_put(rotor_clocks_t *self, const rotor_link_t *link, int64_t ns) {
    self->now = rotor_max(self->now, self->put_end);
    self->put_end = ns == 0 ? self->now : rotor_clocks_write(self, link, ns);
}
