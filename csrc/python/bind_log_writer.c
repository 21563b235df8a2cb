#include "support.h"

#include <string.h>

#include "log_writer.h"

typedef struct {
    PyObject_HEAD
    rotor_log_writer_t writer;
} py_writer_t;

static rotor_log_writer_t *writer_of(PyObject *object) { return &((py_writer_t *)object)->writer; }

static PyObject *py_writer_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    if (PyTuple_GET_SIZE(args) != 0 || (kwargs != NULL && PyDict_GET_SIZE(kwargs) != 0)) {
        return PyErr_Format(PyExc_TypeError, "LogWriter takes no arguments");
    }
    PyObject *self = type->tp_alloc(type, 0);
    if (self != NULL) {
        rotor_log_writer_init(writer_of(self));
    }
    return self;
}

static void py_writer_dealloc(PyObject *object) {
    rotor_log_writer_free(writer_of(object));
    py_dealloc(object);
}

/* The characters of a str, which has to outlive them. */
static bool get_name(PyObject *object, const char *what, rotor_name_t *name) {
    Py_ssize_t length;

    if (!PyUnicode_Check(object)) {
        PyErr_Format(PyExc_TypeError, "%s must be a str, got %R", what, object);
        return false;
    }
    name->text = PyUnicode_AsUTF8AndSize(object, &length);
    if (name->text == NULL) {
        return false;
    }
    name->length = length;
    if (memchr(name->text, '\0', (size_t)length) != NULL) {
        PyErr_Format(PyExc_ValueError, "%s is %R; names hold no null characters", what, object);
        return false;
    }
    return true;
}

/* A tuple of the entries of a list, tuple or the like, or NULL. A str is refused. */
static PyObject *get_tuple(PyObject *object, const char *what) {
    if (PyUnicode_Check(object)) {
        return PyErr_Format(PyExc_TypeError, "%s must be a sequence, got the str %R", what,
                            object);
    }
    return PySequence_Tuple(object);
}

/* The names in a tuple, which keeps them alive. Free the answer with PyMem_Free. */
static rotor_name_t *get_names(PyObject *tuple, const char *what) {
    Py_ssize_t count = PyTuple_GET_SIZE(tuple);
    rotor_name_t *names = PyMem_New(rotor_name_t, (size_t)count);
    if (names == NULL) {
        return (rotor_name_t *)PyErr_NoMemory();
    }
    for (Py_ssize_t k = 0; k < count; k++) {
        if (!get_name(PyTuple_GET_ITEM(tuple, k), what, &names[k])) {
            PyMem_Free(names);
            return NULL;
        }
    }
    return names;
}

/* The same of indices below a number. */
static int64_t *get_indices(PyObject *tuple, int64_t below) {
    Py_ssize_t count = PyTuple_GET_SIZE(tuple);
    int64_t *indices = PyMem_New(int64_t, (size_t)count);
    if (indices == NULL) {
        return (int64_t *)PyErr_NoMemory();
    }
    for (Py_ssize_t k = 0; k < count; k++) {
        if (!py_get_integer(PyTuple_GET_ITEM(tuple, k), "an entry of mutated", 0, below - 1,
                            &indices[k])) {
            PyMem_Free(indices);
            return NULL;
        }
    }
    return indices;
}

/* CALL or MUTATE; `what`: its third argument. */
static PyObject *write_operation(PyObject *object, PyObject *const *args, Py_ssize_t nargs,
                                 const char *method, const char *what, bool mutates) {
    PyObject *tuples[2] = {NULL, NULL};
    rotor_name_t *inputs = NULL;
    rotor_name_t *results = NULL;
    int64_t *mutated = NULL;
    rotor_name_t name;
    int64_t time_ns;
    int status;
    PyObject *answer = NULL;

    if (!py_are_counted(method, nargs, 4, 4) || !get_name(args[0], "name", &name) ||
        (tuples[0] = get_tuple(args[1], "args")) == NULL ||
        (inputs = get_names(tuples[0], "args")) == NULL ||
        (tuples[1] = get_tuple(args[2], what)) == NULL ||
        (!mutates && (results = get_names(tuples[1], what)) == NULL) ||
        !py_get_integer(args[3], "time_ns", 0, ROTOR_MAX_VALUE, &time_ns)) {
        goto out;
    }
    Py_ssize_t input_count = PyTuple_GET_SIZE(tuples[0]);
    Py_ssize_t count = PyTuple_GET_SIZE(tuples[1]);
    if (count == 0) {
        PyErr_Format(PyExc_ValueError, "%s is empty, expected one or more", what);
        goto out;
    }
    if (mutates && (mutated = get_indices(tuples[1], input_count)) == NULL) {
        goto out;
    }
    status = mutates ? rotor_log_write_mutate(writer_of(object), name, inputs, input_count, mutated,
                                              count, time_ns)
                     : rotor_log_write_call(writer_of(object), name, inputs, input_count, results,
                                            count, time_ns);
    answer = py_none(object, status);
out:
    PyMem_Free(inputs);
    PyMem_Free(results);
    PyMem_Free(mutated);
    Py_XDECREF(tuples[0]);
    Py_XDECREF(tuples[1]);
    return answer;
}

PyDoc_STRVAR(writer_call_doc, "call(name, args, results, time_ns, /)\n--\n\n"
                              "Write CALL; memory and alias of every result have to follow.");

static PyObject *py_writer_call(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    return write_operation(object, args, nargs, "call", "results", false);
}

PyDoc_STRVAR(writer_mutate_doc, "mutate(name, args, mutated, time_ns, /)\n--\n\n"
                                "Write MUTATE; `mutated` are indices of `args`.");

static PyObject *py_writer_mutate(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    return write_operation(object, args, nargs, "mutate", "mutated", true);
}

static PyObject *write_name(PyObject *object, PyObject *argument, const char *instruction) {
    rotor_name_t name;
    if (!get_name(argument, "name", &name)) {
        return NULL;
    }
    return py_none(object, rotor_log_write_name(writer_of(object), instruction, name));
}

PyDoc_STRVAR(writer_constant_doc, "constant(name, /)\n--\n\n"
                                  "Write CONSTANT; its memory has to follow.");

static PyObject *py_writer_constant(PyObject *object, PyObject *argument) {
    return write_name(object, argument, "CONSTANT");
}

PyDoc_STRVAR(writer_release_doc, "release(name, /)\n--\n\nWrite RELEASE.");

static PyObject *py_writer_release(PyObject *object, PyObject *argument) {
    return write_name(object, argument, "RELEASE");
}

PyDoc_STRVAR(writer_pin_doc, "pin(name, /)\n--\n\nWrite PIN.");

static PyObject *py_writer_pin(PyObject *object, PyObject *argument) {
    return write_name(object, argument, "PIN");
}

PyDoc_STRVAR(writer_annotate_doc, "annotate(text, /)\n--\n\n"
                                  "Write ANNOTATE, such as START or BACKWARD.");

static PyObject *py_writer_annotate(PyObject *object, PyObject *argument) {
    rotor_name_t text;
    if (!get_name(argument, "text", &text)) {
        return NULL;
    }
    return py_none(object, rotor_log_write_annotate(writer_of(object), text));
}

static PyObject *write_number(PyObject *object, PyObject *const *args, Py_ssize_t nargs,
                              const char *what, int64_t least, int64_t most,
                              int (*write)(rotor_log_writer_t *, rotor_name_t, int64_t)) {
    rotor_name_t name;
    int64_t number;
    if (!py_are_counted(what, nargs, 2, 2) || !get_name(args[0], "name", &name) ||
        !py_get_integer(args[1], what, least, most, &number)) {
        return NULL;
    }
    return py_none(object, write(writer_of(object), name, number));
}

PyDoc_STRVAR(writer_memory_doc, "memory(name, bytes, /)\n--\n\nWrite MEMORY.");

static PyObject *py_writer_memory(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    return write_number(object, args, nargs, "memory", 0, ROTOR_MAX_VALUE,
                        rotor_log_write_memory);
}

PyDoc_STRVAR(writer_alias_doc, "alias(name, alias, /)\n--\n\n"
                               "Write ALIAS: -1, or an index of the arguments of the call.");

static PyObject *py_writer_alias(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    return write_number(object, args, nargs, "alias", -1, INT32_MAX, rotor_log_write_alias);
}

static PyObject *write_copy(PyObject *object, PyObject *const *args, Py_ssize_t nargs,
                            const char *method, bool rebinds) {
    rotor_name_t destination;
    rotor_name_t source;
    if (!py_are_counted(method, nargs, 2, 2) || !get_name(args[0], "dst", &destination) ||
        !get_name(args[1], "src", &source)) {
        return NULL;
    }
    return py_none(object, rotor_log_write_copy(writer_of(object), destination, source, rebinds));
}

PyDoc_STRVAR(writer_copy_doc, "copy(dst, src, /)\n--\n\n"
                              "Write COPY: `dst` is a name more for the tensor of `src`.");

static PyObject *py_writer_copy(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    return write_copy(object, args, nargs, "copy", false);
}

PyDoc_STRVAR(writer_copy_from_doc, "copy_from(dst, src, /)\n--\n\n"
                                   "Write COPY_FROM: `dst` leaves its tensor for that of `src`.");

static PyObject *py_writer_copy_from(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    return write_copy(object, args, nargs, "copy_from", true);
}

PyDoc_STRVAR(writer_take_doc, "take()\n--\n\n"
                              "Return the text written since the last take, as UTF-8.");

static PyObject *py_writer_take(PyObject *object, PyObject *unused) {
    rotor_log_writer_t *writer = writer_of(object);
    PyObject *text = PyBytes_FromStringAndSize(writer->text, (Py_ssize_t)writer->length);
    if (text != NULL) {
        writer->length = 0;
    }
    return text;
}

static PyMethodDef writer_methods[] = {
    {"constant", py_writer_constant, METH_O, writer_constant_doc},
    {"memory", PY_FASTCALL(py_writer_memory), writer_memory_doc},
    {"alias", PY_FASTCALL(py_writer_alias), writer_alias_doc},
    {"call", PY_FASTCALL(py_writer_call), writer_call_doc},
    {"mutate", PY_FASTCALL(py_writer_mutate), writer_mutate_doc},
    {"copy", PY_FASTCALL(py_writer_copy), writer_copy_doc},
    {"copy_from", PY_FASTCALL(py_writer_copy_from), writer_copy_from_doc},
    {"release", py_writer_release, METH_O, writer_release_doc},
    {"pin", py_writer_pin, METH_O, writer_pin_doc},
    {"annotate", py_writer_annotate, METH_O, writer_annotate_doc},
    {"take", py_writer_take, METH_NOARGS, writer_take_doc},
    {NULL, NULL, 0, NULL},
};

PyDoc_STRVAR(writer_doc, "Writes a log, instruction by instruction (see rotor.simrd.LogWriter).");

static PyType_Slot writer_slots[] = {
    {Py_tp_new, py_writer_new},
    {Py_tp_dealloc, py_writer_dealloc},
    {Py_tp_methods, writer_methods},
    {Py_tp_doc, (void *)writer_doc},
    {0, NULL},
};

int py_add_log_writer(PyObject *module) {
    return py_add_type(module, "rotor._core.LogWriter", sizeof(py_writer_t), 0, writer_slots,
                       NULL);
}
