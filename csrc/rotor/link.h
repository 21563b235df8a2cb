/*
 * The link to a second tier of memory, and the clocks of a program that uses it.
 *
 * Transfers are served in the order in which they are asked for: one queue, or one for each direction
 * where the link is duplex. A transfer takes the latency and its bytes at the link's rate, in whole
 * nanoseconds, rounded up. Computing goes on meanwhile and waits only for what it needs:
 *   - a run begins when the computing before it and the fetches of its inputs are done;
 *   - a write is asked for when the run ends that makes the storage; its finish waits for it;
 *   - a fetch is asked for when computing reaches it, and begins after the storage was written;
 *   - a run of ROTOR_READS is a fetch, of what was written before the program began;
 *   - a run of ROTOR_WRITES waits for the write of the one before it, and asks for its own.
 */
#ifndef ROTOR_LINK_H
#define ROTOR_LINK_H

#include "dataflow.h"

/* Clocks never pass this time; one that reaches it has overflown. */
#define ROTOR_LINK_ENDLESS (INT64_C(1) << 61)

typedef struct {
    /* input */
    double write_bytes_per_s; /* to the tier */
    double read_bytes_per_s;  /* from it */
    int64_t latency_ns;       /* of each transfer */
    bool duplex;              /* writes and reads do not wait for each other */
    int64_t host_bytes;       /* what the tier holds at most; INT64_MAX for any */
    int64_t least_bytes;      /* the smallest storage that may move */
    int64_t padding_bytes;    /* what a fetch allocates beside the storage */
} rotor_link_t;

/* ROTOR_ERR_NEGATIVE_SIZE, ROTOR_ERR_NEGATIVE_TIME, ROTOR_ERR_TOO_LARGE for a field out of range: rates
 * are positive and finite. */
int rotor_link_check(const rotor_link_t *self);
/* The same of a link to plan a graph with, or NULL; ROTOR_ERR_BAD_OPERATION where that is not plain. */
int rotor_link_check_graph(const rotor_link_t *self, const rotor_dataflow_t *graph);

/* True if a storage may move: neither pinned, nor fixed, nor empty, nor too small, nor made by an
 * operation of the loss, which the caller runs. */
bool rotor_link_moves(const rotor_link_t *self, const rotor_dataflow_t *graph, int32_t storage);

int64_t rotor_link_write_ns(const rotor_link_t *self, int64_t bytes);
int64_t rotor_link_read_ns(const rotor_link_t *self, int64_t bytes);
/* The same of all storages; -1 where one does not move. One at home is there already. */
void rotor_link_times(const rotor_link_t *self, const rotor_dataflow_t *graph, int64_t *write_ns,
                      int64_t *read_ns);

/* Sums stay at ROTOR_LINK_ENDLESS instead of passing it. */
static inline int64_t rotor_link_later(int64_t time_ns, int64_t ns) {
    return rotor_min(time_ns + ns, ROTOR_LINK_ENDLESS);
}

typedef struct {
    /* state; times in ns since the program began */
    int64_t now;        /* of computing */
    int64_t write_free; /* when the queue of writes is empty */
    int64_t read_free;  /* the same as write_free where the link is not duplex */
    int64_t put_end;    /* when the write is done that a run asked for last */
    int64_t link_ns;    /* of all transfers */
} rotor_clocks_t;

/* The end of a write that is asked for now, of a fetch of what was written at `written`; both take so long. */
int64_t rotor_clocks_write(rotor_clocks_t *self, const rotor_link_t *link, int64_t ns);
int64_t rotor_clocks_fetch(rotor_clocks_t *self, const rotor_link_t *link, int64_t ns,
                           int64_t written);
/* A run of ROTOR_WRITES, which takes so long; 0 for one that only waits. */
void rotor_clocks_put(rotor_clocks_t *self, const rotor_link_t *link, int64_t ns);

#endif
