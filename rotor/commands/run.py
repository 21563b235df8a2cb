"""``rotor run``: a training script as it is, with an answer to ``out of memory``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rotor.commands import add_options, add_output, examples
from rotor.commands.model import LIMIT, OFFLOAD, TOTAL, limit_of, offload_of, total_of


def add(commands: Any) -> None:
    """Add ``run`` to the commands of a parser."""
    sub = commands.add_parser(
        "run",
        help="a training script as it is, with an answer to `out of memory`",
        usage="%(prog)s [--watch] [--limit BYTES] [--total BYTES] [options] SCRIPT.py "
        "[arguments of the script]",
        description="Run a script as `python SCRIPT.py` does. Where it runs out of memory, or with "
        "--watch, say in words what its training step needs, what a limit costs, and which line "
        "to add. With --limit or --total, train within that limit: the module that is called "
        "outermost gets it, and nothing in the script changes. Options of rotor come before the "
        "script.",
        epilog=examples(
            "run train.py --epochs 3",
            "run --watch train.py --epochs 3",
            "run --limit 2GiB train.py --epochs 3",
            "run --total card train.py --epochs 3",
            "run --watch -m package.train",
        ),
    )
    sub.add_argument("script", metavar="SCRIPT.py", help="the script; with -m, a module")
    sub.add_argument(
        "rest", metavar="...", nargs=argparse.REMAINDER, help="arguments of the script"
    )
    sub.add_argument("-m", action="store_true", dest="is_module", help="run a module by its name")
    options = {
        "--watch": "meter the first training step, and say what a limit would cost; on a CPU, "
        "where nothing runs out of memory by itself, this is the way",
        "--limit BYTES": f"train within this limit, {LIMIT}",
        "--total BYTES": TOTAL,
        **{name: OFFLOAD[name] for name in ("--offload TIER", "--host-limit BYTES")},
        "--offload-state": "have parameters, gradients and the states of the script's optimizer "
        "there too, and count in the limit what of them is in memory",
    }
    add_options(sub, options)
    add_output(sub, help="write the advice, or what a limit led to, as JSON to a file")
    sub.set_defaults(command=_run, is_script=True)


def _run(arguments: argparse.Namespace) -> int:
    limit, total = limit_of(arguments), total_of(arguments)
    is_limited = limit is not None or total is not None
    if arguments.watch and is_limited:
        raise ValueError("--watch says what limits cost, and --limit keeps one: give one of them")
    if not arguments.is_module and not Path(arguments.script).is_file():
        raise ValueError(f"no file {arguments.script}: expected a script, before its arguments")
    if arguments.offload and not is_limited:
        raise ValueError("--offload is for a limit: give --limit or --total too, or leave it out")
    offload = offload_of(arguments)
    if arguments.offload_state:
        offload["offload_state"] = True
    if arguments.json not in (None, "-"):  # The script may change its folder.
        arguments.json = str(Path(arguments.json).absolute())
    from rotor.commands import script

    limits = {"mem_limit": limit, "total_limit": total, **offload} if is_limited else {}
    return script.run(arguments, limits)
