/*
 * The choice of what leaves memory where a second tier may take it: the smaller of two costs, by hand.
 */
#include "eviction.h"
#include "eviction_check.h"
#include "eviction_tier.h"
#include "testing.h"

/* A byte a nanosecond in either direction, 10 ns for each transfer. */
static rotor_link_t link_of(int64_t host_bytes) {
    return (rotor_link_t){.write_bytes_per_s = 1e9,
                          .read_bytes_per_s = 1e9,
                          .latency_ns = 10,
                          .host_bytes = host_bytes,
                          .least_bytes = 50};
}

static void init(rotor_eviction_t *engine, const char *heuristic, int64_t host_bytes,
                 double weight) {
    rotor_eviction_options_t options = {.heuristic = rotor_find_heuristic(heuristic)};
    rotor_link_t link = link_of(host_bytes);
    rotor_eviction_init(engine, &options);
    rotor_eviction_set_tier(engine, &link, weight);
}

static int32_t add(rotor_eviction_t *engine, int64_t bytes, int64_t ns, int32_t parent) {
    int32_t storage;
    CHECK(rotor_eviction_add(engine, bytes, &storage) == ROTOR_OK);
    CHECK(rotor_eviction_compute(engine, storage, ns) == ROTOR_OK);
    if (parent >= 0) {
        CHECK(rotor_eviction_depend(engine, storage, parent) == ROTOR_OK);
    }
    CHECK(rotor_eviction_materialize(engine, &storage, 1) == ROTOR_OK);
    CHECK(rotor_eviction_allow(engine, storage) == ROTOR_OK);
    rotor_eviction_touch(engine, storage, 1);
    return storage;
}

static int32_t choose(rotor_eviction_t *engine) {
    int32_t storage = -2;
    CHECK(rotor_eviction_choose(engine, 2, &storage) == ROTOR_OK);
    CHECK(rotor_eviction_check(engine) == NULL);
    return storage;
}

/* What the owner does with the choice. */
static void move(rotor_eviction_t *engine, int32_t storage) {
    CHECK(rotor_eviction_prefers_tier(engine, storage));
    rotor_eviction_store(engine, storage, true);
    CHECK(rotor_eviction_leave(engine, storage) == ROTOR_OK);
    CHECK(rotor_eviction_check(engine) == NULL);
}

/* Of 100 bytes, a move takes 2 * (10 + 100) = 220 ns, a fetch alone 110. */
static void test_the_smaller_cost_decides(void) {
    rotor_eviction_t engine;
    init(&engine, "DTRLocal", INT64_MAX, 1.0);
    int32_t cheap = add(&engine, 100, 100, -1); /* min(100, 220) / 100 */
    int32_t dear = add(&engine, 100, 1000, -1); /* min(1000, 220) / 100 */
    int32_t large = add(&engine, 400, 5000, -1); /* min(5000, 820) / 400 = 2.05 */
    int32_t small = add(&engine, 40, 60, -1);   /* too small to move: 60 / 40 = 1.5 */
    CHECK(choose(&engine) == cheap && !rotor_eviction_prefers_tier(&engine, cheap));
    CHECK(rotor_eviction_evict(&engine, cheap) == ROTOR_OK);
    CHECK(choose(&engine) == small && !rotor_eviction_prefers_tier(&engine, small));
    CHECK(rotor_eviction_evict(&engine, small) == ROTOR_OK);
    CHECK(choose(&engine) == large);
    move(&engine, large);
    CHECK(choose(&engine) == dear);
    move(&engine, dear);
    CHECK(choose(&engine) == -1);
    /* Both come back: the tier still has them, so that each costs its fetch, 410 / 400 and 110 / 100. */
    CHECK(rotor_eviction_fetched(&engine, large) == ROTOR_OK);
    CHECK(rotor_eviction_fetched(&engine, dear) == ROTOR_OK);
    CHECK(rotor_eviction_move_ns(&engine, large) == 410);
    CHECK(choose(&engine) == large);
    rotor_eviction_store(&engine, large, false); /* written to: 820 / 400 */
    CHECK(choose(&engine) == dear && rotor_eviction_move_ns(&engine, large) == 820);
    rotor_eviction_free(&engine);
}

static void test_a_pinned_one_costs_its_move(void) {
    rotor_eviction_t engine;
    init(&engine, "DTRLocal", INT64_MAX, 1.0);
    int32_t pinned = add(&engine, 100, 5, -1);
    rotor_eviction_pin(&engine, pinned);
    CHECK(choose(&engine) == -1 && engine.locked_bytes == 100);
    CHECK(rotor_eviction_allow(&engine, pinned) == ROTOR_OK);
    CHECK(choose(&engine) == pinned && engine.locked_bytes == 0);
    int32_t other = add(&engine, 100, 221, -1); /* 220 as well: the last wins */
    CHECK(choose(&engine) == other);
    CHECK(rotor_eviction_compute(&engine, other, 1000) == ROTOR_OK);
    rotor_eviction_lock(&engine, other);
    move(&engine, pinned);
    CHECK(rotor_eviction_fetched(&engine, pinned) == ROTOR_OK && engine.locked_bytes == 100);
    rotor_eviction_pin(&engine, pinned); /* for good */
    CHECK(choose(&engine) == -1 && engine.locked_bytes == 200);
    rotor_eviction_free(&engine);
}

static void test_the_tier_has_an_end(void) {
    rotor_eviction_t engine;
    init(&engine, "DTRLocal", 150, 1.0);
    int32_t first = add(&engine, 100, 1000, -1);
    int32_t second = add(&engine, 100, 1000, -1);
    int32_t third = add(&engine, 60, 1000, -1);
    rotor_eviction_pin(&engine, first);
    CHECK(rotor_eviction_allow(&engine, first) == ROTOR_OK);
    rotor_eviction_lock(&engine, second);
    CHECK(choose(&engine) == first); /* 2.2, and third 140 / 60 */
    move(&engine, first);
    CHECK(!rotor_eviction_may_store(&engine, third) && engine.stored_bytes == 100);
    CHECK(choose(&engine) == third && !rotor_eviction_prefers_tier(&engine, third));
    CHECK(rotor_eviction_evict(&engine, third) == ROTOR_OK);
    CHECK(rotor_eviction_fetched(&engine, first) == ROTOR_OK);
    rotor_eviction_store(&engine, first, false);
    CHECK(rotor_eviction_unlock(&engine, second) == ROTOR_OK && choose(&engine) == second);
    move(&engine, second);
    CHECK(choose(&engine) == -1); /* nothing else may be computed again, and there is no room */
    CHECK(rotor_eviction_remove(&engine, second) == ROTOR_OK && engine.stored_bytes == 0);
    CHECK(choose(&engine) == first);
    rotor_eviction_free(&engine);
}

static void test_neighbours_see_what_is_away_in_memory(void) {
    static const char *const names[] = {"DTRAncestors", "DTREqClass", "DTRUnopt"};
    for (int k = 0; k < 3; k++) {
        for (int is_away = 0; is_away < 2; is_away++) {
            rotor_eviction_t engine;
            init(&engine, names[k], INT64_MAX, 1.0);
            int32_t parent = add(&engine, 100, 1000, -1);
            int32_t child = add(&engine, 1000, 50, parent); /* 50, or 1050, in 1000 bytes */
            int32_t other = add(&engine, 1000, 60, -1);
            if (is_away) {
                move(&engine, parent);
            } else {
                CHECK(rotor_eviction_evict(&engine, parent) == ROTOR_OK);
            }
            CHECK(choose(&engine) == (is_away ? child : other));
            rotor_eviction_free(&engine);
        }
    }
}

static void test_the_weight_of_moves(void) {
    for (int k = 0; k < 2; k++) {
        rotor_eviction_t engine;
        init(&engine, "DTRLocal", INT64_MAX, k == 0 ? 1.0 : 0.25);
        int32_t storage = add(&engine, 100, 100, -1);
        CHECK(rotor_eviction_move_ns(&engine, storage) == (k == 0 ? 220 : 55));
        CHECK(rotor_eviction_prefers_tier(&engine, storage) == (k == 1));
        rotor_eviction_free(&engine);
    }
}

static void test_chance_draws_what_can_go(void) {
    rotor_eviction_t engine;
    init(&engine, "RandomStorage", 0, 1.0);
    int32_t pinned = add(&engine, 100, 5, -1);
    rotor_eviction_pin(&engine, pinned);
    CHECK(rotor_eviction_allow(&engine, pinned) == ROTOR_OK && choose(&engine) == -1);
    int32_t other = add(&engine, 100, 5, -1);
    for (int k = 0; k < 20; k++) {
        CHECK(choose(&engine) == other);
    }
    rotor_eviction_free(&engine);
}

static const test_case_t cases[] = {
    {"the_smaller_cost_decides", test_the_smaller_cost_decides},
    {"a_pinned_one_costs_its_move", test_a_pinned_one_costs_its_move},
    {"the_tier_has_an_end", test_the_tier_has_an_end},
    {"neighbours_see_what_is_away_in_memory", test_neighbours_see_what_is_away_in_memory},
    {"the_weight_of_moves", test_the_weight_of_moves},
    {"chance_draws_what_can_go", test_chance_draws_what_can_go},
};

TEST_MAIN(cases)
