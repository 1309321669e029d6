/* Products with numbers whose lowest 4 bits lie along rows, two a byte: up to 4 input rows, in AVX512.
 *
 * 64 bytes are 32 words of 16 bits, and have 128 columns: of each 2 * run columns the first half in the lower halves of `run` bytes, the
 * others in the upper halves. A shift by 4 n leaves one number lowest in each word: 32 columns take a shift and one permutation to decode,
 * and no group a table. Inputs lie in the same order, struct inputs' words. Lanes of a sum then belong to one group each, and are
 * multiplied by its scale when 128 columns are summed:
 *
 *     y = sum over groups: scale * sum over the group's columns: number * x
 *
 * With runs of one, a lane of a sum has 8 neighbouring columns. With longer ones numbers of even n are of other columns than those of odd n.
 * Weights are not rounded to BF16, as decoding rounds them. A core of Zen 4 multiplies 26 GB/s of INT4 so from its own cache, where a table
 * for each group and codes cut from bytes gave 15 (docs/log.md, 2026-11-26). */
#ifndef PENSTOCK_PRODUCT_WORDS_H
#define PENSTOCK_PRODUCT_WORDS_H

#include "product_blocks.h"

#ifdef HAS_X86
/* A row of the matrix. scales: of its groups, or, where these are larger, of each WORDS_COLUMNS columns. shifts: what is added to all
 * numbers of a group. */
struct words_row {
    const uint8_t *codes;
    float *scales, *shifts;
};

/* Whether groups of columns end where lanes and sums do. */
ALONE int words_fit(int64_t columns, int64_t group)
{
    const int larger = group % WORDS_COLUMNS == 0 || (group == columns && group > WORDS_COLUMNS);
    return columns % TILE == 0 && (larger || (group % (2 * WORDS_LANE) == 0 && WORDS_COLUMNS % group == 0));
}

/* Of numbers of groups one for each sum of 128 columns, where a group is larger. From the last on, since they lie where they came from. */
ALONE void spread_groups(float *numbers, int64_t columns, int64_t group)
{
    for (int64_t b = (columns - 1) / WORDS_COLUMNS; group > WORDS_COLUMNS && b >= 0; b--)
        numbers[b] = numbers[b * WORDS_COLUMNS / group];
}

/* A factor for each lane. at: those of a sum's groups, with `lanes` lanes each. */
FOR_AVX512 ALONE __m512 by_lanes(const float *at, __m512i places, const int whole)
{
    return whole ? _mm512_set1_ps(*at) : _mm512_permutexvar_ps(places, _mm512_loadu_ps(at));
}

/* Rows of a matrix that stay in the caches for all rows of F16 inputs. */
enum { PIECE = 16 };

/* name, of F16 inputs: each row is two of BF16, whose products are summed. */
static inline void by_twos(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y, int64_t stride,
                           product_fn name)
{
    const int64_t all = (in->columns + WORDS_COLUMNS - 1) / WORDS_COLUMNS;
    float sums[MOST_WIDE * PIECE];
    for (int64_t o = first; o < last; o += PIECE) {
        const int64_t end = last - o < PIECE ? last : o + PIECE;
        for (int64_t from = 0; from < in->rows; from += MOST_WIDE / 2) {
            const int64_t rows = in->rows - from < MOST_WIDE / 2 ? in->rows - from : MOST_WIDE / 2;
            struct inputs twos = *in;
            twos.rows = 2 * rows;
            twos.words += 2 * from * all * WORDS_COLUMNS;
            twos.eights += 2 * from * all * (WORDS_COLUMNS / WORDS_LANE);
            name(m, o, end, &twos, sums - o, PIECE);
            for (int64_t r = 0; r < rows; r++)
                for (int64_t i = 0; i < end - o; i++)
                    y[(from + r) * stride + o + i] = sums[2 * r * PIECE + i] + sums[(2 * r + 1) * PIECE + i];
        }
    }
}

/* So many input rows as are multiplied at once by `all`, where it `fits`; others by `otherwise`. */
#define BY_ROWS(all, fits, otherwise)                                                                                                \
    switch ((fits) ? in->rows : 0) {                                                                                                 \
    case 1: all(m, first, last, in, y, stride, 1); break;                                                                            \
    case 2: all(m, first, last, in, y, stride, 2); break;                                                                            \
    case 3: all(m, first, last, in, y, stride, 3); break;                                                                            \
    case 4: all(m, first, last, in, y, stride, 4); break;                                                                            \
    default: otherwise(m, first, last, in, y, stride);                                                                               \
    }

/* name: products of so many input rows as are multiplied at once, by name_all, where it `fits`; others by strips. name_f16: of F16 inputs,
 * others by strips that `decode` makes. */
#define BY_WIDTH(name, fits, strips, decode)                                                                                         \
    FOR_AVX512 void name(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y, int64_t stride)     \
    {                                                                                                                                \
        BY_ROWS(name##_all, fits, strips)                                                                                            \
    }                                                                                                                                \
    static STRIPS_AT(name##_strips_f16, decode, LEVEL_AVX512, NUMBER_F16)                                                            \
    void name##_f16(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y, int64_t stride)          \
    {                                                                                                                                \
        if (fits)                                                                                                                    \
            by_twos(m, first, last, in, y, stride, name);                                                                            \
        else                                                                                                                         \
            name##_strips_f16(m, first, last, in, y, stride);                                                                        \
    }

/* What 128 numbers `w` of a row make of block `at` of the inputs, a sum of eight columns in each lane, added to what they begin with. */
FOR_AVX512 ALONE __m512 block_by_pairs(const struct inputs *in, int64_t at, const __m512i *w, __m512 begin, const int native)
{
    _Pragma("GCC unroll 4") for (int n = 0; n < 4; n++) begin = and_pairs(begin, w[n], in->words + at * WORDS_COLUMNS + TILE * n, native);
    return begin;
}

/* All rows of a matrix, by name_all.
 *
 *     numbers           sixteen, twice: a code's fifth bit is anything
 *     block, how        block_by_pairs, native; block_by_wholes, unit
 *     fill(m, o, row)   scales, and shifts where `shifted`, of row o
 *     shifted           whether numbers of `m` are shifted
 *     group             columns that have one scale */
#define WORDS_ROWS(name, numbers, block, how, fill, shifted, group)                                                                  \
    FOR_AVX512 ALONE void name##_row(const struct words_row *row, const struct inputs *in, int64_t columns, int lanes, float *y,     \
                                     int64_t stride, const int wide, const int whole, const int shift)                               \
    {                                                                                                                                \
        const int64_t blocks = columns / WORDS_COLUMNS, tail = columns % WORDS_COLUMNS, all = blocks + (tail > 0);                   \
        const int64_t step = 16 / lanes;                                                                                             \
        const __m512i known = numbers, lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);               \
        const __m512i places = _mm512_srl_epi32(lane, _mm_cvtsi32_si128(__builtin_ctz((unsigned)lanes)));                            \
        __m512 sums[MOST_WIDE];                                                                                                      \
        _Pragma("GCC unroll 4") for (int r = 0; r < wide; r++) sums[r] = _mm512_setzero_ps();                                        \
        for (int64_t b = 0; b < all; b++) {                                                                                          \
            const uint8_t *codes = row->codes + b * (WORDS_COLUMNS / 2);                                                             \
            const __m512i words = b < blocks ? _mm512_loadu_si512(codes)                                                             \
                                             : _mm512_maskz_loadu_epi8((__mmask64)-1 >> (WORDS_COLUMNS - tail) / 2, codes);          \
            const __m512 scales = by_lanes(row->scales + b * step, places, whole);                                                   \
            __m512i w[4];                                                                                                            \
            fetch(codes, AHEAD, 1);                                                                                                  \
            _Pragma("GCC unroll 4") for (int n = 0; n < 4; n++) w[n] =                                                               \
                _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4 * n), known);                                                    \
            _Pragma("GCC unroll 4") for (int r = 0; r < wide; r++)                                                                   \
            {                                                                                                                        \
                const int64_t at = r * all + b;                                                                                      \
                __m512 begin = _mm512_setzero_ps();                                                                                  \
                if (shift)                                                                                                           \
                    begin = _mm512_mul_ps(_mm512_load_ps(in->eights + at * (WORDS_COLUMNS / WORDS_LANE)),                            \
                                          by_lanes(row->shifts + b * step, places, whole));                                          \
                sums[r] = _mm512_fmadd_ps(block(in, at, w, begin, how), scales, sums[r]);                                            \
            }                                                                                                                        \
        }                                                                                                                            \
        _Pragma("GCC unroll 4") for (int r = 0; r < wide; r++) y[r * stride] = _mm512_reduce_add_ps(sums[r]);                        \
    }                                                                                                                                \
    FOR_AVX512 ALONE void name##_all(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y,         \
                                     int64_t stride, const int wide)                                                                 \
    {                                                                                                                                \
        const int64_t columns = m->columns, each = (int64_t)(group) < WORDS_COLUMNS ? (group) : WORDS_COLUMNS;                       \
        const int lanes = (int)each / WORDS_LANE;                                                                                    \
        float scales[columns / each + 32], shifts[columns / each + 32];                                                              \
        memset(scales, 0, sizeof scales);                                                                                            \
        memset(shifts, 0, sizeof shifts);                                                                                            \
        for (int64_t o = first; o < last; o++) {                                                                                     \
            struct words_row row = {(const uint8_t *)m->part[0] + o * columns / 2, scales, shifts};                                  \
            fill(m, o, &row);                                                                                                        \
            if (lanes == 16 && !(shifted))                                                                                           \
                name##_row(&row, in, columns, lanes, y + o, stride, wide, 1, 0);                                                     \
            else if (lanes == 16)                                                                                                    \
                name##_row(&row, in, columns, lanes, y + o, stride, wide, 1, 1);                                                     \
            else if (!(shifted))                                                                                                     \
                name##_row(&row, in, columns, lanes, y + o, stride, wide, 0, 0);                                                     \
            else                                                                                                                     \
                name##_row(&row, in, columns, lanes, y + o, stride, wide, 0, 1);                                                     \
        }                                                                                                                            \
    }

/* name: product_fn; table: the sixteen numbers as BF16. */
#define WORDS_AT(name, native, fill, table, shifted, group, strips, decode)                                                          \
    WORDS_ROWS(name, table, block_by_pairs, native, fill, shifted, group)                                                            \
    BY_WIDTH(name, in->run == 1 && words_fit(m->columns, group), strips, decode)

/* Whether all inputs that are whole numbers are numbers with an end. */
ALONE int all_fixed(const struct inputs *in)
{
    const int64_t all = (in->columns + WORDS_COLUMNS - 1) / WORDS_COLUMNS;
    int none = 0;
    for (int64_t b = 0; b < in->rows * all; b++)
        none |= in->steps[b] != in->steps[b];
    return !none;
}

FOR_AVX512 ALONE __m512i and_wholes(__m512i sum, __m512i w, const uint16_t *x)
{
    __asm__("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(w), "m"(*(const __m512i *)x));
    return sum;
}

/* The same of inputs that are whole numbers: one times `unit` is what a number is. */
FOR_AVX512 ALONE __m512 block_by_wholes(const struct inputs *in, int64_t at, const __m512i *w, __m512 begin, const float unit)
{
    __m512i found = _mm512_setzero_si512();
    _Pragma("GCC unroll 4") for (int n = 0; n < 4; n++) found = and_wholes(found, w[n], in->words + at * WORDS_COLUMNS + TILE * n);
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(found), _mm512_set1_ps(in->steps[at] * unit), begin);
}

/* name: of so many input rows as are multiplied at once, by name_all, where it `fits` and all inputs have an end. */
#define FIXED_WIDTHS(name, fits, otherwise)                                                                                          \
    FOR_AVX512 void name(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y, int64_t stride)     \
    {                                                                                                                                \
        BY_ROWS(name##_all, (fits) && all_fixed(in), otherwise)                                                                      \
    }

/* name, of any number of input rows: as many at a time as are multiplied at once. */
static inline void by_fours(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y, int64_t stride,
                            product_fn name)
{
    const int64_t all = (in->columns + WORDS_COLUMNS - 1) / WORDS_COLUMNS, piece = in->rows > MOST_WIDE ? PIECE : last - first;
    for (int64_t o = first; o < last; o += piece)
        for (int64_t from = 0; from < in->rows; from += MOST_WIDE) {
            struct inputs some = *in;
            some.rows = in->rows - from < MOST_WIDE ? in->rows - from : MOST_WIDE;
            some.x += from * in->columns;
            some.xb += from * in->columns;
            some.words += from * all * WORDS_COLUMNS;
            some.eights += from * all * (WORDS_COLUMNS / WORDS_LANE);
            some.steps += from * all;
            name(m, o, last - o < piece ? last : o + piece, &some, y + from * stride, stride);
        }
}

/* name_few, name_few_amx, name_few_f16, of codes of 8 bits: inputs that are whole numbers by what AVX2 has, which memory is slower than;
 * more of them by name_dot, name_amx, name_avx512_f16. */
#define FEW_BYTES(name)                                                                                                              \
    void name##_avx2(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y, int64_t stride);        \
    void name##_avx2_f16(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y, int64_t stride);    \
    void name##_few(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y, int64_t stride)          \
    {                                                                                                                                \
        (in->run ? name##_avx2 : name##_dot)(m, first, last, in, y, stride);                                                         \
    }                                                                                                                                \
    void name##_few_amx(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y, int64_t stride)      \
    {                                                                                                                                \
        (in->run ? name##_avx2 : name##_amx)(m, first, last, in, y, stride);                                                         \
    }                                                                                                                                \
    void name##_few_f16(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y, int64_t stride)      \
    {                                                                                                                                \
        if (in->run)                                                                                                                 \
            by_fours(m, first, last, in, y, stride, name##_avx2_f16);                                                                \
        else                                                                                                                         \
            name##_avx512_f16(m, first, last, in, y, stride);                                                                        \
    }

/* name_dot_f16: of F16 inputs, where name_dot `fits`; others by strips. */
#define F16_BY_WHOLES(name, fits)                                                                                                    \
    void name##_dot_f16(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y, int64_t stride)      \
    {                                                                                                                                \
        if ((fits) && all_fixed(in))                                                                                                 \
            by_fours(m, first, last, in, y, stride, name##_dot);                                                                     \
        else                                                                                                                         \
            name##_avx512_strips_f16(m, first, last, in, y, stride);                                                                 \
    }

/* name: product_fn, with inputs that are whole numbers: product_fixed.h. A core of an Intel Xeon with AMX multiplies 24 GB/s of INT4 so from
 * its own cache, and 16 by WORDS_AT: a product of pairs of BF16 takes it two cycles and more. Sums of 32 bits get eight columns. */
#define FIXED_WIDE(name, fill, numbers, unit, shifted, group, otherwise)                                                             \
    WORDS_ROWS(name, numbers, block_by_wholes, unit, fill, shifted, group)                                                           \
    FIXED_WIDTHS(name, in->run == 1 && words_fit(m->columns, group), otherwise)

/* What 128 columns have: their numbers, and the scales of the lanes of even and odd n; `less`: what is taken from each eight columns. */
struct words_part {
    __m512i w[4];
    __m512 even, odd, less;
};

/* What 128 columns make of block `at` of the inputs, added to sum. */
FOR_AVX512 ALONE __m512 part_by_pairs(const struct inputs *in, int64_t at, const struct words_part *part, __m512 sum, const int native)
{
    const uint16_t *x = in->words + at * WORDS_COLUMNS;
    const __m512 none = _mm512_setzero_ps();
    const __m512 even = and_pairs(and_pairs(none, part->w[0], x, native), part->w[2], x + 2 * TILE, native);
    const __m512 odd = and_pairs(and_pairs(none, part->w[1], x + TILE, native), part->w[3], x + 3 * TILE, native);
    return _mm512_fmadd_ps(even, part->even, _mm512_fmadd_ps(odd, part->odd, sum));
}

/* The same of numbers and inputs that are whole. */
FOR_AVX512 ALONE __m512 part_by_wholes(const struct inputs *in, int64_t at, const struct words_part *part, __m512 sum, const int native)
{
    const uint16_t *x = in->words + at * WORDS_COLUMNS;
    const __m512i none = _mm512_setzero_si512();
    const __m512i even = and_wholes(and_wholes(none, part->w[0], x), part->w[2], x + 2 * TILE);
    const __m512i odd = and_wholes(and_wholes(none, part->w[1], x + TILE), part->w[3], x + 3 * TILE);
    const __m512 by = _mm512_set1_ps(in->steps[at]);
    (void)native;
    sum = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(even), by), part->even, sum);
    return _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(odd), by), part->odd, sum);
}

/* All rows of a matrix whose blocks have their scales with them, by name_all.
 *
 *     open(state *, m, row)
 *     part(state *, column, columns left, struct words_part *, whether numbers are whole ones)
 *     by, native     part_by_pairs, or part_by_wholes where `wholes`
 *     lessened       whether there is `less` */
#define RUNS_ROWS(name, by, native, wholes, state, open, part, lessened)                                                             \
    FOR_AVX512 ALONE void name##_all(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y,         \
                                     int64_t stride, const int wide)                                                                 \
    {                                                                                                                                \
        const int64_t columns = m->columns, all = (columns + WORDS_COLUMNS - 1) / WORDS_COLUMNS;                                     \
        for (int64_t o = first; o < last; o++) {                                                                                     \
            struct state row = {0};                                                                                                  \
            __m512 sums[MOST_WIDE];                                                                                                  \
            open(&row, m, o);                                                                                                        \
            _Pragma("GCC unroll 4") for (int r = 0; r < wide; r++) sums[r] = _mm512_setzero_ps();                                    \
            for (int64_t b = 0; b < all; b++) {                                                                                      \
                struct words_part found;                                                                                             \
                part(&row, b * WORDS_COLUMNS, columns - b * WORDS_COLUMNS, &found, wholes);                                          \
                _Pragma("GCC unroll 4") for (int r = 0; r < wide; r++)                                                               \
                {                                                                                                                    \
                    const int64_t at = r * all + b;                                                                                  \
                    sums[r] = by(in, at, &found, sums[r], native);                                                                   \
                    if (lessened)                                                                                                    \
                        sums[r] = _mm512_fnmadd_ps(found.less, _mm512_load_ps(in->eights + at * 16), sums[r]);                       \
                }                                                                                                                    \
            }                                                                                                                        \
            _Pragma("GCC unroll 4") for (int r = 0; r < wide; r++) y[r * stride + o] = _mm512_reduce_add_ps(sums[r]);                \
        }                                                                                                                            \
    }

/* name: product_fn. */
#define RUNS_AT(name, native, state, open, part, runs, lessened, strips, decode)                                                     \
    RUNS_ROWS(name, part_by_pairs, native, 0, state, open, part, lessened)                                                           \
    BY_WIDTH(name, in->run == runs && m->columns % TILE == 0, strips, decode)

/* The same, with inputs that are whole numbers. */
#define FIXED_RUNS(name, state, open, part, runs, lessened, otherwise)                                                               \
    RUNS_ROWS(name, part_by_wholes, 1, 1, state, open, part, lessened)                                                               \
    FIXED_WIDTHS(name, in->run == runs && m->columns % TILE == 0, otherwise)

/* name_avx512, name_dot, name_amx, name_dot_f16: by words, more rows by strips that `block` decodes. With BF16's products inputs are whole
 * numbers. */
#define RUNS(name, state, open, block, decode, part, runs, lessened)                                                                 \
    DECODED_AT(name##_avx512, 0, LEVEL_AVX512, IN_ORDER, state, open, block, decode)                                                 \
    DECODED_AT(name##_dot, 1, LEVEL_AVX512_BF16, IN_ORDER, state, open, block, decode)                                               \
    RUNS_AT(name##_avx512, 0, state, open, part, runs, lessened, name##_avx512_strips, decode)                                       \
    FIXED_RUNS(name##_dot, state, open, part, runs, lessened, name##_dot_strips)                                                     \
    F16_BY_WHOLES(name, in->run == runs && m->columns % TILE == 0)                                                                   \
    FOR_TILES(name, IN_ORDER, state, open, block)

/* The same.
 *
 *     numbers, unit   sixteen whole numbers of 16 bits, twice; one times unit is what `table` has */
#define WORDS(name, state, open, block, decode, fill, table, numbers, unit, shifted, group)                                          \
    DECODED_AT(name##_avx512, 0, LEVEL_AVX512, BY_TURNS, state, open, block, decode)                                                 \
    DECODED_AT(name##_dot, 1, LEVEL_AVX512_BF16, BY_TURNS, state, open, block, decode)                                               \
    WORDS_AT(name##_avx512, 0, fill, table, shifted, group, name##_avx512_strips, decode)                                            \
    FIXED_WIDE(name##_dot, fill, numbers, unit, shifted, group, name##_dot_strips)                                                   \
    F16_BY_WHOLES(name, in->run == 1 && words_fit(m->columns, group))                                                                \
    FOR_TILES(name, BY_TURNS, state, open, block)
#endif

#endif
