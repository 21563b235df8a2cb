/* Medians of times and the end of repeats. */
#include "testing.h"
#include "timing.h"

static int64_t median_of(const int64_t *samples, int64_t count, double tolerance, bool *is_stable) {
    int64_t median = -1;
    CHECK(rotor_timing_median(samples, count, tolerance, &median, is_stable) == ROTOR_OK);
    return median;
}

static void test_medians(void) {
    static const struct {
        int64_t samples[7];
        int64_t count;
        double tolerance;
        int64_t median;
        bool is_stable;
    } rows[] = {
        {{100}, 1, 1.0, 100, false},
        {{100, 100}, 2, 1.0, 100, false},
        {{0, 0, 0}, 3, 0.0, 0, true},
        {{90, 100, 110}, 3, 0.1, 100, true},
        {{90, 100, 110}, 3, 0.09, 100, false},
        {{105, 100, 95, 9000, 100}, 5, 0.05, 100, true}, /* one slow sample does not count */
        {{110, 100, 90, 9000, 100}, 5, 0.04, 100, false},
        {{1, 100, 100, 100, 900, 100, 100}, 7, 0.0, 100, true},
        {{1, 2, 3, 4}, 4, 0.5, 2, false}, /* 2.5: to the even one */
        {{1, 4, 3, 2}, 4, 0.6, 2, true},
        {{3, 4}, 2, 1.0, 4, false},
        {{-3, -2}, 2, 1.0, -2, false},
    };
    for (size_t k = 0; k < sizeof(rows) / sizeof(rows[0]); k++) {
        bool is_stable = !rows[k].is_stable;
        CHECK(median_of(rows[k].samples, rows[k].count, rows[k].tolerance, &is_stable) ==
              rows[k].median);
        CHECK(is_stable == rows[k].is_stable);
    }
}

static void test_samples_stay_as_they_are(void) {
    int64_t samples[] = {3, 1, 2};
    bool is_stable;
    CHECK(median_of(samples, 3, 0.5, &is_stable) == 2);
    CHECK(samples[0] == 3 && samples[1] == 1 && samples[2] == 2);
}

static void test_failures_leave_the_outputs(void) {
    int64_t samples[] = {3, 1, 2};
    int64_t median = 7;
    bool is_stable = true;
    CHECK(rotor_timing_median(samples, 0, 1.0, &median, &is_stable) == ROTOR_ERR_BAD_LENGTH);
    rotor_testing_fail_after(1);
    CHECK(rotor_timing_median(samples, 3, 1.0, &median, &is_stable) == ROTOR_ERR_NO_MEMORY);
    rotor_testing_fail_after(0);
    CHECK(median == 7 && is_stable);
}

static void test_repeats_end(void) {
    rotor_timing_rule_t rule = {.min_repeats = 3, .max_repeats = 5, .most_ns = 100};
    CHECK(!rotor_timing_is_enough(&rule, 2, true, 99));
    CHECK(rotor_timing_is_enough(&rule, 3, true, 99) &&
          !rotor_timing_is_enough(&rule, 3, false, 99));
    CHECK(rotor_timing_is_enough(&rule, 5, false, 0));
    CHECK(rotor_timing_is_enough(&rule, 1, false, 100));
    rule.min_comes_first = true;
    CHECK(!rotor_timing_is_enough(&rule, 2, true, 1000) &&
          rotor_timing_is_enough(&rule, 3, false, 1000));
}

static const test_case_t cases[] = {
    {"medians", test_medians},
    {"samples_stay_as_they_are", test_samples_stay_as_they_are},
    {"failures_leave_the_outputs", test_failures_leave_the_outputs},
    {"repeats_end", test_repeats_end},
};

TEST_MAIN(cases)
