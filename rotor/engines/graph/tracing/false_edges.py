"""Inputs that an operator reads for their sizes only.

The gradient of a convolution's input does not depend on that input's values, yet the operator takes
the tensor, for its sizes and its layout. Such an edge keeps an activation for nothing, or has it
computed again. A tensor of the same sizes and strides takes its place, on pages of the address
space that are never touched: kernel and layouts stay, and so do the bits.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from rotor._pytorch import core, symbols
from rotor.common.tensor_trees import extent_of, result_tensors


def identities_of(node: fx.Node) -> list[int]:
    """Return the identity of the storage of each of a node's tensors."""
    return [core.storage_identity(tensor) for tensor in result_tensors(node.meta.get("val"))]


def changed_inputs(output: fx.Node, count: int) -> dict[int, str]:
    """Return the numbers of the results that are new values of inputs, and which these are.

    `output` is that of a joint graph, of which the first `count` results are the forward's. An
    input is given by the text of its description.
    """
    described = (output.meta.get("desc") or [])[:count]
    inputs = [getattr(one, "mutated_input", None) for one in described]
    return {number: repr(one) for number, one in enumerate(inputs) if one is not None}


DEVICES = ("cpu",)
"""Types of devices whose kernels were compared; on others the edges stay."""

_aten = torch.ops.aten
_CONVOLUTION = _aten.convolution_backward.default
OF_FIRST = (
    _aten.empty_like.default,
    _aten.fill.Scalar,
    _aten.fill.Tensor,
    _aten.full_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
    _aten.new_full.default,
    _aten.new_ones.default,
    _aten.new_zeros.default,
    _aten.ones_like.default,
    _aten.rand_like.default,
    _aten.randn_like.default,
    _aten.zero.default,
    _aten.zeros_like.default,
)
"""Operators that read their first argument for its sizes only, or for its type."""

OF_SECOND = (
    _aten.max_pool2d_with_indices_backward.default,
    _aten.max_pool3d_with_indices_backward.default,
    _aten.avg_pool2d_backward.default,
    _aten.avg_pool3d_backward.default,
    _aten._adaptive_avg_pool2d_backward.default,
    _aten._adaptive_avg_pool3d_backward.default,
    _aten.adaptive_max_pool2d_backward.default,
    _aten.adaptive_max_pool3d_backward.default,
    _aten.reflection_pad1d_backward.default,
    _aten.reflection_pad2d_backward.default,
    _aten.reflection_pad3d_backward.default,
    _aten.replication_pad1d_backward.default,
    _aten.replication_pad2d_backward.default,
    _aten.replication_pad3d_backward.default,
    _aten.nll_loss_backward.default,
    _aten.nll_loss2d_backward.default,
)
"""Operators that read their second argument for its sizes only."""

PREFIX = "_sizes_of_"
"""Beginning of the names of tensors without memory."""


def drop_false_edges(module: fx.GraphModule) -> int:
    """Replace arguments in a joint graph that are read for sizes only; return their number."""
    graph = module.graph
    resident = {
        identity
        for node in graph.find_nodes(op="placeholder")
        if "tangent" not in node.name and _has_storage(node)
        for identity in identities_of(node)
    }
    count = 0
    for node in list(graph.nodes):
        for position in _positions(node):
            given: Any = node.args[position]
            is_known = _has_storage(given) and given.meta["val"].device.type in DEVICES
            if is_known and resident.isdisjoint(identities_of(given)):
                arguments = list(node.args)
                arguments[position] = _stand_in(module, node, given, f"{PREFIX}{count}")
                node.args = tuple(arguments)
                count += 1
    return count


def _positions(node: fx.Node) -> Iterator[int]:
    """Return the positions of the arguments that an operation reads for their sizes only."""
    if node.op != "call_function":
        return
    if node.target in OF_FIRST:
        yield 0
    elif node.target in OF_SECOND:
        yield 1
    elif node.target is _CONVOLUTION and isinstance(node.args[-1], list | tuple):
        of_input, of_weight = node.args[-1][:2]
        if not of_weight:
            yield 1
        if not of_input:
            yield 2


def _has_storage(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.layout == torch.strided


def _stand_in(module: fx.GraphModule, user: fx.Node, given: fx.Node, name: str) -> fx.Node:
    value = given.meta["val"]
    if any(map(symbols.is_symbol, (*value.shape, *value.stride()))):
        # Its sizes are known when the step runs.
        shape, strides = (
            tuple([symbols.text_of(part) for part in parts])
            for parts in (value.shape, value.stride())
        )
        with module.graph.inserting_before(user):
            node = module.graph.call_function(of_sizes, (shape, strides, value.dtype))
    else:
        with core.real_tensors():
            made = without_memory(value.shape, value.stride(), value.dtype)
        module.register_buffer(name, made, persistent=False)
        with module.graph.inserting_before(user):
            node = module.graph.get_attr(name)
    with core.fake_mode_of([given]), symbols.unguarded((*value.shape, *value.stride())):
        node.meta["val"] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return node


def of_sizes(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor without memory, called by graphs whose sizes are symbols."""
    return without_memory(torch.Size(shape), strides, dtype)


def without_memory(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros on pages of the address space that have no memory unless they are written."""
    extent = max(extent_of(shape, strides), 1)
    pages = mmap.mmap(-1, extent * dtype.itemsize, access=mmap.ACCESS_COPY)
    flat = torch.frombuffer(pages, dtype=dtype, count=extent)
    return flat.as_strided(shape, strides)
