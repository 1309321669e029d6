/* Functions of floats as polynomials, in plain C that a compiler makes vectors of. */
#ifndef PENSTOCK_APPROXIMATIONS_H
#define PENSTOCK_APPROXIMATIONS_H

#include "products.h"

/* e to the x for floats: 2 to the n times a polynomial of the rest, within 2 units of the last place. */
ALONE float exp_of(float x)
{
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float shifted = x * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f;
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * as_float((uint32_t)((int32_t)n + 127) << 23);
}

ALONE float tanh_of(float x)
{
    float e = exp_of(2.0f * (x < -10.0f ? -10.0f : x > 10.0f ? 10.0f : x));
    return (e - 1.0f) / (e + 1.0f);
}

#endif
