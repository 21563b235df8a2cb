"""Sequence in the executor's form: the operations of the forward, and of each backward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rotor.algorithms.sequence import BACKWARD, CODES, FE, LOSS


class Schedule:
    """Operations of a sequence, cut at the loss and at each backward.

    The first `head` of `n` stages are left to plain autograd: the sequence runs ``Fe_0 ..
    Fe_head-1`` first and ``B_head-1 .. B_0`` last. With `plain_tail`, the last stages are left to
    it too, if the sequence runs ``Fe_k .. Fe_n-1 L B_n-1 .. B_k`` around the loss.

    Raises ValueError for a Backward before the loss, a Loss after it, no loss, or a backward
    missing or out of order, and AttributeError for an unknown operation.
    """

    def __init__(
        self, sequence: Iterable[Any], n: int, *, plain_tail: bool = True, head: int = 0
    ) -> None:
        ops = [_read(op) for op in sequence]
        losses = [k for k, (kind, _) in enumerate(ops) if kind == LOSS]
        for kind, stage in ops[: losses[0] if losses else None]:
            if kind == BACKWARD:
                raise ValueError(f"B_{stage} is in the forward part of the sequence, before L")
        if not losses:
            raise ValueError("the sequence has no loss L between its forward and backward parts")
        if len(losses) > 1:
            raise ValueError("a second loss L is in the backward part of the sequence")
        before, after = ops[: losses[0]], ops[losses[0] + 1 :]
        for _, stage in before + after:
            if not 0 <= stage < n:
                raise ValueError(f"the sequence names stage {stage}, the chain has {n} stages")
        self.n = n
        self.head = head
        """First stage after those that plain autograd runs at the beginning."""
        self.tail = n
        """First stage that plain autograd runs at the end; n without one."""
        if before[:head] != [(FE, i) for i in range(head)] or after[len(after) - head :] != [
            (BACKWARD, i) for i in reversed(range(head))
        ]:
            raise ValueError(
                f"the sequence does not begin with Fe_0 .. Fe_{head - 1} kept to the end"
            )
        before, after = before[head:], after[: len(after) - head]
        if plain_tail:
            while (
                before
                and after
                and before[-1] == (FE, self.tail - 1)
                and after[0] == (BACKWARD, self.tail - 1)
            ):
                before.pop()
                after.pop(0)
                self.tail -= 1
        self.forward = before
        """(kind, stage) before the loss, except for head and tail."""
        self.segments = _cut(after, head, self.tail)
        """For each stage between head and tail, its backward's operations, up to its own B."""
        self.runs = [int(not head <= i < self.tail) for i in range(n)]
        """Number of forward runs of each stage."""
        for kind, stage in before + after:
            self.runs[stage] += kind != BACKWARD
        self.recomputed = frozenset(i for i in range(n) if self.runs[i] > 1)


def _read(op: Any) -> tuple[int, int]:
    kind = getattr(op, "kind", None)
    if kind not in CODES:
        raise AttributeError(f"unknown operation {op!r}, expected one of {', '.join(CODES)}")
    return CODES[kind], op.stage


def _cut(after: list[tuple[int, int]], head: int, tail: int) -> list[list[tuple[int, int]]]:
    segments: list[list[tuple[int, int]]] = [[] for _ in range(tail)]
    expected = tail - 1
    current: list[tuple[int, int]] = []
    for op in after:
        current.append(op)
        if op[0] == BACKWARD:
            if op[1] != expected:
                raise ValueError(
                    f"B_{op[1]} was found where B_{expected} was expected"
                    if expected >= head
                    else f"B_{op[1]} comes after the last backward"
                )
            segments[expected] = current
            current = []
            expected -= 1
    if expected >= head or current:
        missing = f"B_{expected}" if expected >= head else "nothing"
        raise ValueError(f"the sequence ends where {missing} was expected")
    return segments
