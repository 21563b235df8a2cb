/*
 * The book of a running program on random programs: what it says is in memory, its sums against
 * recounts, operations run again only on inputs that are there, and nothing left in the end. And
 * storages that leave the engine.
 */
#include <stdlib.h>

#include "recorder.h"
#include "recorder_check.h"
#include "testing.h"

static uint32_t draw(uint32_t *state) {
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

static rotor_recorder_options_t options_of(const char *name, int64_t budget) {
    return (rotor_recorder_options_t){
        .budget = budget,
        .eviction = {.heuristic = rotor_find_heuristic(name), .rebuild_every = 16},
    };
}

/* What in-memory nodes take, recounted. */
static int64_t recount(const rotor_recorder_t *book) {
    int64_t bytes = 0;
    for (int32_t k = 0; k < book->node_count; k++) {
        const rotor_node_t *node = &book->nodes[k];
        if (node->state != 0 && rotor_recorder_is_material(book, k) &&
            (node->state & ROTOR_NODE_FOREIGN) == 0) {
            bytes += node->bytes;
        }
    }
    return bytes;
}

static bool is_moving; /* of the last node that was to go */

static int make_room(rotor_recorder_t *book, int64_t bytes) {
    int32_t node;
    int ret;
    do {
        ret = rotor_recorder_make_room(book, bytes, book->options.budget - bytes, &node, &is_moving);
        if (ret == ROTOR_OK && is_moving) {
            ret = rotor_recorder_moved(book, node);
        }
    } while (ret == ROTOR_OK && node >= 0);
    return ret;
}

/* Runs again what the operation that has begun needs. */
static int catch_up(rotor_recorder_t *book) {
    int32_t op;
    int ret;
    while ((ret = rotor_recorder_next(book, &op)) == ROTOR_OK && op != ROTOR_NEW_OPERATION) {
        if (op == ROTOR_FETCH) {
            int64_t bytes = book->nodes[rotor_recorder_awaited(book)].bytes;
            if ((ret = make_room(book, bytes)) != ROTOR_OK ||
                (ret = rotor_recorder_fetched(book, 1)) != ROTOR_OK) {
                break;
            }
            continue;
        }
        const rotor_record_t *record = &book->records[op];
        for (int32_t k = 0; k < record->input_count; k++) {
            CHECK(rotor_recorder_is_material(book, record->items[k]));
            CHECK(book->eviction.candidates[record->items[k]].locks > 0);
        }
        if ((ret = make_room(book, rotor_recorder_replay_bytes(book, op))) != ROTOR_OK ||
            (ret = rotor_recorder_replayed(book, record->cost_ns)) != ROTOR_OK) {
            break;
        }
    }
    book->event_count = 0;
    return ret;
}

static int operate(rotor_recorder_t *book, const int32_t *inputs, int64_t count, int64_t bytes,
                   int32_t origin, int32_t *node) {
    int32_t op;
    int ret = rotor_recorder_begin(book, inputs, count);
    if (ret == ROTOR_OK) {
        ret = catch_up(book);
    }
    if (ret == ROTOR_OK) {
        ret = make_room(book, origin < 0 ? bytes : 0);
    }
    if (ret == ROTOR_OK) {
        rotor_completion_t done = {count, &bytes, &origin, 1, 5, 0, 0};
        ret = rotor_recorder_finish(book, &done, node, &op);
    }
    book->event_count = 0;
    return ret;
}

/* A chain forward, and its nodes dropped from the end with two reads each. */
static int run_chain(rotor_recorder_t *book, int32_t length) {
    int32_t nodes[64];
    int32_t result;
    int ret = rotor_recorder_source(book, 10, false, &nodes[0]);

    for (int32_t k = 1; ret == ROTOR_OK && k < length; k++) {
        bool writes = k % 5 == 0;
        ret = operate(book, &nodes[k - 1], 1, 10, writes ? nodes[k - 1] : -1, &nodes[k]);
        if (writes) {
            nodes[k - 1] = -1;
        }
    }
    for (int32_t k = length - 1; ret == ROTOR_OK && k >= 0; k--) {
        if (nodes[k] < 0) {
            continue;
        }
        ret = operate(book, &nodes[k], 1, 10, -1, &result);
        if (ret == ROTOR_OK) {
            ret = rotor_recorder_dead(book, result);
        }
        if (ret == ROTOR_OK) {
            ret = rotor_recorder_dead(book, nodes[k]);
        }
        book->event_count = 0;
    }
    return ret;
}

static void test_a_chain_in_little_memory(void) {
    rotor_recorder_options_t options = options_of("DTREqClass", 60);
    rotor_recorder_t book;
    rotor_recorder_init(&book, &options);
    CHECK(run_chain(&book, 40) == ROTOR_OK);
    CHECK(book.peak_bytes <= 60 && book.replays > 0 && book.evictions > 0);
    CHECK(book.live_nodes == 0 && book.live_records == 0 && book.current_bytes == 0);
    int64_t footprint = rotor_recorder_footprint(&book);
    for (int k = 0; k < 60; k++) {
        CHECK(run_chain(&book, 40) == ROTOR_OK);
    }
    CHECK(book.peak_bytes <= 60 && book.live_nodes == 0);
    CHECK(rotor_recorder_footprint(&book) < 8 * footprint + 65536);
    rotor_recorder_free(&book);
}

/* Temporaries are as good as anything else where the options say so. */
static void test_temporaries_may_be_mixed_with_the_rest(void) {
    int64_t temporary[2];
    for (int mixed = 0; mixed < 2; mixed++) {
        rotor_recorder_options_t options = options_of("LRU", 40);
        options.mixes_temporaries = mixed != 0;
        rotor_recorder_t book;
        int32_t source, early, dropped, late, other, chosen;
        rotor_recorder_init(&book, &options);
        CHECK(rotor_recorder_source(&book, 0, false, &source) == ROTOR_OK);
        CHECK(operate(&book, &source, 1, 10, -1, &dropped) == ROTOR_OK);
        CHECK(operate(&book, &dropped, 1, 10, -1, &late) == ROTOR_OK);
        CHECK(rotor_recorder_dead(&book, dropped) == ROTOR_OK);
        CHECK(operate(&book, &source, 1, 10, -1, &early) == ROTOR_OK);
        CHECK(operate(&book, &source, 1, 10, -1, &other) == ROTOR_OK); /* Time passes. */
        CHECK(rotor_recorder_dead(&book, other) == ROTOR_OK);
        /* Makes `late` go, and computes it again by way of `dropped`. */
        CHECK(rotor_recorder_make_room(&book, 30, -1, &chosen, &is_moving) == ROTOR_OK && chosen == late);
        CHECK(operate(&book, &late, 1, 10, -1, &other) == ROTOR_OK);
        CHECK(rotor_recorder_is_material(&book, dropped) && book.replays == 2);
        CHECK(rotor_recorder_make_room(&book, 10, -1, &chosen, &is_moving) == ROTOR_OK);
        CHECK(chosen == (mixed ? early : dropped));
        temporary[mixed] = book.event_count;
        book.event_count = 0;
        rotor_recorder_free(&book);
    }
    /* That a temporary goes is told. */
    CHECK(temporary[0] == 1 && temporary[1] == 0);
}

static void test_running_out_of_memory(void) {
    for (int64_t n = 1;; n++) {
        rotor_recorder_options_t options = options_of("DTREqClass", 60);
        rotor_recorder_t book;
        rotor_recorder_init(&book, &options);
        rotor_testing_fail_after(n);
        int ret = run_chain(&book, 20);
        rotor_testing_fail_after(0);
        CHECK(ret == ROTOR_OK || ret == ROTOR_ERR_NO_MEMORY);
        rotor_recorder_free(&book);
        if (ret == ROTOR_OK) {
            CHECK(n > 10);
            return;
        }
    }
}

static void test_no_room(void) {
    rotor_recorder_options_t options = options_of("LRU", 25);
    rotor_recorder_t book;
    int32_t source, node, found;
    rotor_recorder_init(&book, &options);
    CHECK(rotor_recorder_source(&book, 10, false, &source) == ROTOR_OK);
    CHECK(operate(&book, &source, 1, 10, -1, &node) == ROTOR_OK);
    CHECK(rotor_recorder_begin(&book, &node, 1) == ROTOR_OK);
    CHECK(rotor_recorder_make_room(&book, 10, -1, &found, &is_moving) == ROTOR_OK && found == -2);
    CHECK(rotor_recorder_make_room(&book, 5, -1, &found, &is_moving) == ROTOR_OK && found == -1);
    CHECK(rotor_recorder_abort(&book) == ROTOR_OK && book.frame_count == 0);
    CHECK(rotor_recorder_make_room(&book, 10, -1, &found, &is_moving) == ROTOR_OK && found == node);
    CHECK(rotor_recorder_evicted(&book) == ROTOR_OK && book.work_count == 1);
    rotor_recorder_free(&book);
}

static void test_pinning_cuts_a_node_off(void) {
    rotor_recorder_options_t options = options_of("DTR", ROTOR_UNLIMITED);
    rotor_recorder_t book;
    int32_t source, a, b;
    rotor_recorder_init(&book, &options);
    CHECK(rotor_recorder_source(&book, 10, true, &source) == ROTOR_OK);
    CHECK(book.current_bytes == 0);
    CHECK(operate(&book, &source, 1, 7, -1, &a) == ROTOR_OK);
    CHECK(operate(&book, &a, 1, 9, -1, &b) == ROTOR_OK);
    CHECK(rotor_recorder_dependents(&book, source) == ROTOR_OK && book.work_count == 2);
    CHECK(rotor_recorder_pin(&book, a, false) == ROTOR_OK && book.nodes[a].op == -1);
    CHECK(rotor_recorder_dependents(&book, source) == ROTOR_OK && book.work_count == 0);
    CHECK(book.live_records == 1 && book.nodes[source].needed == 0);
    CHECK(rotor_recorder_pin(&book, b, false) == ROTOR_OK && book.live_records == 0);
    CHECK(rotor_recorder_dead(&book, source) == ROTOR_OK && book.current_bytes == 6);
    CHECK(rotor_recorder_dead(&book, a) == ROTOR_OK && rotor_recorder_dead(&book, b) == ROTOR_OK);
    CHECK(book.live_nodes == 0 && book.current_bytes == -10);
    rotor_recorder_free(&book);
}

enum { MOST = 40 };

/* An operation whose result cannot be computed again. */
static int operate_once(rotor_recorder_t *book, int32_t input, int64_t bytes, int32_t *node) {
    int32_t op;
    int32_t origin = -1;
    int ret = rotor_recorder_begin(book, &input, 1);
    if (ret == ROTOR_OK && (ret = catch_up(book)) == ROTOR_OK &&
        (ret = make_room(book, bytes)) == ROTOR_OK) {
        rotor_completion_t done = {-1, &bytes, &origin, 1, 5, 0, 0};
        ret = rotor_recorder_finish(book, &done, node, &op);
    }
    book->event_count = 0;
    return ret;
}

/* A move takes 2 ns and half a nanosecond for each byte, both ways: computing takes 5 ns. */
static void random_program(const char *heuristic, uint32_t seed, bool has_tier) {
    static const rotor_link_t link = {.write_bytes_per_s = 2e9,
                                      .read_bytes_per_s = 2e9,
                                      .latency_ns = 2,
                                      .host_bytes = 300,
                                      .least_bytes = 6};
    rotor_recorder_options_t options = options_of(heuristic, has_tier ? 200 : 400);
    rotor_recorder_t book;
    int32_t live[MOST];
    int64_t count = 1;
    int64_t away = 0;
    rotor_recorder_init(&book, &options);
    if (has_tier) {
        rotor_eviction_set_tier(&book.eviction, &link, 1.0);
    }
    CHECK(rotor_recorder_source(&book, 20, false, &live[0]) == ROTOR_OK);
    for (int step = 0; step < 600; step++) {
        int32_t inputs[2];
        int64_t wanted = 1 + (draw(&seed) % 2 != 0 && count > 1);
        int64_t first = draw(&seed) % (uint32_t)count;
        inputs[0] = live[first];
        inputs[1] = live[(first + 1) % count];
        int32_t origin = -1;
        if (draw(&seed) % 6 == 0 && (book.nodes[inputs[0]].state & ROTOR_NODE_SOURCE) == 0) {
            origin = inputs[0];
        }
        int32_t node;
        CHECK(operate(&book, inputs, wanted, 5 + draw(&seed) % 20, origin, &node) == ROTOR_OK);
        if (origin >= 0) {
            live[first] = node;
        } else {
            live[count++] = node;
        }
        if (has_tier && count < MOST && draw(&seed) % 8 == 0) {
            CHECK(operate_once(&book, live[0], 6, &live[count]) == ROTOR_OK);
            count++;
        }
        if (has_tier && draw(&seed) % 8 == 0) {
            int32_t pinned = live[draw(&seed) % (uint32_t)count];
            CHECK((!rotor_recorder_is_material(&book, pinned) &&
                   !rotor_recorder_is_away(&book, pinned)) ||
                  rotor_recorder_pin(&book, pinned, true) == ROTOR_OK);
            CHECK(!rotor_recorder_is_material(&book, live[0]) ||
                  rotor_recorder_changed(&book, live[0]) == ROTOR_OK);
        }
        for (int64_t k = 0; k < count; k++) {
            away += rotor_recorder_is_away(&book, live[k]);
        }
        while (count > 1 && (count == MOST || draw(&seed) % 3 == 0)) {
            int64_t gone = draw(&seed) % (uint32_t)count;
            const rotor_node_t *node_gone = &book.nodes[live[gone]];
            if ((node_gone->state & ROTOR_NODE_SOURCE) != 0 && node_gone->needed > 0) {
                continue; /* the owner keeps it */
            }
            CHECK(rotor_recorder_dead(&book, live[gone]) == ROTOR_OK);
            live[gone] = live[--count];
            book.event_count = 0;
        }
        CHECK(recount(&book) == book.current_bytes);
        CHECK(rotor_recorder_check(&book) == NULL);
        CHECK(book.frame_count == 0 && book.pending_count == 0);
    }
    CHECK(has_tier == (away > 0));
    while (count > 0) {
        int64_t gone = count - 1;
        while ((book.nodes[live[gone]].state & ROTOR_NODE_SOURCE) != 0 &&
               book.nodes[live[gone]].needed > 0) {
            gone--;
        }
        CHECK(rotor_recorder_dead(&book, live[gone]) == ROTOR_OK);
        live[gone] = live[--count];
        book.event_count = 0;
    }
    CHECK(book.eviction.stored_bytes == 0);
    CHECK(book.live_nodes == 0 && book.live_records == 0 && book.current_bytes == 0);
    CHECK(book.eviction.removed_count == book.eviction.count);
    CHECK(book.eviction.total_compute_ns == 0 && book.eviction.locked_bytes == 0);
    rotor_recorder_free(&book);
}

static void test_random_programs(void) {
    static const char *const names[] = {"DTREqClass", "DTR", "MSPS", "LRU", "DTRUnopt"};
    for (int k = 0; k < 5; k++) {
        for (uint32_t seed = 1; seed <= 3; seed++) {
            random_program(names[k], seed, false);
            random_program(names[k], seed, true);
        }
    }
}

/* Storages come, go out, come back and are removed; regions agree with walks, classes are exact. */
static void test_removal_from_the_engine(void) {
    static const char *const names[] = {"DTR", "DTR", "DTREqClass"};
    uint32_t seed = 7;
    for (int which = 0; which < 3; which++) {
        int first_choice = which == 1 ? 250 : 0;
        rotor_eviction_options_t options = {.heuristic = rotor_find_heuristic(names[which]),
                                            .rebuild_every = 1,
                                            .skip_unmade = true,
                                            .late_regions = which == 1};
        rotor_eviction_t engine;
        int32_t known[32];
        int32_t count = 0;
        int32_t chosen;
        rotor_eviction_init(&engine, &options);
        for (int step = 0; step < 500; step++) {
            if (count < 32) {
                int32_t storage;
                CHECK(rotor_eviction_add(&engine, 10, &storage) == ROTOR_OK);
                CHECK(rotor_eviction_compute(&engine, storage, 1 + draw(&seed) % 9) == ROTOR_OK);
                for (int k = 0; k < 2 && count > 0; k++) {
                    CHECK(rotor_eviction_depend(&engine, storage,
                                                known[draw(&seed) % (uint32_t)count]) == ROTOR_OK);
                }
                CHECK(rotor_eviction_materialize(&engine, &storage, 1) == ROTOR_OK);
                known[count++] = storage;
            }
            int32_t at = (int32_t)(draw(&seed) % (uint32_t)count);
            if (rotor_eviction_is(&engine, known[at], ROTOR_MATERIAL)) {
                CHECK(rotor_eviction_evict(&engine, known[at]) == ROTOR_OK);
            } else if (draw(&seed) % 2 == 0) {
                CHECK(rotor_eviction_materialize(&engine, &known[at], 1) == ROTOR_OK);
            }
            if (draw(&seed) % 3 == 0) {
                at = (int32_t)(draw(&seed) % (uint32_t)count);
                CHECK(rotor_eviction_remove(&engine, known[at]) == ROTOR_OK);
                known[at] = known[--count];
            }
            if (step < first_choice) {
                CHECK(!engine.has_regions);
                continue;
            }
            CHECK(rotor_eviction_choose(&engine, step, &chosen) == ROTOR_OK);
            CHECK(chosen < 0 || !rotor_eviction_is(&engine, chosen, ROTOR_REMOVED));
            for (int32_t k = 0; which < 2 && k < count; k++) {
                if (rotor_eviction_is(&engine, known[k], ROTOR_MATERIAL)) {
                    for (int way = 0; way < 2; way++) {
                        CHECK(engine.candidates[known[k]].around_ns[way] ==
                              rotor_eviction_around(&engine, known[k], (enum rotor_direction)way));
                    }
                }
            }
        }
        CHECK(engine.count <= 33 && engine.neighbour_count < 20000);
        CHECK(engine.classes.count < 4096);
        rotor_eviction_free(&engine);
    }
}

/* Values that are dear to compute, read in turn; how often something ran again. */
static int64_t read_in_turn(bool never_keep, int64_t *thrashes) {
    enum { VALUES = 10, ROUNDS = 200 };
    rotor_recorder_options_t options = options_of("LRU", 80);
    rotor_recorder_t book;
    int32_t source, values[VALUES], node, op;
    int32_t origin = -1;
    int64_t bytes = 10;
    options.never_keep = never_keep;
    rotor_recorder_init(&book, &options);
    CHECK(rotor_recorder_source(&book, 0, false, &source) == ROTOR_OK);
    for (int k = 0; k < VALUES * (ROUNDS + 1); k++) {
        bool is_new = k < VALUES;
        CHECK(rotor_recorder_begin(&book, is_new ? &source : &values[k % VALUES], 1) == ROTOR_OK);
        CHECK(catch_up(&book) == ROTOR_OK && make_room(&book, is_new ? bytes : 0) == ROTOR_OK);
        rotor_completion_t done = {is_new ? 1 : -1, &bytes, &origin, is_new, is_new ? 100 : 1, 0, 0};
        CHECK(rotor_recorder_finish(&book, &done, is_new ? &values[k] : &node, &op) == ROTOR_OK);
        CHECK(recount(&book) == book.current_bytes && book.current_bytes <= 80);
        book.event_count = 0;
    }
    CHECK(book.held_bytes == 100 && book.held_peak_bytes == 100);
    *thrashes = book.thrashes;
    int64_t replays = book.replays;
    for (int k = 0; k < VALUES; k++) {
        CHECK(rotor_recorder_dead(&book, values[k]) == ROTOR_OK);
    }
    CHECK(rotor_recorder_dead(&book, source) == ROTOR_OK);
    CHECK(book.held_bytes == 0 && book.node_bytes_kept == 0 && book.live_nodes == 0);
    CHECK(book.eviction.locked_bytes == 0);
    rotor_recorder_free(&book);
    return replays;
}

static void test_thrashing_is_found(void) {
    int64_t thrashes;
    int64_t kept = read_in_turn(false, &thrashes);
    CHECK(thrashes > 0);
    int64_t never = read_in_turn(true, &thrashes);
    CHECK(thrashes > 0 && never >= 10 * 190 && kept < never / 2);
}

/* A source is written to while something evicted needs it. */
static void test_copies_of_sources(void) {
    for (int is_foreign = 0; is_foreign < 2; is_foreign++) {
        rotor_recorder_options_t options = options_of("LRU", 40);
        rotor_recorder_t book;
        int32_t source, again, a, b, c;
        rotor_recorder_init(&book, &options);
        CHECK(rotor_recorder_source(&book, 5, is_foreign != 0, &source) == ROTOR_OK);
        int64_t level = book.current_bytes;
        CHECK(operate(&book, &source, 1, 20, -1, &a) == ROTOR_OK);
        CHECK(operate(&book, &a, 1, 20, -1, &b) == ROTOR_OK);
        CHECK(!is_foreign || rotor_recorder_is_material(&book, a));
        CHECK(make_room(&book, 20) == ROTOR_OK && !rotor_recorder_is_material(&book, a));
        int64_t before = book.current_bytes;
        int64_t held = book.held_bytes;
        CHECK(rotor_recorder_copied(&book, source, &again) == ROTOR_OK && again != source);
        CHECK(book.current_bytes == before + 5 && book.copied_bytes == 5);
        CHECK(book.held_bytes == held && book.current_bytes == recount(&book));
        CHECK(book.nodes[again].needed == 0 && book.nodes[source].needed == 1);
        /* What needs the copy runs again; what reads the source does not need it. */
        CHECK(operate(&book, &again, 1, 1, -1, &c) == ROTOR_OK && book.replays == 0);
        CHECK(rotor_recorder_dead(&book, c) == ROTOR_OK);
        int32_t inputs[2] = {a, again};
        CHECK(operate(&book, inputs, 2, 1, -1, &c) == ROTOR_OK && book.replays == 1);
        /* The program's storage may go before the copy does, and the copy with its last reader. */
        CHECK(rotor_recorder_dead(&book, c) == ROTOR_OK);
        CHECK(rotor_recorder_dead(&book, again) == ROTOR_OK);
        CHECK(book.copied_bytes == 5);
        CHECK(rotor_recorder_dead(&book, a) == ROTOR_OK && book.copied_bytes == 5);
        book.event_count = 0;
        CHECK(rotor_recorder_dead(&book, b) == ROTOR_OK && book.copied_bytes == 0);
        CHECK(book.live_nodes == 0 && book.live_records == 0 &&
              book.held_bytes == (is_foreign ? -5 : 0));
        CHECK(book.eviction.locked_bytes == 0);
        CHECK(book.current_bytes == (is_foreign ? -5 : 0) && level == (is_foreign ? 0 : 5));
        rotor_recorder_free(&book);
    }
}

/* A replayed write fails: what it may have written into is computed again. */
static void test_a_failed_write(void) {
    rotor_recorder_options_t options = options_of("LRU", 40);
    rotor_recorder_t book;
    int32_t source, origin, written, last, op;
    rotor_recorder_init(&book, &options);
    CHECK(rotor_recorder_source(&book, 0, false, &source) == ROTOR_OK);
    CHECK(operate(&book, &source, 1, 10, -1, &origin) == ROTOR_OK);
    CHECK(operate(&book, &origin, 1, 10, origin, &written) == ROTOR_OK);
    CHECK(rotor_recorder_dead(&book, origin) == ROTOR_OK);
    CHECK(operate(&book, &written, 1, 10, -1, &last) == ROTOR_OK);
    CHECK(make_room(&book, 40) == ROTOR_OK && book.current_bytes == 0);
    CHECK(rotor_recorder_begin(&book, &written, 1) == ROTOR_OK);
    CHECK(rotor_recorder_next(&book, &op) == ROTOR_OK && op == book.nodes[origin].op);
    CHECK(rotor_recorder_replayed(&book, 5) == ROTOR_OK);
    CHECK(rotor_recorder_next(&book, &op) == ROTOR_OK && op == book.nodes[written].op);
    CHECK(rotor_recorder_may_reuse(&book, origin));
    book.event_count = 0;
    CHECK(rotor_recorder_failed(&book) == ROTOR_OK);
    CHECK(book.event_count == 1 && book.events[0].kind == ROTOR_DROPPED);
    CHECK(rotor_recorder_abort(&book) == ROTOR_OK);
    CHECK(!rotor_recorder_is_material(&book, origin) && book.current_bytes == 0);
    CHECK(operate(&book, &written, 1, 10, -1, &last) == ROTOR_OK && book.replays == 3);
    rotor_recorder_free(&book);
}

static void test_what_a_write_takes(void) {
    rotor_recorder_options_t options = options_of("LRU", ROTOR_UNLIMITED);
    rotor_recorder_t book;
    int32_t source, again, a, b, written;
    bool is_worth;
    rotor_recorder_init(&book, &options);
    CHECK(rotor_recorder_source(&book, 15, false, &source) == ROTOR_OK);
    CHECK(rotor_recorder_copying(&book, source, &is_worth) == ROTOR_OK && !is_worth);
    CHECK(operate(&book, &source, 1, 10, -1, &a) == ROTOR_OK);
    CHECK(rotor_recorder_copying(&book, source, &is_worth) == ROTOR_OK && !is_worth);
    CHECK(operate(&book, &a, 1, 10, -1, &b) == ROTOR_OK);
    CHECK(rotor_recorder_copying(&book, source, &is_worth) == ROTOR_OK && is_worth);
    CHECK(rotor_recorder_writing(&book, source, true, 1) == ROTOR_WRITE_SOURCE);
    CHECK(rotor_recorder_writing(&book, a, false, 1) == ROTOR_WRITE_RESTORED);
    CHECK(rotor_recorder_writing(&book, b, true, 1) == ROTOR_WRITE_VERSION);
    CHECK(operate(&book, &b, 1, 10, b, &written) == ROTOR_OK);
    CHECK(rotor_recorder_writing(&book, written, true, 2) == ROTOR_WRITE_VERSION);
    CHECK(rotor_recorder_writing(&book, written, true, 1) == ROTOR_WRITE_TOO_LONG);
    /* Copies count with the next one: two take more than what was computed. */
    CHECK(rotor_recorder_copied(&book, source, &again) == ROTOR_OK);
    CHECK(operate(&book, &again, 1, 10, -1, &b) == ROTOR_OK);
    CHECK(rotor_recorder_copying(&book, again, &is_worth) == ROTOR_OK && !is_worth);
    rotor_recorder_free(&book);
}

/* Whether a recorder with another value in one of its fields is found to be wrong; puts it back. */
#define IS_FOUND(book, field, value)                                                               \
    do {                                                                                           \
        int64_t before = (int64_t)(field);                                                         \
        CHECK(rotor_recorder_check(book) == NULL);                                                 \
        field = (value);                                                                           \
        CHECK(rotor_recorder_check(book) != NULL);                                                 \
        memcpy(&(field), &before, sizeof(field));                                                  \
    } while (0)

static void test_contradictions_are_found(void) {
    rotor_recorder_options_t options = options_of("LRU", 40);
    rotor_recorder_t book;
    int32_t source, gone, a, b;
    rotor_recorder_init(&book, &options);
    CHECK(rotor_recorder_source(&book, 0, false, &source) == ROTOR_OK);
    CHECK(operate(&book, &source, 1, 10, -1, &gone) == ROTOR_OK);
    CHECK(operate(&book, &gone, 1, 10, -1, &a) == ROTOR_OK);
    CHECK(rotor_recorder_dead(&book, gone) == ROTOR_OK);
    CHECK(make_room(&book, 40) == ROTOR_OK);
    CHECK(operate(&book, &a, 1, 10, -1, &b) == ROTOR_OK); /* `gone` is a temporary now */
    CHECK((book.nodes[gone].state & ROTOR_NODE_TEMPORARY) != 0);
    IS_FOUND(&book, book.live_nodes, 1);
    IS_FOUND(&book, book.live_records, 1);
    IS_FOUND(&book, book.node_bytes_kept, 1);
    IS_FOUND(&book, book.copied_bytes, 1);
    IS_FOUND(&book, book.nodes[a].op, -1);
    IS_FOUND(&book, book.nodes[a].needed, 2);
    IS_FOUND(&book, book.nodes[a].state, ROTOR_NODE_USED | ROTOR_NODE_SOURCE);
    IS_FOUND(&book, book.nodes[b].state, ROTOR_NODE_USED | ROTOR_NODE_LIVE | ROTOR_NODE_KEPT);
    IS_FOUND(&book, book.nodes[gone].state, ROTOR_NODE_USED);
    IS_FOUND(&book, book.nodes[gone].previous, a);
    IS_FOUND(&book, book.last_temporary, a);
    IS_FOUND(&book, book.records[book.nodes[b].op].remembered, 0);
    IS_FOUND(&book, book.records[book.nodes[b].op].items[0], 3000);
    IS_FOUND(&book, book.eviction.pool_count, 0);
    CHECK(rotor_recorder_check(&book) == NULL);
    rotor_recorder_free(&book);
}

static const test_case_t cases[] = {
    {"a_chain_in_little_memory", test_a_chain_in_little_memory},
    {"temporaries_may_be_mixed_with_the_rest", test_temporaries_may_be_mixed_with_the_rest},
    {"running_out_of_memory", test_running_out_of_memory},
    {"no_room", test_no_room},
    {"pinning_cuts_a_node_off", test_pinning_cuts_a_node_off},
    {"random_programs", test_random_programs},
    {"thrashing_is_found", test_thrashing_is_found},
    {"copies_of_sources", test_copies_of_sources},
    {"a_failed_write", test_a_failed_write},
    {"what_a_write_takes", test_what_a_write_takes},
    {"contradictions_are_found", test_contradictions_are_found},
    {"removal_from_the_engine", test_removal_from_the_engine},
};

TEST_MAIN(cases)
