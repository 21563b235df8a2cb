#include "chains.h"
#include "envelope.h"

enum { MOST = 12, LONGEST = 40, RANGE = 200 };

typedef struct {
    rotor_point_t points[2][LONGEST];
    rotor_points_t a;
    rotor_points_t b;
    bool alone;
    int64_t shift;
    int64_t base;
    int64_t need;
} function_t;

static function_t functions[MOST];

static rotor_points_t draw_points(uint64_t *state, rotor_point_t *points) {
    int64_t count = between(state, 0, 9) == 0 ? 0 : between(state, 1, LONGEST);
    int64_t bytes = between(state, 0, 30);
    int64_t excess = between(state, 2, 6) * count + between(state, 0, 5);
    for (int64_t k = 0; k < count; k++) {
        points[k] = (rotor_point_t){.bytes = bytes, .excess = excess};
        bytes += between(state, 1, 5);
        excess -= between(state, 1, 2);
    }
    return (rotor_points_t){.points = points, .count = count};
}

static int64_t value_of(const rotor_points_t *p, int64_t m) {
    if (p->count == 0 || p->points[0].bytes > m) {
        return INT64_MAX;
    }
    return p->points[rotor_last_within(p->points, 0, p->count - 1, m)].excess;
}

static int64_t least_at(int64_t count, int64_t m, int64_t limit) {
    int64_t least = INT64_MAX;
    for (int64_t k = 0; k < count; k++) {
        const function_t *f = &functions[k];
        int64_t at = m < limit ? m : limit;
        int64_t a = value_of(&f->a, at - f->shift);
        int64_t b = f->alone ? 0 : value_of(&f->b, at);
        if (at >= f->need && a != INT64_MAX && b != INT64_MAX) {
            least = rotor_min(least, f->base + a + b);
        }
    }
    return least;
}

static int64_t draw(uint64_t *state, rotor_envelope_t *envelope, int64_t limit) {
    int64_t count = between(state, 0, MOST);
    rotor_envelope_clear(envelope);
    for (int64_t k = 0; k < count; k++) {
        function_t *f = &functions[k];
        f->a = draw_points(state, f->points[0]);
        f->b = draw_points(state, f->points[1]);
        f->alone = between(state, 0, 3) == 0;
        f->shift = between(state, 0, 20);
        f->base = between(state, 0, 40);
        f->need = between(state, 0, 60);
        rotor_envelope_add(envelope, &f->a, f->shift, f->alone ? NULL : &f->b, f->base, f->need,
                           limit);
    }
    return count;
}

static void equals_the_least_of_all(void) {
    rotor_envelope_t envelope;
    uint64_t state = 3;
    CHECK(rotor_envelope_init(&envelope, MOST) == ROTOR_OK);
    for (int round = 0; round < 3000; round++) {
        int64_t limit = between(&state, 0, 2) == 0 ? between(&state, 0, RANGE) : RANGE;
        int64_t count = draw(&state, &envelope, limit);
        CHECK(rotor_envelope_solve(&envelope) == ROTOR_OK);
        rotor_points_t found = {.points = envelope.points, .count = envelope.count};
        for (int64_t k = 1; k < found.count; k++) {
            CHECK(found.points[k].bytes > found.points[k - 1].bytes);
            CHECK(found.points[k].excess < found.points[k - 1].excess);
        }
        for (int64_t m = 0; m <= RANGE; m++) {
            CHECK(value_of(&found, m) == least_at(count, m, limit));
        }
    }
    rotor_envelope_free(&envelope);
    rotor_envelope_free(&envelope);
}

static void out_of_memory(void) {
    int ret = ROTOR_ERR_NO_MEMORY;
    int64_t k = 1;
    for (; ret == ROTOR_ERR_NO_MEMORY; k++) {
        rotor_envelope_t envelope;
        uint64_t state = 5;
        rotor_testing_fail_after(k);
        ret = rotor_envelope_init(&envelope, MOST);
        for (int round = 0; round < 20 && ret == ROTOR_OK; round++) {
            draw(&state, &envelope, RANGE);
            ret = rotor_envelope_solve(&envelope);
        }
        rotor_envelope_free(&envelope);
    }
    CHECK(ret == ROTOR_OK && k > 7);
}

static const test_case_t cases[] = {
    {"equals_the_least_of_all", equals_the_least_of_all},
    {"out_of_memory", out_of_memory},
};

TEST_MAIN(cases)
