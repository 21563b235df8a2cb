"""Cells: pieces of an experiment that run apart from one another, each with a file of its own."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rotor.chain import check_header, read_json, write_json
from rotor.common.progress import progress

__all__ = ["Cell", "Store", "run_cells", "usable_cpus"]

FORMAT = "rotor.cell"
VERSION = 1

# Raised whenever what a cell computes changes: cells of other numbers are not read back.
_SETTINGS_VERSION = 1


@dataclass(frozen=True)
class Cell:
    """One piece of work.

    Attributes
    ----------
    function
        A function of a module, called as ``function(**arguments)`` in some process; what it returns
        is kept as JSON.
    arguments
        Its keywords.
    identity
        JSON data that tells the cell from all others: settings, and a digest of what is read from
        files. It makes the name of the cell's file.
    fields
        Fields that a result must have; a stored one that lacks any of them is not read back.
    """

    function: Callable[..., dict[str, Any]]
    arguments: dict[str, Any]
    identity: dict[str, Any]
    fields: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """A digest of the identity, of 32 hexadecimal digits."""
        return _digest([_SETTINGS_VERSION, self.identity])


def _digest(data: Any) -> str:
    text = json.dumps(data, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class Store:
    """Finished cells in a directory, a file each.

    A file is written as a whole or not at all. One that is damaged, or of another cell, counts as
    not there.

    Parameters
    ----------
    directory
        Where; made when the first cell is put.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, cell: Cell) -> Path:
        """Return the file of a cell."""
        return self.directory / f"{cell.key}.json"

    def get(self, cell: Cell) -> dict[str, Any] | None:
        """Return the result of the cell, or None if it has not run."""
        try:
            fields = check_header(read_json(self.path(cell)), FORMAT, VERSION)
        except (OSError, ValueError):
            return None
        result = fields.get("result")
        if fields.get("identity") != cell.identity or not isinstance(result, dict):
            return None
        if fields.get("digest") != _digest(result) or not set(cell.fields) <= result.keys():
            return None
        return result

    def put(self, cell: Cell, result: dict[str, Any]) -> None:
        """Keep what the cell gave."""
        self.directory.mkdir(parents=True, exist_ok=True)
        data = {
            "format": FORMAT,
            "version": VERSION,
            "identity": cell.identity,
            "digest": _digest(result),
            "result": result,
        }
        write_json(data, self.path(cell))

    def clear(self) -> None:
        """Forget all cells."""
        for path in self.directory.glob("*.json"):
            path.unlink(missing_ok=True)


def usable_cpus() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


def run_cells(
    cells: Sequence[Cell],
    store: Store,
    *,
    jobs: int,
    description: str,
    finished: Callable[[Cell, int], None] | None = None,
) -> list[dict[str, Any]]:
    """Run what has not run yet, in processes of their own, and give what all cells gave.

    Parameters
    ----------
    cells
        In the order of the results. Equal ones run once.
    store
        Store of finished cells; each is saved as soon as it is done, so that after an
        interruption or an error the next call goes on with the rest.
    jobs
        Processes; 1 runs everything in this one.
    description
        Of the progress bar.
    finished
        Called after each cell that ran, with how many of all are done.

    Returns
    -------
    list of dict
        Result of each cell, in the order of `cells`.

    Raises
    ------
    ValueError
        `jobs` is below 1.
    Exception
        Any exception of a cell, with a note that names the cell.
    """
    if jobs < 1:
        raise ValueError(f"jobs = {jobs}, expected at least 1")
    found: dict[str, dict[str, Any] | None] = {cell.key: store.get(cell) for cell in cells}
    waiting = list({cell.key: cell for cell in cells if found[cell.key] is None}.values())
    running = contextlib.closing(_results(waiting, min(jobs, len(waiting))))
    with progress(len(found), description) as update, running as results:
        done = len(found) - len(waiting)
        update(done)
        for cell, result in results:
            plain = json.loads(json.dumps(result, allow_nan=False))
            store.put(cell, plain)
            found[cell.key] = plain
            done += 1
            update(done)
            if finished is not None:
                finished(cell, done)
    return [kept for cell in cells if (kept := found[cell.key]) is not None]


def _results(cells: list[Cell], jobs: int) -> Generator[tuple[Cell, dict[str, Any]], None, None]:
    """Return the pairs of a cell and what it gave, as they are done."""
    if jobs <= 1:
        for cell in cells:
            yield cell, _noted(cell, functools.partial(cell.function, **cell.arguments))
        return
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        jobs, mp_context=multiprocessing.get_context("spawn"), initializer=_ignore_interrupts
    )
    try:
        futures: dict[Future[dict[str, Any]], Cell] = {
            pool.submit(cell.function, **cell.arguments): cell for cell in cells
        }
        for future in as_completed(futures):
            yield futures[future], _noted(futures[future], future.result)
    except BaseException:
        # The files of finished cells are complete: what runs now may end at once.
        children = set(multiprocessing.active_children()) - before
        for child in children:
            child.terminate()
        pool.shutdown(wait=True, cancel_futures=True)
        for child in children:
            child.join()
        raise
    pool.shutdown(wait=True)


def _noted(cell: Cell, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return call()
    except Exception as error:
        error.add_note(f"in the cell {json.dumps(cell.identity, sort_keys=True)}")
        raise


def _ignore_interrupts() -> None:
    """Ignore Ctrl-C, which reaches all processes of a terminal: the first one ends the others."""
    with contextlib.suppress(ValueError):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
