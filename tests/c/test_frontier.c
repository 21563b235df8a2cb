#include "chains.h"
#include "frontier.h"
#include "persistent.h"

enum { LARGE = 1 << 30 };

static draft_t draft;

/* Each point's schedule has the point's time and peak; a byte less has no such time. */
static void check_points(const rotor_frontier_t *table) {
    const rotor_chain_t *chain = table->chain;
    rotor_sequence_t sequence;
    rotor_result_t result;
    int64_t minimum = -1;

    rotor_sequence_init(&sequence);
    for (int64_t k = 0; k < table->curve_count; k++) {
        int64_t bytes = table->curve_bytes[k];
        sequence.length = 0;
        CHECK(rotor_frontier_sequence(table, bytes, &sequence, &minimum) == ROTOR_OK);
        CHECK(rotor_simulate(chain, sequence.ops, sequence.length, &result, NULL, NULL) ==
              ROTOR_OK);
        CHECK(result.time_ns == table->curve_ns[k] && result.peak == bytes);
        if (k > 0) {
            CHECK(bytes > table->curve_bytes[k - 1]);
            CHECK(table->curve_ns[k] < table->curve_ns[k - 1]);
        }
    }
    CHECK(rotor_frontier_sequence(table, table->curve_bytes[0] - 1, &sequence, &minimum) ==
          ROTOR_ERR_INFEASIBLE);
    CHECK(minimum == table->curve_bytes[0]);
    rotor_sequence_free(&sequence);
}

static void one_stage(void) {
    rotor_chain_t chain;
    rotor_frontier_t table;
    draft_equal(&draft, 1, 1);
    chain_from(&chain, &draft);
    CHECK(rotor_frontier_solve(&table, &chain, false, LARGE, NULL) == ROTOR_OK);
    CHECK(table.curve_count == 1 && table.curve_ns[0] == 2);
    check_points(&table);
    rotor_frontier_free(&table);
    rotor_frontier_free(&table);
    rotor_chain_free(&chain);
}

static void all_sizes_zero(void) {
    rotor_chain_t chain;
    rotor_frontier_t table;
    draft_equal(&draft, 7, 0);
    for (int k = 0; k < 7; k++) {
        draft.values[0][k] = draft.values[1][k] = 3;
    }
    chain_from(&chain, &draft);
    CHECK(rotor_frontier_solve(&table, &chain, false, LARGE, NULL) == ROTOR_OK);
    CHECK(table.curve_count == 1 && table.curve_bytes[0] == 0 && table.curve_ns[0] == 42);
    check_points(&table);
    rotor_frontier_free(&table);
    rotor_chain_free(&chain);
}

static void all_times_zero(void) {
    rotor_chain_t chain;
    rotor_frontier_t table;
    draft_equal(&draft, 7, 5);
    for (int k = 0; k < 7; k++) {
        draft.values[0][k] = draft.values[1][k] = 0;
    }
    chain_from(&chain, &draft);
    CHECK(rotor_frontier_solve(&table, &chain, false, LARGE, NULL) == ROTOR_OK);
    CHECK(table.curve_count == 1 && table.curve_ns[0] == 0);
    check_points(&table);
    rotor_frontier_free(&table);
    rotor_chain_free(&chain);
}

static void points_are_what_the_simulator_says(void) {
    for (uint64_t seed = 1; seed < 150; seed++) {
        rotor_chain_t chain;
        rotor_frontier_t table;
        draft_random(&draft, 1 + (int64_t)(seed % 25), seed % 2 == 0 ? 9 : 1000, seed);
        chain_from(&chain, &draft);
        CHECK(rotor_frontier_solve(&table, &chain, false, LARGE, NULL) == ROTOR_OK);
        check_points(&table);
        rotor_frontier_free(&table);
        rotor_chain_free(&chain);
    }
}

/* With one slot per byte, the dense table is the same function. */
static void equals_the_dense_table(void) {
    for (uint64_t seed = 1; seed < 80; seed++) {
        rotor_chain_t chain;
        rotor_frontier_t table;
        rotor_persistent_t dense;
        draft_random(&draft, 1 + (int64_t)(seed % 40), 12, seed + 1000);
        chain_from(&chain, &draft);
        CHECK(rotor_frontier_solve(&table, &chain, false, LARGE, NULL) == ROTOR_OK);
        int64_t slots = table.curve_bytes[table.curve_count - 1] - chain.x[0];
        if (slots > 0) {
            CHECK(rotor_persistent_fill(&dense, &chain, slots + chain.x[0], slots,
                                        ROTOR_PRECISION_DOUBLE, LARGE, NULL) == ROTOR_OK);
            int64_t k = -1;
            for (int64_t m = 0; m <= slots; m++) {
                while (k + 1 < table.curve_count && table.curve_bytes[k + 1] <= m + chain.x[0]) {
                    k++;
                }
                double excess = rotor_persistent_excess(&dense, 0, chain.n, m);
                if (k < 0) {
                    CHECK(excess > 1e300);
                } else {
                    CHECK((int64_t)excess == table.curve_ns[k] - rotor_chain_ideal_ns(&chain));
                }
            }
            rotor_persistent_free(&dense);
        }
        rotor_frontier_free(&table);
        rotor_chain_free(&chain);
    }
}

static void refuses_large_tables(void) {
    rotor_chain_t chain;
    rotor_frontier_t table;
    int64_t bound = 1;
    int ret = ROTOR_ERR_TABLE_TOO_LARGE;
    draft_random(&draft, 20, 1000, 5);
    chain_from(&chain, &draft);
    for (; ret == ROTOR_ERR_TABLE_TOO_LARGE && bound < LARGE; bound = 2 * bound) {
        ret = rotor_frontier_solve(&table, &chain, false, bound, NULL);
        CHECK(ret == ROTOR_OK || table.frontiers == NULL);
    }
    CHECK(ret == ROTOR_OK && bound > 1000 && table.table_bytes <= bound / 2);
    rotor_frontier_free(&table);
    rotor_chain_free(&chain);
}

static void stops_when_told(void) {
    rotor_chain_t chain;
    rotor_frontier_t table;
    draft_random(&draft, 12, 100, 3);
    chain_from(&chain, &draft);
    int ret = ROTOR_ERR_INTERRUPTED;
    int64_t questions = 1;
    for (; ret == ROTOR_ERR_INTERRUPTED; questions++) {
        int64_t left = questions;
        rotor_callback_t callback = {.keep_going = stop_at, .context = &left};
        ret = rotor_frontier_solve(&table, &chain, false, LARGE, &callback);
    }
    CHECK(ret == ROTOR_OK && questions > 12);
    rotor_frontier_free(&table);
    rotor_chain_free(&chain);
}

static void times_that_overflow(void) {
    rotor_chain_t chain;
    rotor_frontier_t table;
    draft_equal(&draft, MOST_STAGES, 1);
    chain_from(&chain, &draft);
    chain.forward_sum[chain.n] = INT64_C(1) << 60;
    CHECK(rotor_frontier_solve(&table, &chain, false, LARGE, NULL) == ROTOR_ERR_OVERFLOW);
    rotor_chain_free(&chain);
}

static void deep_chain(void) {
    rotor_chain_t chain;
    rotor_frontier_t table;
    draft_equal(&draft, 120, 1);
    chain_from(&chain, &draft);
    CHECK(rotor_frontier_solve(&table, &chain, false, LARGE, NULL) == ROTOR_OK);
    check_points(&table);
    rotor_frontier_free(&table);
    rotor_chain_free(&chain);
}

static void out_of_memory(void) {
    rotor_chain_t chain;
    rotor_frontier_t table;
    rotor_sequence_t sequence;
    int64_t minimum;
    int ret = ROTOR_ERR_NO_MEMORY;
    int64_t k = 1;
    draft_random(&draft, 14, 100000, 9);
    chain_from(&chain, &draft);
    for (; ret == ROTOR_ERR_NO_MEMORY; k++) {
        rotor_testing_fail_after(k);
        ret = rotor_frontier_solve(&table, &chain, false, LARGE, NULL);
    }
    CHECK(ret == ROTOR_OK && k > 10);
    ret = ROTOR_ERR_NO_MEMORY;
    rotor_sequence_init(&sequence);
    for (k = 1; ret == ROTOR_ERR_NO_MEMORY; k++) {
        rotor_testing_fail_after(k);
        sequence.length = 0;
        ret = rotor_frontier_sequence(&table, table.curve_bytes[0], &sequence, &minimum);
    }
    CHECK(ret == ROTOR_OK && k > 2);
    rotor_testing_fail_after(0);
    rotor_sequence_free(&sequence);
    rotor_frontier_free(&table);
    rotor_chain_free(&chain);
}

static const test_case_t cases[] = {
    {"one_stage", one_stage},
    {"all_sizes_zero", all_sizes_zero},
    {"all_times_zero", all_times_zero},
    {"points_are_what_the_simulator_says", points_are_what_the_simulator_says},
    {"equals_the_dense_table", equals_the_dense_table},
    {"refuses_large_tables", refuses_large_tables},
    {"stops_when_told", stops_when_told},
    {"times_that_overflow", times_that_overflow},
    {"deep_chain", deep_chain},
    {"out_of_memory", out_of_memory},
};

TEST_MAIN(cases)
