/* Whole numbers of 4 or 8 bits: every weight is (number - zero point) * scale, rounded to the scale's dtype, then to that of out. */
#include "rows.h"
#include "strips.h"

#ifdef HAS_INTRINSICS
#include <immintrin.h>
#endif

/* BY_COLUMNS: words [rows, columns * bits / 32]. DOWN: words [columns * bits / 32, rows]. AWQ: words [columns, rows / 8], whose lanes hold
 * the even rows, then the odd ones. SIGNED: bytes [rows, columns]. A word's lowest bits come first. */
enum layout { BY_COLUMNS, DOWN, AWQ, SIGNED };
/* Zero points: half of all numbers; in words, along rows; the same less one; signed bytes [rows, groups]. */
enum zeros { MIDDLE, IN_WORDS, LESS_ONE, BYTES };
enum kind { BF16, F16, F32 };
enum { CHUNK = 256, LINE = 16, MOST_GROUPS = 4096 };

struct whole_job {
    const uint32_t *words;
    const void *scales;
    const uint32_t *zeros;
    const int32_t *members; /* the group of each column, or NULL where groups follow each other */
    uint16_t *out;
    int64_t rows, columns, groups, bits;
    int64_t layout, zero_kind, scale_kind, out_kind, begin; /* begin: the row that out begins with */
};

ALONE uint16_t rounded(float value, int64_t scale_kind, int64_t out_kind)
{
    if (scale_kind == F16 && out_kind != F16)
        value = from_f16(to_f16(value));
    else if (scale_kind == BF16 && out_kind != BF16)
        value = from_bf16(to_bf16(value));
    return out_kind == F16 ? to_f16(value) : to_bf16(value);
}

ALONE float scale_of(const struct whole_job *job, int64_t row, int64_t group)
{
    int64_t at = job->layout == DOWN || job->layout == AWQ ? group * job->rows + row : row * job->groups + group;
    if (job->scale_kind == F32)
        return ((const float *)job->scales)[at];
    uint16_t held = ((const uint16_t *)job->scales)[at];
    return job->scale_kind == F16 ? from_f16(held) : from_bf16(held);
}

ALONE int32_t zero_of(const struct whole_job *job, int64_t row, int64_t group)
{
    if (job->zero_kind == MIDDLE)
        return 1 << (job->bits - 1);
    if (job->zero_kind == BYTES)
        return ((const int8_t *)job->zeros)[row * job->groups + group] + 128;
    int64_t each = 32 / job->bits, lane = row % each, across = (job->rows + each - 1) / each;
    if (job->layout == AWQ)
        lane = lane % 2 * 4 + lane / 2;
    uint32_t word = job->zeros[job->layout == BY_COLUMNS ? row / each * job->groups + group : group * across + row / each];
    uint32_t mask = (1u << job->bits) - 1u, zero = word >> (lane * job->bits) & mask;
    return (int32_t)(job->zero_kind == LESS_ONE ? (zero + 1u) & mask : zero);
}

/* What each number of 4 bits is. */
ALONE void numbers_of(float zero, float scale, uint16_t *table, int64_t scale_kind, int64_t out_kind)
{
    for (int number = 0; number < 16; number++)
        table[number] = rounded(((float)number - zero) * scale, scale_kind, out_kind);
}

/* The same, by loops that a compiler makes wide. */
ALONE void table_of(float zero, float scale, uint16_t *table, int64_t scale_kind, int64_t out_kind)
{
    if (scale_kind == BF16 && out_kind == BF16)
        numbers_of(zero, scale, table, BF16, BF16);
    else if (scale_kind == F16 && out_kind == F16)
        numbers_of(zero, scale, table, F16, F16);
    else if (scale_kind == F16 && out_kind == BF16)
        numbers_of(zero, scale, table, F16, BF16);
    else if (scale_kind == BF16 && out_kind == F16)
        numbers_of(zero, scale, table, BF16, F16);
    else
        numbers_of(zero, scale, table, scale_kind, out_kind);
}

/* count numbers of 4 bits by a table of what each is. */
ALONE void by_table(const uint8_t *codes, const uint16_t *table, uint16_t *out, int64_t count)
{
    for (int64_t i = 0; i < count / 2; i++) {
        out[2 * i] = table[codes[i] & 15u];
        out[2 * i + 1] = table[codes[i] >> 4];
    }
    if (count % 2)
        out[count - 1] = table[codes[count / 2] & 15u];
}

#ifdef HAS_INTRINSICS
FOR_AVX2 static inline void by_table_wide(const uint8_t *codes, const uint16_t *table, uint16_t *out, int64_t count)
{
    const __m128i bytes = _mm_set1_epi16(255), nibble = _mm_set1_epi8(15);
    __m128i first = _mm_loadu_si128((const __m128i *)table), second = _mm_loadu_si128((const __m128i *)(table + 8));
    const __m128i lower = _mm_packus_epi16(_mm_and_si128(first, bytes), _mm_and_si128(second, bytes));
    const __m128i upper = _mm_packus_epi16(_mm_srli_epi16(first, 8), _mm_srli_epi16(second, 8));
    int64_t done = 0;
    for (; done + 32 <= count; done += 32) {
        __m128i both = _mm_loadu_si128((const __m128i *)(codes + done / 2));
        __m128i even = _mm_and_si128(both, nibble), odd = _mm_and_si128(_mm_srli_epi16(both, 4), nibble);
        for (int half = 0; half < 2; half++) {
            __m128i code = half ? _mm_unpackhi_epi8(even, odd) : _mm_unpacklo_epi8(even, odd);
            __m128i low = _mm_shuffle_epi8(lower, code), high = _mm_shuffle_epi8(upper, code);
            _mm_storeu_si128((__m128i *)(out + done + 16 * half), _mm_unpacklo_epi8(low, high));
            _mm_storeu_si128((__m128i *)(out + done + 16 * half + 8), _mm_unpackhi_epi8(low, high));
        }
    }
    by_table(codes + done / 2, table, out + done, count - done);
}
#endif

ALONE void bytes_of(const uint8_t *codes, float zero, float scale, uint8_t flip, uint16_t *out, int64_t count, int64_t scale_kind,
                    int64_t out_kind)
{
    for (int64_t i = 0; i < count; i++)
        out[i] = rounded(((float)(uint8_t)(codes[i] ^ flip) - zero) * scale, scale_kind, out_kind);
}

/* Columns [first, last) of a row, whose numbers begin at codes. */
ALONE void columns_of(const struct whole_job *job, int64_t row, const uint8_t *codes, int64_t first, int64_t last, const int wide)
{
    const int64_t group_columns = job->columns / job->groups, scale_kind = job->scale_kind, out_kind = job->out_kind;
    const uint8_t flip = job->layout == SIGNED ? 128 : 0;
    uint16_t *out = job->out + (row - job->begin) * job->columns;
    for (int64_t from = first; from < last;) {
        int64_t group = from / group_columns, to = (group + 1) * group_columns;
        to = to < last ? to : last;
        const float scale = scale_of(job, row, group), zero = (float)zero_of(job, row, group);
        if (job->bits == 4) {
            uint16_t table[16];
            table_of(zero, scale, table, scale_kind, out_kind);
#ifdef HAS_INTRINSICS
            if (wide)
                by_table_wide(codes + (from - first) / 2, table, out + from, to - from);
            else
#endif
                by_table(codes + (from - first) / 2, table, out + from, to - from);
        } else if (scale_kind == BF16 && out_kind == BF16) {
            bytes_of(codes + from - first, zero, scale, flip, out + from, to - from, BF16, BF16);
        } else if (scale_kind == F16 && out_kind == F16) {
            bytes_of(codes + from - first, zero, scale, flip, out + from, to - from, F16, F16);
        } else if (scale_kind == BF16 && out_kind == F16) {
            bytes_of(codes + from - first, zero, scale, flip, out + from, to - from, BF16, F16);
        } else {
            bytes_of(codes + from - first, zero, scale, flip, out + from, to - from, scale_kind, out_kind);
        }
        from = to;
    }
    (void)wide;
}

/* The same where each column names its group; one that is negative follows its neighbours, one that is not there counts as the last. Of 4
 * bits a table for each group says what a number is. */
static void ordered_columns(const struct whole_job *job, int64_t row, const uint8_t *codes, int64_t first, int64_t last)
{
    float scale[MOST_GROUPS], zero[MOST_GROUPS];
    uint16_t table[MOST_GROUPS * 16], *out = job->out + (row - job->begin) * job->columns;
    const int64_t group_columns = job->columns / job->groups;
    for (int64_t group = 0; group < job->groups; group++) {
        scale[group] = scale_of(job, row, group);
        zero[group] = (float)zero_of(job, row, group);
        if (job->bits == 4)
            table_of(zero[group], scale[group], table + group * 16, job->scale_kind, job->out_kind);
    }
    for (int64_t column = first; column < last; column++) {
        int64_t at = column - first, group = job->members[column];
        group = group < 0 ? column / group_columns : group;
        group = group < job->groups ? group : job->groups - 1;
        if (job->bits == 4)
            out[column] = table[group * 16 + (codes[at / 2] >> (at % 2 * 4) & 15)];
        else
            out[column] = rounded(((float)codes[at] - zero[group]) * scale[group], job->scale_kind, job->out_kind);
    }
}

ALONE void part_of_row(const struct whole_job *job, int64_t row, const void *codes, int64_t first, int64_t last, const int wide)
{
    if (job->members)
        ordered_columns(job, row, codes, first, last);
    else
        columns_of(job, row, codes, first, last, wide);
}

/* Words of some rows, which lie side by side, one row after the other. */
ALONE void down_rows(const struct whole_job *job, int64_t first, int64_t last, const int wide)
{
    const int64_t each = 32 / job->bits, width = job->columns / each;
    uint32_t held[LINE][CHUNK];
    for (int64_t row = first; row < last; row += LINE) {
        int64_t rows = last - row < LINE ? last - row : LINE;
        for (int64_t word = 0; word < width; word += CHUNK) {
            int64_t count = width - word < CHUNK ? width - word : CHUNK;
            for (int64_t i = 0; i < count; i++)
                for (int64_t j = 0; j < rows; j++)
                    held[j][i] = job->words[(word + i) * job->rows + row + j];
            for (int64_t j = 0; j < rows; j++)
                part_of_row(job, row + j, held[j], word * each, (word + count) * each, wide);
        }
    }
}

/* Eight columns of 8 rows, a word each, become 8 rows of 8 columns: a transposition of 8 x 8 numbers. */
ALONE void awq_rows(const struct whole_job *job, int64_t first, int64_t last, const int wide)
{
    static const int lanes[8] = {0, 4, 1, 5, 2, 6, 3, 7};
    const int64_t across = job->rows / 8;
    uint32_t held[LINE * 8][CHUNK / 8], word[8][LINE] = {{0}};
    for (int64_t begin = first / 8; begin < last / 8; begin += LINE) {
        int64_t count = last / 8 - begin < LINE ? last / 8 - begin : LINE;
        for (int64_t column = 0; column < job->columns; column += CHUNK) {
            int64_t columns = job->columns - column < CHUNK ? job->columns - column : CHUNK;
            for (int64_t octet = 0; octet < columns / 8; octet++) {
                for (int k = 0; k < 8; k++)
                    for (int64_t j = 0; j < count; j++)
                        word[k][j] = job->words[(column + octet * 8 + k) * across + begin + j];
                for (int step = 4; step; step /= 2) {
                    const uint32_t mask = step == 4 ? 0xffffu : step == 2 ? 0x00ff00ffu : 0x0f0f0f0fu;
                    for (int k = 0; k < 8; k++)
                        if (!(k & step))
                            for (int j = 0; j < LINE; j++) {
                                uint32_t a = word[k][j], b = word[k + step][j];
                                word[k][j] = (a & mask) | (b & mask) << (4 * step);
                                word[k + step][j] = (a >> (4 * step) & mask) | (b & ~mask);
                            }
                }
                for (int64_t j = 0; j < count; j++)
                    for (int row = 0; row < 8; row++)
                        held[j * 8 + row][octet] = word[lanes[row]][j];
            }
            for (int64_t j = 0; j < count * 8; j++)
                part_of_row(job, begin * 8 + j, held[j], column, column + columns, wide);
        }
    }
}

ALONE void whole_rows(const void *given, int64_t first, int64_t last, const int wide)
{
    const struct whole_job *job = given;
    if (job->layout == DOWN)
        down_rows(job, first, last, wide);
    else if (job->layout == AWQ)
        awq_rows(job, first, last, wide);
    else
        for (int64_t row = first; row < last; row++) {
            int64_t each = 32 / job->bits, width = (job->columns + each - 1) / each * 4;
            width = job->layout == SIGNED ? job->columns : width;
            part_of_row(job, row, (const uint8_t *)job->words + row * width, 0, job->columns, wide);
        }
}

#ifdef HAS_INTRINSICS
FOR_AVX512 static void whole_512(const void *job, int64_t first, int64_t last)
{
    whole_rows(job, first, last, 1);
}

FOR_AVX2 static void whole_256(const void *job, int64_t first, int64_t last)
{
    whole_rows(job, first, last, 1);
}
#endif

static void whole_128(const void *job, int64_t first, int64_t last)
{
    whole_rows(job, first, last, 0);
}

static rows_work whole_by(int set)
{
#ifdef HAS_INTRINSICS
    if (set != NARROW)
        return set == AVX512 ? whole_512 : whole_256;
#endif
    return (void)set, whole_128;
}

void whole_strip(int set, const void *words, const uint16_t *scales, const void *zeros, uint16_t *out, int64_t first, int64_t last,
                 int64_t rows, int64_t columns, int64_t groups, int64_t bits, int64_t layout, int64_t zero_kind, int64_t scale_kind,
                 int64_t out_kind)
{
    struct whole_job job = {words, scales, zeros, NULL, out, rows, columns, groups, bits, layout, zero_kind, scale_kind, out_kind, first};
    whole_by(set)(&job, first, last);
}

/* out [rows, columns] BF16 or F16 of words in a layout and scales of any kind, [rows, groups] or, where words lie DOWN or AWQ, [groups,
 * rows]; zeros in words [rows * bits / 32, groups] or [groups, rows * bits / 32], in bytes [rows, groups]. Pointers of zeros and members
 * that zero_kind and ordered do without are not followed. columns are a multiple of groups; DOWN and AWQ have whole words; at most
 * 4096 groups where columns are ordered. */
int64_t whole_decode(const uint32_t *words, const void *scales, const uint32_t *zeros, const int32_t *members, uint16_t *out, int64_t rows,
                     int64_t columns, int64_t groups, int64_t bits, int64_t layout, int64_t zero_kind, int64_t ordered, int64_t scale_kind,
                     int64_t out_kind, int64_t threads)
{
    struct whole_job job = {words, scales, zeros, ordered ? members : NULL, out, rows, columns, groups, bits, layout, zero_kind,
                            scale_kind, out_kind, 0};
    int64_t grain = layout == AWQ ? 8 * LINE : layout == DOWN ? LINE : 1;
    over_rows(whole_by(widest()), &job, rows, grain, threads);
    return 0;
}
