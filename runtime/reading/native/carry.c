/* Copies to a card by the thread that read: the thread that launches kernels would have to be woken for each part of an expert. */
#include "carry.h"

#include <stdlib.h>
#include <time.h>

/* NULL without memory. */
struct carrier *carrier_open(void *enter, void *context, void *copy, void *record, void *stream)
{
    struct carrier *carrier = calloc(1, sizeof *carrier);
    if (!carrier)
        return NULL;
    /* C has no way from a pointer to a function but through memory */
    *(void **)&carrier->enter = enter;
    *(void **)&carrier->copy = copy;
    *(void **)&carrier->record = record;
    carrier->context = context;
    carrier->stream = stream;
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

int carry_on(struct carry *carry, const char *buffer)
{
    struct carrier *carrier = carry->carrier;
    struct timespec now;
    int refused = 0;
    pthread_mutex_lock(&carrier->lock);
    clock_gettime(CLOCK_MONOTONIC, &now);
    carry->begun_ns = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    if (!carrier->closed) {
        refused = carrier->enter(carrier->context);
        for (int64_t i = 0; !refused && i < carry->count; i++) {
            const struct segment *s = &carry->segments[i];
            refused = carrier->copy(carry->to + (uint64_t)s->to, (uint64_t)(uintptr_t)(buffer + s->from), (size_t)s->bytes, carrier->stream);
        }
        if (!refused)
            refused = carrier->record(carry->event, carrier->stream);
        carry->number = refused ? -(int64_t)refused : ++carrier->carried;
    }
    pthread_mutex_unlock(&carrier->lock);
    return refused != 0;
}
