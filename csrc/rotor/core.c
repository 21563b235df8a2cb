#include "core.h"

#include <stdlib.h>
#include <string.h>

const char *rotor_strerror(int status) {
    switch (status) {
    case ROTOR_OK:
        return "no error";
    case ROTOR_ERR_NO_MEMORY:
        return "there is not enough memory";
    case ROTOR_ERR_INTERRUPTED:
        return "the computation was interrupted";
    case ROTOR_ERR_OVERFLOW:
        return "a sum of sizes or times does not fit in 64 bits";
    case ROTOR_ERR_BAD_LENGTH:
        return "a chain needs at least one stage";
    case ROTOR_ERR_NEGATIVE_SIZE:
        return "a size is negative";
    case ROTOR_ERR_NEGATIVE_TIME:
        return "a time is negative";
    case ROTOR_ERR_BACKWARD_TMP:
        return "a backward temporary is below minus the gradient of its stage's input";
    case ROTOR_ERR_TOO_LARGE:
        return "a size or time is too large";
    case ROTOR_ERR_BAD_SLOTS:
        return "the number of memory slots must be positive";
    case ROTOR_ERR_BAD_BUDGET:
        return "the budget must be positive";
    case ROTOR_ERR_INFEASIBLE:
        return "no schedule fits in the budget";
    case ROTOR_ERR_TABLE_TOO_LARGE:
        return "the table of the solver would need more memory than it may use";
    case ROTOR_ERR_BAD_OPERATION:
        return "the operation is unknown, or names a stage that the chain does not have";
    case ROTOR_ERR_NO_INPUT:
        return "the input of the operation is not in memory";
    case ROTOR_ERR_NO_TAPE:
        return "the stage was not run with Fe before its backward";
    case ROTOR_ERR_NO_GRADIENT:
        return "the gradient of the stage's output is not in memory";
    case ROTOR_ERR_TWICE:
        return "the operation was already done and its result is still in memory";
    case ROTOR_ERR_ONCE:
        return "the stage may run forward only once, by Fe";
    case ROTOR_ERR_INCOMPLETE:
        return "the sequence ends before the backward of stage 0";
    case ROTOR_ERR_IO:
        return "a file could not be read or was not understood";
    case ROTOR_ERR_UNAVAILABLE:
        return "this machine does not offer what was asked for";
    case ROTOR_ERR_FORMAT:
        return "the log is malformed";
    case ROTOR_ERR_BAD_HEURISTIC:
        return "the runtime does not keep what the heuristic needs";
    case ROTOR_ERR_BAD_STATE:
        return "a command asks for a tensor that was freed for good";
    default:
        return "unknown status";
    }
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
