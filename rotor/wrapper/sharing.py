"""Conditions under which ranks may share their plans."""

from __future__ import annotations

from rotor.common.ranks import RankError, Ranks
from rotor.engines.contract import Settings


def agree_to_share(ranks: Ranks, settings: Settings, engine: str) -> None:
    """Raise, on every rank, unless all have a model whose plans can be shared.

    This is a collective operation; `engine` names the engine that is asked first. Raises ValueError
    if an option of this rank's model is for a process that plans for itself, RankError if another
    rank's is, or if the ranks differ in what they plan.
    """

    def own() -> str:
        _check(settings)
        tier = "none" if settings.offload is None else type(settings.offload.tier).__name__
        return f"plans as {engine} with offload {tier} and verify={settings.verify!r}"

    for rank, other in enumerate(found := ranks.together(own)):
        if other != found[0]:
            raise RankError(
                f"rank 0 {found[0]}, rank {rank} {other}: give Checkpointable the same options on "
                "every rank"
            )


def _check(settings: Settings) -> None:
    """Raise ValueError for an option under which no program can be shared."""
    refused = None
    if settings.engine == "dynamic":
        refused = 'engine="dynamic" decides while a step runs, and has no plan'
    elif settings.backend != "fx":
        refused = f'backend="{settings.backend}" compiles for one process what its plan needs'
    elif settings.counts == "reserved":
        refused = 'counts="reserved" depends on the allocator of one process'
    elif settings.graph_class is not None:
        refused = "the budgets of rotor.rockmate are those of one process"
    if refused is not None:
        raise ValueError(
            f"share_plans() is for chains and captured graphs, and {refused}: leave one of them "
            "out; each process then plans for itself, with the same gradients"
        )
