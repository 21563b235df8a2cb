#include "vector.h"

int rotor_grow(void **items, int64_t *capacity, int64_t needed, size_t size) {
    int64_t wanted = rotor_max(needed, 16);
    size_t bytes;

    if (needed <= *capacity) {
        return ROTOR_OK;
    }
    if (needed >= INT32_MAX) {
        return ROTOR_ERR_OVERFLOW;
    }
    wanted = rotor_max(wanted, rotor_min(*capacity * 2, INT32_MAX - 1));
    if (rotor_array_bytes(wanted, size, &bytes) != ROTOR_OK) {
        return ROTOR_ERR_OVERFLOW;
    }
    void *moved = rotor_realloc(*items, bytes);
    if (moved == NULL) {
        return ROTOR_ERR_NO_MEMORY;
    }
    *items = moved;
    *capacity = wanted;
    return ROTOR_OK;
}
