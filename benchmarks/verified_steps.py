"""What it costs to prove a step while it runs, in steps that recompute many values.

Models with limits between the least they can run in and what they need without recomputation, as
graphs and as chains. Steps of the same plan run in turn, verified (``verify="always"``) and not
(``verify="off"``), by rounds in the one and the other order. Prints medians over the rounds of the
ratio of their times, verified to not: of CPU time (on CUDA of wall time until the step has ended)
and of wall time. Ends with an error where a verified step did not compare all it computed again, or
with ``--most`` where a ratio of CPU time is above it.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from common import (
    Batch,
    classification_batch,
    cross_entropy,
    keep_freed_memory,
    open_device,
    read_clock,
    token_batch,
    train_step,
)
from graph_truth import Language
from torch import nn

import rotor
from rotor.report.text import table


@dataclass(frozen=True)
class Case:
    """A model, the engine that plans it, and a batch."""

    name: str
    engine: str
    make: Callable[[], nn.Module]
    batch: Batch


class Residual(nn.Module):
    """Two layers of a residual block of a multilayer perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of the input and what the layers make of it."""
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))


def cases(device: torch.device, shrink: int) -> list[Case]:
    """A GPT and a ResNet-18, each as a graph and as a chain, and a chain of residual blocks."""
    if device.type == "cpu":
        sizes, length, vocabulary, images, side = (256, 6, 1000, 4), 128, 1000, 16, 128
    else:
        sizes, length, vocabulary, images, side = (768, 12, 8192, 12), 512, 8192, 128, 128
    tokens = token_batch(max(8 // shrink, 1), length, vocabulary, device)
    pictures = classification_batch(max(images // shrink, 1), side, device, 10)
    width = sizes[0]
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(max(1024 // shrink, 8), width, generator=generator).to(device)
    labels = torch.randint(0, width, (rows.shape[0],), generator=generator).to(device)

    def perceptron() -> nn.Module:
        return nn.Sequential(*[Residual(width) for _ in range(12)])

    def chained_gpt() -> nn.Module:
        width, layers, words, heads = sizes
        given = {"width": width, "layers": layers, "heads": heads, "dropout": 0.0}
        return rotor.gpt.gpt("mini", **given, vocab_size=words, context_length=length)

    def resnet() -> nn.Module:
        return rotor.resnet.resnet18(num_classes=10)

    return [
        Case("GPT", "graph", lambda: Language(*sizes), tokens),
        Case("ResNet-18", "graph", resnet, pictures),
        Case("GPT", "chain", chained_gpt, tokens),
        Case("ResNet-18", "chain", resnet, pictures),
        Case("perceptron", "chain", perceptron, (rows, labels)),
    ]


@dataclass(frozen=True)
class Row:
    """What one plan showed."""

    case: Case
    limit_bytes: int
    recomputed: int
    values: int
    cpu: float
    wall: float


def planned(case: Case, device: torch.device, share: float) -> tuple[rotor.Checkpointable, int]:
    """A model with a plan, and its limit: `share` of the way from the least there can be."""
    torch.manual_seed(0)
    captured = case.engine == "graph"
    chk = rotor.Checkpointable(
        case.make().to(device),
        engine=case.engine,
        loss_fn=cross_entropy if captured else None,
        verify="always",
    )
    x, target = case.batch
    chk.measure(x, targets=(target,) if captured else ())
    found = chk.curve().bytes
    limit = int(found[0] + share * (found[-1] - found[0]))
    chk.compute_sequence(limit)
    return chk, limit


def timed(case: Case, chk: rotor.Checkpointable) -> tuple[float, float]:
    """Seconds of a step, of CPU time and of wall time."""
    device = case.batch[0].device
    wall, start = time.perf_counter(), read_clock(device)
    train_step(chk, case.batch, captured=case.engine == "graph")
    seconds = read_clock(device) - start
    return seconds, time.perf_counter() - wall


def judge(case: Case, device: torch.device, share: float, rounds: int) -> Row:
    """Steps of one plan in turn."""
    chk, limit = planned(case, device, share)
    for verify in ("always", "always", "off", "off"):
        chk.verify = verify
        timed(case, chk)
    plan = chk.plan
    verified, ratios = plan.proved.steps, []
    for k in range(rounds):
        times = {}
        for verify in ("always", "off") if k % 2 else ("off", "always"):
            chk.verify = verify
            times[verify] = timed(case, chk)
        ratios.append([a / b for a, b in zip(times["always"], times["off"], strict=True)])
    proved = plan.proved
    if chk.plan is not plan or proved.steps != verified + rounds or not proved.values:
        raise SystemExit(f"{case.name} ({case.engine}): not every step was verified: {proved}")
    cpu, wall = (statistics.median(column) for column in zip(*ratios, strict=True))
    return Row(case, limit, recomputed(plan, case.engine), proved.values, cpu, wall)


def recomputed(plan: Any, engine: str) -> int:
    """Operations or stages that a plan runs more than once."""
    return plan.recomputed if engine == "graph" else len(plan.schedule.recomputed)


def main() -> None:
    """One table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="parts of names; all by default")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.05, 0.5])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--shrink", type=int, default=1, help="divide the batches by this")
    parser.add_argument("--most", type=float, help="fail where a ratio of CPU time is above it")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    device = open_device(arguments.device)
    keep_freed_memory()
    words = [word.lower() for word in arguments.models]
    lines = [["model", "engine", "limit MB", "recomputed", "compared", "CPU time", "wall time"]]
    worst = 0.0
    for case in cases(device, arguments.shrink):
        if words and not any(word in f"{case.name} {case.engine}".lower() for word in words):
            continue
        for share in arguments.shares:
            row = judge(case, device, share, arguments.rounds)
            worst = max(worst, row.cpu)
            lines.append(
                [
                    case.name,
                    case.engine,
                    f"{row.limit_bytes / 1e6:.2f}",
                    str(row.recomputed),
                    str(row.values),
                    f"{row.cpu:.3f}",
                    f"{row.wall:.3f}",
                ]
            )
    print("verified steps over unverified ones, medians of pairs")
    print(table(lines))
    if arguments.most is not None and worst > arguments.most:
        raise SystemExit(f"verified steps take {worst:.3f} of the others, above {arguments.most}")


if __name__ == "__main__":
    main()
