#ifndef CARRY_H
#define CARRY_H

#include <pthread.h>
#include <stdint.h>

/* A copy stream of a card, and the driver's calls that queue on it: no library of the driver's is needed to build this. */
struct carrier {
    int (*enter)(void *context);
    void *context;
    int (*copy)(uint64_t to, uint64_t from, size_t bytes, void *stream);
    int (*record)(void *event, void *stream);
    void *stream;
    int64_t closed, carried; /* carried: requests */
    pthread_mutex_t lock;
};

/* What is copied on of a buffer, and where to, counted from two addresses. */
struct segment {
    int64_t from, to, bytes;
};

/* What becomes of a request that has come: segments go to memory that begins at `to`, and `event` is recorded behind them. Everything in
 * int64_t or addresses, so that the interpreter may write it as an array. */
struct carry {
    struct carrier *carrier;
    const struct segment *segments;
    int64_t count;
    uint64_t to;
    void *event;
    int64_t number; /* written: how many requests the carrier had carried with it, or less than 0: what the driver refused it with */
    int64_t begun_ns;
};

/* 0, or 1 where the driver refuses. Nothing is done once the carrier is closed. */
int carry_on(struct carry *carry, const char *buffer);

#endif
