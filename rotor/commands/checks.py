"""Checks of a command line on models that need no PyTorch, so that they fail at once."""

from __future__ import annotations

import argparse
import ast
import re
from pathlib import Path
from typing import Any

__all__ = ["check_model", "parse_argument", "parse_input"]

_LONGEST = 1 << 40
_LOSSES = ("cross_entropy", "mse", "sum")


def parse_input(text: str) -> tuple[str | None, tuple[int, ...]]:
    """Return a name and a shape from text such as ``32,3,224,224`` or ``ids=8x128``.

    Raises
    ------
    ValueError
        It cannot be read, or a size is not positive.
    """
    name, separator, shape = text.rpartition("=")
    try:
        sizes = tuple(int(size) for size in shape.replace("x", ",").split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1 or max(sizes) > _LONGEST:
        raise ValueError(
            f"--input {text!r} is no shape, expected positive sizes such as 32,3,224,224"
        )
    if separator and not name.isidentifier():
        raise ValueError(f"--input {text!r}: {name!r} is no name of an argument")
    return name or None, sizes


def parse_argument(text: str) -> tuple[str, Any]:
    """Return name and value from text such as ``layers=4``; ValueError: it cannot be read."""
    name, separator, value = text.partition("=")
    if not separator or not name.isidentifier():
        raise ValueError(f"--arg {text!r}: expected NAME=VALUE, such as layers=4")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def check_model(arguments: argparse.Namespace) -> None:
    """Raise ValueError if an option of a command on a model is wrong, as far as text tells.

    Raises
    ------
    ValueError
        A file is missing, or a name, shape or number cannot be read.
    """
    for text in arguments.arg:
        parse_argument(text)
    for text in arguments.input:
        parse_input(text)
    if not arguments.input and (arguments.dtype or arguments.high):
        raise ValueError("--dtype and --high are of inputs: give --input too")
    where, separator, _ = arguments.factory.rpartition(":")
    if not separator and re.search(r"\.py$|[/.]", arguments.factory):
        raise ValueError(
            f"{arguments.factory!r} names no callable, expected such as "
            f"{arguments.factory}:make_model"
        )
    if re.search(r"\.py$|/", where) and not Path(where).is_file():
        raise ValueError(f"no file {where}")
    loss = arguments.loss
    if loss is not None and loss not in _LOSSES and ":" not in loss:
        raise ValueError(
            f"--loss {loss!r}: expected {', '.join(_LOSSES)}, or FILE.py:FUNCTION, a function of "
            "the output"
        )
    if arguments.device is not None and not re.fullmatch(r"[a-z]+(:\d+)?", arguments.device):
        raise ValueError(f"--device {arguments.device!r}: expected cpu, cuda, or such as cuda:1")
    for name in ("points", "multiple_of", "max_batch"):
        number = getattr(arguments, name, None)
        if number is not None and number < 1:
            shown = name.replace("_", "-")
            raise ValueError(f"--{shown} {number}: expected a whole number of 1 or more")
