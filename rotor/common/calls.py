"""Calls of a module: made of a sample, and told apart by a signature."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rotor._pytorch import core
from rotor._pytorch import traces as modes
from rotor.common.modes import autocast_of
from rotor.common.tensor_trees import output_tensors

_PLAIN_LEAVES = {torch.Tensor, nn.Parameter, bool, int, float, str, type(None)}
_VALUES = (
    bool | int | float | str | bytes | complex | None | torch.dtype | torch.device | torch.Size
)
_FEW = (bool, type(None), torch.dtype, torch.device, torch.Size)
"""Types of which there are few values: they always tell calls apart."""


def sample_call(
    sample: Any, *, is_one: bool = False, takes_lists: bool = False
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the keyword arguments that a sample stands for.

    A sample is a tuple of positional arguments, a dictionary of keyword arguments, or the only
    argument; with `is_one` always the only argument, for stages of a chain take one. With
    `takes_lists` a list holds positional arguments too, as in published interfaces.
    """
    if isinstance(sample, dict) and not is_one:
        return (), sample
    several = tuple | list if takes_lists else tuple
    return tuple(sample) if isinstance(sample, several) and not is_one else (sample,), {}


def layout_of(tensor: torch.Tensor) -> Any:
    """Return a tensor's strides, or the name of a layout that has none."""
    return tensor.stride() if tensor.layout == torch.strided else tensor.layout


NO_TARGETS: Any = ...
"""Default of ``targets=``: other than an empty tuple, which asks for a loss of the output alone."""


def targets_of(given: Any) -> tuple[Any, ...] | None:
    """Return the targets that a caller gives; ``None`` without any. One need not be in a tuple."""
    if given is NO_TARGETS:
        return None
    return tuple(given) if isinstance(given, tuple | list) else (given,)


def flattened_call(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], targets: tuple[Any, ...] | None
) -> tuple[list[Any], str]:
    """Return the leaves of the arguments of a model and its loss, and their structure as text."""
    leaves = [*args, *kwargs.values(), *(targets or ())]
    if _PLAIN_LEAVES.issuperset(map(type, leaves)) and type(args) is tuple:
        count = -1 if targets is None else len(targets)
        return leaves, _flat_structure(len(args), tuple(kwargs), count)
    leaves, spec = core.tree_flatten((args, dict(kwargs), targets))
    return leaves, str(spec)


@functools.lru_cache
def _flat_structure(positional: int, names: tuple[str, ...], targets: int) -> str:
    leaf = (None,)
    call = leaf * positional, dict.fromkeys(names), None if targets < 0 else leaf * targets
    return str(core.tree_flatten(call)[1])


def leaf_signature(leaf: Any) -> Any:
    """Return the part of a signature that comes from one leaf of the arguments.

    Objects count by their type: guards compare the attributes that captured code reads.
    """
    if isinstance(leaf, torch.Tensor):
        own = (leaf.shape, layout_of(leaf), leaf.dtype, leaf.device, leaf.requires_grad)
        if type(leaf) in _PLAIN_LEAVES:
            return own
        # A distributed tensor is split in a way that its shape does not show.
        return (*own, type(leaf), getattr(leaf, "placements", ()))
    if isinstance(leaf, float | complex):
        # As texts, -0.0 differs from 0.0, and NaN equals NaN.
        return (type(leaf), repr(leaf))
    if isinstance(leaf, _VALUES):
        return (type(leaf), leaf)
    inner = output_tensors(leaf)
    if inner:
        return (type(leaf), tuple(map(leaf_signature, inner)))
    if hasattr(leaf, "dtype"):
        return (type(leaf), leaf.dtype, leaf.shape)
    return type(leaf)


class Reads:
    """Numbers and texts among the arguments of calls of one structure that captured code reads.

    `leaves` are the numbers of the leaves, all of which count before a capture (``None``);
    `captured` are their values in three captured calls at most; `inputs` are the leaves that
    captured code takes as inputs from their second value on.
    """

    def __init__(self) -> None:
        self.leaves: frozenset[int] | None = None
        self.captured: list[PlainValues] = []
        self.inputs: frozenset[int] = frozenset()
        self._constants: frozenset[int] = frozenset()
        self._repeats = 0
        self._met: set[tuple[Any, ...]] = set()

    def see(self, values: PlainValues, leaves: Sequence[Any]) -> None:
        """Make inputs of numbers whose values differ from those of captured calls."""
        if self.captured and self.leaves is not None:
            changed = [
                k
                for k in self.leaves - self.inputs - self._constants
                if is_changing_number(leaves[k])
                and any(other.values[k] != values.values[k] for other in self.captured)
            ]
            self.inputs |= frozenset(changed)
        values.inputs = self.inputs

    @property
    def is_endless(self) -> bool:
        """True once so many values were captured that no other should be."""
        return len(self._met) >= MOST_VALUES

    def begin_again(self) -> None:
        """Have further values captured."""
        self._met.clear()

    def keep_constant(self, leaves: frozenset[int]) -> None:
        """Have numbers that cannot be inputs told apart by their values in later calls."""
        self._constants |= leaves
        self.inputs -= leaves

    def note(self, leaves: frozenset[int], values: PlainValues) -> list[int]:
        """Note a capture; return the leaves of which it has met the third value."""
        self.leaves = leaves if self.leaves is None else self.leaves | leaves
        if not self.is_endless:
            self._met.add(tuple(values.values[k] for k in sorted(self.leaves - self.inputs)))
        if values in self.captured:
            self._repeats += 1
            if self._repeats == _MANY:
                # The code asks for their values.
                self.keep_constant(self.inputs)
            return []
        if len(self.captured) == _MANY:
            return []
        self.captured.append(values)
        if len(self.captured) < _MANY:
            return []
        read = sorted(self.leaves - self.inputs)
        return [k for k in read if len({other.values[k] for other in self.captured}) == _MANY]


_MANY, MOST_VALUES = 3, 16
"""Captures for other values, after which a warning comes, and after which there are no more."""


class Structures:
    """Containers among the arguments of calls that take the same tensors, in three at most."""

    def __init__(self) -> None:
        self._seen: list[dict[str, str]] = []

    def note(self, structures: dict[str, str]) -> list[str]:
        """Note the structure of each argument; return the names of those that had a third one."""
        if len(self._seen) == _MANY or structures in self._seen:
            return []
        self._seen.append(structures)
        if len(self._seen) < _MANY:
            return []
        return [k for k in structures if len({one.get(k) for one in self._seen}) == _MANY]


class PlainValues:
    """Numbers and texts among the arguments of a call; equal if the leaves that are read are equal.

    `values` holds signatures by the number of the leaf. The values of leaves in `inputs` do not
    matter, for captured code takes them as inputs.
    """

    __slots__ = ("inputs", "reads", "values")

    @classmethod
    def of(cls, measured: Sequence[Any]) -> PlainValues:
        """Return the plain values of a kind of step; none where ranks compare all values."""
        return next((part for part in measured if isinstance(part, cls)), cls({}, Reads()))

    def __init__(self, values: dict[int, Any], reads: Reads) -> None:
        self.values, self.reads = values, reads
        self.inputs: frozenset[int] = frozenset()

    def __hash__(self) -> int:
        return hash(tuple(self.values))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PlainValues) or self.values.keys() != other.values.keys():
            return False
        read = self.values if self.reads.leaves is None else self.reads.leaves
        return self.inputs == other.inputs and all(
            self.values[k] == other.values[k] for k in read if k not in self.inputs
        )


def is_plain_value(leaf: Any) -> bool:
    """Return whether a leaf is a number or a text, of which there may be many."""
    return isinstance(leaf, _VALUES) and not isinstance(leaf, _FEW)


def is_changing_number(leaf: Any) -> bool:
    """Return whether a leaf is a number that captured code may take as an input.

    PyTorch makes constants of zero, one, and what is not finite.
    """
    is_number = type(leaf) is int or isinstance(leaf, float)
    return is_number and math.isfinite(leaf) and leaf not in (0, 1)


def leaf_expressions(arguments: Any) -> list[str | None]:
    """Return dynamo's expression of each leaf of (args, kwargs, targets); ``None`` if unknown."""
    found: list[str | None] = []
    for (first, *path), _ in core.tree_flatten_with_path(arguments)[0]:
        keys = [getattr(key, "key", getattr(key, "idx", None)) for key in path]
        known = all(isinstance(key, str | int) for key in keys)
        name = ("args", "kwargs", "targets")[first.idx]
        found.append(f"L['{name}']" + "".join(f"[{key!r}]" for key in keys) if known else None)
    return found


def shared_places(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int, int]]:
    """Return tensors on the storage of an earlier one: both numbers, and how far it lies behind."""
    firsts: dict[int, tuple[int, int]] = {}
    found = []
    for number, tensor in enumerate(tensors):
        for part in core.strided_parts(tensor):
            here = number, int(part.storage_offset())
            first, offset = firsts.setdefault(core.storage_identity(part), here)
            if first != number:
                found.append((number, first, here[1] - offset))
    return found


def mode_signature(kind: str) -> tuple[Any, ...]:
    """Return the part of a signature that comes from modes, for a type of device."""
    return (kind, *autocast_of(kind), modes.choices())


def call_signature(args: Sequence[Any], kwargs: Any) -> Any:
    """Return what a captured piece depends on in its arguments and around it."""
    leaves, spec = core.tree_flatten((args, kwargs))
    kinds = {leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)}
    kinds = kinds - {"meta"} or {"cpu"}
    described = tuple([leaf_signature(leaf) for leaf in leaves])
    return str(spec), described, tuple([mode_signature(kind) for kind in sorted(kinds)])
