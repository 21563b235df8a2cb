"""`Checkpointable`: a model that trains within a memory limit."""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from rotor import _torch, memory
from rotor.algorithms import Persistent
from rotor.algorithms.curve import Curve
from rotor.algorithms.sequence import Sequence as Schedule
from rotor.algorithms.utils import DynamicAlgorithm, checked_slots
from rotor.chain import Chain
from rotor.errors import InfeasibleError, MemoryLimitWarning
from rotor.executor import Run, run_chain
from rotor.inspection import Inspection, measure
from rotor.metering import StepBytes, StepMeter, cancel_running
from rotor.plan import Plan, loss_reserve, make_plan, own_bytes
from rotor.progress import progress
from rotor.report.text import plan_report, stage_table
from rotor.stages import Structure, find_stages, refuse_sharded
from rotor.transparent import TransparentModule
from rotor.units import format_bytes, parse_bytes
from rotor.values import tensors_of

logger = logging.getLogger("rotor")

_ENGINES = ("auto", "chain", "graph", "dynamic")
_METERED_STEPS = 3


class _DefaultSlots(int):
    """The 500 slots that nobody asked for."""


_DEFAULT_SLOTS = _DefaultSlots(500)


class Checkpointable(TransparentModule):
    """A model that trains as before, in a given number of bytes.

    Parameters
    ----------
    model
        An ``nn.Sequential``; nested ones are explored.
    custom_input
        A sample of the input: the model is measured, and a schedule computed, at once. Without
        it, the first training forward does both.
    mem_limit
        The most that one training step (forward, loss, backward) may have allocated on the
        model's device at any moment above the level at which its forward began: bytes, or text
        such as "700MiB". ``None``: 90 % of what is free when the first training forward begins.
    mem_slots
        Plan on this many slots of memory. Where nobody gives a number, the exact solver is used
        where that is cheap, and 500 slots otherwise.
    verbosity
        0: warnings, 1: what is done, 2: details; sets the level of ``logging.getLogger("rotor")``.
    preserve_rng_state
        Recompute with the random numbers of the first forward.
    loss_tmp_memory_usage
        Bytes that the loss needs beside the gradient of the output; by default 4 times the
        output, its gradient included, is set aside until the first step has been metered.
    engine
        "auto" or "chain".
    loss_fn
        ``loss_fn(output, *targets)``: the loss becomes part of the plan, and
        ``model(x, targets=(t,))`` returns it.

    Attributes
    ----------
    module
        The wrapped model.
    names, functions
        The stages, by name and as callables; as measured once there is a measure.
    inspection_values
        The last measure, ``None`` before one.

    Raises
    ------
    TypeError, ValueError
        The model is no ``nn.Sequential``; the limit is not a positive number of bytes.
    InfeasibleError
        No schedule fits in the limit; ``minimum_bytes`` is the least that one fits in.

    Notes
    -----
    Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova: Optimal checkpointing for heterogeneous
    chains, hal-02352969. The memory model is described in docs/memory-model.md.
    """

    loss_fn: Callable[..., torch.Tensor] | None
    mem_limit: int | None
    _algorithm: DynamicAlgorithm
    _inspections: dict[Any, Inspection]
    _plans: dict[Any, Plan]
    _latest: Plan | None
    _structure: Structure
    _learned_loss: dict[Any, int]

    def __init__(
        self,
        model: nn.Module,
        custom_input: Any = None,
        mem_limit: int | str | None = None,
        mem_slots: int = _DEFAULT_SLOTS,
        verbosity: int = 0,
        preserve_rng_state: bool = True,
        loss_tmp_memory_usage: int = 0,
        *,
        engine: str = "auto",
        loss_fn: Callable[..., torch.Tensor] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
        if engine not in _ENGINES:
            raise ValueError(f"unknown engine {engine!r}, expected one of {', '.join(_ENGINES)}")
        if engine in ("graph", "dynamic"):
            raise ValueError(f'engine={engine!r} is not part of this release: use engine="chain"')
        limit = None if mem_limit is None else parse_bytes(mem_limit)
        if mem_slots is not _DEFAULT_SLOTS:
            mem_slots = checked_slots(mem_slots)
        if loss_tmp_memory_usage:
            loss_tmp_memory_usage = parse_bytes(loss_tmp_memory_usage, name="loss_tmp_memory_usage")
        stages = find_stages(model)
        refuse_sharded(model)
        super().__init__(model)
        self.__dict__.update(
            names=[stage.name for stage in stages],
            functions=list(stages),
            mem_limit=limit,
            mem_slots=mem_slots,
            verbosity=verbosity,
            preserve_rng_state=preserve_rng_state,
            loss_tmp_memory_usage=loss_tmp_memory_usage,
            inspection_values=None,
            loss_fn=loss_fn,
            _algorithm=Persistent(),
            _options={},
            _structure=Structure(model),
            _inspections={},
            _plans={},
            _latest=None,
            _latest_key=None,
            _learned_loss={},
            _pending=None,
            _warned=set(),
        )
        _set_verbosity(verbosity)
        if custom_input is not None:
            self.measure(custom_input)
            self.compute_sequence()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_pending": None}

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
                key = self._key(custom_input, targets)
                self._inspections.pop(key[0], None)
                for plan_key in [k for k in self._plans if k[0] == key[0]]:
                    del self._plans[plan_key]
                inspection = self._inspect(key[0], custom_input, targets)
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
        algo: DynamicAlgorithm | type[DynamicAlgorithm] | None = None,
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
            An algorithm of `rotor.algorithms`, ``Persistent()`` by default.
        **algo_kwargs
            Given to the class where `algo` is one, else to its ``solve``.

        Returns
        -------
        Sequence
            The schedule, priced by the simulator on `build_chain`.

        Raises
        ------
        ValueError
            Nothing was measured; two different limits are given; InfeasibleError (a ValueError)
            when no schedule fits.
        """
        if custom_mem_limit_bytes is not None and mem_limit is not None:
            raise ValueError("give the limit once: mem_limit= or custom_mem_limit_bytes=")
        given = custom_mem_limit_bytes if mem_limit is None else mem_limit
        limit = self.mem_limit if given is None else parse_bytes(given)
        slots = self.mem_slots if mem_slots is None else checked_slots(mem_slots)
        key = self._measured_key()
        before = (self._algorithm, self._options, self.mem_limit, self.mem_slots, self._plans)
        algorithm, options = self._algorithm, self._options
        if algo is not None or algo_kwargs:
            if isinstance(algo, type):
                algorithm, options = algo(**algo_kwargs), {}
            else:
                algorithm, options = algo or Persistent(), algo_kwargs
        self.__dict__.update(
            _algorithm=algorithm, _options=options, mem_limit=limit, mem_slots=slots, _plans={}
        )
        try:
            plan = self._make(key)
        except BaseException:
            names = ("_algorithm", "_options", "mem_limit", "mem_slots", "_plans")
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
            own_bytes(inspection, [count] * len(chain), rng=self.preserve_rng_state)
            for count in (3, 1)
        )
        limits = curve.bytes - chain.x_bytes[0] + most
        if curve.seconds[-1] <= chain.ideal_time:
            limits[-1] += least - most
        useful = limits < limits[-1]
        useful[-1] = True
        return Curve(limits[useful], curve.seconds[useful])

    def get_expected_memory(self) -> int:
        """Predicted peak of a step, in bytes above the level at its start; ValueError: no plan."""
        return self._planned().predicted_bytes

    def get_expected_makespan(self) -> float:
        """Predicted seconds of a step, forward and backward; ValueError: no plan."""
        return self._planned().makespan

    def display(self) -> str:
        """A table of the stages and what the schedule does with them; ValueError: no plan."""
        return stage_table(self._planned())

    def report(self) -> str:
        """Limit, predicted and measured peak, and time, as text; ValueError: no plan."""
        return plan_report(self._planned())

    def _planned(self) -> Plan:
        if self._latest is None:
            raise ValueError("no schedule was computed: call compute_sequence(), or train a step")
        return self._latest

    def _measured_key(self) -> Any:
        if self._latest_key is None:
            raise ValueError("nothing was measured: call measure(sample), or train a step")
        return self._latest_key

    def _key(self, arg: Any, targets: Sequence[Any]) -> tuple[Any, tuple[bool, ...]]:
        """What a plan belongs to: what a measure belongs to, and which gradients are missing."""
        tensors = tensors_of(arg)
        if not tensors:
            raise ValueError("the input holds no tensor, expected a tensor or a tuple with tensors")
        kind = tensors[0].device.type
        required, absent = self._structure.parameter_flags()
        measured = (
            tuple([(t.shape, t.dtype, t.device, t.requires_grad) for t in tensors]),
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)),
            self._structure.training_flags(),
            required,
            tuple([(t.shape, t.dtype) for t in tensors_of(targets)]) if targets else None,
        )
        return measured, absent

    def _inspect(self, key: Any, arg: Any, targets: Sequence[Any]) -> Inspection:
        stages = find_stages(self.module)
        refuse_sharded(self.module)
        self._check_devices(arg)
        loss_fn = self.loss_fn if targets else None
        cancel_running()
        with progress(len(stages), "measuring the stages") as update:
            inspection = measure(stages, arg, loss_fn=loss_fn, targets=targets, progress=update)
        merged = [stage.name for stage in inspection.stages if len(stage.names) > 1]
        if merged:
            logger.info("merged because they cannot be cut apart: %s", ", ".join(merged))
        self._inspections[key] = inspection
        self.__dict__.update(
            inspection_values=inspection,
            names=[stage.name for stage in inspection.stages],
            functions=list(inspection.stages),
        )
        return inspection

    def _check_devices(self, arg: Any) -> None:
        devices = {t.device for t in tensors_of(arg)}
        for name, parameter in self.module.named_parameters():
            if parameter.device not in devices:
                raise ValueError(
                    f"the input is on {', '.join(sorted(map(str, devices)))} and parameter {name} "
                    f"is on {parameter.device}: move the input, or the model, with .to(device)"
                )

    def _chain(self, key: Any) -> Chain:
        inspection = self._inspections[key[0]]
        # A parameter that several stages share gets its gradient in the last of them.
        lacking = self._structure.lacking_gradient(key[1])
        missing = []
        for stage in reversed(inspection.stages):
            ids = [id(parameter) for parameter in stage.parameters()]
            missing.append([i in lacking for i in ids])
            lacking.difference_update(ids)
        loss_tmp = self._learned_loss.get(key[0])
        if loss_tmp is None:
            loss_tmp = loss_reserve(inspection, self.loss_tmp_memory_usage)
        return inspection.chain(
            loss_tmp_bytes=loss_tmp,
            hold_output=inspection.loss_peak_bytes is None,
            rng=self.preserve_rng_state,
            missing=missing[::-1],
        )

    def _make(self, key: Any, reserve_bytes: int = 0) -> Plan:
        inspection = self._inspections[key[0]]
        limit = self.mem_limit
        if limit is None:
            limit = memory.free_bytes(inspection.device) * 9 // 10
            self.__dict__["mem_limit"] = limit
            logger.info("no limit was given: 90 %% of free memory, %s", format_bytes(limit))
        options = dict(self._options)
        if not isinstance(self.mem_slots, _DefaultSlots):
            options.setdefault("mem_slots", self.mem_slots)
        with progress(1, "computing the schedule") as update:
            plan = make_plan(
                inspection,
                self._chain(key),
                limit,
                self._algorithm,
                reserve_bytes=reserve_bytes,
                rng=self.preserve_rng_state,
                options=options,
                progress=update,
            )
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
        if targets and self.loss_fn is None:
            raise ValueError("targets are for a loss: give Checkpointable(..., loss_fn=) too")
        if not (self.module.training and torch.is_grad_enabled()):
            return self._with_loss(self.module.forward(inputs), targets)
        if _torch.in_functorch():
            raise RuntimeError(
                "torch.func transforms (grad, vmap, functional_call inside them) cannot go through "
                "a schedule that recomputes: apply them to the plain model, chk.module"
            )
        if not self._structure.is_current():
            self._forget()
        key = self._key(inputs, targets)
        plan = self._plans.get(key)
        if plan is None or plan.outdated:
            plan = self._plan_for(key, inputs, targets)
        self.__dict__["_latest"] = plan
        return self._step(plan, inputs, targets)

    def _with_loss(self, output: Any, targets: Sequence[Any]) -> Any:
        return self.loss_fn(output, *targets) if targets and self.loss_fn else output

    def _forget(self) -> None:
        stages = find_stages(self.module)
        self.__dict__.update(
            _structure=Structure(self.module),
            _inspections={},
            _plans={},
            _latest_key=None,
            names=[stage.name for stage in stages],
            functions=list(stages),
        )

    def _plan_for(self, key: Any, inputs: Any, targets: Sequence[Any]) -> Plan:
        old = self._plans.get(key)
        if key[0] not in self._inspections:
            self._inspect(key[0], inputs, targets)
        if old is None:
            return self._make(key)
        try:
            plan = self._make(key, old.reserve_bytes)
        except InfeasibleError as error:
            old.outdated = False
            self._warn_over(old, error.minimum_bytes)
            return old
        plan.meterings = old.meterings
        return plan

    def _step(self, plan: Plan, inputs: Any, targets: Sequence[Any]) -> Any:
        self._note_pending(plan)
        meter = self._start_meter(plan)
        output = run_chain(
            plan.inspection.stages,
            plan.schedule,
            inputs,
            preserve_rng_state=self.preserve_rng_state,
            flags=plan.inspection.flags,
            started=self._started,
        )
        if meter is not None:
            meter.forward_done(output)
        return self._with_loss(output, targets)

    def _started(self, run: Run) -> None:
        self.__dict__["_pending"] = weakref.ref(run)

    def _note_pending(self, plan: Plan) -> None:
        pending = self._pending() if self._pending is not None else None
        if pending is not None and not pending.is_done():
            self._warn_once(
                "pending",
                "a forward began while the backward of an earlier one was still to come: each "
                f"keeps its own limit's worth of memory ({format_bytes(plan.limit_bytes)})",
            )

    def _warn_once(self, name: str, message: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            warnings.warn(message, MemoryLimitWarning, stacklevel=5)

    # -- metering the first steps of a plan

    def _start_meter(self, plan: Plan) -> StepMeter | None:
        if plan.measured_bytes is not None or plan.meterings >= _METERED_STEPS:
            return None
        myself = weakref.ref(self)

        def done(step: StepBytes) -> None:
            model = myself()
            if model is not None:
                model._learn(plan, step)

        try:
            gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
            return StepMeter(plan.inspection.device, done, gradients)
        except memory.MeterBusyError as error:
            self._warn_once("busy", f"this step's memory was not measured: {error}")
            return None

    def _warn_over(self, plan: Plan, least_bytes: int) -> None:
        self._warn_once(
            "over",
            f"the limit of {plan.limit_bytes} bytes could not be kept: the step needed "
            f"{plan.measured_bytes} bytes, {plan.predicted_bytes} were predicted. Something "
            "outside the model, such as the loss, allocates during the step; a limit of "
            f"{least_bytes} bytes would do, and loss_fn= makes the loss part of the plan",
        )

    def _learn(self, plan: Plan, step: StepBytes) -> None:
        """Compare a metered step with its plan; have it made again where that helps."""
        plan.measured_bytes = step.peak_bytes
        plan.meterings += 1
        over = step.peak_bytes - plan.limit_bytes
        logger.info(
            "measured peak %s, predicted %s, limit %s",
            format_bytes(step.peak_bytes),
            format_bytes(plan.predicted_bytes),
            format_bytes(plan.limit_bytes),
        )
        key = next((k for k, p in self._plans.items() if p is plan), None)
        captured = plan.inspection.loss_peak_bytes is not None
        # Another step may hold the output longer than this one did.
        released = 0 if step.output_held else plan.inspection.output_bytes
        learned = step.loss_bytes + released - plan.inspection.output_grad_bytes
        new_loss = not captured and learned != plan.chain.loss_tmp_bytes
        if key is None:
            return
        if new_loss:
            self._learned_loss[key[0]] = learned
        if plan.meterings >= _METERED_STEPS:
            if over > 0:
                self._warn_over(plan, step.peak_bytes)
            return
        if over > 0 or new_loss:
            corrected = Schedule(plan.sequence.codes, self._chain(key))
            explained = corrected.peak_bytes - plan.chain.x_bytes[0] + plan.own_bytes
            plan.reserve_bytes = max(plan.reserve_bytes, step.peak_bytes - explained)
            plan.outdated = True


def _set_verbosity(verbosity: int) -> None:
    if verbosity <= 0:
        return
    logger.setLevel(logging.INFO if verbosity == 1 else logging.DEBUG)
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
