/* What a thread reads while it waits: of what comes next the rows that are its own, into its core's cache. */
#ifndef PENSTOCK_AHEAD_H
#define PENSTOCK_AHEAD_H

#include "products.h"

enum { AHEAD_LINE = 64, AHEAD_SOME = 4096, AHEAD_MOST = 2 };

/* Stretches of memory of as many bytes each, and how many bytes of all were asked for. */
struct ahead {
    const char *at[AHEAD_MOST];
    int64_t count, bytes, seen;
};

/* Ask for the next of them, if any is left: 1. Nothing is waited for. */
static inline int read_ahead(struct ahead *ahead)
{
    if (ahead->seen >= ahead->count * ahead->bytes)
        return 0;
    const int64_t within = ahead->seen % ahead->bytes, left = ahead->bytes - within;
    const char *at = ahead->at[ahead->seen / ahead->bytes] + within;
    const int64_t some = left < AHEAD_SOME ? left : AHEAD_SOME;
    for (int64_t k = 0; k < some; k += AHEAD_LINE)
        __builtin_prefetch(at + k, 0, 2);
    ahead->seen += some;
    return 1;
}

/* Bytes of part[0] from one row of a matrix to the next; 0 where rows do not lie by themselves. */
int64_t row_bytes(const struct matrix *m);

#endif
