"""Plans that get better while training runs (``planning="background"``).

The first step runs a program that a short search found with the costs of a glance. Between the
following steps a few operations are measured; then a background thread searches, and the step after
a search runs the program that was found, if that is better. The thread has the cost model alone,
never the model.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from rotor._pytorch import core
from rotor.common.background import Executor, ThreadJob
from rotor.common.tensor_trees import tree_tensors
from rotor.engines.contract import Call, Context, Key
from rotor.engines.graph.captured_step import CapturedStep
from rotor.engines.graph.costs.glance import Refinement, glance
from rotor.engines.graph.costs.profile import Cost, keys_of
from rotor.engines.graph.costs.repeating import keep_from_now_on, keep_unrepeatable
from rotor.engines.graph.planned import GraphPlan, PlanningRecord
from rotor.engines.graph.searching import (
    LEAST_GAIN,
    MOST_ROUNDS,
    SMALL_GAIN,
    Kept,
    Known,
    begun_with,
    exchanged,
    is_fastest,
    options_number,
    outcome_of,
)
from rotor.engines.graph.tracing.lowering import Lowered
from rotor.errors import InfeasibleError, InvalidSequenceError
from rotor.graph import planner
from rotor.graph.graph import Graph
from rotor.graph.link import Link
from rotor.graph.program import Program

_MEASURING_STEPS = 24
"""Steps within which all operations are measured."""

_SEARCH_NS = 70_000
"""Time of a search with ``effort="fast"``, for each operation."""

_TIER_TIMES = 3
"""Ratio of the times of a search with a second tier, and without."""

_SEARCH_SHARE = 0.1

Solve = Callable[[Graph, int, dict[str, Any], Any], Program]
logger = logging.getLogger("rotor")

Start = Callable[[Graph, Link | None], Program | None]


def quick_options(options: Mapping[str, Any], graph: Graph) -> dict[str, Any]:
    """Return the options of a search that costs little beside a step."""
    effort = options.get("effort", "default")
    if not isinstance(effort, int) or effort > 1:
        step_ns = sum(operation.cost_ns for operation in graph.operations)
        times = 1 if options.get("link") is None else _TIER_TIMES
        is_cheap = times * _SEARCH_NS * len(graph) <= _SEARCH_SHARE * step_ns
        effort = "fast" if is_cheap else 0
    return {**options, "effort": effort}


class _Quick:
    """Short search that begins with programs at hand, and takes one that fits as it is."""

    def __init__(self, starts: Sequence[Start]) -> None:
        self._starts = starts
        self._latest: Program | None = None
        self.taken: int | None = None
        self.is_repaired = False

    def __call__(
        self, graph: Graph, budget: int, options: dict[str, Any], progress: Any
    ) -> Program:
        link = options.get("link")
        found = [(k, start(graph, link)) for k, start in enumerate(self._starts)]
        programs = [(k, program) for k, program in found if program is not None]
        fitting = [(k, program) for k, program in programs if program.peak_bytes <= budget]
        self.taken, self.is_repaired = None, bool(programs)
        if fitting:
            self.taken, program = min(fitting, key=lambda one: one[1].time_ns)
            return program
        start = min(programs, key=lambda one: one[1].peak_bytes)[1] if programs else None
        given = quick_options(options, graph)
        before = None if self._latest is None else _priced(self._latest, graph, link)
        if before is not None:
            # The budget is a little less than before: repairing the latest program is enough.
            start, given["effort"] = before, 0
        self._latest = planner.plan(graph, budget, progress=progress, start=start, **given)
        return self._latest


def _priced(old: Program, graph: Graph, link: Link | None) -> Program | None:
    """Return a program of another cost model and link; None if its actions are invalid there."""
    try:
        return Program(graph, old.actions, link)
    except InvalidSequenceError:
        return None


@dataclass
class Rough:
    """Operations of a captured step whose times are rough."""

    refinement: Refinement
    """Their measurement."""
    slots: dict[fx.Node, core.Slot]
    """Primals that are parameters or buffers."""
    leaves: dict[fx.Node, int]
    """Primals that are tensors of the call, by their number."""
    is_kept: bool = False
    """True once the rough times are on disk."""

    def primals(self, call: Call | None) -> dict[fx.Node, Any]:
        """Return the primals that are at hand: parameters, buffers, arguments of the call."""
        found = {node: core.value_in(slot) for node, slot in self.slots.items()}
        if call is not None:
            given = tree_tensors((*call.arguments, call.targets))
            for node, number in self.leaves.items():
                value = given[number] if number < len(given) else None
                if value is not None and value.shape == node.meta["val"].shape:
                    found[node] = value
        return {node: value for node, value in found.items() if isinstance(value, torch.Tensor)}


@dataclass
class _Search:
    """State of the search for one kind of step."""

    key: Key
    plan: GraphPlan
    known: Known
    record: PlanningRecord
    job: ThreadJob | None = None
    has_begun: bool = False
    rounds: int = 0
    own_bytes: int = 0
    link: Link | None = None


class Improver:
    """Background planning of the steps of one engine.

    `steps` are its captured steps for no existing gradients, by the measured part of their keys.
    """

    def __init__(self, context: Context, steps: Mapping[Any, CapturedStep]) -> None:
        self.context = context
        self._steps = steps
        self.executor: Executor = ThreadJob
        """Place where searches run."""
        self.rough: dict[Any, Rough] = {}
        """Operations that are left to measure, by the measured part of the steps' key."""
        self._searches: dict[Key, _Search] = {}
        self._keys: tuple[Lowered, list[str]] | None = None
        self._priced_seconds = 0.0

    def is_on(self) -> bool:
        """Return whether a step waits for its plan, which may be exchanged for a better one."""
        return self.context.is_stepping and self.context.may_improve_plans()

    # -- costs

    def price(
        self,
        key: Key,
        lowered: Lowered,
        device: torch.device,
        primals: Sequence[Any],
        call: Call,
        progress: Callable[[int, int], object] | None,
    ) -> list[Cost]:
        """Return the costs of a glance at a captured call; the rest is measured between steps."""
        begun = time.thread_time()
        keys = keys_of(lowered, device)
        self._keys = (lowered, keys)
        costs, rough = glance(
            lowered,
            device,
            primals,
            keys=keys,
            progress=progress,
            proves=self.context.settings.verify != "off",
        )
        keep_unrepeatable(lowered, [cost.flags for cost in costs])
        self.rough.pop(key.measured, None)
        if rough:
            slots = {id(core.value_in(slot)): slot for slot in _slots(self.context.module)}
            given = tree_tensors((*call.arguments, call.targets))
            leaves = {id(tensor): number for number, tensor in enumerate(given)}
            pairs = list(zip(lowered.primals, primals, strict=False))
            self.rough[key.measured] = Rough(
                Refinement(lowered, device, costs, rough, keys),
                {node: slots[id(value)] for node, value in pairs if id(value) in slots},
                {node: leaves[id(value)] for node, value in pairs if id(value) in leaves},
            )
        self._priced_seconds += time.thread_time() - begun
        return costs

    def count_capture(self, begun: float) -> None:
        """Count the time of a capture that began at a moment of this thread's clock."""
        self._priced_seconds = time.thread_time() - begun

    def settle(self, measured: Any, step: CapturedStep, limit_bytes: int | None = None) -> None:
        """Measure at once the operations of a step that are left to measure.

        `measured` is that part of the step's key; the step is the one without existing gradients.
        Operations whose measurement needs more than `limit_bytes` keep their costs.
        """
        rough = self.rough.pop(measured, None)
        if rough is not None:
            refinement = rough.refinement
            refinement.advance(refinement.total, rough.primals(None), limit_bytes or 1 << 62)
            _take_costs(step, refinement)

    # -- the first plan

    def plan(
        self,
        key: Key,
        step: CapturedStep,
        limit_bytes: int,
        planned: Callable[[Solve | None], GraphPlan],
    ) -> GraphPlan:
        """Return a plan that costs little to find, and have better ones looked for.

        `planned` makes the plan by a search for programs, or by the planner's if it is given None.
        Raise InfeasibleError if no plan was found, by a full search either.
        """
        begun = time.thread_time()
        context = self.context
        if not step.is_provable(limit_bytes):
            # Nothing can be verified: operations that ran only once must be tested.
            self.settle(key.measured, step.base, limit_bytes)
        before = self._searches.pop(key, None)
        if before is not None and before.job is not None:
            before.job.stop()
        old = context.plans.get(key)
        if not isinstance(old, GraphPlan):
            old = None
        if before is not None and (before.plan is not old or before.plan.step is not step):
            before = None
        keys = self._keys[1] if self._keys is not None and self._keys[0] is step.lowered else None
        self._keys = None
        known = Known(step.lowered, step.device, keys) if before is None else before.known
        has_taken = self._take_loss(key, step, known)
        kept = [] if before is not None else known.programs()
        starts: list[Start] = [one.program for one in kept]
        if old is not None:
            starts.append(partial(_priced, old.program))
        quick = _Quick(starts)
        try:
            plan = planned(quick)
        except InfeasibleError:
            if has_taken:
                # The loss may differ from that of the earlier run.
                del context.learned_loss[key.measured]
            quick = _Quick([])
            plan = planned(None)
        if before is None:
            record = PlanningRecord("estimated")
            if quick.is_repaired:
                is_kept = quick.taken is not None and quick.taken < len(kept)
                record.origin = "kept on disk" if is_kept else "repaired"
        else:
            record = before.record
        record.seconds += time.thread_time() - begun + self._priced_seconds
        self._priced_seconds = 0.0
        plan.planning = record
        rough = self.rough.get(key.measured)
        record.is_rough = rough is not None
        if rough is not None:
            left = rough.refinement.total
            logger.info("%d operations are left to measure, a few after each step", left)
        if old is not None:
            plan.take_code(old)
        search = _Search(key, plan, known, record, link=plan.program.link or step.link)
        is_settled = quick.taken is not None and quick.taken < len(kept)
        record.is_final = is_fastest(plan) or (
            is_settled
            and key.measured not in self.rough
            and kept[quick.taken or 0] == self._kept(search, is_final=True)
        )
        self._searches[key] = search
        return plan

    def _take_loss(self, key: Key, step: CapturedStep, known: Known) -> bool:
        """Reserve for the loss its need of an earlier run; return whether that is known."""
        settings, learned = self.context.settings, self.context.learned_loss
        is_open = not (step.loss_captured or settings.loss_tmp_memory_usage)
        if not is_open or key.measured in learned or known.loss_bytes is None:
            return False
        learned[key.measured] = known.loss_bytes
        return True

    def _kept(self, search: _Search, *, is_final: bool) -> Kept:
        plan = search.plan
        return Kept(
            plan.program.actions.tolist(),
            plan.limit_bytes,
            plan.loss_bytes,
            plan.reserve_bytes,
            options_number(self.context.settings.options, plan.program.link),
            is_final,
            plan.program.link is not None,
        )

    def _keep(self, search: _Search) -> None:
        kept = self._kept(search, is_final=search.record.is_final)
        search.known.keep(kept, self.context.learned_loss.get(search.key.measured))

    # -- better plans

    def improved(self, plan: GraphPlan, call: Call | None) -> GraphPlan:
        """Return the plan of the next step: a better one if it was found meanwhile.

        `call` is that of the next step, whose arguments may be read; None without one.
        """
        search = self._searches.get(plan.key)
        if search is None or search.plan is not plan:
            return plan
        if not search.has_begun:
            # The first step has shown the need of the loss.
            search.has_begun = True
            self._keep(search)
            rough = self.rough.get(plan.key.measured)
            if rough is not None and not rough.is_kept:
                rough.is_kept = True
                rough.refinement.keep_rough()
        if search.record.is_final:
            return plan
        if search.job is not None:
            if not search.job.is_done():
                return plan
            job, search.job = search.job, None
            self._collect(search, job)
        elif self._measures(search, call):
            pass
        elif search.rounds < MOST_ROUNDS:
            self._start(search)
        return self._installed(plan, search)

    def _measures(self, search: _Search, call: Call | None) -> bool:
        """Measure a few operations; return whether any were left."""
        rough = self.rough.get(search.key.measured)
        if rough is None:
            return False
        begun = time.thread_time()
        refinement = rough.refinement
        count = refinement.total if call is None else math.ceil(refinement.total / _MEASURING_STEPS)
        refinement.advance(count, rough.primals(call), search.plan.limit_bytes)
        if refinement.is_done:
            del self.rough[search.key.measured]
            _take_costs(self._steps[search.key.measured], refinement)
        search.record.seconds += time.thread_time() - begun
        return True

    def _start(self, search: _Search) -> None:
        """Begin a search from the program so far."""
        plan = search.plan
        start = _priced(plan.program, plan.step.graph(plan.loss_bytes), search.link)
        if start is None:
            search.record.is_final = True
            return
        own = max(plan.executor_bytes, search.own_bytes)
        options = self.context.settings.options
        work = begun_with(start.graph, plan, start, own, options, search.rounds)
        search.job = self.executor(work)

    def _collect(self, search: _Search, job: ThreadJob) -> None:
        """Take the program of a search that has ended, if it is better and fits."""
        result, has_failed = outcome_of(job, self.context)
        search.record.is_final |= has_failed
        if result is None or search.plan.is_refuted:
            return
        found, seconds = result
        search.rounds += 1
        search.record.seconds += seconds
        plan, graph = search.plan, found.graph
        before = Program(graph, plan.program.actions, found.link)
        gain = 1 - found.time_ns / max(before.time_ns, 1)
        if gain >= LEAST_GAIN:
            self._exchange(search, found)
        else:
            plan.graph, plan.program = graph, before
        if gain < SMALL_GAIN or search.rounds >= MOST_ROUNDS:
            search.record.is_final = True
        if gain >= LEAST_GAIN or search.record.is_final:
            self._keep(search)

    def _exchange(self, search: _Search, program: Program) -> None:
        """Make the plan of a better program, unless it does not fit with the bytes beside it."""
        old = search.plan
        own = old.step.bytes_beside(program, old.limit_bytes)
        if program.peak_bytes + own + old.reserve_bytes > old.limit_bytes:
            # The next search leaves so many bytes beside its program.
            search.own_bytes = own
            return
        missing = old.step.tier_excess(program)
        if missing:
            assert program.link is not None
            most = min(program.link.host_bytes or program.host_peak_bytes, program.host_peak_bytes)
            search.link = replace(program.link, host_bytes=max(most - missing, 0))
            return
        search.plan = exchanged(old, program, own, search.record)

    def _installed(self, old: GraphPlan, search: _Search) -> GraphPlan:
        new = search.plan
        if new is not old:
            new.key = search.key
            self.context.plans[search.key] = new
            if self.context.latest is old:
                self.context.latest = new
        return new

    def finish(self, timeout: float | None) -> bool:
        """Bring all searches to their end; return whether that took at most `timeout` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        for search in list(self._searches.values()):
            while not search.record.is_final and self.context.is_current(search.plan):
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    return False
                if search.job is not None and not search.job.wait(left):
                    return False
                self.improved(search.plan, None)
        return True

    def forget(self, measured: Any) -> None:
        """Drop the rough times and searches of a kind of step."""
        self.rough.pop(measured, None)
        self.stop(measured)

    def stop(self, measured: Any = None) -> None:
        """End the searches of a kind of step; by default all."""
        for key in [k for k in self._searches if measured is None or k.measured == measured]:
            search = self._searches.pop(key)
            if search.job is not None:
                search.job.stop()


def _take_costs(step: CapturedStep, refinement: Refinement) -> None:
    refinement.keep()
    keep_from_now_on(step.captured.lowered, refinement.differing)
    step.set_costs(refinement.costs())


def _slots(module: nn.Module) -> list[core.Slot]:
    return [
        slot
        for part in module.modules()
        for slot in (*core.parameter_slots(part), *core.buffer_slots(part))
    ]
