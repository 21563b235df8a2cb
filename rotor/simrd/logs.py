"""Logs of eager programs, in the format of DTR's prototype.

A log is one JSON object per line. The reader accepts what the prototype writes: CONSTANT, CALL,
MEMORY, ALIAS, MUTATE, COPY, COPY_FROM, RELEASE, PIN and ANNOTATE, with numbers as strings or as
integers.
"""

from __future__ import annotations

import enum
import gzip
import io
import os
import warnings
import zlib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from rotor import _core
from rotor.common.progress import progress
from rotor.errors import MalformedLogError
from rotor.simrd.settings import Baseline, compute_baseline, forwarded

OUTPUT_CONDITIONS = ("rematerialize", "preallocate", "leave")
"""Choices of `parse` for tensors that still have a name at the end."""

_PIECE_BYTES = 1 << 20
_GZIP = b"\x1f\x8b"

_COLUMNS = ("cost_ns", "bytes", "first_input", "input_count", "first_output", "output_count")
_OPERATION = np.dtype([(name, np.int64) for name in _COLUMNS])
_TENSOR = np.dtype([("storage", np.int64), ("operation", np.int64), ("is_alias", np.bool_)])
_STORAGE = np.dtype([("bytes", np.int64), ("root", np.int64)])
_COMMAND = np.dtype([("kind", np.int64), ("index", np.int64)])


class Readable(Protocol):
    """A file that is open in binary mode."""

    def read(self, size: int, /) -> bytes:
        """Return at most `size` bytes, none at the end."""


LogSource = str | os.PathLike[str] | bytes | bytearray | memoryview | Readable
"""Sources of `parse`: a path, the text of a log, a file that is open in binary mode."""


class CommandKind(enum.IntEnum):
    """Kinds of `Log.commands`."""

    COMPUTE = 0
    """An operation is made and executed."""
    GET = 1
    """A tensor gains a reference."""
    PIN = 2
    """A tensor is rematerialized if need be, and kept for good."""
    RELEASE = 3
    """A tensor loses a reference."""


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    array.flags.writeable = False
    return array


def _table(columns: tuple[bytearray, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    assert dtype.names is not None
    table = np.empty(len(columns[0]) // 8, dtype=dtype)
    for name, column in zip(dtype.names, columns, strict=True):
        if column:
            table[name] = np.frombuffer(column, dtype=np.int64)
    return _frozen(table)


class Log:
    """A log that was read: a graph of operations and the commands on it. `parse` makes it.

    It does not change, may be replayed by many threads at once, and can be pickled. A log that
    came from a path is pickled as the path and read again where it is unpickled, which fails with
    ValueError if the file has changed since; a log from bytes or an open file keeps its text and
    is pickled as that, compressed.
    """

    def __init__(
        self,
        core: _core.Log,
        origin: Path | bytes,
        crc32: int,
        name: str,
        cut_at_start: bool,
        output_condition: str,
    ) -> None:
        self._core = core
        self._origin = origin
        self._crc32 = crc32
        self._name = name
        self._cut_at_start = cut_at_start
        self._output_condition = output_condition

    @property
    def name(self) -> str:
        """The name of its file without ``.log`` and ``.gz``; "log" where it has none."""
        return self._name

    cut_at_start: bool = forwarded(
        "_cut_at_start", "True if START annotations dropped what came before them."
    )
    output_condition: str = forwarded("_output_condition", "One of `OUTPUT_CONDITIONS`.")
    core: _core.Log = forwarded("_core", "Object that the core replays.")

    @property
    def path(self) -> Path | None:
        """Path that it was read from; None for other sources."""
        return self._origin if isinstance(self._origin, Path) else None

    line_count: int = forwarded(
        "_core.line_count", "Number of lines, including empty ones and the ones before START."
    )
    command_count: int = forwarded(
        "_core.command_count", "Commands, the pins of the outputs included."
    )
    operation_count: int = forwarded("_core.operation_count", "Operations, constants included.")
    tensor_count: int = forwarded("_core.tensor_count", "Tensors, aliases included.")
    storage_count: int = forwarded("_core.storage_count", "Storages.")
    start_count: int = forwarded("_core.start_count", "START annotations.")

    @property
    def backward_command(self) -> int:
        """Commands before the backward begins, -1 where it is not known.

        It begins at the first BACKWARD annotation, also where an operation with "backward" in its
        name comes before that; in a log without the annotation, at the first such operation.
        """
        return self._core.backward_command

    ignored_releases: int = forwarded(
        "_core.ignored_releases", "RELEASE of names that are not defined."
    )

    @property
    def output_bytes(self) -> int:
        """Bytes of the storages that have a name at the end, with "preallocate"; else 0."""
        return self._core.output_bytes

    @property
    def footprint_bytes(self) -> int:
        """Bytes that it takes in memory, arrays that were asked for left out."""
        kept = len(self._origin) if isinstance(self._origin, bytes) else 0
        return self._core.footprint_bytes + kept

    @cached_property
    def operations(self) -> NDArray[Any]:
        """A structured array, read-only.

        ``cost_ns``, ``bytes`` of the storages that it makes, ``first_input`` and ``input_count``
        in `inputs`, ``first_output`` and ``output_count`` in `tensors`; shape (operations,).
        """
        return _table(self._core.operations(), _OPERATION)

    @cached_property
    def inputs(self) -> NDArray[np.int64]:
        """Tensors that operations read, grouped by operation and in order; read-only."""
        return _frozen(np.array(memoryview(self._core.inputs()).cast("q"), dtype=np.int64))

    @cached_property
    def tensors(self) -> NDArray[Any]:
        """``storage``, ``operation`` (that makes it), ``is_alias``; structured, read-only."""
        return _table(self._core.tensors(), _TENSOR)

    @cached_property
    def storages(self) -> NDArray[Any]:
        """``bytes`` and ``root`` (its first tensor); structured, read-only."""
        return _table(self._core.storages(), _STORAGE)

    @cached_property
    def commands(self) -> NDArray[Any]:
        """``kind`` (see ``CommandKind``) and ``index``, an operation or tensor; read-only."""
        pairs = np.array(memoryview(self._core.commands()).cast("q"), dtype=np.int64)
        return _frozen(pairs.view(_COMMAND))

    def operation_name(self, operation: int) -> str:
        """Return the name of an operation; "constant" of constants.

        Raises
        ------
        IndexError
            No operation has this number.
        """
        return self._core.operation_name(operation)

    def tensor_name(self, tensor: int) -> str:
        """Return the name under which a tensor was made; with "$" after it where MUTATE made it.

        Raises
        ------
        IndexError
            No tensor has this number.
        """
        return self._core.tensor_name(tensor)

    def lookup(self, name: str) -> int:
        """Return the tensor that has a name at the end, or -1."""
        return self._core.lookup(name)

    def references(self, tensor: int) -> int:
        """Return the number of references that a tensor holds from names at the end.

        Raises
        ------
        IndexError
            No tensor has this number.
        """
        return self._core.references(tensor)

    @cached_property
    def baseline(self) -> Baseline:
        """The log run without a budget: what ratios of budgets refer to."""
        if not self._core.is_finished:
            raise ValueError(
                f"the log {self.name!r} was not read to its end; parse() it, or finish() it"
            )
        return compute_baseline(self._core)

    def __repr__(self) -> str:
        return (
            f"<Log {self.name!r}: {self.operation_count} operations, {self.tensor_count} tensors, "
            f"{self.command_count} commands>"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        origin = self._origin
        if isinstance(origin, bytes):
            origin = zlib.compress(origin, 1)
        options = (self._crc32, self.name, self.cut_at_start, self.output_condition)
        return _restore, (origin, *options, self.__dict__.get("baseline"))


def _restore(
    origin: Path | bytes,
    crc32: int,
    name: str,
    cut_at_start: bool,
    output_condition: str,
    baseline: Baseline | None,
) -> Log:
    source = zlib.decompress(origin) if isinstance(origin, bytes) else origin
    log = _read(source, name, cut_at_start, output_condition)
    if log._crc32 != crc32:
        raise ValueError(f"{log.path} has changed since the log was parsed; parse it again")
    if baseline is not None:
        log.__dict__["baseline"] = baseline
    return log


def parse(
    source: LogSource, *, cut_at_start: bool = True, output_condition: str = "rematerialize"
) -> Log:
    """Read a log.

    Parameters
    ----------
    source
        A path, the name of a shipped log such as "unet", the text of a log as bytes, or a file
        that is open in binary mode. Text that is compressed with gzip is recognized by its first
        bytes. Files are read in pieces.
    cut_at_start
        True: START annotations drop everything before them, as in the published experiments.
    output_condition
        Treatment of tensors that still have a name at the end: "rematerialize" brings them back
        into memory and keeps them (the published default), "preallocate" sums up their bytes in
        `Log.output_bytes`, "leave" does nothing.

    Returns
    -------
    Log
        The log, read once, to be simulated as often as one likes.

    Raises
    ------
    MalformedLogError
        A line is not in the expected format, the log or its compression ends early, or the log is
        empty; ``.line`` is the number of the line, ``.source`` the file.
    OSError
        The file cannot be read.
    TypeError, ValueError
        An argument is none of the above.

    Warns
    -----
    UserWarning
        The log releases names that it did not define; that is ignored.

    Examples
    --------
    >>> from rotor.simrd import LogWriter
    >>> writer = LogWriter()
    >>> writer.constant("x", 4)
    >>> writer.call("relu", ["x"], ["y"], 10, bytes=[4], aliases=[-1])
    >>> parse(writer.getvalue())
    <Log 'log': 2 operations, 2 tensors, 5 commands>
    """
    if not isinstance(cut_at_start, bool):
        raise TypeError(f"cut_at_start must be True or False, got {cut_at_start!r}")
    if output_condition not in OUTPUT_CONDITIONS:
        known = ", ".join(OUTPUT_CONDITIONS)
        raise ValueError(f"output_condition = {output_condition!r}, expected one of {known}")
    log = _read(source, _name_of(source), cut_at_start, output_condition)
    if log.ignored_releases:
        warnings.warn(
            f"{log.path or log.name}: {log.ignored_releases} RELEASE of names that are not defined "
            "were ignored",
            stacklevel=2,
        )
    return log


def shipped_logs() -> Path:
    """Return the directory of the logs that come with the package.

    They are of one step of small models, forward and backward, recorded on a CPU; its
    ``manifest.json`` has their titles.
    """
    return Path(__file__).parents[1] / "experiments" / "logs"


def _found(source: str | os.PathLike[str]) -> Path:
    """Return a path; that of a shipped log for its name, where no file has it."""
    path = Path(source)
    shipped = shipped_logs() / f"{path.name}.log.gz"
    is_name = os.path.basename(source) == os.fspath(source) and not path.exists()
    return shipped if is_name and shipped.is_file() else path


def _name_of(source: LogSource) -> str:
    name = source if isinstance(source, str | os.PathLike) else getattr(source, "name", None)
    if not isinstance(name, str | os.PathLike):
        return "log"
    return os.path.basename(os.fspath(name)).removesuffix(".gz").removesuffix(".log") or "log"


def _read(source: LogSource, name: str, cut_at_start: bool, output_condition: str) -> Log:
    core = _core.Log(cut_at_start)
    path: Path | None = None
    if isinstance(source, str | os.PathLike):
        path = _found(source).absolute()
        with path.open("rb") as file, _Raw(file, keeps=False) as raw:
            _feed(core, raw, os.fstat(file.fileno()).st_size, str(path), name)
    else:
        size = 0
        if isinstance(source, bytes | bytearray | memoryview):
            source = bytes(source)
            size = len(source)
        elif not _is_binary_file(source):
            raise TypeError(
                f"cannot read a log from {source!r}; expected a path, bytes, or a file that is "
                "open in binary mode"
            )
        with _Raw(source, keeps=True) as raw:
            _feed(core, raw, size, "" if name == "log" else name, name)
    _finish(core, output_condition, str(path or ("" if name == "log" else name)))
    origin = raw.text if path is None else path
    return Log(core, origin, raw.crc32, name, cut_at_start, output_condition)


def _is_binary_file(source: object) -> bool:
    return callable(getattr(source, "read", None)) and not isinstance(source, io.TextIOBase)


class _Raw:
    """The bytes of a source as they are: counted, and kept where a pickle will need them."""

    def __init__(self, source: bytes | Readable, keeps: bool) -> None:
        self.crc32 = 0
        self.done = 0
        self._text = source if isinstance(source, bytes) else None
        self._file: Readable = io.BytesIO(source) if isinstance(source, bytes) else source
        self._kept: list[bytes] | None = [] if keeps and self._text is None else None
        self._ahead = b""

    @property
    def text(self) -> bytes:
        if self._text is None:
            self._text = b"".join(self._kept or ())
            self._kept = None
        return self._text

    def read(self, size: int, /) -> bytes:
        piece, self._ahead = self._ahead[:size], self._ahead[size:]
        if piece:
            return piece
        piece = self._fill(size)
        self.crc32 = zlib.crc32(piece, self.crc32)
        self.done += len(piece)
        if self._kept is not None:
            self._kept.append(piece)
        return piece

    def _fill(self, size: int) -> bytes:
        """Read `size` bytes of the file, fewer only at its end: a file may give fewer at a time."""
        pieces: list[bytes] = []
        while size > 0:
            piece = self._file.read(size)
            if not isinstance(piece, bytes):
                raise TypeError(
                    f"read() gave {type(piece).__name__}; expected bytes, of a file that is open "
                    "in binary mode"
                )
            if not piece:
                break
            pieces.append(piece)
            size -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def is_gzip(self) -> bool:
        """Return whether the text is compressed; nothing is taken from it."""
        self._ahead = self.read(len(_GZIP))
        return self._ahead == _GZIP

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        self._file = io.BytesIO()


def _pieces(raw: _Raw, source: str) -> Iterator[bytes]:
    if not raw.is_gzip():
        while piece := raw.read(_PIECE_BYTES):
            yield piece
        return
    with gzip.GzipFile(fileobj=raw, mode="rb") as inflated:  # type: ignore[call-overload]
        while True:
            try:
                piece = inflated.read(_PIECE_BYTES)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise MalformedLogError(
                    f"{source or 'log'}: the gzip data is damaged or ends early ({error})",
                    source=source,
                ) from error
            if not piece:
                return
            yield piece


def _feed(core: _core.Log, raw: _Raw, size: int, source: str, name: str) -> None:
    with progress(size, f"reading {name}") as update:
        for piece in _pieces(raw, source):
            try:
                core.feed(piece)
            except MalformedLogError as error:
                raise MalformedLogError(str(error.args[0]), error.line, source) from None
            update(raw.done, max(raw.done, size))


def _finish(core: _core.Log, output_condition: str, source: str) -> None:
    try:
        core.finish(OUTPUT_CONDITIONS.index(output_condition))
    except MalformedLogError as error:
        raise MalformedLogError(str(error.args[0]), error.line, source) from None
    if core.operation_count == 0:
        found = "the last START is followed by no operation" if core.start_count else "it is empty"
        raise MalformedLogError(
            f"{source or 'log'}: {found}; expected a log with at least one CONSTANT or CALL",
            source=source,
        )
