/* The floating solver: known worlds, random chains, and every way to fail. */
#include "floating.h"
#include "worlds.h"

#include <stdlib.h>

enum { MAX_N = 12 };

static void print_ops(const rotor_sequence_t *s, char *text, size_t size) {
    static const char *const names[] = {"Fn", "Fck", "Fe", "L", "B"};
    size_t used = 0;
    text[0] = '\0';
    for (int64_t k = 0; k < s->length && used < size; k++) {
        const char *name = names[s->ops[k].kind];
        used += (size_t)snprintf(text + used, size - used, "%s%s%d", k == 0 ? "" : " ", name,
                                 (int)s->ops[k].stage);
    }
}

/* Four stages where the persistent optimum in 6 bytes takes 20 ns, and one that floats 17. */
static void floats_init(world_t *w) {
    *w = (world_t){.values = {{3, 1, 2, 1},
                              {0, 0, 0, 0},
                              {0, 1, 2, 1, 1},
                              {3, 2, 1, 2},
                              {0},
                              {0},
                              {0},
                              {0, 1, 2, 1, 1},
                              {0}}};
    CHECK(world_init(w, 4, 0, false) == ROTOR_OK);
}

static void test_beats_persistent(void) {
    world_t w;
    rotor_floating_t table;
    rotor_sequence_t sequence;
    rotor_result_t result;
    int64_t minimum = 0;
    char text[256];

    floats_init(&w);
    rotor_sequence_init(&sequence);
    CHECK(rotor_floating_solve(&table, &w.chain, 6, 6, INT64_MAX, NULL, &minimum) == ROTOR_OK);
    CHECK(minimum == 6);
    CHECK(rotor_floating_sequence(&table, &sequence) == ROTOR_OK);
    CHECK(rotor_simulate(&w.chain, sequence.ops, sequence.length, &result, NULL, NULL) ==
          ROTOR_OK);
    CHECK(result.time_ns == 17);
    CHECK(result.peak == 6);
    print_ops(&sequence, text, sizeof(text));
    CHECK(strcmp(text, "Fck0 Fck1 Fn2 Fe3 L4 B3 Fn1 Fe2 B2 Fck0 Fe1 B1 Fe0 B0") == 0);
    rotor_sequence_free(&sequence);
    rotor_floating_free(&table);
    rotor_floating_free(&table);
    rotor_chain_free(&w.chain);
}

static void test_coarse_slots_still_answer(void) {
    world_t w;
    rotor_floating_t table;
    rotor_sequence_t sequence;
    rotor_result_t result;
    int64_t minimum = 0;

    floats_init(&w);
    for (int64_t slots = 1; slots <= 9; slots++) {
        rotor_sequence_init(&sequence);
        CHECK(rotor_floating_solve(&table, &w.chain, 6, slots, INT64_MAX, NULL, &minimum) ==
              ROTOR_OK);
        CHECK(rotor_floating_sequence(&table, &sequence) == ROTOR_OK);
        CHECK(rotor_simulate(&w.chain, sequence.ops, sequence.length, &result, NULL, NULL) ==
              ROTOR_OK);
        CHECK(result.peak <= 6);
        rotor_sequence_free(&sequence);
        rotor_floating_free(&table);
    }
    rotor_chain_free(&w.chain);
}

static bool stop(void *context, int64_t done, int64_t total) {
    int64_t *asked = context;
    CHECK(0 <= done && done <= total);
    return --*asked > 0;
}

static void test_refusals(void) {
    world_t w;
    rotor_floating_t table;
    rotor_sequence_t sequence;
    int64_t minimum = -1;
    int64_t asked = 3;
    rotor_callback_t callback = {.keep_going = stop, .context = &asked};
    int64_t *long_times;

    floats_init(&w);
    CHECK(rotor_floating_solve(&table, &w.chain, 6, 0, INT64_MAX, NULL, &minimum) ==
          ROTOR_ERR_BAD_SLOTS);
    CHECK(rotor_floating_solve(&table, &w.chain, 6, INT64_MAX, INT64_MAX, NULL, &minimum) ==
          ROTOR_ERR_BAD_SLOTS);
    CHECK(rotor_floating_solve(&table, &w.chain, 0, 5, INT64_MAX, NULL, &minimum) ==
          ROTOR_ERR_BAD_BUDGET);
    CHECK(minimum == -1);
    CHECK(rotor_floating_solve(&table, &w.chain, 5, 5, INT64_MAX, NULL, &minimum) ==
          ROTOR_ERR_INFEASIBLE);
    CHECK(minimum == 6);
    CHECK(rotor_floating_solve(&table, &w.chain, 6, 5, INT64_MAX, &callback, &minimum) ==
          ROTOR_ERR_INTERRUPTED);
    rotor_floating_free(&table);
    /* Whatever the bound, it is refused or met. */
    for (int64_t bound = 0; bound < 4096; bound += 8) {
        int ret = rotor_floating_solve(&table, &w.chain, 6, 20, bound, NULL, &minimum);
        CHECK(ret == ROTOR_OK || ret == ROTOR_ERR_TABLE_TOO_LARGE);
        CHECK(ret != ROTOR_OK || table.table_bytes <= bound);
        CHECK(bound != 0 || ret == ROTOR_ERR_TABLE_TOO_LARGE);
        rotor_sequence_init(&sequence);
        CHECK(ret != ROTOR_OK || rotor_floating_sequence(&table, &sequence) == ROTOR_OK);
        rotor_sequence_free(&sequence);
        rotor_floating_free(&table);
    }
    /* Slots whose rows alone pass the bound. */
    CHECK(rotor_floating_solve(&table, &w.chain, 6, 1 << 24, 1 << 20, NULL, &minimum) ==
          ROTOR_ERR_TABLE_TOO_LARGE);
    rotor_chain_free(&w.chain);

    /* Times that cannot be added up. */
    int64_t n = 3000;
    int64_t bad;
    rotor_chain_t chain;
    long_times = calloc((size_t)n + 1, sizeof(*long_times));
    int64_t *zeros = calloc((size_t)n + 1, sizeof(*zeros));
    CHECK(long_times != NULL && zeros != NULL);
    if (long_times != NULL && zeros != NULL) {
        for (int64_t i = 0; i < n; i++) {
            long_times[i] = ROTOR_MAX_VALUE;
        }
        rotor_chain_t source = {.n = n,
                                .forward_ns = long_times,
                                .backward_ns = long_times,
                                .x = zeros,
                                .xbar = zeros,
                                .fe_tmp = zeros,
                                .fn_tmp = zeros,
                                .b_tmp = zeros,
                                .grad = zeros,
                                .pgrad = zeros};
        CHECK(rotor_chain_init(&chain, &source, &bad) == ROTOR_OK);
        CHECK(rotor_floating_solve(&table, &chain, 6, 5, INT64_MAX, NULL, &minimum) ==
              ROTOR_ERR_OVERFLOW);
        rotor_chain_free(&chain);
    }
    free(long_times);
    free(zeros);
}

static void test_out_of_memory(void) {
    world_t w;
    rotor_floating_t table;
    rotor_sequence_t sequence;
    int64_t minimum;
    int64_t count;
    int64_t *bytes = NULL;
    int64_t *ns = NULL;
    int ret = ROTOR_ERR_NO_MEMORY;

    floats_init(&w);
    for (int64_t failing = 1; ret == ROTOR_ERR_NO_MEMORY && failing < 100; failing++) {
        int64_t live = rotor_testing_live();
        rotor_sequence_init(&sequence);
        rotor_testing_fail_after(failing);
        ret = rotor_floating_solve(&table, &w.chain, 9, 9, INT64_MAX, NULL, &minimum);
        if (ret == ROTOR_OK) {
            ret = rotor_floating_sequence(&table, &sequence);
            CHECK(ret == ROTOR_OK || sequence.length == 0);
        }
        if (ret == ROTOR_OK) {
            ret = rotor_floating_curve(&table, NULL, &count, &bytes, &ns);
        }
        rotor_testing_fail_after(0);
        CHECK(ret == ROTOR_OK || ret == ROTOR_ERR_NO_MEMORY);
        CHECK(failing > 1 || ret == ROTOR_ERR_NO_MEMORY);
        if (ret == ROTOR_OK) {
            rotor_free(bytes);
            rotor_free(ns);
        }
        rotor_sequence_free(&sequence);
        rotor_floating_free(&table);
        CHECK(rotor_testing_live() == live);
    }
    CHECK(ret == ROTOR_OK);
    rotor_chain_free(&w.chain);
}

/* Any chain, any budget, any number of slots: within budget, or infeasible by the exact minimum. */
static void test_random_chains(void) {
    seed = 1;
    int64_t feasible = 0;
    for (int k = 0; k < 3000; k++) {
        world_t w;
        rotor_floating_t table;
        rotor_sequence_t sequence;
        rotor_result_t result;
        int64_t minimum = 0;
        int64_t exact = 0;
        int64_t slots = 1 + draw(60);

        CHECK(random_world(&w, 1 + draw(MAX_N - 1)) == ROTOR_OK);
        (void)rotor_floating_solve(&table, &w.chain, 1, 1, INT64_MAX, NULL, &exact);
        rotor_floating_free(&table);
        int64_t budget = rotor_max(1, draw(2) == 0 ? exact : exact - 2 + draw(2 * exact + 4));
        rotor_sequence_init(&sequence);
        int ret =
            rotor_floating_solve(&table, &w.chain, budget, slots, INT64_MAX, NULL, &minimum);
        CHECK(minimum == exact);
        CHECK(ret == (budget < exact ? ROTOR_ERR_INFEASIBLE : ROTOR_OK));
        if (ret == ROTOR_OK) {
            int64_t count = 0;
            int64_t *bytes = NULL;
            int64_t *ns = NULL;
            feasible++;
            CHECK(rotor_floating_sequence(&table, &sequence) == ROTOR_OK);
            CHECK(rotor_simulate(&w.chain, sequence.ops, sequence.length, &result, NULL, NULL) ==
                  ROTOR_OK);
            CHECK(result.peak <= budget);
            CHECK(result.time_ns >= rotor_chain_ideal_ns(&w.chain));
            CHECK(rotor_floating_curve(&table, NULL, &count, &bytes, &ns) == ROTOR_OK);
            CHECK(count >= 1 && bytes[0] == exact);
            for (int64_t p = 1; p < count; p++) {
                CHECK(bytes[p] > bytes[p - 1] && ns[p] < ns[p - 1]);
            }
            for (int64_t p = 0; p < count; p++) {
                CHECK(bytes[p] > budget || ns[p] >= result.time_ns);
            }
            rotor_free(bytes);
            rotor_free(ns);
        }
        rotor_sequence_free(&sequence);
        rotor_floating_free(&table);
        rotor_chain_free(&w.chain);
    }
    CHECK(feasible > 1500);
}

static const test_case_t cases[] = {
    {"beats_persistent", test_beats_persistent},
    {"coarse_slots_still_answer", test_coarse_slots_still_answer},
    {"refusals", test_refusals},
    {"out_of_memory", test_out_of_memory},
    {"random_chains", test_random_chains},
};

TEST_MAIN(cases)
