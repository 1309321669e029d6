/* FP8 E4M3 with F32 scales of blocks: every element is float(element) * scale, rounded once to BF16 or F16. */
#include "rows.h"
#include "strips.h"

struct fp8_job {
    const uint8_t *weight;
    const float *scales;
    uint16_t *out;
    int64_t columns, tall, wide, scale_columns, begin; /* begin: the row that out begins with */
    int64_t out_kind;
};

/* What is written. */
enum { BF16, F16 };
enum { STRETCH = 128 };

/* E4M3FN: no infinities, 0x7f and 0xff are NaN. */
ALONE float from_e4m3(uint32_t bits)
{
    uint32_t magnitude = bits & 0x7fu, value = (magnitude << 20) + (120u << 23), small;
    float below = as_float(magnitude << 20 | 121u << 23) - 0.015625f; /* without the leading 1 of a normal number */
    memcpy(&small, &below, sizeof small);
    value = magnitude < 8u ? small : value;
    value = magnitude == 0x7fu ? 0x7fc00000u : value;
    return as_float(value | (bits & 0x80u) << 24);
}

/* In two loops, each of which a compiler makes wide. */
ALONE void to_halves(const uint8_t *weight, const float scale, uint16_t *out, int64_t count)
{
    float values[STRETCH];
    for (int64_t from = 0; from < count; from += STRETCH) {
        const int64_t some = count - from < STRETCH ? count - from : STRETCH;
        for (int64_t i = 0; i < some; i++)
            values[i] = from_e4m3(weight[from + i]) * scale;
        for (int64_t i = 0; i < some; i++)
            out[from + i] = to_f16(values[i]);
    }
}

ALONE void fp8_rows(const void *given, int64_t first, int64_t last)
{
    const struct fp8_job *job = given;
    for (int64_t row = first; row < last; row++) {
        const uint8_t *weight = job->weight + row * job->columns;
        uint16_t *out = job->out + (row - job->begin) * job->columns;
        const float *scales = job->scales + row / job->tall * job->scale_columns;
        for (int64_t from = 0; from < job->columns; from += job->wide, scales++) {
            int64_t to = from + job->wide < job->columns ? from + job->wide : job->columns;
            const float scale = *scales;
            if (job->out_kind == F16)
                to_halves(weight + from, scale, out + from, to - from);
            else
                for (int64_t column = from; column < to; column++)
                    out[column] = to_bf16(from_e4m3(weight[column]) * scale);
        }
    }
}
WIDER(fp8_rows)

/* out [rows, columns] BF16 of weight [rows, columns] E4M3 and scales [ceil(rows / tall), ceil(columns / wide)] F32. */
int64_t fp8_decode(const uint8_t *weight, const float *scales, uint16_t *out, int64_t rows, int64_t columns, int64_t tall, int64_t wide,
                   int64_t threads)
{
    struct fp8_job job = {weight, scales, out, columns, tall, wide, (columns + wide - 1) / wide, 0, BF16};
    over_rows(fp8_rows_wide, &job, rows, 1, threads);
    return 0;
}

void fp8_strip(int set, const uint8_t *weight, const float *scales, uint16_t *out, int64_t first, int64_t last, int64_t columns,
               int64_t tall, int64_t wide, int64_t out_kind)
{
    struct fp8_job job = {weight, scales, out, columns, tall, wide, (columns + wide - 1) / wide, first, out_kind};
    fp8_rows_by(set)(&job, first, last);
}
