/* A token's keys are divided into spans, whose sums are put together at the end: so many threads have work with one row, too. A span's sums
 * depend on nothing else, so that the result is the same for any number of threads. */
#define _GNU_SOURCE
#include "attend.h"
#include "approximations.h"

enum { LANES = 16, SPAN = 256, CHUNK = 32, TOGETHER = 4, MOST_DIM = 512 };

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

/* sums [tokens][spans][heads][value_dim], and beside each the largest score and the sum of weights. */
struct partial {
    float *sums, *most, *total;
};

struct attending {
    const struct attend *a;
    struct partial partial;
    int64_t spans;
    int level;
};

/* Keys [begin, end) of one token's row, and `heads` heads of K from kv_head on, whose rows lie side by side: memory is read in its order.
 * query: the token's. place: of its first query head's sums in this span. */
struct piece {
    const int64_t *pages;
    const uint16_t *query;
    int64_t position, begin, end, place, kv_head, heads;
};

/* Sums, largest scores and weights of a piece to their places. The coming piece, or NULL, is fetched towards its end. */
typedef void (*piece_fn)(const struct attending *work, const struct piece *piece, const struct piece *coming);

#ifdef HAS_X86
#include "attend_256.h"
#include "attend_512.h"
#endif

int64_t tokens_of(const struct attend *a)
{
    int64_t tokens = 0;
    for (int64_t r = 0; r < a->rows; r++)
        tokens += a->counts[r];
    return tokens;
}

static int64_t spans_of(const struct attend *a)
{
    int64_t keys = a->window && a->window < a->most_keys ? a->window : a->most_keys;
    return (keys + SPAN - 1) / SPAN;
}

int64_t attend_bytes(const struct attend *a)
{
    return a->tokens * a->heads * spans_of(a) * (a->value_dim + 2) * 4;
}

/* The row that token `number` of all rows' tokens belongs to, and which of that row's it is. */
static int64_t row_of(const struct attend *a, int64_t number, int64_t *token)
{
    int64_t row = 0;
    for (; number >= a->counts[row]; row++)
        number -= a->counts[row];
    *token = number;
    return row;
}

ALONE void load(floats *to, const uint16_t *from)
{
    halves held;
    memcpy(&held, from, sizeof held);
    words bits = __builtin_convertvector(held, words) << 16;
    memcpy(to, &bits, sizeof bits);
}

ALONE float sum_of(const floats *lanes)
{
    float a[LANES];
    memcpy(a, lanes, sizeof a);
    for (int i = 0; i < 8; i++)
        a[i] += a[i + 8];
    for (int i = 0; i < 4; i++)
        a[i] += a[i + 4];
    return (a[0] + a[2]) + (a[1] + a[3]);
}

/* `wide` query heads of one K head over keys [begin, end) of one row. q [wide][key_dim]; sums [wide][value_dim] become what they add up to. */
ALONE void over_keys(const struct attend *a, const int64_t *pages, const float *q, const float *slopes, int64_t kv_head, int64_t position,
                     int64_t begin, int64_t end, float *sums, float *most, float *total, const int wide)
{
    float scores[TOGETHER][CHUNK];
    const uint16_t *values[CHUNK];
    for (int h = 0; h < wide; h++)
        most[h] = -1e30f, total[h] = 0;
    memset(sums, 0, (size_t)(wide * a->value_dim) * sizeof *sums);
    for (int64_t base = begin; base < end; base += CHUNK) {
        const int64_t count = end - base < CHUNK ? end - base : CHUNK;
        float shrunk[TOGETHER];
        for (int64_t j = 0; j < count; j++) {
            const int64_t key = base + j, slot = pages[key / a->page_tokens] * a->page_tokens + key % a->page_tokens;
            const uint16_t *k = a->keys + slot * a->k_token + kv_head * a->k_head;
            floats found[TOGETHER];
            values[j] = a->values + slot * a->v_token + kv_head * a->v_head;
            _Pragma("GCC unroll 4") for (int h = 0; h < wide; h++) found[h] = (floats){0};
            for (int64_t d = 0; d < a->key_dim; d += LANES) {
                floats row;
                load(&row, k + d);
                _Pragma("GCC unroll 4") for (int h = 0; h < wide; h++)
                {
                    floats x;
                    memcpy(&x, q + h * a->key_dim + d, sizeof x);
                    found[h] += row * x;
                }
            }
            _Pragma("GCC unroll 4") for (int h = 0; h < wide; h++) scores[h][j] = sum_of(&found[h]) * a->scaling;
        }
        for (int h = 0; h < wide; h++) {
            float *score = scores[h], higher = most[h], weights = 0;
            for (int64_t j = 0; a->softcap > 0 && j < count; j++)
                score[j] = a->softcap * tanh_of(score[j] / a->softcap);
            for (int64_t j = 0; slopes && j < count; j++)
                score[j] += slopes[h] * (float)(base + j - position);
            for (int64_t j = 0; j < count; j++)
                higher = score[j] > higher ? score[j] : higher;
            for (int64_t j = count; j < CHUNK; j++)
                score[j] = -1e30f;
            for (int j = 0; j < CHUNK; j++)
                score[j] = exp_of(score[j] - higher);
            for (int64_t j = 0; j < count; j++)
                weights += score[j];
            shrunk[h] = exp_of(most[h] - higher);
            total[h] = total[h] * shrunk[h] + weights;
            most[h] = higher;
        }
        for (int64_t d = 0; d < a->value_dim; d += LANES) {
            floats found[TOGETHER];
            _Pragma("GCC unroll 4") for (int h = 0; h < wide; h++)
            {
                memcpy(&found[h], sums + h * a->value_dim + d, sizeof found[h]);
                found[h] *= shrunk[h];
            }
            for (int64_t j = 0; j < count; j++) {
                floats row;
                load(&row, values[j] + d);
                _Pragma("GCC unroll 4") for (int h = 0; h < wide; h++) found[h] += row * scores[h][j];
            }
            _Pragma("GCC unroll 4") for (int h = 0; h < wide; h++) memcpy(sums + h * a->value_dim + d, &found[h], sizeof found[h]);
        }
    }
}

static void piece_portable(const struct attending *work, const struct piece *piece, const struct piece *coming)
{
    (void)coming;
    const struct attend *a = work->a;
    const int64_t group = a->heads / a->kv_heads, first = piece->kv_head * group;
    float q[TOGETHER * MOST_DIM], sums[TOGETHER * MOST_DIM], most[TOGETHER], total[TOGETHER];
    for (int64_t head = first; head < first + piece->heads * group;) {
        const int64_t kv_head = head / group, left = (kv_head + 1) * group - head, wide = left < TOGETHER ? left : TOGETHER;
        const float *slopes = a->slopes ? a->slopes + head : 0;
        const int64_t begin = piece->begin, end = piece->end, position = piece->position;
        for (int64_t h = 0; h < wide; h++)
            for (int64_t d = 0; d < a->key_dim; d++)
                q[h * a->key_dim + d] = from_bf16(piece->query[(head + h) * a->q_head + d]);
        switch (wide) {
        case 1: over_keys(a, piece->pages, q, slopes, kv_head, position, begin, end, sums, most, total, 1); break;
        case 2: over_keys(a, piece->pages, q, slopes, kv_head, position, begin, end, sums, most, total, 2); break;
        case 3: over_keys(a, piece->pages, q, slopes, kv_head, position, begin, end, sums, most, total, 3); break;
        default: over_keys(a, piece->pages, q, slopes, kv_head, position, begin, end, sums, most, total, 4); break;
        }
        for (int64_t h = 0; h < wide; h++, head++) {
            const int64_t place = piece->place + head;
            memcpy(work->partial.sums + place * a->value_dim, sums + h * a->value_dim, (size_t)a->value_dim * sizeof *sums);
            work->partial.most[place] = most[h];
            work->partial.total[place] = total[h];
        }
    }
}


/* Items are [token][span][K head]: the piece of items [item, last) that has one token and one span. */
static struct piece piece_at(const struct attending *work, int64_t item, int64_t last)
{
    const struct attend *a = work->a;
    const int64_t kv_head = item % a->kv_heads, span = item / a->kv_heads % work->spans, number = item / a->kv_heads / work->spans;
    int64_t token;
    const int64_t row = row_of(a, number, &token), position = a->starts[row] + token;
    const int64_t least = a->window && position >= a->window ? position - a->window + 1 : 0, begin = least + span * SPAN;
    const int64_t left = a->kv_heads - kv_head;
    return (struct piece){
        .pages = a->pages + row * a->table_row,
        .query = a->query + (a->firsts[row] + token) * a->q_token,
        .position = position,
        .begin = begin,
        .end = position + 1 < begin + SPAN ? position + 1 : begin + SPAN,
        .place = (number * work->spans + span) * a->heads,
        .kv_head = kv_head,
        .heads = left < last - item ? left : last - item,
    };
}

static void attend_items(const struct attending *work, int64_t first, int64_t last, piece_fn over)
{
    struct piece piece = piece_at(work, first, last);
    for (int64_t item = first; item < last;) {
        item += piece.heads;
        const struct piece coming = piece_at(work, item < last ? item : first, last);
        over(work, &piece, item < last ? &coming : 0);
        piece = coming;
    }
}

/* Items are [token][head]: its spans' sums as one. */
ALONE void merge_items(const struct attending *work, int64_t first, int64_t last)
{
    const struct attend *a = work->a;
    const int64_t spans = work->spans;
    float sums[MOST_DIM];
    for (int64_t item = first; item < last; item++) {
        const int64_t head = item % a->heads, number = item / a->heads, first_place = number * spans * a->heads + head;
        const float *most = work->partial.most + first_place, *totals = work->partial.total + first_place;
        int64_t token;
        const int64_t row = row_of(a, number, &token);
        uint16_t *out = a->out + (a->firsts[row] + token) * a->o_token + head * a->o_head;
        float higher = a->sinks ? a->sinks[head] : -1e30f, total;
        for (int64_t s = 0; s < spans; s++)
            higher = most[s * a->heads] > higher ? most[s * a->heads] : higher;
        total = a->sinks ? exp_of(a->sinks[head] - higher) : 0;
        memset(sums, 0, sizeof sums);
        for (int64_t s = 0; s < spans; s++) {
            const float weight = exp_of(most[s * a->heads] - higher);
            const float *from = work->partial.sums + (first_place + s * a->heads) * a->value_dim;
            if (totals[s * a->heads] == 0) /* behind the last key */
                continue;
            total += totals[s * a->heads] * weight;
            for (int64_t d = 0; d < a->value_dim; d++)
                sums[d] += from[d] * weight;
        }
        for (int64_t d = 0; d < a->value_dim; d++)
            out[d] = to_bf16(sums[d] / total);
    }
}

#define ATTEND(name, over)                                                                                                           \
    static void attend_##name(const void *work, int64_t first, int64_t last) { attend_items(work, first, last, over); }
#define MERGE(name, target)                                                                                                          \
    target static void merge_##name(const void *work, int64_t first, int64_t last) { merge_items(work, first, last); }
ATTEND(portable, piece_portable)
MERGE(portable, )
#ifdef HAS_X86
ATTEND(avx2, piece_avx2)
ATTEND(avx512, piece_avx512)
ATTEND(bf16, piece_bf16)
MERGE(avx2, FOR_AVX2)
MERGE(avx512, FOR_AVX512)
#endif

static phase_fn attend_at(int level)
{
    return level >= LEVEL_AVX512_BF16 ? X86(attend_bf16)
           : level >= LEVEL_AVX512    ? X86(attend_avx512)
           : level >= LEVEL_AVX2      ? X86(attend_avx2)
                                      : attend_portable;
}

static phase_fn merge_at(int level)
{
    return level >= LEVEL_AVX512 ? X86(merge_avx512) : level >= LEVEL_AVX2 ? X86(merge_avx2) : merge_portable;
}

/* Items are tokens: their new K and V to their places. */
static void write_items(const void *given, int64_t first, int64_t last)
{
    const struct attend *a = given;
    const size_t key = (size_t)a->key_dim * sizeof *a->keys, value = (size_t)a->value_dim * sizeof *a->values;
    for (int64_t token = first; token < last; token++)
        for (int64_t head = 0; head < a->kv_heads; head++) {
            const int64_t at = a->places[token], from = token * a->kv_heads + head;
            memcpy((uint16_t *)a->keys + at * a->k_token + head * a->k_head, a->new_keys + from * a->key_dim, key);
            memcpy((uint16_t *)a->values + at * a->v_token + head * a->v_head, a->new_values + from * a->value_dim, value);
        }
}

int attend_part(const struct team *team, int64_t me, const struct attend *a, void *scratch, struct progress *progress)
{
    const int64_t tokens = a->tokens, spans = spans_of(a), places = tokens * a->heads * spans;
    float *memory = scratch;
    const struct attending work = {a, {memory + 2 * places, memory, memory + places}, spans, team->level};
    const int64_t items = tokens * a->kv_heads * spans, merged = tokens * a->heads;
    const struct phase attending = {items, 1, 0, attend_at(team->level)}, merging = {merged, 4, 0, merge_at(team->level)};
    if (a->new_keys) {
        const struct phase writing = {tokens, 1, 0, write_items};
        do_phase(a, team, me, progress, 2, &writing);
        wait_for_phase(progress, 2, tokens, NULL);
    }
    do_phase(&work, team, me, progress, 0, &attending);
    wait_for_phase(progress, 0, items, NULL);
    const int last = do_phase(&work, team, me, progress, 1, &merging);
    if (!last)
        wait_for_phase(progress, 1, merged, NULL);
    return last;
}
