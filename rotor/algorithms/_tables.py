"""Parts of the algorithms over the C core's tables: their memory bound, and their results."""

from __future__ import annotations

import numpy as np

from rotor.algorithms.curve import Curve
from rotor.algorithms.sequence import Sequence
from rotor.chain import Chain

LARGEST_TABLE_BYTES = 4 << 30


def table_bound(asked_bytes: int | None) -> int:
    """Return the requested bound; by default half of the available memory, 4 GiB at most."""
    if asked_bytes is not None:
        return asked_bytes
    import psutil

    return min(LARGEST_TABLE_BYTES, int(psutil.virtual_memory().available) // 2)


def priced(codes: bytearray, chain: Chain) -> Sequence:
    """Return the sequence of the core's operations, priced on its chain."""
    return Sequence(np.frombuffer(codes, dtype=np.int32).reshape(-1, 2), chain)


def curve_of(points: tuple[bytearray, bytearray]) -> Curve:
    """Return the curve of the core's points: bytes, and nanoseconds."""
    sizes, ns = (np.frombuffer(values, dtype=np.int64) for values in points)
    return Curve(sizes, ns / 1e9)
