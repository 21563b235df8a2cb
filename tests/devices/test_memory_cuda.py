"""Meters and free memory of CUDA devices, on a caching allocator that is a fake."""

import pytest
import torch

from rotor import _core, memory
from rotor._pytorch import devices, ends
from rotor.memory import MeterBusyError, Segment, meter


class _FakeCuda:
    """The counters of a caching allocator."""

    def __init__(self, monkeypatch):
        self.current = self.peak = 1000
        for name in ("reset_peak_memory_stats", "memory_stats", "get_memory_info"):
            monkeypatch.setattr(torch.accelerator, name, getattr(self, name))
        monkeypatch.setattr(devices, "settle_backwards", lambda _: None)
        fraction = self.get_per_process_memory_fraction
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", fraction)
        monkeypatch.setattr(_core, "cuda_memory", self.cuda_memory)

    def cuda_memory(self, device, cuda_library, nvml_library):
        assert (device, cuda_library, nvml_library) == (0, None, "")
        return {"free_bytes": self.driver_free, "total_bytes": 20_000}

    driver_free = -1

    def allocate(self, nbytes):
        self.current += nbytes
        self.peak = max(self.peak, self.current)

    def reset_peak_memory_stats(self, device):
        self.peak = self.current

    def memory_stats(self, device):
        return {
            "allocated_bytes.all.current": self.current,
            "allocated_bytes.all.peak": self.peak,
            "reserved_bytes.all.current": 4000,
        }

    def get_memory_info(self, device):
        return 5000, 20_000

    def get_per_process_memory_fraction(self, device):
        return self.fraction

    fraction = 1.0


def test_a_cuda_meter_reads_the_allocators_counters(monkeypatch):
    cuda = _FakeCuda(monkeypatch)
    cuda.allocate(9000)
    cuda.allocate(-9500)
    # The main thread, and a ``with`` block, read the allocator's events.
    monkeypatch.setattr(ends, "is_main_thread", lambda: False)
    m, other = meter("cuda:0").start(), meter("cuda:1").start()
    with pytest.raises(MeterBusyError, match="cuda:0"):
        meter(torch.device("cuda", 0)).start()
    cuda.allocate(300)
    m.mark("a")
    cuda.allocate(700)
    cuda.allocate(-900)
    m.mark("b")
    cuda.allocate(-200)
    other.stop()
    m.stop()
    assert m.segments == [Segment("a", 300, 1000, 100), Segment("b", 100, 100, -100)]
    assert (m.peak_bytes, m.end_bytes) == (1000, -100)


def test_cached_memory_counts_as_free_on_cuda(monkeypatch):
    cuda = _FakeCuda(monkeypatch)
    assert memory.free_bytes("cuda:0") == 5000 + 4000 - 1000
    cuda.fraction = 0.25
    assert memory.free_bytes("cuda:0") == 5000 - 1000
    cuda.fraction = 0.01
    assert memory.free_bytes("cuda:0") == 0


def test_the_driver_is_asked_before_pytorch(monkeypatch):
    cuda = _FakeCuda(monkeypatch)
    cuda.driver_free = 6000
    assert memory.free_bytes("cuda:0") == 6000 + 4000 - 1000
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert memory.free_bytes("cuda") == 6000 + 4000 - 1000
