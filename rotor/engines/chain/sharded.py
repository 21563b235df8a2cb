"""Chains whose parameters are sharded by FSDP2 (``fully_shard``).

FSDP2 puts whole parameters in the place of sharded ones while a module runs, and takes gradients
out of ``.grad`` of the whole ones in hooks of autograd. So autograd cannot be asked about the
parameters of a stage: its B is a nested ``backward()``, which meets the hooks as a plain step
would, and one node represents all stages, with a token that requires a gradient in place of
parameters. Unsharded parameters have nodes, as in a plain chain: autograd adds up what several
stages give, before it calls hooks. Parameters gathered by a recomputation are released after it.

Stages of several ranks run collective operations in every run, measured or not: every rank
measures in step with the others, the same number of rounds. The measures are merged (times by
their mean, bytes by their maximum), and the first rank plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rotor._pytorch import core, fsdp
from rotor.algorithms.sequence import FE
from rotor.algorithms.sequence import Sequence as Operations
from rotor.chain import Chain
from rotor.common.joining import joined
from rotor.common.ranks import RankError, Ranks, members_of
from rotor.common.undisturbed import gradients_aside
from rotor.engines.chain.measure import Measuring
from rotor.engines.chain.measures import Inspection, StageMeasure
from rotor.engines.chain.plan import Plan, Schedule
from rotor.engines.chain.run import Run
from rotor.engines.chain.stages import Stage, trainable
from rotor.engines.proofs import PutBack, gradients_before
from rotor.meter import allocator


class ShardedStage(Stage):
    """Stage with parameters that FSDP2 gathers."""

    __slots__ = ("_owners", "_sharding", "units")

    def __init__(self, names: list[str], functions: list[Any], sharding: Sharding) -> None:
        super().__init__(names, functions)
        self._sharding = sharding
        own = set(self.modules())
        self.units = [unit for unit in sharding.units if own.issuperset(unit.modules)]
        """Units that are gathered while the stage runs, and released after it."""
        self._owners = [sharding.owner(slot) for slot in self._parameter_slots]

    def plain_parameters(self) -> list[nn.Parameter]:
        """Return those of `parameters` that are not sharded."""
        pairs = zip(self.parameters(), self.owners(), strict=True)
        return [parameter for parameter, owner in pairs if owner is None]

    def graph_leaves(self) -> list[nn.Parameter]:
        """Return the parameters in which its graph can end: whole ones, once they were gathered."""
        owned = zip(self._owners, self._parameter_slots, strict=True)
        return trainable(slots.get(n) if o is None else o.whole for o, (slots, n) in owned)

    def owners(self) -> list[fsdp.ShardedParameter | None]:
        """Return FSDP2's record of each of `parameters`; ``None`` for unsharded ones."""
        by_id = {id(o.shard): o for o in self._owners if o is not None}
        return [by_id.get(id(parameter)) for parameter in self.parameters()]

    def every_owner(self) -> list[fsdp.ShardedParameter]:
        """Return FSDP2's records of all parameters of the stage."""
        return [owner for owner in self._owners if owner is not None]

    def current_parameters(self) -> list[Any]:
        """Return the shards of the parameters, which persist while whole ones come and go."""
        return [
            slots.get(name) if owner is None else owner.shard
            for owner, (slots, name) in zip(self._owners, self._parameter_slots, strict=True)
        ]

    def sharded_parameters(self) -> list[Any]:
        """Return the shards, and the parameters that are not sharded."""
        return self.current_parameters()

    def merged_with(self, following: Stage) -> Stage:
        """Return one stage of this and the one after it."""
        return ShardedStage(
            [*self.names, *following.names],
            [*self.functions, *following.functions],
            self._sharding,
        )

    def reshard(self) -> None:
        """Release parameters that a recomputation gathered, if the forward would have done so."""
        for unit in self.units:
            if unit.reshards_after_forward:
                unit.reshard()


class SpansStages(RuntimeError):
    """Presence of several stages in one unit of FSDP2: none of them can be recomputed alone."""


class Sharding:
    """Sharding by FSDP2 of a model that is planned as a chain.

    The `roots` are the modules whose call is a step of the model: the model, and its wrapper. The
    `units` gather parameters of the model, and those in `around` contain it. Raises RuntimeError
    with the remedy if some modules are sharded in a way that cannot be planned.
    """

    def __init__(
        self,
        model: nn.Module,
        roots: Sequence[nn.Module],
        units: list[fsdp.Unit],
        around: Sequence[fsdp.Unit] = (),
    ) -> None:
        places = {id(module): k for k, module in enumerate([*roots, *model.modules()])}
        self.units = sorted(units, key=lambda u: min(places.get(id(m), -1) for m in u.modules))
        self._around = around
        self._is_prepared = False
        self.root = next(
            (u for u in units if any(m is root for m in u.modules for root in roots)), None
        )
        """Unit whose forward is that of the model, if any."""
        self._owners = {
            (id(slots), name): parameter
            for unit in units
            for parameter in unit.parameters
            for slots, name in parameter.slots
        }
        self._shards = [parameter for unit in units for parameter in unit.parameters]
        held = {id(slots) for m in model.modules() for slots, _ in core.parameter_slots(m)}
        plain: dict[int, core.Slot] = {}
        for module in model.modules():
            for slot in core.parameter_slots(module):
                if self.owner(slot) is None:
                    plain.setdefault(id(slot[0][slot[1]]), slot)
        self._plain = list(plain.values())
        self._mine = [p for p in self._shards if any(id(slots) in held for slots, _ in p.slots)]
        every = [*(p.shard for p in self._shards), *model.parameters()]
        meshes = {p.device_mesh for p in every if hasattr(p, "device_mesh")}
        self.ranks = Ranks.of(members_of(meshes)) if meshes else Ranks()
        """Processes that have to run the same plan."""

    def cast(self, args: Any) -> Any:
        """Return arguments as cast by FSDP2 before the model's forward."""
        self.prepare()
        return args if self.root is None else self.root.cast_inputs(args)

    def owner(self, slot: core.Slot) -> fsdp.ShardedParameter | None:
        """Return FSDP2's record of the parameter in a slot; ``None`` if it has none."""
        return self._owners.get((id(slot[0]), slot[1]))

    def stages(self, stages: Iterable[Stage]) -> list[Stage]:
        """Return the stages as sharded ones; raise SpansStages if a unit has several of them."""
        found = [ShardedStage(stage.names, stage.functions, self) for stage in stages]
        inside = {id(unit) for stage in found for unit in stage.units}
        for unit in self.units:
            if len(unit.modules) > 1 and id(unit) not in inside:
                kinds = ", ".join(type(module).__name__ for module in unit.modules)
                raise SpansStages(
                    f"one call of fully_shard([...]) has modules of several stages ({kinds}), "
                    "whose parameters come and go together: the stages cannot be recomputed one "
                    "by one. Shard each of them by a call of its own, or put them into one stage"
                )
        return list(found)

    def outer(self, stages: Sequence[Stage]) -> list[fsdp.Unit]:
        """Return the units around the stages, gathered from the first to the last backward."""
        inside = {id(u) for stage in stages for u in getattr(stage, "units", ())}
        return [unit for unit in self.units if id(unit) not in inside]

    def prepare(self) -> None:
        """Let FSDP2 decide which units are roots, as the first forward would.

        Raises RuntimeError if the model is a part of a sharded one that has not run yet.
        """
        if self._is_prepared:
            return
        for unit in self._around:
            if not unit.is_prepared:
                kind = type(unit.modules[0]).__name__
                raise RuntimeError(
                    f"the model is part of a {kind} that is sharded too and has not run yet: "
                    "measuring a part first would make it a root of its own, which FSDP2 refuses "
                    "later. Give no sample and do not call measure(): the first training step "
                    "measures"
                )
        for unit in self.units:
            unit.prepare()
        self._is_prepared = True

    # -- what a plan depends on

    def parameter_flags(self) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        """Return flags: parameters that require gradients, that lack one, units that reduce."""
        mine = self._mine
        plain = [slots[name] for slots, name in self._plain]
        required = [p.shard.requires_grad for p in mine] + [p.requires_grad for p in plain]
        absent = [
            p.shard.grad is None if p.unit.reduces else p.whole_gradient() is None for p in mine
        ]
        absent += [p.grad is None for p in plain]
        required += [unit.reshards_after_forward for unit in self.units]
        return tuple(required), (*absent, *(unit.reduces for unit in self.units))

    def lacking_gradient(self, flags: Sequence[bool]) -> set[int]:
        """Return the ids of the parameters without gradient, by the second of `parameter_flags`."""
        parameters = [p.shard for p in self._mine]
        parameters += [slots[name] for slots, name in self._plain]
        return {id(p) for p, absent in zip(parameters, flags, strict=False) if absent}

    def gradients_before(self) -> PutBack:
        """Return the function that puts the existing gradients back."""
        plain = [slots[name] for slots, name in self._plain]
        return gradients_before([p for p in plain if p is not None], self._shards)

    # -- bytes outside the stages

    def gradient_bytes(
        self, stage: Stage, measured: Sequence[int], missing: Sequence[bool]
    ) -> list[int]:
        """Return the bytes of gradients that a stage leaves, one for each of its parameters.

        `measured` are the bytes that its B left when it was measured, gradients reduced; `missing`
        flags the parameters that have no gradient yet, and get one from this stage.
        """
        assert isinstance(stage, ShardedStage)
        own = {id(unit) for unit in stage.units}
        found = []
        for owner, size, absent in zip(stage.owners(), measured, missing, strict=True):
            if owner is not None and id(owner.unit) in own and not owner.unit.reduces:
                size = owner.reduced_bytes
            is_outer = owner is not None and id(owner.unit) not in own
            # Whole gradients of parameters that an outer unit gathers are new in every step.
            is_new = owner.whole_gradient() is None if owner is not None and is_outer else absent
            found.append(size if is_new else 0)
        return found

    def final_reduce_bytes(self, stages: Sequence[Stage]) -> int:
        """Return the bytes of the final reduce-scatter (parameters outside all stages)."""
        outer = [unit for unit in self.outer(stages) if unit.reduces]
        shards = sum(p.shard_bytes for unit in outer for p in unit.parameters)
        return sum(unit.reduced_bytes for unit in outer) + shards

    def unreduced_bytes(self) -> int:
        """Return the bytes of whole gradients that the next backward leaves (accumulation)."""
        return sum(
            p.reduced_bytes
            for p in self._mine
            if not p.unit.reduces and p.shard.requires_grad and p.whole_gradient() is None
        )

    def collective_bytes(self, stages: Sequence[Stage], device: torch.device) -> int:
        """Return the bytes of collectives that persist between operations: parameters, buffers.

        These are parameters of stages that are not released after the forward, and parameters of
        the model itself. If the units have a root in common, collectives of one stage overlap with
        the next, and one block or more that are gathered ahead, or are being reduced, count too.
        Replicas of shards keep what they reduce to the end of the backward.
        """
        inside = [unit for stage in stages for unit in getattr(stage, "units", ())]
        kept = {id(unit): unit for unit in inside if not unit.reshards_after_forward}
        total = sum(self._rounded(unit, device) for unit in kept.values())
        total += self.base_bytes(device)
        total += self.all_reduced_bytes
        shared = [u for u in inside if any(u.shares_buffers_with(o) for o in self.units if o != u)]
        if shared:
            together = [*shared, *self.outer(stages)]
            buffers = max(unit.reduce_buffers for unit in together)
            ahead = max(unit.prefetches for unit in together)
            total += ahead * max(unit.gathered_bytes for unit in together)
            total += buffers * max(unit.reduced_bytes for unit in together)
        elif inside:
            total += self.deferred_free_bytes(device)
        return total

    @property
    def all_reduced_bytes(self) -> int:
        """Bytes that replicas of shards have reduced, kept to the end of a backward."""
        return sum(unit.all_reduced_bytes for unit in self.units)

    def deferred_free_bytes(self, device: torch.device) -> int:
        """Return the bytes that a thread of gloo, on the CPU, may free after the collective."""
        if device.type != "cpu":
            return 0
        inside = [unit for unit in self.units if unit is not self.root]
        return max((max(u.gathered_bytes, u.reduced_bytes) for u in inside), default=0)

    def base_bytes(self, device: torch.device) -> int:
        """Return the bytes that the model's own unit gathers before the model's forward."""
        return 0 if self.root is None else self._rounded(self.root, device)

    def _rounded(self, unit: fsdp.Unit, device: torch.device) -> int:
        return sum(allocator.rounded_bytes(p.gathered_bytes, device) for p in unit.parameters)


def find_sharding(model: nn.Module, wrapper: nn.Module | None = None) -> Sharding | None:
    """Return the sharding of a model by FSDP2; ``None`` if nothing is sharded.

    The `wrapper` represents the model, and may itself have been sharded. Raises RuntimeError if the
    model is sharded by the first FSDP, or in a way that cannot be planned.
    """
    modules = list(model.modules())
    if not (any(fsdp.managed(modules)) or any(map(fsdp.is_unit, modules))):
        return None
    if wrapper is not None:
        # Pipelines ask for it, also where the model was sharded after it was wrapped.
        vars(wrapper).update(fsdp.states_of(model))
    slots = {(id(s), name) for m in modules for s, name in core.parameter_slots(m)}
    roots = [model] if wrapper is None else [model, wrapper]
    own = {id(module) for module in [*modules, *roots]}
    every = fsdp.units()
    units = [
        unit
        for unit in every
        if any((id(s), name) in slots for p in unit.parameters for s, name in p.slots)
        or any(id(module) in own for module in unit.modules)
    ]
    if not units:
        raise RuntimeError(
            "the model is sharded by FullyShardedDataParallel, the first FSDP, whose flat "
            "parameters cannot be recomputed stage by stage: use fully_shard (FSDP2), in the "
            "settings of Accelerate and Transformers fsdp_version: 2"
        )
    around = [
        unit
        for unit in every
        if any(
            id(m) not in own and any(part is model for part in m.modules()) for m in unit.modules
        )
    ]
    return Sharding(model, roots, units, around)


class ShardedRun(Run):
    """State of one step of a sharded chain, as `Run`; nested backwards always accumulate."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, accumulate=True, **kwargs)
        self.lowest = 0
        self.anchors = (self.token.detach().requires_grad_(),)

    def back(self, i: int, need_x: bool, needs: Sequence[bool]) -> Sequence[torch.Tensor | None]:
        """Run B of stage i; its modules may be run again afterwards."""
        found = super().back(i, need_x, needs)
        stage = self.stages[i]
        if isinstance(stage, ShardedStage):
            for unit in stage.units:
                unit.settle()
        return found

    def _accumulate(
        self, i: int, root: torch.Tensor, given: torch.Tensor | None
    ) -> Sequence[torch.Tensor | None]:
        """Run the backward of stage i; return the gradients of unsharded parameters."""
        with gradients_aside(self.parameters[i]):
            super()._accumulate(i, root, given)
            return [parameter.grad for parameter in self.parameters[i]]

    def _redo(self, i: int) -> None:
        operations = self.schedule.segments[i][:-1]
        for count, (kind, k) in enumerate(operations, 1):
            self.do(kind, k)
            stage = self.stages[k]
            is_needed = kind == FE and k == i and count == len(operations)
            if isinstance(stage, ShardedStage) and not is_needed:
                stage.reshard()


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
