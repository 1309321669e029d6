/* The same decoders for some rows of a matrix, by the caller's thread alone, with an instruction set of NARROW, AVX2 or AVX512 that the
 * machine has. Each writes rows [first, last) to out [last - first][columns], in BF16 or, where out_kind is 1, in F16; other arguments are
 * those of the decoder named alike. */
#ifndef PENSTOCK_STRIPS_H
#define PENSTOCK_STRIPS_H

#include <stdint.h>

void gguf_strip(int set, const uint8_t *weight, uint16_t *out, int64_t first, int64_t last, int64_t blocks_a_row, int64_t kind,
                int64_t out_kind);
void fp8_strip(int set, const uint8_t *weight, const float *scales, uint16_t *out, int64_t first, int64_t last, int64_t columns,
               int64_t tall, int64_t wide, int64_t out_kind);
/* In BF16. Escapes are put in by whoever calls. columns are a multiple of 128. */
void lossless_strip(int set, const uint8_t *low, const uint8_t *codes, const uint8_t *exponents, uint16_t *out, int64_t first,
                    int64_t last, int64_t columns);
/* scales F32 of all rows. */
void nibbles_strip(int set, const uint8_t *codes, const float *values, const float *scales, uint16_t *out, int64_t first, int64_t last,
                   int64_t columns, int64_t group, int64_t out_kind);
/* Numbers by columns, packed or signed bytes; scale_kind 0 is BF16, 1 F16. */
void whole_strip(int set, const void *words, const uint16_t *scales, const void *zeros, uint16_t *out, int64_t first, int64_t last,
                 int64_t rows, int64_t columns, int64_t groups, int64_t bits, int64_t layout, int64_t zero_kind, int64_t scale_kind,
                 int64_t out_kind);

#endif
