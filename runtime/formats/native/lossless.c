/* BF16 in 12 bits. Of each group of 128 numbers: 128 bytes of sign and mantissa, and 64 bytes of codes, of which byte i has that of number
 * i in its low half and that of number 64 + i in its high half. A code names one of 15 exponents; 15 says that the number is an escape. */
#include "rows.h"
#include "strips.h"

#ifdef HAS_INTRINSICS
#include <immintrin.h>
#endif

enum { GROUP = 128, HALF = 64, ESCAPE = 15 };

struct lossless_job {
    const uint8_t *low, *codes;
    uint16_t *out;
    uint8_t high_bits[16], low_bits[16]; /* of an exponent: its upper seven, and its last one at its place in the lower byte */
};

static void group_narrow(const struct lossless_job *job, const uint8_t *low, const uint8_t *codes, uint16_t *out)
{
    for (int i = 0; i < GROUP; i++) {
        uint32_t code = i < HALF ? codes[i] & 15u : codes[i - HALF] >> 4, byte = low[i];
        out[i] = (uint16_t)((byte & 0x80u) << 8 | (uint32_t)job->high_bits[code] << 8 | job->low_bits[code] | (byte & 0x7fu));
    }
}

static void lossless_narrow(const void *given, int64_t first, int64_t last)
{
    const struct lossless_job *job = given;
    for (int64_t group = first; group < last; group++)
        group_narrow(job, job->low + group * GROUP, job->codes + group * HALF, job->out + group * GROUP);
}

#ifdef HAS_INTRINSICS
FOR_AVX512 static void lossless_512(const void *given, int64_t first, int64_t last)
{
    const struct lossless_job *job = given;
    const __m512i high_bits = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)job->high_bits));
    const __m512i low_bits = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)job->low_bits));
    const __m512i nibble = _mm512_set1_epi8(15), sign = _mm512_set1_epi8((char)0x80);
    const __m512i first_half = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), second_half = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    for (int64_t group = first; group < last; group++) {
        __m512i both = _mm512_loadu_si512(job->codes + group * HALF);
        for (int half = 0; half < 2; half++) {
            __m512i code = _mm512_and_si512(half ? _mm512_srli_epi16(both, 4) : both, nibble);
            __m512i byte = _mm512_loadu_si512(job->low + group * GROUP + half * HALF);
            /* sign ? byte : table */
            __m512i upper = _mm512_ternarylogic_epi64(sign, byte, _mm512_shuffle_epi8(high_bits, code), 0xca);
            __m512i lower = _mm512_ternarylogic_epi64(sign, _mm512_shuffle_epi8(low_bits, code), byte, 0xca);
            __m512i even = _mm512_unpacklo_epi8(lower, upper), odd = _mm512_unpackhi_epi8(lower, upper);
            uint16_t *out = job->out + group * GROUP + half * HALF;
            _mm512_storeu_si512(out, _mm512_permutex2var_epi64(even, first_half, odd));
            _mm512_storeu_si512(out + 32, _mm512_permutex2var_epi64(even, second_half, odd));
        }
    }
}

FOR_AVX2 static void lossless_256(const void *given, int64_t first, int64_t last)
{
    const struct lossless_job *job = given;
    const __m256i high_bits = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)job->high_bits));
    const __m256i low_bits = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)job->low_bits));
    const __m256i nibble = _mm256_set1_epi8(15), sign = _mm256_set1_epi8((char)0x80);
    for (int64_t group = first; group < last; group++) {
        for (int quarter = 0; quarter < 4; quarter++) {
            __m256i both = _mm256_loadu_si256((const __m256i *)(job->codes + group * HALF + quarter % 2 * 32));
            __m256i code = _mm256_and_si256(quarter < 2 ? both : _mm256_srli_epi16(both, 4), nibble);
            __m256i byte = _mm256_loadu_si256((const __m256i *)(job->low + group * GROUP + quarter * 32));
            __m256i upper = _mm256_or_si256(_mm256_and_si256(byte, sign), _mm256_shuffle_epi8(high_bits, code));
            __m256i lower = _mm256_or_si256(_mm256_andnot_si256(sign, byte), _mm256_shuffle_epi8(low_bits, code));
            __m256i even = _mm256_unpacklo_epi8(lower, upper), odd = _mm256_unpackhi_epi8(lower, upper);
            __m256i *out = (__m256i *)(job->out + group * GROUP + quarter * 32);
            _mm256_storeu_si256(out, _mm256_permute2x128_si256(even, odd, 0x20));
            _mm256_storeu_si256(out + 1, _mm256_permute2x128_si256(even, odd, 0x31));
        }
    }
}
#endif

static rows_work lossless_by(int set)
{
#ifdef HAS_INTRINSICS
    if (set != NARROW)
        return set == AVX512 ? lossless_512 : lossless_256;
#endif
    return (void)set, lossless_narrow;
}

static struct lossless_job lossless_of(const uint8_t *low, const uint8_t *codes, const uint8_t *exponents, uint16_t *out)
{
    struct lossless_job job = {low, codes, out, {0}, {0}};
    for (int i = 0; i < 16; i++) {
        job.high_bits[i] = exponents[i] >> 1;
        job.low_bits[i] = (uint8_t)(exponents[i] << 7);
    }
    return job;
}

void lossless_strip(int set, const uint8_t *low, const uint8_t *codes, const uint8_t *exponents, uint16_t *out, int64_t first,
                    int64_t last, int64_t columns)
{
    struct lossless_job job = lossless_of(low + first * columns, codes + first * columns / 2, exponents, out);
    lossless_by(set)(&job, 0, (last - first) * columns / GROUP);
}

/* out [groups, 128] BF16 of low [groups, 128] and codes [groups, 64] by the 16 exponents (the last is unused), then the escapes' numbers
 * [escapes] put where at [escapes] says; places outside are left out. */
int64_t lossless_decode(const uint8_t *low, const uint8_t *codes, const uint8_t *exponents, const int32_t *at, const uint16_t *values,
                        uint16_t *out, int64_t groups, int64_t escapes, int64_t threads)
{
    struct lossless_job job = lossless_of(low, codes, exponents, out);
    over_rows(lossless_by(widest()), &job, groups, 16, threads);
    for (int64_t i = 0; i < escapes; i++)
        if (at[i] >= 0 && at[i] < groups * GROUP)
            out[at[i]] = values[i];
    return 0;
}

struct count_job {
    const uint16_t *numbers;
    int64_t *counts;
};

static void count_part(const void *given, int64_t first, int64_t last)
{
    const struct count_job *job = given;
    uint32_t found[4][256] = {{0}}; /* four, since neighbours have the same exponent */
    for (int64_t begin = first; begin < last; begin += 1 << 24) {
        int64_t end = begin + (1 << 24) < last ? begin + (1 << 24) : last, i = begin;
        for (; i + 4 <= end; i += 4)
            for (int j = 0; j < 4; j++)
                found[j][job->numbers[i + j] >> 7 & 255]++;
        for (; i < end; i++)
            found[0][job->numbers[i] >> 7 & 255]++;
        for (int j = 0; j < 4; j++)
            for (int exponent = 0; exponent < 256; exponent++) {
                __atomic_fetch_add(job->counts + exponent, (int64_t)found[j][exponent], __ATOMIC_RELAXED);
                found[j][exponent] = 0;
            }
    }
}

/* Adds to counts [256] how often each exponent occurs among count BF16 numbers. */
int64_t lossless_count(const uint16_t *numbers, int64_t *counts, int64_t count, int64_t threads)
{
    struct count_job job = {numbers, counts};
    over_rows(count_part, &job, count, 1 << 16, threads);
    return 0;
}

struct encode_job {
    const uint16_t *numbers;
    uint8_t *low, *codes;
    uint8_t code_of[256];
};

static void encode_part(const void *given, int64_t first, int64_t last)
{
    const struct encode_job *job = given;
    for (int64_t group = first; group < last; group++) {
        const uint16_t *numbers = job->numbers + group * GROUP;
        uint8_t *low = job->low + group * GROUP, *codes = job->codes + group * HALF;
        for (int i = 0; i < GROUP; i++)
            low[i] = (uint8_t)((numbers[i] >> 8 & 0x80u) | (numbers[i] & 0x7fu));
        for (int i = 0; i < HALF; i++)
            codes[i] = (uint8_t)(job->code_of[numbers[i] >> 7 & 255] | job->code_of[numbers[i + HALF] >> 7 & 255] << 4);
    }
}

/* The other way round. Escapes' places and numbers go to at and values, in order, at most room of them; returns how many there are. */
int64_t lossless_encode(const uint16_t *numbers, const uint8_t *exponents, uint8_t *low, uint8_t *codes, int32_t *at, uint16_t *values,
                        int64_t groups, int64_t room, int64_t threads)
{
    struct encode_job job = {numbers, low, codes, {0}};
    memset(job.code_of, ESCAPE, sizeof job.code_of);
    for (int code = ESCAPE - 1; code >= 0; code--)
        job.code_of[exponents[code]] = (uint8_t)code;
    over_rows(encode_part, &job, groups, 16, threads);
    int64_t escapes = 0;
    for (int64_t group = 0; group < groups; group++) {
        const uint8_t *of_group = codes + group * HALF;
        unsigned any = 0;
        for (int i = 0; i < HALF; i++)
            any |= (unsigned)(of_group[i] >> 4 == ESCAPE) | (unsigned)((of_group[i] & 15) == ESCAPE);
        for (int64_t i = group * GROUP; any && i < (group + 1) * GROUP; i++)
            if (job.code_of[numbers[i] >> 7 & 255] == ESCAPE) {
                if (escapes < room) {
                    at[escapes] = (int32_t)i;
                    values[escapes] = numbers[i];
                }
                escapes++;
            }
    }
    return escapes;
}
