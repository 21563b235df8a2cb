#include "heuristics.h"

#include <string.h>

__extension__ typedef unsigned __int128 wide_t;

static const rotor_heuristic_t heuristics[] = {
    {"DTR", ROTOR_REGIONS, true, ROTOR_LAST_USE},
    {"DTREqClass", ROTOR_CLASSES, true, ROTOR_LAST_USE},
    {"DTRLocal", ROTOR_OWN, true, ROTOR_LAST_USE},
    {"DTRUnopt", ROTOR_UNION, true, ROTOR_NEIGHBOURHOOD_USE},
    {"MSPS", ROTOR_ANCESTORS, true, ROTOR_NO_STALENESS},
    {"DTRAncestors", ROTOR_ANCESTORS, true, ROTOR_LAST_USE}, /* rotor's own */
    {"LRU", ROTOR_LAST_ACCESS, false, ROTOR_NO_STALENESS},
    {"LargestStorage", ROTOR_ONE, true, ROTOR_NO_STALENESS},
    {"RandomStorage", ROTOR_CHANCE, false, ROTOR_NO_STALENESS},
    {"AbESizeStale", ROTOR_REGIONS, true, ROTOR_LAST_USE},
    {"AbESize", ROTOR_REGIONS, true, ROTOR_NO_STALENESS},
    {"AbEStale", ROTOR_REGIONS, false, ROTOR_LAST_USE},
    {"AbE", ROTOR_REGIONS, false, ROTOR_NO_STALENESS},
    {"AbEqSizeStale", ROTOR_CLASSES, true, ROTOR_LAST_USE},
    {"AbEqSize", ROTOR_CLASSES, true, ROTOR_NO_STALENESS},
    {"AbEqStale", ROTOR_CLASSES, false, ROTOR_LAST_USE},
    {"AbEq", ROTOR_CLASSES, false, ROTOR_NO_STALENESS},
    {"AbLocalSizeStale", ROTOR_OWN, true, ROTOR_LAST_USE},
    {"AbLocalSize", ROTOR_OWN, true, ROTOR_NO_STALENESS},
    {"AbLocalStale", ROTOR_OWN, false, ROTOR_LAST_USE},
    {"AbLocal", ROTOR_OWN, false, ROTOR_NO_STALENESS},
    {"AbSizeStale", ROTOR_ONE, true, ROTOR_LAST_USE},
    {"AbSize", ROTOR_ONE, true, ROTOR_NO_STALENESS},
    {"AbStale", ROTOR_ONE, false, ROTOR_LAST_USE},
    {"AbRandom", ROTOR_CHANCE, false, ROTOR_NO_STALENESS},
};

#define HEURISTIC_COUNT ((int64_t)(sizeof(heuristics) / sizeof(heuristics[0])))

const rotor_heuristic_t *rotor_heuristic(int64_t index) {
    return index >= 0 && index < HEURISTIC_COUNT ? &heuristics[index] : NULL;
}

const rotor_heuristic_t *rotor_find_heuristic(const char *name) {
    for (int64_t k = 0; k < HEURISTIC_COUNT; k++) {
        if (strcmp(heuristics[k].name, name) == 0) {
            return &heuristics[k];
        }
    }
    return NULL;
}

double rotor_eviction_cost_quotient(const rotor_eviction_cost_t *cost) {
    if (cost->bytes <= 0 || cost->staleness <= 0) {
        return HUGE_VAL;
    }
    bool is_negative = cost->numerator < 0;
    uint64_t top = is_negative ? 0 - (uint64_t)cost->numerator : (uint64_t)cost->numerator;
    wide_t bottom = (wide_t)(uint64_t)cost->bytes * (uint64_t)cost->staleness;
    wide_t rest = top % bottom;
    uint64_t digits = (uint64_t)(top / bottom);
    int exponent = 0;

    if (top == 0) {
        return 0.0;
    }
    /* Two bits more than a double has; what is left decides ties through the last of them. */
    while (digits < UINT64_C(1) << 54) {
        rest <<= 1;
        digits = digits << 1 | (rest >= bottom);
        if (rest >= bottom) {
            rest -= bottom;
        }
        exponent--;
    }
    double magnitude = ldexp((double)(digits | (rest != 0)), exponent);
    return is_negative ? -magnitude : magnitude;
}

bool rotor_eviction_cost_at_most(const rotor_eviction_cost_t *a, const rotor_eviction_cost_t *b) {
    double margin = fabs(b->estimate) * 0x1p-49;

    if (a->estimate < b->estimate - margin) {
        return true;
    }
    if (a->estimate > b->estimate + margin) {
        return false;
    }
    if (a->numerator == b->numerator && a->bytes == b->bytes && a->staleness == b->staleness) {
        return true;
    }
    if (isinf(a->estimate) || isinf(b->estimate)) {
        return isinf(b->estimate);
    }
    if (a->bytes == 1 && a->staleness == 1 && b->bytes == 1 && b->staleness == 1) {
        return a->numerator <= b->numerator;
    }
    return rotor_eviction_cost_quotient(a) <= rotor_eviction_cost_quotient(b);
}
