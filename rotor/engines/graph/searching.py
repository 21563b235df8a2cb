"""Programs of captured steps: those that shapes share, and those of earlier runs of a script.

A program is an order in which a graph's operations run, at any shape: it carries over from one to
others.

Programs and reserves are kept on disk by the graph. Its fingerprint covers its operations, the
layouts of their arguments, the storages, the device, PyTorch's version and the number of threads. A
kept program is checked and priced as any other: one that does not suit is not used.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import fx

from rotor._pytorch import core
from rotor.common import cache
from rotor.common.checksums import Proved
from rotor.engines.graph.code.early import EarlyCode
from rotor.engines.graph.code.emit import Emitted
from rotor.engines.graph.code.handover import Away, with_handovers
from rotor.engines.graph.code.proving import Prover
from rotor.engines.graph.costs.profile import Cost, environment_of, keys_of
from rotor.engines.graph.tracing.lowering import Lowered
from rotor.errors import InvalidSequenceError
from rotor.graph.graph import Graph
from rotor.graph.link import Link
from rotor.graph.program import Program
from rotor.graph.resizing import Resizing

Order = npt.NDArray[np.int32]

_KIND = "programs"
_ORDERS = "orders"
_MOST_ORDERS = 16
_LOSS = "loss"
_FIELDS = 5
_DIGITS = 3
_WITH_TIER = " with a tier"
_MOST_PROGRAMS = 32


def options_number(options: Mapping[str, Any], link: Link | None = None) -> int:
    """Return a number for the options of a search, and for the link to a second tier.

    Speeds of the link that differ by less than a factor of about 2 give the same number.
    """
    text = repr(sorted(options.items()))
    if link is not None:
        speeds = (link.write_bytes_per_s, link.read_bytes_per_s)
        text += repr(([round(math.log2(speed)) for speed in speeds], link.host_bytes))
    return zlib.crc32(text.encode())


def fingerprint(lowered: Lowered, device: torch.device, keys: Sequence[str] | None = None) -> str:
    """Return the text by which knowledge on a graph is kept; `keys` are the result of `keys_of`."""
    keys = keys_of(lowered, device) if keys is None else keys
    return _digest(lowered, device, keys, lowered.storages)


def _structure(lowered: Lowered, device: torch.device) -> str:
    """Return the text by which the programs for all shapes of a graph are kept.

    The sizes of storages are those of the shape seen first: the text has the symbols instead.
    """
    calls = [None if task.node is None else _call(task.node) for task in lowered.tasks]
    return _digest(lowered, device, calls, [pinned for _, pinned in lowered.storages])


def _call(node: fx.Node) -> tuple[str, list[str]]:
    results = core.tree_flatten(node.meta.get("val"))[0]
    return str(node.target), [str(getattr(result, "shape", "")) for result in results]


def _digest(
    lowered: Lowered, device: torch.device, calls: Sequence[Any], storages: Sequence[Any]
) -> str:
    digest = hashlib.sha256()
    for call, task in zip(calls, lowered.tasks, strict=True):
        made = sorted(task.made.items())
        digest.update(
            repr((call, task.name, task.phase, task.inputs, made, task.gradients)).encode()
        )
    digest.update(repr(storages).encode())
    return f"{environment_of(device)} {digest.hexdigest()}"


def program_of(graph: Graph, actions: Sequence[int] | Order, link: Link | None) -> Program | None:
    """Return a program of a graph; None if the actions make no valid one."""
    try:
        return Program(graph, np.asarray(actions, dtype=np.int32), link)
    except (InvalidSequenceError, ValueError, OverflowError):
        return None


@dataclass(frozen=True)
class Kept:
    """Program of an earlier run."""

    actions: Sequence[int]
    limit_bytes: int
    loss_bytes: int
    reserve_bytes: int
    options: int
    """Number of the options of its search (`options_number`)."""
    is_final: bool
    """True if the search for a better one had ended."""
    has_tier: bool = False
    """True if it was searched for with a second tier."""


class Known:
    """Knowledge on one graph; arguments as of `fingerprint`."""

    def __init__(
        self, lowered: Lowered, device: torch.device, keys: Sequence[str] | None = None
    ) -> None:
        self._environment = fingerprint(lowered, device, keys)
        self._rows = cache.load(_KIND, self._environment)

    @property
    def loss_bytes(self) -> int | None:
        """Bytes of the caller's loss in the latest run; ``None`` if unknown."""
        row = self._rows.get(_LOSS)
        return row[0] if row else None

    def programs(self) -> list[Kept]:
        """Return the programs of earlier runs, under any limit."""
        return [
            Kept(
                row[_FIELDS:],
                row[0],
                row[1],
                row[2],
                row[3],
                bool(row[4]),
                name.endswith(_WITH_TIER),
            )
            for name, row in self._rows.items()
            if name != _LOSS and len(row) > _FIELDS
        ]

    def keep(self, found: Kept, loss_bytes: int | None) -> None:
        """Keep a program on disk, in the place of one under nearly the same limit.

        `loss_bytes` are those of the caller's loss, None if not metered.
        """
        name = f"limit {float(found.limit_bytes):.{_DIGITS}g}"
        name += _WITH_TIER if found.has_tier else ""
        row = [
            found.limit_bytes,
            found.loss_bytes,
            found.reserve_bytes,
            found.options,
            int(found.is_final),
            *map(int, found.actions),
        ]
        rows = {name: row}
        if loss_bytes is not None:
            rows[_LOSS] = [loss_bytes]
        if all(self._rows.get(key) == value for key, value in rows.items()):
            return
        self._rows.update(rows)
        cache.store(_KIND, self._environment, rows)


class KnownOrders:
    """Latest programs for all shapes of one graph with symbols.

    They are kept apart from others if they were searched for with a second tier.
    """

    def __init__(self, lowered: Lowered, device: torch.device, *, has_tier: bool = False) -> None:
        self._environment = _structure(lowered, device) + (_WITH_TIER if has_tier else "")
        self._rows = cache.load(_ORDERS, self._environment)
        self._next = len(self._rows)

    def programs(self, graph: Graph, link: Link | None = None) -> list[tuple[int, Program]]:
        """Return valid programs of earlier runs, each after the bytes of all storages at its shape.

        They are checked on the graph, at any shape, and the link to a second tier.
        """
        found = [(row[0], program_of(graph, row[1:], link)) for row in self._rows.values() if row]
        return [(total, program) for total, program in found if program is not None]

    def keep(self, total: int, program: Program) -> None:
        """Keep a program on disk that was searched for at a shape of `total` bytes."""
        row = [total, *program.actions.tolist()]
        if row in self._rows.values():
            return
        name = f"program {self._next % _MOST_ORDERS}"
        self._next += 1
        self._rows[name] = row
        cache.store(_ORDERS, self._environment, {name: row})


@dataclass
class Entry:
    """Program of a captured step, and the code that runs it; steps of other shapes share both."""

    actions: Order
    code: Emitted | None = None
    """Functions that run it; None before they are needed."""
    early: dict[bool, EarlyCode] = field(default_factory=dict)
    """Code that a consumer of single gradients gets: of verified steps, and of others."""
    verified: tuple[Emitted, Prover] | None = None
    """Functions with comparisons, and their prover."""
    proved: Proved = field(default_factory=Proved)
    """Results of verified steps."""
    own: dict[int, int] = field(default_factory=dict)
    """Bytes kept beside the storages, by limit."""
    used: int = 0
    """Number of the last choice of the program."""
    total: int = 0
    """Bytes of all storages at the shape for which it was searched."""
    link: Link | None = None
    """Link to a second tier with which it was searched for."""


class Operations:
    """Operations of a captured step for one set of existing gradients, and their programs."""

    resizing: Resizing
    """Source of cost models; there is one only where shapes share the operations."""
    known: KnownOrders | None = None
    """Programs on disk; ``None`` if none are read or kept."""

    def __init__(self, lowered: Lowered, existing: frozenset[int], away: Away | None) -> None:
        self.lowered = lowered
        self.origins: list[int | Cost] = list(range(len(lowered.tasks)))
        """For each operation its number in the captured graph, or the cost of one that it lacks."""
        if existing:
            self.lowered, self.origins = with_handovers(lowered, existing, away)
        self.programs: dict[bytes, Entry] = {}
        self._choices = 0
        self.entry(range(len(self.lowered.tasks)))

    def costs(self, costs: Sequence[Cost]) -> list[Cost]:
        """Return the costs of its operations, from those of the captured graph's."""
        return [one if isinstance(one, Cost) else costs[one] for one in self.origins]

    def entry(self, actions: Sequence[int] | Order) -> Entry:
        """Return a program's entry, made if it is new."""
        order = np.asarray(actions, dtype=np.int32)
        key = order.tobytes()
        if key not in self.programs:
            self.programs[key] = Entry(order)
        found = self.programs[key]
        self._choices += 1
        found.used = self._choices
        return found

    def prune(self) -> None:
        """Drop the programs that were not chosen for longest."""
        while len(self.programs) > _MOST_PROGRAMS:
            # The first program, which runs every operation once, is always kept.
            oldest = min(list(self.programs)[1:], key=lambda key: self.programs[key].used)
            del self.programs[oldest]
