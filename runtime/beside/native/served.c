/* A step's units in their order. The card sets ask[i] when x is there; done[i] is set, and ask[i] cleared, when y is there. Where there are
 * words near[i], the card sets them some time before; whoever begins a step clears them. */
#define _GNU_SOURCE
#include "served.h"
#include "looks.h"

#include <stdlib.h>

struct served *served_open(int64_t count, const struct unit *units, int64_t rows, int32_t *ask, int32_t *done, int32_t *near,
                           const uint16_t *x, uint16_t *y, const int64_t *at)
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
    served->ask = ask;
    served->done = done;
    served->near = near;
    for (int64_t i = 0; i < count; i++) {
        served->units[i].unit = units[i];
        served->units[i].y = y + at[i];
    }
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

void served_ready(struct served *served, int64_t rows)
{
    served->rows = rows;
    served->front = 0;
    for (int64_t i = 0; i < served->count; i++) {
        struct served_unit *unit = &served->units[i];
        unit->scratch = scratch_in(served->scratch, &unit->unit, rows);
        memset(&unit->progress, 0, sizeof unit->progress);
        unit->begun = unit->ended = 0;
        if (served->near)
            __atomic_store_n(&served->near[i * FLAG_WORDS], 0, __ATOMIC_RELEASE);
    }
}

/* Until unit i is asked, or another thread saw that it is; what is `ahead` is read meanwhile. 0 when there is no use in waiting. */
static int await_unit(struct served *served, int64_t i, struct ahead *ahead)
{
    const int32_t *ask = &served->ask[i * FLAG_WORDS];
    for (struct looks looks = {0};;) {
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
        if (!read_ahead(ahead))
            look_again(&looks);
    }
}

int served_live(const struct team *team, int64_t me, struct served *served, int64_t first, int64_t past)
{
    int last = 0;
    for (int64_t i = first; i < past; i++) {
        struct served_unit *unit = &served->units[i];
        struct ahead ahead = ahead_of(team, me, &unit->unit);
        int64_t none = 0;
        if (!await_unit(served, i, &ahead))
            return 0;
        if (!__atomic_load_n(&unit->begun, __ATOMIC_RELAXED))
            __atomic_compare_exchange_n(&unit->begun, &none, now_ns(), 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
        last = take_part(team, me, &unit->unit, &unit->scratch, &unit->progress, served->rows, served->x, unit->y);
        if (last) {
            __atomic_store_n(&unit->ended, now_ns(), __ATOMIC_RELEASE);
            __atomic_store_n(&served->ask[i * FLAG_WORDS], 0, __ATOMIC_RELAXED);
            __atomic_store_n(&served->done[i * FLAG_WORDS], 1, __ATOMIC_RELEASE);
        }
    }
    return last;
}
