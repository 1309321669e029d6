/* Two columns of BF16 in each 32 bits, times two: what products and attention in AVX512 are made of. */
#ifndef PENSTOCK_BOTH_512_H
#define PENSTOCK_BOTH_512_H

#include "products.h"

#include <immintrin.h>

/* sum + even columns' products + odd columns'. */
FOR_AVX512 ALONE __m512 both_avx512(__m512 sum, __m512i w, __m512i x)
{
    const __m512i odd = _mm512_set1_epi32((int)0xffff0000u);
    sum = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(w, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)), sum);
    return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(w, odd)), _mm512_castsi512_ps(_mm512_and_si512(x, odd)), sum);
}

/* vdpbf16ps takes denormal numbers for zero and rounds each step to the nearest whatever the mode: within 2^-22 of the sum of
 * magnitudes, as F32 sums are (tests/runtime/beside/test_host_products.py). Tiles do the same. */
FOR_AVX512_BF16 ALONE __m512 both_dot(__m512 sum, __m512i w, __m512i x)
{
    return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)x);
}

#endif
