/* FP8 E4M3 times F32 scales.
 *
 * part[0] numbers [rows][columns]; part[1] scales. FP8: group x group of them share a scale, [ceil(rows / group)][ceil(columns / group)].
 * FP8-row: a scale for each row; group is 1, or 0 where all have the same. */
#include "product_blocks.h"

static void fp8_rows_of(const struct matrix *m, int set, int64_t first, int64_t last, uint16_t *out)
{
    fp8_strip(set, m->part[0], m->part[1], out, first, last, m->columns, m->group, m->group);
}

static void fp8_row_strip(const struct matrix *m, int set, int64_t first, int64_t last, uint16_t *out)
{
    fp8_strip(set, m->part[0], m->part[1], out, first, last, m->columns, m->group ? 1 : m->rows, m->columns);
}

STRIPS(fp8, fp8_rows_of)
STRIPS(fp8_row, fp8_row_strip)

#ifdef HAS_X86
struct fp8_row {
    const uint8_t *numbers;
    const float *scales;
    int64_t wide, left;
    __m512 scale;
};

FOR_AVX512 ALONE void open_fp8(struct fp8_row *row, const struct matrix *m, int64_t o)
{
    row->numbers = (const uint8_t *)m->part[0] + o * m->columns;
    row->scales = (const float *)m->part[1] + o / m->group * ((m->columns + m->group - 1) / m->group);
    row->wide = m->group;
    row->left = 0;
    row->scale = _mm512_setzero_ps();
}

FOR_AVX512 ALONE void open_fp8_row(struct fp8_row *row, const struct matrix *m, int64_t o)
{
    row->numbers = (const uint8_t *)m->part[0] + o * m->columns;
    row->scales = (const float *)m->part[1] + (m->group ? o : 0);
    row->wide = m->columns;
    row->left = 0;
    row->scale = _mm512_setzero_ps();
}

/* 16 words of numbers, sign-extended, as F16 of 2 ** -8 of what they are, in F32. */
FOR_AVX512 ALONE __m512 from_words(__m256i words, __m512 scale)
{
    __m256i shifted = _mm256_slli_epi16(words, 7); /* exponent and mantissa at their places, and above them copies of the sign */
    __m256i halves = _mm256_and_si256(shifted, _mm256_set1_epi16((short)0xbfff));
    __mmask16 wrong = _mm256_cmpeq_epi16_mask(_mm256_and_si256(words, _mm256_set1_epi16(127)), _mm256_set1_epi16(127));
    __m512 value = _mm512_mul_ps(_mm512_cvtph_ps(halves), scale);
    return _mm512_mask_mov_ps(value, wrong, _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000)));
}

FOR_AVX512 ALONE void block_fp8(struct fp8_row *row, int64_t column, __m512i *w, const int tiles, const int native)
{
    const uint8_t *numbers = row->numbers + column;
    _mm_prefetch((const char *)(numbers + 1024), _MM_HINT_T0);
    _mm_prefetch((const char *)(numbers + 1088), _MM_HINT_T0);
    for (int t = 0; t < tiles; t++) {
        if (row->left <= 0) {
            row->scale = _mm512_set1_ps(*row->scales++ * 256);
            row->left = row->wide;
        }
        row->left -= TILE;
        __m256i low = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(numbers + 32 * t)));
        __m256i high = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(numbers + 32 * t + 16)));
        w[t] = both_narrowed(from_words(high, row->scale), from_words(low, row->scale), native);
    }
}

BLOCKS(fp8, fp8_row, open_fp8, block_fp8, fp8_rows_of)
BLOCKS(fp8_row, fp8_row, open_fp8_row, block_fp8, fp8_row_strip)
#endif
