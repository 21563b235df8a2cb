"""History of CUDA's allocator, with the lines of code behind it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rotor._pytorch import core

__all__ = ["record_history", "save_snapshot"]


@contextmanager
def record_history(path: str | os.PathLike[str] | None = None) -> Iterator[None]:
    """Record the actions of CUDA's allocator, with the lines of code that caused them.

    Around a training step it shows the origin of each byte, beside the prediction of a plan.

    Parameters
    ----------
    path
        File of the snapshot, saved at the end, also after an error such as out of memory: a
        ``.pickle`` file for https://pytorch.org/memory_viz. Without one, use
        ``report(path, snapshot=True)`` inside.

    Raises
    ------
    RuntimeError
        PyTorch sees no CUDA device.
    """
    _check_history()
    core.record_history(True)
    try:
        yield
    finally:
        try:
            if path is not None:
                save_snapshot(path)
        finally:
            core.record_history(False)


def save_snapshot(path: str | os.PathLike[str]) -> Path:
    """Save the state and the recorded history of CUDA's allocator; return the path.

    Raises
    ------
    RuntimeError
        PyTorch sees no CUDA device.
    """
    _check_history()
    path = Path(path)
    core.dump_snapshot(path)
    return path


def _check_history() -> None:
    if not core.has_history():
        raise RuntimeError(
            "snapshots come from CUDA's allocator, and PyTorch sees no CUDA device here: on the "
            'CPU, report("trace.json") has the bytes of the last metered step over time'
        )
