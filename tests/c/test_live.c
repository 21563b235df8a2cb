/* Live bytes after the events of an allocator. */
#include "live.h"
#include "testing.h"

#include <string.h>

#define MOST 16

static void check_levels(const rotor_live_events_t *events, const int64_t *resident,
                         int64_t resident_count, const int64_t *wanted) {
    int64_t live[MOST];
    CHECK(rotor_live_bytes(events, resident, resident_count, live) == ROTOR_OK);
    CHECK(memcmp(live, wanted, (size_t)events->count * sizeof(*live)) == 0);
}

static void test_blocks_are_freed_by_address(void) {
    static const int64_t address[] = {3000, 1000, 2000, 1000, 9000, 1000, 3000};
    static const int64_t nbytes[] = {30, 100, 50, -100, -70, 40, -30};
    static const int64_t wanted[] = {30, 130, 180, 80, 80, 120, 90};
    check_levels(&(rotor_live_events_t){address, nbytes, NULL, 7}, NULL, 0, wanted);
    check_levels(&(rotor_live_events_t){NULL, NULL, NULL, 0}, NULL, 0, wanted);
}

static void test_what_others_overlap_is_gone(void) {
    static const int64_t address[] = {1000, 1100, 1300, 1150, 1000};
    static const int64_t nbytes[] = {100, 100, 50, 170, -100};
    static const int64_t wanted[] = {100, 200, 250, 270, 170};
    check_levels(&(rotor_live_events_t){address, nbytes, NULL, 5}, NULL, 0, wanted);
}

static void test_totals_show_what_other_threads_free(void) {
    static const int64_t address[] = {100, 200, 700, 300};
    static const int64_t nbytes[] = {5, 5, -80, 1};
    static const int64_t total[] = {9, 94, 14, 10};
    static const int64_t told[] = {5, 10, 10, 11};
    static const int64_t untold[] = {5, 10, 10, 6};
    static const int64_t resident[] = {600, 700, 800};
    check_levels(&(rotor_live_events_t){address, nbytes, total, 4}, resident, 3, told);
    check_levels(&(rotor_live_events_t){address, nbytes, total, 4}, resident, 1, untold);
}

static void test_failed_allocations_leave_nothing(void) {
    int64_t address[40];
    int64_t nbytes[40];
    int64_t live[40];
    for (int64_t k = 0; k < 40; k++) {
        address[k] = 10 * k;
        nbytes[k] = 10;
    }
    rotor_live_events_t events = {address, nbytes, NULL, 40};
    int64_t before = rotor_testing_live();
    for (int64_t n = 1;; n++) {
        rotor_testing_fail_after(n);
        int ret = rotor_live_bytes(&events, NULL, 0, live);
        rotor_testing_fail_after(0);
        CHECK(rotor_testing_live() == before);
        if (ret == ROTOR_OK) {
            CHECK(n > 2);
            break;
        }
        CHECK(ret == ROTOR_ERR_NO_MEMORY);
    }
    CHECK(live[39] == 400);
}

static const test_case_t cases[] = {
    {"blocks_are_freed_by_address", test_blocks_are_freed_by_address},
    {"what_others_overlap_is_gone", test_what_others_overlap_is_gone},
    {"totals_show_what_other_threads_free", test_totals_show_what_other_threads_free},
    {"failed_allocations_leave_nothing", test_failed_allocations_leave_nothing},
};

TEST_MAIN(cases)
