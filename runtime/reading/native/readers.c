/* Blocks read by threads that need no interpreter: each is one preadv, then the copies of what could not land in its place. Whatever else
 * happens to a block goes back to the thread that called readers_work: a file that is not open, an error, a short read, a closed pool.
 *
 * The threads are the interpreter's own, inside readers_work without its lock. */
#define _GNU_SOURCE
#include "request.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { READERS_VERSION = 6 };
enum { LOG = 4096, LOG_TOLD = 512 }; /* facts that are kept, beside two of each reader, and after how many somebody should hear them */
enum { ENDED, ODD, OVER, TOLD };     /* why readers_work returns */

/* A read that began, or one that ended. */
struct fact {
    int64_t begun_ns, ended_ns; /* ended_ns: 0 of a read that began */
    int64_t bytes;              /* -1: it was handed back */
    int64_t number, reader, offset;
    const struct file *file;
};

struct reader {
    struct request *at; /* of which it handed a block back */
    int64_t part;
};

struct readers {
    pthread_mutex_t lock;
    pthread_cond_t work;
    struct queue urgent, usual;
    int64_t threads, idle, called; /* called: readers that were woken and have not looked yet */
    int64_t closed, stopped, touching;
    char *staging;
    int64_t staged_bytes; /* of each reader */
    int64_t log_first, log_held, log_told, log_room;
    struct fact *log;
    struct reader reader[];
};

int64_t readers_version(void)
{
    return READERS_VERSION;
}

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* `staging`: staged_bytes for each of the threads, aligned. NULL without memory. */
struct readers *readers_open(int64_t threads, char *staging, int64_t staged_bytes)
{
    struct readers *pool = calloc(1, sizeof *pool + (size_t)threads * sizeof *pool->reader);
    struct fact *log = malloc((size_t)(LOG + 2 * threads) * sizeof *log);
    if (!pool || !log) {
        free(pool);
        free(log);
        return NULL;
    }
    pool->log = log;
    pool->log_room = LOG + 2 * threads;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->work, NULL);
    pool->urgent.end = &pool->urgent.first;
    pool->usual.end = &pool->usual.first;
    pool->threads = threads;
    pool->staging = staging;
    pool->staged_bytes = staged_bytes;
    return pool;
}

/* No thread is in readers_work, or will be. */
void readers_free(struct readers *pool)
{
    pthread_mutex_destroy(&pool->lock);
    pthread_cond_destroy(&pool->work);
    free(pool->log);
    free(pool);
}

static struct queue *next_queue(struct readers *pool)
{
    return pool->urgent.first ? &pool->urgent : pool->usual.first ? &pool->usual : NULL;
}

/* Under the lock: 1 when the caller should wake a reader, once it has let go of the lock, which that one takes first; 0 where `most` were
 * woken that have still to look. Whoever asks wakes one; each that comes wakes two: to wake a thread takes the thread that launches
 * kernels 5 to 30 us. */
static int call(struct readers *pool, int64_t most)
{
    if (pool->called >= most || pool->called >= pool->idle)
        return 0;
    pool->called++;
    return 1;
}

static void wake(struct readers *pool, int readers)
{
    while (readers--)
        pthread_cond_signal(&pool->work);
}

/* 0, or 1 without memory: then nothing is asked for. The parts, all that they name, and what they land in must stay until the request is
 * over: then its number comes into the inbox, or readers_work returns with it. One reader is woken for all of `asked`. */
int64_t readers_ask(struct readers *pool, const struct asked *const *asked, int64_t requests, int64_t urgent)
{
    struct request *first = NULL, **end = &first;
    for (int64_t i = 0; i < requests; i++, end = &(*end)->next) {
        if ((*end = request_of(asked[i])))
            continue;
        for (struct request *request; (request = first); request_free(request))
            first = request->next;
        return 1;
    }
    if (!first)
        return 0;
    for (int64_t i = 0; i < requests; i++)
        if (asked[i]->carrier)
            asked[i]->carrier->promised += asked[i]->count;
    pthread_mutex_lock(&pool->lock);
    struct queue *queue = urgent ? &pool->urgent : &pool->usual;
    *queue->end = first;
    queue->end = end;
    int woken = call(pool, 1);
    pthread_mutex_unlock(&pool->lock);
    wake(pool, woken);
    return 0;
}

/* Under the lock. There is room: readers_work sees to it. */
static void note(struct readers *pool, const struct fact *fact)
{
    pool->log[(pool->log_first + pool->log_held++) % pool->log_room] = *fact;
}

/* Up to `most` facts in the order in which they were noted. */
int64_t readers_hear(struct readers *pool, struct fact *facts, int64_t most)
{
    pthread_mutex_lock(&pool->lock);
    int64_t heard = pool->log_held < most ? pool->log_held : most;
    for (int64_t i = 0; i < heard; i++)
        facts[i] = pool->log[(pool->log_first + i) % pool->log_room];
    pool->log_first = (pool->log_first + heard) % pool->log_room;
    pool->log_held -= heard;
    pool->log_told = 0;
    pthread_mutex_unlock(&pool->lock);
    return heard;
}

/* 0 where the process ends: the interpreter may have given the buffer back. Else leave() comes behind what touches it. */
static int enter(struct readers *pool)
{
    pthread_mutex_lock(&pool->lock);
    int may = !pool->stopped;
    __atomic_add_fetch(&pool->touching, may, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&pool->lock);
    return may;
}

static void leave(struct readers *pool)
{
    __atomic_sub_fetch(&pool->touching, 1, __ATOMIC_RELEASE);
}

/* 0 where the process ends. */
static int copy_all(struct readers *pool, const struct copy *copy, int copies)
{
    int may = enter(pool);
    for (int i = 0; may && i < copies; i++)
        memcpy(copy[i].to, copy[i].from, (size_t)copy[i].bytes);
    if (may)
        leave(pool);
    return may;
}

/* Whether a part that has come is sound. */
static int is_sound(struct readers *pool, struct request *request, int64_t part)
{
    int sound = 1;
    if (request->asked.inbox && enter(pool)) {
        sound = bring_on(request, part);
        leave(pool);
    }
    return sound;
}

/* Under the lock: a block is over. Whether its part has come and is to be brought on: until brought_on it counts as one block. */
static int block_over(struct request *request, int64_t part)
{
    int came = !--request->awaited[part].left && !request->failed;
    if (came && (request->asked.carrier || request->asked.parts[part].looked))
        return 1;
    request->left--;
    return 0;
}

/* What is left of the request afterwards. */
static int64_t brought_on(struct readers *pool, struct request *request, int64_t part)
{
    int sound = is_sound(pool, request, part);
    pthread_mutex_lock(&pool->lock);
    request->unsound |= !sound;
    int64_t left = --request->left;
    pthread_mutex_unlock(&pool->lock);
    return left;
}

/* A request has no block left. 1 when readers_work should return with its number. */
static int ended(struct readers *pool, struct request *request, int64_t *number)
{
    for (int64_t i = 0; !request->blocks && i < request->asked.count; i++)
        request->unsound |= !is_sound(pool, request, i);
    if (request->asked.carrier && (request->failed || request->unsound) && enter(pool)) {
        carry_rest(request);
        leave(pool);
    }
    return over(request, number);
}

/* Under the lock: whether there may be no room for what readers will note. */
static int log_full(const struct readers *pool)
{
    return pool->log_held > LOG;
}

/* Under the lock, until there is something to do: 0 when there is no more. */
static int await(struct readers *pool)
{
    for (;;) {
        if (!pool->stopped && (log_full(pool) || next_queue(pool)))
            return 1;
        if (pool->closed)
            return 0;
        pool->idle++;
        pthread_cond_wait(&pool->work, &pool->lock);
        pool->idle--;
        pool->called -= pool->called > 0;
    }
}

/* Reads blocks as reader `me`, until the pool is closed and nothing is left (ENDED), or until told[0] is the number of a request that
 *     ODD   has a block to be looked at, in told[1..5] as struct block: readers_mended comes next
 *     OVER  is over, and has no inbox, brought what is no number, or was not carried on
 * or until facts should be heard (TOLD). */
int64_t readers_work(struct readers *pool, int64_t me, int64_t *told)
{
    char *staging = pool->staging + me * pool->staged_bytes;
    struct block block;
    struct copy copy[MOST_COPIES];
    int copies;
    for (;;) {
        pthread_mutex_lock(&pool->lock);
        if (!await(pool)) {
            pthread_mutex_unlock(&pool->lock);
            return ENDED;
        }
        if (pool->log_held >= LOG_TOLD && (!pool->log_told || log_full(pool))) {
            pool->log_told = 1;
            pthread_mutex_unlock(&pool->lock);
            return TOLD;
        }
        struct queue *queue = next_queue(pool);
        struct request *request = queue->first;
        int64_t part;
        int some = take(queue, &block, &part);
        int64_t left = request->left, closed = pool->closed;
        int woken = 0;
        if ((queue = next_queue(pool))) {
            woken = call(pool, pool->threads);
            if (queue->first->next || queue->first->blocks - queue->first->taken > 1)
                woken += call(pool, pool->threads);
        }
        if (!some) {
            pthread_mutex_unlock(&pool->lock);
            wake(pool, woken);
            if (!left && ended(pool, request, &told[0]))
                return OVER;
            continue;
        }
        struct fact fact = {now_ns(), 0, -1, request->asked.number, me, block.offset, block.file};
        if (!closed)
            note(pool, &fact);
        int32_t state = __atomic_load_n(&block.file->state, __ATOMIC_ACQUIRE);
        pthread_mutex_unlock(&pool->lock);
        wake(pool, woken);
        if (!closed) {
            fact.bytes = read_block(&block, state, request->asked.into, staging, copy, &copies);
            if (fact.bytes >= 0 && copies && !copy_all(pool, copy, copies))
                fact.bytes = -1;
        }
        pthread_mutex_lock(&pool->lock);
        if (!closed) {
            fact.ended_ns = now_ns();
            note(pool, &fact);
        }
        if (fact.bytes < 0) {
            pool->reader[me].at = request;
            pool->reader[me].part = part;
            told[0] = request->asked.number;
            memcpy(&told[1], &block, sizeof block);
            pthread_mutex_unlock(&pool->lock);
            return ODD;
        }
        int came = block_over(request, part);
        left = request->left;
        pthread_mutex_unlock(&pool->lock);
        if (came)
            left = brought_on(pool, request, part);
        if (!left && ended(pool, request, &told[0]))
            return OVER;
    }
}

/* The block that reader `me` handed back was read, or the request has failed. 1 when the request is over and somebody is to be told. */
int64_t readers_mended(struct readers *pool, int64_t me, int64_t failed)
{
    pthread_mutex_lock(&pool->lock);
    struct request *request = pool->reader[me].at;
    int64_t number, part = pool->reader[me].part;
    request->failed |= failed;
    int came = block_over(request, part);
    int64_t left = request->left;
    pthread_mutex_unlock(&pool->lock);
    if (came)
        left = brought_on(pool, request, part);
    return !left && ended(pool, request, &number);
}

/* Threads return when nothing is left; blocks that have not begun go back to them. */
void readers_close(struct readers *pool)
{
    pthread_mutex_lock(&pool->lock);
    pool->closed = 1;
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
}

/* The process ends: nothing begins any more, nothing is written but by reads that have begun, and threads stay where they are. */
void readers_stop(struct readers *pool)
{
    pthread_mutex_lock(&pool->lock);
    pool->stopped = 1;
    pthread_mutex_unlock(&pool->lock);
    while (__atomic_load_n(&pool->touching, __ATOMIC_ACQUIRE))
        sched_yield();
}
