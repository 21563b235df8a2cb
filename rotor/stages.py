"""Stages of a chain as PyTorch modules: finding them in a Sequential, and running one.

A stage is one module, or several in a row that cannot be cut apart: one that begins in place or
only views its input belongs to the module before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rotor import _fsdp, _torch
from rotor.places import Place


class Stage:
    """One stage of a chain: functions applied in a row.

    Parameters
    ----------
    names
        Dotted names of the functions in the model.
    functions
        Modules, or callables without parameters.

    Attributes
    ----------
    buffers
        Where the stage's buffers stand: (the dictionary of their module, their name).
    mutable_buffers
        Those that a forward changes; a recomputation runs on copies of them. ``None`` when nobody
        looked: then every buffer is taken for one.
    state
        Other state that a forward depends on and that the stages change.
    """

    __slots__ = (
        "_parameter_slots",
        "buffers",
        "functions",
        "mutable_buffers",
        "names",
        "state",
    )

    def __init__(self, names: list[str], functions: list[Callable[[Any], Any]]) -> None:
        self.names = names
        self.functions = functions
        self._parameter_slots: list[_torch.Slot] = []
        self.buffers: list[_torch.Slot] = []
        self.mutable_buffers: list[_torch.Slot] | None = None
        self.state: list[Place] = []
        for module in self.modules():
            self._parameter_slots += _torch.parameter_slots(module)
            self.buffers += _torch.buffer_slots(module)

    @property
    def name(self) -> str:
        """The name of the stage: its functions' names, joined."""
        return "+".join(self.names)

    def __call__(self, x: Any) -> Any:
        """Apply the functions."""
        for function in self.functions:
            x = function(x)
        return x

    def modules(self) -> Iterator[nn.Module]:
        """Every module in the stage, once."""
        seen: set[nn.Module] = set()
        for function in self.functions:
            if isinstance(function, nn.Module):
                for module in function.modules():
                    if module not in seen:
                        seen.add(module)
                        yield module

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that require a gradient now, once each."""
        found = {}
        for slots, name in self._parameter_slots:
            parameter = slots.get(name)
            if parameter is not None and parameter.requires_grad:
                found[id(parameter)] = parameter
        return list(found.values())

    def graph_leaves(self) -> list[nn.Parameter]:
        """The parameters that its graph can end in."""
        return self.parameters()

    def on_any_rank(self, flag: bool) -> bool:
        """Whether a flag holds on any rank that runs this stage together with others."""
        return flag

    def standing(self) -> list[Any]:
        """Whatever stands where the parameters stood when the stage was made."""
        return [slots.get(name) for slots, name in self._parameter_slots]

    def merged_with(self, following: Stage) -> Stage:
        """One stage of this and the one after it."""
        return Stage([*self.names, *following.names], [*self.functions, *following.functions])

    def __repr__(self) -> str:
        return f"<Stage {self.name}>"


def is_plain_sequential(module: Any) -> bool:
    """Whether calling `module` does nothing but call its children in a row."""
    return (
        isinstance(module, nn.Sequential)
        and type(module).forward is nn.Sequential.forward
        and "forward" not in module.__dict__
    )


def find_stages(model: nn.Module) -> list[Stage]:
    """One stage for each leaf of a Sequential, nested Sequentials explored.

    A nested Sequential that has hooks of its own stays one stage, so that they run.

    Raises
    ------
    TypeError
        `model` is no Sequential, or one with a forward of its own.
    """
    if not is_plain_sequential(model):
        raise TypeError(
            f"the chain engine needs an nn.Sequential, got {type(model).__name__}"
            + (" with a forward of its own" if isinstance(model, nn.Sequential) else "")
            + ": write the model as nn.Sequential(stage, stage, ...), where each stage takes what "
            "the one before it returns (rotor.models has many), or wrap an nn.Sequential inside "
            "the model, such as model.features"
        )
    stages: list[Stage] = []

    def explore(prefix: str, module: nn.Module) -> None:
        # named_children() would drop a module that is used twice.
        for name, child in _torch.child_modules(module):
            dotted = f"{prefix}{name}"
            if is_plain_sequential(child) and not _torch.has_hooks(child):
                explore(f"{dotted}.", child)
            else:
                stages.append(Stage([dotted], [child]))

    explore("", model)
    if not stages:
        raise ValueError("the nn.Sequential is empty: there is nothing to run")
    return stages


def refuse_sharded(model: nn.Module, planned_as: str = "a graph") -> None:
    """Raise when FSDP swaps parameters of the model while it runs.

    Parameters
    ----------
    model
        The model.
    planned_as
        What it would be planned as.

    Raises
    ------
    RuntimeError
        Names the module.
    """
    if not _fsdp.is_loaded():
        return
    modules = dict(model.named_modules())
    managed = _fsdp.managed(modules.values()) or [False] * len(modules)
    for (name, module), is_managed in zip(modules.items(), managed, strict=True):
        if is_managed or _fsdp.is_unit(module):
            where = f"module {name}" if name else "the model"
            raise RuntimeError(
                f"{where} is sharded by fully_shard (FSDP2): its parameters are swapped while it "
                f"runs, and planned as {planned_as} it would silently lose gradients. Leave the "
                'engine at "auto", which plans an nn.Sequential as a chain and any other model by '
                "its sharded blocks (docs/fsdp.md); or use DistributedDataParallel"
            )


def refuse_replicated(model: nn.Module) -> None:
    """Raise where a part of the model is a DistributedDataParallel, which has to be outside.

    Raises
    ------
    TypeError
        Names the module.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            kind = type(module).__name__
            where = f"module {name}" if name else "the model"
            raise TypeError(
                f"{where} is a {kind}: what it does with gradients would be lost, or done twice, "
                "where they are computed under a plan. Wrap the other way round: "
                f"{kind}(rotor.Checkpointable(model))"
            )


def shared_parameters(stages: Iterable[Stage]) -> set[int]:
    """Return the ids of the parameters that more than one of the stages has."""
    found: set[int] = set()
    shared: set[int] = set()
    for stage in stages:
        ids = {id(parameter) for parameter in stage.parameters()}
        shared |= found & ids
        found |= ids
    return shared


@contextmanager
def gradients_aside(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Parameters without gradients inside, and with those that they had afterwards."""
    kept = [(parameter, parameter.grad) for parameter in parameters]
    try:
        for parameter, _ in kept:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


def _draws_in_cudnn(tensor: torch.Tensor) -> bool:
    """Whether a recurrent layer with such weights takes its dropout from cuDNN."""
    return tensor.is_cuda and bool(torch.backends.cudnn.is_acceptable(tensor))


class Structure:
    """What a plan depends on in a model, read fast before every step.

    Parameters
    ----------
    model
        The wrapped model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules = list(model.modules())
        self._types = [type(module) for module in self._modules]
        self._children = [
            (children, tuple(children.values()))
            for children in map(_torch.child_slots, self._modules)
        ]
        self._parameters = [slot for m in self._modules for slot in _torch.parameter_slots(m)]
        self._managed = _fsdp.managed(self._modules)
        self._recurrent = [m for m in self._modules if isinstance(m, nn.RNNBase)]

    @property
    def parameters(self) -> list[_torch.Slot]:
        """Where parameters stand: (the dictionary of their module, their name)."""
        return self._parameters

    def is_current(self) -> bool:
        """Whether the model has the modules it had, of the types that they had, sharded alike."""
        return (
            [type(module) for module in self._modules] == self._types
            and all(tuple(children.values()) == then for children, then in self._children)
            and _fsdp.managed(self._modules) == self._managed
        )

    def check_dropout(self) -> None:
        """Raise where a recurrent layer has dropout that cannot be drawn again.

        Raises
        ------
        RuntimeError
            Names the layer, and says what to do.
        """
        for module in self._recurrent:
            draws = module.training and module.dropout > 0 and module.num_layers > 1
            if draws and _draws_in_cudnn(next(module.parameters())):
                kind = type(module).__name__
                raise RuntimeError(
                    f"the dropout of {kind}(..., dropout={module.dropout}) is drawn from a state "
                    "of cuDNN that no generator restores, so computing the layer again would take "
                    "other masks, and gradients would be wrong. Set dropout=0 and put nn.Dropout "
                    "between layers of one each; or torch.backends.cudnn.enabled = False; or use "
                    'engine="dynamic", which keeps what such a layer makes'
                )

    def training_flags(self) -> tuple[bool, ...]:
        """The training flag of every module."""
        return tuple([module.training for module in self._modules])

    def parameter_flags(self) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        """Which parameters require gradients, and which have none yet."""
        parameters = [slots.get(name) for slots, name in self._parameters]
        return (
            tuple([p is not None and p.requires_grad for p in parameters]),
            tuple([p is not None and p.grad is None for p in parameters]),
        )

    def lacking_gradient(self, flags: tuple[bool, ...]) -> set[int]:
        """The ids of the parameters that had no gradient, by the second of `parameter_flags`."""
        return {
            id(slots[name])
            for (slots, name), absent in zip(self._parameters, flags, strict=True)
            if absent
        }
