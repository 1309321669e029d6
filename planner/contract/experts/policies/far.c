/* What planner/contract/experts/policies/far.py tells of, computed: one call for a visit of a layer, one for its names. All memory is Python's. */

#include <stddef.h>

struct far {
    int layers, count, top_k;
    int reach;                      /* the farthest layer that scores are taken of, in layers from today's */
    double least;                   /* the least chance of a name */
    double *visits, *right;         /* [reach + 1, top_k] by distance and rank: of names that were judged */
    int *told;                      /* [layers, reach + 1, top_k]: whom a layer's next visit was said to use, or NOBODY */
    const unsigned char *held;      /* [layers, count] */
    int *names;                     /* [layers * top_k, 2]: layer, expert */
};

enum { NOBODY = -1, NEXT = 1 };     /* the next layer is the policies' own to judge */

static size_t told_at(const struct far *f, int layer, int distance)
{
    return ((size_t)layer * (f->reach + 1) + distance) * f->top_k;
}

/* The top_k best of scores, the best first; of equals the lower number. */
static void best(const struct far *f, const float *scores, int *experts)
{
    int n = 0;
    for (int e = 0; e < f->count; e++) {
        if (n == f->top_k && scores[e] <= scores[experts[n - 1]])
            continue;
        int rank = n < f->top_k ? n++ : n - 1;
        for (; rank && scores[experts[rank - 1]] < scores[e]; rank--)
            experts[rank] = experts[rank - 1];
        experts[rank] = e;
    }
}

static int in_there(const int *experts, int n, int expert)
{
    for (int i = 0; i < n; i++)
        if (experts[i] == expert)
            return 1;
    return 0;
}

/* experts: [n]; ahead: [rows, count] of the layers after this one, the nearest first. Not 0 where the visit cannot be. */
int far_observe(const struct far *f, int layer, const int *experts, int n, const float *ahead, int rows)
{
    if (layer < 0 || rows < 0 || rows > f->reach || layer + rows >= f->layers)
        return 1;
    for (int distance = NEXT + 1; distance <= f->reach; distance++) {
        int *told = f->told + told_at(f, layer, distance);
        for (int rank = 0; rank < f->top_k; rank++) {
            if (told[rank] != NOBODY) {
                f->visits[distance * f->top_k + rank] += 1;
                f->right[distance * f->top_k + rank] += in_there(experts, n, told[rank]);
            }
            told[rank] = NOBODY;
        }
    }
    for (int distance = NEXT + 1; distance <= rows; distance++) {
        const int coming = layer + distance;
        int *told = f->told + told_at(f, coming, distance);
        best(f, ahead + (size_t)(distance - 1) * f->count, told);
        for (int rank = 0; rank < f->top_k; rank++)
            if (f->held[(size_t)coming * f->count + told[rank]])
                told[rank] = NOBODY;
    }
    return 0;
}

/* Fills in names, the nearest layer first, up to most ranks of each: how many they are. */
int far_named(const struct far *f, int layer, int most)
{
    int n = 0;
    for (int distance = NEXT + 1; distance <= f->reach && layer + distance < f->layers; distance++) {
        const int *told = f->told + told_at(f, layer + distance, distance);
        for (int rank = 0; rank < most && rank < f->top_k; rank++) {
            const int at = distance * f->top_k + rank;
            if (told[rank] == NOBODY || f->right[at] < f->least * f->visits[at])
                continue;
            f->names[2 * n] = layer + distance;
            f->names[2 * n + 1] = told[rank];
            n++;
        }
    }
    return n;
}

/* For Python to compare with what it has of it. */
size_t far_bytes(void) { return sizeof(struct far); }
