"""Measures of memory by their published names: `MemSize`, `MeasureMemory`, `DisplayMemory`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Self

import psutil
import torch
from torch import nn

from rotor._pytorch import devices
from rotor.meter.allocator import free_bytes, meter
from rotor.timing import make_timer
from rotor.units import format_bytes, parse_bytes

__all__ = ["DisplayMemory", "MeasureMemory", "MemSize"]


class MemSize(int):
    """Number of bytes that is shown for people, such as "1.5 GiB".

    Parameters
    ----------
    v
        Bytes.
    """

    def __new__(cls, v: float) -> Self:
        """Return a whole number of bytes."""
        return super().__new__(cls, v)

    @property
    def v(self) -> int:
        """The number."""
        return int(self)

    @classmethod
    def fromStr(cls, str: str) -> Self:
        """Return the bytes that a text such as "1.5G" says; ValueError: it cannot be read."""
        return cls(parse_bytes(str, name="str"))

    def __add__(self, other: int) -> Self:
        return type(self)(int(self) + other)

    def __sub__(self, other: int) -> Self:
        return type(self)(int(self) - other)

    def __str__(self) -> str:
        return format_bytes(self)

    def __format__(self, format_spec: str) -> str:
        return format(str(self), format_spec)


class MeasureMemory:
    """Memory in use: what the allocator of an accelerator has given out, or the process has taken.

    Parameters
    ----------
    device
        The CPU, whose allocator keeps no count: the process's resident bytes are read there, which
        are no exact measure. `measure` is exact on every device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = devices.known(device)
        self._most = 0
        self.resetMax()
        self.start_memory = self.last_memory = self.currentValue()

    def currentValue(self) -> int:
        """Return the bytes in use."""
        is_cpu = self.device.type == "cpu"
        found = psutil.Process().memory_info().rss if is_cpu else devices.level(self.device)
        self._most = max(self._most, found)
        return int(found)

    def current(self) -> MemSize:
        """Return the bytes in use, as a `MemSize`."""
        return MemSize(self.currentValue())

    def maximumValue(self) -> MemSize:
        """Return the most since `resetMax`; on the CPU, of the values that were read."""
        if self.device.type == "cpu":
            return MemSize(self._most)
        return MemSize(devices.counters(self.device)[1])

    def resetMax(self) -> None:
        """Count the maximum anew."""
        self._most = 0
        if self.device.type != "cpu":
            devices.reset_peak(self.device)
        self.currentValue()

    def available(self, index: int | None = None) -> int:
        """Return what may still be allocated, on another device of that kind too; in bytes."""
        device = self.device if index is None else torch.device(self.device.type, index)
        return free_bytes(device)

    def diffFromLast(self) -> MemSize:
        """Return the change since the last call."""
        before, self.last_memory = self.last_memory, self.currentValue()
        return MemSize(self.last_memory - before)

    def diffFromStart(self) -> MemSize:
        """Return the change since this object was made."""
        return MemSize(self.currentValue() - self.start_memory)

    def currentCached(self) -> MemSize:
        """Return what the allocator of an accelerator has taken from it; 0 on the CPU."""
        return MemSize(0 if self.device.type == "cpu" else devices.reserved_bytes(self.device))

    def measure(self, func: Callable[..., Any], *args: Any) -> tuple[Any, MemSize, MemSize]:
        """Call a function; return its result, the bytes that stay, and the most it needed.

        Both are above the level at the start. MeterBusyError: another meter is running.
        """
        with meter(self.device) as found:
            result = func(*args)
        self.diffFromLast()
        return result, MemSize(found.end_bytes), MemSize(found.peak_bytes)


class DisplayMemory:
    """Lines on the standard output about the memory in use.

    Parameters
    ----------
    device
        As of `MeasureMemory`.
    maxLabelSize
        Width of the labels.
    """

    def __init__(self, device: torch.device, maxLabelSize: int = 45) -> None:
        self.device = device
        self.memUsage = MeasureMemory(device)
        self.setMaxLabelSize(maxLabelSize)

    def setMaxLabelSize(self, size: int) -> None:
        """Set the width of the labels."""
        self.maxLabelSize = size

    def maximumValue(self) -> MemSize:
        """Return the most bytes since the maximum was reset."""
        return self.memUsage.maximumValue()

    def printCurrentState(self, label: str, time: float | None = None) -> None:
        """Write a line: label, milliseconds if given, bytes in use, most, change, cached."""
        usage = self.memUsage
        now = f"{'' if time is None else format(time, '.2f'):>8}"
        sys.stdout.write(
            f"{label:<{self.maxLabelSize}} {now} TotalMem: {usage.current():>12} "
            f"max reached: {self.maximumValue():>12} wrt to last: {usage.diffFromLast():>12} "
            f"cached: {usage.currentCached():>12}\n"
        )

    def inspectModule(self, module: nn.Module) -> None:
        """Write a line after the forward and the backward of each child, from now on."""
        timer = make_timer(self.device)
        timer.start()
        children = dict(module.named_children())
        self.setMaxLabelSize(max(map(len, children), default=0) + len("Bwd "))

        def line(label: str) -> Callable[..., None]:
            return lambda *_: self.printCurrentState(label, timer.elapsedAndReset())

        for name, child in children.items():
            child.register_forward_hook(line(f"Fwd {name}"))
            child.register_full_backward_hook(line(f"Bwd {name}"))
