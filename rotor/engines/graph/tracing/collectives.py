"""Collective operations in captured graphs.

A functional collective returns a tensor that is written to later, and ``wait_tensor`` returns the
same storage once it is; the fake tensors of a capture lie on two storages. Here a wait is a view of
the result of its collective, and the emitted code of the collective waits in its own line, so that
checksums and frees come after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import fx

from rotor._pytorch import dispatch


def is_wait(node: fx.Node) -> bool:
    """Return whether a node waits for a collective."""
    return dispatch.is_wait(node.target)


def is_collective(node: fx.Node | None) -> bool:
    """Return whether other processes take part in the operation of a node."""
    return node is not None and dispatch.is_collective(node.target)


def awaited(nodes: Iterable[fx.Node]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield the nodes that wait, each with the node of the result for which it waits."""
    for node in nodes:
        if node.op == "call_function" and is_wait(node):
            yield node, node.all_input_nodes[0]


def groups_of(nodes: Iterable[fx.Node | None]) -> list[Any]:
    """Return the process groups of these collectives, but for those of fake processes."""
    found = [node for node in nodes if node is not None]
    return dispatch.groups_among(v for n in found for v in (*n.args, *n.kwargs.values()))
