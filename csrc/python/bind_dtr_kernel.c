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
        self->operator_ = Py_NewRef(operator_);
        self->name = Py_NewRef(name);
        self->call = Py_NewRef(call);
        self->replay = Py_NewRef(replay);
        self->in_place = Py_NewRef(in_place);
        self->written_names = Py_NewRef(written_names);
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
    Py_VISIT(self->operator_);
    Py_VISIT(self->name);
    Py_VISIT(self->call);
    Py_VISIT(self->replay);
    Py_VISIT(self->in_place);
    Py_VISIT(self->written_names);
    return 0;
}

static int py_kernel_clear(PyObject *object) {
    py_kernel_t *self = (py_kernel_t *)object;
    Py_CLEAR(self->operator_);
    Py_CLEAR(self->name);
    Py_CLEAR(self->call);
    Py_CLEAR(self->replay);
    Py_CLEAR(self->in_place);
    Py_CLEAR(self->written_names);
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
    static const struct {
        const char *name;
        int value;
    } traits[] = {
        {"TRAIT_VIEW", TRAIT_VIEW},
        {"TRAIT_FRESH", TRAIT_FRESH},
        {"TRAIT_RANDOM", TRAIT_RANDOM},
        {"TRAIT_CUSTOM", TRAIT_CUSTOM},
        {"TRAIT_VARIES", TRAIT_VARIES},
        {"TRAIT_RESHAPES", TRAIT_RESHAPES},
        {"TRAIT_SIZES_BY_VALUE", TRAIT_SIZES_BY_VALUE},
        {"TRAIT_POINTWISE", TRAIT_POINTWISE},
    };
    for (size_t k = 0; k < sizeof(traits) / sizeof(traits[0]); k++) {
        if (PyModule_AddIntConstant(module, traits[k].name, traits[k].value) != 0) {
            return -1;
        }
    }
    return py_add_type(module, "rotor._core.Kernel", sizeof(py_kernel_t), Py_TPFLAGS_HAVE_GC,
                       kernel_slots, &py_state(module)->kernel_type);
}
