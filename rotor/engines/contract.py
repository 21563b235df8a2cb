"""Contract between the driver and engines.

An engine knows how to measure a module, to plan a step under a limit, and to run a plan. The driver
(`rotor.wrapper.driver`) decides when each of these is done, for all engines alike.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from rotor._pytorch import backwards, core
from rotor.algorithms.curve import Curve
from rotor.algorithms.persistent import DEFAULT_SLOTS
from rotor.common.calls import Reads, Structures, sample_call
from rotor.common.frames import warn_caller
from rotor.common.model_state import ModelState
from rotor.common.tensor_trees import device_of, tree_tensors
from rotor.engines.peers import Peers
from rotor.errors import InfeasibleError, MemoryLimitWarning
from rotor.graph.planner import check_options
from rotor.meter.step_meter import StepBytes, StepWatch, Verdict
from rotor.tier.offload import Offload
from rotor.tier.state import AwayState


class NothingToPlan(Exception):
    """Absence of gradients: nothing in the call needs one."""


class CannotPlan(Exception):
    """Refusal of a call that the engine cannot plan; the next engine is asked.

    Parameters
    ----------
    error
        Error to raise if no other engine is left.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error

    @property
    def line(self) -> str:
        """First line of the error, for a table of the engines that were compared."""
        line = (str(self.error).strip().splitlines() or [type(self.error).__name__])[0]
        return f"not captured: {line.removeprefix('not captured: ')}"


class Unsuited(Exception):
    """Refusal of a model that the engine cannot plan under any call."""


class PlanAgain(Exception):
    """Discovery of another capture for a call, which needs its own plan."""


_MOST_SHAPES = 4
_MOST_PLANS = 8
"""Largest number of plans of one kind of step, for sets of existing gradients."""


class Key(NamedTuple):
    """Kind of a step.

    Attributes
    ----------
    measured
        All facts that a measure depends on.
    absent
        Parameters that have no gradient yet; a plan depends on them too.
    """

    measured: Any
    absent: Any

    def __repr__(self) -> str:
        return f"<{self.shapes or 'steps'}, {self.gradients}>"

    @property
    def gradients(self) -> str:
        """Gradients that exist when such a step begins, as text."""
        flags = self.absent if isinstance(self.absent, tuple) else ()
        some = f"{len(flags) - sum(map(bool, flags))} of {len(flags)} gradients exist"
        return "no gradients yet" if all(flags) else some if any(flags) else "gradients exist"

    def difference(self, other: Key) -> str:
        """Return what differs from another kind of step, as text."""
        mine, others = _shapes_within(self.measured), _shapes_within(other.measured)
        if mine == others:
            if self.measured != other.measured:
                return "another mode, or another value among the arguments"
            return self.gradients
        is_alike = [(a[1:], t) for a, t in mine] == [(a[1:], t) for a, t in others]
        sizes = [(a[0], b[0]) for (a, _), (b, _) in zip(mine, others, strict=False) if a and b]
        changed = {(new, old) for new, old in sizes if new != old}
        if is_alike and len(changed) == 1:
            return "batch {} instead of {}".format(*changed.pop())
        return f"{self.shapes} instead of {other.shapes}"

    @property
    def shapes(self) -> str:
        """Shapes and types of the tensors that such a step takes, as text; empty if unknown."""
        found = [
            f"{'x'.join(map(str, shape)) or 'a number'} {str(dtype).removeprefix('torch.')}"
            for shape, dtype in _shapes_within(self.measured)
        ]
        more = f" and {len(found) - _MOST_SHAPES} more" if len(found) > _MOST_SHAPES else ""
        return ", ".join(found[:_MOST_SHAPES]) + more


def _shapes_within(part: Any) -> list[tuple[torch.Size, torch.dtype]]:
    """Return the shapes in a signature, each in a tuple with its type."""
    if not isinstance(part, tuple):
        return []
    types = [item for item in part if isinstance(item, torch.dtype)]
    if part and isinstance(part[0], torch.Size) and types:
        return [(part[0], types[0])]
    return [shape for item in part for shape in _shapes_within(item)]


@dataclass(frozen=True)
class Call:
    """Arguments of one step; `targets` are for the loss, ``None`` without one."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    targets: tuple[Any, ...] | None = None

    @staticmethod
    def of(
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        targets: tuple[Any, ...] | None,
        *,
        is_one: bool,
    ) -> Call:
        """Return a call; with `is_one`, raise TypeError unless one input is given."""
        if not is_one:
            return Call(args, kwargs, targets)
        given = (*args, *kwargs.values())
        if len(given) != 1 or kwargs.keys() - {"inputs", "input", "custom_input"}:
            raise TypeError(
                f"an nn.Sequential takes one input, got {len(args)} arguments"
                + (f" and {', '.join(kwargs)}" if kwargs else "")
            )
        return Call(given, {}, targets)

    @staticmethod
    def of_sample(sample: Any, *, is_one: bool = False) -> Call:
        """Return the call that a sample stands for: arguments, keyword arguments, or the only one.

        Raises
        ------
        TypeError
            It is text or a number, as a limit in the wrong place is.
        """
        if isinstance(sample, str | int):
            raise TypeError(
                f"custom_input={sample!r} is no sample of the input: did you mean "
                f"mem_limit={sample!r}?"
            )
        return Call(*sample_call(sample, is_one=is_one))

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of the module."""
        return self.args, dict(self.kwargs)


@dataclass
class Settings:
    """Options of one wrapped model.

    Attributes
    ----------
    module
        Plain model.
    mem_limit
        Limit in bytes; ``None`` where none was given.
    budget
        Most bytes beside new gradients of parameters; ``None`` where none was given.
    total_limit
        Most bytes of the process on the device, or "card"; ``None`` where none was given.
    limit_bytes
        Limit of the latest plan; ``None`` before one.
    algorithm, algorithm_options
        Algorithm that finds schedules of chains, and keywords of its ``solve``.
    unsuited
        Reasons of engines that cannot run the model, by name.
    graph_class
        Engine of captured graphs, if not the default one.
    offload
        Second tier; ``None`` for none.
    away
        Homes of parameters, gradients and optimizer states there; ``None`` where they are here.
    asks_for_schedule
        True once a schedule of a chain was asked for.
    options, given_options
        Options of the plans: those of the constructor, and those of the latest `compute_sequence`.

    Other attributes have the meaning of `rotor.Checkpointable`.
    """

    module: nn.Module
    mem_limit: int | None = None
    total_limit: int | str | None = None
    mem_slots: int | None = None
    verbosity: int = 0
    preserve_rng_state: bool = True
    loss_tmp_memory_usage: int = 0
    engine: str = "auto"
    loss_fn: Callable[..., Any] | None = None
    profile: Any = "measured"
    backend: str = "fx"
    verify: str | int = "first"
    planning: str = "background"
    counts: str = "allocated"
    offload: Offload | None = None
    away: AwayState | None = None
    options: dict[str, Any] = field(default_factory=dict)
    algorithm: Any = None
    algorithm_options: dict[str, Any] = field(default_factory=dict)
    asks_for_schedule: bool = False
    unsuited: dict[str, str] = field(default_factory=dict)
    graph_class: Any = None
    budget: int | None = None
    limit_bytes: int | None = None
    given_options: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.given_options = self.options

    @property
    def shown_slots(self) -> int:
        """Number of memory slots that is shown, also where none was given."""
        return DEFAULT_SLOTS if self.mem_slots is None else self.mem_slots

    @property
    def present_limit(self) -> int | None:
        """Limit of the latest plan, or else the given one; ``None`` where neither is known.

        Where the limit counts parameters and states too, it is the given one.
        """
        is_given = self.limit_bytes is None or self.away is not None
        return self.mem_limit if is_given else self.limit_bytes

    @property
    def offload_state(self) -> Any:
        """Optimizer whose states have homes, or a list of several; ``None`` for none."""
        return None if self.away is None else self.away.optimizer

    @offload_state.setter
    def offload_state(self, optimizer: Any) -> None:
        if self.away is None or self.offload is None:
            raise ValueError(
                "the parameters of this model are in memory, where any optimizer steps: wrap it "
                "anew with offload= and offload_state= to have them in a second tier"
            )
        self.away.adopt(optimizer)
        self.offload.coming_bytes = self.away.coming_home_bytes()


class Refusal(NamedTuple):
    """Refusal of a kind of step by an engine."""

    engine: int
    """Number of the engine that takes over."""
    device: torch.device
    reason: str
    why: dict[str, str]
    """Reasons of all engines that were asked, by name."""


@dataclass
class Context:
    """State that the engines of one wrapped model share.

    Attributes
    ----------
    settings
        Options, and the module.
    wrapper
        Function that returns the wrapping module, which FSDP2 may shard in the place of the model;
        ``None`` without one.
    structure
        Modules and parameters of the model at discovery.
    explain
        Function that completes an error of a step that does not fit, given the step's limit.
    peers
        Ranks that share plans.
    sharding
        FSDP2's units of the model; ``None`` if no engine runs a sharded model.
    plans
        Plans by kind of step.
    loaded
        Schedules that were loaded, by `Key.measured`.
    learned_loss
        Bytes of the caller's loss by `Key.measured`, for metered steps.
    refusals
        Refusals by `Key.measured`.
    lacking
        Reasons against the plans of `Engine.others`, by their name and `Key.measured`.
    searches
        Background searches of the engines, which hold them.
    reads
        Plain values among the arguments that captured code reads, by structure of the arguments.
    latest, latest_key
        Latest plan, made or run; kind of the latest step, measured or run.
    warned
        Topics of the warnings so far.
    rerun_bytes
        Largest need of a backward without a plan that a warning has named.
    is_stepping
        True while a training step is planned and its forward runs.
    """

    settings: Settings
    wrapper: Callable[[], nn.Module | None]
    structure: ModelState
    explain: Callable[[InfeasibleError, int], None]
    peers: Peers = field(default_factory=Peers)
    sharding: Any = None
    plans: dict[Key, Any] = field(default_factory=dict)
    loaded: dict[Any, Any] = field(default_factory=dict)
    learned_loss: dict[Any, int] = field(default_factory=dict)
    refusals: dict[Any, Refusal] = field(default_factory=dict)
    lacking: defaultdict[str, dict[Any, str]] = field(default_factory=lambda: defaultdict(dict))
    searches: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    reads: defaultdict[str, Reads] = field(default_factory=lambda: defaultdict(Reads))
    structures: defaultdict[Any, Structures] = field(
        default_factory=lambda: defaultdict(Structures)
    )
    latest: Any = None
    latest_key: Key | None = None
    warned: set[str] = field(default_factory=set)
    rerun_bytes: int = 0
    is_stepping: bool = False

    def warn(self, topic: str, text: str) -> None:
        """Warn about the limit, once for each topic."""
        if topic not in self.warned:
            self.warned.add(topic)
            warn_caller(text, MemoryLimitWarning)

    def begin_planning(self) -> None:
        """Drop all plans and their leftovers: the limit or an option has changed."""
        self.plans, self.loaded = {}, {}
        for searches in self.searches:
            searches.stop()

    def may_improve_plans(self) -> bool:
        """Return whether plans get better between steps; ranks plan together before a step."""
        return (
            self.settings.planning == "background"
            and self.peers.ranks is None
            and not core.is_distributed()
        )

    def is_behind(self) -> bool:
        """Return whether this rank has to plan before its next step; False if it plans alone."""
        if self.peers.ranks is None:
            return False
        for plan in self.plans.values():
            plan.expect(self)
        verdicts = [plan.verdict for plan in self.plans.values()]
        return not verdicts or any(verdict is not Verdict.KEEP for verdict in verdicts)

    def refined(self, key: Key) -> Key:
        """Return the key of a plan: under many plans of a kind, that of new gradients only."""
        if key not in self.plans and not all(key.absent):
            known = sum(other.measured == key.measured for other in self.plans)
            if known >= _MOST_PLANS:
                return Key(key.measured, (True,) * len(key.absent))
        return key

    def knows_loss(self, key: Key) -> bool:
        """Return whether the need of the caller's loss was given, or learnt."""
        return key.measured in self.learned_loss or bool(self.settings.loss_tmp_memory_usage)

    def measured_key(self) -> Key:
        """Return the kind of the latest measured step; raise ValueError before one."""
        if self.latest_key is None:
            raise ValueError("nothing was measured: call measure(sample), or train a step")
        return self.latest_key

    @property
    def module(self) -> nn.Module:
        """Plain model."""
        return self.settings.module

    def shells(self) -> AbstractContextManager[None]:
        """Return a context in which captured code gets the model's parameters that have homes."""
        away = self.settings.away
        return core.NOTHING if away is None else away.shells(self.structure.parameters)

    @property
    def gradients(self) -> list[torch.Tensor]:
        """Existing gradients of the model's parameters."""
        gradients = backwards.gradients_of(self.module.parameters())
        return [gradient for gradient in gradients if gradient is not None]

    def is_current(self, plan: Any) -> bool:
        """Return whether steps still run under a plan."""
        return any(known is plan for known in self.plans.values())

    def device_of(self, call: Call) -> torch.device:
        """Return the device of a call: that of its first tensor, or else the model's."""
        return device_of(call.arguments, self.module)

    def check_devices(self, arguments: Any) -> None:
        """Raise ValueError if a parameter is on another device than the arguments."""
        devices = {t.device for t in tree_tensors(arguments)}
        if not devices:
            return
        for name, parameter in self.module.named_parameters():
            if parameter.device not in devices:
                raise ValueError(
                    f"the input is on {', '.join(sorted(map(str, devices)))} and parameter {name} "
                    f"is on {parameter.device}: move the input, or the model, with .to(device)"
                )

    def loss_of(self, call: Call) -> Callable[..., Any] | None:
        """Return the loss function of a call; ``None`` if its output is wanted."""
        return None if call.targets is None else self.settings.loss_fn

    def with_loss(self, output: Any, targets: Sequence[Any] | None) -> Any:
        """Return the loss if targets are given, even an empty tuple of them; else the output."""
        loss_fn = self.settings.loss_fn
        return output if targets is None or loss_fn is None else loss_fn(output, *targets)

    def plain(self, args: Any, kwargs: Any, targets: Sequence[Any] | None) -> Any:
        """Return the result of a call without a plan, its loss included."""
        return self.with_loss(self.module.forward(*args, **kwargs), targets)


IsPending = Callable[[], bool] | None
"""Function that returns True while the backward of a step is still to come."""

StartMeter = Callable[[], StepWatch | None]
"""Function that starts the meter of a step; ``None`` for an unobserved one."""


class Engine(ABC):
    """Way to run training steps within a limit; the engines of a model share one context."""

    name: ClassVar[str]
    """Name in messages."""
    published: ClassVar[frozenset[str]] = frozenset()
    """Names of the engine's attributes that the wrapper publishes."""
    depends_on_structure: ClassVar[bool] = True
    """True to drop measures and plans when modules or parameters of the model are exchanged."""
    plans_ahead: ClassVar[bool] = True
    """True if a plan is known before the first step under it; else a plan comes before a measure,
    which tries a step."""
    has_schedules: ClassVar[bool] = False
    """True if an algorithm finds a schedule; else plans have options alone."""
    is_portable = False
    """True if measures and plans hold for a copy of the model."""
    others: Mapping[str, Engine] = MappingProxyType({})
    """Engines whose plans this one compares with its own and may give, by `Metered.engine`."""
    takes_one: ClassVar[bool] = False
    """True if a call has one argument, the input."""
    ranks_meter_later: ClassVar[bool] = False
    """True if steps of ranks that plan together are observed after the first metered ones."""
    fallback = ""
    """Opening of the warning that the engine took a step over; the earlier engine's reason
    follows. Empty for no warning."""
    searches: Any = None
    """Background searches for better plans; ``None`` without any."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.settings = context.settings

    def check(self, options: Mapping[str, Any]) -> None:
        """Raise if the model, a setting, or an option of the plans does not suit the engine.

        Under "auto", options are those of graphs, to which other engines may hand over.
        """
        if self.settings.engine == "auto":
            check_options(options)
        elif options:
            raise TypeError(f"unknown option {next(iter(options))!r}")

    @abstractmethod
    def key(self, call: Call) -> Key:
        """Return the kind of a step; raise if the arguments cannot be planned."""

    # -- measuring and planning

    @abstractmethod
    def measure(self, key: Key, call: Call) -> Any:
        """Measure such a step, leaving no trace; return the measure.

        Raises CannotPlan if another engine has to plan this call, Unsuited if another has to plan
        every call, and NothingToPlan if no gradient is needed. An engine that does not plan ahead
        tries a step under its plan, and raises InfeasibleError if that does not keep the limit.
        """

    @abstractmethod
    def forget(self, measured: Any) -> None:
        """Drop the measure of a kind of step."""

    @abstractmethod
    def device_of(self, key: Key) -> torch.device | None:
        """Return the device of such steps; ``None`` before they were measured."""

    @abstractmethod
    def plan(self, key: Key, limit_bytes: int, reserve_bytes: int = 0) -> Any:
        """Return the plan of such steps; raise InfeasibleError if none fits beside the reserve."""

    def replan(self, old: Any, make: Callable[[int], Any]) -> Any:
        """Return a plan that includes the lessons of metered steps, or the old one.

        `make` makes a plan beside a reserve in bytes.
        """
        return make(old.reserve_bytes)

    def curve(self, key: Key, points: int, *, training: bool = False) -> tuple[Curve, torch.device]:
        """Return step time against limit, and the device of the steps.

        With `training` it is that of all plans that training may make, others' among them.
        """
        raise ValueError(f"the {self.name} engine has no curve")

    @property
    def remarks(self) -> Sequence[Any]:
        """Tables for a report on the latest plan, beside the plan's own."""
        return ()

    # -- running and learning

    @abstractmethod
    def run(self, plan: Any, call: Call, start: StartMeter) -> tuple[Any, IsPending]:
        """Run a step under a plan; return its output, and the function that tells if it is pending.

        The engine calls `start`, which starts the meter, when all work before the step is done.
        Raises CannotPlan if the model's code differs from the measured one, and PlanAgain if it
        differs and its new form has been measured.
        """

    @abstractmethod
    def learn(self, plan: Any, step: StepBytes) -> None:
        """Compare a metered step with its plan."""
