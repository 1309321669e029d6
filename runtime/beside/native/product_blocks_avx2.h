/* Products with rows that are decoded in registers: AVX2, few input rows. */
#ifndef PENSTOCK_PRODUCT_BLOCKS_AVX2_H
#define PENSTOCK_PRODUCT_BLOCKS_AVX2_H

#include "product_strips.h"

#ifdef HAS_X86
#include <immintrin.h>

enum { TILE_AVX2 = 32, WIDE_AVX2 = 4 };

/* The 16 numbers of a table, each's lower and upper byte, in both halves of a register. */
struct table_avx2 {
    __m256i lower, upper;
};

FOR_AVX2 ALONE __m256i to_bf16_avx2(__m256 values)
{
    const __m256i bits = _mm256_castps_si256(values), even = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), even), 16);
}

/* Of codes 0 to 7 and 8 to 15. */
FOR_AVX2 ALONE struct table_avx2 table_of(__m256 first, __m256 second)
{
    const __m256i byte = _mm256_set1_epi16(255);
    __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(to_bf16_avx2(first), to_bf16_avx2(second)), 0xd8);
    __m256i lower = _mm256_and_si256(words, byte), upper = _mm256_srli_epi16(words, 8);
    struct table_avx2 found;
    found.lower = _mm256_permute4x64_epi64(_mm256_packus_epi16(lower, lower), 0x88);
    found.upper = _mm256_permute4x64_epi64(_mm256_packus_epi16(upper, upper), 0x88);
    return found;
}

/* 32 columns whose codes lie in 16 bytes, the lower half first: of 16 columns the eight even ones, then the eight odd ones, in BF16. */
FOR_AVX2 ALONE void look_up_avx2(const uint8_t *codes, const struct table_avx2 *table, __m256i *w)
{
    const __m128i both = _mm_loadu_si128((const __m128i *)codes);
    const __m256i wide = _mm256_inserti128_si256(_mm256_castsi128_si256(both), _mm_srli_epi16(both, 4), 1);
    const __m256i code = _mm256_and_si256(wide, _mm256_set1_epi8(15));
    const __m256i lower = _mm256_shuffle_epi8(table->lower, code), upper = _mm256_shuffle_epi8(table->upper, code);
    w[0] = _mm256_unpacklo_epi8(lower, upper);
    w[1] = _mm256_unpackhi_epi8(lower, upper);
}

FOR_AVX2 ALONE __m256 wide_avx2(__m128i halves)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

FOR_AVX2 ALONE float sum_of_avx2(__m256 sums)
{
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

/* name_avx2: products of up to 4 input rows, summed as bf16_avx2 sums; more by strips that the same function decodes. Columns that are no
 * multiple of 32 go by `decode`'s strips.
 *
 *     struct state                      what is known of one row
 *     open(state *, m, row)
 *     block(state *, column, __m256i w[2]) the next 32 columns as look_up_avx2 gives them */
#define BLOCKS_AVX2(name, state, open, block, decode)                                                                                \
    FOR_AVX2 static void name##_decoded_avx2(const struct matrix *m, int set, int64_t first, int64_t last, uint16_t *out)            \
    {                                                                                                                                \
        if (m->columns % TILE_AVX2) {                                                                                                \
            decode(m, set, first, last, out);                                                                                        \
            return;                                                                                                                  \
        }                                                                                                                            \
        for (int64_t o = first; o < last; o++) {                                                                                     \
            struct state row;                                                                                                        \
            open(&row, m, o);                                                                                                        \
            for (int64_t k = 0; k < m->columns; k += TILE_AVX2, out += TILE_AVX2) {                                                  \
                __m256i w[2];                                                                                                        \
                block(&row, k, w);                                                                                                   \
                for (int t = 0; t < 2; t++) {                                                                                        \
                    __m128i even = _mm256_castsi256_si128(w[t]), odd = _mm256_extracti128_si256(w[t], 1);                            \
                    _mm_storeu_si128((__m128i *)(out + 16 * t), _mm_unpacklo_epi16(even, odd));                                      \
                    _mm_storeu_si128((__m128i *)(out + 16 * t + 8), _mm_unpackhi_epi16(even, odd));                                  \
                }                                                                                                                    \
            }                                                                                                                        \
        }                                                                                                                            \
    }                                                                                                                                \
    static STRIPS_AT(name##_strips_avx2, name##_decoded_avx2, LEVEL_AVX2)                                                            \
    FOR_AVX2 ALONE void name##_some_avx2(const struct matrix *m, int64_t o, const struct inputs *in, float *y, int64_t stride,       \
                                         const int high, const int wide)                                                             \
    {                                                                                                                                \
        const __m256i upper = _mm256_set1_epi32((int)0xffff0000u);                                                                   \
        const int64_t columns = m->columns;                                                                                          \
        struct state rows[4];                                                                                                        \
        __m256 sums[4][WIDE_AVX2];                                                                                                   \
        _Pragma("GCC unroll 4") for (int i = 0; i < high; i++)                                                                       \
        {                                                                                                                            \
            open(&rows[i], m, o + i);                                                                                                \
            _Pragma("GCC unroll 4") for (int r = 0; r < wide; r++) sums[i][r] = _mm256_setzero_ps();                                 \
        }                                                                                                                            \
        for (int64_t k = 0; k < columns; k += TILE_AVX2)                                                                             \
            _Pragma("GCC unroll 4") for (int i = 0; i < high; i++)                                                                   \
            {                                                                                                                        \
                __m256i w[2];                                                                                                        \
                block(&rows[i], k, w);                                                                                               \
                _Pragma("GCC unroll 2") for (int t = 0; t < 2; t++)                                                                  \
                {                                                                                                                    \
                    const __m256 even = wide_avx2(_mm256_castsi256_si128(w[t])), odd = wide_avx2(_mm256_extracti128_si256(w[t], 1)); \
                    _Pragma("GCC unroll 4") for (int r = 0; r < wide; r++)                                                           \
                    {                                                                                                                \
                        const __m256i x = _mm256_loadu_si256((const __m256i *)(in->xb + r * columns + k + 16 * t));                  \
                        sums[i][r] = _mm256_fmadd_ps(even, _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)), sums[i][r]);               \
                        sums[i][r] = _mm256_fmadd_ps(odd, _mm256_castsi256_ps(_mm256_and_si256(x, upper)), sums[i][r]);              \
                    }                                                                                                                \
                }                                                                                                                    \
            }                                                                                                                        \
        _Pragma("GCC unroll 4") for (int i = 0; i < high; i++)                                                                       \
            _Pragma("GCC unroll 4") for (int r = 0; r < wide; r++) y[r * stride + o + i] = sum_of_avx2(sums[i][r]);                  \
    }                                                                                                                                \
    FOR_AVX2 ALONE void name##_all_avx2(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y,      \
                                        int64_t stride, const int high, const int wide)                                              \
    {                                                                                                                                \
        int64_t o = first;                                                                                                           \
        for (; o + high <= last; o += high)                                                                                          \
            name##_some_avx2(m, o, in, y, stride, high, wide);                                                                       \
        for (; o < last; o++)                                                                                                        \
            name##_some_avx2(m, o, in, y, stride, 1, wide);                                                                          \
    }                                                                                                                                \
    FOR_AVX2 void name##_avx2(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y, int64_t stride) \
    {                                                                                                                                \
        switch (m->columns % TILE_AVX2 ? 0 : in->rows) {                                                                             \
        case 1: name##_all_avx2(m, first, last, in, y, stride, 2, 1); break;                                                         \
        case 2: name##_all_avx2(m, first, last, in, y, stride, 2, 2); break;                                                         \
        case 3: name##_all_avx2(m, first, last, in, y, stride, 2, 3); break;                                                         \
        case 4: name##_all_avx2(m, first, last, in, y, stride, 2, 4); break;                                                         \
        default: name##_strips_avx2(m, first, last, in, y, stride); break;                                                           \
        }                                                                                                                            \
    }
#endif

#endif
