/* The types Handler and Kernel, by which Python uses bind_dtr_handler.c. */
#include "bind_dtr_private.h"

#include <structmember.h>

#include "core.h"

/* Kernel */

static PyObject *py_kernel_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"operator", "call",      "in_place",       "written",
                            "is_view",  "is_simple", "sizes_by_value", NULL};
    PyObject *operator_, *call, *in_place, *written;
    int is_view, is_simple, sizes_by_value;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOO!ppp", names, &operator_, &call, &in_place,
                                     &PyTuple_Type, &written, &is_view, &is_simple,
                                     &sizes_by_value)) {
        return NULL;
    }
    py_kernel_t *self = (py_kernel_t *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->operator_ = Py_NewRef(operator_);
        self->call = Py_NewRef(call);
        self->in_place = Py_NewRef(in_place);
        self->written = Py_NewRef(written);
        self->is_view = is_view != 0;
        self->is_simple = is_simple != 0;
        self->sizes_by_value = sizes_by_value != 0;
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
    Py_VISIT(self->call);
    Py_VISIT(self->in_place);
    Py_VISIT(self->written);
    return 0;
}

static int py_kernel_clear(PyObject *object) {
    py_kernel_t *self = (py_kernel_t *)object;
    Py_CLEAR(self->operator_);
    Py_CLEAR(self->call);
    Py_CLEAR(self->in_place);
    Py_CLEAR(self->written);
    return 0;
}

static void py_kernel_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    (void)py_kernel_clear(object);
    type->tp_free(object);
    Py_DECREF(type);
}

PyDoc_STRVAR(kernel_doc,
             "Kernel(operator, call, in_place, written, is_view, is_simple, sizes_by_value)\n--\n\n"
             "The facts of an operator that a Handler needs.");

static PyType_Slot kernel_slots[] = {
    {Py_tp_new, py_kernel_new},
    {Py_tp_dealloc, py_kernel_dealloc},
    {Py_tp_traverse, py_kernel_traverse},
    {Py_tp_clear, py_kernel_clear},
    {Py_tp_members, kernel_members},
    {Py_tp_doc, (void *)kernel_doc},
    {0, NULL},
};

static PyType_Spec kernel_spec = {
    .name = "rotor._core.Kernel",
    .basicsize = sizeof(py_kernel_t),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = kernel_slots,
};

/* Handler */

PyDoc_STRVAR(run_doc, "run($self, session, func, types, args, kwargs, /)\n--\n\n"
                      "Run one operator of the program; what is unusual goes to session._handle.");

static PyObject *py_handler_run(METHOD_ARGUMENTS) {
    (void)type;
    if (py_book_expect("run", count, 5, names) != 0) {
        return NULL;
    }
    if (!PyTuple_Check(args[3]) || (args[4] != Py_None && !PyDict_Check(args[4]))) {
        PyErr_SetString(PyExc_TypeError, "args must be a tuple, kwargs a dictionary or None");
        return NULL;
    }
    return py_operator_run((py_handler_t *)object, args);
}

PyDoc_STRVAR(signature_doc, "signature($self, kernel, args, kwargs, /)\n--\n\n"
                            "Return the key of an operator on arguments of one layout, or None "
                            "where it has none; floating-point numbers are not part of it.");

static PyObject *py_handler_signature(METHOD_ARGUMENTS) {
    py_handler_t *self = (py_handler_t *)object;
    (void)type;
    if (py_book_expect("signature", count, 3, names) != 0) {
        return NULL;
    }
    if (self->is_busy || Py_TYPE(args[0]) != self->kernel_type || !PyTuple_Check(args[1]) ||
        !PyDict_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "signature() takes a Kernel, a tuple and a dictionary");
        return NULL;
    }
    self->is_busy = true;
    enum py_reading found = py_operator_read(self, (py_kernel_t *)args[0], args[1], args[2]);
    PyObject *key = NULL;
    if (found == READ_OK) {
        key = PyBytes_FromStringAndSize((const char *)self->key, (Py_ssize_t)self->key_count * 8);
    } else if (found == READ_SLOW) {
        key = Py_NewRef(Py_None);
    }
    py_operator_clear(self);
    self->is_busy = false;
    return key;
}

PyDoc_STRVAR(catch_up_doc, "catch_up($self, session, /)\n--\n\n"
                           "Run again what the operation that has begun needs; what is unusual "
                           "goes to session._replay.");

static PyObject *py_handler_catch_up(METHOD_ARGUMENTS) {
    (void)type;
    if (py_book_expect("catch_up", count, 1, names) != 0 ||
        py_operator_catch_up((py_handler_t *)object, args[0]) != 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(gone_doc, "gone($self, ref, /)\n--\n\nNote that a storage died.");

static PyObject *py_handler_gone(PyObject *object, PyObject *const *args, Py_ssize_t count) {
    py_handler_t *self = (py_handler_t *)object;
    if (count != 1 || Py_TYPE(args[0]) != self->ref_type) {
        PyErr_SetString(PyExc_TypeError, "gone() takes a StorageRef");
        return NULL;
    }
    py_ref_t *ref = (py_ref_t *)args[0];
    if (PyDict_GetItemWithError(self->table, ref->key) == (PyObject *)ref) {
        Py_INCREF(ref);
        int ret = PyDict_DelItem(self->table, ref->key);
        Py_DECREF(ref);
        if (ret != 0) {
            return NULL;
        }
    }
    if (self->is_open) {
        py_book_note_gone(self->recorder, ref);
    }
    Py_RETURN_NONE;
}

static PyObject *py_handler_observer(PyObject *object, void *closure) {
    (void)closure;
    return Py_NewRef(((py_handler_t *)object)->recorder->observer);
}

static int py_handler_observe(PyObject *object, PyObject *value, void *closure) {
    py_recorder_t *recorder = ((py_handler_t *)object)->recorder;
    (void)closure;
    if (py_book_forget_gone(recorder) != 0) {
        return -1;
    }
    Py_XSETREF(recorder->observer, Py_NewRef(value == NULL ? Py_None : value));
    return 0;
}

static PyGetSetDef handler_getset[] = {
    {"observer", py_handler_observer, py_handler_observe,
     "Hears of everything; Python handles all operators then.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef handler_methods[] = {
    {"run", (PyCFunction)(void (*)(void))py_handler_run,
     METH_METHOD | METH_FASTCALL | METH_KEYWORDS, run_doc},
    {"signature", (PyCFunction)(void (*)(void))py_handler_signature,
     METH_METHOD | METH_FASTCALL | METH_KEYWORDS, signature_doc},
    {"catch_up", (PyCFunction)(void (*)(void))py_handler_catch_up,
     METH_METHOD | METH_FASTCALL | METH_KEYWORDS, catch_up_doc},
    {"gone", (PyCFunction)(void (*)(void))py_handler_gone, METH_FASTCALL, gone_doc},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef handler_members[] = {
    {"is_open", T_BOOL, offsetof(py_handler_t, is_open), 0, "Whether deaths count."},
    {"is_verifying", T_BOOL, offsetof(py_handler_t, is_verifying), 0,
     "Whether Python runs operators again."},
    {"watches_writes", T_BOOL, offsetof(py_handler_t, watches_writes), 0,
     "Whether Python handles what writes to sources."},
    {"kernels", T_OBJECT, offsetof(py_handler_t, kernels), READONLY, "By operator."},
    {NULL, 0, 0, 0, NULL},
};

/* DLPack's view of tensors, and its name of the device. */
static int find_device(py_handler_t *self) {
    PyObject *capsule = self->parts[PART_EXCHANGE];
    if (capsule != Py_None) {
        const py_dl_exchange_t *exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
        if (exchange == NULL) {
            return -1;
        }
        self->exchange = exchange->major == 1 && exchange->view != NULL ? exchange : NULL;
    }
    if (self->is_cpu) {
        self->device_type = ROTOR_DL_CPU;
        return 0;
    }
    PyObject *kind = PyObject_GetAttrString(self->device, "type");
    PyObject *index = PyObject_GetAttrString(self->device, "index");
    if (kind != NULL && index != NULL && PyUnicode_Check(kind) && PyLong_Check(index) &&
        PyUnicode_CompareWithASCIIString(kind, "cuda") == 0) {
        self->device_type = ROTOR_DL_CUDA;
        self->device_index = (int32_t)PyLong_AsLong(index);
    }
    Py_XDECREF(kind);
    Py_XDECREF(index);
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *py_handler_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *keywords[] = {"recorder",  "parts",       "table",       "needs",
                               "device",    "block_bytes", "small_bytes", "longest_chain",
                               "has_views", NULL};
#define AS_TEXT(name) #name,
    static const char *const texts[] = {HANDLER_NAMES(AS_TEXT)};
#undef AS_TEXT
    py_state_t *state = py_state(PyType_GetModule(type));
    PyObject *recorder, *parts, *table, *needs, *device;
    long long block_bytes, small_bytes;
    int longest_chain, has_views;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!O!O!OLLip", keywords, state->recorder_type,
                                     &recorder, &PyTuple_Type, &parts, &PyDict_Type, &table,
                                     &PyDict_Type, &needs, &device, &block_bytes, &small_bytes,
                                     &longest_chain, &has_views)) {
        return NULL;
    }
    if (PyTuple_GET_SIZE(parts) != PART_COUNT || block_bytes < 1) {
        PyErr_Format(PyExc_ValueError, "parts must have %d entries, block_bytes be positive",
                     PART_COUNT);
        return NULL;
    }
    py_handler_t *self = (py_handler_t *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->recorder = (py_recorder_t *)Py_NewRef(recorder);
    self->ref_type = (PyTypeObject *)Py_NewRef(state->ref_type);
    self->needs_type = (PyTypeObject *)Py_NewRef(state->needs_type);
    self->kernel_type = (PyTypeObject *)Py_NewRef(state->kernel_type);
    for (int k = 0; k < PART_COUNT; k++) {
        self->parts[k] = Py_NewRef(PyTuple_GET_ITEM(parts, k));
    }
    self->table = Py_NewRef(table);
    self->needs = Py_NewRef(needs);
    self->device = Py_NewRef(device);
    self->kernels = PyDict_New();
    self->is_cpu = PyObject_RichCompareBool(device, self->parts[PART_CPU], Py_EQ) == 1;
    self->is_open = true;
    self->has_views = has_views != 0;
    self->block_bytes = block_bytes;
    self->small_bytes = small_bytes;
    self->longest_chain = longest_chain;
    self->gone = PyObject_GetAttrString((PyObject *)self, "gone");
    self->zero = PyLong_FromLong(0);
    self->dtype_and_device = Py_BuildValue("(ss)", "dtype", "device");
    self->cpu_flags = (int32_t)PyLong_AsLong(self->parts[PART_CPU_FLAGS]);
    self->sole_references = (int32_t)PyLong_AsLong(self->parts[PART_SOLE_REFERENCES]);
    bool is_complete = self->kernels != NULL && self->gone != NULL && self->zero != NULL &&
                       self->dtype_and_device != NULL && find_device(self) == 0;
    for (int k = 0; k < NAME_COUNT && is_complete; k++) {
        self->names[k] = PyUnicode_InternFromString(texts[k]);
        is_complete = self->names[k] != NULL;
    }
    if (!is_complete || PyErr_Occurred()) {
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

static int py_handler_traverse(PyObject *object, visitproc visit, void *arg) {
    py_handler_t *self = (py_handler_t *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->recorder);
    Py_VISIT(self->ref_type);
    Py_VISIT(self->needs_type);
    Py_VISIT(self->kernel_type);
    for (int k = 0; k < PART_COUNT; k++) {
        Py_VISIT(self->parts[k]);
    }
    Py_VISIT(self->table);
    Py_VISIT(self->needs);
    Py_VISIT(self->kernels);
    Py_VISIT(self->device);
    Py_VISIT(self->flags);
    Py_VISIT(self->gone);
    return 0;
}

static int py_handler_clear(PyObject *object) {
    py_handler_t *self = (py_handler_t *)object;
    self->is_open = false;
    /* The table and the book stay: callbacks of storages may come until the end. */
    Py_CLEAR(self->kernels);
    Py_CLEAR(self->flags);
    Py_CLEAR(self->gone);
    return 0;
}

static void py_handler_dealloc(PyObject *object) {
    py_handler_t *self = (py_handler_t *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    (void)py_handler_clear(object);
    py_operator_clear(self);
    Py_CLEAR(self->table);
    Py_CLEAR(self->recorder);
    Py_CLEAR(self->ref_type);
    Py_CLEAR(self->needs_type);
    Py_CLEAR(self->kernel_type);
    for (int k = 0; k < PART_COUNT; k++) {
        Py_CLEAR(self->parts[k]);
    }
    for (int k = 0; k < NAME_COUNT; k++) {
        Py_CLEAR(self->names[k]);
    }
    Py_CLEAR(self->needs);
    Py_CLEAR(self->device);
    Py_CLEAR(self->zero);
    Py_CLEAR(self->dtype_and_device);
    rotor_free(self->key);
    rotor_free(self->inputs);
    rotor_free(self->nodes);
    rotor_free(self->marks);
    type->tp_free(object);
    Py_DECREF(type);
}

PyDoc_STRVAR(handler_doc, "Handler(recorder, parts, table, needs, device, block_bytes, "
                          "small_bytes, longest_chain, has_views)\n--\n\n"
                          "Runs the operators of a program under a budget.");

static PyType_Slot handler_slots[] = {
    {Py_tp_new, py_handler_new},
    {Py_tp_dealloc, py_handler_dealloc},
    {Py_tp_traverse, py_handler_traverse},
    {Py_tp_clear, py_handler_clear},
    {Py_tp_methods, handler_methods},
    {Py_tp_members, handler_members},
    {Py_tp_getset, handler_getset},
    {Py_tp_doc, (void *)handler_doc},
    {0, NULL},
};

static PyType_Spec handler_spec = {
    .name = "rotor._core.Handler",
    .basicsize = sizeof(py_handler_t),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = handler_slots,
};

int py_add_handler(PyObject *module) {
    py_state_t *state = py_state(module);
    state->kernel_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &kernel_spec, NULL);
    PyObject *handler = PyType_FromModuleAndSpec(module, &handler_spec, NULL);
    int ret = state->kernel_type == NULL || handler == NULL ||
                      PyModule_AddType(module, state->kernel_type) != 0
                  ? -1
                  : PyModule_AddType(module, (PyTypeObject *)handler);
    Py_XDECREF(handler);
    return ret;
}
