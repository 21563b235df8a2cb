#include "chains.h"

static draft_t draft;

static int status_of(int64_t *bad) {
    rotor_chain_t chain;
    int status = rotor_chain_init(&chain, &draft.source, bad);
    rotor_chain_free(&chain);
    return status;
}

static void copies_and_sums(void) {
    rotor_chain_t chain;
    draft_equal(&draft, 3, 5);
    draft.values[0][2] = 7;
    draft.values[8][1] = 1;
    chain_from(&chain, &draft);
    draft.values[0][2] = 0;
    CHECK(chain.forward_ns[2] == 7);
    CHECK(chain.forward_sum[0] == 0 && chain.forward_sum[3] == 17);
    CHECK(chain.pgrad_after[3] == 0 && chain.pgrad_after[2] == 0);
    CHECK(chain.pgrad_after[1] == 5 && chain.pgrad_after[0] == 6);
    CHECK(rotor_chain_ideal_ns(&chain) == 17 + 15);
    rotor_chain_free(&chain);
    rotor_chain_free(&chain);
}

static void refuses_wrong_entries(void) {
    int64_t bad;
    const int negative[9] = {ROTOR_ERR_NEGATIVE_TIME, ROTOR_ERR_NEGATIVE_TIME,
                             ROTOR_ERR_NEGATIVE_SIZE, ROTOR_ERR_NEGATIVE_SIZE,
                             ROTOR_ERR_NEGATIVE_SIZE, ROTOR_ERR_NEGATIVE_SIZE,
                             ROTOR_ERR_BACKWARD_TMP,  ROTOR_ERR_NEGATIVE_SIZE,
                             ROTOR_ERR_NEGATIVE_SIZE};
    for (size_t k = 0; k < 9; k++) {
        draft_equal(&draft, 3, 1);
        draft.values[k][2] = -2;
        CHECK(status_of(&bad) == negative[k] && bad == 2);
        draft.values[k][2] = ROTOR_MAX_VALUE + 1;
        CHECK(status_of(&bad) == ROTOR_ERR_TOO_LARGE && bad == 2);
        draft.values[k][2] = ROTOR_MAX_VALUE;
        CHECK(status_of(&bad) == ROTOR_OK);
    }
    draft_equal(&draft, 3, 1);
    draft.values[6][0] = -1;
    draft.source.loss_tmp = -1;
    CHECK(status_of(&bad) == ROTOR_OK);
    draft.source.loss_tmp = -2;
    CHECK(status_of(&bad) == ROTOR_ERR_BACKWARD_TMP && bad == 3);
    draft.source.loss_tmp = ROTOR_MAX_VALUE + 1;
    CHECK(status_of(&bad) == ROTOR_ERR_TOO_LARGE);
    draft.source.n = 0;
    CHECK(status_of(&bad) == ROTOR_ERR_BAD_LENGTH && bad == -1);
    draft.source.n = (INT64_C(1) << 18) + 1;
    CHECK(status_of(&bad) == ROTOR_ERR_TOO_LARGE && bad == -1);
}

static void needs_of_operations(void) {
    rotor_chain_t chain;
    draft_equal(&draft, 2, 1);
    draft.values[2][2] = 100; /* x[2], the output */
    draft.values[7][1] = 10;  /* grad[1] */
    draft.source.hold_output = true;
    chain_from(&chain, &draft);
    CHECK(rotor_chain_held(&chain, 2) == 0);
    CHECK(rotor_chain_held(&chain, 1) == 1 + 0 + 100);
    CHECK(rotor_chain_held(&chain, 0) == 10 + 1 + 100);
    CHECK(rotor_chain_need_fe(&chain, 0, 0) == 111 + 2 + 1);
    CHECK(rotor_chain_need_fn(&chain, 0, 2, 0) == 0 + 1 + 1);
    CHECK(rotor_chain_need_fn(&chain, 0, 2, 1) == 1 + 100 + 1);
    CHECK(rotor_chain_need_b(&chain, 1, 2) == 1 + 2 + 10 + 1);
    CHECK(rotor_chain_need_b(&chain, 1, 1) == 1 + 2 + 10 + 1 + 100);
    CHECK(rotor_chain_need_b(&chain, 0, 1) == 10 + 2 + 1 + 1 + 1 + 100);
    CHECK(rotor_chain_need_loss(&chain) == 2);
    rotor_chain_free(&chain);
}

static void discretise_rounds_up(void) {
    CHECK(rotor_discretise(0, 10, 5) == 0);
    CHECK(rotor_discretise(1, 10, 5) == 1);
    CHECK(rotor_discretise(2, 10, 5) == 1);
    CHECK(rotor_discretise(3, 10, 5) == 2);
    CHECK(rotor_discretise(10, 10, 5) == 5);
    CHECK(rotor_discretise(11, 10, 5) == 6);
    CHECK(rotor_discretise(-1, 10, 5) == 0);
    CHECK(rotor_discretise(-2, 10, 5) == -1);
    uint64_t state = 1;
    for (int k = 0; k < 20000; k++) {
        int64_t budget = between(&state, 1, INT64_C(1) << between(&state, 1, 62));
        int64_t slots = between(&state, 1, 1 << between(&state, 1, 28));
        int64_t bytes = between(&state, 0, budget);
        __int128 found = rotor_discretise(bytes, budget, slots);
        CHECK(found * budget >= (__int128)bytes * slots);
        CHECK((found - 1) * budget < (__int128)bytes * slots);
    }
}

static void out_of_memory(void) {
    int64_t bad;
    draft_equal(&draft, 3, 1);
    rotor_testing_fail_after(1);
    CHECK(status_of(&bad) == ROTOR_ERR_NO_MEMORY);
}

static const test_case_t cases[] = {
    {"copies_and_sums", copies_and_sums},           {"refuses_wrong_entries", refuses_wrong_entries},
    {"needs_of_operations", needs_of_operations},   {"discretise_rounds_up", discretise_rounds_up},
    {"out_of_memory", out_of_memory},
};

TEST_MAIN(cases)
