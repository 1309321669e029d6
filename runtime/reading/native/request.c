/* Calls of read: their runs cut into blocks, one after the other, and what is left of them. Whoever calls holds the pool's lock. */
#include "request.h"

#include <stdlib.h>
#include <string.h>

static int64_t blocks_of(const struct run *run)
{
    return (run->offset % ALIGN + run->bytes + run->step - 1) / run->step;
}

/* To the first block from here on. */
static void next_run(struct request *request)
{
    const struct asked *asked = &request->asked;
    for (; request->part < asked->count; request->part++, request->run = 0) {
        const struct part *part = &asked->parts[request->part];
        for (; request->run < part->count; request->run++, request->step = 0)
            if (request->step < blocks_of(&part->runs[request->run]))
                return;
    }
}

/* `cut` of blocks.py. */
static struct block next_block(struct request *request)
{
    const struct run *run = &request->asked.parts[request->part].runs[request->run];
    int64_t begin = run->offset, end = begin + run->bytes;
    int64_t start = begin - begin % ALIGN + request->step * run->step, stop = start + run->step;
    int64_t offset = start < begin ? begin : start;
    request->step++;
    next_run(request);
    return (struct block){run->file, offset, (stop < end ? stop : end) - offset, run->dest + offset - begin, run->landing};
}

struct request *request_of(const struct asked *asked)
{
    struct request *request = calloc(1, sizeof *request + (size_t)asked->count * sizeof *request->awaited);
    if (!request || (asked->inbox && inbox_expect(asked->inbox))) {
        free(request);
        return NULL;
    }
    request->asked = *asked;
    if (asked->carrier)
        memset(asked->carried, 0, (size_t)asked->count * sizeof *asked->carried);
    for (int64_t i = 0; i < asked->count; i++) {
        struct awaited *awaited = &request->awaited[i];
        for (int64_t k = 0; k < asked->parts[i].count; k++)
            awaited->blocks += blocks_of(&asked->parts[i].runs[k]);
        awaited->left = awaited->blocks;
        request->blocks += awaited->blocks;
    }
    request->left = request->blocks;
    next_run(request);
    return request;
}

void request_free(struct request *request)
{
    if (request->asked.inbox)
        inbox_forget(request->asked.inbox);
    free(request);
}

/* Takes the first request off its queue. */
static void pop(struct queue *queue)
{
    queue->first = queue->first->next;
    if (!queue->first)
        queue->end = &queue->first;
}

int take(struct queue *queue, struct block *block, int64_t *part)
{
    struct request *request = queue->first;
    *part = request->part;
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

int bring_on(struct request *request, int64_t number)
{
    const struct asked *asked = &request->asked;
    struct part *part = &asked->parts[number];
    if (!all_numbers(part->looks, part->looked, asked->into))
        return 0;
    part->looked = 0;
    const struct move move = {part->segments, part->copied, asked->to, asked->into};
    return !asked->carrier || !carry_on(asked->carrier, &move, asked->events[number], &asked->carried[number]);
}

void carry_rest(const struct request *request)
{
    const struct asked *asked = &request->asked;
    int64_t rest = 0;
    for (int64_t i = 0; i < asked->count; i++)
        rest += !asked->carried[i].number;
    carry_none(asked->carrier, rest);
}

int over(struct request *request, int64_t *number)
{
    struct inbox *inbox = request->asked.inbox;
    *number = request->asked.number;
    if (!inbox || request->unsound) {
        request_free(request);
        return 1;
    }
    free(request);
    inbox_push(inbox, *number);
    return 0;
}
