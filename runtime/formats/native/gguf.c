/* Blocks of GGUF files: 32 or 256 elements of a row with their scales. Every element is computed in F32, each product and difference rounded
 * (compile without contraction), and rounded once more to BF16 or F16. */
#include "rows.h"
#include "strips.h"

struct gguf_job {
    const uint8_t *weight;
    uint16_t *out;
    int64_t kind; /* ggml's number of the type */
    int64_t out_kind;
};

/* What is written. */
enum { BF16, F16 };

enum { Q4_0 = 2, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14, SMALL = 32, LARGE = 256 };

ALONE float from_half(const uint8_t *bytes)
{
    uint32_t bits = bytes[0] | (uint32_t)bytes[1] << 8, sign = (bits & 0x8000u) << 16, rest = (bits & 0x7fffu) << 13;
    if (rest >= 0x7c00u << 13)
        return as_float(sign | 0x7f800000u | (rest & 0x7fffffu));
    float value = as_float(rest) * 0x1p112f;
    return sign ? -value : value;
}

ALONE void round_all(const float *values, uint16_t *out, int count, int64_t kind)
{
    if (kind == F16)
        for (int i = 0; i < count; i++)
            out[i] = to_f16(values[i]);
    else
        for (int i = 0; i < count; i++)
            out[i] = to_bf16(values[i]);
}

ALONE void q4_0(const uint8_t *block, float *values)
{
    const float scale = from_half(block);
    for (int i = 0; i < 16; i++) {
        values[i] = (float)((block[2 + i] & 15) - 8) * scale;
        values[16 + i] = (float)((block[2 + i] >> 4) - 8) * scale;
    }
}

ALONE void q8_0(const uint8_t *block, float *values)
{
    const float scale = from_half(block);
    for (int i = 0; i < 32; i++)
        values[i] = (float)(int8_t)block[2 + i] * scale;
}

/* What the codes of group g of eight are multiplied by, and what is subtracted then. */
ALONE void six_bits(const uint8_t *block, int g, float *factor, float *offset)
{
    const uint8_t *six = block + 4;
    int by = g < 4 ? six[g] & 63 : (six[g + 4] & 15) | (six[g - 4] >> 6) << 4;
    int less = g < 4 ? six[g + 4] & 63 : six[g + 4] >> 4 | (six[g] >> 6) << 4;
    *factor = from_half(block) * (float)by;
    *offset = from_half(block + 2) * (float)less;
}

ALONE void q4_k(const uint8_t *block, float *values)
{
    for (int pair = 0; pair < 4; pair++) {
        const uint8_t *codes = block + 16 + pair * 32;
        float factor, offset, next_factor, next_offset, *low = values + pair * 64, *high = low + 32;
        six_bits(block, 2 * pair, &factor, &offset);
        six_bits(block, 2 * pair + 1, &next_factor, &next_offset);
        for (int i = 0; i < 32; i++)
            low[i] = (float)(codes[i] & 15) * factor - offset;
        for (int i = 0; i < 32; i++)
            high[i] = (float)(codes[i] >> 4) * next_factor - next_offset;
    }
}

ALONE void q5_k(const uint8_t *block, float *values)
{
    for (int g = 0; g < 8; g++) {
        const uint8_t *codes = block + 48 + g / 2 * 32, *fifth = block + 16;
        const int shift = g % 2 * 4;
        float factor, offset;
        six_bits(block, g, &factor, &offset);
        for (int i = 0; i < 32; i++)
            values[g * 32 + i] = (float)((codes[i] >> shift & 15) | (fifth[i] >> g & 1) << 4) * factor - offset;
    }
}

ALONE void q6_k(const uint8_t *block, float *values)
{
    const float scale = from_half(block + 208);
    for (int g = 0; g < 8; g++) {
        const uint8_t *low = block + g / 4 * 64 + g % 2 * 32, *high = block + 128 + g / 4 * 32;
        const int by_low = g % 4 / 2 * 4, by_high = g % 4 * 2;
        for (int half = 0; half < 2; half++) {
            const float factor = scale * (float)(int8_t)block[192 + 2 * g + half];
            for (int i = half * 16; i < half * 16 + 16; i++) {
                int code = (low[i] >> by_low & 15) | (high[i] >> by_high & 3) << 4;
                values[g * 32 + i] = (float)(code - 32) * factor;
            }
        }
    }
}

ALONE void gguf_blocks(const void *given, int64_t first, int64_t last)
{
    const struct gguf_job *job = given;
    float values[LARGE];
    for (int64_t block = first; block < last; block++)
        switch (job->kind) {
        case Q4_0:
            q4_0(job->weight + block * 18, values);
            round_all(values, job->out + block * SMALL, SMALL, job->out_kind);
            break;
        case Q8_0:
            q8_0(job->weight + block * 34, values);
            round_all(values, job->out + block * SMALL, SMALL, job->out_kind);
            break;
        case Q4_K:
            q4_k(job->weight + block * 144, values);
            round_all(values, job->out + block * LARGE, LARGE, job->out_kind);
            break;
        case Q5_K:
            q5_k(job->weight + block * 176, values);
            round_all(values, job->out + block * LARGE, LARGE, job->out_kind);
            break;
        case Q6_K:
            q6_k(job->weight + block * 210, values);
            round_all(values, job->out + block * LARGE, LARGE, job->out_kind);
            break;
        }
}
WIDER(gguf_blocks)

static int64_t nbytes_of(int64_t kind)
{
    return kind == Q4_0 ? 18 : kind == Q8_0 ? 34 : kind == Q4_K ? 144 : kind == Q5_K ? 176 : 210;
}

void gguf_strip(int set, const uint8_t *weight, uint16_t *out, int64_t first, int64_t last, int64_t blocks_a_row, int64_t kind,
                int64_t out_kind)
{
    struct gguf_job job = {weight + first * blocks_a_row * nbytes_of(kind), out, kind, out_kind};
    gguf_blocks_by(set)(&job, 0, (last - first) * blocks_a_row);
}

/* out BF16 of so many blocks of the type kind, one of the five above, one after the other in weight. */
int64_t gguf_decode(const uint8_t *weight, uint16_t *out, int64_t blocks, int64_t kind, int64_t threads)
{
    struct gguf_job job = {weight, out, kind, BF16};
    over_rows(gguf_blocks_wide, &job, blocks, 64, threads);
    return 0;
}
