"""Weights that autocast casts once for several uses, by its cache, in graphs that are traced.

A trace has no such cache: it would cast a weight anew for each use, and add the gradients of the
uses in the weight's own precision, where eager PyTorch adds them in the lower one.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import fx
from torch.nn import functional

from rotor._pytorch import devices

_NAMES = ("matmul", "mm", "bmm", "addmm", "addbmm", "baddbmm", "conv_tbc", "prelu")
_CONVOLUTIONS = [f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)]
_CELLS = {torch.gru_cell, torch.lstm_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell}
_FUNCTIONS = {getattr(torch, name) for name in (*_NAMES, *_CONVOLUTIONS)} | {
    torch._C._nn.linear,
    torch.linalg.matmul,
    functional.scaled_dot_product_attention,
    functional.multi_head_attention_forward,
    operator.matmul,
    *_CELLS,
}
"""Functions whose arguments autocast casts to the lower precision, on every device; of some, only
those of `_weights`.
"""

_ATTENTION = inspect.signature(functional.multi_head_attention_forward)
_PACKED = ("in_proj_weight", "in_proj_bias")
_PROJECTIONS = (
    *(f"{name}_proj_weight" for name in ("q", "k", "v", "out")),
    "out_proj_bias",
)


class _Casting(NamedTuple):
    """Autocast at a node."""

    dtypes: dict[str, torch.dtype]
    """Lower precision by kind of device, where it is on."""
    region: int
    """Number of the outermost contexts that have ended: the cache is emptied there."""


def autocast_dtypes() -> dict[str, torch.dtype]:
    """Return the lower precision by kind of device, where autocast is on."""
    kinds = {"cpu", devices.accelerator_in_use().type}
    return {k: torch.get_autocast_dtype(k) for k in kinds if torch.is_autocast_enabled(k)}


def casts_are_shared(kind: str) -> bool:
    """Return whether autocast is on and casts a weight once for all of its uses."""
    return torch.is_autocast_enabled(kind) and torch.is_autocast_cache_enabled()


def cast_once(module: fx.GraphModule) -> None:
    """Write a cast into a graph for each weight that eager PyTorch would cast for several uses."""
    if not torch.is_autocast_cache_enabled():
        return
    uses: dict[Any, list[fx.Node]] = {}
    for node, casting in _nodes(module.graph):
        if node.target in _FUNCTIONS or (node.op == "call_method" and node.target in _NAMES):
            for weight in _weights(node):
                value = weight.meta.get("example_value")
                dtype = casting.dtypes.get(value.device.type) if _is_cached(value) else None
                if dtype is not None:
                    uses.setdefault((weight, dtype, casting.region), []).append(node)
    several = {key: nodes for key, nodes in uses.items() if len(nodes) > 1}
    for (weight, dtype, _), nodes in several.items():
        with module.graph.inserting_before(nodes[0]):
            cast = module.graph.call_method("to", (weight, dtype))
        cast.meta = {**nodes[0].meta, "example_value": weight.meta["example_value"].to(dtype)}
        for node in nodes:
            node.replace_input_with(weight, cast)
    if several:
        module.recompile()


def _weights(node: fx.Node) -> list[fx.Node]:
    """Return the arguments of a function that autocast casts whole."""
    given: Iterable[Any] = node.all_input_nodes
    if node.target in _CELLS:
        given = node.args[2:]
    elif node.target is functional.multi_head_attention_forward:
        named = _ATTENTION.bind(*node.args, **node.kwargs).arguments
        # Of queries that are not keys and values too, parts of the weight are cast.
        is_packed = named["query"] is named["key"] is named["value"]
        names = (*_PROJECTIONS, *_PACKED) if is_packed else _PROJECTIONS
        given = [named.get(name) for name in names]
    return [weight for weight in given if isinstance(weight, fx.Node)]


def has_casts_for_several(parts: Iterable[fx.Node]) -> bool:
    """Return whether autocast may cast a weight once for a part of a graph and for other nodes."""
    weights = {node for part in parts for node in part.all_input_nodes}
    return any(
        len(weight.users) > 1 and _is_cached(value) and casts_are_shared(value.device.type)
        for weight in weights
        if (value := weight.meta.get("example_value")) is not None
    )


def _is_cached(value: object) -> TypeGuard[torch.Tensor]:
    return (
        isinstance(value, torch.Tensor)
        and value.dtype == torch.float32
        and value.requires_grad
        and value.is_leaf
        and not value._is_view()
    )


def _nodes(graph: fx.Graph) -> Iterator[tuple[fx.Node, _Casting]]:
    """Yield the nodes of a graph with the autocast that they run in."""
    around = autocast_dtypes()
    entered: dict[fx.Node, dict[str, torch.dtype]] = {}
    dtypes, region = around, 0
    for node in graph.nodes:
        if node.target is torch.amp.autocast_mode._enter_autocast:
            entered[node] = dtypes
            kind, dtype, is_on, _ = node.args
            dtypes = {**dtypes, kind: dtype or torch.get_autocast_dtype(kind)}
            if not is_on:
                del dtypes[kind]
        elif node.target is torch.amp.autocast_mode._exit_autocast:
            dtypes = entered.pop(node.args[0])
            region += not (entered or around)
        else:
            yield node, _Casting(dtypes, region)
