"""Calls of a module: made of a sample, and told apart by a signature."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rotor._pytorch import core
from rotor.common.generators import autocast_of
from rotor.common.tensor_trees import output_tensors

__all__ = [
    "autocast_signature",
    "call_signature",
    "flattened_call",
    "leaf_signature",
    "sample_call",
]

_PLAIN_LEAVES = {torch.Tensor, nn.Parameter, bool, int, float, str, type(None)}
_VALUES = bool | int | float | str | None | torch.dtype | torch.device


def sample_call(
    sample: Any, *, is_one: bool = False, takes_lists: bool = False
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the keyword arguments that a sample stands for.

    Parameters
    ----------
    sample
        A tuple of positional arguments, a dictionary of keyword arguments, or the only argument.
    is_one
        The sample is the only argument, of any type: chains of stages take one.
    takes_lists
        A list holds positional arguments too, as in published interfaces.
    """
    if isinstance(sample, dict) and not is_one:
        return (), sample
    several = tuple | list if takes_lists else tuple
    return tuple(sample) if isinstance(sample, several) and not is_one else (sample,), {}


def layout_of(tensor: torch.Tensor) -> Any:
    """Return a tensor's strides, or the name of a layout that has none."""
    return tensor.stride() if tensor.layout == torch.strided else tensor.layout


def flattened_call(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], targets: tuple[Any, ...]
) -> tuple[list[Any], str]:
    """Return the leaves of a call's arguments, and their structure as text.

    Parameters
    ----------
    args, kwargs
        Arguments of the model.
    targets
        Arguments of the loss.
    """
    leaves = [*args, *kwargs.values(), *targets]
    if _PLAIN_LEAVES.issuperset(map(type, leaves)) and type(args) is type(targets) is tuple:
        return leaves, _flat_structure(len(args), tuple(kwargs), len(targets))
    leaves, spec = core.tree_flatten((args, dict(kwargs), targets))
    return leaves, str(spec)


@functools.lru_cache
def _flat_structure(positional: int, names: tuple[str, ...], targets: int) -> str:
    leaf = (None,)
    call = leaf * positional, dict.fromkeys(names), leaf * targets
    return str(core.tree_flatten(call)[1])


def leaf_signature(leaf: Any, *, by_identity: bool) -> Any:
    """Return the part of a signature that comes from one leaf of the arguments.

    Parameters
    ----------
    leaf
        A tensor, a plain value, or any other object.
    by_identity
        Other objects count as themselves, not by their type.
    """
    if isinstance(leaf, torch.Tensor):
        return (leaf.shape, layout_of(leaf), leaf.dtype, leaf.device, leaf.requires_grad)
    if isinstance(leaf, _VALUES):
        return (type(leaf), leaf)
    inner = output_tensors(leaf)
    if inner:
        return (type(leaf), tuple([leaf_signature(t, by_identity=False) for t in inner]))
    if hasattr(leaf, "dtype"):
        return (type(leaf), leaf.dtype, leaf.shape)
    return (type(leaf), id(leaf)) if by_identity else type(leaf)


def autocast_signature(kind: str) -> tuple[str, bool, torch.dtype]:
    """Return the part of a signature that comes from autocast on a type of device."""
    return (kind, *autocast_of(kind))


def call_signature(args: Sequence[Any], kwargs: Any) -> Any:
    """Return what a captured piece depends on in its arguments and around it."""
    leaves, spec = core.tree_flatten((args, kwargs))
    kinds = {leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)}
    kinds = kinds - {"meta"} or {"cpu"}
    described = tuple([leaf_signature(leaf, by_identity=False) for leaf in leaves])
    return str(spec), described, tuple([autocast_signature(kind) for kind in sorted(kinds)])
