import ctypes
import gc
import inspect
import mmap
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rotor import _core

MEMORY_KEYS = {
    "resident_bytes",
    "peak_resident_bytes",
    "virtual_bytes",
    "data_bytes",
    "total_bytes",
    "available_bytes",
    "cgroup_limit_bytes",
    "cgroup_usage_bytes",
    "cgroup_free_bytes",
    "address_space_limit_bytes",
    "data_limit_bytes",
    "free_bytes",
    "heap_used_bytes",
    "heap_kept_bytes",
}
GPU_KEYS = {
    "free_bytes",
    "total_bytes",
    "nvml_free_bytes",
    "nvml_used_bytes",
    "nvml_total_bytes",
    "name",
}
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.mark.parametrize("clock", [_core.clock_ns, _core.thread_cpu_ns, _core.process_cpu_ns])
def test_clocks_go_forward_in_whole_nanoseconds(clock):
    first = clock()
    sum(range(100_000))
    second = clock()
    assert type(first) is int
    assert 0 < first < second


def test_the_clock_of_a_thread_does_not_count_other_threads():
    spent = []

    def work():
        start = _core.thread_cpu_ns()
        sum(range(2_000_000))
        spent.append(_core.thread_cpu_ns() - start)

    process, own = _core.process_cpu_ns(), _core.thread_cpu_ns()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    own, process = _core.thread_cpu_ns() - own, _core.process_cpu_ns() - process
    assert process >= spent[0]
    assert own < spent[0]


def test_every_figure_of_memory_is_a_known_number_or_minus_one(tmp_path):
    for root in ("/", tmp_path, str(tmp_path), bytes(tmp_path)):
        memory = _core.probe_memory(root)
        assert set(memory) == MEMORY_KEYS
        assert all(type(v) is int and v >= -1 for v in memory.values())


def test_an_empty_root_knows_nothing_of_the_machine(tmp_path):
    memory = _core.probe_memory(root=tmp_path)
    own = {"heap_used_bytes", "heap_kept_bytes"}
    assert {k: v for k, v in memory.items() if k not in own} == dict.fromkeys(MEMORY_KEYS - own, -1)
    assert _core.reset_peak_rss(root=tmp_path) is False


def test_the_smallest_of_what_is_left_is_free(tmp_path):
    def put(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    put("proc/meminfo", "MemTotal: 90 kB\nMemAvailable: 80 kB\n")
    assert _core.probe_memory(tmp_path)["free_bytes"] == 80 * 1024
    put("proc/self/cgroup", "0::/job\n")
    put("sys/fs/cgroup/job/memory.max", "60000\n")
    put("sys/fs/cgroup/job/memory.current", "30000\n")
    put("sys/fs/cgroup/job/memory.stat", "inactive_file 10000\n")
    memory = _core.probe_memory(tmp_path)
    assert memory["free_bytes"] == memory["cgroup_free_bytes"] == 40000
    put("proc/self/status", "VmSize: 10 kB\nVmData: 5 kB\n")
    put("proc/self/limits", "Max data size    6000   unlimited   bytes\n")
    assert _core.probe_memory(tmp_path)["free_bytes"] == 6000 - 5 * 1024


@linux
def test_the_resident_peak_is_seen_after_a_reset_without_a_sampler():
    if not _core.reset_peak_rss():
        pytest.skip("this kernel does not reset VmHWM")
    before = _core.probe_memory()["peak_resident_bytes"]
    with mmap.mmap(-1, 50 << 20) as block:
        for page in range(0, len(block), mmap.PAGESIZE):
            block[page] = 1
    assert _core.probe_memory()["peak_resident_bytes"] > before + (40 << 20)
    assert _core.reset_peak_rss()
    assert _core.probe_memory()["peak_resident_bytes"] < before + (40 << 20)


@linux
def test_the_heap_is_counted():
    before = _core.probe_memory()["heap_used_bytes"]
    if before < 0:
        pytest.skip("this C library has no mallinfo2")
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    blocks = [libc.malloc(ctypes.c_size_t(100_000)) for _ in range(100)]
    after = _core.probe_memory()["heap_used_bytes"]
    for block in blocks:
        libc.free(ctypes.c_void_p(block))
    if after == before:
        pytest.skip("malloc is not the C library's own here")
    assert after - before >= 10_000_000


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: _core.probe_memory(1.5), TypeError),
        (lambda: _core.probe_memory("/", "/"), TypeError),
        (lambda: _core.probe_memory("a\0b"), ValueError),
        (lambda: _core.probe_memory("x" * 5000), OSError),
        (lambda: _core.reset_peak_rss("x" * 5000), OSError),
        (lambda: _core.clock_ns(1), TypeError),
        (lambda: _core.cuda_memory(), TypeError),
        (lambda: _core.cuda_memory("0"), TypeError),
        (lambda: _core.cuda_memory(1 << 40), OverflowError),
        (lambda: _core.cuda_memory(0, 5), TypeError),
    ],
)
def test_wrong_arguments_are_refused(call, error):
    with pytest.raises(error):
        call()


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("clock_ns", []),
        ("thread_cpu_ns", []),
        ("process_cpu_ns", []),
        ("probe_memory", ["root"]),
        ("reset_peak_rss", ["root"]),
        ("cuda_memory", ["device", "cuda_library", "nvml_library"]),
    ],
)
def test_signatures_are_documented(name, parameters):
    function = getattr(_core, name)
    assert list(inspect.signature(function).parameters) == parameters
    assert function.__doc__


def test_repeated_probes_keep_nothing(tmp_path):
    def probe() -> None:
        _core.probe_memory(tmp_path)
        _core.reset_peak_rss(tmp_path)
        _core.cuda_memory(0, "/nowhere", "/nowhere")
        with pytest.raises(TypeError):
            _core.probe_memory(1)

    for _ in range(20):
        probe()
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(500):
        probe()
    gc.collect()
    assert sys.getallocatedblocks() - before < 100


def test_missing_libraries_leave_all_unknown():
    memory = _core.cuda_memory(0, "/nowhere/libcuda.so", "/nowhere/libnvidia-ml.so")
    assert set(memory) == GPU_KEYS
    assert memory == {**dict.fromkeys(GPU_KEYS, -1), "name": ""}
    assert _core.cuda_memory(-1) == memory
    assert _core.cuda_memory(0, "", "") == memory


def test_this_machines_gpu_is_unknown_or_plausible():
    memory = _core.cuda_memory(0)
    assert set(memory) == GPU_KEYS
    if memory["nvml_total_bytes"] >= 0:
        assert 0 <= memory["nvml_used_bytes"] <= memory["nvml_total_bytes"]
        assert memory["name"]


# A driver and an NVML of two devices in reverse order; the environment says what fails.
_FAKES = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static int fails(const char *name) {
    const char *list = getenv("ROTOR_FAKE_FAILS");
    return list != NULL && strstr(list, name) != NULL;
}
static int depth, retained, sessions;
int fake_balance(void) { return depth * 100 + retained * 10 + sessions; }
int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal + 40;
    return fails("get") || ordinal > 1;
}
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    *flags = 0;
    *active = !fails("active");
    return device < 40;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = &depth;
    retained++;
    return device < 40;
}
int cuDevicePrimaryCtxRelease_v2(int device) { retained--; return device < 40; }
int cuCtxPushCurrent_v2(void *context) { depth++; return context != &depth; }
int cuCtxPopCurrent_v2(void **context) { *context = &depth; depth--; return 0; }
int cuMemGetInfo_v2(size_t *free, size_t *total) {
    *free = 1000;
    *total = (size_t)3 << 40;
    return fails("info");
}
int cuDeviceGetPCIBusId(char *text, int length, int device) {
    snprintf(text, (size_t)length, "bus %d", device);
    return 0;
}
int nvmlInit_v2(void) { sessions += !fails("init"); return fails("init"); }
int nvmlShutdown(void) { sessions--; return 0; }
static int handles[2] = {70, 71};
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    *handle = &handles[index];
    return 0;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, void **handle) {
    *handle = &handles[strcmp(bus_id, "bus 40") == 0];
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long *memory) {
    memory[0] = (unsigned long long)*(int *)handle;
    memory[1] = 20;
    memory[2] = 50;
    return fails("memory");
}
int nvmlDeviceGetName(void *handle, char *name, unsigned length) {
    snprintf(name, length, "device %d", *(int *)handle);
    return fails("name");
}
"""


@pytest.fixture(scope="module")
def fakes(tmp_path_factory):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder: Path = tmp_path_factory.mktemp("fakes")
    (folder / "fake.c").write_text(_FAKES)
    library = str(folder / "libfake.so")
    command = [compiler, "-shared", "-fPIC", "-o", library, str(folder / "fake.c")]
    subprocess.run(command, check=True)
    return library


def test_the_driver_and_nvml_are_asked_for_the_same_device(fakes, monkeypatch):
    monkeypatch.delenv("ROTOR_FAKE_FAILS", raising=False)
    held = ctypes.CDLL(fakes)
    assert _core.cuda_memory(0, fakes, fakes) == {
        "free_bytes": 1000,
        "total_bytes": 3 << 40,
        "nvml_total_bytes": 71,
        "nvml_free_bytes": 20,
        "nvml_used_bytes": 50,
        "name": "device 71",
    }
    assert _core.cuda_memory(1, fakes, fakes)["name"] == "device 70"
    driver = _core.cuda_memory(0, fakes, "")
    assert (driver["free_bytes"], driver["nvml_free_bytes"]) == (1000, -1)
    assert held.fake_balance() == 0


@pytest.mark.parametrize("visible", [None, "1,0"])
def test_without_a_driver_nvml_is_asked_by_index_where_indices_agree(fakes, monkeypatch, visible):
    monkeypatch.setenv("ROTOR_FAKE_FAILS", "get")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    memory = _core.cuda_memory(0, fakes, fakes)
    assert memory["free_bytes"] == memory["total_bytes"] == -1
    assert memory["nvml_total_bytes"] == (70 if visible is None else -1)
    assert memory["name"] == ("device 70" if visible is None else "")


@pytest.mark.parametrize(
    ("failing", "unknown"),
    [
        ("active", {"free_bytes", "total_bytes"}),
        ("info", {"free_bytes", "total_bytes"}),
        ("init", {"nvml_free_bytes", "nvml_used_bytes", "nvml_total_bytes", "name"}),
        ("memory", {"nvml_free_bytes", "nvml_used_bytes", "nvml_total_bytes"}),
        ("name", {"name"}),
    ],
)
def test_what_fails_is_unknown_and_everything_is_given_back(fakes, monkeypatch, failing, unknown):
    monkeypatch.setenv("ROTOR_FAKE_FAILS", failing)
    held = ctypes.CDLL(fakes)
    memory = _core.cuda_memory(0, fakes, fakes)
    assert {key for key, value in memory.items() if value in (-1, "")} == unknown
    assert held.fake_balance() == 0
