"""Private names of PyTorch for random numbers that Python and NumPy draw in captured code.

Dynamo would keep the first number of a `random.Random` for good, and take NumPy's from PyTorch.
Here each call of the code draws anew from the same generators, before the graph runs: numbers and
arrays are inputs of the graph. Code that does anything else with a generator is not captured.
"""

from __future__ import annotations

import functools
import pickle
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from rotor._pytorch import core


def is_random(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call of an operator draws random numbers of PyTorch's."""
    if torch.Tag.nondeterministic_seeded not in getattr(operator, "tags", ()):
        return False
    # Dropout has no element to drop.
    names = [argument.name for argument in core.schema_arguments(operator)]
    share = {**dict(zip(names, args, strict=False)), **kwargs}.get("dropout_p", 0.0)
    return "dropout_p" not in names or not (isinstance(share, float) and share == 0.0)


_LIBRARY = torch.library.Library("rotor_draws", "FRAGMENT")
_LIBRARY.define("kept(SymInt[] size, Tensor seed, float share) -> Tensor")
KEPT = torch.ops.rotor_draws.kept.default
"""Mask of the elements that dropout keeps, a function of a seed; `share` is that of the others."""

_DRAWN = 1 << 15
"""Numbers that are drawn at once: they stay in a processor's cache."""


@torch.library.impl(_LIBRARY, "kept", "CPU")
def _kept(size: Sequence[int], seed: torch.Tensor, share: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(int(seed))
    kept = torch.empty(size, dtype=torch.bool)
    drawn = torch.empty(min(kept.numel(), _DRAWN))
    for part in kept.view(-1).split(_DRAWN):
        torch.gt(drawn[: len(part)].uniform_(generator=generator), share, out=part)
    return kept


@torch.library.impl(_LIBRARY, "kept", "Meta")
def _kept_like(size: Sequence[Any], seed: torch.Tensor, share: float) -> torch.Tensor:
    return seed.new_empty(size, dtype=torch.bool)


_latest: dict[type, tuple[bytes, Any]] = {}
"""Latest state of a generator of each kind, which records share: one of Python's takes 25 KB."""


def generators(modules: Iterable[nn.Module] = ()) -> list[Any]:
    """Return the generators of Python and NumPy, and those in modules' attributes."""
    numpy: Any = sys.modules.get("numpy")
    found = [random.random.__self__]  # type: ignore[attr-defined]
    if numpy is not None:
        found.append(numpy.random.mtrand._rand)
    kinds = (torch.Generator, *_kinds())
    values = [value for module in modules for value in vars(module).values()]
    return [*found, *(value for value in values if isinstance(value, kinds))]


def state_of(generator: Any) -> functools.partial[Any]:
    """Return a function that puts a generator back as it is now."""
    if hasattr(generator, "bit_generator"):
        bits = generator.bit_generator
        return functools.partial(setattr, bits, "state", bits.state)
    if isinstance(generator, torch.Generator):
        # The tensor of the state would count as memory of the step.
        return functools.partial(_write, generator, generator.get_state().numpy().tobytes())
    is_python = isinstance(generator, random.Random)
    state = generator.getstate() if is_python else generator.get_state()
    pickled = pickle.dumps(state)
    known = _latest.get(type(generator))
    if known is None or known[0] != pickled:
        known = _latest[type(generator)] = pickled, state
    return functools.partial(generator.setstate if is_python else generator.set_state, known[1])


def _write(generator: torch.Generator, state: bytes) -> None:
    generator.set_state(tensor_of(state))


def tensor_of(state: bytes) -> torch.Tensor:
    """Return the state of a generator as a tensor that PyTorch's allocator does not count."""
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _kinds() -> tuple[type, ...]:
    numpy: Any = sys.modules.get("numpy")
    numpys = () if numpy is None else (numpy.random.RandomState, numpy.random.Generator)
    return (random.Random, *numpys)


class Draws:
    """Random numbers that one captured call draws, which can be taken back until it has run."""

    def __init__(self) -> None:
        self._before: dict[int, Callable[[], object]] = {}

    def _drawn(self, generator: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        if id(generator) not in self._before:
            self._before[id(generator)] = state_of(generator)
        return getattr(generator, name)(*args, **kwargs)

    def take_back(self) -> None:
        """Put all generators back as they were before the call."""
        for restore in self._before.values():
            restore()
        self._before.clear()

    def keep(self) -> None:
        """Forget the states that the generators had before the call."""
        self._before.clear()

    def drawn_anew(self) -> AbstractContextManager[None]:
        """Return a context in which captures draw in each call."""
        from torch._dynamo.variables.builder import VariableBuilder

        wrap, kinds = VariableBuilder._wrap, _kinds()

        def wrapped(builder: Any, value: Any) -> Any:
            generator = getattr(value, "__self__", None)
            if isinstance(value, kinds):
                return _variables()[0](self, value, source=builder.source)
            if isinstance(generator, kinds) and callable(value):
                return _variables()[1](self, generator, value.__name__, source=builder.source)
            return wrap(builder, value)

        return core.replaced(VariableBuilder, _wrap=wrapped)

    def input(self, tx: Any, generator: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Return the variable of a drawn number, or array, of the code that is being captured."""
        from torch._dynamo.exc import unimplemented
        from torch._dynamo.source import RandomValueSource
        from torch._dynamo.variables.builder import VariableBuilder

        draw = functools.partial(self._drawn, generator, name)
        constants = [arg.as_python_constant() for arg in args]
        named = {key: value.as_python_constant() for key, value in kwargs.items()}
        value = draw(*constants, **named)
        source = RandomValueSource(len(tx.output.random_calls))
        tx.output.random_calls.append((draw, constants, named))
        builder = VariableBuilder(tx, source)
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.ndarray):
            made = builder(value)
            # Shape and type follow from the arguments, which are constants.
            tx.output.guards.remove_guards_with_source(source)
            return made
        if type(value) is float and numpy is not None:
            # Kept in full precision, as the number of each call is.
            return builder.wrap_unspecialized_primitive(numpy.float64(value))
        if isinstance(value, int | float) and not isinstance(value, bool):
            return builder.wrap_unspecialized_primitive(value)
        return unimplemented(
            gb_type="random values that are no numbers",
            context=f"{type(generator).__name__}.{name}",
            explanation=f"{type(generator).__name__}.{name}() draws no number, or array of numbers",
            hints=[],
        )


def cached_effects_refused() -> AbstractContextManager[None]:
    """Return a context in which captures refuse calls of functions with a cache that matter.

    Such a function runs once, and a graph of it every time: the same only where it neither draws
    numbers, nor computes from tensors that change, nor writes to what others read.
    """
    from torch._dynamo.exc import unimplemented
    from torch._dynamo.variables.functions import WrapperUserFunctionVariable

    call: Any = WrapperUserFunctionVariable.call_function

    def refusing(function: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if not hasattr(function.wrapper_obj, "cache_info"):
            return call(function, tx, args, kwargs)
        before, known, written = _draws_of(tx.output), set(tx.output.graph.nodes), []
        effects: Any = type(tx.output.side_effects)
        allow = effects.check_allowed_side_effect

        def noting(held: Any, item: Any) -> bool:
            if not type(item.mutation_type).__name__.endswith("New"):
                written.append(item)
            return bool(allow(held, item))

        with core.replaced(effects, check_allowed_side_effect=noting):
            result = call(function, tx, args, kwargs)
        added = [node for node in tx.output.graph.nodes if node not in known]
        name = function.wrapper_obj.__qualname__
        for is_so, kind, verb in (
            (_draws_of(tx.output) != before, "random numbers in", "draws"),
            (written, "writes of", "writes"),
            (any(map(_reads_inputs(known), added)), "tensors read by", "reads them"),
        ):
            if is_so:
                unimplemented(
                    gb_type=f"{kind} a function with a cache",
                    context=name,
                    explanation=f"{name}() {verb} once, a graph every time",
                    hints=[],
                )
        return result

    return core.replaced(WrapperUserFunctionVariable, call_function=refusing)


def _reads_inputs(known: Any) -> Callable[[Any], bool]:
    """Return whether a node reads a tensor of known nodes, or one that the code is given."""

    def reads(node: Any) -> bool:
        return any(
            isinstance(used.meta.get("example_value"), torch.Tensor)
            for used in node.all_input_nodes
            if used in known or used.op == "placeholder"
        )

    return reads


def _draws_of(captured: Any) -> int:
    """Return how many random numbers, or tensors of them, captured code draws so far."""
    return len(captured.random_calls) + sum(map(_is_drawn, captured.graph.nodes))


def _is_drawn(node: Any) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    packet: Any = getattr(torch.ops.aten, name, None)
    overloads = packet.overloads() if hasattr(packet, "overloads") else ()
    tag = torch.Tag.nondeterministic_seeded
    return any(tag in getattr(packet, overload).tags for overload in overloads)


@functools.cache
def _variables() -> tuple[Any, Any]:
    """Return the classes of dynamo's variables for generators, and for their methods."""
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.variables.base import VariableTracker

    class Generator(VariableTracker):
        _nonvar_fields = {"draws", "generator", *VariableTracker._nonvar_fields}  # noqa: RUF012

        def __init__(self, draws: Draws, generator: Any, **options: Any) -> None:
            super().__init__(**options)
            self.draws, self.generator = draws, generator
            assert self.source is not None
            install_guard(self.source.make_guard(GuardBuilder.ID_MATCH))

        def python_type(self) -> type:
            return type(self.generator)

        def read(self, tx: Any, name: str) -> Any:
            return Method(self.draws, self.generator, name)

        def call_method(self, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
            return self.draws.input(tx, self.generator, name, args, kwargs)

    class Method(VariableTracker):
        _nonvar_fields = {  # noqa: RUF012
            *VariableTracker._nonvar_fields,
            "draws",
            "generator",
            "name",
        }

        def __init__(self, draws: Draws, generator: Any, name: str, **options: Any) -> None:
            super().__init__(**options)
            self.draws, self.generator, self.name = draws, generator, name

        def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
            return self.draws.input(tx, self.generator, self.name, args, kwargs)

    setattr(Generator, core.attribute_reader(), Generator.read)
    return Generator, Method
