"""Keys of a configuration: checks, defaults, and the types of command that each serves."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

from rotor.simrd import heuristics, runtimes
from rotor.units import parse_bytes

TYPES = ("baseline", "dtr", "simrd")
KINDS = ("fixed", "ratio", "param_sweep")
NO_LIMIT = "inf"
"""A memory budget without a limit; -1, as published, is another word for it."""

Check = Callable[[Any, str], Any]
"""Takes a value and its path, and returns the value as it is used."""


def fail(path: str, found: object, expected: str) -> NoReturn:
    """Raise ValueError with a path, the value there and what was expected."""
    raise ValueError(f"{path} = {json.dumps(found)}, expected {expected}")


def _flag(value: Any, path: str) -> bool:
    if not isinstance(value, bool):
        fail(path, value, "true or false")
    return value


def text(value: Any, path: str) -> str:
    """Return the value, which has to be text that is not empty."""
    if not isinstance(value, str) or not value:
        fail(path, value, "text")
    return value


def _whole(lowest: int, meaning: str = "") -> Callable[[Any, str], int]:
    def check(value: Any, path: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
            fail(path, value, f"a whole number of {lowest} or more{meaning}")
        return value

    return check


def _above(lowest: float, meaning: str) -> Callable[[Any, str], float]:
    def check(value: Any, path: str) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not lowest < value < math.inf:
            fail(path, value, f"a number above {lowest:g}: {meaning}")
        return float(value)

    return check


def _is_none(value: Any) -> bool:
    return value == -1 and not isinstance(value, bool)


def budget(value: Any, path: str) -> int | None:
    """Return bytes, or None for no limit."""
    if value == NO_LIMIT or _is_none(value):
        return None
    try:
        return parse_bytes(value)
    except (TypeError, ValueError):
        fail(path, value, f'bytes, text such as "700MiB", or "{NO_LIMIT}" or -1 for no limit')


def named(known: Callable[[], Iterable[str]]) -> Callable[[Any, str], str]:
    """Return a check that a value is one of the names that `known` returns."""

    def check(value: Any, path: str) -> str:
        names = list(known())
        if not isinstance(value, str) or value not in names:
            fail(path, value, f"one of {', '.join(names)}")
        return value

    return check


ratio = _above(0, "a part of the memory of the baseline")
_seconds = _above(0, "seconds")


def _least_ratio(value: Any, path: str) -> float | None:
    return None if _is_none(value) else ratio(value, path)


_warm_ups = _whole(0, ": runs that are not timed (the flag --dry-run says what would run)")


@dataclass(frozen=True)
class Option:
    """One thing that a command, its ``extra_params`` or the defaults may set for a trial."""

    check: Check
    """Function of the value and its path."""
    default: Any
    """None where a key of the whole configuration gives it."""
    types: tuple[str, ...]
    """Types of command that it has a meaning for."""


_RUNS = ("baseline", "dtr")
OPTIONS = {
    "batch_size": Option(_whole(1), None, TYPES),
    "n_inputs": Option(_whole(1), None, _RUNS),
    "n_reps": Option(_whole(1), None, _RUNS),
    "dry_run": Option(_warm_ups, None, _RUNS),
    "timeout": Option(_seconds, 600.0, _RUNS),
    "attempt_timeout": Option(_seconds, 120.0, _RUNS),
    "max_retries": Option(_whole(0), 2, _RUNS),
    "retry_on_error": Option(_flag, False, _RUNS),
    "ignore_small_tensors": Option(_flag, True, ("dtr", "simrd")),
    "use_sampling": Option(_flag, True, ("dtr", "simrd")),
    "no_sampling_below_budget": Option(budget, None, ("dtr", "simrd")),
    "no_sampling_below_ratio": Option(_least_ratio, None, ("dtr", "simrd")),
    "heuristic": Option(named(heuristics.names), "DTREqClass", ("dtr", "simrd")),
    "runtime": Option(named(runtimes.names), "V2EagerOptimized", ("simrd",)),
    "overhead_limit": Option(_above(1, "times the time of the log"), 10.0, ("simrd",)),
    "save_logs": Option(_flag, None, ("dtr",)),
    "log": Option(text, None, ("simrd",)),
}
TOP: dict[str, tuple[Check, Any]] = {
    "description": (text, ""),
    "active": (_flag, True),
    "save_logs": (_flag, False),
    "log_dest": (text, "logs"),
    "simrd_config": (text, None),
    "sizes": (named(lambda: ("published", "small")), "published"),
    "sync_gpu": (_flag, False),
    "dry_run": (_warm_ups, 1),
    "n_inputs": (_whole(1), 1),
    "n_reps": (_whole(1), 1),
    "report_errors": (_flag, True),
    "set_seed": (_flag, False),
    "seed": (_whole(0), 0),
    "device": (text, "auto"),
}
STRUCTURE = ("models", "dtr_settings")
COMMAND = ("type", "kind", "memory_budget", "ratio", "extra_params")
WITHOUT_MEANING = (
    "dtr_torch_cmd",
    "notify",
    "slack_client_token",
    "channel_id",
    "report_images",
    "slack_description",
)
"""Keys of the prototype and of its dashboard that are about its machine and its messages."""
ALWAYS = ("use_profiling",)
"""Keys of the prototype for what is done always."""
