#include "envelope.h"

#include <string.h>

#include "vector.h"

/* base + a(m - shift) + b(m) from m = start on. */
typedef struct rotor_envelope_candidate {
    const rotor_point_t *a;
    const rotor_point_t *b;
    int64_t shift;
    int64_t base;
    int64_t start;
} candidate_t;

/* A candidate within a range [low, high): its points from max(low, start) to just below high. */
typedef struct rotor_envelope_entry {
    const candidate_t *candidate;
    int64_t a_low;
    int64_t a_high;
    int64_t b_low;
    int64_t b_high;
} entry_t;

/* A range whose envelope is still to be computed; `count` entries, on the stack of entries. */
typedef struct rotor_envelope_range {
    int64_t low;
    int64_t best; /* the least value at low */
    int64_t count;
} range_t;

/* A range with at most so many points is swept point by point. */
enum { SWEEP = 16 };

static const rotor_point_t anywhere = {.bytes = INT64_MIN / 4, .excess = 0};
static const rotor_points_t nothing = {.points = &anywhere, .count = 1};

static int envelope_arrays(rotor_envelope_t *self, int64_t most, bool is_new) {
    return ROTOR_ARRAYS(is_new,
        ROTOR_ARRAY(self->candidates, most), ROTOR_ARRAY(self->entries, most),
        ROTOR_ARRAY(self->scratch, most), ROTOR_ARRAY(self->next, most));
}

int rotor_envelope_init(rotor_envelope_t *self, int64_t most) {
    memset(self, 0, sizeof(*self));
    self->entry_capacity = most;
    return envelope_arrays(self, most, true);
}

void rotor_envelope_free(rotor_envelope_t *self) {
    (void)envelope_arrays(self, 0, false);
    rotor_free(self->ranges);
    rotor_free(self->points);
    memset(self, 0, sizeof(*self));
}

void rotor_envelope_clear(rotor_envelope_t *self) {
    self->candidate_count = 0;
    self->entry_count = 0;
    self->count = 0;
}

static int reserve_points(rotor_envelope_t *self, int64_t more) {
    return ROTOR_RESERVE(self->points, self->count, self->capacity, more);
}

static int push_range(rotor_envelope_t *self, range_t range) {
    int ret = ROTOR_RESERVE(self->ranges, self->range_count, self->range_capacity, 1);
    if (ret == ROTOR_OK) {
        self->ranges[self->range_count++] = range;
    }
    return ret;
}

void rotor_envelope_add(rotor_envelope_t *self, const rotor_points_t *a, int64_t shift,
                        const rotor_points_t *b, int64_t base, int64_t need, int64_t limit) {
    b = b == NULL ? &nothing : b;
    if (a->count == 0 || b->count == 0) {
        return;
    }
    int64_t start = rotor_max(need, rotor_max(a->points[0].bytes + shift, b->points[0].bytes));
    if (start > limit) {
        return;
    }
    candidate_t *candidate = &self->candidates[self->candidate_count++];
    *candidate = (candidate_t){
        .a = a->points, .b = b->points, .shift = shift, .base = base, .start = start};
    self->entries[self->entry_count++] = (entry_t){
        .candidate = candidate,
        .a_low = rotor_last_within(a->points, 0, a->count - 1, start - shift),
        .a_high = rotor_last_within(a->points, 0, a->count - 1, limit - shift),
        .b_low = rotor_last_within(b->points, 0, b->count - 1, start),
        .b_high = rotor_last_within(b->points, 0, b->count - 1, limit)};
}

static inline int64_t envelope_value(const candidate_t *c, int64_t ka, int64_t kb) {
    return c->base + c->a[ka].excess + c->b[kb].excess;
}

static inline int64_t next_bytes(const entry_t *e) {
    const candidate_t *c = e->candidate;
    int64_t a = e->a_low < e->a_high ? c->a[e->a_low + 1].bytes + c->shift : INT64_MAX;
    int64_t b = e->b_low < e->b_high ? c->b[e->b_low + 1].bytes : INT64_MAX;
    return rotor_min(a, b);
}

/* Moves an entry to its next point, which is at m. */
static inline int64_t envelope_advance(entry_t *e, int64_t m) {
    const candidate_t *c = e->candidate;
    e->a_low += e->a_low < e->a_high && c->a[e->a_low + 1].bytes + c->shift == m;
    e->b_low += e->b_low < e->b_high && c->b[e->b_low + 1].bytes == m;
    return envelope_value(c, e->a_low, e->b_low);
}

/* Room for it must have been reserved. */
static inline void emit(rotor_envelope_t *self, int64_t m, int64_t value) {
    int64_t k = self->count;
    if (k == 0 || value < self->points[k - 1].excess) {
        k -= k > 0 && self->points[k - 1].bytes == m;
        self->points[k] = (rotor_point_t){.bytes = m, .excess = value};
        self->count = k + 1;
    }
}

/* The only entry of a range. */
static void emit_alone(rotor_envelope_t *self, entry_t *e, int64_t low) {
    const candidate_t *c = e->candidate;
    if (c->start > low) {
        emit(self, c->start, envelope_value(c, e->a_low, e->b_low));
    }
    for (int64_t m = next_bytes(e); m != INT64_MAX; m = next_bytes(e)) {
        int64_t value = envelope_advance(e, m);
        emit(self, m, value);
    }
}

/* The points of all entries of a range in the order of their bytes. */
static void envelope_sweep(rotor_envelope_t *self, entry_t *entries, int64_t count, int64_t low) {
    int64_t *next = self->next;
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
        int64_t value = m == e->candidate->start ? envelope_value(e->candidate, e->a_low, e->b_low)
                                                 : envelope_advance(e, m);
        emit(self, m, value);
        next[least] = next_bytes(e);
    }
}

/*
 * Divides the top range at m: its entries that can improve on the best value at the low end of
 * either half go there, the left half on top. The upper end of a range is the lower end of the next
 * one on the stack.
 */
static int divide(rotor_envelope_t *self, int64_t m) {
    range_t *range = &self->ranges[self->range_count - 1];
    int64_t count = range->count;
    entry_t *entries = self->entries + (self->entry_count - count);
    int64_t best = range->best;
    int64_t left = 0;
    int64_t right = 0;

    for (int64_t k = 0; k < count; k++) {
        entry_t e = entries[k];
        const candidate_t *c = e.candidate;
        if (c->start < m) {
            int64_t ka = rotor_last_within(c->a, e.a_low, e.a_high, m - c->shift);
            int64_t kb = rotor_last_within(c->b, e.b_low, e.b_high, m);
            entry_t *part = &self->scratch[left];
            *part = e;
            part->a_high = ka - (ka > e.a_low && c->a[ka].bytes + c->shift == m);
            part->b_high = kb - (kb > e.b_low && c->b[kb].bytes == m);
            left += envelope_value(c, part->a_high, part->b_high) < range->best;
            e.a_low = ka;
            e.b_low = kb;
        }
        if (c->start <= m) {
            best = rotor_min(best, envelope_value(c, e.a_low, e.b_low));
        }
        entries[right] = e;
        right += envelope_value(c, e.a_high, e.b_high) < best;
    }
    self->entry_count += right - count;
    int ret = ROTOR_RESERVE(self->entries, self->entry_count, self->entry_capacity, left);
    if (ret != ROTOR_OK) {
        return ret;
    }
    memcpy(self->entries + self->entry_count, self->scratch, (size_t)left * sizeof(entry_t));
    self->entry_count += left;
    range_t half = {.low = range->low, .best = range->best, .count = left};
    *range = (range_t){.low = m, .best = best, .count = right};
    return push_range(self, half);
}

/* The bytes at which a range is divided: at the middle point of its longest list, where that has two or more. */
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

int rotor_envelope_solve(rotor_envelope_t *self) {
    int64_t low = INT64_MAX;
    int64_t best = INT64_MAX;
    int ret;

    for (int64_t k = 0; k < self->candidate_count; k++) {
        low = rotor_min(low, self->candidates[k].start);
    }
    for (int64_t k = 0; k < self->candidate_count; k++) {
        const entry_t *e = &self->entries[k];
        if (e->candidate->start == low) {
            best = rotor_min(best, envelope_value(e->candidate, e->a_low, e->b_low));
        }
    }
    self->count = 0;
    if (self->candidate_count == 0) {
        return ROTOR_OK;
    }
    self->range_count = 0;
    ret = push_range(self, (range_t){.low = low, .best = best, .count = self->candidate_count});
    if (ret != ROTOR_OK) {
        return ret;
    }
    while (self->range_count > 0) {
        range_t *range = &self->ranges[self->range_count - 1];
        entry_t *entries = self->entries + (self->entry_count - range->count);
        ret = reserve_points(self, 1);
        if (ret != ROTOR_OK) {
            return ret;
        }
        emit(self, range->low, range->best);
        int64_t kept = 0;
        for (int64_t k = 0; k < range->count; k++) {
            entry_t e = entries[k];
            entries[kept] = e;
            kept += envelope_value(e.candidate, e.a_high, e.b_high) < range->best;
        }
        self->entry_count += kept - range->count;
        range->count = kept;
        int64_t points;
        int64_t longest;
        int64_t m = middle(entries, kept, &points, &longest);
        if (kept > 1 && longest > 1 && points > SWEEP) {
            ret = divide(self, m);
            if (ret != ROTOR_OK) {
                return ret;
            }
            continue;
        }
        ret = reserve_points(self, points + 1);
        if (ret != ROTOR_OK) {
            return ret;
        }
        if (kept == 1) {
            emit_alone(self, entries, range->low);
        } else if (kept > 1) {
            envelope_sweep(self, entries, kept, range->low);
        }
        self->entry_count -= kept;
        self->range_count--;
    }
    return ROTOR_OK;
}
