"""Small tables of numbers, and single contents, that rotor keeps on disk between runs.

A table is one JSON file in ``$ROTOR_CACHE_DIR``, else under ``rotor`` in the platform's directory
for caches; a content is a file of bytes there, and the oldest ones make room for others. Writers
replace whole files. A damaged file, or one that is not a regular file, counts as missing; a file
that cannot be written is skipped. Without a home directory nothing is kept.
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

__all__ = ["directory", "load", "load_bytes", "store", "store_bytes"]

logger = logging.getLogger("rotor")
_VERSION = 1

_LARGEST_FILE = 1 << 26
_LARGEST_NUMBER = 1 << 42
"""Four terabytes, more than an hour in nanoseconds."""

_MOST_DIGITS = 20
_MOST_CONTENTS = 64
_CHECKSUM_BYTES = 32


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


def _read(path: Path, *, is_ours: bool = False) -> bytes:
    """Return the content of a regular file of a sensible size; raise OSError for any other.

    With `is_ours`, refuse a file that another user owns or may write to.
    """
    # Opening a pipe would block until a process writes to it.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    with os.fdopen(os.open(path, flags), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{path} is no regular file")
        writers = stat.S_IWGRP | stat.S_IWOTH
        if is_ours and (found.st_uid != os.geteuid() or found.st_mode & writers):
            raise OSError(f"{path} may be another user's")
        content = file.read(_LARGEST_FILE + 1)
    if len(content) > _LARGEST_FILE:
        raise OSError(f"{path} is larger than {_LARGEST_FILE} bytes")
    return content


def _number(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError("a number of too many digits")
    return int(text)


def _checksum(entries: dict[str, list[int]]) -> str:
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def _is_row(row: Any) -> bool:
    return isinstance(row, list) and all(
        type(value) is int and 0 <= value <= _LARGEST_NUMBER for value in row
    )


def load(kind: str, environment: str) -> dict[str, list[int]]:
    """Return the table of a kind for an environment (versions, device); empty if none is kept."""
    path = _path(kind, environment)
    if path is None:
        return {}
    try:
        found: Any = json.loads(_read(path), parse_int=_number)
        table = found["entries"]
        if (
            found["format"] != f"rotor.{kind}"
            or found["version"] != _VERSION
            or found["environment"] != environment
            or not all(map(_is_row, table.values()))
            or found["sha256"] != _checksum(table)
        ):
            return {}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}
    return dict(table)


def store(kind: str, environment: str, entries: dict[str, list[int]]) -> None:
    """Add entries to a table; entries that another process added meanwhile are kept."""
    path = _path(kind, environment)
    if path is None:
        return
    table = load(kind, environment) | {key: row for key, row in entries.items() if _is_row(row)}
    content = {
        "format": f"rotor.{kind}",
        "version": _VERSION,
        "environment": environment,
        "entries": table,
        "sha256": _checksum(table),
    }
    _write_whole(path, json.dumps(content).encode())


def _write_whole(path: Path, content: bytes) -> None:
    """Write a whole file; log if that is impossible."""
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


def load_bytes(kind: str, digest: str) -> bytes | None:
    """Return the content that this user stored under a digest; ``None`` if there is none."""
    where = directory()
    if where is None:
        return None
    try:
        found = _read(where / f"{kind}-{digest}.bin", is_ours=True)
    except OSError:
        return None
    checksum, content = found[:_CHECKSUM_BYTES], found[_CHECKSUM_BYTES:]
    return content if hashlib.sha256(content).digest() == checksum else None


def store_bytes(kind: str, digest: str, content: bytes) -> None:
    """Store a content under a digest, and drop the oldest ones of its kind beyond a number."""
    where = directory()
    if where is None:
        return
    _write_whole(where / f"{kind}-{digest}.bin", hashlib.sha256(content).digest() + content)
    try:
        kept = sorted(where.glob(f"{kind}-*.bin"), key=lambda path: path.stat().st_mtime)
        for path in kept[:-_MOST_CONTENTS]:
            path.unlink(missing_ok=True)
    except OSError as error:
        logger.info("old files of the cache %s were not dropped: %s", where, error)
