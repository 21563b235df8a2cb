"""Plans: a schedule for one kind of step under a limit, with its predicted needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

import torch
from torch import nn

from rotor.algorithms.curve import Curve
from rotor.algorithms.peaks import Peak, peak_of
from rotor.algorithms.sequence import BACKWARD, CODES, FE, LOSS, Sequence
from rotor.algorithms.utils import DynamicAlgorithm, ProgressCallback, solved
from rotor.chain import Chain
from rotor.common.accounting import assumed_loss_bytes, generator_bytes, scalar_bytes
from rotor.common.checksums import NO_ROOM, has_room, proof_bytes
from rotor.common.timeline import PredictedTimeline
from rotor.engines.chain.measures import Inspection
from rotor.errors import InfeasibleError
from rotor.graph.chains import ChainProgram
from rotor.meter.step_meter import Metered
from rotor.units import exact_bytes


class Schedule:
    """Operations of a sequence, cut at the loss and at each backward.

    The first `head` of `n` stages are left to plain autograd: the sequence runs ``Fe_0 ..
    Fe_head-1`` first and ``B_head-1 .. B_0`` last. With `plain_tail`, the last stages are left to
    it too, if the sequence runs ``Fe_k .. Fe_n-1 L B_n-1 .. B_k`` around the loss.

    Raises ValueError for a Backward before the loss, a Loss after it, no loss, or a backward
    missing or out of order, and AttributeError for an unknown operation.
    """

    def __init__(
        self, sequence: Iterable[Any], n: int, *, plain_tail: bool = True, head: int = 0
    ) -> None:
        ops = [_read(op) for op in sequence]
        losses = [k for k, (kind, _) in enumerate(ops) if kind == LOSS]
        for kind, stage in ops[: losses[0] if losses else None]:
            if kind == BACKWARD:
                raise ValueError(f"B_{stage} is in the forward part of the sequence, before L")
        if not losses:
            raise ValueError("the sequence has no loss L between its forward and backward parts")
        if len(losses) > 1:
            raise ValueError("a second loss L is in the backward part of the sequence")
        before, after = ops[: losses[0]], ops[losses[0] + 1 :]
        for _, stage in before + after:
            if not 0 <= stage < n:
                raise ValueError(f"the sequence names stage {stage}, the chain has {n} stages")
        self.n = n
        self.head = head
        """First stage after those that plain autograd runs at the beginning."""
        self.tail = n
        """First stage that plain autograd runs at the end; n without one."""
        if before[:head] != [(FE, i) for i in range(head)] or after[len(after) - head :] != [
            (BACKWARD, i) for i in reversed(range(head))
        ]:
            raise ValueError(
                f"the sequence does not begin with Fe_0 .. Fe_{head - 1} kept to the end"
            )
        before, after = before[head:], after[: len(after) - head]
        if plain_tail:
            while (
                before
                and after
                and before[-1] == (FE, self.tail - 1)
                and after[0] == (BACKWARD, self.tail - 1)
            ):
                before.pop()
                after.pop(0)
                self.tail -= 1
        self.forward = before
        """(kind, stage) before the loss, except for head and tail."""
        self.segments = _cut(after, head, self.tail)
        """For each stage between head and tail, its backward's operations, up to its own B."""
        self.runs = [int(not head <= i < self.tail) for i in range(n)]
        """Number of forward runs of each stage."""
        for kind, stage in before + after:
            self.runs[stage] += kind != BACKWARD
        self.recomputed = frozenset(i for i in range(n) if self.runs[i] > 1)


def _read(op: Any) -> tuple[int, int]:
    kind = getattr(op, "kind", None)
    if kind not in CODES:
        raise AttributeError(f"unknown operation {op!r}, expected one of {', '.join(CODES)}")
    return CODES[kind], op.stage


def _cut(after: list[tuple[int, int]], head: int, tail: int) -> list[list[tuple[int, int]]]:
    segments: list[list[tuple[int, int]]] = [[] for _ in range(tail)]
    expected = tail - 1
    current: list[tuple[int, int]] = []
    for op in after:
        current.append(op)
        if op[0] == BACKWARD:
            if op[1] != expected:
                raise ValueError(
                    f"B_{op[1]} was found where B_{expected} was expected"
                    if expected >= head
                    else f"B_{op[1]} comes after the last backward"
                )
            segments[expected] = current
            current = []
            expected -= 1
    if expected >= head or current:
        missing = f"B_{expected}" if expected >= head else "nothing"
        raise ValueError(f"the sequence ends where {missing} was expected")
    return segments


_ATTEMPTS = 4


@dataclass(repr=False)
class Plan(Metered):
    """Schedule and its figures; bytes are above the level at which a step begins."""

    engine: ClassVar[str] = "chain"

    inspection: Inspection
    chain: Chain
    sequence: Sequence
    schedule: Schedule
    """Operations of the sequence in the executor's form."""
    limit_bytes: int
    executor_bytes: int
    """Bytes that the executor itself keeps: random states and copies of buffers."""
    _known: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._known = len(self.inspection.refuted)

    @property
    def is_refuted(self) -> bool:
        """True if a stage gave other bits when it ran again."""
        return len(self.inspection.refuted) != self._known

    @property
    def result(self) -> Sequence:
        """Schedule of the plan."""
        return self.sequence

    @property
    def program(self) -> ChainProgram:
        """Schedule as a program, with the time of a captured loss."""
        return ChainProgram(self.sequence, self.inspection.loss_ns or 0)

    @property
    def recomputed(self) -> int:
        """Stages that run more than once."""
        return len(self.schedule.recomputed)

    @property
    def device(self) -> torch.device:
        """Device of the stages."""
        return self.inspection.device

    @property
    def predicted_bytes(self) -> int:
        """Peak of a step by the simulator, the executor's own bytes included."""
        return self.sequence.peak_bytes - self.chain.x_bytes[0] + self.executor_bytes

    @property
    def unlimited_bytes(self) -> int:
        """Predicted peak of a step that recomputes nothing."""
        return self.program.unplanned.peak_bytes

    @property
    def holds_output(self) -> bool:
        """True if the caller's output has room in the backward, or a captured loss consumes it."""
        return self.chain.hold_output or self.inspection.loss_peak_bytes is not None

    @property
    def loss_room_bytes(self) -> int | None:
        """Bytes for the caller's loss and the gradient it makes; ``None`` if a loss is captured."""
        if self.inspection.loss_peak_bytes is not None:
            return None
        return self.chain.loss_tmp_bytes + self.inspection.output_grad_bytes

    @property
    def recomputation(self) -> float:
        """Time of recomputed stages, against that of a step without."""
        ideal = self.chain.ideal_time
        return self.sequence.makespan / ideal - 1 if ideal else 0.0

    @property
    def makespan(self) -> float:
        """Seconds of a step by the simulator; a captured loss is included."""
        return self.sequence.makespan + (self.inspection.loss_ns or 0) / 1e9

    @property
    def predicted_timeline(self) -> PredictedTimeline:
        """Live bytes of a step by the simulator."""
        program = self.program
        costs = [program.graph.operations[number].cost_ns for number in program.ops]
        live = program.timeline().peak_bytes + self.executor_bytes
        return PredictedTimeline.of_runs(costs, live, program.ops.tolist().index(len(self.chain)))


def executor_bytes(
    inspection: Inspection, runs: Items[int], *, rng: bool = True, verified: bool = False
) -> int:
    """Return the bytes kept beside the chain's: random states, copies of buffers, scalars.

    `runs` has the number of forward runs of each stage; `rng` tells whether random states are
    preserved, `verified` whether recomputed values are compared in some steps.
    """
    measures = list(zip(inspection.measures, runs, strict=True))
    recomputed = [m for m, count in measures if count > 1]
    kept = scalar_bytes(inspection.device.type)
    kept += sum(m.buffer_bytes for m in recomputed)
    if recomputed:
        # Hooks and attributes hold what a stage has left when its graph has been dropped.
        kept += sum(m.left_bytes for m, _ in measures)
    # The last run of a stage uses up the copy itself, an earlier run a copy of the copy.
    kept += max((m.buffer_bytes for m, count in measures if count > 2), default=0)
    if rng:
        kept += generator_bytes(inspection.device.type, sum(m.uses_rng for m in recomputed))
    if verified and recomputed:
        kept += sum(m.buffer_bytes for m, _ in measures)
        made = sum(count * len(m.flags) for m, count in measures if count > 1)
        kept += proof_bytes(inspection.device, made)
    return kept


def with_executor(
    curve: Curve,
    chain: Chain,
    inspection: Inspection,
    own_bytes: int,
    *,
    rng: bool,
    verified: bool,
) -> Curve:
    """Return a chain's curve by limits, which hold what the executor keeps beside the chain.

    The given curve is by budgets of the chain. `own_bytes` are kept beside the needs of the chain
    and the executor; `rng` and `verified` are as in `executor_bytes`.
    """
    n, compared = len(chain), _most_compared(inspection)

    def kept(count: int, *, proved: bool) -> int:
        runs = [count] * n
        return executor_bytes(inspection, runs, rng=rng, verified=proved) + own_bytes

    base = curve.bytes - chain.x_bytes[0]
    limits = base + kept(3, proved=False)
    if verified:
        # Steps are verified under limits with room for it.
        room = [has_room(inspection.device, compared, limit) for limit in limits.tolist()]
        limits[room] += kept(3, proved=True) - kept(3, proved=False)
    if curve.seconds[-1] <= chain.ideal_time:
        limits[-1] = base[-1] + kept(1, proved=False)
    useful = limits < limits[-1]
    useful[-1] = True
    return Curve(limits[useful], curve.seconds[useful])


def _most_compared(inspection: Inspection) -> int:
    """Return the most checksums that a verified step makes: of three runs of every stage."""
    return sum(3 * len(m.flags) for m in inspection.measures)


def loss_reserve(inspection: Inspection, given_bytes: int) -> int:
    """Return the loss's temporary: as captured, as given, or 4 x the output with its gradient."""
    if inspection.loss_peak_bytes is not None:
        return inspection.loss_peak_bytes - inspection.output_grad_bytes
    if given_bytes:
        return given_bytes
    return assumed_loss_bytes(inspection.output_bytes) - inspection.output_grad_bytes


def kept_stages(inspection: Inspection) -> str:
    """Return a part of a sentence on the stages that are never recomputed, with a reason."""
    if not inspection.reasons:
        return ""
    i, reason = next(iter(inspection.reasons.items()))
    count = sum(inspection.once)
    return (
        f". {count} of {len(inspection.measures)} stages are never recomputed, stage "
        f"{inspection.measures[i].name} for one: {reason}"
    )


def _has_parts(inspection: Inspection, name: str) -> bool:
    """Return whether a stage of a name has modules within, which could be stages."""
    functions = [f for stage in inspection.stages if stage.name == name for f in stage.functions]
    return any(isinstance(f, nn.Module) and any(f.children()) for f in functions)


def with_proofs(
    make: Callable[..., Plan], inspection: Inspection, limit_bytes: int, verify: str | int
) -> Plan:
    """Return the plan of `make(verified=flag)` under a limit, with proofs if it has room for them.

    `verify` names the steps in which recomputed values are compared.
    """
    compared = _most_compared(inspection)
    has_proofs = has_room(inspection.device, compared, limit_bytes)
    try:
        plan = make(verified=verify != "off" and has_proofs)
    except InfeasibleError as error:
        least = error.minimum_bytes
        if verify != "off" and not has_proofs and has_room(inspection.device, compared, least):
            # A limit of that size has room for verified steps, which need their own bytes.
            make(verified=True)
        raise
    plan.verify = verify
    plan.proved.unproved = "" if has_proofs else NO_ROOM
    return plan


def make_chain_plan(
    inspection: Inspection,
    chain: Chain,
    limit_bytes: int,
    algorithm: DynamicAlgorithm,
    *,
    reserve_bytes: int,
    rng: bool,
    options: dict[str, Any],
    progress: ProgressCallback | None,
    collective_bytes: int,
    plain_tail: bool,
    verified: bool,
) -> Plan:
    """Return the best schedule of the algorithm under a limit on bytes above the level at its
    start.

    The `options` are keywords of the algorithm's ``solve``. `reserve_bytes` are set aside beside
    the predicted ones, and `collective_bytes` are kept beside the needs of the chain and the
    executor, with those of verified steps if `verified`. With `plain_tail`, plain autograd may run
    the last stages.

    Raises InfeasibleError if no schedule fits; its `minimum_bytes` is the least limit with a
    schedule, counted as `limit_bytes` is.
    """
    n = len(chain)
    resident = chain.x_bytes[0]

    @cache
    def peak_within(budget: int) -> Peak | None:
        try:
            return peak_of(solved(algorithm, chain, budget, progress=progress, **options))
        except InfeasibleError:  # An algorithm of the caller's, whose least limit is not exact.
            return None

    def solve(own: int) -> Plan:
        budget = limit_bytes - own - reserve_bytes + resident
        try:
            sequence = solved(algorithm, chain, max(budget, 1), progress=progress, **options)
        except InfeasibleError as error:
            least = error.minimum_bytes
            peak = peak_within(least)
            cut = ""
            if peak is not None and peak.is_divisible and _has_parts(inspection, peak.module):
                cut = f", cut stage {peak.module} into several"
            least += own + reserve_bytes - resident
            raise InfeasibleError(
                f"no schedule fits in a limit of {exact_bytes(limit_bytes)}: the least "
                f"that one fits in is {exact_bytes(least)}, above the model and its input. Raise "
                f"mem_limit{cut}, or make the batch smaller{kept_stages(inspection)}",
                least,
                peak=peak and peak.in_all(least, "beside the stages"),
            ) from error
        schedule = Schedule(sequence, n, plain_tail=plain_tail, head=inspection.plain[0])
        kept = executor_bytes(inspection, schedule.runs, rng=rng, verified=verified)
        kept += collective_bytes
        return Plan(
            inspection, chain, sequence, schedule, limit_bytes, kept, reserve_bytes=reserve_bytes
        )

    def fits(plan: Plan) -> bool:
        return plan.predicted_bytes + reserve_bytes <= limit_bytes

    fewest, most = (
        executor_bytes(inspection, [count] * n, rng=rng, verified=verified) + collective_bytes
        for count in (1, 3)
    )
    found: Plan | None = None
    refusal: tuple[Any, ...] = ()
    # The executor's bytes depend on the schedule, and the schedule on the rest of the limit.
    waiting, tried = [fewest, most], set[int]()
    while waiting:
        own = waiting.pop(0)
        if own in tried:
            continue
        tried.add(own)
        try:
            plan = solve(own)
        except InfeasibleError as error:
            refusal = error.args
            continue
        if fits(plan) and own == fewest:
            return plan
        if fits(plan) and (found is None or plan.makespan < found.makespan):
            found = plan
        if len(tried) < _ATTEMPTS:
            waiting.append(plan.executor_bytes)
    if found is None:
        raise InfeasibleError(*refusal)
    return found
