/* Numbers of 4 bits, two a byte, the lower half first, in groups that share a scale: MXFP4, NVFP4. */
#include "rows.h"
#include "strips.h"

#ifdef HAS_INTRINSICS
#include <immintrin.h>
#endif

/* What is written. */
enum { BF16 = 0, F16 = 1 };

struct nibbles_job {
    const uint8_t *codes;
    const float *values, *scales;
    uint16_t *out;
    int64_t group, kind;
};

/* What each code of a group is decoded to. */
ALONE void fill(const struct nibbles_job *job, int64_t group, uint16_t table[16])
{
    const float scale = job->scales[group];
    float products[16];
    for (int code = 0; code < 16; code++)
        products[code] = job->values[code] * scale;
    if (job->kind == BF16)
        for (int code = 0; code < 16; code++)
            table[code] = to_bf16(products[code]);
    else
        for (int code = 0; code < 16; code++)
            table[code] = to_f16(products[code]);
}

ALONE void look_up(const uint8_t *codes, int64_t from, int64_t bytes, const uint16_t table[16], uint16_t *out)
{
    for (int64_t i = from; i < bytes; i++) {
        out[2 * i] = table[codes[i] & 15];
        out[2 * i + 1] = table[codes[i] >> 4];
    }
}

static void nibbles_narrow(const void *given, int64_t first, int64_t last)
{
    const struct nibbles_job *job = given;
    uint16_t table[16];
    for (int64_t group = first; group < last; group++) {
        fill(job, group, table);
        look_up(job->codes + group * job->group / 2, 0, job->group / 2, table, job->out + group * job->group);
    }
}

#ifdef HAS_INTRINSICS
/* The bytes of 16 numbers apart: all lower ones, all upper ones. */
FOR_AVX2 static inline void split(const uint16_t table[16], __m128i *lower, __m128i *upper)
{
    const __m128i low = _mm_set1_epi16(255);
    __m128i one = _mm_loadu_si128((const __m128i *)table), two = _mm_loadu_si128((const __m128i *)(table + 8));
    *lower = _mm_packus_epi16(_mm_and_si128(one, low), _mm_and_si128(two, low));
    *upper = _mm_packus_epi16(_mm_srli_epi16(one, 8), _mm_srli_epi16(two, 8));
}

/* 8 bytes of codes, as 16 codes in their order. */
FOR_AVX2 static inline __m128i sixteen(const uint8_t *codes)
{
    const __m128i nibble = _mm_set1_epi8(15);
    __m128i both = _mm_loadl_epi64((const __m128i *)codes);
    return _mm_and_si128(_mm_unpacklo_epi8(both, _mm_srli_epi16(both, 4)), nibble);
}

FOR_AVX2 static inline void look_up_256(const uint8_t *codes, int64_t bytes, const uint16_t table[16], uint16_t *out)
{
    __m128i lower, upper;
    split(table, &lower, &upper);
    int64_t i = 0;
    for (; i + 8 <= bytes; i += 8) {
        __m128i code = sixteen(codes + i);
        __m128i low = _mm_shuffle_epi8(lower, code), high = _mm_shuffle_epi8(upper, code);
        _mm_storeu_si128((__m128i *)(out + 2 * i), _mm_unpacklo_epi8(low, high));
        _mm_storeu_si128((__m128i *)(out + 2 * i + 8), _mm_unpackhi_epi8(low, high));
    }
    look_up(codes, i, bytes, table, out);
}

FOR_AVX2 static void nibbles_256(const void *given, int64_t first, int64_t last)
{
    const struct nibbles_job *job = given;
    uint16_t table[16];
    for (int64_t group = first; group < last; group++) {
        fill(job, group, table);
        look_up_256(job->codes + group * job->group / 2, job->group / 2, table, job->out + group * job->group);
    }
}

FOR_AVX512 static void nibbles_512(const void *given, int64_t first, int64_t last)
{
    const struct nibbles_job *job = given;
    const __m256i nibble = _mm256_set1_epi16(0x0f0f);
    uint16_t table[16];
    for (int64_t group = first; group < last; group++) {
        const uint8_t *codes = job->codes + group * job->group / 2;
        uint16_t *out = job->out + group * job->group;
        int64_t bytes = job->group / 2, i = 0;
        fill(job, group, table);
        const __m512i numbers = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)table));
        for (; i + 16 <= bytes; i += 16) {
            __m256i both = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(codes + i)));
            __m256i code = _mm256_and_si256(_mm256_or_si256(both, _mm256_slli_epi16(both, 4)), nibble);
            _mm512_storeu_si512(out + 2 * i, _mm512_permutexvar_epi16(_mm512_cvtepu8_epi16(code), numbers));
        }
        look_up(codes, i, bytes, table, out);
    }
}
#endif

static rows_work nibbles_by(int set)
{
#ifdef HAS_INTRINSICS
    if (set != NARROW)
        return set == AVX512 ? nibbles_512 : nibbles_256;
#endif
    return (void)set, nibbles_narrow;
}

void nibbles_strip(int set, const uint8_t *codes, const float *values, const float *scales, uint16_t *out, int64_t first, int64_t last,
                   int64_t columns, int64_t group, int64_t out_kind)
{
    struct nibbles_job job = {codes + first * columns / 2, values, scales + first * columns / group, out, group, out_kind};
    nibbles_by(set)(&job, 0, (last - first) * columns / group);
}

/* out [groups, group], BF16 or F16 as kind says, of codes [groups, group / 2]: values[code] * scale by values [16] and scales [groups], all
 * F32, rounded once. group is even. */
int64_t nibbles_decode(const uint8_t *codes, const float *values, const float *scales, uint16_t *out, int64_t groups, int64_t group,
                       int64_t kind, int64_t threads)
{
    struct nibbles_job job = {codes, values, scales, out, group, kind};
    over_rows(nibbles_by(widest()), &job, groups, 64, threads);
    return 0;
}
