#include "probe.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#if defined(__GLIBC__) && defined(__GLIBC_PREREQ)
#if __GLIBC_PREREQ(2, 33)
#define ROTOR_HAS_MALLINFO2 1
#endif
#include <malloc.h>
#endif

#ifdef __APPLE__
#include <mach/mach.h>
#include <sys/sysctl.h>
#endif

enum { PATH_SIZE = 4096, TEXT_SIZE = 16384 };

/* Control groups write "no limit" as a number near 2^63. */
#define NO_LIMIT (INT64_C(1) << 62)

static int64_t read_clock(clockid_t id) {
    struct timespec t;
    if (clock_gettime(id, &t) != 0) {
        return ROTOR_UNKNOWN;
    }
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

int64_t rotor_clock_ns(void) { return read_clock(CLOCK_MONOTONIC); }

int64_t rotor_thread_cpu_ns(void) { return read_clock(CLOCK_THREAD_CPUTIME_ID); }

int64_t rotor_process_cpu_ns(void) { return read_clock(CLOCK_PROCESS_CPUTIME_ID); }

static bool join(char *path, size_t size, const char *root, const char *name) {
    size_t length = strlen(root);
    while (length > 0 && root[length - 1] == '/') {
        length--;
    }
    if (length + strlen(name) + 2 > size) {
        return false;
    }
    memcpy(path, root, length);
    path[length] = '/';
    strcpy(path + length + 1, name);
    return true;
}

/* The head of a file as text, at most size - 1 characters; false when the file does not exist. */
static bool read_text(const char *folder, const char *name, char *text, size_t size) {
    char path[PATH_SIZE];
    int file = join(path, sizeof(path), folder, name) ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    size_t length = 0;
    if (file < 0) {
        return false;
    }
    while (length < size - 1) {
        ssize_t got = read(file, text + length, size - 1 - length);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got <= 0) {
            break;
        }
        length += (size_t)got;
    }
    close(file);
    text[length] = '\0';
    return true;
}

/* A whole number, not negative, times `unit`; unknown where none is found or it is too large. */
static int64_t parse_count(const char *text, int64_t unit) {
    char *end;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (end == text || errno != 0 || value < 0 || value > INT64_MAX / unit) {
        return ROTOR_UNKNOWN;
    }
    return (int64_t)value * unit;
}

/* The number after the `key` that begins a line. */
static int64_t find_count(const char *text, const char *key, int64_t unit) {
    size_t length = strlen(key);
    for (const char *line = text; line != NULL && *line != '\0';) {
        if (strncmp(line, key, length) == 0) {
            return parse_count(line + length, unit);
        }
        line = strchr(line, '\n');
        line = line == NULL ? NULL : line + 1;
    }
    return ROTOR_UNKNOWN;
}

static int64_t read_count(const char *folder, const char *name) {
    char text[64];
    return read_text(folder, name, text, sizeof(text)) ? parse_count(text, 1) : ROTOR_UNKNOWN;
}

static int64_t smaller_known(int64_t a, int64_t b) {
    if (a == ROTOR_UNKNOWN || b == ROTOR_UNKNOWN) {
        return a == ROTOR_UNKNOWN ? b : a;
    }
    return rotor_min(a, b);
}

static void probe_process(const char *root, rotor_host_memory_t *memory) {
    char text[TEXT_SIZE];
    if (read_text(root, "proc/self/status", text, sizeof(text))) {
        memory->resident_bytes = find_count(text, "VmRSS:", 1024);
        memory->peak_resident_bytes = find_count(text, "VmHWM:", 1024);
        memory->virtual_bytes = find_count(text, "VmSize:", 1024);
        memory->data_bytes = find_count(text, "VmData:", 1024);
    }
}

static void probe_machine(const char *root, rotor_host_memory_t *memory) {
    char text[TEXT_SIZE];
    if (read_text(root, "proc/meminfo", text, sizeof(text))) {
        memory->total_bytes = find_count(text, "MemTotal:", 1024);
        memory->available_bytes = find_count(text, "MemAvailable:", 1024);
    }
}

typedef struct {
    const char *limits[2];
    const char *usage;
    const char *cache; /* the line of memory.stat */
} group_files_t;

static const group_files_t version_1 = {
    {"memory.limit_in_bytes", NULL}, "memory.usage_in_bytes", "total_inactive_file "};
static const group_files_t version_2 = {
    {"memory.max", "memory.high"}, "memory.current", "inactive_file "};

static void probe_group(const char *folder, const group_files_t *files,
                        rotor_host_memory_t *memory) {
    char text[TEXT_SIZE];
    int64_t limit = read_count(folder, files->limits[0]);
    int64_t usage = read_count(folder, files->usage);
    int64_t cache = ROTOR_UNKNOWN;
    if (files->limits[1] != NULL) {
        limit = smaller_known(limit, read_count(folder, files->limits[1]));
    }
    if (limit == ROTOR_UNKNOWN || limit >= NO_LIMIT || usage == ROTOR_UNKNOWN) {
        return;
    }
    if (read_text(folder, "memory.stat", text, sizeof(text))) {
        cache = find_count(text, files->cache, 1);
    }
    usage -= rotor_min(usage, rotor_max(cache, 0));
    int64_t left = rotor_max(limit - usage, 0);
    if (memory->cgroup_free_bytes == ROTOR_UNKNOWN || left < memory->cgroup_free_bytes) {
        memory->cgroup_limit_bytes = limit;
        memory->cgroup_usage_bytes = usage;
        memory->cgroup_free_bytes = left;
    }
}

/* True if a path leads up: a group outside the namespace that this process can see. */
static bool leads_up(const char *path) {
    for (const char *dots = strstr(path, ".."); dots != NULL; dots = strstr(dots + 2, "..")) {
        bool begins = dots == path || dots[-1] == '/';
        if (begins && (dots[2] == '/' || dots[2] == '\0')) {
            return true;
        }
    }
    return false;
}

/* The group `name` under `mount` and all above it, up to the mount itself. */
static void probe_groups(const char *root, const char *mount, const char *name,
                         const group_files_t *files, rotor_host_memory_t *memory) {
    char top[PATH_SIZE], folder[PATH_SIZE];
    if (!join(top, sizeof(top), root, mount)) {
        return;
    }
    while (*name == '/') {
        name++;
    }
    if (!leads_up(name) && join(folder, sizeof(folder), top, name)) {
        size_t shortest = strlen(top) + 1;
        for (char *cut = folder + strlen(folder); strlen(folder) > shortest; *cut = '\0') {
            probe_group(folder, files, memory);
            cut = strrchr(folder, '/');
        }
    }
    probe_group(top, files, memory);
}

/* True if the comma-separated list [list, end) has the controller "memory". */
static bool has_memory(const char *list, const char *end) {
    while (list < end) {
        const char *comma = memchr(list, ',', (size_t)(end - list));
        const char *stop = comma == NULL ? end : comma;
        if (stop - list == 6 && strncmp(list, "memory", 6) == 0) {
            return true;
        }
        list = stop + 1;
    }
    return false;
}

static void probe_cgroups(const char *root, rotor_host_memory_t *memory) {
    char text[TEXT_SIZE];
    if (!read_text(root, "proc/self/cgroup", text, sizeof(text))) {
        return;
    }
    /* Each line is id:controllers:path; version 2 has no controllers. */
    for (char *line = text, *next; line != NULL && *line != '\0'; line = next) {
        next = strchr(line, '\n');
        if (next != NULL) {
            *next++ = '\0';
        }
        char *controllers = strchr(line, ':');
        char *name = controllers == NULL ? NULL : strchr(controllers + 1, ':');
        if (name == NULL) {
            continue;
        }
        if (name == controllers + 1) {
            probe_groups(root, "sys/fs/cgroup", name + 1, &version_2, memory);
            probe_groups(root, "sys/fs/cgroup/unified", name + 1, &version_2, memory);
        } else if (has_memory(controllers + 1, name)) {
            probe_groups(root, "sys/fs/cgroup/memory", name + 1, &version_1, memory);
        }
    }
}

#ifndef __linux__
static int64_t soft_limit(int resource) {
    struct rlimit limit;
    if (getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY ||
        limit.rlim_cur >= (rlim_t)NO_LIMIT) {
        return ROTOR_UNKNOWN;
    }
    return (int64_t)limit.rlim_cur;
}
#endif

static void probe_limits(const char *root, rotor_host_memory_t *memory) {
#ifdef __linux__
    char text[TEXT_SIZE];
    if (read_text(root, "proc/self/limits", text, sizeof(text))) {
        memory->address_space_limit_bytes = find_count(text, "Max address space", 1);
        memory->data_limit_bytes = find_count(text, "Max data size", 1);
    }
#else
    if (strcmp(root, "/") == 0) {
        memory->address_space_limit_bytes = soft_limit(RLIMIT_AS);
        memory->data_limit_bytes = soft_limit(RLIMIT_DATA);
    }
#endif
}

#ifdef __APPLE__
static void probe_mach(rotor_host_memory_t *memory) {
    mach_task_basic_info_data_t task;
    mach_msg_type_number_t count = MACH_TASK_BASIC_INFO_COUNT;
    if (task_info(mach_task_self(), MACH_TASK_BASIC_INFO, (task_info_t)&task, &count) ==
        KERN_SUCCESS) {
        memory->resident_bytes = (int64_t)task.resident_size;
        memory->peak_resident_bytes = (int64_t)task.resident_size_max;
        memory->virtual_bytes = (int64_t)task.virtual_size;
    }
    uint64_t total;
    size_t size = sizeof(total);
    if (sysctlbyname("hw.memsize", &total, &size, NULL, 0) == 0) {
        memory->total_bytes = (int64_t)total;
    }
    vm_statistics64_data_t pages;
    count = HOST_VM_INFO64_COUNT;
    if (host_statistics64(mach_host_self(), HOST_VM_INFO64, (host_info64_t)&pages, &count) ==
        KERN_SUCCESS) {
        int64_t usable = (int64_t)pages.free_count + (int64_t)pages.inactive_count;
        memory->available_bytes = usable * (int64_t)sysconf(_SC_PAGESIZE);
    }
}
#endif

static int64_t left(int64_t limit, int64_t used, int64_t kept) {
    if (limit == ROTOR_UNKNOWN || used == ROTOR_UNKNOWN) {
        return ROTOR_UNKNOWN;
    }
    return rotor_max(limit - used, 0) + kept;
}

int rotor_probe_memory(const char *root, rotor_host_memory_t *memory) {
    rotor_host_memory_t found = {
        ROTOR_UNKNOWN, ROTOR_UNKNOWN, ROTOR_UNKNOWN, ROTOR_UNKNOWN, ROTOR_UNKNOWN, ROTOR_UNKNOWN,
        ROTOR_UNKNOWN, ROTOR_UNKNOWN, ROTOR_UNKNOWN, ROTOR_UNKNOWN, ROTOR_UNKNOWN, ROTOR_UNKNOWN};
    char path[PATH_SIZE];
    if (!join(path, sizeof(path), root, "proc/self/clear_refs")) {
        return ROTOR_ERR_IO;
    }
#ifdef __APPLE__
    if (strcmp(root, "/") == 0) {
        probe_mach(&found);
    }
#endif
    probe_process(root, &found);
    probe_machine(root, &found);
    probe_cgroups(root, &found);
    probe_limits(root, &found);
    /* What the heap keeps is taken already, and can be used. */
    rotor_heap_t heap;
    rotor_probe_heap(&heap);
    int64_t kept = strcmp(root, "/") == 0 ? rotor_max(heap.kept_bytes, 0) : 0;
    int64_t least = smaller_known(found.available_bytes, found.cgroup_free_bytes);
    least = smaller_known(least, left(found.address_space_limit_bytes, found.virtual_bytes, kept));
    found.free_bytes = smaller_known(least, left(found.data_limit_bytes, found.data_bytes, kept));
    *memory = found;
    return ROTOR_OK;
}

int rotor_probe_reset_peak(const char *root) {
    char path[PATH_SIZE];
    if (!join(path, sizeof(path), root, "proc/self/clear_refs")) {
        return ROTOR_ERR_IO;
    }
    int file = open(path, O_WRONLY | O_CLOEXEC);
    if (file < 0) {
        return ROTOR_ERR_UNAVAILABLE;
    }
    ssize_t written = write(file, "5", 1);
    close(file);
    return written == 1 ? ROTOR_OK : ROTOR_ERR_UNAVAILABLE;
}

void rotor_probe_heap(rotor_heap_t *heap) {
#ifdef ROTOR_HAS_MALLINFO2
    struct mallinfo2 info = mallinfo2();
    heap->used_bytes = (int64_t)(info.uordblks + info.hblkhd);
    heap->kept_bytes = (int64_t)info.fordblks;
#else
    heap->used_bytes = ROTOR_UNKNOWN;
    heap->kept_bytes = ROTOR_UNKNOWN;
#endif
}

bool rotor_probe_map_blocks(int64_t least_bytes) {
#ifdef __GLIBC__
    /* A heap of its own takes 64 MiB of addresses for each thread. */
    return least_bytes <= INT_MAX && mallopt(M_ARENA_MAX, 1) == 1 &&
           mallopt(M_MMAP_THRESHOLD, (int)least_bytes) == 1;
#else
    (void)least_bytes;
    return false;
#endif
}
