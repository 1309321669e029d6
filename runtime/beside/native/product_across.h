/* Words of neighbouring rows that lie side by side: what product_across.c and product_across_fixed.c share. */
#ifndef PENSTOCK_PRODUCT_ACROSS_H
#define PENSTOCK_PRODUCT_ACROSS_H

#include "products.h"

#ifdef HAS_X86
#include <immintrin.h>

enum { LANES = 16, NUMBERS_A_WORD = 8, FETCHED = 64 };

/* The row that each 4 bits of one of AWQ's words hold. */
static const int awq_rows[NUMBERS_A_WORD] = {0, 2, 4, 6, 1, 3, 5, 7};

/* 16 words, of which `count` are there. */
FOR_AVX512 ALONE __m512i words_at(const uint32_t *words, int64_t count)
{
    return _mm512_maskz_loadu_epi32((__mmask16)(count >= LANES ? 0xffff : count > 0 ? (1 << count) - 1 : 0), words);
}

/* 16 scales, of which `count` are there, as the matrix has them. */
FOR_AVX512 ALONE __m512 scales_at(const struct matrix *m, const uint16_t *from, int64_t count)
{
    const __mmask16 some = (__mmask16)(count >= LANES ? 0xffff : count > 0 ? (1 << count) - 1 : 0);
    const __m256i bits = _mm256_maskz_loadu_epi16(some, from);
    return m->part[3] ? _mm512_cvtph_ps(bits) : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

/* The words of 16 rows from `first` on, each once for every row that it has. held: those of ACROSS rows. */
FOR_AVX512 ALONE __m512i words_of_rows(__m512i held, int64_t first)
{
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_permutexvar_epi32(_mm512_add_epi32(_mm512_set1_epi32((int)first / NUMBERS_A_WORD), _mm512_srli_epi32(lane, 3)), held);
}
#endif

#endif
