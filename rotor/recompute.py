"""What a recomputation needs to give the numbers of the first forward again.

Random number generators are set back and restored afterwards; buffers that the first forward
changed (the running statistics of BatchNorm, the vectors of spectral norm) are replaced by copies
of what they were, so that the real ones are updated exactly once; autocast is as it was.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import nn

from rotor import _core, _torch
from rotor.places import Saved
from rotor.stages import Stage

States = list[tuple[torch.Tensor, Any]]
"""The state of each generator, and the same bytes as an array."""

SPLIT_BACKWARD = (
    "a backward asked for the gradients of inputs only, and keeps the graph for those of "
    "parameters: a plan gives both at once. In a pipeline, use a schedule with whole backwards "
    "(GPipe, 1F1B, Interleaved1F1B), none of the zero-bubble ones"
)


class RngTracker:
    """Reads the states of the CPU's and the device's generators, no more often than needed."""

    __slots__ = ("_generators", "latest")

    def __init__(self, device: torch.device) -> None:
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[device.index or 0])
        self.latest: States | None = None
        """What was read last, if nothing can have drawn random numbers since."""

    def read(self) -> States:
        """The states now."""
        return [(s := generator.get_state(), s.numpy()) for generator in self._generators]

    def write(self, states: States) -> None:
        """Set the generators."""
        for generator, (state, _) in zip(self._generators, states, strict=True):
            generator.set_state(state)

    def drawn_since(self, states: States) -> bool:
        """Whether random numbers were drawn since `states` was read."""
        now = self.latest = self.read()
        for (_, before), (_, after) in zip(states, now, strict=True):
            if not _core.same_bytes(before, after):
                return True
        return False


class Snapshot:
    """What the first forward of a stage began with, for recomputations of it.

    Parameters
    ----------
    stage
        The stage, about to run for the first time.
    rng
        Where random states are read, ``None`` when they are not to be preserved.
    """

    __slots__ = (
        "_buffers",
        "_parameters",
        "_rng",
        "_stage",
        "_state",
        "_states",
        "_versions",
        "_watched",
    )

    def __init__(self, stage: Stage, rng: RngTracker | None) -> None:
        self._stage = stage
        self._parameters = stage.standing()
        self._versions = [-1 if p is None else p._version for p in self._parameters]
        self._rng = rng
        self._states = None if rng is None else rng.latest or rng.read()
        self._watched: list[tuple[_torch.Slot, torch.Tensor, int]] = []
        self._buffers: list[tuple[_torch.Slot, torch.Tensor]] = []
        self._state = Saved(stage.state)
        if stage.buffers:
            self._copy_buffers(stage)

    def _copy_buffers(self, stage: Stage) -> None:
        self._watched = [
            (slot, buffer, buffer._version)
            for slot in stage.buffers
            if (buffer := slot[0][slot[1]]) is not None
        ]
        mutable = stage.buffers if stage.mutable_buffers is None else stage.mutable_buffers
        self._buffers = [
            (slot, buffer.detach().clone())
            for slot in mutable
            if (buffer := slot[0][slot[1]]) is not None
        ]

    def finish(self) -> None:
        """The first forward is over: keep only what it changed.

        Raises
        ------
        RuntimeError
            It changed a buffer of which no copy was made.
        """
        states, rng = self._states, self._rng
        if states is not None and rng is not None and not rng.drawn_since(states):
            self._states = None
        if not self._watched:
            return
        # Kernels such as native_batch_norm change buffers without a trace in their versions.
        if self._stage.mutable_buffers is None:
            self._buffers = [
                (slot, copy)
                for slot, copy in self._buffers
                if not torch.equal(copy, slot[0][slot[1]])
            ]
        else:
            self._check_watched()
        self._watched = []

    def _check_watched(self) -> None:
        copied = {_key(slot) for slot, _ in self._buffers}
        for slot, buffer, version in self._watched:
            same = slot[0][slot[1]] is buffer and buffer._version == version
            if not same and _key(slot) not in copied:
                raise RuntimeError(
                    f"stage {self._stage.name} changed its buffer {slot[1]!r}, which it did not "
                    "do when it was measured, so recomputing it would change it twice: call "
                    "measure() again with the model as it is now"
                )

    def recompute(self, x: Any, *, last: bool) -> Any:
        """Run the stage again as the first time; the `last` run may use up the copies."""
        self._check_parameters()
        if not self._buffers and not self._state and self._states is None:
            return self._stage(x)
        saved = None
        current = self._state.current()
        replaced = [slots[name] for (slots, name), _ in self._buffers]
        try:
            if self._states is not None and self._rng is not None:
                saved = self._rng.read()
                self._rng.write(self._states)
            for (slots, name), copy in self._buffers:
                slots[name] = copy if last else copy.clone()
            self._state.put(last=last)
            return self._stage(x)
        finally:
            for ((slots, name), _), buffer in zip(self._buffers, replaced, strict=True):
                slots[name] = buffer
            for place, value in current:
                place.put(value)
            if saved is not None and self._rng is not None:
                self._rng.write(saved)

    def _check_parameters(self) -> None:
        for now, then, version in zip(
            self._stage.standing(), self._parameters, self._versions, strict=True
        ):
            if now is not then or (now is not None and now._version != version):
                raise RuntimeError(
                    f"the parameters of stage {self._stage.name} were changed or replaced "
                    "between its forward and its recomputation in the backward, which would give "
                    "wrong gradients: step the optimizer, or swap parameters, after the backward"
                )


def _key(slot: _torch.Slot) -> tuple[int, str]:
    return id(slot[0]), slot[1]


class AutocastState:
    """The autocast settings when it is made; entered around a backward, they hold again."""

    __slots__ = ("_settings", "_stack", "enabled")

    def __init__(self, device_type: str) -> None:
        kinds = ("cpu",) if device_type == "cpu" else ("cpu", device_type)
        self._settings = [(kind, *_autocast(kind)) for kind in kinds]
        self.enabled = any(enabled for _, enabled, _ in self._settings)
        self._stack: ExitStack | None = None

    def is_current(self) -> bool:
        """Whether the settings hold now."""
        return all(_autocast(kind) == (enabled, dtype) for kind, enabled, dtype in self._settings)

    def __enter__(self) -> None:
        changed = [
            (kind, enabled, dtype)
            for kind, enabled, dtype in self._settings
            if _autocast(kind) != (enabled, dtype)
        ]
        if changed:
            self._stack = ExitStack()
            for kind, enabled, dtype in changed:
                self._stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._stack is not None:
            self._stack.close()
            self._stack = None


def _autocast(kind: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


@contextmanager
def autocast_off(device_type: str) -> Iterator[None]:
    """Autocast disabled where it is on, as it is during a backward."""
    with ExitStack() as stack:
        for kind in {"cpu", device_type}:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def generators_kept(modules: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Put the generators of Python and NumPy, and those in modules' attributes, back as they were.

    Parameters
    ----------
    modules
        Where to look for a `torch.Generator`, or one of NumPy's or Python's.
    """
    numpy: Any = sys.modules.get("numpy")
    restores: list[Callable[[], object]] = [partial(random.setstate, random.getstate())]
    if numpy is not None:
        restores.append(partial(numpy.random.set_state, numpy.random.get_state()))
    for module in modules:
        for value in module.__dict__.values():
            if isinstance(value, torch.Generator):
                restores.append(partial(value.set_state, value.get_state()))
            elif isinstance(value, random.Random):
                restores.append(partial(value.setstate, value.getstate()))
            elif numpy is not None and isinstance(value, numpy.random.RandomState):
                restores.append(partial(value.set_state, value.get_state()))
            elif numpy is not None and isinstance(value, numpy.random.Generator):
                bits = value.bit_generator
                restores.append(partial(setattr, bits, "state", bits.state))
    try:
        yield
    finally:
        for restore in restores:
            restore()
