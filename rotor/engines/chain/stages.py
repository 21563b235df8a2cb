"""Stages of a chain as PyTorch modules: finding them, running one, and the ends of its graph.

A stage is one module, or several in a row that cannot be cut apart: one that begins in place or
only views its input belongs to the module before it.

Stages run apart from each other. An input that requires gradients has a node before it, as in the
plain model, where it has the graph of earlier stages: a stage may ask. Large outputs are handed on
by a node that keeps nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import Function
from torch.autograd.graph import saved_tensors_hooks

from rotor._pytorch import core
from rotor._pytorch.traces import OwnParametrizations, are_parametrizations_cached
from rotor.common.dependencies import Dependencies, Record
from rotor.common.places import Place
from rotor.common.ranks import Ranks, wait_for
from rotor.common.tensor_trees import Flags, tree_tensors, with_tensors
from rotor.common.undisturbed import buffers_copied


class Stage:
    """Stage of a chain: modules, or callables without parameters, in a row, with dotted names."""

    __slots__ = (
        "_dependencies",
        "_is_parallel",
        "_parameter_slots",
        "all_slots",
        "asks",
        "buffers",
        "functions",
        "mutable_buffers",
        "names",
        "read",
        "state",
        "written",
    )

    def __init__(self, names: list[str], functions: list[Callable[[Any], Any]]) -> None:
        self.names = names
        self.functions = functions
        self._parameter_slots: list[core.Slot] = []
        self.buffers: list[core.Slot] = []
        self.mutable_buffers: list[core.Slot] | None = None
        """Buffers that a forward changes, to be copied for reruns; every one if ``None``."""
        self.state: list[Place] = []
        """Other state that a forward depends on and that the stages change."""
        self.written: list[core.Slot] = []
        """Parameters that a forward writes to."""
        self.asks = False
        """True if a forward gives other bits where no graph is recorded."""
        self.all_slots: Sequence[core.Slot] = ()
        """Parameters and buffers of the whole chain."""
        self.read: set[int] = set()
        """Ids of the parameters, and of other stages' buffers, that a forward reads."""
        self._dependencies: Dependencies | None = None
        self._is_parallel = core.is_distributed()
        for module in self.modules():
            self._parameter_slots += core.parameter_slots(module)
            self.buffers += core.buffer_slots(module)

    @property
    def name(self) -> str:
        """Name of the stage: its functions' names, joined."""
        return "+".join(self.names)

    def __call__(self, x: Any) -> Any:
        """Apply the functions; what they cache of parametrizations belongs to this run's graph."""
        if are_parametrizations_cached():
            with OwnParametrizations():
                return self._applied(x)
        return self._applied(x)

    def _applied(self, x: Any) -> Any:
        for function in self.functions:
            x = function(x)
        if self._is_parallel and type(x) is not torch.Tensor:
            wait_for(tree_tensors(x))  # A recomputed output may have no reader.
        return x

    def record(self) -> Record:
        """Return a record of the state that the functions depend on, as it is now."""
        found = None if self._dependencies is None else self._dependencies.recorded()
        if found is None:
            self._dependencies = Dependencies(
                zip(self.names, self.functions, strict=True),
                with_parameters=not self.sharded_parameters(),
            )
            found = self._dependencies.recorded()
        assert found is not None
        return Record(found)

    def slots(self) -> list[core.Slot]:
        """Return the slots of its parameters and buffers."""
        return [*self._parameter_slots, *self.buffers]

    def on_copies(self) -> AbstractContextManager[list[tuple[core.Slot, torch.Tensor]]]:
        """Return a context with copies of its buffers; it gives the originals with their slots."""
        return buffers_copied(self.buffers, with_leaves=True)

    def others(self) -> set[int]:
        """Return the ids of other stages' tensors that it does not read, though it reaches them."""
        ids = [set(map(id, map(core.value_in, s))) for s in (self.all_slots, self.slots())]
        return ids[0] - ids[1] - self.read

    def note_written(self, tensors: Sequence[Any]) -> None:
        """Note that a forward writes to these parameters or buffers."""
        ids = set(map(id, tensors))
        self.written += [slot for slot in self._parameter_slots if id(slot[0][slot[1]]) in ids]
        buffers = [slot for slot in self.buffers if id(slot[0][slot[1]]) in ids]
        self.mutable_buffers = [*(self.mutable_buffers or ()), *buffers]

    def is_of_layers(self) -> bool:
        """Return whether the stage holds PyTorch's own layers only, without hooks."""
        return all(isinstance(function, nn.Module) for function in self.functions) and all(
            type(module).__module__.startswith("torch.nn.modules.") and not core.has_hooks(module)
            for module in self.modules()
        )

    def modules(self) -> Iterator[nn.Module]:
        """Yield every module in the stage, once."""
        seen: set[nn.Module] = set()
        for function in self.functions:
            if isinstance(function, nn.Module):
                for module in function.modules():
                    if module not in seen:
                        seen.add(module)
                        yield module

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that require a gradient now, once each."""
        return trainable(self.current_parameters())

    plain_parameters = parameters
    """Function that returns those among them that autograd sees, which FSDP2 does not gather."""

    def graph_leaves(self) -> list[nn.Parameter]:
        """Return the parameters in which its graph can end."""
        return self.parameters()

    def current_parameters(self) -> list[Any]:
        """Return the current contents of the parameter slots recorded at construction."""
        return list(map(core.value_in, self._parameter_slots))

    def sharded_parameters(self) -> list[Any]:
        """Return the parameters that come and go while the functions run; none without FSDP2."""
        return []

    def merged_with(self, following: Stage) -> Stage:
        """Return one stage of this and the one after it."""
        return Stage([*self.names, *following.names], [*self.functions, *following.functions])

    def __repr__(self) -> str:
        return f"<Stage {self.name}>"


def trainable(parameters: Iterable[Any]) -> list[nn.Parameter]:
    """Return those of the parameters that require a gradient, once each."""
    found = {id(p): p for p in parameters if p is not None and p.requires_grad}
    return list(found.values())


def is_plain_sequential(module: Any) -> bool:
    """Return whether calling `module` only calls its children in a row."""
    return (
        isinstance(module, nn.Sequential)
        and type(module).forward is nn.Sequential.forward
        and "forward" not in module.__dict__
    )


def find_stages(model: nn.Module, ranks: Ranks | None = None) -> list[Stage]:
    """Return one stage for each leaf of a Sequential, nested Sequentials explored.

    A nested Sequential that has hooks of its own, on any of the ranks, stays one stage, so that
    they run. Raises
    TypeError if `model` is no Sequential, or one with a forward of its own.
    """
    if not is_plain_sequential(model):
        raise TypeError(
            f"the chain engine needs an nn.Sequential, got {type(model).__name__}"
            + (" with a forward of its own" if isinstance(model, nn.Sequential) else "")
            + ": write the model as nn.Sequential(stage, stage, ...), where each stage takes what "
            "the one before it returns (rotor.models has many), or wrap an nn.Sequential inside "
            "the model, such as model.features"
        )
    named = model.named_modules(remove_duplicate=False)
    whole = {name for name, module in named if core.has_hooks(module)}
    if ranks is not None:
        whole = whole.union(*ranks.exchange(whole))
    stages = list(_stages_of("", model, whole))
    if not stages:
        raise ValueError("the nn.Sequential is empty: give it one stage at least")
    return stages


def _stages_of(prefix: str, module: nn.Module, whole: set[str]) -> Iterator[Stage]:
    # named_children() would drop a module that is used twice.
    for name, child in core.child_modules(module):
        dotted = f"{prefix}{name}"
        if is_plain_sequential(child) and dotted not in whole:
            yield from _stages_of(f"{dotted}.", child, whole)
        else:
            yield Stage([dotted], [child])


def shared_parameters(stages: Iterable[Stage]) -> set[int]:
    """Return the ids of the parameters that more than one of the stages has."""
    found: set[int] = set()
    shared: set[int] = set()
    for stage in stages:
        ids = {id(parameter) for parameter in stage.parameters()}
        shared |= found & ids
        found |= ids
    return shared


def made_gradients(
    stages: Sequence[Stage],
    sizes: Sequence[Sequence[int]],
    lacking: Iterable[int],
    shared: set[int],
) -> tuple[list[list[bool]], list[int]]:
    """Return flags of each stage's parameters whose lasting gradients it makes, and sums in bytes.

    `sizes` are the bytes of the gradients of the stages' parameters. `lacking` has the ids of the
    parameters whose gradients last: the last stage that has one makes it. `shared` has those of
    several stages: a stage's gradient is added to that of a later one. The sums are, by stage, the
    largest that it completes.
    """
    left, waiting = set(lacking), set[int]()
    flags, sums = [], []
    for stage, own in zip(reversed(stages), reversed(sizes), strict=True):
        ids = [id(parameter) for parameter in stage.parameters()]
        flags.append([i in left for i in ids])
        left.difference_update(ids)
        sums.append(max([b for i, b in zip(ids, own, strict=True) if i in waiting], default=0))
        waiting.update(shared.intersection(ids))
    return flags[::-1], sums[::-1]


_HANDOFF_BYTES = 16_384
"""Size below which outputs are kept through their backward: a handoff would cost more time."""


@cache
def token_of(device: torch.device) -> torch.Tensor:
    """Return a scalar that stands for values of a device without their memory."""
    return torch.zeros((), device=device)


@cache
def source_of(device: torch.device) -> torch.Tensor:
    """Return the leaf before the inputs of stages on a device; no gradient is kept in it."""
    return torch.zeros((), device=device, requires_grad=True)


class _Handoff(Function):
    """Root of a stage's graph: its backward returns the gradient and keeps nothing."""

    @staticmethod
    def forward(ctx: Any, cell: list[Any], token: torch.Tensor, *outputs: torch.Tensor) -> Any:
        ctx.cell = cell
        return token.detach()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return None, None, *ctx.cell.pop()


class _Input(Function):
    """Node before an input, in the place of earlier stages: keeps the gradient that arrives."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        (ctx.gradient,) = gradients
        return None, None


_apply_handoff = core.bare_apply(_Handoff)
_apply_input = core.bare_apply(_Input)


def root_of(
    outputs: list[torch.Tensor], token: torch.Tensor
) -> tuple[torch.Tensor, list[Any] | None]:
    """Return the root of a stage's graph, and its backward's cell of gradients, if it has one."""
    if len(outputs) == 1 and outputs[0].nbytes < _HANDOFF_BYTES:
        return outputs[0], None
    cell: list[Any] = []
    return _apply_handoff(cell, token, *outputs), cell


def leaf_flags(value: Any) -> Flags:
    """Return for each tensor of a value whether it is a leaf."""
    return tuple(tensor.is_leaf for tensor in tree_tensors(value))


def as_inputs(
    value: Any, flags: Flags, leaf: torch.Tensor, leaves: Flags | None = None
) -> tuple[Any, list[torch.Tensor]]:
    """Return a copy of a stage's input that shares storages, and those of its tensors with a flag
    set.

    The flags tell which tensors require gradients; each has a node before it that follows `leaf`,
    but for those that `leaves` names, which become leaves themselves (by default none).
    """
    tensors = tree_tensors(value)
    found = [
        tensor.detach()
        if not flag
        else tensor.detach().requires_grad_()
        if leaves is not None and leaves[k]
        else _apply_input(leaf, tensor.detach())
        for k, (tensor, flag) in enumerate(zip(tensors, flags, strict=True))
    ]
    wanted = [tensor for tensor, flag in zip(found, flags, strict=True) if flag]
    return found[0] if tensors and value is tensors[0] else with_tensors(value, found), wanted


def arrived_gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient that a backward through everything left at an input of `as_inputs`."""
    return tensor.grad if tensor.is_leaf else getattr(tensor.grad_fn, "gradient", None)


def _drop(tensor: torch.Tensor) -> None:
    """Keep nothing of a tensor that a graph saves."""


def _refuse(_: None) -> torch.Tensor:
    raise RuntimeError(
        "a stage of the chain computes gradients in its forward, and branches on whether they are "
        'enabled, so that it can only run where its graph is kept: use engine="dynamic"'
    )


keeping_nothing = partial(saved_tensors_hooks, _drop, _refuse)
"""Context in which graphs are recorded that keep no tensors."""


def peak_estimate(
    forward: Callable[[], Any], parameters: Iterable[torch.Tensor], others: Iterable[torch.Tensor]
) -> int:
    """Return roughly the bytes of a step without recomputation; the forward runs, and keeps none.

    They are those of the saved tensors other than the parameters and `others`, and the gradients
    that the backward has made by then; two of them, as large as a saved tensor, are in flight.
    """
    gradients = {
        core.storage_identity(p): p.nbytes if p.requires_grad and p.grad is None else 0
        for p in parameters
    }
    known = set(map(core.storage_identity, others))
    references: list[Any] = []
    saved: list[tuple[int, int]] = []
    kept = 0

    def keep(tensor: torch.Tensor) -> None:
        nonlocal kept
        for part in core.strided_parts(tensor):
            place = core.storage_identity(part)
            if place in gradients:
                saved.append((kept, gradients[place]))
            elif place not in known:
                known.add(place)
                references.append(core.storage_reference(part))
                kept += part.untyped_storage().nbytes()
                saved.append((kept + 2 * part.untyped_storage().nbytes(), 0))

    with saved_tensors_hooks(keep, _refuse), torch.enable_grad():
        forward()
    peak, grown = 0, 0
    for level, gradient in reversed(saved):
        grown += gradient
        peak = max(peak, level + grown)
    return peak
