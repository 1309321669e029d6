/* How threads share one piece of work: phase after phase, claiming some of each. */
#ifndef PENSTOCK_PHASES_H
#define PENSTOCK_PHASES_H

#include "ahead.h"

#include <sched.h>

enum { PHASES = 4, LINE = 64, SPINS = 1 << 14, MOST_THREADS = 256 };

/* How far threads are with one piece of work: how much of each phase is claimed and how much finished. */
struct progress {
    struct {
        int64_t claimed;
        char apart[LINE - 8];
        int64_t finished;
        char apart_too[LINE - 8];
        char own[MOST_THREADS]; /* whether a thread's own rows are claimed */
    } phase[PHASES];
};

/* ahead: bytes that each thread may read ahead. */
struct team {
    int64_t threads, ahead;
    int level;
};

typedef void (*phase_fn)(const void *work, int64_t first, int64_t last);

/* A phase of a piece of work: `total` rows, claimed by `grain` at least. At the beginning lie the `own` rows of each thread, one thread's
 * after the other's. */
struct phase {
    int64_t total, grain, own;
    phase_fn each;
};

static inline void relax(void)
{
#ifdef HAS_X86
    __builtin_ia32_pause();
#endif
}

static inline int do_rows(const void *work, struct progress *progress, int number, const struct phase *phase, int64_t first,
                          int64_t count)
{
    phase->each(work, first, first + count);
    return __atomic_add_fetch(&progress->phase[number].finished, count, __ATOMIC_ACQ_REL) == phase->total;
}

/* Rows of thread `whose`, if nobody has begun them. */
static inline int do_own(const void *work, struct progress *progress, int number, const struct phase *phase, int64_t whose)
{
    char *claimed = &progress->phase[number].own[whose];
    if (__atomic_load_n(claimed, __ATOMIC_RELAXED) || __atomic_exchange_n(claimed, 1, __ATOMIC_RELAXED))
        return 0;
    return do_rows(work, progress, number, phase, whose * phase->own, phase->own);
}

/* Thread `me` takes part: in its own rows, then in those that are nobody's, then in those of threads that have not come. Threads claim less
 * towards the end, so that all end together. Returns 1 if this thread finished the last of all. */
static inline int do_phase(const void *work, const struct team *team, int64_t me, struct progress *progress, int number,
                           const struct phase *phase)
{
    const int64_t threads = team->threads, owned = phase->own ? threads : 0, free = phase->total - phase->own * owned;
    int64_t *claimed = &progress->phase[number].claimed;
    int last = 0;
    if (me < owned)
        last = do_own(work, progress, number, phase, me);
    int64_t first = __atomic_load_n(claimed, __ATOMIC_RELAXED);
    while (first < free) {
        int64_t size = (free - first) / (2 * threads) / phase->grain * phase->grain;
        size = size < phase->grain ? phase->grain : size;
        size = size > free - first ? free - first : size;
        if (!__atomic_compare_exchange_n(claimed, &first, first + size, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
            continue;
        last |= do_rows(work, progress, number, phase, phase->own * owned + first, size);
        first = __atomic_load_n(claimed, __ATOMIC_RELAXED);
    }
    for (int64_t whose = 0; whose < owned; whose++)
        last |= do_own(work, progress, number, phase, whose);
    return last;
}

/* Until others finished what they claimed; meanwhile what is `ahead` is read. A core that others want, too, is given up after a while. */
static inline void wait_for_phase(const struct progress *progress, int number, int64_t total, struct ahead *ahead)
{
    for (int64_t spins = 0; __atomic_load_n(&progress->phase[number].finished, __ATOMIC_ACQUIRE) < total; spins++) {
        if (ahead && read_ahead(ahead))
            continue;
        relax();
        if (spins > SPINS)
            sched_yield();
    }
}

#endif
