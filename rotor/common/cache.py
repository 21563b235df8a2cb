"""Small tables of numbers that rotor keeps on disk between runs.

Each is one JSON file in ``$ROTOR_CACHE_DIR``, else under ``rotor`` in the platform's directory for
caches. A file names its kind and its environment, and has a checksum of these and of its content;
writers replace whole files. A file counts as missing if it is damaged, of another kind or
environment, not regular, or if another user owns it or may write to it; a file that cannot be
written is skipped. Without a home directory nothing is kept.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
import sys
import tempfile
from pathlib import Path
from typing import Any

logger = logging.getLogger("rotor")

_VERSION = 1

_LARGEST_FILE = 1 << 26
_LARGEST_NUMBER = 1 << 42
"""Four terabytes, more than an hour in nanoseconds."""

_MOST_DIGITS = 20
_CHECKSUM = "sha256"


def directory() -> Path | None:
    """Return the directory of the tables; ``None`` if the user has no home directory."""
    given = os.environ.get("ROTOR_CACHE_DIR")
    if given:
        return Path(given)
    try:
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Caches" / "rotor"
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rotor"
    except (RuntimeError, KeyError):
        return None


def _path(kind: str, environment: str) -> Path | None:
    where = directory()
    digest = hashlib.sha256(environment.encode()).hexdigest()[:24]
    return None if where is None else where / f"{kind}-{digest}.json"


def _read(path: Path) -> bytes:
    """Return the content of a regular file of this user's alone; raise OSError for any other."""
    # Opening a pipe would block until a process writes to it.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    with os.fdopen(os.open(path, flags), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError("it is no regular file")
        if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise OSError("another user owns it, or may write to it")
        content = file.read(_LARGEST_FILE + 1)
    if len(content) > _LARGEST_FILE:
        raise OSError(f"it is larger than {_LARGEST_FILE} bytes")
    return content


def _number(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError("a number of too many digits")
    return int(text)


def _checksum(fields: dict[str, Any]) -> str:
    others = {name: value for name, value in fields.items() if name != _CHECKSUM}
    return hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()


def sealed(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a file with a checksum of all of them."""
    return {**fields, _CHECKSUM: _checksum(fields)}


def is_whole(fields: dict[str, Any]) -> bool:
    """Return whether the fields of a file are as `sealed` returned them."""
    return bool(fields.get(_CHECKSUM) == _checksum(fields))


def _fields(path: Path | None, kind: str, environment: str) -> dict[str, Any]:
    """Return the fields of a file; none if it is not there, damaged, or another one."""
    if path is None:
        return {}
    try:
        found: Any = json.loads(_read(path), parse_int=_number)
        if not isinstance(found, dict) or not is_whole(found):
            raise ValueError("it is damaged")
        if any(found[name] != value for name, value in _header(kind, environment).items()):
            raise ValueError("it is another file's copy")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        logger.info("the cache %s is not read, but made again: %s", path, error)
        return {}
    return found


def _header(kind: str, environment: str) -> dict[str, Any]:
    return {"format": f"rotor.{kind}", "version": _VERSION, "environment": environment}


def _is_row(row: Any) -> bool:
    return isinstance(row, list) and all(
        type(value) is int and 0 <= value <= _LARGEST_NUMBER for value in row
    )


def load(kind: str, environment: str) -> dict[str, list[int]]:
    """Return the table of a kind for an environment (versions, device); empty if none is kept."""
    table = _fields(_path(kind, environment), kind, environment).get("entries")
    return table if isinstance(table, dict) and all(map(_is_row, table.values())) else {}


def store(kind: str, environment: str, entries: dict[str, list[int]]) -> None:
    """Add entries to a table; entries that another process added meanwhile are kept."""
    table = load(kind, environment) | {key: row for key, row in entries.items() if _is_row(row)}
    _write(kind, environment, {"entries": table})


def _write(kind: str, environment: str, fields: dict[str, Any]) -> None:
    """Write a whole file; log if that is impossible."""
    path = _path(kind, environment)
    if path is None:
        return
    content = json.dumps(sealed(_header(kind, environment) | fields)).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        logger.info("the cache %s was not written: %s", path, error)
