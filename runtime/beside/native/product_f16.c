/* F16 matrices, whose numbers become F32 in registers. part[0]: [rows][columns]. Inputs are read in F32, whatever they are rounded to.
 *
 * A block is a few rows of the matrix times a few input rows, whose sums stay in registers, over one chunk of columns after the other, as
 * those of BF16 (product_bf16.c). */
#include "product_chunks.h"

#ifdef HAS_X86
#include <immintrin.h>

enum { STEP = 32, LANES_512 = 16, LANES_AVX2 = 8 };
#ifndef AHEAD_HINT
#define AHEAD_HINT _MM_HINT_T1
#endif

/* name_block of BY_CHUNKS.
 *
 *     floats, lanes                       a register of so many sums
 *     number(at, left), input(at, left)   the next ones, zeros where none are left
 *     add(w, x, sum) */
#define BLOCK_F16(name, target, floats, lanes, most_high, number, input, add)                                          \
    target ALONE void name##_block(const uint16_t *w, const float *x, int64_t columns, int64_t chunk, floats (*kept)[4],             \
                                   int64_t ahead, const int high, const int wide)                                                    \
    {                                                                                                                                \
        floats sums[most_high][4];                                                                                                   \
        _Pragma("GCC unroll 4") for (int i = 0; i < high; i++)                                                                       \
            _Pragma("GCC unroll 4") for (int r = 0; r < wide; r++) sums[i][r] = kept[i][r];                                          \
        for (int64_t k = 0; k < chunk; k += lanes) {                                                                                 \
            floats row[most_high];                                                                                                   \
            _Pragma("GCC unroll 4") for (int i = 0; i < high; i++)                                                                   \
            {                                                                                                                        \
                row[i] = number(w + i * columns + k, chunk - k);                                                                     \
                if (ahead && k % STEP == 0)                                                                                          \
                    _mm_prefetch((const char *)(w + i * columns + k + ahead), AHEAD_HINT);                                           \
            }                                                                                                                        \
            _Pragma("GCC unroll 4") for (int r = 0; r < wide; r++)                                                                   \
            {                                                                                                                        \
                const floats one = input(x + r * columns + k, chunk - k);                                                            \
                _Pragma("GCC unroll 4") for (int i = 0; i < high; i++) sums[i][r] = add(row[i], one, sums[i][r]);                    \
            }                                                                                                                        \
        }                                                                                                                            \
        _Pragma("GCC unroll 4") for (int i = 0; i < high; i++)                                                                       \
            _Pragma("GCC unroll 4") for (int r = 0; r < wide; r++) kept[i][r] = sums[i][r];                                          \
    }

FOR_AVX512 ALONE __m512 number_512(const uint16_t *at, int64_t left)
{
    const __mmask16 some = left >= LANES_512 ? (__mmask16)-1 : (__mmask16)((1 << left) - 1);
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(some, at));
}

FOR_AVX512 ALONE __m512 input_512(const float *at, int64_t left)
{
    return _mm512_maskz_loadu_ps(left >= LANES_512 ? (__mmask16)-1 : (__mmask16)((1 << left) - 1), at);
}

FOR_AVX2 ALONE __m256 number_avx2(const uint16_t *at, int64_t left)
{
    uint16_t some[LANES_AVX2] = {0};
    if (__builtin_expect(left >= LANES_AVX2, 1))
        return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at));
    memcpy(some, at, (size_t)left * sizeof *at);
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)some));
}

FOR_AVX2 ALONE __m256 input_avx2(const float *at, int64_t left)
{
    float some[LANES_AVX2] = {0};
    if (__builtin_expect(left >= LANES_AVX2, 1))
        return _mm256_loadu_ps(at);
    memcpy(some, at, (size_t)left * sizeof *at);
    return _mm256_loadu_ps(some);
}

FOR_AVX2 ALONE float all_avx2(__m256 sums)
{
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

BLOCK_F16(f16_avx512, FOR_AVX512, __m512, LANES_512, 4, number_512, input_512, _mm512_fmadd_ps)
BY_CHUNKS(f16_avx512, FOR_AVX512, __m512, float, x, 4, _mm512_setzero_ps, _mm512_reduce_add_ps)
BLOCK_F16(f16_avx2, FOR_AVX2, __m256, LANES_AVX2, 2, number_avx2, input_avx2, _mm256_fmadd_ps)
BY_CHUNKS(f16_avx2, FOR_AVX2, __m256, float, x, 2, _mm256_setzero_ps, all_avx2)
#else
typedef int no_function_here;
#endif
