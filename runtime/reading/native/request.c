/* Calls of read: their runs cut into blocks, one after the other, and what is left of them. Whoever calls holds the pool's lock. */
#include "request.h"

#include <stdlib.h>

static int64_t blocks_of(const struct run *run)
{
    return (run->offset % ALIGN + run->bytes + run->step - 1) / run->step;
}

/* To the first block from here on. */
static void next_run(struct request *request)
{
    while (request->run < request->count && request->step == blocks_of(&request->runs[request->run])) {
        request->run++;
        request->step = 0;
    }
}

/* `cut` of blocks.py. */
static struct block next_block(struct request *request)
{
    const struct run *run = &request->runs[request->run];
    int64_t begin = run->offset, end = begin + run->bytes;
    int64_t start = begin - begin % ALIGN + request->step * run->step, stop = start + run->step;
    int64_t offset = start < begin ? begin : start;
    request->step++;
    next_run(request);
    return (struct block){run->file, offset, (stop < end ? stop : end) - offset, run->dest + offset - begin, run->landing};
}

struct request *request_of(const struct asked *asked, char *into)
{
    struct request *request = calloc(1, sizeof *request);
    if (!request || (asked->inbox && inbox_expect(asked->inbox))) {
        free(request);
        return NULL;
    }
    request->runs = asked->runs;
    request->into = into;
    request->inbox = asked->inbox;
    request->looks = asked->looks;
    request->looked = asked->looked;
    request->carry = asked->carry;
    request->number = asked->number;
    request->count = asked->count;
    for (int64_t i = 0; i < asked->count; i++)
        request->blocks += blocks_of(&asked->runs[i]);
    request->left = request->blocks;
    next_run(request);
    return request;
}

void request_free(struct request *request)
{
    if (request->inbox)
        inbox_forget(request->inbox);
    free(request);
}

/* Takes the first request off its queue. */
static void pop(struct queue *queue)
{
    queue->first = queue->first->next;
    if (!queue->first)
        queue->end = &queue->first;
}

int take(struct queue *queue, struct block *block)
{
    struct request *request = queue->first;
    int64_t rest = request->blocks - request->taken;
    int some = rest && !request->failed;
    if (some)
        *block = next_block(request);
    else
        request->left -= rest;
    request->taken += some ? 1 : rest;
    if (request->taken == request->blocks)
        pop(queue);
    return some;
}

int over(struct request *request, int sound, int64_t *number)
{
    struct inbox *inbox = request->inbox;
    *number = request->number;
    if (!inbox || !sound) {
        request_free(request);
        return 1;
    }
    free(request);
    inbox_push(inbox, *number);
    return 0;
}
