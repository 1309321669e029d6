/* Numbers of 4 bits whose words do not lie along rows: words of neighbouring rows are multiplied side by side, as they lie. GPTQ4 with
 * AVX512, AWQ with AVX2, too. product_turned.c says how they lie, and multiplies on other machines.
 *
 * A line of memory is 16 words. One of the 8 numbers of each becomes 16 floats by one permutation, which belong to one row of the matrix
 * each, and all are multiplied by one input:
 *
 *     y[row] = sum over groups: scale[row] * (sum over the group's columns: number * x - zero point[row] * sum of x)
 *
 * Sums are in F32, whatever inputs are, and no number is rounded. All inputs are multiplied with a group before the next one comes, so that
 * they find it in the caches. What follows in the same rows is fetched meanwhile: it is far away, so that no processor guesses it.
 * Turning such numbers into the order of rows first took 2 to 4 times as long (docs/log.md, 2026-11-27, night). */
#include "product_across.h"

#ifdef HAS_X86
enum { MOST_INPUTS = 4 };

/* Of ACROSS rows, of which `count` are there: a group's columns, and inputs that have `all` columns each. */
struct group {
    const uint32_t *words;
    int64_t stride, count, columns, all;
    const float *x;
};

/* The 4 bits from `bit` on of each word. */
FOR_AVX512 ALONE __m512 numbers_of(__m512i words, int bit)
{
    const __m512 all = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_permutexvar_ps(_mm512_srl_epi32(words, _mm_cvtsi32_si128(bit)), all);
}

/* Eight sums for each of `inputs`, `part` of `parts` of them at a time: as many as there are registers. Of AWQ one for each place of a
 * word. less: NULL, or zero points that numbers are less. */
FOR_AVX512 ALONE void sum_awq(const struct group *g, __m512 *out, const __m512 *less, const int inputs, const int part, const int parts)
{
    const int sums = NUMBERS_A_WORD / parts;
    __m512 sum[MOST_INPUTS * NUMBERS_A_WORD];
    _Pragma("GCC unroll 32") for (int i = 0; i < inputs * sums; i++) sum[i] = _mm512_setzero_ps();
    for (int64_t k = 0; k < g->columns; k++) {
        const uint32_t *at = g->words + k * g->stride;
        const __m512i words = words_at(at, g->count / NUMBERS_A_WORD);
        if (part == 0)
            __builtin_prefetch(at + FETCHED * g->stride, 0, 2);
        _Pragma("GCC unroll 8") for (int n = 0; n < sums; n++)
        {
            __m512 found = numbers_of(words, 4 * (sums * part + n));
            if (less)
                found = _mm512_sub_ps(found, less[sums * part + n]);
            _Pragma("GCC unroll 4") for (int r = 0; r < inputs; r++) sum[r * sums + n] =
                _mm512_fmadd_ps(found, _mm512_set1_ps(g->x[r * g->all + k]), sum[r * sums + n]);
        }
    }
    _Pragma("GCC unroll 32") for (int i = 0; i < inputs * sums; i++) out[i / sums * NUMBERS_A_WORD + part * sums + i % sums] = sum[i];
}

/* Of GPTQ one for each 16 rows. */
FOR_AVX512 ALONE void sum_gptq(const struct group *g, __m512 *out, const __m512 *less, const int inputs, const int part, const int parts)
{
    const int sums = ACROSS / LANES / parts;
    __m512 sum[MOST_INPUTS * NUMBERS_A_WORD];
    _Pragma("GCC unroll 32") for (int i = 0; i < inputs * sums; i++) sum[i] = _mm512_setzero_ps();
    for (int64_t k = 0; k < g->columns; k += NUMBERS_A_WORD) {
        const uint32_t *at = g->words + k / NUMBERS_A_WORD * g->stride;
        _Pragma("GCC unroll 8") for (int j = 0; j < sums; j++)
        {
            const int64_t from = (int64_t)(part * sums + j) * LANES;
            const __m512i words = words_at(at + from, g->count - from);
            __builtin_prefetch(at + from + FETCHED / NUMBERS_A_WORD * g->stride, 0, 2);
            _Pragma("GCC unroll 8") for (int n = 0; n < NUMBERS_A_WORD; n++)
            {
                __m512 found = numbers_of(words, 4 * n);
                if (less)
                    found = _mm512_sub_ps(found, less[part * sums + j]);
                _Pragma("GCC unroll 4") for (int r = 0; r < inputs; r++) sum[r * sums + j] =
                    _mm512_fmadd_ps(found, _mm512_set1_ps(g->x[r * g->all + k + n]), sum[r * sums + j]);
            }
        }
    }
    _Pragma("GCC unroll 32") for (int i = 0; i < inputs * sums; i++) out[i / sums * NUMBERS_A_WORD + part * sums + i % sums] = sum[i];
}

FOR_AVX512 ALONE void sum_part(const struct group *g, __m512 *out, const __m512 *less, const int inputs, const int part, const int parts,
                               const int awq)
{
    if (awq)
        sum_awq(g, out, less, inputs, part, parts);
    else
        sum_gptq(g, out, less, inputs, part, parts);
}

FOR_AVX512 ALONE void sum_halves(const struct group *g, __m512 *out, const int inputs, const int awq)
{
    sum_part(g, out, NULL, inputs, 0, 2, awq);
    sum_part(g, out, NULL, inputs, 1, 2, awq);
}

FOR_AVX512 ALONE void sum_inputs(const struct group *g, __m512 *out, int64_t inputs, const int awq)
{
    switch (inputs) {
    case 1: sum_part(g, out, NULL, 1, 0, 1, awq); break;
    case 2: sum_halves(g, out, 2, awq); break;
    case 3: sum_halves(g, out, 3, awq); break;
    default: sum_halves(g, out, 4, awq);
    }
}

/* The row of lane `lane` of sum `i`. */
ALONE int row_of(int i, int lane, const int awq)
{
    return awq ? NUMBERS_A_WORD * lane + awq_rows[i] : LANES * i + lane;
}

/* Scales and zero points of a group of ACROSS rows, as their sums lie. */
FOR_AVX512 ALONE void fill(const struct matrix *m, int64_t group, int64_t o, int64_t count, __m512 *scales, __m512 *zeros, const int awq)
{
    const uint16_t *from = (const uint16_t *)m->part[1] + group * m->rows + o;
    const uint32_t *words = (const uint32_t *)m->part[2] + group * (m->rows / NUMBERS_A_WORD) + o / NUMBERS_A_WORD;
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i held = words_at(words, count / NUMBERS_A_WORD);
    float in_order[ACROSS];
    for (int64_t r = 0; r < ACROSS; r += LANES)
        _mm512_storeu_ps(in_order + r, scales_at(m, from + r, count - r));
    for (int i = 0; i < NUMBERS_A_WORD; i++)
        if (awq) {
            scales[i] = _mm512_i32gather_ps(_mm512_slli_epi32(lane, 3), in_order + awq_rows[i], 4);
            zeros[i] = numbers_of(held, 4 * i);
        } else { /* 15 and one more are 0 */
            const __m512i places = _mm512_slli_epi32(_mm512_and_si512(lane, _mm512_set1_epi32(7)), 2);
            const __m512i bits = _mm512_srlv_epi32(words_of_rows(held, LANES * i), places);
            scales[i] = _mm512_loadu_ps(in_order + LANES * i);
            zeros[i] = numbers_of(_mm512_add_epi32(bits, _mm512_set1_epi32(m->part[4] != NULL)), 0);
        }
}

FOR_AVX512 ALONE void product_across(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y, int64_t stride,
                                     const int awq)
{
    const int64_t groups = m->columns / m->group, across = awq ? m->rows / NUMBERS_A_WORD : m->rows;
    __m512 sums[MOST_INPUTS * NUMBERS_A_WORD], scales[NUMBERS_A_WORD], zeros[NUMBERS_A_WORD], found[in->rows * NUMBERS_A_WORD];
    float lanes[LANES];
    for (int64_t o = first; o < last; o += ACROSS) {
        const int64_t count = last - o < ACROSS ? last - o : ACROSS;
        for (int64_t i = 0; i < in->rows * NUMBERS_A_WORD; i++)
            found[i] = _mm512_setzero_ps();
        for (int64_t g = 0; g < groups; g++) {
            const int64_t column = g * m->group;
            fill(m, g, o, count, scales, zeros, awq);
            for (int64_t r = 0; r < in->rows; r += MOST_INPUTS) {
                const int64_t inputs = in->rows - r < MOST_INPUTS ? in->rows - r : MOST_INPUTS;
                const float *x = in->x + r * in->columns + column;
                const uint32_t *words = (const uint32_t *)m->part[0];
                words += awq ? column * across + o / NUMBERS_A_WORD : column / NUMBERS_A_WORD * across + o;
                const struct group group = {words, across, count, m->group, in->columns, x};
                sum_inputs(&group, sums, inputs, awq);
                for (int64_t i = 0; i < inputs; i++) {
                    __m512 eights = _mm512_setzero_ps(); /* groups are whole eights of columns */
                    for (int64_t k = 0; k < m->group; k += NUMBERS_A_WORD)
                        eights = _mm512_add_ps(eights, _mm512_maskz_loadu_ps(0xff, x + i * in->columns + k));
                    const float sum = _mm512_reduce_add_ps(eights);
                    __m512 *of = sums + i * NUMBERS_A_WORD, *to = found + (r + i) * NUMBERS_A_WORD;
                    if (__builtin_expect(sum - sum != 0, 0)) { /* an input has no end: what it is multiplied by says which it gets */
                        const struct group one = {words, across, count, m->group, in->columns, x + i * in->columns};
                        sum_part(&one, of, zeros, 1, 0, 1, awq);
                        for (int n = 0; n < NUMBERS_A_WORD; n++)
                            to[n] = _mm512_fmadd_ps(scales[n], of[n], to[n]);
                    } else
                        for (int n = 0; n < NUMBERS_A_WORD; n++)
                            to[n] = _mm512_fmadd_ps(scales[n], _mm512_fnmadd_ps(zeros[n], _mm512_set1_ps(sum), of[n]), to[n]);
                }
            }
        }
        for (int64_t i = 0; i < in->rows * NUMBERS_A_WORD; i++) {
            const int n = (int)(i % NUMBERS_A_WORD);
            _mm512_storeu_ps(lanes, found[i]);
            for (int l = 0; l < LANES; l++)
                if (row_of(n, l, awq) < count)
                    y[i / NUMBERS_A_WORD * stride + o + row_of(n, l, awq)] = lanes[l];
        }
    }
}

FOR_AVX512 void gptq4_avx512(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y, int64_t stride)
{
    product_across(m, first, last, in, y, stride, 0);
}

FOR_AVX512 void awq_avx512(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y, int64_t stride)
{
    product_across(m, first, last, in, y, stride, 1);
}

/* AVX2 has half the lanes and half the registers: 64 rows of AWQ at once, and two inputs. */
enum { LANES_AVX2 = 8, AT_ONCE_AVX2 = LANES_AVX2 * NUMBERS_A_WORD, INPUTS_AVX2 = 2 };

FOR_AVX2 ALONE __m256i words_avx2(const uint32_t *words, int64_t count)
{
    if (count >= LANES_AVX2)
        return _mm256_loadu_si256((const __m256i *)words);
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_maskload_epi32((const int *)words, _mm256_cmpgt_epi32(_mm256_set1_epi32((int)count), lane));
}

FOR_AVX2 ALONE __m256 numbers_avx2(__m256i words, int bit)
{
    return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srl_epi32(words, _mm_cvtsi32_si128(bit)), _mm256_set1_epi32(15)));
}

FOR_AVX2 ALONE void sum_awq_avx2(const struct group *g, __m256 *out, const __m256 *less, const int inputs, const int part, const int parts)
{
    const int sums = NUMBERS_A_WORD / parts;
    __m256 sum[INPUTS_AVX2 * NUMBERS_A_WORD];
    _Pragma("GCC unroll 16") for (int i = 0; i < inputs * sums; i++) sum[i] = _mm256_setzero_ps();
    for (int64_t k = 0; k < g->columns; k++) {
        const uint32_t *at = g->words + k * g->stride;
        const __m256i words = words_avx2(at, g->count / NUMBERS_A_WORD);
        if (part == 0)
            __builtin_prefetch(at + FETCHED * g->stride, 0, 2);
        _Pragma("GCC unroll 8") for (int n = 0; n < sums; n++)
        {
            __m256 found = numbers_avx2(words, 4 * (sums * part + n));
            if (less)
                found = _mm256_sub_ps(found, less[sums * part + n]);
            _Pragma("GCC unroll 2") for (int r = 0; r < inputs; r++) sum[r * sums + n] =
                _mm256_fmadd_ps(found, _mm256_broadcast_ss(g->x + r * g->all + k), sum[r * sums + n]);
        }
    }
    _Pragma("GCC unroll 16") for (int i = 0; i < inputs * sums; i++) out[i / sums * NUMBERS_A_WORD + part * sums + i % sums] = sum[i];
}

FOR_AVX2 ALONE void fill_avx2(const struct matrix *m, int64_t group, int64_t o, int64_t count, __m256 *scales, __m256 *zeros)
{
    const uint16_t *from = (const uint16_t *)m->part[1] + group * m->rows + o;
    const uint32_t *words = (const uint32_t *)m->part[2] + group * (m->rows / NUMBERS_A_WORD) + o / NUMBERS_A_WORD;
    const __m256i held = words_avx2(words, count / NUMBERS_A_WORD), lane = _mm256_setr_epi32(0, 8, 16, 24, 32, 40, 48, 56);
    float in_order[AT_ONCE_AVX2];
    for (int64_t r = 0; r < AT_ONCE_AVX2; r += LANES_AVX2) { /* rows are whole eights */
        const __m128i bits = r < count ? _mm_loadu_si128((const __m128i *)(from + r)) : _mm_setzero_si128();
        const __m256 wide = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
        _mm256_storeu_ps(in_order + r, m->part[3] ? _mm256_cvtph_ps(bits) : wide);
    }
    for (int i = 0; i < NUMBERS_A_WORD; i++) {
        scales[i] = _mm256_i32gather_ps(in_order + awq_rows[i], lane, 4);
        zeros[i] = numbers_avx2(held, 4 * i);
    }
}

FOR_AVX2 void awq_avx2(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y, int64_t stride)
{
    const int64_t groups = m->columns / m->group, across = m->rows / NUMBERS_A_WORD;
    __m256 sums[INPUTS_AVX2 * NUMBERS_A_WORD], scales[NUMBERS_A_WORD], zeros[NUMBERS_A_WORD], found[in->rows * NUMBERS_A_WORD];
    float lanes[LANES_AVX2];
    for (int64_t o = first; o < last; o += AT_ONCE_AVX2) {
        const int64_t count = last - o < AT_ONCE_AVX2 ? last - o : AT_ONCE_AVX2;
        for (int64_t i = 0; i < in->rows * NUMBERS_A_WORD; i++)
            found[i] = _mm256_setzero_ps();
        for (int64_t g = 0; g < groups; g++) {
            const uint32_t *words = (const uint32_t *)m->part[0] + g * m->group * across + o / NUMBERS_A_WORD;
            fill_avx2(m, g, o, count, scales, zeros);
            for (int64_t r = 0; r < in->rows; r += INPUTS_AVX2) {
                const float *x = in->x + r * in->columns + g * m->group;
                const struct group group = {words, across, count, m->group, in->columns, x};
                const int64_t inputs = in->rows - r < INPUTS_AVX2 ? 1 : INPUTS_AVX2;
                if (inputs == 1)
                    sum_awq_avx2(&group, sums, NULL, 1, 0, 1);
                else {
                    sum_awq_avx2(&group, sums, NULL, 2, 0, 2);
                    sum_awq_avx2(&group, sums, NULL, 2, 1, 2);
                }
                for (int64_t i = 0; i < inputs; i++) {
                    float sum = 0;
                    __m256 eights = _mm256_setzero_ps();
                    for (int64_t k = 0; k < m->group; k += LANES_AVX2)
                        eights = _mm256_add_ps(eights, _mm256_loadu_ps(x + i * in->columns + k));
                    _mm256_storeu_ps(lanes, eights);
                    for (int l = 0; l < LANES_AVX2; l++)
                        sum += lanes[l];
                    __m256 *of = sums + i * NUMBERS_A_WORD, *to = found + (r + i) * NUMBERS_A_WORD;
                    if (__builtin_expect(sum - sum != 0, 0)) { /* as above */
                        const struct group one = {words, across, count, m->group, in->columns, x + i * in->columns};
                        sum_awq_avx2(&one, of, zeros, 1, 0, 1);
                        for (int n = 0; n < NUMBERS_A_WORD; n++)
                            to[n] = _mm256_fmadd_ps(scales[n], of[n], to[n]);
                    } else
                        for (int n = 0; n < NUMBERS_A_WORD; n++)
                            to[n] = _mm256_fmadd_ps(scales[n], _mm256_fnmadd_ps(zeros[n], _mm256_set1_ps(sum), of[n]), to[n]);
                }
            }
        }
        for (int64_t i = 0; i < in->rows * NUMBERS_A_WORD; i++) {
            const int n = (int)(i % NUMBERS_A_WORD);
            _mm256_storeu_ps(lanes, found[i]);
            for (int l = 0; l < LANES_AVX2; l++)
                if (row_of(n, l, 1) < count)
                    y[i / NUMBERS_A_WORD * stride + o + row_of(n, l, 1)] = lanes[l];
        }
    }
}
#endif
