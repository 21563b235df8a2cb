"""Identities of the storages on which the tensors of a joint graph lie.

Nodes that were copied for an alike module have the tensors of the originals: a `Table` tells on
which storages these lie in the copy.
"""

from __future__ import annotations

import itertools

from torch import fx

from rotor._pytorch import core
from rotor.common.tensor_trees import result_tensors

__all__ = ["TABLE", "Table", "identities_of"]

TABLE = "rotor_storages"
"""Name of the table of a copied node, in its data."""

_NUMBERS = itertools.count(1)


class Table(dict[int, int]):
    """Identities of storages in a copy, by the identities of the original's.

    Storages that are not in the table are the copy's own, and get new identities.
    """

    def __missing__(self, identity: int) -> int:
        made = self[identity] = -next(_NUMBERS)
        return made


def identities_of(node: fx.Node) -> list[int]:
    """Return the identity of the storage of each of a node's tensors."""
    found = [core.storage_identity(tensor) for tensor in result_tensors(node.meta.get("val"))]
    table = node.meta.get(TABLE)
    return found if table is None else [table[identity] for identity in found]
