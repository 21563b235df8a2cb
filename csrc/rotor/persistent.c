#include "persistent.h"

#include <math.h>
#include <string.h>

/* Intervals are filled in squares of TILE x TILE, so that the rows they share stay in the cache. */
enum { TILE = 16 };

/* Rows fall: where the far end of so many slots is no better than the near end, they are skipped. */
enum { CHUNK = 32 };

/* -- what a state needs, in slots; slots + 1 for all that does not fit */

static int32_t persistent_to_slots(const rotor_persistent_t *s, int64_t bytes) {
    int64_t rounded = bytes > s->budget ? s->slots + 1
                                        : rotor_discretise(bytes, s->budget, s->slots);
    return (int32_t)rotor_min(rounded, s->slots + 1);
}

static int64_t step_need(const rotor_persistent_t *s, int64_t i, int64_t l) {
    return persistent_to_slots(s, rotor_chain_need_tape(s->chain, i, l));
}

/* Facts kept from one split of an interval to the next, as j grows. */
typedef struct {
    int64_t forward_need; /* bytes, which seldom change */
    int64_t need;         /* slots for them */
    int64_t end;          /* from here on splits are of no use */
} track_t;

static track_t track_of(const rotor_persistent_t *s, int64_t cell) {
    return (track_t){
        .forward_need = -1, .need = 0, .end = rotor_min(s->hi[cell], s->slots) + 1};
}

static int64_t split_need(const rotor_persistent_t *s, track_t *track, int64_t i, int64_t l,
                          int64_t j) {
    int64_t forward_need = s->forward_need[rotor_cell(s->chain->n, i, j)];
    if (forward_need != track->forward_need) {
        track->forward_need = forward_need;
        track->need = persistent_to_slots(s, rotor_chain_held(s->chain, l) + forward_need);
    }
    return track->need;
}

#define REAL float
#define KERNEL(name) name##_single
#include "persistent_kernel.h"
#undef REAL
#undef KERNEL
#define REAL double
#define KERNEL(name) name##_double
#include "persistent_kernel.h"
#undef REAL
#undef KERNEL

/* -- bounds of the rows, and with them the size of the table */

static void fill_forward_need(const rotor_chain_t *c, int64_t *forward_need) {
    for (int64_t i = 0; i <= c->n; i++) {
        int64_t most = 0;
        for (int64_t j = i; j <= c->n; j++) {
            if (j > i) {
                int64_t k = j - 1;
                int64_t own = (k == i ? 0 : c->x[k]) + c->x[k + 1] + c->fn_tmp[k];
                most = rotor_max(most, c->once[k] != 0 ? ROTOR_NEVER : own);
            }
            forward_need[rotor_cell(c->n, i, j)] = most;
        }
    }
}

/* The rows lo, hi and offset; *count is the number of values. */
static int fill_bounds(rotor_persistent_t *s, const rotor_callback_t *callback, int64_t *count) {
    const rotor_chain_t *c = s->chain;
    int64_t n = c->n;

    *count = 0;
    for (int64_t i = n; i >= 0; i--) {
        for (int64_t l = i; l <= n; l++) {
            int64_t cell = rotor_cell(n, i, l);
            int64_t lo;
            int64_t hi;
            if (i == l) {
                lo = i == n ? persistent_to_slots(s, rotor_chain_need_loss(c)) : step_need(s, i, i);
                hi = lo;
            } else {
                int64_t from = rotor_cell(n, i + 1, l);
                int64_t need = step_need(s, i, l);
                track_t track = {.forward_need = -1, .need = 0, .end = 0};
                int64_t cell_a = from;
                int64_t cell_b = rotor_cell(n, i, i);
                lo = rotor_max(need, s->lo[from] + s->xbar[i]);
                hi = rotor_max(need, s->hi[from] + s->xbar[i]);
                for (int64_t j = i + 1; j <= l; j++) {
                    int64_t parts = rotor_max(s->lo[cell_a] + s->x[j], s->lo[cell_b]);
                    if (parts < lo) {
                        lo = rotor_min(lo, rotor_max(parts, split_need(s, &track, i, l, j)));
                    }
                    cell_a += n - j;
                    cell_b++;
                }
            }
            s->lo[cell] = (int32_t)rotor_min(lo, s->slots + 1);
            s->hi[cell] = (int32_t)rotor_min(hi, s->slots + 1);
            s->offset[cell] = *count;
            *count += rotor_min(s->hi[cell], s->slots) - s->lo[cell] + 1;
        }
        int ret = rotor_ask(callback, 0, n * (n + 1) * (n + 2) / 6);
        if (ret != ROTOR_OK) {
            return ret;
        }
    }
    return ROTOR_OK;
}

static int persistent_arrays(rotor_persistent_t *s, int64_t n, bool is_new) {
    int64_t cells = rotor_cells(n);
    return ROTOR_ARRAYS(is_new,
        ROTOR_ARRAY(s->lo, cells), ROTOR_ARRAY(s->hi, cells), ROTOR_ARRAY(s->offset, cells),
        ROTOR_ARRAY(s->forward_need, cells), ROTOR_ARRAY(s->x, n + 1), ROTOR_ARRAY(s->xbar, n));
}

static int allocate_values(rotor_persistent_t *s, int64_t count, enum rotor_precision precision,
                           int64_t max_table_bytes) {
    int64_t size = (int64_t)sizeof(double);
    int64_t most = precision == ROTOR_PRECISION_DOUBLE
                       ? max_table_bytes
                       : rotor_min(max_table_bytes, ROTOR_DOUBLE_BYTES);
    s->single = precision == ROTOR_PRECISION_SINGLE ||
                (precision == ROTOR_PRECISION_AUTO && count > most / size);
    size = s->single ? (int64_t)sizeof(float) : size;
    if (count > max_table_bytes / size) {
        return ROTOR_ERR_TABLE_TOO_LARGE;
    }
    s->table_bytes = count * size;
    s->values = rotor_malloc((size_t)s->table_bytes);
    return s->values == NULL ? ROTOR_ERR_NO_MEMORY : ROTOR_OK;
}

int rotor_persistent_fill(rotor_persistent_t *self, const rotor_chain_t *chain, int64_t budget,
                          int64_t slots, enum rotor_precision precision, int64_t max_table_bytes,
                          const rotor_callback_t *callback) {
    int ret;
    int64_t count;

    memset(self, 0, sizeof(*self));
    if (slots < 1 || slots > ROTOR_MAX_SLOTS) {
        return ROTOR_ERR_BAD_SLOTS;
    }
    if (budget <= chain->x[0]) {
        return ROTOR_ERR_BAD_BUDGET;
    }
    if (chain->forward_sum[chain->n] > (INT64_C(1) << 62) / chain->n) {
        return ROTOR_ERR_OVERFLOW;
    }
    /* The bounds of the rows, beside the values. */
    if (24 * rotor_cells(chain->n) > max_table_bytes) {
        return ROTOR_ERR_TABLE_TOO_LARGE;
    }
    self->chain = chain;
    self->budget = budget - chain->x[0];
    self->slots = slots;
    ret = persistent_arrays(self, chain->n, true);
    if (ret != ROTOR_OK) {
        goto out;
    }
    for (int64_t i = 0; i <= chain->n; i++) {
        self->x[i] = persistent_to_slots(self, chain->x[i]);
    }
    for (int64_t i = 0; i < chain->n; i++) {
        self->xbar[i] = persistent_to_slots(self, chain->xbar[i]);
    }
    fill_forward_need(chain, self->forward_need);
    ret = fill_bounds(self, callback, &count);
    if (ret == ROTOR_OK) {
        ret = allocate_values(self, count, precision, max_table_bytes);
    }
    if (ret == ROTOR_OK) {
        ret = self->single ? fill_single(self, callback) : fill_double(self, callback);
    }
out:
    if (ret != ROTOR_OK) {
        rotor_persistent_free(self);
    }
    return ret;
}

void rotor_persistent_free(rotor_persistent_t *self) {
    (void)persistent_arrays(self, 0, false);
    rotor_free(self->values);
    memset(self, 0, sizeof(*self));
}

static double excess(const rotor_persistent_t *s, int64_t cell, int64_t m) {
    return s->single ? (double)at_single(s, cell, m) : at_double(s, cell, m);
}

double rotor_persistent_excess(const rotor_persistent_t *self, int64_t i, int64_t l, int64_t m) {
    return excess(self, rotor_cell(self->chain->n, i, l), m);
}

/* -- from a table to a schedule */

static rotor_choice_t persistent_choose(const void *solver, int64_t i, int64_t l, int64_t m) {
    const rotor_persistent_t *s = solver;
    int64_t n = s->chain->n;
    rotor_choice_t best = {.j = i, .first = m - s->xbar[i], .second = 0};
    double least = INFINITY;
    track_t track = {.forward_need = -1, .need = 0, .end = 0};

    if (m >= step_need(s, i, l)) {
        least = excess(s, rotor_cell(n, i + 1, l), m - s->xbar[i]);
    }
    for (int64_t j = i + 1; j <= l; j++) {
        double base = (double)(s->chain->forward_sum[j] - s->chain->forward_sum[i]);
        if (base >= least) {
            break;
        }
        if (m >= split_need(s, &track, i, l, j)) {
            double value = base + excess(s, rotor_cell(n, j, l), m - s->x[j]) +
                           excess(s, rotor_cell(n, i, j - 1), m);
            if (value < least) {
                least = value;
                best = (rotor_choice_t){.j = j, .first = m - s->x[j], .second = m};
            }
        }
    }
    return best;
}

/* A state to be done, or (i < 0) the backward of stage l. */
typedef struct {
    int64_t i;
    int64_t l;
    int64_t m;
} frame_t;

int rotor_persistent_walk(int64_t n, const void *solver, rotor_choose_t choose_at, int64_t m,
                          rotor_sequence_t *sequence) {
    int ret = ROTOR_OK;
    int64_t count = 1;
    /* Each open state has one more frame below those it opens: 2 n + 2 at most. */
    frame_t *frames = rotor_malloc_array(2 * n + 3, sizeof(*frames));

    if (frames == NULL) {
        return ROTOR_ERR_NO_MEMORY;
    }
    frames[0] = (frame_t){.i = 0, .l = n, .m = m};
    while (count > 0 && ret == ROTOR_OK) {
        frame_t f = frames[--count];
        if (f.i < 0) {
            ret = rotor_sequence_append(sequence, ROTOR_B, f.l);
            continue;
        }
        if (f.i == f.l) {
            if (f.i == n) {
                ret = rotor_sequence_append(sequence, ROTOR_LOSS, f.i);
                continue;
            }
            ret = rotor_sequence_append(sequence, ROTOR_FE, f.i);
            if (ret == ROTOR_OK) {
                ret = rotor_sequence_append(sequence, ROTOR_B, f.i);
            }
            continue;
        }
        rotor_choice_t choice = choose_at(solver, f.i, f.l, f.m);
        if (choice.j == f.i) {
            ret = rotor_sequence_append(sequence, ROTOR_FE, f.i);
            frames[count++] = (frame_t){.i = -1, .l = f.i, .m = 0};
            frames[count++] = (frame_t){.i = f.i + 1, .l = f.l, .m = choice.first};
        } else {
            ret = rotor_sequence_append_forward(sequence, f.i, choice.j);
            frames[count++] = (frame_t){.i = f.i, .l = choice.j - 1, .m = choice.second};
            frames[count++] = (frame_t){.i = choice.j, .l = f.l, .m = choice.first};
        }
    }
    rotor_free(frames);
    return ret;
}

int rotor_persistent_trace(const rotor_persistent_t *self, rotor_sequence_t *sequence) {
    if (self->lo[rotor_cell(self->chain->n, 0, self->chain->n)] > self->slots) {
        return ROTOR_ERR_INFEASIBLE;
    }
    return rotor_persistent_walk(self->chain->n, self, persistent_choose, self->slots, sequence);
}

/* Fills a table and appends its schedule; *exact is false where rounding has added up in it. */
static int solve_in(const rotor_chain_t *chain, int64_t budget, int64_t slots,
                    enum rotor_precision precision, int64_t max_table_bytes,
                    const rotor_callback_t *callback, rotor_sequence_t *sequence, bool *exact) {
    rotor_persistent_t table;
    rotor_result_t result;
    int64_t begin = sequence->length;
    int ret = rotor_persistent_fill(&table, chain, budget, slots, precision, max_table_bytes,
                                    callback);
    if (ret == ROTOR_OK) {
        ret = rotor_persistent_trace(&table, sequence);
    }
    if (ret == ROTOR_OK && table.single) {
        ret = rotor_simulate(chain, sequence->ops + begin, sequence->length - begin, &result, NULL,
                             NULL);
        double found = (double)(result.time_ns - rotor_chain_ideal_ns(chain));
        double stated = rotor_persistent_excess(&table, 0, chain->n, slots);
        *exact = found <= stated * (1.0 + 1.0 / (1 << 21));
    }
    rotor_persistent_free(&table);
    return ret;
}

int rotor_persistent_solve(const rotor_chain_t *chain, int64_t budget, int64_t slots,
                           enum rotor_precision precision, int64_t max_table_bytes,
                           const rotor_callback_t *callback, rotor_sequence_t *sequence) {
    rotor_sequence_t again;
    bool exact = true;
    int ret;

    rotor_sequence_init(&again);
    ret = solve_in(chain, budget, slots, precision, max_table_bytes, callback, sequence, &exact);
    if (ret != ROTOR_OK || exact) {
        goto out;
    }
    ret = solve_in(chain, budget, slots, ROTOR_PRECISION_DOUBLE, max_table_bytes, callback, &again,
                   &exact);
    if (ret == ROTOR_OK) {
        rotor_sequence_free(sequence);
        *sequence = again;
        rotor_sequence_init(&again);
    }
    ret = ret == ROTOR_ERR_TABLE_TOO_LARGE ? ROTOR_OK : ret;
out:
    rotor_sequence_free(&again);
    return ret;
}

/* -- the least memory */

typedef struct {
    const rotor_chain_t *chain;
    const int64_t *lo; /* [rotor_cells(n)] bytes */
} minimum_t;

static rotor_choice_t choose_minimum(const void *solver, int64_t i, int64_t l, int64_t m) {
    const minimum_t *s = solver;
    const rotor_chain_t *c = s->chain;
    int64_t n = c->n;
    int64_t need = 0;

    if (m >= rotor_chain_need_tape(c, i, l) && m - c->xbar[i] >= s->lo[rotor_cell(n, i + 1, l)]) {
        return (rotor_choice_t){.j = i, .first = m - c->xbar[i], .second = 0};
    }
    int64_t j = i + 1;
    for (; j < l; j++) {
        need = rotor_max(need, rotor_chain_need_fn(c, i, l, j - 1));
        if (m >= need && m - c->x[j] >= s->lo[rotor_cell(n, j, l)] &&
            m >= s->lo[rotor_cell(n, i, j - 1)]) {
            break;
        }
    }
    return (rotor_choice_t){.j = j, .first = m - c->x[j], .second = m};
}

int rotor_persistent_minimum(const rotor_chain_t *chain, int64_t max_table_bytes,
                             const rotor_callback_t *callback, int64_t *minimum, int64_t budget,
                             rotor_sequence_t *sequence) {
    const rotor_chain_t *c = chain;
    int64_t n = c->n;
    int64_t done = 0;
    int ret = ROTOR_OK;

    if (rotor_cells(n) > max_table_bytes / (int64_t)sizeof(int64_t)) {
        return ROTOR_ERR_TABLE_TOO_LARGE;
    }
    int64_t *lo = rotor_malloc_array(rotor_cells(n), sizeof(*lo));
    if (lo == NULL) {
        return ROTOR_ERR_NO_MEMORY;
    }
    for (int64_t i = n; i >= 0; i--) {
        lo[rotor_cell(n, i, i)] =
            i == n ? rotor_chain_need_loss(c) : rotor_chain_need_tape(c, i, i);
        for (int64_t l = i + 1; l <= n; l++) {
            int64_t cell_a = rotor_cell(n, i + 1, l);
            int64_t cell_b = rotor_cell(n, i, i);
            int64_t least = rotor_max(rotor_chain_need_tape(c, i, l), lo[cell_a] + c->xbar[i]);
            int64_t need = 0;
            for (int64_t j = i + 1; j <= l; j++) {
                need = rotor_max(need, rotor_chain_need_fn(c, i, l, j - 1));
                if (need >= least) {
                    break;
                }
                int64_t parts = rotor_max(lo[cell_a] + c->x[j], lo[cell_b]);
                least = rotor_min(least, rotor_max(parts, need));
                cell_a += n - j;
                cell_b++;
            }
            lo[rotor_cell(n, i, l)] = least;
            done += l - i;
            ret = rotor_ask(callback, done, n * (n + 1) * (n + 2) / 6);
            if (ret != ROTOR_OK) {
                goto out;
            }
        }
    }
    *minimum = lo[rotor_cell(n, 0, n)] + c->x[0];
    if (sequence != NULL) {
        minimum_t solver = {.chain = c, .lo = lo};
        ret = budget < *minimum ? ROTOR_ERR_INFEASIBLE
                                : rotor_persistent_walk(n, &solver, choose_minimum,
                                                        budget - c->x[0], sequence);
    }
out:
    rotor_free(lo);
    return ret;
}
