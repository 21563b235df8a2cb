"""Steps of one captured graph at any sizes: costs by fits, and programs that carry over.

A graph captured with symbolic dimensions has the same operations at every shape, so that a program
is an order in which they run at any of them. For a new shape, sizes and costs are evaluated, the
programs of other shapes are priced, and the fastest that fits is taken; only if none fits, a search
is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from rotor._pytorch import symbols
from rotor.common.accounting import METERED_STEPS
from rotor.common.checksums import Proved
from rotor.engines.graph.capture import Captured
from rotor.engines.graph.captured_step import CapturedStep, homes_of
from rotor.engines.graph.code.emit import Emitted
from rotor.engines.graph.code.handover import Away, with_handovers
from rotor.engines.graph.code.offloading import Layout
from rotor.engines.graph.code.pricing import build_graph, transfers
from rotor.engines.graph.code.proving import Prover
from rotor.engines.graph.costs.profile import Cost, in_order, keys_of
from rotor.engines.graph.costs.symbols import Fits, Point, Sizes, at, work_of
from rotor.engines.graph.planned import GraphPlan
from rotor.engines.graph.searching import KnownOrders, Order, program_of
from rotor.engines.graph.tracing.groups import groups_among
from rotor.engines.graph.tracing.lowering import Lowered
from rotor.errors import InfeasibleError
from rotor.graph import planner
from rotor.graph.graph import Graph
from rotor.graph.link import Link
from rotor.graph.program import Program
from rotor.graph.resizing import Resizing
from rotor.tier.offload import Homes, Offload

_MOST_PROGRAMS = 32
_LEAST_POINTS = 4
_GOOD = 1.01
"""Time of a program, against that without recomputation, for which no better one is searched."""
_NEAR = 1.05
"""Ratio of the bytes of two shapes for which a program of the larger one is good enough."""
_TRUSTED_SHAPES = 3
"""Number of shapes with metered steps after which predictions are trusted."""
_MARGIN = 1.1
"""Ratio of limit and prediction from which trusted steps are not metered."""

Numbers = npt.NDArray[np.int64]
Values = tuple[int, ...]
Shapes = tuple[tuple[int, ...] | None, ...]
"""Shapes of the leaves of a call's arguments; ``None`` for leaves that are no tensors."""


@dataclass
class _Entry:
    """Program for every shape, and the code that runs it."""

    actions: Order
    code: Emitted | None = None
    """Functions that run it; None before they are needed."""
    verified: Any = None
    """The same with comparisons, and their prover."""
    proved: Proved = field(default_factory=Proved)
    """Results of verified steps."""
    own: dict[int, int] = field(default_factory=dict)
    """Bytes kept beside the storages, by limit."""
    used: int = 0
    """Number of the last choice of the program."""
    total: int = 0
    """Bytes of all storages at the shape for which it was searched."""
    link: Link | None = None
    """Link to a second tier with which it was searched for."""


class _Variant:
    """Operations of a graph for one set of existing gradients, and its programs."""

    def __init__(
        self,
        lowered: Lowered,
        costs: Sequence[Cost],
        existing: frozenset[int],
        known: Callable[[Lowered], KnownOrders] | None,
        link: Link | None,
        away: Away | None = None,
        homes: Homes | None = None,
    ) -> None:
        self.lowered, priced = lowered, list(costs)
        if existing:
            self.lowered, priced = with_handovers(lowered, costs, existing, away)
        numbers = {id(task): k for k, task in enumerate(lowered.tasks)}
        self.origin = np.array([numbers.get(id(t), -1) for t in self.lowered.tasks])
        self.made = [list(task.made.values()) for task in self.lowered.tasks]
        own = [cost.workspace_bytes for cost in priced]
        self.workspaces = np.where(self.origin >= 0, 0, np.array(own, dtype=np.int64))
        """Workspaces of the operations that the captured graph lacks."""
        graph = build_graph(self.lowered, priced, 0, moves=link is not None, homes=homes)
        self.resizing = Resizing(graph)
        self.programs: dict[bytes, _Entry] = {}
        self.choices = 0
        self.entry(range(len(self.lowered.tasks)))
        self.known = None if known is None else known(self.lowered)
        for total, program in [] if self.known is None else self.known.programs(graph, link):
            self.entry(program.actions).total = total
            self.entry(program.actions).link = link

    def spread(self, values: Numbers) -> Numbers:
        """Return figures of its operations, from those of the graph's."""
        found: Numbers = np.where(self.origin >= 0, values[self.origin], 0)
        return found

    def entry(self, actions: Sequence[int] | Order) -> _Entry:
        """Return a program's entry, made if it is new."""
        order = np.asarray(actions, dtype=np.int32)
        key = order.tobytes()
        if key not in self.programs:
            self.programs[key] = _Entry(order)
        found = self.programs[key]
        self.choices += 1
        found.used = self.choices
        return found

    def prune(self) -> None:
        """Drop the programs that were not chosen for longest."""
        while len(self.programs) > _MOST_PROGRAMS:
            # The first program, which runs every operation once, is always kept.
            oldest = min(list(self.programs)[1:], key=lambda key: self.programs[key].used)
            del self.programs[oldest]


class SymbolicGraph:
    """Captured graph with symbols: sizes, costs and programs of its steps.

    `known` gives the programs on disk of a graph; by default none are read or kept. `facts` are
    other fields of its steps (`ShapeStep`).
    """

    def __init__(
        self,
        captured: Captured,
        device: torch.device,
        *,
        origins: list[tuple[int, int]] | None = None,
        leaf_sizes: dict[int, list[str]] | None = None,
        known: Callable[[Lowered], KnownOrders] | None = None,
        offload: Offload | None = None,
        away: Away | None = None,
        **facts: Any,
    ) -> None:
        self._known, self._facts = known, facts
        self.offload, self.away = offload, away
        self.origins, self.leaf_sizes = origins, leaf_sizes or {}
        """As of `rotor.engines.graph.sizing.origins_of`."""
        self.captured, self.device = captured, device
        self.sizes = Sizes(captured.lowered, device)
        self.fits = Fits()
        self.factors = np.ones(len(captured.lowered.storages))
        self.excess: dict[Values, int] = {}
        """Bytes by which metered steps exceeded their prediction."""
        self.losses: dict[Values, int] = {}
        """Bytes that the caller's loss needs."""
        self.held: dict[Values, int] = {}
        """Limits of the plans so far."""
        self._variants: dict[tuple[frozenset[int], int], _Variant] = {}

    # -- costs

    def concrete(self, values: Sequence[int]) -> Lowered:
        """Return the graph at plain sizes, to measure its operations."""
        storages, _, _ = self.sizes.of(values)
        return at(self.captured.lowered, storages.tolist(), values)

    def add_point(self, values: Sequence[int], costs: Sequence[Cost]) -> None:
        """Add the measured costs of all operations at one shape."""
        storages, moved, flops = self.sizes.of(values)
        self.fits.add(Point.of(values, costs, moved, flops))
        for task, cost in zip(self.captured.lowered.tasks, costs, strict=True):
            for storage, size in zip(task.made.values(), cost.made_bytes, strict=True):
                # Some operations make storages that are larger than their results.
                ratio = _ROUNDED * size / max(int(storages[storage]), 1)
                self.factors[storage] = max(self.factors[storage], ratio)

    def add_known(self, values: Sequence[int], known: dict[str, Cost]) -> None:
        """Add costs at a shape at which another capture was measured, if it has all operations.

        `known` are the costs by the keys of operations (`keys_of`).
        """
        lowered = self.concrete(values)
        keys = keys_of(lowered, self.device)
        if all(key in known for key in keys if key):
            self.add_point(values, in_order(lowered, keys, known))

    def figures(self, values: Sequence[int]) -> tuple[Numbers, Numbers, Numbers]:
        """Return bytes of storages, times and workspaces at a shape."""
        storages, moved, flops = self.sizes.of(values)
        storages = np.ceil(storages * self.factors).astype(np.int64)
        ns = self.fits.ns(work_of(moved, flops))
        return storages, ns, self.fits.workspaces(values, np.maximum(moved, 1).astype(np.float64))

    def costs(self, values: Sequence[int]) -> list[Cost]:
        """Return the cost of every operation at a shape."""
        storages, ns, workspaces = (part.tolist() for part in self.figures(values))
        return [
            Cost(time, workspace, tuple([storages[s] for s in task.made.values()]))
            for task, time, workspace in zip(
                self.captured.lowered.tasks, ns, workspaces, strict=True
            )
        ]

    def scaled(self, known: dict[Values, int], values: Values) -> int:
        """Return an upper bound of a figure that grows with the shape, from known ones."""
        here = self._growing(values)
        return max(
            (-(-figure * max(here, there) // there) if figure > 0 else figure)
            for shape, figure in known.items()
            for there in [self._growing(shape)]
        )

    def _growing(self, values: Values) -> int:
        """Return the bytes of the storages that grow with the shape, at a shape."""
        return max(int(self.sizes.of(values)[0][self.sizes.grows].sum()), 1)

    def total(self, values: Values) -> int:
        """Return the bytes of all storages at a shape."""
        return max(int(self.sizes.of(values)[0].sum()), 1)

    def broken_at(self, values: Sequence[int]) -> str:
        """Return a condition of its kernels that does not hold at a shape; empty if all do."""
        scope = dict(zip(self.sizes.names, values, strict=True))
        groups = groups_among(task.node for task in self.captured.lowered.tasks)
        found = dict.fromkeys(text for group in groups for text in group.conditions)
        return next((text for text in found if not symbols.evaluated(text, scope)), "")

    # -- steps

    def variant(self, existing: frozenset[int]) -> _Variant:
        """Return the operations for a set of existing gradients."""
        lowered = self.captured.lowered
        key = (existing, len(lowered.unrepeatable))
        if key not in self._variants:
            costs = self.costs(self.fits.points[-1].values)
            self._variants = {k: v for k, v in self._variants.items() if k[1] == key[1]}
            link = None if self.offload is None else self.offload.known_link(self.device)
            homes = homes_of(self.offload, self.away, self.device)
            self._variants[key] = _Variant(
                lowered, costs, existing, self._known, link, self.away, homes
            )
        return self._variants[key]

    def forget_programs(self) -> None:
        """Drop all programs, since an option has changed."""
        self._variants.clear()

    def step(self, values: Values) -> ShapeStep:
        """Return the step of a shape."""
        return ShapeStep(
            captured=self.captured,
            costs=[],
            device=self.device,
            offload=self.offload,
            away=self.away,
            symbolic=self,
            values=values,
            **self._facts,
        )

    def values_at(self, shapes: Shapes) -> Values | None:
        """Return the values of the symbols at the shapes of a call; ``None`` if unknown."""
        if self.origins is None:
            return None
        found = []
        for leaf, dimension in self.origins:
            shape = shapes[leaf]
            assert shape is not None
            found.append(shape[dimension])
        return tuple(found)

    def shapes_at(self, values: Values, like: Shapes) -> Shapes:
        """Return the shapes of a call at which the symbols have some values.

        Leaves whose sizes are unknown have the shapes in `like`, which are those of any call of the
        graph.
        """
        scope = dict(zip(self.sizes.names, values, strict=True))
        found = list(like)
        for leaf, sizes in self.leaf_sizes.items():
            found[leaf] = tuple([int(symbols.evaluated(size, scope)) for size in sizes])
        return tuple(found)


_PARTS = 1 << 12

_ROUNDED = 1 - 1e-14
"""Factor that keeps the product of a ratio, a whole number, from being above it."""


def _between(low: Values, high: Values, part: int) -> Values:
    return tuple(a + (b - a) * part // _PARTS for a, b in zip(low, high, strict=True))


@dataclass
class ShapeStep(CapturedStep):
    """Step of a graph with symbols at one shape, given by values of the symbols."""

    shares_shapes: ClassVar[bool] = True
    symbolic: SymbolicGraph = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self.base = self
        variant = self._variant
        sizes, ns, workspaces = self.symbolic.figures(self.values)
        sizes[[variant.made[variant.lowered.loss][k] for k in self.absent]] = 0
        workspaces = variant.spread(workspaces) + variant.workspaces
        self._figures = (sizes, variant.spread(ns), workspaces)
        pinned = [is_pinned for _, is_pinned in variant.lowered.storages]
        self.lowered = replace(
            variant.lowered, storages=list(zip(sizes.tolist(), pinned, strict=True))
        )
        self._release_outputs()
        listed = sizes.tolist()
        times, works = (part.tolist() for part in self._figures[1:])
        self.costs = [
            Cost(time, work, tuple([listed[s] for s in made]))
            for time, work, made in zip(times, works, variant.made, strict=True)
        ]

    @property
    def _variant(self) -> _Variant:
        return self.symbolic.variant(self.existing)

    @property
    def operations(self) -> object:
        """Operations of the graph for the existing gradients: steps that share them are alike."""
        return self._variant

    def learn_program(self, program: Program) -> None:
        """Add a program that was searched for at this shape to those of all shapes."""
        total = self.symbolic.total(self.values)
        entry = self._variant.entry(program.actions)
        entry.total, entry.link = total, self.link
        if self._variant.known is not None:
            self._variant.known.keep(total, program)
        self._variant.prune()

    def graph(self, loss_bytes: int) -> Graph:
        """Return the cost model, with `loss_bytes` of workspace in the loss."""
        sizes, ns, workspaces = self._figures
        workspaces = workspaces.copy()
        workspaces[self.lowered.loss] = loss_bytes
        if self.homes is not None:
            ns = ns.copy()
            for k, (time, _) in transfers(self.lowered, self.homes, sizes.tolist()).items():
                ns[k] = time
        return self._variant.resizing.graph(sizes, ns, workspaces)

    def code(
        self, numbers: list[int], layout: Layout | None = None, prover: Prover | None = None
    ) -> Emitted:
        """Return the functions that run a program, which other shapes share."""
        if prover is not None:
            return super().code(numbers, layout, prover)
        entry = self._variant.entry(numbers)
        if entry.code is None:
            entry.code = super().code(numbers, layout)
        return entry.code

    def executor_bytes_of(self, numbers: list[int], limit_bytes: int) -> int:
        """Return the bytes kept beside the graph's storages while a program runs."""
        entry = self._variant.entry(numbers)
        if limit_bytes not in entry.own:
            entry.own[limit_bytes] = super().executor_bytes_of(numbers, limit_bytes)
        return entry.own[limit_bytes]

    def loss_workspace(self, given_bytes: int, learned_bytes: int | None) -> int:
        """Return the need of the loss: learnt at this shape or at others, given, or assumed."""
        if learned_bytes is None and self.symbolic.losses and not self.loss_captured:
            return self.symbolic.scaled(self.symbolic.losses, self.values)
        return super().loss_workspace(given_bytes, learned_bytes)

    @property
    def expected_excess(self) -> int:
        """Bytes by which the step may exceed its prediction, as steps of other shapes did."""
        known = self.symbolic.excess
        return max(self.symbolic.scaled(known, self.values), 0) if known else 0

    def solve(self, graph: Graph, budget: int, **options: Any) -> Program:
        """Return a known program that fits in a budget and is good, or the result of a search.

        The arguments are those of `rotor.graph.plan`.
        """
        variant, total = self._variant, self.symbolic.total(self.values)
        known = self.priced(graph, budget, options.get("link"))
        if known is not None:
            entry = variant.entry(known.actions)
            is_near = total <= entry.total <= _NEAR * total and entry.link == self.link
            if is_near or known.time_ns <= _GOOD * graph.total_time * 1e9:
                return known
        try:
            found = planner.plan(graph, budget, **options | {"effort": "fast"})
        except InfeasibleError:
            if known is None:
                raise
            return known
        if known is not None and known.time_ns <= found.time_ns:
            return known
        self.learn_program(found)
        return found

    def priced(self, graph: Graph, budget: int, link: Link | None) -> Program | None:
        """Return the fastest known program within a budget; ``None`` if none fits."""
        best: Program | None = None
        for entry in self._variant.programs.values():
            program = program_of(graph, entry.actions, link)
            # None moves more than the tier may hold, or the model has no tier any more.
            if program is None or program.peak_bytes > budget:
                continue
            if best is None or program.time_ns < best.time_ns:
                best = program
        return best

    def _is_held(self, limit_bytes: int) -> bool:
        """Return whether a known program fits in a limit."""
        own = self.most_executor_bytes(limit_bytes) + self.expected_excess
        graph = self.graph(self.loss_workspace(0, None))
        return self.priced(graph, limit_bytes - own, self.link) is not None

    def _keep_least(self) -> None:
        """Keep programs of little memory for this shape."""
        graph = self.graph(self.loss_workspace(0, None))
        found = planner.curve(graph, _LEAST_POINTS, effort="fast", link=self.link)
        for program in found.programs:
            self._variant.entry(program.actions)

    def adopt(self, plan: GraphPlan) -> None:
        """Share results of verified steps with plans of the same program; note the limit.

        Once steps of other shapes were as predicted, those of this plan are not metered.
        """
        entry = self._variant.entry(plan.program.actions)
        entry.proved.unproved = plan.proved.unproved
        plan.proved = entry.proved
        self.symbolic.held[self.values] = plan.limit_bytes
        known = self.symbolic.excess
        is_right = len(known) >= _TRUSTED_SHAPES and max(known.values()) <= 0
        if is_right and plan.predicted_bytes * _MARGIN <= plan.limit_bytes:
            plan.meterings = METERED_STEPS

    def note_excess(self, excess_bytes: int) -> None:
        """Have steps of other shapes expect this one's bytes beyond its prediction."""
        self.symbolic.excess[self.values] = excess_bytes

    def largest_fitting(self, limit_bytes: int, shapes: Shapes) -> Shapes | None:
        """Return the shapes of the largest call that fits, between one with a plan and this one.

        `shapes` are those of this call, which fits in no plan. None is returned without a shape
        that has a plan within the limit.
        """
        known = [shape for shape, limit in self.symbolic.held.items() if limit <= limit_bytes]
        if not known:
            return None
        begin = max(known, key=self.symbolic.total)
        self._keep_least()
        low, high = 0, _PARTS
        while high - low > 1:
            middle = (low + high) // 2
            if replace(self, values=_between(begin, self.values, middle))._is_held(limit_bytes):
                low = middle
            else:
                high = middle
        return self.symbolic.shapes_at(_between(begin, self.values, low), shapes)

    def note_loss(self, plan: GraphPlan, loss_bytes: int) -> bool:
        """Have steps of other shapes expect the need of the loss; return whether it is larger."""
        self.symbolic.losses[self.values] = loss_bytes
        return loss_bytes > plan.loss_bytes

    def verified(self, ops: Any, make: Callable[[], Any]) -> Any:
        """Return a program's code with comparisons; other shapes share it."""
        entry = self._variant.entry(ops)
        if entry.verified is None:
            entry.verified = make()
        return entry.verified
