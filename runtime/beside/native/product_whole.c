/* Whole numbers of 4 and 8 bits in groups of columns: a weight is (number - zero point) * scale, rounded to the scale's type, then to BF16,
 * as decoding gives it. With few input rows INT4 is multiplied by words instead (product_words.h), and with AVX2 all are by whole numbers
 * (product_fixed.h): then weights are not rounded.
 *
 * INT4: part[0] words [rows][columns / 8], the lowest bits first. part[1] scales [rows][columns / group], BF16, or F16 where part[3] is not
 * NULL. part[2] NULL, or zero points in words [rows / 8][columns / group], packed along rows; without them 8 is zero.
 * INT8: signed bytes [rows][columns] and signed zero points [rows][columns / group], or NULL. UINT8: 128 is zero, or zero points in words
 * [rows / 4][columns / group]. group divides columns. */
#include "product_fixed.h"
#include "product_groups_f16.h"

enum { BY_COLUMNS = 0, SIGNED = 3, MIDDLE = 0, IN_WORDS = 1, BYTES = 3 }; /* of whole.c */

static void whole_of(const struct matrix *m, int set, int number, int64_t first, int64_t last, uint16_t *out, int64_t bits,
                     int64_t layout)
{
    int64_t zeros = m->part[2] == NULL ? MIDDLE : layout == SIGNED ? BYTES : IN_WORDS;
    whole_strip(set, m->part[0], m->part[1], m->part[2], out, first, last, m->rows, m->columns, m->columns / m->group, bits, layout, zeros,
                m->part[3] != NULL, number);
}

static void int4_strip(const struct matrix *m, int set, int number, int64_t first, int64_t last, uint16_t *out)
{
    whole_of(m, set, number, first, last, out, 4, BY_COLUMNS);
}

static void int8_strip(const struct matrix *m, int set, int number, int64_t first, int64_t last, uint16_t *out)
{
    whole_of(m, set, number, first, last, out, 8, SIGNED);
}

static void uint8_strip(const struct matrix *m, int set, int number, int64_t first, int64_t last, uint16_t *out)
{
    whole_of(m, set, number, first, last, out, 8, BY_COLUMNS);
}

STRIPS_AT(int4_portable, int4_strip, LEVEL_PORTABLE, NUMBER_BF16)
STRIPS_AT(int4_portable_f16, int4_strip, LEVEL_PORTABLE, NUMBER_F16)
STRIPS_AT(int8_portable, int8_strip, LEVEL_PORTABLE, NUMBER_BF16)
STRIPS_AT(int8_portable_f16, int8_strip, LEVEL_PORTABLE, NUMBER_F16)
STRIPS_AT(uint8_portable, uint8_strip, LEVEL_PORTABLE, NUMBER_BF16)
STRIPS_AT(uint8_portable_f16, uint8_strip, LEVEL_PORTABLE, NUMBER_F16)

#ifdef HAS_X86
/* A row; `left` columns have the scale and zero point that were given last. */
struct whole_place {
    const uint8_t *codes, *zeros;
    const uint16_t *scales;
    int64_t group, left, zero_step;
    int shift, halves; /* halves: scales are F16 */
};

/* With what came of the scale and zero point. */
struct whole_row {
    struct whole_place at;
    __m512i table;
    __m512 scale, zero;
};

FOR_AVX2 ALONE void open_whole(struct whole_place *row, const struct matrix *m, int64_t o, const int bits, const int in_bytes)
{
    const int64_t groups = m->columns / m->group, each = 32 / bits;
    row->codes = (const uint8_t *)m->part[0] + o * m->columns * bits / 8;
    row->scales = (const uint16_t *)m->part[1] + o * groups;
    row->group = m->group;
    row->halves = m->part[3] != NULL;
    row->left = 0;
    row->zeros = m->part[2];
    row->zero_step = in_bytes ? 1 : 4;
    row->shift = 0;
    if (row->zeros && in_bytes)
        row->zeros += o * groups;
    else if (row->zeros) {
        row->shift = (int)(o % each) * bits;
        row->zeros += o / each * groups * 4 + row->shift / 8;
        row->shift %= 8;
    }
}

/* Goes on to the next group where one ends. Returns 1 if it did. */
FOR_AVX2 ALONE int next_group(struct whole_place *row, float *scale, float *zero, const int bits, const int middle)
{
    row->left -= TILE;
    if (row->left >= 0)
        return 0;
    row->left = row->group - TILE;
    *scale = row->halves ? _cvtsh_ss(*row->scales) : from_bf16(*row->scales);
    row->scales++;
    *zero = (float)middle;
    if (row->zeros) {
        *zero = bits == 4 ? (float)(*row->zeros >> row->shift & 15) : middle ? (float)*row->zeros : (float)*(const int8_t *)row->zeros;
        row->zeros += row->zero_step;
    }
    return 1;
}

FOR_AVX512 ALONE void open_wide(struct whole_row *row, const struct matrix *m, int64_t o, const int bits, const int in_bytes)
{
    open_whole(&row->at, m, o, bits, in_bytes);
    row->table = _mm512_setzero_si512();
    row->scale = row->zero = _mm512_setzero_ps();
}

/* Rounded to F16 where scales are. */
FOR_AVX512 ALONE __m512 as_scaled(const struct whole_row *row, __m512 weights)
{
    return row->at.halves ? _mm512_cvtph_ps(_mm512_cvtps_ph(weights, _MM_FROUND_TO_NEAREST_INT)) : weights;
}

FOR_AVX512 ALONE void open_int4(struct whole_row *row, const struct matrix *m, int64_t o)
{
    open_wide(row, m, o, 4, 0);
}

/* Goes on to the next group where one ends: its sixteen numbers as BF16, twice. */
FOR_AVX512 ALONE void next_table(struct whole_row *row, const int native)
{
    const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    float scale, zero;
    if (next_group(&row->at, &scale, &zero, 4, 8)) {
        __m512 weights = _mm512_mul_ps(_mm512_sub_ps(numbers, _mm512_set1_ps(zero)), _mm512_set1_ps(scale));
        row->table = table_of_16(as_scaled(row, weights), native);
    }
}

FOR_AVX512 ALONE void block_int4(struct whole_row *row, int64_t column, __m512i *w, const int tiles, const int native, const int64_t far)
{
    const uint8_t *codes = row->at.codes + column / 2;
    fetch(codes, far / 2, 1);
    if (!row->at.left && row->at.group >= BLOCK)
        next_table(row, native), row->at.left += TILE;
    if (__builtin_expect(row->at.left >= BLOCK && tiles == 4, 1)) { /* one table for all */
        const __m512i table = row->table;
        row->at.left -= BLOCK;
        _Pragma("GCC unroll 4") for (int t = 0; t < 4; t++) w[t] =
            _mm512_permutexvar_epi16(nibbles_by_turns(codes + 16 * t, native), table);
        return;
    }
    for (int t = 0; t < tiles; t++) {
        next_table(row, native);
        w[t] = _mm512_permutexvar_epi16(nibbles_by_turns(codes + 16 * t, native), row->table);
    }
}

/* As if 8 were the zero point. */
FOR_AVX512 ALONE __m512i int4_table(void)
{
    const __m512 numbers = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    return table_of_16(numbers, 0);
}

FOR_AVX512 ALONE __m512i int4_numbers(void)
{
    return _mm512_broadcast_i64x4(_mm256_setr_epi16(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7));
}

FOR_AVX512 ALONE void fill_int4(const struct matrix *m, int64_t o, const struct words_row *row)
{
    const int64_t groups = m->columns / m->group;
    const uint16_t *scales = (const uint16_t *)m->part[1] + o * groups;
    const int32_t *zeros = m->part[2] ? (const int32_t *)m->part[2] + o / 8 * groups : NULL;
    const __m128i place = _mm_cvtsi32_si128((int)(o % 8) * 4);
    for (int64_t g = 0; g < groups; g += 16) {
        const __mmask16 some = (__mmask16)(groups - g < 16 ? (1 << (groups - g)) - 1 : -1);
        const __m256i bits = _mm256_maskz_loadu_epi16(some, scales + g);
        const __m512i wide = _mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
        _mm512_storeu_ps(row->scales + g, m->part[3] ? _mm512_cvtph_ps(bits) : _mm512_castsi512_ps(wide));
        if (zeros) {
            const __m512i words = _mm512_maskz_loadu_epi32(some, zeros + g);
            const __m512i zero = _mm512_and_si512(_mm512_srl_epi32(words, place), _mm512_set1_epi32(15));
            _mm512_storeu_ps(row->shifts + g, _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_set1_epi32(8), zero)));
        }
    }
    spread_groups(row->scales, m->columns, m->group);
    if (zeros)
        spread_groups(row->shifts, m->columns, m->group);
}

FOR_AVX512 ALONE void block_bytes(struct whole_row *row, int64_t column, __m512i *w, const int tiles, const int middle, const int native,
                                  const int64_t far)
{
    const uint8_t *codes = row->at.codes + column;
    fetch(codes, far, 2);
    for (int t = 0; t < tiles; t++) {
        float scale, zero;
        if (next_group(&row->at, &scale, &zero, 8, middle)) {
            row->scale = _mm512_set1_ps(scale);
            row->zero = _mm512_set1_ps(zero);
        }
        __m128i low = _mm_loadu_si128((const __m128i *)(codes + 32 * t)), high = _mm_loadu_si128((const __m128i *)(codes + 32 * t + 16));
        __m512 a = _mm512_cvtepi32_ps(middle ? _mm512_cvtepu8_epi32(low) : _mm512_cvtepi8_epi32(low));
        __m512 b = _mm512_cvtepi32_ps(middle ? _mm512_cvtepu8_epi32(high) : _mm512_cvtepi8_epi32(high));
        a = _mm512_mul_ps(_mm512_sub_ps(a, row->zero), row->scale);
        b = _mm512_mul_ps(_mm512_sub_ps(b, row->zero), row->scale);
        w[t] = both_narrowed(as_scaled(row, b), as_scaled(row, a), native);
    }
}

FOR_AVX512 ALONE void open_int8(struct whole_row *row, const struct matrix *m, int64_t o)
{
    open_wide(row, m, o, 8, 1);
}

FOR_AVX512 ALONE void open_uint8(struct whole_row *row, const struct matrix *m, int64_t o)
{
    open_wide(row, m, o, 8, 0);
}

FOR_AVX512 ALONE void block_int8(struct whole_row *row, int64_t column, __m512i *w, const int tiles, const int native, const int64_t far)
{
    block_bytes(row, column, w, tiles, 0, native, far);
}

FOR_AVX512 ALONE void block_uint8(struct whole_row *row, int64_t column, __m512i *w, const int tiles, const int native, const int64_t far)
{
    block_bytes(row, column, w, tiles, 128, native, far);
}

struct int4_row_avx2 {
    struct whole_place at;
    struct table_avx2 table;
};

FOR_AVX2 ALONE void open_int4_avx2(struct int4_row_avx2 *row, const struct matrix *m, int64_t o)
{
    open_whole(&row->at, m, o, 4, 0);
    row->table.lower = row->table.upper = _mm256_setzero_si256();
}

FOR_AVX2 ALONE __m256 as_scaled_avx2(const struct whole_place *row, __m256 weights)
{
    return row->halves ? _mm256_cvtph_ps(_mm256_cvtps_ph(weights, _MM_FROUND_TO_NEAREST_INT)) : weights;
}

FOR_AVX2 ALONE void block_int4_avx2(struct int4_row_avx2 *row, int64_t column, __m256 *w)
{
    const uint8_t *codes = row->at.codes + column / 2;
    float scale, zero;
    if (next_group(&row->at, &scale, &zero, 4, 8)) {
        const __m256 by = _mm256_set1_ps(scale), less = _mm256_set1_ps(zero);
        __m256 first = _mm256_mul_ps(_mm256_sub_ps(_mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7), less), by);
        __m256 second = _mm256_mul_ps(_mm256_sub_ps(_mm256_setr_ps(8, 9, 10, 11, 12, 13, 14, 15), less), by);
        row->table = table_of(as_scaled_avx2(&row->at, first), as_scaled_avx2(&row->at, second));
    }
    fetch(codes, AHEAD, 1);
    from_table(neighbours_in_order(codes), &row->table, w);
}

struct bytes_row_avx2 {
    struct whole_place at;
    __m256 scale, zero;
};

FOR_AVX2 ALONE void block_bytes_avx2(struct bytes_row_avx2 *row, int64_t column, __m256 *w, const int middle)
{
    const __m256i codes = _mm256_loadu_si256((const __m256i *)(row->at.codes + column));
    float scale, zero;
    fetch(row->at.codes + column, AHEAD, 1);
    if (next_group(&row->at, &scale, &zero, 8, middle)) {
        row->scale = _mm256_set1_ps(scale);
        row->zero = _mm256_set1_ps(zero - (float)middle);
    }
    /* from an unsigned byte 128 is taken, which makes it a signed one, and from its zero point, too */
    from_bytes(in_order(middle ? _mm256_xor_si256(codes, _mm256_set1_epi8((char)128)) : codes), w);
    for (int i = 0; i < 4; i++)
        w[i] = rounded_avx2(as_scaled_avx2(&row->at, _mm256_mul_ps(_mm256_sub_ps(w[i], row->zero), row->scale)));
}

FOR_AVX2 ALONE void open_int8_avx2(struct bytes_row_avx2 *row, const struct matrix *m, int64_t o)
{
    open_whole(&row->at, m, o, 8, 1);
    row->scale = row->zero = _mm256_setzero_ps();
}

FOR_AVX2 ALONE void open_uint8_avx2(struct bytes_row_avx2 *row, const struct matrix *m, int64_t o)
{
    open_whole(&row->at, m, o, 8, 0);
    row->scale = row->zero = _mm256_setzero_ps();
}

FOR_AVX2 ALONE void block_int8_avx2(struct bytes_row_avx2 *row, int64_t column, __m256 *w)
{
    block_bytes_avx2(row, column, w, 0);
}

FOR_AVX2 ALONE void block_uint8_avx2(struct bytes_row_avx2 *row, int64_t column, __m256 *w)
{
    block_bytes_avx2(row, column, w, 128);
}

static STRIPS_AT(int4_strips_f16, int4_strip, LEVEL_AVX2, NUMBER_F16)
static STRIPS_AT(int8_strips_f16, int8_strip, LEVEL_AVX2, NUMBER_F16)
static STRIPS_AT(uint8_strips_f16, uint8_strip, LEVEL_AVX2, NUMBER_F16)
GROUPS_F16_AVX2(int4_others_f16, nibbles_f16, 4, 0, 8, int4_strips_f16)
GROUPS_F16_AVX2(int8_others_f16, signed_f16, 8, 1, 0, int8_strips_f16)
GROUPS_F16_AVX2(uint8_others_f16, unsigned_f16, 8, 0, 128, uint8_strips_f16)
GROUPS_F16_512(int4_floats_f16, nibbles_f16_512, 4, 0, 8, int4_strips_f16)
GROUPS_F16_512(int8_avx512_f16, signed_f16_512, 8, 1, 0, int8_strips_f16)
GROUPS_F16_512(uint8_avx512_f16, unsigned_f16_512, 8, 0, 128, uint8_strips_f16)

/* Eight at once; the last ones one by one. */
FOR_AVX2 ALONE void fill_int4_avx2(const struct matrix *m, int64_t o, const struct words_row *row)
{
    const int64_t groups = m->columns / m->group, eights = groups / FIXED_LANES * FIXED_LANES;
    const uint16_t *scales = (const uint16_t *)m->part[1] + o * groups;
    const int32_t *zeros = m->part[2] ? (const int32_t *)m->part[2] + o / 8 * groups : NULL;
    const int place = (int)(o % 8) * 4;
    for (int64_t g = 0; g < eights; g += FIXED_LANES) {
        const __m128i bits = _mm_loadu_si128((const __m128i *)(scales + g));
        const __m256i wide = _mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16);
        _mm256_storeu_ps(row->scales + g, m->part[3] ? _mm256_cvtph_ps(bits) : _mm256_castsi256_ps(wide));
        if (zeros) {
            const __m256i words = _mm256_srl_epi32(_mm256_loadu_si256((const __m256i *)(zeros + g)), _mm_cvtsi32_si128(place));
            const __m256i zero = _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_and_si256(words, _mm256_set1_epi32(15)));
            _mm256_storeu_ps(row->shifts + g, _mm256_cvtepi32_ps(zero));
        }
    }
    for (int64_t g = eights; g < groups; g++) {
        row->scales[g] = m->part[3] ? _cvtsh_ss(scales[g]) : from_bf16(scales[g]);
        if (zeros)
            row->shifts[g] = -(float)((uint32_t)zeros[g] >> place & 15);
    }
    spread_groups(row->scales, m->columns, m->group);
    if (zeros)
        spread_groups(row->shifts, m->columns, m->group);
}

BLOCKS_AVX2(int4_decoded, int4_row_avx2, open_int4_avx2, block_int4_avx2, int4_strip)
FIXED_WORDS(int4, nibbles_fixed, fill_int4_avx2, -8, m->group)
BLOCKS_AVX2(int8_decoded, bytes_row_avx2, open_int8_avx2, block_int8_avx2, int8_strip)
BLOCKS_AVX2(uint8_decoded, bytes_row_avx2, open_uint8_avx2, block_uint8_avx2, uint8_strip)
FIXED_BYTES(int8, signed_fixed, 1, 0)
FIXED_BYTES(uint8, unsigned_fixed, 0, 128)
WORDS(int4, whole_row, open_int4, block_int4, int4_strip, fill_int4, int4_table(), int4_numbers(), 1.0f,
      m->part[2] != NULL, m->group)
BLOCKS(int8, ONE_ROW, whole_row, open_int8, block_int8, int8_strip)
BLOCKS(uint8, ONE_ROW, whole_row, open_uint8, block_uint8, uint8_strip)
FEW_BYTES(int8)
FEW_BYTES(uint8)

/* One F16 input by words, more in F32: a number is decoded once for all of them, and has one sum where words have two. */
void int4_shared_f16(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y, int64_t stride)
{
    (in->run ? int4_avx512_f16 : int4_floats_f16)(m, first, last, in, y, stride);
}

void int4_shared_dot_f16(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y, int64_t stride)
{
    (in->run ? int4_dot_f16 : int4_floats_f16)(m, first, last, in, y, stride);
}
#endif
