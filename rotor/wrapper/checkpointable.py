"""`Checkpointable`: a model that trains within a memory limit."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from rotor._pytorch import core, traces
from rotor.algorithms.curve import Curve
from rotor.algorithms.utils import checked_slots
from rotor.common.background import checked_planning
from rotor.common.calls import NO_TARGETS, targets_of
from rotor.common.checksums import checked_verify
from rotor.common.model_state import planned_module
from rotor.common.ranks import Ranks
from rotor.engines.contract import Call, Settings
from rotor.engines.graph.calls import checked_counts, takes_targets
from rotor.meter import allocator as memory
from rotor.meter.room import checked_total
from rotor.tier.interface import Tier
from rotor.tier.offload import checked_offload
from rotor.tier.weights import Weights
from rotor.units import parse_bytes
from rotor.wrapper.announcing import heard
from rotor.wrapper.driver import Driver
from rotor.wrapper.registry import ENGINES
from rotor.wrapper.reporting import ReportingModule
from rotor.wrapper.setting import (
    Setting,
    away_state,
    check_backend,
    check_names,
    checked_limit,
    checked_loss,
    checked_loss_bytes,
    checked_verbosity,
    plan_anew,
)
from rotor.wrapper.transparent import ShownForward, own_call_of, shown
from rotor.wrapper.usage_warnings import warn_of_forward

_NOT_COMPILED = (
    "a model with a limit runs its own plan, which torch.compile leaves as it is: "
    'rotor.Checkpointable(model, backend="inductor") compiles plans'
)


class _AbsentError(AttributeError, ValueError):
    """Absence of an attribute that no plan has set: for ``hasattr`` it does not exist."""


class Checkpointable(ReportingModule):
    """Model that trains as before, in a given number of bytes.

    Parameters
    ----------
    model
        Any module. An ``nn.Sequential`` is planned as a chain of stages (nested ones are explored);
        everything else as a captured graph of operations.
    custom_input
        A sample of the input: the model is measured, and a plan made, at once; for graphs a tuple
        stands for several arguments, a dictionary for keyword arguments. Without it, the first
        training forward does both.
    mem_limit
        Most bytes that one training step (forward, loss, backward) may have allocated on the
        model's device at any moment above the level at which its forward began: bytes, or text
        such as "700MiB". Parameters, optimizer states and gradients that exist are not in it.
        ``None``: 90 % of what is free, divided by the processes of ``torchrun`` that share it,
        less the optimizer states still to come.
    mem_slots
        Number of memory slots that chains are planned on. Without a number, the exact
        solver is used if it is cheap, and 500 slots otherwise.
    verbosity
        0: warnings, and one line when the first plan is run, and when another one took long; -1:
        warnings alone; 1: what is done, 2: details. The level of ``logging.getLogger("rotor")``
        while this model is at work.
    preserve_rng_state
        Recompute with the random numbers of the first forward.
    loss_tmp_memory_usage
        Bytes that the loss needs beside the gradient of the output; by default 4 times the
        output, its gradient included, is set aside until the first step has been metered.
    engine
        "auto", "chain", "graph", or "dynamic": the model runs unplanned, and when memory gets short
        results are evicted and computed again. "auto" takes, for an ``nn.Sequential``, the chain or
        the graph, whichever recomputes less; `compute_sequence` computes the chain's schedule.
    loss_fn
        ``loss_fn(output, *targets)``: the loss becomes part of the plan, and
        ``model(x, targets=(t,))`` returns it.
    profile
        For graphs, the costs of operations: "measured" runs each distinct one here; a
        `rotor.graph.Machine` estimates them, a `rotor.graph.Profile`, or the path of one, holds
        measures of another machine: then nothing is run before the first step.
    backend
        For graphs, what runs their operations: "fx", PyTorch's own operators, "inductor", which
        fuses and compiles them before planning: each kernel is one operation, or "auto", which
        measures both, and keeps to the faster one at all limits (docs/graph.md).
    verify
        Steps in which recomputed values are compared, bit for bit, with the values computed
        first: "first", the first 3 of every plan; "always"; a number n, every n-th too; "off".
        After a difference the backward raises `rotor.RecomputationError`.
    planning
        For captured graphs that are planned by a training step: "background" runs the first step
        after a short search, and looks for better plans while training runs; "before" searches
        before the first step, so that a seed gives one plan. `custom_input`, `measure` and
        `compute_sequence` always search at once.
    counts
        Bytes that the limit counts on an accelerator: "allocated", the ones in tensors and
        workspaces, or "reserved", the ones that the caching allocator takes from the device for
        them (docs/gpu.md). Reserved bytes are planned for captured graphs.
    offload
        Second tier of memory, to which a step may move values instead of keeping or recomputing
        them: "disk" or "disk:FOLDER" for a file on a disk (`rotor.tier.DiskTier`), "host" for
        pinned memory of the host, or a `rotor.tier.Tier` of your own. The model is then captured as
        one graph, in parts, or as sharded blocks (docs/offload.md), or run by the dynamic engine
        (docs/dynamic.md). ``None``: no tier.
    offload_limit
        Most bytes that a step may have on the tier, or text such as "16GiB"; by default any.
    host_limit
        Most bytes of the host's memory with ``offload="host"``, or text such as "64GiB"; by default
        any. What has no room there goes to a file, in the folder of "host:FOLDER" if it is named
        (`rotor.tier.LayeredTier`).
    offload_state
        Optimizer of the model, or a list of several: parameters, gradients and states live in the
        tier then, and `mem_limit` counts those in memory (docs/larger-than-memory.md).
    update
        "device" or "host": where the optimizer computes with `offload_state`; by default the host
        where the tier is its memory. The bits of an update depend on it.
    weights
        Values of parameters and buffers on the meta device, with `offload_state`: the path of a
        safetensors file or a folder of them, a mapping from names to tensors, or a function of a
        name. They go to the tier one after the other.
    total_limit
        Most bytes that this process may hold on the device, as ``nvidia-smi`` counts them, or
        "card": all that others leave. What a step may take of it is what parameters, optimizer
        states (those still to come too) and others leave (docs/out-of-memory.md). With `mem_limit`
        too, the smaller limit holds.
    **options
        For graphs: ``effort``, ``seed`` and ``time_limit`` of `rotor.graph.plan`. With
        ``engine="auto"`` an ``nn.Sequential`` takes them too, and they have an effect only where
        it is planned as a graph.

    Attributes
    ----------
    module
        The wrapped model.
    mem_limit
        Limit of a step in bytes, ``None`` before it is known; a new one may have any form.
    mem_slots, verbosity, loss_tmp_memory_usage, verify, planning, total_limit, offload_state
        Values of the arguments; new ones, also of `mem_limit`, hold from the next step on.
    preserve_rng_state, engine, loss_fn, backend, counts
        Values of the arguments, which cannot be changed.
    offload
        Second tier and its link; ``None`` without one.
    plan, plans
        Latest plan, run or made, ``None`` before one; and every plan, by kind of step.
    names, functions, inspection_values, chain, sequence, all_values
        Of an ``nn.Sequential`` that is planned as a chain: its stages, the latest measure, the cost
        model and the schedule. ``model.sequence = s`` is ``model.load_plan(s)``.
    graph, program
        Of a captured graph: the cost model, and the program.

    Raises
    ------
    TypeError, ValueError
        The model is no module, or no ``nn.Sequential`` with ``engine="chain"``; the limit is not a
        positive number of bytes.
    InfeasibleError
        No plan fits in the limit; ``minimum_bytes`` is the least limit with a plan.

    Notes
    -----
    Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova: Optimal checkpointing for heterogeneous
    chains, hal-02352969. The memory model is described in docs/memory-model.md.
    """

    _shown_name = "Checkpointable"
    _settings_class: ClassVar[type[Settings]] = Settings
    mem_limit = Setting(checked_limit, plan_anew, "present_limit")
    total_limit = Setting(checked_total, plan_anew)
    mem_slots = Setting(checked_slots, plan_anew, "shown_slots")
    verbosity = Setting(checked_verbosity)
    preserve_rng_state = Setting()
    loss_tmp_memory_usage = Setting(checked_loss_bytes, plan_anew)
    engine = Setting()
    loss_fn = Setting()
    backend = Setting()
    verify = Setting(checked_verify)
    planning = Setting(checked_planning)
    counts = Setting()
    offload = Setting()
    offload_state = Setting(lambda optimizer: optimizer, plan_anew)

    def __init__(
        self,
        model: nn.Module,
        custom_input: Any = None,
        mem_limit: int | str | None = None,
        mem_slots: int | None = None,
        verbosity: int = 0,
        preserve_rng_state: bool = True,
        loss_tmp_memory_usage: int = 0,
        *,
        engine: str = "auto",
        loss_fn: Callable[..., torch.Tensor] | None = None,
        profile: Any = "measured",
        backend: str = "fx",
        verify: str | int = "first",
        planning: str = "background",
        counts: str = "allocated",
        offload: str | Tier | None = None,
        offload_limit: int | str | None = None,
        host_limit: int | str | None = None,
        offload_state: torch.optim.Optimizer | list[torch.optim.Optimizer] | None = None,
        update: str | None = None,
        weights: Weights | None = None,
        total_limit: int | str | None = None,
        **options: Any,
    ) -> None:
        module = planned_module(model)
        if engine not in ENGINES:
            raise ValueError(f"unknown engine {engine!r}, expected one of {', '.join(ENGINES)}")
        check_backend(backend, engine, model)
        check_names(options, [*inspect.signature(Checkpointable.__init__).parameters][2:-1])
        settings = self._settings_class(
            module,
            mem_limit=checked_limit(mem_limit),
            total_limit=checked_total(total_limit),
            mem_slots=None if mem_slots is None else checked_slots(mem_slots),
            verbosity=checked_verbosity(verbosity),
            preserve_rng_state=preserve_rng_state,
            loss_tmp_memory_usage=checked_loss_bytes(loss_tmp_memory_usage),
            engine=engine,
            loss_fn=checked_loss(loss_fn),
            profile=profile,
            backend=backend,
            verify=checked_verify(verify),
            planning=checked_planning(planning),
            counts=checked_counts(counts, engine),
            offload=checked_offload(offload, offload_limit, engine, host_limit),
            options=options,
        )
        settings.away = away_state(settings, offload_state, update, weights)
        super().__init__(model)
        self.__dict__["_driver"] = Driver(settings, self)
        if custom_input is not None:
            self.measure_sample(custom_input)
            self.compute_sequence()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "forward" in cls.__dict__:
            cls.forward = core.untraced(cls.forward, _NOT_COMPILED)  # type: ignore[method-assign]

    def __getstate__(self) -> dict[str, Any]:
        self._driver.check_portable()
        return super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._driver.attach(self)

    def __repr__(self) -> str:
        return f"{self._shown_name}({self.module!r})"

    def __getattr__(self, name: str) -> Any:
        module = self.__dict__.get("module")
        if name in self._published:
            try:
                return getattr(self._driver.engines[0], name)
            except ValueError as error:
                raise _AbsentError(*error.args) from None
        if name == "model" and module is not None:
            # Published: the wrapped model, unless the model has an attribute of that name.
            return getattr(module, name, module)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "sequence" and name in self._published:
            self.load_plan(value)
        elif name in self._published:
            raise AttributeError(
                f"{name} of a model with a limit is read-only: measure() and compute_sequence() "
                "make it anew, load_plan() takes a schedule or a program of your own, and the "
                "wrapped model, with attributes of its own, is model.module"
            )
        else:
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._published})

    @property
    def _published(self) -> frozenset[str]:
        """Names of the engine's attributes."""
        driver = self.__dict__.get("_driver")
        return frozenset() if driver is None else driver.engines[0].published

    @property
    def planned_as(self) -> str:
        """Form in which steps are planned: "chain", "graph", "blocks" or "dynamic"."""
        return self._driver.engines[0].name

    # -- measuring and planning

    @property
    def plan(self) -> Any:
        """Latest plan, run or made; ``None`` before one."""
        return self._driver.context.latest

    @property
    def plans(self) -> Mapping[Any, Any]:
        """Every plan, by kind of step."""
        return self._driver.context.plans

    @property
    def limits(self) -> dict[str, int] | None:
        """Sum from which the limit of a step follows, as of the latest plan.

        Bytes of "context", "parameters", "gradients", "optimizer", "other", "optimizer_to_come",
        "slack" and "step". ``None`` before a plan, and with a `mem_limit` alone. With `host_limit`
        also the bytes "in_host", in use there, and "beneath", on the disk.
        """
        return self._driver.limits.bytes_by_name()

    @property
    def homes(self) -> dict[str, int] | None:
        """Bytes of a model with `offload_state`; ``None`` for others.

        Of "parameters", "gradients" and "states" in the second tier; of what is "resident": in
        memory all the time, and counted by `mem_limit`; "update_reads" and "update_writes" are
        moved by one step of the optimizer.
        """
        away = self._driver.settings.away
        return None if away is None else away.bytes_by_name()

    @heard
    def measure(self, *args: Any, targets: Any = NO_TARGETS, **kwargs: Any) -> Any:
        """Measure a training step on a sample of the arguments.

        The model keeps its parameters, gradients, buffers, random states and training flags. The
        model is measured in training mode: a chain stage by stage, a graph by capturing it and
        running each of its operations, blocks of a sharded model on all ranks at once; under the
        dynamic engine, a step runs within the limit.

        Parameters
        ----------
        *args, **kwargs
            Arguments of the model; a chain takes one input.
        targets
            With ``loss_fn``: its arguments after the output, or the only one.

        Returns
        -------
        Inspection, CapturedStep or None
            The measure of a chain, or of a graph; ``None`` if no single one exists: a warning
            names the reason, and the engine that runs instead.

        Raises
        ------
        ValueError
            The input is on another device than the model, holds no tensor, or is changed in place
            by the first stage; nothing in the step needs a gradient.
        TypeError
            A stage returns something other than tensors; the model does not take such arguments.
        CaptureError
            No single graph exists, with ``engine="graph"``; the message has the reason and the
            line of code.
        InfeasibleError
            The step does not fit in the limit, with ``engine="dynamic"``.
        """
        takes_one = self._driver.engines[0].takes_one
        return self._driver.measure(Call.of(args, kwargs, targets_of(targets), is_one=takes_one))

    @heard
    def measure_sample(self, sample: Any) -> Any:
        """Measure on a sample in the form that the constructor takes.

        For chains it is the input; else a tuple stands for several arguments, a dictionary for
        keyword arguments.
        """
        takes_one = self._driver.engines[0].takes_one
        return self._driver.measure(Call.of_sample(sample, is_one=takes_one))

    @heard
    def compute_sequence(
        self,
        custom_mem_limit_bytes: int | str | None = None,
        mem_slots: int | None = None,
        algo: Any = None,
        *,
        mem_limit: int | str | None = None,
        **options: Any,
    ) -> Any:
        """Plan the following steps, under the limit given here or before.

        Parameters
        ----------
        custom_mem_limit_bytes, mem_limit
            The limit, by its published name or by ours; by default the previous one.
        mem_slots
            Plan a chain on this many slots; graphs are planned in bytes.
        algo
            For chains, an algorithm of `rotor.algorithms`, its class, or its name such as
            "floating"; ``Persistent()`` by default. It makes all plans up to the next call.
        **options
            For chains, given to the class if `algo` is one or a name, else to its ``solve``. For
            graphs ``effort``, ``seed`` and ``time_limit`` of `rotor.graph.plan`. Under the dynamic
            engine ``heuristic``, ``seed``, ``strict``, ``sample``, ``ignore_small`` and
            ``storage_swap`` of `rotor.dtr.budget`.

        Returns
        -------
        Sequence, Program or None
            The schedule of a chain, or the program of a graph, priced by the simulator; ``None``
            if no single one exists.

        Raises
        ------
        ValueError
            Nothing was measured; two different limits are given; no algorithm has that name;
            InfeasibleError (a ValueError) when no plan fits.
        """
        if custom_mem_limit_bytes is not None and mem_limit is not None:
            raise ValueError("give the limit once: mem_limit= or custom_mem_limit_bytes=")
        given = custom_mem_limit_bytes if mem_limit is None else mem_limit
        limit = None if given is None else parse_bytes(given)
        slots = None if mem_slots is None else checked_slots(mem_slots)
        return self._driver.compute(limit, options, (algo, slots))[1]

    @heard
    def plan_step(self, mem_limit: int | str | None = None, **options: Any) -> Any:
        """Plan the following steps as training does; return the plan.

        Where `compute_sequence` asks for the schedule of a chain, this is the choice of
        ``engine="auto"``: of a chain, a graph, parts or blocks the one that runs.

        Parameters
        ----------
        mem_limit
            The limit; by default the previous one.
        **options
            For graphs ``effort``, ``seed`` and ``time_limit`` of `rotor.graph.plan`.

        Returns
        -------
        Plan or None
            With ``engine``, ``predicted_bytes`` and ``makespan``; ``None`` where the dynamic
            engine decides while a step runs.

        Raises
        ------
        ValueError
            Nothing was measured; InfeasibleError (a ValueError) when no plan fits.
        """
        limit = None if mem_limit is None else parse_bytes(mem_limit)
        return self._driver.compute(limit, options)[0]

    @heard
    def curve(self, points: int = 40, *, training: bool = False) -> Curve:
        """Return step time against limit, for all limits; the model's input is not counted.

        With `offload_state` limits hold the resident bytes too (`homes`), and times no update.

        Its picture, `Curve.plot`, marks the limit, the point without recomputation, and the
        device's free memory. Plain PyTorch recomputes nothing either; a captured graph may need
        less all the same.

        Parameters
        ----------
        points
            Number of limits tried, for graphs; of a chain every point is known.
        training
            True: of the plans that training makes (`plan_step`), with ``engine="auto"`` the best of
            a Sequential's chain, graph and parts; by default of its chain.

        Returns
        -------
        Curve
            Limits in bytes and seconds of a step, in rising order of the limits.

        Raises
        ------
        ValueError
            Nothing was measured; the dynamic engine runs the model.
        """
        steps, device = self._driver.curve(points, training=training)
        curve = self._driver.limits.whole(steps)
        profile = self._driver.settings.profile
        is_here = isinstance(profile, str)
        free = memory.free_bytes(device) if is_here else profile.free_bytes
        marks = [
            ("nothing recomputed", int(curve.bytes[-1])),
            ("limit", self.mem_limit),
            (f"free on {device if is_here else 'that machine'}", free),
        ]
        curve.marks = tuple([(name, size) for name, size in marks if size is not None])
        return curve

    @heard
    def load_plan(self, source: Any) -> Any:
        """Run the following steps by a saved schedule or program.

        The model was measured (`measure`, or a step). The plan must be one of the same stages, or
        of the same operations on the same storages; sizes and times are the ones measured here.
        Should a step need more than predicted, a new plan is made. `compute_sequence`
        forgets it.

        Parameters
        ----------
        source
            A sequence or a program, its JSON text, or the path of a file written by
            ``to_json(path)`` or ``rotor plan --out``.

        Returns
        -------
        Sequence or Program
            The plan, priced by the measures of this machine.

        Raises
        ------
        ValueError
            Nothing was measured; the file holds no plan; it is one of another model, and the
            message has the first difference; the model has no plan of that form.
        InfeasibleError
            The plan needs more than the limit; ``minimum_bytes`` is its need.
        """
        return self._driver.load(source)

    def load_program(self, source: Any) -> Any:
        """Load a program, as `load_plan` does."""
        return self.load_plan(source)

    def share_plans(self, group: Any = None) -> None:
        """Make the processes of a group measure together and run one plan.

        Replicas of a model, under DistributedDataParallel for instance, get the same result from
        different plans; with this they also run the same schedule, or program of a captured graph,
        under the least limit of all, with a second tier or without. A model sharded by
        ``fully_shard``, one with distributed parameters, and one with collective operations do so
        by themselves. Each process of the group has to call this, and from then
        on has to measure, plan and train in step with the others; what one of them cannot do is an
        error on all. A copy of the model plans for itself again.

        A captured graph is planned before a step, as with ``planning="before"``, for each
        combination of the ranks' shapes. Models that are captured in parts are refused when they
        are measured.

        Parameters
        ----------
        group
            A process group; the default one without it.

        Raises
        ------
        RuntimeError
            No process group exists.
        ValueError
            The dynamic engine or ``counts="reserved"`` was asked for.
        RankError
            Another rank raised one of these, or has other options.
        """
        self._driver.share_plans(Ranks(group))

    def wait_for_planning(self, timeout: float | None = None) -> bool:
        """Bring the search for better plans to its end; return whether none is left.

        What is left to measure is measured now, unless a backward is still to come.

        Parameters
        ----------
        timeout
            Most seconds to wait; any number by default.
        """
        return self._driver.finish_planning(timeout)

    # -- running

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; warn if a forward put in the place of this class's does not limit it."""
        if (
            traces.is_symbolic()
            and (node := traces.symbolic_call(self.module, args, kwargs)) is not None
        ):
            return node
        driver = self._driver
        calls = driver.calls
        plain_call = super().__call__
        output = own_call_of(self.module, self.forward, plain_call)(*args, **kwargs)
        if driver.calls == calls:
            warn_of_forward(driver.context, self.forward)
        return output

    __call__ = shown(core.untraced(__call__, _NOT_COMPILED))

    def forward(self, *args: Any, targets: Any = NO_TARGETS, **kwargs: Any) -> Any:
        """Return the model's output, or its loss where ``loss_fn`` and `targets` are given.

        In training mode with gradients enabled the plan, made at the first call, is followed;
        otherwise the plain model runs.

        Parameters
        ----------
        *args, **kwargs
            Arguments of the wrapped model.
        targets
            With ``loss_fn``: its arguments after the output, or the only one; ``()`` for none.
        """
        driver = self._driver
        driver.calls += 1
        if self.loss_fn is None and targets is not NO_TARGETS and takes_targets(self.module):
            kwargs["targets"], targets = targets, NO_TARGETS
        given = None if targets is NO_TARGETS else targets_of(targets)
        call = Call.of(args, kwargs, given, is_one=driver.engines[0].takes_one)
        return driver.step(call) if driver.is_training(call) else driver.plain(call)

    forward = ShownForward(core.untraced(heard(forward), _NOT_COMPILED))  # type: ignore[assignment]
