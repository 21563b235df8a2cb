"""Does the measured peak respect the limit, is it the predicted one, are the numbers equal?

For each model: limits from 90 % of the plain peak down to the least feasible, with the loss outside
(the second planned step is judged) and captured (the first one is). Prints one row for each limit.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from dataclasses import dataclass

import torch
from cases import Case, chosen
from common import (
    Batch,
    cross_entropy,
    equal_gradients,
    equal_states,
    open_device,
    step_peak_bytes,
    train_step,
)
from torch import nn

import rotor
from rotor import memory
from rotor.report.text import table

FRACTIONS = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3]


@dataclass
class Row:
    """What one limit gave."""

    fraction: float
    limit: int
    predicted: int
    measured: int
    equal: bool
    slower: float

    def kept(self) -> bool:
        """Whether everything is as promised."""
        close = abs(self.predicted - self.measured) <= 0.01 * self.measured
        return self.measured <= self.limit and close and self.equal


def metered_step(model: nn.Module, batch: Batch, captured: bool) -> int:
    """Peak of one step, by a meter of our own."""
    for parameter in model.parameters():
        parameter.grad = None
    x, target = batch
    with memory.meter(x.device) as meter, warnings.catch_warnings():
        warnings.simplefilter("ignore", rotor.MemoryLimitWarning)
        if captured:
            model(x, targets=(target,)).backward()
        else:
            output = model(x)
            cross_entropy(output, target).backward()
    return int(meter.peak_bytes)


def judge(
    start: nn.Module, measured: rotor.Checkpointable, batch: Batch, limit: int, plain: int
) -> Row:
    """Train one limit beside the plain model."""
    captured = measured.loss_fn is not None
    chk = copy.deepcopy(measured)
    chk.load_state_dict(start.state_dict())
    chk.compute_sequence(limit)
    twin = copy.deepcopy(start)
    equal = True
    if not captured:
        torch.manual_seed(1)
        expected = train_step(twin, batch)
        torch.manual_seed(1)
        equal &= bool(torch.equal(expected, train_step(chk, batch)))
    torch.manual_seed(2)
    peak = metered_step(chk, batch, captured)
    torch.manual_seed(2)
    train_step(twin, batch)
    equal &= equal_gradients(twin, chk) and equal_states(twin, chk)
    ideal = chk.build_chain().ideal_time
    return Row(
        limit / plain,
        limit,
        chk.get_expected_memory(),
        peak,
        equal,
        chk.plan.sequence.makespan / ideal,
    )


def run(case: Case, device: torch.device, captured: bool, fractions: list[float]) -> bool:
    """Judge one model at every limit; prints a table."""
    torch.manual_seed(0)
    batch = case.batch(device)
    start = case.make().to(device)
    plain = step_peak_bytes(copy.deepcopy(start), batch)
    chk = rotor.Checkpointable(copy.deepcopy(start), loss_fn=cross_entropy if captured else None)
    chk.measure(batch[0], targets=(batch[1],) if captured else ())
    try:
        chk.compute_sequence(1)
    except rotor.InfeasibleError as error:
        least = error.minimum_bytes
    limits = [int(f * plain) for f in fractions if f * plain > least]
    rows = [judge(start, chk, batch, limit, plain) for limit in [*limits, least]]
    loss = "captured, first step" if captured else "outside, second step"
    print(f"\n{case.name}: plain peak {plain / 1e6:.2f} MB; loss {loss}")
    head = ["limit / plain", "limit MB", "predicted MB", "measured MB", "predicted / measured"]
    lines = [[*head, "time / plain, predicted", "bit-equal", "kept"]]
    for row in rows:
        lines.append(
            [
                f"{row.fraction:.3f}",
                f"{row.limit / 1e6:.2f}",
                f"{row.predicted / 1e6:.2f}",
                f"{row.measured / 1e6:.2f}",
                f"{row.predicted / row.measured:.4f}",
                f"{row.slower:.3f}",
                "yes" if row.equal else "NO",
                "yes" if row.kept() else "NO",
            ]
        )
    print(table(lines), flush=True)
    return all(row.kept() for row in rows)


def main() -> None:
    """All models, or those named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="parts of names; all by default")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--fractions", type=float, nargs="+", default=FRACTIONS)
    arguments = parser.parse_args()
    device = open_device(arguments.device)
    results = [
        run(case, device, captured, arguments.fractions)
        for case in chosen(device, arguments.models)
        for captured in (False, True)
    ]
    if not all(results):
        raise SystemExit("a limit was not kept, a prediction was off, or numbers differ: see above")


if __name__ == "__main__":
    main()
