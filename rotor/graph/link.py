"""The link to a second tier of memory: its speed, and what it may move."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from rotor.units import parse_bytes

_NS = 1_000_000_000
_FIELDS = ("write_bytes_per_s", "read_bytes_per_s", "latency_s")
_BYTES = ("host_bytes", "least_bytes", "padding_bytes")
_LARGEST_BYTES = 1 << 42
_LONGEST_S = 4000.0


@dataclass(frozen=True)
class Link:
    """Link between the device and a second tier of memory, which serves transfers in their order.

    Parameters
    ----------
    write_bytes_per_s, read_bytes_per_s
        Bytes that it moves to the tier and back, per second.
    latency_s
        Seconds that each transfer takes beside those of its bytes, rounded to nanoseconds.
    duplex
        True if writes and reads do not wait for each other.
    host_bytes
        The most bytes that the tier may hold; ``None`` for any.
    least_bytes
        Size of the smallest storage that is worth moving.
    padding_bytes
        Bytes that a fetch allocates on the device beside those of the storage.

    Raises
    ------
    ValueError, TypeError
        A field is not as described.
    """

    write_bytes_per_s: float
    read_bytes_per_s: float
    latency_s: float = 0.0
    duplex: bool = False
    host_bytes: int | None = None
    least_bytes: int = 1
    padding_bytes: int = 0

    def __post_init__(self) -> None:
        for name in _FIELDS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name} must be a number, got {value!r}")
            object.__setattr__(self, name, float(value))
        for name in _FIELDS[:2]:
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} = {getattr(self, name)!r}, expected more than 0")
        if not 0 <= self.latency_s <= _LONGEST_S:
            raise ValueError(f"latency_s = {self.latency_s!r}, expected 0 to {_LONGEST_S:g} s")
        if not isinstance(self.duplex, bool):
            raise TypeError(f"duplex must be True or False, got {self.duplex!r}")
        for name in _BYTES:
            object.__setattr__(self, name, self._bytes(name))

    def _bytes(self, name: str) -> int | None:
        value = getattr(self, name)
        if name == "host_bytes" and value is None:
            return None
        if value == 0 and isinstance(value, int) and not isinstance(value, bool):
            return 0
        number = parse_bytes(value, name=name)
        if name != "host_bytes" and number > _LARGEST_BYTES:
            raise ValueError(f"{name} = {number}, expected 0 to {_LARGEST_BYTES}")
        return number

    @property
    def latency_ns(self) -> int:
        """Nanoseconds that each transfer takes beside those of its bytes."""
        return round(self.latency_s * _NS)

    @property
    def core(self) -> tuple[float, float, int, bool, int, int, int]:
        """The link as the core reads it."""
        host = -1 if self.host_bytes is None else min(self.host_bytes, (1 << 63) - 1)
        return (
            self.write_bytes_per_s,
            self.read_bytes_per_s,
            self.latency_ns,
            self.duplex,
            host,
            self.least_bytes,
            self.padding_bytes,
        )

    def write_ns(self, size_bytes: int) -> int:
        """Return the nanoseconds of one write of so many bytes, rounded up."""
        return self.latency_ns + math.ceil(size_bytes * _NS / self.write_bytes_per_s)

    def read_ns(self, size_bytes: int) -> int:
        """Return the nanoseconds of one fetch of so many bytes, rounded up."""
        return self.latency_ns + math.ceil(size_bytes * _NS / self.read_bytes_per_s)

    def write_seconds(self, size_bytes: int) -> float:
        """Return the seconds of one write of so many bytes."""
        return self.latency_s + size_bytes / self.write_bytes_per_s

    def read_seconds(self, size_bytes: int) -> float:
        """Return the seconds of one fetch of so many bytes."""
        return self.latency_s + size_bytes / self.read_bytes_per_s

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain data, for JSON."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @classmethod
    def from_dict(cls, data: Any) -> Link:
        """Return the link that `to_dict` wrote.

        Raises
        ------
        ValueError
            A field is missing, unknown or wrong.
        """
        if not isinstance(data, dict):
            raise ValueError("a link must be an object of its fields")
        try:
            return cls(**data)
        except TypeError as error:
            raise ValueError(f"malformed link: {error}") from error
