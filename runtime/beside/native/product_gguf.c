/* Blocks of GGUF files: Q4_0, Q8_0, Q4_K, Q5_K, Q6_K. part[0] rows of blocks. A weight is computed in F32, each product and difference
 * rounded (compile without contraction), then rounded to BF16, as decoding gives it. columns are whole blocks. Few input rows are multiplied
 * by words, but of Q8_0. */
#include "product_gguf.h"
#include "product_words.h"

STRIPS_AT(q4_0_portable, q4_0_strip, LEVEL_PORTABLE)
STRIPS_AT(q8_0_portable, q8_0_strip, LEVEL_PORTABLE)
STRIPS_AT(q4_k_portable, q4_k_strip, LEVEL_PORTABLE)
STRIPS_AT(q5_k_portable, q5_k_strip, LEVEL_PORTABLE)
STRIPS_AT(q6_k_portable, q6_k_strip, LEVEL_PORTABLE)

#ifdef HAS_X86
GGUF_OPENS(FOR_AVX512)

/* A F16 number in all lanes. */
FOR_AVX512 ALONE __m512 half_of(const uint8_t *bytes)
{
    uint16_t bits;
    memcpy(&bits, bytes, sizeof bits);
    return _mm512_cvtph_ps(_mm256_set1_epi16((short)bits));
}

FOR_AVX512 ALONE void block_q4_0(struct gguf_row *row, int64_t column, __m512i *w, const int tiles, const int native, const int64_t far)
{
    const __m512 numbers = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    const uint8_t *block = row->blocks + column / SMALL * BYTES_Q4_0;
    fetch(block, far / SMALL * BYTES_Q4_0, 2);
    for (int t = 0; t < tiles; t++, block += BYTES_Q4_0) {
        __m512i table = table_of_16(_mm512_mul_ps(numbers, half_of(block)), native);
        __m256i both = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(block + 2)));
        __m512i codes = _mm512_inserti64x4(_mm512_castsi256_si512(both), _mm256_srli_epi16(both, 4), 1);
        w[t] = _mm512_permutexvar_epi16(codes, table);
    }
}

FOR_AVX512 ALONE void block_q8_0(struct gguf_row *row, int64_t column, __m512i *w, const int tiles, const int native, const int64_t far)
{
    const uint8_t *block = row->blocks + column / SMALL * BYTES_Q8_0;
    fetch(block, far / SMALL * BYTES_Q8_0, 3);
    for (int t = 0; t < tiles; t++, block += BYTES_Q8_0) {
        const __m512 scale = half_of(block);
        __m512 a = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(block + 2))));
        __m512 b = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(block + 18))));
        w[t] = both_narrowed(_mm512_mul_ps(b, scale), _mm512_mul_ps(a, scale), native);
    }
}

/* Eight scales and eight minima of 6 bits, times their F16 numbers. Bytes 4 to 7 and 8 to 11 have the lowest six bits of four scales and four
 * minima, and above them the highest two of the others, whose lowest four are in bytes 12 to 15. */
FOR_AVX512 ALONE void six_bits(const uint8_t *block, float *factors)
{
    enum { EITHER_AND_THIRD = 0xf8 };
    const __m128i all = _mm_loadu_si128((const __m128i *)block), top = _mm_set1_epi8(0x30);
    const __m128i low = _mm_shuffle_epi8(all, _mm_setr_epi8(4, 5, 6, 7, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15));
    const __m128i high = _mm_shuffle_epi8(all, _mm_setr_epi8(-1, -1, -1, -1, 4, 5, 6, 7, -1, -1, -1, -1, 8, 9, 10, 11));
    __m128i six = _mm_and_si128(_mm_srlv_epi32(low, _mm_setr_epi32(0, 0, 0, 4)), _mm_setr_epi32(0x3f3f3f3f, 0x0f0f0f0f, 0x3f3f3f3f, 0x0f0f0f0f));
    six = _mm_ternarylogic_epi32(six, _mm_srli_epi32(high, 2), top, EITHER_AND_THIRD);
    const __m512 halves = _mm512_castps128_ps512(_mm_cvtph_ps(all));
    const __m512 by = _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1), halves);
    _mm512_storeu_ps(factors, _mm512_mul_ps(by, _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(six))));
}

/* 16 numbers from `begin` on, as group g of a large block has them. */
FOR_AVX512 ALONE __m512 weights_of(const float *factors, int g, float begin)
{
    const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512 products = _mm512_mul_ps(_mm512_add_ps(numbers, _mm512_set1_ps(begin)), _mm512_set1_ps(factors[g]));
    return _mm512_sub_ps(products, _mm512_set1_ps(factors[8 + g]));
}

FOR_AVX512 ALONE void block_q4_k(struct gguf_row *row, int64_t column, __m512i *w, const int tiles, const int native, const int64_t far)
{
    const uint8_t *block = row->blocks + column / LARGE * BYTES_Q4_K;
    const int half = column % LARGE / BLOCK;
    const __m512i nibble = _mm512_set1_epi16(15), upper = _mm512_set1_epi16(16);
    (void)tiles; /* always 4 */
    fetch(block + half * 72, far / LARGE * BYTES_Q4_K, 2);
    if (!half)
        six_bits(block, row->factors);
    for (int pair = 0; pair < 2; pair++) {
        const int g = 4 * half + 2 * pair;
        const __m512i table = both_narrowed(weights_of(row->factors, g + 1, 0), weights_of(row->factors, g, 0), native);
        const __m512i both = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(block + 16 + 64 * half + 32 * pair)));
        w[2 * pair] = _mm512_permutexvar_epi16(_mm512_and_si512(both, nibble), table);
        w[2 * pair + 1] = _mm512_permutexvar_epi16(_mm512_or_si512(_mm512_srli_epi16(both, 4), upper), table);
    }
}

FOR_AVX512 ALONE void block_q5_k(struct gguf_row *row, int64_t column, __m512i *w, const int tiles, const int native, const int64_t far)
{
    const uint8_t *block = row->blocks + column / LARGE * BYTES_Q5_K;
    const int half = column % LARGE / BLOCK;
    const __m512i nibble = _mm512_set1_epi16(15);
    (void)tiles; /* always 4 */
    fetch(block + half * 88, far / LARGE * BYTES_Q5_K, 2);
    if (!half)
        six_bits(block, row->factors);
    /* the fifth bit of group 4 * half at its place, of each next one a place higher */
    __m512i fifth = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(block + 16)));
    fifth = half ? fifth : _mm512_slli_epi16(fifth, 4);
    for (int pair = 0; pair < 2; pair++) {
        __m512i both = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(block + 48 + 64 * half + 32 * pair)));
        for (int upper = 0; upper < 2; upper++) {
            const int g = 4 * half + 2 * pair + upper;
            __m512i table = both_narrowed(weights_of(row->factors, g, 16), weights_of(row->factors, g, 0), native);
            /* the lowest four bits of one, above them those of the other; the table minds five */
            __m512i codes = _mm512_ternarylogic_epi64(nibble, upper ? _mm512_srli_epi16(both, 4) : both, fifth, 0xca);
            w[2 * pair + upper] = _mm512_permutexvar_epi16(codes, table);
            fifth = _mm512_srli_epi16(fifth, 1);
        }
    }
}

FOR_AVX512 ALONE void block_q6_k(struct gguf_row *row, int64_t column, __m512i *w, const int tiles, const int native, const int64_t far)
{
    const uint8_t *block = row->blocks + column / LARGE * BYTES_Q6_K;
    const int half = column % LARGE / BLOCK;
    const __m256i nibble = _mm256_set1_epi8(15), top = _mm256_set1_epi8(48), middle = _mm256_set1_epi8(32);
    const __m512 scale = half_of(block + 208);
    (void)tiles; /* always 4 */
    fetch(block + half * 105, far / LARGE * BYTES_Q6_K, 2);
    __m256i high = _mm256_loadu_si256((const __m256i *)(block + 128 + 32 * half));
    for (int t = 0; t < 4; t++) {
        __m256i low = _mm256_loadu_si256((const __m256i *)(block + 64 * half + t % 2 * 32));
        low = _mm256_and_si256(t < 2 ? low : _mm256_srli_epi16(low, 4), nibble);
        __m256i upper = t == 0 ? _mm256_slli_epi16(high, 4) : t == 1 ? _mm256_slli_epi16(high, 2) : t == 2 ? high : _mm256_srli_epi16(high, 2);
        __m256i codes = _mm256_sub_epi8(_mm256_or_si256(low, _mm256_and_si256(upper, top)), middle);
        const int8_t *scales = (const int8_t *)block + 192 + 8 * half + 2 * t;
        __m512 a = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(codes)));
        __m512 b = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(codes, 1)));
        a = _mm512_mul_ps(a, _mm512_mul_ps(scale, _mm512_set1_ps(scales[0])));
        b = _mm512_mul_ps(b, _mm512_mul_ps(scale, _mm512_set1_ps(scales[1])));
        w[t] = both_narrowed(b, a, native);
    }
}

/* Whole numbers from `from` on, to 32 of them, as BF16. */
FOR_AVX512 ALONE __m512i numbers_from(int from)
{
    const __m512i ints = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512 low = _mm512_cvtepi32_ps(_mm512_add_epi32(ints, _mm512_set1_epi32(from)));
    return both_narrowed(_mm512_add_ps(low, _mm512_set1_ps(16)), low, 0);
}

/* Sixteen of them, twice. */
FOR_AVX512 ALONE __m512i numbers_of_4(int from)
{
    return _mm512_broadcast_i64x4(_mm512_castsi512_si256(numbers_from(from)));
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
FOR_AVX512 ALONE void part_q4_0(const struct gguf_row *row, int64_t column, int64_t left, struct words_part *found)
{
    enum { WORDS = BYTES_Q4_0 / 2, LATER = 4 };
    const uint8_t *block = row->blocks + column / SMALL * BYTES_Q4_0;
    const int64_t words = left < WORDS_COLUMNS ? left / SMALL * WORDS : 4 * WORDS;
    const __mmask32 some = (__mmask32)((1ull << (words < 32 ? words : 32)) - 1), later = (__mmask32)((1ull << (words - LATER)) - 1);
    const __m512i a = _mm512_maskz_loadu_epi16(some, block), b = _mm512_maskz_loadu_epi16(later, block + 2 * LATER);
    const __m512i from = _mm512_set_epi16(35, 34, 33, 32, 31, 30, 29, 28, 26, 25, 24, 23, 22, 21, 20, 19, 17, 16, 15, 14, 13, 12, 11, 10, 8, 7, 6,
                                          5, 4, 3, 2, 1);
    const __m256i scales = _mm256_set_epi16(27, 27, 27, 27, 18, 18, 18, 18, 9, 9, 9, 9, 0, 0, 0, 0);
    __m512i codes = _mm512_permutexvar_epi16(from, a);
    codes = _mm512_mask_permutexvar_epi16(codes, 0xf0000000u, _mm512_sub_epi16(from, _mm512_set1_epi16(LATER)), b);
    fetch(block, FAR / SMALL * BYTES_Q4_0, 2);
    found->even = found->odd = _mm512_cvtph_ps(_mm512_castsi512_si256(_mm512_permutexvar_epi16(_mm512_castsi256_si512(scales), a)));
    const __m512i numbers = numbers_of_4(-8);
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

FOR_AVX512 ALONE void part_q4_k(struct gguf_row *row, int64_t column, int64_t left, struct words_part *found)
{
    const uint8_t *block = row->blocks + column / LARGE * BYTES_Q4_K;
    const int half = column % LARGE / BLOCK;
    const __m512i words = _mm512_loadu_si512(block + 16 + 64 * half), numbers = numbers_of_4(0);
    (void)left;
    fetch(block + half * 72, FAR / LARGE * BYTES_Q4_K, 1);
    if (!half)
        six_bits(block, row->factors);
    scales_of(row, half, found);
    _Pragma("GCC unroll 4") for (int n = 0; n < 4; n++) found->w[n] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4 * n), numbers);
}

FOR_AVX512 ALONE void part_q5_k(struct gguf_row *row, int64_t column, int64_t left, struct words_part *found)
{
    const uint8_t *block = row->blocks + column / LARGE * BYTES_Q5_K;
    const int half = column % LARGE / BLOCK;
    const __m512i words = _mm512_loadu_si512(block + 48 + 64 * half), numbers = numbers_from(0);
    const __m512i fifth = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(block + 16)));
    (void)left;
    fetch(block + half * 88, FAR / LARGE * BYTES_Q5_K, 2);
    if (!half)
        six_bits(block, row->factors);
    scales_of(row, half, found);
    /* bit g of a byte is of group g; groups 4 half and 4 half + 2 have even n, and the fifth bit's place is 4 */
    const __m512i above[4] = {half ? shifted_by(fifth, 0, -2) : shifted_by(fifth, 4, 2), half ? shifted_by(fifth, -1, -3) : shifted_by(fifth, 3, 1),
                              half ? shifted_by(fifth, -8, -10) : shifted_by(fifth, -4, -6),
                              half ? shifted_by(fifth, -9, -11) : shifted_by(fifth, -5, -7)};
    _Pragma("GCC unroll 4") for (int n = 0; n < 4; n++) found->w[n] =
        _mm512_permutexvar_epi16(above_nibbles(_mm512_srli_epi16(words, 4 * n), above[n]), numbers);
}

FOR_AVX512 ALONE void part_q6_k(struct gguf_row *row, int64_t column, int64_t left, struct words_part *found)
{
    const uint8_t *block = row->blocks + column / LARGE * BYTES_Q6_K;
    const int half = column % LARGE / BLOCK;
    const __m512i words = _mm512_loadu_si512(block + 64 * half), lower = numbers_from(-32), upper = numbers_from(0);
    const __m512i top = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(block + 128 + 32 * half)));
    (void)left;
    fetch(block + half * 105, FAR / LARGE * BYTES_Q6_K, 2);
    if (!half)
        _mm512_storeu_ps(row->factors, _mm512_mul_ps(half_of(block + 208),
                                                     _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(block + 192))))));
    const __m512 factors = _mm512_loadu_ps(row->factors);
    found->even = to_lanes(factors, 8 * half, 4, 1);
    found->odd = to_lanes(factors, 8 * half + 4, 4, 1);
    /* two bits a column, for columns of the second 32 two places higher; their place is 4 */
    const __m512i above[4] = {shifted_by(top, 4, 2), shifted_by(top, 0, -2), shifted_by(top, -4, -6), shifted_by(top, -8, -10)};
    _Pragma("GCC unroll 4") for (int n = 0; n < 4; n++) found->w[n] =
        _mm512_permutex2var_epi16(lower, above_nibbles(_mm512_srli_epi16(words, 4 * n), above[n]), upper);
}

BLOCKS(q8_0, ONE_ROW, gguf_row, open_q8_0, block_q8_0, q8_0_strip)
RUNS(q4_0, gguf_row, open_q4_0, block_q4_0, q4_0_strip, part_q4_0, 16, 0)
RUNS(q4_k, gguf_row, open_q4_k, block_q4_k, q4_k_strip, part_q4_k, 32, 1)
RUNS(q5_k, gguf_row, open_q5_k, block_q5_k, q5_k_strip, part_q5_k, 32, 1)
RUNS(q6_k, gguf_row, open_q6_k, block_q6_k, q6_k_strip, part_q6_k, 64, 0)
#endif
