#include <stdint.h>

#include "chains.h"

static void every_status_has_a_sentence(void) {
    const char *unknown = rotor_strerror(-9999);
    int known = 0;
    for (int status = 0; status > -60; status--) {
        CHECK(rotor_strerror(status) != NULL && rotor_strerror(status)[0] != '\0');
        known += strcmp(rotor_strerror(status), unknown) != 0;
    }
    CHECK(known == 25);
}

static void allocations_of_nothing(void) {
    void *a = rotor_malloc(0);
    void *b = rotor_calloc(0, 8);
    void *c = rotor_realloc(NULL, 0);
    CHECK(a != NULL && b != NULL && c != NULL);
    rotor_free(a);
    rotor_free(b);
    rotor_free(c);
    rotor_free(NULL);
}

static void calloc_clears(void) {
    unsigned char *block = rotor_calloc(100, 3);
    CHECK(block != NULL);
    for (int k = 0; block != NULL && k < 300; k++) {
        CHECK(block[k] == 0);
    }
    rotor_free(block);
}

static void allocations_fail_when_told(void) {
    rotor_testing_fail_after(2);
    void *first = rotor_malloc(8);
    CHECK(first != NULL);
    CHECK(rotor_malloc(8) == NULL);
    CHECK(rotor_calloc(1, 8) == NULL);
    CHECK(rotor_realloc(first, 16) == NULL);
    rotor_testing_fail_after(0);
    rotor_free(first);
}

static void products_that_overflow(void) {
    size_t bytes = 7;
    CHECK(rotor_array_bytes(INT64_MAX, 16, &bytes) == ROTOR_ERR_OVERFLOW);
    CHECK(rotor_array_bytes(-1, 1, &bytes) == ROTOR_ERR_OVERFLOW);
    CHECK(bytes == 7);
    CHECK(rotor_array_bytes(3, 16, &bytes) == ROTOR_OK && bytes == 48);
    CHECK(rotor_malloc_array(INT64_MAX, 16) == NULL);
}

static void asking(void) {
    int64_t left = 2;
    rotor_callback_t callback = {.keep_going = stop_at, .context = &left};
    rotor_callback_t silent = {.keep_going = NULL, .context = NULL};
    CHECK(rotor_ask(NULL, 0, 1) == ROTOR_OK);
    CHECK(rotor_ask(&silent, 0, 1) == ROTOR_OK);
    CHECK(rotor_ask(&callback, 0, 1) == ROTOR_OK);
    CHECK(rotor_ask(&callback, 1, 1) == ROTOR_ERR_INTERRUPTED);
}

static const test_case_t cases[] = {
    {"every_status_has_a_sentence", every_status_has_a_sentence},
    {"allocations_of_nothing", allocations_of_nothing},
    {"calloc_clears", calloc_clears},
    {"allocations_fail_when_told", allocations_fail_when_told},
    {"products_that_overflow", products_that_overflow},
    {"asking", asking},
};

TEST_MAIN(cases)
