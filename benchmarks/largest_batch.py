"""The largest batch that fits: as `rotor.largest_batch` finds it, and by trial of those around it.

The true largest is the last size, going up one step at a time, whose step rotor plans and runs
within the limit; for plain PyTorch, the last whose measured peak is within it. Throughput is that
of the rows that `largest_batch` ran.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from common import (
    classification_batch,
    cross_entropy,
    keep_freed_memory,
    step_peak_bytes,
    token_batch,
)
from torch import nn

import rotor
from rotor.report.text import table
from rotor.units import format_bytes

Make = Callable[[int], tuple[torch.Tensor, torch.Tensor]]


def cnn() -> nn.Module:
    """Eight convolutions with BatchNorm."""
    layers: list[nn.Module] = []
    for index in range(8):
        layers += [
            nn.Conv2d(3 if index == 0 else 24, 24, 3, padding=1),
            nn.BatchNorm2d(24),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10))


def gpt() -> nn.Module:
    """A GPT of 6 layers, width 96."""
    return rotor.models.gpt.gpt(
        vocab_size=512, context_length=64, layers=6, heads=4, width=96, dropout=0.0
    )


def cases(device: torch.device) -> list[tuple[str, nn.Module, Make, int]]:
    """Name, model, batches, and the plain batch whose peak is the limit."""
    return [
        (
            "CNN, 8 convolutions, 32 pixels",
            cnn().to(device),
            lambda size: classification_batch(size, 32, device, 10),
            8,
        ),
        (
            "ResNet-18, 64 pixels",
            rotor.models.resnet18(num_classes=10).to(device),
            lambda size: classification_batch(size, 64, device, 10),
            16,
        ),
        (
            "GPT, 6 layers, 64 tokens",
            gpt().to(device),
            lambda size: token_batch(size, 64, 512, device),
            4,
        ),
    ]


def fits_planned(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], limit: int) -> bool:
    """Whether rotor plans a step and runs it within the limit."""
    x, target = batch
    for parameter in model.parameters():
        parameter.grad = None
    try:
        chk = rotor.Checkpointable(model, mem_limit=limit, loss_fn=cross_entropy)
        chk.measure(x, targets=(target,))
        chk.compute_sequence()
    except rotor.InfeasibleError:
        return False
    return step_peak_bytes(chk, batch, captured=True) <= limit


def by_trial(fits: Callable[[int], bool], near: int) -> int:
    """The largest size that fits, from `near` down and then up, one at a time."""
    size = max(near, 1)
    while size and not fits(size):
        size -= 1
    while size and fits(size + 1):
        size += 1
    return size


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="", help="cases whose names contain this")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    keep_freed_memory()
    torch.manual_seed(0)
    sizes = [
        ["", "limit", "rotor", "by trial", "plain", "by trial", "peak / limit", "sizes planned"]
    ]
    rates = [["", "plain, largest", "rotor, largest", "ratio", "best", "batch", "ratio to plain"]]
    times = [["", "usual", "timed=False, points=1", "batch", "batch"]]
    for name, model, make, plain_size in cases(device):
        if arguments.only not in name:
            continue
        limit = step_peak_bytes(model, make(plain_size))
        for parameter in model.parameters():
            parameter.grad = None
        x, target = make(4)
        began = time.monotonic()
        found = rotor.largest_batch(model, x, limit, loss_fn=cross_entropy, targets=(target,))
        middle = time.monotonic()
        quick = rotor.largest_batch(
            model, x, limit, loss_fn=cross_entropy, targets=(target,), timed=False, points=1
        )
        times.append(
            [
                name,
                f"{middle - began:.3g} s",
                f"{time.monotonic() - middle:.3g} s",
                str(found.largest.batch),
                str(quick.largest.batch),
            ]
        )
        size = found.largest.batch
        true = by_trial(lambda k: fits_planned(model, make(k), limit), size)  # noqa: B023
        plain = 0 if found.plain is None else found.plain.batch
        true_plain = by_trial(lambda k: step_peak_bytes(model, make(k)) <= limit, plain)  # noqa: B023
        planned = sum(tried.runs == "rotor" for tried in found.table)
        sizes.append(
            [
                name,
                format_bytes(limit),
                str(size),
                str(true),
                str(plain),
                str(true_plain),
                f"{found.largest.measured_bytes / limit:.4f}",
                str(planned),
            ]
        )
        base = found.plain.samples_per_second if found.plain is not None else float("nan")
        rates.append(
            [
                name,
                f"{base:.4g} /s",
                f"{found.largest.samples_per_second:.4g} /s",
                f"{found.largest.samples_per_second / base:.3f}",
                f"{found.best.samples_per_second:.4g} /s",
                f"{found.best.batch} ({found.best_runs})",
                f"{found.best.samples_per_second / base:.3f}",
            ]
        )
    print(f"largest batch, {device}")
    print(table(sizes))
    print()
    print("throughput, samples a second")
    print(table(rates))
    print()
    print("wall time of largest_batch")
    print(table(times))


if __name__ == "__main__":
    main()
