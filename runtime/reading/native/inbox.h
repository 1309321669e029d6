#ifndef INBOX_H
#define INBOX_H

#include <pthread.h>
#include <stdint.h>

/* Where a consumer hears which requests are over, in the order in which they were. */
struct inbox {
    int64_t held; /* the interpreter looks at it, too */
    pthread_mutex_t lock;
    int64_t *numbers, room, first, asked; /* asked: those that are still to come */
    uint32_t rung, waiting; /* rung: changes with each number */
    int64_t least, words;   /* numbers for which the one who waits is woken; of those held, the ones that wake at once */
};

/* 0 when there is room for one number more than there may be. Then inbox_push or inbox_forget comes. */
int inbox_expect(struct inbox *inbox);
void inbox_forget(struct inbox *inbox);
void inbox_push(struct inbox *inbox, int64_t number);
/* Sleeps until `least` numbers have come, for so many ns at most, or less for a signal. 0 when they have, and nothing that wakes at once. */
int inbox_await(struct inbox *inbox, int64_t ns, int64_t least);

#endif
