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

/* What is asked for together. */
struct asked {
    const struct run *runs;
    int64_t count, number;
    struct inbox *inbox;
    const struct look *looks; /* at what comes, before the inbox gets the number */
    int64_t looked;           /* how many */
    struct carry *carry;      /* what becomes of it then; NULL: nothing */
};

struct request {
    struct request *next;
    const struct run *runs;
    char *into;
    struct inbox *inbox;         /* NULL: a reader returns with its number */
    const struct look *looks;
    int64_t looked;
    struct carry *carry;
    int64_t number, count;       /* runs */
    int64_t run, step;           /* which block is the next */
    int64_t taken, left, blocks; /* left: blocks that are not over */
    int64_t failed;
};

struct queue {
    struct request *first, **end;
};

/* NULL without memory. */
struct request *request_of(const struct asked *asked, char *into);
/* Of a request that nobody was told of. */
void request_free(struct request *request);
/* Takes the next block of the queue's first request, or, of one that has failed, all that are left. 0 where it took no block: then nobody
 * else gets any of it. */
int take(struct queue *queue, struct block *block);
/* A request is over. 1 when the caller should return with its number: it has no inbox, or what came is not `sound`. */
int over(struct request *request, int sound, int64_t *number);

#endif
