/* Units of a step, each done when it is asked. */
#ifndef PENSTOCK_SERVED_H
#define PENSTOCK_SERVED_H

#include "unit.h"

/* A flag has a cache line for itself. */
enum { FLAG_WORDS = LINE / 4 };

struct served_unit {
    struct unit unit;
    struct scratch scratch;
    struct progress progress;
    int64_t begun, ended; /* ns */
};

struct served {
    int64_t count, rows;
    const uint16_t *x;
    uint16_t *y;
    int32_t *ask, *done;
    int32_t stopped;
    char apart[LINE];
    int64_t front; /* units that were begun */
    char apart_too[LINE];
    void *scratch;
    struct served_unit units[];
};

/* NULL without memory. */
struct served *served_open(int64_t count, const struct unit *units, int64_t rows, int32_t *ask, int32_t *done, const uint16_t *x, uint16_t *y);
void served_close(struct served *served);

/* 1 when the step's last unit is done. */
int64_t served_over(const struct served *served);

/* For a step of that many rows. No thread may be at the last one still. */
void served_ready(struct served *served, int64_t rows);

/* Takes part in all units. Returns 1 for the thread that finished the last one. */
int served_live(const struct team *team, struct served *served);

#endif
