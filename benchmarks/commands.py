"""Are the figures of the commands true? Five models, every command, and the steps that they are of.

For a ResNet, a GPT-2, a U-Net, an LSTM and a model with branches: ``rotor measure``, ``curve``,
``plan``, ``fit`` and ``report`` run as on the command line, and training steps run within the same
limit, with the sum of the outputs for a loss. Fails if a figure is more than 5 % off in bytes, if a
step needs more than its limit, or if a command does not end within its time.

    OMP_NUM_THREADS=1 python benchmarks/commands.py [MODEL ...]
"""

from __future__ import annotations

import argparse
import io
import json
import tempfile
import time
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import command_models
import torch
from common import keep_freed_memory

import rotor
from rotor.commands.main import main as rotor_main
from rotor.fit.batches import sum_of
from rotor.report.text import table
from rotor.units import format_bytes

MODELS = ("resnet", "gpt2", "unet", "lstm", "branches")
FILE = Path(command_models.__file__)
SHARE = 0.7
OFF = 0.05
SECONDS = 120
STEPS = 8
TARGETS = (torch.zeros(()),)
BATCHES = ("--multiple-of", 2, "--max-batch", 512)


def command(*words: object) -> tuple[dict[str, Any], float]:
    """Run a command line; return its JSON, and the seconds that it took."""
    out, err = io.StringIO(), io.StringIO()
    begun = time.perf_counter()
    with redirect_stdout(out), redirect_stderr(err), warnings.catch_warnings():
        code = rotor_main([*map(str, words), "--json", "--quiet"])
    seconds = time.perf_counter() - begun
    if code:
        raise SystemExit(f"rotor {' '.join(map(str, words))} ended with {code}: {err.getvalue()}")
    found: dict[str, Any] = json.loads(out.getvalue())
    return found, seconds


def steps_peak(name: str, limit: int | None, batch: int | None = None) -> int:
    """Return the peak of a training step, plain or within a limit, once its plan is settled."""
    torch.manual_seed(0)
    model, sample = getattr(command_models, name)()
    if batch is not None:
        sample = sample[:1].expand(batch, *sample.shape[1:]).clone()
    if limit is not None:
        model = rotor.Checkpointable(
            model, mem_limit=limit, loss_fn=_sum, planning="before", verbosity=-1
        )

    def step() -> None:
        loss = sum_of(model(sample)) if limit is None else model(sample, targets=TARGETS)
        loss.backward()

    for _ in range(STEPS):
        step()
        model.zero_grad(set_to_none=True)
    with rotor.memory.meter("cpu") as meter:
        step()
    return int(meter.peak_bytes)


def _sum(output: Any, _: torch.Tensor) -> torch.Tensor:
    return sum_of(output)


def check(name: str, folder: Path) -> tuple[list[list[str]], list[str]]:
    """Return the rows of a model, and its faults."""
    factory, rows, faults = (f"{FILE}:{name}", "--loss", "sum"), [], []

    def row(what: str, seconds: float, said: int | None, found: int | None, limit: int | None):
        shown = [format_bytes(size) if size is not None else "" for size in (said, found, limit)]
        rows.append([f"{name}: {what}", *shown, f"{seconds:.1f} s"])
        if said is not None and found is not None and abs(said - found) > OFF * found:
            faults.append(f"{name}: {what} said {said} bytes, and the step needs {found}")
        if limit is not None and found is not None and found > limit:
            faults.append(f"{name}: {what}: the step needs {found} bytes, above {limit}")
        if seconds > SECONDS:
            faults.append(f"{name}: {what} took {seconds:.0f} s")

    plain = steps_peak(name, None)
    _, seconds = command("measure", *factory)
    row("measure", seconds, None, None, None)
    limit = int(plain * SHARE)
    curve, seconds = command("curve", *factory, "--limit", limit, "--points", 6)
    row("curve, plain", seconds, curve["plain_bytes"], plain, None)
    limit = max(limit, int(curve["minimum_bytes"] * 1.05))
    saved = folder / f"{name}.json"
    planned, seconds = command("plan", *factory, "--limit", limit)
    saved.write_text(json.dumps(planned), encoding="utf-8")
    measured = steps_peak(name, limit)
    predicted = planned["plan"]["predicted_bytes"]
    row("plan", seconds, predicted, measured, limit)
    if planned["schedule"] is not None:
        _, seconds = command("report", saved)
        row("report", seconds, None, None, None)
    fitted, seconds = command("fit", *factory, "--limit", limit, "--points", 2, *BATCHES)
    batch = fitted["largest"]["batch"]
    row(f"fit, batch {batch}", seconds, None, steps_peak(name, limit, batch), limit)
    return rows, faults


def main() -> None:
    """All models, or those named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)}; all by default")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    keep_freed_memory()
    rows = [["command", "said", "the step", "limit", "took"]]
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.models or MODELS:
            found, wrong = check(name, Path(folder))
            rows += found
            faults += wrong
    print(table(rows))
    if faults:
        raise SystemExit("\n".join(faults))


if __name__ == "__main__":
    main()
