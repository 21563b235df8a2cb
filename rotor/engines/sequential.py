"""Engine of an ``nn.Sequential`` that is asked for no engine in particular: a chain, or one graph.

The schedule of the chain is known at once. Where it recomputes, the model is captured as a graph of
operations too, and the plan with less recomputation under the limit runs. The published
``compute_sequence`` asks for a schedule of the chain.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from rotor._pytorch import core
from rotor.common.undisturbed import training_flags_kept
from rotor.engines.chain.engine import ChainEngine
from rotor.engines.contract import (
    Call,
    CannotPlan,
    Context,
    DefaultSlots,
    IsPending,
    Key,
    NothingToPlan,
    PlanAgain,
    StartMeter,
)
from rotor.engines.graph.engine import GraphEngine
from rotor.errors import InfeasibleError
from rotor.meter import allocator
from rotor.meter.step_meter import StepBytes, StepWatch
from rotor.report.text import Text, table
from rotor.units import format_bytes, format_seconds

__all__ = ["Comparison", "SequentialEngine"]

logger = logging.getLogger("rotor")

_WORTH = 0.01
"""Share of recomputation in the chain from which capturing a graph is worth its time."""


@dataclass(frozen=True)
class Comparison:
    """Predictions of the plans that were made under one limit.

    Attributes
    ----------
    chosen
        "chain" or "graph".
    chain, graph
        Prediction of each, as text.
    """

    chosen: str
    chain: str
    graph: str

    def table(self) -> Text:
        """Return the predictions as a table."""
        mark = {True: "runs", False: ""}
        return table(
            [
                ["compared", "predicted", ""],
                ["chain", self.chain, mark[self.chosen == "chain"]],
                ["graph", self.graph, mark[self.chosen == "graph"]],
            ]
        )


class _WholeGraph(GraphEngine):
    """Graph of a chain, captured and searched in full for each shape."""

    improves = False
    follows_shapes = False


class SequentialEngine(ChainEngine):
    """Chain, or captured graph, by their predicted recomputation under the limit."""

    published: ClassVar[frozenset[str]] = ChainEngine.published | {"graph", "program", "graph_plan"}

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._inner: GraphEngine | None = None
        self._is_asked = False
        self._samples: dict[Any, tuple[list[Any], Any]] = {}
        self._reasons: dict[Any, str] = {}
        self._compared: dict[Key, Comparison] = {}

    def __getstate__(self) -> dict[str, Any]:
        kept = super().__getstate__()
        return kept | {"_inner": None, "_samples": {}, "_compared": {}}

    def is_portable(self) -> bool:
        """Return whether a copy of the model shares all state, and no plan is a graph's."""
        plans = self.context.plans.values()
        return super().is_portable() and all(plan.engine == "chain" for plan in plans)

    @property
    def graph(self) -> Any:
        """Cost model of the latest plan; ValueError: it is a chain's."""
        return self.graph_plan().graph

    @property
    def program(self) -> Any:
        """Program of the latest plan; ValueError: it is a chain's."""
        return self.graph_plan().program

    def graph_plan(self) -> Any:
        """Return the latest plan; raise ValueError if it is a chain's."""
        plan = self.context.latest
        if plan is None:
            raise ValueError("no plan was made: call compute_sequence(), or train a step")
        if plan.engine != "graph":
            raise ValueError('the model runs as a chain: give engine="graph" for a graph')
        return plan

    # -- measuring

    def measure(self, key: Key, call: Call) -> Any:
        """Measure every stage; keep the form of the call, for a capture."""
        leaves, spec = core.tree_flatten((call.args, call.targets))
        self._samples[key.measured] = [_described(leaf) for leaf in leaves], spec
        self._reasons.pop(key.measured, None)
        return super().measure(key, call)

    def forget(self, measured: Any) -> None:
        """Drop the measures of an input."""
        super().forget(measured)
        self._samples.pop(measured, None)
        self._reasons.pop(measured, None)
        if self._inner is not None:
            self._inner.forget(measured)

    # -- planning

    def choose(self, algo: Any, options: dict[str, Any]) -> None:
        """Set the algorithm of the following plans, which are schedules of the chain."""
        super().choose(algo, options)
        self._is_asked = True

    def begin_planning(self) -> None:
        """Forget loaded sequences and compiled programs."""
        super().begin_planning()
        if self._inner is not None:
            self._inner.begin_planning()

    def plan(
        self, key: Key, limit_bytes: int, reserve_bytes: int = 0, *, is_strict: bool = False
    ) -> Any:
        """Return the plan with the least recomputation, of a chain or of a graph."""
        chain, refusal = None, None
        try:
            chain = super().plan(key, limit_bytes, reserve_bytes, is_strict=is_strict)
        except InfeasibleError as error:
            refusal = error
        self._compared.pop(key, None)
        slower = _slower(chain)
        if slower <= _WORTH or self._is_asked_for_chain(key):
            if refusal is not None:
                raise refusal
            return chain
        reason, graph = self._reason(key), None
        if not reason:
            try:
                graph = self._graph_plan(key, limit_bytes, reserve_bytes)
            except CannotPlan as refused:
                reason = self._reasons[key.measured] = _first_line(refused.error)
            except InfeasibleError as error:
                reason = _infeasible(error)
                if refusal is not None and error.minimum_bytes < refusal.minimum_bytes:
                    refusal = error
        if chain is None and graph is None:
            assert refusal is not None
            raise refusal
        chosen = chain if graph is None or slower <= graph.program.slowdown - 1 else graph
        assert chosen is not None
        told = _infeasible(refusal) if chain is None else _prediction(chain.makespan, slower)
        if graph is not None:
            reason = _prediction(graph.makespan, graph.program.slowdown - 1)
        self._compared[key] = Comparison(chosen.engine, told, reason)
        logger.info("compared: chain %s; graph %s", told, reason)
        return chosen

    def _is_asked_for_chain(self, key: Key) -> bool:
        """Return whether a schedule was computed on request, or an option of chains was given."""
        settings = self.settings
        return (
            self._is_asked
            or settings.algorithm is not None
            or bool(settings.algorithm_options)
            or not isinstance(settings.mem_slots, DefaultSlots)
            or key.measured in self._loaded
        )

    def _reason(self, key: Key) -> str:
        """Return the reason not to capture a graph; empty without one."""
        if self._sharding is not None or self.context.peers.ranks is not None:
            return "not captured: ranks run one schedule"
        if key.measured not in self._samples:
            return "not captured: the stages were measured at other sizes only"
        if any(stage.state for stage in self._inspections[key.measured].stages):
            return "not captured: stages change state that is no tensor of the model"
        if not self.settings.preserve_rng_state:
            return "not captured: it always repeats random numbers, see preserve_rng_state"
        return self._reasons.get(key.measured, "")

    def _graph_plan(self, key: Key, limit_bytes: int, reserve_bytes: int) -> Any:
        """Return the plan of the model's graph, captured at the first time.

        Raises
        ------
        CannotPlan, InfeasibleError
            No graph of the model exists, or no program fits.
        """
        if self._inner is None:
            self._inner = _WholeGraph(self.context)
        if not self._inner.is_measured(key):
            module = self.context.module
            with training_flags_kept(module), torch.enable_grad():
                if not module.training:
                    module.train()
                leaves, spec = self._samples[key.measured]
                args, targets = core.tree_unflatten([_made_up(leaf) for leaf in leaves], spec)
                call = Call(args, {}, targets)
                if self.key(call).measured != key.measured:
                    raise CannotPlan(ValueError("modes changed since the stages were measured"))
                try:
                    self._inner.measure(key, call)
                except (NothingToPlan, allocator.MeterBusyError) as error:
                    raise CannotPlan(ValueError(str(error) or "nothing to plan")) from None
        return self._inner.plan(key, limit_bytes, reserve_bytes)

    def _owner(self, plan: Any) -> GraphEngine | None:
        """Return the engine of a graph's plan; ``None`` for a chain's."""
        return self._inner if plan.engine == "graph" else None

    def result(self, plan: Any) -> Any:
        """Return the schedule, or the program, of a plan."""
        owner = self._owner(plan)
        return super().result(plan) if owner is None else owner.result(plan)

    def remarks(self, plan: Any, key: Key | None) -> list[Any]:
        """Return a table of what was compared."""
        compared = self._compared.get(plan.key)
        return [] if compared is None else [compared.table()]

    # -- running and learning

    def run(self, plan: Any, call: Call, start: StartMeter) -> tuple[Any, IsPending]:
        """Run a step under a plan."""
        owner = self._owner(plan)
        if owner is None:
            return super().run(plan, call, start)
        try:
            return owner.run(plan, call, start)
        except CannotPlan as refused:
            # From now on it is a chain.
            self._reasons[plan.key.measured] = _first_line(refused.error)
            owner.forget(plan.key.measured)
            raise PlanAgain from refused

    def expect(self, plan: Any) -> None:
        """Check, before a step, for needs that its plan does not know."""
        owner = self._owner(plan)
        (super().expect if owner is None else owner.expect)(plan)

    def watch(self, plan: Any) -> StepWatch | None:
        """Return the observer of an unmetered step; ``None`` without one."""
        owner = self._owner(plan)
        return super().watch(plan) if owner is None else owner.watch(plan)

    def learn(self, plan: Any, step: StepBytes) -> None:
        """Compare a metered step with its plan."""
        owner = self._owner(plan)
        (super().learn if owner is None else owner.learn)(plan, step)

    def learn_again(self, plan: Any, step: StepBytes) -> None:
        """Compare a step that was metered later with its plan."""
        owner = self._owner(plan)
        (super().learn_again if owner is None else owner.learn_again)(plan, step)

    def learn_peak(self, plan: Any, peak_bytes: int) -> None:
        """Have the next step planned for a need beyond the limit."""
        owner = self._owner(plan)
        (super().learn_peak if owner is None else owner.learn_peak)(plan, peak_bytes)

    def replan(self, old: Any, make: Callable[[int], Any]) -> Any:
        """Return a plan that includes the lessons of metered steps; the old one if none fits."""
        owner = self._owner(old)
        return (super().replan if owner is None else owner.replan)(old, make)


def _slower(chain: Any) -> float:
    """Return the recomputation of a chain's plan, as a share of a step."""
    if chain is None:
        return float("inf")
    ideal = chain.chain.ideal_time
    return chain.sequence.makespan / ideal - 1 if ideal else 0.0


def _prediction(seconds: float, slower: float) -> str:
    return f"{format_seconds(seconds)} a step, {slower:+.1%} of it recomputed"


def _infeasible(error: InfeasibleError | None) -> str:
    assert error is not None
    return f"needs {format_bytes(error.minimum_bytes)}"


def _first_line(error: Exception) -> str:
    return "not captured: " + (str(error).strip().splitlines() or [type(error).__name__])[0]


@dataclass(frozen=True)
class _Form:
    """Tensor without its values."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


def _described(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return value
    return _Form(tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad)


def _made_up(value: Any) -> Any:
    if not isinstance(value, _Form):
        return value
    made = torch.empty_strided(value.shape, value.strides, dtype=value.dtype, device=value.device)
    return made.zero_().requires_grad_(value.requires_grad)
