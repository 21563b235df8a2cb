"""The program of a log as static planners see it, and the exact price of a schedule of it.

A schedule is a list of steps: ``op >= 0`` executes that operation, ``~tensor`` (negative) pins a
tensor, as the log does with its constants and with what it still refers to at its end. What may be
dropped, and when, follows from the steps: a storage is dropped after the last read of one of its
tensors before they are executed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from rotor.simrd.logs import Log


__all__ = ["Price", "Program", "price"]

_COMPUTE, _PIN = 0, 2
_NEVER = 1 << 62


@dataclass(frozen=True, eq=False)
class Program:
    """Operations, tensors and storages of a log, and the order in which it runs them.

    Attributes
    ----------
    cost_ns
        Of each operation.
    inputs
        Tensors that each operation reads.
    outputs
        Tensors that each operation makes, consecutive.
    storage
        Of each tensor.
    operation
        That makes each tensor.
    is_alias
        Of each tensor: whether it is a view of a storage that another tensor was the first of.
    storage_bytes
        Of each storage.
    steps
        Actions of the log: operations, and pins as ``~tensor``.
    forward_steps
        Number of steps before the BACKWARD annotation; all steps if the log has none.
    """

    cost_ns: tuple[int, ...]
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[range, ...]
    storage: tuple[int, ...]
    operation: tuple[int, ...]
    is_alias: tuple[bool, ...]
    storage_bytes: tuple[int, ...]
    steps: tuple[int, ...]
    forward_steps: int

    @classmethod
    def from_log(cls, log: Log) -> Program:
        """Return the program of a log without its releases: a static plan knows the later reads."""
        operations, tensors, storages = log.operations, log.tensors, log.storages
        flat = log.inputs.tolist()
        kinds, indices = log.commands["kind"], log.commands["index"]
        is_step = np.isin(kinds, (_COMPUTE, _PIN))
        steps = np.where(kinds == _PIN, ~indices, indices)[is_step].tolist()
        backward = log.backward_command if log.backward_command >= 0 else len(kinds)

        def spans(of: str) -> list[range]:
            first, count = operations[f"first_{of}"], operations[f"{of}_count"]
            ends = zip(first.tolist(), (first + count).tolist(), strict=True)
            return [range(begin, end) for begin, end in ends]

        return cls(
            cost_ns=tuple(operations["cost_ns"].tolist()),
            inputs=tuple(tuple(flat[span.start : span.stop]) for span in spans("input")),
            outputs=tuple(spans("output")),
            storage=tuple(tensors["storage"].tolist()),
            operation=tuple(tensors["operation"].tolist()),
            is_alias=tuple(bool(alias) for alias in tensors["is_alias"].tolist()),
            storage_bytes=tuple(storages["bytes"].tolist()),
            steps=tuple(steps),
            forward_steps=int(is_step[:backward].sum()),
        )

    def is_constant(self, operation: int) -> bool:
        """Return whether an operation reads nothing and costs nothing."""
        return not self.inputs[operation] and self.cost_ns[operation] == 0

    def new_bytes(self, operation: int) -> int:
        """Return bytes that an execution of it allocates: of all its outputs that are no views."""
        return sum(
            self.storage_bytes[self.storage[t]]
            for t in self.outputs[operation]
            if not self.is_alias[t]
        )

    @property
    def base_compute_ns(self) -> int:
        """Time of all operations, each executed once."""
        return sum(self.cost_ns)

    @property
    def pinned_storages(self) -> frozenset[int]:
        """Storages that the log pins at some time."""
        return frozenset(self.storage[~step] for step in self.steps if step < 0)


@dataclass(frozen=True, eq=False)
class Price:
    """Memory and time of a schedule.

    Attributes
    ----------
    peak_bytes
        The most that is in memory while a step runs, constants included.
    compute_ns
        Nanoseconds of all executions.
    slowdown
        `compute_ns` over the nanoseconds of the program without a recomputation (1 for a program
        that takes no time).
    n_remat
        Executions beyond the first of each operation.
    memory_bytes
        In memory after each step, int64 [steps].
    """

    peak_bytes: int
    compute_ns: int
    slowdown: float
    n_remat: int
    memory_bytes: npt.NDArray[np.int64]


def price(program: Program, steps: Sequence[int]) -> Price:
    """Return memory and time of a schedule, counted as the replay of a log counts them.

    An execution allocates all its outputs beside everything that is in memory, including its
    inputs; outputs that exist already are freed again after it. A pinned storage is never dropped.
    The difference from a replay is that no budget is enforced and nothing is chosen: what is
    dropped follows from the steps, so that a storage that is still referred to by the program but
    not read again takes no memory, as in Checkmate's model.

    Parameters
    ----------
    program
        Program that is scheduled.
    steps
        Operations and pins, as in `rotor.simrd.program`.

    Returns
    -------
    Price
        Peak bytes and time.

    Raises
    ------
    ValueError
        A step reads or pins what is not in memory, or an operation or pin of the program is
        missing. The message has the position.
    """
    _check_complete(program, steps)
    ends = _lifetimes(program, steps)
    live = [-1] * len(program.storage_bytes)
    dropped: dict[int, list[int]] = {}
    memory = peak = compute = 0
    after = np.zeros(len(steps), dtype=np.int64)
    for position, step in enumerate(steps):
        if step >= 0:
            compute += program.cost_ns[step]
            memory += program.new_bytes(step)
            peak = max(peak, memory)
            for tensor in program.outputs[step]:
                storage = program.storage[tensor]
                size = program.storage_bytes[storage]
                if live[storage] >= position:
                    memory -= 0 if program.is_alias[tensor] else size
                    continue
                live[storage] = ends[storage].pop()
                dropped.setdefault(live[storage], []).append(size)
        memory -= sum(dropped.pop(position, ()))
        after[position] = memory
    base = program.base_compute_ns
    return Price(
        peak_bytes=peak,
        compute_ns=compute,
        slowdown=compute / base if base else 1.0,
        n_remat=sum(step >= 0 for step in steps) - len(program.cost_ns),
        memory_bytes=after,
    )


def _check_complete(program: Program, steps: Iterable[int]) -> None:
    missing = set(program.steps) - set(steps)
    if missing:
        step = min(missing, key=lambda step: (step < 0, step))
        what = f"operation {step} is never executed" if step >= 0 else f"tensor {~step} is unpinned"
        raise ValueError(f"the schedule is not complete: {what} ({len(missing)} steps are missing)")


def _lifetimes(program: Program, steps: Sequence[int]) -> list[list[int]]:
    """Return the positions after which each storage is dropped, the latest first."""
    begun = [-1] * len(program.storage)
    last = [-1] * len(program.storage)
    spans: list[list[tuple[int, int]]] = [[] for _ in program.storage_bytes]

    def read(tensor: int, until: int, position: int) -> None:
        if begun[tensor] < 0:
            raise ValueError(f"step {position} needs tensor {tensor}, which was never computed")
        last[tensor] = max(last[tensor], until)

    for position, step in enumerate(steps):
        if step < 0:
            read(~step, _NEVER, position)
            continue
        for tensor in program.inputs[step]:
            read(tensor, position, position)
        for tensor in program.outputs[step]:
            if begun[tensor] >= 0:
                spans[program.storage[tensor]].append((begun[tensor], last[tensor]))
            begun[tensor] = position
            last[tensor] = position
    for tensor, start in enumerate(begun):
        if start >= 0:
            spans[program.storage[tensor]].append((start, last[tensor]))
    return [_merged_ends(listed) for listed in spans]


def _merged_ends(spans: list[tuple[int, int]]) -> list[int]:
    ends: list[int] = []
    for start, end in sorted(spans):
        if ends and start <= ends[-1]:
            ends[-1] = max(ends[-1], end)
        else:
            ends.append(end)
    return ends[::-1]
