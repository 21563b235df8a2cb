"""Chains whose parameters are sharded by FSDP2 (``fully_shard``).

FSDP2 puts whole parameters in the place of sharded ones while a module runs, and takes gradients
out of ``.grad`` of the whole ones in hooks of autograd. So autograd cannot be asked about the
parameters of a stage: its B is a nested ``backward()``, which meets the hooks as a plain step
would, and one node represents all stages, with a token that requires a gradient in place of
parameters. Unsharded parameters have nodes, as in a plain chain: autograd adds up what several
stages give, before it calls hooks. Parameters gathered by a recomputation are released after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from rotor._pytorch import core, fsdp
from rotor.algorithms.sequence import FE
from rotor.common.ranks import Ranks, members_of
from rotor.common.undisturbed import gradients_aside
from rotor.engines.chain.run import Run
from rotor.engines.chain.stages import Stage
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

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that require a gradient now, shards for sharded ones, once each."""
        found: dict[int, nn.Parameter] = {}
        for owner, (slots, name) in zip(self._owners, self._parameter_slots, strict=True):
            parameter = slots.get(name) if owner is None else owner.shard
            if parameter is not None and parameter.requires_grad:
                found[id(parameter)] = parameter
        return list(found.values())

    def plain_parameters(self) -> list[nn.Parameter]:
        """Return those of `parameters` that are not sharded."""
        pairs = zip(self.parameters(), self.owners(), strict=True)
        return [parameter for parameter, owner in pairs if owner is None]

    def graph_leaves(self) -> list[nn.Parameter]:
        """Return the parameters in which its graph can end: whole ones, once they were gathered."""
        found: dict[int, nn.Parameter] = {}
        for owner, (slots, name) in zip(self._owners, self._parameter_slots, strict=True):
            parameter = slots.get(name) if owner is None else owner.whole
            if parameter is not None and parameter.requires_grad:
                found[id(parameter)] = parameter
        return list(found.values())

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

    def splits_backward(self) -> bool:
        """Return False: the graph does not show all parameters. A second backward is refused."""
        return False

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
