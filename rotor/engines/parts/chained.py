"""Stages of an ``nn.Sequential`` that cannot be captured: chains between the captured parts.

Stages in a row that are not captured are one part of the model. It runs by a schedule of the chain
engine, under autograd as it is: everything is kept, or stages are computed again as a whole. The
schedules are priced by the measures of the stages, and one of them is chosen together with the
programs of the captured parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import nn

from rotor.algorithms.no_checkpoint import NoCheckpoint
from rotor.algorithms.persistent import Persistent
from rotor.algorithms.sequence import BACKWARD, FE, LOSS
from rotor.algorithms.sequence import Sequence as Operations
from rotor.chain import Chain
from rotor.common.accounting import GENERATOR_BYTES, generator_bytes, scalar_bytes
from rotor.common.rerun import Unit
from rotor.common.tensor_trees import tree_tensors
from rotor.engines.chain.measures import Inspection
from rotor.engines.chain.plan import Schedule, executor_bytes
from rotor.engines.chain.run import run_chain
from rotor.engines.chain.segments import Around
from rotor.engines.chain.snapshot import StageOrigins
from rotor.engines.proofs import RunProof, StepProof
from rotor.graph.assembly import Option, undominated

_POINTS = 8
"""Schedules of a chain for each size of a loss that is tried."""

_LITTLE = 4
"""Divisor of a stage's kept bytes: if no more than this part was captured, it runs in a chain."""

IntArray = npt.NDArray[Any]

Called = tuple[nn.Module, int]
"""Call of a module in a forward: the module, and the number of its earlier calls."""


class CalledStages(NamedTuple):
    """Stages in a row, and the calls of their functions in a forward."""

    begin: int
    end: int
    place: int
    """Place of the first function among the functions of all stages."""
    calls: list[Called]


class StageCalls:
    """Calls of the functions of a model's stages in one forward."""

    def __init__(self, functions: Sequence[tuple[int, Any]]) -> None:
        self._functions = functions
        self.calls: list[Called] = []
        self.current: int | None = None
        """Stage of the running call; ``None`` outside of stages."""
        self.captured: dict[int, list[Called | None]] = {}
        """Captured calls within each stage; ``None`` stands for a capture of the whole stage."""
        self.around: dict[int, tuple[nn.Module, int]] = {}
        """Captured modules around several functions, each with the place after its last function,
        by the place of its first one.
        """

    def units(self, chains: Sequence[CalledStages]) -> list[Any]:
        """Return the modules to call in a row; a chain, or a module around several, is one."""
        found: list[Any] = []
        starts = {chain.place: chain for chain in chains}
        place = 0
        while place < len(self._functions):
            if place in starts:
                found.append(starts[place])
                place += len(starts[place].calls)
            elif place in self.around:
                module, place = self.around[place]
                found.append(module)
            else:
                found.append(self._functions[place][1])
                place += 1
        return found

    @contextmanager
    def entered(self, module: nn.Module, number: int) -> Iterator[None]:
        """Note a call, which runs in the context, if it is that of the next function."""
        place = len(self.calls)
        is_next = place < len(self._functions) and self._functions[place][1] is module
        if self.current is not None or not is_next:
            yield
            return
        self.calls.append((module, number))
        self.current = self._functions[place][0]
        try:
            yield
        finally:
            self.current = None

    def note_captured(self, module: nn.Module, number: int, begin: int) -> None:
        """Note a captured call of a stage, in one, or around several, from `calls[begin]` on."""
        for stage, _ in self._functions[begin : len(self.calls)]:
            self.captured.setdefault(stage, []).append(None)
            self.around[begin] = module, len(self.calls)
        if self.current is not None:
            is_whole = (module, number) == self.calls[-1]
            self.captured.setdefault(self.current, []).append(
                None if is_whole else (module, number)
            )


@dataclass(frozen=True)
class Unsaved:
    """Bytes of the values between the stages of a chain that autograd does not keep, [n + 1]."""

    by_any: list[int]
    """Of each value, the bytes that no stage saves."""
    by_later: list[int]
    """Bytes that no stage after it saves: the graph of the ones before it may be gone."""

    @classmethod
    def of(cls, values: Sequence[Mapping[int, int]], saved: Sequence[set[int]]) -> Unsaved:
        """Return the sums, from values' bytes by storage and the storages that stages save."""

        def bytes_beside(value: Mapping[int, int], stages: Sequence[set[int]]) -> int:
            return sum(value[storage] for storage in value.keys() - set().union(*stages))

        # A storage that several values share counts for the first of them.
        first = [
            {s: size for s, size in value.items() if not any(s in other for other in values[:i])}
            for i, value in enumerate(values)
        ]
        return cls(
            [bytes_beside(value, saved) for value in first],
            [bytes_beside(value, saved[i:]) for i, value in enumerate(first)],
        )


@dataclass(frozen=True)
class MeasuredStages:
    """Measured stages of a model, any of which may run in a chain if it is not captured."""

    inspection: Inspection
    missing: list[list[bool]]
    """For each stage, flags of the parameters whose gradients it makes and leaves."""
    sums: list[int]
    """Bytes of the largest gradient that autograd adds to one of a later stage, by stage."""

    def in_forward(self) -> StageCalls:
        """Return an observer of a forward."""
        stages = enumerate(self.inspection.stages)
        return StageCalls([(i, function) for i, stage in stages for function in stage.functions])

    def uncaptured(
        self, seen: StageCalls, inside: Mapping[Called, int], smallest: int
    ) -> list[CalledStages]:
        """Return the chains of stages in a row of which nothing, or little, was captured in a
        forward.

        `inside` has the bytes that autograd keeps from inside of each call. A chain is worth a
        choice if it keeps more than `smallest` bytes beside its outputs.
        """
        stages = self.inspection.stages
        if len(seen.calls) < sum(len(stage.functions) for stage in stages):
            return []
        found: list[CalledStages] = []
        place, is_open = 0, False
        for i, stage in enumerate(stages):
            calls = seen.calls[place : place + len(stage.functions)]
            may_run = self._may_run(i, seen, inside)
            if may_run and is_open:
                last = found[-1]
                found[-1] = last._replace(end=i + 1, calls=[*last.calls, *calls])
            elif may_run:
                found.append(CalledStages(i, i + 1, place, calls))
            is_open = may_run
            place += len(calls)
        return [
            chain
            for chain in found
            if any(self._inner_bytes(i) > smallest for i in range(chain.begin, chain.end))
        ]

    def _may_run(self, i: int, seen: StageCalls, inside: Mapping[Called, int]) -> bool:
        measure = self.inspection.measures[i]
        if measure.varies or measure.leaves or not any(measure.flags):
            return False
        captured = seen.captured.get(i, [])
        known = [inside.get(call, 0) for call in captured if call is not None]
        is_whole = len(known) < len(captured)
        return not is_whole and _LITTLE * sum(known) <= self._inner_bytes(i)

    def _inner_bytes(self, i: int) -> int:
        """Return the bytes that a stage keeps beside its output."""
        measure = self.inspection.measures[i]
        return measure.xbar_bytes - (measure.output_bytes if self._holds_output(i) else 0)

    def _holds_output(self, i: int) -> bool:
        """Return whether the measured memory of a stage includes its output: a loss consumes it."""
        is_last = i == len(self.inspection.stages) - 1
        return not is_last or self.inspection.loss_peak_bytes is None

    def kind(self, begin: int, end: int, unsaved: Unsaved) -> ChainKind:
        """Return the ways to run some stages in a row; see `ChainKind`."""
        return ChainKind(self, begin, end, unsaved, self._holds_output(end - 1))

    def part(self, begin: int, end: int) -> Inspection:
        """Return the measures of some stages in a row."""
        whole = self.inspection
        grads = [*(m.grad_bytes for m in whole.measures), whole.output_grad_bytes]
        outputs = [whole.input_bytes, *(m.output_bytes for m in whole.measures)]
        return Inspection(
            whole.stages[begin:end],
            whole.measures[begin:end],
            outputs[begin],
            grads[end],
            whole.flags[begin],
            whole.device,
        )


@dataclass(eq=False)
class ChainKind:
    """Stages in a row, and the schedules by which they may run."""

    measured: MeasuredStages
    begin: int
    end: int
    unsaved: Unsaved
    """Values that nothing keeps where the stages run as they are."""
    holds_output: bool
    """True if the measured memory of the last stage includes its output."""
    schedules: list[Schedule] = field(init=False, repr=False)
    """Ways to run it; `options` has their needs."""
    inspection: Inspection = field(init=False, repr=False)
    _options: dict[bool, list[Option]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._search()

    def _search(self) -> None:
        """Find schedules, from nothing recomputed to the least memory."""
        self.inspection = self.measured.part(self.begin, self.end)
        chain = self._chain(0)
        found = [
            (operations, Schedule(operations, len(chain))) for operations in _schedules(self._chain)
        ]
        best: list[int] = []
        for is_held in (True, False):
            priced = [self._option(*one, is_held) for one in found]
            best += [priced.index(option) for option in undominated(priced)]
        kept = [found[k] for k in dict.fromkeys(best)]
        self.schedules = [schedule for _, schedule in kept]
        self._options = {
            is_held: [self._option(*one, is_held) for one in kept] for is_held in (True, False)
        }

    def _chain(self, loss_bytes: int) -> Chain:
        """Return the cost model, with a loss that needs `loss_bytes` beside its gradient."""
        places = slice(self.begin, self.end)
        return self.inspection.chain(
            loss_tmp_bytes=loss_bytes,
            hold_output=False,
            missing=self.measured.missing[places],
            sums=self.measured.sums[places],
        )

    def _option(self, operations: Operations, schedule: Schedule, is_held: bool) -> Option:
        """Return the needs of a schedule; see `options`."""
        chain, inspection, codes = operations.chain, self.inspection, operations.codes
        assert chain is not None
        loss = int(np.argmax(codes[:, 0] == LOSS))
        freed = self._freed(codes, loss, schedule.tail)
        peaks = operations.timeline.peak_bytes - chain.x_bytes[0] - freed
        kept = int(operations.timeline.live_bytes[loss] - freed[loss])
        kept -= chain.x_bytes[0] + chain.grad_bytes[-1]
        # The output is gone when its gradient arrives, unless the stages' own graph keeps it.
        output = chain.x_bytes[-1]
        if _is_recorded(codes, loss, len(chain) - 1):
            output = self.unsaved.by_any[-1] if self.holds_output else 0
            kept -= chain.x_bytes[-1] if is_held and self.holds_output else output
        peaks[loss] -= output
        device = inspection.device
        own = executor_bytes(inspection, schedule.runs) - scalar_bytes(device.type)
        # While a stage runs again, the current random state is held too, except in Fn, whose
        # temporaries include it.
        again = [m.uses_rng for i, m in enumerate(inspection.measures) if schedule.runs[i] > 1]
        held = own - (GENERATOR_BYTES if generator_bytes(device.type, sum(again)) else 0)
        given = self.unsaved.by_any[0] if schedule.tail else 0
        return Option(
            kept_bytes=max(kept, 0) + held + given,
            forward_bytes=int(peaks[:loss].max()) + held + self.unsaved.by_any[0],
            backward_bytes=int(peaks[loss:].max()) + own + given,
            time_ns=round(operations.makespan * 1e9),
        )

    def _freed(self, codes: IntArray, loss: int, tail: int) -> IntArray:
        """Return the bytes that the simulator counts in each operation, and plain autograd frees.

        Inputs of the last stages, which plain autograd runs from stage `tail` on, stay only if they
        are saved. `loss` is the number of the loss among the operations.
        """
        n = self.end - self.begin
        sizes = np.zeros(n + 1, dtype=np.int64)
        for i in range(max(tail, 1), n):
            is_gone = i == tail and not _is_recorded(codes, loss, i - 1)
            sizes[i] = (self.unsaved.by_later if is_gone else self.unsaved.by_any)[i]
        sums = np.concatenate([[0], np.cumsum(sizes)])
        stages = codes[:, 1]
        # The input of a stage exists while it runs forward, and is gone in its backward.
        plain = np.where(codes[:, 0] == BACKWARD, sums[stages + 1], sums[stages])
        is_first = np.arange(len(codes)) <= loss
        return np.where((stages >= tail) & (is_first | (codes[:, 0] == BACKWARD)), plain, 0)

    def options(self, is_held: bool) -> list[Option]:
        """Return the needs of each schedule; others may hold the outputs until the backward."""
        return self._options[is_held]

    @property
    def unrepeatable(self) -> int:
        """Number of stages that are never recomputed."""
        return sum(m.varies for m in self.measured.inspection.measures[self.begin : self.end])

    def refresh(self) -> None:
        """Search again for schedules if a stage gave other bits."""
        if self.unrepeatable != sum(m.varies for m in self.inspection.measures):
            self._search()

    def recomputes(self, number: int) -> bool:
        """Return whether a schedule runs a stage again."""
        return bool(self.schedules[number].recomputed)

    def treatment(self, number: int) -> str:
        """Return a schedule's treatment of the stages, as text."""
        again, count = len(self.schedules[number].recomputed), self.end - self.begin
        if not again:
            return "kept"
        return "recomputed whole" if again == count else f"{again} of {count} recomputed whole"

    @property
    def name(self) -> str:
        """Name of the stages."""
        first, last = self.inspection.stages[0], self.inspection.stages[-1]
        return first.name if first is last else f"{first.name} to {last.name}"

    def run(self, number: int, x: Any, step: StepProof | None, k: int) -> Any:
        """Return the output of the stages, run by a schedule, as part k of a verified step."""
        schedule, inspection = self.schedules[number], self.inspection
        proof = None
        if step is not None and self.recomputes(number):
            proof = RunProof(step, StageOrigins(inspection.stages, self._keep), k)
        around = Around(self._unit, inspection, schedule, x, is_whole=False)
        flags = inspection.flags
        return around.whole(
            run_chain(inspection.stages, schedule, x, flags=flags, proof=proof, around=around)
        )

    def _keep(self, stages: list[int]) -> None:
        """Have stages run forward only once from now on."""
        self.measured.inspection.refute(self.begin + i for i in stages)

    @cached_property
    def _unit(self) -> Unit:
        functions = [f for stage in self.inspection.stages for f in stage.functions]
        modules = [m for f in functions if isinstance(f, nn.Module) for m in f.modules()]
        return Unit(dict.fromkeys(modules))


def _is_recorded(codes: IntArray, loss: int, stage: int) -> bool:
    """Return whether a stage's graph exists at the loss."""
    return bool((codes[:loss] == (FE, stage)).all(axis=1).any())


def _schedules(priced: Callable[[int], Chain]) -> list[Operations]:
    """Return the schedules of a chain for several peaks and several amounts of kept memory.

    `priced` returns the chain with a loss of some size. Only small steps fit beside a large loss:
    then the best schedules are those that keep little.
    """
    chain, algorithm = priced(0), Persistent()
    unplanned = next(NoCheckpoint().candidates(chain))
    found = [unplanned]
    highest = unplanned.peak_bytes
    for loss_bytes in (0, highest // 2, 4 * highest):
        other = priced(loss_bytes)
        budgets = algorithm.curve(other).bytes
        places = np.linspace(0, len(budgets) - 1, min(len(budgets), _POINTS)).astype(int)
        for budget in budgets[places].tolist():
            found.append(Operations(algorithm.solve(other, max(budget, 1)).codes, chain))
    return list(dict.fromkeys(found))


def mark_backward(x: Any, y: Any, begins: Callable[[], object], ends: Callable[[], object]) -> None:
    """Call each function once, when the backward from output `y` to input `x` begins, and ends."""
    begin, end = _once(begins), _once(ends)
    for tensor in tree_tensors(y):
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(begin)
    for tensor in tree_tensors(x):
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(end)
        elif tensor.requires_grad:
            tensor.register_hook(end)


def _once(function: Callable[[], object]) -> Callable[[Any], None]:
    waiting = [function]

    def call(_: Any) -> None:
        if waiting:
            waiting.pop()()

    return call
