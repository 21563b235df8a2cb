#include "chains.h"
#include "sequence.h"

static draft_t draft;

static const rotor_op_t plain[] = {{ROTOR_FE, 0}, {ROTOR_FE, 1}, {ROTOR_LOSS, 2},
                                   {ROTOR_B, 1},  {ROTOR_B, 0}};

static void grows(void) {
    rotor_sequence_t sequence;
    rotor_sequence_init(&sequence);
    for (int64_t k = 0; k < 1000; k++) {
        CHECK(rotor_sequence_append(&sequence, ROTOR_FE, k) == ROTOR_OK);
    }
    CHECK(sequence.length == 1000 && sequence.ops[999].stage == 999);
    CHECK(sequence.ops[0].kind == ROTOR_FE && sequence.ops[0].stage == 0);
    rotor_sequence_free(&sequence);
    rotor_sequence_free(&sequence);
    CHECK(sequence.length == 0);
}

static void appends_forwards(void) {
    rotor_sequence_t sequence;
    rotor_sequence_init(&sequence);
    CHECK(rotor_sequence_append_forward(&sequence, 2, 2) == ROTOR_OK && sequence.length == 0);
    CHECK(rotor_sequence_append_forward(&sequence, 2, 5) == ROTOR_OK && sequence.length == 3);
    for (int32_t k = 0; k < 3; k++) {
        CHECK(sequence.ops[k].kind == (k == 0 ? ROTOR_FCK : ROTOR_FN));
        CHECK(sequence.ops[k].stage == k + 2);
    }
    rotor_sequence_free(&sequence);
}

static void no_memory_keeps_the_sequence(void) {
    rotor_sequence_t sequence;
    rotor_sequence_init(&sequence);
    for (int64_t k = 0; k < 64; k++) {
        CHECK(rotor_sequence_append(&sequence, ROTOR_FE, k) == ROTOR_OK);
    }
    rotor_testing_fail_after(1);
    CHECK(rotor_sequence_append(&sequence, ROTOR_FE, 64) == ROTOR_ERR_NO_MEMORY);
    rotor_testing_fail_after(0);
    CHECK(sequence.length == 64 && sequence.ops[63].stage == 63);
    rotor_sequence_free(&sequence);
}

static void prices_by_hand(void) {
    rotor_chain_t chain;
    rotor_result_t result;
    int64_t peaks[5];
    int64_t lives[5];

    draft_equal(&draft, 2, 1);
    draft.source.loss_tmp = 3;
    chain_from(&chain, &draft);
    CHECK(rotor_simulate(&chain, plain, 5, &result, peaks, lives) == ROTOR_OK);
    /* x0 1, +xbar 2, +xbar 2, +grad 1; B(1): +grad 1 + tmp 1; after it: x0 xbar0 grad1 pgrad1. */
    const int64_t expected_peaks[] = {1 + 2 + 1, 3 + 2 + 1, 5 + 1 + 3, 6 + 2, 5 + 2};
    const int64_t expected_lives[] = {3, 5, 6, 5, 1 + 1 + 2};
    for (int k = 0; k < 5; k++) {
        CHECK(peaks[k] == expected_peaks[k]);
        CHECK(lives[k] == expected_lives[k]);
    }
    CHECK(result.time_ns == 4 && result.peak == 9 && result.failed_at == -1);
    rotor_chain_free(&chain);
}

static void check_refused(const rotor_op_t *ops, int64_t length, int status, int64_t where) {
    rotor_chain_t chain;
    rotor_result_t result;
    draft_equal(&draft, 2, 1);
    chain_from(&chain, &draft);
    CHECK(rotor_simulate(&chain, ops, length, &result, NULL, NULL) == status);
    CHECK(result.failed_at == where);
    rotor_chain_free(&chain);
}

static void refuses_wrong_sequences(void) {
    const rotor_op_t unknown[] = {{7, 0}};
    const rotor_op_t beyond[] = {{ROTOR_FE, 3}};
    const rotor_op_t before[] = {{ROTOR_FE, -1}};
    const rotor_op_t loss_stage[] = {{ROTOR_LOSS, 1}};
    const rotor_op_t forward_of_loss[] = {{ROTOR_FN, 2}};
    const rotor_op_t no_input[] = {{ROTOR_FE, 1}};
    const rotor_op_t no_output[] = {{ROTOR_FE, 0}, {ROTOR_LOSS, 2}};
    const rotor_op_t early[] = {{ROTOR_FE, 0}, {ROTOR_B, 0}};
    const rotor_op_t no_tape[] = {{ROTOR_FN, 0}, {ROTOR_FN, 1}, {ROTOR_LOSS, 2}, {ROTOR_B, 1}};
    const rotor_op_t twice[] = {{ROTOR_FE, 0}, {ROTOR_FE, 0}};
    const rotor_op_t losses[] = {{ROTOR_FE, 0}, {ROTOR_FE, 1}, {ROTOR_LOSS, 2}, {ROTOR_LOSS, 2}};
    const rotor_op_t again[] = {{ROTOR_FE, 0}, {ROTOR_FE, 1}, {ROTOR_LOSS, 2},
                                {ROTOR_B, 1},  {ROTOR_B, 1}};
    check_refused(unknown, 1, ROTOR_ERR_BAD_OPERATION, 0);
    check_refused(beyond, 1, ROTOR_ERR_BAD_OPERATION, 0);
    check_refused(before, 1, ROTOR_ERR_BAD_OPERATION, 0);
    check_refused(loss_stage, 1, ROTOR_ERR_BAD_OPERATION, 0);
    check_refused(forward_of_loss, 1, ROTOR_ERR_BAD_OPERATION, 0);
    check_refused(no_input, 1, ROTOR_ERR_NO_INPUT, 0);
    check_refused(no_output, 2, ROTOR_ERR_NO_INPUT, 1);
    check_refused(early, 2, ROTOR_ERR_NO_GRADIENT, 1);
    check_refused(no_tape, 4, ROTOR_ERR_NO_TAPE, 3);
    check_refused(twice, 2, ROTOR_ERR_TWICE, 1);
    check_refused(losses, 4, ROTOR_ERR_TWICE, 3);
    check_refused(again, 5, ROTOR_ERR_TWICE, 4);
    check_refused(plain, 4, ROTOR_ERR_INCOMPLETE, 4);
    check_refused(plain, 0, ROTOR_ERR_INCOMPLETE, 0);
}

static void runs_once(void) {
    int64_t once[] = {1, 0};
    const rotor_op_t kept[] = {{ROTOR_FE, 0}, {ROTOR_FN, 1}, {ROTOR_LOSS, 2},
                               {ROTOR_FE, 1}, {ROTOR_B, 1},  {ROTOR_B, 0}};
    const rotor_op_t dropped[] = {{ROTOR_FCK, 0}, {ROTOR_FE, 1}};
    const rotor_op_t again[] = {{ROTOR_FE, 0}, {ROTOR_FE, 1}, {ROTOR_LOSS, 2},
                                {ROTOR_B, 1},  {ROTOR_B, 0},  {ROTOR_FE, 0}};
    rotor_chain_t chain;
    rotor_result_t result;

    draft_equal(&draft, 2, 1);
    draft.source.once = once;
    chain_from(&chain, &draft);
    CHECK(rotor_simulate(&chain, kept, 6, &result, NULL, NULL) == ROTOR_OK);
    CHECK(rotor_simulate(&chain, dropped, 2, &result, NULL, NULL) == ROTOR_ERR_ONCE);
    CHECK(result.failed_at == 0);
    CHECK(rotor_simulate(&chain, again, 6, &result, NULL, NULL) == ROTOR_ERR_ONCE);
    CHECK(result.failed_at == 5);
    CHECK(rotor_chain_need_fn(&chain, 0, 1, 0) == ROTOR_NEVER);
    CHECK(rotor_chain_need_fn(&chain, 1, 1, 1) < ROTOR_NEVER);
    rotor_chain_free(&chain);
}

static void random_operations_keep_the_books(void) {
    rotor_chain_t chain;
    rotor_memory_t memory;
    rotor_price_t price;
    uint64_t state = 1;

    for (uint64_t seed = 1; seed < 300; seed++) {
        int64_t n = 1 + (int64_t)(seed % 6);
        draft_random(&draft, n, 20, seed);
        chain_from(&chain, &draft);
        CHECK(rotor_memory_init(&memory, &chain) == ROTOR_OK);
        for (int k = 0; k < 200; k++) {
            int64_t live = memory.live;
            rotor_op_t op = {.kind = (int32_t)between(&state, -1, 5),
                             .stage = (int32_t)between(&state, -1, n + 1)};
            if (rotor_step(&memory, op, &price) == ROTOR_OK) {
                CHECK(price.live == memory.live && memory.live >= chain.x[0]);
                CHECK(price.peak >= live && price.time_ns >= 0);
            } else {
                CHECK(memory.live == live);
            }
        }
        rotor_memory_free(&memory);
        rotor_chain_free(&chain);
    }
}

static void out_of_memory(void) {
    rotor_chain_t chain;
    rotor_result_t result;
    draft_equal(&draft, 2, 1);
    chain_from(&chain, &draft);
    rotor_testing_fail_after(1);
    CHECK(rotor_simulate(&chain, plain, 5, &result, NULL, NULL) == ROTOR_ERR_NO_MEMORY);
    rotor_testing_fail_after(0);
    rotor_chain_free(&chain);
}

static const test_case_t cases[] = {
    {"grows", grows},
    {"appends_forwards", appends_forwards},
    {"no_memory_keeps_the_sequence", no_memory_keeps_the_sequence},
    {"prices_by_hand", prices_by_hand},
    {"refuses_wrong_sequences", refuses_wrong_sequences},
    {"runs_once", runs_once},
    {"random_operations_keep_the_books", random_operations_keep_the_books},
    {"out_of_memory", out_of_memory},
};

TEST_MAIN(cases)
