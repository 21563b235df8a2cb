"""Captured steps: operations, their costs, and the room that the code of a program needs.

A graph captured with symbolic dimensions has the same operations at every shape. For a new shape,
sizes and costs are evaluated, the programs of other shapes are priced, and the fastest that fits is
taken; only if none fits, a search is made. A graph of one shape has no symbols.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch

from rotor._pytorch import core, devices
from rotor.common.accounting import (
    METERED_STEPS,
    assumed_loss_bytes,
    generator_bytes,
    scalar_bytes,
)
from rotor.common.checksums import has_room
from rotor.engines.graph.capture import Capture, Captured
from rotor.engines.graph.code.early import EarlyCode, EarlyStep, Mark, Marks, Owners
from rotor.engines.graph.code.emit import Emitted, emit
from rotor.engines.graph.code.handover import Away
from rotor.engines.graph.code.offloading import Layout, layout_of
from rotor.engines.graph.code.pricing import (
    Pooling,
    build_graph,
    outliving_storages,
    sizes_of,
    transfers,
)
from rotor.engines.graph.code.proving import Prover, checksums_of, proving_bytes
from rotor.engines.graph.costs.profile import Cost
from rotor.engines.graph.costs.symbols import AnySize, Shapes, Values, last_fitting
from rotor.engines.graph.searching import Entry, KnownOrders, Operations, Order, program_of
from rotor.engines.graph.tracing.false_edges import DEVICES
from rotor.engines.graph.tracing.lowering import Lowered
from rotor.errors import InfeasibleError
from rotor.graph import planner
from rotor.graph.blocks import (
    SMALL_BYTES,
    BlockBytes,
    PoolBytes,
    pool_bytes,
    program_bytes,
    small_blocks,
)
from rotor.graph.graph import Graph
from rotor.graph.link import Link
from rotor.graph.program import Program
from rotor.graph.resizing import Resizing
from rotor.tier.offload import Homes, Offload
from rotor.tier.state import AwayState

_LEAST_POINTS = 4
_GOOD = 1.01
"""Time of a program, against that without recomputation, for which no better one is searched."""
_NEAR = 1.05
"""Ratio of the bytes of two shapes for which a program of the larger one is good enough."""
_TRUSTED_SHAPES = 3
"""Number of shapes with metered steps after which predictions are trusted."""
_MARGIN = 1.1
"""Ratio of limit and prediction from which trusted steps are not metered."""


@dataclass(eq=False)
class CapturedStep:
    """Facts on one kind of step: its operations and their costs."""

    releases_outputs: ClassVar[bool] = False
    """True if others hold the outputs of the forward, as far as these are held."""
    capture: Capture
    captured: Captured
    costs: list[Cost]
    device: torch.device
    loss_captured: bool
    """True if the loss is among the operations."""
    planned_for: str = ""
    """Type of the device of the costs, if it differs from `device`."""
    owners: Owners | None = field(default=None, repr=False)
    """Origins of the primals that get gradients; None if unknown for one of them."""
    existing: frozenset[int] = frozenset()
    """Gradients that exist when the step begins: new ones are added to them."""
    absent: frozenset[int] = frozenset()
    """Numbers of the tangents that the loss does not hand to the backward."""
    verifies: bool = True
    """True if recomputed values are compared in some steps."""
    counts: str = "allocated"
    """Bytes that a limit counts on an accelerator: "allocated", or "reserved" by its allocator."""
    offload: Offload | None = None
    away: Away | None = None
    """Gradients that leave for homes in a second tier; ``None`` where parameters are here."""
    any_size: AnySize | None = field(default=None, repr=False)
    """Sizes and costs at any shape; ``None`` if the graph has one shape."""
    values: Values = ()
    """Values of the symbols in its graph."""
    keeps_orders: bool = False
    """True if programs for all shapes are kept on disk."""
    every: dict[tuple[frozenset[int], int], Operations] = field(default_factory=dict, repr=False)
    """Operations by existing gradients and unrepeatable operations, which all shapes share."""
    lowered: Lowered = field(init=False, repr=False)
    base: CapturedStep = field(init=False, repr=False)
    """The same step without existing gradients, with all tangents."""
    _variants: dict[tuple[frozenset[int], frozenset[int]], CapturedStep] = field(
        init=False, default_factory=dict, repr=False
    )

    def __post_init__(self) -> None:
        self.base = self
        lowered = self.operations.lowered
        costs = self.costs if self.any_size is None else self.any_size.costs(self.values)
        self.costs = self._of_operations(costs)
        self.lowered = lowered
        if self.any_size is None and not self.releases_outputs:
            return
        sizes = [size for size, _ in lowered.storages]
        if self.any_size is not None:
            sizes = sizes_of(lowered, self.costs)
        # Others hold the outputs of the forward: they count as long as operations read them.
        outputs = set(lowered.tasks[lowered.loss].inputs if self.releases_outputs else ())
        storages = [
            (size, is_pinned and s not in outputs)
            for s, (size, (_, is_pinned)) in enumerate(zip(sizes, lowered.storages, strict=True))
        ]
        self.lowered = replace(lowered, storages=storages)

    @property
    def shares_shapes(self) -> bool:
        """True if costs and programs are shared with steps of other shapes."""
        return self.any_size is not None

    @property
    def broken(self) -> str:
        """Condition of its kernels that does not hold at its shape; empty if all do."""
        return "" if self.any_size is None else self.any_size.broken_at(self.values)

    @property
    def operations(self) -> Operations:
        """Operations for the existing gradients: steps that share them are alike."""
        lowered = self.captured.lowered
        key = (self.existing, len(lowered.unrepeatable))
        if key not in self.every:
            for old in [other for other in self.every if other[1] != key[1]]:
                del self.every[old]
            made = self.every[key] = Operations(lowered, self.existing, self.away)
            if self.any_size is not None:
                costs = self.any_size.costs(self.any_size.fits.points[-1].values)
                priced, link = made.costs(costs), self.link
                moves = link is not None
                graph = build_graph(made.lowered, priced, 0, moves=moves, homes=self.homes)
                made.resizing = Resizing(graph)
                if self.keeps_orders:
                    has_tier = self.offload is not None
                    made.known = KnownOrders(made.lowered, self.device, has_tier=has_tier)
                for total, program in made.known.programs(graph, link) if made.known else ():
                    entry = made.entry(program.actions)
                    entry.total, entry.link = total, link
        return self.every[key]

    def _of_operations(self, costs: list[Cost]) -> list[Cost]:
        """Return costs from those of the captured graph; tangents that are absent have no bytes."""
        found = self.operations.costs(costs)
        if self.absent:
            loss = self.captured.lowered.loss
            sizes = enumerate(found[loss].made_bytes)
            made = tuple([0 if k in self.absent else size for k, size in sizes])
            found[loss] = replace(found[loss], made_bytes=made)
        return found

    def set_costs(self, costs: list[Cost]) -> None:
        """Replace the costs of the operations, here and in the results of `variant`.

        The sizes must be as before, and this step, like the costs, without existing gradients.
        """
        for step in (self, *self._variants.values()):
            step.costs = step._of_operations(costs)

    def variant(self, existing: frozenset[int], absent: frozenset[int]) -> CapturedStep:
        """Return the same step with some existing gradients, and some absent tangents."""
        if not existing and not absent:
            return self
        if (existing, absent) not in self._variants:
            made = replace(self, existing=existing, absent=absent)
            made.base = self
            self._variants[existing, absent] = made
        return self._variants[existing, absent]

    def at(self, values: Values) -> CapturedStep:
        """Return the step of another shape."""
        return replace(self, values=values)

    def forget_programs(self) -> None:
        """Drop all programs, since an option has changed."""
        self.capture.forget_programs()
        self.every.clear()

    @property
    def absent_tangents(self) -> frozenset[int]:
        """Tangents that came in no backward so far; none before the first."""
        return self.captured.absent or frozenset()

    @property
    def doubtful_tangents(self) -> frozenset[int]:
        """Tangents that never come if the model computes its own loss; none after a backward.

        A model that returns a single number and larger outputs is trained by the single number.
        """
        if not self.lowered.output_of_tangent:
            return frozenset()
        values = [node.meta["val"] for node in self.lowered.tangents]
        large = frozenset(k for k, value in enumerate(values) if value.numel() > 1)
        is_known = self.captured.absent is not None
        on_cpu = all(value.device.type in DEVICES for value in values)
        return large if on_cpu and not is_known and len(large) < len(values) else frozenset()

    def existing_among(self, lacking: Sequence[bool]) -> frozenset[int]:
        """Return the existing gradients, by flags of `slots_of` that are true where none exists.

        Those that leave for a second tier are among them: none stays.
        """
        away = frozenset() if self.away is None else self.away.gradients
        return frozenset(
            index
            for index, owner in (self.owners or {}).items()
            if owner.slots and (index in away or not lacking[owner.slots[0]])
        )

    @property
    def hands_over(self) -> bool:
        """True if gradients leave by nodes of ours: early, to be added to others, or in terms."""
        return bool(self.lowered.further) or any(task.gradients for task in self.lowered.tasks)

    @property
    def total(self) -> int:
        """Bytes of all storages."""
        return sum(size for size, _ in self.lowered.storages)

    def graph(self, loss_bytes: int) -> Graph:
        """Return the cost model, with `loss_bytes` of workspace in the loss."""
        if self.any_size is None:
            moves = self.offload is not None
            return build_graph(self.lowered, self.costs, loss_bytes, moves=moves, homes=self.homes)
        sizes = sizes_of(self.lowered, self.costs)
        ns = np.array([cost.ns for cost in self.costs], dtype=np.int64)
        workspaces = np.array([cost.workspace_bytes for cost in self.costs], dtype=np.int64)
        workspaces[self.lowered.loss] = loss_bytes
        if self.homes is not None:
            for k, (time, _) in transfers(self.lowered, self.homes, sizes).items():
                ns[k] = time
        return self.operations.resizing.graph(np.array(sizes, dtype=np.int64), ns, workspaces)

    @property
    def homes(self) -> Homes | None:
        """Links to the homes of its parameters; ``None`` where they are here."""
        if self.offload is None or self.away is None:
            return None
        return self.offload.homes(self.device)

    @property
    def state(self) -> AwayState | None:
        """Parameters at home in a second tier; ``None`` where they are here."""
        return None if self.away is None else self.away.state

    @property
    def link(self) -> Link | None:
        """Link to the second tier, on which plans count; ``None`` without a tier."""
        return None if self.offload is None else self.offload.known_link(self.device)

    def layout(self, program: Program) -> Layout | None:
        """Return places for a program's offloaded values; ``None`` if it has none."""
        if self.offload is None:
            return None
        sizes = sizes_of(self.lowered, self.costs)
        return layout_of(self.offload.tier, self.lowered, program.actions.tolist(), sizes)

    def tier_excess(self, program: Program) -> int:
        """Return the bytes by which a program's places exceed the limit of the tier; 0 if none."""
        if self.offload is None or self.offload.limit_bytes is None:
            return 0
        layout = self.layout(program)
        return 0 if layout is None else max(layout.nbytes - self.offload.limit_bytes, 0)

    def entry(self, actions: Sequence[int] | Order) -> Entry:
        """Return what is known of a program, which steps of other shapes share."""
        if self.any_size is None:
            return Entry(np.asarray(actions, dtype=np.int32))
        return self.operations.entry(actions)

    def code(
        self, numbers: list[int], layout: Layout | None = None, prover: Prover | None = None
    ) -> Emitted:
        """Return the functions that run the actions of a program, compared by a prover if given."""
        make = EarlyCode.of if self.hands_over else emit
        pooling = self.pooling()
        return make(self.lowered, numbers, prover=prover, layout=layout, pooling=pooling)

    @contextmanager
    def installed(
        self, slots: Sequence[core.Slot], arguments: Any, code: Emitted, marks: Marks | None = None
    ) -> Iterator[tuple[Any, EarlyStep | None]]:
        """Make the next captured call run code, and deliver gradients as early as that can.

        The context gives the arguments to call it with, and the runner with early gradients, None
        without one. The marks are called when the backward begins, and when it ends.
        """
        state = self.state
        self.capture.leaves = []
        if isinstance(code, EarlyCode) and self.owners is not None:
            if state is not None:
                # Another graph that the call may reach has gradients of other shells.
                self.capture.forget_programs()
            early = EarlyStep(code, self.owners, marks, state)
            self.captured.emitted = early
            with early.around(slots, arguments) as replaced:
                yield replaced, early
        else:
            # Else gradients would come to the parameters' shells, and be lost.
            assert self.away is None or not self.away.gradients
            # Gradients of tensors of unknown origin come all at the end, added up.
            self.captured.emitted = code if marks is None else marked(code, *marks)
            yield arguments, None
        if state is not None and self.capture.leaves is not None:
            self.capture.leaves = [*map(state.parameter_of, self.capture.leaves)]

    @property
    def has_pool(self) -> bool:
        """True if programs may run in a private pool of the allocator."""
        counts = self.counts == "reserved" and self.offload is None
        return counts and devices.has_pools(self.device)

    def pooling(
        self, lowered: Lowered | None = None, costs: list[Cost] | None = None
    ) -> Pooling | None:
        """Return the use of a private pool by code, of other operations if these are given."""
        if not self.has_pool:
            return None
        return Pooling(lowered or self.lowered, costs or self.costs)

    def pool_of(self, program: Program, limit_bytes: int) -> PoolBytes | None:
        """Return the bytes of a program's private pool; ``None`` without."""
        if not self.has_pool:
            return None
        own = self.executor_bytes_of(program.actions.tolist(), limit_bytes)
        return self._blocks_of(program, own)[1]

    def _blocks_of(self, program: Program, own_bytes: int) -> tuple[BlockBytes, PoolBytes | None]:
        """Return the bytes of a program's blocks, and those in a private pool if these are less.

        `own_bytes` are the bytes beside the graph's storages, as of `executor_bytes_of`.
        """
        copies = [self.lowered.input_bytes(node) for node in self.lowered.mutated]
        is_small = max(copies, default=0) <= SMALL_BYTES
        beside = small_blocks(own_bytes) if is_small else [own_bytes]
        orders = [cost.orders for cost in self.costs]
        expandable = devices.expandable_segments()
        found = program_bytes(program, beside, orders=orders, expandable=expandable)
        if not self.has_pool:
            return found, None
        pool = pool_bytes(program, outliving_storages(self.lowered), beside, orders=orders)
        return found, pool if pool.reserved_peak_bytes < found.reserved_peak_bytes else None

    @property
    def tangent_bytes(self) -> int:
        """Bytes of the gradients that the loss hands to the backward."""
        return sum(self.costs[self.lowered.loss].made_bytes)

    @property
    def output_bytes(self) -> int:
        """Bytes of the outputs' storages."""
        sizes = sizes_of(self.lowered, self.costs)
        return sum(sizes[storage] for storage in self.lowered.tasks[self.lowered.loss].inputs)

    @property
    def _devices(self) -> list[torch.device]:
        """Devices of its runs, and of its plans."""
        return [torch.device(self.device.type), torch.device(self.planned_for or self.device)]

    @property
    def _most_compared(self) -> int:
        """Largest number of checksums of a verified step."""
        return 2 * sum(len(task.made) for task in self.lowered.tasks)

    def is_provable(self, limit_bytes: int) -> bool:
        """Return whether a limit has room for the checksums of a verified step."""
        return all(has_room(d, self._most_compared, limit_bytes) for d in self._devices)

    def executor_bytes(self, replayed: int, compared: int, limit_bytes: int) -> int:
        """Return the bytes kept beside the graph's storages, with copies of changed inputs.

        The others are for scalars, `replayed` restored random states and, in a verified step,
        `compared` checksums.
        """
        proves = self.verifies and self.is_provable(limit_bytes)
        changed = sum(map(self.lowered.input_bytes, self.lowered.mutated))
        if any(device.type == "cpu" for device in self._devices):
            changed += late_bytes(self.lowered, self.costs)
        return changed + max(
            scalar_bytes(device.type)
            + generator_bytes(device.type, replayed)
            + (proving_bytes(self.lowered, device, compared) if proves else 0)
            for device in self._devices
        )

    def executor_bytes_of(self, numbers: list[int], limit_bytes: int) -> int:
        """Return the bytes kept beside the graph's storages while a program's actions run."""
        own, tasks = self.entry(numbers).own, self.lowered.tasks
        if limit_bytes not in own:
            runs = np.bincount([k for k in numbers if k < len(tasks)], minlength=len(tasks))
            replayed = sum(task.random and runs[k] > 1 for k, task in enumerate(tasks))
            compared = checksums_of(self.lowered, numbers)
            own[limit_bytes] = self.executor_bytes(int(replayed), compared, limit_bytes)
        return own[limit_bytes]

    def bytes_beside(self, program: Program, limit_bytes: int) -> int:
        """Return the bytes that a program needs beside the graph's storages.

        On an accelerator they include the slack of the caching allocator: blocks that are larger
        than their storages and, where reserved bytes count, holes between blocks.
        """
        own = self.executor_bytes_of(program.actions.tolist(), limit_bytes)
        if self.device.type == "cpu":
            return own
        found, pool = self._blocks_of(program, own)
        needed = found.allocated_peak_bytes
        if self.counts == "reserved":
            needed = (pool or found).reserved_peak_bytes
        return max(needed - program.peak_bytes, own)

    def most_executor_bytes(self, limit_bytes: int) -> int:
        """Return the most bytes kept beside the graph's storages, under any recomputation."""
        random = sum(task.random for task in self.lowered.tasks)
        return self.executor_bytes(random, self._most_compared, limit_bytes)

    @property
    def assumed_loss_bytes(self) -> int:
        """Assumed need of an unknown loss beside the tangents: with them, 4 x the output."""
        return max(assumed_loss_bytes(self.output_bytes) - self.tangent_bytes, 0)

    def loss_workspace(self, given_bytes: int, learned_bytes: int | None) -> int:
        """Return the need of the loss beside the tangents.

        It is learnt, at this shape or at others, given, or 4 x the output.
        """
        if learned_bytes is not None:
            return max(learned_bytes, 0)
        if self.loss_captured:
            return 0
        if self.any_size is not None and self.any_size.losses:
            return self.any_size.scaled(self.any_size.losses, self.values)
        return given_bytes or self.assumed_loss_bytes

    def note_loss(self, plan: Any, loss_bytes: int) -> bool:
        """Take note of the need of the caller's loss; return whether a plan should follow it.

        Steps of other shapes expect it too, and follow a larger one.
        """
        if self.any_size is None:
            return bool(loss_bytes != plan.loss_bytes)
        self.any_size.losses[self.values] = loss_bytes
        return bool(loss_bytes > plan.loss_bytes)

    # -- programs that shapes share

    def learn_program(self, program: Program) -> None:
        """Add a program that was searched for at this shape to those of all shapes."""
        assert self.any_size is not None
        total, operations = self.any_size.total(self.values), self.operations
        entry = operations.entry(program.actions)
        entry.total, entry.link = total, self.link
        if operations.known is not None:
            operations.known.keep(total, program)
        operations.prune()

    def solve(self, graph: Graph, budget: int, **options: Any) -> Program:
        """Return a known program that fits in a budget and is good, or the result of a search.

        The arguments are those of `rotor.graph.plan`.
        """
        assert self.any_size is not None
        known = self.priced(graph, budget, options.get("link"))
        if known is not None:
            total, entry = self.any_size.total(self.values), self.entry(known.actions)
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
        for entry in self.operations.programs.values():
            program = program_of(graph, entry.actions, link)
            # None moves more than the tier may hold, or the model has no tier any more.
            if program is None or program.peak_bytes > budget:
                continue
            if best is None or program.time_ns < best.time_ns:
                best = program
        return best

    def adopt(self, plan: Any) -> None:
        """Share results of verified steps with plans of the same program; note the limit.

        Once steps of other shapes were as predicted, those of this plan are not metered.
        """
        if self.any_size is None:
            return
        proved = plan.entry.proved
        proved.unproved, plan.proved = plan.proved.unproved, proved
        self.any_size.held[self.values] = plan.limit_bytes
        known = self.any_size.excess
        is_right = len(known) >= _TRUSTED_SHAPES and max(known.values()) <= 0
        if is_right and plan.predicted_bytes * _MARGIN <= plan.limit_bytes:
            plan.meterings = METERED_STEPS

    @property
    def expected_excess(self) -> int:
        """Bytes by which the step may exceed its prediction, as steps of other shapes did."""
        if self.any_size is None or not self.any_size.excess:
            return 0
        return max(self.any_size.scaled(self.any_size.excess, self.values), 0)

    def note_excess(self, excess_bytes: int) -> None:
        """Have steps of other shapes expect this one's bytes beyond its prediction."""
        if self.any_size is not None:
            self.any_size.excess[self.values] = excess_bytes

    def largest_fitting(self, limit_bytes: int, shapes: Shapes) -> Shapes | None:
        """Return the shapes of the largest call that fits, between one with a plan and this one.

        `shapes` are those of this call, which fits in no plan. None is returned without a shape
        that has a plan within the limit.
        """
        assert self.any_size is not None
        begin = self.any_size.largest_held(limit_bytes)
        if begin is None:
            return None
        # Programs of little memory for this shape.
        graph = self.graph(self.loss_workspace(0, None))
        found = planner.curve(graph, _LEAST_POINTS, effort="fast", link=self.link)
        for program in found.programs:
            self.operations.entry(program.actions)

        def fits(values: Values) -> bool:
            step = self.at(values)
            own = step.most_executor_bytes(limit_bytes) + step.expected_excess
            graph = step.graph(step.loss_workspace(0, None))
            return step.priced(graph, limit_bytes - own, step.link) is not None

        return self.any_size.shapes_at(last_fitting(begin, self.values, fits), shapes)


def marked(code: Emitted, begins: Mark, ends: Mark) -> Emitted:
    """Return a program whose backward reports its start and its end."""

    def backward(args: list[Any]) -> Any:
        begins()
        try:
            return code.backward(args)
        finally:
            ends()

    return replace(code, backward=backward)


def late_bytes(lowered: Lowered, costs: Sequence[Cost]) -> int:
    """Return the most bytes of a finished collective that a thread of gloo may still hold."""
    found = [0]
    for number in lowered.collectives:
        cost = costs[number]
        sizes = [lowered.storages[storage][0] for storage in lowered.tasks[number].inputs]
        found.append(max(cost.workspace_bytes, *sizes, *cost.made_bytes))
    return max(found)
