"""Marks of selective activation checkpointing, as plans honour them.

A policy of `torch.utils.checkpoint.create_selective_checkpoint_contexts` marks operators:

- MUST_SAVE: the operation runs once;
- PREFER_SAVE: it runs once as long as a plan fits so;
- MUST_RECOMPUTE: a copy of the operation in the backward makes the values that the backward
  reads, unless it draws random numbers;
- MUST_CPU_OFFLOAD, PREFER_CPU_OFFLOAD: as MUST_SAVE and PREFER_SAVE, since a second tier first
  takes values that are never computed again;
- PREFER_RECOMPUTE, which ``checkpoint()`` without a policy means too: the plan decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import fx

from rotor._pytorch import core

_SAVED = ("MUST_SAVE", "MUST_CPU_OFFLOAD")
_PREFERRED = ("PREFER_SAVE", "PREFER_CPU_OFFLOAD")
_RECOMPUTED = "MUST_RECOMPUTE"


def _mark(node: fx.Node) -> str:
    mark = node.meta.get("recompute")
    return "" if mark is None else str(getattr(mark, "name", ""))


def is_saved(node: fx.Node) -> bool:
    """Return whether an operation must not run again."""
    return _mark(node) in _SAVED


def prefers_saving(node: fx.Node) -> bool:
    """Return whether an operation runs again only where no plan fits otherwise."""
    return _mark(node) in _PREFERRED


def described(nodes: Iterable[fx.Node]) -> str:
    """Return a text on the marks of a graph; empty where a plan decides about all operations."""
    count: dict[str, int] = {}
    for node in nodes:
        mark = _mark(node)
        if mark in (*_SAVED, *_PREFERRED, _RECOMPUTED):
            count[mark] = count.get(mark, 0) + 1
    return ", ".join(f"{number} {mark}" for mark, number in count.items())


def recompute_marked(
    module: fx.GraphModule,
    forward: set[fx.Node],
    is_view: Callable[[fx.Node], bool],
    is_fixed: Callable[[fx.Node], bool],
) -> int:
    """Copy operations marked MUST_RECOMPUTE to the backward, for its reads; return their number.

    `module` is the joint graph, and `forward` its nodes before the loss. `is_view` tells whether a
    node is a view or an item of another, and `is_fixed` whether an operation must not run a second
    time.
    """
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    if not any(_mark(node) == _RECOMPUTED for node in nodes):
        return 0
    again: set[fx.Node] = set()
    for node in nodes:
        if node not in forward:
            continue
        is_marked = _mark(node) == _RECOMPUTED and not is_fixed(node)
        if is_marked or (is_view(node) and again.intersection(node.all_input_nodes)):
            again.add(node)
    # A copy stands before the first node that reads it; places are found from the last copy on.
    places: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if node not in forward:
            for read in again.intersection(node.all_input_nodes):
                places.setdefault(read, node)
    order = {node: number for number, node in enumerate(nodes)}
    for node in reversed([node for node in nodes if node in again]):
        if node in places:
            for read in again.intersection(node.all_input_nodes):
                here = places.get(read, places[node])
                places[read] = min(here, places[node], key=order.__getitem__)
    copies: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if node not in places:
            continue
        with module.graph.inserting_before(places[node]):
            copy = module.graph.node_copy(node, lambda read: copies.get(read, read))
        copy.meta["partitioner_tag"] = "is_backward"
        copy.meta["val"] = _made(copy)
        copy.meta.pop("recompute", None)
        copies[node] = copy
    for node in nodes:
        if node not in forward:
            for read in copies.keys() & set(node.all_input_nodes):
                node.replace_input_with(read, copies[read])
    return sum(not is_view(node) for node in copies)


def _made(node: fx.Node) -> Any:
    def value(read: fx.Node) -> Any:
        return read.meta["val"]

    with core.fake_mode_of([node, *node.all_input_nodes]):
        return node.target(  # type: ignore[operator]
            *fx.map_arg(node.args, value), **fx.map_arg(node.kwargs, value)
        )
