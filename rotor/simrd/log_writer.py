"""Writes logs in the format that `rotor.simrd.logs` reads."""

from __future__ import annotations

import gzip
import io
import operator
import os
from collections.abc import Sequence
from typing import Any, Self

from rotor import _core

_LARGEST = 1 << 42


class LogWriter:
    r"""Writes a log, instruction by instruction.

    Parameters
    ----------
    file
        A path, compressed with gzip where it ends in ``.gz``; or a file that is open in binary
        mode, which stays open; or None to write to memory.

    Notes
    -----
    Names are checked when the log is read, not here. A writer to a file is a context manager, or
    ends with `close`.

    Examples
    --------
    >>> writer = LogWriter()
    >>> writer.constant("x", 4)
    >>> writer.getvalue()
    b'{"INSTRUCTION":"CONSTANT","NAME":"x"}\n{"INSTRUCTION":"MEMORY","MEMORY":"4","NAME":"x"}\n'
    """

    def __init__(self, file: str | os.PathLike[str] | Any | None = None) -> None:
        self._core = _core.LogWriter()
        self._memory: io.BytesIO | None = None
        self._owned: list[Any] = []
        self._file: Any
        self._instructions = 0
        if file is None:
            self._memory = io.BytesIO()
            self._file = self._memory
        elif isinstance(file, str | os.PathLike):
            self._file = open(file, "wb")  # noqa: SIM115
            self._owned = [self._file]
            if os.fspath(file).endswith(".gz"):
                self._file = gzip.GzipFile("", "wb", fileobj=self._file, mtime=0)
                self._owned.insert(0, self._file)
        elif isinstance(file, io.TextIOBase) or not callable(getattr(file, "write", None)):
            raise TypeError(
                f"cannot write a log to {file!r}; expected a path, a file that is open in binary "
                "mode, or None"
            )
        else:
            self._file = file

    def constant(self, name: str, bytes: int) -> None:
        """Write a constant and its size in bytes.

        Raises
        ------
        TypeError, ValueError
            Of this and all other instructions: a name is no str or has a null character; a number
            is no integer, or out of range (sizes and times from 0 to 2^42). Nothing is written.
        """
        size = _integer(bytes, "bytes", 0, _LARGEST)
        self._core.constant(name)
        self._core.memory(name, size)
        self._written()

    def call(
        self,
        name: str,
        args: Sequence[str],
        results: Sequence[str],
        time_ns: int,
        *,
        bytes: Sequence[int],
        aliases: Sequence[int],
    ) -> None:
        """Write an operation with new results.

        Parameters
        ----------
        name
            Of the operation.
        args
            Names of tensors that it reads.
        results
            New names, one or more.
        time_ns
            Its time, ns.
        bytes
            Size of each result.
        aliases
            Of each result, -1 for a storage of its own, else the index in `args` of the tensor
            that it is a view of.

        Raises
        ------
        TypeError, ValueError
            Lengths differ, or a name, size or index is of another type or out of range; nothing is
            written then.
        """
        args, results = _names(args, "args"), _names(results, "results")
        sizes = [_integer(size, "bytes", 0, _LARGEST) for size in bytes]
        views = [_integer(alias, "aliases", -1, len(args) - 1) for alias in aliases]
        if not len(sizes) == len(views) == len(results):
            raise ValueError(
                f"{len(results)} results have {len(sizes)} bytes and {len(views)} aliases; "
                "expected one of each for every result"
            )
        self._core.call(name, args, results, time_ns)
        for result, size, alias in zip(results, sizes, views, strict=True):
            self._core.memory(result, size)
            self._core.alias(result, alias)
        self._written()

    def mutate(self, name: str, args: Sequence[str], mutated: Sequence[int], time_ns: int) -> None:
        """Write an operation that writes to some of its arguments.

        Parameters
        ----------
        name
            Of the operation.
        args
            Names of tensors that it reads.
        mutated
            Indices in `args` of the tensors that it writes to.
        time_ns
            Its time, ns.
        """
        self._core.mutate(name, args, mutated, time_ns)
        self._written()

    def copy(self, dst: str, src: str) -> None:
        """Write that a tensor has one more name."""
        self._core.copy(dst, src)
        self._written()

    def copy_from(self, dst: str, src: str) -> None:
        """Write that a name leaves its tensor for that of another name."""
        self._core.copy_from(dst, src)
        self._written()

    def release(self, name: str) -> None:
        """Write that a tensor has one reference less."""
        self._core.release(name)
        self._written()

    def pin(self, name: str) -> None:
        """Write that a tensor is brought into memory and kept."""
        self._core.pin(name)
        self._written()

    def annotate(self, text: str) -> None:
        """Write a note: "START" and "BACKWARD" mean something to `parse`."""
        self._core.annotate(text)
        self._written()

    def _written(self) -> None:
        self._instructions += 1
        if self._instructions % 1024 == 0:
            self.flush()

    def flush(self) -> None:
        """Hand what was written to the file.

        Raises
        ------
        ValueError
            The writer is closed.
        """
        self._file.write(self._core.take())

    def getvalue(self) -> bytes:
        """Return the text of a writer to memory.

        Raises
        ------
        ValueError
            It writes to a file.
        """
        if self._memory is None:
            raise ValueError("this writer writes to a file; only one to memory has a value")
        self.flush()
        return self._memory.getvalue()

    def close(self) -> None:
        """Write what is left, and close a file that was given as a path."""
        if not self._file.closed:
            self.flush()
        for file in self._owned:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()


def _names(names: Sequence[str], what: str) -> list[str]:
    if isinstance(names, str):
        raise TypeError(f"{what} must be a sequence of names, got the str {names!r}")
    return list(names)


def _integer(value: object, what: str, least: int, most: int) -> int:
    if isinstance(value, bool):
        raise TypeError(f"{what} must hold integers, got {value!r}")
    number = operator.index(value)  # type: ignore[arg-type]
    if not least <= number <= most:
        raise ValueError(f"{what}: {number} is out of range, expected {least} to {most}")
    return number
