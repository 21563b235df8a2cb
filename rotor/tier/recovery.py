"""The last finished step of an optimizer whose homes are on a disk, readable after a kill.

A folder that the user has named holds the file of a disk tier, in which homes have two places, and
two records, written by turns. A record says where the values of a finished step are, with their
checksums, and holds those that stay in memory. The places that it names are written by nothing
before the next record is complete.
"""

from __future__ import annotations

import atexit
import copy
import errno
import fcntl
import gc
import io
import math
import os
import pickle
import shutil
import struct
import sys
import tempfile
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from rotor import _core
from rotor._pytorch import core, optimizers
from rotor.tier import kept
from rotor.tier.disk import DiskTier
from rotor.tier.homes import AwayTensor, Home
from rotor.tier.interface import Tier, TransferError
from rotor.tier.weights import bytes_of
from rotor.units import exact_bytes

VALUES = "rotor-values"
RECORDS = ("rotor-step-0", "rotor-step-1")
"""Files of a folder: that of the tier, and two records."""

_FORMAT, _VERSION = "rotor.step", 1
_HEAD = struct.Struct("<8sQQQ")
"""Begin of a record, written last: a word, its number, the bytes of its text, and all bytes."""
_WORD, _SUM = b"rotor.st", struct.Struct("<I")
_BODY = _HEAD.size + _SUM.size

_NUMBER = "rotor.tensor"
"""Key of the number that stands for a tensor in the text of a record."""


class FinishedSteps:
    """Record of the last finished step of an optimizer, in the folder of its tier.

    The homes of `module` and `optimizer` will be in `tier`, of a folder that the user has named.
    ValueError before anything has changed: another process uses the folder, or it holds an earlier
    run; or the model or optimizer has a state that cannot be recorded.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer, tier: DiskTier) -> None:
        self._folder, self._tier, self._module = tier.directory, tier, module
        self._optimizer = weakref.ref(optimizer)
        self._process = os.getpid()
        self._number = self._step = 0
        self._written: tuple[int, list[Home], list[tuple[torch.Tensor, int]], int] | None = None
        self._homes: list[Home] = []
        self._small: list[tuple[torch.Tensor, int]] = []
        self._states: dict[Any, dict[str, Any]] = {}
        self._known: Any = None
        self._objects: dict[str, Any] = {}
        self._others: dict[str, Any] = {}
        self._lock = _locked(self._folder)
        try:
            _refuse_earlier(self._folder)
            self._facts()
            tier.name_file(VALUES)
            self._values = os.open(self._folder / VALUES, os.O_RDONLY | os.O_CLOEXEC)
        except BaseException:
            os.close(self._lock)
            raise
        self._files = [self._lock, self._values]
        """Open files: the folder, the values, and the last record, which needs no name to be read.
        """
        self.end = weakref.finalize(self, _remove, self._files, self._process)
        """Function that removes the files, at a normal end."""
        self.end.atexit = False
        _running.add(self)

    @classmethod
    def of(
        cls, module: nn.Module, optimizers: Sequence[Optimizer], tier: Tier
    ) -> FinishedSteps | None:
        """Return the record of a tier whose folder the user has named; ``None`` for others."""
        if not isinstance(tier, DiskTier) or not tier.is_named:
            return None
        return cls(module, _only(optimizers), tier)

    @classmethod
    def find(cls, optimizer: Any) -> FinishedSteps | None:
        """Return the record of an optimizer; ``None`` if there is none."""
        wanted, _ = optimizers.unwrapped(optimizer)
        return next((one for one in list(_running) if one._optimizer() is wanted), None)

    def follow(self, optimizers: Sequence[Optimizer], move: Callable[[Optimizer], None]) -> None:
        """Record the steps of another optimizer, counted on, once `move` has moved its states."""
        optimizer = _only(optimizers)
        before, self._optimizer = self._optimizer, weakref.ref(optimizer)
        try:
            self._facts(is_checked=True)
            move(optimizer)
            self.record(self._step, is_new=False)
        except BaseException:
            self._optimizer = before
            raise

    def add(self, objects: dict[str, Any]) -> None:
        """Have the states of further objects in every record, from now on."""
        before = self._objects, self._others
        self._objects = self._objects | objects
        try:
            self.record(self._step, is_checked=True)
        except BaseException:
            self._objects, self._others = before
            raise

    @contextmanager
    def step(self) -> Iterator[None]:
        """Have the context be a step of the optimizer: finished at its end, or undone by an error.

        What has changed between steps is recorded first, so that it is not undone.
        """
        if os.getpid() != self._process:
            raise ValueError(
                "the file of this tier is closed, or was opened by the process that this one was "
                "forked from, which alone writes to it: make a new tier in this process"
            )
        if self._known != self._present() or any(home.has_changed() for home in self._homes):
            self.record(self._step, is_new=False)
        try:
            yield
            self.record(self._step + 1)
        except BaseException as error:
            if self._written is not None:
                # An interruption of a step that is finished.
                self._take()
                raise
            lost = self._undo()
            but = (
                f", but {lost} small ones, whose record cannot be read: load what was saved before"
                if lost
                else ""
            )
            error.add_note(
                f"parameters and states are those of step {self._step} of the optimizer again, "
                f"the last finished one{but}"
            )
            raise

    def record(self, step: int, *, is_new: bool = True, is_checked: bool = False) -> None:
        """Record that a step is finished; other objects are as then if it is not new."""
        if is_new:
            self._others = kept.states(self._objects)
        facts, homes, small = self._facts(step, is_checked=is_checked)
        name = RECORDS[(self._number + 1) % 2]
        file = -1
        try:
            os.fdatasync(self._values)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            file = os.open(name, flags, 0o600, dir_fd=self._lock)
            begins = _write(file, self._number + 1, facts, small)
            if self._number < len(RECORDS):
                os.fsync(self._lock)
        except BaseException as error:
            if file >= 0:
                os.close(file)
            self._forget_other()
            if not isinstance(error, OSError):
                raise
            number = error.errno or errno.EIO
            is_gone = number == errno.ENOENT
            cure = "the folder was removed" if is_gone else "give the folder more room"
            raise TransferError(
                number,
                f"{os.strerror(number)}: the record of a finished step could not be written, and "
                f"the step is undone; {cure}",
                str(self._folder / name),
            ) from None
        self._written = step, homes, list(zip(small, begins, strict=True)), file
        self._take()

    def _take(self) -> None:
        """Have the record that was written be the last one."""
        assert self._written is not None
        self._step, self._homes, pairs, file = self._written
        before = [one for one in self._files[2:] if one != file]
        self._files[2:] = [file]
        for one in before:
            os.close(one)
        for home in self._homes:
            home.keep()
        leaves, _ = core.tree_flatten(self._others)
        others = {id(tensor) for tensor in (*leaves, *self._module.buffers())}
        self._small = [(tensor, begin) for tensor, begin in pairs if id(tensor) not in others]
        optimizer = self._optimizer()
        known = {} if optimizer is None else optimizer.state
        self._states = {owner: dict(state) for owner, state in known.items()}
        self._known = self._present()
        self._number, self._written = self._number + 1, None

    def _undo(self) -> int:
        """Have parameters and states be those of the last record again, but so many tensors."""
        self._forget_other()
        for home in self._homes:
            home.go_back()
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer.state.clear()
            optimizer.state.update({owner: dict(s) for owner, s in self._states.items()})
        lost = len(self._small)
        for tensor, begin in self._small:
            values = torch.empty(tensor.shape, dtype=tensor.dtype)
            with suppress(OSError), torch.no_grad():
                _read(self._files[2], memoryview(bytes_of(values)), begin, self._folder)
                tensor.copy_(values)
                lost -= 1
        self._known = self._present()
        return lost

    def _forget_other(self) -> None:
        """Drop the other record: it may be complete, and its places will be written to."""
        other = RECORDS[(self._number + 1) % 2]
        with suppress(OSError):
            file = os.open(other, os.O_WRONLY | os.O_CLOEXEC, dir_fd=self._lock)
            with os.fdopen(file, "wb") as opened:
                opened.write(bytes(_BODY))

    def _present(self) -> Any:
        """Return what tells whether parameters or states have changed, beside homes themselves."""
        optimizer = self._optimizer()
        states = [] if optimizer is None else list(optimizer.state.values())
        tensors = [*self._module.parameters(), *(v for state in states for v in state.values())]
        return [
            id(t.home) if isinstance(t, AwayTensor) else (id(t), t._version)
            for t in tensors
            if isinstance(t, torch.Tensor)
        ]

    def _facts(
        self, step: int = 0, *, is_checked: bool = False
    ) -> tuple[dict[str, Any], list[Home], list[torch.Tensor]]:
        """Return the text of a record, the homes in it, and the tensors whose values follow it."""
        optimizer = self._optimizer()
        entries: list[dict[str, Any]] = []
        places: list[tuple[int, int]] = []
        homes: list[Home] = []
        small: list[torch.Tensor] = []
        numbers: dict[int, int] = {}

        def numbered(value: torch.Tensor) -> dict[str, int]:
            is_home = isinstance(value, AwayTensor) and not value.steps
            key = id(value.home) if is_home else id(value)  # type: ignore[attr-defined]
            if key not in numbers:
                numbers[key] = len(entries)
                entry: dict[str, Any] = {
                    "dtype": str(value.dtype).removeprefix("torch."),
                    "shape": [*value.shape],
                }
                if is_home:
                    home: Home = value.home  # type: ignore[attr-defined]
                    homes.append(home)
                    entry |= {"stride": [*home.stride], "phase": home.phase, "first": len(places)}
                    places.extend(self._tier.place(home.area, offset) for offset in home.offsets)
                elif value.layout == torch.strided:
                    small.append(value)
                else:
                    raise ValueError(f"a tensor of layout {value.layout} {_UNRECORDED}")
                entries.append(entry)
            return {_NUMBER: numbers[key]}

        found = {
            "model": self._module.state_dict(keep_vars=True),
            "optimizer": {} if optimizer is None else optimizer.state_dict(),
            **self._others,
        }
        facts = {
            "format": _FORMAT,
            "version": _VERSION,
            "step": step,
            "sector": self._tier.alignment_bytes,
            "state": _replaced(found, lambda v: isinstance(v, torch.Tensor), numbered),
            "entries": entries,
            "places": torch.tensor(places, dtype=torch.int64).reshape(-1, 2),
        }
        if self._number == 0 or is_checked:
            try:
                torch.load(io.BytesIO(_text(facts)), weights_only=True)
            except (pickle.PickleError, AttributeError, TypeError) as error:
                raise ValueError(f"{str(error).splitlines()[0]}: this {_UNRECORDED}") from None
        return facts, homes, small


_REFUSED = (
    "cannot be recorded in the folder that offload= names, for recovery: give "
    'offload="disk" without a folder'
)
_UNRECORDED = f"in the state of the model, the optimizer or what is kept with them {_REFUSED}"


def _only(optimizers: Sequence[Optimizer]) -> Optimizer:
    """Return the only one of some optimizers; ValueError: between two steps no state is whole."""
    if len(optimizers) > 1:
        raise ValueError(f"the steps of {len(optimizers)} optimizers {_REFUSED}")
    return optimizers[0]


_running: weakref.WeakSet[FinishedSteps] = weakref.WeakSet()


def _leave() -> None:
    """Leave the folders to the process that this one was forked from."""
    for steps in list(_running):
        if steps.end.alive:  # Else the number may be that of another file.
            os.close(steps._lock)
    _running.clear()


os.register_at_fork(after_in_child=_leave)


@atexit.register
def _end_all() -> None:
    """Remove the files of runs, unless the process ends by an error that nobody has caught."""
    for steps in list(_running):
        if getattr(sys, "last_value", None) is None:
            steps.end()


def _remove(files: list[int], process: int) -> None:
    if os.getpid() != process:
        return
    for name in (*RECORDS, VALUES):
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=files[0])
    for file in files:
        os.close(file)


def _locked(folder: Path) -> int:
    """Return an open folder that no other model or process may use before it is closed."""
    found = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for is_last in (False, True):
        try:
            fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if is_last:
                os.close(found)
                raise ValueError(
                    f"{folder} is used by another model, of this process or one that still runs: "
                    "name another folder, or wait for its end"
                ) from None
            # A model that nobody uses any more.
            gc.collect()
    return found


def _refuse_earlier(folder: Path) -> None:
    record = newest(folder)
    if record is not None:
        raise ValueError(
            f"{folder} holds step {record.facts['step']} of an earlier run that was killed: "
            f"`rotor recover {folder} --out FILE` saves its parameters and states; remove "
            f"{folder / 'rotor-*'} to train anew there"
        )


def keep(optimizer: Optimizer, **objects: Any) -> None:
    """Have the states of further objects in the record of each finished step of an optimizer.

    Call it when all have the states with which training begins. They are recorded as they are when
    ``optimizer.step()`` returns, a ``GradScaler`` as its ``update()`` leaves it.

    Parameters
    ----------
    optimizer
        Optimizer of a model with ``offload="disk:FOLDER", offload_state=optimizer``.
    **objects
        Objects with ``state_dict()``, such as a scheduler, and generators; their names are those of
        their states in the result of `recover`.

    Raises
    ------
    ValueError, TypeError
        The optimizer has no record, a name is taken, or a state cannot be recorded.
    """
    kept.check(objects)
    found = FinishedSteps.find(optimizer)
    if found is None:
        raise ValueError(
            "this optimizer has no record of its steps: wrap its model with "
            'offload="disk:FOLDER" and offload_state=optimizer before'
        )
    found.add(objects)


# -- records


def _replaced(value: Any, is_leaf: Callable[[Any], bool], function: Callable[[Any], Any]) -> Any:
    """Return nested containers with a function's results in the place of leaves."""
    if is_leaf(value):
        return function(value)
    if isinstance(value, dict):
        made = copy.copy(value)
        made.update({k: _replaced(one, is_leaf, function) for k, one in value.items()})
        return made
    if isinstance(value, list | tuple):
        return type(value)(_replaced(one, is_leaf, function) for one in value)
    return value


def _text(facts: dict[str, Any]) -> bytes:
    made = io.BytesIO()
    torch.save(facts, made)
    return made.getvalue()


def _write(opened: int, number: int, facts: Any, small: list[torch.Tensor]) -> list[int]:
    """Write a record, its begin at last; return where the values of tensors are in it."""
    begins: list[int] = []
    sizes = [t.numel() * t.itemsize for t in small]
    end = 0
    for entry in (entry for entry in facts["entries"] if "first" not in entry):
        entry["begin"], end = end, end + sizes[len(begins)]
        begins.append(entry["begin"])
    text = _text(facts)
    head = _HEAD.pack(_WORD, number, len(text), len(text) + end)
    with os.fdopen(opened, "r+b", closefd=False) as file:
        file.seek(_BODY)
        file.write(text)
        checksum = zlib.crc32(text, zlib.crc32(head))
        for tensor in small:
            values = memoryview(bytes_of(tensor))
            checksum = zlib.crc32(values, checksum)
            file.write(values)
        file.truncate()
        file.flush()
        os.pwrite(file.fileno(), head + _SUM.pack(checksum), 0)
        os.fdatasync(file.fileno())
    return [_BODY + len(text) + begin for begin in begins]


class _Record(NamedTuple):
    number: int
    path: Path
    begin: int
    """Place of the values in the file."""
    facts: dict[str, Any]


def _record_in(path: Path) -> _Record | None:
    """Return the record in a file, if it is complete."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    with file:
        head, known = file.read(_HEAD.size), file.read(_SUM.size)
        if len(known) < _SUM.size:
            return None
        word, number, length, left = _HEAD.unpack(head)
        if word != _WORD or length > left or _BODY + left > os.fstat(file.fileno()).st_size:
            return None
        text = file.read(length)
        checksum = zlib.crc32(text, zlib.crc32(head))
        left -= length
        while left > 0:
            block = file.read(min(left, 1 << 20))
            checksum = zlib.crc32(block, checksum)
            left -= len(block) or left
        if (checksum,) != _SUM.unpack(known):
            return None
    facts = torch.load(io.BytesIO(text), weights_only=True)
    if (facts.get("format"), facts.get("version")) != (_FORMAT, _VERSION):
        raise ValueError(
            f"{path}: version {facts.get('version')!r} of {facts.get('format')!r} is unknown, "
            f"expected {_VERSION} of {_FORMAT!r}"
        )
    return _Record(number, path, _BODY + length, facts)


def newest(folder: Path) -> _Record | None:
    """Return the last complete record of a folder, if it has any."""
    found = [record for name in RECORDS if (record := _record_in(folder / name)) is not None]
    return max(found, key=lambda record: record.number, default=None)


# -- recovery


def recover(
    directory: str | os.PathLike[str], scratch: str | os.PathLike[str] | None = None
) -> dict[str, Any]:
    """Return parameters and states of the last finished step of a run that was killed.

    The values of large tensors are copied to files without names, and are in memory once they are
    read: models larger than memory load them one after the other.

    Parameters
    ----------
    directory
        Folder that ``offload="disk:FOLDER"`` named, with ``offload_state=``. It is left as it is.
    scratch
        Folder with room for the copies; by default the same one.

    Returns
    -------
    dict
        ``"step"``, the number of steps that the optimizer had finished; ``"model"`` and
        ``"optimizer"``, the results of ``state_dict()`` after the last one; ``"random"``, for
        `set_random`; and the states of what `keep` has named.

    Raises
    ------
    ValueError
        The folder holds no finished step, or its run has not ended.
    OSError
        The folder cannot be read, or holds other bytes than were written.
    """
    folder = Path(directory)
    lock = _locked(folder)
    try:
        record = newest(folder)
        if record is None:
            raise ValueError(
                f"{folder} holds no finished step: it is not the folder of a run with "
                "offload_state= that was killed, or its records are damaged"
            )
        room = folder if scratch is None else Path(scratch)
        needed = sum(map(_nbytes, record.facts["entries"]))
        if shutil.disk_usage(room).free < needed:
            raise OSError(
                errno.ENOSPC,
                f"copies of the values need {exact_bytes(needed)} on the disk of this folder: name "
                "another one, scratch= or that of --out",
                str(room),
            )
        with (folder / VALUES).open("rb") as values, record.path.open("rb") as small:
            tensors = [
                _home_in(record, entry, values.fileno(), folder / VALUES, room)
                if "first" in entry
                else _small_in(record, entry, small.fileno())
                for entry in record.facts["entries"]
            ]
        state = _replaced(
            record.facts["state"],
            lambda value: isinstance(value, dict) and _NUMBER in value,
            lambda value: tensors[value[_NUMBER]],
        )
        return {"step": record.facts["step"], **state}
    finally:
        os.close(lock)


def _nbytes(entry: dict[str, Any]) -> int:
    dtype: torch.dtype = getattr(torch, entry["dtype"])
    size: int = math.prod(entry["shape"])
    return size * dtype.itemsize


def _small_in(record: _Record, entry: dict[str, Any], file: int) -> torch.Tensor:
    made = torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
    _read(file, memoryview(bytes_of(made)), record.begin + entry["begin"], record.path)
    return made


def _home_in(
    record: _Record, entry: dict[str, Any], file: int, path: Path, scratch: Path
) -> torch.Tensor:
    """Return the tensor of a home, whose bytes are on the disk until they are read."""
    dtype, sector, left = getattr(torch, entry["dtype"]), record.facts["sector"], _nbytes(entry)
    with tempfile.NamedTemporaryFile(dir=scratch, prefix=".rotor-recovered-") as copied:
        for place in record.facts["places"][entry["first"] :]:
            piece = torch.empty(min(left, _core.PIECE_BYTES), dtype=torch.uint8)
            begin, checksum = place.tolist()
            # Bytes before the first whole sector have one of their own.
            head = min(-entry["phase"] % sector, len(piece))
            memory = memoryview(bytes_of(piece))
            _read(file, memory[:head], begin, path)
            _read(file, memory[head:], begin + (sector if head else 0), path)
            if _core.checksum(piece.data_ptr(), 1, (len(piece),), (1,)) != checksum:
                raise TransferError(
                    errno.EIO,
                    f"{len(piece)} bytes at byte {begin} are not those that step "
                    f"{record.facts['step']} has written: the disk has to be checked",
                    str(path),
                )
            copied.write(memory)
            left -= len(piece)
            if not left:
                break
        copied.flush()
        made = torch.from_file(copied.name, False, math.prod(entry["shape"]), dtype=dtype)
    return made.as_strided(entry["shape"], entry["stride"])


def _read(file: int, memory: memoryview, begin: int, path: Path) -> None:
    while memory:
        count = os.preadv(file, [memory], begin)
        if not count:
            raise TransferError(errno.EIO, f"the file ends before byte {begin}", str(path))
        memory, begin = memory[count:], begin + count
