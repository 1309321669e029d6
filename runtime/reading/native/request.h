#ifndef REQUEST_H
#define REQUEST_H

#include "block.h"
#include "carry.h"
#include "inbox.h"
#include "look.h"

/* Bytes of a file to be read in blocks: `struct Run` of blocks.py. Everything in int64_t, so that the interpreter may write it as an
 * array. */
struct run {
    const struct file *file;
    int64_t offset, bytes, dest, landing, step;
};

/* Part of a request: what becomes of it when all of its blocks have come, those of other parts or not. Kept by whoever asks until the
 * request is over. */
struct part {
    const struct run *runs;
    int64_t count;
    const struct look *looks; /* at what came */
    int64_t looked;           /* how many; 0 from the time on that all were numbers */
    const struct segment *segments; /* then copied on, if the request has a carrier */
    int64_t copied;
};

struct asked {
    struct part *parts;
    int64_t count, number;
    struct inbox *inbox;     /* gets the number when all is over */
    struct carrier *carrier; /* NULL: nothing is copied on */
    uint64_t to;             /* where the segments go */
    struct carried *carried; /* written: of each part */
    void *const *events;     /* recorded behind each part that is copied on */
    char *into;              /* where all of it lands */
};

/* How much of a part is still to come. */
struct awaited {
    int64_t blocks, left; /* left: blocks that are not over */
};

struct request {
    struct request *next;
    struct asked asked;
    int64_t part, run, step;     /* which block is the next */
    int64_t taken, left, blocks; /* left: blocks that are not over, or whose part is not brought on */
    int64_t failed, unsound;     /* unsound: what came is no number, or the driver refuses it */
    struct awaited awaited[];    /* of each part */
};

struct queue {
    struct request *first, **end;
};

/* NULL without memory. */
struct request *request_of(const struct asked *asked);
/* Of a request that nobody was told of. */
void request_free(struct request *request);
/* Takes the next block of the queue's first request, and says of which part it is, or, of a request that has failed, all that are left. 0
 * where it took no block: then nobody else gets any of it. */
int take(struct queue *queue, struct block *block, int64_t *part);
/* A part has come. 0 where it holds what is no number, or the driver refuses it. */
int bring_on(struct request *request, int64_t part);
/* Of a request that is over, and will not come whole: kernels wait for none of its parts. */
void carry_rest(const struct request *request);
/* A request is over. 1 when the caller should return with its number: it has no inbox, or is unsound. */
int over(struct request *request, int64_t *number);

#endif
