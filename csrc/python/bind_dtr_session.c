/* The type Handler, by which Python uses bind_dtr_handler.c. */
#include "bind_dtr_private.h"

#include <structmember.h>

#include "core.h"

void py_handler_lock(py_handler_t *self) {
    unsigned long me = PyThread_get_thread_ident();
    if (self->owner == me) {
        self->depth++;
        return;
    }
    if (!PyThread_acquire_lock(self->lock, NOWAIT_LOCK)) {
        Py_BEGIN_ALLOW_THREADS
        (void)PyThread_acquire_lock(self->lock, WAIT_LOCK);
        Py_END_ALLOW_THREADS
    }
    self->owner = me;
    self->depth = 1;
}

void py_handler_abort(py_handler_t *self) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    self->recorder->is_borrowed = false;
    (void)rotor_recorder_abort(&self->recorder->book);
    (void)py_book_release_guards(self->recorder);
    (void)py_book_settle(self->recorder);
    py_book_let_go(self->recorder);
    if (type != NULL) {
        PyErr_Restore(type, value, traceback);
    }
}

void py_handler_unlock(py_handler_t *self) {
    if (self->depth == 1 && self->recorder->book.frame_count > 0) {
        py_handler_abort(self); /* An exception has left what Python began. */
    }
    if (--self->depth == 0) {
        self->owner = 0;
        PyThread_release_lock(self->lock);
    }
}

static PyObject *py_handler_enter(PyObject *object, PyObject *unused) {
    py_handler_lock((py_handler_t *)object);
    Py_RETURN_NONE;
}

static PyObject *py_handler_exit(PyObject *object, PyObject *const *args, Py_ssize_t count) {
    py_handler_t *self = (py_handler_t *)object;
    if (self->owner != PyThread_get_thread_ident()) {
        return PyErr_Format(PyExc_RuntimeError, "this thread has not entered the handler");
    }
    py_handler_unlock(self);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(signature_doc, "signature($self, kernel, args, kwargs, /)\n--\n\n"
                            "Return the key of an operator on arguments of one layout, or None "
                            "where it has none; floating-point numbers are not part of it.");

static PyObject *py_handler_signature(PyObject *object, PyObject *const *args, Py_ssize_t count) {
    py_handler_t *self = (py_handler_t *)object;
    if (py_book_expect("signature", count, 3) != 0) {
        return NULL;
    }
    if (self->is_busy || Py_TYPE(args[0]) != self->kernel_type || !PyTuple_Check(args[1]) ||
        !PyDict_Check(args[2])) {
        return PyErr_Format(PyExc_TypeError,
                            "signature() takes a Kernel, a tuple and a dictionary");
    }
    self->is_busy = true;
    PyObject *key = NULL;
    if (py_operator_read(self, Py_None, (py_kernel_t *)args[0], args[1], args[2]) == 0) {
        key = self->has_key ? PyBytes_FromStringAndSize((const char *)self->key,
                                                        (Py_ssize_t)self->key_count * 8)
                            : Py_NewRef(Py_None);
    }
    py_operator_clear(self);
    self->is_busy = false;
    return key;
}

PyDoc_STRVAR(catch_up_doc, "catch_up($self, session, /)\n--\n\n"
                           "Run again what the operation that has begun needs.");

static PyObject *py_handler_catch_up(PyObject *object, PyObject *argument) {
    if (py_operator_catch_up((py_handler_t *)object, argument) != 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(rerun_doc, "rerun($self, record, storages, around, /)\n--\n\n"
                        "Run the operator of a record on storages of its inputs, as it ran first; "
                        "return its results. around: None, or what is called with the operator, "
                        "args and kwargs instead.");

static PyObject *py_handler_rerun(PyObject *object, PyObject *const *args, Py_ssize_t count) {
    py_handler_t *self = (py_handler_t *)object;
    int64_t took;
    if (py_book_expect("rerun", count, 3) != 0) {
        return NULL;
    }
    const py_record_t *record = (py_record_t *)args[0];
    if (Py_TYPE(args[0]) != self->record_type || !PyTuple_Check(args[1]) ||
        PyTuple_GET_SIZE(args[1]) != record->pattern->count) {
        return PyErr_Format(PyExc_TypeError,
                            "rerun() takes a Record and a tuple of the storages of its inputs");
    }
    return py_record_run(self, record, &PyTuple_GET_ITEM(args[1], 0),
                         args[2] == Py_None ? NULL : args[2], &took);
}

PyDoc_STRVAR(gone_doc, "gone($self, ref, /)\n--\n\nNote that a storage died.");

static PyObject *py_handler_gone(PyObject *object, PyObject *argument) {
    py_handler_t *self = (py_handler_t *)object;
    if (Py_TYPE(argument) != self->ref_type) {
        return PyErr_Format(PyExc_TypeError, "gone() takes a StorageRef");
    }
    py_ref_t *ref = (py_ref_t *)argument;
    py_table_remove(&self->table, ref);
    if (self->is_open) {
        py_book_note_gone(self->recorder, ref);
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(reference_doc, "reference($self, storage, /)\n--\n\n"
                            "Return the reference to a storage, or None.");

static PyObject *py_handler_reference(PyObject *object, PyObject *argument) {
    py_ref_t *ref = py_table_find(&((py_handler_t *)object)->table, argument);
    return Py_NewRef(ref == NULL ? Py_None : (PyObject *)ref);
}

PyDoc_STRVAR(track_doc, "track($self, storage, /)\n--\n\n"
                        "Return the reference to a storage, a new one without a number where there "
                        "is none.");

static PyObject *py_handler_track(PyObject *object, PyObject *argument) {
    bool is_new;
    return Py_XNewRef((PyObject *)py_table_enter((py_handler_t *)object, argument, &is_new));
}

PyDoc_STRVAR(references_doc, "references($self, /)\n--\n\nReturn all references to storages.");

static PyObject *py_handler_references(PyObject *object, PyObject *unused) {
    const py_ref_table_t *table = &((py_handler_t *)object)->table;
    PyObject *list = PyList_New(0);
    for (size_t k = 0; list != NULL && k < table->capacity; k++) {
        if (table->slots[k] != NULL && PyList_Append(list, (PyObject *)table->slots[k]) != 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

/* References of Python's to a tensor, but for the caller's: one more is PyTorch's where others own it
 * too. Weak ones count as well, but for our own. */
static Py_ssize_t holders_of(py_handler_t *self, PyObject *ref, PyObject *tensor) {
    PyObject *uses = PyObject_CallMethodNoArgs(tensor, self->names[NAME__use_count]);
    Py_ssize_t owners = uses == NULL ? -1 : PyLong_AsSsize_t(uses);
    Py_XDECREF(uses);
    bool is_seen = ((PyWeakReference *)ref)->wr_next != NULL || Py_REFCNT(ref) > 1;
    return owners < 0 ? -1 : Py_REFCNT(tensor) - 1 - (owners > 1) + is_seen;
}

PyDoc_STRVAR(held_doc, "held($self, /)\n--\n\n"
                       "Return (tensor, number of Python's references) of what was noted in made "
                       "and has any.");

static PyObject *py_handler_held(PyObject *object, PyObject *unused) {
    py_handler_t *self = (py_handler_t *)object;
    PyObject *refs = self->made == NULL ? Py_NewRef(Py_None) : Py_NewRef(self->made);
    PyObject *list = PyList_New(0);
    for (Py_ssize_t k = 0; list != NULL && PyList_Check(refs) && k < PyList_GET_SIZE(refs); k++) {
        PyObject *ref = PyList_GET_ITEM(refs, k);
        PyObject *tensor = Py_NewRef(PyWeakref_Check(ref) ? PyWeakref_GetObject(ref) : Py_None);
        Py_ssize_t holders = tensor == Py_None ? 0 : holders_of(self, ref, tensor);
        PyObject *pair = holders > 0 ? Py_BuildValue("On", tensor, holders) : NULL;
        if (holders < 0 || (holders > 0 && (pair == NULL || PyList_Append(list, pair) != 0))) {
            Py_CLEAR(list);
        }
        Py_XDECREF(pair);
        Py_DECREF(tensor);
    }
    Py_DECREF(refs);
    return list;
}

PyDoc_STRVAR(forget_doc, "forget($self, /)\n--\n\nForget all references to storages.");

static PyObject *py_handler_forget(PyObject *object, PyObject *unused) {
    py_table_clear(&((py_handler_t *)object)->table);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(adopt_doc, "adopt($self, storage, nbytes, is_foreign, /)\n--\n\n"
                        "Count a storage that no operator makes; return the reference to it.");

static PyObject *py_handler_add(PyObject *object, PyObject *const *args, Py_ssize_t count) {
    py_handler_t *self = (py_handler_t *)object;
    int64_t bytes;
    if (py_book_expect("adopt", count, 3) != 0 ||
        py_book_read_int64(args[1], &bytes) != 0 || py_book_forget_gone(self->recorder) != 0) {
        return NULL;
    }
    PyObject *ref = (PyObject *)py_handler_adopt(self, args[0], bytes, args[2] == Py_True);
    return Py_XNewRef(ref);
}

static PyObject *py_handler_observer(PyObject *object, void *closure) {
    return Py_NewRef(((py_handler_t *)object)->recorder->observer);
}

static int py_handler_observe(PyObject *object, PyObject *value, void *closure) {
    py_recorder_t *recorder = ((py_handler_t *)object)->recorder;
    if (py_book_forget_gone(recorder) != 0) {
        return -1;
    }
    Py_XSETREF(recorder->observer, Py_NewRef(value == NULL ? Py_None : value));
    return 0;
}

static PyGetSetDef handler_getset[] = {
    {"observer", py_handler_observer, py_handler_observe,
     "Hears of everything.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef handler_methods[] = {
    {"signature", PY_FASTCALL(py_handler_signature), signature_doc},
    {"catch_up", py_handler_catch_up, METH_O, catch_up_doc},
    {"rerun", PY_FASTCALL(py_handler_rerun), rerun_doc},
    {"reference", py_handler_reference, METH_O, reference_doc},
    {"track", py_handler_track, METH_O, track_doc},
    {"references", py_handler_references, METH_NOARGS, references_doc},
    {"forget", py_handler_forget, METH_NOARGS, forget_doc},
    {"held", py_handler_held, METH_NOARGS, held_doc},
    {"adopt", PY_FASTCALL(py_handler_add), adopt_doc},
    {"gone", py_handler_gone, METH_O, gone_doc},
    {"__enter__", py_handler_enter, METH_NOARGS, "Keep other threads out."},
    {"__exit__", PY_FASTCALL(py_handler_exit), "Let other threads in again."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef handler_members[] = {
    {"is_open", T_BOOL, offsetof(py_handler_t, is_open), 0, "Whether deaths count."},
    {"verifier", T_OBJECT, offsetof(py_handler_t, verifier), 0,
     "Compares what runs again; None: nothing is compared."},
    {"module", T_OBJECT, offsetof(py_handler_t, module), 0,
     "Path of the module that runs, noted with each operation; None: not noted."},
    {"made", T_OBJECT, offsetof(py_handler_t, made), 0,
     "Weak references to what operators make are appended to this list; None: to none."},
    {"clock", T_OBJECT, offsetof(py_handler_t, clock), 0,
     "Called for the time, ns; None: the system's clock."},
    {"slack_bytes", T_LONGLONG, offsetof(py_handler_t, slack_bytes), 0,
     "The most that the allocator keeps with a block above 1 MiB."},
    {"unread_blocks", T_LONGLONG, offsetof(py_handler_t, unread_blocks), 0,
     "Such blocks made since the device's counter was read."},
    {"watches_writes", T_BOOL, offsetof(py_handler_t, watches_writes), 0,
     "Whether Python hears of every write to a source."},
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
    if (self->exchange == NULL) {
        return 0;
    }
    // Only a tensor tells the number of the device's type: builds for ROCm call theirs "cuda" too.
    PyObject *arguments = Py_BuildValue("(i)", 0);
    PyObject *options = Py_BuildValue("{s:O}", "device", self->device);
    PyObject *nothing = arguments == NULL || options == NULL
                            ? NULL
                            : PyObject_Call(self->parts[PART_EMPTY], arguments, options);
    py_dl_tensor_t view;
    if (nothing != NULL && self->exchange->view(nothing, &view) == 0) {
        self->device_type = view.device_type;
        self->device_index = view.device_index;
    }
    PyErr_Clear(); /* tensors are read by their attributes then */
    Py_XDECREF(nothing);
    Py_XDECREF(options);
    Py_XDECREF(arguments);
    return 0;
}

/* What needs no arguments; -1 with an exception. */
static int prepare_handler(py_handler_t *self) {
#define AS_TEXT(name) #name,
    static const char *const texts[] = {HANDLER_NAMES(AS_TEXT)};
#undef AS_TEXT
    self->verifier = Py_NewRef(Py_None);
    self->is_open = true;
    self->is_cpu = PyObject_RichCompareBool(self->device, self->parts[PART_CPU], Py_EQ) == 1;
    self->lock = PyThread_allocate_lock();
    self->gone = PyObject_GetAttrString((PyObject *)self, "gone");
    self->zero = PyLong_FromLong(0);
    self->dtype_and_device = Py_BuildValue("(ss)", "dtype", "device");
    self->plain_flags = (int32_t)PyLong_AsLong(self->parts[PART_PLAIN_FLAGS]);
    self->cpu_flags = (int32_t)PyLong_AsLong(self->parts[PART_CPU_FLAGS]);
    self->sole_references = (int32_t)PyLong_AsLong(self->parts[PART_SOLE_REFERENCES]);
    if (self->lock == NULL) {
        PyErr_NoMemory();
    }
    for (int k = 0; k < NAME_COUNT && !PyErr_Occurred(); k++) {
        self->names[k] = PyUnicode_InternFromString(texts[k]);
    }
    return PyErr_Occurred() || find_device(self) != 0 ? -1 : 0;
}

/* What it has to the end, and what goes when it is collected. */
#define HANDLER_OBJECTS(entry)                                                                     \
    entry(recorder) entry(ref_type) entry(needs_type) entry(kernel_type) entry(record_type)        \
        entry(needs) entry(kernels) entry(kept) entry(device) entry(bytes) entry(zero)             \
            entry(dtype_and_device)
#define HANDLER_VARIABLES(entry)                                                                   \
    entry(verifier) entry(clock) entry(flags) entry(gone) entry(module) entry(made)

static PyObject *py_handler_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *keywords[] = {"recorder", "parts",       "needs",       "kernels",       "kept",
                               "device",   "bytes",       "block_bytes", "small_bytes",
                               "longest_chain", "swaps", NULL};
    py_state_t *state = py_state(PyType_GetModule(type));
    PyObject *recorder, *parts, *needs, *kernels, *kept, *device, *bytes;
    long long block_bytes, small_bytes;
    int longest_chain, swaps;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "O!O!O!O!O!OOLLip", keywords, state->recorder_type, &recorder,
            &PyTuple_Type, &parts, &PyDict_Type, &needs, &PyDict_Type, &kernels, &PySet_Type,
            &kept, &device, &bytes, &block_bytes, &small_bytes, &longest_chain, &swaps)) {
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
    self->record_type = (PyTypeObject *)Py_NewRef(state->record_type);
    for (int k = 0; k < PART_COUNT; k++) {
        self->parts[k] = Py_NewRef(PyTuple_GET_ITEM(parts, k));
    }
    self->needs = Py_NewRef(needs);
    self->kernels = Py_NewRef(kernels);
    self->kept = Py_NewRef(kept);
    self->device = Py_NewRef(device);
    self->bytes = Py_NewRef(bytes);
    self->block_bytes = block_bytes;
    self->small_bytes = small_bytes;
    self->longest_chain = longest_chain;
    self->swaps = swaps != 0;
    if (prepare_handler(self) != 0) {
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

static int py_handler_traverse(PyObject *object, visitproc visit, void *arg) {
    py_handler_t *self = (py_handler_t *)object;
    Py_VISIT(Py_TYPE(object));
    for (int k = 0; k < PART_COUNT; k++) {
        Py_VISIT(self->parts[k]);
    }
    for (size_t k = 0; k < self->table.capacity; k++) {
        Py_VISIT((PyObject *)self->table.slots[k]);
    }
    HANDLER_OBJECTS(PY_VISIT_FIELD)
    HANDLER_VARIABLES(PY_VISIT_FIELD)
    return 0;
}

static int py_handler_clear(PyObject *object) {
    py_handler_t *self = (py_handler_t *)object;
    self->is_open = false;
    /* The table and the book stay: callbacks of storages may come until the end. */
    HANDLER_VARIABLES(PY_CLEAR_FIELD)
    return 0;
}

static void py_handler_dealloc(PyObject *object) {
    py_handler_t *self = (py_handler_t *)object;
    PyObject_GC_UnTrack(object);
    (void)py_handler_clear(object);
    py_operator_clear(self);
    py_table_clear(&self->table);
    py_needs_forget_recent(self);
    for (int k = 0; k < PART_COUNT; k++) {
        Py_CLEAR(self->parts[k]);
    }
    for (int k = 0; k < NAME_COUNT; k++) {
        Py_CLEAR(self->names[k]);
    }
    HANDLER_OBJECTS(PY_CLEAR_FIELD)
    if (self->lock != NULL) {
        PyThread_free_lock(self->lock);
    }
    rotor_free(self->key);
    rotor_free(self->inputs);
    rotor_free(self->nodes);
    rotor_free(self->marks);
    rotor_free(self->outputs.places);
    rotor_free(self->outputs.bytes);
    rotor_free(self->outputs.origins);
    rotor_free(self->outputs.indices);
    rotor_free(self->outputs.nodes);
    py_dealloc(object);
}

bool py_is_handler(PyObject *object) { return Py_TYPE(object)->tp_dealloc == py_handler_dealloc; }

PyDoc_STRVAR(handler_doc,
             "Handler(recorder, parts, needs, kernels, kept, device, bytes, block_bytes, "
             "small_bytes, longest_chain, swaps)\n--\n\n"
             "Runs the operators of a program under a budget; other threads are kept out of its "
             "context.");

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

int py_add_handler(PyObject *module) {
    return py_add_type(module, "rotor._core.Handler", sizeof(py_handler_t), Py_TPFLAGS_HAVE_GC,
                       handler_slots, NULL);
}
