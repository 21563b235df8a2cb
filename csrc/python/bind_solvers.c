#include "binding.h"

int rotor_add_solvers(PyObject *module) {
    (void)module;
    return 0;
}
