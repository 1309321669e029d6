/* Numbers of 4 bits whose words do not lie along rows: some rows are turned into INT4's order, in the core's own cache, and multiplied so.
 * With AVX512 few inputs, and with AVX2 AWQ, are multiplied as they lie: product_across.c.
 *
 * part[0] words; part[1] scales [columns / group][rows], BF16, or F16 where part[3] is not NULL; part[2] zero points in words
 * [columns / group][rows / 8]. rows and columns are multiples of 8.
 * GPTQ4: words [columns / 8][rows], the lowest bits first; zero points are stored less one where part[4] is not NULL.
 * AWQ: words [columns][rows / 8], whose 4 bits hold rows 0, 2, 4, 6, 1, 3, 5, 7, in zero points, too. */
#include "product_blocks.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum { LINE_WORDS = 16, AWQ_ROWS = 64, OCTETS = AWQ_ROWS / 8 };

typedef uint32_t octets __attribute__((vector_size(4 * OCTETS)));

/* words [columns / 8][all] from row o on -> out [count][columns / 8]: 16 words of a row at a time, a line of memory. */
static void turn_gptq(const struct matrix *m, int64_t o, int64_t count, uint32_t *out)
{
    const int64_t width = m->columns / 8, whole = width / LINE_WORDS * LINE_WORDS;
    const uint32_t *words = (const uint32_t *)m->part[0] + o;
    int64_t from = 0;
#ifdef __SSE2__
    for (; from < whole; from += LINE_WORDS) {
        for (int64_t k = from; k < from + LINE_WORDS; k++) /* what the next rows need lies in the same pages */
            __builtin_prefetch(words + k * m->rows + LINE_WORDS, 0, 2);
        for (int64_t j = 0; j + 4 <= count; j += 4)
            for (int64_t k = from; k < from + LINE_WORDS; k += 4) {
                __m128i a = _mm_loadu_si128((const __m128i *)(words + k * m->rows + j));
                __m128i b = _mm_loadu_si128((const __m128i *)(words + (k + 1) * m->rows + j));
                __m128i c = _mm_loadu_si128((const __m128i *)(words + (k + 2) * m->rows + j));
                __m128i d = _mm_loadu_si128((const __m128i *)(words + (k + 3) * m->rows + j));
                __m128i ab = _mm_unpacklo_epi32(a, b), cd = _mm_unpacklo_epi32(c, d);
                _mm_storeu_si128((__m128i *)(out + j * width + k), _mm_unpacklo_epi64(ab, cd));
                _mm_storeu_si128((__m128i *)(out + (j + 1) * width + k), _mm_unpackhi_epi64(ab, cd));
                ab = _mm_unpackhi_epi32(a, b), cd = _mm_unpackhi_epi32(c, d);
                _mm_storeu_si128((__m128i *)(out + (j + 2) * width + k), _mm_unpacklo_epi64(ab, cd));
                _mm_storeu_si128((__m128i *)(out + (j + 3) * width + k), _mm_unpackhi_epi64(ab, cd));
            }
    }
#else
    (void)whole;
#endif
    for (; from < width; from++)
        for (int64_t j = 0; j < count; j++)
            out[j * width + from] = words[from * m->rows + j];
}

/* Which 4 bits of a word hold row 0 to 7. */
static const int lanes[8] = {0, 4, 1, 5, 2, 6, 3, 7};

/* 8 columns of 8 rows, a word each, become 8 rows of 8 columns: three steps of a transposition, of OCTETS such squares at once. */
ALONE void turn_squares(octets *word)
{
    _Pragma("GCC unroll 3") for (int step = 4; step; step /= 2)
    {
        const uint32_t mask = step == 4 ? 0xffffu : step == 2 ? 0x00ff00ffu : 0x0f0f0f0fu;
        _Pragma("GCC unroll 8") for (int k = 0; k < 8; k++)
            if (!(k & step)) {
                const octets a = word[k], b = word[k + step];
                word[k] = (a & mask) | (b & mask) << (4 * step);
                word[k + step] = (a >> (4 * step) & mask) | (b & ~mask);
            }
    }
}

/* words [columns][all / 8] from row o on -> out [count][columns / 8]. */
ALONE void turn_awq(const struct matrix *m, int64_t o, int64_t count, uint32_t *out)
{
    const int64_t width = m->columns / 8, across = m->rows / 8;
    const uint32_t *words = (const uint32_t *)m->part[0] + o / 8;
    uint32_t held[AWQ_ROWS][LINE_WORDS];
    for (int64_t from = 0; from < width; from += LINE_WORDS) {
        const int64_t some = width - from < LINE_WORDS ? width - from : LINE_WORDS;
        for (int64_t k = 0; k < some; k++) {
            octets word[8];
            _Pragma("GCC unroll 8") for (int64_t c = 0; c < 8; c++)
            {
                const uint32_t *at = words + ((from + k) * 8 + c) * across;
                __builtin_prefetch(at + OCTETS, 0, 2); /* what the next rows need lies in the same page */
                if (count == AWQ_ROWS)
                    memcpy(&word[c], at, sizeof word[c]);
                else {
                    word[c] = (octets){0};
                    memcpy(&word[c], at, (size_t)count / 8 * 4);
                }
            }
            turn_squares(word);
            _Pragma("GCC unroll 8") for (int row = 0; row < 8; row++)
                _Pragma("GCC unroll 8") for (int64_t j = 0; j < OCTETS; j++) held[j * 8 + row][k] = word[lanes[row]][j];
        }
        for (int64_t r = 0; r < count; r++)
            if (some == LINE_WORDS)
                memcpy(out + r * width + from, held[r], sizeof held[r]);
            else
                memcpy(out + r * width + from, held[r], (size_t)some * 4);
    }
}

static uint32_t zeros_of(uint32_t word, int awq, int less_one)
{
    uint32_t found = 0;
    for (int row = 0; awq && row < 8; row++)
        found |= (word >> (4 * lanes[row]) & 15u) << (4 * row);
    word = awq ? found : word;
    return less_one ? ((word & 0x77777777u) + 0x11111111u) ^ (word & 0x88888888u) : word;
}

static inline void product_by_turning(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y,
                                      int64_t stride, int level, int number, int awq)
{
    const product_fn multiply = product_of(KIND_INT4, number, level);
    const int64_t at_once = awq ? AWQ_ROWS : TILE_ROWS, groups = m->columns / m->group;
    uint32_t words[at_once * m->columns / 8] __attribute__((aligned(64))), zeros[at_once / 8 * groups];
    uint16_t scales[at_once * groups];
    for (int64_t o = first; o < last; o += at_once) {
        const int64_t count = last - o < at_once ? last - o : at_once;
        const struct matrix turned = {KIND_INT4, m->group, count, m->columns, {words, scales, zeros, m->part[3], 0}};
        for (int64_t g = 0; g < groups; g++) {
            const uint16_t *from = (const uint16_t *)m->part[1] + g * m->rows + o;
            for (int64_t r = 0; r < count; r++)
                scales[r * groups + g] = from[r];
            for (int64_t r = 0; r < count / 8; r++)
                zeros[r * groups + g] = zeros_of(((const uint32_t *)m->part[2])[g * (m->rows / 8) + o / 8 + r], awq, m->part[4] != NULL);
        }
        if (awq)
            turn_awq(m, o, count, words);
        else
            turn_gptq(m, o, count, words);
        multiply(&turned, 0, count, in, y + o, stride);
    }
}

#define TURNED(name, awq, level, number)                                                                                             \
    void name(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y, int64_t stride)                \
    {                                                                                                                                \
        product_by_turning(m, first, last, in, y, stride, level, number, awq);                                                       \
    }
TURNED(gptq4_portable, 0, LEVEL_PORTABLE, NUMBER_BF16)
TURNED(gptq4_portable_f16, 0, LEVEL_PORTABLE, NUMBER_F16)
TURNED(gptq4_avx2, 0, LEVEL_AVX2, NUMBER_BF16)
TURNED(gptq4_avx2_f16, 0, LEVEL_AVX2, NUMBER_F16)
TURNED(awq_portable, 1, LEVEL_PORTABLE, NUMBER_BF16)
TURNED(awq_portable_f16, 1, LEVEL_PORTABLE, NUMBER_F16)

#ifdef HAS_X86
void gptq4_whole(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y, int64_t stride);
TURNED(gptq4_turned, 0, LEVEL_AMX, NUMBER_BF16)
void gptq4_amx(const struct matrix *m, int64_t first, int64_t last, const struct inputs *in, float *y, int64_t stride)
{
    (in->rows < TILES_FROM ? gptq4_whole : gptq4_turned)(m, first, last, in, y, stride);
}
#endif
