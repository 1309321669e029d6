/* Products with rows that are decoded in registers: AVX2, few input rows. */
#ifndef PENSTOCK_PRODUCT_BLOCKS_AVX2_H
#define PENSTOCK_PRODUCT_BLOCKS_AVX2_H

#include "product_strips.h"

#ifdef HAS_X86
#include <immintrin.h>

enum { TILE_AVX2 = 32, WIDE_AVX2 = 4 };

/* BF16 numbers of codes 0 to 15, each's lower and upper byte, in both halves of a register. */
struct table_avx2 {
    __m256i lower, upper;
};

/* To the nearest BF16, ties to even. */
FOR_AVX2 ALONE __m256 rounded_avx2(__m256 values)
{
    const __m256i bits = _mm256_castps_si256(values), even = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i found = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), even);
    return _mm256_castsi256_ps(_mm256_and_si256(found, _mm256_set1_epi32((int)0xffff0000u)));
}

/* Of codes 0 to 7 and 8 to 15. */
FOR_AVX2 ALONE struct table_avx2 table_of(__m256 first, __m256 second)
{
    const __m256i byte = _mm256_set1_epi16(255);
    const __m256i a = _mm256_srli_epi32(_mm256_castps_si256(rounded_avx2(first)), 16);
    const __m256i b = _mm256_srli_epi32(_mm256_castps_si256(rounded_avx2(second)), 16);
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8);
    const __m256i lower = _mm256_and_si256(words, byte), upper = _mm256_srli_epi16(words, 8);
    struct table_avx2 found;
    found.lower = _mm256_permute4x64_epi64(_mm256_packus_epi16(lower, lower), 0x88);
    found.upper = _mm256_permute4x64_epi64(_mm256_packus_epi16(upper, upper), 0x88);
    return found;
}

/* A byte for each of 32 columns stands in an order from which unpacking gives even and odd ones apart. From the columns' own order: */
FOR_AVX2 ALONE __m256i in_order(__m256i bytes)
{
    const __m256i order = _mm256_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15, /* and again */
                                           0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    return _mm256_shuffle_epi8(_mm256_permute4x64_epi64(bytes, 0xd8), order);
}

/* From 16 bytes with two neighbours each, the even one in the lower half. */
FOR_AVX2 ALONE __m256i neighbours_in_order(const uint8_t *codes)
{
    const __m256i order = _mm256_setr_epi8(0, 1, 2, 3, 0, 1, 2, 3, 8, 9, 10, 11, 8, 9, 10, 11, /* behind them the others */
                                           4, 5, 6, 7, 4, 5, 6, 7, 12, 13, 14, 15, 12, 13, 14, 15);
    const __m256i both = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)codes)), order);
    return _mm256_and_si256(_mm256_srlv_epi32(both, _mm256_setr_epi32(0, 4, 0, 4, 0, 4, 0, 4)), _mm256_set1_epi8(15));
}

/* From 16 bytes whose lower halves are the first 16 columns. */
FOR_AVX2 ALONE __m256i halves_in_order(const uint8_t *codes)
{
    const __m256i order = _mm256_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 0, 2, 4, 6, 1, 3, 5, 7, /* behind them the others */
                                           8, 10, 12, 14, 9, 11, 13, 15, 8, 10, 12, 14, 9, 11, 13, 15);
    const __m256i both = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)codes)), order);
    return _mm256_and_si256(_mm256_srlv_epi64(both, _mm256_setr_epi64x(0, 4, 0, 4)), _mm256_set1_epi8(15));
}

/* Numbers of 32 columns in F32, from a byte each as above: of 16 columns the eight even ones, then the eight odd ones. */

/* BF16 numbers by their lower and upper bytes. */
FOR_AVX2 ALONE void from_halves(__m256i lower, __m256i upper, __m256 *w)
{
    const __m256i none = _mm256_setzero_si256(), a = _mm256_unpacklo_epi8(lower, upper), b = _mm256_unpackhi_epi8(lower, upper);
    w[0] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(none, a));
    w[1] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(none, a));
    w[2] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(none, b));
    w[3] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(none, b));
}

FOR_AVX2 ALONE void from_table(__m256i codes, const struct table_avx2 *table, __m256 *w)
{
    from_halves(_mm256_shuffle_epi8(table->lower, codes), _mm256_shuffle_epi8(table->upper, codes), w);
}

/* Signed bytes. */
FOR_AVX2 ALONE void from_bytes(__m256i codes, __m256 *w)
{
    from_halves(_mm256_setzero_si256(), codes, w);
    for (int i = 0; i < 4; i++)
        w[i] = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_castps_si256(w[i]), 24));
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
 *     block(state *, column, __m256 w[4]) the next 32 columns as from_halves gives them */
#define BLOCKS_AVX2(name, state, open, block, decode)                                                                                \
    FOR_AVX2 static void name##_decoded_avx2(const struct matrix *m, int set, int number, int64_t first, int64_t last, uint16_t *out) \
    {                                                                                                                                \
        if (m->columns % TILE_AVX2) {                                                                                                \
            decode(m, set, number, first, last, out);                                                                                \
            return;                                                                                                                  \
        }                                                                                                                            \
        for (int64_t o = first; o < last; o++) {                                                                                     \
            struct state row;                                                                                                        \
            open(&row, m, o);                                                                                                        \
            for (int64_t k = 0; k < m->columns; k += TILE_AVX2, out += TILE_AVX2) {                                                  \
                __m256 w[4];                                                                                                         \
                block(&row, k, w);                                                                                                   \
                for (int t = 0; t < 2; t++) {                                                                                        \
                    const __m256i even = _mm256_srli_epi32(_mm256_castps_si256(w[2 * t]), 16);                                       \
                    _mm256_storeu_si256((__m256i *)(out + 16 * t), _mm256_or_si256(even, _mm256_castps_si256(w[2 * t + 1])));        \
                }                                                                                                                    \
            }                                                                                                                        \
        }                                                                                                                            \
    }                                                                                                                                \
    static STRIPS_AT(name##_strips_avx2, name##_decoded_avx2, LEVEL_AVX2, NUMBER_BF16)                                               \
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
                __m256 w[4];                                                                                                         \
                block(&rows[i], k, w);                                                                                               \
                _Pragma("GCC unroll 2") for (int t = 0; t < 2; t++)                                                                  \
                    _Pragma("GCC unroll 4") for (int r = 0; r < wide; r++)                                                           \
                    {                                                                                                                \
                        const __m256i x = _mm256_loadu_si256((const __m256i *)(in->xb + r * columns + k + 16 * t));                  \
                        sums[i][r] = _mm256_fmadd_ps(w[2 * t], _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)), sums[i][r]);           \
                        sums[i][r] = _mm256_fmadd_ps(w[2 * t + 1], _mm256_castsi256_ps(_mm256_and_si256(x, upper)), sums[i][r]);     \
                    }                                                                                                                \
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
