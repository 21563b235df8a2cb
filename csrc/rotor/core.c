#include "core.h"

#include <stdlib.h>
#include <string.h>

const char *rotor_strerror(int status) {
    static const struct {
        int status;
        const char *text;
    } texts[] = {
        {ROTOR_OK, "no error"},
        {ROTOR_ERR_NO_MEMORY, "there is not enough memory"},
        {ROTOR_ERR_INTERRUPTED, "the computation was interrupted"},
        {ROTOR_ERR_OVERFLOW, "a sum of sizes or times does not fit in 64 bits"},
        {ROTOR_ERR_BAD_LENGTH, "a chain needs at least one stage"},
        {ROTOR_ERR_NEGATIVE_SIZE, "a size is negative"},
        {ROTOR_ERR_NEGATIVE_TIME, "a time is negative"},
        {ROTOR_ERR_BACKWARD_TMP,
         "a backward temporary is below minus the gradient of its stage's input"},
        {ROTOR_ERR_TOO_LARGE, "a size or time is too large"},
        {ROTOR_ERR_BAD_SLOTS, "the number of memory slots must be positive"},
        {ROTOR_ERR_BAD_BUDGET, "the budget must be positive"},
        {ROTOR_ERR_INFEASIBLE, "no schedule fits in the budget"},
        {ROTOR_ERR_TABLE_TOO_LARGE,
         "the table of the solver would need more memory than it may use"},
        {ROTOR_ERR_BAD_OPERATION,
         "the operation is unknown, or names a stage that the chain does not have"},
        {ROTOR_ERR_NO_INPUT, "the input of the operation is not in memory"},
        {ROTOR_ERR_NO_TAPE, "the stage was not run with Fe before its backward"},
        {ROTOR_ERR_NO_GRADIENT, "the gradient of the stage's output is not in memory"},
        {ROTOR_ERR_TWICE, "the operation was already done and its result is still in memory"},
        {ROTOR_ERR_ONCE, "the stage may run forward only once, by Fe"},
        {ROTOR_ERR_INCOMPLETE, "the sequence ends before the backward of stage 0"},
        {ROTOR_ERR_IO, "a file could not be read or was not understood"},
        {ROTOR_ERR_UNAVAILABLE, "this machine does not offer what was asked for"},
        {ROTOR_ERR_FORMAT, "the log is malformed"},
        {ROTOR_ERR_BAD_HEURISTIC, "the runtime does not keep what the heuristic needs"},
        {ROTOR_ERR_BAD_STATE, "a command asks for a tensor that was freed for good"},
    };
    for (size_t k = 0; k < sizeof(texts) / sizeof(texts[0]); k++) {
        if (texts[k].status == status) {
            return texts[k].text;
        }
    }
    return "unknown status";
}

#ifdef ROTOR_TESTING
static int64_t allocations_left;
static int64_t allocations_live;

void rotor_testing_fail_after(int64_t n) { allocations_left = n; }

int64_t rotor_testing_live(void) { return allocations_live; }

static bool may_allocate(void) {
    if (allocations_left == 0) {
        return true;
    }
    if (allocations_left == 1) {
        return false;
    }
    allocations_left--;
    return true;
}

static void count(int64_t change) { allocations_live += change; }
#else
static bool may_allocate(void) { return true; }

static void count(int64_t change) { (void)change; }
#endif

void *rotor_malloc(size_t size) {
    void *block = may_allocate() ? malloc(size == 0 ? 1 : size) : NULL;
    count(block != NULL);
    return block;
}

void *rotor_calloc(size_t count_of, size_t size) {
    bool empty = count_of == 0 || size == 0;
    void *block = may_allocate() ? calloc(empty ? 1 : count_of, empty ? 1 : size) : NULL;
    count(block != NULL);
    return block;
}

void *rotor_realloc(void *block, size_t size) {
    void *moved = may_allocate() ? realloc(block, size == 0 ? 1 : size) : NULL;
    count(moved != NULL && block == NULL);
    return moved;
}

void rotor_free(void *block) {
    count(block == NULL ? 0 : -1);
    free(block);
}

int rotor_array_bytes(int64_t count_of, size_t size, size_t *bytes) {
    if (count_of < 0 || (size != 0 && (uint64_t)count_of > SIZE_MAX / size)) {
        return ROTOR_ERR_OVERFLOW;
    }
    *bytes = (size_t)count_of * size;
    return ROTOR_OK;
}

void *rotor_malloc_array(int64_t count_of, size_t size) {
    size_t bytes;
    return rotor_array_bytes(count_of, size, &bytes) == ROTOR_OK ? rotor_malloc(bytes) : NULL;
}

int rotor_malloc_part(int64_t count_of, size_t size, int64_t most, int64_t *taken, void *place) {
    size_t bytes;
    int ret = rotor_array_bytes(count_of, size, &bytes);
    if (ret != ROTOR_OK || bytes > (size_t)INT64_MAX || (int64_t)bytes > most - *taken) {
        return ROTOR_ERR_TABLE_TOO_LARGE;
    }
    void *block = rotor_malloc(bytes);
    if (block == NULL) {
        return ROTOR_ERR_NO_MEMORY;
    }
    memcpy(place, &block, sizeof(block));
    *taken += (int64_t)bytes;
    return ROTOR_OK;
}

int rotor_arrays(bool is_new, const rotor_array_t *arrays, size_t count_of) {
    int ret = ROTOR_OK;
    for (size_t k = 0; k < count_of; k++) {
        void *block;
        size_t bytes = 0;
        memcpy(&block, arrays[k].place, sizeof(block));
        if (!is_new) {
            rotor_free(block);
        }
        bool fits = rotor_array_bytes(arrays[k].count, arrays[k].size, &bytes) == ROTOR_OK;
        block = is_new && fits ? rotor_calloc(bytes, 1) : NULL;
        ret = is_new && block == NULL ? ROTOR_ERR_NO_MEMORY : ret;
        memcpy(arrays[k].place, &block, sizeof(block));
    }
    return ret;
}

int rotor_ask(const rotor_callback_t *callback, int64_t done, int64_t total) {
    if (callback == NULL || callback->keep_going == NULL) {
        return ROTOR_OK;
    }
    return callback->keep_going(callback->context, done, total) ? ROTOR_OK : ROTOR_ERR_INTERRUPTED;
}
