/* Products with rows that are decoded some at a time, into memory that stays in the core's own cache, and multiplied as BF16 or F16. */
#ifndef PENSTOCK_PRODUCT_STRIPS_H
#define PENSTOCK_PRODUCT_STRIPS_H

#include "../../formats/native/strips.h"
#include "products.h"

/* Tiles want 16 rows at once; with fewer a strip stays in the first cache. A strip lies on the stack. */
enum { STRIP_ROWS = 4, MOST_COLUMNS = 1 << 16, LINE_BYTES = 64 };

/* What a stream of stored bytes reads `ahead` bytes later is on its way into the second cache meanwhile: as many lines at once as a core may
 * ask for. The first cache has room for fewer that are on their way, 16 of an Intel core, which is 7 GB/s; it gets them from the second. */
enum { AHEAD = 4096, NEAR = 512 };

ALONE void fetch(const uint8_t *at, const int64_t ahead, const int lines)
{
    for (int line = 0; line < lines; line++) {
        __builtin_prefetch(at + ahead + LINE_BYTES * line, 0, 2);
        __builtin_prefetch(at + NEAR + LINE_BYTES * line, 0, 3);
    }
}

/* Writes rows [first, last) to out [last - first][columns]. set: a decoder's instruction set, NARROW, AVX2 or AVX512. number:
 * what it writes. */
typedef void (*strip_fn)(const struct matrix *m, int set, int number, int64_t first, int64_t last, uint16_t *out);

static inline void product_by_strips(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y,
                                     int64_t stride, int level, int number, strip_fn decode)
{
    const int32_t kind = number == NUMBER_F16 ? KIND_F16 : KIND_BF16;
    const product_fn multiply = product_of(kind, number, level);
    const int set = level < LEVEL_AVX512 ? level : LEVEL_AVX512, at_once = level == LEVEL_AMX ? TILE_ROWS : STRIP_ROWS;
    uint16_t strip[at_once * m->columns] __attribute__((aligned(64)));
    for (int64_t o = first; o < last; o += at_once) {
        const int64_t rows = last - o < at_once ? last - o : at_once;
        const struct matrix plain = {kind, 0, rows, m->columns, {strip}};
        decode(m, set, number, o, o + rows, strip);
        multiply(&plain, 0, rows, in, y + o, stride);
    }
}

#define STRIPS_AT(name, decode, level, number)                                                                                       \
    void name(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y, int64_t stride)               \
    {                                                                                                                                \
        product_by_strips(m, first, last, in, y, stride, level, number, decode);                                                     \
    }
/* name_portable, and of F16 inputs name_portable_f16: by strips that `decode` makes. */
#define STRIPS_PORTABLE(name, decode)                                                                                                \
    STRIPS_AT(name##_portable, decode, LEVEL_PORTABLE, NUMBER_BF16)                                                                  \
    STRIPS_AT(name##_portable_f16, decode, LEVEL_PORTABLE, NUMBER_F16)
/* Those, and name_avx2_f16. */
#define STRIPS(name, decode)                                                                                                         \
    STRIPS_PORTABLE(name, decode)                                                                                                    \
    STRIPS_AT(name##_avx2_f16, decode, LEVEL_AVX2, NUMBER_F16)

#endif
