/*
 * Clocks, and the memory of the process, the machine, its control groups and CUDA devices.
 *
 * A figure that cannot be known is -1: a missing file or library is not an error. Functions that
 * read files take a `root`, "/" in earnest, a folder with proc/ and sys/ in tests.
 */
#ifndef ROTOR_PROBE_H
#define ROTOR_PROBE_H

#include "core.h"

#define ROTOR_UNKNOWN (INT64_C(-1))

/* Nanoseconds of a clock that never goes back; its start means nothing. */
int64_t rotor_clock_ns(void);
/* CPU time of the calling thread, and of all threads of the process. */
int64_t rotor_thread_cpu_ns(void);
int64_t rotor_process_cpu_ns(void);

typedef struct {
    /* output */
    /* this process (proc/self/status) */
    int64_t resident_bytes;
    int64_t peak_resident_bytes; /* since the start, or since rotor_probe_reset_peak() */
    int64_t virtual_bytes;
    int64_t data_bytes;
    /* the machine (proc/meminfo) */
    int64_t total_bytes;
    int64_t available_bytes;
    /*
     * The control group, v1 or v2, of this process or above it, with the least left: its limit, its
     * usage without the page cache that the kernel would give back (inactive_file), and the
     * difference, not below 0. All unknown where no group sets a limit.
     */
    int64_t cgroup_limit_bytes;
    int64_t cgroup_usage_bytes;
    int64_t cgroup_free_bytes;
    /* Soft limits on address space and on data; unknown where none is set. */
    int64_t address_space_limit_bytes;
    int64_t data_limit_bytes;
    /*
     * What this process may still allocate: the smallest of what is available, what the groups and
     * what the limits leave, with the free blocks of the heap; the unknown ones do not count. Not
     * below 0; unknown when all are.
     */
    int64_t free_bytes;
} rotor_host_memory_t;

/* ROTOR_ERR_IO when `root` is too long for a path. */
int rotor_probe_memory(const char *root, rotor_host_memory_t *memory);

/*
 * Makes peak_resident_bytes start again from what is resident now. ROTOR_ERR_UNAVAILABLE where the
 * kernel has no such thing or does not let us.
 */
int rotor_probe_reset_peak(const char *root);

/* The C library's heap: bytes that are allocated (mapped ones included), and free ones it keeps. */
typedef struct {
    /* output */
    int64_t used_bytes;
    int64_t kept_bytes;
} rotor_heap_t;

void rotor_probe_heap(rotor_heap_t *heap);

/*
 * Makes the C library map blocks from `least_bytes` on from the system, give them back when they
 * are freed, and have one heap for all new threads, from now on in the whole process; false where
 * it has no such settings.
 */
bool rotor_probe_map_blocks(int64_t least_bytes);

enum { ROTOR_GPU_NAME_SIZE = 96 };

typedef struct {
    /* output */
    /* cuMemGetInfo: only where the device's primary context is active, none is made */
    int64_t free_bytes;
    int64_t total_bytes;
    /* NVML, which counts all processes */
    int64_t nvml_free_bytes;
    int64_t nvml_used_bytes;
    int64_t nvml_total_bytes;
    char name[ROTOR_GPU_NAME_SIZE]; /* "" when unknown */
} rotor_cuda_memory_t;

/*
 * The memory of a CUDA device by its ordinal in this process. The libraries are opened with dlopen:
 * NULL for the usual names, "" for none. This never initialises CUDA; where it is not initialised, NVML is asked
 * for its device of the same index, unless CUDA_VISIBLE_DEVICES makes the indices differ.
 */
void rotor_probe_cuda(int device, const char *cuda_library, const char *nvml_library,
                      rotor_cuda_memory_t *memory);

#endif
