/* Revolve, and the frontiers of the heterogeneous adjoint schedules. */
#include "frontier.h"
#include "revolve.h"
#include "worlds.h"

enum { MAX_N = 14, TABLE = 41 };

static int64_t count_kind(const rotor_sequence_t *s, enum rotor_kind kind) {
    int64_t count = 0;
    for (int64_t k = 0; k < s->length; k++) {
        count += s->ops[k].kind == (int32_t)kind;
    }
    return count;
}

/* The most plain activations beside x[0] that are live at once, by the meaning of the operations. */
static int64_t count_checkpoints(const rotor_sequence_t *s, int64_t n) {
    bool there[TABLE + 1] = {false};
    int64_t most = 0;
    for (int64_t k = 0; k < s->length; k++) {
        int64_t i = s->ops[k].stage;
        int32_t kind = s->ops[k].kind;
        if (kind == ROTOR_B) {
            there[i] = false;
            if (i < n) {
                there[i + 1] = false;
            }
        } else if (kind == ROTOR_FE) {
            int64_t live = 0;
            for (int64_t j = 1; j <= n; j++) {
                live += j != i && there[j];
            }
            most = rotor_max(most, live);
        } else if (kind == ROTOR_FN || kind == ROTOR_FCK) {
            there[i] = kind == ROTOR_FCK;
            there[i + 1] = true;
        }
    }
    return most;
}

/* Every number of stages and checkpoints: the count is the least there is, and the schedule's. */
static void test_least_forwards(void) {
    static int64_t least[TABLE][TABLE];
    for (int64_t c = 0; c < TABLE; c++) {
        for (int64_t n = 1; n < TABLE; n++) {
            least[n][c] = c == 0 ? n * (n - 1) / 2 : least[n][c - 1];
            for (int64_t j = 1; j < n && c > 0; j++) {
                least[n][c] =
                    rotor_min(least[n][c], j + least[n - j][c - 1] + least[j][c]);
            }
            CHECK(rotor_revolve_forwards(n, c) == least[n][c]);
            rotor_sequence_t s;
            rotor_sequence_init(&s);
            CHECK(rotor_revolve_schedule(n, c, &s) == ROTOR_OK);
            CHECK(count_kind(&s, ROTOR_FN) + count_kind(&s, ROTOR_FCK) == least[n][c]);
            CHECK(count_kind(&s, ROTOR_FE) == n && count_kind(&s, ROTOR_B) == n);
            CHECK(count_kind(&s, ROTOR_LOSS) == 1);
            CHECK(count_checkpoints(&s, n) <= c);
            rotor_sequence_free(&s);
        }
    }
    /* The input and two checkpoints: r = 2, 2 * 10 - C(5, 1). */
    CHECK(rotor_revolve_forwards(10, 2) == 15);
    CHECK(rotor_revolve_forwards(1, 1 << 20) == 0);
    CHECK(rotor_revolve_forwards(1 << 18, INT64_MAX / 2) == (1 << 18) - 1);
    CHECK(rotor_revolve_forwards(1 << 18, 0) == (INT64_C(1) << 17) * ((1 << 18) - 1));
}

static void test_schedule_refuses(void) {
    rotor_sequence_t s;
    rotor_sequence_init(&s);
    CHECK(rotor_revolve_schedule(0, 1, &s) == ROTOR_ERR_BAD_LENGTH);
    CHECK(rotor_revolve_schedule(3, -1, &s) == ROTOR_ERR_BAD_SLOTS);
    CHECK(rotor_revolve_schedule(INT64_MAX, 5, &s) == ROTOR_ERR_TOO_LARGE);
    CHECK(rotor_revolve_schedule(1 << 18, 0, &s) == ROTOR_ERR_TOO_LARGE);
    CHECK(rotor_sequence_append(&s, ROTOR_FE, 7) == ROTOR_OK);
    for (int64_t failing = 1; failing < 4; failing++) {
        rotor_testing_fail_after(failing);
        int ret = rotor_revolve_schedule(40, 2, &s);
        rotor_testing_fail_after(0);
        CHECK(ret == ROTOR_ERR_NO_MEMORY);
        CHECK(s.length == 1);
    }
    rotor_sequence_free(&s);
}

/* Every point of the curve is the simulated figure of its schedule; nothing fits below the first. */
static void test_random_chains(void) {
    seed = 2;
    int64_t points = 0;
    for (int k = 0; k < 1500; k++) {
        world_t w;
        rotor_frontier_t table;
        rotor_sequence_t s;
        rotor_result_t result;
        int64_t minimum = 0;

        CHECK(random_world(&w, 1 + draw(MAX_N - 1)) == ROTOR_OK);
        CHECK(rotor_frontier_solve(&table, &w.chain, true, INT64_MAX, NULL) == ROTOR_OK);
        rotor_sequence_init(&s);
        for (int64_t p = 0; p < table.curve_count; p++) {
            int64_t budget = table.curve_bytes[p];
            points++;
            s.length = 0;
            CHECK(rotor_frontier_sequence(&table, budget, &s, &minimum) == ROTOR_OK);
            CHECK(rotor_simulate(&w.chain, s.ops, s.length, &result, NULL, NULL) == ROTOR_OK);
            CHECK(result.peak == budget);
            CHECK(result.time_ns == table.curve_ns[p]);
            CHECK(p == 0 || (budget > table.curve_bytes[p - 1] &&
                             table.curve_ns[p] < table.curve_ns[p - 1]));
        }
        s.length = 0;
        CHECK(rotor_frontier_sequence(&table, table.curve_bytes[0] - 1, &s, &minimum) ==
              ROTOR_ERR_INFEASIBLE);
        CHECK(minimum == table.curve_bytes[0] && s.length == 0);
        /* No number of Revolve's checkpoints does better. */
        for (int64_t c = 0; c < w.chain.n; c++) {
            s.length = 0;
            CHECK(rotor_revolve_schedule(w.chain.n, c, &s) == ROTOR_OK);
            CHECK(rotor_simulate(&w.chain, s.ops, s.length, &result, NULL, NULL) == ROTOR_OK);
            int64_t time = result.time_ns;
            s.length = 0;
            CHECK(rotor_frontier_sequence(&table, result.peak, &s, &minimum) == ROTOR_OK);
            CHECK(rotor_simulate(&w.chain, s.ops, s.length, &result, NULL, NULL) == ROTOR_OK);
            CHECK(result.time_ns <= time);
        }
        rotor_sequence_free(&s);
        rotor_frontier_free(&table);
        rotor_frontier_free(&table);
        rotor_chain_free(&w.chain);
    }
    CHECK(points > 3000);
}

static bool stop(void *context, int64_t done, int64_t total) {
    int64_t *asked = context;
    CHECK(0 <= done && done <= total);
    return --*asked > 0;
}

static void test_refusals(void) {
    world_t w;
    rotor_frontier_t table;
    int64_t asked = 5;
    rotor_callback_t callback = {.keep_going = stop, .context = &asked};
    int ret = ROTOR_ERR_TABLE_TOO_LARGE;

    seed = 3;
    CHECK(random_world(&w, 6) == ROTOR_OK);
    CHECK(rotor_frontier_solve(&table, &w.chain, true, INT64_MAX, &callback) ==
          ROTOR_ERR_INTERRUPTED);
    for (int64_t bound = 0; ret == ROTOR_ERR_TABLE_TOO_LARGE && bound < 100000; bound += 8) {
        ret = rotor_frontier_solve(&table, &w.chain, true, bound, NULL);
        CHECK(ret == ROTOR_ERR_TABLE_TOO_LARGE || (ret == ROTOR_OK && bound > 0));
        CHECK(ret != ROTOR_OK || table.table_bytes <= bound);
    }
    CHECK(ret == ROTOR_OK);
    rotor_frontier_free(&table);
    rotor_chain_free(&w.chain);
}

static void test_out_of_memory(void) {
    world_t w;
    rotor_frontier_t table;
    rotor_sequence_t s;
    int64_t minimum;
    int ret = ROTOR_ERR_NO_MEMORY;

    seed = 4;
    CHECK(random_world(&w, 5) == ROTOR_OK);
    for (int64_t failing = 1; ret == ROTOR_ERR_NO_MEMORY && failing < 200; failing++) {
        int64_t live = rotor_testing_live();
        rotor_sequence_init(&s);
        rotor_testing_fail_after(failing);
        ret = rotor_frontier_solve(&table, &w.chain, true, INT64_MAX, NULL);
        if (ret == ROTOR_OK) {
            ret = rotor_frontier_sequence(&table, INT64_MAX / 4, &s, &minimum);
        }
        rotor_testing_fail_after(0);
        CHECK(ret == ROTOR_OK || ret == ROTOR_ERR_NO_MEMORY);
        CHECK(failing > 1 || ret == ROTOR_ERR_NO_MEMORY);
        rotor_sequence_free(&s);
        rotor_frontier_free(&table);
        CHECK(rotor_testing_live() == live);
    }
    CHECK(ret == ROTOR_OK);
    rotor_chain_free(&w.chain);
}

static const test_case_t cases[] = {
    {"least_forwards", test_least_forwards},
    {"schedule_refuses", test_schedule_refuses},
    {"random_chains", test_random_chains},
    {"refusals", test_refusals},
    {"out_of_memory", test_out_of_memory},
};

TEST_MAIN(cases)
