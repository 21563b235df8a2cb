#include "log.h"
#include "log_writer.h"
#include "testing.h"

static rotor_name_t name_of(const char *text) {
    return (rotor_name_t){.text = text, .length = (int64_t)strlen(text)};
}

static const rotor_name_t args[] = {{"w", 1}, {"a", 1}};
static const rotor_name_t results[] = {{"b", 1}, {"c", 1}};
static const int64_t mutated[] = {1, 0};

static int write_all(rotor_log_writer_t *writer) {
    int ret;
    if ((ret = rotor_log_write_annotate(writer, name_of("START"))) != ROTOR_OK ||
        (ret = rotor_log_write_name(writer, "CONSTANT", name_of("w"))) != ROTOR_OK ||
        (ret = rotor_log_write_memory(writer, name_of("w"), 0)) != ROTOR_OK ||
        (ret = rotor_log_write_copy(writer, name_of("a"), name_of("w"), false)) != ROTOR_OK ||
        (ret = rotor_log_write_call(writer, name_of("f"), args, 2, results, 2, 1234567890123)) !=
            ROTOR_OK ||
        (ret = rotor_log_write_memory(writer, name_of("b"), 4398046511104)) != ROTOR_OK ||
        (ret = rotor_log_write_alias(writer, name_of("b"), -1)) != ROTOR_OK ||
        (ret = rotor_log_write_memory(writer, name_of("c"), 7)) != ROTOR_OK ||
        (ret = rotor_log_write_alias(writer, name_of("c"), 1)) != ROTOR_OK ||
        (ret = rotor_log_write_mutate(writer, name_of("g_"), args, 2, mutated, 2, 5)) !=
            ROTOR_OK ||
        (ret = rotor_log_write_copy(writer, name_of("a"), name_of("w"), true)) != ROTOR_OK ||
        (ret = rotor_log_write_name(writer, "RELEASE", name_of("w"))) != ROTOR_OK) {
        return ret;
    }
    return rotor_log_write_name(writer, "PIN", name_of("b"));
}

static const char expected[] =
    "{\"ANNOTATION\":\"START\",\"INSTRUCTION\":\"ANNOTATE\"}\n"
    "{\"INSTRUCTION\":\"CONSTANT\",\"NAME\":\"w\"}\n"
    "{\"INSTRUCTION\":\"MEMORY\",\"MEMORY\":\"0\",\"NAME\":\"w\"}\n"
    "{\"DST\":\"a\",\"INSTRUCTION\":\"COPY\",\"SRC\":\"w\"}\n"
    "{\"ARGS\":[\"w\",\"a\"],\"INSTRUCTION\":\"CALL\",\"NAME\":\"f\",\"RESULT\":[\"b\",\"c\"],"
    "\"TIME\":\"1234567890123\"}\n"
    "{\"INSTRUCTION\":\"MEMORY\",\"MEMORY\":\"4398046511104\",\"NAME\":\"b\"}\n"
    "{\"ALIAS\":\"-1\",\"INSTRUCTION\":\"ALIAS\",\"NAME\":\"b\"}\n"
    "{\"INSTRUCTION\":\"MEMORY\",\"MEMORY\":\"7\",\"NAME\":\"c\"}\n"
    "{\"ALIAS\":\"1\",\"INSTRUCTION\":\"ALIAS\",\"NAME\":\"c\"}\n"
    "{\"ARGS\":[\"w\",\"a\"],\"INSTRUCTION\":\"MUTATE\",\"MUTATE\":[1,0],\"NAME\":\"g_\","
    "\"TIME\":\"5\"}\n"
    "{\"DST\":\"a\",\"INSTRUCTION\":\"COPY_FROM\",\"SRC\":\"w\"}\n"
    "{\"INSTRUCTION\":\"RELEASE\",\"NAME\":\"w\"}\n"
    "{\"INSTRUCTION\":\"PIN\",\"NAME\":\"b\"}\n";

static void writes_every_instruction(void) {
    rotor_log_writer_t writer;
    rotor_log_t log;
    rotor_log_error_t error;
    rotor_log_writer_init(&writer);
    CHECK(write_all(&writer) == ROTOR_OK);
    CHECK(writer.length == (int64_t)strlen(expected));
    CHECK(memcmp(writer.text, expected, strlen(expected)) == 0);
    CHECK(rotor_log_init(&log, true) == ROTOR_OK);
    CHECK(rotor_log_feed(&log, writer.text, writer.length, NULL, &error) == ROTOR_OK);
    CHECK(rotor_log_finish(&log, ROTOR_LEAVE, &error) == ROTOR_OK);
    CHECK(log.graph.tensor_count == 5 && log.command_count == 11);
    rotor_log_free(&log);
    rotor_log_writer_free(&writer);
    rotor_log_writer_free(&writer);
    CHECK(writer.length == 0);
}

/* Every character but the null one, and UTF-8, comes back as it was. */
static void escapes_what_json_escapes(void) {
    char name[160];
    int64_t length = 0;
    rotor_log_writer_t writer;
    rotor_log_t log;
    rotor_log_error_t error;

    for (int c = 1; c < 128; c++) {
        name[length++] = (char)c;
    }
    memcpy(name + length, "\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80", 10);
    length += 9;
    rotor_log_writer_init(&writer);
    CHECK(rotor_log_write_name(&writer, "CONSTANT", name_of(name)) == ROTOR_OK);
    CHECK(rotor_log_write_memory(&writer, name_of(name), 1) == ROTOR_OK);
    CHECK(rotor_log_write_name(&writer, "RELEASE", name_of("")) == ROTOR_OK);
    CHECK(memchr(writer.text, '\x01', (size_t)writer.length) == NULL);
    CHECK(rotor_log_init(&log, true) == ROTOR_OK);
    CHECK(rotor_log_feed(&log, writer.text, writer.length, NULL, &error) == ROTOR_OK);
    CHECK(rotor_log_lookup(&log, name, length) == 0 && log.ignored_releases == 1);
    CHECK(strcmp(log.graph.names + log.graph.tensors[0].name, name) == 0);
    rotor_log_free(&log);
    rotor_log_writer_free(&writer);
}

static void writes_integers(void) {
    const int64_t numbers[] = {0, -1, 9, 10, INT64_MAX, INT64_MIN};
    rotor_log_writer_t writer;
    rotor_log_writer_init(&writer);
    for (int k = 0; k < 6; k++) {
        char line[128];
        writer.length = 0;
        CHECK(rotor_log_write_alias(&writer, name_of("x"), numbers[k]) == ROTOR_OK);
        int length = snprintf(line, sizeof(line),
                              "{\"ALIAS\":\"%lld\",\"INSTRUCTION\":\"ALIAS\",\"NAME\":\"x\"}\n",
                              (long long)numbers[k]);
        CHECK(writer.length == length && memcmp(writer.text, line, (size_t)length) == 0);
    }
    rotor_log_writer_free(&writer);
}

/* A line is written whole or not at all. */
static void no_memory(void) {
    int64_t n = 1;
    int ret = ROTOR_ERR_NO_MEMORY;
    for (; ret != ROTOR_OK && n < 100; n++) {
        rotor_log_writer_t writer;
        rotor_log_writer_init(&writer);
        rotor_testing_fail_after(n);
        ret = write_all(&writer);
        rotor_testing_fail_after(0);
        CHECK(ret == ROTOR_OK || ret == ROTOR_ERR_NO_MEMORY);
        CHECK(writer.length == 0 || writer.text[writer.length - 1] == '\n');
        CHECK(memcmp(writer.length ? writer.text : "", expected, (size_t)writer.length) == 0);
        rotor_log_writer_free(&writer);
    }
    CHECK(ret == ROTOR_OK && n > 3);
}

static void refuses_names_without_end(void) {
    rotor_log_writer_t writer;
    const rotor_name_t name = {.text = "x", .length = INT32_MAX};
    rotor_log_writer_init(&writer);
    CHECK(rotor_log_write_name(&writer, "RELEASE", name) == ROTOR_ERR_OVERFLOW);
    CHECK(writer.length == 0);
    rotor_log_writer_free(&writer);
}

static const test_case_t cases[] = {
    {"writes_every_instruction", writes_every_instruction},
    {"escapes_what_json_escapes", escapes_what_json_escapes},
    {"writes_integers", writes_integers},
    {"no_memory", no_memory},
    {"refuses_names_without_end", refuses_names_without_end},
};

TEST_MAIN(cases)
