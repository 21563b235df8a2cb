"""``rotor check``: a few models under limits on this machine's device, and what was held."""

from __future__ import annotations

import argparse
from typing import Any

from rotor.commands import add_output, columns, examples, give, tell
from rotor.fit.result import shown_bytes

_MODELS = ("chain", "graph", "reserved", "dynamic")


def add(commands: Any) -> None:
    """Add the command to the parser."""
    sub = commands.add_parser(
        "check",
        help="run a few models under limits here, and print what was held",
        description="Train a few small models on the device at hand, plain and under limits: does "
        "each step stay within its limit by the device's own counters, and are loss and gradients "
        "equal, bit for bit? It takes about a minute. The JSON file has everything that an issue "
        "needs. The exit code is 1 if a limit was not held, or a value differs.",
        epilog=examples("check", "check --device cpu --json check.json"),
    )
    sub.add_argument("--device", default=None, help="device (default: the accelerator, else cpu)")
    sub.add_argument(
        "--models",
        default=",".join(_MODELS),
        metavar="NAMES",
        help=f"some of {', '.join(_MODELS)}, separated by commas (default: all)",
    )
    sub.add_argument(
        "--size", type=int, default=4, help="scale of the models, 1 is the least (default: 4)"
    )
    sub.add_argument(
        "--share",
        type=float,
        default=0.7,
        help="limit, as a share of the plain step's peak (default: 0.7)",
    )
    add_output(sub)
    sub.set_defaults(command=_run, check=_check)


def _check(arguments: argparse.Namespace) -> None:
    for name in arguments.models.split(","):
        if name not in _MODELS:
            raise ValueError(f"--models {name!r}: expected some of {', '.join(_MODELS)}")
    if arguments.size < 1:
        raise ValueError(f"--size {arguments.size}: expected a whole number of 1 or more")
    if not 0.3 <= arguments.share <= 1:
        raise ValueError(f"--share {arguments.share}: expected a number from 0.3 to 1")


def _run(arguments: argparse.Namespace) -> int:
    from rotor.commands import checking, environment
    from rotor.commands.factories import device_of

    device = device_of(arguments.device)
    cases = []
    for name in arguments.models.split(","):
        tell(arguments, f"check: {name} on {device}")
        cases.append(checking.checked(name, device, arguments.size, arguments.share))
    is_held = all(case["held"] for case in cases)
    facts = environment.describe()
    data = {
        "device": str(device),
        "held": is_held,
        "cases": cases,
        "versions": facts["versions"],
        "devices": facts["devices"],
        "settings": checking.settings_of(device),
    }
    give(arguments, data, _text(cases, str(device), is_held))
    return 0 if is_held else 1


def _text(cases: list[dict[str, Any]], device: str, is_held: bool) -> str:
    rows = [["model", "counted", "plain", "limit", "predicted", "measured", "held", "equal"]]
    for case in cases:
        sizes = [case[f"{k}_bytes"] for k in ("plain", "limit", "predicted", "measured")]
        verdict = ["yes" if case[k] else "NO" for k in ("within", "equal")]
        if case["refused"]:
            verdict = [case["refused"], "-"]
        rows.append([case["name"], case["counts"], *map(shown_bytes, sizes), *verdict])
    end = "All limits were held" if is_held else "Not all limits were held"
    advice = "" if is_held else ": please attach the file of --json to an issue"
    return f"{columns(rows)}\n\n{end} on {device}{advice}."
