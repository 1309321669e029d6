/* Products with rows that are decoded in registers: AVX512 with its BF16 instructions or without, few input rows. */
#ifndef PENSTOCK_PRODUCT_BLOCKS_H
#define PENSTOCK_PRODUCT_BLOCKS_H

#include "product_pieces.h"
#include "product_strips.h"

#ifdef HAS_X86
#include <immintrin.h>

/* Columns decoded at once, in registers of 32. */
enum { BLOCK = 128, TILE = 32 };

/* Columns from a block to the one that is fetched meanwhile, where one row follows the other. */
enum { FAR = 8192 };

/* Rows of a matrix that one input row is multiplied with at once. Four share its columns, which at 14336 do not fit the first cache: that is
 * what binds where decoding is a few operations. One has four sums on the way, which is right where decoding binds. */
enum rows_read { ONE_ROW = 1, FOUR_ROWS = 4 };

/* The order in which `block` gives 32 columns, by fours. Codes of 16 bytes stand in all quarters of a register, and each four columns are cut
 * from one of its two words of 64 bits, the first or the second by turns: so no code crosses a lane. */
enum order { IN_ORDER, BY_TURNS };

FOR_AVX512 ALONE __m512i from_turns(__m512i columns)
{
    return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), columns);
}

/* From 16 bytes of codes, two a byte, the lower half first: 32 words by turns whose lowest four bits are the codes; above them is anything. */
FOR_AVX512 ALONE __m512i nibbles_by_turns(const uint8_t *codes, const int native)
{
    __m512i all = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)codes));
    if (native) {
        const __m512i places = _mm512_setr_epi64(0x0c0c080804040000, 0x0c0c080804040000, 0x1c1c181814141010, 0x1c1c181814141010,
                                                 0x2c2c282824242020, 0x2c2c282824242020, 0x3c3c383834343030, 0x3c3c383834343030);
        __asm__("vpmultishiftqb %1, %2, %0" : "=v"(all) : "v"(all), "v"(places));
        return all;
    }
    const __m512i places = _mm512_setr_epi64(0x8001800180008000, 0x8009800980088008, 0x8003800380028002, 0x800b800b800a800a,
                                             0x8005800580048004, 0x800d800d800c800c, 0x8007800780068006, 0x800f800f800e800e);
    return _mm512_srlv_epi16(_mm512_shuffle_epi8(all, places), _mm512_set1_epi64(0x0004000000040000));
}

/* What the BF16 instructions do. They are written as such, and not as intrinsics, since a function for a narrower instruction set has them,
 * too, behind `native`, a constant. Without them rounding takes four operations, and a product of pairs two. */
FOR_AVX512 ALONE __m256i narrowed(__m512 values, const int native)
{
    __m256i found;
    if (native) {
        __asm__("vcvtneps2bf16 %1, %0" : "=v"(found) : "v"(values));
        return found;
    }
    const __m512i bits = _mm512_castps_si512(values), even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), even);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}

/* `low` in the lower half. */
FOR_AVX512 ALONE __m512i both_narrowed(__m512 high, __m512 low, const int native)
{
    __m512i found;
    if (native) {
        __asm__("vcvtne2ps2bf16 %2, %1, %0" : "=v"(found) : "v"(high), "v"(low));
        return found;
    }
    return _mm512_inserti64x4(_mm512_castsi256_si512(narrowed(low, 0)), narrowed(high, 0), 1);
}

/* To a compiler so many numbers are changed here: one of them in all lanes is then a load, and not two shuffles, which are what binds. */
#define FROM_MEMORY(numbers, count) __asm__("" : "+m"(*(float(*)[count])(numbers)))

/* Sixteen numbers for a permutation whose codes' fifth bit may be anything. */
FOR_AVX512 ALONE __m512i table_of_16(__m512 values, const int native)
{
    return native ? both_narrowed(values, values, native) : _mm512_broadcast_i64x4(narrowed(values, native));
}

FOR_AVX512 ALONE __m512 and_pairs(__m512 sum, __m512i w, const uint16_t *x, const int native)
{
    const __m512i input = _mm512_loadu_si512(x), odd = _mm512_set1_epi32((int)0xffff0000u);
    if (native) {
        __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(w), "v"(input));
        return sum;
    }
    sum = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(w, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(input, 16)), sum);
    return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(w, odd)), _mm512_castsi512_ps(_mm512_and_si512(input, odd)), sum);
}

/* name_strips: products by strips that `block` decodes. Columns that are no whole registers go by `decode`'s.
 *
 *     struct state                                    what is known of one row
 *     open(state *, m, row)
 *     block(state *, column, __m512i w[4], n, native, far) the next 32 * n columns as BF16, from `column` on, a multiple of 128; n is 4 but at
 *                                                     the end; what lies far columns on is fetched */
#define DECODED_AT(name, native, level, order, state, open, block, decode)                                                           \
    FOR_AVX512 static void name##_decoded(const struct matrix *m, int set, int number, int64_t first, int64_t last, uint16_t *out)   \
    {                                                                                                                                \
        const int64_t columns = m->columns;                                                                                          \
        if (columns % TILE) {                                                                                                        \
            decode(m, set, number, first, last, out);                                                                                \
            return;                                                                                                                  \
        }                                                                                                                            \
        for (int64_t o = first; o < last; o++) {                                                                                     \
            struct state row;                                                                                                        \
            __m512i w[4];                                                                                                            \
            int64_t k = 0;                                                                                                           \
            open(&row, m, o);                                                                                                        \
            for (; k + BLOCK <= columns; k += BLOCK, out += BLOCK) {                                                                 \
                block(&row, k, w, 4, native, FAR);                                                                                   \
                _Pragma("GCC unroll 4") for (int t = 0; t < 4; t++) _mm512_storeu_si512(out + TILE * t, order == BY_TURNS ? from_turns(w[t]) : w[t]);\
            }                                                                                                                        \
            const int tiles = (int)((columns - k) / TILE);                                                                           \
            if (tiles)                                                                                                               \
                block(&row, k, w, tiles, native, FAR);                                                                               \
            for (int t = 0; t < tiles; t++, out += TILE)                                                                             \
                _mm512_storeu_si512(out, order == BY_TURNS ? from_turns(w[t]) : w[t]);                                               \
        }                                                                                                                            \
    }                                                                                                                                \
    static STRIPS_AT(name##_strips, name##_decoded, level, NUMBER_BF16)

/* name: products of up to 4 input rows, summed as those of BF16; more by name_strips. */
#define BLOCKS_AT(name, native, read, state, open, block)                                                                            \
    FOR_AVX512 ALONE void name##_some(const struct matrix *m, int64_t o, const uint16_t *x, float *y, int64_t stride,                \
                                           const int high, const int wide)                                                           \
    {                                                                                                                                \
        const int64_t columns = m->columns;                                                                                          \
        struct state rows[4];                                                                                                        \
        const int64_t far = high > 1 ? high * columns : FAR; /* so many rows are read side by side */                                \
        __m512 sums[4][MOST_WIDE];                                                                                                   \
        int64_t k = 0;                                                                                                               \
        _Pragma("GCC unroll 4") for (int i = 0; i < high; i++)                                                                       \
        {                                                                                                                            \
            open(&rows[i], m, o + i);                                                                                                \
            _Pragma("GCC unroll 4") for (int r = 0; r < wide; r++) sums[i][r] = _mm512_setzero_ps();                                 \
        }                                                                                                                            \
        for (; k + BLOCK <= columns; k += BLOCK)                                                                                     \
            _Pragma("GCC unroll 4") for (int i = 0; i < high; i++)                                                                   \
            {                                                                                                                        \
                __m512i w[4];                                                                                                        \
                block(&rows[i], k, w, 4, native, far);                                                                               \
                _Pragma("GCC unroll 4") for (int r = 0; r < wide; r++)                                                               \
                    _Pragma("GCC unroll 4") for (int t = 0; t < 4; t++) sums[i][r] =                                                 \
                        and_pairs(sums[i][r], w[t], x + r * columns + k + 32 * t, native);                                           \
            }                                                                                                                        \
        for (int i = 0; k < columns && i < high; i++) {                                                                              \
            __m512i w[4];                                                                                                            \
            const int tiles = (int)((columns - k) / TILE);                                                                           \
            block(&rows[i], k, w, tiles, native, far);                                                                               \
            for (int r = 0; r < wide; r++)                                                                                           \
                for (int t = 0; t < tiles; t++)                                                                                      \
                    sums[i][r] = and_pairs(sums[i][r], w[t], x + r * columns + k + 32 * t, native);                                  \
        }                                                                                                                            \
        _Pragma("GCC unroll 4") for (int i = 0; i < high; i++)                                                                       \
            _Pragma("GCC unroll 4") for (int r = 0; r < wide; r++) y[r * stride + o + i] = _mm512_reduce_add_ps(sums[i][r]);              \
    }                                                                                                                                \
    FOR_AVX512 ALONE float name##_one(const struct matrix *m, int64_t o, const uint16_t *x)                                          \
    {                                                                                                                                \
        const int64_t columns = m->columns;                                                                                          \
        struct state row;                                                                                                            \
        __m512i w[4];                                                                                                                \
        __m512 sums[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};                       \
        int64_t k = 0;                                                                                                               \
        open(&row, m, o);                                                                                                            \
        for (; k + BLOCK <= columns; k += BLOCK) {                                                                                   \
            block(&row, k, w, 4, native, FAR);                                                                                       \
            _Pragma("GCC unroll 4") for (int t = 0; t < 4; t++) sums[t] =                                                            \
                and_pairs(sums[t], w[t], x + k + TILE * t, native);                                                                  \
        }                                                                                                                            \
        const int tiles = (int)((columns - k) / TILE);                                                                               \
        if (tiles)                                                                                                                   \
            block(&row, k, w, tiles, native, FAR);                                                                                   \
        for (int t = 0; t < tiles; t++)                                                                                              \
            sums[0] = and_pairs(sums[0], w[t], x + k + TILE * t, native);                                                            \
        return _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3])));                     \
    }                                                                                                                                \
    FOR_AVX512 ALONE void name##_all(const struct matrix *m, int64_t first, int64_t last, const uint16_t *x, float *y,               \
                                          int64_t stride, const int wide)                                                            \
    {                                                                                                                                \
        int64_t o = first;                                                                                                           \
        for (; wide == 1 && read == ONE_ROW && o < last; o++)                                                                        \
            y[o] = name##_one(m, o, x);                                                                                              \
        for (; o + 4 <= last; o += 4)                                                                                                \
            name##_some(m, o, x, y, stride, 4, wide);                                                                                \
        for (; o < last; o++)                                                                                                        \
            name##_some(m, o, x, y, stride, 1, wide);                                                                                \
    }                                                                                                                                \
    FOR_AVX512 ALONE void name##_few(const struct matrix *m, int64_t first, int64_t last, const uint16_t *x, int64_t rows, float *y, \
                                     int64_t stride)                                                                                 \
    {                                                                                                                                \
        switch (rows) {                                                                                                              \
        case 1: name##_all(m, first, last, x, y, stride, 1); break;                                                                  \
        case 2: name##_all(m, first, last, x, y, stride, 2); break;                                                                  \
        case 3: name##_all(m, first, last, x, y, stride, 3); break;                                                                  \
        default: name##_all(m, first, last, x, y, stride, 4); break;                                                                 \
        }                                                                                                                            \
    }                                                                                                                                \
    FOR_AVX512 void name(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y,                     \
                                    int64_t stride)                                                                                  \
    {                                                                                                                                \
        if (m->columns % TILE || in->rows > MOST_WIDE)                                                                               \
            name##_strips(m, first, last, in, y, stride);                                                                            \
        else                                                                                                                         \
            name##_few(m, first, last, in->xb, in->rows, y, stride);                                                                 \
    }

#define FOR_TILES(name, order, state, open, block)                                                                                   \
    static STRIPS_AT(name##_tiles, name##_dot_decoded, LEVEL_AMX, NUMBER_BF16)                                                       \
    PIECES_AT(name, order, state, open, block)                                                                                       \
    void name##_amx(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y, int64_t stride)          \
    {                                                                                                                                \
        (in->rows <= MOST_WIDE ? name##_dot : name##_pieces)(m, first, last, in, y, stride);                                         \
    }

/* name_avx512, name_dot, name_amx. */
#define BLOCKS(name, read, state, open, block, decode)                                                                               \
    DECODED_AT(name##_avx512, 0, LEVEL_AVX512, IN_ORDER, state, open, block, decode)                                                 \
    DECODED_AT(name##_dot, 1, LEVEL_AVX512_BF16, IN_ORDER, state, open, block, decode)                                               \
    BLOCKS_AT(name##_avx512, 0, read, state, open, block)                                                                            \
    BLOCKS_AT(name##_dot, 1, read, state, open, block)                                                                               \
    FOR_TILES(name, IN_ORDER, state, open, block)
#endif

#endif
