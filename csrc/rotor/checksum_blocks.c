#include "checksum_blocks.h"

#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_X86 1
#include <immintrin.h>
#else
#define HAS_X86 0
#endif

enum { LANES = ROTOR_CHECKSUM_LANES, BLOCK = ROTOR_CHECKSUM_BLOCK };

/* The growth of the key of lane k from block to block. */
static uint64_t step_of(int k) {
    return UINT64_C(0x9e3779b97f4a7c15) + ((uint64_t)k << 33) + ((uint64_t)k << 1);
}

static void portable(rotor_checksum_lanes_t *lanes, const unsigned char *data, size_t count) {
    rotor_checksum_lanes_t at = *lanes;
    uint64_t step[LANES];
    for (int k = 0; k < LANES; k++) {
        step[k] = step_of(k);
    }
    for (size_t i = 0; i < count; i++, data += BLOCK) {
        uint64_t words[LANES];
        memcpy(words, data, BLOCK);
        for (int k = 0; k < LANES; k++) {
            uint64_t a = words[k] + at.keys[k];
            uint64_t b = words[k] ^ ~(at.keys[k] >> 32 | at.keys[k] << 32);
            at.first[k] += (a & UINT32_MAX) * (a >> 32);
            at.second[k] += (b & UINT32_MAX) * (b >> 32);
            at.keys[k] += step[k];
        }
    }
    *lanes = at;
}

#if HAS_X86

/* The halves of 64 bits exchanged, as _mm256_shuffle_epi32 takes it. */
enum { EXCHANGED = 0xb1 };

__attribute__((target("avx2"))) static void avx2(rotor_checksum_lanes_t *lanes,
                                                 const unsigned char *data, size_t count) {
    const __m256i ones = _mm256_set1_epi64x(-1);
    __m256i first[2], second[2], keys[2], step[2];
    for (int h = 0; h < 2; h++) {
        uint64_t steps[4];
        for (int k = 0; k < 4; k++) {
            steps[k] = step_of(4 * h + k);
        }
        step[h] = _mm256_loadu_si256((const __m256i *)steps);
        first[h] = _mm256_loadu_si256((const __m256i *)(lanes->first + 4 * h));
        second[h] = _mm256_loadu_si256((const __m256i *)(lanes->second + 4 * h));
        keys[h] = _mm256_loadu_si256((const __m256i *)(lanes->keys + 4 * h));
    }
    for (size_t i = 0; i < count; i++, data += BLOCK) {
        for (int h = 0; h < 2; h++) {
            __m256i words = _mm256_loadu_si256((const __m256i *)(data + 32 * h));
            __m256i turned = _mm256_xor_si256(_mm256_shuffle_epi32(keys[h], EXCHANGED), ones);
            __m256i a = _mm256_add_epi64(words, keys[h]);
            __m256i b = _mm256_xor_si256(words, turned);
            a = _mm256_mul_epu32(a, _mm256_srli_epi64(a, 32));
            b = _mm256_mul_epu32(b, _mm256_srli_epi64(b, 32));
            first[h] = _mm256_add_epi64(first[h], a);
            second[h] = _mm256_add_epi64(second[h], b);
            keys[h] = _mm256_add_epi64(keys[h], step[h]);
        }
    }
    for (int h = 0; h < 2; h++) {
        _mm256_storeu_si256((__m256i *)(lanes->first + 4 * h), first[h]);
        _mm256_storeu_si256((__m256i *)(lanes->second + 4 * h), second[h]);
        _mm256_storeu_si256((__m256i *)(lanes->keys + 4 * h), keys[h]);
    }
}

__attribute__((target("avx512f"))) static void avx512(rotor_checksum_lanes_t *lanes,
                                                      const unsigned char *data, size_t count) {
    const __m512i ones = _mm512_set1_epi64(-1);
    uint64_t steps[LANES];
    for (int k = 0; k < LANES; k++) {
        steps[k] = step_of(k);
    }
    __m512i step = _mm512_loadu_si512(steps);
    __m512i first = _mm512_loadu_si512(lanes->first);
    __m512i second = _mm512_loadu_si512(lanes->second);
    __m512i keys = _mm512_loadu_si512(lanes->keys);
    for (size_t i = 0; i < count; i++, data += BLOCK) {
        __m512i words = _mm512_loadu_si512(data);
        __m512i turned = _mm512_xor_si512(_mm512_ror_epi64(keys, 32), ones);
        __m512i a = _mm512_add_epi64(words, keys);
        __m512i b = _mm512_xor_si512(words, turned);
        a = _mm512_mul_epu32(a, _mm512_srli_epi64(a, 32));
        b = _mm512_mul_epu32(b, _mm512_srli_epi64(b, 32));
        first = _mm512_add_epi64(first, a);
        second = _mm512_add_epi64(second, b);
        keys = _mm512_add_epi64(keys, step);
    }
    _mm512_storeu_si512(lanes->first, first);
    _mm512_storeu_si512(lanes->second, second);
    _mm512_storeu_si512(lanes->keys, keys);
}

#endif

rotor_checksum_blocks_t rotor_checksum_version(rotor_checksum_kind_t kind) {
#if HAS_X86
    if (kind == ROTOR_CHECKSUM_AVX2) {
        return __builtin_cpu_supports("avx2") ? avx2 : NULL;
    }
    if (kind == ROTOR_CHECKSUM_AVX512) {
        return __builtin_cpu_supports("avx512f") ? avx512 : NULL;
    }
#endif
    return kind == ROTOR_CHECKSUM_PORTABLE ? portable : NULL;
}

rotor_checksum_blocks_t rotor_checksum_fastest(void) {
    rotor_checksum_blocks_t found = NULL;
    for (int kind = ROTOR_CHECKSUM_KINDS - 1; found == NULL; kind--) {
        found = rotor_checksum_version((rotor_checksum_kind_t)kind);
    }
    return found;
}
