/* FP8 E4M3 times F32 scales.
 *
 * part[0] numbers [rows][columns]; part[1] scales. FP8: group x group of them share a scale, [ceil(rows / group)][ceil(columns / group)].
 * FP8-row: a scale for each row; group is 1, or 0 where all have the same. With AVX512 up to 4 input rows, of F16 any, are multiplied by
 * numbers in F32, and sums by scales: then no weight is rounded. */
#include "product_blocks_avx2.h"
#include "product_words.h"

static void fp8_rows_of(const struct matrix *m, int set, int number, int64_t first, int64_t last, uint16_t *out)
{
    fp8_strip(set, m->part[0], m->part[1], out, first, last, m->columns, m->group, m->group, number);
}

static void fp8_row_strip(const struct matrix *m, int set, int number, int64_t first, int64_t last, uint16_t *out)
{
    fp8_strip(set, m->part[0], m->part[1], out, first, last, m->columns, m->group ? 1 : m->rows, m->columns,
              number);
}

STRIPS(fp8, fp8_rows_of)
STRIPS(fp8_row, fp8_row_strip)

#ifdef HAS_X86
/* A row; `left` columns have the scale that was given last. */
struct fp8_place {
    const uint8_t *numbers;
    const float *scales;
    int64_t wide, left;
};

struct fp8_row {
    struct fp8_place at;
    __m512 scale;
};

FOR_AVX2 ALONE struct fp8_place fp8_place_of(const struct matrix *m, int64_t o)
{
    const float *scales = (const float *)m->part[1] + o / m->group * ((m->columns + m->group - 1) / m->group);
    return (struct fp8_place){(const uint8_t *)m->part[0] + o * m->columns, scales, m->group, 0};
}

FOR_AVX2 ALONE struct fp8_place fp8_row_place_of(const struct matrix *m, int64_t o)
{
    return (struct fp8_place){(const uint8_t *)m->part[0] + o * m->columns, (const float *)m->part[1] + (m->group ? o : 0), m->columns, 0};
}

/* Goes on to the next scale where one ends; `scale` gets 2 ** 8 of it. Returns 1 if it did. */
FOR_AVX2 ALONE int next_fp8_scale(struct fp8_place *row, float *scale)
{
    const int ended = row->left <= 0;
    if (ended) {
        *scale = *row->scales++ * 256;
        row->left = row->wide;
    }
    row->left -= TILE;
    return ended;
}

FOR_AVX512 ALONE void open_fp8(struct fp8_row *row, const struct matrix *m, int64_t o)
{
    row->at = fp8_place_of(m, o);
    row->scale = _mm512_setzero_ps();
}

FOR_AVX512 ALONE void open_fp8_row(struct fp8_row *row, const struct matrix *m, int64_t o)
{
    row->at = fp8_row_place_of(m, o);
    row->scale = _mm512_setzero_ps();
}

/* 16 words of numbers, sign-extended, as F16 of 2 ** -8 of what they are, in F32. */
FOR_AVX512 ALONE __m512 from_words(__m256i words, __m512 scale)
{
    __m256i shifted = _mm256_slli_epi16(words, 7); /* exponent and mantissa at their places, and above them copies of the sign */
    return _mm512_mul_ps(_mm512_cvtph_ps(_mm256_and_si256(shifted, _mm256_set1_epi16((short)0xbfff))), scale);
}

/* Where all but the sign are ones, which F16 takes for a number. */
FOR_AVX512 ALONE __mmask64 none_of(const uint8_t *numbers, const int tiles)
{
    const __m512i bytes = _mm512_maskz_loadu_epi8(tiles > 1 ? ~(__mmask64)0 : 0xffffffffu, numbers);
    return _mm512_cmpeq_epi8_mask(_mm512_or_si512(bytes, _mm512_set1_epi8((char)128)), _mm512_set1_epi8(-1));
}

FOR_AVX512 static __attribute__((noinline)) void put_none(__mmask64 none, __m512i *w)
{
    for (int half = 0; half < 2; half++)
        w[half] = _mm512_mask_mov_epi16(w[half], (__mmask32)(none >> 32 * half), _mm512_set1_epi16(0x7fc0));
}

FOR_AVX512 ALONE void block_fp8(struct fp8_row *row, int64_t column, __m512i *w, const int tiles, const int native, const int64_t far)
{
    const uint8_t *numbers = row->at.numbers + column;
    float scale;
    fetch(numbers, far, 2);
    for (int t = 0; t < tiles; t++) {
        if (next_fp8_scale(&row->at, &scale))
            row->scale = _mm512_set1_ps(scale);
        __m512i words = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(numbers + 32 * t)));
        const __m512 low = from_words(_mm512_castsi512_si256(words), row->scale);
        w[t] = both_narrowed(from_words(_mm512_extracti64x4_epi64(words, 1), row->scale), low, native);
    }
    for (int t = 0; t < tiles; t += 2) {
        const __mmask64 none = none_of(numbers + 32 * t, tiles - t);
        if (__builtin_expect(none != 0, 0))
            put_none(none, w + t);
    }
}

static STRIPS_AT(fp8_strips_f16, fp8_rows_of, LEVEL_AVX512, NUMBER_F16)
static STRIPS_AT(fp8_row_strips_f16, fp8_row_strip, LEVEL_AVX512, NUMBER_F16)
BLOCKS(fp8, ONE_ROW, fp8_row, open_fp8, block_fp8, fp8_rows_of)
BLOCKS(fp8_row, ONE_ROW, fp8_row, open_fp8_row, block_fp8, fp8_row_strip)

/* 16 words of numbers, sign-extended, as F32 of 2 ** -8 of what they are. */
FOR_AVX512 ALONE __m512 floats_of(__m256i words)
{
    return _mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(words, 7), _mm256_set1_epi16((short)0xbfff)));
}

/* Rows [o, o + high) by `wide` input rows. Returns 0 where a number is none, which F16 takes for one: then y means nothing. */
FOR_AVX512 ALONE int rows_by_floats(const struct matrix *m, int64_t o, const struct inputs *in, float *y, int64_t stride, const int high,
                                    const int wide, const int by_row)
{
    const __m256i size = _mm256_set1_epi8(127);
    const int64_t each = by_row ? m->columns : m->group;
    struct fp8_place rows[2];
    __m512 sums[2][MOST_WIDE];
    __m256i largest = _mm256_setzero_si256();
    for (int i = 0; i < high; i++) {
        rows[i] = by_row ? fp8_row_place_of(m, o + i) : fp8_place_of(m, o + i);
        _Pragma("GCC unroll 4") for (int r = 0; r < wide; r++) sums[i][r] = _mm512_setzero_ps();
    }
    for (int64_t begin = 0; begin < m->columns; begin += each) {
        const int64_t end = m->columns - begin < each ? m->columns : begin + each;
        __m512 found[2][MOST_WIDE];
        _Pragma("GCC unroll 2") for (int i = 0; i < high; i++)
            _Pragma("GCC unroll 4") for (int r = 0; r < wide; r++) found[i][r] = _mm512_setzero_ps();
        for (int64_t k = begin; k < end; k += TILE)
            _Pragma("GCC unroll 2") for (int i = 0; i < high; i++)
            {
                const __m256i bytes = _mm256_loadu_si256((const __m256i *)(rows[i].numbers + k));
                const __m512i words = _mm512_cvtepi8_epi16(bytes);
                const __m512 low = floats_of(_mm512_castsi512_si256(words)), upper = floats_of(_mm512_extracti64x4_epi64(words, 1));
                fetch(rows[i].numbers + k, AHEAD, 1);
                largest = _mm256_max_epu8(largest, _mm256_and_si256(bytes, size));
                _Pragma("GCC unroll 4") for (int r = 0; r < wide; r++)
                {
                    const float *x = in->x + r * in->columns + k;
                    found[i][r] = _mm512_fmadd_ps(low, _mm512_loadu_ps(x), found[i][r]);
                    found[i][r] = _mm512_fmadd_ps(upper, _mm512_loadu_ps(x + TILE / 2), found[i][r]);
                }
            }
        _Pragma("GCC unroll 2") for (int i = 0; i < high; i++)
        {
            const __m512 scale = _mm512_set1_ps(*rows[i].scales++ * 256);
            _Pragma("GCC unroll 4") for (int r = 0; r < wide; r++) sums[i][r] = _mm512_fmadd_ps(found[i][r], scale, sums[i][r]);
        }
    }
    _Pragma("GCC unroll 2") for (int i = 0; i < high; i++)
        _Pragma("GCC unroll 4") for (int r = 0; r < wide; r++) y[r * stride + o + i] = _mm512_reduce_add_ps(sums[i][r]);
    return !_mm256_movemask_epi8(_mm256_cmpeq_epi8(largest, size));
}

/* name: product_fn, of input rows some after the others; where a number is none, or columns end within 32, by `otherwise`. */
#define BY_FLOATS(name, by_row, otherwise)                                                                                           \
    FOR_AVX512 ALONE void name##_all(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y,         \
                                     int64_t stride, const int wide)                                                                 \
    {                                                                                                                                \
        for (int64_t o = first; o < last; o += 2) {                                                                                  \
            const int64_t end = last - o < 2 ? last : o + 2;                                                                         \
            const int fine = end - o == 2 ? rows_by_floats(m, o, in, y, stride, 2, wide, by_row)                                     \
                                          : rows_by_floats(m, o, in, y, stride, 1, wide, by_row);                                    \
            if (__builtin_expect(!fine, 0))                                                                                          \
                otherwise(m, o, end, in, y, stride);                                                                                 \
        }                                                                                                                            \
    }                                                                                                                                \
    FOR_AVX512 static void name##_wide(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y,       \
                                       int64_t stride)                                                                               \
    {                                                                                                                                \
        BY_ROWS(name##_all, 1, otherwise)                                                                                            \
    }                                                                                                                                \
    void name(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y, int64_t stride)                \
    {                                                                                                                                \
        if (m->columns % TILE || (!(by_row) && m->group % TILE))                                                                     \
            otherwise(m, first, last, in, y, stride);                                                                                \
        else                                                                                                                         \
            by_fours(m, first, last, in, y, stride, name##_wide);                                                                    \
    }

#define FEW(name, more)                                                                                                              \
    void name##_few_##more(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y, int64_t stride)   \
    {                                                                                                                                \
        (in->rows > MOST_WIDE ? name##_##more : name##_floats)(m, first, last, in, y, stride);                                       \
    }
#define FLOATS(name, by_row)                                                                                                         \
    BY_FLOATS(name##_floats, by_row, name##_avx512)                                                                                  \
    BY_FLOATS(name##_avx512_f16, by_row, name##_strips_f16)                                                                          \
    FEW(name, avx512)                                                                                                                \
    FEW(name, dot)                                                                                                                   \
    FEW(name, amx)
FLOATS(fp8, 0)
FLOATS(fp8_row, 1)

struct fp8_row_avx2 {
    struct fp8_place at;
    __m256 scale;
};

FOR_AVX2 ALONE void open_fp8_avx2(struct fp8_row_avx2 *row, const struct matrix *m, int64_t o)
{
    row->at = fp8_place_of(m, o);
    row->scale = _mm256_setzero_ps();
}

FOR_AVX2 ALONE void open_fp8_row_avx2(struct fp8_row_avx2 *row, const struct matrix *m, int64_t o)
{
    row->at = fp8_row_place_of(m, o);
    row->scale = _mm256_setzero_ps();
}

/* What is none among 16 numbers. */
FOR_AVX2 ALONE void keep_none(__m128i numbers, __m256 *w)
{
    const __m128i none = _mm_cmpeq_epi8(_mm_and_si128(numbers, _mm_set1_epi8(127)), _mm_set1_epi8(127));
    w[0] = _mm256_or_ps(w[0], _mm256_castsi256_ps(_mm256_cvtepi8_epi32(none)));
    w[1] = _mm256_or_ps(w[1], _mm256_castsi256_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(none, 8))));
}

FOR_AVX2 ALONE void block_fp8_avx2(struct fp8_row_avx2 *row, int64_t column, __m256 *w)
{
    const __m128i apart = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    const uint8_t *numbers = row->at.numbers + column;
    float scale;
    const __m256i size = _mm256_and_si256(_mm256_loadu_si256((const __m256i *)numbers), _mm256_set1_epi8(127));
    const int none = _mm256_movemask_epi8(_mm256_cmpeq_epi8(size, _mm256_set1_epi8(127)));
    fetch(numbers, AHEAD, 1);
    if (next_fp8_scale(&row->at, &scale))
        row->scale = _mm256_set1_ps(scale);
    for (int t = 0; t < 2; t++) {
        const __m128i bytes = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(numbers + 16 * t)), apart);
        /* as F16 of 2 ** -8 of what they are: exponent and mantissa at their places, without the copy of the sign above them */
        const __m256i words = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
        const __m256i halves = _mm256_and_si256(words, _mm256_set1_epi16((short)0xbfff));
        w[2 * t] = rounded_avx2(_mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), row->scale));
        w[2 * t + 1] = rounded_avx2(_mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)), row->scale));
        if (__builtin_expect(none, 0))
            keep_none(bytes, w + 2 * t);
    }
}

BLOCKS_AVX2(fp8, fp8_row_avx2, open_fp8_avx2, block_fp8_avx2, fp8_rows_of)
BLOCKS_AVX2(fp8_row, fp8_row_avx2, open_fp8_row_avx2, block_fp8_avx2, fp8_row_strip)
#endif
