#include "support.h"

static int load_errors(PyObject *module) {
    py_state_t *state = py_state(module);
    PyObject *errors = PyImport_ImportModule("rotor.errors");
    if (errors == NULL) {
        return -1;
    }
    state->infeasible_error = PyObject_GetAttrString(errors, "InfeasibleError");
    state->invalid_sequence_error = PyObject_GetAttrString(errors, "InvalidSequenceError");
    state->malformed_log_error = PyObject_GetAttrString(errors, "MalformedLogError");
    Py_DECREF(errors);
    return state->infeasible_error == NULL || state->invalid_sequence_error == NULL ||
                   state->malformed_log_error == NULL
               ? -1
               : 0;
}

static int execute(PyObject *module) {
#define AS_FUNCTION(area) py_add_##area,
    static int (*const areas[])(PyObject *) = {PY_AREAS(AS_FUNCTION)};
#undef AS_FUNCTION
    int ret = load_errors(module);
    for (size_t k = 0; ret == 0 && k < sizeof(areas) / sizeof(areas[0]); k++) {
        ret = areas[k](module);
    }
    return ret;
}

static int traverse(PyObject *module, visitproc visit, void *arg) {
    py_state_t *state = py_state(module);
#define VISIT(type, name) Py_VISIT(state->name);
    PY_STATE_OBJECTS(VISIT)
#undef VISIT
    return 0;
}

static int clear(PyObject *module) {
    py_state_t *state = py_state(module);
#define CLEAR(type, name) Py_CLEAR(state->name);
    PY_STATE_OBJECTS(CLEAR)
#undef CLEAR
    return 0;
}

static void release(void *module) { (void)clear((PyObject *)module); }

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, execute},
    {0, NULL},
};

PyDoc_STRVAR(documentation, "The C core of rotor: chains, sequences, solvers, probes.");

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,  .m_name = "rotor._core",
    .m_doc = documentation, .m_size = sizeof(py_state_t),
    .m_slots = slots,       .m_traverse = traverse,
    .m_clear = clear,       .m_free = release,
};

PyMODINIT_FUNC PyInit__core(void);

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&module_def); }
