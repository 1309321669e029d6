/* Keys and values of one span in AVX512: scores of four keys at a time, four heads each, from BF16 as it lies. */
#ifndef PENSTOCK_ATTEND_512_H
#define PENSTOCK_ATTEND_512_H

#include "attend_chunks.h"
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

/* sums of sixteen columns from d on, the next head's `apart` further: shrunk, and each key's values times its weight. A line of each coming
 * row is fetched meanwhile. */
FOR_AVX512 ALONE void add_sixteen(const uint16_t *const *values, int64_t head, int64_t count, const float (*weights)[CHUNK],
                                  const float *shrunk, float *sums, int64_t apart, int64_t d, const uint16_t *const *coming, const int wide)
{
    __m512 found[TOGETHER];
    _Pragma("GCC unroll 4") for (int h = 0; h < wide; h++) found[h] =
        _mm512_mul_ps(_mm512_loadu_ps(sums + h * apart + d), _mm512_set1_ps(shrunk[h]));
    for (int64_t j = 0; j < count; j++) {
        const __m512 row = widened(values[j] + head + d);
        if (coming)
            _mm_prefetch((const char *)(coming[j] + d), _MM_HINT_T1);
        _Pragma("GCC unroll 4") for (int h = 0; h < wide; h++) found[h] = _mm512_fmadd_ps(row, _mm512_set1_ps(weights[h][j]), found[h]);
    }
    _Pragma("GCC unroll 4") for (int h = 0; h < wide; h++) _mm512_storeu_ps(sums + h * apart + d, found[h]);
}

/* The same of 32 columns, which take two operations to widen, the even ones and the odd ones apart. */
FOR_AVX512 ALONE void add_values(const uint16_t *const *values, int64_t head, int64_t count, const float (*weights)[CHUNK],
                                 const float *shrunk, float *sums, int64_t apart, int64_t d, const uint16_t *const *coming, const int wide)
{
    const __m512i evens = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30), one = _mm512_set1_epi32(1);
    const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23), upper = _mm512_set1_epi32((int)0xffff0000u);
    __m512 even[TOGETHER], odd[TOGETHER];
    _Pragma("GCC unroll 4") for (int h = 0; h < wide; h++)
    {
        const __m512 by = _mm512_set1_ps(shrunk[h]), low = _mm512_loadu_ps(sums + h * apart + d);
        const __m512 high = _mm512_loadu_ps(sums + h * apart + d + LANES);
        even[h] = _mm512_mul_ps(_mm512_permutex2var_ps(low, evens, high), by);
        odd[h] = _mm512_mul_ps(_mm512_permutex2var_ps(low, _mm512_add_epi32(evens, one), high), by);
    }
    for (int64_t j = 0; j < count; j++) {
        const __m512i row = _mm512_loadu_si512(values[j] + head + d);
        const __m512 two = _mm512_castsi512_ps(_mm512_slli_epi32(row, 16)), other = _mm512_castsi512_ps(_mm512_and_si512(row, upper));
        if (coming)
            _mm_prefetch((const char *)(coming[j] + d), _MM_HINT_T1);
        _Pragma("GCC unroll 4") for (int h = 0; h < wide; h++)
        {
            const __m512 weight = _mm512_set1_ps(weights[h][j]);
            even[h] = _mm512_fmadd_ps(two, weight, even[h]);
            odd[h] = _mm512_fmadd_ps(other, weight, odd[h]);
        }
    }
    _Pragma("GCC unroll 4") for (int h = 0; h < wide; h++)
    {
        _mm512_storeu_ps(sums + h * apart + d, _mm512_permutex2var_ps(even[h], first, odd[h]));
        _mm512_storeu_ps(sums + h * apart + d + LANES,
                         _mm512_permutex2var_ps(even[h], _mm512_add_epi32(first, _mm512_set1_epi32(8)), odd[h]));
    }
}

/* A chunk as over_keys of attend.c has it, with queries as they lie.
 *
 * name_keys: products of four keys and `wide` query heads, from column d on, are added to found [wide][4].
 * name_wide: `wide` query heads from `head` on, of K head `own` of the piece, over the chunk at `base`. coming: NULL, or what is on its way
 * meanwhile. */
#define KEYS_512(name, target, both)                                                                                                 \
    target ALONE void name##_keys(const struct attend *a, const uint16_t *const *keys, int64_t own, const uint16_t *from, int64_t d, \
                                  const uint16_t *const *coming, __m512 *found, const __mmask32 mask, const int wide)                \
    {                                                                                                                                \
        __m512i row[4];                                                                                                              \
        _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++)                                                                          \
        {                                                                                                                            \
            row[i] = _mm512_maskz_loadu_epi16(mask, keys[i] + own + d);                                                              \
            if (coming)                                                                                                              \
                _mm_prefetch((const char *)(coming[i] + d), _MM_HINT_T1);                                                            \
        }                                                                                                                            \
        _Pragma("GCC unroll 4") for (int h = 0; h < wide; h++)                                                                       \
        {                                                                                                                            \
            const __m512i x = _mm512_maskz_loadu_epi16(mask, from + h * a->q_head + d);                                              \
            _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) found[4 * h + i] = both(found[4 * h + i], row[i], x);                \
        }                                                                                                                            \
    }                                                                                                                                \
    target ALONE void name##_wide(const struct attending *work, const struct piece *piece, const struct chunk *chunk, int64_t base,  \
                                  int64_t own, int64_t head, const struct chunk *coming, const int wide)                             \
    {                                                                                                                                \
        const struct attend *a = work->a;                                                                                            \
        const uint16_t *from = piece->query + head * a->q_head;                                                                      \
        const float *slopes = a->slopes ? a->slopes + head : 0;                                                                      \
        const int64_t place = piece->place + head, apart = a->value_dim, k_own = own * a->k_head;                                    \
        const int64_t count = piece->end - base < CHUNK ? piece->end - base : CHUNK;                                                 \
        float scores[TOGETHER][CHUNK], shrunk[TOGETHER], four[LANES];                                                                \
        for (int64_t j = 0; j < count; j += 4) {                                                                                     \
            __m512 found[4 * TOGETHER];                                                                                              \
            _Pragma("GCC unroll 16") for (int i = 0; i < 4 * TOGETHER; i++) found[i] = _mm512_setzero_ps();                          \
            int64_t d = 0;                                                                                                           \
            for (; d + 32 <= a->key_dim; d += 32)                                                                                    \
                name##_keys(a, chunk->keys + j, k_own, from, d, coming ? coming->keys + j : 0, found, 0xffffffffu, wide);            \
            if (d < a->key_dim)                                                                                                      \
                name##_keys(a, chunk->keys + j, k_own, from, d, coming ? coming->keys + j : 0, found, 0xffffu, wide);                \
            _mm512_storeu_ps(four, _mm512_mul_ps(sums_of(found), _mm512_set1_ps(a->scaling)));                                       \
            for (int h = 0; h < wide; h++)                                                                                           \
                memcpy(scores[h] + j, four + 4 * h, 4 * sizeof *four);                                                               \
        }                                                                                                                            \
        for (int h = 0; h < wide; h++) {                                                                                             \
            float *score = scores[h], *most = work->partial.most + place + h, *total = work->partial.total + place + h;              \
            const __mmask16 low = (__mmask16)(count >= 16 ? 0xffff : (1u << count) - 1);                                             \
            const __mmask16 high = (__mmask16)(count <= 16 ? 0 : (1u << (count - 16)) - 1);                                          \
            for (int64_t j = 0; a->softcap > 0 && j < count; j++)                                                                    \
                score[j] = a->softcap * tanh_of(score[j] / a->softcap);                                                              \
            for (int64_t j = 0; slopes && j < count; j++)                                                                            \
                score[j] += slopes[h] * (float)(base + j - piece->position);                                                         \
            const __m512 none = _mm512_set1_ps(-1e30f), first = _mm512_mask_loadu_ps(none, low, score);                              \
            const __m512 second = _mm512_mask_loadu_ps(none, high, score + LANES);                                                   \
            const float most_here = _mm512_reduce_max_ps(_mm512_max_ps(first, second));                                              \
            const float higher = most_here > *most ? most_here : *most;                                                              \
            const __m512 weight = _mm512_maskz_mov_ps(low, exp_512(_mm512_sub_ps(first, _mm512_set1_ps(higher))));                   \
            const __m512 other = _mm512_maskz_mov_ps(high, exp_512(_mm512_sub_ps(second, _mm512_set1_ps(higher))));                  \
            _mm512_storeu_ps(score, weight);                                                                                         \
            _mm512_storeu_ps(score + LANES, other);                                                                                  \
            shrunk[h] = exp_of(*most - higher);                                                                                      \
            *total = *total * shrunk[h] + _mm512_reduce_add_ps(_mm512_add_ps(weight, other));                                        \
            *most = higher;                                                                                                          \
        }                                                                                                                            \
        float *sums = work->partial.sums + place * a->value_dim;                                                                     \
        const uint16_t *const *rows = coming ? coming->values : 0;                                                                   \
        const float(*weights)[CHUNK] = (const float(*)[CHUNK])scores;                                                                \
        int64_t d = 0;                                                                                                               \
        for (; d + 2 * LANES <= a->value_dim; d += 2 * LANES)                                                                        \
            add_values(chunk->values, own * a->v_head, count, weights, shrunk, sums, apart, d, rows, wide);                          \
        if (d < a->value_dim)                                                                                                        \
            add_sixteen(chunk->values, own * a->v_head, count, weights, shrunk, sums, apart, d, rows, wide);                         \
    }
KEYS_512(piece_avx512, FOR_AVX512, both_avx512)
CHUNKS(piece_avx512, FOR_AVX512)
KEYS_512(piece_bf16, FOR_AVX512_BF16, both_dot)
CHUNKS(piece_bf16, FOR_AVX512_BF16)

#endif
