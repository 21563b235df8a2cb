#include "probe.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

/*
 * The driver's and NVML's interfaces as far as they are used here; both are stable binary
 * interfaces, and 0 means success in both.
 */
typedef int (*get_device_fn)(int *device, int ordinal);
typedef int (*get_state_fn)(int device, unsigned *flags, int *active);
typedef int (*retain_fn)(void **context, int device);
typedef int (*release_fn)(int device);
typedef int (*push_fn)(void *context);
typedef int (*pop_fn)(void **context);
typedef int (*mem_info_fn)(size_t *free, size_t *total);
typedef int (*bus_id_fn)(char *text, int length, int device);

typedef struct {
    unsigned long long total, free, used;
} nvml_memory_t;

typedef int (*nvml_fn)(void);
typedef int (*nvml_index_fn)(unsigned index, void **handle);
typedef int (*nvml_bus_fn)(const char *bus_id, void **handle);
typedef int (*nvml_memory_fn)(void *handle, nvml_memory_t *memory);
typedef int (*nvml_name_fn)(void *handle, char *name, unsigned length);

enum { BUS_ID_SIZE = 32 };

/* ISO C has no conversion from an object pointer to a function pointer; POSIX promises the copy. */
static bool find(void *library, const char *name, void *function) {
    void *symbol = dlsym(library, name);
    memcpy(function, &symbol, sizeof(symbol));
    return symbol != NULL;
}

static void *open_first(const char *given, const char *const *usual) {
    if (given != NULL && given[0] == '\0') {
        return NULL;
    }
    if (given != NULL) {
        return dlopen(given, RTLD_LAZY | RTLD_LOCAL);
    }
    void *library = NULL;
    for (; library == NULL && *usual != NULL; usual++) {
        library = dlopen(*usual, RTLD_LAZY | RTLD_LOCAL);
    }
    return library;
}

static void probe_context(void *library, int device, rotor_cuda_memory_t *memory) {
    get_state_fn get_state;
    retain_fn retain;
    release_fn release;
    push_fn push;
    pop_fn pop;
    mem_info_fn mem_info;
    unsigned flags;
    int active = 0;
    void *context;
    size_t free_bytes, total_bytes;

    if (!find(library, "cuDevicePrimaryCtxGetState", &get_state) ||
        !find(library, "cuDevicePrimaryCtxRetain", &retain) ||
        !find(library, "cuDevicePrimaryCtxRelease_v2", &release) ||
        !find(library, "cuCtxPushCurrent_v2", &push) ||
        !find(library, "cuCtxPopCurrent_v2", &pop) ||
        !find(library, "cuMemGetInfo_v2", &mem_info)) {
        return;
    }
    if (get_state(device, &flags, &active) != 0 || !active || retain(&context, device) != 0) {
        return;
    }
    if (push(context) == 0) {
        if (mem_info(&free_bytes, &total_bytes) == 0) {
            memory->free_bytes = (int64_t)free_bytes;
            memory->total_bytes = (int64_t)total_bytes;
        }
        pop(&context);
    }
    release(device);
}

/* The driver's part; true when it knows the device's address on the bus. */
static bool probe_driver(const char *name, int ordinal, rotor_cuda_memory_t *memory,
                         char *bus_id) {
    static const char *const usual[] = {"libcuda.so.1", "libcuda.so", NULL};
    get_device_fn get_device;
    bus_id_fn get_bus_id;
    int device;
    bool located = false;
    void *library = open_first(name, usual);
    if (library == NULL) {
        return false;
    }
    if (find(library, "cuDeviceGet", &get_device) && get_device(&device, ordinal) == 0) {
        probe_context(library, device, memory);
        located = find(library, "cuDeviceGetPCIBusId", &get_bus_id) &&
                  get_bus_id(bus_id, BUS_ID_SIZE, device) == 0;
    }
    dlclose(library);
    return located;
}

static void probe_nvml(const char *name, int ordinal, const char *bus_id,
                       rotor_cuda_memory_t *memory) {
    static const char *const usual[] = {"libnvidia-ml.so.1", "libnvidia-ml.so", NULL};
    nvml_fn init, stop;
    nvml_index_fn by_index;
    nvml_bus_fn by_bus;
    nvml_memory_fn get_memory;
    nvml_name_fn get_name;
    nvml_memory_t found;
    void *handle = NULL;
    void *library = open_first(name, usual);
    if (library == NULL) {
        return;
    }
    if (!find(library, "nvmlInit_v2", &init) || !find(library, "nvmlShutdown", &stop) ||
        !find(library, "nvmlDeviceGetMemoryInfo", &get_memory) || init() != 0) {
        goto out;
    }
    bool same_indices = getenv("CUDA_VISIBLE_DEVICES") == NULL;
    bool known =
        bus_id != NULL
            ? find(library, "nvmlDeviceGetHandleByPciBusId_v2", &by_bus) &&
                  by_bus(bus_id, &handle) == 0
            : same_indices && find(library, "nvmlDeviceGetHandleByIndex_v2", &by_index) &&
                  by_index((unsigned)ordinal, &handle) == 0;
    if (known && get_memory(handle, &found) == 0) {
        memory->nvml_total_bytes = (int64_t)found.total;
        memory->nvml_free_bytes = (int64_t)found.free;
        memory->nvml_used_bytes = (int64_t)found.used;
    }
    if (known && find(library, "nvmlDeviceGetName", &get_name) &&
        get_name(handle, memory->name, ROTOR_GPU_NAME_SIZE) != 0) {
        memory->name[0] = '\0';
    }
    memory->name[ROTOR_GPU_NAME_SIZE - 1] = '\0';
    stop();
out:
    dlclose(library);
}

void rotor_probe_cuda(int device, const char *cuda_library, const char *nvml_library,
                      rotor_cuda_memory_t *memory) {
    char bus_id[BUS_ID_SIZE] = "";
    memory->free_bytes = ROTOR_UNKNOWN;
    memory->total_bytes = ROTOR_UNKNOWN;
    memory->nvml_free_bytes = ROTOR_UNKNOWN;
    memory->nvml_used_bytes = ROTOR_UNKNOWN;
    memory->nvml_total_bytes = ROTOR_UNKNOWN;
    memset(memory->name, 0, sizeof(memory->name));
    if (device < 0) {
        return;
    }
    bool located = probe_driver(cuda_library, device, memory, bus_id);
    probe_nvml(nvml_library, device, located ? bus_id : NULL, memory);
}
