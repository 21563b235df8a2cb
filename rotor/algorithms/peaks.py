"""The moment of a plan at which the most bytes are live, in parts, which set its least limit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from rotor.algorithms.sequence import Sequence
from rotor.units import format_bytes

__all__ = ["Peak", "peak_of"]

_LEAST_SHARE = 100
"""Divisor of the bytes of a moment, of which smaller parts are not listed."""


@dataclass(frozen=True)
class Peak:
    """The moment of a plan at which the most bytes are live.

    Attributes
    ----------
    operation
        The operation that runs then, and its phase.
    module
        Path of the module that it belongs to; empty for the model itself.
    parts
        Bytes by what they are; together those of the plan.
    """

    operation: str
    module: str
    parts: Mapping[str, int]

    GRADIENTS: ClassVar = "gradients that exist by then"
    SAVED: ClassVar = "saved by its forward"
    PASSING: ClassVar = "while it runs"

    @property
    def is_divisible(self) -> bool:
        """True if most of it is what one stage saves: more than the gradient of any one value."""
        return 2 * self.parts.get(self.SAVED, 0) > sum(self.parts.values())

    def in_all(self, total_bytes: int, part: str = "beside the graph") -> Peak:
        """Return the same moment with a further part, for the rest of a limit."""
        rest = total_bytes - sum(self.parts.values())
        return replace(self, parts={**self.parts, part: rest})

    def __str__(self) -> str:
        total = sum(self.parts.values())
        parts = sorted(self.parts.items(), key=lambda item: -item[1])
        listed = [f"{format_bytes(n)} {part}" for part, n in parts if n * _LEAST_SHARE >= total]
        where = f"module '{self.module}'" if self.module else "the model"
        text = f"{self.operation} of {where}: {', '.join(listed)}"
        if 2 * self.parts.get(self.GRADIENTS, 0) < total:
            return text
        return (
            f"{text}. No smaller batch lowers gradients: with zero_grad(set_to_none=False) they "
            "exist when a step begins, and do not count in its limit"
        )


def peak_of(sequence: Sequence) -> Peak:
    """Return the operation at the peak of a sequence with a chain, and its bytes in parts.

    The chain's input is in no part.
    """
    chain, line = sequence.chain, sequence.timeline
    assert chain is not None
    place = int(np.argmax(line.peak_bytes))
    kind, stage, size = sequence[place].kind, sequence[place].stage, chain.x_bytes[0]
    before = int(line.live_bytes[place - 1]) if place else size
    gradients = sum(chain.pgrad_bytes[op.stage] for op in sequence[:place] if op.kind == "B")
    own = chain.xbar_bytes[stage] if kind == "B" else 0
    return Peak(
        {"B": "backward", "L": "loss"}.get(kind, "forward"),
        "" if kind == "L" else str((chain.names or range(stage + 1))[stage]),
        {
            Peak.GRADIENTS: gradients,
            Peak.SAVED: own,
            "kept for later": before - size - gradients - own,
            Peak.PASSING: int(line.peak_bytes[place]) - before,
        },
    )
