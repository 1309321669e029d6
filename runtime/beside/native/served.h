/* Units of a step, each done when it is asked. */
#ifndef PENSTOCK_SERVED_H
#define PENSTOCK_SERVED_H

#include "unit.h"

/* A flag has a cache line for itself. */
enum { FLAG_WORDS = LINE / 4 };

struct served_unit {
    struct unit unit;
    uint16_t *y;
    struct scratch scratch;
    struct progress progress;
    int64_t begun, ended; /* ns */
};

struct served {
    int64_t count, rows;
    const uint16_t *x;
    int32_t *ask, *done, *near; /* near: NULL where the pool's threads look for `ask` from the step's begin on */
    int32_t stopped;
    char apart[LINE];
    int64_t front; /* units that were begun */
    char apart_too[LINE];
    void *scratch;
    struct served_unit units[];
};

/* Unit i writes from y[at[i]] on. NULL without memory. */
struct served *served_open(int64_t count, const struct unit *units, int64_t rows, int32_t *ask, int32_t *done, int32_t *near,
                           const uint16_t *x, uint16_t *y, const int64_t *at);
void served_close(struct served *served);

/* 1 when the step's last unit is done. */
int64_t served_over(const struct served *served);

/* For a step of that many rows. No thread may be at the last one still. */
void served_ready(struct served *served, int64_t rows);

/* Thread `me` takes part in the units from `first` to before `past`. It reads ahead while none is asked. Returns 1 for the thread that
 * finished the last one. */
int served_live(const struct team *team, int64_t me, struct served *served, int64_t first, int64_t past);

struct pool;

/* For a step of that many rows, of which no unit is posted yet. The step before has ended. */
void pool_ready(struct pool *pool, struct served *served, int64_t rows);

/* Posts the units from `first` to before `past` of a step that is ready: the job's number. Threads spin until each is asked. */
int64_t pool_serve(struct pool *pool, struct served *served, int64_t first, int64_t past);

/* Ends a step that will not be asked for more, and waits until no thread is at it. */
void pool_abandon(struct pool *pool, struct served *served);

#endif
