/* The phases of a unit: inputs in all forms, gate and up with the activation, down. */
#define _GNU_SOURCE
#include "approximations.h"
#include "unit.h"

#include <math.h>

enum { READ_BYTES = 4096, READ_LANES = 32 };
enum { CLAIM_BYTES = 1 << 16 };

struct work {
    const struct team *team;
    const struct unit *unit;
    const struct scratch *scratch;
    int64_t rows;
    const uint16_t *x;
    uint16_t *y;
};

int64_t inputs_of(const struct unit *unit)
{
    return unit->form == FORM_PRODUCT ? unit->down.columns : unit->up.columns;
}

int64_t middle_of(const struct unit *unit)
{
    return unit->form == FORM_PRODUCT ? 0 : unit->form == FORM_PAIRED ? unit->up.rows / 2 : unit->up.rows;
}

static int64_t lines(int64_t bytes)
{
    return (bytes + LINE - 1) / LINE * LINE;
}

static int64_t pairs_bytes(int64_t rows, int64_t columns)
{
    return lines((rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS * ((columns + 1) / 2 * 2) * 2);
}

/* Columns of words; a sum of eight takes an eighth of a float each. */
static int64_t padded(int64_t columns)
{
    return (columns + WORDS_COLUMNS - 1) / WORDS_COLUMNS * WORDS_COLUMNS;
}

/* Of F16 there are two rows of words for each. */
static int64_t words_rows(const struct unit *unit, int64_t rows)
{
    return unit->number == NUMBER_F16 ? 2 * rows : rows;
}

static int64_t words_bytes(int64_t rows, int64_t columns)
{
    return lines(2 * rows * padded(columns)) + lines(4 * rows * padded(columns) / WORDS_LANE);
}

static int64_t steps_bytes(int64_t rows, int64_t columns)
{
    return lines(4 * rows * (padded(columns) / WORDS_COLUMNS));
}

int64_t scratch_bytes(const struct unit *unit, int64_t rows)
{
    int64_t inputs = inputs_of(unit), middle = middle_of(unit), words = words_rows(unit, rows);
    return lines(4 * rows * inputs) + 2 * lines(4 * rows * middle) + lines(4 * rows * unit->down.rows) + lines(2 * rows * middle) +
           pairs_bytes(rows, inputs) + pairs_bytes(rows, middle) + words_bytes(words, inputs) + words_bytes(words, middle) +
           steps_bytes(rows, inputs) + steps_bytes(rows, middle) + (unit->form == FORM_PAIRED ? lines(8 * rows * middle) : 0);
}

struct scratch scratch_in(void *memory, const struct unit *unit, int64_t rows)
{
    int64_t inputs = inputs_of(unit), middle = middle_of(unit), words = words_rows(unit, rows);
    char *at = memory;
    struct scratch found;
    found.x = (float *)at;
    found.gate = (float *)(at += lines(4 * rows * inputs));
    found.up = (float *)(at += lines(4 * rows * middle));
    found.out = (float *)(at += lines(4 * rows * middle));
    found.middle = (uint16_t *)(at += lines(4 * rows * unit->down.rows));
    found.x_pairs = (uint16_t *)(at += lines(2 * rows * middle));
    found.middle_pairs = (uint16_t *)(at += pairs_bytes(rows, inputs));
    found.x_words = (uint16_t *)(at += pairs_bytes(rows, middle));
    found.x_eights = (float *)(at + lines(2 * words * padded(inputs)));
    found.middle_words = (uint16_t *)(at += words_bytes(words, inputs));
    found.middle_eights = (float *)(at + lines(2 * words * padded(middle)));
    found.x_steps = (float *)(at += words_bytes(words, middle));
    found.middle_steps = (float *)(at += steps_bytes(rows, inputs));
    found.both = (float *)(at + steps_bytes(rows, middle));
    return found;
}

ALONE float from_number(uint16_t bits, const int32_t number)
{
    return number == NUMBER_F16 ? from_f16(bits) : from_bf16(bits);
}

ALONE uint16_t to_number(float value, const int32_t number)
{
    return number == NUMBER_F16 ? to_f16(value) : to_bf16(value);
}

/* Tiles multiply BF16 alone. */
static int wants_pairs(const struct work *work)
{
    return work->team->level >= LEVEL_AMX && work->rows >= TILES_FROM && work->unit->number == NUMBER_BF16;
}

/* Columns [first, last) of all of the tiles' rows; first is even. */
static void pairs_of(const uint16_t *values, uint16_t *pairs, int64_t rows, int64_t columns, int64_t first, int64_t last)
{
    const int64_t twos = (columns + 1) / 2;
    for (int64_t r = 0; r < (rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS; r++) {
        const uint16_t *from = values + r * columns;
        uint16_t *to = pairs + (r / TILE_ROWS * twos * TILE_ROWS + r % TILE_ROWS) * 2;
        for (int64_t k = first; k < last; k += 2) {
            to[k * TILE_ROWS] = r < rows ? from[k] : 0;
            to[k * TILE_ROWS + 1] = r < rows && k + 1 < columns ? from[k + 1] : 0;
        }
    }
}

static int64_t wanted_run(const struct work *work, const struct matrix *m)
{
    return words_run(m->kind, work->unit->number, work->rows, work->team->level);
}

/* What BF16 leaves of an F16 number, which is a BF16, too. Nothing of what is no number, or has no end. */
ALONE float left_over(float value, uint16_t upper)
{
    const float left = value - from_bf16(upper);
    return left == left ? left : 0;
}

/* Columns [first, last), and zeros behind the last; first is a multiple of WORDS_LANE. Of each 2 * run columns the first half lie in the
 * lower halves of `run` bytes, the others in the upper halves. An F16 number lies as a BF16 in one row and what that leaves in the next. */
ALONE void words_of(const float *values, const uint16_t *given, uint16_t *words, float *eights, int64_t rows, int64_t columns,
                    int64_t first, int64_t last, int64_t run, const int32_t number)
{
    const int64_t all = padded(columns), end = last < columns ? last : all, each = number == NUMBER_F16 ? 2 : 1;
    const int bits = __builtin_ctzll((unsigned long long)run); /* run is a power of two */
    for (int64_t r = 0; r < rows; r++, values += columns, given += columns, words += each * all, eights += each * all / WORDS_LANE)
        for (int64_t k = first; k < end; k += WORDS_LANE) {
            uint16_t *to = words + k / WORDS_COLUMNS * WORDS_COLUMNS;
            float sum = 0;
            for (int64_t i = k; i < k + WORDS_LANE; i++) {
                const int64_t at = i % WORDS_COLUMNS, byte = (at >> (bits + 1) << bits) + (at & (run - 1)), upper = at >> bits & 1;
                const int64_t place = (byte % 2 * 2 + upper) * (WORDS_COLUMNS / 4) + byte / 2;
                const float value = i < columns ? values[i] : 0;
                to[place] = i >= columns ? 0 : number == NUMBER_F16 ? to_bf16(value) : given[i];
                if (number == NUMBER_F16)
                    to[all + place] = to_bf16(left_over(value, to[place]));
                sum += value;
            }
            eights[k / WORDS_LANE] = sum;
            if (number == NUMBER_F16)
                eights[(all + k) / WORDS_LANE] = 0;
        }
}

/* The least step is 2 ** -126, F32's least number with a leading one. */
enum { FIXED_BITS = 14, SMALL_EXPONENT = FIXED_BITS + 1, NO_END = 255 };

/* As product_fixed.h has them: columns [first, last), and zeros behind the last. first is a multiple of WORDS_COLUMNS; last, too, or the end. */
static void fixed_of(const float *values, uint16_t *words, float *sums, float *steps, int64_t rows, int64_t columns, int64_t first,
                     int64_t last, int64_t run, int level)
{
    const int64_t all = padded(columns), summed = fixed_summed(run, level);
    const int bits = __builtin_ctzll((unsigned long long)run);
    for (int64_t r = 0; r < rows; r++, values += columns, words += all, sums += all / summed, steps += all / WORDS_COLUMNS)
        for (int64_t k = first; k < last; k += WORDS_COLUMNS) {
            const int64_t some = columns - k < WORDS_COLUMNS ? columns - k : WORDS_COLUMNS;
            float x[WORDS_COLUMNS] = {0};
            int32_t bits_of[WORDS_COLUMNS], largest = 0;
            memcpy(x, values + k, (size_t)some * sizeof *x);
            memcpy(bits_of, x, sizeof bits_of);
            for (int i = 0; i < WORDS_COLUMNS; i++) {
                const int32_t size = bits_of[i] & 0x7fffffff;
                largest = size > largest ? size : largest;
            }
            /* of nothing but zeros any step serves: the smallest, times a scale, would be subnormal, and the CPU half as fast */
            const int32_t found = largest >> 23, exponent = !largest ? 127 : found < SMALL_EXPONENT ? SMALL_EXPONENT : found;
            const float step = as_float((uint32_t)(exponent - FIXED_BITS) << 23);
            const float inverse = as_float((uint32_t)(2 * 127 + FIXED_BITS - exponent) << 23);
            steps[k / WORDS_COLUMNS] = found == NO_END ? as_float(0x7fc00000u) : step;
            for (int i = 0; i < WORDS_COLUMNS; i++) /* to the nearest, ties to even */
                x[i] = x[i] * inverse + 12582912.0f;
            memcpy(bits_of, x, sizeof bits_of); /* whose lower half is the whole number's */
            for (int64_t i = 0; i < WORDS_COLUMNS; i++) {
                const int64_t byte = (i >> (bits + 1) << bits) + (i & (run - 1)), upper = i >> bits & 1;
                const int64_t place = run == WORDS_COLUMNS ? i : (byte % 2 * 2 + upper) * (WORDS_COLUMNS / 4) + byte / 2;
                words[k + place] = (uint16_t)bits_of[i];
            }
            for (int64_t i = 0; i < WORDS_COLUMNS; i += summed) {
                int32_t sum = 0;
                for (int64_t j = i; j < i + summed; j++)
                    sum += (int16_t)bits_of[j];
                sums[(k + i) / summed] = step * (float)sum;
            }
        }
}

/* The words that `m` wants, if any. */
static void share_words(const struct work *work, const struct matrix *m, const float *values, const uint16_t *given, uint16_t *words,
                        float *eights, float *steps, int64_t first, int64_t last)
{
    const int64_t run = wanted_run(work, m);
    if (run && words_fixed(work->team->level))
        fixed_of(values, words, eights, steps, work->rows, m->columns, first, last, run, work->team->level);
    else if (run && work->unit->number == NUMBER_F16)
        words_of(values, given, words, eights, work->rows, m->columns, first, last, run, NUMBER_F16);
    else if (run)
        words_of(values, given, words, eights, work->rows, m->columns, first, last, run, NUMBER_BF16);
}

static const struct matrix *first_matrix(const struct unit *unit)
{
    return unit->form == FORM_PRODUCT ? &unit->down : &unit->up;
}

static void take_inputs(const void *given, int64_t first, int64_t last)
{
    const struct work *work = given;
    int64_t columns = inputs_of(work->unit);
    for (int64_t r = 0; r < work->rows; r++)
        for (int64_t k = first; k < last; k++)
            work->scratch->x[r * columns + k] = from_number(work->x[r * columns + k], work->unit->number);
    if (wants_pairs(work))
        pairs_of(work->x, work->scratch->x_pairs, work->rows, columns, first, last);
    share_words(work, first_matrix(work->unit), work->scratch->x, work->x, work->scratch->x_words, work->scratch->x_eights,
                work->scratch->x_steps, first, last);
}

static struct inputs first_inputs(const struct work *work)
{
    const struct scratch *scratch = work->scratch;
    const uint16_t *pairs = wants_pairs(work) ? scratch->x_pairs : 0;
    const int64_t run = wanted_run(work, first_matrix(work->unit));
    const struct inputs in = {
        work->rows, inputs_of(work->unit), run, scratch->x, work->x, pairs, scratch->x_words, scratch->x_eights, scratch->x_steps,
    };
    return in;
}

ALONE float rounded(float value, const int32_t number)
{
    return from_number(to_number(value, number), number);
}

ALONE float activated(float x, const int32_t activation)
{
    switch (activation) {
    case ACT_SILU: return x / (1.0f + exp_of(-x));
    case ACT_GELU: return 0.5f * x * (1.0f + erff(x * 0.70710678f));
    case ACT_GELU_TANH: return 0.5f * x * (1.0f + tanh_of(0.79788456f * (x + 0.044715f * x * x * x)));
    default: return x > 0 ? x : 0;
    }
}

/* One row's products become what down takes: to in its number, up in F32. */
ALONE void activate(float *gate, float *up, uint16_t *to, int64_t count, const int32_t activation, const int32_t number)
{
    for (int64_t o = 0; o < count; o++) {
        float value = rounded(up[o], number);
        if (gate)
            value *= rounded(activated(rounded(gate[o], number), activation), number);
        else
            value = activated(value, activation);
        to[o] = to_number(value, number);
        up[o] = from_number(to[o], number);
    }
}

ALONE void activate_all(float *restrict gate, float *restrict up, uint16_t *restrict to, int64_t count, int32_t activation,
                        const int32_t number)
{
    if (gate && activation == ACT_SILU)
        activate(gate, up, to, count, ACT_SILU, number);
    else if (gate && activation == ACT_GELU_TANH)
        activate(gate, up, to, count, ACT_GELU_TANH, number);
    else if (gate)
        activate(gate, up, to, count, activation, number);
    else
        activate(0, up, to, count, activation, number);
}

typedef void (*activate_fn)(float *gate, float *up, uint16_t *to, int64_t count, int32_t activation, int32_t number);

#define ACTIVATE(name, target)                                                                                                       \
    target static void name(float *gate, float *up, uint16_t *to, int64_t count, int32_t activation, int32_t number)                 \
    {                                                                                                                                \
        if (number == NUMBER_F16)                                                                                                    \
            activate_all(gate, up, to, count, activation, NUMBER_F16);                                                               \
        else                                                                                                                         \
            activate_all(gate, up, to, count, activation, NUMBER_BF16);                                                              \
    }
ACTIVATE(activate_portable, )
#ifdef HAS_X86
ACTIVATE(activate_avx2, FOR_AVX2)
ACTIVATE(activate_avx512, FOR_AVX512)
#endif

static activate_fn activate_at(int level)
{
    return level >= LEVEL_AVX512 ? X86(activate_avx512) : level >= LEVEL_AVX2 ? X86(activate_avx2) : activate_portable;
}

static void add(float *to, const uint16_t *bias, int64_t count, int32_t number)
{
    for (int64_t o = 0; bias && o < count; o++)
        to[o] += from_number(bias[o], number);
}

static void share_middle_words(const void *given, int64_t first, int64_t last)
{
    const struct work *work = given;
    const struct scratch *scratch = work->scratch;
    share_words(work, &work->unit->down, scratch->up, scratch->middle, scratch->middle_words, scratch->middle_eights,
                scratch->middle_steps, first, last);
}

/* Whole numbers of 16 bits need all of a block: they wait for what is made of it. */
static int shares_later(const struct work *work)
{
    const struct unit *unit = work->unit;
    return words_fixed(work->team->level) && wanted_run(work, &unit->down);
}

/* Columns [first, last) of what down takes, in the forms that it takes. */
static void share_middle(const struct work *work, int64_t first, int64_t last)
{
    const struct scratch *scratch = work->scratch;
    const int64_t middle = middle_of(work->unit);
    if (wants_pairs(work))
        pairs_of(scratch->middle, scratch->middle_pairs, work->rows, middle, first, last);
    if (!shares_later(work))
        share_middle_words(work, first, last);
}

/* Rounded once, as the card's own kernel for these experts. */
static void make_paired(const void *given, int64_t first, int64_t last)
{
    const struct work *work = given;
    const struct unit *unit = work->unit;
    const struct scratch *scratch = work->scratch;
    const struct inputs in = first_inputs(work);
    const int64_t middle = middle_of(unit);
    product_of(unit->up.kind, unit->number, work->team->level)(&unit->up, 2 * first, 2 * last, &in, scratch->both, 2 * middle);
    for (int64_t r = 0; r < work->rows; r++) {
        float *both = scratch->both + r * 2 * middle, *made = scratch->up + r * middle;
        add(both + 2 * first, unit->bias[1] ? unit->bias[1] + 2 * first : 0, 2 * (last - first), unit->number);
        for (int64_t o = first; o < last; o++) {
            float gate = rounded(both[2 * o], unit->number), up = rounded(both[2 * o + 1], unit->number);
            gate = gate < unit->limit ? gate : unit->limit;
            up = up < -unit->limit ? -unit->limit : up > unit->limit ? unit->limit : up;
            uint16_t value = to_number((up + 1.0f) * gate / (1.0f + exp_of(-unit->alpha * gate)), unit->number);
            scratch->middle[r * middle + o] = value;
            made[o] = from_number(value, unit->number);
        }
    }
    share_middle(work, first, last);
}

static void make_middle(const void *given, int64_t first, int64_t last)
{
    const struct work *work = given;
    const struct unit *unit = work->unit;
    const struct scratch *scratch = work->scratch;
    const struct inputs in = first_inputs(work);
    const int64_t middle = middle_of(unit), count = last - first;
    const int gated = unit->form == FORM_GATED;
    if (gated)
        product_of(unit->gate.kind, unit->number, work->team->level)(&unit->gate, first, last, &in, scratch->gate, middle);
    product_of(unit->up.kind, unit->number, work->team->level)(&unit->up, first, last, &in, scratch->up, middle);
    for (int64_t r = 0; r < work->rows; r++) {
        float *gate = scratch->gate + r * middle + first, *up = scratch->up + r * middle + first;
        if (gated)
            add(gate, unit->bias[0] ? unit->bias[0] + first : 0, count, unit->number);
        add(up, unit->bias[1] ? unit->bias[1] + first : 0, count, unit->number);
        activate_at(work->team->level)(gated ? gate : 0, up, scratch->middle + r * middle + first, count, unit->activation,
                                        unit->number);
    }
    share_middle(work, first, last);
}

static void make_outputs(const void *given, int64_t first, int64_t last)
{
    const struct work *work = given;
    const struct unit *unit = work->unit;
    const struct scratch *scratch = work->scratch;
    const int64_t outputs = unit->down.rows;
    const uint16_t *pairs = wants_pairs(work) ? scratch->middle_pairs : 0;
    const int64_t run = wanted_run(work, &unit->down);
    const struct inputs after = {
        work->rows,     middle_of(unit), run,                   scratch->up,            scratch->middle,
        pairs,          scratch->middle_words, scratch->middle_eights, scratch->middle_steps,
    };
    const struct inputs in = unit->form == FORM_PRODUCT ? first_inputs(work) : after;
    product_of(unit->down.kind, unit->number, work->team->level)(&unit->down, first, last, &in, scratch->out, outputs);
    for (int64_t r = 0; r < work->rows; r++) {
        float *out = scratch->out + r * outputs;
        add(out + first, unit->bias[2] ? unit->bias[2] + first : 0, last - first, unit->number);
        for (int64_t o = first; o < last; o++)
            work->y[r * outputs + o] = to_number(out[o], unit->number);
    }
}

/* Blocks [first, last) of memory. */
static void read_blocks(const void *given, int64_t first, int64_t last)
{
    const struct work *work = given;
    const uint64_t *at = (const uint64_t *)work->unit->down.part[0] + first * (READ_BYTES / 8);
    uint64_t lanes[READ_LANES] = {0}, seen = 0;
    for (int64_t k = 0; k < (last - first) * (READ_BYTES / 8); k += READ_LANES)
        for (int l = 0; l < READ_LANES; l++)
            lanes[l] |= at[k + l];
    for (int l = 0; l < READ_LANES; l++)
        seen |= lanes[l];
    __atomic_fetch_or((uint64_t *)work->y, seen, __ATOMIC_RELAXED);
}

/* Rows of a matrix that are worth a claim. */
static int64_t grain_of(const struct matrix *m)
{
    const int64_t least = rows_at_once(m->kind), rows = CLAIM_BYTES / (m->columns ? m->columns : 1) / least * least;
    return rows < least ? least : rows;
}

/* Matrices of which a phase takes rows: gate and up, or down. */
struct both {
    const struct matrix *of[AHEAD_MOST];
    int64_t count, each; /* each: their rows for one of the phase */
};

static struct both first_both(const struct unit *unit)
{
    if (unit->form == FORM_GATED)
        return (struct both){{&unit->gate, &unit->up}, 2, 1};
    return (struct both){{first_matrix(unit)}, 1, unit->form == FORM_PAIRED ? 2 : 1};
}

/* Rows of a phase that each thread has for its own: of as many bytes as it may read ahead, half of the phase at most. */
static int64_t own_rows(const struct team *team, const struct both *both, int64_t total, int64_t grain)
{
    int64_t bytes = 0;
    for (int64_t i = 0; i < both->count; i++) {
        const int64_t each = row_bytes(both->of[i]);
        if (!each)
            return 0;
        bytes += both->each * each;
    }
    const int64_t most = total / 2 / team->threads, fits = team->ahead / bytes;
    return (fits < most ? fits : most) / grain * grain;
}

static struct ahead own_of(const struct team *team, int64_t me, const struct both *both, int64_t own)
{
    struct ahead ahead = {{NULL}, me < team->threads ? both->count : 0, own * both->each * row_bytes(both->of[0]), 0};
    for (int64_t i = 0; i < ahead.count; i++)
        ahead.at[i] = (const char *)both->of[i]->part[0] + me * ahead.bytes;
    return ahead;
}

static struct phase first_phase(const struct team *team, const struct unit *unit)
{
    const struct both both = first_both(unit);
    const int64_t grain = grain_of(first_matrix(unit));
    const int64_t total = unit->form == FORM_PRODUCT ? unit->down.rows : middle_of(unit);
    const phase_fn each = unit->form == FORM_PRODUCT ? make_outputs : unit->form == FORM_PAIRED ? make_paired : make_middle;
    return (struct phase){total, grain, own_rows(team, &both, total, grain), each};
}

struct ahead ahead_of(const struct team *team, int64_t me, const struct unit *unit)
{
    const struct both both = first_both(unit);
    return own_of(team, me, &both, unit->form == FORM_READ ? 0 : first_phase(team, unit).own);
}

int take_part(const struct team *team, int64_t me, const struct unit *unit, const struct scratch *scratch, struct progress *progress,
              int64_t rows, const uint16_t *x, uint16_t *y)
{
    const struct work work = {team, unit, scratch, rows, x, y};
    const int64_t inputs = inputs_of(unit), middle = middle_of(unit);
    if (unit->form == FORM_READ) {
        const struct phase reading = {unit->bytes / READ_BYTES, CLAIM_BYTES / READ_BYTES, 0, read_blocks};
        int ended = do_phase(&work, team, me, progress, 0, &reading);
        wait_for_phase(progress, 0, reading.total, NULL);
        return ended;
    }
    const struct phase taking = {inputs, 256, 0, take_inputs};
    struct phase outputs = first_phase(team, unit);
    do_phase(&work, team, me, progress, 0, &taking);
    wait_for_phase(progress, 0, inputs, NULL);
    if (unit->form != FORM_PRODUCT) {
        const struct both last = {{&unit->down}, 1, 1};
        const int64_t grain = grain_of(&unit->down);
        do_phase(&work, team, me, progress, 1, &outputs);
        outputs = (struct phase){unit->down.rows, grain, own_rows(team, &last, unit->down.rows, grain), make_outputs};
        struct ahead ahead = own_of(team, me, &last, outputs.own);
        wait_for_phase(progress, 1, middle, &ahead);
        if (shares_later(&work)) {
            const struct phase sharing = {middle, 2 * WORDS_COLUMNS, 0, share_middle_words};
            do_phase(&work, team, me, progress, 2, &sharing);
            wait_for_phase(progress, 2, middle, &ahead);
        }
    }
    int ended = do_phase(&work, team, me, progress, 3, &outputs);
    if (!ended)
        wait_for_phase(progress, 3, unit->down.rows, NULL);
    return ended;
}
