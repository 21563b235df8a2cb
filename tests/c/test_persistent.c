#include <math.h>

#include "chains.h"
#include "persistent.h"

enum { LARGE = 1 << 30 };

static draft_t draft;

/* Bytes that the schedule without recomputation needs, and more. */
static int64_t generous(const rotor_chain_t *c) {
    int64_t sum = c->x[0] + c->loss_tmp + 1;
    for (int64_t i = 0; i < c->n; i++) {
        sum += c->xbar[i] + c->fe_tmp[i] + c->fn_tmp[i] + c->grad[i] + c->pgrad[i] + c->x[i + 1] +
               (c->b_tmp[i] > 0 ? c->b_tmp[i] : 0);
    }
    return sum + c->grad[c->n];
}

static void check_within(const rotor_chain_t *chain, const rotor_sequence_t *sequence,
                         int64_t budget, rotor_result_t *result) {
    CHECK(rotor_simulate(chain, sequence->ops, sequence->length, result, NULL, NULL) == ROTOR_OK);
    CHECK(result->peak <= budget);
}

static void schedules_keep_the_budget(void) {
    rotor_sequence_t sequence;
    rotor_result_t result;
    uint64_t state = 7;
    int found = 0;

    rotor_sequence_init(&sequence);
    for (uint64_t seed = 1; seed < 400; seed++) {
        rotor_chain_t chain;
        rotor_persistent_t table;
        draft_random(&draft, 1 + (int64_t)(seed % 40), 300, seed);
        chain_from(&chain, &draft);
        int64_t budget = chain.x[0] + between(&state, 1, generous(&chain));
        int64_t slots = between(&state, 1, 200);
        CHECK(rotor_persistent_fill(&table, &chain, budget, slots, ROTOR_PRECISION_AUTO, LARGE,
                                    NULL) == ROTOR_OK);
        CHECK(!table.single);
        sequence.length = 0;
        int ret = rotor_persistent_trace(&table, &sequence);
        double excess = rotor_persistent_excess(&table, 0, chain.n, slots);
        CHECK(ret == (isinf(excess) ? ROTOR_ERR_INFEASIBLE : ROTOR_OK));
        if (ret == ROTOR_OK) {
            check_within(&chain, &sequence, budget, &result);
            CHECK(result.time_ns - rotor_chain_ideal_ns(&chain) == (int64_t)excess);
            found++;
        }
        rotor_persistent_free(&table);
        rotor_chain_free(&chain);
    }
    CHECK(found > 100);
    rotor_sequence_free(&sequence);
}

/* Small times are exact in both. */
static void single_equals_double(void) {
    for (uint64_t seed = 1; seed < 100; seed++) {
        rotor_chain_t chain;
        rotor_persistent_t one;
        rotor_persistent_t two;
        draft_random(&draft, 1 + (int64_t)(seed % 50), 100, seed);
        chain_from(&chain, &draft);
        int64_t budget = chain.x[0] + 1 + generous(&chain) / 2;
        CHECK(rotor_persistent_fill(&one, &chain, budget, 60, ROTOR_PRECISION_SINGLE, LARGE,
                                    NULL) == ROTOR_OK);
        CHECK(rotor_persistent_fill(&two, &chain, budget, 60, ROTOR_PRECISION_DOUBLE, LARGE,
                                    NULL) == ROTOR_OK);
        CHECK(one.single && !two.single && one.table_bytes * 2 == two.table_bytes);
        for (int64_t i = 0; i <= chain.n; i++) {
            for (int64_t l = i; l <= chain.n; l++) {
                double before = INFINITY;
                for (int64_t m = 0; m <= 60; m++) {
                    double value = rotor_persistent_excess(&two, i, l, m);
                    bool same = value == rotor_persistent_excess(&one, i, l, m);
                    CHECK(same && value <= before);
                    before = value;
                }
            }
        }
        rotor_persistent_free(&one);
        rotor_persistent_free(&two);
        rotor_chain_free(&chain);
    }
}

static void single_rounds_little(void) {
    rotor_chain_t chain;
    rotor_persistent_t one;
    rotor_persistent_t two;
    for (uint64_t seed = 1; seed < 12; seed++) {
        draft_random(&draft, 90, INT64_C(1) << 38, seed);
        chain_from(&chain, &draft);
        int64_t budget = chain.x[0] + 1 + generous(&chain) / 3;
        CHECK(rotor_persistent_fill(&one, &chain, budget, 100, ROTOR_PRECISION_SINGLE, LARGE,
                                    NULL) == ROTOR_OK);
        CHECK(rotor_persistent_fill(&two, &chain, budget, 100, ROTOR_PRECISION_DOUBLE, LARGE,
                                    NULL) == ROTOR_OK);
        double a = rotor_persistent_excess(&one, 0, 90, 100);
        double b = rotor_persistent_excess(&two, 0, 90, 100);
        CHECK(isinf(a) == isinf(b));
        CHECK(isinf(b) || fabs(a - b) <= b * 2 * 90 / (1 << 24));
        rotor_persistent_free(&one);
        rotor_persistent_free(&two);
        rotor_chain_free(&chain);
    }
}

static void solve_falls_back_on_single(void) {
    rotor_chain_t chain;
    rotor_persistent_t table;
    rotor_sequence_t sequence;
    rotor_result_t result;
    draft_random(&draft, 60, 100000, 4);
    chain_from(&chain, &draft);
    int64_t budget = chain.x[0] + generous(&chain) / 2;
    CHECK(rotor_persistent_fill(&table, &chain, budget, 300, ROTOR_PRECISION_DOUBLE, LARGE, NULL) ==
          ROTOR_OK);
    int64_t bytes = table.table_bytes;
    double best = rotor_persistent_excess(&table, 0, 60, 300);
    rotor_persistent_free(&table);
    CHECK(rotor_persistent_fill(&table, &chain, budget, 300, ROTOR_PRECISION_DOUBLE, bytes - 1,
                                NULL) == ROTOR_ERR_TABLE_TOO_LARGE);
    CHECK(rotor_persistent_fill(&table, &chain, budget, 300, ROTOR_PRECISION_AUTO, bytes - 1,
                                NULL) == ROTOR_OK);
    CHECK(table.single);
    rotor_persistent_free(&table);
    rotor_sequence_init(&sequence);
    CHECK(rotor_persistent_solve(&chain, budget, 300, ROTOR_PRECISION_AUTO, bytes - 1, NULL, &sequence) == ROTOR_OK);
    check_within(&chain, &sequence, budget, &result);
    double found = (double)(result.time_ns - rotor_chain_ideal_ns(&chain));
    CHECK(found >= best && found <= best * 1.0001);
    CHECK(rotor_persistent_solve(&chain, budget, 300, ROTOR_PRECISION_AUTO, bytes / 2 - 1, NULL,
                                 &sequence) ==
          ROTOR_ERR_TABLE_TOO_LARGE);
    rotor_sequence_free(&sequence);
    rotor_chain_free(&chain);
}

/* A chain on which the rounding of single adds up to more than 2^-21. */
static void solve_falls_back_on_double(void) {
    enum { N = 120, SLOTS = 60 };
    rotor_chain_t chain;
    rotor_persistent_t one;
    rotor_persistent_t two;
    rotor_sequence_t sequence;
    rotor_result_t result;
    int64_t minimum;
    draft_random(&draft, N, INT64_C(1) << 38, 39);
    chain_from(&chain, &draft);
    CHECK(rotor_persistent_minimum(&chain, LARGE, NULL, &minimum, 0, NULL) == ROTOR_OK);
    int64_t budget = chain.x[0];
    for (int64_t i = 0; i < N; i++) {
        budget += chain.xbar[i];
    }
    budget = minimum + (budget - minimum) / 5;
    CHECK(rotor_persistent_fill(&one, &chain, budget, SLOTS, ROTOR_PRECISION_SINGLE, LARGE, NULL) ==
          ROTOR_OK);
    CHECK(rotor_persistent_fill(&two, &chain, budget, SLOTS, ROTOR_PRECISION_DOUBLE, LARGE, NULL) ==
          ROTOR_OK);
    double stated = rotor_persistent_excess(&one, 0, N, SLOTS);
    double best = rotor_persistent_excess(&two, 0, N, SLOTS);
    int64_t bytes = two.table_bytes;
    CHECK(best > stated * (1.0 + 1.0 / (1 << 21)));
    rotor_persistent_free(&one);
    rotor_persistent_free(&two);
    for (int k = 0; k < 2; k++) {
        rotor_sequence_init(&sequence);
        CHECK(rotor_persistent_solve(&chain, budget, SLOTS, ROTOR_PRECISION_SINGLE,
                                     k == 0 ? LARGE : bytes - 1, NULL, &sequence) == ROTOR_OK);
        check_within(&chain, &sequence, budget, &result);
        double found = (double)(result.time_ns - rotor_chain_ideal_ns(&chain));
        CHECK(k == 0 ? found == best : found >= best && found < best * 1.00001);
        rotor_sequence_free(&sequence);
    }
    rotor_chain_free(&chain);
}

static void least_memory(void) {
    rotor_sequence_t sequence;
    rotor_result_t result;
    rotor_sequence_init(&sequence);
    for (uint64_t seed = 1; seed < 300; seed++) {
        rotor_chain_t chain;
        int64_t minimum = -1;
        int64_t again = -1;
        draft_random(&draft, 1 + (int64_t)(seed % 30), seed % 2 == 0 ? 5 : 1000, seed);
        chain_from(&chain, &draft);
        CHECK(rotor_persistent_minimum(&chain, LARGE, NULL, &minimum, 0, NULL) == ROTOR_OK);
        sequence.length = 0;
        CHECK(rotor_persistent_minimum(&chain, LARGE, NULL, &again, minimum, &sequence) ==
              ROTOR_OK);
        check_within(&chain, &sequence, minimum, &result);
        CHECK(again == minimum && result.peak == minimum);
        sequence.length = 0;
        CHECK(rotor_persistent_minimum(&chain, LARGE, NULL, &again, minimum - 1, &sequence) ==
              ROTOR_ERR_INFEASIBLE);
        CHECK(again == minimum && sequence.length == 0);
        int64_t ample = chain.x[0] + generous(&chain);
        CHECK(rotor_persistent_minimum(&chain, LARGE, NULL, &again, ample, &sequence) == ROTOR_OK);
        check_within(&chain, &sequence, ample, &result);
        CHECK(result.time_ns == rotor_chain_ideal_ns(&chain));
        rotor_chain_free(&chain);
    }
    rotor_sequence_free(&sequence);
}

static void refuses(void) {
    rotor_chain_t chain;
    rotor_persistent_t table;
    int64_t minimum = 0;
    draft_equal(&draft, 5, 4);
    chain_from(&chain, &draft);
    const int64_t wrong[] = {0, -1, INT64_MIN, ROTOR_MAX_SLOTS + 1, INT64_MAX};
    for (size_t k = 0; k < 5; k++) {
        CHECK(rotor_persistent_fill(&table, &chain, 100, wrong[k], ROTOR_PRECISION_AUTO, LARGE,
                                    NULL) == ROTOR_ERR_BAD_SLOTS);
    }
    CHECK(rotor_persistent_fill(&table, &chain, 4, 10, ROTOR_PRECISION_AUTO, LARGE, NULL) ==
          ROTOR_ERR_BAD_BUDGET);
    CHECK(rotor_persistent_fill(&table, &chain, INT64_MIN, 10, ROTOR_PRECISION_AUTO, LARGE, NULL) ==
          ROTOR_ERR_BAD_BUDGET);
    CHECK(rotor_persistent_fill(&table, &chain, 100, 10, ROTOR_PRECISION_AUTO, 100, NULL) ==
          ROTOR_ERR_TABLE_TOO_LARGE);
    CHECK(rotor_persistent_fill(&table, &chain, 100, ROTOR_MAX_SLOTS, ROTOR_PRECISION_AUTO, LARGE,
                                NULL) == ROTOR_ERR_TABLE_TOO_LARGE);
    CHECK(rotor_persistent_minimum(&chain, 100, NULL, &minimum, 0, NULL) ==
          ROTOR_ERR_TABLE_TOO_LARGE);
    CHECK(rotor_persistent_fill(&table, &chain, INT64_MAX, 10, ROTOR_PRECISION_AUTO, LARGE, NULL) ==
          ROTOR_OK);
    CHECK(rotor_persistent_excess(&table, 0, 5, 10) == 0.0);
    rotor_persistent_free(&table);
    rotor_chain_free(&chain);
}

static void stops_when_told(void) {
    rotor_chain_t chain;
    rotor_persistent_t table;
    draft_random(&draft, 70, 100, 3);
    chain_from(&chain, &draft);
    int64_t budget = chain.x[0] + generous(&chain);
    int ret = ROTOR_ERR_INTERRUPTED;
    int64_t questions = 1;
    for (; ret == ROTOR_ERR_INTERRUPTED; questions++) {
        int64_t left = questions;
        rotor_callback_t callback = {.keep_going = stop_at, .context = &left};
        ret = rotor_persistent_fill(&table, &chain, budget, 20, ROTOR_PRECISION_AUTO, LARGE,
                                    &callback);
    }
    CHECK(ret == ROTOR_OK && questions > 70);
    rotor_persistent_free(&table);
    int64_t left = 5;
    rotor_callback_t callback = {.keep_going = stop_at, .context = &left};
    int64_t minimum;
    CHECK(rotor_persistent_minimum(&chain, LARGE, &callback, &minimum, 0, NULL) ==
          ROTOR_ERR_INTERRUPTED);
    rotor_chain_free(&chain);
}

static void out_of_memory(void) {
    rotor_chain_t chain;
    rotor_sequence_t sequence;
    int64_t minimum;
    draft_random(&draft, 20, 100, 2);
    chain_from(&chain, &draft);
    int64_t budget = chain.x[0] + generous(&chain);
    int ret = ROTOR_ERR_NO_MEMORY;
    int64_t k = 1;
    for (; ret == ROTOR_ERR_NO_MEMORY; k++) {
        rotor_sequence_init(&sequence);
        rotor_testing_fail_after(k);
        ret = rotor_persistent_solve(&chain, budget, 50, ROTOR_PRECISION_AUTO, LARGE, NULL,
                                     &sequence);
        rotor_sequence_free(&sequence);
    }
    CHECK(ret == ROTOR_OK && k > 8);
    ret = ROTOR_ERR_NO_MEMORY;
    for (k = 1; ret == ROTOR_ERR_NO_MEMORY; k++) {
        rotor_sequence_init(&sequence);
        rotor_testing_fail_after(k);
        ret = rotor_persistent_minimum(&chain, LARGE, NULL, &minimum, budget, &sequence);
        rotor_sequence_free(&sequence);
    }
    CHECK(ret == ROTOR_OK && k > 3);
    rotor_testing_fail_after(0);
    rotor_chain_free(&chain);
}

static const test_case_t cases[] = {
    {"schedules_keep_the_budget", schedules_keep_the_budget},
    {"single_equals_double", single_equals_double},
    {"single_rounds_little", single_rounds_little},
    {"solve_falls_back_on_single", solve_falls_back_on_single},
    {"solve_falls_back_on_double", solve_falls_back_on_double},
    {"least_memory", least_memory},
    {"refuses", refuses},
    {"stops_when_told", stops_when_told},
    {"out_of_memory", out_of_memory},
};

TEST_MAIN(cases)
