"""Private names of PyTorch for checks that a traced call of a module stands for another one.

Dynamo's guards say on what a trace depends. They leave out the classes of PyTorch's own modules
within a module, so that modules are compared part by part too.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx, nn

from rotor._pytorch import core


class Refused(Exception):
    """Signal that a call cannot be one node."""


_PLAIN_VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.Size)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, type)
_CONSTANTS = (*_PLAIN_VALUES, *_FUNCTIONS, tuple, torch.device)
"""Types of values that cannot change within themselves."""


def _leaves(value: Any, found: list[Any], tensors: list[fx.Node]) -> None:
    """Append a description of an argument, and the nodes of the tensors in it."""
    from torch._dynamo.variables import ConstantVariable, TensorVariable
    from torch._dynamo.variables.lists import ListVariable, TupleVariable

    value = value.realize()
    if type(value) is TensorVariable:
        node = value.as_proxy().node
        example = node.meta.get("example_value")
        if not isinstance(example, torch.Tensor) or example.layout != torch.strided:
            raise Refused("an argument is a sparse tensor")
        if node not in tensors:
            tensors.append(node)
        found.append((tensors.index(node), type(example), *layout(example)))
    elif isinstance(value, ConstantVariable):
        found.append((type(value.value), value.value))
    elif type(value) in (TupleVariable, ListVariable):
        found.append((type(value), len(value.items)))
        for item in value.items:
            _leaves(item, found, tensors)
    else:
        kind = value.python_type_name()
        raise Refused(f"an argument is a {kind}: only tensors, numbers, text, and lists of these")


def layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a description of a tensor without its values; raise Refused if a size is a symbol."""
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    if any(not isinstance(size, int) for size in (*shape, *strides)):
        raise Refused("a size of an argument is a symbol")
    return shape, strides, tensor.dtype, tensor.device, tensor.requires_grad


def layout_check(tensors: Sequence[torch.Tensor]) -> Callable[[Sequence[Any]], bool]:
    """Return a cheap check that other tensors have the layouts of these.

    Its result is False, too, where modes such as autocast differ.
    """
    from torch._C._dynamo.guards import TensorGuards

    sizes: Any = [list(tensor.shape) for tensor in tensors]
    strides: Any = [list(tensor.stride()) for tensor in tensors]
    guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    return lambda others: bool(guards.check(*others))


def mode_check() -> Callable[[], bool]:
    """Return a check that gradients, autocast, precisions and the like are on or off as now.

    Its result is False, too, within a transform of ``torch.func``.
    """
    from torch._C._dynamo.guards import GlobalStateGuard

    state = GlobalStateGuard()
    return lambda: bool(state.check()) and not core.in_functorch()


def signature(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], list[Any]]:
    """Return a description of arguments, and the nodes of their tensors.

    Raises Refused if a call with such arguments cannot be one node.
    """
    found: list[Any] = [len(args), *kwargs]
    tensors: list[fx.Node] = []
    for value in (*args, *kwargs.values()):
        _leaves(value, found, tensors)
    return tuple(found), tensors


def is_plain_module(module: nn.Module) -> bool:
    """Return whether calling a module calls its class's forward, and nothing else."""
    return "forward" not in vars(module) and not any(getattr(module, name) for name in core.HOOKS)


def scope(tx: Any) -> dict[str, Any]:
    """Return the variables in which dynamo's expressions have values."""
    return {"G": tx.output.root_tx.f_globals, "L": tx.output.root_tx.f_locals}


def difference(one: nn.Module, other: nn.Module, place: str = "") -> str:
    """Return the place of a difference between modules that dynamo guards by attributes alone.

    It does not guard the classes of PyTorch's own modules within a module.
    """
    if type(one) is not type(other) or list(core.child_slots(one)) != list(core.child_slots(other)):
        return place or "their class"
    if type(one).__module__.startswith("torch."):
        ours, theirs = vars(one), vars(other)
        for name in ours if ours.keys() == theirs.keys() else dict.fromkeys([*ours, *theirs]):
            value, twin = ours.get(name), theirs.get(name)
            if (
                value is not twin
                and name != "_modules"
                and not _have_same_classes(value, twin)
                and _settings(value) != _settings(twin)
            ):
                return f"{place}.{name}".strip(".")
    for name, child in core.child_slots(one).items():
        inner, twin = f"{place}.{name}".strip("."), core.child_slots(other)[name]
        if (child is None) != (twin is None):
            return inner
        if child is not None and twin is not None and (found := difference(child, twin, inner)):
            return found
    return ""


def unguarded_difference(scope: dict[str, Any], template: Any, cache: dict[Any, Any]) -> str:
    """Return the place of a difference in values that a trace has read, and dynamo does not guard.

    These are bound methods of classes, methods of PyTorch's tensors, and modules in containers.
    `cache` has the module that is compared with the template's.
    """
    guarded = {source.name for source, *_ in template.condition.guards}
    twins = {template.source: template.module}
    for source in template.condition.traced_sources:
        if template.source.name not in source.name or source.name in guarded:
            continue
        place = within(source.name, template.source.name)
        try:
            value, twin = source.get_value(scope, {}, cache), source.get_value(scope, {}, twins)
            if isinstance(value, nn.Module) and isinstance(twin, nn.Module):
                place = difference(value, twin, place)
            elif isinstance(value, torch.Tensor) or value is twin or value == twin:
                place = ""
        except (AttributeError, LookupError, NameError, RuntimeError, TypeError, ValueError):
            pass
        if place:
            return place
    return ""


def _have_same_classes(value: Any, twin: Any) -> bool:
    """Return whether values are dictionaries with the same names, and classes of their items."""
    return (
        isinstance(value, dict)
        and isinstance(twin, dict)
        and value.keys() == twin.keys()
        and list(map(type, value.values())) == [type(twin[name]) for name in value]
    )


def _settings(value: Any) -> Any:
    """Return the part of an attribute's value that may differ from module to module."""
    if isinstance(value, _PLAIN_VALUES):
        return type(value), value
    if isinstance(value, tuple | list):
        return type(value), [_settings(item) for item in value]
    if isinstance(value, dict):
        return {
            name: None if item is None else type(item)
            for name, item in value.items()
            if isinstance(item, torch.Tensor | nn.Module | None)
        }
    if isinstance(value, _FUNCTIONS):
        return value
    return type(value)


def within(name: str, module: str) -> str:
    """Return the place of a value in a module, from dynamo's expressions of both."""
    return core.module_path(name.removeprefix(module)).strip(".") or "their class"


def is_watched(tx: Any, source: Any, cache: dict[Any, Any], kept: set[int]) -> bool:
    """Return whether a change of a value on which a trace depends would be noticed.

    The owner of the capture watches the attributes of modules, and dynamo what the traced module
    holds, but neither what is within an object of another module's.
    """
    value, base = cache[source], source
    while base in cache:
        if isinstance(cache[base], type):
            # Dynamo watches classes, which alike modules share.
            return True
        base = getattr(base, "base", None)
    if isinstance(value, nn.Module | torch.Tensor) or type(value) in _CONSTANTS:
        return True
    if isinstance(value, dict | list | set) and id(value) in kept:
        return True
    try:
        return source.get_value(scope(tx), {}, {}) is value
    except (AttributeError, LookupError, NameError, TypeError):
        return False


def guarded_names() -> dict[str, bool]:
    """Return dynamo's expressions of all that the code which is being captured has read.

    Their values say whether all that an object contains was read too.
    """
    from torch._guards import TracingContext

    found: dict[str, bool] = {}
    for guard in TracingContext.get().guards_context.dynamo_guards:
        kind = guard.create_fn_name()
        if kind != "TYPE_MATCH":
            found[guard.name] = found.get(guard.name, False) or kind in _WHOLE
    return found


_WHOLE = ("CONSTANT_MATCH", "EQUALS_MATCH", "ID_MATCH")


def reads_gradients(names: Iterable[str]) -> bool:
    """Return whether one of dynamo's expressions is the gradient of a tensor."""
    return any(re.search(r"\.grad\b", name) for name in names)
