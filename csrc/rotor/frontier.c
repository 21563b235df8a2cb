#include "frontier.h"

#include <math.h>
#include <string.h>

#include "persistent.h"

/* -- storage: chunks that are never moved, freed together */

enum { CHUNK_POINTS = 1 << 15 };

typedef struct chunk {
    struct chunk *next;
    int64_t used;
    int64_t capacity;
    rotor_point_t points[];
} chunk_t;

static rotor_point_t *take(rotor_frontier_t *self, int64_t count) {
    chunk_t *chunk = self->chunks;
    rotor_point_t *taken = chunk->points + chunk->used;
    chunk->used += count;
    return taken;
}

/* Makes room for `count` points in the newest chunk. */
static int reserve(rotor_frontier_t *self, int64_t count) {
    chunk_t *chunk = self->chunks;
    if (chunk != NULL && chunk->capacity - chunk->used >= count) {
        return ROTOR_OK;
    }
    int64_t left = self->max_table_bytes - self->table_bytes - (int64_t)sizeof(chunk_t);
    int64_t capacity = rotor_min(CHUNK_POINTS, left / (int64_t)sizeof(rotor_point_t));
    capacity = rotor_max(capacity, count);
    int64_t bytes = capacity * (int64_t)sizeof(rotor_point_t);
    if (bytes > left) {
        return ROTOR_ERR_TABLE_TOO_LARGE;
    }
    chunk = rotor_malloc(sizeof(chunk_t) + (size_t)bytes);
    if (chunk == NULL) {
        return ROTOR_ERR_NO_MEMORY;
    }
    chunk->next = self->chunks;
    chunk->used = 0;
    chunk->capacity = capacity;
    self->chunks = chunk;
    self->table_bytes += (int64_t)sizeof(chunk_t) + bytes;
    return ROTOR_OK;
}

static const rotor_points_t *at(const rotor_frontier_t *self, int64_t i, int64_t l) {
    return &self->frontiers[rotor_cell(self->chain->n, i, l)];
}

/* -- the frontier of an interval: the lower envelope of its candidates */

/* base + a(m - shift) + b(m) from m = start on. */
typedef struct {
    const rotor_point_t *a;
    const rotor_point_t *b;
    int64_t shift;
    int64_t base;
    int64_t start;
} candidate_t;

/* A candidate within a range [low, high): its points from max(low, start) to just below high. */
typedef struct {
    const candidate_t *candidate;
    int64_t a_low;
    int64_t a_high;
    int64_t b_low;
    int64_t b_high;
} entry_t;

/* A range whose envelope is still to be computed; `count` entries, on the stack of entries. */
typedef struct {
    int64_t low;
    int64_t best; /* the least value at low */
    int64_t count;
} range_t;

typedef struct {
    candidate_t *candidates; /* [n + 1] */
    int64_t candidate_count;
    entry_t *entries; /* a stack: those of the top range are the last ones */
    int64_t entry_count;
    int64_t entry_capacity;
    entry_t *scratch; /* [n + 1] */
    int64_t *next;    /* [n + 1] */
    range_t *ranges; /* a stack */
    int64_t range_count;
    int64_t range_capacity;
    rotor_point_t *points; /* those found, [capacity] */
    int64_t capacity;
    int64_t count;
} work_t;

/* A range with at most so many points is swept point by point. */
enum { SWEEP = 16 };

static const rotor_point_t anywhere = {.bytes = INT64_MIN / 4, .excess = 0};

static int work_init(work_t *self, int64_t n) {
    memset(self, 0, sizeof(*self));
    self->candidates = rotor_malloc_array(n + 1, sizeof(*self->candidates));
    self->scratch = rotor_malloc_array(n + 1, sizeof(*self->scratch));
    self->next = rotor_malloc_array(n + 1, sizeof(*self->next));
    bool complete = self->candidates != NULL && self->scratch != NULL && self->next != NULL;
    return complete ? ROTOR_OK : ROTOR_ERR_NO_MEMORY;
}

static void work_free(work_t *self) {
    rotor_free(self->candidates);
    rotor_free(self->entries);
    rotor_free(self->scratch);
    rotor_free(self->next);
    rotor_free(self->ranges);
    rotor_free(self->points);
    memset(self, 0, sizeof(*self));
}

static int reserve_points(work_t *self, int64_t more) {
    int64_t wanted = self->count + more;
    if (wanted <= self->capacity) {
        return ROTOR_OK;
    }
    int64_t capacity = wanted + wanted / 2 + 64;
    rotor_point_t *points = rotor_realloc(self->points, (size_t)capacity * sizeof(*points));
    if (points == NULL) {
        return ROTOR_ERR_NO_MEMORY;
    }
    self->points = points;
    self->capacity = capacity;
    return ROTOR_OK;
}

static int reserve_entries(work_t *self, int64_t more) {
    int64_t wanted = self->entry_count + more;
    if (wanted <= self->entry_capacity) {
        return ROTOR_OK;
    }
    int64_t capacity = wanted + wanted / 2 + 64;
    entry_t *entries = rotor_realloc(self->entries, (size_t)capacity * sizeof(*entries));
    if (entries == NULL) {
        return ROTOR_ERR_NO_MEMORY;
    }
    self->entries = entries;
    self->entry_capacity = capacity;
    return ROTOR_OK;
}

static int push_range(work_t *self, range_t range) {
    if (self->range_count == self->range_capacity) {
        int64_t capacity = 2 * self->range_capacity + 64;
        range_t *ranges = rotor_realloc(self->ranges, (size_t)capacity * sizeof(*ranges));
        if (ranges == NULL) {
            return ROTOR_ERR_NO_MEMORY;
        }
        self->ranges = ranges;
        self->range_capacity = capacity;
    }
    self->ranges[self->range_count++] = range;
    return ROTOR_OK;
}

/* The last index in [low, high] whose bytes are at most m, where those at low are. */
static int64_t last_within(const rotor_point_t *points, int64_t low, int64_t high, int64_t m) {
    const rotor_point_t *base = points + low;
    int64_t count = high - low + 1;
    while (count > 1) {
        int64_t half = count / 2;
        base = base[half].bytes <= m ? base + half : base;
        count -= half;
    }
    return base - points;
}

/* A candidate that is of use for m <= limit, if it is of any. */
static void add_candidate(work_t *work, const rotor_points_t *a, int64_t shift,
                          const rotor_points_t *b, int64_t base, int64_t need, int64_t limit) {
    if (a->count == 0 || b->count == 0) {
        return;
    }
    int64_t start = rotor_max(need, rotor_max(a->points[0].bytes + shift, b->points[0].bytes));
    if (start > limit) {
        return;
    }
    work->candidates[work->candidate_count++] = (candidate_t){.a = a->points,
                                                              .b = b->points,
                                                              .shift = shift,
                                                              .base = base,
                                                              .start = start};
    work->entries[work->entry_count++] = (entry_t){
        .candidate = &work->candidates[work->candidate_count - 1],
        .a_low = last_within(a->points, 0, a->count - 1, start - shift),
        .a_high = last_within(a->points, 0, a->count - 1, limit - shift),
        .b_low = last_within(b->points, 0, b->count - 1, start),
        .b_high = last_within(b->points, 0, b->count - 1, limit)};
}

static inline int64_t value_at(const candidate_t *c, int64_t ka, int64_t kb) {
    return c->base + c->a[ka].excess + c->b[kb].excess;
}

static inline int64_t next_bytes(const entry_t *e) {
    const candidate_t *c = e->candidate;
    int64_t a = e->a_low < e->a_high ? c->a[e->a_low + 1].bytes + c->shift : INT64_MAX;
    int64_t b = e->b_low < e->b_high ? c->b[e->b_low + 1].bytes : INT64_MAX;
    return rotor_min(a, b);
}

/* Moves an entry to its next point, which is at m. */
static inline int64_t advance(entry_t *e, int64_t m) {
    const candidate_t *c = e->candidate;
    e->a_low += e->a_low < e->a_high && c->a[e->a_low + 1].bytes + c->shift == m;
    e->b_low += e->b_low < e->b_high && c->b[e->b_low + 1].bytes == m;
    return value_at(c, e->a_low, e->b_low);
}

/* Room for it must have been reserved. */
static inline void emit(work_t *work, int64_t m, int64_t value) {
    int64_t k = work->count;
    if (k == 0 || value < work->points[k - 1].excess) {
        k -= k > 0 && work->points[k - 1].bytes == m;
        work->points[k] = (rotor_point_t){.bytes = m, .excess = value};
        work->count = k + 1;
    }
}

/* The only entry of a range. */
static void emit_alone(work_t *work, entry_t *e, int64_t low) {
    const candidate_t *c = e->candidate;
    if (c->start > low) {
        emit(work, c->start, value_at(c, e->a_low, e->b_low));
    }
    for (int64_t m = next_bytes(e); m != INT64_MAX; m = next_bytes(e)) {
        int64_t value = advance(e, m);
        emit(work, m, value);
    }
}

/* The points of all entries of a range in the order of their bytes. */
static void sweep(work_t *work, entry_t *entries, int64_t count, int64_t low) {
    int64_t *next = work->next;
    for (int64_t k = 0; k < count; k++) {
        int64_t start = entries[k].candidate->start;
        next[k] = start > low ? start : next_bytes(&entries[k]);
    }
    for (;;) {
        int64_t least = 0;
        for (int64_t k = 1; k < count; k++) {
            least = next[k] < next[least] ? k : least;
        }
        int64_t m = next[least];
        if (m == INT64_MAX) {
            break;
        }
        entry_t *e = &entries[least];
        int64_t value = m == e->candidate->start ? value_at(e->candidate, e->a_low, e->b_low)
                                                 : advance(e, m);
        emit(work, m, value);
        next[least] = next_bytes(e);
    }
}

/*
 * Divides the top range at m: its entries that can improve on the best value at the low end of
 * either half go there, the left half on top. The upper end of a range is the lower end of the next
 * one on the stack.
 */
static int divide(work_t *work, int64_t m) {
    range_t *range = &work->ranges[work->range_count - 1];
    int64_t count = range->count;
    entry_t *entries = work->entries + (work->entry_count - count);
    int64_t best = range->best;
    int64_t left = 0;
    int64_t right = 0;

    for (int64_t k = 0; k < count; k++) {
        entry_t e = entries[k];
        const candidate_t *c = e.candidate;
        if (c->start < m) {
            int64_t ka = last_within(c->a, e.a_low, e.a_high, m - c->shift);
            int64_t kb = last_within(c->b, e.b_low, e.b_high, m);
            entry_t *part = &work->scratch[left];
            *part = e;
            part->a_high = ka - (ka > e.a_low && c->a[ka].bytes + c->shift == m);
            part->b_high = kb - (kb > e.b_low && c->b[kb].bytes == m);
            left += value_at(c, part->a_high, part->b_high) < range->best;
            e.a_low = ka;
            e.b_low = kb;
        }
        if (c->start <= m) {
            best = rotor_min(best, value_at(c, e.a_low, e.b_low));
        }
        entries[right] = e;
        right += value_at(c, e.a_high, e.b_high) < best;
    }
    work->entry_count += right - count;
    int ret = reserve_entries(work, left);
    if (ret != ROTOR_OK) {
        return ret;
    }
    memcpy(work->entries + work->entry_count, work->scratch, (size_t)left * sizeof(entry_t));
    work->entry_count += left;
    range_t half = {.low = range->low, .best = range->best, .count = left};
    *range = (range_t){.low = m, .best = best, .count = right};
    return push_range(work, half);
}

/* Where to divide a range: at the middle point of its longest list, where that has two or more. */
static int64_t middle(const entry_t *entries, int64_t count, int64_t *points, int64_t *longest) {
    int64_t m = 0;
    *points = 0;
    *longest = 0;
    for (int64_t k = 0; k < count; k++) {
        const entry_t *e = &entries[k];
        int64_t a = e->a_high - e->a_low;
        int64_t b = e->b_high - e->b_low;
        *points += a + b + 1;
        if (rotor_max(a, b) > *longest) {
            *longest = rotor_max(a, b);
            m = a >= b ? e->candidate->a[e->a_low + (a + 1) / 2].bytes + e->candidate->shift
                       : e->candidate->b[e->b_low + (b + 1) / 2].bytes;
        }
    }
    return m;
}

static int envelope(work_t *work) {
    int64_t low = INT64_MAX;
    int64_t best = INT64_MAX;
    int ret;

    for (int64_t k = 0; k < work->candidate_count; k++) {
        low = rotor_min(low, work->candidates[k].start);
    }
    for (int64_t k = 0; k < work->candidate_count; k++) {
        const entry_t *e = &work->entries[k];
        if (e->candidate->start == low) {
            best = rotor_min(best, value_at(e->candidate, e->a_low, e->b_low));
        }
    }
    work->count = 0;
    if (work->candidate_count == 0) {
        return ROTOR_OK;
    }
    work->range_count = 0;
    ret = push_range(work, (range_t){.low = low, .best = best, .count = work->candidate_count});
    if (ret != ROTOR_OK) {
        return ret;
    }
    while (work->range_count > 0) {
        range_t *range = &work->ranges[work->range_count - 1];
        entry_t *entries = work->entries + (work->entry_count - range->count);
        ret = reserve_points(work, 1);
        if (ret != ROTOR_OK) {
            return ret;
        }
        emit(work, range->low, range->best);
        int64_t kept = 0;
        for (int64_t k = 0; k < range->count; k++) {
            entry_t e = entries[k];
            entries[kept] = e;
            kept += value_at(e.candidate, e.a_high, e.b_high) < range->best;
        }
        work->entry_count += kept - range->count;
        range->count = kept;
        int64_t points;
        int64_t longest;
        int64_t m = middle(entries, kept, &points, &longest);
        if (kept > 1 && longest > 1 && points > SWEEP) {
            ret = divide(work, m);
            if (ret != ROTOR_OK) {
                return ret;
            }
            continue;
        }
        ret = reserve_points(work, points + 1);
        if (ret != ROTOR_OK) {
            return ret;
        }
        if (kept == 1) {
            emit_alone(work, entries, range->low);
        } else if (kept > 1) {
            sweep(work, entries, kept, range->low);
        }
        work->entry_count -= kept;
        work->range_count--;
    }
    return ROTOR_OK;
}

/* -- which memory a state is ever asked for */

/* Slots of the rough table from which the limits come. */
enum { ROUGH_SLOTS = 512 };

/* m of state (0, n) from which on nothing is repeated. */
static int64_t ample(const rotor_chain_t *c) {
    int64_t need = rotor_chain_need_loss(c);
    for (int64_t i = c->n - 1; i >= 0; i--) {
        int64_t own = rotor_max(rotor_chain_need_fe(c, i, c->n), rotor_chain_need_b(c, i, c->n));
        need = rotor_max(own, need + c->xbar[i]);
    }
    return need;
}

/*
 * limits[(i, l)] becomes the most memory with which the state can be part of an optimal schedule of
 * (0, n), or -1: a split at j is of no use where even a rough schedule of (i, l) repeats less time
 * than stages i .. j-1 take.
 */
static void spread(const rotor_persistent_t *rough, int64_t *limits) {
    const rotor_chain_t *c = rough->chain;
    int64_t n = c->n;
    double margin = 1.0 + 8.0 * (double)n / (1 << 24);

    for (int64_t i = 0; i < n; i++) {
        for (int64_t l = n; l > i; l--) {
            int64_t cell = rotor_cell(n, i, l);
            int64_t limit = limits[cell];
            int64_t slot = rotor_min(rough->hi[cell], rough->slots);
            int64_t need = rotor_max(rotor_chain_need_fe(c, i, l), rotor_chain_need_b(c, i, l));
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
}

static int fill_limits(rotor_frontier_t *self, const rotor_callback_t *callback, int64_t *limits) {
    const rotor_chain_t *c = self->chain;
    rotor_persistent_t rough;
    int64_t most = ample(c);
    int ret;

    memset(&rough, 0, sizeof(rough));
    for (int64_t k = 0; k < rotor_cells(c->n); k++) {
        limits[k] = most == 0 ? 0 : -1;
    }
    limits[rotor_cell(c->n, 0, c->n)] = most;
    if (most == 0) {
        return ROTOR_OK;
    }
    ret = rotor_persistent_fill(&rough, c, most + c->x[0], ROUGH_SLOTS, ROTOR_PRECISION_SINGLE,
                                self->max_table_bytes, callback);
    if (ret == ROTOR_OK) {
        spread(&rough, limits);
    }
    rotor_persistent_free(&rough);
    return ret;
}

static int leaf(rotor_frontier_t *self, int64_t i, rotor_points_t *points) {
    const rotor_chain_t *c = self->chain;
    int ret = reserve(self, 1);
    if (ret != ROTOR_OK) {
        return ret;
    }
    rotor_point_t *taken = take(self, 1);
    taken->bytes = i == c->n ? rotor_chain_need_loss(c)
                             : rotor_max(rotor_chain_need_fe(c, i, i), rotor_chain_need_b(c, i, i));
    taken->excess = 0;
    *points = (rotor_points_t){.points = taken, .count = 1};
    return ROTOR_OK;
}

static int interval(rotor_frontier_t *self, work_t *work, int64_t i, int64_t l, int64_t limit,
                    rotor_points_t *points) {
    const rotor_chain_t *c = self->chain;
    const rotor_points_t none = {.points = &anywhere, .count = 1};

    work->candidate_count = 0;
    work->entry_count = 0;
    int ret = reserve_entries(work, l - i + 1);
    if (ret != ROTOR_OK) {
        return ret;
    }
    add_candidate(work, at(self, i + 1, l), c->xbar[i], &none, 0,
                  rotor_max(rotor_chain_need_fe(c, i, l), rotor_chain_need_b(c, i, l)), limit);
    int64_t need = 0;
    for (int64_t j = i + 1; j <= l; j++) {
        need = rotor_max(need, rotor_chain_need_fn(c, i, l, j - 1));
        add_candidate(work, at(self, j, l), c->x[j], at(self, i, j - 1),
                      c->forward_sum[j] - c->forward_sum[i], need, limit);
    }
    ret = envelope(work);
    if (ret == ROTOR_OK) {
        ret = reserve(self, work->count);
    }
    if (ret != ROTOR_OK) {
        return ret;
    }
    if (work->count == 0) {
        *points = (rotor_points_t){.points = NULL, .count = 0};
        return ROTOR_OK;
    }
    rotor_point_t *taken = take(self, work->count);
    memcpy(taken, work->points, (size_t)work->count * sizeof(*taken));
    *points = (rotor_points_t){.points = taken, .count = work->count};
    return ROTOR_OK;
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

int rotor_frontier_solve(rotor_frontier_t *self, const rotor_chain_t *chain,
                         int64_t max_table_bytes, const rotor_callback_t *callback) {
    int ret;
    int64_t n = chain->n;
    int64_t cells = rotor_cells(n);
    int64_t done = 0;
    int64_t *limits = NULL;
    work_t work;

    memset(self, 0, sizeof(*self));
    self->chain = chain;
    self->max_table_bytes = max_table_bytes;
    ret = work_init(&work, n);
    if (ret != ROTOR_OK) {
        goto out;
    }
    if (chain->forward_sum[n] > (INT64_C(1) << 62) / n) {
        ret = ROTOR_ERR_OVERFLOW;
        goto out;
    }
    if (cells > max_table_bytes / (int64_t)sizeof(*self->frontiers)) {
        ret = ROTOR_ERR_TABLE_TOO_LARGE;
        goto out;
    }
    self->table_bytes = cells * (int64_t)sizeof(*self->frontiers);
    self->frontiers = rotor_malloc_array(cells, sizeof(*self->frontiers));
    if (self->frontiers == NULL) {
        ret = ROTOR_ERR_NO_MEMORY;
        goto out;
    }
    limits = rotor_malloc_array(cells, sizeof(*limits));
    if (limits == NULL) {
        ret = ROTOR_ERR_NO_MEMORY;
        goto out;
    }
    ret = fill_limits(self, callback, limits);
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
    work_free(&work);
    if (ret != ROTOR_OK) {
        rotor_frontier_free(self);
    }
    return ret;
}

void rotor_frontier_free(rotor_frontier_t *self) {
    chunk_t *chunk = self->chunks;
    while (chunk != NULL) {
        chunk_t *next = chunk->next;
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
    int64_t k = last_within(points->points, 0, points->count - 1, m);
    *bytes = points->points[k].bytes;
    return points->points[k].excess;
}

static rotor_choice_t choose(const void *solver, int64_t i, int64_t l, int64_t m) {
    const rotor_frontier_t *s = solver;
    const rotor_chain_t *c = s->chain;
    int64_t unused;
    int64_t need = rotor_max(rotor_chain_need_fe(c, i, l), rotor_chain_need_b(c, i, l));
    int64_t wanted = excess_at(at(s, i, l), m, &m);

    if (m >= need && excess_at(at(s, i + 1, l), m - c->xbar[i], &unused) == wanted) {
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
    return rotor_persistent_walk(self->chain, self, choose, budget - self->chain->x[0], sequence);
}
