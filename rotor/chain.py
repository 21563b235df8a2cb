"""The cost model of a chain, as users and algorithms see it: bytes and seconds.

A chain is what Beaumont et al. (hal-02352969, section 3) plan on: ``n`` stages and a loss, each
stage with the time of its forward and backward, the size of its input, and the size of everything
that its backward needs. This module needs no PyTorch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from rotor import _core

FORMAT = "rotor.chain"
VERSION = 1
_NS = 1_000_000_000
_LARGEST = 1 << 42
_NEEDED = (
    *("forward_time", "backward_time", "x_bytes", "xbar_bytes"),
    *("forward_tmp_bytes", "backward_tmp_bytes"),
)
_OPTIONAL = (
    *("forward_nograd_tmp_bytes", "grad_bytes", "pgrad_bytes", "loss_tmp_bytes"),
    *("hold_output", "names", "once"),
)


def _numbers(name: str, values: Iterable[Any], length: int, unit: str) -> list[int | float]:
    listed = list(values)
    if len(listed) != length:
        raise ValueError(f"{name} has {len(listed)} entries, expected {length}")
    numbers: list[int | float] = []
    for i, value in enumerate(listed):
        number = value.item() if isinstance(value, np.generic) else value
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise TypeError(f"{name}[{i}] must be a number of {unit}, got {value!r}")
        if number != number:
            raise ValueError(f"{name}[{i}] is NaN, expected a number of {unit}")
        numbers.append(number)
    return numbers


def _sizes(name: str, values: Iterable[Any], length: int, *, signed: bool = False) -> list[int]:
    numbers = _numbers(name, values, length, "bytes")
    for i, value in enumerate(numbers):
        if abs(value) > _LARGEST:
            raise ValueError(f"{name}[{i}] = {value} is too large, expected at most {_LARGEST}")
        if value != int(value):
            raise ValueError(f"{name}[{i}] = {value} is not a whole number of bytes")
        if value < 0 and not signed:
            raise ValueError(f"{name}[{i}] = {value} is negative, expected a size in bytes")
    return [int(value) for value in numbers]


def _times(name: str, values: Iterable[Any], length: int) -> list[float]:
    numbers = _numbers(name, values, length, "seconds")
    for i, value in enumerate(numbers):
        if not 0 <= value <= _LARGEST / _NS:
            raise ValueError(
                f"{name}[{i}] = {value}, expected seconds between 0 and {_LARGEST / _NS:.0f}"
            )
    return [float(value) for value in numbers]


class Saved:
    """Object that can be written as JSON, and read again."""

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data, for JSON."""
        raise NotImplementedError

    @classmethod
    def from_dict(cls, data: Any) -> Any:
        """Return the object that `to_dict` wrote."""
        raise NotImplementedError

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return it as JSON text; also written to `path` when one is given."""
        return write_json(self.to_dict(), path)

    @classmethod
    def from_json(cls, source: str | os.PathLike[str]) -> Self:
        """Return the object in JSON text, or in the file at a path.

        Raises
        ------
        ValueError
            Not JSON, another format or version, or a field missing, unknown or wrong.
        """
        found: Self = cls.from_dict(read_json(source))
        return found


class Chain(Saved):
    """Cost model of n stages and a loss, from which a schedule is computed.

    Parameters
    ----------
    forward_time, backward_time
        Seconds of each stage's forward and backward, [n].
    x_bytes
        Size of the input of each stage, and of the output of the last one, [n + 1].
    xbar_bytes
        Bytes that the forward of each stage keeps for its backward, its output included, each
        storage once, [n]. (Papers write it with index i + 1.)
    forward_tmp_bytes
        Bytes that the forward which keeps everything allocates beyond that while it runs, [n].
    backward_tmp_bytes
        Peak of each backward above the level at its start, less ``grad_bytes[i]``, [n]. It may be
        negative down to ``-grad_bytes[i]``, if saved tensors are freed before gradients are
        made.
    forward_nograd_tmp_bytes
        As ``forward_tmp_bytes`` for a forward that keeps nothing, [n]; the same by default.
    grad_bytes
        Size of the gradient of each ``x``, [n + 1]; by default that of ``x``.
    pgrad_bytes
        Parameter gradients that the backward of each stage makes and that stay, [n]; 0 by default.
    loss_tmp_bytes
        Peak of the loss above the level at its start, less ``grad_bytes[n]``.
    hold_output
        True if the caller holds the output until the end of the step.
    names
        Names of the stages, [n].
    once
        Stages that may run forward only once, by Fe, because a second run would not give the same
        values, [n]; none by default.

    Raises
    ------
    ValueError
        A length does not fit; a value is NaN, negative or too large. The message names the entry.
    TypeError
        An entry is not a number.

    Notes
    -----
    A chain's budget counts ``x_bytes[0]``, as published. ``hold_output=False`` with the other
    defaults is the model of Beaumont et al., hal-02352969.
    """

    def __init__(
        self,
        forward_time: Iterable[float],
        backward_time: Iterable[float],
        x_bytes: Iterable[int],
        xbar_bytes: Iterable[int],
        forward_tmp_bytes: Iterable[int],
        backward_tmp_bytes: Iterable[int],
        *,
        forward_nograd_tmp_bytes: Iterable[int] | None = None,
        grad_bytes: Iterable[int] | None = None,
        pgrad_bytes: Iterable[int] | None = None,
        loss_tmp_bytes: int = 0,
        hold_output: bool = True,
        names: Sequence[str] | None = None,
        once: Sequence[bool] | None = None,
    ) -> None:
        forward = list(forward_time)
        n = len(forward)
        if n < 1:
            raise ValueError("a chain needs at least one stage, forward_time is empty")
        self.forward_time = _times("forward_time", forward, n)
        self.backward_time = _times("backward_time", backward_time, n)
        self.x_bytes = _sizes("x_bytes", x_bytes, n + 1)
        self.xbar_bytes = _sizes("xbar_bytes", xbar_bytes, n)
        self.forward_tmp_bytes = _sizes("forward_tmp_bytes", forward_tmp_bytes, n)
        self.backward_tmp_bytes = _sizes("backward_tmp_bytes", backward_tmp_bytes, n, signed=True)
        light = (
            self.forward_tmp_bytes
            if forward_nograd_tmp_bytes is None
            else (forward_nograd_tmp_bytes)
        )
        grad_bytes = self.x_bytes if grad_bytes is None else grad_bytes
        pgrad_bytes = [0] * n if pgrad_bytes is None else pgrad_bytes
        self.forward_nograd_tmp_bytes = _sizes("forward_nograd_tmp_bytes", light, n)
        self.grad_bytes = _sizes("grad_bytes", grad_bytes, n + 1)
        self.pgrad_bytes = _sizes("pgrad_bytes", pgrad_bytes, n)
        (self.loss_tmp_bytes,) = _sizes("loss_tmp_bytes", [loss_tmp_bytes], 1, signed=True)
        if not isinstance(hold_output, bool):
            raise TypeError(f"hold_output must be True or False, got {hold_output!r}")
        self.hold_output = hold_output
        peaks = [*self.backward_tmp_bytes, self.loss_tmp_bytes]
        for i, (tmp, grad) in enumerate(zip(peaks, self.grad_bytes, strict=True)):
            if tmp < -grad:
                name = f"backward_tmp_bytes[{i}]" if i < n else "loss_tmp_bytes"
                raise ValueError(
                    f"{name} = {tmp} is below -grad_bytes[{i}] = {-grad}: a peak cannot lie below "
                    "the level at its start"
                )
        if names is not None and len(names) != n:
            raise ValueError(f"names has {len(names)} entries, expected {n}")
        self.names = [str(name) for name in names] if names is not None else None
        if once is not None and len(once) != n:
            raise ValueError(f"once has {len(once)} entries, expected {n}")
        self.once = [False] * n if once is None else [bool(flag) for flag in once]
        self.core = self._build_core()

    def _build_core(self) -> _core.Chain:
        return _core.Chain(
            _ns_array(self.forward_time),
            _ns_array(self.backward_time),
            _int_array(self.x_bytes),
            _int_array(self.xbar_bytes),
            _int_array(self.forward_tmp_bytes),
            _int_array(self.forward_nograd_tmp_bytes),
            _int_array(self.backward_tmp_bytes),
            _int_array(self.grad_bytes),
            _int_array(self.pgrad_bytes),
            _int_array(self.once),
            self.loss_tmp_bytes,
            self.hold_output,
        )

    def __len__(self) -> int:
        """Return the number of stages; the loss is not counted."""
        return len(self.forward_time)

    @property
    def ideal_time(self) -> float:
        """Seconds of one step without recomputation, the loss not counted."""
        return self.core.ideal_ns / _NS

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Chain):
            return NotImplemented
        return self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<Chain of {len(self)} stages, {self.ideal_time:.6g} s without recomputation>"

    def __reduce__(self) -> tuple[Any, ...]:
        return (Chain.from_dict, (self.to_dict(),))

    def to_dict(self) -> dict[str, Any]:
        """Return the chain as plain lists, for JSON; with ``once`` if a stage runs once."""
        names = [*_NEEDED, *(_OPTIONAL if any(self.once) else _OPTIONAL[:-1])]
        fields = {name: getattr(self, name) for name in names}
        return {"format": FORMAT, "version": VERSION, **fields}

    @classmethod
    def from_dict(cls, data: Any) -> Chain:
        """Return the chain that `to_dict` wrote.

        Raises
        ------
        ValueError
            The data is of another format or version, or lacks a field; the message names it.
        """
        fields = dict(check_header(data, FORMAT, VERSION))
        try:
            positional = [fields.pop(name) for name in _NEEDED]
        except KeyError as error:
            raise ValueError(f"a chain needs the field {error}, and it is missing") from None
        unknown = sorted(set(fields) - {*_OPTIONAL})
        if unknown:
            raise ValueError(f"a chain has no field {unknown[0]!r}")
        try:
            return cls(*positional, **fields)
        except TypeError as error:
            raise ValueError(f"malformed chain: {error}") from error


def _ns_array(seconds: Iterable[float]) -> npt.NDArray[np.int64]:
    return np.array([round(value * _NS) for value in seconds], dtype=np.int64)


def _int_array(values: Iterable[int]) -> npt.NDArray[np.int64]:
    return np.array(list(values), dtype=np.int64)


def check_header(data: Any, expected: str, *versions: int) -> dict[str, Any]:
    """Return the fields of a JSON object without its header, which must be the expected one."""
    if not isinstance(data, dict):
        raise ValueError(f"malformed JSON: expected an object of format {expected!r}")
    fields = dict(data)
    found = fields.pop("format", None)
    if found != expected:
        raise ValueError(f"expected JSON of format {expected!r}, got {found!r}")
    if (got := fields.pop("version", None)) not in versions:
        known = " and ".join(map(str, versions))
        raise ValueError(f"{expected} version {got!r} is unknown; this rotor reads {known}")
    return fields


def write_json(data: dict[str, Any], path: str | os.PathLike[str] | None) -> str:
    """Return the data as JSON text; write it to `path` completely or not at all."""
    text = json.dumps(data, allow_nan=False)
    if path is not None:
        write_text(text, Path(path))
    return text


def write_text(text: str, target: Path) -> None:
    """Write a text completely or not at all."""
    with new_file(target) as path:
        path.write_text(text, encoding="utf-8", newline="\n")


@contextmanager
def new_file(target: str | os.PathLike[str]) -> Iterator[Path]:
    """Give the path of a file that replaces another one when the context ends without an error.

    A link stays and leads to the new file; what is no regular file, such as a device, is written to
    itself.
    """
    given = Path(target)
    is_special = given.exists() and not given.is_file()
    path = given if is_special else Path(os.path.realpath(given))
    partial = given if is_special else path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        if not is_special:
            partial.replace(path)
    except OSError as error:
        if error.filename in (None, str(partial)):
            error.filename = str(given)
        raise
    finally:
        if not is_special:
            partial.unlink(missing_ok=True)


def read_json(source: str | os.PathLike[str]) -> Any:
    """Return parsed JSON: `source` is the text when it begins with a brace, else a path."""
    if not isinstance(source, str | os.PathLike):
        raise TypeError(f"expected JSON text, or the path of a file, got {source!r}")
    is_text = isinstance(source, str) and source.lstrip()[:1] in ("{", "[")
    text = str(source) if is_text else Path(source).read_text(encoding="utf-8")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"malformed JSON: {error}") from error
