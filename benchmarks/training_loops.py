"""What a limit changes in the training loops that people have: a table of tests/loops.py.

Run as ``python benchmarks/training_loops.py [--steps 80] [--markdown] [word ...]``. Each loop
trains twice from the same seed, plainly and within a share of the plain run's peak. "lines" are
those that name rotor; losses are compared bit for bit, under autocast within 5e-3; "planned" is
the predicted time of recomputation, "first" the time of the first step, and "full speed" the first
step from which on no three of five steps take more than half as long again as the last ones do,
in CPU time of one thread.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import os
import statistics
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import framework_loops
import loops

from rotor.report.text import table as plain_table
from rotor.units import format_bytes, format_seconds

HEADER = ("loop", "lines", "losses", "plain", "limit", "peak", "planned", "first", "full speed")
_SLOW = 1.5


def full_speed(seconds: list[float]) -> int:
    """Return the number of steps before the time of a step stays near the last ones' median."""
    usual = statistics.median(seconds[-max(len(seconds) // 3, 1) :])
    middle = [statistics.median(seconds[k : k + 5]) for k in range(len(seconds) - 5)]
    slow = [k for k, one in enumerate(middle) if one > _SLOW * usual]
    return slow[-1] + 3 if slow else sum(one > _SLOW * usual for one in seconds[:3])


def compared(one: loops.Case, plain: loops.Loop, ours: loops.Loop) -> str:
    """Return how the losses of two runs compare."""
    pairs = list(zip(plain.losses, ours.losses, strict=True))
    if all(a == b for a, b in pairs):
        return "equal"
    worst = max(abs(a - b) / abs(a) for a, b in pairs)
    return f"within {worst:.0e}" if worst <= one.tolerance else f"DIFFERENT: {worst:.0e}"


def row(one: loops.Case, steps: int) -> tuple[str, ...]:
    """Return a line of the table."""
    plain = one.run(steps=steps)
    limit = int(one.share * max(plain.peaks))
    ours = one.run(limit, options={"verbosity": -1}, steps=steps)
    peaks = [plan.measured_bytes for plan in ours.plans if plan.measured_bytes is not None]
    shares = [getattr(plan, "recomputation", None) for plan in ours.plans]
    planned = [share for share in shares if share is not None]
    return (
        one.name,
        str(one.lines),
        compared(one, plain, ours),
        format_bytes(max(plain.peaks)),
        format_bytes(limit),
        format_bytes(max(peaks + ours.peaks)),
        f"{max(planned):+.1%}" if planned else "as it runs",
        format_seconds(ours.seconds[0]),
        f"step {full_speed(ours.seconds) + 1}",
    )


def table(rows: list[tuple[str, ...]], *, markdown: bool) -> str:
    """Return rows as a table."""
    if not markdown:
        return plain_table([HEADER, *rows])
    lines = ["| " + " | ".join(cells) + " |" for cells in (HEADER, *rows)]
    return "\n".join([lines[0], "|---" * len(HEADER) + "|", *lines[1:]])


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="only loops with one of these in their names")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--markdown", action="store_true")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    os.environ.setdefault("ROTOR_CACHE_DIR", tempfile.mkdtemp())
    warnings.simplefilter("ignore")
    assert framework_loops.hugging_face is not None
    rows: list[Any] = []
    for one in loops.CASES:
        is_wanted = not given.words or any(w.lower() in one.name.lower() for w in given.words)
        if is_wanted and all(importlib.util.find_spec(name) for name in one.needs):
            # Trainers print each loss.
            with contextlib.redirect_stdout(io.StringIO()):
                rows.append(row(one, given.steps))
            print("  ".join(rows[-1]), file=sys.stderr, flush=True)
    print(table(rows, markdown=given.markdown))


if __name__ == "__main__":
    main()
