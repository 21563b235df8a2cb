"""Operations of captured graphs that bring bytes from elsewhere: fetches and collectives.

A parameter at home in a second tier becomes the result of an operation that fetches it. A plan then
keeps the fetched tensor, or fetches it again where it is read next, as it computes
other values again.

A functional collective returns a tensor that is written to later, and ``wait_tensor`` returns the
same storage once it is; the fake tensors of a capture lie on two storages. Here a wait is a view of
the result of its collective, and the emitted code of the collective waits in its own line, so that
checksums and frees come after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from rotor._pytorch import core, dispatch
from rotor.engines.graph.tracing.false_edges import changed_inputs
from rotor.errors import CaptureError
from rotor.tier.homes import Home


class Fetch:
    """Operation that returns a parameter from its home."""

    __name__ = "fetch"

    def __init__(self, home: Home) -> None:
        self.home = home

    def __repr__(self) -> str:
        """Return the name by which costs are kept."""
        tier = f"{self.home.tier!r}, {self.home.tier.alignment_bytes}"
        return f"fetch({self.home.dtype}, {tuple(self.home.shape)}, {tier})"

    def __deepcopy__(self, memo: Any) -> Fetch:
        return self

    def __call__(self) -> torch.Tensor:
        """Return the parameter in new memory."""
        return self.home.fetch()

    def begin(self) -> torch.Tensor:
        """Return new memory for the parameter, complete after `arrived`."""
        made, tickets = self.home.read()
        made.arriving = self.home, tickets  # type: ignore[attr-defined]
        return made


def is_fetch(node: fx.Node | None) -> bool:
    """Return whether a node of a graph fetches a parameter."""
    return node is not None and isinstance(node.target, Fetch)


def arrived(tensor: torch.Tensor) -> None:
    """Wait until a tensor of `Fetch.begin` is complete; a second backward has waited before."""
    arriving = vars(tensor).pop("arriving", None)
    if arriving is not None:
        home, tickets = arriving
        home.wait(tickets)


def insert_fetches(module: fx.GraphModule, homes: Sequence[Home | None], outputs: int) -> None:
    """Replace inputs of a joint graph that have homes by operations that fetch them.

    Parameters
    ----------
    module
        Joint graph, of which the first results are `outputs` of the forward.
    homes
        Home of each input; ``None`` for inputs in memory.

    Raises
    ------
    CaptureError
        The forward returns or writes such a parameter.
    """
    graph = module.graph
    placeholders = graph.find_nodes(op="placeholder")
    returned = set(graph.output_node().all_input_nodes)
    written = set(changed_inputs(graph.output_node(), outputs).values())
    place = {node: number for number, node in enumerate(graph.nodes)}
    for node, home in zip(placeholders, homes, strict=False):
        if home is None or not node.users:
            continue
        if node in returned or repr(node.meta.get("desc")) in written:
            raise CaptureError(
                f"the forward returns or writes the parameter {node.name}, whose bytes are in a "
                "second tier: return a clone of it, or leave offload_state out"
            )
        value = node.meta["val"]
        with graph.inserting_before(min(node.users, key=place.__getitem__)):
            made = graph.call_function(Fetch(home))
        node.replace_all_uses_with(made)
        made.meta["val"] = value
        with core.fake_mode_of([node]):
            node.meta["val"] = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=value.device
            )
    module.recompile()


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
