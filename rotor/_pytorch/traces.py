"""Traces of a run in tensors, caches and process-wide modes of PyTorch: seen, and undone.

And traces of torch.fx, which runs a model on symbols: noticed, and joined as one node.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils import parametrize
from torch.utils import _python_dispatch

from rotor._pytorch import core, dispatch

_CHOICES = ("math_sdp", "flash_sdp", "mem_efficient_sdp", "cudnn_sdp", "cudnn", "mkldnn")
core.check(f"_C._get_{name}_enabled" for name in _CHOICES)
core.check(["fx._symbolic_trace.is_fx_symbolic_tracing"])
_ASKED = [getattr(torch._C, f"_get_{name}_enabled") for name in _CHOICES]
GLOBAL_HOOKS = [
    getattr(nn.modules.module, f"_global_{name}")
    for name in ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
]

in_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
is_symbolic: Callable[[], bool] = fx._symbolic_trace.is_fx_symbolic_tracing
"""Return whether torch.fx runs a model on symbols, which no compiler reads."""


def choices() -> tuple[bool, ...]:
    """Return which implementations PyTorch may choose for attention, convolutions and the like.

    The last one is whether ``torch.nn.utils.parametrize.cached`` keeps weights.
    """
    return (*[ask() for ask in _ASKED], parametrize._cache_enabled > 0)


def global_hooks() -> list[Any]:
    """Return the hooks that run in calls of every module.

    Under a mode, which no captured code goes through, those of PyTorch's ModuleTracker are left
    out: each FlopCounterMode has its own.
    """
    if not any(GLOBAL_HOOKS):
        return []
    are_all = not dispatch.has_modes()
    found = [[h for h in held.values() if are_all or not _tracks(h)] for held in GLOBAL_HOOKS]
    return found if any(found) else []


def _tracks(hook: Any) -> bool:
    tracker = getattr(sys.modules.get("torch.utils.module_tracker"), "ModuleTracker", ())
    return isinstance(getattr(hook, "__self__", None), tracker)


@contextmanager
def untracked() -> Iterator[None]:
    """Leave out the hooks of PyTorch's ModuleTracker, such as those of FlopCounterMode.

    They keep nodes of graphs, of which they use no values.
    """
    kept = [dict(held) for held in GLOBAL_HOOKS]
    for held, hooks in zip(GLOBAL_HOOKS, kept, strict=True):
        for number in [number for number, hook in hooks.items() if _tracks(hook)]:
            del held[number]
    try:
        yield
    finally:
        for held, hooks in zip(GLOBAL_HOOKS, kept, strict=True):
            now = dict(held)
            held.clear()
            held.update(hooks | now)


core.check(
    """
    _C._autograd._unsafe_set_version_counter nn.utils.parametrize._cache
    nn.utils.parametrize._cache_enabled utils._python_dispatch.TorchDispatchMode
    utils._python_dispatch._get_current_dispatch_mode
    """
)

_STATISTICS = ("running_mean", "running_var")


class OwnParametrizations:
    """Context in which ``torch.nn.utils.parametrize.cached`` knows no weights of outside."""

    def __enter__(self) -> None:
        self._kept = parametrize._cache
        vars(parametrize)["_cache"] = {}

    def __exit__(self, *_: object) -> None:
        vars(parametrize)["_cache"] = self._kept


def are_parametrizations_cached() -> bool:
    """Return whether ``torch.nn.utils.parametrize.cached`` keeps weights now."""
    return parametrize._cache_enabled > 0


@cache
def _written(operator: Any) -> tuple[tuple[int, str], ...]:
    """Return places and names of the arguments that an operator writes to."""
    schema = getattr(operator, "_schema", None)
    if schema is None:
        return ()
    # Kernels of batch norm write to their statistics, which their schemas do not say.
    more = _STATISTICS if "batch_norm" in schema.name else ()
    return tuple(
        (place, argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.name in more or (argument.alias_info and argument.alias_info.is_write)
    )


@cache
def _makes(operator: Any) -> bool:
    """Return whether all results of an operator have memory of their own."""
    schema = getattr(operator, "_schema", None)
    return schema is not None and not any(result.alias_info for result in schema.returns)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


class _Kept:
    """Tensor as it was before it was written to first."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._count = None if tensor.is_inference() else tensor._version
        self._requires_grad = tensor.requires_grad
        self._place = self._current_place()
        self.identity = None if self._place is None else self._place[0]

    def _current_place(self) -> Any:
        t = self.tensor
        if t.layout != torch.strided:
            return None
        return core.storage_identity(t), t.storage_offset(), t.size(), t.stride()

    def restore(self, storages: dict[int, Any]) -> None:
        """Set place and history back; the bytes are set back already."""
        tensor = self.tensor
        if tensor.requires_grad and not self._requires_grad and not tensor._is_view():
            tensor.detach_()
        if self._place != self._current_place() and self._place[0] in storages:
            identity, *place = self._place
            with torch.no_grad():
                tensor.set_(storages[identity][0], *place)
        if self._count is not None:
            torch._C._autograd._unsafe_set_version_counter((tensor,), (self._count,))


class Collectives(_python_dispatch.TorchDispatchMode):
    """Context in which a function gets the process groups of each collective before it runs."""

    supports_higher_order_operators = True

    def __init__(self, check: Callable[[list[Any]], object]) -> None:
        super().__init__()
        self._check = check

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # PyTorch would import its compiler.

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # PyTorch would never compile again what is called in the context.

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if dispatch.is_collective(operator):
            self._check(dispatch.groups_among([*args, *kwargs.values()]))
        return operator(*args, **kwargs)

    core.hide_from_dynamo(__torch_dispatch__)


class Writes(Collectives):
    """Context in which the bytes of tensors from before are kept when they are first written to.

    Only tensors that are written to are copied. Operators are seen below autograd, whoever calls
    them. `watched` are ids of tensors, and `read` those of them that operators were given. `check`
    is that of `Collectives`; by default nothing is checked.
    """

    def __init__(
        self, watched: Collection[int] = (), check: Callable[[list[Any]], object] = bool
    ) -> None:
        super().__init__(check)
        self._watched = watched
        self.read: set[int] = set()
        self._made: set[int] = set()
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._kept: dict[int, _Kept] = {}

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._watched:
            given = map(id, _tensors([*args, *kwargs.values()]))
            self.read.update(key for key in given if key in self._watched)
        for place, name in _written(operator):
            given = args[place] if place < len(args) else kwargs.get(name)
            for tensor in _tensors(given):
                self._keep(tensor)
        result = super().__torch_dispatch__(operator, types, args, kwargs)
        if _makes(operator):
            for tensor in _tensors(result):
                for part in core.strided_parts(tensor):
                    self._made.add(core.storage_identity(part))
        return result

    core.hide_from_dynamo(__torch_dispatch__)

    def _keep(self, tensor: torch.Tensor) -> None:
        parts = core.strided_parts(tensor)
        storages = {core.storage_identity(part): part.untyped_storage() for part in parts}
        if storages.keys() <= self._made:
            return
        if id(tensor) not in self._kept:
            self._kept[id(tensor)] = _Kept(tensor)
        for identity, storage in storages.items():
            if identity not in self._storages and identity not in self._made:
                self._storages[identity] = storage, storage.clone()

    def written(self) -> list[torch.Tensor]:
        """Return the tensors from before that were written to."""
        return [kept.tensor for kept in self._kept.values()]

    def is_innermost(self) -> bool:
        """Return whether no other mode was entered since."""
        return _python_dispatch._get_current_dispatch_mode() is self

    def identities(self) -> set[int]:
        """Return the identities of the storages from before that were written to."""
        return set(self._storages)

    def undo(self, spares: Callable[[int], bool] = lambda identity: False) -> None:
        """Write the former bytes back, but for storages whose identity `spares` accepts."""
        with torch.no_grad():
            for identity, (storage, before) in self._storages.items():
                if spares(identity):
                    continue
                if storage.nbytes() != before.nbytes():
                    storage.resize_(before.nbytes())
                storage.copy_(before)
        # Views share a version, which was least when the first of them was written to.
        for kept in reversed(self._kept.values()):
            if kept.identity is None or not spares(kept.identity):
                kept.restore(self._storages)
        self._storages.clear()
        self._kept.clear()


def symbolic_call(module: nn.Module, args: Any, kwargs: Any) -> fx.Proxy | None:
    """Return the result of a call at the place of a module as a symbol; ``None`` without one."""
    given = core.tree_flatten((args, kwargs))[0]
    tracer: Any = next((value.tracer for value in given if isinstance(value, fx.Proxy)), None)
    if tracer is None:
        return None
    proxy: fx.Proxy = tracer.create_proxy(
        "call_module", tracer.path_of_module(module), args, kwargs
    )
    return proxy
