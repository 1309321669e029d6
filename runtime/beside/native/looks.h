/* How a thread looks for a word that somebody else writes: it spins, then naps, for others may have the core. */
#ifndef PENSTOCK_LOOKS_H
#define PENSTOCK_LOOKS_H

#include "phases.h"

#include <time.h>

enum { SPIN_NS = 20000000, NAP_NS = 50000, LOOKS = 64 };

struct looks {
    int64_t count, since;
};

int64_t now_ns(void);

static inline void look_again(struct looks *looks)
{
    relax();
    if (++looks->count % LOOKS)
        return;
    const int64_t now = now_ns();
    looks->since = looks->since ? looks->since : now;
    if (now - looks->since > SPIN_NS)
        nanosleep(&(struct timespec){0, NAP_NS}, NULL);
}

#endif
