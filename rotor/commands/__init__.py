"""Commands of the command line, one in each file, and the parts that all of them share."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

FORMAT = "rotor.command"
VERSION = 1

_EXAMPLES = "examples:"


class HelpFormatter(argparse.HelpFormatter):
    """Formatter that wraps descriptions, and leaves the lines of examples unchanged."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith(_EXAMPLES):
            return "".join(indent + line for line in text.splitlines(keepends=True))
        return super()._fill_text(text, width, indent)


def examples(*lines: str) -> str:
    """Return examples of a command line, for the end of its help."""
    return "\n".join([_EXAMPLES, *[f"  rotor {line}" for line in lines]])


def say(text: str = "") -> None:
    """Write a line to stdout."""
    sys.stdout.write(f"{text}\n")


_STYLES = {
    r"(?m)^-[- ]*$": "dim",
    r"(?m)^.*nothing fits.*$": "red",
    r"(?m)^.*the limit$": "green",
    r"(?m)^At your .*\.$": "bold",
}


def show(text: str) -> None:
    """Write results to stdout, in colour on a terminal where rich is installed."""
    if not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
        say(text)
        return
    from rich.console import Console
    from rich.text import Text

    styled = Text(text)
    for pattern, style in _STYLES.items():
        styled.highlight_regex(pattern, style)
    Console(highlight=False, soft_wrap=True).print(styled)


def write_stderr(text: str) -> None:
    """Write to stderr, unless a script has closed it."""
    with suppress(AttributeError, ValueError):
        sys.stderr.write(text)


def tell(arguments: argparse.Namespace, text: str, *, always: bool = False) -> None:
    """Write a line to stderr, on progress: unless ``--quiet`` is given; or always."""
    if always or not arguments.quiet:
        write_stderr(f"rotor: {text}\n")


def number(text: str) -> float:
    """Return a number of a command line."""
    try:
        return float(text)
    except ValueError:
        hint = " (LOG comes before the options)" if Path(text).exists() else ""
        raise argparse.ArgumentTypeError(f"invalid float value: {text!r}{hint}") from None


def columns(rows: list[list[str]]) -> str:
    """Return rows of text, left-aligned in columns."""
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


_TYPES = {"N": int, "B": int, "R": number, "X": float, "S": float}


def add_options(to: Any, options: dict[str, str], **defaults: Any) -> None:
    """Add options by their usage, and their help.

    A usage is ``--name VALUE``, ``--name VALUE ...`` for one or more values, or ``--name`` for a
    flag; without the dashes, it is of an argument. `_TYPES` has the values that are numbers.
    """
    for usage, text in options.items():
        name, _, value = usage.partition(" ")
        if not value:
            to.add_argument(name, action="store_true", help=text)
            continue
        metavar, _, more = value.partition(" ")
        details: dict[str, Any] = {"nargs": "+"} if more else {}
        if metavar in _TYPES:
            details["type"] = _TYPES[metavar]
        default = defaults.get(name.lstrip("-").replace("-", "_"))
        to.add_argument(name, metavar=metavar, help=text, default=default, **details)


def add_output(sub: argparse.ArgumentParser, **json_details: Any) -> None:
    """Add the options that every command has: ``--json``, ``--quiet``, ``--debug``."""
    group = sub.add_argument_group("output")
    details = json_details or {
        "nargs": "?",
        "const": "-",
        "help": "write the results as JSON, to stdout instead of the text where no file is given",
    }
    group.add_argument("--json", metavar="FILE", **details)
    quiet, debug = "write no progress to stderr", "show the traceback of an error"
    add_options(group, {"--quiet": quiet, "--debug": debug})


def add_pages(sub: argparse.ArgumentParser) -> None:
    """Add ``--html`` and ``--trace``."""
    options = {
        "--html FILE": "write a page, to a .html file",
        "--trace FILE": "write a trace, to a .json or .json.gz file, for ui.perfetto.dev or "
        "chrome://tracing",
    }
    add_options(sub, options)


def check_pages(arguments: argparse.Namespace) -> None:
    """Raise ValueError if the file of ``--html`` or ``--trace`` has another ending."""
    page, trace = arguments.html, arguments.trace
    if page is not None and not page.lower().endswith((".html", ".htm")):
        raise ValueError(f"--html {page!r}: expected a name that ends in .html")
    if trace is not None and not trace.lower().endswith((".json", ".json.gz")):
        raise ValueError(f"--trace {trace!r}: expected a name that ends in .json or .json.gz")


def check_folders(arguments: argparse.Namespace) -> None:
    """Raise ValueError if the folder of an output is missing, or the file may not be written.

    Files that the command reads may not, and none twice. It checks before anything runs: runs may
    take minutes.
    """
    files = ["json", "html", "plot", "save", "trace"]
    if getattr(arguments, "announce", False):  # elsewhere --out is a folder, which is made
        files.append("out")
    taken = dict.fromkeys(_files_read(arguments, files), "is read by this command")
    for name in files:
        path = getattr(arguments, name, None)
        if not isinstance(path, str) or path == "-":
            continue
        target = Path(path)
        if not target.absolute().parent.is_dir():
            raise ValueError(
                f"--{name} {path}: no folder {target.parent}: make it, or name another"
            )
        if target.is_dir():
            raise ValueError(f"--{name} {path} is a folder, expected the name of a file")
        if not os.access(target if target.exists() else target.absolute().parent, os.W_OK):
            raise ValueError(
                f"--{name} {path}: no permission to write it: name a file somewhere else"
            )
        place = os.path.realpath(target)
        if place in taken and (target.is_file() or not target.exists()):
            raise ValueError(f"--{name} {path} {taken[place]}: name another file")
        taken[place] = f"is the file of --{name} too"


def _files_read(arguments: argparse.Namespace, outputs: Sequence[str]) -> Iterator[str]:
    """Yield the files that arguments other than the outputs name: FILE, or FILE:NAME."""
    for name, value in vars(arguments).items():
        for text in value if isinstance(value, list) else [value]:
            if name not in outputs and isinstance(text, str):
                for path in {text, text.partition(":")[0]}:
                    if os.path.isfile(path):
                        yield os.path.realpath(path)


def write_json(data: Any, target: str) -> None:
    """Write JSON to a file, or to stdout if `target` is "-"."""
    text = json.dumps(data, allow_nan=False, indent=1)
    if target == "-":
        say(text)
    else:
        Path(target).write_text(text + "\n", encoding="utf-8")


def write_command_json(arguments: argparse.Namespace, data: dict[str, Any], target: str) -> None:
    """Write the results of a command as JSON: format, version and command, then its fields."""
    head = {"format": FORMAT, "version": VERSION, "command": arguments.command_name}
    write_json(head | data, target)


def give(arguments: argparse.Namespace, data: dict[str, Any], text: str) -> None:
    """Write results: JSON if asked for, and text unless stdout has the JSON."""
    if arguments.json is not None:
        write_command_json(arguments, data, arguments.json)
    if arguments.json != "-":
        show(text)
