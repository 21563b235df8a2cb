"""Commands of the command line that have a file of their own, and what all commands share."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

__all__ = ["columns", "number", "say"]


def say(text: str = "") -> None:
    """Write a line to stdout."""
    sys.stdout.write(f"{text}\n")


def number(text: str) -> float:
    """A number of a command line."""
    try:
        return float(text)
    except ValueError:
        hint = " (LOG stands before the options)" if Path(text).exists() else ""
        raise argparse.ArgumentTypeError(f"invalid float value: {text!r}{hint}") from None


def columns(rows: list[list[str]]) -> str:
    """Rows of text, left-aligned in columns."""
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
