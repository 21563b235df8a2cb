"""Better programs for shapes that share a graph, found while training runs.

A background thread searches at the largest shape first, then at the shapes that come most often.
Each program that it finds is for every shape: a shape takes the program in its next step, if that
is faster there and fits.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rotor.common.background import ThreadJob
from rotor.engines.contract import Context
from rotor.engines.graph.improving import Improver
from rotor.engines.graph.planned import GraphPlan
from rotor.engines.graph.searching import (
    LEAST_GAIN,
    MOST_ROUNDS,
    SMALL_GAIN,
    begun_with,
    exchanged,
    is_fastest,
    outcome_of,
)
from rotor.engines.graph.shapes import ShapeStep, Values
from rotor.graph.program import Program

_MOST_SHAPES = 4
"""Number of shapes of a graph at which a search is worth its time."""


@dataclass
class _State:
    """Searches for programs of one graph, for one set of existing gradients."""

    plans: dict[Values, GraphPlan] = field(default_factory=dict)
    """Latest plan of each shape."""
    used: Counter[Values] = field(default_factory=Counter)
    """Number of steps by shape."""
    rounds: Counter[Values] = field(default_factory=Counter)
    """Number of searches by shape."""
    final: set[Values] = field(default_factory=set)
    """Shapes for which no more searches follow."""
    own_bytes: dict[Values, int] = field(default_factory=dict)
    """Bytes to leave beside programs, by shape."""
    job: ThreadJob | None = None
    target: Values = ()
    """Shape of the running search."""
    found: int = 0
    """Number of better programs so far."""
    seen: dict[Any, int] = field(default_factory=dict)
    """Value of `found` at the last comparison, by the key of a plan."""


def _step_of(plan: GraphPlan) -> ShapeStep:
    assert isinstance(plan.step, ShapeStep)
    return plan.step


class ShapeImprover:
    """Background planning of the shapes of one engine's graphs.

    It uses the executor and the settings of `improver`, which plans the other steps.
    """

    def __init__(self, improver: Improver) -> None:
        self._improver = improver
        self._states: dict[Any, _State] = {}

    @property
    def _context(self) -> Context:
        return self._improver.context

    def improved(self, plan: GraphPlan) -> GraphPlan:
        """Return the plan of the next step: a better one if a program was found meanwhile."""
        if not self._improver.is_on() or plan.is_refuted:
            return plan
        step = _step_of(plan)
        # Plans count on another speed of a tier after steps have shown it.
        state = self._states.setdefault((step.operations, step.link), _State())
        state.used[step.values] += 1
        state.plans[step.values] = plan
        if state.job is not None and state.job.is_done():
            self._collect(state)
        if state.job is None:
            self._start(state)
        return self._exchanged(state, plan)

    def finish(self, timeout: float | None) -> bool:
        """Bring all searches to their end; return whether that took at most `timeout` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        for state in list(self._states.values()):
            while state.job is not None or any(self._open(state)):
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    return False
                if state.job is None:
                    self._start(state)
                elif not state.job.wait(left):
                    return False
                else:
                    self._collect(state)
            for plan in list(state.plans.values()):
                if self._context.is_current(plan):
                    self._exchanged(state, plan)
        return True

    def stop(self) -> None:
        """End all searches."""
        for state in self._states.values():
            if state.job is not None:
                state.job.stop()
        self._states.clear()

    def _open(self, state: _State) -> Iterator[Values]:
        """Yield the shapes for which a search is worth its time."""
        has_room = len(state.rounds) < _MOST_SHAPES
        for values, plan in state.plans.items():
            is_wanted = values not in state.final and (has_room or values in state.rounds)
            if is_wanted and not is_fastest(plan) and self._context.is_current(plan):
                yield values

    def _start(self, state: _State) -> None:
        """Begin a search at the largest shape, or else at the shape that comes most often."""
        shapes = list(self._open(state))
        if not shapes:
            return
        totals = {v: _step_of(plan).symbolic.total(v) for v, plan in state.plans.items()}
        largest = max(totals, key=lambda values: totals[values])
        target = state.target = (
            largest if largest in shapes else max(shapes, key=lambda values: state.used[values])
        )
        plan = state.plans[target]
        graph = plan.step.graph(plan.loss_bytes)
        start = Program(graph, plan.program.actions, plan.step.link)
        own = max(plan.executor_bytes, state.own_bytes.get(target, 0))
        plan.planning.is_final = False
        work = begun_with(
            graph, plan, start, own, self._context.settings.options, state.rounds[target]
        )
        state.job = self._improver.executor(work)

    def _collect(self, state: _State) -> None:
        """Keep the program of a search that has ended, if it is better."""
        job, target = state.job, state.target
        state.job = None
        assert job is not None
        plan = state.plans[target]
        result, _ = outcome_of(job, self._context)
        gain = 0.0
        state.rounds[target] += 1
        if result is not None and not plan.is_refuted:
            found, seconds = result
            plan.planning.seconds += seconds
            before = Program(found.graph, plan.program.actions, found.link)
            gain = 1 - found.time_ns / max(before.time_ns, 1)
            if gain >= LEAST_GAIN:
                step = _step_of(plan)
                own = step.bytes_beside(found, plan.limit_bytes)
                state.own_bytes[target] = own
                step.learn_program(found)
                state.found += 1
        if gain < SMALL_GAIN or state.rounds[target] >= MOST_ROUNDS:
            state.final.add(target)
            plan.planning.is_final = True

    def _exchanged(self, state: _State, plan: GraphPlan) -> GraphPlan:
        """Return a plan of the fastest program now known, which becomes the current one."""
        step = _step_of(plan)
        if state.seen.get(plan.key, 0) == state.found:
            return plan
        state.seen[plan.key] = state.found
        graph = step.graph(plan.loss_bytes)
        room = plan.limit_bytes - plan.reserve_bytes
        best = step.priced(graph, room - plan.executor_bytes, step.link)
        before = Program(graph, plan.program.actions, step.link)
        if best is None or 1 - best.time_ns / max(before.time_ns, 1) < LEAST_GAIN:
            return plan
        own = step.bytes_beside(best, plan.limit_bytes)
        if best.peak_bytes + own > room or step.tier_excess(best):
            return plan
        new = exchanged(plan, best, own, plan.planning)
        new.key = plan.key
        step.adopt(new)
        state.plans[step.values] = new
        self._context.plans[plan.key] = new
        if self._context.latest is plan:
            self._context.latest = new
        return new
