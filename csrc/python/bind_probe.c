#include "support.h"

#include "probe.h"

PyDoc_STRVAR(clock_ns_doc, "clock_ns()\n--\n\n"
                           "Return nanoseconds of a clock that never goes back.");

static PyObject *py_clock_ns(PyObject *module, PyObject *unused) {
    return PyLong_FromLongLong(rotor_clock_ns());
}

PyDoc_STRVAR(thread_cpu_ns_doc, "thread_cpu_ns()\n--\n\n"
                                "Return the CPU time of the calling thread, in nanoseconds.");

static PyObject *py_thread_cpu_ns(PyObject *module, PyObject *unused) {
    return PyLong_FromLongLong(rotor_thread_cpu_ns());
}

PyDoc_STRVAR(process_cpu_ns_doc,
             "process_cpu_ns()\n--\n\n"
             "Return the CPU time of all threads of this process, in nanoseconds.");

static PyObject *py_process_cpu_ns(PyObject *module, PyObject *unused) {
    return PyLong_FromLongLong(rotor_process_cpu_ns());
}

/* The optional argument `root` as bytes, a new reference. */
static PyObject *get_root(PyObject *args, PyObject *kwargs, const char *format) {
    static char *names[] = {"root", NULL};
    PyObject *root = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, format, names, PyUnicode_FSConverter, &root)) {
        return NULL;
    }
    return root != NULL ? root : PyBytes_FromString("/");
}

PyDoc_STRVAR(
    probe_memory_doc,
    "probe_memory(root='/')\n--\n\n"
    "Return the memory of this process, the machine, control groups, limits, and the C library's\n"
    "heap: a dict of bytes, -1 where a figure is unknown or a limit is not set.\n"
    "\n"
    "`root` is the folder that holds proc and sys. ``free_bytes`` is what this process\n"
    "may still allocate.");

static PyObject *py_probe_memory(PyObject *module, PyObject *args, PyObject *kwargs) {
    rotor_host_memory_t memory;
    rotor_heap_t heap;
    int ret;
    PyObject *root = get_root(args, kwargs, "|O&:probe_memory");
    if (root == NULL) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    ret = rotor_probe_memory(PyBytes_AS_STRING(root), &memory);
    rotor_probe_heap(&heap);
    Py_END_ALLOW_THREADS
    Py_DECREF(root);
    if (ret != ROTOR_OK) {
        return py_raise_status(module, ret);
    }
    return Py_BuildValue(
        "{sL sL sL sL sL sL sL sL sL sL sL sL sL sL}", "resident_bytes",
        (long long)memory.resident_bytes, "peak_resident_bytes",
        (long long)memory.peak_resident_bytes, "virtual_bytes", (long long)memory.virtual_bytes,
        "data_bytes", (long long)memory.data_bytes, "total_bytes", (long long)memory.total_bytes,
        "available_bytes", (long long)memory.available_bytes, "cgroup_limit_bytes",
        (long long)memory.cgroup_limit_bytes, "cgroup_usage_bytes",
        (long long)memory.cgroup_usage_bytes, "cgroup_free_bytes",
        (long long)memory.cgroup_free_bytes, "address_space_limit_bytes",
        (long long)memory.address_space_limit_bytes, "data_limit_bytes",
        (long long)memory.data_limit_bytes, "free_bytes", (long long)memory.free_bytes,
        "heap_used_bytes", (long long)heap.used_bytes, "heap_kept_bytes",
        (long long)heap.kept_bytes);
}

PyDoc_STRVAR(heap_bytes_doc, "heap_bytes()\n--\n\n"
                             "Return the bytes that the C library's heap has given out, mapped "
                             "ones included; -1 where that\n"
                             "is unknown. It takes less than a microsecond.");

static PyObject *py_heap_bytes(PyObject *module, PyObject *args) {
    rotor_heap_t heap;
    rotor_probe_heap(&heap);
    return PyLong_FromLongLong((long long)heap.used_bytes);
}

PyDoc_STRVAR(map_blocks_doc,
             "map_blocks(least_bytes, /)\n--\n\n"
             "Make the C library give freed blocks of that size and above back to the system.\n"
             "\n"
             "False where it has no such setting. It holds for the whole process.");

static PyObject *py_map_blocks(PyObject *module, PyObject *argument) {
    long long least = PyLong_AsLongLong(argument);
    if (least == -1 && PyErr_Occurred()) {
        return NULL;
    }
    return PyBool_FromLong(rotor_probe_map_blocks((int64_t)least));
}

PyDoc_STRVAR(reset_peak_rss_doc,
             "reset_peak_rss(root='/')\n--\n\n"
             "Make ``peak_resident_bytes`` start again from what is resident now.\n"
             "\n"
             "False where this machine does not offer it.");

static PyObject *py_reset_peak_rss(PyObject *module, PyObject *args, PyObject *kwargs) {
    int ret;
    PyObject *root = get_root(args, kwargs, "|O&:reset_peak_rss");
    if (root == NULL) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    ret = rotor_probe_reset_peak(PyBytes_AS_STRING(root));
    Py_END_ALLOW_THREADS
    Py_DECREF(root);
    if (ret != ROTOR_OK && ret != ROTOR_ERR_UNAVAILABLE) {
        return py_raise_status(module, ret);
    }
    return PyBool_FromLong(ret == ROTOR_OK);
}

PyDoc_STRVAR(cuda_memory_doc,
             "cuda_memory(device, cuda_library=None, nvml_library=None)\n--\n\n"
             "Return the memory of a CUDA device: a dict of bytes, -1 where a figure is unknown, "
             "and a name,\n"
             "\"\" where it is.\n"
             "\n"
             "``free_bytes`` and ``total_bytes`` are the driver's, where the device's context is\n"
             "active; ``nvml_*`` count all processes. The libraries are opened when they exist;\n"
             "an empty name opens none.");

static PyObject *py_cuda_memory(PyObject *module, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"device", "cuda_library", "nvml_library", NULL};
    int device;
    const char *cuda_library = NULL;
    const char *nvml_library = NULL;
    rotor_cuda_memory_t memory;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "i|zz:cuda_memory", names, &device,
                                     &cuda_library, &nvml_library)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    rotor_probe_cuda(device, cuda_library, nvml_library, &memory);
    Py_END_ALLOW_THREADS
    return Py_BuildValue("{sL sL sL sL sL sN}", "free_bytes", (long long)memory.free_bytes,
                         "total_bytes", (long long)memory.total_bytes, "nvml_free_bytes",
                         (long long)memory.nvml_free_bytes, "nvml_used_bytes",
                         (long long)memory.nvml_used_bytes, "nvml_total_bytes",
                         (long long)memory.nvml_total_bytes, "name", py_text(memory.name));
}

#define WITH_KEYWORDS(function) (PyCFunction)(void (*)(void)) function, METH_VARARGS | METH_KEYWORDS

static PyMethodDef functions[] = {
    {"clock_ns", py_clock_ns, METH_NOARGS, clock_ns_doc},
    {"thread_cpu_ns", py_thread_cpu_ns, METH_NOARGS, thread_cpu_ns_doc},
    {"process_cpu_ns", py_process_cpu_ns, METH_NOARGS, process_cpu_ns_doc},
    {"probe_memory", WITH_KEYWORDS(py_probe_memory), probe_memory_doc},
    {"heap_bytes", py_heap_bytes, METH_NOARGS, heap_bytes_doc},
    {"map_blocks", py_map_blocks, METH_O, map_blocks_doc},
    {"reset_peak_rss", WITH_KEYWORDS(py_reset_peak_rss), reset_peak_rss_doc},
    {"cuda_memory", WITH_KEYWORDS(py_cuda_memory), cuda_memory_doc},
    {NULL, NULL, 0, NULL},
};

int py_add_probe(PyObject *module) { return PyModule_AddFunctions(module, functions); }
