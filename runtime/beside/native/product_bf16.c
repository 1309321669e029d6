/* BF16 matrices. part[0]: [rows][columns].
 *
 * A block is a few rows of the matrix times a few input rows, whose sums stay in registers. Columns go in chunks, so that the block's
 * weights, read for several groups of input rows, stay in the first cache. While a block is multiplied the next one is prefetched. */
#include "products.h"

#ifdef HAS_X86
#include <immintrin.h>

enum { CHUNK = 1024, MOST_ROWS = 16, STREAM = 1024 };
#ifndef AHEAD_HINT
#define AHEAD_HINT _MM_HINT_T1
#endif

/* Sums of 8 columns at a time: x in F32. */
FOR_AVX2 ALONE void block_avx2(const uint16_t *w, int64_t columns, const float *x, float *y, int64_t stride, int rows)
{
    __m256 sums[4][2];
    int64_t k = 0;
    for (int r = 0; r < rows; r++)
        sums[r][0] = sums[r][1] = _mm256_setzero_ps();
    for (; k + 16 <= columns; k += 16) {
        __m256i low = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(w + k)));
        __m256i high = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(w + k + 8)));
        __m256 a = _mm256_castsi256_ps(_mm256_slli_epi32(low, 16)), b = _mm256_castsi256_ps(_mm256_slli_epi32(high, 16));
        _mm_prefetch((const char *)(w + k + CHUNK), _MM_HINT_T0);
        for (int r = 0; r < rows; r++) {
            sums[r][0] = _mm256_fmadd_ps(a, _mm256_loadu_ps(x + r * columns + k), sums[r][0]);
            sums[r][1] = _mm256_fmadd_ps(b, _mm256_loadu_ps(x + r * columns + k + 8), sums[r][1]);
        }
    }
    for (int r = 0; r < rows; r++) {
        __m256 both = _mm256_add_ps(sums[r][0], sums[r][1]);
        __m128 four = _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
        __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        float sum = _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
        for (int64_t rest = k; rest < columns; rest++)
            sum += from_bf16(w[rest]) * x[r * columns + rest];
        y[r * stride] = sum;
    }
}

FOR_AVX2 void bf16_avx2(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y, int64_t stride)
{
    const int64_t columns = m->columns;
    for (int64_t o = first; o < last; o++) {
        const uint16_t *w = (const uint16_t *)m->part[0] + o * columns;
        for (int64_t r = 0; r < in->rows;) {
            const float *x = in->x + r * columns;
            float *to = y + r * stride + o;
            int64_t left = in->rows - r;
            if (left >= 4) {
                block_avx2(w, columns, x, to, stride, 4);
                r += 4;
            } else if (left >= 2) {
                block_avx2(w, columns, x, to, stride, 2);
                r += 2;
            } else {
                block_avx2(w, columns, x, to, stride, 1);
                r++;
            }
        }
    }
}

/* sum + even columns' products + odd columns'. */
FOR_AVX512 ALONE __m512 both_avx512(__m512 sum, __m512i w, __m512i x)
{
    const __m512i odd = _mm512_set1_epi32((int)0xffff0000u);
    sum = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(w, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)), sum);
    return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(w, odd)), _mm512_castsi512_ps(_mm512_and_si512(x, odd)), sum);
}

FOR_AVX512_BF16 ALONE __m512 both_dot(__m512 sum, __m512i w, __m512i x)
{
    return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)x);
}

/* name_block: `high` rows of the matrix (up to 4) times `wide` input rows (up to 4), over one chunk of columns; sums go on.
 * name: all of it. */
#define PRODUCTS_512(name, target, both)                                                                                             \
    target ALONE void name##_block(const uint16_t *w, const uint16_t *x, int64_t columns, int64_t chunk, __m512 (*kept)[4],          \
                                   int64_t ahead, const int high, const int wide)                                                    \
    {                                                                                                                                \
        __m512 sums[4][4];                                                                                                           \
        _Pragma("GCC unroll 4") for (int i = 0; i < high; i++)                                                                       \
            _Pragma("GCC unroll 4") for (int r = 0; r < wide; r++) sums[i][r] = kept[i][r];                                          \
        for (int64_t k = 0; k < chunk; k += 32) {                                                                                    \
            __m512i row[4];                                                                                                          \
            __mmask32 mask = chunk - k >= 32 ? 0xffffffffu : (1u << (chunk - k)) - 1u;                                               \
            _Pragma("GCC unroll 4") for (int i = 0; i < high; i++)                                                                   \
            {                                                                                                                        \
                row[i] = _mm512_maskz_loadu_epi16(mask, w + i * columns + k);                                                        \
                if (ahead)                                                                                                           \
                    _mm_prefetch((const char *)(w + i * columns + k + ahead), AHEAD_HINT);                                          \
            }                                                                                                                        \
            _Pragma("GCC unroll 4") for (int r = 0; r < wide; r++)                                                                   \
            {                                                                                                                        \
                __m512i input = _mm512_maskz_loadu_epi16(mask, x + r * columns + k);                                                 \
                _Pragma("GCC unroll 4") for (int i = 0; i < high; i++) sums[i][r] = both(sums[i][r], row[i], input);                 \
            }                                                                                                                        \
        }                                                                                                                            \
        _Pragma("GCC unroll 4") for (int i = 0; i < high; i++)                                                                       \
            _Pragma("GCC unroll 4") for (int r = 0; r < wide; r++) kept[i][r] = sums[i][r];                                          \
    }                                                                                                                                \
    target ALONE void name##_rows(const uint16_t *w, const struct inputs *in, int64_t from, int64_t rows, float *y, int64_t stride,  \
                                  const int high)                                                                                    \
    {                                                                                                                                \
        const int64_t columns = in->columns;                                                                                         \
        __m512 kept[MOST_ROWS / 4][4][4];                                                                                            \
        for (int g = 0; g * 4 < rows; g++)                                                                                           \
            for (int i = 0; i < high; i++)                                                                                           \
                for (int r = 0; r < 4; r++)                                                                                          \
                    kept[g][i][r] = _mm512_setzero_ps();                                                                             \
        for (int64_t k = 0; k < columns; k += CHUNK) {                                                                               \
            int64_t chunk = columns - k < CHUNK ? columns - k : CHUNK;                                                               \
            for (int g = 0; g * 4 < rows; g++) {                                                                                     \
                const uint16_t *x = in->xb + (from + g * 4) * columns + k;                                                           \
                int64_t ahead = g ? 0 : high * columns;                                                                              \
                switch (rows - g * 4) {                                                                                              \
                case 1: name##_block(w + k, x, columns, chunk, kept[g], ahead, high, 1); break;                                      \
                case 2: name##_block(w + k, x, columns, chunk, kept[g], ahead, high, 2); break;                                      \
                case 3: name##_block(w + k, x, columns, chunk, kept[g], ahead, high, 3); break;                                      \
                default: name##_block(w + k, x, columns, chunk, kept[g], ahead, high, 4); break;                                     \
                }                                                                                                                    \
            }                                                                                                                        \
        }                                                                                                                            \
        for (int64_t r = 0; r < rows; r++)                                                                                           \
            for (int i = 0; i < high; i++)                                                                                           \
                y[(from + r) * stride + i] = _mm512_reduce_add_ps(kept[r / 4][i][r % 4]);                                            \
    }                                                                                                                                \
    target void name(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y, int64_t stride)        \
    {                                                                                                                                \
        const int64_t columns = m->columns;                                                                                          \
        for (int64_t o = first; o < last && in->rows == 1; o++)                                                                      \
            y[o] = name##_one((const uint16_t *)m->part[0] + o * columns, in->xb, columns);                                          \
        for (int64_t o = first; o < last && in->rows > 1;) {                                                                         \
            const uint16_t *w = (const uint16_t *)m->part[0] + o * columns;                                                          \
            const int four = last - o >= 4;                                                                                          \
            for (int64_t from = 0; from < in->rows; from += MOST_ROWS) {                                                             \
                int64_t rows = in->rows - from < MOST_ROWS ? in->rows - from : MOST_ROWS;                                            \
                if (four)                                                                                                            \
                    name##_rows(w, in, from, rows, y + o, stride, 4);                                                                \
                else                                                                                                                 \
                    name##_rows(w, in, from, rows, y + o, stride, 1);                                                                \
            }                                                                                                                        \
            o += four ? 4 : 1;                                                                                                       \
        }                                                                                                                            \
    }

/* One input row takes less than memory gives, so rows of the matrix are read one by one: a single stream, prefetched over their ends. */
#define ONE_512(name, target, both)                                                                                                  \
    target ALONE float name##_one(const uint16_t *w, const uint16_t *x, int64_t columns)                                             \
    {                                                                                                                                \
        __m512 sums[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};                       \
        int64_t k = 0;                                                                                                               \
        for (; k + 128 <= columns; k += 128)                                                                                         \
            _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++)                                                                      \
            {                                                                                                                        \
                _mm_prefetch((const char *)(w + k + 32 * i + STREAM), _MM_HINT_T0);                                                  \
                sums[i] = both(sums[i], _mm512_loadu_si512(w + k + 32 * i), _mm512_loadu_si512(x + k + 32 * i));                     \
            }                                                                                                                        \
        for (; k < columns; k += 32) {                                                                                               \
            __mmask32 mask = columns - k >= 32 ? 0xffffffffu : (1u << (columns - k)) - 1u;                                           \
            sums[0] = both(sums[0], _mm512_maskz_loadu_epi16(mask, w + k), _mm512_maskz_loadu_epi16(mask, x + k));                   \
        }                                                                                                                            \
        return _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3])));                \
    }

ONE_512(bf16_avx512, FOR_AVX512, both_avx512)
ONE_512(bf16_dot, FOR_AVX512_BF16, both_dot)
PRODUCTS_512(bf16_avx512, FOR_AVX512, both_avx512)
PRODUCTS_512(bf16_dot, FOR_AVX512_BF16, both_dot)
#else
typedef int no_function_here;
#endif
