#ifndef LOOK_H
#define LOOK_H

#include <stdint.h>

/* Numbers in a buffer: `count` of `size` bytes, 1, 2 or 4, the first at `at`, each `step` bytes behind the one before. Of what is no number
 * all of `bits` are set. Everything in int64_t, so that the interpreter may write it as an array. */
struct look {
    int64_t at, count, step, size, bits;
};

/* Whether all of them are numbers. */
int all_numbers(const struct look *looks, int64_t count, const char *buffer);

#endif
