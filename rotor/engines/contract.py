"""The contract of engines: what the driver gives them, and what it asks of them.

An engine knows how to measure a module, to plan a step under a limit, and to run a plan. The driver
(`rotor.wrapper.driver`) decides when each of these is done, for all engines alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from rotor.algorithms.curve import Curve
from rotor.common.calls import sample_call
from rotor.common.model_state import ModelState
from rotor.common.tensor_trees import tensors_of
from rotor.engines.peers import Alone, Peers
from rotor.meter.step_meter import StepBytes, StepWatch, Verdict

__all__ = [
    "DEFAULT_SLOTS",
    "Call",
    "CannotPlan",
    "Context",
    "DefaultSlots",
    "Engine",
    "IsPending",
    "Key",
    "NothingToPlan",
    "PlanAgain",
    "Refusal",
    "Settings",
    "StartMeter",
    "Unsuited",
    "Verdict",
]


class NothingToPlan(Exception):
    """Nothing in the call needs a gradient."""


class CannotPlan(Exception):
    """The engine cannot plan such a call; the next one is asked.

    Parameters
    ----------
    error
        Raised where no other engine is left.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Unsuited(Exception):
    """The engine cannot plan this model, whatever the call."""


class PlanAgain(Exception):
    """A call has led to another capture: it needs a plan of its own before it can run."""


class DefaultSlots(int):
    """Default slot count; distinguishes "not given" from an explicit 500."""


DEFAULT_SLOTS = DefaultSlots(500)


class Key(NamedTuple):
    """The kind of a step.

    Attributes
    ----------
    measured
        Everything that a measure depends on.
    absent
        The parameters that have no gradient yet; a plan depends on it too.
    """

    measured: Any
    absent: Any


@dataclass(frozen=True)
class Call:
    """The arguments of one step; `targets` are for the loss."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    targets: tuple[Any, ...] = ()

    @staticmethod
    def of_sample(sample: Any) -> Call:
        """Return the call that a sample stands for: a tuple of arguments, or keyword arguments."""
        return Call(*sample_call(sample))

    @property
    def device(self) -> torch.device:
        """Device of the first tensor."""
        return tensors_of((self.args, dict(self.kwargs)))[0].device

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of the module."""
        return self.args, dict(self.kwargs)


@dataclass
class Settings:
    """The options of one wrapped model.

    Attributes
    ----------
    module
        The plain model.
    mem_limit
        The limit in bytes; ``None`` before it is known.
    algorithm, algorithm_options
        What finds schedules of chains, and keywords of its ``solve``.
    unsuited
        Names of engines that cannot plan the model.
    graph_class
        Engine of captured graphs, where it is not the default one.

    Other attributes are those of `rotor.Checkpointable`.
    """

    module: nn.Module
    mem_limit: int | None = None
    mem_slots: int = DEFAULT_SLOTS
    verbosity: int = 0
    preserve_rng_state: bool = True
    loss_tmp_memory_usage: int = 0
    engine: str = "auto"
    loss_fn: Callable[..., Any] | None = None
    profile: Any = "measured"
    backend: str = "fx"
    verify: str | int = "first"
    options: dict[str, Any] = field(default_factory=dict)
    algorithm: Any = None
    algorithm_options: dict[str, Any] = field(default_factory=dict)
    unsuited: set[str] = field(default_factory=set)
    graph_class: Any = None


class Refusal(NamedTuple):
    """An engine's refusal of a kind of step.

    Attributes
    ----------
    engine
        Number of the engine that takes over.
    device
        Where such steps run.
    reason
        Why, as text.
    """

    engine: int
    device: torch.device
    reason: str


@dataclass
class Context:
    """What the engines of one wrapped model share.

    Attributes
    ----------
    settings
        Options, and the module.
    wrapper
        Gives the wrapping module, which FSDP2 may shard in the place of the model; ``None`` without
        one.
    warn
        ``warn(topic, text)``: warns of the limit, once for each topic.
    structure
        The modules and parameters of the model, as they were found.
    peers
        The ranks that share plans.
    plans
        By kind of step.
    learned_loss
        Bytes of the caller's loss by `Key.measured`, where a step was metered.
    refusals
        By `Key.measured`.
    latest, latest_key
        The plan that was made, or ran, last; the kind of step that was measured, or ran, last.
    """

    settings: Settings
    wrapper: Callable[[], nn.Module | None]
    warn: Callable[[str, str], None]
    structure: ModelState
    peers: Peers = field(default_factory=Alone)
    plans: dict[Key, Any] = field(default_factory=dict)
    learned_loss: dict[Any, int] = field(default_factory=dict)
    refusals: dict[Any, Refusal] = field(default_factory=dict)
    latest: Any = None
    latest_key: Key | None = None

    def measured_key(self) -> Key:
        """Return the kind of step that was measured last; ValueError: nothing was."""
        if self.latest_key is None:
            raise ValueError("nothing was measured: call measure(sample), or train a step")
        return self.latest_key

    @property
    def module(self) -> nn.Module:
        """The plain model."""
        return self.settings.module

    def is_current(self, plan: Any) -> bool:
        """Return whether steps still run under a plan."""
        return any(known is plan for known in self.plans.values())

    def check_devices(self, arguments: Any) -> None:
        """Raise ValueError where a parameter is on another device than the arguments."""
        devices = {t.device for t in tensors_of(arguments)}
        for name, parameter in self.module.named_parameters():
            if parameter.device not in devices:
                raise ValueError(
                    f"the input is on {', '.join(sorted(map(str, devices)))} and parameter {name} "
                    f"is on {parameter.device}: move the input, or the model, with .to(device)"
                )

    def with_loss(self, output: Any, targets: Sequence[Any]) -> Any:
        """Return the loss where there are targets, else the output."""
        loss_fn = self.settings.loss_fn
        return loss_fn(output, *targets) if targets and loss_fn else output


IsPending = Callable[[], bool] | None
"""Tells whether the backward of a step is still to come."""

StartMeter = Callable[[], StepWatch | None]
"""Starts the meter of a step; ``None`` where nothing sees it."""


class Engine(ABC):
    """A way to run training steps within a limit.

    Parameters
    ----------
    context
        Shared with the other engines of the model.

    Attributes
    ----------
    name
        As in messages.
    published
        Names of the engine's own that the wrapper offers.
    depends_on_structure
        Measures and plans are dropped when modules or parameters of the model are exchanged.
    plans_ahead
        A plan is known before the first step under it.
    """

    name: ClassVar[str]
    published: ClassVar[frozenset[str]] = frozenset()
    depends_on_structure: ClassVar[bool] = True
    plans_ahead: ClassVar[bool] = True

    def __init__(self, context: Context) -> None:
        self.context = context

    @property
    def settings(self) -> Settings:
        """Options of the wrapped model."""
        return self.context.settings

    def check(self) -> None:
        """Raise where the model or an option does not go with the engine."""

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise TypeError for an option that the engine does not take."""
        if options:
            raise TypeError(f"unknown option {next(iter(options))!r}")

    def check_sharding(self) -> None:
        """Raise where the model is sharded and the engine cannot run that."""

    def is_portable(self) -> bool:
        """Return whether measures and plans hold for a copy of the model."""
        return False

    # -- calls

    def call_of(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], targets: Sequence[Any]
    ) -> Call:
        """Return the call of a step."""
        return Call(args, kwargs, tuple(targets))

    def call_of_sample(self, sample: Any) -> Call:
        """Return the call that a sample of the constructor stands for."""
        return Call.of_sample(sample)

    def prepared(self, call: Call) -> Call:
        """Return a call of `measure` as the model itself would be called."""
        return call

    @abstractmethod
    def key(self, call: Call) -> Key:
        """Return the kind of a step; raises where the arguments cannot be planned."""

    def refined(self, key: Key) -> Key:
        """Return the key under which a plan of this engine is kept."""
        return key

    # -- measuring and planning

    @abstractmethod
    def is_measured(self, key: Key) -> bool:
        """Return whether a plan can be made for such steps."""

    @abstractmethod
    def measure(self, key: Key, call: Call) -> Any:
        """Measure such a step, leaving no trace; return what was measured.

        Raises
        ------
        CannotPlan, Unsuited, NothingToPlan
            Another engine has to, for this call or altogether; or nothing needs a gradient.
        """

    @abstractmethod
    def forget(self, measured: Any) -> None:
        """Drop what was measured of a kind of step."""

    @abstractmethod
    def device_of(self, key: Key) -> torch.device:
        """Return where such steps run."""

    @abstractmethod
    def plan(self, key: Key, limit_bytes: int, reserve_bytes: int = 0) -> Any:
        """Return the plan of such steps under a limit.

        Raises
        ------
        InfeasibleError
            None fits beside the reserve.
        """

    def expect(self, plan: Any) -> None:
        """Look, before a step, whether it will need more than its plan knows."""

    def replan(self, old: Any, make: Callable[[int], Any]) -> Any:
        """Return a plan that knows what metered steps taught, or the old one.

        Parameters
        ----------
        old
            The plan that another one is to replace.
        make
            Makes a plan beside a reserve in bytes.
        """
        return make(old.reserve_bytes)

    def begin_planning(self) -> None:
        """Drop what plans left behind: the limit or an option has changed."""

    def choose(self, algo: Any, options: dict[str, Any]) -> None:
        """Set options of the following plans, and the algorithm, where it is given."""
        given = options if algo is None else options | {"algo": algo}
        self.check_options(given)
        self.settings.options = self.settings.options | given

    def has_measures(self) -> bool:
        """Return whether anything was measured."""
        return False

    def limit_on(self, device: torch.device, given: Callable[[torch.device], int]) -> int:
        """Return the limit of a step on a device, from the limit that was given."""
        return given(device)

    def take_over(self, reason: str) -> None:
        """Warn, where that is due, that earlier engines have refused a kind of step."""

    def try_out(self, key: Key, call: Call) -> None:
        """Raise InfeasibleError where this engine could not keep the limit of another's plan."""

    def result(self, plan: Any) -> Any:
        """Return what `compute_sequence` gives of a plan."""
        return None

    def curve(self, key: Key, points: int) -> tuple[Curve, torch.device]:
        """Return step time against limit, and where steps run."""
        raise ValueError(f"the {self.name} engine has no curve")

    def load(self, key: Key, source: Any, limit_bytes: int) -> Any:
        """Return a plan of such steps that was saved."""
        raise ValueError(
            f'engine="{self.name}" decides while a step runs, and has no plan to load: give '
            'engine="chain" or "graph"'
        )

    # -- running and learning

    @abstractmethod
    def run(self, plan: Any, call: Call, start: StartMeter) -> tuple[Any, IsPending]:
        """Run a step under a plan; return its output, and whether its backward is to come.

        Parameters
        ----------
        plan
            The plan.
        call
            The arguments.
        start
            Starts what meters the step, when all that comes before a step is done.

        Raises
        ------
        CannotPlan
            The model's code is not what was measured.
        PlanAgain
            The same, and what it is now has been measured.
        """

    def watch(self, plan: Any) -> StepWatch | None:
        """Return what sees a step that is not metered; ``None`` where nothing does."""
        return None

    @abstractmethod
    def learn(self, plan: Any, step: StepBytes) -> None:
        """Compare one of the first metered steps of a plan with the plan."""

    def learn_again(self, plan: Any, step: StepBytes) -> None:
        """Compare a step that was metered later with what its plan knows."""

    def remarks(self, plan: Any, key: Key | None) -> list[Any]:
        """Return tables that reports show beside those of a plan."""
        return []
