/* Threads pinned to cores that do units in the order they were posted. They spin while a job is near, and sleep otherwise. */
#define _GNU_SOURCE
#include "attend.h"
#include "looks.h"
#include "served.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>

enum { JOBS = 64, LET_GO = -1 };

struct pool;

/* A unit and its inputs, some units of a step, or attention. The unit is a copy: threads that come late look at it when the caller has long gone
 * on. */
struct job {
    struct served *served;
    int64_t first, past; /* of its units */
    struct attend attend; /* of no rows where it is none */
    struct unit unit;
    int64_t rows;
    const uint16_t *x;
    uint16_t *y;
    const uint32_t *ask;   /* the job begins when this word is `value` or later; NULL: at once */
    uint32_t *flag, value; /* written when y is, for a card that waits; NULL for none */
    int64_t *times;        /* its begin and end, ns, are written here; NULL for nobody */
    struct scratch scratch;
    int64_t begun, left; /* ns, or LET_GO; threads that have still to leave it */
    int32_t done;
    struct progress own;
};

struct pool {
    struct team team;
    int64_t posted, busy_ns, bytes, near_until, made_at_most;
    int32_t stopped, letting_go;
    int64_t pinned, made;
    void *scratch;
    int64_t scratch_bytes;
    pthread_mutex_t lock, posting;
    pthread_cond_t begun, ended;
    pthread_t threads[MOST_THREADS];
    struct job jobs[JOBS];
};

struct member {
    struct pool *pool;
    int64_t number, core;
};

int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

enum { REST_NS = 50000 };

/* 1 when job `number` is there, 0 when the pool ends. */
static int await_job(struct pool *pool, int64_t number)
{
    int64_t until = now_ns() + REST_NS;
    while (__atomic_load_n(&pool->posted, __ATOMIC_ACQUIRE) <= number) {
        if (__atomic_load_n(&pool->stopped, __ATOMIC_ACQUIRE))
            return 0;
        relax();
        int64_t near = __atomic_load_n(&pool->near_until, __ATOMIC_ACQUIRE), now = now_ns();
        if (now < until || now < near)
            continue;
        pthread_mutex_lock(&pool->lock);
        while (pool->posted <= number && !pool->stopped && pool->near_until <= now)
            pthread_cond_wait(&pool->begun, &pool->lock);
        pthread_mutex_unlock(&pool->lock);
        until = now_ns() + REST_NS;
    }
    return 1;
}

/* What a job's units took and read, and that it is done. */
static void finish(struct pool *pool, struct job *job)
{
    int64_t took = 0, bytes = 0;
    for (int64_t i = job->first; job->served && i < job->past; i++) {
        took += job->served->units[i].ended - job->served->units[i].begun;
        bytes += job->served->units[i].unit.bytes;
    }
    const int64_t now = now_ns(), begun = __atomic_load_n(&job->begun, __ATOMIC_ACQUIRE);
    if (!job->served && begun != LET_GO) {
        took = now - begun;
        bytes = job->unit.bytes;
        if (job->times) {
            job->times[0] = begun;
            __atomic_store_n(&job->times[1], now, __ATOMIC_RELEASE);
        }
    }
    if (job->flag)
        __atomic_store_n(job->flag, job->value, __ATOMIC_RELEASE);
    pthread_mutex_lock(&pool->lock);
    pool->busy_ns += took;
    pool->bytes += bytes;
    __atomic_store_n(&job->done, 1, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&pool->ended);
    pthread_mutex_unlock(&pool->lock);
}

/* Until a card asks for the job, or another thread saw that it did: a thread that comes late must not look at the word, which may be gone. 0
 * where the pool is closed, and nobody will ask. */
static int await_ask(const struct pool *pool, const struct job *job)
{
    for (struct looks looks = {0}; !__atomic_load_n(&job->begun, __ATOMIC_ACQUIRE); look_again(&looks)) {
        if ((int32_t)(__atomic_load_n(job->ask, __ATOMIC_ACQUIRE) - job->value) >= 0)
            return 1;
        if (__atomic_load_n(&pool->letting_go, __ATOMIC_RELAXED))
            return 0;
    }
    return 1;
}

/* The job begins, or goes on. 0 where it was let go of: a card that waits for it is told that it is done. */
static int begin(struct pool *pool, struct job *job)
{
    const int asked = !job->ask || await_ask(pool, job);
    int64_t begun = __atomic_load_n(&job->begun, __ATOMIC_ACQUIRE);
    if (!begun && __atomic_compare_exchange_n(&job->begun, &begun, asked ? now_ns() : LET_GO, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)
        && !asked)
        finish(pool, job);
    return asked && begun != LET_GO;
}

/* Takes part in a job until it is done, as thread `me`. */
static void join(struct pool *pool, int64_t me, struct job *job)
{
    int last;
    if (!begin(pool, job))
        return;
    if (job->served)
        last = served_live(&pool->team, me, job->served, job->first, job->past);
    else if (job->attend.rows)
        last = attend_part(&pool->team, me, &job->attend, pool->scratch, &job->own);
    else
        last = take_part(&pool->team, me, &job->unit, &job->scratch, &job->own, job->rows, job->x, job->y);
    if (last)
        finish(pool, job);
}

static void *live(void *given)
{
    const struct member member = *(struct member *)given;
    struct pool *pool = member.pool;
    const int64_t core = member.core;
    free(given);
    pthread_setname_np(pthread_self(), "penstock-beside");
    if (core >= 0) {
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(core, &set);
        if (!pthread_setaffinity_np(pthread_self(), sizeof set, &set))
            __atomic_add_fetch(&pool->pinned, 1, __ATOMIC_RELAXED);
    }
    for (int64_t number = 0; await_job(pool, number); number++) {
        struct job *job = &pool->jobs[number % JOBS];
        join(pool, member.number, job);
        __atomic_sub_fetch(&job->left, 1, __ATOMIC_ACQ_REL);
    }
    return NULL;
}

/* 0 when all of them live. */
static int make_threads(struct pool *pool, const int64_t *cores)
{
    for (; pool->made < pool->made_at_most; pool->made++) {
        struct member *member = malloc(sizeof *member);
        if (!member)
            return 1;
        *member = (struct member){pool, pool->made, cores[pool->made]};
        if (pthread_create(&pool->threads[pool->made], NULL, live, member)) {
            free(member);
            return 1;
        }
    }
    return 0;
}

static void end_threads(struct pool *pool)
{
    pthread_mutex_lock(&pool->lock);
    __atomic_store_n(&pool->stopped, 1, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&pool->begun);
    pthread_mutex_unlock(&pool->lock);
    for (int64_t t = 0; t < pool->made; t++)
        pthread_join(pool->threads[t], NULL);
}

/* NULL when the threads cannot be made. cores: one a thread, -1 leaves it to the kernel. level: LEVELS or more for the machine's. joined: 1
 * where one of the threads is whoever calls pool_do. ahead: bytes of a served unit that each thread may read while it waits. */
struct pool *pool_open(int64_t threads, const int64_t *cores, int64_t level, int64_t joined, int64_t ahead)
{
    if (threads < 1 || threads > MOST_THREADS || joined < 0 || joined > 1 || ahead < 0)
        return NULL;
    struct pool *pool = calloc(1, sizeof *pool);
    if (!pool)
        return NULL;
    int machine = machine_level();
    pool->team.threads = threads;
    pool->team.ahead = ahead;
    pool->made_at_most = threads - joined;
    pool->team.level = level < machine ? (int)level : machine;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_mutex_init(&pool->posting, NULL);
    pthread_cond_init(&pool->begun, NULL);
    pthread_cond_init(&pool->ended, NULL);
    sigset_t all, before; /* signals are the interpreter's */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = make_threads(pool, cores);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) {
        end_threads(pool);
        free(pool);
        return NULL;
    }
    return pool;
}

static int idle(const struct pool *pool)
{
    for (int64_t j = 0; j < JOBS; j++)
        if (__atomic_load_n(&pool->jobs[j].left, __ATOMIC_ACQUIRE))
            return 0;
    return 1;
}

/* Until no thread is at any job. */
void pool_rest(struct pool *pool)
{
    while (!idle(pool))
        sched_yield();
}

/* The slot of the next job, when all threads have left the job that had it. */
static struct job *next_slot(struct pool *pool)
{
    struct job *job = &pool->jobs[pool->posted % JOBS];
    while (__atomic_load_n(&job->left, __ATOMIC_ACQUIRE))
        sched_yield();
    memset(job, 0, sizeof *job);
    job->left = pool->made;
    return job;
}

static int64_t post(struct pool *pool)
{
    pthread_mutex_lock(&pool->lock);
    int64_t number = pool->posted;
    __atomic_store_n(&pool->posted, number + 1, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&pool->begun);
    pthread_mutex_unlock(&pool->lock);
    return number;
}

/* 0 when threads share so many bytes of memory, whose begin is pool->scratch. */
static int reserve(struct pool *pool, int64_t need)
{
    void *more = NULL;
    if (need <= pool->scratch_bytes)
        return 0;
    if (posix_memalign(&more, LINE, (size_t)need))
        return 1;
    pool_rest(pool);
    free(pool->scratch);
    pool->scratch = more;
    pool->scratch_bytes = need;
    return 0;
}

static struct job *next_unit(struct pool *pool, const struct unit *unit, int64_t rows, const uint16_t *x, uint16_t *y)
{
    struct job *job = next_slot(pool);
    job->unit = *unit;
    job->rows = rows;
    job->x = x;
    job->y = y;
    job->scratch = scratch_in(pool->scratch, unit, rows);
    return job;
}

/* Posts the job in the next slot and computes it with the others, until it is done. */
static void post_and_join(struct pool *pool, struct job *job)
{
    post(pool);
    join(pool, pool->made, job);
    while (!__atomic_load_n(&job->done, __ATOMIC_ACQUIRE))
        relax();
}

/* The job's number, or -1 without memory. x, y and the matrices must stay until it is done. *flag = value tells a card so. */
int64_t pool_start(struct pool *pool, const struct unit *unit, int64_t rows, const uint16_t *x, uint16_t *y, uint32_t *flag,
                   int64_t value)
{
    pthread_mutex_lock(&pool->posting);
    int64_t number = -1;
    if (!reserve(pool, scratch_bytes(unit, rows))) {
        struct job *job = next_unit(pool, unit, rows, x, y);
        job->flag = flag;
        job->value = (uint32_t)value;
        number = post(pool);
    }
    pthread_mutex_unlock(&pool->posting);
    return number;
}

/* The unit, done when this returns, by the caller's thread, too. 0, or -1 without memory. */
int64_t pool_do(struct pool *pool, const struct unit *unit, int64_t rows, const uint16_t *x, uint16_t *y)
{
    pthread_mutex_lock(&pool->posting);
    int failed = reserve(pool, scratch_bytes(unit, rows));
    if (!failed)
        post_and_join(pool, next_unit(pool, unit, rows, x, y));
    pthread_mutex_unlock(&pool->posting);
    return failed ? -1 : 0;
}

/* The slot of the next job, which is attention; NULL without memory. */
static struct job *next_attention(struct pool *pool, const struct attend *given)
{
    struct attend attend = *given;
    attend.tokens = tokens_of(given);
    if (reserve(pool, attend_bytes(&attend)))
        return NULL;
    struct job *job = next_slot(pool);
    job->attend = attend;
    return job;
}

/* Attention, done like pool_do. */
int64_t pool_attend(struct pool *pool, const struct attend *given)
{
    pthread_mutex_lock(&pool->posting);
    struct job *job = next_attention(pool, given);
    if (job)
        post_and_join(pool, job);
    pthread_mutex_unlock(&pool->posting);
    return job ? 0 : -1;
}

/* Attention, begun when *ask is `value` or later; behind it *flag = value, and times are its begin and end. What it reads and writes must stay
 * until then. 0, or -1 without memory: nothing is begun. */
int64_t pool_attend_asked(struct pool *pool, const struct attend *given, const uint32_t *ask, uint32_t *flag, int64_t value, int64_t *times)
{
    pthread_mutex_lock(&pool->posting);
    struct job *job = next_attention(pool, given);
    if (job) {
        job->ask = ask;
        job->flag = flag;
        job->value = (uint32_t)value;
        job->times = times;
        post(pool);
    }
    pthread_mutex_unlock(&pool->posting);
    return job ? 0 : -1;
}

void pool_ready(struct pool *pool, struct served *served, int64_t rows)
{
    pthread_mutex_lock(&pool->posting);
    pool_rest(pool);
    served_ready(served, rows);
    pthread_mutex_unlock(&pool->posting);
}

int64_t pool_serve(struct pool *pool, struct served *served, int64_t first, int64_t past)
{
    pthread_mutex_lock(&pool->posting);
    struct job *job = next_slot(pool);
    job->served = served;
    job->first = first;
    job->past = past;
    int64_t number = post(pool);
    pthread_mutex_unlock(&pool->posting);
    return number;
}

/* A step whose units are done as they are asked: the job's number. The step before has ended. */
int64_t pool_step(struct pool *pool, struct served *served, int64_t rows)
{
    pool_ready(pool, served, rows);
    return pool_serve(pool, served, 0, served->count);
}

void pool_abandon(struct pool *pool, struct served *served)
{
    pthread_mutex_lock(&pool->posting);
    __atomic_store_n(&served->stopped, 1, __ATOMIC_RELEASE);
    pool_rest(pool);
    __atomic_store_n(&served->stopped, 0, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&pool->posting);
}

/* 1 when the job of that number has ended. */
static int ended(struct pool *pool, int64_t number)
{
    const struct job *job = &pool->jobs[number % JOBS];
    return __atomic_load_n(&job->done, __ATOMIC_ACQUIRE) || __atomic_load_n(&pool->posted, __ATOMIC_ACQUIRE) > number + JOBS;
}

/* times: begin and end of each unit in ns, 0 where it was not done. */
void served_tell(const struct served *served, int64_t *times)
{
    for (int64_t i = 0; i < served->count; i++) {
        times[2 * i] = __atomic_load_n(&served->units[i].begun, __ATOMIC_ACQUIRE);
        times[2 * i + 1] = __atomic_load_n(&served->units[i].ended, __ATOMIC_ACQUIRE);
    }
}

/* Until the job of that number has written y. */
void pool_wait(struct pool *pool, int64_t number)
{
    struct job *job = &pool->jobs[number % JOBS];
    int64_t until = now_ns() + REST_NS;
    while (now_ns() < until) {
        if (ended(pool, number))
            return;
        relax();
    }
    pthread_mutex_lock(&pool->lock);
    while (!job->done && pool->posted <= number + JOBS)
        pthread_cond_wait(&pool->ended, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
}

/* A job comes within so many ns: threads wake up and spin for it. 0: none does. */
void pool_near(struct pool *pool, int64_t ns)
{
    pthread_mutex_lock(&pool->lock);
    __atomic_store_n(&pool->near_until, ns > 0 ? now_ns() + ns : 0, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&pool->begun);
    pthread_mutex_unlock(&pool->lock);
}

/* told: ns that units took, bytes that they read, threads that got their cores, the level. */
void pool_tell(struct pool *pool, int64_t *told)
{
    pthread_mutex_lock(&pool->lock);
    told[0] = pool->busy_ns;
    told[1] = pool->bytes;
    told[2] = __atomic_load_n(&pool->pinned, __ATOMIC_RELAXED);
    told[3] = pool->team.level;
    pthread_mutex_unlock(&pool->lock);
}

/* After the jobs that were posted, but for those that a card has not asked for. */
void pool_close(struct pool *pool)
{
    __atomic_store_n(&pool->letting_go, 1, __ATOMIC_RELEASE);
    pool_rest(pool);
    end_threads(pool);
    free(pool->scratch);
    free(pool);
}
