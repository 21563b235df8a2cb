"""Graph engine: forward, loss and backward captured as one graph, under a program."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch

from rotor._pytorch import core, symbols
from rotor._pytorch.captures import fresh
from rotor._pytorch.quiet_capture import Branches
from rotor.algorithms.curve import Curve
from rotor.common.calls import PlainValues, leaf_expressions
from rotor.common.frames import release
from rotor.common.model_state import refuse_sharded
from rotor.common.progress import progress
from rotor.common.ranks import NeedsPeers, each
from rotor.common.tensor_trees import output_tensors
from rotor.engines.contract import (
    Call,
    CannotPlan,
    Context,
    IsPending,
    Key,
    PlanAgain,
    StartMeter,
)
from rotor.engines.graph.calls import captured_key, check_arguments, gives_plain_outputs, run_once
from rotor.engines.graph.capture import Capture, Unplanned
from rotor.engines.graph.captured_step import CapturedStep
from rotor.engines.graph.choosing import Choices, choose_groups
from rotor.engines.graph.code.emit import Emitted
from rotor.engines.graph.code.numbers import ModelNumbers
from rotor.engines.graph.code.pricing import build_graph
from rotor.engines.graph.costs.profile import Cost
from rotor.engines.graph.costs.recorded import MEASURED, price, source_of
from rotor.engines.graph.improving import Improver
from rotor.engines.graph.making import loaded_plan, make_graph_plan
from rotor.engines.graph.planned import GraphPlan, lower_bound_of
from rotor.engines.graph.sizing import (
    Family,
    Sizing,
    kind_of,
    made_step,
    note_reads,
    warn_unrepeatable,
)
from rotor.engines.graph.tracing.fetches import groups_of
from rotor.engines.graph.tracing.lowering import Lowered
from rotor.engines.learning import MeteredEngine, plan_with_guess
from rotor.engines.proofs import StepProof
from rotor.errors import CaptureError, InfeasibleError
from rotor.graph import planner
from rotor.graph.graph import Graph
from rotor.graph.planner import PlanCurve, check_options
from rotor.graph.program import simulate
from rotor.meter.step_meter import StepBytes, cancel_running
from rotor.report.text import Text
from rotor.tier.offload import check_device
from rotor.units import format_bytes

logger = logging.getLogger("rotor")


def _call(module: Any, loss_fn: Any, args: Any, kwargs: Any, targets: Any) -> Any:
    output = module.forward(*args, **kwargs)
    return output if loss_fn is None else loss_fn(output, *targets)


def check_generator(context: Context) -> None:
    """Raise ValueError unless random numbers are to repeat as in the first forward."""
    if not context.settings.preserve_rng_state:
        raise ValueError(
            "a graph is always recomputed with the random numbers of the first forward: leave "
            "preserve_rng_state at True"
        )


class GraphEngine(MeteredEngine):
    """Captured steps of any module.

    The first training forward of each kind captures forward, loss (``loss_fn=``) and backward as
    one graph, measures its operations and plans them; `graph` is the cost model, `program` the
    plan.
    """

    name: ClassVar[str] = "graph"
    published: ClassVar[frozenset[str]] = frozenset(
        ["graph", "program", "cost_model", "graph_plan", "options"]
    )

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.steps: dict[Any, CapturedStep] = {}
        self._branches = Branches()
        self._numbers = ModelNumbers()
        self.sizing = Sizing(context)
        self.primals: list[Any] | None = None
        """List that takes the tensors of the next capture, or None."""
        self.choices = Choices()
        self.improver = Improver(context, self.steps, self.sizing.families)
        context.searches.add(self.improver)
        self.searches = self.improver if self.improves else None

    def check(self, options: Mapping[str, Any]) -> None:
        """Raise if an option is unknown, random numbers may differ, or the profile is invalid.

        A sharded model is refused too, unless its graph was not asked for.
        """
        settings = self.settings
        check_options(options)
        if settings.engine != "auto" or settings.backend != "fx":
            refuse_sharded(self.context.module)
        check_generator(self.context)
        settings.profile = source_of(settings.profile)
        if settings.backend == "auto" and settings.profile != MEASURED:
            raise ValueError(
                'backend="auto" compares times that are measured here, and profile= has those of '
                'another machine: give backend="fx" or "inductor"'
            )

    # -- measuring

    def key(self, call: Call) -> Key:
        """Return the kind of a step."""
        takes_numbers = self.settings.backend == "fx" and symbols.takes_numbers()
        return captured_key(self.context, call, takes_numbers=takes_numbers)

    def forget(self, measured: Any) -> None:
        """Drop the capture of a kind of step."""
        self.steps.pop(measured, None)
        self.sizing.forget(measured)
        self.improver.forget(measured)

    def device_of(self, key: Key) -> torch.device | None:
        """Return the device of such steps; ``None`` before they were captured."""
        step = self.steps.get(key.measured)
        return None if step is None else step.device

    def measure(self, key: Key, call: Call) -> CapturedStep:
        """Capture a step and measure its operations."""
        refuse_sharded(self.context.module)
        args, kwargs = call.arguments
        self.context.check_devices((args, kwargs))
        check_arguments(self.context.module, args, kwargs)
        loss_fn = self.context.loss_of(call)
        cancel_running()
        arguments = (args, kwargs, call.targets)
        if self.settings.offload is not None:
            check_device(self.settings.offload.tier, self.context.device_of(call))
        values = PlainValues.of(key.measured)
        if values.reads.is_endless:
            raise CannotPlan(
                CaptureError(
                    "the model's code depends on Python values that keep changing: those of its "
                    "arguments had 16 values so far, and it was captured for each; give numbers "
                    "that change as tensors"
                )
            )
        inputs = values.inputs
        reason = self._one_shape_reason(has_numbers=bool(inputs or self._numbers.inputs))
        if self.follows_shapes and reason:
            self.sizing.captured_separately(key, arguments, reason)
        elif self.follows_shapes:
            make = partial(self._new_capture, self._backend(key))
            profiled = partial(self._profiled, key, call=call)
            step = self.sizing.shared(key, loss_fn, arguments, make, profiled)
            if step is not None:
                for measured, known in self.steps.items():
                    if known.shares_shapes:
                        self.improver.forget(measured)
                return step
        begun = time.thread_time()
        with progress(1, "capturing the model"):
            try:
                expressions = leaf_expressions(arguments) if inputs else []
                numbers = self._numbers.inputs.union(
                    name for k in inputs if (name := expressions[k])
                )
                taken = self._captured(loss_fn, call, numbers, self._backend(key))
            except CaptureError as error:
                if numbers:
                    values.reads.keep_constant(inputs)
                    values.inputs = frozenset()
                    self._numbers.refuse()
                    release(error)
                    return GraphEngine.measure(self, key, call)  # Its ranks have met already.
                self.sizing.refuse(key, error)
                note_reads(self.context, key, None, call)
                release(error)
                raise CannotPlan(error) from None
        kind = kind_of(key.measured)
        if self.settings.backend == "auto" and not self.choices.known(kind):
            compiled = partial(self._captured, loss_fn, call, numbers, "inductor")
            taken = self.choices.of(kind, taken, self.context.device_of(call), compiled)
        self.improver.count_capture(begun)
        return self._profiled(key, *taken, call)

    def _backend(self, key: Key) -> str:
        """Return what runs a kind of step: operators too, before the choice of "auto"."""
        backend = self.settings.backend
        return backend if backend != "auto" else self.choices.known(kind_of(key.measured)) or "fx"

    def _one_shape_reason(self, *, has_numbers: bool) -> str:
        """Return the reason why no plan holds for several shapes; empty without one."""
        if has_numbers:
            return "a number that the code reads changes"
        if self.settings.counts == "reserved":
            return "reserved bytes depend on the rounding of each size"
        return "" if self.solve() is None else "the given algorithm plans one shape"

    def _new_capture(self, backend: str, numbers: Collection[str] = ()) -> Capture:
        away = self.settings.away
        home_of = None if away is None else away.home_of
        branches = self._branches
        return Capture(fresh(_call), backend, branches=branches, numbers=numbers, home_of=home_of)

    def _captured(
        self, loss_fn: Any, call: Call, numbers: Collection[str], backend: str
    ) -> tuple[Capture, Unplanned]:
        try:
            return self._captured_once(loss_fn, call, numbers, backend)
        except CaptureError as error:
            # Modules that prepare themselves in their first forward can be captured after it.
            if not run_once(self.context.module, *call.arguments, self.context.peers):
                raise error from None
            release(error)
            return self._captured_once(loss_fn, call, numbers, backend)

    def _captured_once(
        self, loss_fn: Any, call: Call, numbers: Collection[str], backend: str
    ) -> tuple[Capture, Unplanned]:
        """Capture a call; in branches for compiled code if plain ones cannot be captured."""
        given = (self.context.module, loss_fn, *call.arguments, call.targets)
        refused: CaptureError | None = None
        while True:
            capture = self._new_capture(backend, numbers)
            try:
                with self.context.shells():
                    found = capture.reach(*given)
                break
            except CaptureError as error:
                refused = refused or error
                if not self._branches.take(error.__cause__):
                    self._branches.take_back()
                    raise refused from None
        if refused is not None and not gives_plain_outputs(self.context, found, call):
            self._branches.take_back()
            found.drop()
            raise refused
        if refused is not None:
            release(refused)
        return capture, found

    def _profiled(
        self,
        key: Key,
        capture: Capture,
        found: Unplanned,
        call: Call,
        family: Family | None = None,
    ) -> CapturedStep:
        """Return the measured step of a captured call; with a family, of a graph for any size."""
        settings, lowered = self.settings, found.captured.lowered
        collectives = (lowered.tasks[k].node for k in lowered.collectives)
        NeedsPeers.check(groups_of(collectives), self.context.peers.members)
        device, source = self.context.device_of(call), settings.profile
        if self.primals is not None:
            self.primals[:] = found.primals

        def priced(plain: Lowered) -> list[Cost]:
            if settings.backend == "auto":
                choose_groups(plain, device, found.primals)
                for task, one in zip(lowered.tasks, plain.tasks, strict=True):
                    if task.node is not None and one.node is not None:
                        task.node.target = one.node.target
            known = (plain, device, found.primals)
            with progress(1, "measuring the operations") as update:
                if source == MEASURED and family is None and self._is_improving():
                    return self.improver.price(key, *known, call, update)
                return price(source, *known, progress=update)

        try:
            step = made_step(
                CapturedStep,
                capture,
                found,
                self.context.structure.parameters,
                (*call.arguments, call.targets),
                device,
                priced,
                settings.away,
                family,
                loss_captured=self.context.loss_of(call) is not None,
                planned_for="" if source == MEASURED else source.device,
                verifies=settings.verify != "off",
                counts=settings.counts,
                offload=settings.offload,
                # Without better plans later a seed decides alone: no programs are read from disk.
                keeps_orders=family is not None and self.context.may_improve_plans(),
            )
        finally:
            found.drop()
        if family is None or step in family.graphs:
            warn_unrepeatable(self.context, [lowered])
            self.sizing.add(key, step, self.steps)
        self.steps[key.measured] = step
        note_reads(self.context, key, found.captured, call)
        return step

    @property
    def remarks(self) -> Sequence[Any]:
        """Notes on the shapes of the calls and what they share, and on the choice of a backend."""
        return [*self.sizing.remarks(), *map(Text, self.choices.texts.values())]

    # -- planning

    @property
    def options(self) -> dict[str, Any]:
        """Options of the planner."""
        return self.settings.options

    def without_graph(self, plan: Any) -> str:
        """Return why a plan has no graph; empty if it has one."""
        has_graph = plan.key is not None and plan.key.measured in self.steps
        return "" if has_graph else f"the model runs without a graph: {plan.reason}"

    def cost_model(self) -> Graph:
        """Return the graph of the latest measured step; raise ValueError without a single one."""
        key = self.context.measured_key()
        if key.measured not in self.steps:
            raise ValueError("the model runs in parts, so no single graph can be measured")
        step = self._step_of(key)
        self.improver.settle(key.measured, self.steps[key.measured])
        return build_graph(step.lowered, step.costs, step.loss_workspace(0, None))

    def _step_of(self, key: Key) -> CapturedStep:
        """Return the captured step, for the existing gradients."""
        if key.measured not in self.steps:
            reason = self.context.refusals[key.measured].reason
            raise ValueError(f"the model runs without a graph: {reason}")
        step = self.steps[key.measured]
        return step.variant(step.existing_among(key.absent), step.absent_tangents)

    def _loss_bytes(self, key: Key) -> int:
        return self.steps[key.measured].loss_workspace(
            self.settings.loss_tmp_memory_usage, self.context.learned_loss.get(key.measured)
        )

    def _knows_loss(self, key: Key) -> bool:
        """Return whether the need of the loss was given, captured or learnt."""
        return self.context.knows_loss(key) or self.steps[key.measured].loss_captured

    def solve(self) -> Any:
        """Return the search for programs, if not the planner of operations."""
        return None

    @property
    def sets_aside(self) -> bool:
        """True if plans leave all that is needed beside the storages, as `make_graph_plan` says."""
        return False

    improves: ClassVar[bool] = True
    """True if better programs may be exchanged between steps."""

    follows_shapes: ClassVar[bool] = True
    """True if calls of several shapes share a capture."""

    def _is_improving(self) -> bool:
        return self.improves and self.improver.is_on()

    def plan(self, key: Key, limit_bytes: int, reserve_bytes: int = 0) -> GraphPlan:
        """Return the fastest program found under a limit."""
        step = self._step_of(key)
        step = step.base.variant(step.existing, self._agreed(step.absent_tangents))
        planned = partial(self._planned, step, key, limit_bytes, reserve_bytes)
        if step.shares_shapes:
            with self.sizing.timed(key):
                return planned(None)
        if self._is_improving():
            return self.improver.plan(key, step, limit_bytes, planned)
        self.improver.settle(key.measured, self.steps[key.measured])
        begun = time.thread_time()
        plan = planned(self.solve())
        plan.planning.seconds = time.thread_time() - begun
        return plan

    def _agreed(self, tangents: frozenset[int]) -> frozenset[int]:
        """Return the tangents among some on which all ranks that share a plan agree."""
        return frozenset.intersection(*each(self.context.peers.ranks, lambda: tangents))

    def _planned(
        self, step: CapturedStep, key: Key, limit_bytes: int, reserve_bytes: int, solve: Any
    ) -> GraphPlan:
        """Return a step's plan; one without doubtful tangents if no other fits."""

        def plan_of(step: CapturedStep) -> GraphPlan:
            find = step.solve if step.shares_shapes else solve
            reserve = max(reserve_bytes, step.expected_excess)
            make = partial(self._found, step, key, limit_bytes, reserve, find)
            try:
                plan = make()
            except InfeasibleError:
                if not any(each(self.context.peers.ranks, step.lowered.drop_preferences)):
                    raise
                plan = make()
            step.adopt(plan)
            return plan

        try:
            return plan_of(step)
        except InfeasibleError as error:
            doubtful = self._agreed(step.doubtful_tangents)
            if not doubtful:
                raise self._too_large(step, key, limit_bytes, error) from None
        # The first step is metered, and shows which outputs have a gradient.
        step = step.base.variant(step.existing, doubtful)
        try:
            return plan_of(step)
        except InfeasibleError as error:
            raise self._too_large(step, key, limit_bytes, error) from None

    def _too_large(
        self, step: CapturedStep, key: Key, limit: int, error: InfeasibleError
    ) -> InfeasibleError:
        """Return the error for a step that fits in no plan."""
        error = self.sizing.too_large(step, key, limit, error)
        if self.settings.backend != "auto" or self._backend(key) != "inductor":
            return error
        return InfeasibleError(
            f'{error.args[0]}. backend="auto" took Inductor\'s kernels, which all limits keep to: '
            'backend="fx" may need less',
            *error.args[1:],
        )

    def _found(
        self, step: CapturedStep, key: Key, limit_bytes: int, reserve_bytes: int, solve: Any
    ) -> GraphPlan:
        ranks = self.context.peers.ranks
        loss_bytes, knows = self._loss_bytes(key), self._knows_loss(key)
        guess = max(each(ranks, lambda: 0 if knows else loss_bytes))
        with progress(1, f"planning{self.sizing.described(key)}") as update:

            def plan_with(reserved: int) -> GraphPlan:
                own = loss_bytes if knows else min(loss_bytes, reserved)
                plan = make_graph_plan(
                    step,
                    limit_bytes,
                    own,
                    reserve_bytes=reserve_bytes,
                    options=self.settings.options,
                    progress=update,
                    solve=solve,
                    sets_aside=self.sets_aside,
                    ranks=ranks,
                )
                plan.short_bytes = loss_bytes - own
                return plan

            # Where every rank knows its loss, the guess is 0.
            plan, _ = plan_with_guess(plan_with, guess, limit_bytes)
        logger.info(
            "planned %d operations%s: predicted peak %s of %s, %.4g s a step, %d run more than "
            "once",
            len(step.lowered.tasks),
            "" if ranks is None else f" with {ranks.size} ranks",
            format_bytes(plan.predicted_bytes),
            format_bytes(plan.limit_bytes),
            plan.makespan,
            plan.recomputed,
        )
        return plan

    def curve(self, key: Key, points: int, *, training: bool = False) -> tuple[Curve, torch.device]:
        """Return the curve of `rotor.graph.curve`, as limits of this step."""
        self.improver.settle(key.measured, self.steps[key.measured])
        step = self._step_of(key)
        least = graph = step.graph(self._loss_bytes(key))
        with progress(points, "computing the curve") as update:
            options = {"link": step.link, "progress": update, **self.settings.options}
            found = planner.curve(graph, points, **options)
            if not self._knows_loss(key):
                # Limits with less room than the loss is assumed to need have plans too.
                least = step.graph(0)
                lowest = planner.curve(least, 2, **options | {"effort": 0})
                if lowest.least_bytes < found.least_bytes:
                    below = planner.curve(least, points, **options)
                    programs = [*found.programs, *below.programs]
                    found = PlanCurve.of(programs, below.least_bytes)
        own = [step.most_executor_bytes(peak) for peak in found.bytes.tolist()]
        curve = Curve(found.bytes + own, found.seconds)
        curve.lower_bound_bytes = lower_bound_of(step, least, curve.minimum_bytes)
        return curve, step.device

    def load(self, key: Key, source: Any, limit_bytes: int) -> GraphPlan:
        """Return the plan of a saved program, priced by the times of this machine."""
        step = self._step_of(key)
        plan = loaded_plan(step, source, limit_bytes)
        if not step.loss_captured:
            # The program determines the need of the loss: seeing it again changes nothing.
            self.context.learned_loss[key.measured] = plan.loss_bytes
        return plan

    # -- running

    def run(self, plan: GraphPlan, call: Call, start: StartMeter) -> tuple[Any, IsPending]:
        """Run a step under a plan."""
        capture = plan.step.capture
        proof = None
        if plan.is_verified(self.settings.verify):
            proof = StepProof(plan.proved, ranks=self.context.peers.ranks)
        code = plan.install(proof)
        value = (*call.arguments, call.targets)
        meter = start()
        rerun = self.context.structure.rerun(value, plan.step.device)
        try:
            output = self._called(plan, call, code)
        except Unplanned as reached:
            # A Python value that the code depends on has changed: the call needs another graph.
            cancel_running()
            step = self.sizing.reached(plan.key, reached)
            if step is not None:
                self.steps[plan.key.measured] = step
                raise PlanAgain from reached
            taken = self._with_numbers(plan, call) or (capture, reached)
            self._profiled(plan.key, *taken, call)
            raise PlanAgain from reached
        except CaptureError as error:
            values = PlainValues.of(plan.key.measured)
            values.reads.keep_constant(values.inputs)
            raise CannotPlan(error) from None
        if meter is not None and capture.ran is not plan.step.captured:
            meter.cancel()
            meter = None
        if meter is not None or len(plan.step.lowered.output_of_tangent) > 1:
            tensors = output_tensors(output)
            capture.note_absent_tangents(tensors)
        output = capture.with_a_way_around(output, rerun, lambda value: self.context.plain(*value))
        if meter is not None:
            meter.forward_done(output_tensors(output))
        token = capture.token
        return output, lambda: token is not None and token() is not None

    def _with_numbers(self, plan: GraphPlan, call: Call) -> tuple[Capture, Unplanned] | None:
        """Return a capture with numbers of the model as inputs, if these have changed."""
        backend, loss_fn = self._backend(plan.key), self.context.loss_of(call)
        if backend != "fx":
            return None
        capture = partial(self._captured, loss_fn, call, backend=backend)
        known = plan.step.captured.numbers
        return self._numbers.captured(known, self.context.module, capture)

    def _called(self, plan: GraphPlan, call: Call, code: Emitted) -> Any:
        """Return the result of the captured call under a plan, whose code is installed."""
        arguments = (*call.arguments, call.targets)
        loss_fn = None if call.targets is None else self.settings.loss_fn
        slots, spread = self.context.structure.parameters, core.in_ddp()
        if spread and self.settings.away is not None:
            raise RuntimeError(
                "DistributedDataParallel would not reduce gradients that leave for a second tier: "
                "leave offload_state out, or shard the model by fully_shard with a "
                "CPUOffloadPolicy"
            )
        code = plan.delivering(code, spread=spread)
        with (
            self.context.shells(),
            plan.step.installed(slots, arguments, code) as (given, early),
        ):
            try:
                return self._run_captured(plan, loss_fn, given)
            except Unplanned as reached:
                if early is not None:
                    reached.primals[:] = map(early.original, reached.primals)
                raise
            finally:
                if early is not None:
                    # Another call may reach this graph, with the parameters themselves.
                    plan.step.captured.emitted = plan.emitted

    def _run_captured(self, plan: GraphPlan, loss_fn: Any, given: Any) -> Any:
        """Return the result of the captured call, whose code is installed."""
        return plan.step.capture(self.context.module, loss_fn, *given)

    # -- learning

    def learn(self, plan: Any, step: StepBytes) -> None:
        """Compare a metered step with its plan, for the plans of other shapes too."""
        is_first = plan.awaits_meter
        super().learn(plan, step)
        if is_first and plan.step.shares_shapes:
            predicted = max(plan.predicted_bytes, self.repriced(plan))
            plan.step.note_excess(step.peak_bytes - predicted)

    def learn_loss(self, plan: GraphPlan, step: StepBytes) -> bool:
        """Note the need of the caller's loss; return whether it is new to the plan."""
        absent = plan.step.absent_tangents
        is_new = absent != plan.step.absent
        now = plan.step.base.variant(plan.step.existing, absent)
        learned = max(step.loss_bytes - now.tangent_bytes, 0)
        if not plan.step.note_loss(plan, learned) or plan.step.loss_captured:
            return is_new
        self.context.learned_loss[plan.key.measured] = learned
        return True

    def repriced(self, plan: GraphPlan) -> int:
        """Return the peak of a plan's program with the latest loss."""
        step = plan.step.base.variant(plan.step.existing, plan.step.absent_tangents)
        graph = step.graph(self._loss_bytes(plan.key))
        program = simulate(graph, plan.program.actions, plan.program.link)
        return program.peak_bytes + plan.executor_bytes
