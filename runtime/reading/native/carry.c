/* Copies to a card by the thread that read: the thread that launches kernels would have to be woken for each part of an expert. */
#include "carry.h"

#include <stdlib.h>
#include <time.h>

enum { ALL = 1 << 30 }; /* more parts than anybody waits for */

/* NULL without memory. `word` 0, or a driver that refuses to write it: kernels wait for events alone. */
struct carrier *carrier_open(void *enter, void *context, void *copy, void *record, void *stream, void *wait, void *kernels, void *write,
                             void *until, uint64_t word)
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
    *(void **)&carrier->write = write;
    *(void **)&carrier->until = until;
    if (write && until && word && !carrier->write(stream, word, 0, 0))
        carrier->word = word;
    pthread_mutex_init(&carrier->lock, NULL);
    return carrier;
}

/* Under the lock. Behind all that was queued the word is `value`. A driver that refuses that has a card that computes nothing any more:
 * whoever waits should not do so for ever. */
static int tell(const struct carrier *carrier, int64_t value)
{
    int refused = carrier->word ? carrier->write(carrier->stream, carrier->word, (uint32_t)value, 0) : 0;
    if (refused)
        __atomic_store_n((uint32_t *)(uintptr_t)carrier->word, (uint32_t)(value + ALL), __ATOMIC_RELEASE);
    return refused;
}

/* Returns when nothing is being queued; nothing is from then on, and no kernel waits for what was. From the thread that launches kernels. */
void carrier_close(struct carrier *carrier)
{
    pthread_mutex_lock(&carrier->lock);
    if (!carrier->closed)
        tell(carrier, carrier->carried + ALL);
    carrier->closed = 1;
    pthread_mutex_unlock(&carrier->lock);
}

/* Whether kernels can wait for what has not been read. */
int64_t carrier_has_word(const struct carrier *carrier)
{
    return carrier->word != 0;
}

/* From the thread that asked, and launches kernels: those issued next begin behind all that was asked for so far and all that it queued
 * before. 0, and nothing is known, where some thread queues the last of it, or has, or the driver refuses. */
int64_t carrier_awaits(const struct carrier *carrier)
{
    if (!carrier->word || __atomic_load_n(&carrier->carried, __ATOMIC_ACQUIRE) >= carrier->promised)
        return 0;
    return !carrier->until(carrier->kernels, carrier->word, (uint32_t)carrier->promised, 0);
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

/* Under the lock: how many it is with these. */
static int64_t count(struct carrier *carrier, int64_t parts)
{
    return __atomic_add_fetch(&carrier->carried, parts, __ATOMIC_RELEASE);
}

int carry_on(struct carrier *carrier, const struct move *move, void *event, struct carried *carried)
{
    struct timespec now;
    int refused = 0;
    pthread_mutex_lock(&carrier->lock);
    clock_gettime(CLOCK_MONOTONIC, &now);
    carried->begun_ns = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    if (!carrier->closed) {
        int64_t number = count(carrier, 1); /* before anything is queued: see carrier_awaits */
        refused = carrier->enter(carrier->context);
        if (!refused)
            refused = queue(carrier, move);
        if (!refused)
            refused = carrier->record(event, carrier->stream);
        int untold = tell(carrier, number);
        refused = refused ? refused : untold;
        carried->number = refused ? -(int64_t)refused : number;
    }
    pthread_mutex_unlock(&carrier->lock);
    return refused != 0;
}

void carry_none(struct carrier *carrier, int64_t parts)
{
    pthread_mutex_lock(&carrier->lock);
    if (!carrier->closed && parts) {
        int64_t number = count(carrier, parts);
        carrier->enter(carrier->context);
        tell(carrier, number);
    }
    pthread_mutex_unlock(&carrier->lock);
}
