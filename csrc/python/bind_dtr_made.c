#include "bind_dtr_private.h"

#include <string.h>

void py_made_init(py_made_t *made) {
    made->places = made->few_places;
    made->bytes = made->few_bytes;
    made->origins = made->few_numbers;
    made->indices = made->few_numbers + ROTOR_FEW;
    made->nodes = made->few_numbers + 2 * ROTOR_FEW;
    made->count = made->largest = 0;
    made->capacity = ROTOR_FEW;
    made->blocks[0] = made->blocks[1] = made->blocks[2] = NULL;
}

void py_made_free(py_made_t *made) {
    for (int64_t k = 0; k < made->count; k++) {
        Py_DECREF(made->places[k]);
    }
    for (int k = 0; k < 3; k++) {
        PyMem_Free(made->blocks[k]);
    }
}

static int grow_made(py_made_t *made) {
    size_t count = (size_t)made->count;
    size_t capacity = 4 * count;
    void *blocks[3] = {PyMem_Calloc(capacity, sizeof(*made->places)),
                       PyMem_Calloc(capacity, sizeof(*made->bytes)),
                       PyMem_Calloc(3 * capacity, sizeof(*made->origins))};
    if (blocks[0] == NULL || blocks[1] == NULL || blocks[2] == NULL) {
        for (int k = 0; k < 3; k++) {
            PyMem_Free(blocks[k]);
        }
        PyErr_NoMemory();
        return -1;
    }
    int32_t *numbers = blocks[2];
    memcpy(blocks[0], made->places, count * sizeof(*made->places));
    memcpy(blocks[1], made->bytes, count * sizeof(*made->bytes));
    memcpy(numbers, made->origins, count * sizeof(*numbers));
    memcpy(numbers + capacity, made->indices, count * sizeof(*numbers));
    made->places = blocks[0];
    made->bytes = blocks[1];
    made->origins = numbers;
    made->indices = numbers + capacity;
    made->nodes = numbers + 2 * capacity;
    made->capacity = (int64_t)capacity;
    for (int k = 0; k < 3; k++) {
        PyMem_Free(made->blocks[k]);
        made->blocks[k] = blocks[k];
    }
    return 0;
}

int py_made_add(py_made_t *made, PyObject *ref, int64_t bytes, int32_t index, int32_t origin) {
    if (made->count == made->capacity && grow_made(made) != 0) {
        return -1;
    }
    made->places[made->count] = Py_NewRef(ref);
    made->bytes[made->count] = bytes;
    made->indices[made->count] = index;
    made->origins[made->count++] = origin;
    made->largest = rotor_max(made->largest, bytes);
    return 0;
}
