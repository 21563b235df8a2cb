/* The type Kernel: the facts of an operator that a Handler needs. */
#include "bind_dtr_private.h"

#include <structmember.h>

/* The bits of positions; false with an exception. */
static bool read_positions(PyObject *positions, uint64_t *bits) {
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(positions); k++) {
        int64_t position;
        if (!py_get_integer(PyTuple_GET_ITEM(positions, k), "a position", 0, 63, &position)) {
            return false;
        }
        *bits |= UINT64_C(1) << position;
    }
    return true;
}

#define KERNEL_OBJECTS(entry)                                                                      \
    entry(operator_) entry(name) entry(call) entry(replay) entry(in_place) entry(written_names)

static PyObject *py_kernel_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"operator", "name",      "call",    "replay",  "in_place", "written",
                            "written_names", "hidden", "hidden_if", "kept_if", "traits", NULL};
    PyObject *operator_, *name, *call, *replay, *in_place, *written, *written_names, *hidden;
    int hidden_if, kept_if, traits;
    uint64_t bits[2] = {0, 0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OUOOOO!O!O!iii", names, &operator_, &name,
                                     &call, &replay, &in_place, &PyTuple_Type, &written,
                                     &PyTuple_Type, &written_names, &PyTuple_Type, &hidden,
                                     &hidden_if, &kept_if, &traits) ||
        !read_positions(written, &bits[0]) || !read_positions(hidden, &bits[1])) {
        return NULL;
    }
    py_kernel_t *self = (py_kernel_t *)type->tp_alloc(type, 0);
    if (self != NULL) {
        KERNEL_OBJECTS(PY_HOLD_FIELD)
        self->written = bits[0];
        self->hidden = bits[1];
        self->hidden_if = hidden_if;
        self->kept_if = kept_if;
        self->traits = traits;
    }
    return (PyObject *)self;
}

static PyMemberDef kernel_members[] = {
    {"operator", T_OBJECT, offsetof(py_kernel_t, operator_), READONLY, "What Python knows."},
    {NULL, 0, 0, 0, NULL},
};

static int py_kernel_traverse(PyObject *object, visitproc visit, void *arg) {
    py_kernel_t *self = (py_kernel_t *)object;
    Py_VISIT(Py_TYPE(object));
    KERNEL_OBJECTS(PY_VISIT_FIELD)
    return 0;
}

static int py_kernel_clear(PyObject *object) {
    py_kernel_t *self = (py_kernel_t *)object;
    KERNEL_OBJECTS(PY_CLEAR_FIELD)
    return 0;
}

PyDoc_STRVAR(kernel_doc,
             "Kernel(operator, name, call, replay, in_place, written, written_names, hidden, "
             "hidden_if, kept_if, traits)\n--\n\n"
             "The facts of an operator that a Handler needs; traits: the sum of TRAIT_... of this "
             "module.");

static PyType_Slot kernel_slots[] = {
    {Py_tp_new, py_kernel_new},
    {Py_tp_dealloc, py_dealloc},
    {Py_tp_traverse, py_kernel_traverse},
    {Py_tp_clear, py_kernel_clear},
    {Py_tp_members, kernel_members},
    {Py_tp_doc, (void *)kernel_doc},
    {0, NULL},
};

int py_add_kernel(PyObject *module) {
    if (PyModule_AddIntMacro(module, TRAIT_VIEW) != 0 ||
        PyModule_AddIntMacro(module, TRAIT_FRESH) != 0 ||
        PyModule_AddIntMacro(module, TRAIT_RANDOM) != 0 ||
        PyModule_AddIntMacro(module, TRAIT_CUSTOM) != 0 ||
        PyModule_AddIntMacro(module, TRAIT_VARIES) != 0 ||
        PyModule_AddIntMacro(module, TRAIT_RESHAPES) != 0 ||
        PyModule_AddIntMacro(module, TRAIT_SIZES_BY_VALUE) != 0 ||
        PyModule_AddIntMacro(module, TRAIT_POINTWISE) != 0) {
        return -1;
    }
    return py_add_type(module, "rotor._core.Kernel", sizeof(py_kernel_t), Py_TPFLAGS_HAVE_GC,
                       kernel_slots, &py_state(module)->kernel_type);
}
