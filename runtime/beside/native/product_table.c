/* Which function multiplies which kind of matrix on which machine. */
#define _GNU_SOURCE
#include "products.h"

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
PRODUCT(f32_portable);

/* By level; the next lower one serves where a level has none. */
static const struct {
    const char *name;
    product_fn by[LEVELS];
} table[KINDS] = {
    [KIND_BF16] = {"BF16", {bf16_portable, X86(bf16_avx2), X86(bf16_avx512), X86(bf16_dot), TILES(bf16_tiles)}},
    [KIND_F16] = {"F16", {f16_portable, 0, 0, 0, 0}},
    [KIND_F32] = {"F32", {f32_portable, 0, 0, 0, 0}},
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

product_fn product_of(int32_t kind, int level)
{
    while (level > LEVEL_PORTABLE && !table[kind].by[level])
        level--;
    return table[kind].by[level];
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
    if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a & 1u << 5))
        return LEVEL_AVX512;
    return tiles_granted() ? LEVEL_AMX : LEVEL_AVX512_BF16;
}
#else
int machine_level(void)
{
    return LEVEL_PORTABLE;
}
#endif
