#include "blocks_piece.h"
#include "testing.h"

#define KIB INT64_C(1024)
#define MIB (1024 * KIB)
#define COUNT(array) ((int64_t)(sizeof(array) / sizeof((array)[0])))

static int replay(enum rotor_segments segments, int64_t capacity, const int64_t *events,
                  int64_t length, rotor_blocks_figures_t *figures) {
    return rotor_blocks_replay(segments, capacity, events, length, NULL, figures);
}

/* Free blocks are listed by size, then address; unmapped ones by address. */
static bool comes_before(const rotor_block_t *a, const rotor_block_t *b,
                         enum rotor_block_state state) {
    return state == ROTOR_BLOCK_FREE && a->size != b->size ? a->size < b->size
                                                           : a->address < b->address;
}

static const char *list_fault(const rotor_blocks_t *self, const rotor_block_list_t *list,
                              enum rotor_block_state state) {
    for (int64_t k = 0; k < list->count; k++) {
        const rotor_block_t *block = &self->blocks[list->items[k]];
        if (block->state != state) {
            return "a listed block has another state";
        }
        if (k > 0 && !comes_before(&self->blocks[list->items[k - 1]], block, state)) {
            return "a list is out of order";
        }
    }
    return NULL;
}

/* The first broken invariant as a sentence, or NULL. */
static const char *blocks_fault(const rotor_blocks_t *self) {
    int64_t bytes[4] = {0, 0, 0, 0};
    int64_t counts[4] = {0, 0, 0, 0};
    for (int64_t k = 0; k < self->block_count; k++) {
        const rotor_block_t *block = &self->blocks[k];
        bytes[block->state] += block->state == ROTOR_BLOCK_GONE ? 0 : block->size;
        counts[block->state]++;
        if (block->state == ROTOR_BLOCK_GONE || block->next == -1) {
            continue;
        }
        const rotor_block_t *next = &self->blocks[block->next];
        if (next->previous != k || next->address != block->address + block->size) {
            return "neighbours are not linked, or have a gap";
        }
        if (block->state != ROTOR_BLOCK_TAKEN && block->state == next->state) {
            return "neighbours of one state were not joined";
        }
    }
    for (int pool = 0; pool <= 1; pool++) {
        const char *fault = list_fault(self, &self->free[pool], ROTOR_BLOCK_FREE);
        fault = fault != NULL
                    ? fault
                    : list_fault(self, &self->unmapped[pool], ROTOR_BLOCK_UNMAPPED);
        if (fault != NULL) {
            return fault;
        }
    }
    if (counts[ROTOR_BLOCK_FREE] != self->free[0].count + self->free[1].count ||
        counts[ROTOR_BLOCK_UNMAPPED] != self->unmapped[0].count + self->unmapped[1].count) {
        return "a free or unmapped block is in no list";
    }
    if (bytes[ROTOR_BLOCK_TAKEN] != self->figures.allocated ||
        bytes[ROTOR_BLOCK_TAKEN] + bytes[ROTOR_BLOCK_FREE] != self->figures.reserved) {
        return "the figures are not those of the blocks";
    }
    return NULL;
}

/* Rounding, both pools, three sizes of segments, and what is split off. */
static void test_ordinary_by_hand(void) {
    const int64_t events[] = {
        1,              /* 0: 512 of a small segment of 2 MiB */
        MIB,            /* 1: still of the small pool, and of the same segment */
        MIB - 512,      /* 2: the rest of it */
        MIB + 1,        /* 3: 1 MiB + 512 of a segment of 20 MiB */
        9 * MIB,        /* 4: of the same */
        10 * MIB,       /* 5: the rest has 10 MiB - 512: 10 MiB of its own */
        11 * MIB,       /* 6: 12 MiB of its own; the rest of 1 MiB stays with it */
        -1 - 5,         /* 10 MiB free */
        9 * MIB,        /* 7: best fit is the rest of segment 3 (10 MiB - 512), which keeps 1 MiB - 512 */
    };
    int64_t levels[2 * COUNT(events)];
    rotor_blocks_figures_t figures;
    CHECK(rotor_blocks_replay(ROTOR_SEGMENTS_ORDINARY, 0, events, COUNT(events), levels,
                              &figures) == ROTOR_OK);
    CHECK(levels[0] == 512 && levels[1] == 2 * MIB);
    CHECK(levels[2] == MIB + 512 && levels[3] == 2 * MIB);
    CHECK(levels[4] == 2 * MIB && levels[5] == 2 * MIB);
    CHECK(levels[6] == 3 * MIB + 512 && levels[7] == 22 * MIB);
    CHECK(levels[9] == 22 * MIB);
    CHECK(levels[11] == 32 * MIB);
    CHECK(levels[12] == levels[10] + 12 * MIB && levels[13] == 44 * MIB);
    CHECK(levels[14] == levels[12] - 10 * MIB);
    CHECK(levels[16] == levels[14] + 10 * MIB - 512 && levels[17] == 44 * MIB);
    CHECK(figures.requested == 1 + 2 * MIB - 512 + MIB + 1 + 9 * MIB + 11 * MIB + 9 * MIB);
    CHECK(figures.allocated_peak == rotor_max(levels[12], levels[16]));
    CHECK(figures.reserved_peak == 44 * MIB && figures.retries == 0);
}

/* Neighbours are joined; cached segments go when the device has no more. */
static void test_ordinary_joins_and_gives_back(void) {
    const int64_t events[] = {
        4 * MIB, 4 * MIB, 4 * MIB, -2, -1, /* 8 MiB free at the front */
        8 * MIB,                           /* fits there */
        -3, -4,                            /* all free: a segment of 20 MiB */
        32 * MIB,                          /* 52 MiB would pass 40: the cached segment goes */
        16 * MIB,                          /* refused */
    };
    rotor_blocks_figures_t figures;
    CHECK(replay(ROTOR_SEGMENTS_ORDINARY, 40 * MIB, events, 6, &figures) == ROTOR_OK);
    CHECK(figures.reserved == 20 * MIB && figures.allocated == 12 * MIB);
    CHECK(replay(ROTOR_SEGMENTS_ORDINARY, 40 * MIB, events, COUNT(events), &figures) ==
          ROTOR_OK);
    CHECK(figures.reserved == 32 * MIB && figures.allocated == 32 * MIB);
    CHECK(figures.retries == 2 && figures.refused == 1);
    CHECK(figures.reserved_peak == 32 * MIB);
}

/* One range grows by pieces; blocks have no slack; only whole free pieces go back. */
static void test_expandable_by_hand(void) {
    const int64_t events[] = {
        11 * MIB,             /* 0: 20 MiB mapped */
        11 * MIB,             /* 1: 9 free and 11 more: 40 MiB */
        MIB + 1,              /* 2: in the rest */
        -1,                   /* 11 MiB free at the front */
        30 * MIB,             /* 3: no place before block 2: 20 MiB - 11 MiB - ... after it */
        -2, -3,               /* 0 .. 23 MiB free */
        ROTOR_BLOCKS_RELEASE, /* of them the first 20 MiB go */
        512,                  /* 4: a range of its own: 2 MiB */
    };
    int64_t levels[2 * COUNT(events)];
    rotor_blocks_figures_t figures;
    CHECK(rotor_blocks_replay(ROTOR_SEGMENTS_EXPANDABLE, 0, events, COUNT(events), levels,
                              &figures) == ROTOR_OK);
    CHECK(levels[0] == 11 * MIB && levels[1] == 20 * MIB);
    CHECK(levels[2] == 22 * MIB && levels[3] == 40 * MIB);
    CHECK(levels[4] == 23 * MIB + 512 && levels[5] == 40 * MIB);
    CHECK(levels[9] == 60 * MIB);
    CHECK(levels[15] == 40 * MIB);
    CHECK(levels[16] == 30 * MIB + 512 && levels[17] == 42 * MIB);
}

static uint64_t draw(uint64_t *state) {
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return *state >> 33;
}

static int64_t drawn_size(uint64_t *state) {
    static const int64_t scales[] = {2 * KIB, MIB, 2 * MIB, 12 * MIB, 40 * MIB};
    return 1 + (int64_t)(draw(state) % (uint64_t)scales[draw(state) % 5]);
}

static void test_invariants(void) {
    enum { LIVE = 60, STEPS = 4000 };
    for (int kind = 0; kind < 4; kind++) {
        int32_t live[LIVE];
        int count = 0;
        uint64_t state = 11 + (uint64_t)kind;
        rotor_blocks_t blocks;
        rotor_blocks_init(&blocks,
                          kind % 2 == 0 ? ROTOR_SEGMENTS_ORDINARY : ROTOR_SEGMENTS_EXPANDABLE,
                          kind < 2 ? 0 : 250 * MIB);
        for (int step = 0; step < STEPS; step++) {
            if (draw(&state) % 400 == 0) {
                CHECK(rotor_blocks_release(&blocks) == ROTOR_OK);
            } else if (count < LIVE && draw(&state) % 2 == 0) {
                int ret = rotor_blocks_take(&blocks, drawn_size(&state), &live[count]);
                CHECK(ret == ROTOR_OK || (kind >= 2 && ret == ROTOR_ERR_INFEASIBLE));
                count += ret == ROTOR_OK;
            } else if (count > 0) {
                int index = (int)(draw(&state) % (uint64_t)count);
                rotor_blocks_give(&blocks, live[index]);
                live[index] = live[--count];
            }
            const char *fault = blocks_fault(&blocks);
            if (fault != NULL) {
                fprintf(stderr, "kind %d, step %d: %s\n", kind, step, fault);
                test_failures++;
                break;
            }
            CHECK(blocks.figures.reserved <= blocks.capacity_bytes);
        }
        while (count > 0) {
            rotor_blocks_give(&blocks, live[--count]);
        }
        CHECK(blocks.figures.allocated == 0 && blocks.figures.requested == 0);
        CHECK(rotor_blocks_release(&blocks) == ROTOR_OK);
        CHECK(blocks.figures.reserved == 0);
        CHECK(kind < 2 || blocks.figures.refused > 0);
        rotor_blocks_free(&blocks);
    }
}

static void test_bad_events(void) {
    const int64_t unknown[] = {512, -2};
    const int64_t twice[] = {512, -1, -1};
    const int64_t empty[] = {0, -1, 512, -2};
    const int64_t empty_twice[] = {0, -1, -1};
    const int64_t large[] = {ROTOR_MAX_VALUE + 1};
    rotor_blocks_figures_t figures;
    CHECK(replay(ROTOR_SEGMENTS_ORDINARY, 0, unknown, 2, &figures) == ROTOR_ERR_BAD_STATE);
    CHECK(replay(ROTOR_SEGMENTS_ORDINARY, 0, twice, 3, &figures) == ROTOR_ERR_BAD_STATE);
    CHECK(replay(ROTOR_SEGMENTS_ORDINARY, 0, empty_twice, 3, &figures) == ROTOR_ERR_BAD_STATE);
    CHECK(replay(ROTOR_SEGMENTS_ORDINARY, 0, large, 1, &figures) == ROTOR_ERR_TOO_LARGE);
    CHECK(replay(ROTOR_SEGMENTS_ORDINARY, 0, empty, 4, &figures) == ROTOR_OK);
    CHECK(figures.allocated == 0 && figures.reserved == 2 * MIB);
    CHECK(replay(ROTOR_SEGMENTS_ORDINARY, 0, empty, 0, &figures) == ROTOR_OK);
    CHECK(figures.reserved_peak == 0);
}

static void test_without_memory(void) {
    int64_t events[120];
    for (int64_t k = 0; k < 60; k++) {
        events[k] = (k + 1) * 512 * KIB;
        events[60 + k] = -1 - (7 * k) % 60;
    }
    for (int kind = 0; kind < 2; kind++) {
        int ret = ROTOR_ERR_NO_MEMORY;
        for (int64_t n = 1; ret != ROTOR_OK && n < 200; n++) {
            rotor_blocks_figures_t figures = {.reserved = -1};
            rotor_testing_fail_after(n);
            ret = replay(kind == 0 ? ROTOR_SEGMENTS_ORDINARY : ROTOR_SEGMENTS_EXPANDABLE,
                         300 * MIB, events, COUNT(events), &figures);
            rotor_testing_fail_after(0);
            CHECK(ret == ROTOR_OK || (ret == ROTOR_ERR_NO_MEMORY && figures.reserved == -1));
        }
        CHECK(ret == ROTOR_OK);
    }
}

static void test_a_piece_by_hand(void) {
    /* Three blocks of 9 MiB are in two segments of 20 MiB; then one of 26 MiB finds no room. */
    const int64_t events[] = {9 * MIB, 9 * MIB, 9 * MIB, -1, -2, -3, 26 * MIB, 512};
    const int64_t released[] = {512, ROTOR_BLOCKS_RELEASE};
    const int64_t small[] = {512};
    rotor_blocks_figures_t without;
    rotor_blocks_piece_t piece;
    CHECK(rotor_blocks_fit(events, COUNT(events), &without, &piece) == ROTOR_OK);
    CHECK(without.reserved_peak == 68 * MIB && without.reserved_small == 2 * MIB);
    CHECK(piece.bytes == 28 * MIB && piece.reserved_peak == 30 * MIB);
    CHECK(piece.small_segments == 1);
    CHECK(rotor_blocks_fit(small, 1, NULL, &piece) == ROTOR_OK);
    CHECK(piece.bytes == 0 && piece.reserved_peak == 2 * MIB && piece.small_segments == 1);
    CHECK(rotor_blocks_fit(small, 0, NULL, &piece) == ROTOR_OK);
    CHECK(piece.bytes == 0 && piece.reserved_peak == 0 && piece.small_segments == 0);
    CHECK(rotor_blocks_fit(released, 2, NULL, &piece) == ROTOR_ERR_BAD_STATE);
}

static void test_a_piece_never_needs_more(void) {
    uint64_t state = 7;
    for (int round = 0; round < 20; round++) {
        int64_t events[200];
        int64_t made = 0;
        int64_t given = 0;
        for (int k = 0; k < COUNT(events); k++) {
            bool takes = made == given || (made - given < 12 && draw(&state) % 2 == 0);
            events[k] = takes ? drawn_size(&state) : -1 - given;
            made += takes;
            given += !takes;
        }
        rotor_blocks_figures_t without;
        rotor_blocks_piece_t piece;
        CHECK(rotor_blocks_fit(events, COUNT(events), &without, &piece) == ROTOR_OK);
        CHECK(piece.reserved_peak <= without.reserved_peak);
        CHECK(piece.bytes == 0 || piece.reserved_peak < without.reserved_peak);
        CHECK(piece.bytes % (2 * MIB) == 0 && piece.bytes <= piece.reserved_peak);
        for (int64_t n = 1; round == 0 && n < 4000; n++) {
            rotor_testing_fail_after(n);
            int ret = rotor_blocks_fit(events, COUNT(events), NULL, &piece);
            rotor_testing_fail_after(0);
            CHECK(ret == ROTOR_OK || ret == ROTOR_ERR_NO_MEMORY);
            if (ret == ROTOR_OK) {
                CHECK(n > 3);
                break;
            }
        }
    }
}

static const test_case_t cases[] = {
    {"ordinary_by_hand", test_ordinary_by_hand},
    {"ordinary_joins_and_gives_back", test_ordinary_joins_and_gives_back},
    {"expandable_by_hand", test_expandable_by_hand},
    {"invariants", test_invariants},
    {"bad_events", test_bad_events},
    {"without_memory", test_without_memory},
    {"a_piece_by_hand", test_a_piece_by_hand},
    {"a_piece_never_needs_more", test_a_piece_never_needs_more},
};

TEST_MAIN(cases)
