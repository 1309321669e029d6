/* A unit that the CPU computes: a linear layer or an FFN, done by threads that claim rows. */
#ifndef PENSTOCK_UNIT_H
#define PENSTOCK_UNIT_H

#include "phases.h"

/* product: down alone. plain: down(act(up x)). gated: down(act(gate x) * up x). read: `bytes` of down.part[0], which only come into
 * registers: what memory gives these threads at most. paired: up's rows are gate and up in turns, and down takes (up + 1) * gate *
 * sigmoid(alpha * gate), gate at most limit, up within it on both sides: gpt-oss's. */
enum form { FORM_PRODUCT, FORM_PLAIN, FORM_GATED, FORM_READ, FORM_PAIRED };
enum activation { ACT_SILU, ACT_GELU, ACT_GELU_TANH, ACT_RELU };

struct unit {
    int32_t form, activation, number; /* number: of x, y and biases, and what is rounded to */
    struct matrix gate, up, down;
    const uint16_t *bias[3]; /* of gate, up, down; NULL for none */
    int64_t bytes;        /* that one pass reads */
    float alpha, limit;   /* of a paired one */
};

/* Memory that threads share for one unit at a time. Floats of `rows` input rows and the widest layers. */
struct scratch {
    float *x, *gate, *up, *out, *both;
    uint16_t *middle, *x_pairs, *middle_pairs, *x_words, *middle_words;
    float *x_eights, *middle_eights, *x_steps, *middle_steps;
};

int64_t inputs_of(const struct unit *unit);
int64_t middle_of(const struct unit *unit);

/* Bytes that a unit with `rows` input rows needs, and the same laid out in memory aligned to 64 bytes. */
int64_t scratch_bytes(const struct unit *unit, int64_t rows);
struct scratch scratch_in(void *memory, const struct unit *unit, int64_t rows);

/* Thread `me` of the team takes part until all rows of y are written. x: [rows][inputs], y: [rows][outputs]. Returns 1 for the thread that
 * finished the last rows, else 0. What torch's layers of that number round is rounded: each linear's output, the activation's, the
 * product's. */
int take_part(const struct team *team, int64_t me, const struct unit *unit, const struct scratch *scratch, struct progress *progress,
              int64_t rows, const uint16_t *x, uint16_t *y);

/* Of a unit that comes next, what thread `me` will read first. */
struct ahead ahead_of(const struct team *team, int64_t me, const struct unit *unit);

#endif
