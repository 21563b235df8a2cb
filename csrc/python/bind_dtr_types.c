#include "bind_dtr_book.h"

#include <structmember.h>

/* StorageRef */

PyObject *py_ref_make(PyTypeObject *type, PyObject *storage, PyObject *gone) {
    PyObject *args = PyTuple_Pack(2, storage, gone);
    PyObject *object = args == NULL ? NULL : _PyWeakref_RefType.tp_new(type, args, NULL);
    Py_XDECREF(args);
    if (object != NULL) {
        py_ref_t *ref = (py_ref_t *)object;
        ref->storage = storage;
        ref->node = -1;
        ref->next_gone = NULL;
        ref->is_gone = ref->is_foreign = ref->stays = 0;
    }
    return object;
}

static int py_ref_traverse(PyObject *object, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(object));
    return _PyWeakref_RefType.tp_traverse(object, visit, arg);
}

static void py_ref_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    _PyWeakref_RefType.tp_dealloc(object);
    Py_DECREF(type);
}

static PyMemberDef ref_members[] = {
    {"node", T_LONGLONG, offsetof(py_ref_t, node), 0, "In the book, -1 for none."},
    {"is_foreign", T_BOOL, offsetof(py_ref_t, is_foreign), READONLY,
     "In memory before the book began."},
    {NULL, 0, 0, 0, NULL},
};

static PyObject *py_ref_key(PyObject *object, void *closure) {
    return PyLong_FromVoidPtr((void *)(uintptr_t)((py_ref_t *)object)->storage);
}

static PyGetSetDef ref_getset[] = {
    {"key", py_ref_key, NULL, "A number that no other storage has while this one lives.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyDoc_STRVAR(ref_doc,
             "A weak reference to a storage that outlives its tensors in Python, with its "
             "numbers; a Handler makes it, and hears when the storage dies.");

static PyType_Slot ref_slots[] = {
    {Py_tp_dealloc, py_ref_dealloc},
    {Py_tp_traverse, py_ref_traverse},
    {Py_tp_members, ref_members},
    {Py_tp_getset, ref_getset},
    {Py_tp_doc, (void *)ref_doc},
    {0, NULL},
};

static PyType_Spec ref_spec = {
    .name = "rotor._core.StorageRef",
    .basicsize = sizeof(py_ref_t),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_HAVE_GC |
             Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = ref_slots,
};

/* Needs */

static PyObject *py_needs_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"made_bytes", "workspace_bytes", "is_measured", NULL};
    long long made, workspace;
    int is_measured;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "LLp", names, &made, &workspace,
                                     &is_measured)) {
        return NULL;
    }
    py_needs_t *self = (py_needs_t *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->made_bytes = made;
        self->workspace_bytes = workspace;
        self->cost_ns = COST_UNKNOWN;
        self->large_blocks = -1;
        self->is_measured = is_measured != 0;
    }
    return (PyObject *)self;
}

void py_pattern_release(py_pattern_t *pattern) {
    if (pattern == NULL || --pattern->references > 0) {
        return;
    }
    Py_CLEAR(pattern->args);
    Py_CLEAR(pattern->kwargs);
    for (int64_t k = 0; k < 4 * pattern->count; k++) {
        Py_CLEAR(pattern->layouts[k]);
    }
    PyMem_Free(pattern);
}

static void py_needs_dealloc(PyObject *object) {
    py_pattern_release(((py_needs_t *)object)->pattern);
    py_dealloc(object);
}

static PyMemberDef needs_members[] = {
    {"made_bytes", T_LONGLONG, offsetof(py_needs_t, made_bytes), 0, "The storages that it makes."},
    {"workspace_bytes", T_LONGLONG, offsetof(py_needs_t, workspace_bytes), 0,
     "The most that it has in use beside them."},
    {"cost_ns", T_LONGLONG, offsetof(py_needs_t, cost_ns), 0,
     "Nanoseconds of an accelerator's time; below 0 while they are not known."},
    {"is_measured", T_BOOL, offsetof(py_needs_t, is_measured), 0, "False while these are guesses."},
    {NULL, 0, 0, 0, NULL},
};

PyDoc_STRVAR(needs_doc, "Needs(made_bytes, workspace_bytes, is_measured)\n--\n\n"
                        "The memory that an operator takes on arguments of one layout.");

static PyType_Slot needs_slots[] = {
    {Py_tp_new, py_needs_new},
    {Py_tp_dealloc, py_needs_dealloc},
    {Py_tp_members, needs_members},
    {Py_tp_doc, (void *)needs_doc},
    {0, NULL},
};

int py_add_dtr_types(PyObject *module) {
    py_state_t *state = py_state(module);
    if (py_add_type(module, "rotor._core.Needs", sizeof(py_needs_t), 0, needs_slots,
                    &state->needs_type) != 0) {
        return -1;
    }
    PyObject *bases = PyTuple_Pack(1, (PyObject *)&_PyWeakref_RefType);
    state->ref_type =
        bases == NULL ? NULL : (PyTypeObject *)PyType_FromModuleAndSpec(module, &ref_spec, bases);
    Py_XDECREF(bases);
    return state->ref_type == NULL ? -1 : PyModule_AddType(module, state->ref_type);
}
