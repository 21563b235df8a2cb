#include "revolve.h"

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
