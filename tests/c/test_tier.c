#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "checksum.h"
#include "testing.h"
#include "tier.h"

enum { MOST = 40000, SECOND = 1000000000 };

/* The build folder: temporary folders may lie in memory. */
static const char *const directory = "build";

static rotor_tier_t *opened(bool buffered) {
    rotor_tier_t *tier = NULL;
    int error;
    CHECK(rotor_tier_open(directory, NULL, buffered, &tier, &error) == ROTOR_OK);
    return tier;
}

static int finished(rotor_tier_t *tier, rotor_transfer_t *transfer) {
    int ret = rotor_tier_wait(tier, transfer, SECOND);
    while (ret == ROTOR_ERR_INTERRUPTED) {
        ret = rotor_tier_wait(tier, transfer, SECOND);
    }
    return ret;
}

/* Buffers of many sizes and phases come back; memory around the target is untouched. */
static void check_buffers(bool buffered) {
    static const int64_t sizes[] = {0, 1, 63, 64, 511, 512, 513, 1023, 1024, 1025, 4096, 9999, 20000};
    rotor_tier_t *tier = opened(buffered);
    char *from = rotor_malloc(MOST);
    char *to = rotor_malloc(MOST);
    if (tier == NULL || from == NULL || to == NULL) {
        goto out;
    }
    int64_t sector = rotor_tier_sector(tier);
    CHECK(buffered == (sector == 1));
    CHECK((sector & (sector - 1)) == 0);
    int64_t room = rotor_tier_room(sector, sizes[12]);
    int error;
    CHECK(rotor_tier_reserve(tier, 2 * room, &error) == ROTOR_OK);
    unsigned seed = 7;
    for (size_t k = 0; k < sizeof(sizes) / sizeof(sizes[0]); k++) {
        for (int64_t shift = 0; shift < sector && shift < 1024; shift += 61) {
            int64_t bytes = sizes[k];
            CHECK(rotor_tier_room(sector, bytes) <= room);
            for (int64_t i = 0; i < MOST; i++) {
                seed = seed * 1664525U + 1013904223U;
                from[i] = (char)(seed >> 24);
                to[i] = 77;
            }
            /* Equal phases at different addresses. */
            int64_t there = (int64_t)(((uintptr_t)from + (uintptr_t)shift - (uintptr_t)to) &
                                      (uintptr_t)(sector - 1)) +
                            sector;
            rotor_transfer_t out = {.writes = true, .memory = from + shift, .bytes = bytes,
                                    .offset = k % 2 == 0 ? 0 : room};
            rotor_transfer_t in = {.memory = to + there, .bytes = bytes, .offset = out.offset};
            CHECK(rotor_tier_begin(tier, &out) == ROTOR_OK);
            CHECK(rotor_tier_begin(tier, &in) == ROTOR_OK);
            CHECK(finished(tier, &in) == ROTOR_OK && finished(tier, &out) == ROTOR_OK);
            CHECK(memcmp(to + there, from + shift, (size_t)bytes) == 0);
            CHECK(to[there - 1] == 77 && to[there + bytes] == 77);
            uint64_t sum = 0;
            const int64_t one = 1;
            CHECK(rotor_checksum(from + shift, 1, 1, &bytes, &one, &sum) == ROTOR_OK);
            CHECK(out.sum == sum && in.sum == sum);
        }
    }
out:
    rotor_tier_free(tier);
    rotor_free(from);
    rotor_free(to);
}

static void test_buffers_come_back(void) { check_buffers(false); }

static void test_buffered_buffers_come_back(void) { check_buffers(true); }

static void test_pieces_are_joined(void) {
    enum { BYTES = 20 << 20 };
    rotor_tier_t *tier = opened(false);
    char *block = rotor_malloc(2 * BYTES + 8192);
    if (tier == NULL || block == NULL) {
        goto out;
    }
    int64_t bytes = BYTES + 300;
    int64_t sector = rotor_tier_sector(tier);
    char *from = block + 64;
    char *to = from + BYTES + 4096;
    to += (uintptr_t)(from - to) & (uintptr_t)(sector - 1);
    for (int64_t i = 0; i < bytes; i++) {
        from[i] = (char)(i * 31 + (i >> 13));
    }
    rotor_transfer_t out = {.writes = true, .memory = from, .bytes = bytes, .offset = sector};
    rotor_transfer_t in = {.memory = to, .bytes = bytes, .offset = sector};
    CHECK(rotor_tier_begin(tier, &out) == ROTOR_OK && rotor_tier_begin(tier, &in) == ROTOR_OK);
    rotor_tier_drain(tier);
    CHECK(out.is_done && in.is_done && out.busy_ns > 0);
    CHECK(finished(tier, &out) == ROTOR_OK && finished(tier, &in) == ROTOR_OK);
    CHECK(memcmp(from, to, (size_t)bytes) == 0);
out:
    rotor_tier_free(tier);
    rotor_free(block);
}

static void test_failures_come_out(void) {
    rotor_tier_t *tier = NULL;
    int error = 0;
    CHECK(rotor_tier_open("build/no such folder", NULL, false, &tier, &error) == ROTOR_ERR_IO);
    CHECK(error == ENOENT && tier == NULL);
    if ((tier = opened(false)) == NULL) {
        return;
    }
    /* More than any disk has. */
    CHECK(rotor_tier_reserve(tier, INT64_C(1) << 55, &error) == ROTOR_ERR_IO);
    CHECK(error == ENOSPC || error == EFBIG);
    CHECK(rotor_tier_reserve(tier, 4096, &error) == ROTOR_OK);
    CHECK(rotor_tier_reserve(tier, 1, &error) == ROTOR_OK);
    char bytes[2048] = {0};
    rotor_transfer_t past = {.memory = bytes, .bytes = 2048, .offset = 1 << 20};
    CHECK(rotor_tier_begin(tier, &past) == ROTOR_OK);
    CHECK(finished(tier, &past) == ROTOR_ERR_IO && past.error == EIO);
    rotor_transfer_t fine = {.writes = true, .memory = bytes, .bytes = 2048};
    CHECK(rotor_tier_begin(tier, &fine) == ROTOR_OK && finished(tier, &fine) == ROTOR_OK);
    rotor_tier_close(tier);
    rotor_tier_close(tier);
    CHECK(rotor_tier_begin(tier, &fine) == ROTOR_ERR_UNAVAILABLE);
    CHECK(rotor_tier_reserve(tier, 1 << 20, &error) == ROTOR_ERR_UNAVAILABLE);
    rotor_tier_free(tier);
    rotor_tier_free(NULL);
}

static void test_a_file_in_memory_is_refused(void) {
    rotor_tier_t *tier = NULL;
    int error = 0;
    if (access("/dev/shm", W_OK) != 0) {
        return;
    }
    CHECK(rotor_tier_open("/dev/shm", NULL, false, &tier, &error) == ROTOR_ERR_UNAVAILABLE);
    CHECK(rotor_tier_open("/dev/shm", NULL, true, &tier, &error) == ROTOR_OK);
    rotor_tier_free(tier);
}

static void test_allocations_may_fail(void) {
    for (int64_t n = 1; n <= 2; n++) {
        rotor_tier_t *tier = NULL;
        int error = 0;
        rotor_testing_fail_after(n);
        CHECK(rotor_tier_open(directory, NULL, false, &tier, &error) == ROTOR_ERR_NO_MEMORY);
        rotor_testing_fail_after(0);
    }
}

/* A name stays, is of the owner alone, and no link is followed. */
static void test_a_file_has_a_name(void) {
    rotor_tier_t *tier = NULL;
    struct stat found;
    int error = 0;
    char bytes[600] = {1, 2, 3};
    rotor_transfer_t out = {.writes = true, .memory = bytes, .bytes = sizeof(bytes)};
    CHECK(rotor_tier_open(directory, "named", false, &tier, &error) == ROTOR_OK);
    CHECK(rotor_tier_begin(tier, &out) == ROTOR_OK && finished(tier, &out) == ROTOR_OK);
    rotor_tier_free(tier);
    CHECK(stat("build/named", &found) == 0 && (found.st_mode & 0777) == 0600);
    CHECK(found.st_size >= (off_t)sizeof(bytes));
    CHECK(unlink("build/named") == 0 && symlink("other", "build/named") == 0);
    CHECK(rotor_tier_open(directory, "named", true, &tier, &error) == ROTOR_ERR_IO);
    CHECK(error == ELOOP && unlink("build/named") == 0);
}

/* A closed tier has moved what was begun; a child reads by itself, and changes nothing. */
static void test_ends(void) {
    static char bytes[1 << 20];
    rotor_tier_t *tier = opened(false);
    if (tier == NULL) {
        return;
    }
    char first[700];
    memset(first, 9, sizeof(first));
    rotor_transfer_t begun = {.writes = true, .memory = first, .bytes = sizeof(first),
                              .offset = 32 << 20};
    CHECK(rotor_tier_begin(tier, &begun) == ROTOR_OK && finished(tier, &begun) == ROTOR_OK);
    rotor_transfer_t some[8];
    for (int k = 0; k < 8; k++) {
        some[k] = (rotor_transfer_t){.writes = true, .memory = bytes, .bytes = sizeof(bytes),
                                     .offset = (int64_t)k << 21};
        CHECK(rotor_tier_begin(tier, &some[k]) == ROTOR_OK);
    }
    pid_t child = fork();
    if (child == 0) {
        rotor_transfer_t other = {.writes = true, .memory = bytes, .bytes = 512};
        bool is_refused = rotor_tier_begin(tier, &other) == ROTOR_ERR_UNAVAILABLE &&
                          rotor_tier_wait(tier, &some[7], SECOND) == ROTOR_ERR_UNAVAILABLE;
        /* At another address than it was written from, if it is of the same phase. */
        uintptr_t shift = ((uintptr_t)first - (uintptr_t)bytes) &
                          (uintptr_t)(rotor_tier_sector(tier) - 1);
        rotor_transfer_t in = {.memory = bytes + shift, .bytes = sizeof(first), .offset = 32 << 20};
        is_refused = is_refused && rotor_tier_wait(tier, &begun, 0) == ROTOR_OK &&
                     rotor_tier_begin(tier, &in) == ROTOR_OK &&
                     rotor_tier_wait(tier, &in, 0) == ROTOR_OK && in.sum == begun.sum &&
                     memcmp(in.memory, first, sizeof(first)) == 0;
        rotor_tier_drain(tier);
        rotor_tier_close(tier);
        _exit(is_refused ? 0 : 1);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    rotor_tier_close(tier);
    for (int k = 0; k < 8; k++) {
        CHECK(some[k].is_done && some[k].error == 0);
        CHECK(rotor_tier_wait(tier, &some[k], 0) == ROTOR_OK);
    }
    rotor_tier_free(tier);
}

static const test_case_t cases[] = {
    {"buffers come back", test_buffers_come_back},
    {"buffered buffers come back", test_buffered_buffers_come_back},
    {"pieces are joined", test_pieces_are_joined},
    {"failures come out", test_failures_come_out},
    {"a file in memory is refused", test_a_file_in_memory_is_refused},
    {"allocations may fail", test_allocations_may_fail},
    {"a file has a name", test_a_file_has_a_name},
    {"ends", test_ends},
};

TEST_MAIN(cases)
