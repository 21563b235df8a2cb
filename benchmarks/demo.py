"""Train a ResNet-18 under a byte limit that plain PyTorch needs more than, and show the figures.

Run by ``make demo``; it ends with the curve, the path of a page, and one sentence.
Memory is what PyTorch's allocator had allocated above the level at which
the forward began; times are medians of steps run in turn.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import torch
from common import (
    Contender,
    best_segments,
    classification_batch,
    equal_gradients,
    equal_states,
    interleaved_times,
    open_device,
    step_peak_bytes,
    train_step,
)
from torch import nn

import rotor
from rotor.algorithms.curve import Curve
from rotor.common.progress import progress
from rotor.report.curves import Point
from rotor.report.text import table
from rotor.units import format_bytes, format_seconds

PAGE = Path(__file__).resolve().parents[1] / "build" / "demo.html"


def parse_arguments() -> argparse.Namespace:
    """Options; the defaults fit a minute or two on two cores."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=32 if cuda else 4)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--steps", type=int, default=30 if cuda else 4)
    parser.add_argument(
        "--fraction", type=float, default=0.75 if cuda else 0.6, help="limit over plain peak"
    )
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    return parser.parse_args()


def main() -> None:
    """Compare rotor, plain PyTorch and checkpoint_sequential on one model."""
    arguments = parse_arguments()
    device = open_device(arguments.device)
    torch.set_num_threads(1)  # steady times beside other work
    torch.manual_seed(0)
    batch = classification_batch(arguments.batch, arguments.size, device)
    model = rotor.resnet.resnet18(num_classes=1000).to(device)
    plain = copy.deepcopy(model)
    twin = copy.deepcopy(model)

    # Both run two steps here, so that the statistics of their BatchNorms stay alike.
    plain_peak = step_peak_bytes(plain, batch)
    limit = int(plain_peak * arguments.fraction)
    print(f"ResNet-18, batch {arguments.batch} x 3 x {arguments.size} x {arguments.size}, {device}")
    print(
        f"plain PyTorch needs {format_bytes(plain_peak)} a step; the limit is "
        f"{format_bytes(limit)}\n"
    )

    loss_fn = nn.functional.cross_entropy
    limited = rotor.Checkpointable(
        twin, mem_limit=limit, engine="graph", loss_fn=loss_fn, effort="fast", planning="before"
    )
    rotor_peak = step_peak_bytes(limited, batch, captured=True)

    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in (plain, limited)]
    identical = True
    with progress(arguments.steps, "training both") as update:
        for step in range(arguments.steps):
            losses = [
                train_step(plain, batch),
                train_step(limited, batch, captured=True),
            ]
            identical &= torch.equal(*losses) and equal_gradients(plain, limited)
            for optimizer in optimizers:
                optimizer.step()
            update(step + 1)
    identical &= equal_states(plain, limited)
    print(
        f"loss {losses[0].item():.6f} plain, {losses[1].item():.6f} rotor after "
        f"{arguments.steps} steps"
    )
    print(f"outputs, gradients, parameters and buffers bit-equal: {'yes' if identical else 'NO'}\n")

    stages = rotor.Checkpointable(copy.deepcopy(plain), engine="chain", verbosity=-1)
    stages.measure(batch[0])
    segmented = best_segments(stages, batch, limit)
    contenders = [
        Contender("rotor", limited, captured=True),
        Contender("plain PyTorch", plain),
        Contender(f"checkpoint_sequential({segmented.segments})", segmented.module),
    ]
    times = interleaved_times(contenders, batch, rounds=5)
    rows = [["", "limit", "peak predicted", "peak measured", "step predicted", "step measured"]]
    rows.append(
        [
            "rotor",
            format_bytes(limit),
            format_bytes(limited.get_expected_memory()),
            format_bytes(rotor_peak),
            format_seconds(limited.get_expected_makespan()),
            format_seconds(times[0]),
        ]
    )
    rows.append(
        ["plain PyTorch", "-", "-", format_bytes(plain_peak), "-", format_seconds(times[1])]
    )
    rows.append(
        [
            contenders[2].name,
            "-",
            "-",
            format_bytes(segmented.peak_bytes),
            "-",
            format_seconds(times[2]),
        ]
    )
    print(table(rows))
    finish(limited, plain_peak, limit, times[0] / times[1])
    if not identical or rotor_peak > limit:
        raise SystemExit("the demo failed: see above")


def finish(limited: rotor.Checkpointable, plain_peak: int, limit: int, slower: float) -> None:
    """Print the curve as a picture, the path of the plan's page, and what was gained."""
    curve = limited.curve(12)
    unit = Point("plain PyTorch", plain_peak, float(curve.seconds[-1]))
    PAGE.parent.mkdir(exist_ok=True)
    limited.report(PAGE)
    print(f"\n{sketch(curve, plain=unit, limit_bytes=limit)}\n")
    print(f"the plan as a page: {PAGE}")
    needs = f"Within {format_bytes(limit)}, where plain PyTorch needs {format_bytes(plain_peak)}"
    print(f"{needs}, a step takes {slower:.2f} times as long and gives the same bits.")


def sketch(
    curve: Curve, *, plain: Point, limit_bytes: int | None = None, width: int = 60, height: int = 10
) -> str:
    """Return a curve drawn with characters: memory and time in percent of a plain step.

    Parameters
    ----------
    curve, plain, limit_bytes
        As for `rotor.report.curves.write_curve`.
    width, height
        Characters and lines of the drawing, without its axes.
    """
    slowest = max(float(curve.seconds[0]) / plain.seconds * 100, 101.0)
    fastest = min(float(curve.seconds[-1]) / plain.seconds * 100, 100.0)
    rows = [[" "] * (width + 1) for _ in range(height)]

    def row_of(seconds: float) -> int:
        share = (slowest - seconds / plain.seconds * 100) / (slowest - fastest)
        return round(min(max(share, 0.0), 1.0) * (height - 1))

    before: int | None = None
    for column in range(width + 1):
        budget = round(plain.bytes * column / width)
        if budget < curve.minimum_bytes:
            continue
        row = row_of(curve.at(budget))
        for k in range(min(row, row if before is None else before), row):
            rows[k][column] = "\u2502"
        rows[row][column] = "\u2500"
        before = row
    rows[row_of(plain.seconds)][width] = "P"
    legend = f"P {plain.name}, {format_bytes(plain.bytes)}"
    if limit_bytes is not None and curve.minimum_bytes <= limit_bytes <= plain.bytes:
        place = round(width * limit_bytes / plain.bytes)
        rows[row_of(curve.at(limit_bytes))][place] = "\u25cf"
        legend = f"\u25cf within {format_bytes(limit_bytes)}   {legend}"
    labels = {0: f"{slowest:.0f} %", height - 1: f"{fastest:.0f} %"}
    lines = [f"{labels.get(k, ''):>6} \u2502{''.join(row)}" for k, row in enumerate(rows)]
    ticks = "".join(f"{f'{share} %':>{width // 4}}" for share in (25, 50, 75, 100))
    return "\n".join(
        [
            "  time of a step",
            *lines,
            f"{'':>6} \u2514" + "\u2500" * (width + 1),
            f"{'':>8}{ticks}",
            f"{'':>8}{f'memory of a step, % of {plain.name}':^{width}}",
            f"{'':>8}{legend}",
        ]
    )


if __name__ == "__main__":
    main()
