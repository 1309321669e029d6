/* BF16 matrices by AMX: 16 rows of the matrix times 16 input rows, whose sums stay in a tile. part[0]: [rows][columns].
 *
 * A tile of the matrix is loaded as it lies, 16 rows of 32 columns; inputs come as pairs, 32 columns of 16 rows. So 16 input rows cost
 * what one does. Four sums are under way at once, each of every fourth 32 columns.
 *
 * Columns go in pieces of PIECE tiles. While one is multiplied the next is asked for, row after row: memory likes a kilobyte in a row better
 * than 16 rows at a time, and a claim's first piece is all that is waited for. */
#include "product_tiles.h"

#ifdef HAS_TILES
enum { PIECE = 16, ASKED_COLUMNS = PIECE * TILE_COLUMNS };
#ifndef AHEAD_HINT
#define AHEAD_HINT _MM_HINT_T1
#endif

void bf16_dot(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y, int64_t stride);

FOR_AMX ALONE void ask_for(const uint16_t *row)
{
    for (int i = 0; i < PIECE; i++)
        _mm_prefetch((const char *)(row + i * TILE_COLUMNS), AHEAD_HINT);
}

/* Sums of 16 rows of the matrix and 16 input rows, in tiles 0 to 3. next: the 16 rows behind them, or 0. */
FOR_AMX static void sixteen(const uint16_t *w, const uint16_t *pairs, int64_t columns, const uint16_t *next)
{
    const int64_t all = columns / TILE_COLUMNS, bytes = columns * 2;
    int64_t t = 0;
    no_sums();
#define STEP(chain, a, b)                                                                                                            \
    do {                                                                                                                             \
        const int64_t k = (t + chain) * TILE_COLUMNS, after = k / ASKED_COLUMNS * ASKED_COLUMNS + ASKED_COLUMNS;                     \
        const uint16_t *ahead = after < columns ? w + after : next;                                                                  \
        if (ahead)                                                                                                                   \
            ask_for(ahead + (t + chain) % PIECE * columns);                                                                          \
        _tile_loadd(a, w + k, bytes);                                                                                                \
        _tile_loadd(b, pairs + k * TILE_ROWS, 64);                                                                                   \
        _tile_dpbf16ps(chain, a, b);                                                                                                 \
    } while (0)
    for (; t + CHAINS <= all; t += CHAINS) {
        STEP(0, 4, 5);
        STEP(1, 6, 7);
        STEP(2, 4, 5);
        STEP(3, 6, 7);
    }
    for (; t < all; t++)
        STEP(0, 4, 5);
#undef STEP
}

FOR_AMX void bf16_tiles(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y, int64_t stride)
{
    const int64_t columns = m->columns;
    if (in->rows < TILES_FROM || !in->pairs || columns % TILE_COLUMNS) {
        bf16_dot(m, first, last, in, y, stride);
        return;
    }
    int64_t o = first;
    open_tiles();
    for (int64_t i = 0; i < TILE_ROWS && o + TILE_ROWS <= last; i++)
        ask_for((const uint16_t *)m->part[0] + (o + i) * columns);
    for (; o + TILE_ROWS <= last; o += TILE_ROWS) {
        const uint16_t *w = (const uint16_t *)m->part[0] + o * columns;
        const uint16_t *next = o + 2 * TILE_ROWS <= last ? w + TILE_ROWS * columns : 0;
        for (int64_t from = 0; from < in->rows; from += TILE_ROWS) {
            const int64_t left = in->rows - from;
            sixteen(w, in->pairs + from * columns, columns, from + TILE_ROWS < in->rows ? 0 : next);
            write_sums(y + from * stride + o, stride, left < TILE_ROWS ? left : TILE_ROWS);
        }
    }
    _tile_release();
    if (o < last)
        bf16_dot(m, o, last, in, y, stride);
}
#else
typedef int no_tiles_here;
#endif
