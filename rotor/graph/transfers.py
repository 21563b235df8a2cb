"""Moments at which the transfers of a program with a second tier begin and end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from rotor.graph.program import Program, written_bytes


class Transfer(NamedTuple):
    """Transfer of a storage, from one moment of the predicted step to another."""

    kind: str
    """"written" or "fetched"."""
    storage: int
    nbytes: int
    begin_ns: int
    end_ns: int


@dataclass
class Transfers:
    """Predicted step of a program on the clock of its operations."""

    moved: list[Transfer] = field(default_factory=list)
    """Transfers, in the order in which they begin."""
    waits_ns: list[int] = field(default_factory=list)
    """Time that each run waits for the tier before it, the waits of finished offloads included."""
    end_ns: int = 0


def transfers_of(program: Program, least_ns: int = 0) -> Transfers:
    """Return the transfers of a program.

    Runs last at least `least_ns`; a page or trace shows none shorter.
    """
    graph, link, found = program.graph, program.link, Transfers()
    runs, storages = len(graph), len(graph.storages)
    finished = {k - runs for k in program.actions.tolist() if runs <= k < runs + storages}
    begins = _writes(program, finished)
    now = waited = put = 0
    run_ns = program.run_ns
    free = {"written": 0, "fetched": 0}
    written: dict[int, int] = {}
    ready: dict[int, int] = {}

    def move(kind: str, storage: int, earliest: int) -> int:
        assert link is not None
        nbytes = graph.storages[storage].bytes
        ns = link.write_ns(nbytes) if kind == "written" else link.read_ns(nbytes)
        return transfer(kind, storage, nbytes, ns, earliest)

    def transfer(kind: str, storage: int, nbytes: int, ns: int, earliest: int) -> int:
        assert link is not None
        last = free[kind] if link.duplex else max(free.values())
        begin = max(last, earliest)
        free[kind] = begin + ns
        found.moved.append(Transfer(kind, storage, nbytes, begin, free[kind]))
        return free[kind]

    for position, number in enumerate(program.actions.tolist()):
        if number < runs:
            operation = graph.operations[number]
            start = max(now, *(ready.get(s, 0) for s in operation.inputs), 0)
            if link is not None and operation.clock == "write":
                start = max(start, put)
                put = start
            found.waits_ns.append(waited + start - now)
            now, waited = start, 0
            if link is not None and operation.clock == "read":
                (storage,) = operation.outputs
                nbytes = graph.storages[storage].bytes
                ready[storage] = transfer("fetched", storage, nbytes, operation.cost_ns, now)
            elif link is not None and operation.clock == "write" and operation.cost_ns:
                nbytes = written_bytes(operation)
                put = transfer("written", operation.inputs[0], nbytes, operation.cost_ns, now)
            now += max(int(run_ns[number]), least_ns)
            for storage in begins.get(position, ()):
                written[storage] = move("written", storage, now)
        elif number < runs + storages:
            end = max(now, written.get(number - runs, 0))
            waited += end - now
            now = end
        else:
            storage = number - runs - storages
            ready[storage] = move("fetched", storage, max(now, written.get(storage, 0)))
    found.end_ns = now
    return found


def _writes(program: Program, finished: set[int]) -> dict[int, list[int]]:
    """Return the storages whose writes begin after each run: the last one before their finish."""
    graph, runs = program.graph, len(program.graph)
    made: dict[int, int] = {}
    begins: dict[int, list[int]] = {}
    for position, number in enumerate(program.actions.tolist()):
        if number < runs:
            outputs = graph.operations[number].outputs
            made.update({storage: position for storage in outputs if storage in finished})
        elif number < runs + len(graph.storages):
            begins.setdefault(made[number - runs], []).append(number - runs)
    return begins
