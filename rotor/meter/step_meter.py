"""Meters of a planned training step: forward, the caller's loss, backward."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, ClassVar, Protocol

import torch

from rotor._pytorch import core, dispatch, ends
from rotor.common.accounting import METERED_STEPS
from rotor.common.checksums import Proved
from rotor.common.tensor_trees import tree_tensors
from rotor.common.timeline import PredictedTimeline, Timeline
from rotor.meter import allocator
from rotor.meter.reserving import Reserving
from rotor.units import format_bytes


@dataclass(frozen=True)
class StepBytes:
    """Peaks of one step, bytes above the level at which its forward began."""

    peak_bytes: int
    loss_bytes: int
    """Peak from the end of the forward to the arrival of the output's gradient, above the level at
    its start: the loss, and the gradient. Old gradients that the caller released in between, as
    Lightning does, leave no room in it: another step may keep them.
    """
    output_held: bool
    """True if the output was still referenced when its gradient arrived."""
    segments: tuple[allocator.Segment, ...] = ()
    """Marked parts of the step, in order."""
    timeline: Timeline | None = None
    """Live bytes over time, if the device's meter records them."""

    def shifted(self, extra_bytes: int) -> StepBytes:
        """Return the peaks above a level that lies lower by `extra_bytes`."""
        segments = tuple(segment.shifted(extra_bytes) for segment in self.segments)
        return replace(self, peak_bytes=self.peak_bytes + extra_bytes, segments=segments)


class Verdict(Enum):
    """Next use of a plan."""

    KEEP = "run it again"
    REPLAN = "another plan would be better"
    REFUTED = "it must not run again"
    REMEASURE = "the model runs other code: measure again"
    GIVE_UP = "it cannot keep the limit: another engine"


@dataclass(frozen=True)
class PlanView:
    """Figures of a plan, as data.

    Attributes
    ----------
    engine
        Name of the plan's form: "chain", "graph", "parts" or "dynamic".
    limit_bytes
        Limit of the plan.
    predicted_bytes, makespan
        Peak and seconds of a step, as predicted; as in the latest step where the engine decides
        while it runs.
    measured_bytes
        Peak of the last metered step; ``None`` before one.
    predicted_timeline, measured_timeline
        Live bytes over time; ``None`` where they are not known.
    """

    engine: str
    limit_bytes: int
    predicted_bytes: int
    makespan: float
    measured_bytes: int | None
    predicted_timeline: PredictedTimeline | None
    measured_timeline: Timeline | None


@dataclass(kw_only=True)
class Metered:
    """Facts on the steps that ran under a plan, common to plans of every kind."""

    engine: ClassVar[str]
    """Name of the plan's form: "chain", "graph", "parts" or "dynamic"."""

    reserve_bytes: int = 0
    """Bytes set aside because a step needed more than predicted."""
    has_given_back: bool = field(default=False, repr=False)
    """True once the reserve was reduced, because a later step needed less."""
    short_bytes: int = 0
    """Bytes that the amount set aside for a loss lacks: no plan fits beside the whole amount."""
    least_bytes_seen: int = 0
    """Least need of a metered or watched step; 0 before one."""
    most_bytes_seen: int = 0
    """Largest need of a metered or watched step; 0 before one."""
    unmetered: int = 0
    differs: bool = field(default=False, repr=False)
    """True if a difference was seen: the next step is metered."""
    warned_bytes: int = 0
    """Largest excess that a warning has named."""
    sparse_bytes: int = field(default=0, repr=False)
    """Largest amount of sparse gradients that existed when a step was metered."""
    reserving: Reserving | None = field(default=None, repr=False)
    """Level of reserved bytes, if the limit counts these."""
    measured_bytes: int | None = None
    """Peak of the last metered step; ``None`` before one."""
    measured_timeline: Timeline | None = field(default=None, repr=False)
    """Live bytes of that step over time."""
    levels: dict[str, int] = field(default_factory=dict, repr=False)
    """By mark, the most bytes above the level at which a metered step began, for `LevelWatch`."""
    slack: dict[str, int] = field(default_factory=dict, repr=False)
    """By mark, the bytes on the heap beside these that the latest step without a difference needed:
    objects of Python and of autograd."""
    losses: set[int] = field(default_factory=set, repr=False)
    """Numbers of autograd's nodes that losses of unmetered steps have made."""
    meterings: int = 0
    outdated: bool = field(default=False, repr=False)
    """True if another plan would be better: the next step makes it."""
    verify: str | int = field(default="first", repr=False)
    """Steps in which recomputed values are compared."""
    proved: Proved = field(default_factory=Proved, repr=False)
    key: Any = field(default=None, repr=False)
    """Kind of step that runs under the plan."""
    earlier: StepBytes | None = field(default=None, repr=False)
    """Metered step whose figures another one has to confirm."""
    is_over: bool = field(default=False, repr=False)
    """True if a step needed more than the limit, and no other plan of the engine would help."""
    lacks_room: bool = field(default=False, repr=False)
    """True if the room for a step is less than it needs by now, and no plan was found that fits."""
    why: dict[str, str] = field(default_factory=dict, repr=False)
    """Engines that were asked for such steps, in order, and why each handed over; the last runs."""

    def __repr__(self) -> str:
        figures: Any = self
        return f"<{type(self).__name__} within {format_bytes(figures.limit_bytes)}>"

    @property
    def awaits_meter(self) -> bool:
        """True if the plan's first metered steps are still to come."""
        return self.measured_bytes is None and self.meterings < METERED_STEPS

    def expect(self, context: Any) -> None:
        """Take note, before a step, of needs that have changed since the plan was made."""

    def stay(self) -> None:
        """Take note that no better plan was found: this one runs on."""

    @property
    def result(self) -> Any:
        """Result of `compute_sequence`; ``None`` without a schedule or a program."""
        return None

    @property
    def is_alone(self) -> bool:
        """True if it holds a capture that no other kind of step shares."""
        return False

    @property
    def predicted_timeline(self) -> PredictedTimeline | None:
        """Predicted live bytes of a step over time; ``None`` where they are not known."""
        return None

    def view(self) -> PlanView:
        """Return the plan's figures; ValueError: nothing is known before a step has run."""
        return PlanView(*(getattr(self, figure.name) for figure in fields(PlanView)))

    @property
    def unlimited_bytes(self) -> int | None:
        """Predicted peak of a step that recomputes nothing; ``None`` where it is not known."""
        return None

    @property
    def unplanned_timeline(self) -> Timeline | None:
        """Timeline of a step that recomputes nothing, where it follows from a metered step."""
        return None

    @property
    def verdict(self) -> Verdict:
        """Use of the plan in the next step."""
        if self.is_over:
            return Verdict.GIVE_UP
        if self.is_refuted:
            return Verdict.REFUTED
        return Verdict.REPLAN if self.outdated else Verdict.KEEP

    def describe_excess(self) -> str:
        """Return a sentence on a limit that could not be kept."""
        return "the limit was not kept"

    @property
    def is_refuted(self) -> bool:
        """True if a recomputed value differed: the plan must not run any more."""
        return False

    @property
    def recomputes(self) -> bool:
        """True if steps compute something again."""
        figures: Any = self
        return bool(figures.recomputed)

    def is_verified(self, verify: str | int) -> bool:
        """Return whether the step that begins is verified; never without recomputation."""
        return self.recomputes and self.proved.begins(verify)

    @property
    def proof(self) -> str:
        """Results of verified steps, as text."""
        return self.proved.text(self.verify) if self.recomputes else "nothing is recomputed"


class StepWatch(Protocol):
    """Observer of a step: a meter, or something cheaper."""

    def mark(self, name: str) -> None:
        """Begin another part of the step."""

    def forward_done(self, output: Any) -> None:
        """Mark the end of the forward."""

    def cancel(self) -> None:
        """Stop without a result."""


def check_idle(device: torch.device) -> None:
    """Raise MeterBusyError if another meter or profiler prevents measuring a model."""
    try:
        with allocator.meter(device):
            pass
    except allocator.MeterBusyError as error:
        raise type(error)(
            f"the model cannot be measured now: {error}. Measure it before: "
            "Checkpointable(model, sample), or chk.measure(sample)"
        ) from error


def _nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's storages."""
    return sum(part.untyped_storage().nbytes() for part in core.strided_parts(tensor))


_OPEN = "meter"
"""Name of a meter among what waits for a step's last backward."""

_MOST_FORWARDS = 64
"""Forwards that may follow in a step whose gradients are differentiated, before it is given up."""


class StepMeter:
    """Meter that starts before a forward and stops by itself at the end of the backward.

    Only the graph of the step references it: when the output is dropped without a backward, it
    stops too. A thread has one at a time; `cancel_running` makes room for another measurement.

    `done` is called with the result at the end of the backward. `existing` are tensors that may be
    freed during the step, such as existing gradients; with `reserving` the peak is counted in
    reserved bytes. A step whose backward runs in another thread than its forward has no result on
    the CPU, nor one in which the caller starts a profiler: `lost` is called instead, with True for
    the former. One whose gradients are to be differentiated lasts to the end
    of the next backward without ``create_graph``, and `passed` is called with its peak. Raises
    MeterBusyError if a profiler is running, for profilers cannot be nested.
    """

    def __init__(
        self,
        device: torch.device,
        done: Callable[[StepBytes], None],
        existing: Iterable[torch.Tensor] = (),
        reserving: Reserving | None = None,
        lost: Callable[[bool], object] = int,
        passed: Callable[[int], object] = int,
    ) -> None:
        self._meter: allocator.Meter | None = None
        self._done, self._lost, self._passed = done, lost, passed
        self._reserving = reserving
        self._thread = threading.get_ident()
        self._in_backward = self._is_open = self._has_raised = False
        self._forwards = 0
        self._output_held = True
        self._outputs: list[weakref.ref[torch.Tensor]] = []
        self._released_bytes = 0
        cancel_running()
        old = list(existing)
        self._old = [(weakref.ref(tensor), _nbytes(tensor)) for tensor in old]
        self._meter = allocator.meter(device, existing=old, timeline=True).start()
        _running.meter = weakref.ref(self)

    @property
    def is_running(self) -> bool:
        """True until the end of the backward."""
        return self._meter is not None

    def mark(self, name: str) -> None:
        """Begin another part of the step; not "loss" or "backward", which are the meter's."""
        if self._meter is not None:
            self._meter.mark(name)

    def forward_done(self, output: Any) -> None:
        """Mark the end of the forward; meter nothing if the output needs no backward."""
        watched = [t for t in tree_tensors(output) if t.requires_grad]
        if self._meter is None or not watched:
            self.cancel()
            return
        self._meter.mark("loss")
        for tensor in watched:
            tensor.register_hook(self._gradient_arrived)
        self._outputs = [weakref.ref(tensor) for tensor in watched]
        self._old = [(tensor, nbytes) for tensor, nbytes in self._old if tensor() is not None]

    def forward_raised(
        self, parameters: Iterable[torch.Tensor], passed: Callable[[int], object]
    ) -> None:
        """Go on to the end of the next backward, and call `passed` with the peak.

        The caller may train on what the forward had noted: the graph of that references the meter.
        """
        self._passed, self._is_open, self._has_raised = passed, True, True
        for parameter in parameters:
            if parameter.requires_grad:
                node: Any = torch.autograd.graph.get_gradient_edge(parameter).node
                node.metadata[type(self)] = self
        finish = weakref.WeakMethod(self._finish)
        dispatch.after_last_backward(self._thread, _OPEN, lambda: (end := finish()) and end())

    def _gradient_arrived(self, gradient: torch.Tensor) -> None:
        if self._meter is not None and not self._meter.is_here:
            is_elsewhere = not self._meter.gave_way
            self.cancel()
            ends.at_end_of_backward(lambda: self._lost(is_elsewhere))
        if self._meter is not None and not self._in_backward:
            self._in_backward = True
            self._output_held = all(output() is not None for output in self._outputs)
            self._released_bytes = sum(nbytes for tensor, nbytes in self._old if tensor() is None)
            self._meter.mark("backward")
            if torch.is_grad_enabled():
                self._is_open = True
                dispatch.after_last_backward(self._thread, _OPEN, self._finish)
            else:
                self._meter.at_end_of_backward(self._finish, self.cancel)

    def _finish(self) -> None:
        if self._meter is None or not self._meter.is_here:
            self.cancel()
            return
        meter, self._meter = self._meter, None
        meter.stop()
        reserving = self._reserving
        peak = meter.peak_bytes if reserving is None else reserving.grown_bytes(meter.device)
        if self._is_open:
            self._passed(peak)
            return
        (loss,) = [segment for segment in meter.segments if segment.name == "loss"]
        self._done(
            StepBytes(
                peak,
                loss.peak_bytes - loss.start_bytes + self._released_bytes,
                self._output_held,
                tuple(meter.segments),
                timeline=meter.timeline,
            )
        )

    def cancel(self) -> None:
        """Stop without a result: the step was abandoned."""
        if self._meter is not None:
            meter, self._meter = self._meter, None
            if self._is_open:
                dispatch.forget_backwards(self._thread, _OPEN)
            meter.drop()

    def goes_on(self) -> bool:
        """Return whether a forward that begins may belong to this step, and count it."""
        self._forwards += 1
        return self._is_open and not self._has_raised and self._forwards <= _MOST_FORWARDS

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not _is_finalizing():
            self.cancel()


class _Running(threading.local):
    """Meter of the step that runs in this thread."""

    meter: Callable[[], StepMeter | None] = staticmethod(lambda: None)


_running = _Running()


def is_running() -> bool:
    """Return whether a meter of this thread runs."""
    meter = _running.meter()
    return meter is not None and meter.is_running


def cancel_running(*, all_steps: bool = True) -> bool:
    """Stop this thread's meter of a step whose backward has not come; return whether one ran.

    Without `all_steps`, the meter of a step whose gradients are to be differentiated goes on.
    """
    meter = _running.meter()
    if meter is None or not meter.is_running:
        return False
    if all_steps or not meter.goes_on():
        meter.cancel()
    return True
