/* Products of a stored matrix with a few input rows, on the CPU. */
#ifndef PENSTOCK_PRODUCTS_H
#define PENSTOCK_PRODUCTS_H

#include "../../formats/native/floats.h"

/* Of every function that Python calls; host_library.py names the same number. Raised when one gets other arguments. */
#define PRODUCTS_VERSION 12

/* One a stored format; product_table.c names each, and each has a file product_KIND.c. */
enum matrix_kind {
    KIND_BF16,
    KIND_F16,
    KIND_F32,
    KIND_INT4,
    KIND_INT8,
    KIND_UINT8,
    KIND_LOSSLESS,
    KIND_MXFP4,
    KIND_FP8,
    KIND_FP8_ROW,
    KIND_Q4_0,
    KIND_Q8_0,
    KIND_Q4_K,
    KIND_Q5_K,
    KIND_Q6_K,
    KIND_GPTQ4,
    KIND_AWQ,
    KIND_NVFP4,
    KINDS
};

/* What inputs are, and what results are rounded to. Formats' decoders have the same numbers. */
enum number { NUMBER_BF16, NUMBER_F16, NUMBERS };

/* Instruction sets, each with all of those before it. */
enum level { LEVEL_PORTABLE, LEVEL_AVX2, LEVEL_AVX512, LEVEL_AVX512_BF16, LEVEL_AMX, LEVELS };

/* rows: outputs; columns: inputs; part: as the kind's file says. */
struct matrix {
    int32_t kind, group;
    int64_t rows, columns;
    const void *part[5];
};

/* Tiles multiply 16 input rows at once; fewer than so many are faster without. */
enum { TILE_ROWS = 16, TILES_FROM = 5, ACROSS = 128 };

/* So many input rows are multiplied at once without tiles. Of F16 so many are by words, some after the others: strips are slower. */
enum { MOST_WIDE = 4, MOST_F16 = 16 };

/* Columns of product_words.h that are summed at once, and neighbours whose inputs' sum is known. */
enum { WORDS_COLUMNS = 128, WORDS_LANE = 8 };

/* x, xb: [rows][columns], F32 and, where inputs are BF16, the same in BF16. pairs: NULL, or the same for tiles: [rows / 16, rounded up]
 * [columns / 2, rounded up][16][2] BF16, zeros where no row or column is. words: where `run` is not 0, xb in the order of product_words.h,
 * [rows][columns / 128, rounded up][4][32], zeros where no column is; and its sums of 8 neighbouring columns. Both lie at multiples of 64
 * bytes. F16 inputs have two rows of words each: an F16 number is the sum of two BF16 numbers. Sums of 8 columns lie with the first,
 * zeros with the second. steps: where `run` is not 0 and words_fixed says so, words are whole numbers of 16 bits, one row of each input, and
 * stand for what they are times a step for each 128 columns, [rows][columns / 128, rounded up]; not a number where an input is none or has
 * no end. Sums are then of fixed_summed columns. */
struct inputs {
    int64_t rows, columns, run;
    const float *x;
    const uint16_t *xb, *pairs, *words;
    const float *eights, *steps;
};

/* y[r * stride + o]: row o of m times input row r, summed in F32; o in [first, last), all r. first is a multiple of rows_at_once. */
typedef void (*product_fn)(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y, int64_t stride);

/* The function of a kind with inputs of a number, for the widest instruction set up to level. F16 is multiplied by all but lossless. */
product_fn product_of(int32_t kind, int32_t number, int level);

/* The run of product_words.h by which products of a kind read so many input rows at level; WORDS_COLUMNS: columns in their order; 0 for none. */
int64_t words_run(int32_t kind, int32_t number, int64_t rows, int level);

/* Whether words are whole numbers of 16 bits at level: of product_fixed.h. */
int words_fixed(int level);

/* Columns of which whole numbers' sum is known. */
int64_t fixed_summed(int64_t run, int level);

/* Rows of a matrix of a kind that a thread should claim together: a multiple of 16. */
int64_t rows_at_once(int32_t kind);

/* The machine's level; asks the kernel for tiles, which needs asking once a process. */
int machine_level(void);

#define ALONE static inline __attribute__((always_inline))

#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_X86 1
#define X86(function) function
#define FOR_AVX2 __attribute__((target("avx2,fma,f16c")))
#define FOR_AVX512 __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")))
#define FOR_AVX512_BF16 __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))
#define FOR_AMX __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16")))
#else
#define X86(function) 0
#endif

#if defined(HAS_X86) && (__GNUC__ >= 11 || __clang_major__ >= 12)
#define HAS_TILES 1
#define TILES(function) function
#else
#define TILES(function) 0
#endif

#endif
