/* GPTQ4 and AWQ as they lie, with inputs that are whole numbers of 16 bits: product_across.c says how words are multiplied side by side,
 * and product_fixed.h what such inputs are.
 *
 * In each 32 bits a product of whole numbers adds two columns of one row. So no number becomes a float, and none needs a permutation:
 *
 *     GPTQ4   bits 4 n and 16 + 4 n of a word are columns n and n + 4 of its row: a shift and a mask give both
 *     AWQ     halves of 16 bits of two columns' words are put side by side: a shift and a mask then give one row's number in each
 *
 *     y[row] = sum over 128 columns, or a group's: scale[row] * (step * sum of number * x - zero point[row] * sum of x) */
#include "product_across.h"
#include "product_words.h"

#ifdef HAS_X86
enum { SUMS = ACROSS / LANES, PAIRS = WORDS_COLUMNS / 2 };

/* Columns of a group of ACROSS rows, of which `count` are there. pairs: of the first input row two columns in each 32 bits, as they are
 * multiplied; the next row's lie `apart` behind. */
struct piece {
    const uint32_t *words;
    int64_t stride, count, columns;
    const uint32_t *pairs;
    int64_t apart;
};

FOR_AVX512 ALONE __m512i and_pair(__m512i sum, __m512i numbers, const uint32_t *pair)
{
    __asm__("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(numbers), "m"(*pair));
    return sum;
}

/* Numbers n of both halves of each 32 bits. */
FOR_AVX512 ALONE __m512i halves_of(__m512i words, const int n)
{
    return _mm512_and_si512(n ? _mm512_srli_epi32(words, 4 * n) : words, _mm512_set1_epi32(0x000f000f));
}

/* `sums` of the eight sums of each of `inputs`, from the `from`-th on: one for 16 rows. */
FOR_AVX512 ALONE void sum_gptq(const struct piece *p, __m512i *out, const int inputs, const int from, const int sums)
{
    __m512i sum[MOST_WIDE * SUMS];
    _Pragma("GCC unroll 32") for (int i = 0; i < inputs * sums; i++) sum[i] = _mm512_setzero_si512();
    for (int64_t k = 0; k < p->columns / NUMBERS_A_WORD; k++) {
        const uint32_t *at = p->words + k * p->stride + from * LANES;
        _Pragma("GCC unroll 8") for (int j = 0; j < sums; j++)
        {
            const __m512i words = words_at(at + j * LANES, p->count - (from + j) * LANES);
            __builtin_prefetch(at + j * LANES + FETCHED / NUMBERS_A_WORD * p->stride, 0, 2);
            _Pragma("GCC unroll 4") for (int n = 0; n < 4; n++)
            {
                const __m512i numbers = halves_of(words, n);
                _Pragma("GCC unroll 4") for (int r = 0; r < inputs; r++) sum[r * sums + j] =
                    and_pair(sum[r * sums + j], numbers, p->pairs + r * p->apart + 4 * k + n);
            }
        }
    }
    _Pragma("GCC unroll 32") for (int i = 0; i < inputs * sums; i++) out[i / sums * SUMS + from + i % sums] = sum[i];
}

/* The same. Sum 4 h + n has number n of each half of what the two columns' words `h`, interleaved, have. */
FOR_AVX512 ALONE void sum_awq(const struct piece *p, __m512i *out, const int inputs, const int from, const int sums)
{
    __m512i sum[MOST_WIDE * SUMS];
    _Pragma("GCC unroll 32") for (int i = 0; i < inputs * sums; i++) sum[i] = _mm512_setzero_si512();
    for (int64_t k = 0; k < p->columns; k += 2) {
        const uint32_t *at = p->words + k * p->stride;
        const __m512i one = words_at(at, p->count / NUMBERS_A_WORD), next = words_at(at + p->stride, p->count / NUMBERS_A_WORD);
        if (from == 0) {
            __builtin_prefetch(at + FETCHED * p->stride, 0, 2);
            __builtin_prefetch(at + (FETCHED + 1) * p->stride, 0, 2);
        }
        _Pragma("GCC unroll 8") for (int j = 0; j < sums; j++)
        {
            const __m512i both = (from + j) / 4 ? _mm512_unpackhi_epi16(one, next) : _mm512_unpacklo_epi16(one, next);
            const __m512i numbers = halves_of(both, (from + j) % 4);
            _Pragma("GCC unroll 4") for (int r = 0; r < inputs; r++) sum[r * sums + j] =
                and_pair(sum[r * sums + j], numbers, p->pairs + r * p->apart + k / 2);
        }
    }
    _Pragma("GCC unroll 32") for (int i = 0; i < inputs * sums; i++) out[i / sums * SUMS + from + i % sums] = sum[i];
}

FOR_AVX512 ALONE void sum_part(const struct piece *p, __m512i *out, const int inputs, const int from, const int sums, const int awq)
{
    if (awq)
        sum_awq(p, out, inputs, from, sums);
    else
        sum_gptq(p, out, inputs, from, sums);
}

/* As many sums at a time as there are registers. */
FOR_AVX512 ALONE void sum_inputs(const struct piece *p, __m512i *out, const int inputs, const int awq)
{
    if (inputs < 3)
        sum_part(p, out, inputs, 0, SUMS, awq);
    else {
        sum_part(p, out, inputs, 0, SUMS / 2, awq);
        sum_part(p, out, inputs, SUMS / 2, SUMS / 2, awq);
    }
}

/* The row of lane `lane` of sum `i`. */
ALONE int row_of(int i, int lane, const int awq)
{
    const int word = lane / 4 * 4 + i / 4 * 2 + lane % 4 / 2;
    return awq ? NUMBERS_A_WORD * word + awq_rows[i % 4 + lane % 2 * 4] : LANES * i + lane;
}

/* Which of ACROSS rows each lane of each sum is. */
struct rows_of {
    int32_t row[SUMS][LANES];
};

/* Scales and zero points of a group of ACROSS rows, as their sums lie. */
FOR_AVX512 ALONE void fill(const struct matrix *m, int64_t group, int64_t o, int64_t count, const struct rows_of *rows_of, __m512 *scales,
                           __m512 *zeros, const int awq)
{
    const uint16_t *from = (const uint16_t *)m->part[1] + group * m->rows + o;
    const uint32_t *words = (const uint32_t *)m->part[2] + group * (m->rows / NUMBERS_A_WORD) + o / NUMBERS_A_WORD;
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i held = words_at(words, count / NUMBERS_A_WORD), more = _mm512_set1_epi32(!awq && m->part[4] != NULL);
    float by_row[ACROSS], zero_by_row[ACROSS];
    for (int i = 0; i < SUMS; i++) {
        const int64_t r = (int64_t)i * LANES;
        const __m512i place = _mm512_and_si512(lane, _mm512_set1_epi32(7));
        /* of AWQ row 0, 1, 2 ... of a word is its number 0, 4, 1, 5 ... */
        const __m512i odd = _mm512_and_si512(place, _mm512_set1_epi32(1));
        const __m512i turned = _mm512_or_si512(_mm512_srli_epi32(place, 1), _mm512_slli_epi32(odd, 2));
        /* 15 and one more are 0 */
        const __m512i zero = _mm512_add_epi32(_mm512_srlv_epi32(words_of_rows(held, r), _mm512_slli_epi32(awq ? turned : place, 2)), more);
        _mm512_storeu_ps(by_row + r, scales_at(m, from + r, count - r));
        _mm512_storeu_ps(zero_by_row + r, _mm512_cvtepi32_ps(_mm512_and_si512(zero, _mm512_set1_epi32(15))));
    }
    for (int i = 0; i < SUMS; i++) {
        const __m512i rows = _mm512_loadu_si512(rows_of->row[i]);
        scales[i] = awq ? _mm512_i32gather_ps(rows, by_row, 4) : _mm512_loadu_ps(by_row + i * LANES);
        zeros[i] = awq ? _mm512_i32gather_ps(rows, zero_by_row, 4) : _mm512_loadu_ps(zero_by_row + i * LANES);
    }
}

/* Columns of inputs as GPTQ multiplies them: column n beside n + 4 of each eight. */
FOR_AVX512 ALONE void pair_up(const uint16_t *x, uint32_t *pairs, int64_t columns)
{
    for (int64_t k = 0; k < columns; k += NUMBERS_A_WORD)
        for (int n = 0; n < 4; n++)
            pairs[k / 2 + n] = x[k + n] | (uint32_t)x[k + n + 4] << 16;
}

/* A group's columns, or 128 of them. */
ALONE int64_t piece_columns(const struct matrix *m)
{
    return m->group < WORDS_COLUMNS ? m->group : WORDS_COLUMNS;
}

/* Whether pieces end where groups and steps do. */
ALONE int pieces_fit(const struct matrix *m)
{
    return m->group % WORDS_COLUMNS == 0 || WORDS_COLUMNS % m->group == 0;
}

FOR_AVX512 ALONE void across_all(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y, int64_t stride,
                                 const int inputs, const int awq)
{
    const int64_t across = awq ? m->rows / NUMBERS_A_WORD : m->rows, all = (m->columns + WORDS_COLUMNS - 1) / WORDS_COLUMNS;
    const int64_t each = piece_columns(m);
    uint32_t turned[awq ? 1 : inputs * all * PAIRS] __attribute__((aligned(64)));
    const uint32_t *pairs = awq ? (const void *)in->words : turned; /* AWQ's are neighbours, as they lie */
    struct rows_of rows_of;
    float lanes[LANES];
    if (!awq)
        pair_up(in->words, turned, inputs * all * WORDS_COLUMNS);
    for (int i = 0; i < SUMS; i++)
        for (int l = 0; l < LANES; l++)
            rows_of.row[i][l] = row_of(i, l, awq);
    for (int64_t o = first; o < last; o += ACROSS) {
        const int64_t count = last - o < ACROSS ? last - o : ACROSS;
        __m512 found[MOST_WIDE * SUMS], scales[SUMS] = {0}, zeros[SUMS] = {0};
        for (int i = 0; i < inputs * SUMS; i++)
            found[i] = _mm512_setzero_ps();
        for (int64_t column = 0; column < m->columns; column += each) {
            const int64_t b = column / WORDS_COLUMNS;
            const uint32_t *words = (const uint32_t *)m->part[0];
            words += awq ? column * across + o / NUMBERS_A_WORD : column / NUMBERS_A_WORD * across + o;
            const struct piece piece = {words, across, count, each, pairs + column / 2, all * PAIRS};
            __m512i sums[MOST_WIDE * SUMS];
            sum_inputs(&piece, sums, inputs, awq);
            if (column % m->group == 0)
                fill(m, column / m->group, o, count, &rows_of, scales, zeros, awq);
            for (int r = 0; r < inputs; r++) {
                const float *eights = in->eights + (r * all * WORDS_COLUMNS + column) / WORDS_LANE;
                const __m512 step = _mm512_set1_ps(in->steps[r * all + b]);
                float sum = 0;
                for (int64_t k = 0; k < each / WORDS_LANE; k++)
                    sum += eights[k];
                for (int i = 0; i < SUMS; i++) {
                    __m512 *to = found + r * SUMS + i;
                    const __m512 own = _mm512_mul_ps(_mm512_cvtepi32_ps(sums[r * SUMS + i]), step);
                    *to = _mm512_fmadd_ps(scales[i], _mm512_fnmadd_ps(zeros[i], _mm512_set1_ps(sum), own), *to);
                }
            }
        }
        for (int r = 0; r < inputs; r++)
            for (int i = 0; i < SUMS; i++) {
                _mm512_storeu_ps(lanes, found[r * SUMS + i]);
                for (int l = 0; l < LANES; l++)
                    if (rows_of.row[i][l] < count)
                        y[r * stride + o + rows_of.row[i][l]] = lanes[l];
            }
    }
}

FOR_AVX512 ALONE void gptq4_whole_all(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y,
                                      int64_t stride, const int inputs)
{
    across_all(m, first, last, in, y, stride, inputs, 0);
}

FOR_AVX512 ALONE void awq_whole_all(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y,
                                    int64_t stride, const int inputs)
{
    across_all(m, first, last, in, y, stride, inputs, 1);
}

void gptq4_avx512(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y, int64_t stride);
void awq_avx512(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y, int64_t stride);
FIXED_WIDTHS(gptq4_whole, in->run == WORDS_COLUMNS && pieces_fit(m), gptq4_avx512)
FIXED_WIDTHS(awq_whole, in->run == WORDS_COLUMNS && pieces_fit(m), awq_avx512)
#endif
