/* Products of F16 inputs with whole numbers in groups, in F32 and unrounded: AVX2, where product_fixed.h has none, and AVX512.
 *
 *     y = sum over groups: scale * sum over the group's columns: (number - zero point) * x
 *
 * Rows are those of product_whole.c. */
#ifndef PENSTOCK_PRODUCT_GROUPS_F16_H
#define PENSTOCK_PRODUCT_GROUPS_F16_H

#include "product_blocks_avx2.h"

#ifdef HAS_X86
/* name: product_fn, by two rows of the matrix and up to 4 input rows at once. Columns or groups that are no multiples of 32 go by `strips`.
 *
 *     floats, lanes                        a register of so many numbers
 *     numbers(codes, zero, floats w[])     the next 32, less their zero point
 *     bits, in_bytes, middle               as open_whole and next_group take them
 *     load, mul, fma, add, none, same, all what they do with registers; `all` sums one */
#define GROUPS_F16(name, target, floats, lanes, numbers, bits, in_bytes, middle, load, mul, fma, add, none, same, all, strips)       \
    target ALONE void name##_some(const struct matrix *m, int64_t o, const struct inputs *in, float *y, int64_t stride,              \
                                  const int high, const int wide)                                                                    \
    {                                                                                                                                \
        struct whole_place rows[2];                                                                                                  \
        floats sums[2][WIDE_AVX2];                                                                                                   \
        _Pragma("GCC unroll 2") for (int i = 0; i < high; i++)                                                                       \
        {                                                                                                                            \
            open_whole(&rows[i], m, o + i, bits, in_bytes);                                                                          \
            _Pragma("GCC unroll 4") for (int r = 0; r < wide; r++) sums[i][r] = none();                                              \
        }                                                                                                                            \
        for (int64_t begin = 0; begin < m->columns; begin += m->group) {                                                             \
            float scale[2], zero[2];                                                                                                 \
            floats of_group[2][WIDE_AVX2];                                                                                           \
            _Pragma("GCC unroll 2") for (int i = 0; i < high; i++)                                                                   \
            {                                                                                                                        \
                rows[i].left = 0;                                                                                                    \
                next_group(&rows[i], &scale[i], &zero[i], bits, middle);                                                             \
                _Pragma("GCC unroll 4") for (int r = 0; r < wide; r++) of_group[i][r] = none();                                      \
            }                                                                                                                        \
            for (int64_t k = begin; k < begin + m->group; k += TILE_AVX2)                                                            \
                _Pragma("GCC unroll 2") for (int i = 0; i < high; i++)                                                               \
                {                                                                                                                    \
                    const uint8_t *codes = rows[i].codes + k * bits / 8;                                                             \
                    floats w[TILE_AVX2 / lanes];                                                                                     \
                    fetch(codes, AHEAD, 1);                                                                                          \
                    numbers(codes, zero[i], w);                                                                                      \
                    _Pragma("GCC unroll 4") for (int r = 0; r < wide; r++)                                                           \
                    {                                                                                                                \
                        const float *x = in->x + r * m->columns + k;                                                                 \
                        floats part = mul(w[0], load(x));                                                                            \
                        _Pragma("GCC unroll 4") for (int n = 1; n < TILE_AVX2 / lanes; n++) part = fma(w[n], load(x + lanes * n), part); \
                        of_group[i][r] = add(of_group[i][r], part);                                                                  \
                    }                                                                                                                \
                }                                                                                                                    \
            _Pragma("GCC unroll 2") for (int i = 0; i < high; i++)                                                                   \
                _Pragma("GCC unroll 4") for (int r = 0; r < wide; r++) sums[i][r] = fma(of_group[i][r], same(scale[i]), sums[i][r]); \
        }                                                                                                                            \
        _Pragma("GCC unroll 2") for (int i = 0; i < high; i++)                                                                       \
            _Pragma("GCC unroll 4") for (int r = 0; r < wide; r++) y[r * stride + o + i] = all(sums[i][r]);                          \
    }                                                                                                                                \
    target ALONE void name##_all(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y,             \
                                 int64_t stride, const int wide)                                                                     \
    {                                                                                                                                \
        int64_t o = first;                                                                                                           \
        for (; o + 2 <= last; o += 2)                                                                                                \
            name##_some(m, o, in, y, stride, 2, wide);                                                                               \
        for (; o < last; o++)                                                                                                        \
            name##_some(m, o, in, y, stride, 1, wide);                                                                               \
    }                                                                                                                                \
    target void name(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y, int64_t stride)         \
    {                                                                                                                                \
        if (m->columns % TILE_AVX2 || m->group % TILE_AVX2) {                                                                        \
            strips(m, first, last, in, y, stride);                                                                                   \
            return;                                                                                                                  \
        }                                                                                                                            \
        for (int64_t o = first; o < last; o += TILE_ROWS) /* which stay in the caches for all input rows */                          \
            for (int64_t from = 0; from < in->rows; from += WIDE_AVX2) {                                                             \
                const int64_t end = last - o < TILE_ROWS ? last : o + TILE_ROWS;                                                     \
                struct inputs some = *in;                                                                                            \
                float *to = y + from * stride;                                                                                       \
                some.x += from * in->columns;                                                                                        \
                switch (in->rows - from) {                                                                                           \
                case 1: name##_all(m, o, end, &some, to, stride, 1); break;                                                          \
                case 2: name##_all(m, o, end, &some, to, stride, 2); break;                                                          \
                case 3: name##_all(m, o, end, &some, to, stride, 3); break;                                                          \
                default: name##_all(m, o, end, &some, to, stride, 4); break;                                                         \
                }                                                                                                                    \
            }                                                                                                                        \
    }

#define GROUPS_F16_AVX2(name, numbers, bits, in_bytes, middle, strips)                                                               \
    GROUPS_F16(name, FOR_AVX2, __m256, 8, numbers, bits, in_bytes, middle, _mm256_loadu_ps, _mm256_mul_ps, _mm256_fmadd_ps,          \
               _mm256_add_ps, _mm256_setzero_ps, _mm256_set1_ps, sum_of_avx2, strips)
#define GROUPS_F16_512(name, numbers, bits, in_bytes, middle, strips)                                                                \
    GROUPS_F16(name, FOR_AVX512, __m512, 16, numbers, bits, in_bytes, middle, _mm512_loadu_ps, _mm512_mul_ps, _mm512_fmadd_ps,       \
               _mm512_add_ps, _mm512_setzero_ps, _mm512_set1_ps, _mm512_reduce_add_ps, strips)

/* 32 codes of 4 bits, two a byte. */
FOR_AVX2 ALONE void nibbles_f16(const uint8_t *codes, float zero, __m256 *w)
{
    const __m128i nibble = _mm_set1_epi8(15), both = _mm_loadu_si128((const __m128i *)codes);
    const __m128i even = _mm_and_si128(both, nibble), odd = _mm_and_si128(_mm_srli_epi16(both, 4), nibble);
    const __m128i low = _mm_unpacklo_epi8(even, odd), high = _mm_unpackhi_epi8(even, odd);
    const __m256i eights[4] = {_mm256_cvtepu8_epi32(low), _mm256_cvtepu8_epi32(_mm_srli_si128(low, 8)), _mm256_cvtepu8_epi32(high),
                               _mm256_cvtepu8_epi32(_mm_srli_si128(high, 8))};
    for (int i = 0; i < 4; i++)
        w[i] = _mm256_sub_ps(_mm256_cvtepi32_ps(eights[i]), _mm256_set1_ps(zero));
}

FOR_AVX2 ALONE void signed_f16(const uint8_t *codes, float zero, __m256 *w)
{
    for (int i = 0; i < 4; i++) {
        const __m256i eight = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(codes + 8 * i)));
        w[i] = _mm256_sub_ps(_mm256_cvtepi32_ps(eight), _mm256_set1_ps(zero));
    }
}

FOR_AVX2 ALONE void unsigned_f16(const uint8_t *codes, float zero, __m256 *w)
{
    for (int i = 0; i < 4; i++) {
        const __m256i eight = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(codes + 8 * i)));
        w[i] = _mm256_sub_ps(_mm256_cvtepi32_ps(eight), _mm256_set1_ps(zero));
    }
}

FOR_AVX512 ALONE void signed_f16_512(const uint8_t *codes, float zero, __m512 *w)
{
    for (int i = 0; i < 2; i++) {
        const __m512i sixteen = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(codes + 16 * i)));
        w[i] = _mm512_sub_ps(_mm512_cvtepi32_ps(sixteen), _mm512_set1_ps(zero));
    }
}

FOR_AVX512 ALONE void unsigned_f16_512(const uint8_t *codes, float zero, __m512 *w)
{
    for (int i = 0; i < 2; i++) {
        const __m512i sixteen = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(codes + 16 * i)));
        w[i] = _mm512_sub_ps(_mm512_cvtepi32_ps(sixteen), _mm512_set1_ps(zero));
    }
}

/* Of 16 bytes, a word of which has 8 columns. */
FOR_AVX512 ALONE void nibbles_f16_512(const uint8_t *codes, float zero, __m512 *w)
{
    const __m512 all = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), less = _mm512_sub_ps(all, _mm512_set1_ps(zero));
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), first = _mm512_srli_epi32(lane, 3);
    const __m512i place = _mm512_slli_epi32(_mm512_and_si512(lane, _mm512_set1_epi32(7)), 2);
    const __m512i words = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)codes));
    for (int i = 0; i < 2; i++) {
        const __m512i two = _mm512_permutexvar_epi32(_mm512_add_epi32(first, _mm512_set1_epi32(2 * i)), words);
        w[i] = _mm512_permutexvar_ps(_mm512_srlv_epi32(two, place), less);
    }
}
#endif

#endif
