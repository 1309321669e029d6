/* Rows of a matrix divided among threads, and what the formats' decoders share. */
#ifndef PENSTOCK_ROWS_H
#define PENSTOCK_ROWS_H

#include "floats.h"

/* Of every function that Python calls; compiled.py names the same number. Raised when one gets other arguments. */
#define FORMATS_VERSION 1

/* Does rows [first, last) of a job. */
typedef void (*rows_work)(const void *job, int64_t first, int64_t last);

/* Calls work for all of rows, on at most threads threads, the caller's among them, and returns when all is done. Parts begin at multiples
 * of grain. A caller that finds the other threads busy does all by itself. */
void over_rows(rows_work work, const void *job, int64_t rows, int64_t grain, int64_t threads);

#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_INTRINSICS 1
#define FOR_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))
#define FOR_AVX2 __attribute__((target("avx2")))
enum { NARROW, AVX2, AVX512 };

/* The widest instruction set for which a decoder may have a function of its own. */
static inline int widest(void)
{
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        return AVX512;
    return __builtin_cpu_supports("avx2") ? AVX2 : NARROW;
}

/* Makes of name, a function of plain loops that is ALONE, name_by, which runs it compiled for an instruction set, and name_wide for the
 * widest one of the machine. */
#define WIDER(name)                                                                                                                  \
    FOR_AVX512 static void name##_512(const void *job, int64_t first, int64_t last) { name(job, first, last); }                     \
    FOR_AVX2 static void name##_256(const void *job, int64_t first, int64_t last) { name(job, first, last); }                       \
    static void name##_128(const void *job, int64_t first, int64_t last) { name(job, first, last); }                                \
    static rows_work name##_by(int set) { return set == AVX512 ? name##_512 : set == AVX2 ? name##_256 : name##_128; }              \
    static void name##_wide(const void *job, int64_t first, int64_t last) { name##_by(widest())(job, first, last); }
#define ALONE static inline __attribute__((always_inline))
#else
enum { NARROW, AVX2, AVX512 };
#define WIDER(name)                                                                                                                  \
    static void name##_wide(const void *job, int64_t first, int64_t last) { name(job, first, last); }                               \
    static rows_work name##_by(int set) { return (void)set, name##_wide; }
#define ALONE static inline
#endif

#endif
