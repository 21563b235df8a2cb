#include "floating.h"

#include <string.h>

enum { CHUNK_VALUES = 1 << 17 };

typedef struct floating_chunk {
    struct floating_chunk *next;
    int64_t values[];
} floating_chunk_t;

typedef rotor_floating_t table_t;
typedef rotor_floating_row_t row_t;

/* State (b, s, l) is one of (l + 1)(l + 2)/2 of its l, ordered by b, then s. */
static row_t *row_of(const table_t *t, int64_t b, int64_t s, int64_t l) {
    int64_t before = l * (l + 1) * (l + 2) / 6;
    return t->rows + before + b * (l + 1) - b * (b - 1) / 2 + (s - b);
}

static int64_t floating_value(const row_t *row, int64_t m) {
    if (row->count == 0 || m < row->low) {
        return ROTOR_NEVER;
    }
    return row->values[rotor_min(m - row->low, row->count - 1)];
}

/* Anything that no row has room for is top + 1. */
static int64_t floating_to_slots(const table_t *t, int64_t bytes) {
    if (bytes / t->room > t->top / t->slots) {
        return t->top + 1;
    }
    return rotor_min(rotor_discretise(bytes, t->room, t->slots), t->top + 1);
}

/* m that a forward of stage b needs; x[b] is in it where the state owns x[b]. */
static int64_t need_forward(const rotor_chain_t *c, int64_t b, int64_t s, int64_t l) {
    int64_t own = b < s ? c->x[b] : 0;
    return rotor_chain_need_fn(c, b, l, b) + own;
}

/*
 * A choice in state (b, s, l): `right` is the state that comes first, on m - shift slots; `left`,
 * if any, the state that comes then, on m. Bytes likewise.
 */
typedef struct {
    const row_t *right;
    const row_t *left;
    int64_t shift;
    int64_t shift_bytes;
    int64_t add;
    int64_t right_s;
    int64_t t;
} floating_choice_t;

/* Fe(b), or the checkpoint that moves on. */
static floating_choice_t choice_single(const table_t *k, int64_t b, int64_t s, int64_t l) {
    const rotor_chain_t *c = k->chain;
    floating_choice_t choice = {.right = NULL, .left = NULL, .t = -1};

    if (b == s) {
        choice.right = b == l ? NULL : row_of(k, b + 1, b + 1, l);
        choice.shift = k->xbar[b];
        choice.shift_bytes = c->xbar[b];
        choice.right_s = b + 1;
    } else {
        bool owns = b + 1 < s;
        choice.right = row_of(k, b + 1, s, l);
        choice.shift = owns ? 0 : k->x[b + 1];
        choice.shift_bytes = owns ? 0 : c->x[b + 1];
        choice.add = c->forward_ns[b];
        choice.right_s = s;
    }
    return choice;
}

static floating_choice_t choice_split(const table_t *k, int64_t b, int64_t s, int64_t l,
                                      int64_t t) {
    const rotor_chain_t *c = k->chain;
    floating_choice_t choice = {.right = row_of(k, b + 1, t + 1, l), .left = row_of(k, b, s, t)};

    if (b < s) {
        choice.shift = k->x[b];
        choice.shift_bytes = c->x[b];
    }
    if (t == b) {
        choice.shift += k->x[b + 1];
        choice.shift_bytes += c->x[b + 1];
    }
    choice.add = c->forward_ns[b];
    choice.right_s = t + 1;
    choice.t = t;
    return choice;
}

static int64_t choice_least(const floating_choice_t *choice) {
    int64_t least = choice->right == NULL ? 0 : choice->right->least + choice->shift_bytes;
    return choice->left == NULL ? least : rotor_max(least, choice->left->least);
}

static int64_t choice_value(const floating_choice_t *choice, int64_t m) {
    int64_t right = choice->right == NULL ? 0 : floating_value(choice->right, m - choice->shift);
    int64_t left = choice->left == NULL ? 0 : floating_value(choice->left, m);
    return right == ROTOR_NEVER || left == ROTOR_NEVER ? ROTOR_NEVER : choice->add + right + left;
}

static int64_t need_single(const rotor_chain_t *c, int64_t b, int64_t s, int64_t l) {
    if (b == c->n) {
        return rotor_chain_need_loss(c);
    }
    return b == s ? rotor_chain_need_tape(c, b, l) : need_forward(c, b, s, l);
}

static int64_t least_of(const table_t *k, int64_t b, int64_t s, int64_t l) {
    const rotor_chain_t *c = k->chain;
    int64_t least = need_single(c, b, s, l);

    if (b == c->n) {
        return least;
    }
    floating_choice_t choice = choice_single(k, b, s, l);
    least = rotor_max(least, choice_least(&choice));
    if (s < l) {
        int64_t forward = need_forward(c, b, s, l);
        for (int64_t t = s; t < l; t++) {
            choice = choice_split(k, b, s, l, t);
            least = rotor_min(least, rotor_max(forward, choice_least(&choice)));
        }
    }
    return least;
}

/* current[m] = min(current[m], choice at m), for from <= m <= top. */
static void floating_fold(const table_t *k, int64_t *current, int64_t from,
                          const floating_choice_t *choice) {
    static const int64_t zero = 0;
    const row_t none = {.values = &zero, .low = 0, .count = 1};
    const row_t *right = choice->right == NULL ? &none : choice->right;
    const row_t *left = choice->left == NULL ? &none : choice->left;
    int64_t shift = choice->right == NULL ? 0 : choice->shift;
    int64_t end = k->top + 1;

    if (right->count == 0 || left->count == 0) {
        return;
    }
    int64_t m = rotor_max(from, rotor_max(right->low + shift, left->low));
    int64_t right_end = right->low + shift + right->count - 1;
    int64_t left_end = left->low + left->count - 1;
    int64_t right_last = choice->add + right->values[right->count - 1];
    int64_t left_last = left->values[left->count - 1];
    /* Rows fall with m: where current is at the choice's floor, nothing can be gained. */
    while (end > m && current[end - 1] <= right_last + left_last) {
        end--;
    }
    const int64_t *r = right->values - right->low;
    const int64_t *q = left->values - left->low;
    int64_t both = rotor_min(end, rotor_min(right_end, left_end));
    for (; m < both; m++) {
        current[m] = rotor_min(current[m], choice->add + r[m - shift] + q[m]);
    }
    for (int64_t stop = rotor_min(end, right_end); m < stop; m++) {
        current[m] = rotor_min(current[m], choice->add + r[m - shift] + left_last);
    }
    for (int64_t stop = rotor_min(end, left_end); m < stop; m++) {
        current[m] = rotor_min(current[m], right_last + q[m]);
    }
    for (; m < end; m++) {
        current[m] = rotor_min(current[m], right_last + left_last);
    }
}

static void fill_scratch(const table_t *k, int64_t b, int64_t s, int64_t l) {
    const rotor_chain_t *c = k->chain;
    int64_t single = floating_to_slots(k, need_single(c, b, s, l));
    floating_choice_t choice = {.right = NULL, .left = NULL};

    for (int64_t m = 0; m <= k->top; m++) {
        k->scratch[m] = ROTOR_NEVER;
    }
    if (b < c->n) {
        choice = choice_single(k, b, s, l);
    }
    floating_fold(k, k->scratch, single, &choice);
    if (s < l) {
        int64_t forward = floating_to_slots(k, need_forward(c, b, s, l));
        for (int64_t t = s; t < l; t++) {
            choice = choice_split(k, b, s, l, t);
            floating_fold(k, k->scratch, forward, &choice);
        }
    }
}

/* All memory of the table comes from here. */
static int floating_reserve(table_t *k, int64_t count, size_t size, void *place) {
    return rotor_malloc_part(count, size, k->max_table_bytes, &k->table_bytes, place);
}

static int store_row(table_t *k, row_t *row) {
    const int64_t *scratch = k->scratch;
    int64_t low = 0;
    int64_t high = k->top;
    floating_chunk_t *chunk = k->chunks;

    row->values = NULL;
    row->low = 0;
    row->count = 0;
    if (scratch[high] >= ROTOR_NEVER) {
        return ROTOR_OK;
    }
    while (scratch[low] >= ROTOR_NEVER) {
        low++;
    }
    while (high > low && scratch[high - 1] == scratch[high]) {
        high--;
    }
    int64_t count = high - low + 1;
    if (k->chunk_left < count) {
        int64_t values = rotor_max(count, CHUNK_VALUES);
        int64_t budget = (k->max_table_bytes - k->table_bytes - (int64_t)sizeof(*chunk)) /
                         (int64_t)sizeof(*scratch);
        values = rotor_max(count, rotor_min(values, budget));
        int ret = floating_reserve(k, values + 1, sizeof(*scratch), &chunk);
        if (ret != ROTOR_OK) {
            return ret;
        }
        chunk->next = k->chunks;
        k->chunks = chunk;
        k->chunk_left = values;
    }
    /* A chunk is filled from its end: what is left is its beginning. */
    k->chunk_left -= count;
    memcpy(chunk->values + k->chunk_left, scratch + low, (size_t)count * sizeof(*scratch));
    row->values = chunk->values + k->chunk_left;
    row->low = (int32_t)low;
    row->count = (int32_t)count;
    return ROTOR_OK;
}

/* States in an order in which each comes after the states that it needs. x[0] never moves: b = 0 < s is unused. */
static int fill(table_t *k, bool least, const rotor_callback_t *callback) {
    int64_t n = k->chain->n;
    int64_t total = (n + 1) * (n + 2) * (n + 3) / 6;
    int ret = ROTOR_OK;

    for (int64_t l = 0; l <= n; l++) {
        for (int64_t b = l; b >= 0; b--) {
            for (int64_t s = b; s <= (b == 0 ? 0 : l); s++) {
                row_t *row = row_of(k, b, s, l);
                if (least) {
                    row->least = least_of(k, b, s, l);
                    continue;
                }
                fill_scratch(k, b, s, l);
                ret = store_row(k, row);
                if (ret != ROTOR_OK) {
                    return ret;
                }
            }
            int64_t done = row_of(k, 0, 0, l) - k->rows;
            ret = rotor_ask(callback, least ? 0 : done, total);
            if (ret != ROTOR_OK) {
                return ret;
            }
        }
    }
    return ret;
}

void rotor_floating_free(rotor_floating_t *self) {
    floating_chunk_t *chunk = self->chunks;
    while (chunk != NULL) {
        floating_chunk_t *next = chunk->next;
        rotor_free(chunk);
        chunk = next;
    }
    rotor_free(self->rows);
    rotor_free(self->x);
    rotor_free(self->xbar);
    rotor_free(self->scratch);
    memset(self, 0, sizeof(*self));
}

static int floating_prepare(table_t *k) {
    const rotor_chain_t *c = k->chain;
    int64_t states = (c->n + 1) * (c->n + 2) * (c->n + 3) / 6;
    int ret;

    if ((ret = floating_reserve(k, states, sizeof(*k->rows), &k->rows)) != ROTOR_OK ||
        (ret = floating_reserve(k, c->n + 1, sizeof(*k->x), &k->x)) != ROTOR_OK ||
        (ret = floating_reserve(k, c->n, sizeof(*k->xbar), &k->xbar)) != ROTOR_OK ||
        (ret = floating_reserve(k, k->top + 1, sizeof(*k->scratch), &k->scratch)) != ROTOR_OK) {
        return ret;
    }
    for (int64_t i = 0; i <= c->n; i++) {
        k->x[i] = floating_to_slots(k, c->x[i]);
    }
    for (int64_t i = 0; i < c->n; i++) {
        k->xbar[i] = floating_to_slots(k, c->xbar[i]);
    }
    return ROTOR_OK;
}

int rotor_floating_solve(rotor_floating_t *self, const rotor_chain_t *chain, int64_t budget,
                         int64_t slots, int64_t max_table_bytes, const rotor_callback_t *callback,
                         int64_t *minimum) {
    int ret;

    memset(self, 0, sizeof(*self));
    if (slots < 1 || slots > INT32_MAX / 2) {
        return ROTOR_ERR_BAD_SLOTS;
    }
    if (budget < 1 || budget > INT64_MAX / 4) {
        return ROTOR_ERR_BAD_BUDGET;
    }
    if (!rotor_chain_times_fit(chain)) {
        return ROTOR_ERR_OVERFLOW;
    }
    self->chain = chain;
    self->budget = budget;
    self->slots = slots;
    self->room = rotor_max(budget - chain->x[0], 1);
    self->within = budget > chain->x[0] ? slots : 0;
    self->top = self->within + chain->n + 2;
    self->max_table_bytes = max_table_bytes;
    if ((ret = floating_prepare(self)) == ROTOR_OK &&
        (ret = fill(self, true, callback)) == ROTOR_OK) {
        *minimum = chain->x[0] + row_of(self, 0, 0, chain->n)->least;
        ret = *minimum > budget ? ROTOR_ERR_INFEASIBLE : fill(self, false, callback);
    }
    if (ret != ROTOR_OK) {
        rotor_floating_free(self);
    }
    return ret;
}

/* A part that remains to be emitted: state (b, s, l), or B(b) where s < 0. `m` is slots, or bytes. */
typedef struct {
    int64_t b, s, l, m;
} floating_task_t;

typedef struct {
    const table_t *table;
    bool least; /* any schedule of m bytes, not the fastest on m slots */
    rotor_sequence_t *sequence;
    floating_task_t *tasks;
    int64_t count;
} trace_t;

static bool takes(const trace_t *trace, const floating_choice_t *choice, int64_t need,
                  const floating_task_t *task) {
    const table_t *k = trace->table;
    if (trace->least) {
        return rotor_max(need, choice_least(choice)) <= task->m;
    }
    int64_t value = floating_value(row_of(k, task->b, task->s, task->l), task->m);
    return task->m >= floating_to_slots(k, need) && choice_value(choice, task->m) == value;
}

static void floating_push(trace_t *trace, int64_t b, int64_t s, int64_t l, int64_t m) {
    trace->tasks[trace->count++] = (floating_task_t){.b = b, .s = s, .l = l, .m = m};
}

static int expand(trace_t *trace, const floating_task_t *task) {
    const table_t *k = trace->table;
    const rotor_chain_t *c = k->chain;
    int64_t b = task->b;
    int64_t s = task->s;
    int64_t l = task->l;
    int64_t forward;
    enum rotor_kind kind;

    if (s < 0) {
        return rotor_sequence_append(trace->sequence, ROTOR_B, b);
    }
    if (b == c->n) {
        return rotor_sequence_append(trace->sequence, ROTOR_LOSS, b);
    }
    floating_choice_t choice = choice_single(k, b, s, l);
    if (takes(trace, &choice, need_single(c, b, s, l), task)) {
        kind = b == s ? ROTOR_FE : ROTOR_FN;
        if (b == s) {
            floating_push(trace, b, -1, b, 0);
        }
    } else {
        kind = ROTOR_FCK;
        forward = need_forward(c, b, s, l);
        for (int64_t t = s; t < l; t++) {
            choice = choice_split(k, b, s, l, t);
            if (takes(trace, &choice, forward, task)) {
                break;
            }
        }
        floating_push(trace, b, s, choice.t, task->m);
    }
    if (choice.right != NULL) {
        int64_t shift = trace->least ? choice.shift_bytes : choice.shift;
        floating_push(trace, b + 1, choice.right_s, l, task->m - shift);
    }
    return rotor_sequence_append(trace->sequence, kind, b);
}

/* Leaves the sequence as it was when it fails. */
static int trace_schedule(const table_t *k, bool least, int64_t m, rotor_sequence_t *sequence) {
    int64_t n = k->chain->n;
    int64_t length = sequence->length;
    trace_t trace = {.table = k, .least = least, .sequence = sequence, .count = 0};
    int ret = ROTOR_OK;

    /* The states that wait are disjoint intervals of stages, the backwards that wait distinct. */
    trace.tasks = rotor_malloc_array(2 * n + 4, sizeof(*trace.tasks));
    if (trace.tasks == NULL) {
        return ROTOR_ERR_NO_MEMORY;
    }
    floating_push(&trace, 0, 0, n, m);
    while (trace.count > 0 && ret == ROTOR_OK) {
        floating_task_t task = trace.tasks[--trace.count];
        ret = expand(&trace, &task);
    }
    rotor_free(trace.tasks);
    if (ret != ROTOR_OK) {
        sequence->length = length;
    }
    return ret;
}

static int simulate_tail(const table_t *k, const rotor_sequence_t *sequence, int64_t first,
                         rotor_result_t *result) {
    return rotor_simulate(k->chain, sequence->ops + first, sequence->length - first, result, NULL,
                          NULL);
}

/* The fastest of the slots' optima that fits, from the most slots down; found tells. */
static int trace_slots(const table_t *k, rotor_sequence_t *sequence, bool *found,
                       int64_t *time_ns) {
    const row_t *root = row_of(k, 0, 0, k->chain->n);
    int64_t first = sequence->length;
    int64_t lowest = root->count == 0 ? ROTOR_NEVER : rotor_max(k->within, root->low);
    rotor_result_t result;
    int ret = ROTOR_OK;

    *found = false;
    for (int64_t m = k->top; m >= lowest && ret == ROTOR_OK && !*found; m--) {
        /* Of equal times, the fewest slots. */
        if (m > lowest && floating_value(root, m - 1) == floating_value(root, m)) {
            continue;
        }
        sequence->length = first;
        ret = trace_schedule(k, false, m, sequence);
        if (ret == ROTOR_OK) {
            ret = simulate_tail(k, sequence, first, &result);
        }
        if (ret == ROTOR_OK) {
            *found = result.peak <= k->budget;
            *time_ns = result.time_ns;
        }
    }
    if (!*found) {
        sequence->length = first;
    }
    return ret;
}

int rotor_floating_sequence(const rotor_floating_t *self, rotor_sequence_t *sequence) {
    const row_t *root = row_of(self, 0, 0, self->chain->n);
    int64_t first = sequence->length;
    int64_t time_ns = 0;
    bool found;
    rotor_result_t least;
    int ret = trace_slots(self, sequence, &found, &time_ns);
    int64_t middle = sequence->length;

    if (ret == ROTOR_OK) {
        ret = trace_schedule(self, true, root->least, sequence);
    }
    if (ret == ROTOR_OK) {
        ret = simulate_tail(self, sequence, middle, &least);
    }
    if (ret != ROTOR_OK) {
        sequence->length = first;
    } else if (found && time_ns <= least.time_ns) {
        sequence->length = middle;
    } else {
        memmove(sequence->ops + first, sequence->ops + middle,
                (size_t)(sequence->length - middle) * sizeof(*sequence->ops));
        sequence->length -= middle - first;
    }
    return ret;
}

static int add_point(const table_t *k, const rotor_sequence_t *sequence, int64_t *count,
                     int64_t *bytes, int64_t *ns) {
    rotor_result_t result;
    int ret = simulate_tail(k, sequence, 0, &result);
    int64_t kept = *count;

    if (ret != ROTOR_OK || (kept > 0 && ns[kept - 1] <= result.time_ns)) {
        return ret;
    }
    /* Points come by descending time: points that need as much or more go. */
    while (kept > 0 && bytes[kept - 1] >= result.peak) {
        kept--;
    }
    bytes[kept] = result.peak;
    ns[kept] = result.time_ns;
    *count = kept + 1;
    return ROTOR_OK;
}

int rotor_floating_curve(const rotor_floating_t *self, const rotor_callback_t *callback,
                         int64_t *count, int64_t **bytes, int64_t **ns) {
    const row_t *root = row_of(self, 0, 0, self->chain->n);
    rotor_sequence_t sequence;
    int64_t found = 0;
    int64_t *found_bytes = rotor_malloc_array(root->count + 1, sizeof(int64_t));
    int64_t *found_ns = rotor_malloc_array(root->count + 1, sizeof(int64_t));
    int ret = ROTOR_ERR_NO_MEMORY;

    rotor_sequence_init(&sequence);
    if (found_bytes == NULL || found_ns == NULL) {
        goto out;
    }
    ret = trace_schedule(self, true, root->least, &sequence);
    if (ret == ROTOR_OK) {
        ret = add_point(self, &sequence, &found, found_bytes, found_ns);
    }
    for (int32_t m = 0; m < root->count && ret == ROTOR_OK; m++) {
        if (m > 0 && root->values[m] == root->values[m - 1]) {
            continue;
        }
        sequence.length = 0;
        ret = trace_schedule(self, false, root->low + m, &sequence);
        if (ret == ROTOR_OK) {
            ret = add_point(self, &sequence, &found, found_bytes, found_ns);
        }
        if (ret == ROTOR_OK) {
            ret = rotor_ask(callback, m, root->count);
        }
    }
    if (ret != ROTOR_OK) {
        goto out;
    }
    *count = found;
    *bytes = found_bytes;
    *ns = found_ns;
    found_bytes = found_ns = NULL;
out:
    rotor_sequence_free(&sequence);
    rotor_free(found_bytes);
    rotor_free(found_ns);
    return ret;
}
