"""Meters a planned training step: forward, the caller's loss, backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import torch

from rotor import _torch, memory
from rotor.checksums import Proved
from rotor.timelines import Timeline
from rotor.values import tensors_of


@dataclass(frozen=True)
class StepBytes:
    """Peaks of one step, bytes above the level at which its forward began.

    Attributes
    ----------
    peak_bytes
        Of the whole step.
    loss_bytes
        Of the time from the end of the forward to the arrival of the output's gradient, above the
        level at its start: the loss, and the gradient.
    output_held
        Whether somebody still held the output when its gradient arrived.
    segments
        The parts of the step that were marked, in order.
    timeline
        Live bytes over time, where the device's meter knows them.
    """

    peak_bytes: int
    loss_bytes: int
    output_held: bool
    segments: tuple[memory.Segment, ...] = ()
    timeline: Timeline | None = None

    def shifted(self, extra_bytes: int) -> StepBytes:
        """The peaks above a level that lies lower by so much."""
        segments = tuple(
            memory.Segment(
                segment.name,
                segment.start_bytes + extra_bytes,
                segment.peak_bytes + extra_bytes,
                segment.end_bytes + extra_bytes,
            )
            for segment in self.segments
        )
        return replace(self, peak_bytes=self.peak_bytes + extra_bytes, segments=segments)


@dataclass(kw_only=True)
class Metered:
    """What plans of every kind know of the steps that ran under them.

    Attributes
    ----------
    reserve_bytes
        Set aside because a step was seen to need more than predicted.
    measured_bytes, measured_timeline
        Peak of the last metered step, and its live bytes over time; ``None`` before one.
    meterings
        How many steps were metered.
    outdated
        Another plan would be better: the next step makes it.
    short_bytes
        Bytes that are set aside for the loss are so many fewer than assumed, for no plan fits
        beside those.
    proved
        What its verified steps have shown.
    least_bytes_seen, most_bytes_seen
        The least and the most that a metered or watched step needed; 0 before one.
    unmetered
        Steps that ran without being metered.
    differs
        Something was seen to differ: the next step is metered.
    warned_bytes
        The largest excess that a warning has named.
    sparse_bytes
        The most bytes of sparse gradients that existed when a step of it was metered.
    is_watched
        Steps are watched after the first ones too.
    """

    is_watched: ClassVar[bool] = True

    reserve_bytes: int = 0
    short_bytes: int = 0
    least_bytes_seen: int = 0
    most_bytes_seen: int = 0
    unmetered: int = 0
    differs: bool = field(default=False, repr=False)
    warned_bytes: int = 0
    sparse_bytes: int = field(default=0, repr=False)
    measured_bytes: int | None = None
    measured_timeline: Timeline | None = field(default=None, repr=False)
    meterings: int = 0
    outdated: bool = field(default=False, repr=False)
    proved: Proved = field(default_factory=Proved, repr=False)

    @property
    def is_refuted(self) -> bool:
        """A value that the plan computes again came out otherwise: it must not run any more."""
        return False


class StepWatch(Protocol):
    """What sees a step: a meter, or something that takes less time."""

    def mark(self, name: str) -> None:
        """Begin another part of the step."""

    def forward_done(self, output: Any) -> None:
        """Mark the end of the forward."""

    def cancel(self) -> None:
        """Stop without a result."""


def check_idle(device: torch.device) -> None:
    """Raise MeterBusyError where a model cannot be measured, as something else meters a device."""
    try:
        memory.meter(device).start().stop()
    except memory.MeterBusyError as error:
        raise memory.MeterBusyError(
            f"the model cannot be measured now: {error}. Measure it before: "
            "Checkpointable(model, sample), or chk.measure(sample)"
        ) from error


class StepMeter:
    """Started before a forward, it stops by itself at the end of the backward.

    Nobody but the graph of the step holds it: when the output is dropped without a backward, it
    stops too. There is one at a time; `cancel_running` makes room for another measurement.

    Parameters
    ----------
    device
        The device whose memory is metered.
    done
        Called with the result, at the end of the backward.
    existing
        Tensors that may be freed during the step, such as gradients that exist.

    Raises
    ------
    MeterBusyError
        A profiler is running, which cannot be nested.
    """

    def __init__(
        self,
        device: torch.device,
        done: Callable[[StepBytes], None],
        existing: Iterable[torch.Tensor] = (),
    ) -> None:
        self._meter: memory.Meter | None = None
        self._done = done
        self._in_backward = False
        self._output_held = True
        self._outputs: list[weakref.ref[torch.Tensor]] = []
        cancel_running()
        self._meter = memory.meter(device, existing=existing, timeline=True).start()
        _running.append(weakref.ref(self))

    def mark(self, name: str) -> None:
        """Begin another part of the step; not "loss" or "backward", which are the meter's."""
        if self._meter is not None:
            self._meter.mark(name)

    def forward_done(self, output: Any) -> None:
        """Mark the end of the forward; nothing is metered where the output needs no backward."""
        watched = [t for t in tensors_of(output) if t.requires_grad]
        if self._meter is None or not watched:
            self.cancel()
            return
        self._meter.mark("loss")
        for tensor in watched:
            tensor.register_hook(self._gradient_arrived)
        self._outputs = [weakref.ref(tensor) for tensor in watched]

    def _gradient_arrived(self, gradient: torch.Tensor) -> None:
        if self._meter is not None and not self._in_backward:
            self._in_backward = True
            self._output_held = all(output() is not None for output in self._outputs)
            self._meter.mark("backward")
            _torch.at_end_of_backward(self._finish, self.cancel)

    def _finish(self) -> None:
        if self._meter is None:
            return
        meter, self._meter = self._meter, None
        meter.stop()
        (loss,) = [segment for segment in meter.segments if segment.name == "loss"]
        self._done(
            StepBytes(
                meter.peak_bytes,
                loss.peak_bytes - loss.start_bytes,
                self._output_held,
                tuple(meter.segments),
                timeline=meter.timeline,
            )
        )

    def cancel(self) -> None:
        """Stop without a result: the step was abandoned."""
        if self._meter is not None:
            meter, self._meter = self._meter, None
            meter.stop()

    def __del__(self) -> None:
        self.cancel()


_running: list[weakref.ref[StepMeter]] = []


def cancel_running() -> None:
    """Stop the meter of a step whose backward has not come, if there is one."""
    while _running:
        meter = _running.pop()()
        if meter is not None:
            meter.cancel()
