"""rk-GB's published partitioners: what the partitioned graph of a `Result` has operations for."""

from __future__ import annotations

from typing import Any

from rotor.common.frames import WithoutCounterpart

__all__ = [
    "Partitioner",
    "PartitionerBottomToTop",
    "PartitionerDagp",
    "PartitionerRecognizeRepetitivePattern",
    "PartitionerSequence",
]


class Partitioner:
    """Leaves a graph flat: one operation for each computation."""


class PartitionerSequence(Partitioner):
    """Cuts a graph at its articulation points: a chain of blocks.

    Parameters
    ----------
    sub_partitioner
        Accepted as published: blocks are not cut again.
    """

    def __init__(self, sub_partitioner: Any = None) -> None:
        self.sub_partitioner = sub_partitioner


_SEQUENCE = "PartitionerSequence() cuts a graph into blocks at its articulation points"


class PartitionerBottomToTop(WithoutCounterpart):
    """Has no counterpart: `PartitionerSequence` cuts at articulation points."""

    instead = _SEQUENCE


class PartitionerRecognizeRepetitivePattern(WithoutCounterpart):
    """Has no counterpart: `Result.equivalent_classes` has the blocks that repeat."""

    instead = f"{_SEQUENCE}, and Result.equivalent_classes has those that repeat"


class PartitionerDagp(WithoutCounterpart):
    """Has no counterpart: `PartitionerSequence` cuts at articulation points."""

    instead = _SEQUENCE
