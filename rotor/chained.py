"""`Checkpointable` for chains: an ``nn.Sequential`` under an optimal schedule."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rotor import _fsdp, algorithms, memory, together
from rotor.algorithms import Persistent
from rotor.algorithms.curve import Curve
from rotor.algorithms.sequence import Sequence as Schedule
from rotor.algorithms.utils import DynamicAlgorithm, checked_slots
from rotor.chain import Chain
from rotor.chain_proofs import UNMEASURED, NeedsGraph, ProvedChain
from rotor.checkpointable import Checkpointable, DefaultSlots
from rotor.distributed import Ranks
from rotor.executor import Run, run_chain
from rotor.inspection import Inspection, Measuring, measure
from rotor.loss_guess import plan_with_guess
from rotor.metering import StepBytes, cancel_running
from rotor.plan import Plan, loss_reserve, make_plan, own_bytes
from rotor.progress import progress
from rotor.published import LoadedSequence, PublishedChain, modules_of
from rotor.remeasuring import with_other_input
from rotor.report.html import chain_page
from rotor.report.text import plan_report, stage_rows, stage_table
from rotor.sharded import ShardedRun, Sharding, find_sharding
from rotor.stages import Stage, Structure, find_stages, shared_parameters
from rotor.units import format_bytes, parse_bytes
from rotor.values import tensors_of
from rotor.watching import known_growth, stage_watch

logger = logging.getLogger("rotor")


class ChainCheckpointable(ProvedChain, PublishedChain, Checkpointable):
    """What `Checkpointable` makes of an ``nn.Sequential``.

    Attributes
    ----------
    names, functions
        The stages, by name and as modules; as measured once there is a measure.
    inspection_values
        The last measure, ``None`` before one.
    """

    _algorithm: DynamicAlgorithm
    _inspections: dict[Any, Inspection]
    _plans: dict[Any, Plan]
    _latest: Plan | None
    _structure: Structure
    _learned_loss: dict[Any, int]
    _profile: Any
    _sharding: Sharding | None
    _ranks: Ranks | None

    def _begin(self) -> None:
        if self._profile != "measured":
            raise ValueError(
                "the stages of a chain are always measured here: profile= is for graphs, give "
                'engine="graph"'
            )
        self.__dict__.update(_graph_options=self._graphs_options(self._options), _options={})
        self.__dict__.update(_algorithm=Persistent(), _ranks=None, _digests={})
        self._look()

    def _look(self) -> None:
        """Find the stages, and what shards them; nothing is measured any more."""
        stages = find_stages(self.module)
        sharding = find_sharding(self.module, self)
        if sharding is not None:
            stages = sharding.stages(stages)
        self.__dict__.update(
            names=[stage.name for stage in stages],
            functions=modules_of(stages),
            inspection_values=None,
            _loaded={},
            _structure=Structure(self.module),
            _sharding=sharding,
            _ranks=self._ranks if sharding is None else sharding.ranks,
            _inspections={},
            _watches={},
            _plans={},
            _latest_key=None,
            _is_unit=_fsdp.is_unit(self),
        )

    def _check_sharded(self, model: nn.Module) -> None:
        del model

    def __getstate__(self) -> dict[str, Any]:
        kept = super().__getstate__() | {"_ranks": None, "_watches": {}}
        return kept | UNMEASURED if self._has_state() else kept

    def share_plans(self, group: Any = None) -> None:
        """Have the processes of a group measure together and run one plan.

        Replicas of a model, under DistributedDataParallel for instance, get the same result from
        different plans; with this they also run the same schedule, under the least limit of all. A
        model sharded by ``fully_shard`` does so by itself. Each process of the group has to call
        this, and from then on has to measure, plan and train in step with the others. A copy of the
        model plans for itself again.

        Parameters
        ----------
        group
            A process group; the default one without it.

        Raises
        ------
        RuntimeError
            There is no process group.
        """
        self.__dict__["_ranks"] = Ranks(group)
        self._look()

    def _measure_sample(self, sample: Any) -> None:
        self.measure(sample)

    def _check_model(self, model: nn.Module) -> None:
        find_stages(model)

    # -- measuring and planning

    def measure(self, custom_input: Any, *, targets: Sequence[Any] = ()) -> Inspection:
        """Measure every stage on a sample of the input.

        Nothing is changed: parameters, gradients, buffers, random states, training flags. The
        model is measured in training mode.

        Parameters
        ----------
        custom_input
            A tensor, or tensors in tuples, lists and dictionaries, on the model's device.
        targets
            With ``loss_fn``: what it takes beside the output.

        Raises
        ------
        ValueError
            The input is on another device than the model, holds no tensor, or is changed in place
            by the first stage.
        TypeError
            A stage returns something other than tensors.
        """
        flags = [(module, module.training) for module in self.module.modules()]
        if not self.module.training:
            self.module.train()
        try:
            with torch.enable_grad():
                self._check_structure()
                if self._sharding is not None:
                    self._sharding.prepare()
                    if self._sharding.root is not None:
                        custom_input = self._sharding.root.cast_inputs(custom_input)
                key = self._key_of_all(custom_input, targets)[0]
                self._inspections.pop(key[0], None)
                for plan_key in [k for k in self._plans if k[0] == key[0]]:
                    del self._plans[plan_key]
                try:
                    inspection = self._inspect(key[0], custom_input, targets)
                except NeedsGraph as found:
                    self._become_graph(str(found))
                    return self.measure(custom_input, targets=targets)
                self.__dict__["_latest_key"] = key
        finally:
            for module, training in flags:
                module.training = training
        return inspection

    def build_chain(self, mem_limit: int | str | None = None) -> Chain:
        """The cost model of the measured stages.

        Parameters
        ----------
        mem_limit
            Accepted as published; the cost model is in bytes and does not depend on it.

        Raises
        ------
        ValueError
            Nothing was measured.
        """
        if mem_limit is not None:
            parse_bytes(mem_limit)
        return self._chain(self._measured_key())

    def compute_sequence(
        self,
        custom_mem_limit_bytes: int | str | None = None,
        mem_slots: int | None = None,
        algo: DynamicAlgorithm | type[DynamicAlgorithm] | str | None = None,
        *,
        mem_limit: int | str | None = None,
        **algo_kwargs: Any,
    ) -> Schedule:
        """Compute the schedule that the following steps run.

        Parameters
        ----------
        custom_mem_limit_bytes, mem_limit
            The limit, by its published name or by ours; by default the one given before.
        mem_slots
            Plan on this many slots.
        algo
            An algorithm of `rotor.algorithms`, its class, or its name such as "floating";
            ``Persistent()`` by default.
        **algo_kwargs
            Given to the class where `algo` is one or a name, else to its ``solve``.

        Returns
        -------
        Sequence
            The schedule, priced by the simulator on `build_chain`.

        Raises
        ------
        ValueError
            Nothing was measured; two different limits are given; no algorithm has that name;
            InfeasibleError (a ValueError) when no schedule fits.
        """
        if custom_mem_limit_bytes is not None and mem_limit is not None:
            raise ValueError("give the limit once: mem_limit= or custom_mem_limit_bytes=")
        given = custom_mem_limit_bytes if mem_limit is None else mem_limit
        limit = self.mem_limit if given is None else parse_bytes(given)
        slots = self.mem_slots if mem_slots is None else checked_slots(mem_slots)
        key = self._measured_key()
        names = ("_algorithm", "_options", "mem_limit", "mem_slots", "_plans", "_loaded")
        before = [self.__dict__[name] for name in names]
        if isinstance(algo, str):
            algo = algorithms.get(algo)
        algorithm, options = self._algorithm, self._options
        if algo is not None or algo_kwargs:
            if isinstance(algo, type):
                algorithm, options = algo(**algo_kwargs), {}
            else:
                algorithm, options = algo or Persistent(), algo_kwargs
        self.__dict__.update(
            _algorithm=algorithm,
            _options=options,
            mem_limit=limit,
            mem_slots=slots,
            _plans={},
            _loaded={},
        )
        try:
            plan = self._make(key)
        except BaseException:
            self.__dict__.update(zip(names, before, strict=True))
            raise
        return plan.sequence

    def curve(self) -> Curve:
        """Step time against limit: every limit at once, the model's input not counted.

        Raises
        ------
        ValueError
            Nothing was measured.
        """
        key = self._measured_key()
        chain, inspection = self._chain(key), self._inspections[key[0]]
        with progress(1, "computing the curve") as update:
            curve = self._algorithm.curve(chain, progress=update)
        most, least = (
            own_bytes(
                inspection,
                [count] * len(chain),
                rng=self.preserve_rng_state,
                verified=self.verify != "off",
            )
            + self._beside_bytes(inspection)
            for count in (3, 1)
        )
        limits = curve.bytes - chain.x_bytes[0] + most
        if curve.seconds[-1] <= chain.ideal_time:
            limits[-1] += least - most
        useful = limits < limits[-1]
        useful[-1] = True
        return self._marked(Curve(limits[useful], curve.seconds[useful]), inspection.device)

    def display(self) -> str:
        """A table of the stages and what the schedule does with them; ValueError: no plan."""
        return stage_table(self._planned())

    def _write_page(self, path: Path) -> None:
        plan = self._planned()
        path.write_text(chain_page(plan, stage_rows(plan)), encoding="utf-8")

    def _report(self) -> str:
        return plan_report(self._planned())

    def _key(self, arg: Any, targets: Sequence[Any]) -> tuple[Any, tuple[bool, ...]]:
        """What a plan belongs to: what a measure belongs to, and which gradients are missing."""
        tensors = tensors_of(arg)
        if not tensors:
            raise ValueError("the input holds no tensor, expected a tensor or a tuple with tensors")
        kind = tensors[0].device.type
        if self._sharding is not None:
            self._sharding.prepare()
        self._structure.check_dropout()
        required, absent = (self._sharding or self._structure).parameter_flags()
        measured = (
            tuple([(t.shape, t.dtype, t.device, t.requires_grad) for t in tensors]),
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)),
            self._structure.training_flags(),
            required,
            tuple([(t.shape, t.dtype) for t in tensors_of(targets)]) if targets else None,
        )
        return measured, absent

    def _key_of_all(self, arg: Any, targets: Sequence[Any]) -> tuple[Any, bool]:
        """The key of a step of all ranks, and whether one of them has something to learn.

        Raises
        ------
        RankError
            Another rank has no valid input; or the ranks do not have the same parameters without
            gradients.
        """
        if self._ranks is None:
            return self._key(arg, targets), False
        is_behind = not self._inspections or any(p.outdated for p in self._plans.values())
        return together.key_of_all(
            self._ranks, lambda: self._key(arg, targets), self._digests, is_behind
        )

    def _inspect(self, key: Any, arg: Any, targets: Sequence[Any]) -> Inspection:
        stages, sharding, ranks = find_stages(self.module), self._sharding, self._ranks
        problem: Exception | None = None
        try:
            self._check_devices(arg)
            cancel_running()
            memory.meter(tensors_of(arg)[0].device).start().stop()
        except Exception as error:
            problem = error
        if ranks is not None:
            ranks.all_well(problem)
        elif problem is not None and not isinstance(problem, memory.MeterBusyError):
            raise problem
        measuring_class: type[Measuring] = Measuring
        around: AbstractContextManager[None] = nullcontext()
        if sharding is not None:
            stages = sharding.stages(stages)
            measuring_class = together.ShardedMeasuring
            around = together.measuring(sharding, stages)
        earlier = self._measured_alike(key) if ranks is None else None
        inspection = None
        if earlier is not None:
            inspection = with_other_input(earlier, stages, arg, self._observed)
        if inspection is None:
            inspection = self._measured(stages, arg, targets, measuring_class, around)
        if ranks is not None:
            inspection = together.joined(ranks, inspection)
        if sharding is not None:
            inspection = together.with_closing(sharding, inspection)
        merged = [stage.name for stage in inspection.stages if len(stage.names) > 1]
        if merged:
            logger.info("merged because they cannot be cut apart: %s", ", ".join(merged))
        self._inspections[key] = inspection
        self.__dict__.update(
            inspection_values=inspection,
            names=[stage.name for stage in inspection.stages],
            functions=modules_of(inspection.stages),
        )
        return inspection

    def _measured(
        self,
        stages: list[Stage],
        arg: Any,
        targets: Sequence[Any],
        measuring_class: type[Measuring],
        around: AbstractContextManager[None],
    ) -> Inspection:
        with around, progress(len(stages), "measuring the stages") as update:
            return measure(
                stages,
                arg,
                loss_fn=self.loss_fn if targets else None,
                targets=targets,
                progress=update,
                measuring_class=measuring_class,
                observed=self._observed,
            )

    def _chain(self, key: Any, reserve: int | None = None) -> Chain:
        inspection = self._inspections[key[0]]
        inspection = known_growth(self._watches, inspection)
        # A parameter that several stages share gets its gradient in the last of them.
        lacking = (self._sharding or self._structure).lacking_gradient(key[1])
        if self._sharding is None:
            # Autograd adds up what several stages give before it adds that to an existing one.
            lacking |= shared_parameters(inspection.stages)
        missing = []
        for stage in reversed(inspection.stages):
            ids = [id(parameter) for parameter in stage.parameters()]
            missing.append([i in lacking for i in ids])
            lacking.difference_update(ids)
        missing.reverse()
        gradients = None
        if self._sharding is not None:
            gradients = [
                sum(self._sharding.gradient_bytes(stage, m.pgrad_bytes, absent))
                for stage, m, absent in zip(
                    inspection.stages, inspection.measures, missing, strict=True
                )
            ]
        loss_tmp = self._learned_loss.get(key[0]) if reserve is None else reserve
        if loss_tmp is None:
            loss_tmp = loss_reserve(inspection, self.loss_tmp_memory_usage)
        return inspection.chain(
            loss_tmp_bytes=loss_tmp,
            hold_output=inspection.loss_peak_bytes is None,
            rng=self.preserve_rng_state,
            missing=missing,
            gradients=gradients,
        )

    def _beside_bytes(self, inspection: Inspection) -> int:
        if self._sharding is None:
            return 0
        return self._sharding.own_bytes(inspection.stages, inspection.device)

    def _make(self, key: Any, reserve_bytes: int = 0, *, strict: bool = False) -> Plan:
        algorithm = self._algorithm
        if key[0] in self._loaded:
            algorithm = LoadedSequence(self._loaded[key[0]], None if strict else algorithm)
        inspection = self._inspections[key[0]]
        is_given = self.mem_limit is not None
        limit = self._limit_on(inspection.device)
        options = dict(self._options)
        if not isinstance(self.mem_slots, DefaultSlots):
            options.setdefault("mem_slots", self.mem_slots)
        if self._ranks is not None:
            self._share_loss(key[0])
        chain = self._chain(key)
        plain_tail = self._sharding is None

        def plan_under(limit_bytes: int, reserved: int, chain: Chain = chain) -> Plan:
            with progress(1, "computing the schedule") as update:
                return make_plan(
                    inspection,
                    chain,
                    limit_bytes,
                    algorithm,
                    reserve_bytes=reserved,
                    rng=self.preserve_rng_state,
                    options=options,
                    progress=update,
                    beside_bytes=self._beside_bytes(inspection),
                    plain_tail=plain_tail,
                    verify=self.verify,
                )

        is_guessed = (
            key[0] not in self._learned_loss
            and not self.loss_tmp_memory_usage
            and inspection.loss_peak_bytes is None
            and key[0] not in self._loaded
        )
        if self._ranks is None and is_guessed:
            guess = chain.loss_tmp_bytes
            plan, reserved = plan_with_guess(
                lambda loss: plan_under(limit, reserve_bytes, self._chain(key, loss)),
                guess,
                limit,
                min(guess, 0),
            )
            plan.short_bytes = guess - reserved
        elif self._ranks is None:
            plan = plan_under(limit, reserve_bytes)
        else:
            plan = together.plan_once(
                self._ranks,
                plan_under,
                limit,
                reserve_bytes,
                chain,
                inspection,
                plain_tail=plain_tail,
            )
            if not is_given:
                self.__dict__["mem_limit"] = plan.limit_bytes
        logger.info(
            "planned %d stages: predicted peak %s of %s, %.4g s a step, %d stages recomputed",
            len(plan.chain),
            format_bytes(plan.predicted_bytes),
            format_bytes(plan.limit_bytes),
            plan.makespan,
            len(plan.schedule.recomputed),
        )
        self._plans[key] = plan
        self.__dict__.update(_latest=plan, _latest_key=key)
        return plan

    # -- running

    def forward(self, inputs: Any, *, targets: Sequence[Any] = ()) -> Any:
        """The model's output, or its loss where ``loss_fn`` and `targets` are given.

        In training mode with gradients enabled the schedule is followed (and made, the first
        time); otherwise the plain model runs.

        Parameters
        ----------
        inputs
            What the wrapped model takes.
        targets
            With ``loss_fn``: what it takes beside the output.
        """
        if not self._checked_call(targets):
            return self._with_loss(self.module.forward(inputs), targets)
        self._check_structure()
        key, is_one_behind = self._key_of_all(inputs, targets)
        plan = self._plans.get(key)
        wants_measure = key[0] not in self._inspections
        wants_plan = plan is None or plan.outdated
        if self._ranks is not None and (is_one_behind or wants_plan):
            wanted = self._ranks.exchange_ints(wants_measure, wants_plan)
            wants_measure, wants_plan = (any(column) for column in zip(*wanted, strict=True))
        if wants_measure and wants_plan:
            try:
                self._inspect(key[0], inputs, targets)
            except NeedsGraph as found:
                self._become_graph(str(found))
                return self.forward(inputs, targets=targets)
        if plan is None or wants_plan:
            plan = self._replanned(key)
        self.__dict__["_latest"] = plan
        return self._step(plan, inputs, targets)

    def _check_structure(self) -> None:
        if not self._structure.is_current() or _fsdp.is_unit(self) != self._is_unit:
            self._look()

    def _step(self, plan: Plan, inputs: Any, targets: Sequence[Any]) -> Any:
        self._note_pending(plan)
        proof = self._proof_of(plan)
        meter = self._start_meter(plan)
        watch = stage_watch(self, plan) if meter is None else None
        output = run_chain(
            plan.inspection.stages if watch is None else watch.stages,
            plan.schedule,
            inputs,
            preserve_rng_state=self.preserve_rng_state,
            flags=plan.inspection.flags,
            started=self._started,
            run_class=Run if self._sharding is None else ShardedRun,
            proof=proof,
        )
        if proof is not None:
            proof.begin_with(output)
        if meter is not None:
            meter.forward_done(output)
        if watch is not None:
            watch.forward_done(output)
        return self._with_loss(output, targets)

    def _started(self, run: Run) -> None:
        self.__dict__["_pending"] = weakref.ref(run)

    def _note_pending(self, plan: Plan) -> None:
        pending = self._pending() if self._pending is not None else None
        if pending is not None and not pending.is_done():
            self._warn_pending(plan.limit_bytes)

    def _learn(self, plan: Any, step: StepBytes) -> None:
        if self._sharding is not None:
            # The model's own unit is gathered before the forward begins.
            step = step.shifted(self._sharding.base_bytes(plan.device))
            if plan.earlier is not None:
                step = replace(
                    step,
                    peak_bytes=min(step.peak_bytes, plan.earlier.peak_bytes),
                    loss_bytes=max(step.loss_bytes, plan.earlier.loss_bytes),
                )
            elif step.peak_bytes > plan.limit_bytes or self._loss_of(plan, step) < (
                plan.chain.loss_tmp_bytes
            ):
                # On the CPU, threads of gloo give buffers back late: another step confirms it.
                plan.earlier = step
                return
        super()._learn(plan, step)

    def _warn_over(self, plan: Any, least_bytes: int) -> None:
        if self._ranks is None or (plan.measured_bytes or 0) > plan.limit_bytes:
            super()._warn_over(plan, least_bytes)

    def _learn_loss(self, key: Any, plan: Plan, step: StepBytes) -> bool:
        learned = self._loss_of(plan, step)
        if learned == plan.chain.loss_tmp_bytes:
            return False
        if self._ranks is not None and plan.meterings > 1 and learned < plan.chain.loss_tmp_bytes:
            # Another rank's loss needs more.
            return False
        self._learned_loss[key[0]] = learned
        return True

    @staticmethod
    def _loss_of(plan: Plan, step: StepBytes) -> int:
        """Bytes of the loss in a metered step, as `Chain.loss_tmp_bytes` counts them."""
        if plan.inspection.loss_peak_bytes is not None:
            return plan.chain.loss_tmp_bytes
        # Another step may hold the output longer than this one did.
        released = 0 if step.output_held else plan.inspection.output_bytes
        return step.loss_bytes + released - plan.inspection.output_grad_bytes

    def _repriced(self, key: Any, plan: Plan) -> int:
        corrected = Schedule(plan.sequence.codes, self._chain(key))
        return corrected.peak_bytes - plan.chain.x_bytes[0] + plan.own_bytes
