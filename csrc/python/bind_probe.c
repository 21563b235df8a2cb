#include "binding.h"

int rotor_add_probe(PyObject *module) {
    (void)module;
    return 0;
}
