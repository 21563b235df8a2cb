"""Published names and options that rotor has no counterpart of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from rotor.common.frames import warn_caller


class WithoutCounterpart:
    """Published class that rotor has no counterpart of: making one raises NotImplementedError."""

    instead: ClassVar[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            f"rotor has no counterpart of the published {type(self).__name__}: {self.instead}"
        )


def warn_of_ignored(name: str, options: Iterable[str], reason: str) -> None:
    """Warn of published options that have no effect, if any are given."""
    ignored = ", ".join(sorted(options))
    if ignored:
        text = f"{name} takes these published options, and they have no effect: {ignored}. {reason}"
        warn_caller(text, UserWarning)
