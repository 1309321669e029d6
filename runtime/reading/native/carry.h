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
    int (*wait)(void *kernels, void *event, unsigned flags); /* the stream of kernels goes on behind the event */
    void *kernels;
    int (*write)(void *stream, uint64_t word, uint32_t value, unsigned flags);
    int (*until)(void *kernels, uint64_t word, uint32_t value, unsigned flags); /* kernels go on once the word is the value, or more */
    uint64_t word; /* 32 bits of page-locked memory, in the stream's order as many as parts were carried by then; 0: there are none */
    int64_t closed, carried, promised; /* parts of requests; promised: asked for so far */
    pthread_mutex_t lock;
};

/* What is copied on of a buffer, and where to, counted from two addresses. */
struct segment {
    int64_t from, to, bytes;
};

/* Segments of the buffer at `from` go to memory that begins at `to`. Everything in int64_t or addresses, so that the interpreter may write
 * it as an array. */
struct move {
    const struct segment *segments;
    int64_t count;
    uint64_t to;
    const char *from;
};

/* What the interpreter hears of a part that has come. number: how many parts the carrier had carried with it, 0 for none; less than 0:
 * what the driver refused it with. */
struct carried {
    int64_t number, begun_ns;
};

/* From a thread that read; `event` is recorded behind. 0, or 1 where the driver refuses. Nothing is done once the carrier is closed. */
int carry_on(struct carrier *carrier, const struct move *move, void *event, struct carried *carried);
/* So many parts will not come: kernels that wait for them go on, and somebody is told why. */
void carry_none(struct carrier *carrier, int64_t parts);

#endif
