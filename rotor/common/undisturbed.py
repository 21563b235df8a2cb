"""Trials: runs of a model that are not the user's, and leave everything as it was.

A `Trial` takes copies of the call's arguments, and puts back what the model's code can reach:
parameters, buffers, attributes, containers, objects, hooks, globals, gradients, random generators,
variables of the environment and of contexts, and PyTorch's own caches. The bytes of tensors are
kept where they are written to, and not before.
"""

from __future__ import annotations

import contextvars
import copy
import gc
import os
import pickle
import types
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from rotor._pytorch import backwards, core, traces
from rotor._pytorch.draws import generators, state_of
from rotor.common.modes import RngTracker
from rotor.common.module_state import Watch
from rotor.common.places import MISSING, ContextValue
from rotor.common.ranks import NeedsPeers
from rotor.common.streams import silence

_MOST_OBJECTS = 100_000
_SHARED = (
    nn.Module,
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.CodeType,
    types.FrameType,
)
"""Types of objects in arguments that a trial takes as they are."""


class Untriable(ValueError):
    """Absence of a way to run something without a trace; the message says why."""


@contextmanager
def training_flags_kept(model: nn.Module) -> Iterator[None]:
    """Put the training flags of a model's modules back as they were."""
    flags = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training


@contextmanager
def gradients_aside(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Take the gradients of parameters, and hooks on them, off inside; put them back afterwards."""
    parameters = list(parameters)
    kept = list(zip(parameters, backwards.gradients_of(parameters), strict=True))
    try:
        for parameter, _ in kept:
            parameter.grad = None
        with core.without_hooks(core.gradient_hooks_of(parameters)):
            yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


@contextmanager
def random_states_kept(device: torch.device) -> Iterator[None]:
    """Put PyTorch's default generators of the CPU and of a device back as they were."""
    rng = RngTracker(device)
    states = rng.read()
    try:
        yield
    finally:
        rng.write(states)


@contextmanager
def generators_kept(modules: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Put generators back that Python, NumPy and attributes of modules have, as they were.

    Attributes may hold a `torch.Generator`, or one of NumPy's or Python's.
    """
    restores = list(map(state_of, generators(modules)))
    try:
        yield
    finally:
        for restore in restores:
            restore()


def random_states(modules: Iterable[nn.Module], device: torch.device) -> list[bytes]:
    """Return the states of all these generators, and of PyTorch's default ones."""
    own = [pickle.dumps(restore.args[-1]) for restore in map(state_of, generators(modules))]
    return [*(state.tobytes() for _, state in RngTracker(device).read()), *own]


# -- arguments


def _reachable(value: Any) -> list[Any]:
    """Return the objects that a value holds, down to tensors and what trials share."""
    found: dict[int, Any] = {}
    waiting = [value]
    while waiting:
        if len(found) > _MOST_OBJECTS:
            raise Untriable("the arguments hold too many objects to copy them")
        item = waiting.pop()
        if id(item) not in found:
            found[id(item)] = item
            if isinstance(item, torch.Tensor):
                waiting += vars(item).values()
            elif not isinstance(item, _SHARED):
                waiting += gc.get_referents(item)
    return list(found.values())


@contextmanager
def buffers_copied(
    slots: Iterable[core.Slot], *, with_leaves: bool = False
) -> Iterator[list[tuple[core.Slot, torch.Tensor]]]:
    """Put the same buffers back after a run on copies of them; shared ones share their copy.

    The context gives the buffers with their slots. Those that require gradients are copied too only
    `with_leaves`.
    """
    kept = [(slot, slot[0][slot[1]]) for slot in slots]
    copies: dict[int, torch.Tensor] = {}
    try:
        for (where, name), buffer in kept:
            if buffer is not None and (with_leaves or not buffer.requires_grad):
                if id(buffer) not in copies:
                    copies[id(buffer)] = buffer.detach().clone()
                where[name] = copies[id(buffer)]
        yield [(slot, buffer) for slot, buffer in kept if buffer is not None]
    finally:
        for (where, name), buffer in kept:
            where[name] = buffer


@contextmanager
def values_kept(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Copy the values that tensors had back into them."""
    kept = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in kept:
                tensor.copy_(value)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the same memory that no graph of the caller's knows.

    A tensor in a graph of the caller's is copied: a write would become a part of that graph.
    """
    if tensor.is_leaf:
        return tensor if tensor.requires_grad else tensor.detach()
    if tensor.layout != torch.strided or core.in_functorch():
        return tensor
    with torch.enable_grad():
        made = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        return made.copy_(tensor.detach().requires_grad_())


def copied_arguments(value: Any, *, copies_tensors: bool = False) -> Any:
    """Return arguments that share nothing with these but modules.

    The bytes of tensors are shared too, unless these are copied: a `Trial` puts them back. Raises
    Untriable if an argument cannot be copied.
    """
    kept = _reachable(value)
    memo: dict[int, Any] = {}
    tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
    for item in kept:
        if isinstance(item, torch.Tensor):
            memo[id(item)] = _copy(item) if copies_tensors else _alias(item)
            tensors.append((item, memo[id(item)]))
        elif isinstance(item, _SHARED):
            memo[id(item)] = item
    try:
        for tensor, made in tensors:
            if made is not tensor and type(made) is torch.Tensor:
                vars(made).update(copy.deepcopy(vars(tensor), memo))
        return copy.deepcopy(value, memo)
    except Exception as error:
        raise Untriable(
            f"the arguments cannot be copied ({type(error).__name__}: {error}), so that trying "
            "the model would change them"
        ) from None


# -- the model and its surroundings


class _Surroundings:
    """Environment variables and context variables, as they are at construction."""

    def __init__(self) -> None:
        self._environ = dict(os.environ)
        self._context = contextvars.copy_context()

    def changed(self) -> set[Any]:
        """Return the variables that have another value now, or none."""
        context = contextvars.copy_context()
        names = self._environ.keys() | os.environ.keys()
        changed = {name for name in names if os.environ.get(name) != self._environ.get(name)}
        return changed | {v for v in context if context[v] is not self._context.get(v, MISSING)}

    def restore(self, among: Iterable[Any]) -> None:
        """Restore these variables; a context variable without a value gets its default."""
        for variable in among:
            if isinstance(variable, contextvars.ContextVar):
                ContextValue(variable.name, variable).put(self._context.get(variable, MISSING))
            elif variable in self._environ:
                os.environ[variable] = self._environ[variable]
            else:
                os.environ.pop(variable, None)


Roots = nn.Module | Iterable[tuple[str, Any]]


class Trial:
    """State before a trial of the model, or of modules and functions by name.

    `arguments` are those of the runs, of which the attribute holds copies. With `is_guarded` the
    bytes of tensors are kept when they are written to, and a collective raises NeedsPeers before it
    runs if it is not one of `peers`, ranks that are all in such a trial; else the bytes of
    attributes are copied at once, and the caller keeps the others. With `is_sharded`, parameters
    and gradients are left to FSDP2. Raises Untriable if arguments cannot be copied, or a running
    generator or a stream cannot be set back.
    """

    def __init__(
        self,
        roots: Roots,
        arguments: Any,
        device: torch.device,
        *,
        is_guarded: bool = True,
        is_sharded: bool = False,
        peers: Iterable[int] = (),
    ) -> None:
        roots = [("the model", roots)] if isinstance(roots, nn.Module) else list(roots)

        self.arguments = copied_arguments(arguments)
        given = [item for item in _reachable(self.arguments) if isinstance(item, torch.Tensor)]
        slots_of = partial(core.slots_of_module, with_parameters=not is_sharded)
        # Attributes of tensors that are given as they are belong to the caller.
        watched = [*roots, *(("an argument", tensor) for tensor in given if tensor.requires_grad)]
        self._watch = Watch(watched, copies_tensors=not is_guarded, slots_of=slots_of)
        for names, reason in (
            (
                self._watch.generators,
                " is a running generator (a function with yield), which measuring would move on "
                "and nothing can set back: keep a list or an iterator of one there",
            ),
            (
                self._watch.streams,
                " is a stream, neither a file nor in memory, to which measuring would write and "
                "which nothing can set back: keep an open file or an io.StringIO there",
            ),
            (
                self._watch.opaque,
                ", whose state measuring may change and nothing can set back: keep it out of the "
                "model",
            ),
        ):
            if names:
                raise Untriable(
                    f'{names[0]}{reason}, or use engine="dynamic", which measures nothing'
                )
        modules = [m for _, root in roots if isinstance(root, nn.Module) for m in root.modules()]
        self._modules = [(m, type(m), m.training) for m in dict.fromkeys(modules)]
        self._given = {
            core.storage_identity(part) for tensor in given for part in core.strided_parts(tensor)
        }
        leaves = [tensor for tensor in given if tensor.is_leaf and tensor.requires_grad]
        if not is_sharded:
            leaves += [p for module, *_ in self._modules for p in module.parameters(recurse=False)]
        leaves = list(dict.fromkeys(leaves))
        gradients = backwards.gradients_of(leaves)
        flags = [leaf.requires_grad for leaf in leaves]
        self._leaves = list(zip(leaves, flags, gradients, strict=True))
        self._places = core.places_of(leaf for leaf, *_ in self._leaves)
        self._rng = RngTracker(device)
        self._states = self._rng.read()
        self._surroundings = _Surroundings()
        self._parametrizations = traces.OwnParametrizations()
        self._parametrizations.__enter__()
        self._writes = traces.Writes(check=partial(NeedsPeers.check, known=peers))
        self._written: set[int] = set()

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Keep the bytes of tensors that are written to in the context, until they are put back."""
        with self._writes, self.silent():
            yield

    def silent(self) -> AbstractContextManager[None]:
        """Return a context in which nothing is printed, or written to the model's files."""
        return silence(self._watch.files)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let operators run unseen in the context; only valid if `is_innermost` holds."""
        self._writes.__exit__(None, None, None)
        try:
            yield
        finally:
            self._writes.__enter__()

    def is_innermost(self) -> bool:
        """Return whether no other mode of PyTorch was entered since."""
        return self._writes.is_innermost()

    def changes_state(self) -> bool:
        """Return whether state of the modules outside parameters and buffers is another now."""
        return bool(self._watch.changed())

    def undo_writes(self) -> None:
        """Restore the bytes of tensors."""
        self._written |= self._writes.identities()
        self._writes.undo()

    def check_hidden(self) -> None:
        """Raise Untriable if a hidden module was written to, whose values runs do not put back."""
        self.undo_writes()
        for name, module in self._watch.hidden:
            own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            parts = [part for tensor in own for part in core.strided_parts(tensor)]
            if any(core.storage_identity(part) in self._written for part in parts):
                raise Untriable(
                    f"the forward writes to {name}, a {type(module).__name__} that is no child of "
                    "a module: register it as one, as an attribute or in an nn.ModuleList, or use "
                    'engine="graph" or "dynamic"'
                )

    def put_back(self, again: Trial | None = None) -> None:
        """Restore the state at construction.

        `again` is the trial of a second run: what that run did not change again stays, such as the
        preparation of the model by a first forward; but tensors of the arguments, and values that
        hold what it did change again, are restored.
        """
        if again is None:
            self._writes.undo()
            self._watch.restore()
            self._surroundings.restore(self._surroundings.changed())
        else:
            changed = again._surroundings.changed()
            rewritten = again._writes.identities()
            places = again._watch.identities(rewritten)
            again.put_back()
            stays = again._watch.storages() - again._watch.storages(places)
            stays -= rewritten | self._given
            self._writes.undo(lambda storage: storage in stays)
            self._watch.restore(places, again._watch)
            self._surroundings.restore(changed)
        for module, kind, training in self._modules:
            if type(module) is not kind:
                module.__class__ = kind  # Lazy modules, say.
            module.training = training
        core.put_places_back(self._places)
        for leaf, requires_grad, gradient in self._leaves:
            if leaf.is_leaf:
                leaf.requires_grad_(requires_grad)
            leaf.grad = gradient
        self._rng.write(self._states)
        if torch.is_autocast_cache_enabled():
            torch.clear_autocast_cache()

    def end(self, again: Trial | None = None) -> None:
        """Restore the state for good; as `put_back`."""
        self.put_back(again)
        self._parametrizations.__exit__()
        # Closures of the run may refer to this object in a cycle.
        del self.arguments, self._leaves, self._places, self._watch


@contextmanager
def trial(
    roots: Roots,
    arguments: Any,
    device: torch.device,
    *,
    is_guarded: bool = True,
    is_sharded: bool = False,
    peers: Iterable[int] = (),
) -> Iterator[Trial]:
    """Run what is in the context without a trace; for the parameters and errors see `Trial`."""
    made = Trial(
        roots, arguments, device, is_guarded=is_guarded, is_sharded=is_sharded, peers=peers
    )
    try:
        with made.guarded() if is_guarded else made.silent():
            yield made
    finally:
        made.end()
