"""Display of progress for work of more than a second; independent of PyTorch."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any, ClassVar, Self

__all__ = ["Progress", "progress"]

logger = logging.getLogger("rotor")
_DELAY_SECONDS = 1.0


class Progress:
    """Progress of one piece of work; `progress` makes it.

    Nothing is shown during the first second. After that a bar is on the terminal until the work
    ends, where stderr is a terminal and ``rich`` is installed; otherwise one line is logged, at
    level INFO. It is itself the callback ``(done, total)`` that solvers take. While a bar is shown,
    work within it shows none.

    Parameters
    ----------
    total
        Units of the work.
    description
        Words for what is done.
    at_once
        True to show the bar before a second has passed.
    """

    _outer: ClassVar[Progress | None] = None

    def __init__(self, total: int, description: str, *, at_once: bool = False) -> None:
        self._total = total
        self._description = description
        self._begun = time.monotonic() - 2 * _DELAY_SECONDS * at_once
        self._announced = False
        self._bar: Any = None
        self._task: Any = None

    def __call__(self, done: int, total: int | None = None) -> None:
        """Report that `done` units are done; a given `total` replaces the number of units."""
        if total is not None:
            self._total = total
        if Progress._outer not in (None, self):
            return
        if not self._announced and time.monotonic() - self._begun > _DELAY_SECONDS:
            self._announced = True
            self._announce(done)
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=max(self._total, 1))

    def _announce(self, done: int) -> None:
        self._bar = _terminal_bar()
        if self._bar is None:
            logger.info("%s: %d of %d done", self._description, done, self._total)
            return
        Progress._outer = self
        self._bar.start()
        self._task = self._bar.add_task(self._description, total=max(self._total, 1))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            Progress._outer = None
            bar.stop()


def _terminal_bar() -> Any:
    """Return a bar on stderr; None if it could not be seen or drawn."""
    stream = sys.stderr
    if stream is None or getattr(stream, "closed", False) or not stream.isatty():
        return None
    try:
        from rich.console import Console
        from rich.progress import Progress as Bar
    except ImportError:
        return None
    return Bar(console=Console(file=sys.stderr), transient=True)


def progress(total: int, description: str, *, at_once: bool = False) -> Progress:
    """Return a context manager that shows the progress of some work when it takes long.

    Parameters
    ----------
    total
        Units of work in all.
    description
        Text for people that names the work.
    at_once
        True to show it from the first call on.

    Returns
    -------
    Progress
        A context manager; inside, it is called with the units done so far.

    Examples
    --------
    >>> with progress(3, "measuring the stages") as update:
    ...     for done in range(1, 4):
    ...         update(done)
    """
    return Progress(total, description, at_once=at_once)
