#include "support.h"

#include <errno.h>

#include "tier.h"

enum { WAIT_NS = 50000000 };

typedef struct {
    PyObject_HEAD
    rotor_tier_t *tier;
} py_disk_file_t;

typedef struct {
    PyObject_HEAD
    rotor_transfer_t transfer;
    py_disk_file_t *file; /* NULL once it is done */
    PyObject *held;       /* owner of the memory; NULL once it is done */
} py_transfer_t;

static PyObject *raise_errno(int error) {
    errno = error;
    return PyErr_SetFromErrno(PyExc_OSError);
}

static PyObject *raise_closed(void) {
    PyErr_SetString(PyExc_ValueError,
                    "the file of this tier is closed, or was opened by the process that this one "
                    "was forked from, which alone writes to it: make a new tier in this process");
    return NULL;
}

static PyObject *py_disk_file_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"directory", "buffered", "name", NULL};
    PyObject *path = NULL;
    const char *name = NULL;
    int buffered = 0;
    int error;
    int ret;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&|pz:DiskFile", names,
                                     PyUnicode_FSConverter, &path, &buffered, &name)) {
        return NULL;
    }
    py_disk_file_t *file = (py_disk_file_t *)type->tp_alloc(type, 0);
    if (file == NULL) {
        Py_DECREF(path);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS;
    ret = rotor_tier_open(PyBytes_AS_STRING(path), name, buffered != 0, &file->tier, &error);
    Py_END_ALLOW_THREADS;
    if (ret == ROTOR_ERR_IO) {
        errno = error;
        PyErr_SetFromErrnoWithFilename(PyExc_OSError, PyBytes_AS_STRING(path));
    } else if (ret != ROTOR_OK) {
        py_raise_status(PyType_GetModule(type), ret);
    }
    Py_DECREF(path);
    if (ret != ROTOR_OK) {
        Py_CLEAR(file);
    }
    return (PyObject *)file;
}

static void py_disk_file_dealloc(PyObject *object) {
    py_disk_file_t *file = (py_disk_file_t *)object;
    Py_BEGIN_ALLOW_THREADS;
    rotor_tier_free(file->tier);
    Py_END_ALLOW_THREADS;
    py_dealloc(object);
}

PyDoc_STRVAR(reserve_doc, "reserve(nbytes, /)\n--\n\n"
                          "Take space on the disk for the first `nbytes` bytes of the file.");

static PyObject *py_disk_file_reserve(PyObject *object, PyObject *argument) {
    py_disk_file_t *file = (py_disk_file_t *)object;
    int64_t nbytes;
    int error;
    int ret;

    if (!py_get_integer(argument, "nbytes", 0, INT64_MAX / 2, &nbytes)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS;
    ret = rotor_tier_reserve(file->tier, nbytes, &error);
    Py_END_ALLOW_THREADS;
    if (ret == ROTOR_ERR_IO) {
        return raise_errno(error);
    }
    if (ret != ROTOR_OK) {
        return raise_closed();
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(begin_doc,
             "begin(writes, address, nbytes, offset, held, /)\n--\n\n"
             "Begin a transfer between memory and the file; return it.\n\n"
             "`held` owns the memory: the transfer keeps it until it is done.");

static PyObject *py_disk_file_begin(PyObject *object, PyObject *args) {
    py_disk_file_t *file = (py_disk_file_t *)object;
    PyObject *module = PyType_GetModule(Py_TYPE(object));
    PyObject *held;
    int writes;
    unsigned long long address;
    long long nbytes, offset;

    if (module == NULL || !PyArg_ParseTuple(args, "pKLLO:begin", &writes, &address, &nbytes,
                                            &offset, &held)) {
        return NULL;
    }
    if (nbytes < 0 || offset < 0 || offset % rotor_tier_sector(file->tier) != 0) {
        return PyErr_Format(PyExc_ValueError,
                            "nbytes = %lld and offset = %lld, expected none below 0 and an offset "
                            "that is a multiple of %lld",
                            nbytes, offset, (long long)rotor_tier_sector(file->tier));
    }
    PyTypeObject *type = py_state(module)->transfer_type;
    py_transfer_t *made = (py_transfer_t *)type->tp_alloc(type, 0);
    if (made == NULL) {
        return NULL;
    }
    made->transfer.writes = writes != 0;
    made->transfer.memory = (char *)(uintptr_t)address;
    made->transfer.bytes = nbytes;
    made->transfer.offset = offset;
    if (rotor_tier_begin(file->tier, &made->transfer) != ROTOR_OK) {
        Py_DECREF(made);
        return raise_closed();
    }
    made->file = (py_disk_file_t *)Py_NewRef(object);
    made->held = Py_NewRef(held);
    return (PyObject *)made;
}

PyDoc_STRVAR(drain_doc, "drain()\n--\n\nWait until nothing moves.");

static PyObject *py_disk_file_drain(PyObject *object, PyObject *unused) {
    py_disk_file_t *file = (py_disk_file_t *)object;
    Py_BEGIN_ALLOW_THREADS;
    rotor_tier_drain(file->tier);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(close_doc, "close()\n--\n\n"
                        "Close the file after the transfers that were begun; it is gone then.");

static PyObject *py_disk_file_close(PyObject *object, PyObject *unused) {
    py_disk_file_t *file = (py_disk_file_t *)object;
    Py_BEGIN_ALLOW_THREADS;
    rotor_tier_close(file->tier);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyObject *py_disk_file_sector(PyObject *object, void *unused) {
    return PyLong_FromLongLong(rotor_tier_sector(((py_disk_file_t *)object)->tier));
}

/* Waits for a slice of time; ROTOR_ERR_INTERRUPTED: it is not done yet. */
static int wait_slice(const py_disk_file_t *file, py_transfer_t *transfer) {
    int ret;
    Py_BEGIN_ALLOW_THREADS;
    ret = rotor_tier_wait(file->tier, &transfer->transfer, WAIT_NS);
    Py_END_ALLOW_THREADS;
    return ret;
}

static void let_go(py_transfer_t *transfer) {
    Py_CLEAR(transfer->held);
    Py_CLEAR(transfer->file);
}

/* Waits before the memory goes, whatever happens. */
static void py_transfer_dealloc(PyObject *object) {
    py_transfer_t *transfer = (py_transfer_t *)object;
    PyObject *kind, *value, *traceback;
    PyErr_Fetch(&kind, &value, &traceback);
    while (transfer->file != NULL &&
           wait_slice(transfer->file, transfer) == ROTOR_ERR_INTERRUPTED) {
    }
    let_go(transfer);
    PyErr_Restore(kind, value, traceback);
    py_dealloc(object);
}

PyDoc_STRVAR(wait_doc, "wait()\n--\n\n"
                       "Wait for the transfer, then release the memory; raise OSError if it failed.");

static PyObject *py_transfer_wait(PyObject *object, PyObject *unused) {
    py_transfer_t *transfer = (py_transfer_t *)object;
    while (transfer->file != NULL) {
        /* Another thread that waits may let go meanwhile. */
        py_disk_file_t *file = (py_disk_file_t *)Py_NewRef(transfer->file);
        int ret = wait_slice(file, transfer);
        Py_DECREF(file);
        if (ret == ROTOR_ERR_UNAVAILABLE) {
            return raise_closed();
        }
        if (ret != ROTOR_ERR_INTERRUPTED) {
            let_go(transfer);
        } else if (PyErr_CheckSignals() != 0) {
            return NULL;
        }
    }
    if (transfer->transfer.error != 0) {
        return raise_errno(transfer->transfer.error);
    }
    Py_RETURN_NONE;
}

static PyObject *py_transfer_busy(PyObject *object, void *unused) {
    py_transfer_t *transfer = (py_transfer_t *)object;
    return PyLong_FromLongLong(transfer->file == NULL ? transfer->transfer.busy_ns : 0);
}

static PyObject *py_transfer_sum(PyObject *object, void *unused) {
    py_transfer_t *transfer = (py_transfer_t *)object;
    return PyLong_FromLongLong(transfer->file == NULL ? (int64_t)transfer->transfer.sum : 0);
}

static PyMethodDef file_methods[] = {
    {"reserve", py_disk_file_reserve, METH_O, reserve_doc},
    {"begin", py_disk_file_begin, METH_VARARGS, begin_doc},
    {"drain", py_disk_file_drain, METH_NOARGS, drain_doc},
    {"close", py_disk_file_close, METH_NOARGS, close_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef file_getset[] = {
    {"sector_bytes", py_disk_file_sector, NULL, "Bytes of a sector; 1 for a buffered file.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyDoc_STRVAR(file_doc,
             "DiskFile(directory, buffered=False, name=None)\n--\n\n"
             "File, and the thread that moves bytes between it and memory; without a name it is gone "
             "when the process ends.");

static PyType_Slot file_slots[] = {
    {Py_tp_new, py_disk_file_new},         {Py_tp_dealloc, py_disk_file_dealloc},
    {Py_tp_methods, file_methods},         {Py_tp_getset, file_getset},
    {Py_tp_doc, (void *)file_doc},         {0, NULL},
};

static PyMethodDef transfer_methods[] = {
    {"wait", py_transfer_wait, METH_NOARGS, wait_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef transfer_getset[] = {
    {"busy_ns", py_transfer_busy, NULL, "Time that it took, after `wait`.", NULL},
    {"checksum", py_transfer_sum, NULL, "Checksum of the bytes that were moved, after `wait`.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyDoc_STRVAR(transfer_doc, "Transfer between memory and a file, which holds the memory until it "
                           "is done.");

static PyType_Slot transfer_slots[] = {
    {Py_tp_dealloc, py_transfer_dealloc}, {Py_tp_methods, transfer_methods},
    {Py_tp_getset, transfer_getset},      {Py_tp_doc, (void *)transfer_doc},
    {0, NULL},
};

static PyObject *py_tier_room(PyObject *module, PyObject *args) {
    long long sector, nbytes;
    if (!PyArg_ParseTuple(args, "LL:tier_room", &sector, &nbytes)) {
        return NULL;
    }
    if (sector < 1 || nbytes < 0) {
        return PyErr_Format(PyExc_ValueError,
                            "sector_bytes = %lld and nbytes = %lld, expected at least 1 and 0",
                            sector, nbytes);
    }
    return PyLong_FromLongLong(rotor_tier_room(sector, nbytes));
}

PyDoc_STRVAR(room_doc, "tier_room(sector_bytes, nbytes, /)\n--\n\n"
                       "Return the bytes of a file that a buffer takes, at any address.");

static PyMethodDef functions[] = {
    {"tier_room", py_tier_room, METH_VARARGS, room_doc},
    {NULL, NULL, 0, NULL},
};

int py_add_tier(PyObject *module) {
    int ret = py_add_type(module, "rotor._core.DiskFile", sizeof(py_disk_file_t), 0, file_slots,
                          NULL);
    ret = ret == 0 ? py_add_type(module, "rotor._core.Transfer", sizeof(py_transfer_t),
                                 Py_TPFLAGS_DISALLOW_INSTANTIATION, transfer_slots,
                                 &py_state(module)->transfer_type)
                   : ret;
    return ret == 0 ? PyModule_AddFunctions(module, functions) : ret;
}
