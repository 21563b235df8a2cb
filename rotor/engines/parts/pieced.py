"""Steps of a model with captured pieces: the plan of all pieces, and one run of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import nn

from rotor.algorithms.curve import Curve
from rotor.common.accounting import CODE_FACTOR
from rotor.common.calls import call_signature
from rotor.common.forward_patch import PatchedForwards
from rotor.engines.graph.emit import StepCode
from rotor.engines.graph.proving import Tally
from rotor.engines.parts.kinds import Kind, backward_marks
from rotor.engines.parts.pieces import Pieces, Site
from rotor.errors import InfeasibleError
from rotor.graph.assembly import Bases, Option, Simulation, choose, least_bytes, simulate
from rotor.meter.step_meter import Metered, StepBytes, StepWatch, Verdict

__all__ = [
    "PiecesPlan",
    "PiecesStep",
    "expect_additions",
    "is_of_additions",
    "learn",
    "learn_levels",
    "make_pieces_plan",
    "measured_bases",
    "pieces_curve",
]


@dataclass
class PiecesPlan(Metered):
    """Choice of a program for each captured piece of a model, under one limit.

    Attributes
    ----------
    reason
        Reason for which no single graph exists.
    pieces
        Captured pieces, and the memory that the code between them keeps.
    choice
        Number of the program that each piece runs.
    simulation
        Peaks of that choice.
    least_bytes
        Least limit that could be kept, as far as known.
    levels
        By mark, the most bytes above the level at which a metered step began.
    metered
        Memory beside the pieces in the metered steps of this plan.
    recomputes
        True if the last step computed something again.
    """

    kind: ClassVar[str] = "parts"

    device: torch.device
    reason: str
    pieces: Pieces
    choice: list[int]
    simulation: Simulation
    limit_bytes: int
    least_bytes: int
    levels: dict[str, int] = field(default_factory=dict, repr=False)
    metered: Bases | None = field(default=None, repr=False)
    recomputes: bool = field(default=False, repr=False)
    parts_label: ClassVar[str] = "parts captured"

    @property
    def predicted_bytes(self) -> int:
        """Peak of a step; the code between the pieces is estimated before a step was metered."""
        return self.simulation.peak_bytes

    @property
    def verdict(self) -> Verdict:
        """Use of the plan in the next step."""
        if self.pieces.wants_search and not self.is_over:
            return Verdict.REMEASURE
        return super().verdict

    @property
    def is_refuted(self) -> bool:
        """True if a recomputed value of a part differed."""
        return self._known != self._counts()

    def _counts(self) -> list[int]:
        return [len(site.kind.captured.lowered.unrepeatable) for site in self.pieces.sites]

    def __post_init__(self) -> None:
        self._known = self._counts()

    def is_verified(self, verify: str | int) -> bool:
        """Return whether the next step is verified; never without recomputation."""
        sites = zip(self.pieces.sites, self.choice, strict=True)
        self.recomputes = any(s.kind.verified(k) is not None for s, k in sites)
        if not self.recomputes:
            return False
        is_due = self.proved.is_due(verify)
        self.proved.ran += 1
        return is_due

    @property
    def proof(self) -> str:
        """Results of verified steps, as text."""
        if not self.recomputes:
            return "nothing was recomputed"
        return self.proved.text("first")

    @property
    def makespan(self) -> float:
        """Seconds of the pieces, forward and backward; the code between is not timed."""
        return self.simulation.time_ns / 1e9

    @property
    def part_names(self) -> list[str]:
        """Captured parts."""
        return [site.name for site in self.pieces.sites]

    @property
    def parts(self) -> str:
        """Number of captured parts."""
        return str(len(self.pieces.sites))

    def describe_excess(self) -> str:
        """Return a sentence on a limit that could not be kept."""
        outside = self.pieces.describe_outside()
        count = len(self.pieces.sites)
        return (
            f"the limit of {self.limit_bytes} bytes was not kept: the step needed "
            f"{self.measured_bytes} bytes. {count} parts of the model are planned together, "
            f"what the rest of it keeps is not{outside}: a limit of "
            f"{max(self.least_bytes, self.limit_bytes)} bytes, or a smaller batch, would do"
        )

    @property
    def unplanned_time(self) -> float:
        """Seconds of the pieces without recomputation."""
        return sum(min(o.time_ns for o in options) for options in self.pieces.options()) / 1e9


def make_pieces_plan(
    device: torch.device, reason: str, pieces: Pieces, limit_bytes: int, reserve_bytes: int
) -> PiecesPlan:
    """Return the fastest choice under a limit.

    If the code between the pieces leaves too little, return the choice of the least peak: the need
    of that code is known only after a metered step, and no plan changes it.

    Raises
    ------
    InfeasibleError
        The pieces alone do not fit.
    """
    pieces.captures.refresh(site.kind for site in pieces.sites)
    options = pieces.options()
    alone = _zero(pieces.bases)
    least_alone = least_bytes(options, alone)
    if least_alone > limit_bytes:
        raise InfeasibleError(
            f"no plan was found that fits in {limit_bytes} bytes; the captured parts of the model "
            f"alone need {least_alone} bytes: give at least that, or a smaller batch",
            least_alone,
        )
    least = least_bytes(options, pieces.bases)
    choice = _chosen(options, pieces.bases, limit_bytes - reserve_bytes)
    return PiecesPlan(
        device,
        reason,
        pieces,
        choice,
        simulate(options, pieces.bases, choice),
        limit_bytes,
        least + reserve_bytes,
        reserve_bytes=reserve_bytes,
    )


def _within(bases: Bases) -> Bases:
    """Return the bases except at the start and end of a step, where no piece keeps anything."""
    return replace(bases, between=(0, *bases.between[1:]))


def _chosen(options: Sequence[Sequence[Option]], bases: Bases, limit_bytes: int) -> list[int]:
    """Return the fastest choice under a limit, or the choice of the least peak."""
    bases = _within(bases)
    return choose(options, bases, max(limit_bytes, least_bytes(options, bases)))


def _zero(bases: Bases) -> Bases:
    nothing = (0,) * len(bases.forward)
    return Bases(nothing, nothing, (*nothing, 0))


class PiecesStep:
    """Runner of a plan's pieces during the model's forward.

    Parameters
    ----------
    plan
        Plan to run.
    meter
        Meter of this step, if it is metered.
    tally
        Tally of a verified step.
    """

    def __init__(
        self, plan: PiecesPlan, meter: StepWatch | None, tally: Tally | None = None
    ) -> None:
        self._plan = plan
        self._meter = meter
        self._tally = tally
        self._sites = {(site.module, site.number): k for k, site in enumerate(plan.pieces.sites)}
        self._counts: dict[nn.Module, int] = {}
        self._stack = ExitStack()
        self.token: weakref.ref[torch.Tensor] | None = None

    def __enter__(self) -> Self:
        modules = dict.fromkeys(site.module for site in self._plan.pieces.sites)
        self._replaced = self._stack.enter_context(PatchedForwards(modules, self._runner))
        self._others = self._stack.enter_context(
            PatchedForwards(self._plan.pieces.elsewhere, self._elsewhere)
        )
        if self._meter is not None:
            self._meter.mark("start")
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _elsewhere(self, module: nn.Module, forward: Any) -> Callable[..., Any]:
        """Return the forward of a module on a path where no pieces were searched."""
        pieces = self._plan.pieces

        def run(*args: Any, **kwargs: Any) -> Any:
            pieces.is_stale = True
            has_parts = next(module.children(), None) is not None
            if not torch.is_grad_enabled() or not has_parts:
                return forward(*args, **kwargs)
            output, failed = None, "now"
            with self._others.paused(), self._replaced.paused():
                signature = call_signature(args, kwargs)
                path = pieces.elsewhere[module]
                kind = pieces.captures.kind_of(path, module, signature, args, kwargs)
                if isinstance(kind, Kind):
                    output, failed = self._call(kind, kind.least_kept, module, args, kwargs)
            return forward(*args, **kwargs) if failed else output

        return run

    def _runner(self, module: nn.Module, forward: Any) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            number = self._counts[module] = self._counts.get(module, -1) + 1
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            k = self._sites.get((module, number))
            if k is None:
                self._plan.pieces.is_stale = True
                return forward(*args, **kwargs)
            site = self._plan.pieces.sites[k]
            if site.failed or site.signature != call_signature(args, kwargs):
                self._plan.pieces.is_stale |= not (site.failed or site.varies)
                # It runs without a plan, and needs what the next metered step tells.
                self._plan.differs = True
                return forward(*args, **kwargs)
            return self._run(k, site, forward, args, kwargs)

        return run

    def _run(self, k: int, site: Site, forward: Any, args: Any, kwargs: Any) -> Any:
        kind = site.kind
        emitted = kind.emitted(self._plan.choice[k])
        verified = None if self._tally is None else kind.verified(self._plan.choice[k])
        if verified is not None:
            emitted, prover = verified
            prover.tally, prover.place = self._tally, site.path
        marks = None
        if self._meter is not None:
            marks = backward_marks(self._meter.mark, k)
            self._meter.mark(f"forward {k}")
        with self._replaced.paused(site.module):
            output, failed = self._call(kind, emitted, site.module, args, kwargs, marks)
        if self._meter is not None:
            self._meter.mark(f"after {k}")
        if failed:
            site.failed = failed == "for good"
            self._plan.pieces.is_stale = True
            return forward(*args, **kwargs)
        return output

    def _call(
        self,
        kind: Kind,
        emitted: StepCode,
        module: nn.Module,
        args: Any,
        kwargs: Any,
        marks: Any = None,
    ) -> tuple[Any, str]:
        output, failed = kind.call(emitted, module, args, kwargs, marks)
        if not failed:
            self.token = kind.capture.token
        return output, failed


def measured_bases(plan: PiecesPlan, step: StepBytes, *, most: bool = True) -> Bases:
    """Return the measured memory beside the pieces of a metered step.

    Parameters
    ----------
    plan
        Plan of the step.
    step
        Metered step.
    most
        True to keep larger earlier values.
    """
    pieces = plan.pieces
    chosen = [options[k] for options, k in zip(pieces.options(), plan.choice, strict=True)]
    count = len(chosen)
    found: dict[tuple[str, int], int] = {}
    pending: set[int] = set()
    for segment in step.segments:
        name, _, number = segment.name.partition(" ")
        k = int(number) if number else count
        peak = segment.peak_bytes
        place = ("between", k)
        if name == "start":
            place = ("between", 0)
        elif name == "after":
            pending.add(k)
            place = ("between", k + 1)
        elif name == "forward":
            place = ("forward", k)
            peak -= chosen[k].forward_bytes
        elif name == "backward" and number:
            pending.discard(k)
            place = ("backward", k)
            peak -= chosen[k].backward_bytes
        peak -= sum(chosen[j].kept_bytes for j in pending if j < place[1])
        found[place] = max(found.get(place, peak), peak)

    def measured(part: str, old: tuple[int, ...]) -> tuple[int, ...]:
        # Earlier measures stay valid if another choice now needs less.
        return tuple(
            found.get((part, k), value)
            if not (most and pieces.is_measured)
            else max(found.get((part, k), value), value)
            for k, value in enumerate(old)
        )

    bases = pieces.bases
    return Bases(
        measured("forward", bases.forward),
        measured("backward", bases.backward),
        measured("between", bases.between),
    )


def _most(one: Bases, other: Bases) -> Bases:
    def column(part: str) -> tuple[int, ...]:
        return tuple(map(max, zip(getattr(one, part), getattr(other, part), strict=True)))

    return Bases(column("forward"), column("backward"), column("between"))


def learn(plan: PiecesPlan, step: StepBytes) -> bool:
    """Note a metered step; return whether another choice would be better."""
    pieces = plan.pieces
    plan.measured_bytes = step.peak_bytes
    for segment in step.segments:
        plan.levels[segment.name] = max(segment.start_bytes, plan.levels.get(segment.name, 0))
    if pieces.wants_search:
        return True
    plan.meterings += 1
    alone = measured_bases(plan, step, most=False)
    plan.metered = alone if plan.metered is None else _most(plan.metered, alone)
    pieces.bases = measured_bases(plan, step)
    pieces.is_measured = True
    options = pieces.options()
    explained = simulate(options, pieces.bases, plan.choice)
    plan.simulation = explained
    over = step.peak_bytes - plan.limit_bytes
    if over > 0 and explained.peak_bytes <= plan.limit_bytes:
        plan.reserve_bytes += over
    plan.least_bytes = least_bytes(options, pieces.bases) + plan.reserve_bytes
    return _chosen(options, pieces.bases, plan.limit_bytes - plan.reserve_bytes) != plan.choice


def learn_levels(plan: PiecesPlan, more: dict[str, int]) -> tuple[int, int]:
    """Note bytes beyond the metered ones, by mark.

    Returns
    -------
    int, int
        Peak that they explain, and the expected peak if the code that kept them
        needs as much again for its inputs, and for gradients.
    """
    pieces = plan.pieces
    found: dict[tuple[str, int], int] = {}
    for mark, size in more.items():
        name, _, number = mark.partition(" ")
        k = int(number) if number else len(pieces.sites)
        places = [("between", k + 1 if name == "after" else k)]
        if number and name in ("forward", "backward"):
            # Memory kept before a piece stays until its backward has run.
            places = [("forward", k), ("backward", k)] if name == "forward" else [("backward", k)]
        for place in places:
            found[place] = max(size, found.get(place, 0))

    metered = plan.metered or pieces.bases

    def raised(part: str) -> tuple[int, ...]:
        return tuple(
            size + found.get((part, k), 0) for k, size in enumerate(getattr(metered, part))
        )

    raised_bases = Bases(raised("forward"), raised("backward"), raised("between"))
    pieces.bases = _most(pieces.bases, raised_bases)
    for k in range(len(pieces.sites) + 1):
        end = f"forward {k}" if k < len(pieces.sites) else "loss"
        kept = more.get(end, 0) - more.get(f"after {k - 1}", 0)
        found["between", k] = found.get(("between", k), 0) + CODE_FACTOR * max(kept, 0)
    expected = _most(pieces.bases, replace(pieces.bases, between=raised("between")))
    options = pieces.options()
    peaks = [simulate(options, bases, plan.choice).peak_bytes for bases in (pieces.bases, expected)]
    return peaks[0], peaks[1]


def expect_additions(plan: PiecesPlan, more_bytes: int) -> None:
    """Plan for existing sparse gradients, which are copied when new ones are added to them.

    Parameters
    ----------
    plan
        Plan of the next step; it is renewed if another choice would be better.
    more_bytes
        Bytes of sparse gradients beyond the ones of its metered steps.
    """
    pieces = plan.pieces
    first, *others = pieces.bases.between
    pieces.bases = replace(pieces.bases, between=(first + more_bytes, *others))
    options = pieces.options()
    plan.simulation = simulate(options, pieces.bases, plan.choice)
    plan.least_bytes = least_bytes(options, pieces.bases) + plan.reserve_bytes
    limit = plan.limit_bytes - plan.reserve_bytes
    plan.outdated |= _chosen(options, pieces.bases, limit) != plan.choice


def is_of_additions(plan: PiecesPlan) -> bool:
    """Return whether adding sparse gradients alone needs more than the limit: no plan helps."""
    if not plan.sparse_bytes:
        return False
    found = simulate(plan.pieces.options(), _within(plan.pieces.bases), plan.choice)
    return found.peak_bytes <= plan.limit_bytes


def pieces_curve(pieces: Pieces, points: int) -> Curve:
    """Return time of the pieces against limit, with the latest memory between them."""
    options = pieces.options()
    fastest = [o.index(min(o, key=lambda option: option.time_ns)) for o in options]
    least = least_bytes(options, pieces.bases)
    most = simulate(options, pieces.bases, fastest).peak_bytes
    found: dict[int, int] = {}
    for k in range(points):
        limit = least + (most - least) * k // max(points - 1, 1)
        priced = simulate(options, pieces.bases, choose(options, pieces.bases, limit))
        found[priced.peak_bytes] = priced.time_ns
    kept: list[tuple[int, int]] = []
    for peak, time_ns in sorted(found.items()):
        if not kept or time_ns < kept[-1][1]:
            kept.append((peak, time_ns))
    return Curve([peak for peak, _ in kept], [time_ns / 1e9 for _, time_ns in kept])
