/* One block from a file to its place: a preadv, and what could not land there to be copied. */
#define _GNU_SOURCE
#include "block.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

static struct iovec memory(char *at, int64_t bytes)
{
    return (struct iovec){at, (size_t)bytes};
}

/* `targets` of landing.py: how many ranges the block's pages land in, and how many copies come after. */
static int land(const struct block *block, char *into, char *staging, struct iovec *range, struct copy *copy, int *copies)
{
    int64_t lead = block->offset % ALIGN, start = block->offset - lead, end = block->offset + block->bytes;
    int64_t first = lead ? start + ALIGN : start, last = end - end % ALIGN, stop = end > last ? last + ALIGN : last;
    char *dest = into + block->dest, *base = dest - lead;
    int ranges = 0;
    *copies = 0;
    if (block->landing == STAGED || (block->landing == EDGES && first > last)) {
        copy[(*copies)++] = (struct copy){dest, staging + lead, block->bytes};
        range[ranges++] = memory(staging, stop - start);
        return ranges;
    }
    if (block->landing == WHOLE) {
        range[ranges++] = memory(base, stop - start);
        return ranges;
    }
    if (lead) {
        copy[(*copies)++] = (struct copy){dest, staging + lead, ALIGN - lead};
        range[ranges++] = memory(staging, ALIGN);
    }
    if (last > first)
        range[ranges++] = memory(base + (first - start), last - first);
    if (end > last) {
        copy[(*copies)++] = (struct copy){base + (last - start), staging + ALIGN, end - last};
        range[ranges++] = memory(staging + ALIGN, ALIGN);
    }
    return ranges;
}

int64_t read_block(const struct block *block, int32_t state, char *into, char *staging, struct copy *copy, int *copies)
{
    struct iovec range[MOST_RANGES];
    int fd = state >> FLAGS;
    int64_t got;
    *copies = 0;
    if (state < 0)
        return -1;
    if (!(state & IS_DIRECT)) {
        do
            got = pread(fd, into + block->dest, (size_t)block->bytes, block->offset);
        while (got < 0 && errno == EINTR);
        if (got >= block->bytes && state & IS_FORGOTTEN)
            posix_fadvise(fd, block->offset, block->bytes, POSIX_FADV_DONTNEED);
        return got < block->bytes ? -1 : got;
    }
    int64_t lead = block->offset % ALIGN;
    int ranges = land(block, into, staging, range, copy, copies);
    do
        got = preadv(fd, range, ranges, block->offset - lead);
    while (got < 0 && errno == EINTR);
    return got < lead + block->bytes ? -1 : got;
}
