/* Numbers of 4 bits with an exponent of one bit or two, two a byte, the lower half first: MXFP4, NVFP4. part[0]: codes [rows][columns / 2].
 *
 * MXFP4: part[1] scales [rows][columns / 32], bytes: 2 ** (scale - 127), 255 is not a number.
 * NVFP4: part[1] scales [rows][columns / 16], E4M3; part[2] F32 factors, one for each `group` rows: a number times (scale * factor), or,
 * where part[3] is not NULL, (scale / factor). columns are a multiple of 16.
 *
 * Few input rows are multiplied by words, and with AVX2 by whole numbers: product_fixed.h. */
#include "product_fixed.h"

enum { GROUP = 32 };

/* The bytes of these numbers as BF16. */
#define E2M1_LOWER 0, 0, -128, -64, 0, 64, -128, -64, 0, 0, -128, -64, 0, 64, -128, -64
#define E2M1_UPPER 0, 63, 63, 63, 64, 64, 64, 64, -128, -65, -65, -65, -64, -64, -64, -64

static const float e2m1[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};

static inline float from_e8m0(uint8_t bits)
{
    return as_float(bits == 255 ? 0x7fc00000u : bits ? (uint32_t)bits << 23 : 0x00400000u);
}

static void mxfp4_strip(const struct matrix *m, int set, int number, int64_t first, int64_t last, uint16_t *out)
{
    const int64_t groups = m->columns / GROUP;
    float scales[groups];
    for (int64_t row = first; row < last; row++) {
        const uint8_t *bytes = (const uint8_t *)m->part[1] + row * groups;
        for (int64_t g = 0; g < groups; g++)
            scales[g] = from_e8m0(bytes[g]);
        nibbles_strip(set, (const uint8_t *)m->part[0] + row * m->columns / 2, e2m1, scales, out + (row - first) * m->columns, 0, 1,
                      m->columns, GROUP, number);
    }
}

STRIPS_PORTABLE(mxfp4, mxfp4_strip)

enum { SMALL_GROUP = 16 };

static inline float from_e4m3(uint8_t bits)
{
    const uint32_t size = bits & 127u;
    const float value = from_f16((uint16_t)(size << 7)) * 256;
    return size == 127 ? as_float(0x7fc00000u) : bits & 128u ? -value : value;
}

static inline float nvfp4_scale(uint8_t bits, float factor, int divides)
{
    return divides ? from_e4m3(bits) / factor : from_e4m3(bits) * factor;
}

static void nvfp4_strip(const struct matrix *m, int set, int number, int64_t first, int64_t last, uint16_t *out)
{
    const int64_t groups = m->columns / SMALL_GROUP;
    float scales[groups];
    for (int64_t row = first; row < last; row++) {
        const uint8_t *bytes = (const uint8_t *)m->part[1] + row * groups;
        const float factor = ((const float *)m->part[2])[row / m->group];
        for (int64_t g = 0; g < groups; g++)
            scales[g] = nvfp4_scale(bytes[g], factor, m->part[3] != NULL);
        nibbles_strip(set, (const uint8_t *)m->part[0] + row * m->columns / 2, e2m1, scales, out + (row - first) * m->columns, 0, 1,
                      m->columns, SMALL_GROUP, number);
    }
}

STRIPS_PORTABLE(nvfp4, nvfp4_strip)

#ifdef HAS_X86
struct mxfp4_row {
    const uint8_t *codes, *scales;
};

FOR_AVX2 ALONE void open_mxfp4(struct mxfp4_row *row, const struct matrix *m, int64_t o)
{
    row->codes = (const uint8_t *)m->part[0] + o * m->columns / 2;
    row->scales = (const uint8_t *)m->part[1] + o * m->columns / GROUP;
}

/* The numbers times 2 ** (scale - 127): where all stay normal ones, by their exponents. */
FOR_AVX512 ALONE __m512i mxfp4_table(__m512i plain, uint8_t scale, const int native)
{
    enum { FIRST = 2, LAST = 252, NO_ZEROS = 0xfefe };
    if (__builtin_expect((uint8_t)(scale - FIRST) > LAST - FIRST, 0))
        return table_of_16(_mm512_mul_ps(_mm512_loadu_ps(e2m1), _mm512_set1_ps(from_e8m0(scale))), native);
    return _mm512_mask_add_epi16(plain, NO_ZEROS | (__mmask32)NO_ZEROS << 16, plain, _mm512_set1_epi16((short)((scale - 127) * 128)));
}

FOR_AVX512 ALONE __m512i e2m1_table(void)
{
    return _mm512_broadcast_i64x4(_mm256_setr_epi16(0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, (short)0x8000, (short)0xbf00,
                                                    (short)0xbf80, (short)0xbfc0, (short)0xc000, (short)0xc040, (short)0xc080, (short)0xc0c0));
}

/* Twice these numbers, which are whole. */
FOR_AVX512 ALONE __m512i e2m1_twice(void)
{
    return _mm512_broadcast_i64x4(_mm256_setr_epi16(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
}

FOR_AVX512 ALONE void block_mxfp4(struct mxfp4_row *row, int64_t column, __m512i *w, const int tiles, const int native, const int64_t far)
{
    const __m512i plain = e2m1_table();
    const uint8_t *codes = row->codes + column / 2, *scales = row->scales + column / GROUP;
    fetch(codes, far / 2, 1);
    for (int t = 0; t < tiles; t++)
        w[t] = _mm512_permutexvar_epi16(nibbles_by_turns(codes + 16 * t, native), mxfp4_table(plain, scales[t], native));
}

FOR_AVX512 ALONE void fill_mxfp4(const struct matrix *m, int64_t o, const struct words_row *row)
{
    const int64_t groups = m->columns / GROUP;
    const uint8_t *scales = (const uint8_t *)m->part[1] + o * groups;
    for (int64_t g = 0; g < groups; g += 16) {
        const __mmask16 some = (__mmask16)(groups - g < 16 ? (1 << (groups - g)) - 1 : -1);
        const __m512i bits = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(some, scales + g));
        __m512i found = _mm512_slli_epi32(bits, 23);
        found = _mm512_mask_mov_epi32(found, _mm512_testn_epi32_mask(bits, bits), _mm512_set1_epi32(0x00400000));
        found = _mm512_mask_mov_epi32(found, _mm512_cmpeq_epi32_mask(bits, _mm512_set1_epi32(255)), _mm512_set1_epi32(0x7fc00000));
        _mm512_storeu_si512(row->scales + g, found);
    }
}

WORDS(mxfp4, mxfp4_row, open_mxfp4, block_mxfp4, mxfp4_strip, fill_mxfp4, e2m1_table(), e2m1_twice(), 0.5f, 0, GROUP)

/* Of codes' numbers, unscaled: each has four bits, so none is rounded. */
FOR_AVX2 ALONE void e2m1_avx2(const uint8_t *codes, __m256 *w)
{
    const struct table_avx2 table = {_mm256_setr_epi8(E2M1_LOWER, E2M1_LOWER), _mm256_setr_epi8(E2M1_UPPER, E2M1_UPPER)};
    fetch(codes, AHEAD, 1);
    from_table(neighbours_in_order(codes), &table, w);
}

/* A power of two times a number of four bits is a BF16. */
FOR_AVX2 ALONE void block_mxfp4_avx2(struct mxfp4_row *row, int64_t column, __m256 *w)
{
    const __m256 by = _mm256_set1_ps(from_e8m0(row->scales[column / GROUP]));
    e2m1_avx2(row->codes + column / 2, w);
    for (int i = 0; i < 4; i++)
        w[i] = _mm256_mul_ps(w[i], by);
}

BLOCKS_AVX2(mxfp4_decoded, mxfp4_row, open_mxfp4, block_mxfp4_avx2, mxfp4_strip)

/* Twice these numbers, which are whole, and 12 more, so that none is below 0. */
enum { E2M1_ABOVE = 12 };

FOR_AVX2 ALONE void e2m1_fixed(__m256i words, __m256i *w)
{
    const __m256i table = _mm256_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0, /* and again */
                                           12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
    const __m256i nibble = _mm256_set1_epi8(15), even = _mm256_and_si256(words, nibble);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi16(words, 4), nibble);
    from_bytes_fixed(_mm256_shuffle_epi8(table, even), _mm256_shuffle_epi8(table, odd), w);
}

/* Half of each. */
FOR_AVX2 ALONE void fill_mxfp4_avx2(const struct matrix *m, int64_t o, const struct words_row *row)
{
    const int64_t groups = m->columns / GROUP, eights = groups / FIXED_LANES * FIXED_LANES;
    const uint8_t *scales = (const uint8_t *)m->part[1] + o * groups;
    for (int64_t g = 0; g < eights; g += FIXED_LANES) {
        const __m256i bits = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(scales + g)));
        const __m256i none = _mm256_cmpeq_epi32(bits, _mm256_set1_epi32(255)), first = _mm256_cmpeq_epi32(bits, _mm256_setzero_si256());
        __m256i found = _mm256_blendv_epi8(_mm256_slli_epi32(bits, 23), _mm256_set1_epi32(0x00400000), first);
        found = _mm256_blendv_epi8(found, _mm256_set1_epi32(0x7fc00000), none);
        _mm256_storeu_ps(row->scales + g, _mm256_mul_ps(_mm256_castsi256_ps(found), _mm256_set1_ps(0.5f)));
    }
    for (int64_t g = eights; g < groups; g++)
        row->scales[g] = 0.5f * from_e8m0(scales[g]);
}

static STRIPS_AT(mxfp4_others_f16, mxfp4_strip, LEVEL_AVX2, NUMBER_F16)
FIXED_WORDS(mxfp4, e2m1_fixed, fill_mxfp4_avx2, -E2M1_ABOVE, GROUP)

struct nvfp4_row {
    const uint8_t *codes, *scales;
    float factor;
    int divides;
};

FOR_AVX2 ALONE void open_nvfp4(struct nvfp4_row *row, const struct matrix *m, int64_t o)
{
    row->codes = (const uint8_t *)m->part[0] + o * m->columns / 2;
    row->scales = (const uint8_t *)m->part[1] + o * m->columns / SMALL_GROUP;
    row->factor = ((const float *)m->part[2])[o / m->group];
    row->divides = m->part[3] != NULL;
}

/* E4M3's exponent and mantissa as F16's are 2 ** -8 of what they are. */
FOR_AVX512 ALONE __m512 from_e4m3_16(__m128i bits)
{
    const __m256i wide = _mm256_cvtepi8_epi16(bits), size = _mm256_set1_epi16(127);
    const __m512i none = _mm512_cvtepi16_epi32(_mm256_cmpeq_epi16(_mm256_and_si256(wide, size), size));
    const __m512 found = _mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16((short)0xbfff)));
    return _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(_mm512_mul_ps(found, _mm512_set1_ps(256))), none));
}

FOR_AVX512 ALONE void block_nvfp4(struct nvfp4_row *row, int64_t column, __m512i *w, const int tiles, const int native, const int64_t far)
{
    const __m512 numbers = _mm512_loadu_ps(e2m1);
    const int64_t odd = 0x0010001000100010;
    const __m512i nibble = _mm512_set1_epi16(15), upper = _mm512_setr_epi64(0, odd, 0, odd, 0, odd, 0, odd);
    const uint8_t *codes = row->codes + column / 2;
    float scales[16];
    __m512 found = from_e4m3_16(_mm_maskz_loadu_epi8((__mmask16)((1 << 2 * tiles) - 1), row->scales + column / SMALL_GROUP));
    found = row->divides ? _mm512_div_ps(found, _mm512_set1_ps(row->factor)) : _mm512_mul_ps(found, _mm512_set1_ps(row->factor));
    _mm512_storeu_ps(scales, found);
    FROM_MEMORY(scales, 16);
    fetch(codes, far / 2, 1);
    for (int t = 0; t < tiles; t++) {
        const __m512 first = _mm512_mul_ps(numbers, _mm512_set1_ps(scales[2 * t]));
        const __m512 second = _mm512_mul_ps(numbers, _mm512_set1_ps(scales[2 * t + 1]));
        /* sixteen columns have the table's first half, the next ones its second */
        const __m512i places = _mm512_ternarylogic_epi64(nibbles_by_turns(codes + 16 * t, native), nibble, upper, 0xea);
        w[t] = _mm512_permutexvar_epi16(places, both_narrowed(second, first, native));
    }
}

FOR_AVX512 ALONE void fill_nvfp4(const struct matrix *m, int64_t o, const struct words_row *row)
{
    const int64_t groups = m->columns / SMALL_GROUP;
    const uint8_t *scales = (const uint8_t *)m->part[1] + o * groups;
    const __m512 factor = _mm512_set1_ps(((const float *)m->part[2])[o / m->group]);
    for (int64_t g = 0; g < groups; g += 16) {
        const __mmask16 some = (__mmask16)(groups - g < 16 ? (1 << (groups - g)) - 1 : -1);
        const __m512 found = from_e4m3_16(_mm_maskz_loadu_epi8(some, scales + g));
        _mm512_storeu_ps(row->scales + g, m->part[3] ? _mm512_div_ps(found, factor) : _mm512_mul_ps(found, factor));
    }
}

WORDS(nvfp4, nvfp4_row, open_nvfp4, block_nvfp4, nvfp4_strip, fill_nvfp4, e2m1_table(), e2m1_twice(), 0.5f, 0,
      SMALL_GROUP)

FOR_AVX2 ALONE __m256 nvfp4_scale_avx2(const struct nvfp4_row *row, uint8_t bits)
{
    const float size = (bits & 127) == 127 ? as_float(0x7fc00000u) : _cvtsh_ss((uint16_t)((bits & 127) << 7)) * 256;
    const float value = bits & 128 ? -size : size;
    return _mm256_set1_ps(row->divides ? value / row->factor : value * row->factor);
}

FOR_AVX2 ALONE void block_nvfp4_avx2(struct nvfp4_row *row, int64_t column, __m256 *w)
{
    const uint8_t *scales = row->scales + column / SMALL_GROUP;
    const __m256 by[2] = {nvfp4_scale_avx2(row, scales[0]), nvfp4_scale_avx2(row, scales[1])};
    e2m1_avx2(row->codes + column / 2, w);
    for (int i = 0; i < 4; i++)
        w[i] = rounded_avx2(_mm256_mul_ps(w[i], by[i / 2]));
}

BLOCKS_AVX2(nvfp4_decoded, nvfp4_row, open_nvfp4, block_nvfp4_avx2, nvfp4_strip)

/* Half of each. */
FOR_AVX2 ALONE void fill_nvfp4_avx2(const struct matrix *m, int64_t o, const struct words_row *row)
{
    const int64_t groups = m->columns / SMALL_GROUP, eights = groups / FIXED_LANES * FIXED_LANES;
    const uint8_t *scales = (const uint8_t *)m->part[1] + o * groups;
    const float factor = ((const float *)m->part[2])[o / m->group];
    const __m256 by = _mm256_set1_ps(factor);
    for (int64_t g = 0; g < eights; g += FIXED_LANES) {
        const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)(scales + g))), size = _mm_set1_epi16(127);
        const __m256i none = _mm256_cvtepi16_epi32(_mm_cmpeq_epi16(_mm_and_si128(wide, size), size));
        __m256 found = _mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16((short)0xbfff)));
        found = _mm256_or_ps(_mm256_mul_ps(found, _mm256_set1_ps(256)), _mm256_castsi256_ps(none));
        found = m->part[3] ? _mm256_div_ps(found, by) : _mm256_mul_ps(found, by);
        _mm256_storeu_ps(row->scales + g, _mm256_mul_ps(found, _mm256_set1_ps(0.5f)));
    }
    for (int64_t g = eights; g < groups; g++)
        row->scales[g] = 0.5f * nvfp4_scale(scales[g], factor, m->part[3] != NULL);
}

static STRIPS_AT(nvfp4_others_f16, nvfp4_strip, LEVEL_AVX2, NUMBER_F16)
FIXED_WORDS(nvfp4, e2m1_fixed, fill_nvfp4_avx2, -E2M1_ABOVE, SMALL_GROUP)
#endif
