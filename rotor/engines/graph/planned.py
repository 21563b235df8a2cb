"""Plans of captured graphs: costs, a program under a limit, the functions that run it.

A plan with a second tier counts on a speed. Where steps wait for the tier longer than the plan
says, the speed that they have shown is planned for instead; where the tier is much faster, too.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch

from rotor.common.checksums import NO_ROOM
from rotor.common.timeline import PredictedTimeline
from rotor.engines.graph.captured_step import CapturedStep
from rotor.engines.graph.code.actions import renumbered
from rotor.engines.graph.code.early import EarlyCode
from rotor.engines.graph.code.emit import Emitted, emit
from rotor.engines.graph.code.offloading import Layout
from rotor.engines.graph.code.pricing import build_graph
from rotor.engines.graph.code.proving import Prover
from rotor.engines.graph.searching import Entry
from rotor.engines.graph.tracing import rewrite
from rotor.engines.proofs import StepProof
from rotor.graph import planner
from rotor.graph.blocks import PoolBytes
from rotor.graph.graph import Graph
from rotor.graph.link import Link
from rotor.graph.program import Program, simulate
from rotor.graph.transfers import transfers_of
from rotor.meter.reserving import Reserving
from rotor.meter.step_meter import Metered
from rotor.tier.offload import Offload
from rotor.units import format_bytes

logger = logging.getLogger("rotor")


@dataclass
class PlanningRecord:
    """Record of the search for one kind of step's program."""

    origin: str = "searched before the step"
    """Or "estimated" by a run or two of each operation, "repaired", "kept on disk", "loaded"."""
    improved: int = 0
    """Number of better programs since."""
    is_final: bool = True
    """True if no better program is looked for."""
    seconds: float = 0.0
    """Time of the capture and of all searches, measurements included."""
    is_rough: bool = False
    """True if operations are left to measure between the steps."""
    told: int = 0
    """Number of better programs when the user was last told of them."""
    told_recomputation: float | None = None
    """Recomputation when the user was last told of it; None before."""

    @property
    def text(self) -> str:
        """Record as text."""
        times = {0: "", 1: ", improved once"}.get(
            self.improved, f", improved {self.improved} times"
        )
        state = "final" if self.is_final else "a better one is looked for"
        return f"{self.origin}{times}, {state}, {self.seconds:.1f} s"


@dataclass(repr=False)
class GraphPlan(Metered):
    """Program and its figures; bytes are above the level at which a step begins."""

    engine: ClassVar[str] = "graph"

    step: CapturedStep
    graph: Graph
    program: Program
    limit_bytes: int
    executor_bytes: int
    """Bytes beside the graph's storages: random states, the caller's scalars, allocator slack."""
    loss_bytes: int
    planning: PlanningRecord = field(default_factory=PlanningRecord)
    budget_bytes: int | None = None
    """Budget of Rockmate, which does not count gradients of parameters; None without one."""
    most_recomputed: float | None = None
    """Share of recomputation above which another engine's plan is better; ``None`` for any."""
    is_beaten: bool = field(default=False, repr=False)
    """True if the search has ended, and more than that share is recomputed."""
    entry: Entry = field(init=False, repr=False)
    """Code of the program."""
    _known: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._known = len(self.step.captured.lowered.unrepeatable)
        self.entry = self.step.entry(self.program.actions)
        self.verify = "first" if self.step.verifies else "off"
        if self.step.counts == "reserved":
            self.reserving = Reserving()
        if not self.step.is_provable(self.limit_bytes):
            self.proved.unproved = NO_ROOM

    @property
    def is_alone(self) -> bool:
        """True if no other kind of step shares the capture."""
        return not self.step.shares_shapes

    @property
    def is_refuted(self) -> bool:
        """True if an operation of this capture gave other bits when it ran again."""
        return len(self.step.captured.lowered.unrepeatable) != self._known

    @property
    def result(self) -> Program:
        """Program of the plan."""
        return self.program

    def expect(self, context: Any) -> None:
        """Ask for another plan if an output has a new gradient, the tier another speed, or another
        engine a better plan.
        """
        known = self.step.captured.absent
        if self.most_recomputed is not None and self.planning.is_final:
            self.is_beaten = self.program.slowdown - 1 > self.most_recomputed
            self.outdated |= self.is_beaten
            self.most_recomputed = None
        self.outdated |= known is not None and not self.step.absent <= known
        layout, offload, link = self.layout, self.step.offload, self.program.link
        if layout is None or offload is None or link is None:
            return
        assert offload.link is not None
        # A plan that counts on the known speed may have less room on the tier.
        if replace(link, host_bytes=offload.link.host_bytes) == offload.link:
            figures = (self.program.waited, self.program.link_time, self.makespan)
            self.outdated |= follows_link(layout, offload, link, *figures)

    def take_code(self, old: GraphPlan) -> None:
        """Take over the functions of another plan of the same program."""
        if old.step is self.step and old.program == self.program:
            self.entry = old.entry

    @property
    def emitted(self) -> Emitted:
        """Functions that run the program, made when they are first needed."""
        if self.entry.code is None:
            self.entry.code = self.step.code(self.program.actions.tolist(), self.layout)
        return self.entry.code

    @functools.cached_property
    def layout(self) -> Layout | None:
        """Places of offloaded values in the second tier; ``None`` if nothing is offloaded."""
        return self.step.layout(self.program)

    @property
    def device(self) -> torch.device:
        """Device of the step."""
        return self.step.device

    @property
    def predicted_bytes(self) -> int:
        """Peak of a step by the simulator, the engine's own bytes included."""
        return self.program.peak_bytes + self.executor_bytes

    @property
    def loss_room_bytes(self) -> int | None:
        """Bytes for the caller's loss and the gradients it makes; ``None``: it is captured."""
        return None if self.step.loss_captured else self.loss_bytes + self.step.tangent_bytes

    @property
    def lower_bound_bytes(self) -> int:
        """Bytes below which no program of this step can stay, with the loss as assumed."""
        return lower_bound_of(self.step, self.graph, self.limit_bytes) + self.reserve_bytes

    @property
    def unlimited_bytes(self) -> int:
        """Predicted peak of a step that recomputes nothing, in the order of the model."""
        return self.program.unplanned.peak_bytes

    @property
    def recomputation(self) -> float:
        """Time of recomputed operations, as a part of the time of a step without recomputation."""
        total = self.graph.total_time
        return (self.program.makespan - self.program.waited) / total - 1 if total else 0.0

    @property
    def makespan(self) -> float:
        """Seconds of a step by the simulator."""
        return self.program.makespan

    @property
    def predicted_timeline(self) -> PredictedTimeline:
        """Live bytes of a step by the simulator."""
        ops = self.program.ops
        costs = self.program.run_ns
        live = self.program.timeline(runs_only=True).peak_bytes + self.executor_bytes
        loss = int(np.flatnonzero(ops == self.step.lowered.loss)[0])
        new = [
            sum(self.graph.storages[s].bytes for s in op.outputs) + op.workspace_bytes
            for op in self.graph.operations
        ]
        # A run lasts until the next one begins: the wait of the next one for the tier is included.
        waits = np.array([*transfers_of(self.program).waits_ns[1:], 0], dtype=np.int64)
        return PredictedTimeline.of_runs(costs[ops] + waits, live, loss, np.array(new)[ops])

    @functools.cached_property
    def recomputed(self) -> int:
        """Operations that run more than once."""
        return int((self.program.runs > 1).sum())

    @property
    def marks(self) -> str:
        """Text on the operations that a policy of selective checkpointing marks; often empty."""
        return rewrite.described_marks(
            t.node for t in self.step.lowered.tasks if t.node is not None
        )

    def install(self, proof: StepProof | None = None) -> Emitted:
        """Make the next step run this plan, compiled now if need be; with a proof, verified."""
        if proof is None:
            code = self.emitted
        else:
            if self.entry.verified is None:
                self.entry.verified = self._verified_code()
            code, prover = self.entry.verified
            prover.prepare(proof)
        code.prepare()
        if self.layout is not None:
            self.layout.prepare()
        self._place(code)
        self.step.captured.emitted = code
        return code

    @functools.cached_property
    def pool(self) -> PoolBytes | None:
        """Bytes of the private pool in which the program runs; ``None`` without one."""
        return self.step.pool_of(self.program, self.limit_bytes)

    def _place(self, code: Emitted) -> None:
        """Have code, which plans may share, use the places and the pool of this plan."""
        if code.places is not None:
            assert self.layout is not None
            code.places.layout = self.layout
        if code.pooling is not None:
            code.pooling.use(self.reserving)

    def _verified_code(self) -> tuple[Emitted, Prover]:
        """Return the program with comparisons; gradients wait for its end if the limit permits."""
        lowered, actions = self.step.lowered, self.program.actions.tolist()
        whole = self.step.captured.lowered
        # What is away has to leave in every step: nothing else takes it to its home.
        if self.step.hands_over and self.step.away is None:
            origins = enumerate(self.step.operations.origins)
            others = {k: number for k, number in origins if isinstance(number, int)}
            held = renumbered(actions, len(lowered.tasks), others)
            costs = [self.step.costs[k] for k in others]
            program = simulate(build_graph(whole, costs, self.loss_bytes), held, self.program.link)
            if program.peak_bytes + self.executor_bytes <= self.limit_bytes:
                prover = Prover(whole, whole)
                pooling = self.step.pooling(whole, costs)
                return emit(whole, held, (), prover, self.layout, pooling), prover
        prover = Prover(lowered, whole)
        return self.step.code(actions, self.layout, prover), prover

    def delivering(self, code: Emitted, *, spread: bool) -> Emitted:
        """Return the code of `install` in the form that delivers gradients as early as it can.

        With `spread`, a consumer waits for new gradients too.
        """
        step = self.step
        is_verified, early = code is not self.entry.code, self.entry.early
        if step.owners is None or not spread or (is_verified and step.hands_over):
            return code
        if is_verified not in early:
            lowered, numbers = step.lowered, self.program.actions.tolist()
            # No gradient leaves before its proof, and a consumer learns from their order.
            early[is_verified] = (
                EarlyCode.in_order(code, lowered, numbers)
                if is_verified
                else EarlyCode.of(
                    lowered, numbers, spread=True, layout=self.layout, pooling=step.pooling()
                )
            )
        self._place(early[is_verified])
        return early[is_verified]


def lower_bound_of(step: CapturedStep, graph: Graph, limit_bytes: int) -> int:
    """Return bytes below which no program of a step can stay."""
    bound = planner.lower_bound(graph, moves=step.offload is not None)
    return bound + step.executor_bytes(0, 0, limit_bytes)


_FIRST_STEPS, _STEPS = 3, 16
"""Steps after which a new plan is compared with its link, and between later comparisons."""

_WAITED = 0.05
"""Share of a step by which waits may exceed the plan's."""

_FASTER = 1.5
"""Ratio of the shown speeds to the planned ones from which a new plan is worth it."""


def follows_link(
    layout: Layout,
    offload: Offload,
    planned_for: Link,
    planned_wait: float,
    link_time: float,
    makespan: float,
) -> bool:
    """Return whether steps have shown another speed of a tier, and note this speed.

    `layout` has the waits and the traffic of the steps. `planned_wait`, `link_time` and `makespan`
    are the planned seconds of a step's waits, of its transfers, and of all of it.
    """
    waits, link = layout.waits, offload.link
    steps = waits.steps - waits.seen_steps
    due = _FIRST_STEPS if waits.seen_steps == 0 else _STEPS
    if link is None or steps < due or not offload.may_learn:
        return False
    waited = (layout.waited_ns() - waits.seen_ns) / steps / 1e9
    traffic = layout.tier.traffic
    rates = None if traffic is None else traffic.since(layout.seen).rates(planned_for.latency_ns)
    layout.see()
    excess = waited - planned_wait
    if rates is None:
        share = link_time / (link_time + max(excess, 0.0)) if link_time else 1.0
        rates = link.write_bytes_per_s * share, link.read_bytes_per_s * share
        rates = rates[0] / offload.planned_share, rates[1] / offload.planned_share
    planned = link.write_bytes_per_s, link.read_bytes_per_s
    is_slow = excess > _WAITED * makespan and (rates[0] < planned[0] or rates[1] < planned[1])
    faster = offload.planned_share / _FASTER
    is_fast = faster * rates[0] > planned[0] and faster * rates[1] > planned[1]
    if not is_slow and not is_fast:
        return False
    logger.info(
        "second tier: %s/s written and %s/s read in steps, %.3g s waited in each, %.3g s planned: "
        "planning again",
        format_bytes(round(rates[0])),
        format_bytes(round(rates[1])),
        waited,
        planned_wait,
    )
    offload.learn(*rates)
    return True
