#include "binding.h"

int rotor_add_classic(PyObject *module) {
    (void)module;
    return 0;
}
