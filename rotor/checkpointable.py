"""`Checkpointable`: a model that trains within a memory limit."""

from __future__ import annotations

import logging
import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, Self, cast

import torch
from torch import nn

from rotor import _inductor, _torch, memory
from rotor.algorithms.curve import Curve
from rotor.algorithms.utils import checked_slots
from rotor.checksums import checked_verify
from rotor.distributed import sharers
from rotor.errors import InfeasibleError, MemoryLimitWarning
from rotor.metering import StepBytes, StepMeter, StepWatch, cancel_running
from rotor.report.plot import plot_timeline
from rotor.stages import Structure, refuse_replicated, refuse_sharded
from rotor.timelines import Timeline
from rotor.tracing import is_trace, write_plan_trace
from rotor.transparent import TransparentModule
from rotor.units import format_bytes, parse_bytes
from rotor.values import tensors_of
from rotor.verbosity import heard
from rotor.watching import PeakWatch, is_due, meter_again, note_peak, warn_excess

logger = logging.getLogger("rotor")

ENGINES = ("auto", "chain", "graph", "dynamic")
BACKENDS = ("fx", "inductor")
METERED_STEPS = 3
_HEARD = {"measure", "compute_sequence", "curve", "load_plan", "load_program", "forward", "_learn"}
"""Methods that log at the model's own verbosity."""


_NOT_COMPILED = (
    "a model with a limit runs its own plan, which torch.compile leaves as it is: "
    'rotor.Checkpointable(model, backend="inductor") compiles plans'
)


class DefaultSlots(int):
    """The 500 slots that nobody asked for."""


DEFAULT_SLOTS = DefaultSlots(500)


class StepPlan(Protocol):
    """What a plan of any engine tells of itself; bytes above the level at which a step begins."""

    limit_bytes: int
    reserve_bytes: int
    measured_bytes: int | None
    measured_timeline: Timeline | None
    meterings: int
    outdated: bool

    @property
    def is_refuted(self) -> bool:
        """A value that it computes again came out otherwise."""

    @property
    def device(self) -> torch.device:
        """Where it runs."""

    @property
    def predicted_bytes(self) -> int:
        """Peak of a step, by the simulator."""

    @property
    def makespan(self) -> float:
        """Seconds of a step, by the simulator."""


class Checkpointable(TransparentModule):
    """A model that trains as before, in a given number of bytes.

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
        The most that one training step (forward, loss, backward) may have allocated on the
        model's device at any moment above the level at which its forward began: bytes, or text
        such as "700MiB". ``None``: 90 % of what is free when the first training forward begins,
        divided by the processes of ``torchrun`` that share it.
    mem_slots
        Chains are planned on this many slots of memory. Where nobody gives a number, the exact
        solver is used where that is cheap, and 500 slots otherwise.
    verbosity
        0: warnings, 1: what is done, 2: details; the level of ``logging.getLogger("rotor")`` while
        this model is at work.
    preserve_rng_state
        Recompute with the random numbers of the first forward.
    loss_tmp_memory_usage
        Bytes that the loss needs beside the gradient of the output; by default 4 times the
        output, its gradient included, is set aside until the first step has been metered.
    engine
        "auto", "chain", "graph", or "dynamic": nothing is planned, the model runs as it is, what it
        computes is evicted when memory gets short, and computed again.
    loss_fn
        ``loss_fn(output, *targets)``: the loss becomes part of the plan, and
        ``model(x, targets=(t,))`` returns it.
    profile
        For graphs, what operations cost: "measured" runs each distinct one here; a
        `rotor.graph.Machine` estimates them, a `rotor.graph.Profile`, or the path of one, has what
        was measured elsewhere: then nothing is run before the first step.
    backend
        For graphs, what runs a plan: "fx", Python code of our own, whose bytes are exact, or
        "inductor", which compiles it; there the measured peak decides, and the limit holds when
        the first steps have been metered (docs/graph.md).
    verify
        The steps in which what is recomputed is compared, bit for bit, with what was computed
        first: "first", the first 3 of every plan; "always"; a number n, every n-th too; "off".
        Where it differs, the backward raises `rotor.RecomputationError`.
    **options
        For graphs: ``effort``, ``seed`` and ``time_limit`` of `rotor.graph.plan`. With
        ``engine="auto"`` an ``nn.Sequential`` takes them too, and they have an effect only where
        it is planned as a graph.

    Attributes
    ----------
    module
        The wrapped model.
    mem_limit
        The limit in bytes, ``None`` before it is known.
    verify
        As given.

    Raises
    ------
    TypeError, ValueError
        The model is no module, or no ``nn.Sequential`` with ``engine="chain"``; the limit is not a
        positive number of bytes.
    InfeasibleError
        No plan fits in the limit; ``minimum_bytes`` is the least that one fits in.

    Notes
    -----
    Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova: Optimal checkpointing for heterogeneous
    chains, hal-02352969. The memory model is described in docs/memory-model.md.
    """

    _shown_name = "Checkpointable"
    loss_fn: Callable[..., torch.Tensor] | None
    mem_limit: int | None
    verify: str | int
    _plans: dict[Any, Any]
    _latest: Any
    _crowded: bool

    def __new__(
        cls,
        model: Any = None,
        *_: Any,
        engine: str = "auto",
        profile: Any = "measured",
        backend: str = "fx",
        **__: Any,
    ) -> Self:
        """An instance for the engine that the model needs."""
        if cls is not Checkpointable:
            return super().__new__(cls)
        is_sequential = (
            isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward
        )
        # Only the operations of a graph can be priced without being run.
        is_timed = isinstance(profile, str) and profile == "measured"
        is_chain = engine == "chain" or (engine != "graph" and is_sequential and is_timed)
        if engine == "dynamic":
            from rotor.dynamic import DynamicCheckpointable as Chosen
        elif backend == "inductor" and engine != "chain":
            from rotor.graphed_inductor import InductorCheckpointable as Chosen  # type: ignore[assignment]
        elif is_chain:
            from rotor.chained import ChainCheckpointable as Chosen  # type: ignore[assignment]
        elif engine == "auto":
            from rotor.graphed_blocks import BlockCheckpointable as Chosen  # type: ignore[assignment]
        else:
            from rotor.graphed import GraphCheckpointable as Chosen  # type: ignore[assignment]
        return cast(Self, Chosen.__new__(Chosen))

    def __init__(
        self,
        model: nn.Module,
        custom_input: Any = None,
        mem_limit: int | str | None = None,
        mem_slots: int = DEFAULT_SLOTS,
        verbosity: int = 0,
        preserve_rng_state: bool = True,
        loss_tmp_memory_usage: int = 0,
        *,
        engine: str = "auto",
        loss_fn: Callable[..., torch.Tensor] | None = None,
        profile: Any = "measured",
        backend: str = "fx",
        verify: str | int = "first",
        **options: Any,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
        if engine not in ENGINES:
            raise ValueError(f"unknown engine {engine!r}, expected one of {', '.join(ENGINES)}")
        if backend not in BACKENDS:
            raise ValueError(f"unknown backend {backend!r}, expected one of {', '.join(BACKENDS)}")
        if backend == "inductor":
            if engine in ("chain", "dynamic"):
                raise ValueError(
                    f'backend="inductor" compiles captured graphs, and engine="{engine}" has none: '
                    'use engine="graph"'
                )
            _inductor.check()
        verify = checked_verify(verify)
        limit = None if mem_limit is None else parse_bytes(mem_limit)
        if mem_slots is not DEFAULT_SLOTS:
            mem_slots = checked_slots(mem_slots)
        if loss_tmp_memory_usage:
            loss_tmp_memory_usage = parse_bytes(loss_tmp_memory_usage, name="loss_tmp_memory_usage")
        self._check_model(model)
        self._check_options(options)
        self._check_sharded(model)
        refuse_replicated(model)
        super().__init__(model)
        self.__dict__.update(
            mem_limit=limit,
            mem_slots=mem_slots,
            verbosity=verbosity,
            preserve_rng_state=preserve_rng_state,
            loss_tmp_memory_usage=loss_tmp_memory_usage,
            loss_fn=loss_fn,
            engine=engine,
            backend=backend,
            verify=verify,
            _options=options,
            _profile=profile,
            _structure=Structure(model),
            _plans={},
            _latest=None,
            _latest_key=None,
            _learned_loss={},
            _pending=None,
            _crowded=False,
            _warned=set(),
        )
        self._begin()
        if custom_input is not None:
            self._measure_sample(custom_input)
            self.compute_sequence()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in _HEARD & vars(cls).keys():
            setattr(cls, name, heard(vars(cls)[name]))
        if "forward" in cls.__dict__:
            # Compiled, what plans and meters a step would be part of a graph, or break it.
            cls.forward = _torch.untraced(cls.forward, _NOT_COMPILED)

    def __getstate__(self) -> dict[str, Any]:
        if self.__dict__.get("_sharding") is not None:
            raise TypeError(
                "a model sharded by fully_shard cannot be pickled or copied: save its state_dict() "
                "with torch.distributed.checkpoint, and shard and wrap a new model"
            )
        return super().__getstate__() | {"_pending": None}

    def __repr__(self) -> str:
        return f"{self._shown_name}({self.module!r})"

    def __getattr__(self, name: str) -> Any:
        if name == "model" and (module := self.__dict__.get("module")) is not None:
            # Published: the wrapped model, unless it has something of that name itself.
            return getattr(module, name, module)
        return super().__getattr__(name)

    def _check_model(self, model: nn.Module) -> None:
        """Raise where the engine cannot plan such a model."""

    def _check_sharded(self, model: nn.Module) -> None:
        """Raise where the model is sharded and the engine cannot run that."""
        engine = self.__dict__.get("engine")
        refuse_sharded(model, "operations" if engine == "dynamic" else "a graph")

    def _begin(self) -> None:
        """Set what the engine keeps of its own."""
        raise NotImplementedError

    def _measure_sample(self, sample: Any) -> None:
        """Measure on the sample that the constructor was given."""
        raise NotImplementedError

    def _check_options(self, options: dict[str, Any]) -> None:
        if options:
            raise TypeError(f"unknown option {next(iter(options))!r}")

    # -- what every engine has

    def get_expected_memory(self) -> int:
        """Predicted peak of a step, in bytes above the level at its start; ValueError: no plan."""
        return int(self._planned().predicted_bytes)

    def get_expected_makespan(self) -> float:
        """Predicted seconds of a step, forward and backward; ValueError: no plan."""
        return float(self._planned().makespan)

    def compute_sequence(
        self,
        custom_mem_limit_bytes: int | str | None = None,
        mem_slots: int | None = None,
        *,
        mem_limit: int | str | None = None,
        **options: Any,
    ) -> Any:
        """Plan the following steps, under the limit given here or before.

        The limit is `mem_limit` or, as published, `custom_mem_limit_bytes`; `mem_slots` and
        `options` are those of the constructor, and for chains ``algo``.
        """
        raise NotImplementedError

    def curve(self) -> Curve:
        """Step time against limit: every limit at once, the model's input not counted.

        Its picture, `Curve.plot`, marks where nothing is recomputed, the limit, and what the
        device has free. Plain PyTorch recomputes nothing either; a captured graph may need less
        than it all the same.
        """
        raise NotImplementedError

    def load_plan(self, source: Any) -> Any:
        """Have the following steps run a plan that was saved; for chains and graphs."""
        raise ValueError(
            f'engine="{self.engine}" decides while a step runs, and has no plan to load: give '
            'engine="chain" or "graph"'
        )

    def _marked(self, curve: Curve, device: torch.device) -> Curve:
        """A curve of this model, with what its picture marks."""
        is_here = isinstance(self._profile, str)
        free = memory.free_bytes(device) if is_here else self._profile.free_bytes
        marks = [
            ("nothing recomputed", int(curve.bytes[-1])),
            ("limit", self.mem_limit),
            (f"free on {device if is_here else 'that machine'}", free),
        ]
        curve.marks = tuple([(name, size) for name, size in marks if size is not None])
        return curve

    def display(self) -> str:
        """A table of the parts of the model and what the plan does with them."""
        raise NotImplementedError

    def report(self, path: str | os.PathLike[str] | None = None, *, snapshot: bool = False) -> str:
        """Limit, predicted and measured peak, and time, as text.

        Parameters
        ----------
        path
            Write this file too. ``.html``: a page that needs nothing else, with the live bytes over
            time, predicted and measured, and what is kept, dropped and recomputed. ``.json`` or
            ``.json.gz``: the same as a trace, which https://ui.perfetto.dev and chrome://tracing
            open.
        snapshot
            Save the snapshot of CUDA's allocator beside that file, ending in ``.pickle``, for
            https://pytorch.org/memory_viz. It holds what was recorded:
            `rotor.memory.record_history`.

        Raises
        ------
        ValueError
            There is no plan; the path ends otherwise; a trace is wanted of a model that runs
            without a plan, and no step was metered.
        RuntimeError
            A snapshot is wanted, and there is no CUDA.
        """
        text = self._report()
        if path is None:
            if snapshot:
                raise ValueError("snapshot=True saves a file beside the report: give it a path")
            return text
        file = Path(path)
        is_page = file.suffix.lower() in (".html", ".htm")
        if not is_page and not is_trace(file):
            raise ValueError(
                "a report is written as a page, to a .html file, or as a trace, to a .json or "
                f".json.gz file, not {file.name}"
            )
        if snapshot:
            memory.save_snapshot(file.with_name(file.name.split(".")[0] + ".pickle"))
        if is_page:
            self._write_page(file)
        else:
            write_plan_trace(self._planned(), file)
        return text

    def _report(self) -> str:
        raise NotImplementedError

    def _write_page(self, path: Path) -> None:
        raise NotImplementedError

    def plot_timeline(self, ax: Any = None) -> Any:
        """Draw the live bytes of a step with matplotlib: predicted, measured, and the limit.

        The measured ones are those of the last metered step, brought to the clock of the
        prediction: forward, loss and backward each. On CUDA only their peak is known.

        Parameters
        ----------
        ax
            The axes to draw on; by default those of a new figure.

        Returns
        -------
        matplotlib.axes.Axes
            The axes that were drawn on.

        Raises
        ------
        ImportError
            matplotlib is not installed; the message names the extra that brings it.
        ValueError
            There is no plan; or one that predicts nothing, and no step was metered.
        """
        return plot_timeline(self._planned(), ax)

    def _planned(self) -> Any:
        if self._latest is None:
            raise ValueError("no plan was made: call compute_sequence(), or train a step")
        return self._latest

    def _measured_key(self) -> Any:
        if self._latest_key is None:
            raise ValueError("nothing was measured: call measure(sample), or train a step")
        return self._latest_key

    def _check_devices(self, arg: Any) -> None:
        devices = {t.device for t in tensors_of(arg)}
        for name, parameter in self.module.named_parameters():
            if parameter.device not in devices:
                raise ValueError(
                    f"the input is on {', '.join(sorted(map(str, devices)))} and parameter {name} "
                    f"is on {parameter.device}: move the input, or the model, with .to(device)"
                )

    def _limit_on(self, device: torch.device) -> int:
        """The limit; 90 % of what is free now where nobody gave one, shared with other ranks."""
        if self.mem_limit is None:
            count = sharers(device)
            limit = memory.free_bytes(device) * 9 // 10 // count
            self.__dict__["mem_limit"] = limit
            logger.info(
                "no limit was given: 90 %% of free memory%s, %s",
                f", shared by {count} processes" if count > 1 else "",
                format_bytes(limit),
            )
        assert self.mem_limit is not None
        return self.mem_limit

    def _make(self, key: Any, reserve_bytes: int = 0) -> StepPlan:
        """Plan what was measured under `key`."""
        raise NotImplementedError

    def _replanned(self, key: Any) -> Any:
        """A plan that knows what the last metered step taught; the old one where none fits."""
        old = self._plans.get(key)
        if old is None:
            return self._make(key)
        try:
            plan: Any = self._make(key, old.reserve_bytes)
        except InfeasibleError as error:
            if old.is_refuted:
                raise
            old.outdated = False
            self._warn_over(old, error.minimum_bytes)
            return old
        plan.meterings = old.meterings
        plan.differs = old.meterings >= METERED_STEPS
        plan.least_bytes_seen, plan.most_bytes_seen = old.least_bytes_seen, old.most_bytes_seen
        plan.warned_bytes = old.warned_bytes
        return plan

    # -- running

    def _checked_call(self, targets: Sequence[Any]) -> bool:
        """Whether this call trains; raises where it cannot be planned for."""
        if targets and self.loss_fn is None:
            raise ValueError("targets are for a loss: give Checkpointable(..., loss_fn=) too")
        if not (self.module.training and torch.is_grad_enabled()):
            return False
        self._check_sharded(self.module)
        if _torch.in_functorch():
            raise RuntimeError(
                "torch.func transforms (grad, vmap, functional_call inside them) cannot go through "
                "a plan that recomputes: apply them to the plain model, chk.module"
            )
        if _torch.in_checkpoint() or _torch.in_backward():
            raise RuntimeError(
                "a model with a limit was called within torch.utils.checkpoint, or otherwise in a "
                "backward: what a plan keeps would be computed twice. Take that checkpoint away, "
                "the plan recomputes what it must; or leave the limit to one model, the outermost"
            )
        return True

    def _with_loss(self, output: Any, targets: Sequence[Any]) -> Any:
        return self.loss_fn(output, *targets) if targets and self.loss_fn else output

    def _warn_once(self, name: str, message: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            warnings.warn(message, MemoryLimitWarning, stacklevel=6)

    def _warn_pending(self, limit_bytes: int) -> None:
        self._warn_once(
            "pending",
            "a forward began while the backward of an earlier one was still to come: each "
            f"keeps its own limit's worth of memory ({format_bytes(limit_bytes)})",
        )
        # What several steps at once need says nothing of one.
        cancel_running()
        self.__dict__["_crowded"] = True

    # -- metering the first steps of a plan

    def _start_meter(self, plan: StepPlan) -> StepWatch | None:
        is_crowded, self.__dict__["_crowded"] = self._crowded, False
        if is_crowded or _torch.in_pipeline():
            return None
        if plan.measured_bytes is not None or plan.meterings >= METERED_STEPS:
            return self._watch(plan)
        myself = weakref.ref(self)

        def done(step: StepBytes) -> None:
            model = myself()
            if model is not None:
                model._learn(plan, step)

        try:
            gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
            return StepMeter(plan.device, done, gradients)
        except memory.MeterBusyError as error:
            self._warn_once("busy", f"this step's memory was not measured: {error}")
            return None

    def _watch(self, plan: Any) -> StepWatch | None:
        """What sees a step of a plan that has been metered; ``None`` where nothing does."""
        if not plan.is_watched or self.__dict__.get("_ranks") is not None:
            return None
        if is_due(plan, self._structure.parameters):
            return meter_again(self, plan)
        return PeakWatch(self, plan) if plan.device.type == "cuda" else None

    def _learn_again(self, plan: Any, step: StepBytes) -> None:
        """Compare a step that was metered later with what its plan knows."""
        self._learn_peak(plan, step.peak_bytes)

    def _learn_peak(self, plan: Any, peak_bytes: int) -> None:
        """Have the next step planned for what a step needed beyond the limit."""
        note_peak(plan, peak_bytes)
        if peak_bytes <= plan.limit_bytes:
            return
        plan.measured_bytes = max(plan.measured_bytes or 0, peak_bytes)
        if any(known is plan for known in self._plans.values()):
            plan.reserve_bytes = max(plan.reserve_bytes, peak_bytes - plan.predicted_bytes)
            plan.outdated = True
        warn_excess(plan, peak_bytes)

    def _warn_over(self, plan: StepPlan, least_bytes: int) -> None:
        self._warn_once(
            "over",
            f"the limit of {plan.limit_bytes} bytes could not be kept: the step needed "
            f"{plan.measured_bytes} bytes, {plan.predicted_bytes} were predicted. Something "
            "outside the model, such as the loss, allocates during the step; a limit of "
            f"{least_bytes} bytes would do, and loss_fn= makes the loss part of the plan",
        )

    def _learn(self, plan: Any, step: StepBytes) -> None:
        """Compare a metered step with its plan; have it made again where that helps."""
        plan.measured_bytes = step.peak_bytes
        plan.measured_timeline = step.timeline
        plan.meterings += 1
        note_peak(plan, step.peak_bytes)
        over = step.peak_bytes - plan.limit_bytes
        if plan.warned_bytes:
            warn_excess(plan, step.peak_bytes)
        logger.info(
            "measured peak %s, predicted %s, limit %s",
            format_bytes(step.peak_bytes),
            format_bytes(plan.predicted_bytes),
            format_bytes(plan.limit_bytes),
        )
        key = next((k for k, p in self._plans.items() if p is plan), None)
        if key is None:
            return
        new_loss = self._learn_loss(key, plan, step)
        if plan.meterings >= METERED_STEPS:
            if over > 0:
                self._warn_over(plan, step.peak_bytes)
            return
        if over > 0 or new_loss:
            explained = self._repriced(key, plan)
            plan.reserve_bytes = max(plan.reserve_bytes, step.peak_bytes - explained)
            plan.outdated = True

    def _learn_loss(self, key: Any, plan: Any, step: StepBytes) -> bool:
        """Note what the caller's loss needed; whether the plan did not know."""
        raise NotImplementedError

    def _repriced(self, key: Any, plan: Any) -> int:
        """What the plan is predicted to need, now that the loss is known."""
        raise NotImplementedError
