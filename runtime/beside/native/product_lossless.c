/* BF16 in 12 bits: the sums are those of the BF16 product to the bit.
 *
 * part[0] low bytes [rows][columns]; part[1] codes [rows][columns / 128][64]; part[2] exponents [16]; part[3] places of the escapes
 * [group], in ascending order; part[4] their numbers [group], BF16. columns are a multiple of 128. */
#include "product_blocks.h"

/* The first escape at or behind `place`. */
static inline int64_t escape_from(const struct matrix *m, int64_t place)
{
    const int32_t *at = m->part[3];
    int64_t low = 0, high = m->group;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (at[middle] < place)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static void lossless_rows(const struct matrix *m, int set, int number, int64_t first, int64_t last, uint16_t *out)
{
    (void)number;
    const int32_t *at = m->part[3];
    const uint16_t *values = m->part[4];
    const int64_t begin = first * m->columns, end = last * m->columns;
    lossless_strip(set, m->part[0], m->part[1], m->part[2], out, first, last, m->columns);
    for (int64_t n = escape_from(m, begin); n < m->group && at[n] < end; n++)
        if (at[n] >= begin) /* out of order only where memory holds anything, in a rehearsal */
            out[at[n] - begin] = values[n];
}

STRIPS_AT(lossless_portable, lossless_rows, LEVEL_PORTABLE, NUMBER_BF16)
STRIPS_AT(lossless_avx2, lossless_rows, LEVEL_AVX2, NUMBER_BF16)

#ifdef HAS_X86
struct lossless_row {
    const uint8_t *low, *codes;
    const int32_t *next, *none; /* of the escapes; behind the last */
    const uint16_t *value;
    int64_t begin;
    __m512i exponents;
};

FOR_AVX512 ALONE void open_lossless(struct lossless_row *row, const struct matrix *m, int64_t o)
{
    int64_t first = escape_from(m, o * m->columns);
    row->begin = o * m->columns;
    row->low = (const uint8_t *)m->part[0] + row->begin;
    row->codes = (const uint8_t *)m->part[1] + row->begin / 2;
    row->next = (const int32_t *)m->part[3] + first;
    row->none = (const int32_t *)m->part[3] + m->group;
    row->value = (const uint16_t *)m->part[4] + first;
    __m256i words = _mm256_cvtepu8_epi16(_mm_loadu_si128(m->part[2]));
    row->exponents = _mm512_broadcast_i64x4(_mm256_slli_epi16(words, 7));
}

FOR_AVX512 static __attribute__((noinline)) void put_escapes(struct lossless_row *row, int64_t place, __m512i *w)
{
    uint16_t numbers[BLOCK] __attribute__((aligned(64)));
    for (int t = 0; t < 4; t++)
        _mm512_store_si512(numbers + TILE * t, w[t]);
    for (; row->next < row->none && *row->next < place + BLOCK; row->next++, row->value++)
        if (*row->next >= place)
            numbers[*row->next - place] = *row->value;
    for (int t = 0; t < 4; t++)
        w[t] = _mm512_load_si512(numbers + TILE * t);
}

FOR_AVX512 ALONE void block_lossless(struct lossless_row *row, int64_t column, __m512i *w, const int tiles, const int native,
                                     const int64_t far)
{
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    const uint8_t *low = row->low + column, *codes = row->codes + column / 2;
    (void)tiles, (void)native; /* always 4; nothing is rounded */
    fetch(low, far, 2);
    fetch(codes, far / 2, 1);
    for (int half = 0; half < 2; half++) {
        /* a number's code in the lowest four bits of a word; the table has all 16 twice, so a fifth bit says nothing */
        __m512i both = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(codes + 32 * half)));
        for (int upper = 0; upper < 2; upper++) {
            __m512i found = _mm512_permutexvar_epi16(upper ? _mm512_srli_epi16(both, 4) : both, row->exponents);
            /* sign-extended: the sign stands in the highest bit, the mantissa in the lowest seven */
            __m512i byte = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(low + 64 * upper + 32 * half)));
            w[2 * upper + half] = _mm512_ternarylogic_epi64(exponent, found, byte, 0xca);
        }
    }
    if (row->next < row->none && *row->next < row->begin + column + BLOCK)
        put_escapes(row, row->begin + column, w);
}

BLOCKS(lossless, FOUR_ROWS, lossless_row, open_lossless, block_lossless, lossless_rows)
#endif
