"""Captured steps: operations, their costs, and the room that the code of a program needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch

from rotor._pytorch import core, devices
from rotor.common.accounting import (
    assumed_loss_bytes,
    generator_bytes,
    scalar_bytes,
)
from rotor.common.checksums import has_room
from rotor.engines.graph.capture import Capture, Captured
from rotor.engines.graph.code.early import EarlyCode, EarlyStep, Mark, Marks, Owners
from rotor.engines.graph.code.emit import Emitted, emit
from rotor.engines.graph.code.handover import Away, with_handovers
from rotor.engines.graph.code.offloading import Layout, layout_of
from rotor.engines.graph.code.pricing import Pooling, build_graph, outliving_storages, sizes_of
from rotor.engines.graph.code.proving import Prover, checksums_of, proving_bytes
from rotor.engines.graph.costs.profile import Cost
from rotor.engines.graph.tracing.false_edges import DEVICES
from rotor.engines.graph.tracing.lowering import Lowered
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
from rotor.tier.offload import Homes, Offload
from rotor.tier.state import AwayState


def homes_of(offload: Offload | None, away: Away | None, device: torch.device) -> Homes | None:
    """Return the links to the homes of a step's parameters; ``None`` where they are here."""
    return None if offload is None or away is None else offload.homes(device)


@dataclass
class CapturedStep:
    """Facts on one kind of step: its operations and their costs."""

    shares_shapes: ClassVar[bool] = False
    """True if costs and programs are shared with steps of other shapes."""
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
    releases_outputs: bool = False
    """True if others hold the outputs of the forward, as far as these are held."""
    values: tuple[int, ...] = ()
    """Values of the symbols in its graph; none if it has one shape."""
    lowered: Lowered = field(init=False, repr=False)
    base: CapturedStep = field(init=False, repr=False)
    """The same step without existing gradients, with all tangents."""
    _variants: dict[tuple[frozenset[int], frozenset[int]], CapturedStep] = field(
        init=False, default_factory=dict, repr=False
    )

    def __post_init__(self) -> None:
        self.base = self
        self.lowered = self.captured.lowered
        if self.existing:
            self.lowered, self.costs = self._with_handovers(self.costs)
        self.costs = self._without_absent(self.costs)
        self._release_outputs()

    def _release_outputs(self) -> None:
        """Count outputs of the forward as long as operations read them, if others hold them."""
        if self.releases_outputs:
            outputs = set(self.lowered.tasks[self.lowered.loss].inputs)
            storages = [
                (size, is_pinned and s not in outputs)
                for s, (size, is_pinned) in enumerate(self.lowered.storages)
            ]
            self.lowered = replace(self.lowered, storages=storages)

    def _with_handovers(self, costs: list[Cost]) -> tuple[Lowered, list[Cost]]:
        return with_handovers(self.captured.lowered, costs, self.existing, self.away)

    def _without_absent(self, costs: list[Cost]) -> list[Cost]:
        """Return costs with tangents of no bytes where they are absent."""
        if not self.absent:
            return costs
        cost = costs[self.lowered.loss]
        made = [0 if k in self.absent else size for k, size in enumerate(cost.made_bytes)]
        found = list(costs)
        found[self.lowered.loss] = replace(cost, made_bytes=tuple(made))
        return found

    def set_costs(self, costs: list[Cost]) -> None:
        """Replace the costs of the operations, here and in the results of `variant`.

        The sizes must be as before, and this step, like the costs, without existing gradients.
        """
        self.costs = costs
        for variant in self._variants.values():
            own = variant._with_handovers(costs)[1] if variant.existing else costs
            variant.costs = variant._without_absent(own)

    def variant(self, existing: frozenset[int], absent: frozenset[int]) -> CapturedStep:
        """Return the same step with some existing gradients, and some absent tangents."""
        if not existing and not absent:
            return self
        if (existing, absent) not in self._variants:
            made = replace(self, existing=existing, absent=absent)
            made.base = self
            self._variants[existing, absent] = made
        return self._variants[existing, absent]

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

    def note_loss(self, plan: Any, loss_bytes: int) -> bool:
        """Take note of the need of the caller's loss; return whether a plan should follow it."""
        return bool(loss_bytes != plan.loss_bytes)

    def graph(self, loss_bytes: int) -> Graph:
        """Return the cost model, with `loss_bytes` of workspace in the loss."""
        moves = self.offload is not None
        return build_graph(self.lowered, self.costs, loss_bytes, moves=moves, homes=self.homes)

    @property
    def homes(self) -> Homes | None:
        """Links to the homes of its parameters; ``None`` where they are here."""
        return homes_of(self.offload, self.away, self.device)

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

    def verified(self, ops: Any, make: Callable[[], Any]) -> Any:
        """Return a program's code with comparisons, made by a function."""
        return make()

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
        count = len(self.lowered.tasks)
        runs = np.bincount([k for k in numbers if k < count], minlength=count)
        replayed = sum(task.random and runs[k] > 1 for k, task in enumerate(self.lowered.tasks))
        return self.executor_bytes(int(replayed), checksums_of(self.lowered, numbers), limit_bytes)

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
        """Return the need of the loss beside the tangents: learnt, given, or 4 x the output."""
        if learned_bytes is not None:
            return max(learned_bytes, 0)
        if self.loss_captured:
            return 0
        return given_bytes or self.assumed_loss_bytes


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
