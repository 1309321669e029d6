/* What planner/contract/experts/policies/mix.py tells of, computed: one call for a visit of a layer. All memory is Python's. */

#include <math.h>
#include <stddef.h>
#include <string.h>

struct mix {
    int layers, count, top_k;
    int near, far;                  /* groups of top_k experts that speak for keeping, for fetching */
    int rates, further;             /* decayed frequencies; features of scores: SCORE_FEATURES or none */
    float floor, due_later, least_score;
    float keep_rate, fetch_rate, weight_rate;
    double share;                   /* of the experts that a visit uses */
    const float *gain;              /* [rates]: what one visit adds to each decayed frequency */
    float *tables;                  /* [layers, near + far, count, count]: what the third speaks for the fourth */
    float *weights, *squares;       /* of the features for fetching, then of those for keeping; sums of squared gradients */
    float *often;                   /* [layers, rates, count] */
    float *odds;                    /* [layers, count]: logits of worth */
    float *worth, *foreseen;        /* [layers, count]; the latter, as its error, is about the layer after */
    float *keep_error, *fetch_error;
    float *features;                /* [layers, 2 visits, features, count], see feature_count() */
    int *rows;                      /* [layers, 2 visits, near + far, top_k]: of the tables */
    int *path;                      /* [2, layers, top_k]: experts of the latest visits, and of those before */
    double *learnt;                 /* [layers]: 4 at first, more with every visit that was learnt from */
    int *latest, *follows;          /* [layers]: which of the two visits is the latest; whether the other is to be learnt from */
};

enum { SCORE_FEATURES = 4 };

/* A visit's features: those of scores, the coming layer's odds, 1, decayed frequencies, recency. Fetching weighs the first
   further + 2 of them, keeping the last rates + 2: both have the 1, each with a weight of its own. */
static int feature_count(const struct mix *m) { return m->further + 3 + m->rates; }

struct visit {
    int *rows;
    float *features, *recency;
};

struct model {
    int first_row, rows, features;
    float rate;
    float *weights, *squares;
    const float *seen;
};

static struct visit visit_of(const struct mix *m, int layer, int which)
{
    const size_t number = 2 * (size_t)layer + which;
    struct visit v;
    v.rows = m->rows + number * (m->near + m->far) * m->top_k;
    v.features = m->features + number * feature_count(m) * m->count;
    v.recency = v.features + (size_t)(feature_count(m) - 1) * m->count;
    return v;
}

static struct model fetching(const struct mix *m, struct visit v)
{
    return (struct model){m->near * m->top_k, m->far * m->top_k, m->further + 2, m->fetch_rate, m->weights, m->squares, v.features};
}

static struct model keeping(const struct mix *m, struct visit v)
{
    const int after = m->further + 2;
    const float *seen = v.features + (size_t)(after - 1) * m->count;
    return (struct model){0, m->near * m->top_k, m->rates + 2, m->keep_rate, m->weights + after, m->squares + after, seen};
}

static void add(float *restrict sums, const float *restrict terms, float factor, int n)
{
    for (int i = 0; i < n; i++)
        sums[i] += factor * terms[i];
}

/* In lanes, which a compiler may add side by side without changing a sum's order. */
static float dot(const float *restrict a, const float *restrict b, int n)
{
    float lanes[8] = {0}, sum = 0;
    int i = 0;
    for (; i + 8 <= n; i += 8)
        for (int lane = 0; lane < 8; lane++)
            lanes[lane] += a[i + lane] * b[i + lane];
    for (; i < n; i++)
        sum += a[i] * b[i];
    for (int lane = 0; lane < 8; lane++)
        sum += lanes[lane];
    return sum;
}

static float logistic(float logit) { return 1 / (1 + expf(-logit)); }

enum { CACHE_LINE_FLOATS = 16 };

/* Rows of the tables are on their way from memory while something else is computed. */
static void prefetch(const struct mix *m, const int *rows)
{
    for (int i = 0; i < (m->near + m->far) * m->top_k; i++)
        for (int e = 0; e < m->count; e += CACHE_LINE_FLOATS)
            __builtin_prefetch(m->tables + (size_t)rows[i] * m->count + e);
}

static void weigh(const struct mix *m, struct model model, const int *rows, float *logits)
{
    memset(logits, 0, m->count * sizeof *logits);
    for (int i = 0; i < model.features; i++)
        add(logits, model.seen + (size_t)i * m->count, model.weights[i], m->count);
    for (int i = model.first_row; i < model.first_row + model.rows; i++)
        add(logits, m->tables + (size_t)rows[i] * m->count, 1, m->count);
}

/* The weights' steps are Adagrad's. Rows that are alike, as before the first visits, learn once. */
static void learn(const struct mix *m, struct model model, const int *rows, const float *error, float pace)
{
    for (int i = model.first_row; i < model.first_row + model.rows; i++)
        if (i % m->top_k == 0 || rows[i] != rows[i - 1])
            add(m->tables + (size_t)rows[i] * m->count, error, -pace * model.rate, m->count);
    for (int i = 0; i < model.features; i++) {
        const float gradient = dot(model.seen + (size_t)i * m->count, error, m->count);
        model.squares[i] += gradient * gradient;
        model.weights[i] -= m->weight_rate * gradient / sqrtf(model.squares[i]);
    }
}

/* A token used experts, top_k of them or more: the latest visit's recency, the path and the frequencies. */
static void use(const struct mix *m, int layer, struct visit now, const int *experts, int n)
{
    int *latest = m->path + (size_t)layer * m->top_k, *before = latest + (size_t)m->layers * m->top_k;
    for (int e = 0; e < m->count; e++)
        now.recency[e] = m->floor;
    for (int i = 0; i < n; i++)
        now.recency[experts[i]] = 1;
    memcpy(before, latest, m->top_k * sizeof *latest);
    memcpy(latest, experts, m->top_k * sizeof *latest);
    for (int rate = 0; rate < m->rates; rate++) {
        float *restrict often = m->often + ((size_t)layer * m->rates + rate) * m->count;
        const float *restrict used = now.recency;
        for (int e = 0; e < m->count; e++)
            often[e] += (used[e] - often[e]) * m->gain[rate];
    }
}

/* Margin, side and slope of the scores, and the odds where there are scores. */
static void take_scores(const struct mix *m, const float *scores, const float *odds, float *margin)
{
    float *side = margin + m->count, *slope = side + m->count, *ranked = slope;
    const int most = m->top_k < m->count ? m->top_k + 1 : m->count;
    int n = 0;
    for (int e = 0; e < m->count; e++) {
        const float level = margin[e] = log2f(scores[e] > m->least_score ? scores[e] : m->least_score);
        if (n == most && level <= ranked[most - 1])
            continue;
        int rank = n < most ? n++ : most - 1;
        for (; rank && ranked[rank - 1] < level; rank--)
            ranked[rank] = ranked[rank - 1];
        ranked[rank] = level;
    }
    const float middle = 0.5f * (ranked[most - 1] + ranked[m->top_k - 1]);
    for (int e = 0; e < m->count; e++) {
        margin[e] -= middle;
        side[e] = (margin[e] > 0) - (margin[e] < 0);
        slope[e] = 2 * logistic(2 * margin[e]) - 1;  /* tanh, at a third of its price */
    }
    memcpy(slope + m->count, odds, m->count * sizeof *odds);
}

/* From the layer's latest visit: what is due in it, and what the coming layer will use. */
static void judge(const struct mix *m, int layer, struct visit now, const float *scores)
{
    const int count = m->count, top_k = m->top_k, groups = m->near + m->far;
    const float *coming = m->odds + (size_t)((layer + 1) % m->layers) * count;
    float *features = now.features;
    for (int group = 0; group < groups; group++) {
        const int back = group < m->near ? group : group - m->near;
        const int place = group == m->near - 1 ? m->layers + layer : (layer - back + m->layers) % m->layers;
        for (int rank = 0; rank < top_k; rank++)
            now.rows[group * top_k + rank] = (layer * groups + group) * count + m->path[place * top_k + rank];
    }
    prefetch(m, now.rows);
    if (scores)
        take_scores(m, scores, coming, features);
    else
        memset(features, 0, (size_t)m->further * count * sizeof *features);
    features += (size_t)m->further * count;
    memcpy(features, coming, count * sizeof *coming);
    features += 2 * (size_t)count;
    for (int i = 0; i < m->rates * count; i++)
        features[i] = logf(m->often[(size_t)layer * m->rates * count + i]);
    float *odds = m->odds + (size_t)layer * count, *foreseen = m->foreseen + (size_t)layer * count;
    weigh(m, keeping(m, now), now.rows, odds);
    weigh(m, fetching(m, now), now.rows, foreseen);
    for (int e = 0; e < count; e++)
        foreseen[e] = logistic(foreseen[e]);
}

static int in_range(const struct mix *m, int layer, const int *experts, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (experts[i] < 0 || experts[i] >= m->count)
            return 0;
    return layer >= 0 && layer < m->layers;
}

/* scores: [count], or NULL. Not 0 where the visit cannot be: nothing was learnt then. */
int mix_observe(const struct mix *m, int layer, const int *experts, int n, const float *scores)
{
    if (n < m->top_k || (scores && m->further != SCORE_FEATURES) || !in_range(m, layer, experts, n))
        return 1;
    const int count = m->count, before = (layer - 1 + m->layers) % m->layers;
    m->latest[layer] ^= 1;
    const struct visit now = visit_of(m, layer, m->latest[layer]), last = visit_of(m, layer, !m->latest[layer]);
    prefetch(m, last.rows);
    use(m, layer, now, experts, n);
    const float *expected = m->foreseen + (size_t)before * count;
    float *missed = m->fetch_error + (size_t)before * count;
    for (int e = 0; e < count; e++)
        missed[e] = expected[e] - now.recency[e];
    judge(m, layer, now, scores);
    float *worth = m->worth + (size_t)layer * count, *keep_error = m->keep_error + (size_t)layer * count;
    for (int e = 0; e < count; e++) {
        const float due = logistic(m->odds[(size_t)layer * count + e]), later = m->due_later * due;
        keep_error[e] = worth[e] - (later > now.recency[e] ? later : now.recency[e]);
        worth[e] = due;
    }
    if (m->follows[layer]) {
        m->learnt[layer] += m->share;
        const float pace = (float)(1 / sqrt(m->learnt[layer]));
        learn(m, keeping(m, last), last.rows, keep_error, pace);
        learn(m, fetching(m, last), last.rows, m->fetch_error + (size_t)layer * count, pace);
    }
    m->follows[layer] = 1;
    return 0;
}

/* routed: [tokens, n]. Not 0 where it cannot be. */
int mix_study(const struct mix *m, int layer, const int *routed, int tokens, int n)
{
    if (n < m->top_k || !in_range(m, layer, routed, (size_t)tokens * n))
        return 1;
    m->latest[layer] ^= 1;
    const struct visit now = visit_of(m, layer, m->latest[layer]);
    for (int token = 0; token < tokens; token++)
        use(m, layer, now, routed + (size_t)token * n, n);
    judge(m, layer, now, NULL);
    for (int e = 0; e < m->count; e++)
        m->worth[(size_t)layer * m->count + e] = logistic(m->odds[(size_t)layer * m->count + e]);
    m->follows[layer] = 0;
    return 0;
}

/* For Python to compare with what it has of it. */
size_t mix_bytes(void) { return sizeof(struct mix); }
