#include "frontier.h"

#include <string.h>

#include "persistent.h"

/* -- storage: chunks that are never moved, freed together */

enum { CHUNK_POINTS = 1 << 15 };

typedef struct frontier_chunk {
    struct frontier_chunk *next;
    int64_t used;
    int64_t capacity;
    rotor_point_t points[];
} frontier_chunk_t;

/* Makes room for `count` points in the newest chunk. */
static int frontier_reserve(rotor_frontier_t *self, int64_t count) {
    frontier_chunk_t *chunk = self->chunks;
    if (chunk != NULL && chunk->capacity - chunk->used >= count) {
        return ROTOR_OK;
    }
    int64_t left = self->max_table_bytes - self->table_bytes - (int64_t)sizeof(*chunk);
    int64_t capacity = rotor_min(CHUNK_POINTS, left / (int64_t)sizeof(rotor_point_t));
    capacity = rotor_max(capacity, count);
    int ret = rotor_malloc_part((int64_t)sizeof(*chunk) + capacity * (int64_t)sizeof(rotor_point_t),
                                1, self->max_table_bytes, &self->table_bytes, &chunk);
    if (ret == ROTOR_OK) {
        *chunk = (frontier_chunk_t){.next = self->chunks, .capacity = capacity};
        self->chunks = chunk;
    }
    return ret;
}

/* Makes a copy of some points the frontier of a state. */
static int frontier_store(rotor_frontier_t *self, const rotor_point_t *from, int64_t count,
                          rotor_points_t *points) {
    int ret = frontier_reserve(self, count);
    *points = (rotor_points_t){.points = NULL, .count = 0};
    if (ret == ROTOR_OK && count > 0) {
        frontier_chunk_t *chunk = self->chunks;
        memcpy(chunk->points + chunk->used, from, (size_t)count * sizeof(*from));
        *points = (rotor_points_t){.points = chunk->points + chunk->used, .count = count};
        chunk->used += count;
    }
    return ret;
}

static const rotor_points_t *at(const rotor_frontier_t *self, int64_t i, int64_t l) {
    return &self->frontiers[rotor_cell(self->chain->n, i, l)];
}

/* -- which memory a state is ever asked for */

/* Slots of the rough table from which the limits come. */
enum { ROUGH_SLOTS = 512 };

/* m of state (0, n) from which on nothing is repeated. */
static int64_t ample(const rotor_chain_t *c) {
    int64_t need = rotor_chain_need_loss(c);
    for (int64_t i = c->n - 1; i >= 0; i--) {
        need = rotor_max(rotor_chain_need_tape(c, i, c->n), need + c->xbar[i]);
    }
    return need;
}

/*
 * limits[(i, l)] becomes the most memory with which the state can be part of an optimal schedule of
 * (0, n), or -1: a split at j is of no use where even a rough schedule of (i, l) repeats less time
 * than stages i .. j-1 take.
 */
static int spread(const rotor_persistent_t *rough, const rotor_callback_t *callback,
                  int64_t *limits) {
    const rotor_chain_t *c = rough->chain;
    int64_t n = c->n;
    double margin = 1.0 + 8.0 * (double)n / (1 << 24);

    for (int64_t i = 0; i < n; i++) {
        int ret = rotor_ask(callback, 0, 1);
        if (ret != ROTOR_OK) {
            return ret;
        }
        for (int64_t l = n; l > i; l--) {
            int64_t cell = rotor_cell(n, i, l);
            int64_t limit = limits[cell];
            int64_t slot = rotor_min(rough->hi[cell], rough->slots);
            int64_t need = rotor_chain_need_tape(c, i, l);
            if (limit < 0) {
                continue;
            }
            if (need <= limit) {
                int64_t *after = &limits[rotor_cell(n, i + 1, l)];
                *after = rotor_max(*after, limit - c->xbar[i]);
            }
            need = 0;
            for (int64_t j = i + 1; j <= l; j++) {
                double base = (double)(c->forward_sum[j] - c->forward_sum[i]);
                while (slot >= rough->lo[cell] &&
                       rotor_persistent_excess(rough, i, l, slot) * margin < base) {
                    slot--;
                }
                need = rotor_max(need, rotor_chain_need_fn(c, i, l, j - 1));
                __int128 first = ((__int128)(slot + 1) * rough->budget + rough->slots - 1) /
                                 rough->slots;
                int64_t most = slot < rotor_min(rough->hi[cell], rough->slots)
                                   ? rotor_min(limit, (int64_t)first - 1)
                                   : limit;
                if (most < need) {
                    continue;
                }
                int64_t *first_part = &limits[rotor_cell(n, j, l)];
                int64_t *second_part = &limits[rotor_cell(n, i, j - 1)];
                *first_part = rotor_max(*first_part, most - c->x[j]);
                *second_part = rotor_max(*second_part, most);
            }
        }
    }
    return ROTOR_OK;
}

/* The rough table is no progress: it asks without counting. */
static bool ask_uncounted(void *context, int64_t done, int64_t total) {
    (void)done;
    (void)total;
    return rotor_ask(context, 0, 1) == ROTOR_OK;
}

static int fill_limits(rotor_frontier_t *self, const rotor_callback_t *callback,
                       int64_t *limits) {
    const rotor_chain_t *c = self->chain;
    rotor_callback_t counted = {.keep_going = NULL, .context = NULL};
    if (callback != NULL) {
        counted = *callback;
    }
    rotor_callback_t uncounted = {.keep_going = ask_uncounted, .context = &counted};
    rotor_persistent_t rough;
    int64_t most = ample(c);
    int64_t limit = self->drops_tapes ? ROTOR_NEVER - 1 : most == 0 ? 0 : -1;
    int ret;

    memset(&rough, 0, sizeof(rough));
    for (int64_t k = 0; k < rotor_cells(c->n); k++) {
        limits[k] = limit;
    }
    if (limit >= 0) {
        return ROTOR_OK;
    }
    limits[rotor_cell(c->n, 0, c->n)] = most;
    ret = rotor_persistent_fill(&rough, c, most + c->x[0], ROUGH_SLOTS, ROTOR_PRECISION_SINGLE,
                                self->max_table_bytes, &uncounted);
    if (ret == ROTOR_OK) {
        ret = spread(&rough, &uncounted, limits);
    }
    rotor_persistent_free(&rough);
    return ret;
}

/* True if state (i, l) may begin with Fe(i). */
static bool may_record(const rotor_frontier_t *self, int64_t i, int64_t l) {
    return !self->drops_tapes || (i == self->chain->n - 1 && l == self->chain->n);
}

static int leaf(rotor_frontier_t *self, int64_t i, rotor_points_t *points) {
    const rotor_chain_t *c = self->chain;
    rotor_point_t point = {
        .bytes = i == c->n ? rotor_chain_need_loss(c) : rotor_chain_need_tape(c, i, i)};
    return frontier_store(self, &point, 1, points);
}

static int interval(rotor_frontier_t *self, rotor_envelope_t *work, int64_t i, int64_t l, int64_t limit,
                    rotor_points_t *points) {
    const rotor_chain_t *c = self->chain;

    rotor_envelope_clear(work);
    if (may_record(self, i, l)) {
        rotor_envelope_add(work, at(self, i + 1, l), c->xbar[i], NULL, 0,
                           rotor_chain_need_tape(c, i, l), limit);
    }
    int64_t need = 0;
    for (int64_t j = i + 1; j <= l; j++) {
        need = rotor_max(need, rotor_chain_need_fn(c, i, l, j - 1));
        rotor_envelope_add(work, at(self, j, l), c->x[j], at(self, i, j - 1),
                           c->forward_sum[j] - c->forward_sum[i], need, limit);
    }
    int ret = rotor_envelope_solve(work);
    return ret == ROTOR_OK ? frontier_store(self, work->points, work->count, points) : ret;
}

static int curve(rotor_frontier_t *self) {
    const rotor_chain_t *c = self->chain;
    const rotor_points_t *root = at(self, 0, c->n);

    self->curve_bytes = rotor_malloc_array(root->count, sizeof(int64_t));
    self->curve_ns = rotor_malloc_array(root->count, sizeof(int64_t));
    if (self->curve_bytes == NULL || self->curve_ns == NULL) {
        return ROTOR_ERR_NO_MEMORY;
    }
    for (int64_t k = 0; k < root->count; k++) {
        self->curve_bytes[k] = root->points[k].bytes + c->x[0];
        self->curve_ns[k] = root->points[k].excess + rotor_chain_ideal_ns(c);
    }
    self->curve_count = root->count;
    return ROTOR_OK;
}

/* Rows computed together, l outside, so that the frontiers (j, l) stay in the cache. */
enum { TILE = 8 };

int rotor_frontier_solve(rotor_frontier_t *self, const rotor_chain_t *chain, bool drops_tapes,
                         int64_t max_table_bytes, const rotor_callback_t *callback) {
    int ret;
    int64_t n = chain->n;
    int64_t cells = rotor_cells(n);
    int64_t done = 0;
    int64_t *limits = NULL;
    rotor_envelope_t work;

    memset(self, 0, sizeof(*self));
    self->chain = chain;
    self->drops_tapes = drops_tapes;
    self->max_table_bytes = max_table_bytes;
    for (int64_t i = 0; drops_tapes && i < n - 1; i++) {
        if (chain->once[i] != 0) {
            return ROTOR_ERR_ONCE;
        }
    }
    ret = rotor_envelope_init(&work, n + 1);
    if (ret != ROTOR_OK) {
        goto out;
    }
    if (chain->forward_sum[n] > (INT64_C(1) << 62) / n) {
        ret = ROTOR_ERR_OVERFLOW;
        goto out;
    }
    ret = rotor_malloc_part(cells, sizeof(*self->frontiers), max_table_bytes, &self->table_bytes,
                            &self->frontiers);
    if (ret != ROTOR_OK) {
        goto out;
    }
    limits = rotor_malloc_array(cells, sizeof(*limits));
    ret = limits == NULL ? ROTOR_ERR_NO_MEMORY : fill_limits(self, callback, limits);
    if (ret != ROTOR_OK) {
        goto out;
    }
    for (int64_t top = n + 1; top > 0; top -= TILE) {
        int64_t bottom = rotor_max(0, top - TILE);
        for (int64_t l = bottom; l <= n; l++) {
            for (int64_t i = rotor_min(l, top - 1); i >= bottom; i--) {
                rotor_points_t *points = &self->frontiers[rotor_cell(n, i, l)];
                int64_t limit = limits[rotor_cell(n, i, l)];
                if (i == l) {
                    ret = leaf(self, i, points);
                } else if (limit < 0) {
                    *points = (rotor_points_t){.points = NULL, .count = 0};
                } else {
                    ret = interval(self, &work, i, l, limit, points);
                }
                done += l - i;
                if (ret == ROTOR_OK) {
                    ret = rotor_ask(callback, done, n * (n + 1) * (n + 2) / 6);
                }
                if (ret != ROTOR_OK) {
                    goto out;
                }
            }
        }
    }
    ret = curve(self);
out:
    rotor_free(limits);
    rotor_envelope_free(&work);
    if (ret != ROTOR_OK) {
        rotor_frontier_free(self);
    }
    return ret;
}

void rotor_frontier_free(rotor_frontier_t *self) {
    frontier_chunk_t *chunk = self->chunks;
    while (chunk != NULL) {
        frontier_chunk_t *next = chunk->next;
        rotor_free(chunk);
        chunk = next;
    }
    rotor_free(self->frontiers);
    rotor_free(self->curve_bytes);
    rotor_free(self->curve_ns);
    memset(self, 0, sizeof(*self));
}

/* -- from the table to a schedule */

/* E of a frontier at m, INT64_MAX below its first point; *bytes is where that value begins. */
static int64_t excess_at(const rotor_points_t *points, int64_t m, int64_t *bytes) {
    if (points->count == 0 || points->points[0].bytes > m) {
        return INT64_MAX;
    }
    int64_t k = rotor_last_within(points->points, 0, points->count - 1, m);
    *bytes = points->points[k].bytes;
    return points->points[k].excess;
}

static rotor_choice_t frontier_choose(const void *solver, int64_t i, int64_t l, int64_t m) {
    const rotor_frontier_t *s = solver;
    const rotor_chain_t *c = s->chain;
    int64_t unused;
    int64_t need = rotor_chain_need_tape(c, i, l);
    /* The least memory of that value; without tapes, the first split that attains it on all of m. */
    int64_t wanted = excess_at(at(s, i, l), m, s->drops_tapes ? &unused : &m);

    if (may_record(s, i, l) && m >= need &&
        excess_at(at(s, i + 1, l), m - c->xbar[i], &unused) == wanted) {
        return (rotor_choice_t){.j = i, .first = m - c->xbar[i], .second = 0};
    }
    need = 0;
    int64_t j = i + 1;
    for (; j < l; j++) {
        need = rotor_max(need, rotor_chain_need_fn(c, i, l, j - 1));
        int64_t left = wanted - (c->forward_sum[j] - c->forward_sum[i]);
        if (m < need || left < 0) {
            continue;
        }
        int64_t first = excess_at(at(s, j, l), m - c->x[j], &unused);
        if (first <= left && excess_at(at(s, i, j - 1), m, &unused) == left - first) {
            break;
        }
    }
    return (rotor_choice_t){.j = j, .first = m - c->x[j], .second = m};
}

int rotor_frontier_sequence(const rotor_frontier_t *self, int64_t budget,
                            rotor_sequence_t *sequence, int64_t *minimum) {
    if (budget < self->curve_bytes[0]) {
        *minimum = self->curve_bytes[0];
        return ROTOR_ERR_INFEASIBLE;
    }
    return rotor_persistent_walk(self->chain->n, self, frontier_choose,
                                 budget - self->chain->x[0], sequence);
}
