"""Devices by PyTorch's common words, and what only some of them have.

A device is the CPU or the accelerator that PyTorch has a module for (``torch.xpu``, or one that a
backend registers). What a module lacks is asked for here, in one place.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from rotor import _core


class _ModuleGenerator:
    """Default generator of a device whose module has functions for its state only."""

    def __init__(self, module: Any, arguments: tuple[Any, ...]) -> None:
        self._module, self._arguments = module, arguments

    def get_state(self) -> torch.Tensor:
        state: torch.Tensor = self._module.get_rng_state(*self._arguments)
        return state

    def set_state(self, new_state: torch.Tensor) -> None:
        self._module.set_rng_state(new_state, *self._arguments)


_ONE_DEVICE = {"mps"}
"""Types with one device, whose functions take none."""


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)


@cache
def type_of(device: torch.device) -> str:
    """Return the type of a device, whose name PyTorch writes anew whenever it is asked."""
    return device.type


def known(device: torch.device | str) -> torch.device:
    """Return a device with its index; ValueError if PyTorch or this machine lacks such a device."""
    found = torch.device(device)
    if found.type == "cpu":
        return torch.device("cpu")
    try:
        module = _module(found)
    except RuntimeError:
        raise ValueError(
            f"expected the CPU or an accelerator that PyTorch has a module for, such as "
            f"{default_type()}, got {str(device)!r}"
        ) from None
    if ":" in str(found):
        return found
    try:
        return torch.device(found.type, getattr(module, "current_device", lambda: 0)())
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"{str(device)!r}: this machine has {count(found.type)} {found.type.upper()} devices"
        ) from error


def has_counters(device: torch.device) -> bool:
    """Return whether an accelerator's allocator counts allocated bytes and their peak."""
    return device.type not in _ONE_DEVICE


def counters(device: torch.device) -> tuple[int, int]:
    """Return the bytes that are allocated on an accelerator, and the most since a reset."""
    stats = torch.accelerator.memory_stats(device)
    allocated: int = stats.get("allocated_bytes.all.current", 0)
    return allocated, stats.get("allocated_bytes.all.peak", 0)


def reset_peak(device: torch.device) -> None:
    """Let the counter of the most allocated bytes begin at the current ones."""
    torch.accelerator.reset_peak_memory_stats(device)


def allocated_bytes(device: torch.device) -> int:
    is_known = _stats is not None and device.index is not None and torch.accelerator.is_available()
    if not is_known or not torch._C._accelerator_isAllocatorInitialized():
        return counters(device)[0]
    found: int = _stats(device.index)["allocated_bytes"]["all"]["current"]
    return found


def level(device: torch.device) -> int:
    """Return the bytes in use on a device; of the CPU, those of the C library's heap."""
    return _core.heap_bytes() if device.type == "cpu" else allocated_bytes(device)


_stats: Any = getattr(torch._C, "_accelerator_getDeviceStats", None)
"""The counters as PyTorch has them: `torch.accelerator.memory_stats` sorts all of them."""


def reserved_bytes(device: torch.device) -> int:
    """Return the bytes that an accelerator's allocator has taken from it."""
    found: int = torch.accelerator.memory_stats(device).get("reserved_bytes.all.current", 0)
    return found


def release_cached(device: torch.device) -> None:
    """Let an accelerator's allocator give cached memory back to the device."""
    with torch.accelerator.device_index(device.index or 0):
        torch.accelerator.empty_cache()


def has_pools(device: torch.device) -> bool:
    """Return whether an accelerator's allocator has private pools, whose segments do not grow."""
    if device.type == "cpu" or expandable_segments():
        return False
    module = _module(device)
    return hasattr(module, "MemPool") and hasattr(module, "use_mem_pool")


class Pool:
    """Private pool of an accelerator's allocator, with segments taken from the device beforehand.

    `blocks` are sizes in bytes: such blocks are allocated together, and freed, and their segments
    stay in the pool. Raises `torch.OutOfMemoryError` if the device has too few bytes.
    """

    def __init__(self, device: torch.device, blocks: Sequence[int]) -> None:
        self._device = device
        self._pool = _module(device).MemPool()
        self._use: Any = None
        self.enter()
        try:
            taken = [torch.empty(size, dtype=torch.uint8, device=device) for size in blocks]
            del taken
        finally:
            self.leave()

    def enter(self) -> None:
        """Take the allocations of this thread from the pool."""
        if self._use is None:
            self._use = _module(self._device).use_mem_pool(self._pool, self._device)
            self._use.__enter__()

    def leave(self) -> None:
        """Take them from where they came before; do nothing if that is so."""
        use, self._use = self._use, None
        if use is not None:
            use.__exit__(None, None, None)


def default_type() -> str:
    """Return the type of the accelerator here; without one, of the most common kind."""
    found = torch.accelerator.current_accelerator()
    return "cuda" if found is None else found.type


def is_type(name: str) -> bool:
    """Return whether a name is that of a type of devices that compute."""
    try:
        found = torch.device(name)
    except (RuntimeError, TypeError):
        return False
    return found.type == name != "meta"


def chosen(name: str | None) -> torch.device:
    """Return the device of a name; by default the accelerator, if one is available.

    Raises ValueError if this machine has no such device.
    """
    if name is None:
        return torch.device(default_type(), 0) if torch.accelerator.is_available() else _CPU
    try:
        device = torch.device(name)
    except RuntimeError:
        kind = default_type()
        raise ValueError(f"{name!r}: expected cpu, {kind}, or such as {kind}:1") from None
    if device.type == "cpu":
        return _CPU
    found = count(device.type)
    if (device.index or 0) >= found:
        raise ValueError(f"{name!r}: this machine has {found} {device.type.upper()} devices")
    return torch.device(device.type, device.index or 0)


_CPU = torch.device("cpu")


def _allocator_settings() -> str:
    read = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    return os.environ.get("PYTORCH_ALLOC_CONF", "") if read is None else str(read())


def _has_cudnn(device: torch.device) -> bool:
    return device.type == "cuda"


def libraries(device: torch.device) -> tuple[Any, ...]:
    """Return versions and settings that decide about an accelerator's kernels and blocks."""
    settings = _allocator_settings()
    if not _has_cudnn(device):
        return (settings,)
    return settings, torch.version.cuda, torch.version.hip, torch.backends.cudnn.version()


def expandable_segments() -> bool:
    """Return whether the segments of the accelerator's allocator grow."""
    return "expandable_segments:true" in _allocator_settings().replace(" ", "").lower()


def free_and_total_bytes(device: torch.device) -> tuple[int, int]:
    """Return the bytes of an accelerator that no process has taken, and all of them."""
    free, total = torch.accelerator.get_memory_info(device)
    return free, total


def memory_fraction(device: torch.device) -> float:
    """Return the part of an accelerator's memory that this process may take."""
    read = getattr(_module(device), "get_per_process_memory_fraction", None)
    return 1.0 if read is None else float(read(device))


def cap_reserved(device: torch.device, nbytes: int, total_bytes: int) -> None:
    """Have an accelerator's allocator take no more from the device than so many of its bytes.

    It gives cached memory back before it takes more. A lower fraction of the user's stays.
    """
    cap = getattr(_module(device), "set_per_process_memory_fraction", None)
    if cap is None:
        return
    present, wanted = memory_fraction(device), min(max(nbytes, 0) / total_bytes, 1.0)
    if present == _capped.get(device, 1.0) or wanted < present:
        cap(wanted, device)
        _capped[device] = memory_fraction(device)


_capped: dict[torch.device, float] = {}


def generator_of(device: torch.device) -> Generator:
    if device.type == "cpu":
        return torch.default_generator
    module = _module(device)
    generators = getattr(module, "default_generators", ())
    index = device.index or 0
    if index < len(generators):
        found: Generator = generators[index]
        return found
    return _ModuleGenerator(module, () if device.type in _ONE_DEVICE else (device,))


def name_of(device: torch.device) -> str:
    """Return the name of a device's model; "cpu" for the CPU."""
    if device.type == "cpu":
        return "cpu"
    read = getattr(_module(device), "get_device_name", None)
    return device.type if read is None else str(read(device))


def identity(device: torch.device) -> str:
    """Return what tells an accelerator from the others of its machine, in every process."""
    read = getattr(_module(device), "get_device_properties", None)
    found = None if read is None else getattr(read(device), "uuid", None)
    if found is not None:
        return str(found)
    visible = [os.environ.get(name, "") for name in _VISIBLE]
    return f"{device} of {' '.join(visible)}"


_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""Variables that show a process some of the devices."""


def capturing(device: torch.device) -> Callable[[], bool] | None:
    """Return the question of whether work is being captured; ``None`` where it cannot be."""
    if device.type == "cpu":
        return None
    asks: Callable[[], bool] | None
    asks = getattr(_module(device), "is_current_stream_capturing", None)
    return asks


def is_capturing() -> bool:
    """Return whether work on the current accelerator is being captured.

    One that is not in use is not asked: PyTorch names it even where its driver is missing, and the
    question is then an error.
    """
    if torch.accelerator.current_accelerator() is None:
        return False
    asks = capturing(accelerator_in_use())
    return asks is not None and asks()


def departure(device: torch.device) -> Callable[[], bool] | None:
    """Return the question of whether work now goes elsewhere than to the present stream.

    It is true while work is captured, and on another stream; ``None`` on the CPU.
    """
    if device.type == "cpu":
        return None
    asks, index = capturing(device), device.index or 0
    current = torch.accelerator.current_stream(index)

    def has_left() -> bool:
        return (asks is not None and asks()) or torch.accelerator.current_stream(index) != current

    return has_left


def synchronize(device: torch.device) -> None:
    torch.accelerator.synchronize(device)


_BUSY_CYCLES = 1 << 20
"""Cycles of the kernel that occupies a device: half a millisecond."""


def occupy(device: torch.device) -> None:
    """Have an accelerator's stream busy for half a millisecond, if its module has a kernel for it.

    What is launched meanwhile runs without a gap: events around it show the device's own time.
    """
    sleep = getattr(_module(device), "_sleep", None)
    if sleep is not None:
        with torch.accelerator.device_index(device.index or 0):
            sleep(_BUSY_CYCLES)


def settle_backwards(device: torch.device) -> None:
    """Wait until an accelerator's thread of backwards has dropped what it ran.

    A backward returns as soon as its last node has run, and the thread drops that node, with what
    it saved, a moment later: the counters of memory fall at a time of its own.
    """
    with torch.inference_mode(False), torch.enable_grad():
        nothing = torch.empty(0, device=device, requires_grad=True)
        nothing.view(0).backward(torch.empty(0, device=device))


def run_in_backward(device: torch.device, call: Callable[[], object]) -> None:
    """Call a function in an accelerator's thread of backwards, without gradients."""
    with torch.inference_mode(False), torch.enable_grad():
        nothing = torch.empty(0, device=device, requires_grad=True)
        made = nothing.view(0)

        def run(_: torch.Tensor) -> None:
            call()

        made.register_hook(run)
        torch.autograd.grad(made, nothing, torch.empty(0, device=device))
    settle_backwards(device)


def searches(device: torch.device) -> bool:
    """Return whether each thread searches algorithms at an operation's first call.

    A search takes as much memory as it finds, once. CUDA searches if it is asked to.
    """
    return device.type != "cpu" and (not _has_cudnn(device) or torch.backends.cudnn.benchmark)


def prepare(device: torch.device) -> None:
    """Let libraries allocate what they keep for this thread and the one of backwards.

    At the first matrix product of a thread, in each stream, an accelerator's library takes a
    workspace that it keeps. Made here, it is part of the level before a step and not of its peak.
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or device.type != accelerator.type:
        return
    key = (device, threading.get_ident(), torch.accelerator.current_stream(device).stream_id)
    if key in _prepared:
        return
    _prepared.add(key)
    autocast = torch.autocast(device.type, enabled=False)
    with torch.inference_mode(False), torch.enable_grad(), autocast:
        matrix = torch.zeros(8, 8, device=device, requires_grad=True)
        torch.autograd.grad((matrix @ matrix).sum(), matrix)
    settle_backwards(device)


_prepared: set[tuple[torch.device, int, int]] = set()


def count(device_type: str) -> int:
    """Return the number of devices of a type that this process sees; 0 for an unknown type."""
    try:
        module = torch.get_device_module(device_type)
    except RuntimeError:
        return 0
    return int(module.device_count()) if module.is_available() else 0


Generator = torch.Generator | _ModuleGenerator
"""Random generator whose state, a tensor in the host's memory, can be read and set."""


def release_all() -> None:
    """Give the unused blocks of the accelerator's allocator back, if the accelerator is in use."""
    if accelerator_in_use().type not in ("cpu", *_ONE_DEVICE):
        torch.accelerator.empty_cache()


def accelerator_in_use() -> torch.device:
    """Return the current device of the accelerator if it is in use, else the CPU."""
    found = torch.accelerator.current_accelerator()
    if found is None:
        return torch.device("cpu")
    module = _module(found)
    if not getattr(module, "is_initialized", module.is_available)():
        return torch.device("cpu")
    return torch.device(found.type, torch.accelerator.current_device_index())
