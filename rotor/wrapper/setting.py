"""Options of a wrapped model as attributes: checked where they may change, refused elsewhere."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable
from typing import Any

from torch import distributed, nn

from rotor import algorithms
from rotor._pytorch import fsdp, inductor
from rotor.common.ranks import RankError, Ranks, members_of
from rotor.engines.contract import Engine, Settings
from rotor.engines.peers import Peers, SharingRanks
from rotor.graph.planner import OPTIONS as GRAPH_OPTIONS
from rotor.tier.state import AwayState
from rotor.tier.weights import Weights
from rotor.units import check_count, parse_bytes

BACKENDS = ("fx", "inductor", "auto")
"""Accepted values of ``backend=``."""


class Setting:
    """Option of a wrapped model, kept in the settings of its driver.

    `check` returns a checked value, or raises; ``None`` means that the option cannot be changed.
    `changed` is called with the driver after a change. `shown` names the attribute of the settings
    that is read, if not the option's own.
    """

    def __init__(
        self,
        check: Callable[[Any], Any] | None = None,
        changed: Callable[[Any], object] | None = None,
        shown: str = "",
    ) -> None:
        self._check = check
        self._changed = changed
        self._shown = shown

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name
        self._shown = self._shown or name

    def __get__(self, model: Any, owner: type) -> Any:
        return self if model is None else getattr(model._driver.settings, self._shown)

    def __set__(self, model: Any, value: Any) -> None:
        if self._check is None:
            raise AttributeError(
                f"{self._name} of a model with a limit cannot be changed: wrap the model anew, by "
                f"rotor.{model._shown_name}(model.module, {self._name}=...)"
            )
        setattr(model._driver.settings, self._name, self._check(value))
        if self._changed is not None:
            self._changed(model._driver)


def check_backend(backend: str, engine: str, model: nn.Module) -> None:
    """Raise ValueError for an unknown backend, or one that compiles where nothing is captured."""
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}, expected one of {', '.join(BACKENDS)}")
    if backend != "fx":
        if engine in ("chain", "dynamic"):
            raise ValueError(
                f'backend="{backend}" compiles captured graphs, and engine="{engine}" has none: '
                'use engine="graph"'
            )
        inductor.check({parameter.device.type for parameter in model.parameters()})


def away_state(
    settings: Settings,
    optimizer: Any,
    update: str | None,
    weights: Weights | None,
) -> AwayState | None:
    """Return the homes of a model's parameters, gradients and optimizer states, if asked for."""
    if optimizer is None:
        for name, value in (("update", update), ("weights", weights)):
            if value is not None:
                raise ValueError(
                    f"{name}= is for parameters in a second tier: give offload_state=, the "
                    "optimizer, too, or leave it out"
                )
        return None
    if settings.offload is None:
        raise ValueError(
            "offload_state= needs a second tier for parameters, gradients and states: give "
            'offload="disk" or offload="host" too'
        )
    tier = settings.offload.tier
    away = AwayState(settings.module, optimizer, tier, update, weights, lambda: settings.mem_limit)
    settings.offload.coming_bytes = away.coming_home_bytes()
    return away


def checked_limit(limit: int | str | None) -> int | None:
    """Return a limit in bytes; ``None`` for the default one."""
    return None if limit is None else parse_bytes(limit)


def checked_loss_bytes(size: int | str) -> int:
    """Return the bytes that the loss needs; 0 where they are not known."""
    return parse_bytes(size, name="loss_tmp_memory_usage") if size else 0


def checked_loss(loss_fn: Any) -> Any:
    """Return a loss that can be called, or ``None``; TypeError for anything else."""
    if loss_fn is not None and not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function of the output, got {loss_fn!r}")
    return loss_fn


def checked_verbosity(verbosity: Any) -> int:
    """Return a level of messages; TypeError if it is no whole number."""
    given = int(verbosity) if isinstance(verbosity, bool) else verbosity
    return check_count(given, "verbosity", -9, 9)


def choose(engine: Engine, algo: Any, options: dict[str, Any]) -> None:
    """Set the algorithm of an engine's following plans: an algorithm, its class, or its name.

    For schedules the options are keywords of the class if `algo` is a class or a name, else of its
    ``solve``; for other plans they are set beside the constructor's.
    """
    settings = engine.settings
    if engine.has_schedules:
        settings.algorithm, settings.algorithm_options = algorithms.chosen(algo, options)
        settings.asks_for_schedule = True
        return
    given = options if algo is None else options | {"algo": algo}
    engine.check(given)
    settings.options = settings.given_options | given


def plan_anew(driver: Any) -> None:
    """Drop all plans of a driver: the following steps are planned by its settings as they are."""
    driver.context.begin_planning()
    driver.order.ask_again()
    driver.settings.limit_bytes = None


def check_names(options: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for an option that looks like a misspelt one of the known."""
    for name in options:
        near = difflib.get_close_matches(name, [*known, *GRAPH_OPTIONS], 1)
        if near and near[0] != name:
            raise TypeError(f"unknown option {name!r}: did you mean {near[0]}?")


def agree_to_share(ranks: Ranks, settings: Settings, engine: str) -> None:
    """Raise, on every rank, unless all have a model whose plans can be shared.

    This is a collective operation; `engine` names the engine that is asked first. Raises ValueError
    if an option of this rank's model is for a process that plans for itself, RankError if another
    rank's is, or if the ranks differ in what they plan.
    """

    def own() -> str:
        _check_shared(settings)
        tier = "none" if settings.offload is None else type(settings.offload.tier).__name__
        options = f'backend="{settings.backend}", verify={settings.verify!r}'
        return f"plans as {engine} with offload {tier}, {options}"

    for rank, other in enumerate(found := ranks.together(own)):
        if other != found[0]:
            raise RankError(
                f"rank 0 {found[0]}, rank {rank} {other}: give Checkpointable the same options on "
                "every rank"
            )


def peers_of(settings: Settings, known: Peers) -> Peers:
    """Return the processes that have to run one plan, since they hold parts of the parameters.

    Those that are `known` to share plans stay; a model that FSDP2 shards finds its own.
    """
    tensors = sys.modules.get("torch.distributed.tensor")
    modules = list(settings.module.modules())
    if known.ranks or tensors is None or fsdp.managed(modules) or _refusal_to_share(settings):
        return known
    parts = [p for p in settings.module.parameters() if isinstance(p, tensors.DTensor)]
    meshes = {part.device_mesh for part in parts}
    real = [mesh for mesh in meshes if distributed.get_backend(mesh.get_group(0)) != "fake"]
    members = members_of(real) if real else frozenset[int]()
    return SharingRanks(Ranks.of(members), has_collectives=True) if len(members) > 1 else known


def _check_shared(settings: Settings) -> None:
    """Raise ValueError for an option under which no program can be shared."""
    refused = _refusal_to_share(settings)
    if refused:
        raise ValueError(
            f"share_plans() is for chains and captured graphs, and {refused}: leave one of them "
            "out; each process then plans for itself, with the same gradients"
        )


def _refusal_to_share(settings: Settings) -> str:
    """Return the reason why no program can be shared; empty without one."""
    refused = ""
    if settings.engine == "dynamic":
        refused = 'engine="dynamic" decides while a step runs, and has no plan'
    elif settings.counts == "reserved":
        refused = 'counts="reserved" depends on the allocator of one process'
    elif settings.backend == "auto":
        refused = 'backend="auto" follows the times of one process'
    elif settings.graph_class is not None:
        refused = "the budgets of rotor.rockmate are those of one process"
    return refused
