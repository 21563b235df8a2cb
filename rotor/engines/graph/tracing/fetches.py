"""Parameters at home in a second tier: each becomes the result of an operation that fetches it.

A plan then keeps the fetched tensor, or fetches it again where it is read next, as it computes
other values again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from rotor._pytorch import core
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
    place = {node: number for number, node in enumerate(graph.nodes)}
    for node, home in zip(placeholders, homes, strict=False):
        if home is None or not node.users:
            continue
        if node in returned or _writes(graph, node, outputs):
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


def _writes(graph: fx.Graph, node: fx.Node, outputs: int) -> bool:
    """Return whether a result of the forward is the new value of an input."""
    described = graph.output_node().meta.get("desc") or []
    written = [getattr(desc, "mutated_input", None) for desc in described[:outputs]]
    return any(repr(desc) == repr(node.meta.get("desc")) for desc in written if desc is not None)
