/* Blocks of GGUF files by words: what 128 columns of each type have. */
#ifndef PENSTOCK_PRODUCT_GGUF_WORDS_H
#define PENSTOCK_PRODUCT_GGUF_WORDS_H

#include "product_gguf.h"
#include "product_words.h"

#ifdef HAS_X86
/* A F16 number in all lanes. */
FOR_AVX512 ALONE __m512 half_of(const uint8_t *bytes)
{
    uint16_t bits;
    memcpy(&bits, bytes, sizeof bits);
    return _mm512_cvtph_ps(_mm256_set1_epi16((short)bits));
}

/* Eight scales and eight minima of 6 bits, times their F16 numbers. Bytes 4 to 7 and 8 to 11 have the lowest six bits of four scales and four
 * minima, and above them the highest two of the others, whose lowest four are in bytes 12 to 15. */
FOR_AVX512 ALONE void six_bits(const uint8_t *block, float *factors)
{
    enum { EITHER_AND_THIRD = 0xf8 };
    const __m128i all = _mm_loadu_si128((const __m128i *)block), top = _mm_set1_epi8(0x30);
    const __m128i low = _mm_shuffle_epi8(all, _mm_setr_epi8(4, 5, 6, 7, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15));
    const __m128i high = _mm_shuffle_epi8(all, _mm_setr_epi8(-1, -1, -1, -1, 4, 5, 6, 7, -1, -1, -1, -1, 8, 9, 10, 11));
    const __m128i own = _mm_setr_epi32(0x3f3f3f3f, 0x0f0f0f0f, 0x3f3f3f3f, 0x0f0f0f0f);
    __m128i six = _mm_and_si128(_mm_srlv_epi32(low, _mm_setr_epi32(0, 0, 0, 4)), own);
    six = _mm_ternarylogic_epi32(six, _mm_srli_epi32(high, 2), top, EITHER_AND_THIRD);
    const __m512 halves = _mm512_castps128_ps512(_mm_cvtph_ps(all));
    const __m512 by = _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1), halves);
    _mm512_storeu_ps(factors, _mm512_mul_ps(by, _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(six))));
}

/* Whole numbers from `from` on, to 32 of them, as BF16, or as they are where `fixed`. */
FOR_AVX512 ALONE __m512i numbers_from(int from, const int fixed)
{
    const __m512i ints = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i low = _mm512_add_epi32(ints, _mm512_set1_epi32(from)), high = _mm512_add_epi32(low, _mm512_set1_epi32(16));
    if (fixed)
        return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(low)), _mm512_cvtepi32_epi16(high), 1);
    return both_narrowed(_mm512_cvtepi32_ps(high), _mm512_cvtepi32_ps(low), 0);
}

/* Sixteen of them, twice. */
FOR_AVX512 ALONE __m512i numbers_of_4(int from, const int fixed)
{
    return _mm512_broadcast_i64x4(_mm512_castsi512_si256(numbers_from(from, fixed)));
}

/* In lanes 0 to 15 number begin + lane / each * step. */
FOR_AVX512 ALONE __m512 to_lanes(__m512 numbers, int begin, const int each, const int step)
{
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i place = _mm512_srli_epi32(lane, each == 8 ? 3 : 2);
    return _mm512_permutexvar_ps(_mm512_add_epi32(step == 2 ? _mm512_add_epi32(place, place) : place, _mm512_set1_epi32(begin)), numbers);
}

/* Words of which the first sixteen are shifted to the left by `first`, the others by `second`; to the right where these are below 0. Both
 * are so, or one is 0. */
FOR_AVX512 ALONE __m512i shifted_by(__m512i words, const int first, const int second)
{
    const int left = first > 0 || second > 0, a = first < 0 ? -first : first, b = second < 0 ? -second : second;
    const __m512i by = _mm512_inserti64x4(_mm512_set1_epi16((short)a), _mm256_set1_epi16((short)b), 1);
    return left ? _mm512_sllv_epi16(words, by) : _mm512_srlv_epi16(words, by);
}

/* The lowest four bits of one, above them those of the other. */
FOR_AVX512 ALONE __m512i above_nibbles(__m512i nibbles, __m512i above)
{
    return _mm512_ternarylogic_epi64(_mm512_set1_epi16(15), nibbles, above, 0xca);
}

/* Four blocks at once: 36 words, of which each ninth is a scale. */
FOR_AVX512 ALONE void part_q4_0(const struct gguf_row *row, int64_t column, int64_t left, struct words_part *found,
                                 const int fixed)
{
    enum { WORDS = BYTES_Q4_0 / 2, LATER = 4 };
    const uint8_t *block = row->blocks + column / SMALL * BYTES_Q4_0;
    const int64_t words = left < WORDS_COLUMNS ? left / SMALL * WORDS : 4 * WORDS;
    const __mmask32 some = (__mmask32)((1ull << (words < 32 ? words : 32)) - 1), later = (__mmask32)((1ull << (words - LATER)) - 1);
    const __m512i a = _mm512_maskz_loadu_epi16(some, block), b = _mm512_maskz_loadu_epi16(later, block + 2 * LATER);
    const __m512i from = _mm512_set_epi16(35, 34, 33, 32, 31, 30, 29, 28, 26, 25, 24, 23, 22, 21, 20, 19, /* and before them */
                                          17, 16, 15, 14, 13, 12, 11, 10, 8, 7, 6, 5, 4, 3, 2, 1);
    const __m256i scales = _mm256_set_epi16(27, 27, 27, 27, 18, 18, 18, 18, 9, 9, 9, 9, 0, 0, 0, 0);
    __m512i codes = _mm512_permutexvar_epi16(from, a);
    codes = _mm512_mask_permutexvar_epi16(codes, 0xf0000000u, _mm512_sub_epi16(from, _mm512_set1_epi16(LATER)), b);
    fetch(block, FAR / SMALL * BYTES_Q4_0, 2);
    found->even = found->odd = _mm512_cvtph_ps(_mm512_castsi512_si256(_mm512_permutexvar_epi16(_mm512_castsi256_si512(scales), a)));
    const __m512i numbers = numbers_of_4(-8, fixed);
    _Pragma("GCC unroll 4") for (int n = 0; n < 4; n++) found->w[n] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4 * n), numbers);
}

/* Of the groups of `half` of a large block. */
FOR_AVX512 ALONE void scales_of(const struct gguf_row *row, int half, struct words_part *found)
{
    const __m512 factors = _mm512_loadu_ps(row->factors);
    found->even = to_lanes(factors, 4 * half, 8, 2);
    found->odd = to_lanes(factors, 4 * half + 1, 8, 2);
    found->less = to_lanes(factors, 8 + 4 * half, 4, 1);
}

FOR_AVX512 ALONE void part_q4_k(struct gguf_row *row, int64_t column, int64_t left, struct words_part *found,
                                 const int fixed)
{
    const uint8_t *block = row->blocks + column / LARGE * BYTES_Q4_K;
    const int half = column % LARGE / BLOCK;
    const __m512i words = _mm512_loadu_si512(block + 16 + 64 * half), numbers = numbers_of_4(0, fixed);
    (void)left;
    fetch(block + half * 72, FAR / LARGE * BYTES_Q4_K, 1);
    if (!half)
        six_bits(block, row->factors);
    scales_of(row, half, found);
    _Pragma("GCC unroll 4") for (int n = 0; n < 4; n++) found->w[n] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4 * n), numbers);
}

FOR_AVX512 ALONE void part_q5_k(struct gguf_row *row, int64_t column, int64_t left, struct words_part *found,
                                 const int fixed)
{
    const uint8_t *block = row->blocks + column / LARGE * BYTES_Q5_K;
    const int half = column % LARGE / BLOCK;
    const __m512i words = _mm512_loadu_si512(block + 48 + 64 * half), numbers = numbers_from(0, fixed);
    const __m512i fifth = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(block + 16)));
    (void)left;
    fetch(block + half * 88, FAR / LARGE * BYTES_Q5_K, 2);
    if (!half)
        six_bits(block, row->factors);
    scales_of(row, half, found);
    /* bit g of a byte is of group g; groups 4 half and 4 half + 2 have even n, and the fifth bit's place is 4 */
    const __m512i above[4] = {
        half ? shifted_by(fifth, 0, -2) : shifted_by(fifth, 4, 2),
        half ? shifted_by(fifth, -1, -3) : shifted_by(fifth, 3, 1),
        half ? shifted_by(fifth, -8, -10) : shifted_by(fifth, -4, -6),
        half ? shifted_by(fifth, -9, -11) : shifted_by(fifth, -5, -7),
    };
    _Pragma("GCC unroll 4") for (int n = 0; n < 4; n++) found->w[n] =
        _mm512_permutexvar_epi16(above_nibbles(_mm512_srli_epi16(words, 4 * n), above[n]), numbers);
}

FOR_AVX512 ALONE void part_q6_k(struct gguf_row *row, int64_t column, int64_t left, struct words_part *found,
                                 const int fixed)
{
    const uint8_t *block = row->blocks + column / LARGE * BYTES_Q6_K;
    const int half = column % LARGE / BLOCK;
    const __m512i words = _mm512_loadu_si512(block + 64 * half), lower = numbers_from(-32, fixed), upper = numbers_from(0, fixed);
    const __m512i top = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(block + 128 + 32 * half)));
    (void)left;
    fetch(block + half * 105, FAR / LARGE * BYTES_Q6_K, 2);
    if (!half) {
        const __m512i scales = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(block + 192)));
        _mm512_storeu_ps(row->factors, _mm512_mul_ps(half_of(block + 208), _mm512_cvtepi32_ps(scales)));
    }
    const __m512 factors = _mm512_loadu_ps(row->factors);
    found->even = to_lanes(factors, 8 * half, 4, 1);
    found->odd = to_lanes(factors, 8 * half + 4, 4, 1);
    /* two bits a column, for columns of the second 32 two places higher; their place is 4 */
    const __m512i above[4] = {shifted_by(top, 4, 2), shifted_by(top, 0, -2), shifted_by(top, -4, -6), shifted_by(top, -8, -10)};
    _Pragma("GCC unroll 4") for (int n = 0; n < 4; n++) found->w[n] =
        _mm512_permutex2var_epi16(lower, above_nibbles(_mm512_srli_epi16(words, 4 * n), above[n]), upper);
}
#endif

#endif
