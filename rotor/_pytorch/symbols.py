"""Private names of PyTorch for sizes that are symbols; SymPy is imported when one is met."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch

from rotor._pytorch import core

Dimension = tuple[torch.Tensor, int]
"""Tensor, and the number of one of its dimensions."""

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_PROPAGATED = "_dynamo_propagated_dynamic_indices"
_MARKS = ("_dynamo_weak_dynamic_indices", "_has_dynamo_dim_marking")


@functools.cache
def _printer() -> Callable[[Any], str]:
    from torch.utils._sympy.printers import PythonPrinter

    doprint: Callable[[Any], str] = PythonPrinter().doprint
    return doprint


def is_symbol(value: Any) -> bool:
    """Return whether a value is a number that depends on sizes, or on data."""
    return isinstance(value, _SYMBOLIC)


def depends_on_data(value: Any) -> bool:
    """Return whether a number, or a size of a tensor, depends on the values of tensors."""
    if isinstance(value, torch.Tensor):
        if not has_symbols(value):
            return False
        parts = [*value.shape, *(value.stride() if value.layout == torch.strided else ())]
        return any(isinstance(part, _SYMBOLIC) and depends_on_data(part) for part in parts)
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(value))


def has_symbols(tensor: torch.Tensor) -> bool:
    return bool(tensor._has_symbolic_sizes_strides)


def text_of(value: Any) -> str:
    """Return a number as text: Python's expression of the symbols in it."""
    return _printer()(value.node.expr) if isinstance(value, _SYMBOLIC) else repr(value)


def text_of_expression(expression: Any) -> str:
    """Return an expression of symbols, such as a condition, as text."""
    return _printer()(expression)


def symbols_in(value: Any) -> set[str]:
    """Return the names of the symbols on which a number depends."""
    if not isinstance(value, _SYMBOLIC):
        return set()
    return {str(symbol) for symbol in value.node.expr.free_symbols}


def hint_of(value: Any) -> Any:
    """Return a number as it was during the capture."""
    return value.node.hint if isinstance(value, _SYMBOLIC) else value


@contextmanager
def unguarded(values: Iterable[Any]) -> Iterator[None]:
    """Let comparisons of numbers in the context make no condition of the captured graph."""
    for value in values:
        if isinstance(value, _SYMBOLIC):
            with value.node.shape_env.suppress_guards():
                yield
            return
    yield


_marked = False


def are_marked() -> bool:
    return _marked


@contextmanager
def marked(dimensions: Iterable[Dimension]) -> Iterator[None]:
    """Have captures in the context take these dimensions as symbols, where the code permits."""
    from torch._dynamo import maybe_mark_dynamic
    from torch.fx.experimental import _config

    global _marked
    tensors: dict[int, torch.Tensor] = {}
    for tensor, dimension in dimensions:
        maybe_mark_dynamic(tensor, dimension)
        tensors[id(tensor)] = tensor
    _marked = bool(tensors)
    try:
        # Sizes that are equal by chance would become one symbol.
        with _config.patch(use_duck_shape=False):  # type: ignore[attr-defined]
            yield
    finally:
        _marked = False
        for tensor in tensors.values():
            for name in _MARKS:
                if hasattr(tensor, name):
                    delattr(tensor, name)


@functools.cache
def takes_numbers() -> bool:
    """Return whether this PyTorch has what `numbers_as_inputs` changes."""
    from torch._dynamo import pgo
    from torch._dynamo.variables import builder
    from torch._functorch._aot_autograd import graph_compile

    return (
        hasattr(pgo, "auto_dynamic")
        and hasattr(builder, "process_automatic_dynamic")
        and hasattr(builder, "is_int_specialization_case")
        and hasattr(builder.VariableBuilder, "wrap_symint")
        and hasattr(graph_compile, "_apply_tensorify_python_scalars")
    )


def numbers_as_inputs(sources: Collection[str]) -> AbstractContextManager[None]:
    """Return a context in which captures take numbers as inputs, where the code permits.

    `sources` are dynamo's expressions of these numbers.
    """
    return _numbers_as_inputs(sources) if sources else core.NOTHING


@contextmanager
def _numbers_as_inputs(sources: Collection[str]) -> Iterator[None]:
    from torch._dynamo.pgo import auto_dynamic
    from torch._dynamo.variables import builder as found_builder
    from torch._functorch._aot_autograd import graph_compile
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    builder: Any = found_builder
    process, wrap = builder.process_automatic_dynamic, builder.VariableBuilder.wrap_symint
    is_constant = builder.is_int_specialization_case

    def marked_too(tx: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        found = process(tx, name, *args, **kwargs)
        return replace(found, scalar=auto_dynamic) if name in sources else found

    def wrapped_too(self: Any, value: int, dynamism: Any = None, context: Any = None) -> Any:
        is_input = dynamism is None and self.name in sources
        return wrap(self, value, DimDynamic.DYNAMIC if is_input else dynamism, context)

    def is_constant_too(value: Any, source: Any) -> bool:
        return source.name not in sources and is_constant(value, source)

    with (
        core.replaced(builder, process_automatic_dynamic=marked_too),
        core.replaced(builder, is_int_specialization_case=is_constant_too),
        core.replaced(builder.VariableBuilder, wrap_symint=wrapped_too),
        # Tensors in the place of Python's numbers would give other bits.
        core.replaced(graph_compile, _apply_tensorify_python_scalars=lambda module: None),
    ):
        yield


def forget_propagated(tensors: Iterable[torch.Tensor]) -> None:
    """Have captures take no size of these tensors as a symbol because an earlier graph did.

    AOTAutograd marks the tensors that a graph with symbols keeps for its backward, or returns;
    that of PyTorch 2.11 does so by the marks of users, which a capture of ours has no use for.
    """
    names = (_PROPAGATED,) if _marked or _has_propagated() else (_PROPAGATED, *_MARKS)
    for tensor in tensors:
        for name in names:
            if hasattr(tensor, name):
                delattr(tensor, name)


@functools.cache
def _has_propagated() -> bool:
    """Return whether AOTAutograd has marks of its own."""
    from torch._functorch._aot_autograd import runtime_wrappers

    return hasattr(runtime_wrappers, "mark_dynamo_propagated_dynamic_indices")


def line_of_constant(tensor: Any, dimension: int) -> str:
    """Return the place in the model's code that made a marked size a constant; empty if unknown.

    The size is that of a dimension of a fake tensor of a captured graph.
    """
    environment = tensor.fake_mode.shape_env
    if environment is None:
        return ""
    size, ending = int(tensor.shape[dimension]), f".size()[{dimension}]"
    for symbol, place in environment.replacements_slocs.items():
        found = environment.replacements.get(symbol)
        sources = environment.var_to_sources.get(symbol, ())
        is_here = any(str(source.name).endswith(ending) for source in sources)
        if found is not None and found.is_number and int(found) == size and is_here:
            return str(place.maybe_user_loc or "").strip()
    return ""


def evaluated(text: str, values: Mapping[str, int]) -> Any:
    """Return the value of an expression that `text_of` returned, with values of symbols by name."""
    return eval(text, {"math": math, "torch": torch, **values})
