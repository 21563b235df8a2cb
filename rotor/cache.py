"""What rotor keeps on disk between runs: small tables of numbers.

A table is one JSON file in ``$ROTOR_CACHE_DIR``, else under ``rotor`` in the platform's directory
for caches. Writers replace whole files; a damaged or unreadable one means "not there", and one that
cannot be written is not.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["directory", "load", "store"]

logger = logging.getLogger("rotor")
_VERSION = 1


def directory() -> Path:
    """Where the tables are."""
    given = os.environ.get("ROTOR_CACHE_DIR")
    if given:
        return Path(given)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "rotor"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rotor"


def _path(kind: str, environment: str) -> Path:
    digest = hashlib.sha256(environment.encode()).hexdigest()[:24]
    return directory() / f"{kind}-{digest}.json"


def load(kind: str, environment: str) -> dict[str, list[int]]:
    """The table of a kind for an environment (versions, device); empty where there is none."""
    try:
        found: Any = json.loads(_path(kind, environment).read_text(encoding="utf-8"))
        table = found["entries"]
        if (
            found["format"] != f"rotor.{kind}"
            or found["version"] != _VERSION
            or found["environment"] != environment
            or not all(
                isinstance(row, list) and all(type(v) is int and v >= 0 for v in row)
                for row in table.values()
            )
        ):
            return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return dict(table)


def store(kind: str, environment: str, entries: dict[str, list[int]]) -> None:
    """Add entries to a table; what another process added meanwhile is kept."""
    path = _path(kind, environment)
    content = {
        "format": f"rotor.{kind}",
        "version": _VERSION,
        "environment": environment,
        "entries": load(kind, environment) | entries,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(content, file)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        logger.info("the cache %s was not written: %s", path, error)
