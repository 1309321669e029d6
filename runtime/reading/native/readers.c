/* Blocks read by threads that need no interpreter: each is one preadv, then the copies of what could not land in its place. Whatever else
 * happens to a block goes back to the thread that called readers_work: a file that is not open, an error, a short read, a closed pool.
 *
 * The threads are the interpreter's own, inside readers_work without its lock. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { READERS_VERSION = 1, MOST_RANGES = 3, MOST_COPIES = 2 };
enum { LOG = 4096, LOG_TOLD = 512 }; /* facts that are kept, beside two of each reader, and after how many somebody should hear them */
enum { ENDED, ODD, OVER, TOLD, UNCUT }; /* why readers_work returns */
enum { IS_DIRECT = 1, IS_FORGOTTEN = 2, FLAGS = 2 };

/* 4 * descriptor + flags, negative while it is not open. The interpreter writes it. */
struct file {
    int32_t state;
};

/* Everything in int64_t, so that the interpreter may write it as an array. */
struct range {
    int64_t at, bytes; /* at: in the buffer, or -1 - what it is in staging */
};

struct copy {
    int64_t from, to, bytes; /* from staging to the buffer */
};

struct block {
    const struct file *file;
    int64_t offset, bytes, dest; /* what is wanted, and where it lands when it is read through the page cache */
    int64_t start, needed;       /* with O_DIRECT: read from there, at least so many bytes */
    int64_t ranges, copies;
    struct range range[MOST_RANGES];
    struct copy copy[MOST_COPIES];
};

/* Where a consumer hears which requests are over, in the order in which they were. */
struct inbox {
    pthread_mutex_t lock;
    int64_t *numbers, room, first, held, asked; /* asked: those that are still to come */
    uint32_t rung, waiting;                     /* rung: changes with each number */
};

struct request {
    struct request *next;
    const struct block *blocks; /* NULL: nobody has cut them yet */
    char *into;
    struct inbox *inbox; /* NULL: a reader returns with its number */
    int64_t number, urgent, count, taken, left, failed;
};

/* A read that began, or one that ended. */
struct fact {
    int64_t begun_ns, ended_ns; /* ended_ns: 0 of a read that began */
    int64_t bytes;              /* -1: it was handed back */
    int64_t number, reader, offset;
    const struct file *file;
};

struct queue {
    struct request *first, **end;
};

struct reader {
    struct request *at; /* which it handed back */
};

struct readers {
    pthread_mutex_t lock;
    pthread_cond_t work;
    struct queue urgent, usual;
    int64_t threads, idle, called; /* called: readers that were woken and have not looked yet */
    int64_t closed, stopped;
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

/* NULL without memory. */
struct inbox *inbox_open(void)
{
    struct inbox *inbox = calloc(1, sizeof *inbox);
    if (inbox)
        pthread_mutex_init(&inbox->lock, NULL);
    return inbox;
}

/* Nobody asks, or waits, or will. */
void inbox_free(struct inbox *inbox)
{
    pthread_mutex_destroy(&inbox->lock);
    free(inbox->numbers);
    free(inbox);
}

/* 0 when there is room for one number more than there may be. */
static int inbox_expect(struct inbox *inbox)
{
    int failed = 0;
    pthread_mutex_lock(&inbox->lock);
    if (inbox->asked + inbox->held == inbox->room) {
        int64_t more = inbox->room ? 2 * inbox->room : 64;
        int64_t *numbers = malloc((size_t)more * sizeof *numbers);
        if (numbers) {
            for (int64_t i = 0; i < inbox->held; i++)
                numbers[i] = inbox->numbers[(inbox->first + i) % inbox->room];
            free(inbox->numbers);
            inbox->numbers = numbers;
            inbox->first = 0;
            inbox->room = more;
        } else {
            failed = 1;
        }
    }
    inbox->asked += !failed;
    pthread_mutex_unlock(&inbox->lock);
    return failed;
}

static void inbox_forget(struct inbox *inbox)
{
    pthread_mutex_lock(&inbox->lock);
    inbox->asked--;
    pthread_mutex_unlock(&inbox->lock);
}

static void inbox_push(struct inbox *inbox, int64_t number)
{
    pthread_mutex_lock(&inbox->lock);
    inbox->numbers[(inbox->first + inbox->held++) % inbox->room] = number;
    inbox->asked--;
    __atomic_add_fetch(&inbox->rung, 1, __ATOMIC_RELEASE);
    int waiting = inbox->waiting != 0;
    pthread_mutex_unlock(&inbox->lock);
    if (waiting)
        syscall(SYS_futex, &inbox->rung, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

/* 0, or 1 without memory. */
int64_t inbox_put(struct inbox *inbox, int64_t number)
{
    if (inbox_expect(inbox))
        return 1;
    inbox_push(inbox, number);
    return 0;
}

/* Up to `most` numbers that came; never waits. */
int64_t inbox_take(struct inbox *inbox, int64_t *numbers, int64_t most)
{
    pthread_mutex_lock(&inbox->lock);
    int64_t taken = inbox->held < most ? inbox->held : most;
    for (int64_t i = 0; i < taken; i++)
        numbers[i] = inbox->numbers[(inbox->first + i) % inbox->room];
    if (taken)
        inbox->first = (inbox->first + taken) % inbox->room;
    inbox->held -= taken;
    pthread_mutex_unlock(&inbox->lock);
    return taken;
}

/* The same when one has come, or 0 after so many ns, or earlier for a signal, which is the caller's to handle. One caller at a time. */
int64_t inbox_wait(struct inbox *inbox, int64_t *numbers, int64_t most, int64_t ns)
{
    struct timespec left = {ns / 1000000000, ns % 1000000000};
    pthread_mutex_lock(&inbox->lock);
    uint32_t rung = inbox->rung;
    int empty = !inbox->held;
    inbox->waiting = 1;
    pthread_mutex_unlock(&inbox->lock);
    if (empty)
        syscall(SYS_futex, &inbox->rung, FUTEX_WAIT_PRIVATE, rung, &left, NULL, 0);
    pthread_mutex_lock(&inbox->lock);
    inbox->waiting = 0;
    pthread_mutex_unlock(&inbox->lock);
    return inbox_take(inbox, numbers, most);
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

/* Under the lock: wakes a reader, unless `most` were woken that have still to look. Whoever asks wakes one; each that comes wakes two: to
 * wake a thread takes the thread that launches kernels 5 to 30 us. */
static void call(struct readers *pool, int64_t most)
{
    if (pool->called >= most || pool->called >= pool->idle)
        return;
    pool->called++;
    pthread_cond_signal(&pool->work);
}

/* What is asked for together. */
struct asked {
    const struct block *blocks;
    int64_t count, number;
    struct inbox *inbox;
};

/* 0, or 1 without memory: then nothing is asked for. The blocks, and what they land in, must stay until the request is over: then its
 * number comes into the inbox, or readers_work returns with it. Without blocks readers_work returns for them. */
int64_t readers_ask(struct readers *pool, const struct asked *asked, int64_t requests, char *into, int64_t urgent)
{
    struct request *first = NULL, **end = &first;
    for (int64_t i = 0; i < requests; i++) {
        struct request *request = malloc(sizeof *request);
        struct inbox *inbox = asked[i].inbox;
        if (!request || (inbox && inbox_expect(inbox))) {
            for (free(request); (request = first); free(request)) {
                first = request->next;
                if (request->inbox)
                    inbox_forget(request->inbox);
            }
            return 1;
        }
        *request = (struct request){NULL, asked[i].blocks, into, inbox, asked[i].number, urgent, asked[i].count, 0, asked[i].count, 0};
        *end = request;
        end = &request->next;
    }
    if (!first)
        return 0;
    pthread_mutex_lock(&pool->lock);
    struct queue *queue = urgent ? &pool->urgent : &pool->usual;
    *queue->end = first;
    queue->end = end;
    call(pool, 1);
    pthread_mutex_unlock(&pool->lock);
    return 0;
}

/* The blocks of the request that reader `me` was given uncut: it is the next of its queue. */
void readers_cut(struct readers *pool, int64_t me, const struct block *blocks, int64_t count)
{
    pthread_mutex_lock(&pool->lock);
    struct request *request = pool->reader[me].at;
    struct queue *queue = request->urgent ? &pool->urgent : &pool->usual;
    request->blocks = blocks;
    request->count = request->left = count;
    request->next = queue->first;
    if (!queue->first)
        queue->end = &request->next;
    queue->first = request;
    pthread_mutex_unlock(&pool->lock);
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

/* Under the lock: takes the first request off its queue. */
static void pop(struct queue *queue)
{
    queue->first = queue->first->next;
    if (!queue->first)
        queue->end = &queue->first;
}

/* Under the lock: takes the next block of the queue's first request, or, of one that has failed, all that are left, or one that is not cut
 * as a whole. -1 for no block: then nobody else gets any of it. */
static int64_t take(struct queue *queue)
{
    struct request *request = queue->first;
    int64_t index = request->taken;
    if (!request->blocks) {
        pop(queue);
        return -1;
    }
    if (request->failed || index == request->count) {
        request->left -= request->count - index;
        request->taken = request->count;
        index = -1;
    } else {
        request->taken++;
    }
    if (request->taken == request->count)
        pop(queue);
    return index;
}

/* What came of a block: bytes, or -1 where somebody else must look at it. */
static int64_t read_block(const struct block *block, int32_t state, char *into, char *staging)
{
    struct iovec to[MOST_RANGES];
    int64_t got;
    if (state < 0)
        return -1;
    int fd = state >> FLAGS;
    if (!(state & IS_DIRECT)) {
        do
            got = pread(fd, into + block->dest, (size_t)block->bytes, block->offset);
        while (got < 0 && errno == EINTR);
        if (got >= block->bytes && state & IS_FORGOTTEN)
            posix_fadvise(fd, block->offset, block->bytes, POSIX_FADV_DONTNEED);
        return got < block->bytes ? -1 : got;
    }
    for (int64_t i = 0; i < block->ranges; i++) {
        const struct range *range = &block->range[i];
        to[i].iov_base = range->at < 0 ? staging - 1 - range->at : into + range->at;
        to[i].iov_len = (size_t)range->bytes;
    }
    do
        got = preadv(fd, to, (int)block->ranges, block->start);
    while (got < 0 && errno == EINTR);
    if (got < block->needed)
        return -1;
    for (int64_t i = 0; i < block->copies; i++)
        memcpy(into + block->copy[i].to, staging + block->copy[i].from, (size_t)block->copy[i].bytes);
    return got;
}

/* `blocks` of a request are over, and perhaps it. 1 when the caller should return with its number. */
static int over(struct request *request, int64_t left, int64_t *number)
{
    if (left)
        return 0;
    struct inbox *inbox = request->inbox;
    *number = request->number;
    free(request);
    if (!inbox)
        return 1;
    inbox_push(inbox, *number);
    return 0;
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
 *     ODD    has block told[1] to be looked at: readers_mended comes next
 *     OVER   is over
 *     UNCUT  has no blocks: readers_cut comes next
 * or until facts should be heard (TOLD). */
int64_t readers_work(struct readers *pool, int64_t me, int64_t *told)
{
    char *staging = pool->staging + me * pool->staged_bytes;
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
        int64_t index = take(queue), left = request->left, closed = pool->closed;
        if ((queue = next_queue(pool))) {
            call(pool, pool->threads);
            if (queue->first->next || queue->first->count - queue->first->taken > 1)
                call(pool, pool->threads);
        }
        if (!request->blocks) {
            pool->reader[me].at = request;
            told[0] = request->number;
            pthread_mutex_unlock(&pool->lock);
            return UNCUT;
        }
        if (index < 0) {
            pthread_mutex_unlock(&pool->lock);
            if (over(request, left, &told[0]))
                return OVER;
            continue;
        }
        const struct block *block = &request->blocks[index];
        struct fact fact = {now_ns(), 0, 0, request->number, me, block->offset, block->file};
        if (!closed)
            note(pool, &fact);
        pthread_mutex_unlock(&pool->lock);
        fact.bytes = closed ? -1 : read_block(block, __atomic_load_n(&block->file->state, __ATOMIC_ACQUIRE), request->into, staging);
        pthread_mutex_lock(&pool->lock);
        if (!closed) {
            fact.ended_ns = now_ns();
            note(pool, &fact);
        }
        if (fact.bytes < 0) {
            pool->reader[me].at = request;
            told[0] = request->number;
            told[1] = index;
            pthread_mutex_unlock(&pool->lock);
            return ODD;
        }
        left = --request->left;
        pthread_mutex_unlock(&pool->lock);
        if (over(request, left, &told[0]))
            return OVER;
    }
}

/* The block that reader `me` handed back was read, or the request has failed. 1 when the request is over and has no inbox. */
int64_t readers_mended(struct readers *pool, int64_t me, int64_t failed)
{
    int64_t number;
    pthread_mutex_lock(&pool->lock);
    struct request *request = pool->reader[me].at;
    request->failed |= failed;
    int64_t left = --request->left;
    pthread_mutex_unlock(&pool->lock);
    return over(request, left, &number);
}

/* Threads return when nothing is left; blocks that have not begun go back to them. */
void readers_close(struct readers *pool)
{
    pthread_mutex_lock(&pool->lock);
    pool->closed = 1;
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
}

/* The process ends: nothing begins any more, and threads stay where they are. */
void readers_stop(struct readers *pool)
{
    pthread_mutex_lock(&pool->lock);
    pool->stopped = 1;
    pthread_mutex_unlock(&pool->lock);
}
