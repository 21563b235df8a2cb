"""Trains 64 public architectures in half of their activation memory; counts the held ones.

The first 64 models of ``tests/coverage_models.py`` of torchvision and transformers, with random
weights, in batches four times as large as there, so that activations decide, not parameters. Each
runs in a process of its own: plain steps, then the same steps by the graph engine under a limit of
the parameters' gradients and half of the rest of the plain peak. A model is *held* if every step
after the first stays within the limit, with the plain gradients; *refused* models are proven
infeasible if the lower bound of any plan is above the limit.

    python benchmarks/half_memory.py [--only hf/] [--steps 3] [--json rows.json]
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tests"), str(HERE)]

import coverage  # noqa: E402
import coverage_models  # noqa: E402

COUNT = 64
REPEATS = 4


@dataclass
class Row:
    """Result of one model; bytes are above the level at the beginning of a step."""

    name: str
    outcome: str = ""
    detail: str = ""
    limit: int = 0
    bound: int = 0
    found: int = 0
    measured: int = 0
    slower: float = 0.0
    different: float = 0.0
    seconds: float = 0.0


def _repeated(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    return value.repeat(REPEATS, *[1] * (value.dim() - 1))


def _sample(name: str) -> coverage_models.Sample:
    sample = coverage_models.build(name)
    sample.args = tuple(map(_repeated, sample.args))
    sample.kwargs = {key: _repeated(value) for key, value in sample.kwargs.items()}
    sample.targets = tuple(map(_repeated, sample.targets))
    return sample


def _step(model: Any, sample: coverage_models.Sample, seed: int) -> torch.Tensor:
    model.zero_grad()
    torch.manual_seed(100 + seed)
    # Users keep the output while the backward runs.
    output = model(*sample.args, **sample.kwargs)
    loss = sample.loss_fn(output, *sample.targets)
    loss.backward()
    return loss.detach()


def judge(name: str, steps: int) -> Row:
    """Run one model here."""
    import rotor
    from rotor import memory

    torch.set_num_threads(1)
    row = Row(name)
    sample = _sample(name)
    plain, ours = copy.deepcopy(sample.model), copy.deepcopy(sample.model)
    _step(plain, sample, 0)
    plain.zero_grad()
    with memory.meter("cpu") as meter:
        _step(plain, sample, 0)
    gradients = sum(p.grad.nbytes for p in plain.parameters() if p.grad is not None)
    row.limit = gradients + (int(meter.peak_bytes) - gradients) // 2
    del plain
    plain = sample.model
    chk = rotor.Checkpointable(ours, mem_limit=row.limit, engine="graph", effort="fast")
    try:
        for seed in range(steps):
            expected, loss = _step(plain, sample, seed), _step(chk, sample, seed)
            found = coverage._difference(
                coverage._state(plain) | {"loss": expected}, coverage._state(ours) | {"loss": loss}
            )
            row.different = max(row.different, found)
            if seed:
                row.measured = max(row.measured, chk.plan.measured_bytes)
    except rotor.InfeasibleError as error:
        row.outcome = "proven" if error.lower_bound_bytes > row.limit else "refused"
        row.bound, row.found = error.lower_bound_bytes, error.minimum_bytes
        return row
    row.bound = row.found = chk.plan.lower_bound_bytes
    row.slower = float(chk.plan.program.slowdown)
    row.outcome = "held"
    if row.measured > row.limit:
        row.outcome = "over"
    elif row.different > coverage.CLOSE:
        row.outcome = "differs"
    return row


def _child(name: str, steps: int, pipe: Any) -> None:
    warnings.simplefilter("ignore")
    began = time.perf_counter()
    try:
        row = judge(name, steps)
    except BaseException as error:
        row = Row(name, type(error).__name__, f"{error}\n{traceback.format_exc()}")
    row.seconds = time.perf_counter() - began
    pipe.send(asdict(row))


def run(name: str, steps: int, timeout: float) -> Row:
    """Run one model in a fresh process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "coverage_preload"])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(name, steps, theirs))
    process.start()
    theirs.close()
    row = Row(name, "timeout", f"{timeout:.0f} s")
    if ours.poll(timeout):
        try:
            row = Row(**ours.recv())
        except EOFError:
            row = Row(name, "died", "the process ended without a result")
    process.join(1)
    if process.is_alive():
        process.kill()
        process.join()
    return row


HEADER = (
    f"{'model':<20}{'limit':>9}{'bound':>9}{'found':>9}{'measured':>9}{'slower':>8}{'differs':>9}"
    "  outcome (bytes in MB)"
)


def line(row: Row) -> str:
    """Return a row of the table."""
    sizes = (row.limit, row.bound, row.found, row.measured)
    first = (row.detail.strip().splitlines() or [""])[0][:100]
    return (
        f"{row.name:<20}"
        + "".join(f"{size / 1e6:>9.3f}" for size in sizes)
        + f"{row.slower:>8.3f}{row.different:>9.1e}  {row.outcome} {first}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="parts of names, by commas")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=400)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    known = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parent / "tests"), str(HERE), known])
    names = [name for name in coverage_models.MODELS if not name.startswith("timm/")][:COUNT]
    names = [name for name in names if any(part in name for part in given.only.split(","))]
    rows = []
    sys.stdout.write(HEADER + "\n")
    for name in names:
        rows.append(run(name, given.steps, given.timeout))
        sys.stdout.write(line(rows[-1]) + "\n")
        sys.stdout.flush()
    held = sum(row.outcome == "held" for row in rows)
    proven = sum(row.outcome == "proven" for row in rows)
    sys.stdout.write(f"{held} of {len(rows)} held, {proven} proven infeasible\n")
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
