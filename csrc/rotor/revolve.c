#include "revolve.h"

#include <string.h>


typedef rotor_revolve_point_t point_t;
typedef rotor_revolve_frontier_t frontier_t;

/* ---- equal stages ---- */

enum { MAX_STAGES = 1 << 18, MAX_FORWARDS = 1 << 28 };

/* C(s + r, s) where it is at most `cap`, else something above it; 0 for r < 0. */
static int64_t binomial(int64_t s, int64_t r, int64_t cap) {
    int64_t k = rotor_min(s, r);
    int64_t value = 1;
    if (r < 0) {
        return 0;
    }
    for (int64_t i = 1; i <= k; i++) {
        value = value * (s + r - k + i) / i;
        if (value > cap) {
            return value;
        }
    }
    return value;
}

static int64_t repetitions(int64_t stages, int64_t s) {
    int64_t r = 0;
    if (s == 1) {
        return stages - 1;
    }
    while (binomial(s, r, stages) < stages) {
        r++;
    }
    return r;
}

int64_t rotor_revolve_forwards(int64_t stages, int64_t checkpoints) {
    int64_t s = rotor_min(checkpoints, stages - 1) + 1;
    int64_t r = repetitions(stages, s);
    return r * stages - binomial(s + 1, r - 1, INT64_MAX / (4 * stages + 4));
}

/* The distance of the next checkpoint of Revolve from the start of an interval of `stages` >= 2. */
static int64_t revolve_advance(int64_t stages, int64_t checkpoints) {
    int64_t s = rotor_min(checkpoints, stages - 1) + 1;
    int64_t r = repetitions(stages, s);
    int64_t least = rotor_max(binomial(s, r - 2, stages), stages - binomial(s - 1, r, stages));
    return rotor_max(least, 1);
}

typedef struct {
    int64_t i, l, checkpoints;
} interval_t;

static int append_leaf(rotor_sequence_t *sequence, int64_t i, int64_t n) {
    int ret = rotor_sequence_append(sequence, ROTOR_FE, i);
    if (ret == ROTOR_OK && i == n - 1) {
        ret = rotor_sequence_append(sequence, ROTOR_LOSS, n);
    }
    return ret == ROTOR_OK ? rotor_sequence_append(sequence, ROTOR_B, i) : ret;
}

int rotor_revolve_schedule(int64_t n, int64_t checkpoints, rotor_sequence_t *sequence) {
    int64_t first = sequence->length;
    int64_t count = 0;
    interval_t *stack;
    int ret = ROTOR_OK;

    if (n < 1) {
        return ROTOR_ERR_BAD_LENGTH;
    }
    if (checkpoints < 0) {
        return ROTOR_ERR_BAD_SLOTS;
    }
    if (n > MAX_STAGES || rotor_revolve_forwards(n, checkpoints) > MAX_FORWARDS) {
        return ROTOR_ERR_TOO_LARGE;
    }
    stack = rotor_malloc_array(n + 1, sizeof(*stack));
    if (stack == NULL) {
        return ROTOR_ERR_NO_MEMORY;
    }
    stack[count++] = (interval_t){.i = 0, .l = n - 1, .checkpoints = checkpoints};
    while (count > 0 && ret == ROTOR_OK) {
        interval_t now = stack[--count];
        if (now.i == now.l) {
            ret = append_leaf(sequence, now.i, n);
            continue;
        }
        int64_t step = now.l - now.i;
        if (now.checkpoints > 0) {
            step = revolve_advance(now.l - now.i + 1, now.checkpoints);
        }
        int64_t j = now.i + step;
        stack[count++] =
            (interval_t){.i = now.i, .l = j - 1, .checkpoints = now.checkpoints};
        stack[count++] =
            (interval_t){.i = j, .l = now.l, .checkpoints = rotor_max(now.checkpoints - 1, 0)};
        ret = rotor_sequence_append_forward(sequence, now.i, j);
    }
    rotor_free(stack);
    if (ret != ROTOR_OK) {
        sequence->length = first;
    }
    return ret;
}

/* ---- stages as they are ---- */

/* A growing list of points, whose memory counts for the table. */
typedef struct {
    point_t *points;
    int64_t count;
    int64_t capacity;
} list_t;

static frontier_t *frontier_of(const rotor_revolve_t *t, int64_t i, int64_t l) {
    return t->frontiers + l * (l + 1) / 2 + i;
}

static int revolve_reserve(rotor_revolve_t *t, int64_t count, size_t size, void *place) {
    return rotor_malloc_part(count, size, t->max_table_bytes, &t->table_bytes, place);
}

/* Makes room for `capacity` points; what was in the list is lost. */
static int list_reserve(rotor_revolve_t *t, list_t *list, int64_t capacity) {
    list->count = 0;
    if (capacity <= list->capacity) {
        return ROTOR_OK;
    }
    rotor_free(list->points);
    t->table_bytes -= list->capacity * (int64_t)sizeof(point_t);
    *list = (list_t){.points = NULL, .count = 0, .capacity = 0};
    int ret = revolve_reserve(t, 2 * capacity, sizeof(point_t), &list->points);
    list->capacity = ret == ROTOR_OK ? 2 * capacity : 0;
    return ret;
}

/* Points come by ascending bytes. */
static void list_add(list_t *list, int64_t bytes, int64_t ns) {
    if (list->count > 0 && list->points[list->count - 1].ns <= ns) {
        return;
    }
    if (list->count > 0 && list->points[list->count - 1].bytes == bytes) {
        list->count--;
    }
    list->points[list->count++] = (point_t){.bytes = bytes, .ns = ns};
}

/* The number of points that take at most `bytes`, given that at least `low` do. */
static int64_t count_within(const point_t *points, int64_t count, int64_t low, int64_t bytes) {
    int64_t step = 1;
    while (low + step <= count && points[low + step - 1].bytes <= bytes) {
        low += step;
        step *= 2;
    }
    int64_t high = rotor_min(count, low + step - 1);
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (points[middle].bytes <= bytes) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

static int64_t revolve_value(const point_t *points, int64_t count, int64_t bytes) {
    int64_t within = count_within(points, count, 0, bytes);
    return within == 0 ? ROTOR_NEVER : points[within - 1].ns;
}

/* The leaf of (i, l): what it needs, or ROTOR_NEVER where (i, l) has none. */
static int64_t need_leaf(const rotor_chain_t *c, int64_t i, int64_t l) {
    if (i == c->n) {
        return rotor_chain_need_loss(c);
    }
    if (i < l && !(i == c->n - 1 && l == c->n)) {
        return ROTOR_NEVER;
    }
    int64_t need = rotor_chain_need_tape(c, i, l);
    return i == l ? need : rotor_max(need, c->xbar[i] + rotor_chain_need_loss(c));
}

/* A split's time: add + right(m - shift) + left(m), from `start` on. */
typedef struct {
    const frontier_t *right;
    const frontier_t *left;
    int64_t shift;
    int64_t add;
    int64_t start;
    int64_t floor; /* its time with memory to spare */
} split_t;

enum { LEAP = 16 };

/*
 * The least m, to within a leap, at which the split beats current; -1 where it never does. Both
 * fall with m: what does not beat current(m) at a later m beats it nowhere in between.
 */
static int64_t first_gain(const list_t *current, const split_t *split) {
    const frontier_t *right = split->right;
    const frontier_t *left = split->left;
    int64_t m = split->start;
    int64_t p = count_within(right->points, right->count, 1, m - split->shift);
    int64_t q = count_within(left->points, left->count, 1, m);
    int64_t k = 0;

    for (;;) {
        k = count_within(current->points, current->count, k, m);
        int64_t value = k == 0 ? ROTOR_NEVER : current->points[k - 1].ns;
        int64_t next = INT64_MAX;
        if (split->floor >= value) {
            return -1;
        }
        if (p < right->count) {
            int64_t far = rotor_min(p + LEAP, right->count) - 1;
            next = right->points[far].bytes + split->shift;
        }
        if (q < left->count) {
            int64_t far = rotor_min(q + LEAP, left->count) - 1;
            next = rotor_min(next, left->points[far].bytes);
        }
        bool last = next == INT64_MAX;
        if (!last) {
            p = count_within(right->points, right->count, p, next - split->shift);
            q = count_within(left->points, left->count, q, next);
        }
        if (split->add + right->points[p - 1].ns + left->points[q - 1].ns < value) {
            return m;
        }
        if (last) {
            return -1;
        }
        m = next;
    }
}

/* out = the better of current and the split, which gains nothing below m. */
static void revolve_fold(const list_t *current, const split_t *split, int64_t m, list_t *out) {
    const frontier_t *right = split->right;
    const frontier_t *left = split->left;
    int64_t p = count_within(right->points, right->count, 1, m - split->shift);
    int64_t q = count_within(left->points, left->count, 1, m);
    int64_t k = count_within(current->points, current->count, 0, m);

    memcpy(out->points, current->points, (size_t)k * sizeof(point_t));
    out->count = k;
    for (;;) {
        for (; k < current->count && current->points[k].bytes <= m; k++) {
            list_add(out, current->points[k].bytes, current->points[k].ns);
        }
        list_add(out, m, split->add + right->points[p - 1].ns + left->points[q - 1].ns);
        int64_t next_right =
            p < right->count ? right->points[p].bytes + split->shift : INT64_MAX;
        int64_t next_left = q < left->count ? left->points[q].bytes : INT64_MAX;
        m = rotor_min(next_right, next_left);
        if (m == INT64_MAX || out->points[out->count - 1].ns <= split->floor) {
            break;
        }
        p += next_right == m;
        q += next_left == m;
    }
    for (; k < current->count; k++) {
        list_add(out, current->points[k].bytes, current->points[k].ns);
    }
}

static int solve_interval(rotor_revolve_t *t, int64_t i, int64_t l, list_t *current, list_t *next) {
    const rotor_chain_t *c = t->chain;
    frontier_t *frontier = frontier_of(t, i, l);
    int64_t leaf = need_leaf(c, i, l);
    int64_t need = 0;
    int ret = list_reserve(t, current, 1);

    if (ret == ROTOR_OK && leaf < ROTOR_NEVER) {
        list_add(current, leaf, 0);
    }
    for (int64_t j = i + 1; j <= l && ret == ROTOR_OK; j++) {
        const frontier_t *right = frontier_of(t, j, l);
        const frontier_t *left = frontier_of(t, i, j - 1);
        need = rotor_max(need, rotor_chain_need_fn(c, i, l, j - 1));
        if (need >= ROTOR_NEVER) {
            break;
        }
        split_t split = {.right = right, .left = left, .shift = c->x[j]};
        split.add = c->forward_sum[j] - c->forward_sum[i];
        split.floor =
            split.add + right->points[right->count - 1].ns + left->points[left->count - 1].ns;
        split.start =
            rotor_max(need, rotor_max(right->points[0].bytes + c->x[j], left->points[0].bytes));
        int64_t gain = first_gain(current, &split);
        if (gain < 0) {
            continue;
        }
        ret = list_reserve(t, next, current->count + right->count + left->count);
        if (ret == ROTOR_OK) {
            revolve_fold(current, &split, gain, next);
            list_t swapped = *current;
            *current = *next;
            *next = swapped;
        }
    }
    if (ret == ROTOR_OK) {
        ret = revolve_reserve(t, current->count, sizeof(point_t), &frontier->points);
    }
    if (ret == ROTOR_OK) {
        memcpy(frontier->points, current->points, (size_t)current->count * sizeof(point_t));
        frontier->count = current->count;
    }
    return ret;
}

static int make_curve(rotor_revolve_t *t) {
    const frontier_t *root = frontier_of(t, 0, t->chain->n);
    int64_t ideal = rotor_chain_ideal_ns(t->chain);
    int ret = revolve_reserve(t, root->count, sizeof(int64_t), &t->curve_bytes);

    if (ret == ROTOR_OK) {
        ret = revolve_reserve(t, root->count, sizeof(int64_t), &t->curve_ns);
    }
    if (ret == ROTOR_OK) {
        t->curve_count = root->count;
        for (int64_t k = 0; k < root->count; k++) {
            t->curve_bytes[k] = t->chain->x[0] + root->points[k].bytes;
            t->curve_ns[k] = ideal + root->points[k].ns;
        }
    }
    return ret;
}

void rotor_revolve_init(rotor_revolve_t *self) { memset(self, 0, sizeof(*self)); }

void rotor_revolve_free(rotor_revolve_t *self) {
    if (self->frontiers != NULL) {
        int64_t n = self->chain->n;
        for (int64_t k = 0; k < (n + 1) * (n + 2) / 2; k++) {
            rotor_free(self->frontiers[k].points);
        }
    }
    rotor_free(self->frontiers);
    rotor_free(self->curve_bytes);
    rotor_free(self->curve_ns);
    memset(self, 0, sizeof(*self));
}

int rotor_revolve_solve(rotor_revolve_t *self, const rotor_chain_t *chain, int64_t max_table_bytes,
                        const rotor_callback_t *callback) {
    int64_t n = chain->n;
    int64_t intervals = (n + 1) * (n + 2) / 2;
    list_t current = {.points = NULL, .count = 0, .capacity = 0};
    list_t next = {.points = NULL, .count = 0, .capacity = 0};
    int ret;

    rotor_revolve_init(self);
    for (int64_t i = 0; i < n - 1; i++) {
        if (chain->once[i] != 0) {
            return ROTOR_ERR_ONCE;
        }
    }
    if (!rotor_chain_times_fit(chain)) {
        return ROTOR_ERR_OVERFLOW;
    }
    self->chain = chain;
    self->max_table_bytes = max_table_bytes;
    ret = revolve_reserve(self, intervals, sizeof(*self->frontiers), &self->frontiers);
    if (ret != ROTOR_OK) {
        goto out;
    }
    memset(self->frontiers, 0, (size_t)intervals * sizeof(*self->frontiers));
    for (int64_t l = 0; l <= n && ret == ROTOR_OK; l++) {
        for (int64_t i = l; i >= 0 && ret == ROTOR_OK; i--) {
            ret = solve_interval(self, i, l, &current, &next);
            if (ret == ROTOR_OK) {
                ret = rotor_ask(callback, l * (l + 1) / 2 + l - i, intervals);
            }
        }
    }
    if (ret == ROTOR_OK) {
        ret = make_curve(self);
    }
out:
    self->table_bytes -= (current.capacity + next.capacity) * (int64_t)sizeof(point_t);
    rotor_free(current.points);
    rotor_free(next.points);
    if (ret != ROTOR_OK) {
        rotor_revolve_free(self);
    }
    return ret;
}

typedef struct {
    int64_t i, l, m;
} revolve_task_t;

/* The split of (i, l) on m bytes; i for a leaf. */
static int64_t find_split(const rotor_revolve_t *t, const revolve_task_t *task) {
    const rotor_chain_t *c = t->chain;
    const frontier_t *frontier = frontier_of(t, task->i, task->l);
    int64_t value = revolve_value(frontier->points, frontier->count, task->m);
    int64_t need = 0;
    int64_t j = task->i;

    if (value == 0 && need_leaf(c, task->i, task->l) <= task->m) {
        return j;
    }
    for (j = task->i + 1; j <= task->l; j++) {
        const frontier_t *right = frontier_of(t, j, task->l);
        const frontier_t *left = frontier_of(t, task->i, j - 1);
        need = rotor_max(need, rotor_chain_need_fn(c, task->i, task->l, j - 1));
        int64_t add = c->forward_sum[j] - c->forward_sum[task->i];
        if (need <= task->m && add + revolve_value(right->points, right->count, task->m - c->x[j]) +
                                       revolve_value(left->points, left->count, task->m) ==
                                   value) {
            break;
        }
    }
    return j;
}

int rotor_revolve_sequence(const rotor_revolve_t *self, int64_t budget, rotor_sequence_t *sequence,
                           int64_t *minimum) {
    const rotor_chain_t *c = self->chain;
    int64_t n = c->n;
    int64_t first = sequence->length;
    int64_t count = 0;
    int ret = ROTOR_OK;

    *minimum = self->curve_bytes[0];
    if (budget < *minimum) {
        return ROTOR_ERR_INFEASIBLE;
    }
    revolve_task_t *stack = rotor_malloc_array(n + 2, sizeof(*stack));
    if (stack == NULL) {
        return ROTOR_ERR_NO_MEMORY;
    }
    stack[count++] = (revolve_task_t){.i = 0, .l = n, .m = budget - c->x[0]};
    while (count > 0 && ret == ROTOR_OK) {
        revolve_task_t task = stack[--count];
        int64_t j = find_split(self, &task);
        if (j > task.i) {
            stack[count++] = (revolve_task_t){.i = task.i, .l = j - 1, .m = task.m};
            stack[count++] = (revolve_task_t){.i = j, .l = task.l, .m = task.m - c->x[j]};
            ret = rotor_sequence_append_forward(sequence, task.i, j);
        } else if (task.i == n) {
            ret = rotor_sequence_append(sequence, ROTOR_LOSS, n);
        } else {
            ret = rotor_sequence_append(sequence, ROTOR_FE, task.i);
            if (ret == ROTOR_OK && task.l > task.i) {
                ret = rotor_sequence_append(sequence, ROTOR_LOSS, n);
            }
            if (ret == ROTOR_OK) {
                ret = rotor_sequence_append(sequence, ROTOR_B, task.i);
            }
        }
    }
    rotor_free(stack);
    if (ret != ROTOR_OK) {
        sequence->length = first;
    }
    return ret;
}
