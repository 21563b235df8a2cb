"""What the benchmarks share: batches, steps, exact peaks, times of contenders run in turn."""

from __future__ import annotations

import copy
import ctypes
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

import rotor
from rotor import memory
from rotor.timing import Clock

Batch = tuple[torch.Tensor, torch.Tensor]


def open_device(name: str) -> torch.device:
    """The device of a name; on CUDA steps then leave the same bits each time.

    Raises
    ------
    SystemExit
        It is no CPU or CUDA device, or there is none here; it says so.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise SystemExit(f"--device takes cpu, cuda or cuda:0, got {name!r}")
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        raise SystemExit(f"--device {name}: PyTorch sees {count} CUDA devices: try --device cpu")
    # Read when cuBLAS is first used.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True)
    # What is not yet written would be filled, which takes time.
    torch.utils.deterministic.fill_uninitialized_memory = False
    device = torch.device("cuda", device.index or 0)
    torch.cuda.set_device(device)
    return device


def read_clock(device: torch.device) -> float:
    """Seconds: CPU time of the process, or on CUDA wall time once everything launched has ended."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def classification_batch(batch: int, size: int, device: torch.device, classes: int = 1000) -> Batch:
    """Random images and labels."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch, 3, size, size, generator=generator)
    labels = torch.randint(0, classes, (batch,), generator=generator)
    return images.to(device), labels.to(device)


def token_batch(batch: int, length: int, vocabulary: int, device: torch.device) -> Batch:
    """Random tokens, and the ones that follow them."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocabulary, (batch, length + 1), generator=generator)
    return tokens[:, :-1].contiguous().to(device), tokens[:, 1:].contiguous().to(device)


def cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The loss of classification, and of next tokens."""
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())


def train_step(model: nn.Module, batch: Batch, *, captured: bool = False) -> torch.Tensor:
    """Forward, loss and backward with fresh gradients; returns the loss."""
    x, target = batch
    for parameter in model.parameters():
        parameter.grad = None
    if captured:
        loss = model(x, targets=(target,))
    else:
        output = model(x)
        loss = cross_entropy(output, target)
    loss.backward()
    return loss.detach()


def step_peak_bytes(model: nn.Module, batch: Batch, *, captured: bool = False) -> int:
    """Peak of a step above the level at its start, after one step that is not metered."""
    train_step(model, batch, captured=captured)
    for parameter in model.parameters():
        parameter.grad = None
    x, target = batch
    with memory.meter(x.device) as meter:
        if captured:
            model(x, targets=(target,)).backward()
        else:
            output = model(x)
            cross_entropy(output, target).backward()
    return int(meter.peak_bytes)


def keep_freed_memory() -> None:
    """Make the C library keep what is freed, as the CUDA allocator does; glibc only.

    Otherwise it gives large blocks back to the system, and a step's time depends on how many pages
    the system has to clear for it, by 10 % and more, whatever is computed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mmap_max, trim_threshold, top_pad = -4, -1, -2
        for option, value in ((mmap_max, 0), (trim_threshold, 2**31 - 1), (top_pad, 2**28)):
            mallopt(option, value)


@dataclass
class Contender:
    """A model to be timed."""

    name: str
    model: nn.Module
    captured: bool = False


def interleaved_times(
    contenders: Sequence[Contender], batch: Batch, rounds: int, warm_ups: int = 2
) -> list[float]:
    """Median seconds of a step of each, run in turn, on the clock that rotor measures with."""
    clock = Clock(batch[0].device)
    samples: list[list[float]] = [[] for _ in contenders]
    for contender in contenders:
        for _ in range(warm_ups):
            train_step(contender.model, batch, captured=contender.captured)
    for _ in range(rounds):
        for contender, times in zip(contenders, samples, strict=True):
            clock.start()
            train_step(contender.model, batch, captured=contender.captured)
            times.append(clock.stop() / 1e9)
    return [statistics.median(times) for times in samples]


class Segmented(nn.Module):
    """``torch.utils.checkpoint.checkpoint_sequential`` over the stages of a model."""

    def __init__(self, stages: Sequence[Callable[[Any], Any]], segments: int) -> None:
        super().__init__()
        self.stages = [_Callable(stage) for stage in stages]
        self.segments = segments
        modules = {m for stage in stages for m in stage.modules()}  # type: ignore[attr-defined]
        self._owned = nn.ModuleList(modules)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output, by `segments` segments."""
        return checkpoint_sequential(self.stages, self.segments, x, use_reentrant=False)


class _Callable:
    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __call__(self, x: Any) -> Any:
        return self.function(x)


@dataclass
class SegmentedPeak:
    """A number of segments with what it needs and takes."""

    segments: int
    module: Segmented
    peak_bytes: int
    seconds: float


def segment_table(
    model: rotor.Checkpointable, batch: Batch, numbers: Iterable[int]
) -> list[SegmentedPeak]:
    """Peak and time of each number of segments, on a copy of the model's stages."""
    stages = copy.deepcopy(model).inspection_values.stages
    clock = Clock(batch[0].device)
    entries = []
    for segments in numbers:
        if segments <= len(stages):
            module = Segmented(stages, segments)
            peak = step_peak_bytes(module, batch)
            clock.start()
            train_step(module, batch)
            entries.append(SegmentedPeak(segments, module, peak, clock.stop() / 1e9))
    return entries


def best_segments(model: rotor.Checkpointable, batch: Batch, limit: int) -> SegmentedPeak:
    """The fastest number of segments within the limit; else the one that needs least."""
    entries = segment_table(model, batch, range(2, 7))
    within = [entry for entry in entries if entry.peak_bytes <= limit]
    if within:
        return min(within, key=lambda entry: entry.seconds)
    return min(entries, key=lambda entry: entry.peak_bytes)


def equal_gradients(a: nn.Module, b: nn.Module) -> bool:
    """Whether all gradients are bit-equal."""
    return all(
        (p.grad is None) == (q.grad is None) and (p.grad is None or torch.equal(p.grad, q.grad))
        for p, q in zip(a.parameters(), b.parameters(), strict=True)
    )


def equal_states(a: nn.Module, b: nn.Module) -> bool:
    """Whether all parameters and buffers are bit-equal."""
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The blocks of a model: the members of its lists and sequences, else its children.

    Parameters
    ----------
    model
        Any module.

    Returns
    -------
    list of (str, Module)
        Disjoint modules by path, none inside another; those without children or parameters are
        left out.
    """
    found: list[tuple[str, nn.Module]] = []

    def visit(path: str, module: nn.Module) -> bool:
        """Whether blocks were found inside."""
        children = list(module.named_children())
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            members = [(f"{path}.{name}".lstrip("."), child) for name, child in children]
            chosen = [item for item in members if any(True for _ in item[1].parameters())]
            if len(chosen) > 1:
                found.extend(chosen)
                return True
        inside = [visit(f"{path}.{name}".lstrip("."), child) for name, child in children]
        return any(inside)

    if not visit("", model):
        found = [
            (name, child)
            for name, child in model.named_children()
            if any(True for _ in child.parameters())
        ]
    unique: dict[int, tuple[str, nn.Module]] = {}
    for path, module in found:
        unique.setdefault(id(module), (path, module))
    return list(unique.values())
