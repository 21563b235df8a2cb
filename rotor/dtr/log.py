"""Log of a program under a budget, in the format that `rotor.simrd` replays.

Every operation is a line. Nodes are storages, and views share the node of their storage, so such a
log has no aliases and no copies of names. A write in place is a ``MUTATE``. A node that the
program writes to and cannot compute again (a parameter, its gradient) keeps its name, and the
operation has an empty result. ``PIN`` marks a node that the runtime keeps in memory
for good. The format is that of the prototype of Kirisame et al., "Dynamic Tensor
Rematerialization", ICLR 2021 (docs/logs.md).
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from rotor._pytorch import dispatch
from rotor.simrd.log_writer import LogWriter

START = "START"
BACKWARD = "BACKWARD"


class ProgramLog:
    """Observer that writes the events of a session as a log.

    Parameters
    ----------
    writer
        Takes the instructions.
    bytes_of
        Size in bytes of a node that existed before the log began.
    """

    def __init__(self, writer: LogWriter, bytes_of: Callable[[int], int]) -> None:
        self._writer = writer
        self._bytes_of = bytes_of
        self._names: dict[int, str] = {}
        self._kept: set[str] = set()
        self._count = 0
        self._backward = -1
        self._lock = threading.Lock()
        self._left: list[str] = []
        self._dead: set[int] = set()  # since the last operation
        self.is_on = True

    # -- events of a session

    def constant(self, node: int, nbytes: int) -> None:
        """Record a storage that no operator made."""
        self._dead.discard(node)
        if self.is_on:
            with self._lock:
                self._declare(node, nbytes)
            self._drain()

    def operation(
        self,
        name: str,
        cost_ns: int,
        inputs: list[int],
        outputs: list[tuple[int, int]],
        written: list[tuple[int, int]],
        is_recorded: bool,
    ) -> None:
        """Record an operator that ran."""
        if self.is_on:
            with self._lock:
                self._operation(name, cost_ns, inputs, outputs, written)
        else:
            for old, new in written:
                if old in self._names:
                    self._names[new] = self._names.pop(old)
        self._dead.clear()
        self._drain()

    def released(self, node: int) -> None:
        """Note that the program dropped a storage, possibly while another line is being written."""
        self._dead.add(node)
        name = self._names.pop(node, None)
        if name is not None:
            self._left.append(name)
            self._drain()

    def pinned(self, node: int) -> None:
        """Record that a storage stays in memory from now on."""
        if self.is_on:
            with self._lock:
                name = self._name(node)
                if name not in self._kept:
                    self._kept.add(name)
                    self._writer.pin(name)
            self._drain()

    def evicted(self, node: int) -> None:
        """Ignore an eviction: the simulator makes its own decisions."""

    # -- notes of the program

    def annotate(self, text: str) -> None:
        """Write a note; after "START" everything in memory is a constant."""
        with self._lock:
            self._writer.annotate(text)
            if text == START:
                self._names.clear()
                self._kept.clear()
                self._left.clear()
                self._backward = -1

    def close(self) -> None:
        """Write what is left, and close the file."""
        self.is_on = False
        self._names.clear()
        self._drain()
        with self._lock:
            self._writer.close()

    # -- writing

    def _declare(self, node: int, nbytes: int) -> str:
        name = self._names[node] = self._new_name()
        self._kept.add(name)
        self._writer.constant(name, nbytes)
        return name

    def _new_name(self) -> str:
        self._count += 1
        return f"x{self._count}"

    def _name(self, node: int) -> str:
        name = self._names.get(node)
        return self._declare(node, self._bytes_of(node)) if name is None else name

    def _operation(
        self,
        operator: str,
        cost_ns: int,
        inputs: list[int],
        outputs: list[tuple[int, int]],
        written: list[tuple[int, int]],
    ) -> None:
        task = dispatch.graph_task()
        if task > self._backward:
            self._backward = task
            self._writer.annotate(BACKWARD)
        # An operation may drop the storages of its arguments (`Tensor.set_`).
        inputs = [node for node in inputs if node in self._names or node not in self._dead]
        for before, after in written:
            if before not in self._names:
                self._declare(before, self._bytes_of(after))
        args = [self._name(node) for node in inputs]
        if written and not outputs:
            places = {node: place for place, node in enumerate(inputs)}
            self._writer.mutate(operator, args, [places[node] for node, _ in written], cost_ns)
            for before, after in written:
                self._names[after] = self._names.pop(before)
            return
        results = [(node, nbytes) for node, nbytes in outputs]
        results += [(after, self._bytes_of(after)) for _, after in written]
        names = [self._new_name() for _ in range(max(len(results), 1))]
        sizes = [nbytes for _, nbytes in results] or [0]
        self._writer.call(operator, args, names, cost_ns, bytes=sizes, aliases=[-1] * len(names))
        if not results:
            self._left.append(names[0])
        self._left.extend(self._names.pop(before) for before, _ in written)
        for (node, _), name in zip(results, names, strict=bool(results)):
            self._names[node] = name

    def _drain(self) -> None:
        """Write the releases that came while something else was written."""
        while self._left and self._lock.acquire(blocking=False):
            try:
                while self._left:
                    name = self._left.pop(0)
                    self._kept.discard(name)
                    self._writer.release(name)
            finally:
                self._lock.release()
