/* Copies to a card by the thread that read: the thread that launches kernels would have to be woken for each part of an expert. */
#include "carry.h"

#include <stdlib.h>
#include <time.h>

/* NULL without memory. */
struct carrier *carrier_open(void *enter, void *context, void *copy, void *record, void *stream, void *wait, void *kernels)
{
    struct carrier *carrier = calloc(1, sizeof *carrier);
    if (!carrier)
        return NULL;
    /* C has no way from a pointer to a function but through memory */
    *(void **)&carrier->enter = enter;
    *(void **)&carrier->copy = copy;
    *(void **)&carrier->record = record;
    carrier->context = context;
    *(void **)&carrier->wait = wait;
    carrier->stream = stream;
    carrier->kernels = kernels;
    pthread_mutex_init(&carrier->lock, NULL);
    return carrier;
}

/* Returns when nothing is being queued; nothing is from then on. */
void carrier_close(struct carrier *carrier)
{
    pthread_mutex_lock(&carrier->lock);
    carrier->closed = 1;
    pthread_mutex_unlock(&carrier->lock);
}

/* Nobody asks, or has asked for anything that is not over. */
void carrier_free(struct carrier *carrier)
{
    pthread_mutex_destroy(&carrier->lock);
    free(carrier);
}

/* 0, or what the driver refuses with. */
static int queue(const struct carrier *carrier, const struct move *move)
{
    int refused = 0;
    for (int64_t i = 0; !refused && i < move->count; i++) {
        const struct segment *s = &move->segments[i];
        refused = carrier->copy(move->to + (uint64_t)s->to, (uint64_t)(uintptr_t)(move->from + s->from), (size_t)s->bytes, carrier->stream);
    }
    return refused;
}

/* From the thread that launches kernels, which has the context and closes the carrier: without the lock, for which it would wait. `event`
 * is recorded behind all moves. 0, or what the driver refuses with. */
int64_t carrier_copy(const struct carrier *carrier, const struct move *moves, int64_t count, void *event)
{
    int refused = 0;
    for (int64_t i = 0; !refused && i < count; i++)
        refused = queue(carrier, &moves[i]);
    return refused ? refused : carrier->record(event, carrier->stream);
}

int carry_on(struct carrier *carrier, const struct move *move, void *event, struct carried *carried)
{
    struct timespec now;
    int refused = 0;
    pthread_mutex_lock(&carrier->lock);
    clock_gettime(CLOCK_MONOTONIC, &now);
    carried->begun_ns = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    if (!carrier->closed) {
        refused = carrier->enter(carrier->context);
        if (!refused)
            refused = queue(carrier, move);
        if (!refused)
            refused = carrier->record(event, carrier->stream);
        carried->number = refused ? -(int64_t)refused : ++carrier->carried;
    }
    pthread_mutex_unlock(&carrier->lock);
    return refused != 0;
}
