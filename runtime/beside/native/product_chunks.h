/* Products whose sums stay in registers, over one chunk of columns after the other: a block's weights, read for several groups of input
 * rows, stay in the first cache. */
#ifndef PENSTOCK_PRODUCT_CHUNKS_H
#define PENSTOCK_PRODUCT_CHUNKS_H

#include "products.h"

#ifdef HAS_X86
enum { CHUNK = 1024, MOST_ROWS = 16 };

/* name: product_fn, by name_block: `high` rows of a matrix of 16 bits at once (most_high, or 1 where fewer are left) and up to 4 input rows,
 * over one chunk. What comes next is `ahead`: the next chunk, or the next rows' first.
 *
 *     floats              a register of sums; none(), all(sums)
 *     type, field         input rows, of struct inputs */
#define BY_CHUNKS(name, target, floats, type, field, most_high, none, all)                                                           \
    target ALONE void name##_rows(const uint16_t *w, const struct inputs *in, int64_t from, int64_t rows, float *y, int64_t stride,  \
                                  const int high)                                                                                    \
    {                                                                                                                                \
        const int64_t columns = in->columns;                                                                                         \
        floats kept[MOST_ROWS / 4][most_high][4];                                                                                    \
        for (int g = 0; g * 4 < rows; g++)                                                                                           \
            for (int i = 0; i < high; i++)                                                                                           \
                for (int r = 0; r < 4; r++)                                                                                          \
                    kept[g][i][r] = none();                                                                                          \
        for (int64_t k = 0; k < columns; k += CHUNK) {                                                                               \
            const int64_t chunk = columns - k < CHUNK ? columns - k : CHUNK;                                                         \
            for (int g = 0; g * 4 < rows; g++) {                                                                                     \
                const type *x = in->field + (from + g * 4) * columns + k;                                                            \
                const int64_t ahead = g ? 0 : k + CHUNK < columns ? CHUNK : high * columns - k;                                      \
                switch (rows - g * 4) {                                                                                              \
                case 1: name##_block(w + k, x, columns, chunk, kept[g], ahead, high, 1); break;                                      \
                case 2: name##_block(w + k, x, columns, chunk, kept[g], ahead, high, 2); break;                                      \
                case 3: name##_block(w + k, x, columns, chunk, kept[g], ahead, high, 3); break;                                      \
                default: name##_block(w + k, x, columns, chunk, kept[g], ahead, high, 4); break;                                     \
                }                                                                                                                    \
            }                                                                                                                        \
        }                                                                                                                            \
        for (int64_t r = 0; r < rows; r++)                                                                                           \
            for (int i = 0; i < high; i++)                                                                                           \
                y[(from + r) * stride + i] = all(kept[r / 4][i][r % 4]);                                                             \
    }                                                                                                                                \
    target void name(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y, int64_t stride)         \
    {                                                                                                                                \
        for (int64_t o = first; o < last;) {                                                                                         \
            const uint16_t *w = (const uint16_t *)m->part[0] + o * m->columns;                                                       \
            const int many = last - o >= most_high;                                                                                  \
            for (int64_t from = 0; from < in->rows; from += MOST_ROWS) {                                                             \
                const int64_t rows = in->rows - from < MOST_ROWS ? in->rows - from : MOST_ROWS;                                      \
                if (many)                                                                                                            \
                    name##_rows(w, in, from, rows, y + o, stride, most_high);                                                        \
                else                                                                                                                 \
                    name##_rows(w, in, from, rows, y + o, stride, 1);                                                                \
            }                                                                                                                        \
            o += many ? most_high : 1;                                                                                               \
        }                                                                                                                            \
    }
#endif

#endif
