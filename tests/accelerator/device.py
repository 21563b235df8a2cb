"""The module ``torch.sim``: what PyTorch asks of a device's module, and the simulation's settings.

It has less than ``torch.cuda``, as the modules of other accelerators do.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import torch

from accelerator.build import library

__all__ = ["register"]

_CLOCKS = {"real": 0, "virtual": 1, "model": 2}
_registered: ModuleType | None = None


def _index(device: Any = None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


class _Device:
    def __init__(self, device: Any) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        self._before = torch._C._accelerator_exchangeDevice(self._index)

    def __exit__(self, *_: object) -> None:
        torch._C._accelerator_maybeExchangeDevice(self._before)


def _functions() -> ctypes.CDLL:
    found = ctypes.CDLL(str(library()))
    number, size, real = ctypes.c_int, ctypes.c_uint64, ctypes.c_double
    signatures = {
        "initialize": [],
        "set_capacity": [number, size],
        "set_taken": [number, size],
        "set_fraction": [number, real],
        "set_expandable": [number, number],
        "set_poison": [number],
        "set_devices": [number],
        "drop_pool": [number, number],
        "replay": [number, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p],
        "set_clock": [number],
        "sleep": [ctypes.c_int64],
        "set_link": [real, ctypes.c_int64, number],
        "set_compute": [real, real, ctypes.c_int64],
        "set_late_copies": [number],
        "set_handles": [size, size, size],
        "forget_handles": [],
        "manual_seed": [number, size],
    }
    for name, arguments in signatures.items():
        function = getattr(found, f"sim_{name}")
        function.argtypes, function.restype = arguments, None
    for name in ("clock_ns", "kernels", "races", "handles", "searches", "first_calls"):
        getattr(found, f"sim_{name}").restype = ctypes.c_int64
    found.sim_last_race.restype = found.sim_snapshot.restype = ctypes.c_char_p
    found.sim_fraction.restype = real
    found.sim_new_pool.restype = found.sim_use_pool.restype = number
    return found


def register() -> ModuleType:
    """Give PyTorch the device, once; return its module."""
    global _registered
    if _registered is None:
        functions = _functions()
        # Memory that other threads of a kernel allocate would not be the device's.
        torch.set_num_threads(1)
        torch.utils.rename_privateuse1_backend("sim")
        functions.sim_initialize()
        _registered = _module(functions)
        torch._register_device_module("sim", _registered)
        torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return _registered


def _module(functions: ctypes.CDLL) -> ModuleType:
    module: Any = ModuleType("torch.sim")
    _describe(module)
    _count_memory(module, functions)
    _give_pools(module, functions)
    _draw(module, functions)
    _simulate(module, functions)
    return module


def _describe(module: Any) -> None:
    accelerator = torch.accelerator
    module._initialized = True
    module._is_in_bad_fork = lambda: False
    module._lazy_init = module.init = lambda: None
    module._exchange_device = torch._C._accelerator_exchangeDevice
    module._maybe_exchange_device = torch._C._accelerator_maybeExchangeDevice
    module.is_available = module.is_initialized = lambda: True
    module.device_count = torch._C._accelerator_hooks_device_count
    module.current_device = accelerator.current_device_index
    module.set_device = lambda device: accelerator.set_device_index(_index(device))
    module.device = _Device
    module.synchronize = lambda device=None: accelerator.synchronize(_index(device))
    module.current_stream = lambda device=None: accelerator.current_stream(_index(device))
    module.set_stream = accelerator.set_stream
    module.stream = lambda stream: stream  # A stream is a context by itself.
    # Functions: elapsed_time() takes no subclasses of torch.Event.
    module.Stream = lambda device=None, priority=0: torch.Stream(
        device=torch.device("sim", _index(device)), priority=priority
    )
    module.Event = lambda enable_timing=False: torch.Event("sim", enable_timing=enable_timing)
    module.get_device_name = lambda device=None: "simulated"
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]


def _count_memory(module: Any, functions: ctypes.CDLL) -> None:
    names = (
        "memory_allocated max_memory_allocated memory_reserved max_memory_reserved memory_stats "
        "reset_peak_memory_stats reset_accumulated_memory_stats"
    )
    for name in names.split():
        counter = getattr(torch.accelerator, name)
        setattr(module, name, lambda device=None, counter=counter: counter(_index(device)))
    module.mem_get_info = lambda device=None: torch.accelerator.get_memory_info(_index(device))
    module.empty_cache = torch.accelerator.empty_cache
    module.OutOfMemoryError = torch.OutOfMemoryError
    module.set_per_process_memory_fraction = lambda fraction, device=None: (
        functions.sim_set_fraction(_index(device), fraction)
    )
    module.get_per_process_memory_fraction = lambda device=None: functions.sim_fraction(
        _index(device)
    )
    module.memory_snapshot = lambda device=None: json.loads(functions.sim_snapshot(_index(device)))


def _give_pools(module: Any, functions: ctypes.CDLL) -> None:
    class MemPool:
        """Private pool of the allocator; its memory is given back once it is dropped."""

        def __init__(self) -> None:
            self._device = _index()
            self.id = (0, functions.sim_new_pool(self._device))

        def __del__(self) -> None:
            functions.sim_drop_pool(self._device, self.id[1])

    in_use: set[tuple[int, int]] = set()

    @contextlib.contextmanager
    def use_mem_pool(pool: MemPool, device: Any = None) -> Iterator[None]:
        """Take the allocations of this thread from a pool, which no other thread may use now."""
        if pool.id in in_use:
            raise RuntimeError(f"already recording to mempool_id {pool.id}")
        index = _index(device)
        in_use.add(pool.id)
        before = functions.sim_use_pool(index, pool.id[1])
        try:
            yield
        finally:
            functions.sim_use_pool(index, before)
            in_use.discard(pool.id)

    module.MemPool, module.use_mem_pool = MemPool, use_mem_pool


def _draw(module: Any, functions: ctypes.CDLL) -> None:
    generators = tuple(torch.ops.sim.default_generator(index) for index in range(4))
    module.default_generators = generators
    module._get_generator = lambda device=None: generators[_index(device)]
    module.get_rng_state = lambda device=None: generators[_index(device)].get_state()
    module.set_rng_state = lambda state, device=None: generators[_index(device)].set_state(state)

    def manual_seed_all(seed: int) -> None:
        for index in range(module.device_count()):
            functions.sim_manual_seed(index, seed % 2**64)

    module.manual_seed_all = manual_seed_all
    module.manual_seed = lambda seed: functions.sim_manual_seed(_index(), seed % 2**64)


def _set_expandable(functions: ctypes.CDLL, on: bool, device: int) -> None:
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{on}")
    functions.sim_set_expandable(device, on)


def _replayed(functions: ctypes.CDLL, events: Any, device: int) -> Any:
    """Return the allocated and reserved bytes after each event (csrc/rotor/blocks.h)."""
    events = np.ascontiguousarray(events, dtype=np.int64)
    levels = np.zeros((len(events), 2), dtype=np.int64)
    functions.sim_replay(device, events.ctypes.data, len(events), levels.ctypes.data)
    return levels


def _simulate(module: Any, functions: ctypes.CDLL) -> None:
    """Add the settings of the simulation, and what it has counted."""
    module.set_capacity = lambda nbytes, device=0: functions.sim_set_capacity(device, nbytes)
    module.set_taken = lambda nbytes, device=0: functions.sim_set_taken(device, nbytes)
    module.replay = lambda events, device=0: _replayed(functions, events, device)
    module.set_expandable = lambda on, device=0: _set_expandable(functions, bool(on), device)
    module.set_devices = functions.sim_set_devices
    module.set_poison = functions.sim_set_poison
    module._sleep = functions.sim_sleep
    module.set_late_copies = functions.sim_set_late_copies
    module.set_clock = lambda kind: functions.sim_set_clock(_CLOCKS[kind])
    module.set_link = lambda gb_per_s, latency_ns=10_000, is_duplex=True: functions.sim_set_link(
        gb_per_s, latency_ns, is_duplex
    )
    module.set_compute = lambda slowdown=1.0, gb_per_s=100.0, launch_ns=5_000: (
        functions.sim_set_compute(slowdown, gb_per_s, launch_ns)
    )
    module.set_handles = lambda handle_bytes=0, search_bytes=0, first_bytes=0: (
        functions.sim_set_handles(handle_bytes, search_bytes, first_bytes)
    )
    module.forget_handles = functions.sim_forget_handles
    for name in ("clock_ns", "kernels", "races", "handles", "searches", "first_calls"):
        setattr(module, name, getattr(functions, f"sim_{name}"))
    module.last_race = lambda: functions.sim_last_race().decode()
