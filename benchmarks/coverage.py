"""Trains public model families in half of their activation memory, by the graph engine alone.

Each model of ``tests/coverage_models.py`` runs in a process of its own: plain steps, then the same
steps under a limit of the parameters' gradients and half of the rest of the plain peak. A row tells
what was captured, the limit, what was predicted and measured from the second step on, and whether
loss, gradients and buffers are bit-equal to the plain model's. See that file for what to install.

    python benchmarks/coverage.py [--only tv/,gpt2] [--captured] [--timeout 300] [--json rows.json]
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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

import coverage_models  # noqa: E402

CLOSE = 1e-5


@dataclass
class Row:
    """What one model gave; bytes are above the level at the beginning of a step."""

    name: str
    outcome: str = ""
    detail: str = ""
    operations: int = 0
    capture_s: float = 0.0
    plan_s: float = 0.0
    plain: int = 0
    gradients: int = 0
    limit: int = 0
    predicted: int = 0
    measured: int = 0
    slower: float = 0.0
    bound: int = 0
    equal: str = ""
    captured_loss: bool = False
    seconds: float = field(default=0.0)

    def good(self) -> bool:
        """Whether the limit was kept, without fallback, with the numbers of the plain model."""
        return self.outcome == "ok"


def _seed(step: int) -> None:
    torch.manual_seed(100 + step)


def _clear(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def _step(model: Any, sample: Any, captured: bool) -> torch.Tensor:
    if captured:
        loss = model(*sample.args, targets=sample.targets, **sample.kwargs)
    else:
        # Users keep the output while the backward runs.
        output = model(*sample.args, **sample.kwargs)
        loss = sample.loss_fn(output, *sample.targets)
    loss.backward()
    return loss.detach()


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {f"grad of {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    found |= {f"buffer {n}": b for n, b in model.named_buffers()}
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def _difference(expected: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> float:
    """Largest difference, of gradients relative to the largest of the model; infinite where a
    tensor is missing.
    """
    if expected.keys() != got.keys():
        return float("inf")
    worst = 0.0
    slopes = [t.abs().max().double() for n, t in expected.items() if n[:4] == "grad" and t.numel()]
    steepest = max(slopes, default=torch.zeros(()))
    for name, tensor in expected.items():
        if tensor.shape != got[name].shape:
            return float("inf")
        if torch.equal(tensor, got[name]) or tensor.numel() == 0:
            continue
        distance = (tensor.double() - got[name].double()).abs().max()
        scale = steepest if name.startswith("grad") else tensor.double().abs().max()
        ratio = float(distance / scale) if scale else float("inf")
        worst = max(worst, ratio if ratio == ratio else float("inf"))
    return worst


def judge(name: str, captured: bool, steps: int) -> Row:
    """Run one model here."""
    # Not at the top: the processes of all models come from one that has imported no rotor.
    import rotor
    from rotor import memory
    from rotor.graph import lower_bound

    row = Row(name)
    torch.set_num_threads(1)
    sample = coverage_models.build(name)
    captured = captured and bool(sample.targets)
    row.captured_loss = captured or not sample.targets
    plain = sample.model
    ours = copy.deepcopy(plain)
    start = copy.deepcopy(plain.state_dict())

    _seed(0)
    _step(plain, sample, captured=False)
    again = copy.deepcopy(plain)
    _clear(again)
    again.load_state_dict(start)
    _clear(plain)
    with memory.meter("cpu") as meter:
        _step(plain, sample, captured=False)
    row.plain = int(meter.peak_bytes)
    row.gradients = sum(p.grad.nbytes for p in plain.parameters() if p.grad is not None)
    row.limit = row.gradients + (row.plain - row.gradients) // 2
    plain = again

    options = {"loss_fn": sample.loss_fn} if captured else {}
    chk = rotor.Checkpointable(ours, mem_limit=row.limit, engine="graph", effort="fast", **options)
    peaks = []
    worst = 0.0
    results: list[dict[str, torch.Tensor]] = []
    for step in range(steps):
        _clear(plain)
        _clear(ours)
        _seed(step)
        expected = _step(plain, sample, captured=False)
        _seed(step)
        began = time.perf_counter()
        _step_of = _metered if chk.plan and chk.plan.measured_bytes else _unmetered
        got, peak = _step_of(chk, sample, captured)
        plan = chk.plan
        if step == 0:
            row.capture_s = time.perf_counter() - began
        else:
            peaks.append(peak if peak is not None else plan.measured_bytes)
        here = _difference(_state(plain) | {"loss": expected}, _state(ours) | {"loss": got})
        worst = max(worst, here)
        results.append(_state(ours) | {"loss": got})
    row.operations = len(plan.step.lowered.tasks)
    row.predicted = plan.predicted_bytes
    row.measured = max(peak for peak in peaks if peak is not None)
    row.slower = float(plan.program.slowdown)
    row.bound = int(lower_bound(plan.graph)) + plan.executor_bytes
    row.equal = "yes" if worst == 0 else f"{worst:.1e}"
    if worst and _equals_aot_eager(name, steps, results):
        row.equal = "=aot " + row.equal
    problems = []
    if worst > CLOSE:
        problems.append("wrong numbers")
    if row.measured > row.limit:
        problems.append("over the limit")
    row.outcome = ", ".join(problems) or "ok"
    return row


def _equals_aot_eager(name: str, steps: int, results: list[dict[str, torch.Tensor]]) -> bool:
    """Whether PyTorch's own capture, run as it is, gives the same bits in the first steps."""
    sample = coverage_models.build(name)
    torch._dynamo.reset()
    compiled = torch.compile(sample.model, backend="aot_eager", dynamic=False)
    for step in range(min(steps, 2)):
        _clear(sample.model)
        _seed(step)
        try:
            loss = _step(compiled, sample, captured=False)
        except Exception:
            return False
        if _difference(_state(sample.model) | {"loss": loss}, results[step]):
            return False
    return True


def _unmetered(model: Any, sample: Any, captured: bool) -> tuple[torch.Tensor, int | None]:
    return _step(model, sample, captured), None


def _metered(model: Any, sample: Any, captured: bool) -> tuple[torch.Tensor, int | None]:
    from rotor import memory

    if model.plan.outdated:
        return _unmetered(model, sample, captured)
    with memory.meter("cpu") as meter:
        loss = _step(model, sample, captured)
    return loss, int(meter.peak_bytes)


def _child(name: str, captured: bool, steps: int, pipe: Any) -> None:
    warnings.simplefilter("ignore")
    began = time.perf_counter()
    try:
        row = judge(name, captured, steps)
    except ImportError as error:
        row = Row(name, "absent", str(error))
    except BaseException as error:
        row = Row(name, type(error).__name__, f"{error}\n{traceback.format_exc()}")
    row.seconds = time.perf_counter() - began
    pipe.send(asdict(row))


def run(name: str, captured: bool, steps: int, timeout: float) -> Row:
    """Run one model in a fresh process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "coverage_preload"])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(name, captured, steps, theirs))
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


def line(row: Row) -> str:
    """One row of the table."""
    mb = 1e6
    first = row.detail.strip().splitlines()[0][:150] if row.detail.strip() else ""
    return (
        f"{row.name:<22}{row.operations:>6}{row.capture_s:>7.1f}{row.plain / mb:>9.2f}"
        f"{row.limit / mb:>9.2f}{row.predicted / mb:>9.2f}{row.measured / mb:>9.2f}"
        f"{row.slower:>7.3f} {'in' if row.captured_loss else 'out':>4}{row.equal:>14}  "
        f"{row.outcome} {first}"
    )


HEADER = (
    f"{'model':<22}{'ops':>6}{'s':>7}{'plain':>9}{'limit':>9}{'predict':>9}{'measured':>9}"
    f"{'slower':>7} {'loss':>4}{'equal':>14}  outcome (bytes in MB)"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="parts of names, by commas")
    parser.add_argument("--captured", action="store_true", help="the loss as loss_fn=")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--timeout", type=float, default=300)
    parser.add_argument("--json", type=Path, help="append the rows, with tracebacks, here")
    given = parser.parse_args()
    known = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parent / "tests"), str(HERE), known])
    parts = given.only.split(",")
    rows = []
    sys.stdout.write(HEADER + "\n")
    for name in coverage_models.MODELS:
        if not any(part in name for part in parts):
            continue
        row = run(name, given.captured, given.steps, given.timeout)
        rows.append(row)
        sys.stdout.write(line(row) + "\n")
        sys.stdout.flush()
        if given.json:
            with given.json.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")
    good = sum(row.good() for row in rows)
    sys.stdout.write(f"{good} of {len(rows)} within the limit, without fallback\n")


if __name__ == "__main__":
    main()
