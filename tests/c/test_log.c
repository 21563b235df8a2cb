#include "log.h"
#include "testing.h"

/* Logs as text: single quotes stand for double ones. */
enum { MOST_TEXT = 8192 };

static const char *quoted(const char *text) {
    static char buffer[MOST_TEXT];
    size_t k = 0;
    for (; text[k] != '\0' && k + 1 < sizeof(buffer); k++) {
        buffer[k] = text[k] == '\'' ? '"' : text[k];
    }
    buffer[k] = '\0';
    return buffer;
}

#define CONSTANT(name, bytes)                                                                \
    "{'INSTRUCTION':'CONSTANT','NAME':'" name "'}\n"                                         \
    "{'INSTRUCTION':'MEMORY','MEMORY':'" #bytes "','NAME':'" name "'}\n"
#define CALL(name, args, results, ns)                                                        \
    "{'ARGS':[" args "],'INSTRUCTION':'CALL','NAME':'" name "','RESULT':[" results           \
    "],'TIME':'" #ns "'}\n"
#define RESULT(name, bytes, alias)                                                           \
    "{'INSTRUCTION':'MEMORY','MEMORY':'" #bytes "','NAME':'" name "'}\n"                     \
    "{'ALIAS':'" #alias "','INSTRUCTION':'ALIAS','NAME':'" name "'}\n"
#define MUTATE(name, args, mutated, ns)                                                      \
    "{'ARGS':[" args "],'INSTRUCTION':'MUTATE','MUTATE':[" mutated "],'NAME':'" name         \
    "','TIME':'" #ns "'}\n"
#define COPY(dst, src) "{'DST':'" dst "','INSTRUCTION':'COPY','SRC':'" src "'}\n"
#define COPY_FROM(dst, src) "{'DST':'" dst "','INSTRUCTION':'COPY_FROM','SRC':'" src "'}\n"
#define RELEASE(name) "{'INSTRUCTION':'RELEASE','NAME':'" name "'}\n"
#define PIN(name) "{'INSTRUCTION':'PIN','NAME':'" name "'}\n"
#define ANNOTATE(text) "{'ANNOTATION':'" text "','INSTRUCTION':'ANNOTATE'}\n"

static const char program[] =
    ANNOTATE("START") CONSTANT("w", 100) CALL("conv", "'w','w'", "'a','b'", 7)
    RESULT("a", 30, -1) RESULT("b", 99, 1) COPY("c", "a") MUTATE("relu_", "'w','a'", "1", 5)
    ANNOTATE("BACKWARD") COPY_FROM("c", "b") RELEASE("a") RELEASE("b") PIN("w")
    CALL("conv_backward", "'c'", "'d'", 11) RESULT("d", 40, -1) RELEASE("unknown");

static const char awkward[] =
    " { 'NAME' : 'w\\u00e9\\ud83d\\ude00\\n' , 'extra' : [1, -2.5e+3, 'x', true, null] ,"
    "\t'more':false, 'INSTRUCTION':'\\u0043ONSTANT' } \r\n"
    "\r\n  \t\n"
    "{'MEMORY':12,'INSTRUCTION':'MEMORY','NAME':'w\xc3\xa9\xf0\x9f\x98\x80\\n'}\r\n"
    "{'NAME':'f','ARGS':[],'RESULT':['\\\\\\/\\b\\f\\r\\t'],'TIME':0,'INSTRUCTION':'CALL'}\n"
    "{'INSTRUCTION':'MEMORY','MEMORY':'4398046511104','NAME':'\\\\/\\b\\f\\r\\t'}\n"
    "{'ALIAS':-1,'INSTRUCTION':'ALIAS','NAME':'\\\\/\\b\\f\\r\\t'}\n"
    "{'ARGS':['\\\\/\\b\\f\\r\\t'],'INSTRUCTION':'MUTATE','MUTATE':['0'],'NAME':'m','TIME':3}";

static int feed(rotor_log_t *log, const char *text, rotor_log_error_t *error) {
    return rotor_log_feed(log, text, (int64_t)strlen(text), NULL, error);
}

static int feed_pieces(rotor_log_t *log, const char *text, int64_t length, int64_t piece,
                       rotor_log_error_t *error) {
    int ret = ROTOR_OK;
    for (int64_t at = 0; at < length && ret == ROTOR_OK; at += piece) {
        /* A copy of the exact size: reading beyond it is seen. */
        int64_t size = rotor_min(piece, length - at);
        char *copy = rotor_malloc((size_t)size);
        if (copy == NULL) {
            return ROTOR_ERR_NO_MEMORY;
        }
        memcpy(copy, text + at, (size_t)size);
        ret = rotor_log_feed(log, copy, size, NULL, error);
        rotor_free(copy);
    }
    return ret;
}

/* Reads a whole log; a log that fails is freed by the caller as well. */
static int read_text(rotor_log_t *log, const char *text, int64_t length, int64_t piece, bool cuts,
                     rotor_log_error_t *error) {
    int ret = rotor_log_init(log, cuts);
    if (ret == ROTOR_OK) {
        ret = feed_pieces(log, text, length, piece, error);
    }
    return ret == ROTOR_OK ? rotor_log_finish(log, ROTOR_REMATERIALIZE, error) : ret;
}

static void check_commands(const rotor_log_t *log, const rotor_command_t *expected,
                           int64_t count) {
    CHECK(log->command_count == count);
    for (int64_t k = 0; k < rotor_min(count, log->command_count); k++) {
        CHECK(log->commands[k].kind == expected[k].kind);
        CHECK(log->commands[k].index == expected[k].index);
    }
}

static const char *tensor_name(const rotor_log_t *log, int32_t tensor) {
    return log->graph.names + log->graph.tensors[tensor].name;
}

/* Whether what a log refers to is there: what a replay relies on. */
static void check_sound(const rotor_log_t *log) {
    const rotor_graph_t *graph = &log->graph;
    int64_t made = 0;
    for (int64_t k = 0; k < log->command_count; k++) {
        const rotor_command_t *command = &log->commands[k];
        if (command->kind == ROTOR_COMPUTE) {
            CHECK(command->index == made);
            made++;
        } else {
            CHECK(command->index >= 0 && command->index < graph->tensor_count);
            CHECK(graph->tensors[command->index].operation < made);
        }
    }
    CHECK(made == graph->operation_count);
    for (int64_t k = 0; k < graph->operation_count; k++) {
        const rotor_operation_t *operation = &graph->operations[k];
        CHECK(operation->output_count > 0 && operation->cost_ns >= 0 && operation->bytes >= 0);
        for (int32_t i = 0; i < operation->input_count; i++) {
            CHECK(graph->inputs[operation->first_input + i] < operation->first_output);
        }
    }
    for (int32_t k = 0; k < graph->tensor_count; k++) {
        CHECK(rotor_log_references(log, k) <= log->command_count);
    }
}

static void reads_every_instruction(void) {
    const rotor_command_t expected[] = {
        {ROTOR_COMPUTE, 0}, {ROTOR_PIN, 0},     {ROTOR_COMPUTE, 1}, {ROTOR_GET, 1},
        {ROTOR_COMPUTE, 2}, {ROTOR_RELEASE, 1}, {ROTOR_RELEASE, 1}, {ROTOR_GET, 2},
        {ROTOR_RELEASE, 3}, {ROTOR_RELEASE, 2}, {ROTOR_PIN, 0},     {ROTOR_COMPUTE, 3},
        {ROTOR_PIN, 0},     {ROTOR_PIN, 2},     {ROTOR_PIN, 2},     {ROTOR_PIN, 4}};
    const int64_t pieces[] = {1, 2, 3, 7, 64, 4096};
    const char *text = quoted(program);

    for (int p = 0; p < 6; p++) {
        rotor_log_t log;
        rotor_log_error_t error;
        CHECK(read_text(&log, text, (int64_t)strlen(text), pieces[p], true, &error) == ROTOR_OK);
        check_commands(&log, expected, 16);
        CHECK(log.line_count == 19 && log.start_count == 1 && log.backward_command == 6);
        CHECK(log.ignored_releases == 1 && log.is_finished && log.output_bytes == 0);
        const rotor_graph_t *graph = &log.graph;
        CHECK(graph->operation_count == 4 && graph->tensor_count == 5);
        CHECK(graph->storage_count == 4 && graph->input_count == 5);
        CHECK(strcmp(graph->names + graph->operations[0].name, "constant") == 0);
        CHECK(strcmp(graph->names + graph->operations[1].name, "conv") == 0);
        CHECK(strcmp(graph->names + graph->operations[2].name, "relu_") == 0);
        CHECK(graph->operations[0].cost_ns == 0 && graph->operations[1].cost_ns == 7);
        CHECK(graph->operations[1].input_count == 2 && graph->operations[1].bytes == 30);
        CHECK(graph->operations[2].input_count == 2 && graph->operations[2].bytes == 30);
        CHECK(graph->inputs[2] == 0 && graph->inputs[3] == 1 && graph->inputs[4] == 2);
        CHECK(graph->tensors[2].is_alias && graph->tensors[2].storage == 0);
        CHECK(!graph->tensors[3].is_alias && graph->tensors[3].storage == 2);
        CHECK(strcmp(tensor_name(&log, 3), "a$") == 0);
        CHECK(rotor_log_lookup(&log, "a", 1) == 3 && rotor_log_lookup(&log, "c", 1) == 2);
        CHECK(rotor_log_lookup(&log, "unknown", 7) == -1);
        CHECK(rotor_log_references(&log, 0) == 1 && rotor_log_references(&log, 1) == 0);
        CHECK(rotor_log_references(&log, 2) == 1 && rotor_log_references(&log, 3) == 0);
        check_sound(&log);
        rotor_log_free(&log);
        rotor_log_free(&log);
    }
}

static void reads_json_as_it_may_be_written(void) {
    rotor_log_t log;
    rotor_log_error_t error;
    char text[MOST_TEXT] = "\xef\xbb\xbf";
    strcat(text, quoted(awkward));
    for (int64_t piece = 1; piece < 12; piece++) {
        CHECK(read_text(&log, text, (int64_t)strlen(text), piece, true, &error) == ROTOR_OK);
        CHECK(log.line_count == 8 && log.command_count == 7 && log.graph.tensor_count == 3);
        CHECK(strcmp(tensor_name(&log, 0), "w\xc3\xa9\xf0\x9f\x98\x80\n") == 0);
        CHECK(strcmp(tensor_name(&log, 2), "\\/\b\f\r\t$") == 0);
        CHECK(log.graph.storages[0].bytes == 12 && log.graph.storages[2].bytes == INT64_C(1) << 42);
        rotor_log_free(&log);
    }
}

static void start_drops_what_came_before(void) {
    const char *text = quoted(CONSTANT("w", 1) RELEASE("u") CALL("backward", "'w'", "'a'", 7)
                                  RESULT("a", 30, -1) ANNOTATE("START") CONSTANT("w", 2)
                                      ANNOTATE("other") RELEASE("a") ANNOTATE("BACKWARD"));
    for (int cuts = 0; cuts < 2; cuts++) {
        rotor_log_t log;
        rotor_log_error_t error;
        int ret = read_text(&log, text, (int64_t)strlen(text), 4096, cuts, &error);
        if (cuts) {
            CHECK(ret == ROTOR_OK && log.graph.operation_count == 1 && log.start_count == 1);
            CHECK(log.graph.storages[0].bytes == 2 && log.ignored_releases == 1);
            CHECK(log.line_count == 12 && log.backward_command == 2 && log.command_count == 3);
        } else {
            CHECK(ret == ROTOR_ERR_FORMAT && error.line == 8);
            CHECK(strstr(error.message, "\"w\" is defined already") != NULL);
            CHECK(log.graph.operation_count == 2 && log.start_count == 1);
            CHECK(log.backward_command == 2 && log.command_count == 3 && log.line_count == 7);
        }
        rotor_log_free(&log);
    }
}

static void ends_on_three_conditions(void) {
    const char *text = quoted(program);
    for (int condition = 0; condition < 3; condition++) {
        rotor_log_t log;
        rotor_log_error_t error;
        CHECK(rotor_log_init(&log, true) == ROTOR_OK);
        CHECK(feed(&log, text, &error) == ROTOR_OK);
        CHECK(rotor_log_finish(&log, (enum rotor_output_condition)condition, &error) == ROTOR_OK);
        CHECK(log.command_count == (condition == ROTOR_REMATERIALIZE ? 16 : 12));
        /* w and b share a storage; d is the other. */
        CHECK(log.output_bytes == (condition == ROTOR_PREALLOCATE ? 140 : 0));
        CHECK(rotor_log_finish(&log, ROTOR_LEAVE, &error) == ROTOR_ERR_FORMAT);
        CHECK(rotor_log_feed(&log, "\n", 1, NULL, &error) == ROTOR_ERR_FORMAT);
        CHECK(strstr(error.message, "ended already") != NULL);
        rotor_log_free(&log);
    }
}

static void grows_while_it_is_read(void) {
    rotor_log_t log;
    rotor_log_error_t error;
    const char *text = quoted(CONSTANT("w", 1));
    CHECK(rotor_log_init(&log, true) == ROTOR_OK);
    CHECK(feed(&log, text, &error) == ROTOR_OK);
    CHECK(log.command_count == 2 && rotor_log_lookup(&log, "w", 1) == 0);
    for (int k = 0; k < 500; k++) {
        char line[128];
        int length = snprintf(line, sizeof(line),
                              "{\"DST\":\"c%d\",\"INSTRUCTION\":\"COPY\",\"SRC\":\"w\"}\n", k);
        CHECK(rotor_log_feed(&log, line, length, NULL, &error) == ROTOR_OK);
        CHECK(log.command_count == k + 3);
    }
    CHECK(rotor_log_references(&log, 0) == 501 && rotor_log_footprint(&log) < 65536);
    CHECK(rotor_log_lookup(&log, "c499", 4) == 0 && rotor_log_lookup(&log, "c500", 4) == -1);
    rotor_log_free(&log);
}

typedef struct {
    const char *text;
    int64_t line;
    const char *message;
} wrong_t;

#define W CONSTANT("w", 8)
#define NAMED "{'INSTRUCTION':'CONSTANT','NAME':'w'}\n"
#define CALLED W CALL("f", "'w'", "'a','b'", 1)

static const wrong_t wrong[] = {
    {"nothing\n", 1, "a JSON object"},
    {"[]\n", 1, "a JSON object"},
    {"{}\n", 1, "no INSTRUCTION"},
    {"{'INSTRUCTION':7}\n", 1, "an integer, \"7\"; expected a string"},
    {"{'INSTRUCTION':['CALL']}\n", 1, "an array; expected a string"},
    {"{'INSTRUCTION':'FREE'}\n", 1, "\"FREE\" is unknown; expected CONSTANT, MEMORY, ALIAS"},
    {"{'INSTRUCTION':'call'}\n", 1, "unknown"},
    {"{'INSTRUCTION':'CONSTANT'}\n", 1, "no NAME; expected it in CONSTANT"},
    {"{'INSTRUCTION':'CONSTANT','NAME':null}\n", 1, "expected a string"},
    {"{'INSTRUCTION':'CONSTANT','NAME':'w','NAME':'w'}\n", 1, "stands twice in the line"},
    {"{'a':1,'b':2,'a':3}\n", 1, "\"a\" stands twice in the line"},
    {"{'a':{'b':1}}\n", 1, "flat array"},
    {"{'a':[[1]]}\n", 1, "flat array"},
    {"{'a':01}\n", 1, "leading zeros"},
    {"{'a':-}\n", 1, "a digit"},
    {"{'a':1.}\n", 1, "a digit"},
    {"{'a':1e}\n", 1, "a digit"},
    {"{'a':nul}\n", 1, "expected a string, a number"},
    {"{'a':tru", 1, "expected a string, a number"},
    {"{'a':1,}\n", 1, "a key in double quotes"},
    {"{'a':[1,]}\n", 1, "a string, a number"},
    {"{'a':[1 2]}\n", 1, "a comma or ]"},
    {"{'a':1 'b':2}\n", 1, "a comma or }"},
    {"{'a' 1}\n", 1, "a colon"},
    {"{a:1}\n", 1, "a key in double quotes"},
    {"{'a':1} x\n", 1, "end of the line after the object, found \"x\" at column 9"},
    {"{'a':'\\x'}\n", 1, "an escape of JSON"},
    {"{'a':'\\u12g4'}\n", 1, "an escape of JSON"},
    {"{'a':'\\u0000'}\n", 1, "no null character"},
    {"{'a':'\\ud800'}\n", 1, "surrogate"},
    {"{'a':'\\udc00'}\n", 1, "surrogate"},
    {"{'a':'\\ud800\\u0041'}\n", 1, "surrogate"},
    {"{'a':'\x01'}\n", 1, "control characters to be escaped, found \"\\x01"},
    {"{'a':'\xff'}\n", 1, "UTF-8"},
    {"{'a':'\xc0\x80'}\n", 1, "UTF-8"},
    {"{'a':'\xe0\x80\x80'}\n", 1, "UTF-8"},
    {"{'a':'\xed\xa0\x80'}\n", 1, "UTF-8"},
    {"{'a':'\xf0\x80\x80\x80'}\n", 1, "UTF-8"},
    {"{'a':'\xf4\x90\x80\x80'}\n", 1, "UTF-8"},
    {"{'a':'\xe2\x82\n", 1, "UTF-8"},
    {"{'a':'b\n'}\n", 1, "a closing quote, found the end of the line"},
    {"\n\n{'a':'b", 3, "a closing quote"},
    {"{'a':'b\\", 1, "an escape of JSON"},
    {W "{'INSTRUCTION':'REL", 3, "a closing quote, found the end of the line at column 20"},
    {W W, 3, "\"w\" is defined already"},
    {W RELEASE("w") W, 4, "\"w\" is defined already"},
    {"{'INSTRUCTION':'CONSTANT','NAME':'w'}\n", 1, "the log ends here, expected MEMORY of \"w\""},
    {NAMED RELEASE("w"), 2, "found RELEASE, expected MEMORY"},
    {NAMED RESULT("v", 1, -1), 2,
     "found MEMORY of \"v\", expected MEMORY of \"w\", a CONSTANT"},
    {W RESULT("w", 1, -1), 3, "follows nothing"},
    {W "{'INSTRUCTION':'ALIAS','NAME':'w','ALIAS':'-1'}\n", 3, "follows nothing"},
    {NAMED "{'INSTRUCTION':'MEMORY','NAME':'w'}\n", 2,
     "no MEMORY; expected it in MEMORY"},
    {CONSTANT("w", -1), 2, "\"-1\", too small; expected an integer from 0 to 4398046511104"},
    {CONSTANT("w", 4398046511105), 2, "too large"},
    {CONSTANT("w", 99999999999999999999999999), 2, "too large"},
    {CONSTANT("w", -99999999999999999999999999), 2, "too small"},
    {CONSTANT("w", 12.0), 2, "\"12.0\"; expected an integer"},
    {CONSTANT("w", ), 2, "expected an integer"},
    {CONSTANT("w", -), 2, "expected an integer"},
    {CONSTANT("w", 1 2), 2, "expected an integer"},
    {NAMED "{'INSTRUCTION':'MEMORY','NAME':'w','MEMORY':12.0}\n", 2,
     "a decimal number, \"12.0\"; expected an integer"},
    {NAMED "{'INSTRUCTION':'MEMORY','NAME':'w','MEMORY':[1]}\n", 2,
     "an array; expected an integer"},
    {CALL("f", "'x'", "'a'", 1), 1, "\"x\" in CALL is not defined"},
    {CALL("f", "7", "'a'", 1), 1, "ARGS in CALL has an integer"},
    {CALL("f", "", "7", 1), 1, "RESULT in CALL has an integer"},
    {CALL("f", "", "", 1), 1, "RESULT in CALL is empty"},
    {CALL("f", "", "'a','b','a'", 1), 1, "\"a\" stands twice in RESULT"},
    {W CALL("f", "", "'w'", 1), 3, "\"w\" is defined already"},
    {CALL("f", "", "'a'", -1), 1, "TIME in CALL is \"-1\", too small"},
    {"{'ARGS':'x','INSTRUCTION':'CALL','NAME':'f','RESULT':['a'],'TIME':'1'}\n", 1,
     "a string, \"x\"; expected an array"},
    {"{'ARGS':[],'INSTRUCTION':'CALL','NAME':'f','RESULT':['a']}\n", 1, "no TIME"},
    {"{'ARGS':[],'INSTRUCTION':'CALL','NAME':'f','TIME':'1'}\n", 1, "no RESULT"},
    {"{'INSTRUCTION':'CALL','NAME':'f','RESULT':['a'],'TIME':'1'}\n", 1, "no ARGS"},
    {CALLED, 3, "the log ends here, expected MEMORY of \"a\", result 1 of 2 of CALL \"f\""},
    {CALLED RESULT("a", 1, -1), 5, "expected MEMORY of \"b\", result 2 of 2"},
    {CALLED RESULT("b", 1, -1), 4, "found MEMORY of \"b\", expected MEMORY of \"a\""},
    {CALLED "{'INSTRUCTION':'ALIAS','NAME':'a','ALIAS':'-1'}\n", 4,
     "found ALIAS of \"a\", expected MEMORY of \"a\""},
    {CALLED CONSTANT("v", 1), 4, "found CONSTANT, expected MEMORY of \"a\""},
    {CALLED RESULT("a", 1, -1) RESULT("a", 1, -1), 6, "expected MEMORY of \"b\""},
    {CALLED RESULT("a", 1, 1), 5, "\"1\", too large; expected an integer from -1 to 0"},
    {CALLED RESULT("a", 1, -2), 5, "too small"},
    {CALLED RESULT("a", 1, -1) RESULT("b", -1, -1), 6, "too small"},
    {MUTATE("m", "", "0", 1), 1, "ARGS in MUTATE is empty"},
    {W MUTATE("m", "'w'", "", 1), 3, "MUTATE in MUTATE is empty"},
    {W MUTATE("m", "'w'", "1", 1), 3, "\"1\", too large; expected an integer from 0 to 0"},
    {W MUTATE("m", "'w'", "-1", 1), 3, "too small"},
    {W MUTATE("m", "'w'", "0.5", 1), 3, "expected an integer"},
    {W MUTATE("m", "'w','w'", "0,0", 1), 3, "\"0\" stands twice in MUTATE"},
    {W MUTATE("m", "'v'", "0", 1), 3, "\"v\" in MUTATE is not defined"},
    {W COPY("v", "u"), 3, "\"u\" in COPY is not defined"},
    {W COPY_FROM("v", "w"), 3, "\"v\" in COPY_FROM is not defined"},
    {W COPY_FROM("w", "v"), 3, "\"v\" in COPY_FROM is not defined"},
    {W "{'INSTRUCTION':'COPY','SRC':'w'}\n", 3, "no DST"},
    {W PIN("v"), 3, "\"v\" in PIN is not defined"},
    {W "{'INSTRUCTION':'RELEASE'}\n", 3, "no NAME"},
    {W "{'INSTRUCTION':'ANNOTATE'}\n", 3, "no ANNOTATION"},
    {W "{'INSTRUCTION':'ANNOTATE','ANNOTATION':1}\n", 3, "expected a string"},
    {CALLED ANNOTATE("START"), 4, "found ANNOTATE, expected MEMORY"},
};

static void refuses_what_is_wrong(void) {
    for (size_t k = 0; k < sizeof(wrong) / sizeof(wrong[0]); k++) {
        const char *text = quoted(wrong[k].text);
        const int64_t pieces[] = {1, 7, MOST_TEXT};
        for (int p = 0; p < 3; p++) {
            rotor_log_t log;
            rotor_log_error_t error = {.line = -1};
            int ret = read_text(&log, text, (int64_t)strlen(text), pieces[p], true, &error);
            bool right = ret == ROTOR_ERR_FORMAT && error.line == wrong[k].line &&
                         strstr(error.message, wrong[k].message) != NULL;
            if (!right) {
                fprintf(stderr, "%s  %d, line %lld: %s\n", text, ret, (long long)error.line,
                        error.message);
            }
            CHECK(right);
            check_sound(&log);
            rotor_log_error_t again;
            CHECK(rotor_log_feed(&log, "\n", 1, NULL, &again) == ROTOR_ERR_FORMAT);
            CHECK(again.line == error.line && strcmp(again.message, error.message) == 0);
            CHECK(rotor_log_finish(&log, ROTOR_LEAVE, &again) == ROTOR_ERR_FORMAT);
            rotor_log_free(&log);
        }
    }
}

static void a_failed_line_changes_nothing(void) {
    const char *const lines[] = {CALL("f", "'w','v'", "'b'", 1), MUTATE("m", "'w','a'", "0,2", 1),
                                 MUTATE("m", "'w','a'", "0,1,1", 1), COPY("x", "y"),
                                 COPY_FROM("a", "y"), CALL("f", "'w'", "'x','w'", 1)};
    for (size_t k = 0; k < sizeof(lines) / sizeof(lines[0]); k++) {
        rotor_log_t log;
        rotor_log_error_t error;
        CHECK(rotor_log_init(&log, true) == ROTOR_OK);
        CHECK(feed(&log, quoted(program), &error) == ROTOR_OK);
        CHECK(feed(&log, quoted(lines[k]), &error) == ROTOR_ERR_FORMAT);
        CHECK(error.line == 20 && log.line_count == 19 && log.command_count == 12);
        CHECK(log.graph.operation_count == 4 && log.graph.tensor_count == 5);
        CHECK(rotor_log_references(&log, 0) == 1 && rotor_log_lookup(&log, "x", 1) == -1);
        rotor_log_free(&log);
    }
}

static void check_sums(const char *first, const char *repeated, const char *message) {
    rotor_log_t log;
    rotor_log_error_t error = {.line = -1};
    int ret = ROTOR_OK;
    const char *text = quoted(first);
    CHECK(rotor_log_init(&log, true) == ROTOR_OK);
    CHECK(feed(&log, text, &error) == ROTOR_OK);
    text = quoted(repeated);
    for (int k = 0; k < (1 << 19) && ret == ROTOR_OK; k++) {
        ret = feed(&log, text, &error);
    }
    CHECK(ret == ROTOR_ERR_FORMAT && strstr(error.message, message) != NULL);
    CHECK(log.graph.operation_count >= 1 << 19);
    rotor_log_free(&log);
}

static void sums_stay_within_bounds(void) {
    check_sums(CONSTANT("w", 4398046511104), MUTATE("m", "'w'", "0", 1), "the sizes of the log");
    check_sums(CONSTANT("w", 0) MUTATE("m", "'w'", "0", 1), MUTATE("m", "'w'", "0", 4398046511104), "the times of the log");
}

static void lines_and_keys_are_bounded(void) {
    enum { PIECE = 1 << 20 };
    rotor_log_t log;
    rotor_log_error_t error = {.line = -1};
    char *piece = rotor_malloc(PIECE);
    int fed = 0;
    int ret = ROTOR_OK;

    CHECK(piece != NULL);
    memset(piece, ' ', PIECE);
    CHECK(rotor_log_init(&log, true) == ROTOR_OK);
    for (; fed < 100 && ret == ROTOR_OK; fed++) {
        ret = rotor_log_feed(&log, piece, PIECE, NULL, &error);
    }
    CHECK(ret == ROTOR_ERR_FORMAT && fed == 65 && strstr(error.message, "64 MiB") != NULL);
    rotor_log_free(&log);

    enum { LONG = (64 << 20) + 2 };
    char *longer = rotor_calloc(LONG, 1);
    CHECK(longer != NULL);
    longer[LONG - 1] = '\n';
    CHECK(rotor_log_init(&log, true) == ROTOR_OK);
    CHECK(rotor_log_feed(&log, longer, LONG, NULL, &error) == ROTOR_ERR_FORMAT);
    CHECK(strstr(error.message, "64 MiB") != NULL);
    rotor_log_free(&log);
    rotor_free(longer);

    char text[MOST_TEXT] = "{";
    for (int k = 0; k < 40; k++) {
        snprintf(text + strlen(text), 16, "%s\"k%d\":0", k ? "," : "", k);
    }
    strcat(text, "}\n");
    CHECK(read_text(&log, text, (int64_t)strlen(text), MOST_TEXT, true, &error) ==
          ROTOR_ERR_FORMAT);
    CHECK(strstr(error.message, "\"k32\" is one too many") != NULL);
    rotor_log_free(&log);

    memcpy(piece, "{\"a\":[0", 7);
    for (int k = 7; k + 1 < PIECE; k += 2) {
        memcpy(piece + k, ",0", 2);
    }
    CHECK(rotor_log_init(&log, true) == ROTOR_OK);
    CHECK(rotor_log_feed(&log, piece, PIECE - 1, NULL, &error) == ROTOR_OK);
    for (int k = 0; k + 1 < PIECE; k += 2) {
        memcpy(piece + k, ",0", 2);
    }
    CHECK(rotor_log_feed(&log, piece, PIECE, NULL, &error) == ROTOR_OK);
    CHECK(rotor_log_feed(&log, ",0,0,0,0]}\n", 11, NULL, &error) == ROTOR_ERR_FORMAT);
    CHECK(strstr(error.message, "1048576 entries") != NULL);
    rotor_log_free(&log);
    rotor_free(piece);
}

static bool stop_at_once(void *context, int64_t done, int64_t total) {
    int64_t *asked = context;
    CHECK(done > 0 && done <= total);
    ++*asked;
    return false;
}

static void can_be_interrupted(void) {
    rotor_log_t log;
    rotor_log_error_t error;
    char text[MOST_TEXT];
    int64_t asked = 0;
    const rotor_callback_t callback = {.keep_going = stop_at_once, .context = &asked};
    memset(text, '\n', sizeof(text));
    CHECK(rotor_log_init(&log, true) == ROTOR_OK);
    CHECK(rotor_log_feed(&log, text, 4095, &callback, &error) == ROTOR_OK && asked == 0);
    CHECK(rotor_log_feed(&log, text, MOST_TEXT, &callback, &error) == ROTOR_ERR_INTERRUPTED);
    CHECK(asked == 1 && log.line_count == 4095 + 4096);
    CHECK(rotor_log_feed(&log, text, 1, NULL, &error) == ROTOR_ERR_FORMAT);
    CHECK(strstr(error.message, "interrupted") != NULL);
    rotor_log_free(&log);
}

/* Every allocation fails in turn: the status says so, and nothing is half done. */
static void no_memory(void) {
    char text[MOST_TEXT];
    rotor_log_t log;
    rotor_log_error_t error;
    int64_t n = 0;
    int ret = ROTOR_ERR_NO_MEMORY;

    strcpy(text, quoted(program));
    strcat(text, quoted(awkward));
    int64_t length = (int64_t)strlen(text);
    for (int64_t piece = 5; piece <= MOST_TEXT; piece += MOST_TEXT - 5) {
        for (n = 1, ret = ROTOR_ERR_NO_MEMORY; ret != ROTOR_OK && n < 4000; n++) {
            rotor_testing_fail_after(n);
            ret = read_text(&log, text, length, piece, true, &error);
            rotor_testing_fail_after(0);
            CHECK(ret == ROTOR_OK || ret == ROTOR_ERR_NO_MEMORY);
            if (log.reader != NULL && !log.is_finished) {
                check_sound(&log);
            }
            rotor_log_free(&log);
        }
        CHECK(ret == ROTOR_OK && n > 15);
    }
    rotor_testing_fail_after(1);
    CHECK(rotor_log_init(&log, true) == ROTOR_ERR_NO_MEMORY);
    rotor_testing_fail_after(0);
    rotor_log_free(&log);
    CHECK(rotor_log_init(&log, true) == ROTOR_OK);
    rotor_testing_fail_after(1);
    CHECK(rotor_log_finish(&log, ROTOR_PREALLOCATE, &error) == ROTOR_ERR_NO_MEMORY);
    rotor_testing_fail_after(0);
    CHECK(!log.is_finished && log.output_bytes == 0);
    rotor_log_free(&log);
}

/* From 0 to bound - 1. */
static int64_t below(uint64_t *state, int64_t bound) {
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (int64_t)((*state >> 33) % (uint64_t)bound);
}

/* One random change of a text: of bytes, or of lines; of at most MOST_TEXT bytes. */
static size_t mutate(uint64_t *state, char *text, size_t length) {
    static const char alphabet[] = "{}[]\",:\\u0-1e.N\n\r \x80\xff";
    static char copy[MOST_TEXT];
    size_t at = (size_t)below(state, (int64_t)length);
    size_t from = at;
    size_t size = 1 + (size_t)below(state, 20);

    if (below(state, 3) == 0) {
        while (from > 0 && text[from - 1] != '\n') {
            from--;
        }
        const char *end = memchr(text + from, '\n', length - from);
        size = end == NULL ? length - from : (size_t)(end - (text + from)) + 1;
    }
    size = size < length - from ? size : length - from;
    memcpy(copy, text, length);
    switch (below(state, 5)) {
    case 0:
        text[at] = alphabet[below(state, sizeof(alphabet) - 1)];
        return length;
    case 1:
        memcpy(text + from, copy + from + size, length - from - size);
        return length - size;
    case 2:
        if (length + size >= MOST_TEXT) {
            return length;
        }
        memcpy(text + from + size, copy + from, length - from);
        return length + size;
    case 3: {
        size_t to = (size_t)below(state, (int64_t)(length - size + 1));
        memcpy(text + to, copy + from, size);
        return length;
    }
    default:
        return below(state, 4) == 0 ? at : length;
    }
}

static void fuzz(void) {
    char text[MOST_TEXT];
    uint64_t state = 2020;
    int64_t refused = 0;
    enum { ROUNDS = 20000 };

    for (int round = 0; round < ROUNDS; round++) {
        rotor_log_t log;
        rotor_log_error_t error = {.line = -1, .message = ""};
        strcpy(text, quoted(program));
        strcat(text, quoted(awkward));
        size_t length = strlen(text);
        for (int64_t k = below(&state, 4); k >= 0 && length > 0; k--) {
            length = mutate(&state, text, length);
        }
        int64_t piece = 1 + below(&state, 200);
        int ret = read_text(&log, text, (int64_t)length, piece, round % 2 == 0, &error);
        CHECK(ret == ROTOR_OK || ret == ROTOR_ERR_FORMAT);
        if (ret == ROTOR_ERR_FORMAT) {
            CHECK(error.line > 0 && strstr(error.message, "expected") != NULL);
            refused++;
        }
        check_sound(&log);
        rotor_log_free(&log);
    }
    CHECK(refused > ROUNDS / 4 && refused < ROUNDS);
}

static const test_case_t cases[] = {
    {"reads_every_instruction", reads_every_instruction},
    {"reads_json_as_it_may_be_written", reads_json_as_it_may_be_written},
    {"start_drops_what_came_before", start_drops_what_came_before},
    {"ends_on_three_conditions", ends_on_three_conditions},
    {"grows_while_it_is_read", grows_while_it_is_read},
    {"refuses_what_is_wrong", refuses_what_is_wrong},
    {"a_failed_line_changes_nothing", a_failed_line_changes_nothing},
    {"sums_stay_within_bounds", sums_stay_within_bounds},
    {"lines_and_keys_are_bounded", lines_and_keys_are_bounded},
    {"can_be_interrupted", can_be_interrupted},
    {"no_memory", no_memory},
    {"fuzz", fuzz},
};

TEST_MAIN(cases)
