#include "bits.h"
#include "classes.h"
#include "testing.h"
#include "vector.h"

#define SIZE 3000

static uint32_t draw(uint32_t *state) {
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

static void check_same(const rotor_bits_t *set, const bool *expected) {
    int32_t at = rotor_bits_next(set, 0);
    for (int32_t k = 0; k < SIZE; k++) {
        CHECK(rotor_bits_has(set, k) == expected[k]);
        if (expected[k]) {
            CHECK(at == k);
            at = rotor_bits_next(set, k + 1);
        }
    }
    CHECK(at == -1);
}

static void test_sets_against_arrays(void) {
    uint32_t state = 7;
    for (int round = 0; round < 40; round++) {
        static bool a_has[SIZE], b_has[SIZE];
        static uint64_t words[SIZE / 64 + 1];
        rotor_bits_t a = {.words = NULL};
        rotor_bits_t b = {.words = NULL};
        int32_t base = (int32_t)(draw(&state) % 2000);
        int32_t range = 1 + (int32_t)(draw(&state) % 900);
        memset(a_has, 0, sizeof(a_has));
        memset(b_has, 0, sizeof(b_has));
        memset(words, 0, sizeof(words));
        for (int k = 0; k < 200; k++) {
            int32_t element = base + (int32_t)draw(&state) % range;
            if (draw(&state) % 4 == 0) {
                rotor_bits_remove(&a, element);
                a_has[element] = false;
            } else {
                CHECK(rotor_bits_add(&a, element) == ROTOR_OK);
                a_has[element] = true;
            }
            element = (int32_t)draw(&state) % SIZE;
            CHECK(rotor_bits_add(&b, element) == ROTOR_OK);
            b_has[element] = true;
            words[element / 64] |= UINT64_C(1) << (element % 64);
        }
        check_same(&a, a_has);
        CHECK(rotor_bits_unite(&a, &b) == ROTOR_OK);
        for (int32_t k = 0; k < SIZE; k++) {
            a_has[k] |= b_has[k];
        }
        check_same(&a, a_has);
        CHECK(rotor_bits_assign(&a, words, 0, SIZE / 64 + 1) == ROTOR_OK);
        check_same(&a, b_has);
        a.count = 0;
        CHECK(rotor_bits_next(&a, 0) == -1);
        CHECK(rotor_bits_unite(&b, &a) == ROTOR_OK);
        check_same(&b, b_has);
        rotor_bits_free(&a);
        rotor_bits_free(&b);
    }
}

static void test_sets_without_memory(void) {
    rotor_bits_t set = {.words = NULL};
    CHECK(rotor_bits_add(&set, 640) == ROTOR_OK);
    rotor_testing_fail_after(1);
    CHECK(rotor_bits_add(&set, 640000) == ROTOR_ERR_NO_MEMORY);
    rotor_testing_fail_after(0);
    CHECK(rotor_bits_has(&set, 640) && !rotor_bits_has(&set, 640000));
    rotor_bits_free(&set);
}

static void test_classes_against_labels(void) {
    enum { NODES = 300 };
    uint32_t state = 3;
    rotor_classes_t classes = {.nodes = NULL};
    int32_t nodes[NODES];
    int32_t labels[NODES];
    int64_t steps = 0;

    for (int32_t k = 0; k < NODES; k++) {
        CHECK(rotor_classes_add(&classes, k, &nodes[k]) == ROTOR_OK);
        labels[k] = k;
    }
    for (int round = 0; round < 250; round++) {
        int32_t a = (int32_t)(draw(&state) % NODES);
        int32_t b = (int32_t)(draw(&state) % NODES);
        int32_t from = rotor_classes_root(&classes, nodes[a], &steps);
        int32_t into = rotor_classes_root(&classes, nodes[b], &steps);
        CHECK((from == into) == (labels[a] == labels[b]));
        if (from != into) {
            int32_t old = labels[a];
            int32_t label = labels[b];
            rotor_classes_join(&classes, from, into);
            CHECK(rotor_classes_root(&classes, nodes[a], &steps) == into);
            for (int32_t k = 0; k < NODES; k++) {
                labels[k] = labels[k] == old ? label : labels[k];
            }
        }
    }
    for (int32_t k = 0; k < NODES; k++) {
        int64_t sum = 0;
        for (int32_t j = 0; j < NODES; j++) {
            sum += labels[j] == labels[k] ? j : 0;
        }
        CHECK(classes.nodes[rotor_classes_root(&classes, nodes[k], &steps)].sum_ns == sum);
    }
    int64_t before = steps;
    rotor_classes_root(&classes, rotor_classes_root(&classes, nodes[0], &before), &steps);
    uint32_t mark = rotor_classes_mark(&classes);
    classes.nodes[5].seen = mark;
    classes.mark = UINT32_MAX;
    CHECK(rotor_classes_mark(&classes) == 1 && classes.nodes[5].seen == 0);
    rotor_classes_free(&classes);
}

static void test_growing(void) {
    int32_t *items = NULL;
    int64_t capacity = 0;
    CHECK(ROTOR_RESERVE(items, 0, capacity, 5) == ROTOR_OK && capacity >= 5);
    items[4] = 4;
    int64_t before = capacity;
    CHECK(ROTOR_RESERVE(items, 0, capacity, before) == ROTOR_OK && capacity == before);
    CHECK(ROTOR_RESERVE(items, before, capacity, 1) == ROTOR_OK && capacity >= 2 * before);
    CHECK(items[4] == 4);
    before = capacity;
    rotor_testing_fail_after(1);
    CHECK(ROTOR_RESERVE(items, before, capacity, 1) == ROTOR_ERR_NO_MEMORY);
    rotor_testing_fail_after(0);
    CHECK(ROTOR_RESERVE(items, 0, capacity, INT64_C(1) << 31) == ROTOR_ERR_OVERFLOW);
    CHECK(capacity == before && items[4] == 4);
    rotor_free(items);
}

static const test_case_t cases[] = {
    {"sets_against_arrays", test_sets_against_arrays},
    {"sets_without_memory", test_sets_without_memory},
    {"classes_against_labels", test_classes_against_labels},
    {"growing", test_growing},
};

TEST_MAIN(cases)
