/* Blocks of GGUF files in AVX2: product_gguf.c says what they are. Few input rows are multiplied by whole numbers. */
#include "product_gguf_fixed.h"

#ifdef HAS_X86
FOR_AVX2 ALONE float half_of(const uint8_t *bytes)
{
    uint16_t bits;
    memcpy(&bits, bytes, sizeof bits);
    return _cvtsh_ss(bits);
}

/* Factors of the eight groups of a large block and what is subtracted: 6 bits each, times their F16 numbers. */
FOR_AVX2 ALONE void six_bits(const uint8_t *block, float *factors)
{
    uint32_t six[3];
    memcpy(six, block + 4, sizeof six);
    const uint32_t low = 0x3f3f3f3fu, nibble = 0x0f0f0f0fu, top = 0x03030303u;
    const __m128i by = _mm_setr_epi32((int)(six[0] & low), (int)((six[2] & nibble) | (six[0] >> 6 & top) << 4), 0, 0);
    const __m128i less = _mm_setr_epi32((int)(six[1] & low), (int)((six[2] >> 4 & nibble) | (six[1] >> 6 & top) << 4), 0, 0);
    _mm256_storeu_ps(factors, _mm256_mul_ps(_mm256_set1_ps(half_of(block)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(by))));
    _mm256_storeu_ps(factors + 8, _mm256_mul_ps(_mm256_set1_ps(half_of(block + 2)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(less))));
}

FOR_AVX2 ALONE void scaled(__m256 *w, float scale)
{
    for (int i = 0; i < 4; i++)
        w[i] = rounded_avx2(_mm256_mul_ps(w[i], _mm256_set1_ps(scale)));
}

FOR_AVX2 ALONE void block_q4_0_avx2(struct gguf_row *row, int64_t column, __m256 *w)
{
    const uint8_t *block = row->blocks + column / SMALL * BYTES_Q4_0;
    fetch(block, AHEAD, 1);
    from_bytes(_mm256_sub_epi8(halves_in_order(block + 2), _mm256_set1_epi8(8)), w);
    scaled(w, half_of(block));
}

FOR_AVX2 ALONE void block_q8_0_avx2(struct gguf_row *row, int64_t column, __m256 *w)
{
    const uint8_t *block = row->blocks + column / SMALL * BYTES_Q8_0;
    fetch(block, AHEAD, 1);
    from_bytes(in_order(bytes_at(block + 2)), w);
    scaled(w, half_of(block));
}

FOR_AVX2 ALONE void block_q4_k_avx2(struct gguf_row *row, int64_t column, __m256 *w)
{
    const uint8_t *block = row->blocks + column / LARGE * BYTES_Q4_K, g = (uint8_t)(column % LARGE / SMALL);
    const __m256 first = _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7), eight = _mm256_set1_ps(8);
    if (!g) {
        six_bits(block, row->factors);
        fetch(block, AHEAD, 3);
    }
    const __m256 by = _mm256_set1_ps(row->factors[g]), less = _mm256_set1_ps(row->factors[8 + g]);
    const struct table_avx2 table = table_of(_mm256_sub_ps(_mm256_mul_ps(first, by), less),
                                             _mm256_sub_ps(_mm256_mul_ps(_mm256_add_ps(first, eight), by), less));
    const __m256i both = bytes_at(block + 16 + 32 * (g / 2));
    from_table(in_order(_mm256_and_si256(g % 2 ? _mm256_srli_epi16(both, 4) : both, _mm256_set1_epi8(15))), &table, w);
}

FOR_AVX2 ALONE void block_q5_k_avx2(struct gguf_row *row, int64_t column, __m256 *w)
{
    const uint8_t *block = row->blocks + column / LARGE * BYTES_Q5_K, g = (uint8_t)(column % LARGE / SMALL);
    if (!g) {
        six_bits(block, row->factors);
        fetch(block, AHEAD, 3);
    }
    const __m256i both = bytes_at(block + 48 + 32 * (g / 2)), bit = _mm256_set1_epi8((char)(1 << g));
    const __m256i low = _mm256_and_si256(g % 2 ? _mm256_srli_epi16(both, 4) : both, _mm256_set1_epi8(15));
    const __m256i fifth = _mm256_cmpeq_epi8(_mm256_and_si256(bytes_at(block + 16), bit), bit);
    const __m256 by = _mm256_set1_ps(row->factors[g]), less = _mm256_set1_ps(row->factors[8 + g]);
    from_bytes(in_order(_mm256_or_si256(low, _mm256_and_si256(fifth, _mm256_set1_epi8(16)))), w);
    for (int i = 0; i < 4; i++)
        w[i] = rounded_avx2(_mm256_sub_ps(_mm256_mul_ps(w[i], by), less));
}

FOR_AVX2 ALONE void block_q6_k_avx2(struct gguf_row *row, int64_t column, __m256 *w)
{
    const uint8_t *block = row->blocks + column / LARGE * BYTES_Q6_K;
    const int half = column % LARGE / 128, t = column % 128 / SMALL;
    const int8_t *scales = (const int8_t *)block + 192 + 8 * half + 2 * t;
    const float scale = half_of(block + 208);
    const __m256i low = bytes_at(block + 64 * half + t % 2 * 32), high = bytes_at(block + 128 + 32 * half);
    const __m256i four = _mm256_and_si256(t < 2 ? low : _mm256_srli_epi16(low, 4), _mm256_set1_epi8(15));
    const __m256i two = _mm256_and_si256(_mm256_srl_epi16(high, _mm_cvtsi32_si128(2 * t)), _mm256_set1_epi8(3));
    fetch(block + LINE_BYTES * t, AHEAD, 1);
    from_bytes(in_order(_mm256_sub_epi8(_mm256_or_si256(four, _mm256_slli_epi16(two, 4)), _mm256_set1_epi8(32))), w);
    for (int i = 0; i < 4; i++)
        w[i] = rounded_avx2(_mm256_mul_ps(w[i], _mm256_set1_ps(scale * (float)scales[i / 2])));
}

BLOCKS_AVX2(q4_0_decoded, gguf_row, open_q4_0, block_q4_0_avx2, q4_0_strip)
BLOCKS_AVX2(q8_0_decoded, gguf_row, open_q8_0, block_q8_0_avx2, q8_0_strip)
BLOCKS_AVX2(q4_k_decoded, gguf_row, open_q4_k, block_q4_k_avx2, q4_k_strip)
BLOCKS_AVX2(q5_k_decoded, gguf_row, open_q5_k, block_q5_k_avx2, q5_k_strip)
BLOCKS_AVX2(q6_k_decoded, gguf_row, open_q6_k, block_q6_k_avx2, q6_k_strip)

static STRIPS_AT(q4_0_others_f16, q4_0_strip, LEVEL_AVX2, NUMBER_F16)
static STRIPS_AT(q8_0_others_f16, q8_0_strip, LEVEL_AVX2, NUMBER_F16)
static STRIPS_AT(q4_k_others_f16, q4_k_strip, LEVEL_AVX2, NUMBER_F16)
static STRIPS_AT(q5_k_others_f16, q5_k_strip, LEVEL_AVX2, NUMBER_F16)
static STRIPS_AT(q6_k_others_f16, q6_k_strip, LEVEL_AVX2, NUMBER_F16)

FIXED_LARGE(q4_k, open_q4_k, BYTES_Q4_K, fill_six_bits, part_q4_k_avx2, 32, 32)
FIXED_LARGE(q5_k, open_q5_k, BYTES_Q5_K, fill_six_bits, part_q5_k_avx2, 32, 32)
FIXED_LARGE(q6_k, open_q6_k, BYTES_Q6_K, fill_q6_k, part_q6_k_avx2, 16, 64)
FIXED_BY_WIDTH(q4_0, in->run == 16)
FIXED_BY_WIDTH(q8_0, in->run == WORDS_COLUMNS)
#endif
