/* Keys and values of one span in AVX2: scores of as many keys at a time as eight sums allow, from BF16 as it lies. */
#ifndef PENSTOCK_ATTEND_256_H
#define PENSTOCK_ATTEND_256_H

#include "attend_chunks.h"

#include <immintrin.h>

enum { EIGHT = 8 };

/* Sixteen numbers of BF16 take two operations to widen: the even ones and the odd ones apart. */
struct parity {
    __m256 even, odd;
};

FOR_AVX2 ALONE struct parity parity_of(const uint16_t *from)
{
    const __m256i both = _mm256_loadu_si256((const __m256i *)from);
    return (struct parity){_mm256_castsi256_ps(_mm256_slli_epi32(both, 16)),
                          _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32((int)0xffff0000u)))};
}

/* The same of sixteen floats in order, and back. */
FOR_AVX2 ALONE struct parity split_parity(const float *from)
{
    const __m256 low = _mm256_loadu_ps(from), high = _mm256_loadu_ps(from + EIGHT);
    const __m256d even = _mm256_castps_pd(_mm256_shuffle_ps(low, high, 0x88)), odd = _mm256_castps_pd(_mm256_shuffle_ps(low, high, 0xdd));
    return (struct parity){_mm256_castpd_ps(_mm256_permute4x64_pd(even, 0xd8)), _mm256_castpd_ps(_mm256_permute4x64_pd(odd, 0xd8))};
}

FOR_AVX2 ALONE void join_parity(float *to, struct parity parts)
{
    const __m256 low = _mm256_unpacklo_ps(parts.even, parts.odd), high = _mm256_unpackhi_ps(parts.even, parts.odd);
    _mm256_storeu_ps(to, _mm256_permute2f128_ps(low, high, 0x20));
    _mm256_storeu_ps(to + EIGHT, _mm256_permute2f128_ps(low, high, 0x31));
}

/* Lane i: the sum of a[i]. */
FOR_AVX2 ALONE __m256 sums_256(const __m256 *a)
{
    const __m256 low = _mm256_hadd_ps(_mm256_hadd_ps(a[0], a[1]), _mm256_hadd_ps(a[2], a[3]));
    const __m256 high = _mm256_hadd_ps(_mm256_hadd_ps(a[4], a[5]), _mm256_hadd_ps(a[6], a[7]));
    return _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
}

/* exp_of for eight. */
FOR_AVX2 ALONE __m256 exp_256(__m256 x)
{
    x = _mm256_min_ps(_mm256_max_ps(x, _mm256_set1_ps(-87.0f)), _mm256_set1_ps(88.0f));
    const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m256 r = _mm256_fmadd_ps(n, _mm256_set1_ps(2.12194440e-4f), _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x));
    __m256 p = _mm256_set1_ps(1.9875691500e-4f);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.3981999507e-3f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(8.3334519073e-3f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(4.1665795894e-2f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.6666665459e-1f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(5.0000001201e-1f));
    p = _mm256_add_ps(_mm256_fmadd_ps(_mm256_mul_ps(p, r), r, r), _mm256_set1_ps(1.0f));
    const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(p, _mm256_castsi256_ps(power));
}

/* Scores of a chunk's keys with `wide` query heads, whose even and odd columns lie apart: `keys` keys at a time, keys * wide <= 8. */
FOR_AVX2 ALONE void score_256(const struct attend *a, const struct chunk *chunk, int64_t own, int64_t count, const struct chunk *coming,
                              const float (*even)[MOST_DIM / 2], const float (*odd)[MOST_DIM / 2], float (*scores)[CHUNK], const int keys,
                              const int wide)
{
    float eight[EIGHT];
    for (int64_t j = 0; j < count; j += keys) {
        __m256 found[EIGHT];
        _Pragma("GCC unroll 8") for (int i = 0; i < EIGHT; i++) found[i] = _mm256_setzero_ps();
        for (int64_t d = 0; d < a->key_dim; d += 2 * EIGHT) {
            struct parity row[EIGHT];
            _Pragma("GCC unroll 8") for (int i = 0; i < keys; i++)
            {
                row[i] = parity_of(chunk->keys[j + i] + own * a->k_head + d);
                if (coming && !(d & 16))
                    _mm_prefetch((const char *)(coming->keys[j + i] + d), _MM_HINT_T1);
            }
            _Pragma("GCC unroll 4") for (int h = 0; h < wide; h++)
            {
                const __m256 x = _mm256_loadu_ps(even[h] + d / 2), y = _mm256_loadu_ps(odd[h] + d / 2);
                _Pragma("GCC unroll 8") for (int i = 0; i < keys; i++) found[keys * h + i] =
                    _mm256_fmadd_ps(row[i].odd, y, _mm256_fmadd_ps(row[i].even, x, found[keys * h + i]));
            }
        }
        _mm256_storeu_ps(eight, _mm256_mul_ps(sums_256(found), _mm256_set1_ps(a->scaling)));
        for (int h = 0; h < wide; h++)
            memcpy(scores[h] + j, eight + keys * h, (size_t)keys * sizeof *eight);
    }
}

/* Scores become weights, of which those behind `count` are 0. Returns what sums so far shrink by. */
FOR_AVX2 ALONE float weigh_256(float *score, int64_t count, float *most, float *total)
{
    float lanes[EIGHT], higher = *most;
    for (int64_t j = count; j < CHUNK; j++)
        score[j] = -1e30f;
    __m256 highest = _mm256_loadu_ps(score), sum = _mm256_setzero_ps();
    for (int64_t j = EIGHT; j < CHUNK; j += EIGHT)
        highest = _mm256_max_ps(highest, _mm256_loadu_ps(score + j));
    _mm256_storeu_ps(lanes, highest);
    for (int i = 0; i < EIGHT; i++)
        higher = lanes[i] > higher ? lanes[i] : higher;
    const __m256 none = _mm256_set1_ps(-1e30f), from = _mm256_set1_ps(higher);
    for (int64_t j = 0; j < CHUNK; j += EIGHT) {
        const __m256 each = _mm256_loadu_ps(score + j), there = _mm256_cmp_ps(each, none, _CMP_GT_OQ);
        const __m256 weight = _mm256_and_ps(there, exp_256(_mm256_sub_ps(each, from)));
        _mm256_storeu_ps(score + j, weight);
        sum = _mm256_add_ps(sum, weight);
    }
    _mm256_storeu_ps(lanes, sum);
    const float shrunk = exp_of(*most - higher);
    *total = *total * shrunk + (((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7])));
    *most = higher;
    return shrunk;
}

/* sums of sixteen columns from d on, the next head's `apart` further: shrunk, and each key's values times its weight. */
FOR_AVX2 ALONE void add_256(const uint16_t *const *values, int64_t head, int64_t count, const float (*weights)[CHUNK], const float *shrunk,
                            float *sums, int64_t apart, int64_t d, const uint16_t *const *coming, const int wide)
{
    struct parity found[TOGETHER];
    _Pragma("GCC unroll 4") for (int h = 0; h < wide; h++)
    {
        const __m256 by = _mm256_set1_ps(shrunk[h]);
        found[h] = split_parity(sums + h * apart + d);
        found[h].even = _mm256_mul_ps(found[h].even, by);
        found[h].odd = _mm256_mul_ps(found[h].odd, by);
    }
    for (int64_t j = 0; j < count; j++) {
        const struct parity row = parity_of(values[j] + head + d);
        if (coming && !(d & 16))
            _mm_prefetch((const char *)(coming[j] + d), _MM_HINT_T1);
        _Pragma("GCC unroll 4") for (int h = 0; h < wide; h++)
        {
            const __m256 weight = _mm256_broadcast_ss(&weights[h][j]);
            found[h].even = _mm256_fmadd_ps(row.even, weight, found[h].even);
            found[h].odd = _mm256_fmadd_ps(row.odd, weight, found[h].odd);
        }
    }
    _Pragma("GCC unroll 4") for (int h = 0; h < wide; h++) join_parity(sums + h * apart + d, found[h]);
}

/* A chunk, as CHUNKS asks for it. */
FOR_AVX2 ALONE void piece_avx2_wide(const struct attending *work, const struct piece *piece, const struct chunk *chunk, int64_t base, int64_t own,
                                    int64_t head, const struct chunk *coming, const int wide)
{
    const struct attend *a = work->a;
    const float *slopes = a->slopes ? a->slopes + head : 0;
    const int64_t place = piece->place + head, count = piece->end - base < CHUNK ? piece->end - base : CHUNK;
    float even[TOGETHER][MOST_DIM / 2], odd[TOGETHER][MOST_DIM / 2], scores[TOGETHER][CHUNK], shrunk[TOGETHER];
    for (int h = 0; h < wide; h++)
        for (int64_t d = 0; d < a->key_dim; d += 2 * EIGHT) {
            const struct parity query = parity_of(piece->query + (head + h) * a->q_head + d);
            _mm256_storeu_ps(even[h] + d / 2, query.even);
            _mm256_storeu_ps(odd[h] + d / 2, query.odd);
        }
    const float(*x)[MOST_DIM / 2] = (const float(*)[MOST_DIM / 2])even, (*y)[MOST_DIM / 2] = (const float(*)[MOST_DIM / 2])odd;
    score_256(a, chunk, own, count, coming, x, y, scores, wide == 1 ? 8 : wide == 2 ? 4 : 2, wide);
    for (int h = 0; h < wide; h++) {
        for (int64_t j = 0; a->softcap > 0 && j < count; j++)
            scores[h][j] = a->softcap * tanh_of(scores[h][j] / a->softcap);
        for (int64_t j = 0; slopes && j < count; j++)
            scores[h][j] += slopes[h] * (float)(base + j - piece->position);
        shrunk[h] = weigh_256(scores[h], count, work->partial.most + place + h, work->partial.total + place + h);
    }
    float *sums = work->partial.sums + place * a->value_dim;
    const float(*weights)[CHUNK] = (const float(*)[CHUNK])scores;
    for (int64_t d = 0; d < a->value_dim; d += 2 * EIGHT)
        add_256(chunk->values, own * a->v_head, count, weights, shrunk, sums, a->value_dim, d, coming ? coming->values : 0, wide);
}
CHUNKS(piece_avx2, FOR_AVX2)

#endif
