/* Stored formats by AMX: 16 rows of a matrix are decoded 128 columns at a time, tile behind tile, and multiplied out of the first cache.
 *
 * Whole rows would go to the second cache and come back from it, at strides that put all rows of a tile in one place of the first. While a
 * piece is decoded the one before is there for tiles, which must not wait for what was just written. A core of an Intel Xeon with AMX
 * multiplies 6.9 GB/s of INT4 with 16 input rows so, by whole rows 4.7 (docs/log.md, 2026-11-27). */
#ifndef PENSTOCK_PRODUCT_PIECES_H
#define PENSTOCK_PRODUCT_PIECES_H

#include "product_tiles.h"

#ifdef HAS_TILES
enum { PIECE_COLUMNS = CHAINS * TILE_COLUMNS, TILE_NUMBERS = TILE_ROWS * TILE_COLUMNS };

/* Adds a piece's products: each tile's to a sum of its own, those of fewer than CHAINS tiles to the first one. */
FOR_AMX ALONE void multiply_piece(const uint16_t *piece, const uint16_t *pairs, const int64_t tiles)
{
#define MULTIPLY(chain, a, b, at)                                                                                                    \
    do {                                                                                                                             \
        _tile_loadd(a, piece + (at) * TILE_NUMBERS, 64);                                                                             \
        _tile_loadd(b, pairs + (at) * TILE_NUMBERS, 64);                                                                             \
        _tile_dpbf16ps(chain, a, b);                                                                                                 \
    } while (0)
    if (tiles == CHAINS) {
        MULTIPLY(0, 4, 5, 0);
        MULTIPLY(1, 6, 7, 1);
        MULTIPLY(2, 4, 5, 2);
        MULTIPLY(3, 6, 7, 3);
        return;
    }
    for (int64_t t = 0; t < tiles; t++)
        MULTIPLY(0, 4, 5, t);
#undef MULTIPLY
}

/* name_pieces: up to 16 input rows; product_blocks.h says what `block` does. More input rows, and rows that are no whole 16, go by name_tiles.
 * What is fetched meanwhile are the next 16 rows, from their first byte to their last. */
#define PIECES_AT(name, order, state, open, block)                                                                                   \
    FOR_AMX ALONE void name##_piece(struct state *rows, int64_t from, const int tiles, int64_t columns, uint16_t *out)               \
    {                                                                                                                                \
        for (int i = 0; i < TILE_ROWS; i++, out += TILE_COLUMNS) {                                                                   \
            const int64_t far = (TILE_ROWS - i) * columns + (TILE_ROWS - 1) * from + i * PIECE_COLUMNS;                              \
            __m512i w[CHAINS];                                                                                                       \
            block(&rows[i], from, w, tiles, 1, far);                                                                                 \
            _Pragma("GCC unroll 4") for (int t = 0; t < tiles; t++)                                                                  \
                _mm512_store_si512(out + t * TILE_NUMBERS, order == BY_TURNS ? from_turns(w[t]) : w[t]);                              \
        }                                                                                                                            \
    }                                                                                                                                \
    FOR_AMX static void name##_pieces(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y,        \
                                      int64_t stride)                                                                                \
    {                                                                                                                                \
        uint16_t pieces[2][CHAINS * TILE_NUMBERS] __attribute__((aligned(64)));                                                      \
        const int64_t columns = m->columns, whole = columns / PIECE_COLUMNS, left = columns % PIECE_COLUMNS / TILE_COLUMNS;           \
        int64_t o = first;                                                                                                           \
        if (!whole || columns % TILE_COLUMNS || in->rows > TILE_ROWS || !in->pairs) {                                                \
            name##_tiles(m, first, last, in, y, stride);                                                                             \
            return;                                                                                                                  \
        }                                                                                                                            \
        open_tiles();                                                                                                                \
        for (; o + TILE_ROWS <= last; o += TILE_ROWS) {                                                                              \
            struct state rows[TILE_ROWS];                                                                                            \
            const uint16_t *pairs = in->pairs;                                                                                       \
            for (int i = 0; i < TILE_ROWS; i++)                                                                                      \
                open(&rows[i], m, o + i);                                                                                            \
            no_sums();                                                                                                               \
            name##_piece(rows, 0, CHAINS, columns, pieces[0]);                                                                       \
            for (int64_t p = 1; p < whole; p++, pairs += CHAINS * TILE_NUMBERS) {                                                    \
                name##_piece(rows, p * PIECE_COLUMNS, CHAINS, columns, pieces[p % 2]);                                               \
                multiply_piece(pieces[(p + 1) % 2], pairs, CHAINS);                                                                  \
            }                                                                                                                        \
            if (left)                                                                                                                \
                name##_piece(rows, whole * PIECE_COLUMNS, (int)left, columns, pieces[whole % 2]);                                    \
            multiply_piece(pieces[(whole + 1) % 2], pairs, CHAINS);                                                                  \
            multiply_piece(pieces[whole % 2], pairs + CHAINS * TILE_NUMBERS, left);                                                  \
            write_sums(y + o, stride, in->rows);                                                                                     \
        }                                                                                                                            \
        _tile_release();                                                                                                             \
        if (o < last)                                                                                                                \
            name##_tiles(m, o, last, in, y, stride);                                                                                 \
    }
#else
#define PIECES_AT(name, order, state, open, block)                                                                                   \
    static void name##_pieces(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y, int64_t stride) \
    {                                                                                                                                \
        name##_tiles(m, first, last, in, y, stride);                                                                                 \
    }
#endif

#endif
