"""Private names of FSDP2 (``fully_shard``) that rotor uses, checked once a model has it."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from rotor._pytorch import core

_REQUIRED = """
    distributed._composable.contract
    distributed._composable_state._module_state_mapping
    distributed.fsdp.FSDPModule._get_fsdp_state distributed.fsdp.FSDPModule.reshard
    distributed.fsdp.FSDPModule.unshard
    distributed.fsdp._fully_shard._fsdp_common.TrainingState.IDLE
    distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.lazy_init
    distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.reshard
    distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.unshard
    distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.wait_for_unshard
    distributed.fsdp._fully_shard._fsdp_state.FSDPState._lazy_init
"""
_MANAGED = "_is_fsdp_managed_module"
_OF_GROUPS = ("_training_state", "_post_forward_indices", "reduce_grads", "all_reduce_grads")
"""Attributes of a group of parameters that a forward and a backward change."""


def _module_class() -> Any:
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)


def is_loaded() -> bool:
    """Return whether FSDP2 was imported, so that a model may be sharded."""
    return _module_class() is not None


def is_unit(module: Any) -> bool:
    """Return whether ``fully_shard`` was applied to this very module."""
    known = _module_class()
    # By its type: a wrapper shows the class of the module in it.
    return known is not None and issubclass(type(module), known)


def states_of(module: nn.Module) -> dict[str, Any]:
    """Return the attribute in which ``fully_shard.state(module)`` is found; empty without one."""
    contract = sys.modules.get("torch.distributed._composable.contract")
    key = "" if contract is None else contract.STATE_KEY
    return {key: module.__dict__[key]} if key in module.__dict__ else {}


def managed(modules: Iterable[nn.Module]) -> list[bool]:
    """Return the modules with parameters that FSDP, the first or the second, manages."""
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    found = [_MANAGED in module.__dict__ for module in modules]
    return found if any(found) else []


class ShardedParameter:
    """Parameter of FSDP2: its shard, which the optimizer sees, and the whole while gathered."""

    __slots__ = ("_param", "unit")

    def __init__(self, unit: Unit, param: Any) -> None:
        self.unit = unit
        self._param = param

    @property
    def shard(self) -> nn.Parameter:
        found: nn.Parameter = self._param.sharded_param
        return found

    @property
    def whole(self) -> Any:
        """Whole parameter, with or without memory; ``None`` before it was first gathered."""
        return getattr(self._param, "_unsharded_param", None)

    @property
    def slots(self) -> list[core.Slot]:
        """Slots in its modules: (the dictionary of the module, its name)."""
        info = self._param._module_info
        modules = [info.module, *info.shared_modules]
        names = [info.param_name, *info.shared_param_names]
        return [(m._parameters, name) for m, name in zip(modules, names, strict=True)]

    @property
    def gathered_numel(self) -> int:
        """Elements of the whole parameter as it is gathered, padding included."""
        return int(self._param.padded_sharded_param_size.numel()) * self.unit.world_size

    @property
    def gathered_bytes(self) -> int:
        dtype = self._param.param_dtype or self._param.orig_dtype
        return self.gathered_numel * int(dtype.itemsize)

    @property
    def reduced_bytes(self) -> int:
        """Bytes of its whole gradient in the type in which gradients are reduced."""
        kept = self._param.param_dtype or self._param.orig_dtype
        return self.gathered_numel * int((self._param.reduce_dtype or kept).itemsize)

    @property
    def is_converted(self) -> bool:
        """True if its gradient is reduced in another type than its own."""
        return self._param.reduce_dtype not in (None, self._param.orig_dtype)

    @property
    def shard_bytes(self) -> int:
        """Bytes of this rank's shard of the gradient."""
        elements = int(self._param.sharded_param._local_tensor.numel())
        return elements * int(self._param.orig_dtype.itemsize)

    def whole_gradient(self) -> torch.Tensor | None:
        """Return the gradient that has not been reduced yet, if any."""
        found: torch.Tensor | None
        _, found, accumulated = self.gradients()
        return found if accumulated is None else accumulated

    def gradients(self) -> tuple[Any, Any, Any]:
        """Return its current gradients, for `put_gradients`."""
        whole = None if self.whole is None else self.whole.grad
        return self._param.sharded_param.grad, whole, self._param.unsharded_accumulated_grad

    def take_gradients(self) -> tuple[Any, Any, Any]:
        """Remove and return its gradients, for `put_gradients`."""
        taken = self.gradients()
        self.put_gradients((None, None, None))
        return taken

    def put_gradients(self, gradients: tuple[Any, Any, Any]) -> None:
        self._param.sharded_param.grad, whole, accumulated = gradients
        if self.whole is not None:
            self.whole.grad = whole
        self._param.unsharded_accumulated_grad = accumulated

    def local_gradient(self) -> torch.Tensor | None:
        gradient = self._param.sharded_param.grad
        return None if gradient is None else gradient._local_tensor


class Unit:
    """Result of one call of ``fully_shard``: parameters that are gathered together.

    They are gathered before the forward of each of `modules`.
    """

    def __init__(self, state: Any) -> None:
        self._state = state
        self.modules: tuple[nn.Module, ...] = tuple(state._modules)
        self.parameters = [
            ShardedParameter(self, param) for group in self._groups for param in group.fsdp_params
        ]

    @property
    def _groups(self) -> list[Any]:
        return _groups_of(self._state)

    @property
    def _mesh_info(self) -> Any:
        """Return FSDP2's record of its ranks; ``None`` without parameters."""
        return self._groups[0].mesh_info if self._groups else None

    @property
    def world_size(self) -> int:
        return int(getattr(self._mesh_info, "shard_mesh_size", 1))

    @property
    def reduces(self) -> bool:
        """True if a backward reduces gradients, or leaves them whole (gradient accumulation)."""
        return all(group.reduce_grads for group in self._groups)

    @property
    def reshards_after_forward(self) -> bool:
        return all(group.post_forward_mesh_info is not None for group in self._groups)

    @property
    def reduce_buffers(self) -> int:
        """Number of kept inputs of earlier reductions."""
        name = "reduce_scatter_max_input_buffers"  # PyTorch 2.11 has no setting: it keeps one.
        return max((int(getattr(g, name, 1)) for g in self._groups), default=0)

    @property
    def prefetches(self) -> int:
        """Largest number of other units that it has gathered ahead, in a forward or a backward."""
        asked = self._state._states_to_forward_prefetch, self._state._states_to_backward_prefetch
        return 1 + len(asked[0]) + len(asked[1])

    @property
    def gathered_bytes(self) -> int:
        return sum(p.gathered_bytes for p in self.parameters)

    @property
    def reduced_bytes(self) -> int:
        """Bytes of its whole gradients, as they are reduced."""
        return sum(p.reduced_bytes for p in self.parameters if p.shard.requires_grad)

    @property
    def all_reduced_bytes(self) -> int:
        """Bytes of shards in the type of reductions, kept to the end of a backward by replicas.

        Where gradients have that type, they are the same memory, and nothing more is kept.
        """
        replicas = getattr(self._mesh_info, "replicate_mesh_size", 1)
        kept = [p for p in self.parameters if p.shard.requires_grad and p.is_converted]
        return sum(p.reduced_bytes // self.world_size for p in kept) if replicas > 1 else 0

    @property
    def is_gathered(self) -> bool:
        return bool(self._groups) and all(group.is_unsharded for group in self._groups)

    def shares_buffers_with(self, other: Unit) -> bool:
        """Return whether both have one root: buffers of one may live on while the other runs."""
        return self._state._state_ctx is other._state._state_ctx

    @property
    def is_prepared(self) -> bool:
        """True once its root is known, from the first forward on."""
        return self._state._is_root is not None

    def prepare(self) -> None:
        """Make it a root, as its first forward would, if no root is known yet."""
        if not self.is_prepared:
            self._state._lazy_init()

    def cast_inputs(self, arg: Any) -> Any:
        """Return the input as cast by its forward, under a policy of mixed precision."""
        cast = getattr(self._state, "_cast_forward_inputs", None)
        if cast is None:
            return _cast(arg, self._state._mp_policy)
        (found,), _ = cast((arg,), {})
        return found

    def gather(self) -> None:
        for group in self._groups:
            group.lazy_init()
            group.unshard()
            group.wait_for_unshard()

    def reshard(self) -> None:
        """Release the whole parameters; do nothing if they are not gathered."""
        for group in self._groups:
            if group.is_unsharded:
                group.reshard()

    def settle(self) -> None:
        """Return to the state before its backward, so that its modules may be run again."""
        from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

        self._state._training_state = TrainingState.IDLE


def _groups_of(state: Any) -> list[Any]:
    """Return the groups of a unit's parameters; PyTorch 2.11 has one at most."""
    if hasattr(state, "_fsdp_param_groups"):
        found: list[Any] = state._fsdp_param_groups
        return found
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _cast(arg: Any, policy: Any) -> Any:
    """Return an input as cast by a policy: PyTorch 2.11 has no function of its own for it."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import _cast_fp_tensor
    from torch.distributed.utils import _apply_to_tensors

    if not (policy.cast_forward_inputs and policy.param_dtype):
        return arg
    return _apply_to_tensors(partial(_cast_fp_tensor, policy.param_dtype), arg)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a sharded tensor; any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def units() -> list[Unit]:
    """Return all units of this process; ImportError: a private name of FSDP2 is missing."""
    core.check(_REQUIRED)
    mapping = attrgetter("distributed._composable_state._module_state_mapping")(torch)
    found: dict[int, Unit] = {}
    for module, reference in list(mapping.items()):
        if is_unit(module):
            state = reference()
            if state is not None and id(state) not in found:
                found[id(state)] = Unit(module._get_fsdp_state())
    return list(found.values())


@contextmanager
def undisturbed(known: Iterable[Unit]) -> Iterator[None]:
    """Run single modules, in the middle of a forward or before the first, without a trace.

    Their changes of FSDP2 are undone afterwards: its states, the order of prefetches, gradients.
    Gradients are reduced meanwhile, under any setting, and no hooks on them are called.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    states = [unit._state for unit in known]
    contexts = list({id(s._state_ctx): s._state_ctx for s in states}.values())
    communications = list({id(s._comm_ctx): s._comm_ctx for s in states}.values())
    groups = [group for state in states for group in _groups_of(state)]
    parameters = [p for unit in known for p in unit.parameters]
    kept = [
        *((c, dict(vars(c))) for c in contexts),
        *((s, {"_training_state": s._training_state}) for s in states),
        *(
            (group, {name: copy.copy(getattr(group, name)) for name in _OF_GROUPS})
            for group in groups
        ),
    ]
    orders = [(c.post_forward_order, list(c.post_forward_order)) for c in communications]
    gradients = [(p, p.take_gradients()) for p in parameters]
    leaves = [tensor for p in parameters for tensor in (p.shard, p.whole) if tensor is not None]
    try:
        for context in contexts:
            context.iter_forward_root = None
            context.post_backward_final_callback_queued = False
            context.is_last_backward = True
        for state in states:
            state._training_state = TrainingState.IDLE
        for group in groups:
            group._training_state = TrainingState.IDLE
            group._post_forward_indices = []
            group.reduce_grads = group.all_reduce_grads = True
        for order, _ in orders:
            order.clear()
        with core.without_hooks(core.gradient_hooks_of(leaves)):
            yield
    finally:
        for owner, values in kept:
            vars(owner).update(values)
        for order, entries in orders:
            order[:] = entries
        for parameter, taken in gradients:
            parameter.put_gradients(taken)


@contextmanager
def ending_backwards_of(known: Iterable[Unit]) -> Iterator[None]:
    """End backwards for these units only; others, whole now, stay so with their gradients."""
    states = [unit._state for unit in known]
    with ExitStack() as entered:
        for context in {id(state._state_ctx): state._state_ctx for state in states}.values():
            own = [state for state in states if state._state_ctx is context]
            entered.enter_context(core.replaced(context, all_states=own))
        yield


def pretended_mesh(sizes: Mapping[str, int]) -> Any:
    """Return a device mesh of processes that need not exist; this one is their first.

    Its collectives return at once. `sizes` are those of its dimensions, by name. Raises ValueError
    if this process belongs to a process group.
    """
    from torch.distributed import device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if core.has_ranks():
        raise ValueError(
            "a mesh of pretended processes needs a process of its own: this one belongs to a "
            "process group"
        )
    count = math.prod(sizes.values())
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    return device_mesh.init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
