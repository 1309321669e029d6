/* Blocks of GGUF files by whole numbers of 16 bits, in AVX2: what columns of each type have. */
#ifndef PENSTOCK_PRODUCT_GGUF_FIXED_H
#define PENSTOCK_PRODUCT_GGUF_FIXED_H

#include "product_fixed.h"
#include "product_gguf.h"

#ifdef HAS_X86
GGUF_OPENS(FOR_AVX2)

FOR_AVX2 ALONE __m256i bytes_at(const uint8_t *bytes)
{
    return _mm256_loadu_si256((const __m256i *)bytes);
}

FOR_AVX2 ALONE __m128i half_in_all(const uint8_t *bytes)
{
    uint16_t bits;
    memcpy(&bits, bytes, sizeof bits);
    return _mm_set1_epi16((short)bits);
}

/* Bytes 4 to 7 and 8 to 11 have the lowest six bits of four scales and four minima, and above them the highest two of the others, whose lowest
 * four are in bytes 12 to 15. */
FOR_AVX2 ALONE void fill_six_bits(const uint8_t *block, float *factors, __m256 *less)
{
    const __m128i all = _mm_loadu_si128((const __m128i *)block), top = _mm_set1_epi8(0x30);
    const __m128i low = _mm_shuffle_epi8(all, _mm_setr_epi8(4, 5, 6, 7, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15));
    const __m128i high = _mm_shuffle_epi8(all, _mm_setr_epi8(-1, -1, -1, -1, 4, 5, 6, 7, -1, -1, -1, -1, 8, 9, 10, 11));
    const __m128i own = _mm_setr_epi32(0x3f3f3f3f, 0x0f0f0f0f, 0x3f3f3f3f, 0x0f0f0f0f);
    __m128i six = _mm_and_si128(_mm_srlv_epi32(low, _mm_setr_epi32(0, 0, 0, 4)), own);
    six = _mm_or_si128(six, _mm_and_si128(_mm_srli_epi32(high, 2), top));
    const __m256 by = _mm256_cvtph_ps(half_in_all(block)), taken = _mm256_cvtph_ps(half_in_all(block + 2));
    _mm256_storeu_ps(factors, _mm256_mul_ps(by, _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(six))));
    less[0] = _mm256_mul_ps(taken, _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(six, 8))));
}

/* Of codes 32 is taken. */
FOR_AVX2 ALONE void fill_q6_k(const uint8_t *block, float *factors, __m256 *less)
{
    const __m256 scale = _mm256_cvtph_ps(half_in_all(block + 208));
    for (int i = 0; i < 2; i++) {
        const __m256i eight = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(block + 192 + 8 * i)));
        const __m256 by = _mm256_mul_ps(scale, _mm256_cvtepi32_ps(eight));
        _mm256_storeu_ps(factors + 8 * i, by);
        less[i] = _mm256_mul_ps(by, _mm256_set1_ps(32));
    }
}

FOR_AVX2 ALONE void part_q4_k_avx2(const uint8_t *block, const int half, const int i, __m256i *w)
{
    nibbles_fixed(bytes_at(block + 16 + 64 * half + 32 * i), w);
}

/* Words shifted to the left; to the right where `by` is below 0. */
FOR_AVX2 ALONE __m256i shifted_avx2(__m256i words, const int by)
{
    return by < 0 ? _mm256_srli_epi16(words, -by) : _mm256_slli_epi16(words, by);
}

/* Four bits of each byte, and above them one or two of another's, which are at 4 already. */
FOR_AVX2 ALONE void with_above(__m256i words, __m256i even, __m256i odd, const int mask, __m256i *w)
{
    const __m256i nibble = _mm256_set1_epi8(15), above = _mm256_set1_epi8((char)mask);
    const __m256i first = _mm256_or_si256(_mm256_and_si256(words, nibble), _mm256_and_si256(even, above));
    const __m256i second = _mm256_and_si256(_mm256_srli_epi16(words, 4), nibble);
    from_bytes_fixed(first, _mm256_or_si256(second, _mm256_and_si256(odd, above)), w);
}

FOR_AVX2 ALONE void part_q5_k_avx2(const uint8_t *block, const int half, const int i, __m256i *w)
{
    const __m256i fifth = bytes_at(block + 16); /* bit g of a byte is of group g */
    const int g = 4 * half + 2 * i;
    with_above(bytes_at(block + 48 + 64 * half + 32 * i), shifted_avx2(fifth, 4 - g), shifted_avx2(fifth, 3 - g), 0x10, w);
}

FOR_AVX2 ALONE void part_q6_k_avx2(const uint8_t *block, const int half, const int i, __m256i *w)
{
    const __m256i top = bytes_at(block + 128 + 32 * half); /* two bits for each of four groups of 32 */
    with_above(bytes_at(block + 64 * half + 32 * i), shifted_avx2(top, 4 - 2 * i), shifted_avx2(top, -2 * i), 0x30, w);
}

/* name_avx2, name_avx2_f16: of large blocks that have their scales with them.
 *
 *     fill(block, factors, less)    what the numbers of each `summed` columns are multiplied by; what is taken from them, times their inputs
 *     part(block, half, i, w[4])    numbers, none below 0, of 64 columns: of a half's two such the i-th
 *     summed                        columns that have one factor: 32, or 16 */
#define FIXED_LARGE(name, open, nbytes, fill, part, summed, runs)                                                                    \
    FOR_AVX2 ALONE void name##_fixed_all(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y,     \
                                   int64_t stride, const int wide)                                                                   \
    {                                                                                                                                \
        const int64_t columns = m->columns, all = columns / WORDS_COLUMNS;                                                           \
        const __m256i places = _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);                                                            \
        for (int64_t o = first; o < last; o++) {                                                                                     \
            struct gguf_row row;                                                                                                     \
            __m256 sums[MOST_WIDE];                                                                                                  \
            open(&row, m, o);                                                                                                        \
            _Pragma("GCC unroll 4") for (int r = 0; r < wide; r++) sums[r] = _mm256_setzero_ps();                                    \
            for (int64_t b = 0; b < columns / LARGE; b++) {                                                                          \
                const uint8_t *block = row.blocks + b * nbytes;                                                                      \
                float factors[LARGE / 16 + FIXED_LANES];                                                                             \
                __m256 less[2];                                                                                                      \
                fetch(block, AHEAD, (nbytes + LINE_BYTES - 1) / LINE_BYTES);                                                         \
                fill(block, factors, less);                                                                                          \
                _Pragma("GCC unroll 4") for (int r = 0; r < wide; r++)                                                               \
                    _Pragma("GCC unroll 2") for (int i = 0; i < LARGE / summed / FIXED_LANES; i++)                                   \
                    {                                                                                                                \
                        const float *sum = in->eights + (r * columns + b * LARGE) / summed + FIXED_LANES * i;                        \
                        sums[r] = _mm256_fnmadd_ps(less[i], _mm256_load_ps(sum), sums[r]);                                           \
                    }                                                                                                                \
                _Pragma("GCC unroll 4") for (int h = 0; h < 4; h++)                                                                  \
                {                                                                                                                    \
                    const int half = h / 2, i = h % 2, at = LARGE / summed / 2 * half + 2 * i;                                       \
                    __m256i w[4];                                                                                                    \
                    part(block, half, i, w);                                                                                         \
                    const __m256 by_even = by_lanes_avx2(factors + at, places, summed == 32);                                        \
                    const __m256 by_odd = by_lanes_avx2(factors + at + (summed == 32 ? 1 : 4), places, summed == 32);                \
                    _Pragma("GCC unroll 4") for (int r = 0; r < wide; r++)                                                           \
                    {                                                                                                                \
                        const int64_t place = r * all + 2 * b + half;                                                                \
                        const uint16_t *x = in->words + place * WORDS_COLUMNS + 16 * i;                                              \
                        const __m256i even = _mm256_add_epi32(pairs_fixed(w[0], x), pairs_fixed(w[2], x + 2 * TILE));                \
                        const __m256i odd = _mm256_add_epi32(pairs_fixed(w[1], x + TILE), pairs_fixed(w[3], x + 3 * TILE));          \
                        __m256 sum = _mm256_mul_ps(_mm256_cvtepi32_ps(even), by_even);                                               \
                        sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(odd), by_odd, sum);                                                 \
                        sums[r] = _mm256_fmadd_ps(sum, _mm256_broadcast_ss(in->steps + place), sums[r]);                             \
                    }                                                                                                                \
                }                                                                                                                    \
            }                                                                                                                        \
            _Pragma("GCC unroll 4") for (int r = 0; r < wide; r++) y[r * stride + o] = sum_of_avx2(sums[r]);                         \
        }                                                                                                                            \
    }                                                                                                                                \
    FIXED_BY_WIDTH(name, in->run == runs && m->columns % LARGE == 0)

/* Two blocks at once, or the last one twice: columns past the end are zeros. */
FOR_AVX2 ALONE void q4_0_fixed_all(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y, int64_t stride,
                                  const int wide)
{
    const int64_t columns = m->columns, all = (columns + WORDS_COLUMNS - 1) / WORDS_COLUMNS;
    for (int64_t o = first; o < last; o++) {
        struct gguf_row row;
        __m256 sums[MOST_WIDE];
        open_q4_0(&row, m, o);
        _Pragma("GCC unroll 4") for (int r = 0; r < wide; r++) sums[r] = _mm256_setzero_ps();
        for (int64_t k = 0; k < columns; k += 2 * SMALL) {
            const uint8_t *block = row.blocks + k / SMALL * BYTES_Q4_0, *next = block + (k + SMALL < columns ? BYTES_Q4_0 : 0);
            const __m128i halves = _mm_unpacklo_epi64(half_in_all(block), half_in_all(next));
            const __m128i a = _mm_loadu_si128((const __m128i *)(block + 2)), b = _mm_loadu_si128((const __m128i *)(next + 2));
            const int64_t part = k % WORDS_COLUMNS / (2 * SMALL);
            const __m256 scales = _mm256_cvtph_ps(halves);
            __m256i w[4];
            fetch(block, AHEAD, 1);
            nibbles_fixed(_mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1), w);
            _Pragma("GCC unroll 4") for (int r = 0; r < wide; r++)
            {
                const int64_t at = r * all + k / WORDS_COLUMNS;
                const uint16_t *x = in->words + at * WORDS_COLUMNS + 16 * part;
                const __m256 eights = _mm256_load_ps(in->eights + at * (WORDS_COLUMNS / WORDS_LANE) + FIXED_LANES * part);
                __m256i sum = pairs_fixed(w[0], x);
                _Pragma("GCC unroll 4") for (int n = 1; n < 4; n++) sum = _mm256_add_epi32(sum, pairs_fixed(w[n], x + TILE * n));
                const __m256 value = _mm256_mul_ps(_mm256_cvtepi32_ps(sum), _mm256_broadcast_ss(in->steps + at));
                sums[r] = _mm256_fmadd_ps(_mm256_fmadd_ps(eights, _mm256_set1_ps(-8), value), scales, sums[r]);
            }
        }
        _Pragma("GCC unroll 4") for (int r = 0; r < wide; r++) y[r * stride + o] = sum_of_avx2(sums[r]);
    }
}

FOR_AVX2 ALONE void q8_0_fixed_all(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y, int64_t stride,
                                  const int wide)
{
    const int64_t columns = m->columns, all = (columns + WORDS_COLUMNS - 1) / WORDS_COLUMNS;
    for (int64_t o = first; o < last; o++) {
        struct gguf_row row;
        __m256 sums[MOST_WIDE];
        open_q8_0(&row, m, o);
        _Pragma("GCC unroll 4") for (int r = 0; r < wide; r++) sums[r] = _mm256_setzero_ps();
        for (int64_t k = 0; k < columns; k += SMALL) {
            const uint8_t *block = row.blocks + k / SMALL * BYTES_Q8_0;
            const __m256 scale = _mm256_cvtph_ps(half_in_all(block));
            __m256i w[2];
            fetch(block, AHEAD, 1);
            signed_fixed(block + 2, w);
            signed_fixed(block + 18, w + 1);
            _Pragma("GCC unroll 4") for (int r = 0; r < wide; r++)
            {
                const uint16_t *x = in->words + r * all * WORDS_COLUMNS + k;
                const __m256i sum = _mm256_add_epi32(pairs_fixed(w[0], x), pairs_fixed(w[1], x + 16));
                const __m256 by = _mm256_mul_ps(scale, _mm256_broadcast_ss(in->steps + r * all + k / WORDS_COLUMNS));
                sums[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), by, sums[r]);
            }
        }
        _Pragma("GCC unroll 4") for (int r = 0; r < wide; r++) y[r * stride + o] = sum_of_avx2(sums[r]);
    }
}
#endif

#endif
