"""Collective measuring of a chain, and one plan for all ranks.

Stages of several ranks run collective operations in every run, measured or not: every rank
measures in step with the others, the same number of rounds. The measures are merged (times by
their mean, bytes by their maximum), and the first rank plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from rotor._pytorch import fsdp
from rotor.algorithms.sequence import Sequence as Operations
from rotor.chain import Chain
from rotor.common.joining import joined
from rotor.common.ranks import RankError, Ranks
from rotor.common.undisturbed import gradients_aside
from rotor.engines.chain.measure import Measuring
from rotor.engines.chain.measures import Inspection, StageMeasure
from rotor.engines.chain.plan import Plan, Schedule
from rotor.engines.chain.sharded import ShardedRun, ShardedStage, Sharding
from rotor.engines.chain.stages import Stage
from rotor.meter import allocator

_TIMES = ("forward_ns", "record_ns", "backward_ns", "loss_ns")
_SAME = ("name", "flags")


class ShardedMeasuring(Measuring):
    """Measuring of the stages of a sharded model, on every rank at once."""

    run_class = ShardedRun
    # FSDP2 fills and frees parameters as stages run.
    sees_writes = False

    @staticmethod
    @contextmanager
    def around(stage: Stage) -> Iterator[None]:
        """Gather the stage's units, so that its leaves are known; the units around it wait."""
        assert isinstance(stage, ShardedStage)
        with fsdp.ending_backwards_of(stage.units):
            for unit in stage.units:
                unit.gather()
            yield
            for unit in stage.units:
                unit.settle()

    def stage(self, i: int) -> StageMeasure:
        """Measure stage i; its units reduce their gradients, the units around it wait."""
        with fsdp.ending_backwards_of(self._units(i)):
            return super().stage(i)

    def before(self, i: int) -> None:
        """Gather the parameters of units that stay gathered after their forward, as in a step."""
        for unit in self._units(i):
            if not unit.reshards_after_forward:
                unit.gather()

    def back(self, i: int) -> Sequence[torch.Tensor | None]:
        """Run B of stage i, and take the gradients from their place in FSDP2."""
        plain = iter(super().back(i))
        stage = self._stage(i)
        found: list[torch.Tensor | None] = []
        for owner in stage.owners():
            if owner is None:
                found.append(next(plain))
            else:
                whole = owner.whole_gradient()
                found.append(owner.local_gradient() if whole is None else whole)
                owner.put_gradients((None, None, None))
        return found

    def gradient_bytes(self, i: int, found: Sequence[torch.Tensor | None]) -> tuple[int, ...]:
        """Return the bytes of gradients; the rest of their common buffer counts with the first."""
        del i
        present = [g for g in found if g is not None]
        sizes = [0 if g is None else g.numel() * g.element_size() for g in found]
        total = allocator.storage_bytes(g for g in present if g.device == self.device)
        if sizes:
            sizes[0] += max(0, total - sum(sizes))
        return tuple(sizes)

    def _stage(self, i: int) -> ShardedStage:
        stage = self.stages[i]
        assert isinstance(stage, ShardedStage)
        return stage

    def _units(self, i: int) -> list[fsdp.Unit]:
        return self._stage(i).units


@contextmanager
def measuring(sharding: Sharding, stages: Sequence[Stage]) -> Iterator[None]:
    """Set gradients aside and gather the units around the stages of a sharded model, in a context.

    The context is entered inside of the model's forward or before the first one.
    """
    plain = [parameter for stage in stages for parameter in stage.plain_parameters()]
    with ExitStack() as stack:
        stack.enter_context(fsdp.undisturbed(sharding.units))
        for unit in sharding.outer(stages):
            if not unit.is_gathered:
                unit.gather()
                stack.callback(unit.reshard)
        try:
            with gradients_aside(plain):
                yield
        finally:
            for stage in stages:
                if isinstance(stage, ShardedStage):
                    for unit in stage.units:
                        unit.reshard()


def joined_measures(ranks: Ranks, inspection: Inspection) -> Inspection:
    """Return all ranks' mean times and largest bytes; raise RankError if their stages differ."""
    bare = replace(inspection, stages=[], device=torch.device("cpu"), reasons={})
    everyone = ranks.exchange((bare, inspection.reasons))
    found = [one for one, _ in everyone]
    first = found[0].measures
    for rank, measures in enumerate(one.measures for one in found):
        for mine, other in zip(first, measures, strict=False):
            _check_same(mine, other, rank)
        if len(measures) != len(first):
            raise RankError(
                f"rank 0 has {len(first)} stages, rank {rank} has {len(measures)}: every rank "
                "needs the same model"
            )
    every = {i: reason for _, one in reversed(everyone) for i, reason in one.items()}
    return replace(
        joined(found, mean=_TIMES),
        stages=inspection.stages,
        device=inspection.device,
        reasons=dict(sorted(every.items())),
    )


def with_final_reduce(sharding: Sharding, inspection: Inspection) -> Inspection:
    """Return the measure with the final reductions of units around the stages included."""
    first = inspection.measures[0]
    last = sharding.final_reduce_bytes(inspection.stages)
    peak = max(first.backward_peak_bytes, last)
    return replace(
        inspection, measures=[replace(first, backward_peak_bytes=peak), *inspection.measures[1:]]
    )


def _check_same(own: StageMeasure, other: StageMeasure, rank: int) -> None:
    for name in _SAME:
        if getattr(own, name) != getattr(other, name):
            raise RankError(
                f"rank 0 has a stage {own.name} with {name} {getattr(own, name)}, where rank "
                f"{rank} has {other.name} with {getattr(other, name)}: every rank needs the same "
                "model, with the same parameters frozen, and inputs of the same kind"
            )


def share_loss(ranks: Ranks, learned_loss: dict[Any, int], measured: Any) -> None:
    """Set the learned need of the loss to the largest that any rank knows, if one does."""
    learned = learned_loss.get(measured)
    found = ranks.exchange_ints(learned is not None, learned or 0)
    known = [size for is_known, size in found if is_known]
    if known:
        learned_loss[measured] = max(known)


def plan_once(
    ranks: Ranks,
    make: Callable[[int, int], Plan],
    limit_bytes: int,
    reserve_bytes: int,
    chain: Chain,
    inspection: Inspection,
    *,
    plain_tail: bool,
) -> Plan:
    """Return the plan that `make(limit, reserve)` gives on the first rank, on all of them.

    The least limit of all ranks holds, and their largest reserve. The inspection and its chain are
    equal on all ranks; with `plain_tail`, plain autograd may run the last stages. Raises
    InfeasibleError on every rank if no schedule fits.
    """
    limit, reserve = ranks.joint_limit(limit_bytes, reserve_bytes)
    own: list[Plan] = []

    def decide() -> tuple[Any, int, str | int, str]:
        own.append(make(limit, reserve))
        plan = own[0]
        return plan.sequence.codes, plan.executor_bytes, plan.verify, plan.proved.unproved

    codes, executor_bytes, verify, unproved = ranks.decide(decide)
    if own:
        return own[0]
    sequence = Operations(codes, chain)
    plan = Plan(
        inspection,
        chain,
        sequence,
        Schedule(sequence, len(chain), plain_tail=plain_tail, head=inspection.plain[0]),
        limit,
        executor_bytes,
        reserve_bytes=reserve,
        verify=verify,
    )
    plan.proved.unproved = unproved
    return plan
