"""Checks of a command line on models that need no PyTorch, so that they fail at once."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rotor.fit.distributions import lengths_of

_LONGEST = 1 << 40
_NAMES = {
    "loss": (("cross_entropy", "mse", "sum"), "output"),
    "offload_state": (("sgd", "adam", "adamw", "adafactor"), "parameters"),
}
_WHOLE = re.compile(r"(torch\.)?(u?int(8|16|32|64)?|long|short)")
_REAL = r"bfloat16|float(16|32|64|8_\w+)?|half|double|bool|c?half|c(float|double)|complex\d+"
_TYPE = re.compile(rf"{_WHOLE.pattern}|(torch\.)?({_REAL})")


def parse_input(text: str) -> tuple[str | None, tuple[int, ...]]:
    """Return a name and a shape from text such as ``32,3,224,224`` or ``ids=8x128``.

    Raise ValueError if it cannot be read, or a size is not positive.
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


def source_of(name: str) -> tuple[str, str]:
    """Return the module or file of a callable, and its name there; ValueError: there is none."""
    where, separator, wanted = name.rpartition(":")
    if not separator:
        if re.search(r"\.py$|[/.]", name):
            raise ValueError(f"{name!r} names no callable, expected such as {name}:make_model")
        where = "rotor.models"
    if re.search(r"\.py$|/", where) and not Path(where).is_file():
        raise ValueError(f"no file {where}")
    return where, wanted


def check_model(arguments: argparse.Namespace) -> None:
    """Raise ValueError if an option of a command on a model is wrong, as far as text tells."""
    for text in arguments.arg:
        parse_argument(text)
    for text in arguments.input:
        parse_input(text)
    if not arguments.input and (arguments.dtype or arguments.high):
        raise ValueError("--dtype and --high are of inputs: give --input too")
    check_types(len(arguments.input), arguments.dtype, arguments.high)
    source_of(arguments.factory)
    _check_files(arguments)
    _check_names(arguments)
    if arguments.device is not None and not re.fullmatch(r"[a-z]+(:\d+)?", arguments.device):
        raise ValueError(f"--device {arguments.device!r}: expected cpu, cuda, or such as cuda:1")
    for name in ("points", "multiple_of", "max_batch"):
        number = getattr(arguments, name, None)
        if number is not None and number < 1:
            shown = name.replace("_", "-")
            raise ValueError(f"--{shown} {number}: expected a whole number of 1 or more")
    least, most = getattr(arguments, "multiple_of", 1), getattr(arguments, "max_batch", None)
    if most is not None and most < least:
        raise ValueError(f"--max-batch {most} is below --multiple-of {least}: no batch is left")
    if getattr(arguments, "lengths", None) is not None:
        lengths_of(arguments.lengths, arguments.seed)


def check_types(inputs: int, types: Sequence[str], highs: Sequence[int]) -> list[int]:
    """Return the indices of the inputs of whole numbers.

    Raises ValueError if types or bounds of the inputs are unknown, or too few or many.
    """
    wrong = next((name for name in types if not _TYPE.fullmatch(name)), None)
    if wrong is not None:
        raise ValueError(f"no dtype {wrong!r}, expected one such as float32 or int64")
    if len(types) > 1 and len(types) != inputs:
        raise ValueError(
            f"{len(types)} --dtype for {inputs} --input: give one for all, or one for each"
        )
    kinds = (list(types) or ["float32"]) * (inputs if len(types) < 2 else 1)
    whole = [k for k, name in enumerate(kinds) if _WHOLE.fullmatch(name)]
    if len(highs) != len(whole) and not (len(highs) == 1 and whole):
        raise ValueError(
            f"{len(highs)} --high for {len(whole)} --input of whole numbers: give the number of "
            "different values, such as --high 1000, one for all or one for each"
        )
    if highs and min(highs) < 1:
        raise ValueError(f"--high {min(highs)}: expected a number of 1 or more")
    return whole


def _check_files(arguments: argparse.Namespace) -> None:
    """Raise if a file that is read is missing, or an option contradicts the profile."""
    profile = getattr(arguments, "profile", None)
    if profile is not None:
        if arguments.engine == "chain":
            raise ValueError(
                "--profile is of operations, and --engine chain measures stages here: leave one out"
            )
        if getattr(arguments, "save", None) is not None:
            raise ValueError("--save is of this machine, and --profile of another: give one")
        if not Path(profile).is_file():
            raise ValueError(f"--profile {profile}: No such file or directory")


def _check_names(arguments: argparse.Namespace) -> None:
    """Raise ValueError if a loss or an optimizer is unknown; give known ones their own names."""
    for option, (known, of) in _NAMES.items():
        given, shown = getattr(arguments, option, None), f"--{option.replace('_', '-')}"
        where, separator, _ = (given or "").rpartition(":")
        if where.endswith(".py") and not Path(where).is_file():
            raise ValueError(f"{shown} {given}: no file {where}")
        if given is None or separator:
            continue
        if given.lower() not in known:
            raise ValueError(
                f"{shown} {given!r}: expected {', '.join(known)}, or FILE.py:FUNCTION, a function "
                f"of the {of}"
            )
        setattr(arguments, option, given.lower())
