/* Scales that come with weights: is_sound of store/scales.py, on the thread that read them. */
#include "look.h"

#include <string.h>

#define NONE_OF(type)                                                                                                                      \
    static type none_of_##type(const char *first, int64_t count, int64_t step, type bits)                                                  \
    {                                                                                                                                      \
        type found = 0;                                                                                                                    \
        for (int64_t i = 0; i < count; i++) {                                                                                              \
            type number;                                                                                                                   \
            memcpy(&number, first + i * step, sizeof number);                                                                              \
            found |= (number & bits) == bits;                                                                                              \
        }                                                                                                                                  \
        return !found;                                                                                                                     \
    }

NONE_OF(uint8_t)
NONE_OF(uint16_t)
NONE_OF(uint32_t)

/* A step that the compiler knows lets it take many numbers at once. */
static int is_sound(const struct look *look, const char *buffer)
{
    const char *first = buffer + look->at;
    switch (look->size) {
    case 1:
        return look->step == 1 ? none_of_uint8_t(first, look->count, 1, (uint8_t)look->bits)
                               : none_of_uint8_t(first, look->count, look->step, (uint8_t)look->bits);
    case 2:
        return look->step == 2 ? none_of_uint16_t(first, look->count, 2, (uint16_t)look->bits)
                               : none_of_uint16_t(first, look->count, look->step, (uint16_t)look->bits);
    default:
        return look->step == 4 ? none_of_uint32_t(first, look->count, 4, (uint32_t)look->bits)
                               : none_of_uint32_t(first, look->count, look->step, (uint32_t)look->bits);
    }
}

int all_numbers(const struct look *looks, int64_t count, const char *buffer)
{
    for (int64_t i = 0; i < count; i++)
        if (!is_sound(&looks[i], buffer))
            return 0;
    return 1;
}
