"""Plans that get better while training runs (``planning="background"``).

The first step runs a program that a short search found with the costs of a glance. Between the
following steps a few operations are measured; then a background thread searches, and the step after
a search runs the program that was found, if that is better. The thread has the cost model alone,
never the model.

Shapes that share a graph are searched at the largest one first, then at those that come most often.
Each program that is found is for every shape, which takes it if it is faster there and fits.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from rotor._pytorch import core
from rotor.common.background import Executor, Stopped, ThreadJob
from rotor.common.tensor_trees import tree_tensors
from rotor.engines.contract import Call, Context, Key
from rotor.engines.graph.captured_step import CapturedStep
from rotor.engines.graph.costs.glance import Refinement, glance
from rotor.engines.graph.costs.profile import Cost, keys_of
from rotor.engines.graph.costs.repeating import keep_from_now_on, keep_unrepeatable
from rotor.engines.graph.costs.symbols import Values
from rotor.engines.graph.planned import GraphPlan, PlanningRecord
from rotor.engines.graph.searching import Kept, Known, Order, options_number, program_of
from rotor.engines.graph.sizing import Families
from rotor.engines.graph.tracing.alike import own_slots
from rotor.engines.graph.tracing.lowering import Lowered
from rotor.errors import InfeasibleError
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

_MOST_ROUNDS = 3
"""Number of searches for one program."""

_MOST_SHAPES = 4
"""Number of shapes of a graph at which a search is worth its time."""

_SMALL_GAIN = 0.01
"""Gain of a search after which no other one follows."""

_LEAST_GAIN = 0.001
"""Gain from which a program is exchanged, which takes the time of making its code."""

Solve = Callable[..., Program]
logger = logging.getLogger("rotor")


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

    def __init__(self, starts: Sequence[Sequence[int] | Order]) -> None:
        self._starts = starts
        self._latest: Program | None = None
        self.taken: int | None = None
        self.is_repaired = False

    def __call__(self, graph: Graph, budget: int, **options: Any) -> Program:
        link = options.get("link")
        found = [(k, program_of(graph, start, link)) for k, start in enumerate(self._starts)]
        programs = [(k, program) for k, program in found if program is not None]
        # Where it fits, no program at hand is faster than one that recomputes nothing.
        once = program_of(graph, range(len(graph)), link) if programs else None
        everything = programs if once is None else [*programs, (None, once)]
        fitting = [(k, program) for k, program in everything if program.peak_bytes <= budget]
        self.taken, self.is_repaired = None, bool(programs)
        if fitting:
            self.taken, program = min(fitting, key=lambda one: one[1].time_ns)
            self.is_repaired = self.taken is not None
            return program
        start = min(programs, key=lambda one: one[1].peak_bytes)[1] if programs else None
        given = quick_options(options, graph)
        before = self._latest and program_of(graph, self._latest.actions, link)
        if before is not None:
            # The budget is a little less than before: repairing the latest program is enough.
            start, given["effort"] = before, 0
        self._latest = planner.plan(graph, budget, start=start, **given)
        return self._latest


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
class _Target:
    """Plan of one shape, and the searches for a better one."""

    plan: GraphPlan
    link: Link | None
    """Link to a second tier with which is searched."""
    is_final: bool = False
    """True if no more searches follow."""
    used: int = 0
    """Number of steps."""
    rounds: int = 0
    """Number of searches."""
    own_bytes: int = 0
    """Bytes to leave beside a program."""
    seen: int = 0
    """Value of `_Search.found` at the last comparison."""

    def end(self) -> None:
        """Look for no better plan."""
        self.is_final = self.plan.planning.is_final = True


@dataclass
class _Search:
    """State of the searches for programs of the same operations, at one shape or several."""

    targets: dict[Values, _Target] = field(default_factory=dict)
    """By the values of the symbols."""
    known: Known | None = None
    """Knowledge on the only kind of step; None if shapes share the programs."""
    job: ThreadJob | None = None
    target: _Target | None = None
    """Target of the running search."""
    has_begun: bool = False
    found: int = 0
    """Number of better programs for every shape."""


class Improver:
    """Background planning of the steps of one engine.

    `steps` are its captured steps for no existing gradients, by the measured part of their keys,
    and `families` those that share shapes.
    """

    def __init__(
        self, context: Context, steps: Mapping[Any, CapturedStep], families: Families
    ) -> None:
        self.context = context
        self._steps, self._families = steps, families
        self.executor: Executor = ThreadJob
        """Place where searches run."""
        self.rough: dict[Any, Rough] = {}
        """Operations that are left to measure, by the measured part of the steps' key."""
        self._searches: dict[Any, _Search] = {}
        """By the key of the only kind of step, or by the operations and the link of shapes."""
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
            slots = own_slots(self.context.module)
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
        if before is not None:
            (target,) = before.targets.values()
            if target.plan is not old or old.step is not step:
                before = None
        keys = self._keys[1] if self._keys is not None and self._keys[0] is step.lowered else None
        self._keys = None
        known = (before and before.known) or Known(step.lowered, step.device, keys)
        has_taken = self._take_loss(key, step, known)
        kept = [] if before is not None else known.programs()
        quick = _Quick(
            [*(one.actions for one in kept), *([] if old is None else [old.program.actions])]
        )
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
            record = target.plan.planning
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
        is_settled = quick.taken is not None and quick.taken < len(kept)
        record.is_final = _is_fastest(plan) or (
            is_settled
            and key.measured not in self.rough
            and kept[quick.taken or 0] == self._kept(plan, is_final=True)
        )
        target = _Target(plan, plan.program.link or step.link, record.is_final)
        self._searches[key] = _Search({step.values: target}, known)
        return plan

    def _take_loss(self, key: Key, step: CapturedStep, known: Known) -> bool:
        """Reserve for the loss its need of an earlier run; return whether that is known."""
        is_known = step.loss_captured or self.context.knows_loss(key)
        if is_known or known.loss_bytes is None:
            return False
        self.context.learned_loss[key.measured] = known.loss_bytes
        return True

    def _kept(self, plan: GraphPlan, *, is_final: bool) -> Kept:
        return Kept(
            plan.program.actions.tolist(),
            plan.limit_bytes,
            plan.loss_bytes,
            plan.reserve_bytes,
            options_number(self.context.settings.options, plan.program.link),
            is_final,
            plan.program.link is not None,
        )

    def _keep(self, known: Known, plan: GraphPlan) -> None:
        kept = self._kept(plan, is_final=plan.planning.is_final)
        known.keep(kept, self.context.learned_loss.get(plan.key.measured))

    # -- better plans

    def improved(self, plan: GraphPlan, call: Call | None) -> GraphPlan:
        """Return the plan of the next step: a better one if it was found meanwhile.

        `call` is that of the next step, whose arguments may be read; None without one.
        """
        if plan.engine != GraphPlan.engine:
            return plan
        step = plan.step
        if step.shares_shapes and self.is_on() and not plan.is_refuted:
            # Plans count on another speed of a tier after steps have shown it.
            search = self._searches.setdefault((step.operations, step.link), _Search())
            target = search.targets.setdefault(step.values, _Target(plan, step.link))
            target.plan = plan
            target.used += 1
        elif plan.key in self._searches:
            search = self._searches[plan.key]
            (target,) = search.targets.values()
        else:
            return plan
        if target.plan is not plan:
            return plan
        if search.known is not None and not search.has_begun:
            # The first step has shown the need of the loss.
            search.has_begun = True
            self._keep(search.known, plan)
            rough = self.rough.get(plan.key.measured)
            if rough is not None and not rough.is_kept:
                rough.is_kept = True
                rough.refinement.keep_rough()
        if search.known is not None and target.is_final:
            # Most steps: nothing is left to find, nor to ask.
            return plan
        self._advance(search, call)
        self._compare(search, target)
        return target.plan

    def _advance(self, search: _Search, call: Call | None) -> None:
        """Take the result of a search that has ended, or else measure, or begin a search."""
        if search.job is not None:
            if search.job.is_done():
                self._collect(search)
            return
        target = self._next(search)
        if target is not None and not self._measures(target.plan, call):
            self._start(search, target)

    def _next(self, search: _Search) -> _Target | None:
        """Return the largest shape, or else the one that comes most often, if a search pays."""
        targets = search.targets.values()
        has_room = sum(target.rounds > 0 for target in targets) < _MOST_SHAPES
        found = [
            target
            for target in targets
            if not (target.is_final or _is_fastest(target.plan))
            and (has_room or target.rounds)
            and self.context.is_current(target.plan)
        ]
        if not found:
            return None
        largest = max(targets, key=lambda target: target.plan.step.total)
        return largest if largest in found else max(found, key=lambda target: target.used)

    def _measures(self, plan: GraphPlan, call: Call | None) -> bool:
        """Measure a few operations; return whether any were left."""
        measured = plan.key.measured
        rough = self.rough.get(measured)
        if rough is None:
            return False
        begun = time.thread_time()
        refinement = rough.refinement
        count = refinement.total if call is None else math.ceil(refinement.total / _MEASURING_STEPS)
        refinement.advance(count, rough.primals(call), plan.limit_bytes)
        if not refinement.left:
            del self.rough[measured]
            _take_costs(self._steps[measured], refinement)
        plan.planning.seconds += time.thread_time() - begun
        return True

    def _start(self, search: _Search, target: _Target) -> None:
        """Begin a search from the program so far."""
        plan, options = target.plan, self.context.settings.options
        graph = plan.step.graph(plan.loss_bytes)
        start = program_of(graph, plan.program.actions, target.link)
        if start is None:
            target.end()
            return
        plan.planning.is_final = False
        own = max(plan.executor_bytes, target.own_bytes)
        budget = max(plan.limit_bytes - own - plan.reserve_bytes, 1)
        seeded = {**options, "seed": options.get("seed", 0) + target.rounds, "link": start.link}
        search.target = target
        search.job = self.executor(partial(_search, graph, budget, seeded, start))

    def _collect(self, search: _Search) -> None:
        """Take the program of a search that has ended, if it is better and fits."""
        job, target = search.job, search.target
        assert job is not None
        assert target is not None
        search.job, plan, step = None, target.plan, target.plan.step
        try:
            result = job.result()
        except Exception as error:
            self.context.warn(
                "planning",
                f"the search for a better plan failed ({type(error).__name__}: {error}), and the "
                "model trains on under the plan so far, which keeps the limit: "
                'planning="before" searches before the first step, and raises such errors',
            )
            target.end()
            return
        if result is None:
            return
        found, seconds = result
        target.rounds += 1
        plan.planning.seconds += seconds
        if plan.is_refuted:
            target.end()
            return
        before = Program(found.graph, plan.program.actions, found.link)
        gain = 1 - found.time_ns / max(before.time_ns, 1)
        if gain < _LEAST_GAIN:
            plan.graph, plan.program = found.graph, before
        elif step.shares_shapes:
            target.own_bytes = step.bytes_beside(found, plan.limit_bytes)
            step.learn_program(found)
            search.found += 1
        else:
            self._exchange(target, found)
        if gain < _SMALL_GAIN or target.rounds >= _MOST_ROUNDS or _is_fastest(target.plan):
            target.end()
        if search.known is not None and (gain >= _LEAST_GAIN or target.is_final):
            self._keep(search.known, target.plan)

    def _compare(self, search: _Search, target: _Target) -> None:
        """Take the fastest program that is now known for every shape, if it is better and fits."""
        plan, step = target.plan, target.plan.step
        if not step.shares_shapes or target.seen == search.found:
            return
        target.seen = search.found
        graph = step.graph(plan.loss_bytes)
        room = plan.limit_bytes - plan.reserve_bytes - plan.executor_bytes
        best = step.priced(graph, room, step.link)
        before = Program(graph, plan.program.actions, step.link)
        if best is not None and 1 - best.time_ns / max(before.time_ns, 1) >= _LEAST_GAIN:
            self._exchange(target, best)

    def _exchange(self, target: _Target, program: Program) -> None:
        """Make the plan of a better program, unless it does not fit with the bytes beside it."""
        old = target.plan
        own = old.step.bytes_beside(program, old.limit_bytes)
        if program.peak_bytes + own + old.reserve_bytes > old.limit_bytes:
            # The next search leaves so many bytes beside its program.
            target.own_bytes = own
            return
        missing = old.step.tier_excess(program)
        if missing:
            assert program.link is not None
            most = min(program.link.host_bytes or program.host_peak_bytes, program.host_peak_bytes)
            target.link = replace(program.link, host_bytes=max(most - missing, 0))
            return
        new = target.plan = GraphPlan(
            old.step,
            program.graph,
            program,
            old.limit_bytes,
            own,
            old.loss_bytes,
            old.planning,
            reserve_bytes=old.reserve_bytes,
            short_bytes=old.short_bytes,
            most_recomputed=old.most_recomputed,
        )
        new.warned_bytes, new.sparse_bytes = old.warned_bytes, old.sparse_bytes
        new.planning.improved += 1
        new.key = old.key
        new.step.adopt(new)
        self.context.plans[new.key] = new
        if self.context.latest is old:
            self.context.latest = new

    def finish(self, end: float, *, measures: bool) -> bool:
        """Bring all searches to their end; return whether that was reached by `end`.

        Nothing is measured with `measures` False, and a search that waits for that is left.
        """
        for search in list(self._searches.values()):
            while (target := search.target if search.job else self._next(search)) is not None:
                left = end - time.monotonic()
                if left <= 0:
                    return False
                if search.job is not None:
                    if not search.job.wait(None if left == math.inf else left):
                        return False
                elif not measures and target.plan.key.measured in self.rough:
                    return False
                self._advance(search, None)
            for target in search.targets.values():
                if self.context.is_current(target.plan):
                    self._compare(search, target)
        return True

    def forget(self, measured: Any) -> None:
        """Drop the rough times and searches of a kind of step."""
        self.rough.pop(measured, None)
        for place in list(self._searches):
            if isinstance(place, Key) and place.measured == measured:
                self._end(place)

    def stop(self) -> None:
        """End all searches, and drop all programs: the limit or an option has changed."""
        for place in list(self._searches):
            self._end(place)
        shared = [step for family in self._families.values() for step in family.graphs]
        for step in (*self._steps.values(), *shared):
            step.forget_programs()

    def _end(self, place: Any) -> None:
        search = self._searches.pop(place)
        if search.job is not None:
            search.job.stop()


def _search(
    graph: Graph, budget: int, options: dict[str, Any], start: Program, stops: Callable[[], bool]
) -> tuple[Program, float]:
    """Return the best program found, and the seconds of CPU time that it took."""

    def progress(done: int, total: int) -> None:
        if stops():
            raise Stopped

    begun = time.thread_time()
    try:
        found = planner.plan(graph, budget, progress=progress, start=start, **options)
    except InfeasibleError:
        found = start
    return found, time.thread_time() - begun


def _is_fastest(plan: GraphPlan) -> bool:
    """Return whether no program can be faster: nothing runs again, and no run waits for a tier."""
    return not plan.recomputed and not plan.program.waited


def _take_costs(step: CapturedStep, refinement: Refinement) -> None:
    refinement.keep()
    keep_from_now_on(step.captured.lowered, refinement.differing)
    step.set_costs(refinement.costs())
