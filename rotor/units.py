"""Bytes and seconds as people write them, and as the core counts them. Needs no PyTorch."""

from __future__ import annotations

import math
import numbers
import re

__all__ = ["LARGEST_BYTES", "exact_bytes", "format_bytes", "format_seconds", "parse_bytes", "to_ns"]

LARGEST_BYTES = 1 << 62
"""The largest number of bytes that is accepted as a size."""

_LARGEST_NS = (1 << 63) - 1
_POWERS = list(enumerate("kmgt", 1))
_UNITS = {"": 1, "b": 1, **{f"{letter}b": 1000**k for k, letter in _POWERS}}
# SLURM and Docker read "K" as "KiB".
_UNITS |= {f"{letter}{end}": 1024**k for k, letter in _POWERS for end in ("ib", "")}
_TEXT = re.compile(
    r"\s*(\d+|\d*\.\d+|\d+\.)(?:e\+?(\d{1,2}))?\s*([a-z]*)\s*", re.ASCII | re.IGNORECASE
)
_EXPECTED = 'expected a positive number of bytes, or text such as "700MiB" or "8 GB"'


def check_count(value: object, name: str, lowest: int, largest: int = (1 << 62)) -> int:
    """Return a whole number within bounds, or an error that says which."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    number = int(value)
    if not lowest <= number <= largest:
        raise ValueError(f"{name} = {value}, expected a whole number from {lowest} to {largest}")
    return number


def parse_bytes(value: object, name: str = "mem_limit") -> int:
    """Return a number of bytes, given as a number or as text.

    Parameters
    ----------
    value
        A whole number (an ``int``, a NumPy integer, a ``float`` without a fraction), or text: a
        decimal number such as 1.5 or 1e9, and a unit out of ``B``, ``KB MB GB TB`` (powers of
        1000) and ``KiB MiB GiB TiB`` or ``K M G T`` (powers of 1024), in any case and with any
        spaces between; bytes where without a unit. With a larger one, a fraction of a byte is
        rounded to the nearest.
    name
        Name of the value in error messages.

    Returns
    -------
    int
        Bytes, from 1 to `LARGEST_BYTES`.

    Raises
    ------
    TypeError
        `value` is a ``bool`` or neither a number nor text.
    ValueError
        It is NaN, zero, negative, infinite or too large, a float with a fraction, or text that
        cannot be read.

    Examples
    --------
    >>> parse_bytes("1.5 GiB")
    1610612736
    """
    if isinstance(value, str):
        count = _parse_text(value, name)
    elif isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number or text, got {value!r}; {_EXPECTED}")
    elif isinstance(value, numbers.Integral):
        count = int(value)
    elif not math.isfinite(value):
        raise ValueError(f"{name} = {value!r}; {_EXPECTED}")
    elif value != math.floor(value):
        raise ValueError(f"{name} = {value!r} is not a whole number of bytes; {_EXPECTED}")
    else:
        count = int(float(value))
    if count <= 0:
        raise ValueError(f"{name} = {value!r}; {_EXPECTED}")
    if count > LARGEST_BYTES:
        raise ValueError(f"{name} = {value!r} is too large; expected at most {LARGEST_BYTES} bytes")
    return count


def _parse_text(text: str, name: str) -> int:
    match = _TEXT.fullmatch(text)
    if match is None or match[3].lower() not in _UNITS:
        raise ValueError(f"{name} = {text!r} cannot be read; {_EXPECTED}")
    whole, _, fraction = match[1].partition(".")
    scale: int = 10 ** len(fraction)
    scaled: int = int(whole + fraction) * _UNITS[match[3].lower()] * 10 ** int(match[2] or 0)
    if match[3].lower() in ("", "b") and scaled % scale:
        raise ValueError(f"{name} = {text!r} is not a whole number of bytes; {_EXPECTED}")
    return (2 * scaled + scale) // (2 * scale)


def format_bytes(n: int) -> str:
    """Return a number of bytes for people: exact below 1 KiB, else three digits or more and a unit.

    Parameters
    ----------
    n
        Bytes; may be negative.

    Returns
    -------
    str
        Such as "1.5 GiB".

    Examples
    --------
    >>> format_bytes(1610612736)
    '1.5 GiB'
    """
    size = float(abs(n))
    sign = "-" if n < 0 else ""
    if size < 1024:
        return f"{sign}{int(size)} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= 1024
        if size < 1023.95 or unit == "TiB":
            break
    digits = 2 if size < 9.995 else 1
    text = f"{size:.{digits}f}".rstrip("0").rstrip(".")
    return f"{sign}{text} {unit}"


def exact_bytes(n: int) -> str:
    """Return a number of bytes for messages: for people, and exactly; below 1 KiB the bytes alone.

    Examples
    --------
    >>> exact_bytes(20796608)
    '19.8 MiB (20796608 bytes)'
    """
    return f"{n} bytes" if abs(n) < 1024 else f"{format_bytes(n)} ({n} bytes)"


def format_seconds(s: float) -> str:
    """Return a time for people: three digits and a unit from ns to minutes.

    Parameters
    ----------
    s
        Seconds; may be negative.

    Returns
    -------
    str
        Such as "12.3 ms".

    Examples
    --------
    >>> format_seconds(0.01234)
    '12.3 ms'
    """
    size = abs(s)
    sign = "-" if s < 0 else ""
    if size >= 119.5:
        return f"{sign}{size / 60:.1f} min"
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6), ("ns", 1e9)):
        if size * scale >= 0.9995 or unit == "ns":
            break
    value = size * scale
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{sign}{f'{value:.{digits}f}' if value else '0'} {unit}"


def to_ns(seconds: float) -> int:
    """Return seconds as whole nanoseconds, rounded to the nearest.

    Raises
    ------
    TypeError
        `seconds` is not a number.
    ValueError
        It is NaN, negative, infinite, or longer than 64 bits of nanoseconds hold.
    """
    number: object = seconds
    if isinstance(number, bool) or not isinstance(number, numbers.Real):
        raise TypeError(f"expected a number of seconds, got {seconds!r}")
    if not seconds >= 0:
        raise ValueError(f"expected a time of 0 seconds or more, got {seconds!r}")
    if seconds > _LARGEST_NS // 1_000_000_000:
        raise ValueError(f"{seconds!r} seconds are too long: the most is {_LARGEST_NS} ns")
    return round(seconds * 1_000_000_000)
