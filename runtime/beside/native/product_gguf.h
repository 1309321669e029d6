/* Blocks of GGUF files, as products and strips of every instruction set know them. */
#ifndef PENSTOCK_PRODUCT_GGUF_H
#define PENSTOCK_PRODUCT_GGUF_H

#include "product_strips.h"

/* ggml's numbers of the types, bytes and columns of a block. */
enum { TYPE_Q4_0 = 2, TYPE_Q8_0 = 8, TYPE_Q4_K = 12, TYPE_Q5_K = 13, TYPE_Q6_K = 14, SMALL = 32, LARGE = 256 };
enum { BYTES_Q4_0 = 18, BYTES_Q8_0 = 34, BYTES_Q4_K = 144, BYTES_Q5_K = 176, BYTES_Q6_K = 210 };

/* A row of blocks. factors: of a large block's eight groups what codes are multiplied by, then what is subtracted. */
struct gguf_row {
    const uint8_t *blocks;
    float factors[16];
};

#define GGUF_STRIP(name, type, block_columns)                                                                                        \
    static void name##_strip(const struct matrix *m, int set, int number, int64_t first, int64_t last, uint16_t *out)               \
    {                                                                                                                                \
        gguf_strip(set, m->part[0], out, first, last, m->columns / block_columns, type, number);                                     \
    }
GGUF_STRIP(q4_0, TYPE_Q4_0, SMALL)
GGUF_STRIP(q8_0, TYPE_Q8_0, SMALL)
GGUF_STRIP(q4_k, TYPE_Q4_K, LARGE)
GGUF_STRIP(q5_k, TYPE_Q5_K, LARGE)
GGUF_STRIP(q6_k, TYPE_Q6_K, LARGE)

#define GGUF_OPEN(name, target, nbytes, block_columns)                                                                               \
    target ALONE void open_##name(struct gguf_row *row, const struct matrix *m, int64_t o)                                           \
    {                                                                                                                                \
        row->blocks = (const uint8_t *)m->part[0] + o * (m->columns / block_columns) * nbytes;                                       \
    }
#define GGUF_OPENS(target)                                                                                                           \
    GGUF_OPEN(q4_0, target, BYTES_Q4_0, SMALL)                                                                                       \
    GGUF_OPEN(q8_0, target, BYTES_Q8_0, SMALL)                                                                                       \
    GGUF_OPEN(q4_k, target, BYTES_Q4_K, LARGE)                                                                                       \
    GGUF_OPEN(q5_k, target, BYTES_Q5_K, LARGE)                                                                                       \
    GGUF_OPEN(q6_k, target, BYTES_Q6_K, LARGE)

#endif
