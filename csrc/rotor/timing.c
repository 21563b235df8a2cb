#include "timing.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define FEWEST 3 /* samples that tell how stable their median is */

static int compare_times(const void *a, const void *b) {
    int64_t left = *(const int64_t *)a;
    int64_t right = *(const int64_t *)b;
    return (left > right) - (left < right);
}

int rotor_timing_median(const int64_t *samples, int64_t count, double rel_tolerance,
                        int64_t *median_ns, bool *is_stable) {
    if (count < 1) {
        return ROTOR_ERR_BAD_LENGTH;
    }
    int64_t *sorted = rotor_malloc_array(count, sizeof(*sorted));
    if (sorted == NULL) {
        return ROTOR_ERR_NO_MEMORY;
    }
    memcpy(sorted, samples, (size_t)count * sizeof(*sorted));
    qsort(sorted, (size_t)count, sizeof(*sorted), compare_times);
    int64_t low = sorted[(count - 1) / 2];
    int64_t gap = sorted[count / 2] - low;
    int64_t middle = low + gap / 2;
    *median_ns = middle + (gap % 2 != 0 && middle % 2 != 0);
    *is_stable = false;
    if (count >= FEWEST) {
        double distance = ceil(((double)count - 2 - sqrt((double)count)) / 2);
        int64_t rank = rotor_max((int64_t)distance, 0);
        double error = (double)(sorted[count - 1 - rank] - sorted[rank]) / 2;
        *is_stable = error <= rel_tolerance * ((double)low + (double)gap / 2);
    }
    rotor_free(sorted);
    return ROTOR_OK;
}

bool rotor_timing_is_enough(const rotor_timing_rule_t *rule, int64_t count, bool is_stable,
                            int64_t spent_ns) {
    bool is_late = spent_ns >= rule->most_ns;
    bool has_most = count >= rule->max_repeats;
    if (count < rule->min_repeats) {
        return has_most || (is_late && !rule->min_comes_first);
    }
    return has_most || is_stable || is_late;
}
