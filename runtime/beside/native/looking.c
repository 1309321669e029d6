/* One thread that looks for the words of a step's units while the pool's threads sleep, and wakes them when a unit is near. Pools of several
 * ranks have the same cores: one of them works at a time, and none spins for its turn. */
#define _GNU_SOURCE
#include "served.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <time.h>

enum { LOOK_NS = 50000 }; /* from one look to the next: less than most attentions take */

struct looker {
    struct pool *pool;
    struct served *served; /* the step under way, NULL for none */
    int32_t closed;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_t thread;
};

/* Until unit i is near, or asked. 0 when there is no use in waiting. */
static int await_near(const struct served *served, int64_t i)
{
    const int32_t *near = &served->near[i * FLAG_WORDS], *ask = &served->ask[i * FLAG_WORDS];
    while (!__atomic_load_n(near, __ATOMIC_ACQUIRE) && !__atomic_load_n(ask, __ATOMIC_ACQUIRE)) {
        if (__atomic_load_n(&served->stopped, __ATOMIC_ACQUIRE))
            return 0;
        nanosleep(&(struct timespec){0, LOOK_NS}, NULL);
    }
    return 1;
}

static void *look(void *given)
{
    struct looker *looker = given;
    pthread_setname_np(pthread_self(), "penstock-looks");
    prctl(PR_SET_TIMERSLACK, 1); /* else a nap takes 50 us more */
    pthread_mutex_lock(&looker->lock);
    for (;;) {
        while (!looker->served && !looker->closed)
            pthread_cond_wait(&looker->changed, &looker->lock);
        struct served *served = looker->served;
        if (!served)
            break;
        pthread_mutex_unlock(&looker->lock);
        for (int64_t i = 0; i < served->count && await_near(served, i); i++)
            pool_serve(looker->pool, served, i, i + 1);
        pthread_mutex_lock(&looker->lock);
        looker->served = NULL;
        pthread_cond_broadcast(&looker->changed);
    }
    pthread_mutex_unlock(&looker->lock);
    return NULL;
}

/* NULL when the thread cannot be made. The pool stays until it is closed. */
struct looker *looker_open(struct pool *pool)
{
    struct looker *looker = calloc(1, sizeof *looker);
    if (!looker)
        return NULL;
    looker->pool = pool;
    pthread_mutex_init(&looker->lock, NULL);
    pthread_cond_init(&looker->changed, NULL);
    sigset_t all, before; /* signals are the interpreter's */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&looker->thread, NULL, look, looker);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) {
        free(looker);
        return NULL;
    }
    return looker;
}

/* Until it looks at no step: the one under way has all its units posted, or was stopped. */
void looker_rest(struct looker *looker)
{
    pthread_mutex_lock(&looker->lock);
    while (looker->served)
        pthread_cond_wait(&looker->changed, &looker->lock);
    pthread_mutex_unlock(&looker->lock);
}

/* A step whose units are done as they are asked. The step before has ended. */
void looker_step(struct looker *looker, struct served *served, int64_t rows)
{
    looker_rest(looker);
    pool_ready(looker->pool, served, rows);
    pthread_mutex_lock(&looker->lock);
    looker->served = served;
    pthread_cond_broadcast(&looker->changed);
    pthread_mutex_unlock(&looker->lock);
}

/* Ends a step that will not be asked for more, and waits until no thread is at it. */
void looker_abandon(struct looker *looker, struct served *served)
{
    __atomic_store_n(&served->stopped, 1, __ATOMIC_RELEASE);
    looker_rest(looker);
    pool_abandon(looker->pool, served);
}

/* After the step under way. */
void looker_close(struct looker *looker)
{
    looker_rest(looker);
    pthread_mutex_lock(&looker->lock);
    looker->closed = 1;
    pthread_cond_broadcast(&looker->changed);
    pthread_mutex_unlock(&looker->lock);
    pthread_join(looker->thread, NULL);
    free(looker);
}
