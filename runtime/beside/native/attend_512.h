/* Keys and values of one span in AVX512: scores of four keys at a time, four heads each, from BF16 as it lies. */
#ifndef PENSTOCK_ATTEND_512_H
#define PENSTOCK_ATTEND_512_H

#include "both_512.h"

/* Lane i: the sum of a[i]. */
FOR_AVX512 ALONE __m512 sums_of(const __m512 *a)
{
    __m512 pairs[8], fours[4];
    _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) pairs[i] =
        _mm512_add_ps(_mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]));
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++)
    {
        const __m512d x = _mm512_castps_pd(pairs[2 * i]), y = _mm512_castps_pd(pairs[2 * i + 1]);
        fours[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
    }
    const __m512 low = _mm512_add_ps(_mm512_shuffle_f32x4(fours[0], fours[1], 0x44), _mm512_shuffle_f32x4(fours[0], fours[1], 0xee));
    const __m512 high = _mm512_add_ps(_mm512_shuffle_f32x4(fours[2], fours[3], 0x44), _mm512_shuffle_f32x4(fours[2], fours[3], 0xee));
    return _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
}

/* exp_of for sixteen. */
FOR_AVX512 ALONE __m512 exp_512(__m512 x)
{
    x = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-87.0f)), _mm512_set1_ps(88.0f));
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x));
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_add_ps(_mm512_fmadd_ps(_mm512_mul_ps(p, r), r, r), _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

FOR_AVX512 ALONE __m512 widened(const uint16_t *from)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16));
}

/* sums [wide][value_dim] from column d on, `lanes` times sixteen of them: shrunk, and each key's values times its weight. */
FOR_AVX512 ALONE void add_values(const struct attend *a, const uint16_t *const *values, int64_t count, const float (*weights)[CHUNK],
                                 const float *shrunk, float *sums, int64_t d, const int wide, const int lanes)
{
    __m512 found[TOGETHER][2];
    _Pragma("GCC unroll 4") for (int h = 0; h < wide; h++)
        _Pragma("GCC unroll 2") for (int i = 0; i < lanes; i++) found[h][i] =
            _mm512_mul_ps(_mm512_loadu_ps(sums + h * a->value_dim + d + i * LANES), _mm512_set1_ps(shrunk[h]));
    for (int64_t j = 0; j < count; j++)
        _Pragma("GCC unroll 2") for (int i = 0; i < lanes; i++)
        {
            const __m512 row = widened(values[j] + d + i * LANES);
            _Pragma("GCC unroll 4") for (int h = 0; h < wide; h++) found[h][i] =
                _mm512_fmadd_ps(row, _mm512_set1_ps(weights[h][j]), found[h][i]);
        }
    _Pragma("GCC unroll 4") for (int h = 0; h < wide; h++)
        _Pragma("GCC unroll 2") for (int i = 0; i < lanes; i++) _mm512_storeu_ps(sums + h * a->value_dim + d + i * LANES, found[h][i]);
}

/* Where keys and values [base, base + CHUNK) of one row lie; behind the last one it stands again. */
ALONE void find_chunk(const struct attend *a, const int64_t *pages, int64_t kv_head, int64_t base, int64_t end, const uint16_t **keys,
                      const uint16_t **values)
{
    for (int64_t j = 0; j < CHUNK; j++) {
        const int64_t key = base + j < end ? base + j : end - 1, slot = pages[key / a->page_tokens] * a->page_tokens + key % a->page_tokens;
        keys[j] = a->keys + slot * a->k_token + kv_head * a->k_head;
        values[j] = a->values + slot * a->v_token + kv_head * a->v_head;
    }
}

/* As over_keys of attend.c, with queries as they lie. The coming chunk is on its way meanwhile. */
#define KEYS_512(name, target, both)                                                                                                 \
    target ALONE void name##_wide(const struct attend *a, const int64_t *pages, const uint16_t *from, const float *slopes,           \
                                  int64_t kv_head, int64_t position, int64_t begin, int64_t end, float *sums, float *most,           \
                                  float *total, const int wide)                                                                      \
    {                                                                                                                                \
        float scores[TOGETHER][CHUNK], shrunk[TOGETHER], four[LANES];                                                                \
        const uint16_t *keys[2][CHUNK], *values[2][CHUNK];                                                                           \
        for (int h = 0; h < wide; h++)                                                                                               \
            most[h] = -1e30f, total[h] = 0;                                                                                          \
        memset(sums, 0, (size_t)(wide * a->value_dim) * sizeof *sums);                                                               \
        if (begin < end)                                                                                                             \
            find_chunk(a, pages, kv_head, begin, end, keys[0], values[0]);                                                           \
        for (int64_t base = begin, now = 0; base < end; base += CHUNK, now = !now) {                                                 \
            const int64_t count = end - base < CHUNK ? end - base : CHUNK, more = base + CHUNK < end;                                \
            if (more)                                                                                                                \
                find_chunk(a, pages, kv_head, base + CHUNK, end, keys[!now], values[!now]);                                          \
            for (int64_t j = 0; j < count; j += 4) {                                                                                 \
                __m512 found[4 * TOGETHER];                                                                                          \
                _Pragma("GCC unroll 16") for (int i = 0; i < 4 * TOGETHER; i++) found[i] = _mm512_setzero_ps();                      \
                for (int64_t d = 0; more && d < a->value_dim; d += 32)                                                               \
                    _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++)                                                              \
                        _mm_prefetch((const char *)(values[!now][j + i] + d), _MM_HINT_T1);                                          \
                for (int64_t d = 0; d < a->key_dim; d += 32) {                                                                       \
                    const __mmask32 mask = a->key_dim - d >= 32 ? 0xffffffffu : 0xffffu;                                             \
                    __m512i row[4];                                                                                                  \
                    _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++)                                                              \
                    {                                                                                                                \
                        row[i] = _mm512_maskz_loadu_epi16(mask, keys[now][j + i] + d);                                               \
                        if (more)                                                                                                    \
                            _mm_prefetch((const char *)(keys[!now][j + i] + d), _MM_HINT_T1);                                        \
                    }                                                                                                                \
                    _Pragma("GCC unroll 4") for (int h = 0; h < wide; h++)                                                           \
                    {                                                                                                                \
                        const __m512i x = _mm512_maskz_loadu_epi16(mask, from + h * a->q_head + d);                                  \
                        _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) found[4 * h + i] = both(found[4 * h + i], row[i], x);    \
                    }                                                                                                                \
                }                                                                                                                    \
                _mm512_storeu_ps(four, _mm512_mul_ps(sums_of(found), _mm512_set1_ps(a->scaling)));                                   \
                for (int h = 0; h < wide; h++)                                                                                       \
                    memcpy(scores[h] + j, four + 4 * h, 4 * sizeof *four);                                                           \
            }                                                                                                                        \
            for (int h = 0; h < wide; h++) {                                                                                         \
                float *score = scores[h];                                                                                            \
                const __mmask16 low = (__mmask16)(count >= 16 ? 0xffff : (1u << count) - 1);                                         \
                const __mmask16 high = (__mmask16)(count <= 16 ? 0 : (1u << (count - 16)) - 1);                                      \
                for (int64_t j = 0; a->softcap > 0 && j < count; j++)                                                                \
                    score[j] = a->softcap * tanh_of(score[j] / a->softcap);                                                          \
                for (int64_t j = 0; slopes && j < count; j++)                                                                        \
                    score[j] += slopes[h] * (float)(base + j - position);                                                            \
                const __m512 none = _mm512_set1_ps(-1e30f), first = _mm512_mask_loadu_ps(none, low, score);                          \
                const __m512 second = _mm512_mask_loadu_ps(none, high, score + LANES);                                               \
                const float most_here = _mm512_reduce_max_ps(_mm512_max_ps(first, second));                                          \
                const float higher = most_here > most[h] ? most_here : most[h];                                                      \
                const __m512 weight = _mm512_maskz_mov_ps(low, exp_512(_mm512_sub_ps(first, _mm512_set1_ps(higher))));               \
                const __m512 other = _mm512_maskz_mov_ps(high, exp_512(_mm512_sub_ps(second, _mm512_set1_ps(higher))));              \
                _mm512_storeu_ps(score, weight);                                                                                     \
                _mm512_storeu_ps(score + LANES, other);                                                                              \
                shrunk[h] = exp_of(most[h] - higher);                                                                                \
                total[h] = total[h] * shrunk[h] + _mm512_reduce_add_ps(_mm512_add_ps(weight, other));                                \
                most[h] = higher;                                                                                                    \
            }                                                                                                                        \
            int64_t d = 0;                                                                                                           \
            for (; a->value_dim - d >= 2 * LANES; d += 2 * LANES)                                                                    \
                add_values(a, values[now], count, (const float (*)[CHUNK])scores, shrunk, sums, d, wide, 2);                         \
            if (d < a->value_dim)                                                                                                    \
                add_values(a, values[now], count, (const float (*)[CHUNK])scores, shrunk, sums, d, wide, 1);                         \
        }                                                                                                                            \
    }                                                                                                                                \
    target static void name(const struct attend *a, const int64_t *pages, const uint16_t *from, const float *slopes,                 \
                            int64_t kv_head, int64_t position, int64_t begin, int64_t end, float *sums, float *most, float *total,   \
                            int wide)                                                                                                \
    {                                                                                                                                \
        switch (wide) {                                                                                                              \
        case 1: name##_wide(a, pages, from, slopes, kv_head, position, begin, end, sums, most, total, 1); break;                     \
        case 2: name##_wide(a, pages, from, slopes, kv_head, position, begin, end, sums, most, total, 2); break;                     \
        case 3: name##_wide(a, pages, from, slopes, kv_head, position, begin, end, sums, most, total, 3); break;                     \
        default: name##_wide(a, pages, from, slopes, kv_head, position, begin, end, sums, most, total, 4); break;                    \
        }                                                                                                                            \
    }
KEYS_512(keys_avx512, FOR_AVX512, both_avx512)
KEYS_512(keys_bf16, FOR_AVX512_BF16, both_dot)

#endif
