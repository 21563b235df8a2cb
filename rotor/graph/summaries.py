"""A program's treatment of each storage: kept, dropped, made again, or moved to a second tier."""

from __future__ import annotations

from dataclasses import dataclass

from rotor.graph.program import Program

FATES = ("kept", "dropped", "recomputed", "offloaded", "backward")
"""Treatments of a storage.

"kept": made in the forward, and in memory when the forward ends. "dropped": made in the forward,
freed before it ends, and never needed again. "recomputed": dropped, made again, and read again.
"offloaded": fetched from a second tier. "backward": made by the loss or the backward.
"""


@dataclass(frozen=True, slots=True)
class StorageSummary:
    """A program's treatment of one storage.

    Attributes
    ----------
    bytes
        Its size.
    fate
        One of `FATES`.
    makings
        Number of times that it is made.
    maker
        The operation that makes it.
    """

    bytes: int
    fate: str
    makings: int
    maker: int


@dataclass(frozen=True, slots=True)
class Again:
    """An operation that runs more than once.

    Attributes
    ----------
    operation
        Its number.
    runs
        Number of times that it runs.
    extra_ns
        Nanoseconds of all runs but the first.
    """

    operation: int
    runs: int
    extra_ns: int


@dataclass(frozen=True)
class Summary:
    """A program's treatment of all storages of its graph.

    Attributes
    ----------
    storages
        One entry for each storage.
    again
        The operations that run more than once, by descending cost.
    operations
        Treatment of each operation: "recomputed" if it runs more than once, else "offloaded",
        "kept" or "dropped" by the treatment of its outputs, or "loss" or "backward".
    boundary
        Number of runs before the loss (or before the backward, without a loss).
    """

    storages: tuple[StorageSummary, ...]
    again: tuple[Again, ...]
    operations: tuple[str, ...]
    boundary: int

    def bytes_of(self, fate: str) -> int:
        """Return the bytes of all storages of one fate, each once.

        Raises
        ------
        ValueError
            No fate has this name.
        """
        if fate not in FATES:
            raise ValueError(f"no fate is named {fate!r}, expected one of {', '.join(FATES)}")
        return sum(storage.bytes for storage in self.storages if storage.fate == fate)

    @property
    def kept_bytes(self) -> int:
        """Bytes of storages that are kept from the forward for the backward."""
        return self.bytes_of("kept")

    @property
    def dropped_bytes(self) -> int:
        """Bytes of storages that the forward makes, drops and never needs again."""
        return self.bytes_of("dropped")

    @property
    def recomputed_bytes(self) -> int:
        """Bytes of storages that are dropped and made again."""
        return self.bytes_of("recomputed")

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of storages that are fetched from a second tier."""
        return self.bytes_of("offloaded")

    @property
    def extra_ns(self) -> int:
        """Nanoseconds of all runs but the first ones."""
        return sum(entry.extra_ns for entry in self.again)


def summarise(program: Program) -> Summary:
    """Return which storages a program keeps, drops, recomputes and offloads.

    Parameters
    ----------
    program
        Any program.

    Returns
    -------
    Summary
    """
    graph = program.graph
    operations = graph.operations
    ops = program.ops.tolist()
    boundary = next((k for k, op in enumerate(ops) if operations[op].phase != "forward"), len(ops))
    fetched = set((program.actions - len(graph) - len(graph.storages)).tolist())
    made = [0] * len(graph.storages)
    read_again = [False] * len(graph.storages)
    first_event: dict[int, str] = {}
    at_boundary: list[int] = list(made)
    for position, op in enumerate(ops):
        if position == boundary:
            at_boundary = list(made)
        for s in operations[op].inputs:
            read_again[s] = read_again[s] or made[s] > 1
            if position >= boundary:
                first_event.setdefault(s, "read")
        for s in operations[op].outputs:
            made[s] += 1
            if position >= boundary:
                first_event.setdefault(s, "made")
    if boundary == len(ops):
        at_boundary = list(made)

    storages = []
    for s, storage in enumerate(graph.storages):
        maker = graph.producers[s]
        if s in fetched:
            fate = "offloaded"
        elif read_again[s] and not storage.pinned:
            fate = "recomputed"
        elif operations[maker].phase != "forward":
            fate = "backward"
        elif at_boundary[s] and (storage.pinned or first_event.get(s) == "read"):
            fate = "kept"
        else:
            fate = "dropped"
        storages.append(StorageSummary(storage.bytes, fate, made[s], maker))
    runs = program.runs.tolist()
    again = [
        Again(op, count, (count - 1) * operations[op].cost_ns)
        for op, count in enumerate(runs)
        if count > 1
    ]
    again.sort(key=lambda entry: (-entry.extra_ns, entry.operation))
    return Summary(
        tuple(storages),
        tuple(again),
        tuple(
            _of_operation(op.phase, count, [storages[s].fate for s in op.outputs])
            for op, count in zip(operations, runs, strict=True)
        ),
        boundary,
    )


def _of_operation(phase: str, runs: int, fates: list[str]) -> str:
    if runs > 1:
        return "recomputed"
    if phase != "forward":
        return phase
    return next((fate for fate in ("offloaded", "kept") if fate in fates), "dropped")
