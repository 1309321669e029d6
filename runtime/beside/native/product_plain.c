/* F16 and F32 matrices, and BF16 on any processor. part[0]: [rows][columns]. */
#include "products.h"

enum { LANES = 16 };

#define PLAIN(name, type, decode)                                                                                                    \
    void name(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y, int64_t stride)               \
    {                                                                                                                                \
        const int64_t columns = m->columns;                                                                                          \
        for (int64_t o = first; o < last; o++) {                                                                                     \
            const type *row = (const type *)m->part[0] + o * columns;                                                                \
            for (int64_t r = 0; r < in->rows; r++) {                                                                                 \
                const float *x = in->x + r * columns;                                                                                \
                float lanes[LANES] = {0}, sum = 0;                                                                                   \
                int64_t k = 0;                                                                                                       \
                for (; k + LANES <= columns; k += LANES)                                                                             \
                    for (int l = 0; l < LANES; l++)                                                                                  \
                        lanes[l] += decode(row[k + l]) * x[k + l];                                                                   \
                for (; k < columns; k++)                                                                                             \
                    sum += decode(row[k]) * x[k];                                                                                    \
                for (int l = 0; l < LANES; l++)                                                                                      \
                    sum += lanes[l];                                                                                                 \
                y[r * stride + o] = sum;                                                                                             \
            }                                                                                                                        \
        }                                                                                                                            \
    }

PLAIN(bf16_portable, uint16_t, from_bf16)
PLAIN(f16_portable, uint16_t, from_f16)
PLAIN(f32_portable, float, )
