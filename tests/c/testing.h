/* A tiny harness: CHECK() in functions, a table { "name", fn } at the end of the file. */
#ifndef ROTOR_TESTS_TESTING_H
#define ROTOR_TESTS_TESTING_H

#include <stdio.h>
#include <string.h>

#include "core.h"

typedef struct {
    const char *name;
    void (*run)(void);
} test_case_t;

static int test_failures;

#define CHECK(condition)                                                                     \
    do {                                                                                     \
        if (!(condition)) {                                                                  \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                  \
            test_failures++;                                                                 \
        }                                                                                    \
    } while (0)

static inline int test_main(const test_case_t *cases, size_t count, int argc, char **argv) {
    int failed = 0;
    size_t ran = 0;
    for (size_t k = 0; k < count; k++) {
        if (argc > 1 && strcmp(argv[1], cases[k].name) != 0) {
            continue;
        }
        int before = test_failures;
        rotor_testing_fail_after(0);
        int64_t live = rotor_testing_live();
        cases[k].run();
        rotor_testing_fail_after(0);
        if (rotor_testing_live() != live) {
            fprintf(stderr, "%s: %lld allocations leaked\n", cases[k].name,
                    (long long)(rotor_testing_live() - live));
            test_failures++;
        }
        ran++;
        failed += test_failures != before;
        printf("%-4s %s\n", test_failures == before ? "ok" : "FAIL", cases[k].name);
    }
    printf("%zu passed, %d failed\n", ran - (size_t)failed, failed);
    return failed != 0 || ran == 0;
}

#define TEST_MAIN(cases)                                                                     \
    int main(int argc, char **argv) {                                                        \
        return test_main(cases, sizeof(cases) / sizeof((cases)[0]), argc, argv);             \
    }

#endif
