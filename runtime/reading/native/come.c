/* Orders that have come: the thread that launches kernels sleeps for all of them, and has the card wait for their copies, in one call. What
 * it does behind a sleep it does with cold caches. */
#include "request.h"

/* Which part of all, one order's behind the other's, was carried last; -1 where one was not carried. */
static int64_t last_of(const struct asked *const *asked, int64_t count, const struct carried **last, void **event)
{
    int64_t found = -1, at = 0;
    for (int64_t i = 0; i < count; i++)
        for (int64_t k = 0; k < asked[i]->count; k++, at++) {
            const struct carried *carried = &asked[i]->carried[k];
            if (carried->number <= 0)
                return -1;
            if (found < 0 || carried->number > (*last)->number) {
                found = at;
                *last = carried;
                *event = asked[i]->events[k];
            }
        }
    return found;
}

/* Sleeps until as many numbers as there are orders have come to `inbox`, for so many ns at most. Then kernels that are issued next wait for
 * all that a carrier has carried of them. Returns the part for which they do; -1, and nothing is known, where not all have come, one was
 * refused, the last was carried before `after_ns`, or the driver refuses. Numbers stay in the inbox. */
int64_t orders_come(struct inbox *inbox, const struct asked *const *asked, int64_t count, int64_t ns, int64_t after_ns)
{
    const struct carried *last = NULL;
    void *event = NULL;
    if (inbox_await(inbox, ns, count))
        return -1;
    int64_t found = last_of(asked, count, &last, &event);
    const struct carrier *carrier = asked[0]->carrier;
    if (found < 0 || last->begun_ns <= after_ns || carrier->wait(carrier->kernels, event, 0))
        return -1;
    return found;
}
