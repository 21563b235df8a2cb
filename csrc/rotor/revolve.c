#include "revolve.h"

#include "persistent.h"

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

/* m: the checkpoints that are left. */
static rotor_choice_t revolve_choose(const void *solver, int64_t i, int64_t l, int64_t m) {
    const int64_t *n = solver;
    int64_t last = rotor_min(l, *n - 1);
    if (i == last) {
        return (rotor_choice_t){.j = i};
    }
    int64_t j = m > 0 ? i + revolve_advance(last - i + 1, m) : last;
    return (rotor_choice_t){.j = j, .first = rotor_max(m - 1, 0), .second = m};
}

int rotor_revolve_schedule(int64_t n, int64_t checkpoints, rotor_sequence_t *sequence) {
    int64_t first = sequence->length;

    if (n < 1) {
        return ROTOR_ERR_BAD_LENGTH;
    }
    if (checkpoints < 0) {
        return ROTOR_ERR_BAD_SLOTS;
    }
    if (n > MAX_STAGES || rotor_revolve_forwards(n, checkpoints) > MAX_FORWARDS) {
        return ROTOR_ERR_TOO_LARGE;
    }
    int ret = rotor_persistent_walk(n, &n, revolve_choose, checkpoints, sequence);
    if (ret != ROTOR_OK) {
        sequence->length = first;
    }
    return ret;
}
