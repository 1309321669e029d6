/* What products by AMX share: how tiles are laid out, and where their sums go. */
#ifndef PENSTOCK_PRODUCT_TILES_H
#define PENSTOCK_PRODUCT_TILES_H

#include "products.h"

#ifdef HAS_TILES
#include <immintrin.h>

/* Of a row of a matrix's tile; sums that are under way at once, each of every fourth tile, and the numbers of one. */
enum { TILE_COLUMNS = 32, CHAINS = 4, TILE_SUMS = TILE_ROWS * TILE_ROWS };

struct tile_config {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
};

/* All eight tiles are 16 rows of 64 bytes, until _tile_release. */
FOR_AMX ALONE void open_tiles(void)
{
    struct tile_config config;
    memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int i = 0; i < 8; i++) {
        config.bytes[i] = 64;
        config.rows[i] = TILE_ROWS;
    }
    _tile_loadconfig(&config);
}

FOR_AMX ALONE void no_sums(void)
{
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

/* Row i becomes column i: of each two rows whose numbers differ in one bit, numbers change places whose columns differ in it, too. */
FOR_AMX ALONE void turn(__m512 *rows)
{
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), others = _mm512_set1_epi32(TILE_ROWS);
    _Pragma("GCC unroll 4") for (int bit = 1; bit < TILE_ROWS; bit *= 2)
    {
        const __m512i changed = _mm512_xor_si512(lane, _mm512_set1_epi32(bit));
        const __mmask16 set = _mm512_test_epi32_mask(lane, _mm512_set1_epi32(bit));
        const __m512i lower = _mm512_mask_add_epi32(lane, set, changed, others), upper = _mm512_mask_add_epi32(changed, set, lane, others);
        _Pragma("GCC unroll 16") for (int i = 0; i < TILE_ROWS; i++)
            if (!(i & bit)) {
                const __m512 a = rows[i], b = rows[i + bit];
                rows[i] = _mm512_permutex2var_ps(a, lower, b);
                rows[i + bit] = _mm512_permutex2var_ps(a, upper, b);
            }
    }
}

/* Tiles 0 to 3, of 16 rows of the matrix and `count` input rows, added up: y[r * stride + i]. */
FOR_AMX ALONE void write_sums(float *y, int64_t stride, int64_t count)
{
    float sums[CHAINS * TILE_SUMS] __attribute__((aligned(64)));
    __m512 rows[TILE_ROWS];
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + TILE_SUMS, 64);
    _tile_stored(2, sums + 2 * TILE_SUMS, 64);
    _tile_stored(3, sums + 3 * TILE_SUMS, 64);
    for (int i = 0; i < TILE_ROWS; i++) {
        const float *sum = sums + i * TILE_ROWS;
        rows[i] = _mm512_add_ps(_mm512_add_ps(_mm512_load_ps(sum), _mm512_load_ps(sum + TILE_SUMS)),
                                _mm512_add_ps(_mm512_load_ps(sum + 2 * TILE_SUMS), _mm512_load_ps(sum + 3 * TILE_SUMS)));
    }
    turn(rows);
    for (int64_t r = 0; r < count; r++)
        _mm512_storeu_ps(y + r * stride, rows[r]);
}
#endif

#endif
