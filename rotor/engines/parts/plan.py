"""Plan of the parts of a model: a choice among the options of each, under one limit.

Parts are captured pieces of a model without a single graph, or blocks that FSDP2 shards one by one.
Both are chosen by `rotor.graph.assembly`, and learn from metered steps in the same way. Between two
marks of a metered step lies a stretch.

All parts have their places of a second tier in one area for each step. The transfers of a part
begin with an idle link, and are over when its backward is. Values that a part writes in its forward
may be read back in its backward only, and stay in the tier until then, together with those of all
other parts: places of different parts do not overlap.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy as np
import torch

from rotor.algorithms.curve import Curve
from rotor.common.accounting import CODE_FACTOR
from rotor.common.timeline import Timeline
from rotor.engines.graph.code.offloading import Layout, StepArea
from rotor.engines.graph.planned import follows_link
from rotor.graph.assembly import (
    Bases,
    Option,
    Simulation,
    choose,
    fastest_of,
    largest_bases,
    least_bytes,
    simulate,
)
from rotor.graph.program import Program
from rotor.meter.step_meter import Metered, StepBytes, Verdict
from rotor.meter.watch import sparse_growth
from rotor.tier.offload import Offload
from rotor.units import exact_bytes

Placement = tuple[Program, Layout | None]
"""Program of a part, and the places of its values in a second tier."""


def place_of(mark: str, count: int) -> tuple[str, int]:
    """Return the field of `rotor.graph.assembly.Bases`, and the index, that a mark begins.

    The marks of `count` parts are "start", "forward k", "after k", "loss", "backward", "backward k"
    and "before k"; "recorded k" is within the backward.
    """
    name, _, number = mark.partition(" ")
    if name == "start":
        return "between", 0
    k = int(number) if number else count
    if number and name in ("forward", "backward", "recorded"):
        return "forward" if name == "forward" else "backward", k
    return "between", k + 1 if name == "after" else k


def retimed(
    measured: Timeline,
    options: Sequence[Sequence[Option]],
    choice: Sequence[int],
    other: Sequence[int],
    peaks: Simulation,
) -> Timeline:
    """Return the timeline of a step under another choice, from that of a metered step under this
    one.

    Each stretch of the step, between the marks of `place_of`, has the peak that is predicted for
    the other choice. A part's backward, which recomputes, is shorter or longer by the difference of
    the predicted times; everything else takes as long as it was measured to.
    """
    marks = [*measured.marks, ("end", float(measured.seconds[-1]))]
    moments, levels = [marks[0][1]], []
    spent = [0.0] * len(options)
    for (mark, begin), (_, end) in pairwise(marks):
        part, k = place_of(mark, len(options))
        seconds = end - begin
        if part != "between":
            spent[k] += seconds
        if part == "backward":
            now, then = options[k][choice[k]].time_ns, options[k][other[k]].time_ns
            seconds += spent[k] * (then / now - 1) if now else 0.0
        moments.append(moments[-1] + max(seconds, 0.0))
        levels.append(int(getattr(peaks, part)[k]))
    live = np.array([*levels, 0], dtype=np.int64)
    return Timeline(np.array(moments), live, np.zeros_like(live))


class Parts(ABC):
    """Parts of a model in the order of the forward, and the code between them."""

    label: ClassVar[str]
    """Name of the parts in reports."""
    sites: list[Any]
    """Parts, each with its ways to run (`pieces.Site`, `block_plan.Block`)."""
    bases: Bases
    """Bytes that are resident under every choice."""
    is_measured: bool
    """True if the bases are those of a metered training step."""
    offload: Offload | None

    @property
    def tier_limit_bytes(self) -> int | None:
        """Most bytes of all parts in the second tier; ``None`` for any."""
        return None if self.offload is None else self.offload.limit_bytes

    @property
    def wants_search(self) -> bool:
        """True if other parts may be found."""
        return False

    def options(self) -> list[list[Option]]:
        """Return the options of each part."""
        return [site.options() for site in self.sites]

    def may_offload(self) -> bool:
        """Return whether a part has a graph, whose programs may move values to the tier."""
        return True

    def tier(self, choice: Sequence[int]) -> PartsTier | None:
        """Return the use of the second tier under a choice; ``None`` without a tier."""
        if self.offload is None:
            return None
        chosen = zip(self.sites, choice, strict=True)
        return PartsTier(self.offload, [site.program(k) for site, k in chosen])

    def names(self, choice: Sequence[int]) -> list[str]:
        """Return the name of each part, and its treatment."""
        return [site.described(k) for site, k in zip(self.sites, choice, strict=True)]

    def recomputes(self, choice: Sequence[int]) -> bool:
        """Return whether anything is computed again under a choice."""
        return any(site.recomputes(k) for site, k in zip(self.sites, choice, strict=True))

    def unrepeatable(self) -> list[Any]:
        """Return the facts on values that may not be recomputed: new ones refute a plan."""
        return [site.unrepeatable for site in self.sites]

    @abstractmethod
    def describe_outside(self) -> str:
        """Return the modules that are not planned, as part of a sentence."""

    def settled(self, choice: list[int]) -> list[int]:
        """Return a choice in its simplest form."""
        return choice

    def described(self) -> str:
        """Return the number of parts, and reasons for exceptions."""
        return str(len(self.sites))

    def describe_again(self, choice: Sequence[int]) -> str:
        """Return the parts without a graph that are computed again, as part of a sentence."""
        del choice
        return ""


P = TypeVar("P", bound=Parts)


@dataclass(repr=False)
class PartsPlan(Metered, Generic[P]):
    """Choice of an option for each part of a model, under one limit."""

    engine: ClassVar[str] = "parts"

    device: torch.device
    reason: str
    """Reason for which no single graph exists."""
    parts: P
    choice: list[int]
    """Number of the option of each part."""
    simulation: Simulation
    limit_bytes: int
    least_bytes: int
    """Least limit that could be kept, as far as known."""
    metered: Bases | None = field(default=None, repr=False)
    """Memory beside the parts in the metered steps of this plan."""
    margin_bytes: int = 0
    """Part of the reserve that is set aside until a step was metered."""

    def __post_init__(self) -> None:
        self.choice = self.parts.settled(self.choice)
        self.tier = self.parts.tier(self.choice)
        self._known = self.parts.unrepeatable()

    @property
    def predicted_bytes(self) -> int:
        """Peak of a step; the code between the parts is estimated before a step was metered."""
        return self.simulation.peak_bytes

    @property
    def verdict(self) -> Verdict:
        """Use of the plan in the next step."""
        if self.parts.wants_search and not self.is_over:
            return Verdict.REMEASURE
        found = super().verdict
        is_other = self.tier is not None and self.tier.is_outdated
        return Verdict.REPLAN if found is Verdict.KEEP and is_other else found

    def expect(self, context: Any) -> None:
        """Plan for sparse gradients that have grown, and for another speed of the tier."""
        if context.peers.ranks is not None:
            return  # Ranks agree after a step.
        if self.tier is not None:
            self.tier.learn(self.makespan)
        more = sparse_growth(self, context.structure.current_parameters())
        if more:
            _expect_additions(self, more)

    def stay(self) -> None:
        """Count on the present speed of the tier: no better plan was found."""
        if self.tier is not None:
            self.tier.accept()

    @property
    def is_refuted(self) -> bool:
        """True if a recomputed value of a part differed."""
        return self._known != self.parts.unrepeatable()

    @property
    def recomputes(self) -> bool:
        """True if steps compute something again."""
        return self.parts.recomputes(self.choice)

    @property
    def makespan(self) -> float:
        """Seconds of the parts, forward and backward; the code between is not timed."""
        return self.simulation.time_ns / 1e9

    @property
    def unplanned(self) -> Simulation:
        """Peaks of the choice that recomputes nothing in the parts."""
        options = self.parts.options()
        return simulate(options, self.parts.bases, fastest(options))

    @property
    def unlimited_bytes(self) -> int:
        """Peak of a step whose parts recompute nothing."""
        return self.unplanned.peak_bytes

    @property
    def recomputation(self) -> float:
        """Time of recomputed operations, against that of the parts without."""
        ideal_ns = self.unplanned.time_ns
        return self.simulation.time_ns / ideal_ns - 1 if ideal_ns else 0.0

    @property
    def unplanned_timeline(self) -> Timeline | None:
        """Predicted peaks of each stretch of a step whose parts recompute nothing.

        On the clock of the metered step; ``None`` before one, and if the plan itself recomputes
        nothing.
        """
        if self.measured_timeline is None:
            return None
        options, unplanned = self.parts.options(), self.unplanned
        if self.simulation.time_ns <= unplanned.time_ns:
            return None
        return retimed(self.measured_timeline, options, self.choice, fastest(options), unplanned)

    def describe_excess(self) -> str:
        """Return a sentence on a limit that cannot be kept."""
        measured, limit = self.measured_bytes, exact_bytes(self.limit_bytes)
        enough = max(self.least_bytes, self.limit_bytes, measured or 0)
        excess = (
            f"the limit of {limit} was not kept: the step needed {exact_bytes(measured)}"
            if measured
            else f"the limit of {limit} is less than the predicted need of a step, "
            f"{exact_bytes(self.predicted_bytes)}"
        )
        return (
            f"{excess}. {len(self.parts.sites)} {self.parts.label} of the model "
            "are planned together, what the rest of it and the loss keep is not"
            f"{self.parts.describe_outside()}: a limit of {exact_bytes(enough)}, or a smaller "
            "batch, would do"
        )


def _within(bases: Bases) -> Bases:
    """Return the bases except at the start and end of a step, where no piece keeps anything."""
    return replace(bases, between=(0, *bases.between[1:]))


def choose_within(
    options: Sequence[Sequence[Option]],
    bases: Bases,
    limit_bytes: int,
    tier_limit_bytes: int | None = None,
) -> list[int]:
    """Return the fastest choice under a limit, or the choice of the least peak."""
    bases = _within(bases)
    least = least_bytes(options, bases, tier_limit_bytes)
    return choose(options, bases, max(limit_bytes, least), tier_limit_bytes)


def fastest(options: Sequence[Sequence[Option]]) -> list[int]:
    """Return the choice of the least time."""
    return [fastest_of(choices) for choices in options]


def without_bases(bases: Bases) -> Bases:
    """Return as many bases of no bytes."""
    nothing = (0,) * len(bases.forward)
    return Bases(nothing, nothing, (*nothing, 0))


def measured_bases(plan: PartsPlan[Any], step: StepBytes, *, most: bool = True) -> Bases:
    """Return the memory beside the parts of a metered step; with `most`, earlier maxima stay.

    What is predicted for a part can be too much, by as much as its neighbourhood then seems to need
    too little: less than what surely is there is not believed.
    """
    parts = plan.parts
    chosen = [options[k] for options, k in zip(parts.options(), plan.choice, strict=True)]
    found: dict[tuple[str, int], int] = {}
    pending: set[int] = set()
    for segment in step.segments:
        place = place_of(segment.name, len(chosen))
        part, k = place
        peak = segment.peak_bytes
        if segment.name.startswith("after "):
            pending.add(k - 1)
        elif part == "forward":
            peak -= chosen[k].forward_bytes
        elif part == "backward":
            pending.discard(k)
            peak -= chosen[k].backward_bytes
        peak -= sum(chosen[j].kept_bytes for j in pending if j < k)
        if part != "between":
            peak = max(peak, parts.sites[k].around_bytes)
        found[place] = max(found.get(place, peak), peak)

    def measured(part: str, old: tuple[int, ...]) -> tuple[int, ...]:
        # Earlier measures stay valid if another choice now needs less.
        return tuple(
            found.get((part, k), value)
            if not (most and parts.is_measured)
            else max(found.get((part, k), value), value)
            for k, value in enumerate(old)
        )

    bases = parts.bases
    return Bases(
        measured("forward", bases.forward),
        measured("backward", bases.backward),
        measured("between", bases.between),
    )


def learn(plan: PartsPlan[Any], step: StepBytes) -> bool:
    """Note a metered step; return whether another choice would be better."""
    parts = plan.parts
    plan.measured_bytes = step.peak_bytes
    for segment in step.segments:
        plan.levels[segment.name] = max(segment.start_bytes, plan.levels.get(segment.name, 0))
    if parts.wants_search:
        return True
    plan.meterings += 1
    alone = measured_bases(plan, step, most=False)
    plan.metered = alone if plan.metered is None else largest_bases([plan.metered, alone])
    parts.bases = measured_bases(plan, step)
    parts.is_measured = True
    plan.reserve_bytes, plan.margin_bytes = plan.reserve_bytes - plan.margin_bytes, 0
    options = parts.options()
    explained = simulate(options, parts.bases, plan.choice)
    plan.simulation = explained
    over = step.peak_bytes - plan.limit_bytes
    if over > 0 and explained.peak_bytes <= plan.limit_bytes:
        plan.reserve_bytes += over
    return _is_outdated(plan, options)


def _is_outdated(plan: PartsPlan[Any], options: Sequence[Sequence[Option]]) -> bool:
    """Note the least peak with the latest bases; return whether another choice is better."""
    bases, most = plan.parts.bases, plan.parts.tier_limit_bytes
    plan.least_bytes = least_bytes(options, bases, most) + plan.reserve_bytes
    limit = plan.limit_bytes - plan.reserve_bytes
    return choose_within(options, bases, limit, most) != plan.choice


def learn_levels(plan: PartsPlan[Any], more: dict[str, int]) -> tuple[int, int]:
    """Note bytes beyond the metered ones, by mark; return two peaks.

    The first is the peak that these bytes explain, the second the expected peak if the code that
    kept them needs as much again for its inputs, and for gradients.
    """
    parts = plan.parts
    found: dict[tuple[str, int], int] = {}
    # The memory that a part itself keeps does not vary.
    ends = {"forward": "after", "backward": "before"}
    for mark, size in list(more.items()):
        name, _, number = mark.partition(" ")
        if number and name in ends:
            more = {f"{ends[name]} {number}": size} | more
    for mark, size in more.items():
        part, k = place_of(mark, len(parts.sites))
        # Memory kept before a part stays until its backward has run.
        for place in [(part, k), ("backward", k)] if part == "forward" else [(part, k)]:
            found[place] = max(size, found.get(place, 0))

    metered = plan.metered or parts.bases

    def raised(part: str) -> tuple[int, ...]:
        return tuple(
            size + found.get((part, k), 0) for k, size in enumerate(getattr(metered, part))
        )

    raised_bases = Bases(raised("forward"), raised("backward"), raised("between"))
    parts.bases = largest_bases([parts.bases, raised_bases])
    for k in range(len(parts.sites) + 1):
        end = f"forward {k}" if k < len(parts.sites) else "loss"
        kept = more.get(end, 0) - more.get(f"after {k - 1}", 0)
        found["between", k] = found.get(("between", k), 0) + CODE_FACTOR * max(kept, 0)
    expected = largest_bases([parts.bases, replace(parts.bases, between=raised("between"))])
    options = parts.options()
    peaks = [simulate(options, bases, plan.choice).peak_bytes for bases in (parts.bases, expected)]
    return peaks[0], peaks[1]


def _expect_additions(plan: PartsPlan[Any], more_bytes: int) -> None:
    """Plan for existing sparse gradients, which are copied when new ones are added to them.

    `more_bytes` is the size of those beyond the ones of the plan's metered steps. The plan of the
    next step is renewed if another choice would be better.
    """
    parts = plan.parts
    first, *others = parts.bases.between
    parts.bases = replace(parts.bases, between=(first + more_bytes, *others))
    options = parts.options()
    plan.simulation = simulate(options, parts.bases, plan.choice)
    plan.outdated |= _is_outdated(plan, options)


def is_of_additions(plan: PartsPlan[Any]) -> bool:
    """Return whether adding sparse gradients alone needs more than the limit: no plan helps."""
    if not plan.sparse_bytes:
        return False
    found = simulate(plan.parts.options(), _within(plan.parts.bases), plan.choice)
    return found.peak_bytes <= plan.limit_bytes


def parts_curve(parts: Parts, points: int) -> Curve:
    """Return time of the parts against limit, with the latest memory between them."""
    options, tier_limit = parts.options(), parts.tier_limit_bytes
    least = least_bytes(options, parts.bases, tier_limit)
    most = simulate(options, parts.bases, fastest(options)).peak_bytes
    limits = [least + (most - least) * k // max(points - 1, 1) for k in range(points)]
    choices = [choose(options, parts.bases, limit, tier_limit) for limit in limits]
    found = [simulate(options, parts.bases, chosen) for chosen in choices]
    return Curve.from_points((priced.peak_bytes, priced.time_ns / 1e9) for priced in found)


class PartsTier:
    """Use of a second tier by the parts of one plan; lists have ``None`` for the other parts."""

    def __init__(self, offload: Offload, found: Sequence[Placement | None]) -> None:
        self.offload = offload
        self._link = offload.link
        layouts = [None if one is None else one[1] for one in found]
        self.programs = [None if one is None or one[1] is None else one[0] for one in found]
        """Program of each part that moves values; ``None`` for other parts."""
        self.whole: Layout | None = None
        """Area of a step, its waits, and its traffic; ``None`` if nothing is offloaded."""
        self._layouts: list[Layout | None] = [None] * len(layouts)
        total = sum(layout.nbytes for layout in layouts if layout is not None)
        if not total:
            return
        self.whole = Layout(offload.tier, {}, {}, total)
        begin = 0
        for k, layout in enumerate(layouts):
            if layout is not None:
                offsets = {s: begin + offset for s, offset in layout.offsets.items()}
                self._layouts[k] = replace(layout, offsets=offsets, waits=self.whole.waits)
                begin += layout.nbytes

    def _moving(self) -> list[Program]:
        return [program for program in self.programs if program is not None]

    def moved_bytes(self, k: int) -> tuple[int, int]:
        """Return the bytes that part `k` writes in one step, and fetches."""
        program = self.programs[k]
        return (0, 0) if program is None else (program.offloaded_bytes, program.fetched_bytes)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that are written in one step."""
        return sum(program.offloaded_bytes for program in self._moving())

    @property
    def fetched_bytes(self) -> int:
        """Bytes that are fetched in one step."""
        return sum(program.fetched_bytes for program in self._moving())

    @property
    def link_time(self) -> float:
        """Seconds that the transfers of one step take."""
        return sum(program.link_time for program in self._moving())

    @property
    def waited(self) -> float:
        """Seconds of one step in which the parts wait for the tier."""
        return sum(program.waited for program in self._moving())

    def waited_ns(self) -> int:
        """Return the time of all waits of the plan's steps so far."""
        return 0 if self.whole is None else self.whole.waited_ns()

    def prepare(self) -> None:
        """Reserve the area of a step now, where a full disk can still be named."""
        if self.whole is not None:
            self.whole.prepare()

    def begin(self) -> PlacedStep:
        """Return the places of a new step."""
        return PlacedStep(self._layouts, None if self.whole is None else self.whole.begin_area())

    def learn(self, makespan: float) -> None:
        """Note another speed of the tier, if steps have shown one; the makespan is as planned."""
        if self.whole is not None and self._link is not None and not self.is_outdated:
            figures = (self.waited, self.link_time, makespan)
            follows_link(self.whole, self.offload, self._link, *figures)

    @property
    def is_outdated(self) -> bool:
        """True if the tier is known to have another speed than the plan counts on."""
        return self.offload.link != self._link

    def accept(self) -> None:
        """Continue with this plan at the latest speed, for which no plan was found."""
        self._link = self.offload.link


class PlacedStep:
    """Places of one step's values by part; the area stays for as long as a part needs it."""

    def __init__(self, layouts: Sequence[Layout | None] = (), area: StepArea | None = None) -> None:
        self._layouts = layouts
        self._area = area

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        area, self._area = self._area, None
        if area is not None:
            area.leave()

    def of(self, k: int) -> tuple[Layout, StepArea] | None:
        """Return the places of part `k` in this step; ``None`` without any."""
        layout = self._layouts[k] if self._area is not None else None
        return None if layout is None or self._area is None else (layout, self._area)
