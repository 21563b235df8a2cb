"""Modes, autocast and random generators, set for a recomputation as in the first forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from rotor import _core
from rotor._pytorch import core, devices, dispatch
from rotor._pytorch.draws import tensor_of
from rotor.common.tensor_trees import tree_tensors

States = list[tuple[torch.Tensor, Any]]
"""The state of each generator, and the same bytes as an array."""

SPLIT_BACKWARD = (
    "a backward asked for the gradients of inputs only, and keeps the graph for the gradients of "
    "parameters: a plan gives both at once. In a pipeline, use a schedule with whole backwards "
    "(GPipe, 1F1B, Interleaved1F1B), none of the zero-bubble ones. Where tensors are split over "
    'processes, give engine="dynamic", or use the plain model (chk.module) for such a backward'
)


class RngTracker:
    """Reader of the states of the CPU's and the device's generators, as rarely as possible."""

    __slots__ = ("_generators", "latest")

    def __init__(self, device: torch.device) -> None:
        self._generators: list[devices.Generator] = [torch.default_generator]
        if devices.type_of(device) != "cpu":
            self._generators.append(devices.generator_of(device))
        self.latest: States | None = None
        """Last states read, if nothing can have drawn random numbers since."""

    def read(self) -> States:
        """Return the current states."""
        return [(s := generator.get_state(), s.numpy()) for generator in self._generators]

    def write(self, states: States) -> None:
        """Set the generators."""
        for generator, (state, _) in zip(self._generators, states, strict=True):
            generator.set_state(state)

    def kept(self) -> Callable[[], None]:
        """Return a function that sets the generators as they are now.

        It holds no tensors, which would count as memory of a step.
        """
        others = [generator.get_state().numpy().tobytes() for generator in self._generators[1:]]
        return partial(self._put_back, torch.default_generator.clone_state(), others)

    def _put_back(self, first: torch.Generator, others: list[bytes]) -> None:
        self.write([(state, None) for state in (first.get_state(), *map(tensor_of, others))])

    def drawn_since(self, states: States) -> bool:
        """Return whether random numbers were drawn since `states` was read."""
        now = self.latest = self.read()
        for (_, before), (_, after) in zip(states, now, strict=True):
            if not _core.same_bytes(before, after):
                return True
        return False


class UncountedStates(RngTracker):
    """Reader of states that are no tensors of PyTorch's allocator, which meters would count."""

    __slots__ = ()

    def read(self) -> States:
        """Return the current states."""
        return [(s := tensor_of(array.tobytes()), s.numpy()) for _, array in super().read()]


class RngState:
    """Random states of the CPU and of the devices of some tensors, by its published name.

    Parameters
    ----------
    tensors
        A tensor, or tensors among other values in nested containers.
    """

    def __init__(self, tensors: Any) -> None:
        places = {tensor.device for tensor in tree_tensors(tensors)} | {torch.device("cpu")}
        self._trackers = [RngTracker(device) for device in places]
        self._states = [tracker.read() for tracker in self._trackers]
        self.cpu_state = torch.get_rng_state()

    def restore(self) -> None:
        """Set the generators as they were when this object was made."""
        for tracker, states in zip(self._trackers, self._states, strict=True):
            tracker.write(states)


class AutocastState:
    """Autocast settings at construction; a context around a backward that restores them."""

    __slots__ = ("_settings", "_stack")

    def __init__(self, device_type: str) -> None:
        kinds = ("cpu",) if device_type == "cpu" else ("cpu", device_type)
        self._settings = [(kind, *autocast_of(kind)) for kind in kinds]
        self._stack: ExitStack | None = None

    @property
    def enabled(self) -> bool:
        """True if autocast was on."""
        return any(enabled for _, enabled, _ in self._settings)

    def changed(self) -> list[tuple[str, bool, torch.dtype]]:
        """Return the settings that do not hold now."""
        return [known for known in self._settings if autocast_of(known[0]) != known[1:]]

    def __enter__(self) -> None:
        changed = self.changed()
        if changed:
            self._stack = ExitStack()
            for kind, enabled, dtype in changed:
                self._stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))

    def __exit__(self, *_: object) -> None:
        if self._stack is not None:
            self._stack.close()
            self._stack = None


def autocast_of(kind: str) -> tuple[bool, torch.dtype]:
    """Return whether autocast is on for a type of device, and its type."""
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


@contextmanager
def autocast_off(device_type: str) -> Iterator[None]:
    """Disable autocast where it is enabled, as it is during a backward."""
    with ExitStack() as stack:
        for kind in {"cpu", device_type}:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _present() -> tuple[Any, ...]:
    return (
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        dispatch.default_device(),
        core.saving_hooks(),
        dispatch.backend_flags(),
        dispatch.attention_kernels(),
    )


class Modes:
    """Modes at construction; a context around a recomputation that sets them again."""

    __slots__ = ("_autocast", "_modes", "_stack")

    def __init__(self, device_type: str) -> None:
        self._autocast = AutocastState(device_type)
        self._modes = _present()

    @property
    def is_autocast(self) -> bool:
        """True if autocast was on."""
        return self._autocast.enabled

    def are_current(self) -> bool:
        """Return whether the modes hold now."""
        return not self._autocast.changed() and bool(_present() == self._modes)

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._autocast)
            inference, dtype, device, hooks, flags, kernels = self._modes
            present = _present()
            if present[0] != inference:
                grad = torch.is_grad_enabled()
                stack.enter_context(torch.inference_mode(inference))
                torch.set_grad_enabled(grad)
            if present[1] != dtype:
                stack.callback(torch.set_default_dtype, present[1])
                torch.set_default_dtype(dtype)
            if present[2] != device:
                stack.enter_context(torch.device(device or "cpu"))
            if present[3] != hooks and hooks is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*hooks))
            if present[4] != flags:
                stack.callback(dispatch.write_flags, present[4])
                dispatch.write_flags(flags)
            if present[5] != kernels:
                stack.callback(dispatch.set_attention_kernels, present[5])
                dispatch.set_attention_kernels(kernels)
            self._stack = stack.pop_all()

    def __exit__(self, *_: object) -> None:
        self._stack.close()
