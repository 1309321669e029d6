/* How threads share one piece of work: phase after phase, claiming some of each. */
#ifndef PENSTOCK_PHASES_H
#define PENSTOCK_PHASES_H

#include "products.h"

#include <sched.h>

enum { PHASES = 4, LINE = 64, SPINS = 1 << 14 };

/* How far threads are with one piece of work: how much of each phase is claimed and how much finished. */
struct progress {
    struct {
        int64_t claimed;
        char apart[LINE - 8];
        int64_t finished;
        char apart_too[LINE - 8];
    } phase[PHASES];
};

struct team {
    int64_t threads;
    int level;
};

typedef void (*phase_fn)(const void *work, int64_t first, int64_t last);

static inline void relax(void)
{
#ifdef HAS_X86
    __builtin_ia32_pause();
#endif
}

/* Threads claim less towards the end, so that all end together. Returns 1 if this thread finished the last of `total`. */
static inline int do_phase(const void *work, int64_t threads, struct progress *progress, int phase, int64_t total, int64_t grain,
                           phase_fn each)
{
    int64_t *claimed = &progress->phase[phase].claimed, *finished = &progress->phase[phase].finished;
    int64_t first = __atomic_load_n(claimed, __ATOMIC_RELAXED);
    int last_of_all = 0;
    while (first < total) {
        int64_t size = (total - first) / (2 * threads) / grain * grain;
        size = size < grain ? grain : size;
        size = size > total - first ? total - first : size;
        if (!__atomic_compare_exchange_n(claimed, &first, first + size, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
            continue;
        each(work, first, first + size);
        last_of_all = __atomic_add_fetch(finished, size, __ATOMIC_ACQ_REL) == total;
        first = __atomic_load_n(claimed, __ATOMIC_RELAXED);
    }
    return last_of_all;
}

/* Until others finished what they claimed. A core that others want, too, is given up after a while. */
static inline void wait_for_phase(const struct progress *progress, int phase, int64_t total)
{
    for (int64_t spins = 0; __atomic_load_n(&progress->phase[phase].finished, __ATOMIC_ACQUIRE) < total; spins++) {
        relax();
        if (spins > SPINS)
            sched_yield();
    }
}

#endif
