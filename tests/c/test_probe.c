/* Probes read fixture folders that the tests write; one test reads this machine. */
#include "probe.h"
#include "testing.h"

#include <ftw.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#define V1 "sys/fs/cgroup/memory"
#define V2 "sys/fs/cgroup"

static char root[64];

static int remove_one(const char *path, const struct stat *status, int kind, struct FTW *walk) {
    (void)status;
    (void)kind;
    (void)walk;
    return remove(path);
}

static void begin(void) {
    strcpy(root, "/tmp/rotor_probe_XXXXXX");
    if (mkdtemp(root) == NULL) {
        perror("mkdtemp");
        abort();
    }
}

static void end(void) { nftw(root, remove_one, 8, FTW_DEPTH | FTW_PHYS); }

static void put(const char *name, const char *text) {
    char path[512];
    snprintf(path, sizeof(path), "%s/%s", root, name);
    for (char *slash = path + strlen(root) + 1; (slash = strchr(slash, '/')) != NULL; slash++) {
        *slash = '\0';
        mkdir(path, 0755);
        *slash = '/';
    }
    FILE *file = fopen(path, "w");
    if (file == NULL || fputs(text, file) < 0 || fclose(file) != 0) {
        perror(path);
        abort();
    }
}

static rotor_host_memory_t probe(void) {
    rotor_host_memory_t memory;
    memset(&memory, 0x55, sizeof(memory));
    CHECK(rotor_probe_memory(root, &memory) == ROTOR_OK);
    return memory;
}

static void test_clocks(void) {
    int64_t wall = rotor_clock_ns(), thread = rotor_thread_cpu_ns();
    int64_t process = rotor_process_cpu_ns();
    CHECK(wall > 0 && thread > 0 && process > 0);
    volatile unsigned work = 0;
    for (unsigned k = 0; k < 100000; k++) {
        work += k;
    }
    CHECK(rotor_clock_ns() > wall);
    CHECK(rotor_thread_cpu_ns() > thread);
    CHECK(rotor_process_cpu_ns() > process);
}

static void test_nothing_known(void) {
    begin();
    rotor_host_memory_t m = probe();
    CHECK(m.resident_bytes == -1 && m.peak_resident_bytes == -1 && m.virtual_bytes == -1);
    CHECK(m.data_bytes == -1 && m.total_bytes == -1 && m.available_bytes == -1);
    CHECK(m.cgroup_limit_bytes == -1 && m.cgroup_usage_bytes == -1 && m.cgroup_free_bytes == -1);
    CHECK(m.address_space_limit_bytes == -1 && m.data_limit_bytes == -1 && m.free_bytes == -1);
    CHECK(rotor_probe_reset_peak(root) == ROTOR_ERR_UNAVAILABLE);
    end();
}

static void test_process_and_machine(void) {
    begin();
    put("proc/self/status", "Name:\tpython\nVmPeak:\t  999 kB\nVmSize:\t  900 kB\n"
                            "VmHWM:\t  120 kB\nVmRSS:\t  100 kB\nVmData:\t  300 kB\n");
    put("proc/meminfo", "MemTotal:       2000 kB\nMemFree:         500 kB\n"
                        "MemAvailable:   1500 kB\n");
    rotor_host_memory_t m = probe();
    CHECK(m.resident_bytes == 100 * 1024 && m.peak_resident_bytes == 120 * 1024);
    CHECK(m.virtual_bytes == 900 * 1024 && m.data_bytes == 300 * 1024);
    CHECK(m.total_bytes == 2000 * 1024 && m.available_bytes == 1500 * 1024);
    CHECK(m.free_bytes == 1500 * 1024);

    put("proc/self/limits", "Limit                     Soft Limit           Hard Limit    Units\n"
                            "Max data size             unlimited            unlimited     bytes\n"
                            "Max address space         1000000              unlimited     bytes\n");
    m = probe();
    CHECK(m.data_limit_bytes == -1 && m.address_space_limit_bytes == 1000000);
    CHECK(m.free_bytes == 1000000 - 900 * 1024);

    put("proc/self/limits", "Max data size             300000               400000        bytes\n");
    m = probe();
    CHECK(m.data_limit_bytes == 300000 && m.free_bytes == 0);
    end();
}

static void test_damaged_files(void) {
    begin();
    put("proc/self/status", "VmRSS:\nVmHWM:\tmany kB\nVmSize:\t-5 kB\n"
                            "VmData:\t99999999999999999999 kB");
    put("proc/meminfo", "MemTotal:  9223372036854775807 kB\nMemAvailable");
    put("proc/self/cgroup", "\n:\n4\n4:memory\n0::\n::::\n5:cpu,memory,:/a");
    put(V1 "/memory.limit_in_bytes", "");
    put(V2 "/memory.max", "max\n");
    put(V2 "/memory.current", "7\n");
    rotor_host_memory_t m = probe();
    CHECK(m.resident_bytes == -1 && m.peak_resident_bytes == -1);
    CHECK(m.virtual_bytes == -1 && m.data_bytes == -1);
    CHECK(m.total_bytes == -1 && m.available_bytes == -1);
    CHECK(m.cgroup_limit_bytes == -1 && m.cgroup_free_bytes == -1 && m.free_bytes == -1);
    end();
}

static void test_cgroup_v2(void) {
    begin();
    put("proc/self/cgroup", "0::/user.slice/job/step\n");
    put(V2 "/user.slice/memory.max", "max\n");
    put(V2 "/user.slice/memory.current", "900000\n");
    put(V2 "/user.slice/job/memory.max", "1000000\n");
    put(V2 "/user.slice/job/memory.current", "700000\n");
    put(V2 "/user.slice/job/memory.stat", "anon 100000\ninactive_anon 5\nfile 650000\n"
                                          "inactive_file 200000\nactive_file 4\n");
    put(V2 "/user.slice/job/step/memory.max", "2000000\n");
    put(V2 "/user.slice/job/step/memory.current", "600000\n");
    rotor_host_memory_t m = probe();
    CHECK(m.cgroup_limit_bytes == 1000000);
    CHECK(m.cgroup_usage_bytes == 500000);
    CHECK(m.cgroup_free_bytes == 500000 && m.free_bytes == 500000);

    put(V2 "/user.slice/job/step/memory.high", "650000\n"); /* the kernel stalls above it */
    m = probe();
    CHECK(m.cgroup_limit_bytes == 650000 && m.cgroup_free_bytes == 50000);

    put(V2 "/memory.max", "10\n"); /* a container: its own group is the mount itself */
    put(V2 "/memory.current", "20\n");
    m = probe();
    CHECK(m.cgroup_limit_bytes == 10 && m.cgroup_free_bytes == 0 && m.free_bytes == 0);
    end();
}

static void test_cgroup_v1(void) {
    begin();
    put("proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/docker/abc\n3:memoryless:/x\n0::/\n");
    put(V1 "/memory.limit_in_bytes", "9223372036854771712\n");
    put(V1 "/memory.usage_in_bytes", "5000\n");
    put(V1 "/docker/memory.limit_in_bytes", "8000\n");
    put(V1 "/docker/memory.usage_in_bytes", "1000\n");
    put(V1 "/docker/abc/memory.limit_in_bytes", "4000\n");
    put(V1 "/docker/abc/memory.usage_in_bytes", "3000\n");
    put(V1 "/docker/abc/memory.stat", "inactive_file 1\ntotal_inactive_file 9999\n");
    put(V1 "/x/memory.limit_in_bytes", "1\n");
    put(V1 "/x/memory.usage_in_bytes", "1\n");
    put("proc/meminfo", "MemAvailable: 1 kB\n");
    rotor_host_memory_t m = probe();
    CHECK(m.cgroup_limit_bytes == 4000 && m.cgroup_usage_bytes == 0);
    CHECK(m.cgroup_free_bytes == 4000);
    CHECK(m.free_bytes == 1024);
    end();
}

static void test_group_outside_the_namespace(void) {
    begin();
    put("proc/self/cgroup", "0::/../../secret\n");
    put("sys/secret/memory.max", "1\n");
    put("sys/secret/memory.current", "1\n");
    put(V2 "/memory.max", "500\n");
    put(V2 "/memory.current", "100\n");
    rotor_host_memory_t m = probe();
    CHECK(m.cgroup_limit_bytes == 500 && m.cgroup_free_bytes == 400);
    put("proc/self/cgroup", "0::/a..b\n");
    put(V2 "/a..b/memory.max", "50\n");
    put(V2 "/a..b/memory.current", "10\n");
    m = probe();
    CHECK(m.cgroup_limit_bytes == 50 && m.cgroup_free_bytes == 40);
    end();
}

static void test_long_root(void) {
    char *path = rotor_malloc(10000);
    rotor_host_memory_t m = {.free_bytes = 77};
    memset(path, 'a', 9999);
    path[9999] = '\0';
    CHECK(rotor_probe_memory(path, &m) == ROTOR_ERR_IO);
    CHECK(m.free_bytes == 77);
    CHECK(rotor_probe_reset_peak(path) == ROTOR_ERR_IO);
    rotor_free(path);
}

static void test_reset_writes_five(void) {
    char path[128], text[8] = "";
    begin();
    put("proc/self/clear_refs", "");
    CHECK(rotor_probe_reset_peak(root) == ROTOR_OK);
    snprintf(path, sizeof(path), "%s/proc/self/clear_refs", root);
    FILE *file = fopen(path, "r");
    CHECK(file != NULL && fgets(text, sizeof(text), file) != NULL);
    CHECK(strcmp(text, "5") == 0);
    if (file != NULL) {
        fclose(file);
    }
    end();
}

static void test_this_machine(void) {
    rotor_host_memory_t m;
    CHECK(rotor_probe_memory("/", &m) == ROTOR_OK);
    CHECK(m.free_bytes >= -1 && m.free_bytes != 0);
#ifdef __linux__
    CHECK(m.resident_bytes > 0 && m.virtual_bytes >= m.resident_bytes);
    CHECK(m.total_bytes > 0 && m.available_bytes > 0 && m.available_bytes <= m.total_bytes);
    CHECK(m.free_bytes > 0 && m.free_bytes <= m.available_bytes);
#endif
}

static void test_large_blocks_are_given_back(void) {
    rotor_heap_t before, after;
    if (!rotor_probe_map_blocks(1 << 20)) {
        return;
    }
    CHECK(!rotor_probe_map_blocks(INT64_MAX));
    rotor_probe_heap(&before);
    for (int i = 0; i < 8; i++) {
        free(malloc(8 << 20));
    }
    rotor_probe_heap(&after);
    CHECK(after.kept_bytes < before.kept_bytes + (8 << 20));
}

static void test_heap(void) {
    rotor_heap_t heap;
    rotor_probe_heap(&heap);
    CHECK(heap.used_bytes >= -1 && heap.kept_bytes >= -1);
}

static void test_no_cuda(void) {
    rotor_cuda_memory_t m;
    memset(&m, 0x55, sizeof(m));
    rotor_probe_cuda(0, "/nowhere/libcuda.so", "/nowhere/libnvidia-ml.so", &m);
    CHECK(m.free_bytes == -1 && m.total_bytes == -1);
    CHECK(m.nvml_free_bytes == -1 && m.nvml_used_bytes == -1 && m.nvml_total_bytes == -1);
    CHECK(m.name[0] == '\0');
    memset(&m, 0x55, sizeof(m));
    rotor_probe_cuda(0, "", "", &m); /* no library is asked */
    CHECK(m.free_bytes == -1 && m.nvml_free_bytes == -1 && m.name[0] == '\0');
    rotor_probe_cuda(-1, NULL, NULL, &m);
    CHECK(m.free_bytes == -1 && m.nvml_free_bytes == -1 && m.name[0] == '\0');
}

static const test_case_t cases[] = {
    {"clocks", test_clocks},
    {"nothing_known", test_nothing_known},
    {"process_and_machine", test_process_and_machine},
    {"damaged_files", test_damaged_files},
    {"cgroup_v2", test_cgroup_v2},
    {"cgroup_v1", test_cgroup_v1},
    {"group_outside_the_namespace", test_group_outside_the_namespace},
    {"long_root", test_long_root},
    {"reset_writes_five", test_reset_writes_five},
    {"this_machine", test_this_machine},
    {"heap", test_heap},
    {"large_blocks_are_given_back", test_large_blocks_are_given_back},
    {"no_cuda", test_no_cuda},
};

TEST_MAIN(cases)
