/* BF16 matrices. part[0]: [rows][columns].
 *
 * A block is a few rows of the matrix times a few input rows, whose sums stay in registers. Columns go in chunks, so that the block's
 * weights, read for several groups of input rows, stay in the first cache. While a chunk is multiplied the next one is
 * prefetched, the next block's first behind the last. */
#include "product_chunks.h"

#ifdef HAS_X86
#include "both_512.h"

#ifndef AHEAD_HINT
#define AHEAD_HINT _MM_HINT_T1
#endif

enum { CHUNK_AVX2 = 512 };

FOR_AVX2 ALONE float sum_avx2(__m256 sums)
{
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

/* `high` rows of the matrix times `wide` input rows, over one chunk of columns, a multiple of 16; sums go on. Of 16 columns the even ones
 * come first: a pair of BF16 numbers becomes two floats by a shift and a mask. */
FOR_AVX2 ALONE void block_avx2(const uint16_t *w, const uint16_t *x, int64_t columns, int64_t chunk, __m256 (*kept)[4], int64_t ahead,
                               const int high, const int wide)
{
    const __m256i upper = _mm256_set1_epi32((int)0xffff0000u);
    __m256 sums[2][4];
    _Pragma("GCC unroll 2") for (int i = 0; i < high; i++)
        _Pragma("GCC unroll 4") for (int r = 0; r < wide; r++) sums[i][r] = kept[i][r];
    for (int64_t k = 0; k < chunk; k += 16) {
        __m256 even[2], odd[2];
        _Pragma("GCC unroll 2") for (int i = 0; i < high; i++)
        {
            const uint16_t *at = w + i * columns + k;
            const __m256i row = _mm256_loadu_si256((const __m256i *)at);
            even[i] = _mm256_castsi256_ps(_mm256_slli_epi32(row, 16));
            odd[i] = _mm256_castsi256_ps(_mm256_and_si256(row, upper));
            if (ahead && k % 32 == 0)
                _mm_prefetch((const char *)(at + ahead), AHEAD_HINT);
        }
        _Pragma("GCC unroll 4") for (int r = 0; r < wide; r++)
        {
            const __m256i input = _mm256_loadu_si256((const __m256i *)(x + r * columns + k));
            const __m256 first = _mm256_castsi256_ps(_mm256_slli_epi32(input, 16));
            const __m256 second = _mm256_castsi256_ps(_mm256_and_si256(input, upper));
            _Pragma("GCC unroll 2") for (int i = 0; i < high; i++) sums[i][r] = _mm256_fmadd_ps(even[i], first, sums[i][r]);
            _Pragma("GCC unroll 2") for (int i = 0; i < high; i++) sums[i][r] = _mm256_fmadd_ps(odd[i], second, sums[i][r]);
        }
    }
    _Pragma("GCC unroll 2") for (int i = 0; i < high; i++)
        _Pragma("GCC unroll 4") for (int r = 0; r < wide; r++) kept[i][r] = sums[i][r];
}

FOR_AVX2 ALONE void rows_avx2(const uint16_t *w, const struct inputs *in, int64_t from, int64_t rows, float *y, int64_t stride,
                              const int high)
{
    const int64_t columns = in->columns, whole = columns / 16 * 16;
    __m256 kept[MOST_ROWS / 4][2][4];
    for (int g = 0; g * 4 < rows; g++)
        for (int i = 0; i < high; i++)
            for (int r = 0; r < 4; r++)
                kept[g][i][r] = _mm256_setzero_ps();
    for (int64_t k = 0; k < whole; k += CHUNK_AVX2) {
        int64_t chunk = whole - k < CHUNK_AVX2 ? whole - k : CHUNK_AVX2;
        for (int g = 0; g * 4 < rows; g++) {
            const uint16_t *x = in->xb + (from + g * 4) * columns + k;
            int64_t ahead = g ? 0 : high * columns;
            switch (rows - g * 4) {
            case 1: block_avx2(w + k, x, columns, chunk, kept[g], ahead, high, 1); break;
            case 2: block_avx2(w + k, x, columns, chunk, kept[g], ahead, high, 2); break;
            case 3: block_avx2(w + k, x, columns, chunk, kept[g], ahead, high, 3); break;
            default: block_avx2(w + k, x, columns, chunk, kept[g], ahead, high, 4); break;
            }
        }
    }
    for (int64_t r = 0; r < rows; r++)
        for (int i = 0; i < high; i++) {
            float sum = sum_avx2(kept[r / 4][i][r % 4]);
            for (int64_t k = whole; k < columns; k++)
                sum += from_bf16(w[i * columns + k]) * in->x[(from + r) * columns + k];
            y[(from + r) * stride + i] = sum;
        }
}

FOR_AVX2 void bf16_avx2(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y, int64_t stride)
{
    const int64_t columns = m->columns;
    for (int64_t o = first; o < last;) {
        const uint16_t *w = (const uint16_t *)m->part[0] + o * columns;
        const int two = last - o >= 2;
        for (int64_t from = 0; from < in->rows; from += MOST_ROWS) {
            int64_t rows = in->rows - from < MOST_ROWS ? in->rows - from : MOST_ROWS;
            if (two)
                rows_avx2(w, in, from, rows, y + o, stride, 2);
            else
                rows_avx2(w, in, from, rows, y + o, stride, 1);
        }
        o += two ? 2 : 1;
    }
}

/* name_block: `high` rows of the matrix (up to 4) times `wide` input rows (up to 4), over one chunk of columns; sums go on. */
#define BLOCK_512(name, target, both)                                                                                             \
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
    }

BLOCK_512(bf16_avx512, FOR_AVX512, both_avx512)
BY_CHUNKS(bf16_avx512, FOR_AVX512, __m512, uint16_t, xb, 4, _mm512_setzero_ps, _mm512_reduce_add_ps)
BLOCK_512(bf16_dot, FOR_AVX512_BF16, both_dot)
BY_CHUNKS(bf16_dot, FOR_AVX512_BF16, __m512, uint16_t, xb, 4, _mm512_setzero_ps, _mm512_reduce_add_ps)
#else
typedef int no_function_here;
#endif
