/* Replays of small logs whose figures are worked out by hand, and of large generated ones. */
#include "log.h"
#include "replay.h"

#include <math.h>

#include "log_writer.h"
#include "testing.h"

static rotor_replay_options_t options_of(const char *heuristic, int64_t budget) {
    return (rotor_replay_options_t){
        .runtime = ROTOR_V2_EAGER,
        .budget_bytes = budget,
        .remat_limit_ns = INFINITY,
        .stop_at_execution = -1,
        .max_events = 1000000,
        .eviction = {.heuristic = rotor_find_heuristic(heuristic), .seed = 1},
    };
}

static rotor_name_t name_of(char *text, size_t size, char letter, int64_t number) {
    snprintf(text, size, "%c%lld", letter, (long long)number);
    return (rotor_name_t){text, (int64_t)strlen(text)};
}

/* CALL of one result of `bytes` and 1 ns from up to two names. */
static void call(rotor_log_writer_t *writer, int64_t result, int64_t first, int64_t second,
                 int64_t bytes) {
    char texts[3][32];
    rotor_name_t args[2];
    int64_t count = 0;
    rotor_name_t made = name_of(texts[0], 32, 't', result);
    if (first >= 0) {
        args[count++] = name_of(texts[1], 32, 't', first);
    }
    if (second >= 0) {
        args[count++] = name_of(texts[2], 32, 't', second);
    }
    rotor_name_t operation = {"op", 2};
    CHECK(rotor_log_write_call(writer, operation, args, count, &made, 1, 1) == ROTOR_OK);
    CHECK(rotor_log_write_memory(writer, made, bytes) == ROTOR_OK);
    CHECK(rotor_log_write_alias(writer, made, -1) == ROTOR_OK);
}

static void release(rotor_log_writer_t *writer, int64_t tensor) {
    char text[32];
    CHECK(rotor_log_write_name(writer, "RELEASE", name_of(text, 32, 't', tensor)) == ROTOR_OK);
}

static void read(rotor_log_t *log, rotor_log_writer_t *writer, enum rotor_output_condition end) {
    rotor_log_error_t error;
    CHECK(rotor_log_init(log, true) == ROTOR_OK);
    CHECK(rotor_log_feed(log, writer->text, writer->length, NULL, &error) == ROTOR_OK);
    CHECK(rotor_log_finish(log, end, &error) == ROTOR_OK);
    rotor_log_writer_free(writer);
}

/* A chain forward of n tensors and its backward, as in a network of n layers. */
static void make_chain(rotor_log_t *log, int64_t n) {
    rotor_log_writer_t writer;
    rotor_log_writer_init(&writer);
    for (int64_t k = 0; k < n; k++) {
        call(&writer, k, k - 1, -1, 1);
    }
    for (int64_t k = 0; k < n; k++) {
        call(&writer, n + k, n - 2 - k, k == 0 ? -1 : n + k - 1, 1);
        release(&writer, n - 1 - k);
        if (k > 0) {
            release(&writer, n + k - 1);
        }
    }
    read(log, &writer, ROTOR_REMATERIALIZE);
}

static void test_without_a_budget(void) {
    rotor_log_t log;
    rotor_replay_t replay;
    rotor_replay_options_t options = options_of("DTR", INT64_MAX);
    make_chain(&log, 10);
    CHECK(rotor_replay_init(&replay, &log, &options) == ROTOR_OK);
    CHECK(rotor_replay_run(&replay, NULL) == ROTOR_OK && replay.outcome == ROTOR_RUN_OK);
    CHECK(replay.clock == 21 && replay.model_compute_ns == 20 && replay.remat_compute_ns == 0);
    CHECK(replay.model_executions == 20 && replay.remats == 0 && replay.executions == 20);
    /* Ten activations, the gradient just made, and from the second on the one before it. */
    CHECK(replay.max_memory == 11 && replay.memory == 1 && replay.evictions == 19);
    CHECK(replay.bottleneck_bytes == 3 && replay.next_command == log.command_count);
    CHECK(rotor_replay_is_defined(&replay, 19) && !rotor_replay_is_defined(&replay, 0));
    CHECK(!rotor_replay_is_defined(&replay, -1) && !rotor_replay_is_defined(&replay, 20));
    rotor_replay_free(&replay);
    rotor_log_free(&log);
}

static void test_running_out_and_thrashing(void) {
    rotor_log_t log;
    rotor_replay_t replay;
    rotor_replay_options_t options = options_of("LRU", 2);
    int32_t locked[8];
    make_chain(&log, 10);
    CHECK(rotor_replay_init(&replay, &log, &options) == ROTOR_OK);
    CHECK(rotor_replay_run(&replay, NULL) == ROTOR_OK && replay.outcome == ROTOR_RUN_OOM);
    CHECK(replay.failed_operation >= 0 && replay.failed_bytes == 1 && replay.memory == 2);
    CHECK(rotor_replay_locked(&replay, locked) == 2 && replay.max_locked_bytes == 2);
    int64_t moment = replay.max_locked_execution;
    rotor_replay_free(&replay);

    options.stop_at_execution = moment;
    CHECK(rotor_replay_init(&replay, &log, &options) == ROTOR_OK);
    CHECK(rotor_replay_run(&replay, NULL) == ROTOR_OK && replay.outcome == ROTOR_RUN_STOPPED);
    CHECK(replay.executions == moment && rotor_replay_locked(&replay, locked) == 2);
    rotor_replay_free(&replay);

    options = options_of("LRU", 3);
    options.remat_limit_ns = 5;
    CHECK(rotor_replay_init(&replay, &log, &options) == ROTOR_OK);
    CHECK(rotor_replay_run(&replay, NULL) == ROTOR_OK && replay.outcome == ROTOR_RUN_THRASH);
    CHECK(replay.remat_compute_ns == 6 && replay.remats == 6 && replay.max_memory == 3);
    rotor_replay_free(&replay);
    options.remat_limit_ns = INFINITY;
    CHECK(rotor_replay_init(&replay, &log, &options) == ROTOR_OK);
    CHECK(rotor_replay_run(&replay, NULL) == ROTOR_OK && replay.outcome == ROTOR_RUN_OK);
    /* Each activation is made again from the first on: 0 .. 7, then 0 .. 6, and so on. */
    CHECK(replay.remats == 8 + 7 + 6 + 5 + 4 + 3 + 2 + 1);
    rotor_replay_free(&replay);
    rotor_log_free(&log);
}

static void test_deep_rematerialization(void) {
    enum { N = 300000 };
    rotor_log_t log;
    rotor_replay_t replay;
    rotor_replay_options_t options = options_of("LRU", 3);
    rotor_log_writer_t writer;
    rotor_log_writer_init(&writer);
    for (int64_t k = 0; k < N; k++) {
        call(&writer, k, k - 1, -1, 1);
    }
    release(&writer, N - 1);
    for (int64_t k = 0; k < N - 3; k++) {
        release(&writer, k);
    }
    read(&log, &writer, ROTOR_LEAVE);
    /* Asks for a tensor that was evicted, like everything before it. */
    log.commands[log.command_count - 1] = (rotor_command_t){ROTOR_PIN, N - 4};
    CHECK(rotor_replay_init(&replay, &log, &options) == ROTOR_OK);
    CHECK(rotor_replay_run(&replay, NULL) == ROTOR_OK && replay.outcome == ROTOR_RUN_OK);
    CHECK(replay.remats == N - 3 && replay.max_memory == 3);
    rotor_replay_free(&replay);
    rotor_log_free(&log);
}

static void test_a_log_that_grows(void) {
    rotor_log_t log;
    rotor_replay_t replay;
    rotor_replay_options_t options = options_of("DTREqClass", 4);
    rotor_log_error_t error;
    options.stats = true;
    CHECK(rotor_log_init(&log, true) == ROTOR_OK);
    CHECK(rotor_replay_init(&replay, &log, &options) == ROTOR_OK);
    for (int64_t k = 0; k < 100; k++) {
        rotor_log_writer_t writer;
        rotor_log_writer_init(&writer);
        call(&writer, k, k - 1, k > 1 ? k - 2 : -1, 1);
        CHECK(rotor_log_feed(&log, writer.text, writer.length, NULL, &error) == ROTOR_OK);
        CHECK(rotor_replay_run(&replay, NULL) == ROTOR_OK);
        CHECK(replay.outcome == ROTOR_RUN_OK && replay.clock >= k + 2);
        CHECK(rotor_replay_is_defined(&replay, (int32_t)k));
        rotor_log_writer_free(&writer);
    }
    int64_t materialized = 0;
    for (int64_t k = 0; k < 100; k++) {
        materialized += replay.storage_stats[k].materialized;
    }
    CHECK(materialized == replay.executions && replay.executions == 100 + replay.remats);
    rotor_replay_free(&replay);
    rotor_log_free(&log);
}

static void test_trace(void) {
    rotor_log_t log;
    rotor_replay_t replay;
    rotor_replay_options_t options = options_of("DTR", 5);
    int64_t counts[8] = {0};
    int64_t most = 0;
    make_chain(&log, 20);
    options.trace = true;
    CHECK(rotor_replay_init(&replay, &log, &options) == ROTOR_OK);
    CHECK(rotor_replay_run(&replay, NULL) == ROTOR_OK && replay.outcome == ROTOR_RUN_OK);
    for (int64_t k = 0; k < replay.event_count; k++) {
        counts[replay.events[k].kind]++;
        most = rotor_max(most, replay.events[k].memory);
        CHECK(k == 0 || replay.events[k].clock >= replay.events[k - 1].clock);
    }
    CHECK(counts[ROTOR_EVENT_COMPUTE] == replay.executions);
    CHECK(counts[ROTOR_EVENT_PENDING] == replay.executions);
    CHECK(counts[ROTOR_EVENT_EVICT] == replay.evictions);
    CHECK(counts[ROTOR_EVENT_LOCK] == counts[ROTOR_EVENT_UNLOCK]);
    CHECK(counts[ROTOR_EVENT_PIN] == 1 && counts[ROTOR_EVENT_PRESSURE] > 0);
    CHECK(most == replay.max_memory && most <= 5);
    CHECK(rotor_replay_footprint(&replay) > 0);
    rotor_replay_free(&replay);
    options.max_events = 10;
    CHECK(rotor_replay_init(&replay, &log, &options) == ROTOR_OK);
    CHECK(rotor_replay_run(&replay, NULL) == ROTOR_ERR_TABLE_TOO_LARGE);
    rotor_replay_free(&replay);
    rotor_log_free(&log);
}

static void test_options_are_checked(void) {
    rotor_log_t log;
    rotor_replay_t replay;
    rotor_replay_options_t options = options_of("DTR", 0);
    make_chain(&log, 2);
    CHECK(rotor_replay_init(&replay, &log, &options) == ROTOR_ERR_BAD_BUDGET);
    rotor_replay_free(&replay);
    for (int64_t k = 0; rotor_heuristic(k) != NULL; k++) {
        enum rotor_numerator n = rotor_heuristic(k)->numerator;
        bool fits = n != ROTOR_CLASSES && n != ROTOR_REGIONS && n != ROTOR_ANCESTORS;
        options = options_of(rotor_heuristic(k)->name, 100);
        options.runtime = ROTOR_V1;
        CHECK(rotor_replay_init(&replay, &log, &options) ==
              (fits ? ROTOR_OK : ROTOR_ERR_BAD_HEURISTIC));
        rotor_replay_free(&replay);
    }
    rotor_log_free(&log);
}

static bool stop(void *context, int64_t done, int64_t total) {
    (void)context;
    return done > total;
}

static void test_interruption(void) {
    rotor_log_t log;
    rotor_replay_t replay;
    rotor_callback_t callback = {stop, NULL};
    rotor_replay_options_t options = options_of("LRU", 3);
    make_chain(&log, 1000);
    CHECK(rotor_replay_init(&replay, &log, &options) == ROTOR_OK);
    CHECK(rotor_replay_run(&replay, &callback) == ROTOR_ERR_INTERRUPTED);
    CHECK(replay.executions > 0 && replay.next_command < log.command_count);
    rotor_replay_free(&replay);
    rotor_log_free(&log);
}

static void test_out_of_memory(void) {
    static const char *const names[] = {"DTR", "DTREqClass", "DTRUnopt"};
    rotor_log_t log;
    make_chain(&log, 40);
    for (size_t h = 0; h < 3; h++) {
        int ret = ROTOR_ERR_NO_MEMORY;
        for (int64_t n = 1; ret != ROTOR_OK; n++) {
            rotor_replay_t replay;
            rotor_replay_options_t options = options_of(names[h], 6);
            options.trace = options.stats = true;
            options.runtime = h == 2 ? ROTOR_V1 : ROTOR_V2_EAGER;
            options.eviction.rebuild_every = 1;
            rotor_testing_fail_after(n);
            ret = rotor_replay_init(&replay, &log, &options);
            if (ret == ROTOR_OK) {
                ret = rotor_replay_run(&replay, NULL);
            }
            CHECK(ret == ROTOR_OK || ret == ROTOR_ERR_NO_MEMORY);
            rotor_testing_fail_after(0);
            rotor_replay_free(&replay);
        }
    }
    rotor_log_free(&log);
}

static const test_case_t cases[] = {
    {"without_a_budget", test_without_a_budget},
    {"running_out_and_thrashing", test_running_out_and_thrashing},
    {"deep_rematerialization", test_deep_rematerialization},
    {"a_log_that_grows", test_a_log_that_grows},
    {"trace", test_trace},
    {"options_are_checked", test_options_are_checked},
    {"interruption", test_interruption},
    {"out_of_memory", test_out_of_memory},
};

TEST_MAIN(cases)
