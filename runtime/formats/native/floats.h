/* Numbers of 16 bits as floats, and back. */
#ifndef PENSTOCK_FLOATS_H
#define PENSTOCK_FLOATS_H

#include <stdint.h>
#include <string.h>

static inline float as_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* A BF16 number's float. */
static inline float from_bf16(uint16_t bits)
{
    return as_float((uint32_t)bits << 16);
}

/* The nearest BF16, ties to even; a NaN stays one. */
static inline uint16_t to_bf16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t nan = (bits & 0x7fffffffu) > 0x7f800000u;
    uint32_t even = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)(nan ? (bits >> 16) | 0x40u : even);
}

/* An F16 number's float. */
static inline float from_f16(uint16_t bits)
{
    uint32_t sign = (uint32_t)(bits & 0x8000u) << 16, size = bits & 0x7fffu, small;
    float below = as_float(size << 13 | 113u << 23) - 0x1p-14f; /* without the leading 1 of a normal number */
    memcpy(&small, &below, sizeof small);
    uint32_t normal = (size << 13) + (112u << 23);
    normal = size >= 0x7c00u ? (size << 13) | 0x7f800000u : normal;
    return as_float(sign | (size < 0x400u ? small : normal));
}

/* The nearest F16, ties to even. Chosen by masks, which compilers make wide where they would branch around a sum. */
static inline uint16_t to_f16(float value)
{
    uint32_t bits, below;
    memcpy(&bits, &value, sizeof bits);
    uint32_t sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
    float small = as_float(size) + 0.5f; /* its last place is that of the smallest F16 */
    memcpy(&below, &small, sizeof below);
    uint32_t normal = (size - (112u << 23) + 0xfffu + (size >> 13 & 1u)) >> 13;
    uint32_t is_small = 0u - (size < 0x38800000u), is_large = 0u - (size >= 0x477ff000u), is_none = 0u - (size > 0x7f800000u);
    uint32_t found = (is_small & (below - 0x3f000000u)) | (is_large & 0x7c00u) | (~(is_small | is_large) & normal);
    return (uint16_t)(sign | found | (is_none & 0x200u));
}

#endif
