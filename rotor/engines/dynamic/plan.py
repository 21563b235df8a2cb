"""Record of steps whose memory is managed while they run."""

from __future__ import annotations

import inspect
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import nn

from rotor import dtr
from rotor._pytorch import devices
from rotor.common.accounting import (
    DYNAMIC_LOSS_FACTOR,
    DYNAMIC_NOISE_BYTES,
    SCRAPS_BYTES,
    assumed_loss_bytes,
    has_room_for_proofs,
    noise_bytes,
)
from rotor.common.checksums import NO_ROOM, is_verified
from rotor.common.timeline import Timeline
from rotor.dtr.context import check_heuristic
from rotor.dtr.recall import Stats
from rotor.dtr.repeating import verifying_bytes
from rotor.dtr.stepping import Unknown, learn_needs
from rotor.engines.dynamic.step import BudgetedStep
from rotor.meter.step_meter import Metered, StepBytes
from rotor.meter.watch import note_peak
from rotor.tier.offload import Offload
from rotor.tier.store import TierStore

_REMEMBERED = 20
_LEARNING_STEPS = (3, 16, 32)
"""Steps after which the speed of a second tier is compared with the one that was measured."""
_STEP_MARKS = ("loss", "backward")
_SETTINGS = inspect.signature(dtr.budget).parameters
OPTIONS = frozenset({"heuristic", "seed", "strict", "sample", "ignore_small", "storage_swap"})
_DEFAULTS = {name: _SETTINGS[name].default for name in OPTIONS}


@dataclass(frozen=True)
class StepFigures:
    """Figures of one step."""

    stats: Stats
    output_bytes: int
    room_bytes: int
    """Rest of the limit for the loss."""


@dataclass(repr=False)
class DynamicPlan(Metered):
    """Record of the steps that run under one limit on one device."""

    engine: ClassVar[str] = "dynamic"

    device: torch.device
    limit_bytes: int
    reason: str = ""
    """Reason for which nothing is planned; empty if the user asked for this engine."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of the session."""
    assumed_loss_bytes: int = 0
    """Need of the loss beside the gradient of the output, as given by the caller; or 0."""
    loss_bytes: int | None = None
    """Largest measured need of the caller's loss; ``None`` before the first metered step."""
    held_bytes: int = 0
    """Memory beyond the runtime's count when the model's backward began."""
    loss_output_bytes: int = 0
    """Bytes of the outputs for which the two needs above were measured."""
    step_bytes: int = 0
    """Peak of the latest metered step with outputs of that size."""
    output_bytes: int = 0
    """Bytes of the outputs in the metered step."""
    counted_bytes: int = 0
    """Runtime's count when the backward of the metered step began."""
    level_bytes: int | None = field(default=None, repr=False)
    """Bytes given out by the device at that time beyond the runtime's count, in the first step
    after a metered one.
    """
    unknown: Unknown = field(default_factory=list, repr=False)
    """Operators of that step whose needs were guessed."""
    offload: Offload | None = None
    kept: set[str] = field(default_factory=set)
    """Operators whose results are not evicted, because they differed when they ran again."""
    accepted: set[Any] = field(default_factory=set, repr=False)
    """Kinds of steps that have run within the limit, or with a warning, where nobody asked for
    this engine: no such step is refused later.
    """
    steps: int = 0
    latest: deque[StepFigures] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def __post_init__(self) -> None:
        if not has_room_for_proofs(verifying_bytes(self.device), self.limit_bytes):
            self.proved.unproved = NO_ROOM

    @property
    def last(self) -> StepFigures:
        """Figures of the latest step; ValueError before one."""
        if not self.latest:
            raise ValueError(
                "nothing is known before a step has run: train one, or measure(sample)"
            )
        return self.latest[-1]

    @property
    def predicted_bytes(self) -> int:
        """Unpredicted: the model's peak in the latest step, by the runtime's count."""
        return self.last.stats.peak_bytes

    @property
    def makespan(self) -> float:
        """Unpredicted: seconds of the latest step in operations, and in choosing."""
        stats = self.last.stats
        return (stats.base_ns + stats.remat_ns + stats.search_ns) / 1e9

    def room_for_loss(self, output_bytes: int) -> int:
        """Return the bytes to leave for the loss, the gradient of the output, and the reserve."""
        return self.reserve_bytes + self._loss(output_bytes)

    def _knows(self, output_bytes: int) -> bool:
        return self.loss_bytes is not None and output_bytes == self.loss_output_bytes

    def _loss(self, output_bytes: int) -> int:
        if self.loss_bytes is not None and output_bytes <= self.loss_output_bytes:
            return self.loss_bytes
        if self.assumed_loss_bytes:
            return self.assumed_loss_bytes + output_bytes
        return max(
            assumed_loss_bytes(output_bytes), self._scaled(self.loss_bytes or 0, output_bytes)
        )

    def held_by_loss(self, output_bytes: int) -> int:
        """Bytes that the loss holds while the model's backward runs."""
        if self.loss_bytes is not None and output_bytes <= self.loss_output_bytes:
            return self.held_bytes
        return self._loss(output_bytes)

    def _scaled(self, nbytes: int, output_bytes: int) -> int:
        known = self.loss_output_bytes
        return -(-nbytes * output_bytes // known) if known else 0

    def learn(self, step: StepBytes) -> int:
        """Note a metered step; return its excess over the limit, negative if it was below."""
        self.measured_bytes = step.peak_bytes
        self.measured_timeline = _without_parts(step.timeline)
        self.meterings += 1
        learn_needs(self.unknown, step.segments)
        output_bytes = self.output_bytes
        starts = {segment.name: segment.start_bytes for segment in step.segments}
        held = max(starts["backward"] - self.counted_bytes, 0)
        note_peak(self, step.peak_bytes)
        self.level_bytes = None
        if output_bytes >= self.loss_output_bytes:
            self.loss_output_bytes = output_bytes
            self.loss_bytes, self.held_bytes = step.loss_bytes, held
            self.step_bytes = step.peak_bytes
        else:
            self.loss_bytes = max(self.loss_bytes or 0, step.loss_bytes)
            self.held_bytes = max(self.held_bytes, held)
        return step.peak_bytes - self.limit_bytes

    def step(self, module: nn.Module, *, is_trial: bool = False) -> BudgetedStep:
        """Return a step of a module, about to begin; a trial leaves no trace."""
        level = devices.level(self.device)
        kind = getattr(self.key, "measured", None)
        # Steps of an accepted kind go on over the limit, and a warning says by how much.
        is_accepted = bool(self.reason) and kind in self.accepted and not is_trial

        def began(step: BudgetedStep) -> None:
            session = step.session
            if step.is_metered:
                self.counted_bytes = session.current_bytes
            held = self.held_by_loss(step.output_bytes)
            if self._knows(step.output_bytes) and not is_trial:
                seen = devices.level(self.device) - level - session.current_bytes
                # The level of the CPU's heap includes Python's objects.
                known = held if self.device.type == "cpu" else min(held, max(seen, 0))
                session.outside_bytes = self.reserve_bytes + known
                held += 0 if level < 0 or step.is_metered else self._grown(step, seen)
            elif not is_trial:
                session.outside_bytes = self.reserve_bytes + step.gradient_bytes
                held = max(held, step.gradient_bytes)
            session.aim(self.limit_bytes - self.reserve_bytes - held)

        store = None if self.offload is None else TierStore(self.offload)

        def ended(step: BudgetedStep) -> None:
            self.steps += 1
            if store is not None and self.steps in _LEARNING_STEPS:
                store.learn()
            if step.is_proved:
                self.proved.add(step.session.compared)
            if step.has_run:
                self.accepted.add(kind)
            if step.session.told_bytes > self.warned_bytes:
                peak_bytes = step.session.stats.peak_bytes
                self.warned_bytes = max(step.session.told_bytes, peak_bytes)
            room = self.room_for_loss(step.output_bytes)
            self.latest.append(StepFigures(step.session.stats, step.output_bytes, room))

        step = BudgetedStep(
            module,
            self.limit_bytes,
            self.device,
            backward_began=began,
            ended=ended,
            is_trial=is_trial,
            observer=None,
            verify=not self.proved.unproved and is_verified(self.verify, self.proved.ran),
            kept=self.kept,
            offload=store,
            **(_DEFAULTS | {"strict": not is_accepted} | self.options),
        )
        self.proved.ran += not is_trial
        step.session.aim(self.limit_bytes - self.reserve_bytes)
        step.session.outside_bytes = self.reserve_bytes
        step.session.told_bytes = self.warned_bytes
        return step

    def _grown(self, step: BudgetedStep, seen_bytes: int) -> int:
        """Return the growth of the loss's memory since the step after the latest metered one."""
        if step.is_crowded:
            return 0
        if self.level_bytes is None:
            self.level_bytes = seen_bytes
        more = seen_bytes - self.level_bytes
        if more <= noise_bytes(self.level_bytes, DYNAMIC_NOISE_BYTES):
            return 0
        self.differs = True
        return more

    def room(self, step: BudgetedStep) -> tuple[int, int]:
        """Return the bytes to leave for the loss of a step, and its known need."""
        wished = self._loss(step.output_bytes)
        if not self._knows(step.output_bytes):
            is_guess = self.loss_bytes is None and not self.assumed_loss_bytes
            return max(wished, DYNAMIC_LOSS_FACTOR * step.output_bytes if is_guess else 0), 0
        step.tried_bytes = self.step_bytes + 2 * SCRAPS_BYTES
        return wished, wished


def _without_parts(timeline: Timeline | None) -> Timeline | None:
    """Return the timeline without the marks of single operators."""
    if timeline is None:
        return None
    return replace(timeline, marks=tuple(m for m in timeline.marks if m[0] in _STEP_MARKS))


def check_options(options: dict[str, Any]) -> None:
    """Raise TypeError or ValueError for an option that `rotor.dtr.budget` does not take."""
    for name in options:
        if name not in OPTIONS:
            raise TypeError(
                f"unknown option {name!r}, expected one of {', '.join(sorted(OPTIONS))} of "
                "rotor.dtr.budget"
            )
    check_heuristic(options.get("heuristic", _DEFAULTS["heuristic"]))
