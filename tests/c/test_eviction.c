/*
 * The eviction engine on random graphs: what it keeps incrementally against walks, its literal mode
 * against its fast one, its order against the rule.
 */
#include "eviction.h"
#include "eviction_check.h"
#include "testing.h"

static uint32_t draw(uint32_t *state) {
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

static rotor_eviction_options_t options_of(const char *name) {
    return (rotor_eviction_options_t){.heuristic = rotor_find_heuristic(name), .seed = 5};
}

/* A chain of n storages in memory, of 10 bytes and 1 ns each, accessed at times 1 .. n. */
static void make_chain(rotor_eviction_t *engine, int32_t n) {
    for (int32_t k = 0; k < n; k++) {
        int32_t storage;
        CHECK(rotor_eviction_add(engine, 10, &storage) == ROTOR_OK && storage == k);
        CHECK(rotor_eviction_compute(engine, storage, 1) == ROTOR_OK);
        if (k > 0) {
            CHECK(rotor_eviction_depend(engine, storage, k - 1) == ROTOR_OK);
        }
        CHECK(rotor_eviction_materialize(engine, &storage, 1) == ROTOR_OK);
        rotor_eviction_touch(engine, storage, k + 1);
    }
}

static int32_t choose(rotor_eviction_t *engine, int64_t now) {
    int32_t storage = -2;
    CHECK(rotor_eviction_choose(engine, now, &storage) == ROTOR_OK);
    return storage;
}

static void test_order_and_ties(void) {
    rotor_eviction_options_t options = options_of("LargestStorage");
    rotor_eviction_t engine;
    rotor_eviction_init(&engine, &options);
    CHECK(choose(&engine, 1) == -1);
    make_chain(&engine, 4);
    CHECK(choose(&engine, 10) == 3); /* all cost 1/10: the last wins */
    rotor_eviction_lock(&engine, 3);
    rotor_eviction_lock(&engine, 3);
    CHECK(choose(&engine, 10) == 2 && engine.locked_bytes == 10);
    CHECK(rotor_eviction_unlock(&engine, 3) == ROTOR_OK && choose(&engine, 10) == 2);
    rotor_eviction_lock(&engine, 1);
    CHECK(rotor_eviction_unlock(&engine, 3) == ROTOR_OK && choose(&engine, 10) == 3);
    CHECK(rotor_eviction_unlock(&engine, 1) == ROTOR_OK && choose(&engine, 10) == 1);
    rotor_eviction_pin(&engine, 1);
    rotor_eviction_pin(&engine, 1);
    CHECK(choose(&engine, 10) == 3 && engine.locked_bytes == 10 && engine.pool_count == 3);
    CHECK(rotor_eviction_evict(&engine, 1) == ROTOR_OK && engine.locked_bytes == 0);
    CHECK(rotor_eviction_footprint(&engine) > 0);
    rotor_eviction_free(&engine);
}

static void test_a_cost_of_zero_wins(void) {
    rotor_eviction_options_t options = options_of("DTRLocal");
    rotor_eviction_t engine;
    int32_t storage;
    rotor_eviction_init(&engine, &options);
    make_chain(&engine, 3);
    for (int k = 0; k < 2; k++) { /* two that cost nothing */
        CHECK(rotor_eviction_add(&engine, 10, &storage) == ROTOR_OK);
        CHECK(rotor_eviction_materialize(&engine, &storage, 1) == ROTOR_OK);
    }
    int64_t before = engine.evaluations;
    CHECK(choose(&engine, 10) == 3); /* the first of them, and the scan stops there */
    CHECK(engine.evaluations == before + 4);
    CHECK(choose(&engine, 0) == 4); /* every staleness is <= 0: all infinite, the last wins */
    rotor_eviction_free(&engine);
}

static void test_random_choices_are_seeded_and_uniform(void) {
    rotor_eviction_options_t options = options_of("RandomStorage");
    int64_t counts[8] = {0};
    int32_t first[16];
    for (int run = 0; run < 2; run++) {
        rotor_eviction_t engine;
        rotor_eviction_init(&engine, &options);
        make_chain(&engine, 8);
        for (int k = 0; k < 16; k++) {
            int32_t storage = choose(&engine, 20);
            CHECK(run == 0 || first[k] == storage);
            first[k] = storage;
        }
        for (int k = 0; k < 8000 && run == 1; k++) {
            counts[choose(&engine, 20)]++;
        }
        rotor_eviction_free(&engine);
    }
    for (int k = 0; k < 8; k++) {
        CHECK(counts[k] > 850 && counts[k] < 1150);
    }
}

static void test_sampling_looks_at_few(void) {
    rotor_eviction_options_t options = options_of("LRU");
    rotor_eviction_t engine;
    options.sample = true;
    rotor_eviction_init(&engine, &options);
    make_chain(&engine, 10000);
    for (int k = 0; k < 50; k++) {
        int64_t before = engine.evaluations;
        CHECK(choose(&engine, 20000) == 0); /* the first is always looked at, and the oldest */
        int64_t looked = engine.evaluations - before;
        CHECK(looked > 120 && looked < 320); /* about 2 sqrt(n) = 200 */
    }
    rotor_eviction_free(&engine);
}

static void test_small_ones_stay_out_of_the_pool(void) {
    rotor_eviction_options_t options = options_of("LRU");
    rotor_eviction_t engine;
    int32_t storage;
    options.ignore_small = true;
    rotor_eviction_init(&engine, &options);
    for (int k = 0; k < 10; k++) {
        CHECK(rotor_eviction_add(&engine, k == 5 ? 9 : 1000, &storage) == ROTOR_OK);
        CHECK(rotor_eviction_materialize(&engine, &storage, 1) == ROTOR_OK);
    }
    CHECK(engine.pool_count == 10); /* 9 is above 1 % of the mean of what was added until then */
    CHECK(rotor_eviction_add(&engine, 7, &storage) == ROTOR_OK);
    CHECK(rotor_eviction_materialize(&engine, &storage, 1) == ROTOR_OK);
    CHECK(engine.pool_count == 10);
    rotor_eviction_free(&engine);
}

/*
 * A random program: storages are computed from others, which come back first and are locked
 * meanwhile; aliases link storages that are there already; in between some are evicted. `check`
 * looks at the engine after every step.
 */
typedef void check_t(rotor_eviction_t *engine, uint32_t *state);

typedef struct {
    rotor_eviction_t *engine;
    uint32_t state;
    int64_t now;
    int32_t *choices;
    int64_t choice_count;
    int32_t parents[4096][3]; /* -1 for none */
} world_t;

static void evict_one(world_t *world) {
    int32_t storage = choose(world->engine, world->now);
    world->choices[world->choice_count++] = storage;
    if (storage >= 0) {
        CHECK(rotor_eviction_evict(world->engine, storage) == ROTOR_OK);
    }
}

static void bring(world_t *world, int32_t storage) {
    rotor_eviction_t *engine = world->engine;
    const int32_t *parents = world->parents[storage];
    if (rotor_eviction_is(engine, storage, ROTOR_MATERIAL)) {
        return;
    }
    for (int k = 0; k < 3; k++) {
        if (parents[k] >= 0) {
            rotor_eviction_touch(engine, parents[k], world->now);
            bring(world, parents[k]);
            rotor_eviction_lock(engine, parents[k]);
        }
    }
    if (draw(&world->state) % 3 == 0) {
        evict_one(world);
    }
    world->now += draw(&world->state) % 30;
    CHECK(rotor_eviction_materialize(engine, &storage, 1) == ROTOR_OK);
    for (int k = 0; k < 3; k++) {
        if (parents[k] >= 0) {
            CHECK(rotor_eviction_unlock(engine, parents[k]) == ROTOR_OK);
        }
    }
}

static void compute_one(world_t *world) {
    rotor_eviction_t *engine = world->engine;
    uint32_t *state = &world->state;
    int32_t n = (int32_t)engine->count;
    int32_t storage;
    CHECK(rotor_eviction_add(engine, 1 + draw(state) % 90, &storage) == ROTOR_OK);
    CHECK(rotor_eviction_compute(engine, storage, draw(state) % 50) == ROTOR_OK);
    for (int k = 0; k < 3; k++) {
        int32_t back = 1 + (int32_t)(draw(state) % 12);
        bool is_there = draw(state) % 2 == 0 && back <= n;
        world->parents[storage][k] = is_there ? n - back : -1;
        if (is_there) {
            CHECK(rotor_eviction_depend(engine, storage, n - back) == ROTOR_OK);
        }
    }
    bring(world, storage);
    rotor_eviction_touch(engine, storage, world->now);
}

static void alias_one(world_t *world) {
    rotor_eviction_t *engine = world->engine;
    int32_t n = (int32_t)engine->count;
    int32_t storage = (int32_t)draw(&world->state) % n;
    int32_t parent = (int32_t)draw(&world->state) % n;
    CHECK(rotor_eviction_compute(engine, storage, draw(&world->state) % 9) == ROTOR_OK);
    CHECK(rotor_eviction_depend(engine, storage, parent) == ROTOR_OK);
    bring(world, storage);
    rotor_eviction_lock(engine, storage);
    bring(world, parent);
    CHECK(rotor_eviction_unlock(engine, storage) == ROTOR_OK);
}

static int64_t wander(rotor_eviction_t *engine, uint32_t seed, int steps, check_t *check,
                      int32_t *choices) {
    static world_t world;
    memset(&world, 0, sizeof(world));
    world.engine = engine;
    world.state = seed;
    world.choices = choices;
    for (int step = 0; step < steps; step++) {
        uint32_t what = draw(&world.state) % 8;
        if (engine->count == 0 || what < 2) {
            compute_one(&world);
        } else if (what == 2 && draw(&world.state) % 4 == 0) {
            alias_one(&world);
        } else if (what < 4) {
            bring(&world, (int32_t)draw(&world.state) % (int32_t)engine->count);
        } else {
            evict_one(&world);
        }
        if (check != NULL) {
            CHECK(rotor_eviction_check(engine) == NULL);
            check(engine, &world.state);
        }
    }
    return world.choice_count;
}

static void check_exact_classes(rotor_eviction_t *engine, uint32_t *state) {
    int32_t storage = (int32_t)draw(state) % (int32_t)engine->count;
    (void)choose(engine, 1); /* rebuilds */
    if (!rotor_eviction_is(engine, storage, ROTOR_MATERIAL)) {
        return;
    }
    /* All that is evicted and connected to a neighbour, whatever the direction. */
    static bool seen[4096];
    static int32_t stack[4096];
    int64_t sum = 0;
    int depth = 0;
    memset(seen, 0, sizeof(seen));
    stack[depth++] = storage;
    while (depth > 0) {
        int32_t at = stack[--depth];
        for (int way = 0; way < 2; way++) {
            rotor_neighbours_t list = engine->candidates[at].neighbours[way];
            for (int32_t k = list.start; k < list.start + list.count; k++) {
                int32_t other = engine->neighbours[k];
                if (!seen[other] && !rotor_eviction_is(engine, other, ROTOR_MATERIAL)) {
                    seen[other] = true;
                    stack[depth++] = other;
                    sum += rotor_eviction_is(engine, other, ROTOR_COMPUTED)
                               ? engine->candidates[other].compute_ns
                               : 0;
                }
            }
        }
    }
    CHECK(rotor_eviction_class_sum(engine, storage) == sum);
}

static void test_exact_classes_against_walks(void) {
    static int32_t choices[200000];
    for (uint32_t seed = 0; seed < 30; seed++) {
        rotor_eviction_options_t options = options_of("DTREqClass");
        rotor_eviction_t engine;
        options.rebuild_every = 1;
        options.keep_edges = seed % 2 == 0;
        rotor_eviction_init(&engine, &options);
        wander(&engine, seed, 600, check_exact_classes, choices);
        rotor_eviction_free(&engine);
    }
}

/* The fast mode and the literal mode have to agree on every choice. */
static void test_literal_mode_agrees(void) {
    static const char *const names[] = {"DTR",      "MSPS", "AbE",      "AbEStale", "AbESize",
                                        "DTREqClass", "AbEq", "DTRUnopt", "DTRLocal",
                                        "DTRAncestors"};
    static int32_t fast[200000], literal[200000];
    for (size_t h = 0; h < sizeof(names) / sizeof(names[0]); h++) {
        for (uint32_t seed = 0; seed < 60; seed++) {
            rotor_eviction_options_t options = options_of(names[h]);
            rotor_eviction_t engine;
            int steps = seed < 50 ? 300 : 1500;
            rotor_eviction_init(&engine, &options);
            int64_t count = wander(&engine, seed, steps, NULL, fast);
            rotor_eviction_free(&engine);
            options.count_accesses = true;
            rotor_eviction_init(&engine, &options);
            CHECK(wander(&engine, seed, steps, NULL, literal) == count);
            CHECK(engine.accesses >= engine.evaluations);
            rotor_eviction_free(&engine);
            CHECK(memcmp(fast, literal, (size_t)count * sizeof(*fast)) == 0);
        }
    }
}

static int old_first(void *context, rotor_eviction_t *engine, int32_t storage, double *cost) {
    (void)context;
    *cost = (double)engine->candidates[storage].last_access;
    return storage == 17 ? ROTOR_ERR_INTERRUPTED : ROTOR_OK;
}

static void test_callbacks(void) {
    static const rotor_heuristic_t mine = {"mine", ROTOR_CALLBACK, false, ROTOR_NO_STALENESS};
    rotor_eviction_options_t options = {.heuristic = &mine, .cost = old_first};
    rotor_eviction_t engine;
    int32_t storage;
    rotor_eviction_init(&engine, &options);
    make_chain(&engine, 10);
    rotor_eviction_touch(&engine, 0, 50);
    CHECK(choose(&engine, 60) == 1);
    CHECK(rotor_eviction_evict(&engine, 4) == ROTOR_OK);
    CHECK(rotor_eviction_evict(&engine, 5) == ROTOR_OK);
    CHECK(rotor_eviction_around(&engine, 3, ROTOR_CHILDREN) == 2);
    CHECK(rotor_eviction_around(&engine, 3, ROTOR_PARENTS) == 0);
    CHECK(rotor_eviction_around(&engine, 6, ROTOR_PARENTS) == 2);
    CHECK(rotor_eviction_class_sum(&engine, 3) == 2);
    rotor_eviction_detach(&engine, 4);
    CHECK(rotor_eviction_around(&engine, 6, ROTOR_PARENTS) == 1);
    for (int k = 0; k < 8; k++) {
        CHECK(rotor_eviction_add(&engine, 1, &storage) == ROTOR_OK);
        CHECK(rotor_eviction_materialize(&engine, &storage, 1) == ROTOR_OK);
        rotor_eviction_touch(&engine, storage, 55);
    }
    CHECK(rotor_eviction_choose(&engine, 60, &storage) == ROTOR_ERR_INTERRUPTED);
    rotor_eviction_free(&engine);
}

static void test_costs_that_overflow(void) {
    rotor_eviction_options_t options = options_of("DTR");
    rotor_eviction_t engine;
    int32_t storage;
    rotor_eviction_init(&engine, &options);
    CHECK(rotor_eviction_add(&engine, 1, &storage) == ROTOR_OK);
    CHECK(rotor_eviction_compute(&engine, storage, INT64_MAX / 4) == ROTOR_OK);
    CHECK(rotor_eviction_compute(&engine, storage, 1) == ROTOR_ERR_OVERFLOW);
    rotor_eviction_free(&engine);
}

static void test_marks_wrap(void) {
    rotor_eviction_options_t options = options_of("DTRUnopt");
    rotor_eviction_t engine;
    rotor_eviction_init(&engine, &options);
    make_chain(&engine, 3);
    CHECK(rotor_eviction_evict(&engine, 1) == ROTOR_OK);
    engine.mark = UINT32_MAX - 1;
    for (int k = 0; k < 4; k++) {
        CHECK(rotor_eviction_around(&engine, 0, ROTOR_CHILDREN) == 1);
    }
    rotor_eviction_free(&engine);
}

static void test_a_storage_without_edges_is_as_new(void) {
    static const char *const names[] = {"DTR", "DTREqClass", "DTRUnopt", "LRU"};
    for (size_t h = 0; h < sizeof(names) / sizeof(names[0]); h++) {
        rotor_eviction_options_t options = options_of(names[h]);
        rotor_eviction_t engine;
        rotor_eviction_init(&engine, &options);
        make_chain(&engine, 5);
        CHECK(rotor_eviction_evict(&engine, 1) == ROTOR_OK);
        CHECK(rotor_eviction_evict(&engine, 3) == ROTOR_OK);
        rotor_eviction_lock(&engine, 2);
        rotor_eviction_pin(&engine, 2);
        CHECK(rotor_eviction_forget_edges(&engine, 2) == ROTOR_OK);
        CHECK(engine.count == 5 && engine.removed_count == 0 && engine.locked_bytes == 10);
        CHECK(rotor_eviction_is(&engine, 2, ROTOR_MATERIAL) &&
              rotor_eviction_is(&engine, 2, ROTOR_PINNED));
        CHECK(engine.candidates[2].locks == 1 && engine.candidates[2].last_access == 3);
        CHECK(engine.candidates[2].compute_ns == 0);
        for (int way = 0; way < 2; way++) {
            CHECK(engine.candidates[2].neighbours[way].count == 0);
            CHECK(rotor_eviction_around(&engine, 2, (enum rotor_direction)way) == 0);
        }
        CHECK(rotor_eviction_around(&engine, 0, ROTOR_CHILDREN) == 1);
        CHECK(rotor_eviction_around(&engine, 4, ROTOR_PARENTS) == 1);
        CHECK(rotor_eviction_check(&engine) == NULL);
        rotor_eviction_free(&engine);
    }
}

/* Whether an engine with another value in one of its fields is found to be wrong; puts it back. */
#define IS_FOUND(engine, field, value)                                                             \
    do {                                                                                           \
        int64_t before = (int64_t)(field);                                                         \
        CHECK(rotor_eviction_check(engine) == NULL);                                               \
        field = (value);                                                                           \
        CHECK(rotor_eviction_check(engine) != NULL);                                               \
        memcpy(&(field), &before, sizeof(field));                                                  \
    } while (0)

static void test_contradictions_are_found(void) {
    rotor_eviction_options_t options = options_of("DTREqClass");
    rotor_eviction_t engine;
    rotor_eviction_init(&engine, &options);
    make_chain(&engine, 6);
    rotor_eviction_lock(&engine, 1);
    CHECK(rotor_eviction_evict(&engine, 2) == ROTOR_OK);
    CHECK(rotor_eviction_remove(&engine, 4) == ROTOR_OK);
    IS_FOUND(&engine, engine.pool_count, 2);
    IS_FOUND(&engine, engine.candidates[0].slot, 1);
    IS_FOUND(&engine, engine.states[3], 0);
    IS_FOUND(&engine, engine.states[2], ROTOR_MATERIAL);
    IS_FOUND(&engine, engine.unused, -1);
    IS_FOUND(&engine, engine.removed_count, 0);
    IS_FOUND(&engine, engine.locked_bytes, 0);
    IS_FOUND(&engine, engine.candidates[1].locks, 0);
    IS_FOUND(&engine, engine.candidates[0].locks, -1);
    IS_FOUND(&engine, engine.total_compute_ns, 0);
    IS_FOUND(&engine, engine.grown, 1);
    IS_FOUND(&engine, engine.neighbours[engine.candidates[1].neighbours[0].start], 5);
    IS_FOUND(&engine, engine.candidates[1].neighbours[0].count, 0);
    IS_FOUND(&engine, engine.neighbour_lost, 0);
    IS_FOUND(&engine, engine.candidates[0].node, 0);
    CHECK(rotor_eviction_check(&engine) == NULL);
    rotor_eviction_free(&engine);
}

static const test_case_t cases[] = {
    {"order_and_ties", test_order_and_ties},
    {"a_cost_of_zero_wins", test_a_cost_of_zero_wins},
    {"random_choices_are_seeded_and_uniform", test_random_choices_are_seeded_and_uniform},
    {"sampling_looks_at_few", test_sampling_looks_at_few},
    {"small_ones_stay_out_of_the_pool", test_small_ones_stay_out_of_the_pool},
    {"exact_classes_against_walks", test_exact_classes_against_walks},
    {"literal_mode_agrees", test_literal_mode_agrees},
    {"callbacks", test_callbacks},
    {"costs_that_overflow", test_costs_that_overflow},
    {"marks_wrap", test_marks_wrap},
    {"a_storage_without_edges_is_as_new", test_a_storage_without_edges_is_as_new},
    {"contradictions_are_found", test_contradictions_are_found},
};

TEST_MAIN(cases)
