#include <math.h>

#include "heuristics.h"
#include "testing.h"

static void test_names_are_found(void) {
    int64_t count = 0;
    while (rotor_heuristic(count) != NULL) {
        CHECK(rotor_find_heuristic(rotor_heuristic(count)->name) == rotor_heuristic(count));
        count++;
    }
    CHECK(count == 25);
    CHECK(rotor_heuristic(-1) == NULL);
    CHECK(rotor_find_heuristic("dtr") == NULL);
    CHECK(rotor_find_heuristic("DTR")->numerator == ROTOR_REGIONS);
}

/* Quotients that one rounding of exact integers gives; the last six differ from what rounding
 * numerator and denominator first would give. */
static void test_quotients_are_rounded_once(void) {
    static const struct {
        int64_t numerator, bytes, staleness;
        double quotient;
    } rows[] = {
        {INT64_C(292), INT64_C(3529807850208), INT64_C(4594915198092498), 0x1.64980827abc24p-86},
        {INT64_C(127), INT64_C(1978953264965), INT64_C(13355851893788), 0x1.73c587dd4c679p-78},
        {INT64_C(163057896), INT64_C(3374823295366), INT64_C(747144855), 0x1.233c8960ec988p-44},
        {INT64_C(116), INT64_C(134507336084), INT64_C(27322287), 0x1.2320e42e17e33p-55},
        {INT64_C(1274807391492082965), INT64_C(1517124545594), INT64_C(32971813438),
         0x1.ab90331f818c2p-16},
        {INT64_C(2903503884097392007), INT64_C(3187907449648), INT64_C(683430824923985085),
         0x1.771ce3640b65bp-40},
        {INT64_C(3428284961096115440), INT64_C(3940987667190), INT64_C(2244168007791358888),
         0x1.b46e81aafd735p-42},
        {INT64_C(2310656867448170999), INT64_C(4257113346556), INT64_C(1170717368403309657),
         0x1.04ff9c11d867ep-41},
        {INT64_C(3430978150927185123), INT64_C(1778320060248), INT64_C(1532795304834792309),
         0x1.624b3bfa017d1p-40},
        {INT64_C(1694185739396986520), INT64_C(3881786282831), INT64_C(1788960925273455271),
         0x1.12ae49f8a135fp-42},
        {INT64_C(1586742924883167785), INT64_C(3728901203729), INT64_C(814595865051814990),
         0x1.26125d0b97177p-41},
    };
    for (size_t k = 0; k < sizeof(rows) / sizeof(rows[0]); k++) {
        rotor_eviction_cost_t cost =
            rotor_eviction_cost(rows[k].numerator, rows[k].bytes, rows[k].staleness);
        rotor_eviction_cost_t minus =
            rotor_eviction_cost(-rows[k].numerator, rows[k].bytes, rows[k].staleness);
        CHECK(rotor_eviction_cost_quotient(&cost) == rows[k].quotient);
        CHECK(rotor_eviction_cost_quotient(&minus) == -rows[k].quotient);
    }
    for (int64_t a = 0; a < 200; a++) {
        for (int64_t b = 1; b < 200; b++) {
            rotor_eviction_cost_t cost = rotor_eviction_cost(a, b, 1);
            CHECK(rotor_eviction_cost_quotient(&cost) == (double)a / (double)b);
        }
    }
    rotor_eviction_cost_t large = rotor_eviction_cost(INT64_MAX, 1, 1);
    CHECK(rotor_eviction_cost_quotient(&large) == 0x1p63);
}

static void test_comparison(void) {
    rotor_eviction_cost_t third = rotor_eviction_cost(1, 3, 1);
    rotor_eviction_cost_t same = rotor_eviction_cost(2, 3, 2);
    rotor_eviction_cost_t half = rotor_eviction_cost(1, 1, 2);
    rotor_eviction_cost_t never = rotor_eviction_cost(1, 0, 5);
    rotor_eviction_cost_t fresh = rotor_eviction_cost(0, 4, 0);
    rotor_eviction_cost_t negative = rotor_eviction_cost(-1, 4, 4);
    /* 2^53 + 1 and 2^53 are one double; as integers they differ. */
    rotor_eviction_cost_t more = rotor_eviction_cost((INT64_C(1) << 53) + 1, 1, 1);
    rotor_eviction_cost_t less = rotor_eviction_cost(INT64_C(1) << 53, 1, 1);
    /* Neighbouring integers over a large denominator round to one double: they tie. */
    rotor_eviction_cost_t a = rotor_eviction_cost((INT64_C(1) << 60) + 1, 3, 7);
    rotor_eviction_cost_t b = rotor_eviction_cost(INT64_C(1) << 60, 3, 7);

    CHECK(rotor_eviction_cost_at_most(&third, &same) && rotor_eviction_cost_at_most(&same, &third));
    CHECK(rotor_eviction_cost_at_most(&third, &half) &&
          !rotor_eviction_cost_at_most(&half, &third));
    CHECK(rotor_eviction_cost_at_most(&half, &never) &&
          !rotor_eviction_cost_at_most(&never, &half));
    CHECK(rotor_eviction_cost_at_most(&never, &fresh) &&
          rotor_eviction_cost_at_most(&fresh, &never));
    CHECK(rotor_eviction_cost_at_most(&negative, &third) &&
          !rotor_eviction_cost_at_most(&third, &negative));
    CHECK(rotor_eviction_cost_at_most(&less, &more) && !rotor_eviction_cost_at_most(&more, &less));
    CHECK(rotor_eviction_cost_at_most(&a, &b) && rotor_eviction_cost_at_most(&b, &a));
}

static const test_case_t cases[] = {
    {"names_are_found", test_names_are_found},
    {"quotients_are_rounded_once", test_quotients_are_rounded_once},
    {"comparison", test_comparison},
};

TEST_MAIN(cases)
