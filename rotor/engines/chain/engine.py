"""Chain engine: the stages of an ``nn.Sequential``, under an optimal schedule."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar

import torch

from rotor._pytorch import devices
from rotor._pytorch.traces import are_parametrizations_cached
from rotor.algorithms import Persistent
from rotor.algorithms.curve import Curve
from rotor.algorithms.sequence import Sequence as Schedule
from rotor.algorithms.utils import DynamicAlgorithm, curve_of_solutions
from rotor.chain import Chain
from rotor.common.calls import mode_signature
from rotor.common.progress import progress
from rotor.common.tensor_trees import tree_tensors
from rotor.engines.chain.alike import changing_weight
from rotor.engines.chain.growth import (
    StageWatch,
    kept_until_backward,
    known_growth,
    measured_alike,
    stage_watch,
    watch_output,
    with_other_input,
)
from rotor.engines.chain.measure import Measuring, measure
from rotor.engines.chain.measures import Inspection, inferred
from rotor.engines.chain.observe import Observation
from rotor.engines.chain.plan import Plan, loss_reserve, make_chain_plan, with_executor, with_proofs
from rotor.engines.chain.published import (
    LoadedSequence,
    PublishedChain,
    checked_sequence,
    modules_of,
)
from rotor.engines.chain.run import Run, run_chain
from rotor.engines.chain.segments import Around
from rotor.engines.chain.sharded import (
    ShardedMeasuring,
    ShardedRun,
    find_sharding,
    joined_measures,
    measuring,
    plan_once,
    share_loss,
    with_final_reduce,
)
from rotor.engines.chain.snapshot import ChainProof, StageOrigins, stages_before
from rotor.engines.chain.stages import Stage, find_stages, made_gradients, shared_parameters
from rotor.engines.contract import (
    Call,
    CannotPlan,
    Context,
    IsPending,
    Key,
    StartMeter,
    Unsuited,
)
from rotor.engines.learning import MeteredEngine, confirmed, plan_with_guess
from rotor.engines.peers import SharingRanks
from rotor.engines.proofs import RunProof, ShardedProof, StepProof
from rotor.errors import InfeasibleError
from rotor.meter.allocator import storage_bytes
from rotor.meter.step_meter import StepBytes
from rotor.report.text import Text
from rotor.units import exact_bytes, format_bytes, parse_bytes

logger = logging.getLogger("rotor")


class ChainEngine(PublishedChain, MeteredEngine):
    """Stages of an ``nn.Sequential``, measured one by one and scheduled together.

    Attributes
    ----------
    names, functions
        Stages, by name and as modules; in their measured form after measuring.
    inspection_values
        Latest measure, ``None`` before one.
    held
        Kinds of steps whose output a caller was seen to hold until the end of the backward.
    """

    name: ClassVar[str] = "chain"
    takes_one: ClassVar[bool] = True
    has_schedules: ClassVar[bool] = True
    published: ClassVar[frozenset[str]] = frozenset(
        [
            *("names", "functions", "inspection_values", "chain", "sequence", "all_values"),
            *("build_chain", "cost_model", "algorithm", "compute_min_sequence"),
            *("compute_pytorch_sequence", "compute_seq_sequence"),
            *("compute_homogeneous_sequence", "compute_heterogeneous_sequence"),
        ]
    )

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        stages = find_stages(context.module)
        self._sharding = context.sharding = find_sharding(context.module, context.wrapper())
        if self._sharding is not None:
            stages = self._sharding.stages(stages)
            context.peers = SharingRanks(self._sharding.ranks)
        self.names = [stage.name for stage in stages]
        self.functions = modules_of(stages)
        self.is_portable = True
        self.inspection_values: Inspection | None = None
        self.watches: dict[int, tuple[Inspection, StageWatch | None]] = {}
        self._inspections: dict[Any, Inspection] = {}
        self._fitted: set[Any] = set()
        self.held: set[Any] = set()

    def check(self, options: Mapping[str, Any]) -> None:
        """Raise if costs of operations are given, which chains do not take, or an option is."""
        super().check(options)
        if self.settings.profile != "measured":
            raise ValueError(
                "the stages of a chain are always measured here: profile= is for graphs, give "
                'engine="graph"'
            )

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in self.__dict__.items() if name != "context"}
        return kept | {"watches": {}}

    @property
    def _flags(self) -> Any:
        """Source of gradient flags of parameters: FSDP2's shards, or the modules."""
        return self._sharding or self.context.structure

    @property
    def algorithm(self) -> DynamicAlgorithm:
        """Algorithm that finds schedules."""
        return self.settings.algorithm or Persistent()

    def key(self, call: Call) -> Key:
        """Return the kind of a step."""
        tensors = tree_tensors(call.args[0])
        if not tensors:
            raise ValueError("the input holds no tensor, expected a tensor or a tuple with tensors")
        kind = devices.type_of(tensors[0].device)
        if self._sharding is not None:
            self._sharding.prepare()
        structure = self.context.structure
        structure.check_dropout()
        required, absent = self._flags.parameter_flags()
        targets = call.targets
        measured = (
            tuple([(t.shape, t.dtype, t.device, t.requires_grad) for t in tensors]),
            mode_signature(kind),
            structure.training_flags(),
            # Other ranks do not see them: hooks of one rank alone must not make it measure.
            structure.switches() if self.context.peers.ranks is None else (),
            required,
            None if targets is None else tuple([(t.shape, t.dtype) for t in tree_tensors(targets)]),
        )
        return Key(measured, absent)

    # -- measuring

    def forget(self, measured: Any) -> None:
        """Drop the measure of an input."""
        self._inspections.pop(measured, None)
        self._fitted.discard(measured)

    def device_of(self, key: Key) -> torch.device | None:
        """Return the device of the stages; ``None`` before they were measured on such an input."""
        inspection = self._inspections.get(key.measured)
        return None if inspection is None else inspection.device

    def measure(self, key: Key, call: Call) -> Inspection:
        """Measure every stage on the input of a call."""
        arg, peers, sharding = call.args[0], self.context.peers, self._sharding
        self._check_weights(call)
        stages = find_stages(self.context.module, peers.ranks)
        self.prepare_measuring(arg)
        measuring_class: type[Measuring] = Measuring
        around: AbstractContextManager[None] = nullcontext()
        if sharding is not None:
            stages = sharding.stages(stages)
            measuring_class = ShardedMeasuring
            around = measuring(sharding, stages)
        inspection = self._inferred(key, stages, arg) if peers.ranks is None else None
        if inspection is None:
            with around, progress(len(stages), "measuring the stages") as update:
                inspection = measure(
                    stages,
                    arg,
                    loss_fn=self.context.loss_of(call),
                    targets=call.targets or (),
                    progress=update,
                    measuring_class=measuring_class,
                    few_rounds=self.settings.planning == "background",
                    observed=self._observed,
                    ranks=peers.ranks,
                )
        if peers.ranks is not None:
            inspection = joined_measures(peers.ranks, inspection)
        if sharding is not None:
            inspection = with_final_reduce(sharding, inspection)
        merged = [stage.name for stage in inspection.stages if len(stage.names) > 1]
        if merged:
            logger.info("merged because they cannot be cut apart: %s", ", ".join(merged))
        self._inspections[key.measured] = inspection
        # Copies of a model do not share what stages keep outside of its tensors.
        self.is_portable &= not any(stage.state for stage in inspection.stages)
        self.inspection_values = inspection
        self.names = [stage.name for stage in inspection.stages]
        self.functions = modules_of(inspection.stages)
        return inspection

    def _check_weights(self, call: Call) -> None:
        """Raise CannotPlan if a cache of the caller's has one value of a weight for all stages."""
        if not are_parametrizations_cached():
            return
        name = changing_weight(self.context.module, self.context.device_of(call))
        if name:
            raise CannotPlan(
                RuntimeError(
                    f"{name} is another whenever its parametrization computes it, and torch.nn."
                    "utils.parametrize.cached() computes it once for all stages and calls, which "
                    "stages that run apart from each other cannot share: leave cached() out, or "
                    'use engine="graph" or "auto"'
                )
            )

    def _inferred(self, key: Key, stages: Sequence[Stage], arg: Any) -> Inspection | None:
        """Return a measure that follows from earlier ones; ``None`` if there is none."""
        known, learned = self._inspections, self.context.learned_loss
        earlier = measured_alike(known, key.measured)
        if earlier is not None:
            return with_other_input(earlier, stages, arg, self._observed)
        size = storage_bytes(tree_tensors(arg))
        return inferred(known, self._fitted, learned, key.measured, size)

    @property
    def remarks(self) -> Sequence[Any]:
        """Note on the inputs whose measures follow from others."""
        kinds, fitted = len(self._inspections), len(self._fitted)
        text = f"inputs of {kinds} kinds: {kinds - fitted} measured, {fitted} between"
        return [Text(text)] if fitted else []

    def _observed(self, stages: Sequence[Stage], seen: Sequence[Observation]) -> None:
        """Raise Unsuited for models that only a graph of operations can follow; warn of kept
        stages.

        Raises RuntimeError instead if values leave a stage of a sharded model. All ranks exchange
        what they have observed.
        """
        leaving = [i for i, s in enumerate(seen) if s.leaves or s.is_fed]
        reason = f"stage {stages[leaving[0]].name}: {seen[leaving[0]].reason()}" if leaving else ""
        varying = [
            f"{stage.name} ({' and '.join(type(f).__name__ for f in stage.functions)})"
            for stage, s in zip(stages, seen, strict=True)
            if not s.repeats
        ]
        if (ranks := self.context.peers.ranks) is not None:
            # Either all ranks go on, or none does.
            found = ranks.exchange((reason, varying))
            reason = next((other for other, _ in found if other), "")
            varying = list(dict.fromkeys(name for _, names in found for name in names))
        if reason:
            if self._sharding is not None:
                raise RuntimeError(
                    f"{reason}, which recomputing stages of a sharded model would lose: return it "
                    "from the stage, in a tuple with its output"
                )
            is_fed = any(s.is_fed for s in seen)
            is_free = self.settings.engine == "auto" and self.settings.preserve_rng_state
            if is_free and not is_fed and self.context.peers.ranks is None:
                logger.info("planned as a graph of operations, not as a chain: %s", reason)
                raise Unsuited(reason)
        self.warn_varying("stage", varying)

    # -- planning

    def build_chain(self, mem_limit: int | str | None = None) -> Chain:
        """Return the cost model of the measured stages.

        Parameters
        ----------
        mem_limit
            Accepted as published; the cost model is in bytes and does not depend on it.

        Raises
        ------
        ValueError
            Nothing was measured yet.
        """
        if mem_limit is not None:
            parse_bytes(mem_limit)
        return self._chain(self.context.measured_key())

    def _inspected(self, key: Key) -> Inspection:
        """Return the measure of a kind of step."""
        return self._inspections[key.measured]

    def cost_model(self) -> Chain:
        """Return the cost model of the latest measure; raise ValueError before one."""
        return self.build_chain()

    def _chain(
        self, key: Key, loss_bytes: int | None = None, *, holds_output: bool = True
    ) -> Chain:
        inspection = known_growth(self.watches, self._inspected(key))
        # A parameter that several stages share gets its gradient in the last of them.
        lacking = self._flags.lacking_gradient(key.absent)
        # Autograd adds up the gradients of several stages before it adds to an existing one.
        stages = inspection.stages
        shared = shared_parameters(stages) & {id(p) for s in stages for p in s.plain_parameters()}
        sizes = [m.pgrad_bytes for m in inspection.measures]
        missing, sums = made_gradients(inspection.stages, sizes, lacking | shared, shared)
        gradients = None
        if self._sharding is not None:
            gradients = [
                sum(self._sharding.gradient_bytes(stage, m.pgrad_bytes, absent))
                for stage, m, absent in zip(
                    inspection.stages, inspection.measures, missing, strict=True
                )
            ]
        if loss_bytes is None:
            loss_bytes = self.context.learned_loss.get(key.measured)
        if loss_bytes is None:
            loss_bytes = loss_reserve(inspection, self.settings.loss_tmp_memory_usage)
        return inspection.chain(
            loss_tmp_bytes=loss_bytes,
            hold_output=holds_output and inspection.loss_peak_bytes is None,
            rng=self.settings.preserve_rng_state,
            missing=missing,
            sums=sums,
            gradients=gradients,
        )

    @property
    def _may_leave_tail(self) -> bool:
        """True if plain autograd may run the last stages.

        Where a backward passes them by, autograd gives them zeros that are no distributed tensors.
        """
        return self._sharding is None and not self.context.peers.has_collectives

    def _collective_bytes(self, inspection: Inspection) -> int:
        if self._sharding is None:
            return 0
        return self._sharding.collective_bytes(inspection.stages, inspection.device)

    def plan(
        self, key: Key, limit_bytes: int, reserve_bytes: int = 0, *, is_strict: bool = False
    ) -> Plan:
        """Return the best schedule under a limit, the same on all ranks."""
        algorithm = self.algorithm
        if key.measured in self.context.loaded:
            loaded = self.context.loaded[key.measured]
            algorithm = LoadedSequence(loaded, None if is_strict else algorithm)
        inspection, ranks = self._inspected(key), self.context.peers.ranks
        options = dict(self.settings.algorithm_options)
        if self.settings.mem_slots is not None:
            options.setdefault("mem_slots", self.settings.mem_slots)
        if ranks is not None:
            share_loss(ranks, self.context.learned_loss, key.measured)
        chain = self._chain(key)

        def plan_under(limit_bytes: int, reserved: int, chain: Chain = chain) -> Plan:
            with progress(1, "computing the schedule") as update:
                make = partial(
                    make_chain_plan,
                    inspection,
                    chain,
                    limit_bytes,
                    algorithm,
                    reserve_bytes=reserved,
                    rng=self.settings.preserve_rng_state,
                    options=options,
                    progress=update,
                    collective_bytes=self._collective_bytes(inspection),
                    plain_tail=self._may_leave_tail,
                )
                return with_proofs(make, inspection, limit_bytes, self.settings.verify)

        is_guessed = (
            not self.context.knows_loss(key)
            and inspection.loss_peak_bytes is None
            and key.measured not in self.context.loaded
        )

        def plan_with(*, holds_output: bool) -> Plan:
            chain_of = partial(self._chain, key, holds_output=holds_output)
            if not is_guessed:
                return plan_under(limit_bytes, reserve_bytes, chain_of())
            guess = chain.loss_tmp_bytes
            plan, reserved = plan_with_guess(
                lambda loss: plan_under(limit_bytes, reserve_bytes, chain_of(loss)),
                guess,
                limit_bytes,
                min(guess, 0),
            )
            plan.short_bytes = guess - reserved
            return plan

        if ranks is not None:
            plan = plan_once(
                ranks,
                plan_under,
                limit_bytes,
                reserve_bytes,
                chain,
                inspection,
                plain_tail=self._may_leave_tail,
            )
        else:
            may_drop = self.settings.engine == self.name and key.measured not in self.held
            refusals = []
            for holds_output in (True, False)[: 1 + may_drop]:
                try:
                    plan = plan_with(holds_output=holds_output)
                    break
                except InfeasibleError as error:
                    refusals.append(error.args)
            else:
                raise InfeasibleError(*refusals[0])
        logger.info(
            "planned %d stages: predicted peak %s of %s, %.4g s a step, %d stages recomputed",
            len(plan.chain),
            format_bytes(plan.predicted_bytes),
            format_bytes(plan.limit_bytes),
            plan.makespan,
            len(plan.schedule.recomputed),
        )
        return plan

    def curve(self, key: Key, points: int, *, training: bool = False) -> tuple[Curve, torch.device]:
        """Return step time against limit, for all limits."""
        del points, training
        chain, inspection = self._chain(key), self._inspected(key)
        with progress(1, "computing the curve") as update:
            find = getattr(self.algorithm, "curve", partial(curve_of_solutions, self.algorithm))
            curve = find(chain, progress=update)
        own = self._collective_bytes(inspection)
        rng, verified = self.settings.preserve_rng_state, self.settings.verify != "off"
        curve = with_executor(curve, chain, inspection, own, rng=rng, verified=verified)
        return curve, inspection.device

    def load(self, key: Key, source: Any, limit_bytes: int) -> Plan:
        """Return the plan of a saved schedule; plans for other gradients follow it too."""
        saved = checked_sequence(source, self._chain(key))
        before = self.context.loaded
        self.context.loaded = before | {key.measured: saved}
        try:
            plan = self.plan(key, limit_bytes, is_strict=True)
        except BaseException as error:
            self.context.loaded = before
            if not isinstance(error, InfeasibleError):
                raise
            least = error.minimum_bytes
            raise InfeasibleError(
                f"the plan needs {exact_bytes(least)}, and the limit is "
                f"{exact_bytes(limit_bytes)}: give at least {least} bytes, or a plan that was "
                "made for less",
                least,
            ) from error
        for other in [k for k in self.context.plans if k.measured == key.measured]:
            del self.context.plans[other]
        return plan

    # -- running

    def run(self, plan: Plan, call: Call, start: StartMeter) -> tuple[Any, IsPending]:
        """Run a step under a plan."""
        proof, x, around = self._proof_of(plan), call.args[0], None
        if self._sharding is None:
            around = Around(self.context.structure.unit, plan.inspection, plan.schedule, x)
        meter = start()
        watch = stage_watch(self, plan) if meter is None else None
        runs: list[weakref.ref[Run]] = []

        def is_pending() -> bool:
            return any(run is not None and not run.is_done() for run in [ref() for ref in runs])

        output = run_chain(
            plan.inspection.stages if watch is None else watch.stages,
            plan.schedule,
            x,
            preserve_rng_state=self.settings.preserve_rng_state,
            flags=plan.inspection.flags,
            started=lambda run: runs.append(weakref.ref(run)),
            run_class=Run if self._sharding is None else ShardedRun,
            proof=None if proof is None else RunProof(proof, self._origins_of(plan)),
            around=around,
        )
        if proof is not None:
            proof.begin_with(output)
        if around is not None:
            output = around.whole(output)
        if (observer := meter or watch) is not None:
            observer.forward_done(output)
        if not plan.holds_output:
            watch_output(self, plan, output)
        pending = is_pending if runs else kept_until_backward(output)
        return self.context.with_loss(output, call.targets), pending

    def _proof_of(self, plan: Plan) -> StepProof | None:
        """Return the proof of the next step; ``None`` if that step is not verified."""
        sharding = self._sharding
        # All ranks have to compare in the same steps.
        if not plan.is_verified(self.settings.verify if sharding is None else plan.verify):
            return None
        stages = plan.inspection.stages
        if sharding is not None:
            undo, ranks = stages_before(stages), sharding.ranks
            return ShardedProof(plan.proved, undo, ranks, sharding.gradients_before)
        return ChainProof(plan.proved, stages, self.context.module.parameters())

    def _origins_of(self, plan: Plan) -> StageOrigins:
        """Return the stages of a plan; every plan of their measure is refuted if some differ."""
        myself, inspection = weakref.ref(self), plan.inspection

        def failed(stages: list[int]) -> None:
            inspection.refute(stages)
            if (engine := myself()) is not None:
                engine.context.loaded.clear()

        return StageOrigins(inspection.stages, failed)

    # -- learning

    def learn(self, plan: Plan, step: StepBytes) -> None:
        """Compare a metered step with its plan; of a sharded model, two steps."""
        if self._sharding is None:
            super().learn(plan, step)
            return
        # The model's own unit is gathered before the forward begins.
        step = step.shifted(self._sharding.base_bytes(plan.device))
        is_over = step.peak_bytes > plan.limit_bytes
        is_less = self._loss_of(plan, step) < plan.chain.loss_tmp_bytes
        known = confirmed(plan, step, is_doubtful=is_over or is_less)
        if known is not None:
            super().learn(plan, known)

    def warn_over(self, plan: Plan, least_bytes: int) -> None:
        """Warn of a limit that could not be kept, on each rank whose step went over."""
        is_over = (plan.measured_bytes or 0) > plan.limit_bytes
        if self.context.peers.ranks is None or is_over:
            super().warn_over(plan, least_bytes)

    def learn_loss(self, plan: Plan, step: StepBytes) -> bool:
        """Note the need of the caller's loss; return whether it is new to the plan."""
        learned, assumed = self._loss_of(plan, step), plan.chain.loss_tmp_bytes
        if learned == assumed or (plan.key.measured in self._fitted and learned < assumed):
            return False
        if self.context.peers.ranks is not None and plan.meterings > 1 and learned < assumed:
            # The loss of another rank needs more.
            return False
        self.context.learned_loss[plan.key.measured] = learned
        return True

    @staticmethod
    def _loss_of(plan: Plan, step: StepBytes) -> int:
        """Return the bytes of the loss in a metered step, as in `Chain.loss_tmp_bytes`."""
        if plan.inspection.loss_peak_bytes is not None:
            return plan.chain.loss_tmp_bytes
        # Another step may hold the output longer than this one did.
        is_released = plan.holds_output and not step.output_held
        more = is_released * plan.inspection.output_bytes - plan.inspection.output_grad_bytes
        return step.loss_bytes + more

    def repriced(self, plan: Plan) -> int:
        """Return the peak of a plan's schedule with the latest costs."""
        corrected = Schedule(plan.sequence.codes, self._chain(plan.key))
        return corrected.peak_bytes - plan.chain.x_bytes[0] + plan.executor_bytes
