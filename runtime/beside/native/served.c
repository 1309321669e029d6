/* A step's units in their order. The card sets ask[i] when x is there; done[i] is set, and ask[i] cleared, when y is there. */
#define _GNU_SOURCE
#include "served.h"

#include <stdlib.h>
#include <time.h>

/* SOON: an ask that comes within it is waited for awake, since waking up takes a part of it. */
enum { SPIN_NS = 20000000, NAP_NS = 50000, SOON_NS = 200000, LOOKS = 64 };

int64_t now_ns(void);

struct served *served_open(int64_t count, const struct unit *units, int64_t rows, int32_t *ask, int32_t *done, const uint16_t *x, uint16_t *y)
{
    struct served *served = calloc(1, sizeof *served + (size_t)count * sizeof *served->units);
    int64_t most = 0;
    if (!served)
        return NULL;
    for (int64_t i = 0; i < count; i++) {
        int64_t need = scratch_bytes(&units[i], rows);
        most = need > most ? need : most;
    }
    if (posix_memalign(&served->scratch, LINE, (size_t)most)) {
        free(served);
        return NULL;
    }
    served->count = count;
    served->x = x;
    served->y = y;
    served->ask = ask;
    served->done = done;
    for (int64_t i = 0; i < count; i++)
        served->units[i].unit = units[i];
    return served;
}

void served_close(struct served *served)
{
    free(served->scratch);
    free(served);
}

int64_t served_over(const struct served *served)
{
    return __atomic_load_n(&served->units[served->count - 1].ended, __ATOMIC_ACQUIRE) != 0;
}

/* What a step's gaps say of the next one's: a shorter one is believed at once, a longer one by an eighth more each step. */
static int64_t gap_after(int64_t known, int64_t found)
{
    return !known || found < known ? found : found - known < known / 8 ? found : known + known / 8 + 1;
}

static void learn_gaps(struct served *served)
{
    int64_t before = served->readied;
    for (int64_t i = 0; i < served->count; i++) {
        struct served_unit *unit = &served->units[i];
        if (!unit->begun || !unit->ended)
            return; /* abandoned there */
        unit->gap = gap_after(unit->gap, unit->begun - before);
        before = unit->ended;
    }
}

void served_ready(struct served *served, int64_t rows)
{
    learn_gaps(served);
    served->readied = now_ns();
    served->rows = rows;
    served->front = 0;
    for (int64_t i = 0; i < served->count; i++) {
        struct served_unit *unit = &served->units[i];
        unit->scratch = scratch_in(served->scratch, &unit->unit, rows);
        memset(&unit->progress, 0, sizeof unit->progress);
        unit->begun = unit->ended = 0;
    }
}

/* Sleeps while the ask is further off than SOON by the gaps of the last steps, by halves, so that most of an early one's wait is seen. Later
 * a thread stays awake for a while; whoever asks later than that is late, and others may have the core. */
static void pass_time(int64_t since, int64_t now, int64_t gap)
{
    const int64_t left = since + gap - SOON_NS - now;
    if (left > NAP_NS)
        nanosleep(&(struct timespec){left / 2 / 1000000000, left / 2 % 1000000000}, NULL);
    else if (now - since > gap + SPIN_NS)
        nanosleep(&(struct timespec){0, NAP_NS}, NULL);
}

/* Until unit i is asked, or another thread saw that it is. 0 when there is no use in waiting. */
static int await_unit(struct served *served, int64_t i)
{
    const int32_t *ask = &served->ask[i * FLAG_WORDS];
    int64_t since = 0;
    for (int64_t looks = 1;; looks++) {
        int64_t front = __atomic_load_n(&served->front, __ATOMIC_ACQUIRE);
        if (front > i)
            return 1;
        if (__atomic_load_n(ask, __ATOMIC_ACQUIRE)) {
            while (front <= i && !__atomic_compare_exchange_n(&served->front, &front, i + 1, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
                ;
            return 1;
        }
        if (__atomic_load_n(&served->stopped, __ATOMIC_RELAXED))
            return 0;
        relax();
        if (looks % LOOKS)
            continue;
        int64_t now = now_ns();
        since = since ? since : now;
        pass_time(since, now, served->units[i].gap);
    }
}

int served_live(const struct team *team, struct served *served)
{
    int last = 0;
    for (int64_t i = 0; i < served->count; i++) {
        struct served_unit *unit = &served->units[i];
        int64_t none = 0;
        if (!await_unit(served, i))
            return 0;
        if (!__atomic_load_n(&unit->begun, __ATOMIC_RELAXED))
            __atomic_compare_exchange_n(&unit->begun, &none, now_ns(), 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
        last = take_part(team, &unit->unit, &unit->scratch, &unit->progress, served->rows, served->x, served->y);
        if (last) {
            __atomic_store_n(&unit->ended, now_ns(), __ATOMIC_RELEASE);
            __atomic_store_n(&served->ask[i * FLAG_WORDS], 0, __ATOMIC_RELAXED);
            __atomic_store_n(&served->done[i * FLAG_WORDS], 1, __ATOMIC_RELEASE);
        }
    }
    return last;
}
