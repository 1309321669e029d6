/* Blocks of GGUF files: Q4_0, Q8_0, Q4_K, Q5_K, Q6_K. part[0] rows of blocks. A weight is computed in F32, each product and difference
 * rounded (compile without contraction), then rounded to BF16, as decoding gives it. columns are whole blocks. Few input rows are multiplied
 * by words, of Q8_0 by what AVX2 has: product_gguf_fixed.h. */
#include "product_gguf_words.h"

STRIPS_PORTABLE(q4_0, q4_0_strip)
STRIPS_PORTABLE(q8_0, q8_0_strip)
STRIPS_PORTABLE(q4_k, q4_k_strip)
STRIPS_PORTABLE(q5_k, q5_k_strip)
STRIPS_PORTABLE(q6_k, q6_k_strip)

#ifdef HAS_X86
GGUF_OPENS(FOR_AVX512)

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

STRIPS_AT(q8_0_avx512_f16, q8_0_strip, LEVEL_AVX512, NUMBER_F16)
BLOCKS(q8_0, ONE_ROW, gguf_row, open_q8_0, block_q8_0, q8_0_strip)
FEW_BYTES(q8_0)
RUNS(q4_0, gguf_row, open_q4_0, block_q4_0, q4_0_strip, part_q4_0, 16, 0)
RUNS(q4_k, gguf_row, open_q4_k, block_q4_k, q4_k_strip, part_q4_k, 32, 1)
RUNS(q5_k, gguf_row, open_q5_k, block_q5_k, q5_k_strip, part_q5_k, 32, 1)
RUNS(q6_k, gguf_row, open_q6_k, block_q6_k, q6_k_strip, part_q6_k, 64, 0)
#endif
