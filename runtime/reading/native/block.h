#ifndef BLOCK_H
#define BLOCK_H

#include <stdint.h>

enum { ALIGN = 4096, MOST_RANGES = 3, MOST_COPIES = 2 };
enum { IS_DIRECT = 1, IS_FORGOTTEN = 2, FLAGS = 2 };
enum { WHOLE, EDGES, STAGED }; /* Landing of blocks.py */

/* 4 * descriptor + flags, negative while it is not open. The interpreter writes it. */
struct file {
    int32_t state;
};

struct block {
    const struct file *file;
    int64_t offset, bytes, dest, landing;
};

struct copy {
    char *to, *from;
    int64_t bytes;
};

/* What came of a block, but for the copies: bytes, or -1 where somebody else must look at it. */
int64_t read_block(const struct block *block, int32_t state, char *into, char *staging, struct copy *copy, int *copies);

#endif
