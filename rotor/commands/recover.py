"""``rotor recover``: parameters and states of a run that was killed."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from rotor.chain import new_file
from rotor.commands import add_options, add_output, columns, examples, give
from rotor.units import format_bytes


def add(commands: Any) -> None:
    """Add ``recover`` to the commands of a parser."""
    sub = commands.add_parser(
        "recover",
        help="parameters and states of a run that was killed",
        usage="%(prog)s FOLDER [--out FILE] [options]",
        description="Read the last finished step of a training whose parameters and optimizer "
        'states were on a disk (offload="disk:FOLDER", offload_state=) and whose process was '
        "killed. Every byte is compared with its checksum; the folder is left as it is.",
        epilog=examples(
            "recover /scratch/run",
            "recover /scratch/run --out step.pt",
            "recover /scratch/run --out model.safetensors",
        ),
    )
    out = "write a file for torch.load, or the parameters alone to a FILE.safetensors"
    add_options(sub, {"folder FOLDER": "folder of the run", "--out FILE": out})
    add_output(sub)
    sub.set_defaults(command=_run, announce=True)


def _run(arguments: argparse.Namespace) -> int:
    import torch

    from rotor.tier import recover, save_weights
    from rotor.tier.recovery import RECORDS, VALUES

    own = [os.path.realpath(Path(arguments.folder, name)) for name in (VALUES, *RECORDS)]
    for option in ("out", "json"):
        path = getattr(arguments, option)
        if path is not None and os.path.realpath(path) in own:
            raise ValueError(f"--{option} {path} is a file of the run itself: name another one")
    out = None if arguments.out is None else Path(arguments.out)
    is_file = out is not None and (out.is_file() or not out.exists())
    room = Path(os.path.realpath(out)).parent if out is not None and is_file else None
    state = recover(arguments.folder, room)
    model, states = state["model"], state["optimizer"].get("state", {})
    if out is not None and out.suffix == ".safetensors":
        save_weights(model.items(), out)
    elif out is not None:
        with new_file(out) as file:
            torch.save(state, file)
    sizes = {
        "model_bytes": _bytes_of(model),
        "optimizer_bytes": sum(map(_bytes_of, states.values())),
    }
    rows = [
        ["steps finished", str(state["step"])],
        ["model", f"{len(model)} tensors, {format_bytes(sizes['model_bytes'])}"],
        ["optimizer", f"{len(states)} states, {format_bytes(sizes['optimizer_bytes'])}"],
    ]
    others = [name for name in state if name not in ("step", "model", "optimizer")]
    rows.append(["beside them", ", ".join(others)])
    if out is not None:
        rows.append(["written to", str(out)])
    found = {"folder": arguments.folder, "steps": state["step"], **sizes, "others": others}
    found["out"] = arguments.out
    give(arguments, found, columns(rows))
    return 0


def _bytes_of(tensors: Any) -> int:
    found = {id(t): t.nbytes for t in tensors.values() if hasattr(t, "nbytes")}
    return sum(found.values())
