"""Is the curve honest? Eight points of it, run: memory within 1 %, time within 5 % of what it says.

For each model of ``graph_truth.py``: ``chk.curve()``, eight of its points from the least memory to
no recomputation, a plan for each point's bytes, its first step metered, and the steps of all of
them timed in turn. Times are ratios to the last point, which recomputes nothing.
"""

from __future__ import annotations

import argparse
import copy
import warnings

import numpy as np
import torch
from common import (
    Contender,
    cross_entropy,
    interleaved_times,
    keep_freed_memory,
    open_device,
    step_peak_bytes,
)
from graph_truth import Case, cases, planned

import rotor
from rotor.report.text import table


def run(case: Case, points: int, rounds: int) -> tuple[float, float]:
    """The largest relative errors of bytes and seconds at one model's points; prints them."""
    torch.manual_seed(0)
    start = case.start()
    chk = rotor.Checkpointable(copy.deepcopy(start), engine="graph", loss_fn=cross_entropy)
    chk.measure(case.batch[0], targets=(case.batch[1],))
    curve = chk.curve()
    monotone = bool(np.all(np.diff(curve.bytes) > 0) and np.all(np.diff(curve.seconds) < 0))
    chosen = np.unique(np.linspace(0, len(curve.bytes) - 1, points).round().astype(int))
    models, peaks = [], []
    for at in chosen:
        model = planned(start, case.batch, int(curve.bytes[at]), "default")
        peaks.append(step_peak_bytes(model, case.batch, captured=True))
        models.append(Contender(str(at), model, True))
    times = interleaved_times(models, case.batch, rounds)
    lines = [
        ["limit MB", "predicted MB", "measured MB", "time, curve", "time, plan", "time, measured"]
    ]
    memory_errors, time_errors = [], []
    for at, contender, peak, seconds in zip(chosen, models, peaks, times, strict=True):
        model = contender.model
        assert isinstance(model, rotor.Checkpointable)
        predicted = model.get_expected_memory()
        slower = seconds / times[-1]
        expected = model.program.makespan / models[-1].model.program.makespan  # type: ignore[union-attr]
        memory_errors.append(abs(peak - predicted) / predicted)
        time_errors.append(abs(slower / expected - 1))
        lines.append(
            [
                f"{curve.bytes[at] / 1e6:.2f}",
                f"{predicted / 1e6:.2f}",
                f"{peak / 1e6:.2f}",
                f"{curve.seconds[at] / curve.seconds[-1]:.3f}",
                f"{expected:.3f}",
                f"{slower:.3f}",
            ]
        )
    shape = "strictly monotone" if monotone else "NOT MONOTONE"
    print(f"\n{case.name}: {len(curve.bytes)} points, {shape}; {len(chosen)} run")
    print(table(lines))
    print(
        f"largest errors: memory {max(memory_errors):.2%}, time {max(time_errors):.1%}", flush=True
    )
    if not monotone:
        raise SystemExit("the curve is not monotone")
    return max(memory_errors), max(time_errors)


def main() -> None:
    """All models, or those named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="parts of names; all by default")
    parser.add_argument("--points", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--shrink", type=int, default=1, help="divide the batches by this")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    device = open_device(arguments.device)
    keep_freed_memory()
    words = [word.lower() for word in arguments.models]
    chosen = [
        case
        for case in cases(device, arguments.shrink)
        if not words or any(word in case.name.lower() for word in words)
    ]
    if max(run(case, arguments.points, arguments.rounds)[0] for case in chosen) > 0.01:
        raise SystemExit("a measured peak was more than 1 % off: see above")


if __name__ == "__main__":
    main()
