#include "checksum.h"
#include "checksum_blocks.h"
#include "testing.h"

#include <string.h>

static uint64_t sum_of(const void *data, int64_t item, int rank, const int64_t *sizes,
                       const int64_t *strides) {
    uint64_t sum = 0;
    CHECK(rotor_checksum(data, item, rank, sizes, strides, &sum) == ROTOR_OK);
    return sum;
}

static uint64_t sum_of_bytes(const unsigned char *data, int64_t count) {
    int64_t stride = 1;
    return sum_of(data, 1, 1, &count, &stride);
}

static void test_every_bit_counts(void) {
    static unsigned char data[9000];
    for (size_t k = 0; k < sizeof(data); k++) {
        data[k] = (unsigned char)(k * 37 >> 3);
    }
    uint64_t whole = sum_of_bytes(data, sizeof(data));
    CHECK(whole == sum_of_bytes(data, sizeof(data)));
    for (size_t k = 0; k < sizeof(data); k += 7) {
        data[k] ^= (unsigned char)(1u << (k % 8));
        CHECK(sum_of_bytes(data, sizeof(data)) != whole);
        data[k] ^= (unsigned char)(1u << (k % 8));
    }
    CHECK(sum_of_bytes(data, sizeof(data)) == whole);
}

static void test_lengths_and_zeros(void) {
    static unsigned char zeros[5000];
    uint64_t seen[130];
    for (int64_t n = 0; n < 130; n++) {
        seen[n] = sum_of_bytes(zeros, n);
        for (int64_t k = 0; k < n; k++) {
            CHECK(seen[k] != seen[n]);
        }
    }
    CHECK(sum_of_bytes(NULL, 0) == seen[0]);
}

static void test_order_and_signs(void) {
    static double values[4096];
    for (int k = 0; k < 4096; k++) {
        values[k] = k % 97 - 48.5;
    }
    int64_t size = 4096, stride = 1;
    uint64_t whole = sum_of(values, 8, 1, &size, &stride);
    for (int distance = 1; distance < 4096; distance *= 2) {
        for (int k = 0; k + distance < 4096; k += 301) {
            double one = values[k], other = values[k + distance];
            values[k] = other;
            values[k + distance] = one;
            CHECK(one == other || sum_of(values, 8, 1, &size, &stride) != whole);
            values[k] = -one;
            values[k + distance] = -other;
            CHECK(sum_of(values, 8, 1, &size, &stride) != whole);
            values[k] = one;
            values[k + distance] = other;
        }
    }
}

static void test_strides(void) {
    /* A matrix of 3 x 5 in rows of 8: what lies between the rows is not read. */
    int32_t padded[24], dense[15];
    for (int k = 0; k < 24; k++) {
        padded[k] = k * k;
    }
    for (int k = 0; k < 15; k++) {
        dense[k] = padded[k / 5 * 8 + k % 5];
    }
    int64_t sizes[3] = {3, 5, 1}, strides[3] = {8, 1, 77};
    int64_t count = 15, one = 1;
    uint64_t whole = sum_of(dense, 4, 1, &count, &one);
    CHECK(sum_of(padded, 4, 3, sizes, strides) == whole);
    padded[6] = -1;
    CHECK(sum_of(padded, 4, 2, sizes, strides) == whole);
    padded[8] = -1;
    CHECK(sum_of(padded, 4, 2, sizes, strides) != whole);
    /* Transposed and expanded, the same memory is read in the same order, once. */
    int64_t turned[3] = {5, 1000, 3}, with[3] = {1, 0, 5};
    CHECK(sum_of(dense, 4, 3, turned, with) == whole);
}

static void test_refusals(void) {
    uint64_t sum = 5;
    int64_t negative = -1, one = 1, none = 0;
    int64_t many[ROTOR_CHECKSUM_MAX_RANK + 1];
    for (int k = 0; k <= ROTOR_CHECKSUM_MAX_RANK; k++) {
        many[k] = 1;
    }
    CHECK(rotor_checksum(&one, 8, -1, &one, &one, &sum) == ROTOR_ERR_BAD_LENGTH);
    CHECK(rotor_checksum(&one, 8, ROTOR_CHECKSUM_MAX_RANK + 1, many, many, &sum) ==
          ROTOR_ERR_BAD_LENGTH);
    CHECK(rotor_checksum(&one, 8, ROTOR_CHECKSUM_MAX_RANK, many, many, &sum) == ROTOR_OK);
    sum = 5;
    CHECK(rotor_checksum(&one, 0, 1, &one, &one, &sum) == ROTOR_ERR_NEGATIVE_SIZE);
    CHECK(rotor_checksum(&one, 8, 1, &negative, &one, &sum) == ROTOR_ERR_NEGATIVE_SIZE);
    CHECK(rotor_checksum(&one, 8, 1, &one, &negative, &sum) == ROTOR_ERR_NEGATIVE_SIZE);
    CHECK(rotor_checksum(NULL, 8, 0, NULL, NULL, &sum) == ROTOR_ERR_UNAVAILABLE);
    CHECK(rotor_checksum(NULL, 8, 1, &one, &one, &sum) == ROTOR_ERR_UNAVAILABLE);
    CHECK(sum == 5);
    CHECK(rotor_checksum(NULL, 8, 1, &none, &one, &sum) == ROTOR_OK);
}

static void test_versions(void) {
    static unsigned char data[64 * ROTOR_CHECKSUM_BLOCK + 1];
    uint64_t x = 1;
    for (size_t k = 0; k < sizeof(data); k++) {
        x = x * UINT64_C(6364136223846793005) + 1442695040888963407u;
        data[k] = (unsigned char)(x >> 56);
    }
    rotor_checksum_blocks_t portable = rotor_checksum_version(ROTOR_CHECKSUM_PORTABLE);
    CHECK(portable != NULL);
    CHECK(rotor_checksum_version(ROTOR_CHECKSUM_KINDS) == NULL);
    int found = 0;
    for (int kind = 0; kind < ROTOR_CHECKSUM_KINDS; kind++) {
        rotor_checksum_blocks_t version = rotor_checksum_version((rotor_checksum_kind_t)kind);
        if (version == NULL) {
            continue;
        }
        found += version == rotor_checksum_fastest();
        for (size_t count = 0; count <= 64; count += count < 4 ? 1 : 15) {
            rotor_checksum_lanes_t one, other;
            for (int k = 0; k < ROTOR_CHECKSUM_LANES; k++) {
                one.first[k] = x * (uint64_t)k;
                one.second[k] = ~x;
                one.keys[k] = x ^ UINT64_C(0x123456789abcdef) * (uint64_t)k;
            }
            other = one;
            portable(&one, data + 1, count);
            version(&other, data + 1, count);
            CHECK(memcmp(&one, &other, sizeof(one)) == 0);
        }
    }
    CHECK(found == 1);
}

static const test_case_t cases[] = {
    {"every_bit_counts", test_every_bit_counts},
    {"lengths_and_zeros", test_lengths_and_zeros},
    {"order_and_signs", test_order_and_signs},
    {"strides", test_strides},
    {"refusals", test_refusals},
    {"versions", test_versions},
};

TEST_MAIN(cases)
