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
    static int (*const areas[])(PyObject *) = {
        py_add_chain,    py_add_solvers,    py_add_classic,   py_add_probe,   py_add_timing,
        py_add_log,      py_add_log_writer, py_add_candidate, py_add_replay,  py_add_planner,
        py_add_recorder, py_add_node_state, py_add_dtr_types, py_add_kernel,  py_add_record,
        py_add_handler,  py_add_modes,      py_add_checksum,   py_add_blocks,   py_add_tier,
        py_add_pending, py_add_live,
    };
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
