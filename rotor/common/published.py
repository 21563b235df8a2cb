"""Published names and options that rotor has no counterpart of."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, ClassVar

__all__ = ["WithoutCounterpart", "warn_of_ignored"]


class WithoutCounterpart:
    """Published class that rotor has no counterpart of.

    Parameters
    ----------
    *args, **kwargs
        Those published.

    Raises
    ------
    NotImplementedError
        Always: the message says what to use instead.
    """

    instead: ClassVar[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            f"rotor has no counterpart of the published {type(self).__name__}: {self.instead}"
        )


def warn_of_ignored(name: str, options: Iterable[str], reason: str, stacklevel: int) -> None:
    """Warn of published options that have no effect, if any are given."""
    ignored = sorted(options)
    if ignored:
        warnings.warn(
            f"{name} takes these published options, and they have no effect: "
            f"{', '.join(ignored)}. {reason}",
            stacklevel=stacklevel + 1,
        )
