/* Numbers that come to one consumer, who sleeps for them without the interpreter. */
#define _GNU_SOURCE
#include "inbox.h"

#include <linux/futex.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* NULL without memory. */
struct inbox *inbox_open(void)
{
    struct inbox *inbox = calloc(1, sizeof *inbox);
    if (inbox)
        pthread_mutex_init(&inbox->lock, NULL);
    return inbox;
}

/* Nobody asks, or waits, or will. */
void inbox_free(struct inbox *inbox)
{
    pthread_mutex_destroy(&inbox->lock);
    free(inbox->numbers);
    free(inbox);
}

int inbox_expect(struct inbox *inbox)
{
    int failed = 0;
    pthread_mutex_lock(&inbox->lock);
    if (inbox->asked + inbox->held == inbox->room) {
        int64_t more = inbox->room ? 2 * inbox->room : 64;
        int64_t *numbers = malloc((size_t)more * sizeof *numbers);
        if (numbers) {
            for (int64_t i = 0; i < inbox->held; i++)
                numbers[i] = inbox->numbers[(inbox->first + i) % inbox->room];
            free(inbox->numbers);
            inbox->numbers = numbers;
            inbox->first = 0;
            inbox->room = more;
        } else {
            failed = 1;
        }
    }
    inbox->asked += !failed;
    pthread_mutex_unlock(&inbox->lock);
    return failed;
}

void inbox_forget(struct inbox *inbox)
{
    pthread_mutex_lock(&inbox->lock);
    inbox->asked--;
    pthread_mutex_unlock(&inbox->lock);
}

static void push(struct inbox *inbox, int64_t number, int is_word)
{
    pthread_mutex_lock(&inbox->lock);
    inbox->numbers[(inbox->first + inbox->held++) % inbox->room] = number;
    inbox->asked--;
    __atomic_add_fetch(&inbox->rung, 1, __ATOMIC_RELEASE);
    inbox->words += is_word;
    int woken = inbox->waiting && (is_word || inbox->held >= inbox->least);
    if (woken)
        inbox->waiting = 0;
    pthread_mutex_unlock(&inbox->lock);
    if (woken)
        syscall(SYS_futex, &inbox->rung, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

void inbox_push(struct inbox *inbox, int64_t number)
{
    push(inbox, number, 0);
}

/* Wakes whoever waits, for however many. 0, or 1 without memory. */
int64_t inbox_put(struct inbox *inbox, int64_t number)
{
    if (inbox_expect(inbox))
        return 1;
    push(inbox, number, 1);
    return 0;
}

/* Up to `most` numbers that came; never waits. */
int64_t inbox_take(struct inbox *inbox, int64_t *numbers, int64_t most)
{
    pthread_mutex_lock(&inbox->lock);
    int64_t taken = inbox->held < most ? inbox->held : most;
    for (int64_t i = 0; i < taken; i++)
        numbers[i] = inbox->numbers[(inbox->first + i) % inbox->room];
    if (taken)
        inbox->first = (inbox->first + taken) % inbox->room;
    inbox->held -= taken;
    if (!inbox->held)
        inbox->words = 0;
    pthread_mutex_unlock(&inbox->lock);
    return taken;
}

int inbox_await(struct inbox *inbox, int64_t ns, int64_t least)
{
    struct timespec left = {ns / 1000000000, ns % 1000000000};
    pthread_mutex_lock(&inbox->lock);
    uint32_t rung = inbox->rung;
    int empty = inbox->held < least && !inbox->words;
    inbox->waiting = 1;
    inbox->least = least;
    pthread_mutex_unlock(&inbox->lock);
    if (empty)
        syscall(SYS_futex, &inbox->rung, FUTEX_WAIT_PRIVATE, rung, &left, NULL, 0);
    pthread_mutex_lock(&inbox->lock);
    inbox->waiting = 0;
    int missing = inbox->held < least || inbox->words;
    pthread_mutex_unlock(&inbox->lock);
    return missing;
}

/* Up to `most` numbers when `least` have come, or as many as there are after so many ns, or earlier for a signal, which is the caller's to
 * handle. One caller at a time. */
int64_t inbox_wait(struct inbox *inbox, int64_t *numbers, int64_t most, int64_t ns, int64_t least)
{
    inbox_await(inbox, ns, least);
    return inbox_take(inbox, numbers, most);
}
