/*
 * The inner loops of persistent.c for one type of excess times: REAL is float or double, KERNEL(f)
 * the name of f for it. Included once for each.
 */

static void KERNEL(both)(REAL *restrict e, const REAL *restrict a, const REAL *restrict b,
                         REAL base, int64_t count) {
    for (int64_t first = 0; first < count; first += CHUNK) {
        int64_t last = rotor_min(first + CHUNK, count) - 1;
        if (base + (a[last] + b[last]) >= e[first]) {
            continue;
        }
        for (int64_t k = first; k <= last; k++) {
            REAL value = base + (a[k] + b[k]);
            e[k] = value < e[k] ? value : e[k];
        }
    }
}

static void KERNEL(one)(REAL *restrict e, const REAL *restrict a, REAL base, int64_t count) {
    for (int64_t first = 0; first < count; first += CHUNK) {
        int64_t last = rotor_min(first + CHUNK, count) - 1;
        if (base + a[last] >= e[first]) {
            continue;
        }
        for (int64_t k = first; k <= last; k++) {
            REAL value = base + a[k];
            e[k] = value < e[k] ? value : e[k];
        }
    }
}

static REAL KERNEL(at)(const rotor_persistent_t *s, int64_t cell, int64_t m) {
    if (m < s->lo[cell]) {
        return (REAL)INFINITY;
    }
    const REAL *values = s->values;
    return values[s->offset[cell] + rotor_min(m, s->hi[cell]) - s->lo[cell]];
}

/*
 * Lowers `to`, whose value on the falling row that begins at `row` is at most base or which is the
 * end of the row, to the first m >= from of which that holds; galloping.
 */
static int64_t KERNEL(first_within)(const REAL *values, int64_t row, int64_t from, int64_t to,
                                    REAL base) {
    int64_t leap = 1;
    while (to - leap >= from && values[row + to - leap] <= base) {
        to -= leap;
        leap *= 2;
    }
    int64_t above = rotor_max(from - 1, to - leap);
    while (to - above > 1) {
        int64_t middle = above + (to - above) / 2;
        if (values[row + middle] <= base) {
            to = middle;
        } else {
            above = middle;
        }
    }
    return to;
}

/*
 * E(i, l) for the split at j. Where E(i, l) is at most the time to repeat stages i .. j-1 the split
 * is of no use, and later ones are not either: track->end is where that begins. A row begins, as if
 * from m = 0, at index offset - lo, which may be negative.
 */
static void KERNEL(split)(const rotor_persistent_t *s, track_t *track, int64_t i, int64_t l,
                          int64_t j) {
    int64_t n = s->chain->n;
    int64_t cell = rotor_cell(n, i, l);
    int64_t cell_a = rotor_cell(n, j, l);
    int64_t cell_b = rotor_cell(n, i, j - 1);
    int64_t x = s->x[j];
    int64_t m = rotor_max(s->lo[cell_a] + x, s->lo[cell_b]);
    if (m >= track->end) {
        return;
    }
    m = rotor_max(m, split_need(s, track, i, l, j));
    REAL *values = s->values;
    REAL base = (REAL)(s->chain->forward_sum[j] - s->chain->forward_sum[i]);
    int64_t row = s->offset[cell] - s->lo[cell];
    track->end = KERNEL(first_within)(values, row, s->lo[cell], track->end, base);
    int64_t end = track->end;
    if (m >= end) {
        return;
    }
    int64_t row_a = s->offset[cell_a] - s->lo[cell_a] - x;
    int64_t row_b = s->offset[cell_b] - s->lo[cell_b];
    int64_t end_a = s->hi[cell_a] + x;
    int64_t end_b = s->hi[cell_b];

    int64_t stop = rotor_min(end, rotor_min(end_a, end_b));
    if (m < stop) {
        KERNEL(both)(values + (row + m), values + (row_a + m), values + (row_b + m), base,
                     stop - m);
        m = stop;
    }
    stop = rotor_min(end, rotor_max(end_a, end_b));
    if (m < stop) {
        KERNEL(one)(values + (row + m), values + (end_a < end_b ? row_b : row_a) + m, base,
                    stop - m);
        m = stop;
    }
    for (; m < end; m++) {
        values[row + m] = base;
    }
}

/* E(i, l) for Fe(i) first, which needs `need` slots. */
static void KERNEL(step)(const rotor_persistent_t *s, int64_t i, int64_t l, int64_t need) {
    int64_t n = s->chain->n;
    int64_t cell = rotor_cell(n, i, l);
    int64_t from = rotor_cell(n, i + 1, l);
    int64_t xbar = s->xbar[i];
    int64_t m = rotor_max(need, s->lo[from] + xbar);
    int64_t end = rotor_min(s->hi[cell], s->slots) + 1;
    REAL *values = s->values;
    int64_t row = s->offset[cell] - s->lo[cell];
    int64_t stop = rotor_min(end, s->hi[from] + xbar);
    if (m < stop) {
        int64_t row_from = s->offset[from] - s->lo[from] - xbar;
        KERNEL(one)(values + (row + m), values + (row_from + m), 0, stop - m);
        m = stop;
    }
    for (; m < end; m++) {
        values[row + m] = 0;
    }
}

static int KERNEL(fill)(rotor_persistent_t *s, const rotor_callback_t *callback) {
    const rotor_chain_t *c = s->chain;
    int64_t n = c->n;
    int64_t done = 0;
    track_t tracks[TILE * TILE];
    REAL *values = s->values;
    int ret = ROTOR_OK;

    for (int64_t i0 = (n / TILE) * TILE; i0 >= 0; i0 -= TILE) {
        int64_t i1 = rotor_min(i0 + TILE, n + 1);
        for (int64_t l0 = i0; l0 <= n; l0 += TILE) {
            int64_t l1 = rotor_min(l0 + TILE, n + 1);
            for (int64_t i = i0; i < i1; i++) {
                for (int64_t l = rotor_max(i, l0); l < l1; l++) {
                    int64_t cell = rotor_cell(n, i, l);
                    for (int64_t m = s->lo[cell]; m <= rotor_min(s->hi[cell], s->slots); m++) {
                        values[s->offset[cell] + m - s->lo[cell]] = (REAL)(i == l ? 0 : INFINITY);
                    }
                    tracks[(i - i0) * TILE + l - l0] = track_of(s, cell);
                }
            }
            /* A first bound, which makes splits useless early: Fe(i) before what is known. */
            for (int64_t i = i1 - 1; i >= i0; i--) {
                for (int64_t l = rotor_max(i + 1, l0); l < l1; l++) {
                    KERNEL(step)(s, i, l, step_need(s, i, l));
                }
            }
            /* Splits whose two parts both lie in tiles that are done. */
            for (int64_t j = i1; j <= l0; j++) {
                for (int64_t i = i0; i < i1; i++) {
                    for (int64_t l = l0; l < l1; l++) {
                        KERNEL(split)(s, &tracks[(i - i0) * TILE + l - l0], i, l, j);
                    }
                }
            }
            for (int64_t i = i1 - 1; i >= i0; i--) {
                for (int64_t l = rotor_max(i + 1, l0); l < l1; l++) {
                    track_t track = track_of(s, rotor_cell(n, i, l));
                    KERNEL(step)(s, i, l, step_need(s, i, l));
                    for (int64_t j = i + 1; j < rotor_min(i1, l + 1); j++) {
                        KERNEL(split)(s, &track, i, l, j);
                    }
                    for (int64_t j = rotor_max(i1, l0 + 1); j <= l; j++) {
                        KERNEL(split)(s, &track, i, l, j);
                    }
                    done += l - i;
                }
            }
            ret = rotor_ask(callback, done, n * (n + 1) * (n + 2) / 6);
            if (ret != ROTOR_OK) {
                return ret;
            }
        }
    }
    return ret;
}
