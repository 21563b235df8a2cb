"""How large the table of a solver may be."""

from __future__ import annotations

LARGEST_TABLE_BYTES = 4 << 30


def table_bound(asked_bytes: int | None) -> int:
    """What a caller asked for; by default half of the memory that is available, 4 GiB at most."""
    if asked_bytes is not None:
        return asked_bytes
    import psutil

    return min(LARGEST_TABLE_BYTES, int(psutil.virtual_memory().available) // 2)
