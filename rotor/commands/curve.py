"""``rotor curve``: step time against memory, before training."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rotor.algorithms.curve import Curve
from rotor.commands import add_output, examples, give, tell
from rotor.commands.model import Subject, add_model, add_profile, limit_of, wrapped
from rotor.report.text import table
from rotor.units import format_bytes, format_seconds

__all__ = ["add", "check_plot", "curve_text"]

_ROOM = 2
_POINTS = 16
_PLAIN = "plain PyTorch"


def add(commands: Any) -> None:
    """Add ``curve`` to the commands of a parser."""
    sub = commands.add_parser(
        "curve",
        help="step time against memory, before training",
        usage="%(prog)s FACTORY --input SHAPE [--limit BYTES] [--plot FILE] [options]",
        description="Measure a model and print the time of a step under every limit, from the "
        "least memory possible to no recomputation, with plain PyTorch's peak, a limit, and this "
        "machine's free memory.",
        epilog=examples(
            "curve resnet18 --input 32,3,224,224",
            "curve train.py:make_model --input 8,512 --dtype int64 --high 1000 --limit 2GiB",
            "curve train.py:make_model --input 32,128 --profile gpu.json",
            "curve gpt2 --input 2,256 --dtype int64 --high 50257 --plot curve.png --json",
        ),
    )
    add_model(sub)
    add_profile(sub)
    sub.add_argument("--limit", metavar="BYTES", help='mark a limit, such as 700MiB or "8 GB"')
    sub.add_argument(
        "--points",
        type=int,
        default=_POINTS,
        metavar="N",
        help="rows of the table at most; of a graph, limits that are planned (default: 16)",
    )
    sub.add_argument(
        "--plot", metavar="FILE", help="draw it, to .png, .pdf or .svg, with matplotlib"
    )
    sub.add_argument(
        "--no-plain", action="store_true", help="do not run a plain step to see its peak"
    )
    add_output(sub)
    sub.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    limit = limit_of(arguments.limit)
    if arguments.points < 2:
        raise ValueError(f"--points {arguments.points}: expected 2 or more")
    if arguments.plot is not None:
        check_plot(arguments.plot)
    from rotor.commands import factories
    from rotor.meter import allocator

    subject = Subject(arguments)
    subject.check()
    model = wrapped(subject, arguments, effort="fast")
    found: Curve = model.curve(arguments.points)
    plain, where = None, "this machine"
    if subject.profile is not None:
        free, where = subject.profile.free_bytes, "that machine"
        plain = factories.planned_peak(model)
    else:
        free = allocator.free_bytes(subject.device)
        if not arguments.no_plain:
            if int(found.bytes[-1]) * _ROOM <= free:
                plain = factories.plain_peak(subject.model, subject.sample, one=subject.is_one)
            else:
                tell(arguments, "plain PyTorch was not run: it might need more than is free")
    marks = [(_PLAIN, plain), ("the limit", limit), (f"free on {where}", free)]
    found.marks = tuple([(name, size) for name, size in marks if size is not None])
    if arguments.plot is not None:
        axes = found.plot()
        axes.set_title(subject.name)
        axes.figure.savefig(arguments.plot)
        tell(arguments, f"{arguments.plot} has the picture")
    data = subject.described() | {
        "curve": found.to_dict(),
        "minimum_bytes": found.minimum_bytes,
        "plain_bytes": plain,
        "limit_bytes": limit,
        "limit_seconds": _at(found, limit),
        "free_bytes": free,
    }
    give(arguments, data, subject.heading() + curve_text(found, arguments.points))
    return 0


def _at(curve: Curve, limit: int | None) -> float | None:
    return None if limit is None or limit < curve.minimum_bytes else curve.at(limit)


def curve_text(curve: Curve, points: int) -> str:
    """Return a table of a curve, at most so many of its points, with its marks among them."""
    count = len(curve.bytes)
    most = min(points, count)
    chosen = sorted({round(k * (count - 1) / max(most - 1, 1)) for k in range(most)})
    fastest = float(curve.seconds[-1])
    lines = [(int(curve.bytes[k]), float(curve.seconds[k]), "") for k in chosen]
    lines += [(size, _at(curve, size) or 0.0, name) for name, size in curve.marks]
    rows = [["memory of a step", "time", "recomputation", ""]]
    for size, seconds, name in sorted(lines):
        # A plain step's peak is a fact; plans set more aside, for a loss that they cannot see.
        is_short = size < curve.minimum_bytes
        least = "nothing fits" if is_short and name != _PLAIN else ""
        slower = f"{seconds / fastest - 1:+.1%}" if fastest and not is_short else "-"
        time = "-" if is_short else format_seconds(seconds)
        rows.append(
            [format_bytes(size), time, slower, ", ".join(part for part in (name, least) if part)]
        )
    return table(rows)


def check_plot(path: str) -> None:
    """Raise if a plot cannot be written to a path: its suffix, or a missing matplotlib."""
    if Path(path).suffix.lower() not in (".png", ".pdf", ".svg"):
        raise ValueError(f"--plot {path!r}: expected a name that ends in .png, .pdf or .svg")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "--plot needs matplotlib: `pip install matplotlib`, or in a clone of rotor "
            '`pip install ".[plot]"`'
        ) from error
