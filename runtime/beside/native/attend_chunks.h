/* A piece's keys and values chunk by chunk, in each all heads, while what comes next is fetched. */
#ifndef PENSTOCK_ATTEND_CHUNKS_H
#define PENSTOCK_ATTEND_CHUNKS_H

/* Where keys and values [base, base + CHUNK) of a piece lie, of its first head; behind the last one it stands again. */
struct chunk {
    const uint16_t *keys[CHUNK], *values[CHUNK];
};

static inline void find_chunk(const struct attend *a, const struct piece *piece, int64_t base, struct chunk *found)
{
    for (int64_t j = 0; j < CHUNK; j++) {
        const int64_t key = base + j < piece->end ? base + j : piece->end - 1;
        const int64_t slot = piece->pages[key / a->page_tokens] * a->page_tokens + key % a->page_tokens;
        found->keys[j] = a->keys + slot * a->k_token + piece->kv_head * a->k_head;
        found->values[j] = a->values + slot * a->v_token + piece->kv_head * a->v_head;
    }
}

/* What of a coming chunk is fetched while head `turn` of `turns` is computed: its share, in the order of memory. */
static inline void share_chunk(const struct attend *a, const struct chunk *chunk, int64_t heads, int64_t turn, int64_t turns,
                               struct chunk *share)
{
    const int64_t all = CHUNK * heads, most = (all + turns - 1) / turns;
    int64_t at = turn * most, j = at / heads, head = at % heads;
    for (int64_t i = 0; i < CHUNK; i++, at++) {
        const int none = i >= most || at >= all;
        share->keys[i] = none ? chunk->keys[CHUNK - 1] : chunk->keys[j] + head * a->k_head;
        share->values[i] = none ? chunk->values[CHUNK - 1] : chunk->values[j] + head * a->v_head;
        if (!none && ++head == heads)
            head = 0, j++;
    }
}

/* name_wide(work, piece, chunk, base, own, head, coming, wide): `wide` query heads from `head` on, of K head `own` of the piece, over the chunk
 * at `base`. coming: NULL, or what is on its way meanwhile. */
#define CHUNKS(name, target)                                                                                                          \
    target static void name##_chunk(const struct attending *work, const struct piece *piece, const struct chunk *chunk, int64_t base, \
                                    const struct chunk *next, int64_t next_heads)                                                    \
    {                                                                                                                                \
        const struct attend *a = work->a;                                                                                            \
        const int64_t group = a->heads / a->kv_heads;                                                                                \
        struct chunk share;                                                                                                          \
        for (int64_t own = 0; own < piece->heads; own++) {                                                                           \
            if (next)                                                                                                                \
                share_chunk(a, next, next_heads, own, piece->heads, &share);                                                         \
            for (int64_t g = 0; g < group; g += TOGETHER) {                                                                          \
                const int64_t head = (piece->kv_head + own) * group + g;                                                             \
                const struct chunk *coming = next && !g ? &share : 0;                                                                \
                switch (group - g) {                                                                                                 \
                case 1: name##_wide(work, piece, chunk, base, own, head, coming, 1); break;                                          \
                case 2: name##_wide(work, piece, chunk, base, own, head, coming, 2); break;                                          \
                case 3: name##_wide(work, piece, chunk, base, own, head, coming, 3); break;                                          \
                default: name##_wide(work, piece, chunk, base, own, head, coming, 4); break;                                         \
                }                                                                                                                    \
            }                                                                                                                        \
        }                                                                                                                            \
    }                                                                                                                                \
    target static void name(const struct attending *work, const struct piece *piece, const struct piece *coming)                     \
    {                                                                                                                                \
        const struct attend *a = work->a;                                                                                            \
        const int64_t group = a->heads / a->kv_heads;                                                                                \
        struct chunk chunk[2];                                                                                                       \
        for (int64_t head = piece->kv_head * group; head < (piece->kv_head + piece->heads) * group; head++) {                        \
            const int64_t place = piece->place + head;                                                                               \
            memset(work->partial.sums + place * a->value_dim, 0, (size_t)a->value_dim * sizeof(float));                              \
            work->partial.most[place] = -1e30f;                                                                                      \
            work->partial.total[place] = 0;                                                                                          \
        }                                                                                                                            \
        if (piece->begin < piece->end)                                                                                               \
            find_chunk(a, piece, piece->begin, &chunk[0]);                                                                           \
        for (int64_t base = piece->begin, now = 0; base < piece->end; base += CHUNK, now = !now) {                                   \
            const struct piece *then = base + CHUNK < piece->end ? piece : coming && coming->begin < coming->end ? coming : 0;       \
            if (then)                                                                                                                \
                find_chunk(a, then, then == piece ? base + CHUNK : then->begin, &chunk[!now]);                                       \
            name##_chunk(work, piece, &chunk[now], base, then ? &chunk[!now] : 0, then ? then->heads : 0);                           \
        }                                                                                                                            \
    }

#endif
