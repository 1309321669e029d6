/* Threads that wait asleep for rows of a matrix. They are made when first needed, and live as long as the process. */
#define _POSIX_C_SOURCE 200809L
#include "rows.h"

#include <pthread.h>

enum { MOST_THREADS = 256, PARTS_EACH = 4 };

static pthread_mutex_t taken = PTHREAD_MUTEX_INITIALIZER; /* by the caller whose job is done */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;  /* of all below */
static pthread_cond_t begun = PTHREAD_COND_INITIALIZER, ended = PTHREAD_COND_INITIALIZER;
static int64_t made, wanted, working, turn;

static struct {
    rows_work work;
    const void *job;
    int64_t rows, part, next;
} now;

int64_t formats_version(void)
{
    return FORMATS_VERSION;
}

static void do_parts(void)
{
    for (;;) {
        int64_t first = __atomic_fetch_add(&now.next, now.part, __ATOMIC_RELAXED);
        if (first >= now.rows)
            return;
        int64_t last = first + now.part;
        now.work(now.job, first, last < now.rows ? last : now.rows);
    }
}

static void *wait_for_rows(void *number)
{
    int64_t mine = (int64_t)(intptr_t)number, seen = 0;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (turn == seen || mine >= wanted) {
            seen = turn;
            pthread_cond_wait(&begun, &lock);
        }
        seen = turn;
        working++;
        pthread_mutex_unlock(&lock);
        do_parts();
        pthread_mutex_lock(&lock);
        if (--working == 0)
            pthread_cond_signal(&ended);
    }
    return NULL;
}

/* A forked process has none of the threads. */
static void after_fork(void)
{
    pthread_mutex_init(&taken, NULL);
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&begun, NULL);
    pthread_cond_init(&ended, NULL);
    made = wanted = working = 0;
}

static int64_t make_threads(int64_t count)
{
    static int told;
    if (!told) {
        told = 1;
        pthread_atfork(NULL, NULL, after_fork);
    }
    while (made < count) {
        pthread_t thread;
        pthread_attr_t detached;
        pthread_attr_init(&detached);
        pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
        int failed = pthread_create(&thread, &detached, wait_for_rows, (void *)(intptr_t)made);
        pthread_attr_destroy(&detached);
        if (failed)
            break;
        made++;
    }
    return made < count ? made : count;
}

void over_rows(rows_work work, const void *job, int64_t rows, int64_t grain, int64_t threads)
{
    threads = threads < MOST_THREADS ? threads : MOST_THREADS;
    if (rows <= grain || threads < 2 || pthread_mutex_trylock(&taken)) {
        work(job, 0, rows);
        return;
    }
    int64_t parts = threads * PARTS_EACH, each = (rows + parts - 1) / parts;
    pthread_mutex_lock(&lock);
    now.work = work;
    now.job = job;
    now.rows = rows;
    now.part = (each + grain - 1) / grain * grain;
    now.next = 0;
    wanted = make_threads(threads - 1);
    turn++;
    pthread_cond_broadcast(&begun);
    pthread_mutex_unlock(&lock);
    do_parts();
    pthread_mutex_lock(&lock);
    wanted = 0; /* who wakes now finds nothing left */
    while (working)
        pthread_cond_wait(&ended, &lock);
    pthread_mutex_unlock(&lock);
    pthread_mutex_unlock(&taken);
}
