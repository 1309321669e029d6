/* Attention of a few tokens over keys and values that lie in pages. */
#ifndef PENSTOCK_ATTEND_H
#define PENSTOCK_ATTEND_H

#include "phases.h"

/* query [tokens][heads][key_dim] -> out [tokens][heads][value_dim] over keys and values [pool tokens][kv_heads][dim], all BF16 with the
 * strides given, in elements; dims are multiples of 16. Row r has counts[r] tokens from firsts[r] on, behind starts[r] others of its
 * sequence, which lies in pages[r * table_row ...] of page_tokens tokens each.
 *
 * score = q k * scaling; softcap: softcap * tanh(score / softcap), 0 is none; slopes: + slope * (key - position); window: keys that a token
 * sees, itself counted, 0 is all before it; sinks: a score of nothing. slopes and sinks are [heads], or NULL. */
struct attend {
    const uint16_t *query, *keys, *values;
    uint16_t *out;
    const int64_t *firsts, *starts, *counts, *pages;
    const float *sinks, *slopes;
    int64_t rows, heads, kv_heads, key_dim, value_dim;
    int64_t q_token, q_head, k_token, k_head, v_token, v_head, o_token, o_head;
    int64_t table_row, page_tokens, window, most_keys;
    float scaling, softcap;
    int64_t tokens; /* of all rows, by tokens_of: a thread that comes late must not look at the tables */
    const uint16_t *new_keys, *new_values; /* [tokens][kv_heads][dim], side by side, which go to places[token] first; NULL for none */
    const int64_t *places;
};

int64_t tokens_of(const struct attend *a);

/* Bytes of memory that threads share for one `attend`. */
int64_t attend_bytes(const struct attend *a);

/* Takes part until all of out is written. Returns 1 for the thread that finished the last of it, else 0. */
int attend_part(const struct team *team, int64_t me, const struct attend *a, void *scratch, struct progress *progress);

#endif
