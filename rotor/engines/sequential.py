"""Engine of an ``nn.Sequential`` that is asked for no engine in particular: chain, graph or parts.

The schedule of the chain is known at once. Where it recomputes, the model is captured as a graph of
operations too, or in parts if a stage cannot be captured; the stages of a sharded model become
blocks. The plan with less recomputation under the limit runs. The published ``compute_sequence``
asks for a schedule of the chain.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch

from rotor._pytorch import core
from rotor.algorithms.curve import Curve
from rotor.common.frames import release
from rotor.common.tensor_trees import NotPassedOn, tree_tensors
from rotor.common.undisturbed import Untriable, training_flags_kept, trial
from rotor.engines.chain.engine import ChainEngine
from rotor.engines.chain.measures import Inspection
from rotor.engines.chain.stages import made_gradients, peak_estimate, shared_parameters
from rotor.engines.contract import (
    Call,
    CannotPlan,
    Context,
    Key,
    NothingToPlan,
    Unsuited,
)
from rotor.engines.graph.engine import GraphEngine
from rotor.engines.parts.blocks import NoBlocks
from rotor.engines.parts.chained import MeasuredStages
from rotor.engines.parts.engine import PartsEngine
from rotor.engines.parts.pieces import Pieces
from rotor.engines.parts.plan import PartsPlan
from rotor.engines.parts.sharded_engine import ShardedBlocksEngine
from rotor.errors import InfeasibleError
from rotor.meter import allocator
from rotor.report.text import Text, table
from rotor.units import exact_bytes, format_bytes, format_seconds

logger = logging.getLogger("rotor")

WORTH = 0.01
"""Share of recomputation in the chain from which capturing a graph is worth its time."""

_NEVER = float("inf")
_HOPE = 0.5
"""Share of a first program's recomputation that exact costs and a search may leave."""
_MARGIN = 64
"""Divisor of a limit: this share is left free while the code between parts is estimated."""


@dataclass(frozen=True)
class Comparison:
    """Predictions of the plans that were compared under one limit."""

    chosen: str
    """Name of the plan that runs: "chain", "graph", "parts" or "blocks"."""
    predictions: dict[str, str]
    """Predictions as text, by name."""
    is_last: bool = False
    """True if the chain has won after the graph's last search."""

    def table(self) -> Text:
        """Return the predictions as a table."""
        rows = [
            [name, prediction, "runs" if name == self.chosen else ""]
            for name, prediction in self.predictions.items()
        ]
        return table([["compared", "predicted", ""], *rows])


class _WholeGraph(GraphEngine):
    """Graph of a chain, captured for each shape."""

    follows_shapes = False


class _ChainParts(PartsEngine):
    """Captured parts of a chain, whose measures are by `Key.measured`."""

    def __init__(self, context: Context, inspections: dict[Any, Inspection]) -> None:
        super().__init__(context)
        self._inspections = inspections

    def stages_of(self, key: Key) -> MeasuredStages:
        """Return the measured stages."""
        inspection = self._inspections[key.measured]
        lacking = self.context.structure.lacking_gradient(key.absent)
        shared = shared_parameters(inspection.stages)
        sizes = [m.pgrad_bytes for m in inspection.measures]
        made = made_gradients(inspection.stages, sizes, lacking | shared, shared)
        return MeasuredStages(inspection, *made)

    def measure(self, key: Key, call: Call) -> None:
        """Capture the parts; add the measured needs of the stages that have no part."""
        super().measure(key, call)
        pieces = self.pieces[key]
        if not pieces.is_measured:
            between = list(pieces.bases.between)
            inspection, k = self._inspections[key.measured], 0
            chained = {i for chain in pieces.chains for i in range(chain.begin, chain.end)}
            for i, stage in enumerate(inspection.stages):
                measure = inspection.measures[i]
                inside = [
                    site
                    for site in pieces.sites
                    if any(site.path == n or site.path.startswith(f"{n}.") for n in stage.names)
                ]
                k += len(inside)
                if not inside and i not in chained:
                    between[k] += max(measure.forward_tmp_bytes, measure.backward_peak_bytes)
            # The caller may hold the output until the backward is over.
            held = inspection.output_bytes if inspection.loss_peak_bytes is None else 0
            backward = tuple(size + held for size in pieces.bases.backward)
            pieces.bases = replace(pieces.bases, backward=backward, between=tuple(between))

    def plan(self, key: Key, limit_bytes: int, reserve_bytes: int = 0) -> PartsPlan[Pieces]:
        """Return the fastest choice under a limit; with a margin before a step was metered."""
        margin = 0 if self.pieces[key].is_measured else limit_bytes // _MARGIN
        plan = super().plan(key, limit_bytes, max(reserve_bytes, margin))
        plan.margin_bytes = max(margin - reserve_bytes, 0)
        return plan

    def reason_of(self, key: Key) -> str:
        """Return the reason for which no single graph exists."""
        return self.context.lacking["graph"][key.measured]

    def announce(self, pieces: Pieces, reason: str) -> None:
        """Log the parts: they are compared with the chain before they run."""
        logger.info("%s The reason: %s", pieces.describe(), reason)


@dataclass(frozen=True)
class _Offer:
    """Plan that is compared; without one, the prediction says why."""

    name: str
    prediction: str
    """Prediction, as text."""
    plan: Any = None
    slower: float = _NEVER
    """Recomputation, as a share of a step."""
    refusal: InfeasibleError | None = None
    """Error of a plan that does not fit."""


class SequentialEngine(ChainEngine):
    """Chain, captured graph or parts, by their predicted recomputation under the limit."""

    published: ClassVar[frozenset[str]] = ChainEngine.published | {"graph", "program", "graph_plan"}

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.others: dict[str, Any] = {}
        self._samples: dict[Any, tuple[list[Any], Any]] = {}
        self._compared: dict[Key, Comparison] = {}

    def __getstate__(self) -> dict[str, Any]:
        empty: dict[str, Any] = {"others": {}, "_samples": {}, "_compared": {}, "searches": None}
        return super().__getstate__() | empty

    def without_graph(self, plan: Any) -> str:
        """Return why a plan has no graph; empty if it has one."""
        return {
            "graph": "",
            "chain": 'the model runs as a chain: give engine="graph" for a graph',
        }.get(plan.engine, "the model runs in parts, without a graph: chk.report() says why")

    # -- measuring

    def measure(self, key: Key, call: Call) -> Any:
        """Measure every stage; keep the form of the call, for a capture.

        Where a training step has to recompute, its graph is captured instead. If that recomputes
        too when its search has ended, the stages are measured then.
        """
        engine = self.others.get("parts")
        parts = engine.pieces.get(key) if isinstance(engine, _ChainParts) else None
        if parts is not None and parts.wants_search:
            self.others["parts"].measure(key, call)
            return None
        leaves, spec = core.tree_flatten((call.args, call.targets))
        self._samples[key.measured] = [_described(leaf) for leaf in leaves], spec
        self._take_back_reasons(key.measured)
        if self._begins_with_graph(key, call):
            return None
        try:
            return super().measure(key, call)
        except (NotPassedOn, Untriable) as error:
            if self.context.peers.ranks is not None or not self.settings.preserve_rng_state:
                raise
            raise Unsuited(str(error)) from None

    def forget(self, measured: Any) -> None:
        """Drop the measures of an input."""
        super().forget(measured)
        self._samples.pop(measured, None)
        self._take_back_reasons(measured)
        for other in self.others.values():
            other.forget(measured)

    def device_of(self, key: Key) -> torch.device | None:
        """Return the device of the stages, or of the graph; ``None`` before either is known.

        Where a graph came first, and had to go, the stages are measured when they are planned.
        """
        found, graph = super().device_of(key), self.others.get("graph")
        if found is None and graph is not None:
            found = graph.device_of(key)
        if found is None and key.measured in self.context.lacking["graph"]:
            forms = (
                leaf
                for leaf in self._samples.get(key.measured, ((),))[0]
                if isinstance(leaf, _Form)
            )
            found = next((form.device for form in forms), None)
        return found

    def _begins_with_graph(self, key: Key, call: Call) -> bool:
        """Capture the graph of a step that has to recompute; return whether there is one.

        The chain comes first where stages change state that is no tensor of the model.
        """
        context, limit = self.context, self.settings.mem_limit
        is_free = context.is_stepping and context.may_improve_plans() and self._sharding is None
        if limit is None or not is_free or self._is_asked_for_chain(key):
            return False
        if not self.settings.preserve_rng_state:
            return False
        parameters = list(context.module.parameters())
        try:
            with trial(context.module, call.arguments, context.device_of(call)) as made:
                args, kwargs = made.arguments
                forward = partial(context.module.forward, *args, **kwargs)
                needed = peak_estimate(forward, parameters, tree_tensors(made.arguments))
                is_closed = not made.changes_state()
        except Exception:
            # Measuring the chain meets and words what is wrong.
            return False
        if needed <= limit or not is_closed:
            return False
        try:
            self._measure_by(self._other("graph"), key)
        except CannotPlan as refused:
            context.lacking["graph"][key.measured] = refused.line
            return False
        return True

    def _inspected(self, key: Key) -> Inspection:
        """Return the measure of a kind of step, measured now if its graph came first."""
        if key.measured not in self._inspections:
            with self._sample_call(key) as call:
                super().measure(key, call)
        return super()._inspected(key)

    def _take_back_reasons(self, measured: Any) -> None:
        for reasons in self.context.lacking.values():
            reasons.pop(measured, None)

    # -- planning

    def plan(
        self, key: Key, limit_bytes: int, reserve_bytes: int = 0, *, is_strict: bool = False
    ) -> Any:
        """Return the plan with the least recomputation, of a chain, a graph or parts."""
        old = self.context.plans.get(key)
        is_beaten = old is not None and old.engine == "graph" and old.is_beaten
        if not is_beaten:
            first = self._graph_alone(key, limit_bytes, reserve_bytes)
            if first is not None:
                return first
        compared = self._compared.get(key)
        if is_beaten and compared is not None and key.measured in self._inspections:
            told = {"graph": _prediction(old.makespan, old.program.slowdown - 1)}
            compared = Comparison("chain", compared.predictions | told, is_last=True)
            self._compared[key] = compared
            # What the graph needs beside its plan says nothing about the chain.
            reserve_bytes = 0
        is_settled = old is not None and compared is not None and compared.is_last
        chain, refusal = None, None
        try:
            chain = super().plan(key, limit_bytes, reserve_bytes, is_strict=is_strict)
        except InfeasibleError as error:
            release(error)
            refusal = error
        slower = recomputation_of(chain)
        if not is_settled:
            self._compared.pop(key, None)
        if self._agreed(is_settled or slower <= WORTH or self._is_asked_for_chain(key)):
            if refusal is not None:
                raise InfeasibleError(*refusal.args)
            return chain
        prediction = _infeasible(refusal) if chain is None else _prediction(chain.makespan, slower)
        offers = [_Offer("chain", prediction, chain, slower, refusal)]
        for name, engine in self._rivals(key):
            offers.append(self._offer(name, engine, key, limit_bytes, reserve_bytes))
        possible = [offer for offer in offers if offer.plan is not None]
        if not possible:
            refusals = [offer.refusal for offer in offers if offer.refusal is not None]
            least = min(refusals, key=lambda error: error.minimum_bytes)
            raise InfeasibleError(*least.args)
        number = self._agreed(offers.index(min(possible, key=lambda offer: offer.slower)))
        chosen = offers[number]
        if chosen.name == "graph":
            chosen.plan.most_recomputed = slower + WORTH
        self._compared[key] = Comparison(chosen.name, {o.name: o.prediction for o in offers})
        for offer in offers:
            logger.info("compared: %s %s", offer.name, offer.prediction)
        return chosen.plan

    def _graph_alone(self, key: Key, limit_bytes: int, reserve_bytes: int) -> Any:
        """Return the graph's plan where the chain is not measured yet; ``None`` to measure it."""
        is_measured = key.measured in self._inspections
        if is_measured or "graph" not in self.others or self._is_asked_for_chain(key):
            return None
        rival = self.context.lacking["graph"].get(key.measured, self.others["graph"])
        offer = self._offer("graph", rival, key, limit_bytes, reserve_bytes)
        if offer.plan is not None:
            offer.plan.most_recomputed = WORTH
            told = {"chain": "measured if the graph recomputes at last", "graph": offer.prediction}
            self._compared[key] = Comparison("graph", told)
        return offer.plan

    def _agreed(self, value: Any) -> Any:
        """Return the first rank's value where ranks plan together."""
        ranks = self.context.peers.ranks
        return value if ranks is None else ranks.broadcast(value)

    def _rivals(self, key: Key) -> Iterator[tuple[str, Any]]:
        """Yield each way to run beside the chain: its name, and its engine or why there is none."""
        reason = self._reason(key) if self._sharding is None else ""
        if reason:
            yield "graph", reason
            return
        for name in ("graph", "parts") if self._sharding is None else ("blocks",):
            lacking = self.context.lacking[name]
            engine = None
            if key.measured not in lacking:
                try:
                    engine = self._other(name)
                    self._measure_by(engine, key)
                except CannotPlan as refused:
                    lacking[key.measured] = refused.line
            yield name, lacking.get(key.measured, engine)
            if key.measured not in lacking:
                return

    def _offer(
        self, name: str, engine: Any, key: Key, limit_bytes: int, reserve_bytes: int
    ) -> _Offer:
        """Return another engine's plan, or a reason; with the error of one that does not fit."""
        if isinstance(engine, str):
            return _Offer(name, engine)
        try:
            plan = engine.plan(key, limit_bytes, reserve_bytes)
        except CannotPlan as refused:
            reason = self.context.lacking[name][key.measured] = refused.line
            return _Offer(name, reason)
        except InfeasibleError as error:
            release(error)
            return _Offer(name, _infeasible(error), refusal=error)
        if plan.engine == "graph":
            slower = plan.program.slowdown - 1
            prediction = _prediction(plan.makespan, slower)
            hoped = slower if plan.planning.is_final else _HOPE * slower
            return _Offer(name, prediction, plan, hoped)
        if plan.predicted_bytes + plan.reserve_bytes > limit_bytes:
            refusal = InfeasibleError(
                f"no plan was found that fits in {exact_bytes(limit_bytes)}; the captured parts of "
                f"the model alone need {exact_bytes(plan.least_bytes)}: give at least that, or a "
                "smaller batch",
                plan.least_bytes,
            )
            return _Offer(name, _infeasible(refusal), refusal=refusal)
        # Code outside of the parts runs once under every plan, and is not timed.
        ideal = self._chain(key).ideal_time
        again = max(plan.makespan - plan.unplanned.time_ns / 1e9, 0.0)
        slower = again / ideal if ideal else 0.0
        prediction = _prediction(ideal + again, slower) + plan.parts.describe_again(plan.choice)
        return _Offer(name, prediction, plan, slower)

    def _is_asked_for_chain(self, key: Key) -> bool:
        """Return whether a schedule was computed on request, or an option of chains was given."""
        settings = self.settings
        return (
            settings.asks_for_schedule
            or settings.algorithm is not None
            or bool(settings.algorithm_options)
            or settings.mem_slots is not None
            or key.measured in self.context.loaded
        )

    def _reason(self, key: Key) -> str:
        """Return the reason to compare the chain with nothing; empty without one."""
        if self.context.peers.ranks is not None:
            return "not captured: ranks run one schedule"
        if key.measured not in self._samples:
            return "not captured: the stages were measured at other sizes only"
        if any(stage.state for stage in self._inspected(key).stages):
            return "not captured: stages change state that is no tensor of the model"
        if not self.settings.preserve_rng_state:
            return "not captured: it always repeats random numbers, see preserve_rng_state"
        return ""

    def _other(self, name: str) -> Any:
        """Return the engine of graphs, or of parts, which are blocks where the model is sharded.

        Raises CannotPlan if the sharded model has no blocks.
        """
        kind = "graph" if name == "graph" else "parts"
        if kind not in self.others:
            try:
                self.others[kind] = (
                    _WholeGraph(self.context)
                    if name == "graph"
                    else _ChainParts(self.context, self._inspections)
                    if self._sharding is None
                    else ShardedBlocksEngine(self.context, self._sharding)
                )
            except NoBlocks as error:
                raise CannotPlan(error) from None
            self.searches = self.others[kind].searches or self.searches
        return self.others[kind]

    def _measure_by(self, engine: Any, key: Key) -> None:
        """Measure a kind of step by another engine, unless it has been."""
        if engine.device_of(key) is not None:
            return
        with self._sample_call(key) as call:
            try:
                engine.measure(key, call)
            except NoBlocks as error:
                raise CannotPlan(error) from None
            except (NothingToPlan, allocator.MeterBusyError) as error:
                raise CannotPlan(ValueError(str(error) or "nothing to plan")) from None

    @contextmanager
    def _sample_call(self, key: Key) -> Iterator[Call]:
        """Give a call of the measured form; with the measured tensors where these still exist."""
        leaves, spec = self._samples[key.measured]
        module = self.context.module
        with training_flags_kept(module), torch.enable_grad():
            if not module.training:
                module.train()
            args, targets = core.tree_unflatten([_made_up(leaf) for leaf in leaves], spec)
            call = Call(args, {}, targets)
            if self._sharding is None and self.key(call).measured != key.measured:
                raise CannotPlan(ValueError("modes changed since the stages were measured"))
            yield call

    @property
    def remarks(self) -> Sequence[Any]:
        """Table of the compared plans."""
        compared = self._compared.get(self.context.latest.key)
        return [] if compared is None else [compared.table()]

    def curve(self, key: Key, points: int, *, training: bool = False) -> tuple[Curve, torch.device]:
        """Return step time against limit of the chain, or of what training runs on its clock.

        Among ranks, which have to measure together, it is that of the chain.
        """
        curve, device = super().curve(key, points)
        is_alone = self._is_asked_for_chain(key) or self.context.peers.ranks is not None
        if is_alone or not training:
            return curve, device
        ideal = float(curve.seconds[-1])
        found = list(zip(curve.bytes.tolist(), curve.seconds.tolist(), strict=True))
        for name, engine in self._rivals(key):
            if isinstance(engine, str):
                continue
            other, _ = engine.curve(key, points)
            fastest = float(other.seconds[-1])
            if name == "parts":
                # Code outside of the parts runs once under every plan, and is not timed.
                times = ideal + (other.seconds - fastest)
            else:
                times = other.seconds * (ideal / fastest)
            found += zip(other.bytes.tolist(), times.tolist(), strict=True)
        return Curve.from_points(found), device


def recomputation_of(chain: Any) -> float:
    """Return the recomputation of a chain's plan, as a share of a step."""
    return _NEVER if chain is None else chain.recomputation


def _prediction(seconds: float, slower: float) -> str:
    return f"{format_seconds(seconds)} a step, {slower:+.1%} of it recomputed"


def _infeasible(error: InfeasibleError | None) -> str:
    assert error is not None
    return f"needs {format_bytes(error.minimum_bytes)}"


class _Form(NamedTuple):
    """Tensor without its values, unless others keep it."""

    like: torch.Tensor
    """Its layout, without memory."""
    device: torch.device
    tensor: weakref.ref[torch.Tensor]


def _described(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return value
    like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    like.requires_grad_(value.requires_grad)
    return _Form(like, value.device, weakref.ref(value))


def _made_up(value: Any) -> Any:
    if not isinstance(value, _Form):
        return value
    like, found = value.like, value.tensor()
    shape, strides = like.shape, like.stride()
    if found is None or (found.shape, found.stride()) != (shape, strides):
        found = torch.empty_strided(shape, strides, dtype=like.dtype, device=value.device).zero_()
    return found.detach().requires_grad_(like.requires_grad)
