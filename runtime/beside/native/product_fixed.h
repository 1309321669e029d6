/* Products with whole numbers of 16 bits: up to 4 input rows at once, in AVX2, and in AVX512 (FIXED_WIDE of product_words.h, and
 * product_across_fixed.c). With AVX512 codes of 8 bits are multiplied by what AVX2 has.
 *
 * Of each WORDS_COLUMNS columns inputs are whole numbers X in fixed point, x = step * X. step is a power of two, and the largest |X| from
 * 2 ** 14 to less than 2 ** 15. A BF16 has eight bits: it keeps them all, but where it is below 2 ** -7 of the largest. There it is rounded
 * by at most step / 2, 2 ** -15 of the largest. So is an F16, which has eleven, below 2 ** -4. Weights' codes are whole numbers, too. One
 * instruction multiplies sixteen of each and adds pairs to eight sums of 32 bits, which are multiplied by scales in F32:
 *
 *     y = sum over groups: scale * step * (sum over the group's columns: code * X - zero point * sum over the group's columns: X)
 *
 * A sum of 32 bits gets at most 16 columns, of codes up to 255 less their zero point: it is below 16 * 255 * 2 ** 15, which 32 bits hold.
 * Codes of 4 bits are up to 24 here: 16 * 24 * 2 ** 15 is below 2 ** 24, so a sum and its sum of X are F32 numbers to the bit, and so is
 * what is left where they cancel. Weights are not rounded to BF16, as decoding rounds them. Inputs of which one is no number, or has no end,
 * are multiplied by decoding. Codes of 4 bits lie by words of 16 bits as product_words.h says, and inputs in the same order.
 *
 * A core of Zen 4 that is held to AVX2 multiplies 15 GB/s of INT4 so, where decoding gave 4.9. */
#ifndef PENSTOCK_PRODUCT_FIXED_H
#define PENSTOCK_PRODUCT_FIXED_H

#include "product_blocks_avx2.h"
#include "product_words.h"

#ifdef HAS_X86
enum { FIXED_LANES = 8, FIXED_ROWS = 2 };

FOR_AVX2 ALONE __m256i pairs_fixed(__m256i w, const uint16_t *x)
{
    return _mm256_madd_epi16(w, _mm256_load_si256((const __m256i *)x));
}

/* Of 16 words the n-th 4 bits of each. */
FOR_AVX2 ALONE __m256i nibble_fixed(__m256i words, const int n)
{
    const __m256i nibble = _mm256_set1_epi16(15);
    return n == 0 ? _mm256_and_si256(words, nibble)
           : n == 3 ? _mm256_srli_epi16(words, 12)
                    : _mm256_and_si256(_mm256_srli_epi16(words, 4 * n), nibble);
}

FOR_AVX2 ALONE void nibbles_fixed(__m256i words, __m256i *w)
{
    _Pragma("GCC unroll 4") for (int n = 0; n < 4; n++) w[n] = nibble_fixed(words, n);
}

/* A factor for each lane of half a block. at: those of its groups, with `lanes` lanes each. */
FOR_AVX2 ALONE __m256 by_lanes_avx2(const float *at, __m256i places, const int whole)
{
    return whole ? _mm256_broadcast_ss(at) : _mm256_permutevar8x32_ps(_mm256_loadu_ps(at), places);
}

/* name_avx2, and of F16 inputs name_avx2_f16: products of so many input rows as are multiplied at once, by name_fixed_all, where it `fits`;
 * others by name_decoded_avx2 and name_others_f16. */
#define FIXED_BY_WIDTH(name, fits)                                                                                                   \
    FOR_AVX2 static void name##_fixed(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y,        \
                                      int64_t stride, product_fn otherwise)                                                          \
    {                                                                                                                                \
        BY_ROWS(name##_fixed_all, (fits) && all_fixed(in), otherwise)                                                                \
    }                                                                                                                                \
    void name##_avx2(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y, int64_t stride)         \
    {                                                                                                                                \
        name##_fixed(m, first, last, in, y, stride, name##_decoded_avx2);                                                            \
    }                                                                                                                                \
    void name##_avx2_f16(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y, int64_t stride)     \
    {                                                                                                                                \
        name##_fixed(m, first, last, in, y, stride, name##_others_f16);                                                              \
    }

/* name_avx2, name_avx2_f16: of codes of 4 bits along rows.
 *
 *     numbers(words, w[4])   the four numbers of each of 16 words, none below 0
 *     fill(m, o, row)        scales of row o, and its shifts, but where these are all `middle`
 *     middle                 what is added to all numbers
 *     group                  columns that have one scale */
#define FIXED_WORDS(name, numbers, fill, middle, group)                                                                              \
    FOR_AVX2 ALONE void name##_fixed_rows(const struct words_row *rows, const struct inputs *in, int64_t columns, int lanes, float *y, \
                                    int64_t stride, const int high, const int wide, const int whole)                                 \
    {                                                                                                                                \
        const int64_t blocks = columns / WORDS_COLUMNS, tail = columns % WORDS_COLUMNS, all = blocks + (tail > 0);                   \
        const int64_t half = whole ? 0 : FIXED_LANES / lanes, step = whole ? 1 : 2 * half, far = high > 1 ? high * columns / 2 : AHEAD; \
        const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);                                                              \
        const __m256i places = _mm256_srl_epi32(lane, _mm_cvtsi32_si128(__builtin_ctz((unsigned)lanes)));                            \
        uint8_t rest[WORDS_COLUMNS / 2] = {0};                                                                                       \
        __m256 sums[FIXED_ROWS][MOST_WIDE];                                                                                          \
        _Pragma("GCC unroll 4") for (int h = 0; h < high; h++)                                                                       \
            _Pragma("GCC unroll 4") for (int r = 0; r < wide; r++) sums[h][r] = _mm256_setzero_ps();                                 \
        for (int64_t b = 0; b < all; b++)                                                                                            \
            _Pragma("GCC unroll 4") for (int h = 0; h < high; h++)                                                                   \
            {                                                                                                                        \
                const uint8_t *codes = rows[h].codes + b * (WORDS_COLUMNS / 2);                                                      \
                const float *scale = rows[h].scales + b * step, *shift = rows[h].shifts + b * step;                                  \
                __m256i found[MOST_WIDE];                                                                                            \
                fetch(codes, far, 1);                                                                                                \
                if (__builtin_expect(b == blocks, 0))                                                                                \
                    codes = memcpy(rest, codes, (size_t)tail / 2);                                                                   \
                _Pragma("GCC unroll 2") for (int i = 0; i < 2; i++)                                                                  \
                {                                                                                                                    \
                    __m256i w[4];                                                                                                    \
                    numbers(_mm256_loadu_si256((const __m256i *)(codes + 32 * i)), w);                                               \
                    _Pragma("GCC unroll 4") for (int r = 0; r < wide; r++)                                                           \
                    {                                                                                                                \
                        const int64_t at = r * all + b;                                                                              \
                        const uint16_t *x = in->words + at * WORDS_COLUMNS + 16 * i;                                                 \
                        const float *eights = in->eights + at * (WORDS_COLUMNS / WORDS_LANE);                                        \
                        __m256i sum = whole && i ? _mm256_add_epi32(found[r], pairs_fixed(w[0], x)) : pairs_fixed(w[0], x);          \
                        _Pragma("GCC unroll 4") for (int n = 1; n < 4; n++) sum = _mm256_add_epi32(sum, pairs_fixed(w[n], x + TILE * n)); \
                        if (whole && !i) {                                                                                           \
                            found[r] = sum;                                                                                          \
                            continue;                                                                                                \
                        }                                                                                                            \
                        const __m256 value = _mm256_mul_ps(_mm256_cvtepi32_ps(sum), _mm256_broadcast_ss(in->steps + at));            \
                        __m256 less = _mm256_load_ps(eights + FIXED_LANES * i);                                                      \
                        less = whole ? _mm256_add_ps(less, _mm256_load_ps(eights)) : less;                                           \
                        less = _mm256_fmadd_ps(less, by_lanes_avx2(shift + i * half, places, whole), value);                         \
                        sums[h][r] = _mm256_fmadd_ps(less, by_lanes_avx2(scale + i * half, places, whole), sums[h][r]);              \
                    }                                                                                                                \
                }                                                                                                                    \
            }                                                                                                                        \
        _Pragma("GCC unroll 4") for (int h = 0; h < high; h++)                                                                       \
            _Pragma("GCC unroll 4") for (int r = 0; r < wide; r++) y[r * stride + h] = sum_of_avx2(sums[h][r]);                      \
    }                                                                                                                                \
    FOR_AVX2 ALONE void name##_fixed_of(const struct words_row *rows, const struct inputs *in, int64_t columns, int lanes, float *y, \
                                  int64_t stride, const int high, const int wide)                                                    \
    {                                                                                                                                \
        if (lanes == 2 * FIXED_LANES)                                                                                                \
            name##_fixed_rows(rows, in, columns, lanes, y, stride, high, wide, 1);                                                   \
        else                                                                                                                         \
            name##_fixed_rows(rows, in, columns, lanes, y, stride, high, wide, 0);                                                   \
    }                                                                                                                                \
    FOR_AVX2 ALONE void name##_fixed_all(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y,     \
                                   int64_t stride, const int wide)                                                                   \
    {                                                                                                                                \
        const int64_t columns = m->columns, each = (int64_t)(group) < WORDS_COLUMNS ? (group) : WORDS_COLUMNS;                       \
        const int64_t some = columns / each + 32;                                                                                    \
        const int lanes = (int)each / WORDS_LANE;                                                                                    \
        float scales[FIXED_ROWS * some], shifts[FIXED_ROWS * some];                                                                  \
        memset(scales, 0, sizeof scales);                                                                                            \
        for (int64_t g = 0; g < FIXED_ROWS * some; g++)                                                                              \
            shifts[g] = middle;                                                                                                      \
        for (int64_t o = first; o < last; o += FIXED_ROWS) {                                                                         \
            const int64_t high = last - o < FIXED_ROWS ? last - o : FIXED_ROWS;                                                      \
            struct words_row rows[FIXED_ROWS];                                                                                       \
            for (int64_t h = 0; h < high; h++) {                                                                                     \
                rows[h] = (struct words_row){(const uint8_t *)m->part[0] + (o + h) * columns / 2, scales + h * some, shifts + h * some}; \
                fill(m, o + h, &rows[h]);                                                                                            \
            }                                                                                                                        \
            if (high == FIXED_ROWS)                                                                                                  \
                name##_fixed_of(rows, in, columns, lanes, y + o, stride, FIXED_ROWS, wide);                                          \
            else                                                                                                                     \
                for (int64_t h = 0; h < high; h++)                                                                                   \
                    name##_fixed_of(rows + h, in, columns, lanes, y + o + h, stride, 1, wide);                                       \
        }                                                                                                                            \
    }                                                                                                                                \
    FIXED_BY_WIDTH(name, in->run == 1 && words_fit(m->columns, group))

/* Sixteen bytes as words. */
FOR_AVX2 ALONE void signed_fixed(const uint8_t *codes, __m256i *w)
{
    *w = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)codes));
}

FOR_AVX2 ALONE void unsigned_fixed(const uint8_t *codes, __m256i *w)
{
    *w = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)codes));
}

/* name_avx2, name_avx2_f16: of rows of product_whole.c with codes of 8 bits, which are columns in their order. words: signed_fixed or       
 * unsigned_fixed; in_bytes, middle: as open_whole and next_group take them. */
#define FIXED_BYTES(name, words_of_16, in_bytes, middle)                                                                             \
    FOR_AVX2 ALONE void name##_fixed_of(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y,      \
                                  int64_t stride, const int wide, const int zeros)                                                   \
    {                                                                                                                                \
        const int64_t columns = m->columns, all = (columns + WORDS_COLUMNS - 1) / WORDS_COLUMNS;                                     \
        const int64_t most = m->group < WORDS_COLUMNS ? m->group : WORDS_COLUMNS;                                                    \
        for (int64_t o = first; o < last; o++) {                                                                                     \
            struct whole_place row;                                                                                                  \
            __m256 sums[MOST_WIDE], scales = _mm256_setzero_ps();                                                                    \
            __m256i zero = _mm256_setzero_si256();                                                                                   \
            open_whole(&row, m, o, 8, in_bytes);                                                                                     \
            _Pragma("GCC unroll 4") for (int r = 0; r < wide; r++) sums[r] = _mm256_setzero_ps();                                    \
            int64_t left = 0;                                                                                                        \
            for (int64_t k = 0, end; k < columns; k = end) {                                                                         \
                __m256i found[MOST_WIDE];                                                                                            \
                if (!left) {                                                                                                         \
                    float scale, less;                                                                                               \
                    row.left = 0;                                                                                                    \
                    next_group(&row, &scale, &less, 8, middle);                                                                      \
                    scales = _mm256_set1_ps(scale);                                                                                  \
                    zero = _mm256_set1_epi16((short)less);                                                                           \
                    left = m->group;                                                                                                 \
                }                                                                                                                    \
                end = k + (left < most ? left : most);                                                                               \
                left -= end - k;                                                                                                     \
                fetch(row.codes + k, AHEAD, 2);                                                                                      \
                _Pragma("GCC unroll 4") for (int r = 0; r < wide; r++) found[r] = _mm256_setzero_si256();                            \
                for (int64_t i = k; i < end; i += 32)                                                                                \
                    _Pragma("GCC unroll 2") for (int j = 0; j < 32; j += 16)                                                         \
                    {                                                                                                                \
                        __m256i w;                                                                                                   \
                        words_of_16(row.codes + i + j, &w);                                                                          \
                        w = zeros ? _mm256_sub_epi16(w, zero) : w;                                                                   \
                        _Pragma("GCC unroll 4") for (int r = 0; r < wide; r++) found[r] =                                            \
                            _mm256_add_epi32(found[r], pairs_fixed(w, in->words + r * all * WORDS_COLUMNS + i + j));                 \
                    }                                                                                                                \
                _Pragma("GCC unroll 4") for (int r = 0; r < wide; r++)                                                               \
                {                                                                                                                    \
                    const __m256 by = _mm256_mul_ps(scales, _mm256_broadcast_ss(in->steps + r * all + k / WORDS_COLUMNS));           \
                    sums[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(found[r]), by, sums[r]);                                            \
                }                                                                                                                    \
            }                                                                                                                        \
            _Pragma("GCC unroll 4") for (int r = 0; r < wide; r++) y[r * stride + o] = sum_of_avx2(sums[r]);                         \
        }                                                                                                                            \
    }                                                                                                                                \
    FOR_AVX2 ALONE void name##_fixed_all(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y,     \
                                   int64_t stride, const int wide)                                                                   \
    {                                                                                                                                \
        if (m->part[2] || (middle))                                                                                                  \
            name##_fixed_of(m, first, last, in, y, stride, wide, 1);                                                                 \
        else                                                                                                                         \
            name##_fixed_of(m, first, last, in, y, stride, wide, 0);                                                                 \
    }                                                                                                                                \
    FIXED_BY_WIDTH(name, in->run == WORDS_COLUMNS && words_fit(m->columns, m->group) && m->group % TILE == 0)

/* What 64 columns have: words as product_words.h orders them, the first eight bits of columns' numbers of even n, then of odd n. */
FOR_AVX2 ALONE void from_bytes_fixed(__m256i even, __m256i odd, __m256i *w)
{
    const __m256i byte = _mm256_set1_epi16(255);
    w[0] = _mm256_and_si256(even, byte);
    w[1] = _mm256_and_si256(odd, byte);
    w[2] = _mm256_srli_epi16(even, 8);
    w[3] = _mm256_srli_epi16(odd, 8);
}
#endif

#endif
