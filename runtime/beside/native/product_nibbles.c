/* Numbers of 4 bits with an exponent of one bit or two, two a byte, the lower half first: MXFP4.
 *
 * part[0] codes [rows][columns / 2]; part[1] scales [rows][columns / 32], bytes: 2 ** (scale - 127), 255 is not a number. */
#include "product_blocks.h"

enum { GROUP = 32 };

static const float e2m1[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};

static inline float from_e8m0(uint8_t bits)
{
    return as_float(bits == 255 ? 0x7fc00000u : bits ? (uint32_t)bits << 23 : 0x00400000u);
}

static void mxfp4_strip(const struct matrix *m, int set, int64_t first, int64_t last, uint16_t *out)
{
    const int64_t groups = m->columns / GROUP;
    float scales[groups];
    for (int64_t row = first; row < last; row++) {
        const uint8_t *bytes = (const uint8_t *)m->part[1] + row * groups;
        for (int64_t g = 0; g < groups; g++)
            scales[g] = from_e8m0(bytes[g]);
        nibbles_strip(set, (const uint8_t *)m->part[0] + row * m->columns / 2, e2m1, scales, out + (row - first) * m->columns, 0, 1,
                      m->columns, GROUP);
    }
}

STRIPS(mxfp4, mxfp4_strip)

#ifdef HAS_X86
struct mxfp4_row {
    const uint8_t *codes, *scales;
};

FOR_AVX512_BF16 ALONE void open_mxfp4(struct mxfp4_row *row, const struct matrix *m, int64_t o)
{
    row->codes = (const uint8_t *)m->part[0] + o * m->columns / 2;
    row->scales = (const uint8_t *)m->part[1] + o * m->columns / GROUP;
}

FOR_AVX512_BF16 ALONE void block_mxfp4(struct mxfp4_row *row, int64_t column, __m512i *w, const int tiles)
{
    const __m512 numbers = _mm512_loadu_ps(e2m1);
    const uint8_t *codes = row->codes + column / 2, *scales = row->scales + column / GROUP;
    _mm_prefetch((const char *)(codes + 1024), _MM_HINT_T0);
    for (int t = 0; t < tiles; t++) {
        __m512 weights = _mm512_mul_ps(numbers, _mm512_set1_ps(from_e8m0(scales[t])));
        __m512i table = _mm512_broadcast_i64x4((__m256i)_mm512_cvtneps_pbh(weights));
        __m512i both = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(codes + 16 * t)));
        w[t] = _mm512_permutexvar_epi16(_mm512_or_si512(both, _mm512_slli_epi32(both, 12)), table);
    }
}

BLOCKS(mxfp4, mxfp4_row, open_mxfp4, block_mxfp4, mxfp4_strip)
#endif
