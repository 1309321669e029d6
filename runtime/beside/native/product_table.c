/* Which function multiplies which kind of matrix on which machine. */
#define _GNU_SOURCE
#include "ahead.h"
#include "product_gguf.h"

#include <sys/syscall.h>
#include <unistd.h>

#define PRODUCT(name)                                                                                                                \
    void name(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y, int64_t stride)

PRODUCT(bf16_portable);
PRODUCT(bf16_avx2);
PRODUCT(bf16_avx512);
PRODUCT(bf16_dot);
PRODUCT(bf16_tiles);
PRODUCT(f16_portable);
PRODUCT(f16_avx2);
PRODUCT(f16_avx512);
PRODUCT(f32_portable);

/* Of a coded kind: decoded a few rows at a time, or, with few input rows, in registers. */
#define CODED(name)                                                                                                                  \
    PRODUCT(name##_portable);                                                                                                        \
    PRODUCT(name##_avx2);                                                                                                            \
    PRODUCT(name##_avx512);                                                                                                          \
    PRODUCT(name##_dot);                                                                                                             \
    PRODUCT(name##_amx)
#define CODED_F16(name)                                                                                                              \
    CODED(name);                                                                                                                     \
    PRODUCT(name##_portable_f16);                                                                                                    \
    PRODUCT(name##_avx2_f16);                                                                                                        \
    PRODUCT(name##_avx512_f16)
/* By words. */
#define WORDED(name)                                                                                                                 \
    CODED_F16(name);                                                                                                                 \
    PRODUCT(name##_dot_f16)
/* By bytes. */
#define BYTES(name)                                                                                                                  \
    CODED_F16(name);                                                                                                                 \
    PRODUCT(name##_few);                                                                                                             \
    PRODUCT(name##_few_amx);                                                                                                         \
    PRODUCT(name##_few_f16)
/* By floats. */
#define FLOATS(name)                                                                                                                 \
    CODED_F16(name);                                                                                                                 \
    PRODUCT(name##_few_avx512);                                                                                                      \
    PRODUCT(name##_few_dot);                                                                                                         \
    PRODUCT(name##_few_amx)
WORDED(int4);
PRODUCT(int4_shared_f16);
PRODUCT(int4_shared_dot_f16);
BYTES(int8);
BYTES(uint8);
CODED(lossless);
WORDED(mxfp4);
FLOATS(fp8);
FLOATS(fp8_row);
WORDED(q4_0);
BYTES(q8_0);
WORDED(q4_k);
WORDED(q5_k);
WORDED(q6_k);
WORDED(nvfp4);
/* Of numbers whose words lie across rows. */
PRODUCT(gptq4_portable);
PRODUCT(gptq4_avx2);
PRODUCT(gptq4_avx512);
PRODUCT(gptq4_whole);
PRODUCT(gptq4_amx);
PRODUCT(gptq4_portable_f16);
PRODUCT(gptq4_avx2_f16);
PRODUCT(awq_portable);
PRODUCT(awq_avx2);
PRODUCT(awq_avx512);
PRODUCT(awq_whole);
PRODUCT(awq_portable_f16);
#define BY(name) {name##_portable, X86(name##_avx2), X86(name##_avx512), X86(name##_dot), X86(name##_amx)}
#define BY_WORDS(name) {BY(name), {name##_portable_f16, X86(name##_avx2_f16), X86(name##_avx512_f16), X86(name##_dot_f16), 0}}
#define BY_BYTES(name)                                                                                                               \
    {{name##_portable, X86(name##_avx2), X86(name##_avx512), X86(name##_few), X86(name##_few_amx)},                                  \
     {name##_portable_f16, X86(name##_avx2_f16), X86(name##_avx512_f16), X86(name##_few_f16), 0}}
#define BY_FLOATS(name)                                                                                                              \
    {{name##_portable, X86(name##_avx2), X86(name##_few_avx512), X86(name##_few_dot), X86(name##_few_amx)},                          \
     {name##_portable_f16, X86(name##_avx2_f16), X86(name##_avx512_f16), 0, 0}}
#define F16_BY {f16_portable, X86(f16_avx2), X86(f16_avx512), 0, 0}

/* By the inputs' number and by level; the next lower one serves where a level has none. */
static const struct {
    const char *name;
    product_fn by[NUMBERS][LEVELS];
} table[KINDS] = {
    [KIND_BF16] = {"BF16", {{bf16_portable, X86(bf16_avx2), X86(bf16_avx512), X86(bf16_dot), TILES(bf16_tiles)}, {bf16_portable}}},
    [KIND_F16] = {"F16", {F16_BY, F16_BY}},
    [KIND_F32] = {"F32", {{f32_portable}, {f32_portable}}},
    [KIND_INT4] = {"INT4", {BY(int4), {int4_portable_f16, X86(int4_avx2_f16), X86(int4_shared_f16), X86(int4_shared_dot_f16), 0}}},
    [KIND_INT8] = {"INT8", BY_BYTES(int8)},
    [KIND_UINT8] = {"UINT8", BY_BYTES(uint8)},
    [KIND_LOSSLESS] = {"lossless", {BY(lossless)}},
    [KIND_MXFP4] = {"MXFP4", BY_WORDS(mxfp4)},
    [KIND_FP8] = {"FP8", BY_FLOATS(fp8)},
    [KIND_FP8_ROW] = {"FP8-row", BY_FLOATS(fp8_row)},
    [KIND_Q4_0] = {"Q4_0", BY_WORDS(q4_0)},
    [KIND_Q8_0] = {"Q8_0", BY_BYTES(q8_0)},
    [KIND_Q4_K] = {"Q4_K", BY_WORDS(q4_k)},
    [KIND_Q5_K] = {"Q5_K", BY_WORDS(q5_k)},
    [KIND_Q6_K] = {"Q6_K", BY_WORDS(q6_k)},
    [KIND_GPTQ4] = {"GPTQ4",
                    {{gptq4_portable, X86(gptq4_avx2), X86(gptq4_avx512), X86(gptq4_whole), X86(gptq4_amx)},
                     {gptq4_portable_f16, X86(gptq4_avx2_f16), X86(gptq4_avx512), X86(gptq4_whole), 0}}},
    [KIND_AWQ] = {"AWQ",
                  {{awq_portable, X86(awq_avx2), X86(awq_avx512), X86(awq_whole), 0},
                   {awq_portable_f16, X86(awq_avx2), X86(awq_avx512), X86(awq_whole), 0}}},
    [KIND_NVFP4] = {"NVFP4", BY_WORDS(nvfp4)},
};

int64_t products_version(void)
{
    return PRODUCTS_VERSION;
}

/* The kind's name; NULL past the last. */
const char *kind_name(int64_t kind)
{
    return kind >= 0 && kind < KINDS ? table[kind].name : 0;
}

product_fn product_of(int32_t kind, int32_t number, int level)
{
    while (level > LEVEL_PORTABLE && !table[kind].by[number][level])
        level--;
    return table[kind].by[number][level];
}

int64_t words_run(int32_t kind, int32_t number, int64_t rows, int level)
{
    const int fixed = words_fixed(level), across = kind == KIND_GPTQ4 || kind == KIND_AWQ;
    if (level < LEVEL_AVX2 || rows > (number == NUMBER_F16 && level >= LEVEL_AVX512 && !across ? MOST_F16 : MOST_WIDE))
        return 0;
    switch (kind) {
    case KIND_GPTQ4: return level < LEVEL_AVX512 ? 1 /* it is turned */ : fixed ? WORDS_COLUMNS : 0;
    case KIND_AWQ: return level >= LEVEL_AVX512 && fixed ? WORDS_COLUMNS : 0;
    case KIND_INT4: return number == NUMBER_BF16 || fixed || rows == 1;
    case KIND_MXFP4:
    case KIND_NVFP4: return 1;
    case KIND_Q4_0: return 16;
    case KIND_Q4_K:
    case KIND_Q5_K: return 32;
    case KIND_Q6_K: return 64;
    case KIND_INT8:
    case KIND_UINT8:
    case KIND_Q8_0: return fixed ? WORDS_COLUMNS : 0;
    default: return 0;
    }
}

int words_fixed(int level)
{
    return level == LEVEL_AVX2 || level >= LEVEL_AVX512_BF16;
}

int64_t fixed_summed(int64_t run, int level)
{
    return level != LEVEL_AVX2 ? WORDS_LANE : run == 32 ? 32 : run == 64 ? 16 : WORDS_LANE; /* the groups of Q4_K and Q5_K, and of Q6_K */
}

int64_t rows_at_once(int32_t kind)
{
    return kind == KIND_AWQ || kind == KIND_GPTQ4 ? ACROSS : TILE_ROWS;
}

int64_t row_bytes(const struct matrix *m)
{
    switch (m->kind) {
    case KIND_BF16:
    case KIND_F16: return 2 * m->columns;
    case KIND_F32: return 4 * m->columns;
    case KIND_INT8:
    case KIND_UINT8:
    case KIND_FP8:
    case KIND_FP8_ROW:
    case KIND_LOSSLESS: return m->columns;
    case KIND_INT4:
    case KIND_MXFP4:
    case KIND_NVFP4: return m->columns / 2;
    case KIND_Q4_0: return m->columns / SMALL * BYTES_Q4_0;
    case KIND_Q8_0: return m->columns / SMALL * BYTES_Q8_0;
    case KIND_Q4_K: return m->columns / LARGE * BYTES_Q4_K;
    case KIND_Q5_K: return m->columns / LARGE * BYTES_Q5_K;
    case KIND_Q6_K: return m->columns / LARGE * BYTES_Q6_K;
    default: return 0; /* GPTQ and AWQ: words lie across rows */
    }
}

/* For Python: whether a kind's rows lie by themselves, so that threads read ahead of them. */
int64_t kind_reads_ahead(int64_t kind)
{
    return row_bytes(&(struct matrix){.kind = (int32_t)kind, .columns = LARGE}) != 0;
}

#ifdef HAS_X86
#include <cpuid.h>

/* Tiles: the processor has them, and the kernel lets this process use them. */
static int tiles_granted(void)
{
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & 1u << 22) || !(d & 1u << 24))
        return 0;
    return !syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA);
}

int machine_level(void)
{
    unsigned a, b, c, d;
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_F16C))
        return LEVEL_PORTABLE;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl") ||
        !__builtin_cpu_supports("avx512dq"))
        return LEVEL_AVX2;
    /* what cuts codes of four bits; every processor with BF16 has it but one of 2020 */
    if (!__builtin_cpu_supports("avx512vbmi") || !__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a & 1u << 5))
        return LEVEL_AVX512;
    return tiles_granted() ? LEVEL_AMX : LEVEL_AVX512_BF16;
}
#else
int machine_level(void)
{
    return LEVEL_PORTABLE;
}
#endif
