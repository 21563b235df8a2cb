"""Compares plain steps, recomputation, offloading to a disk, and both, at equal limits.

A GPT-like model and a ResNet train under shares of plain PyTorch's peak; contenders run in
alternating rounds, and a row has the median of each and its quartiles. The speed of the disk is the
number of times that it writes the bytes of that peak in the time of a plain step: at 0.1 a tier
gains little, at 3 it is nearly free. "offload" runs no operation again: the planner is given the
same graph with every operation marked as one that runs once. Rows where the tier loses are shown as
the others are.

    python benchmarks/tier.py [--rounds 9] [--shares .8 .6 .4] [--folder /var/tmp] [--quick]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from rotor.models import resnet18
from torch import nn
from torch.nn import functional as F

import rotor
from rotor.graph import Graph, Link, Program, plan
from rotor.units import format_bytes

SHARES = (0.8, 0.6, 0.4, 0.25)
CONTENDERS = ("recompute", "offload", "tier")


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixing, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        rows, length, width = x.shape
        mixed = self.mixing(self.first(x)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = mixed.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + F.dropout(self.out(seen.transpose(1, 2).reshape(x.shape)), 0.1)
        return x + self.narrow(F.gelu(self.wide(self.second(x))))


def gpt(width: int = 192, depth: int = 6) -> nn.Module:
    """Blocks that are no chain for rotor: the graph is planned."""
    return nn.Sequential(*[Block(width, 6) for _ in range(depth)])


@dataclass
class Subject:
    """A model and its batch."""

    name: str
    make: Callable[[], nn.Module]
    batch: tuple[int, ...]


def subjects(quick: bool) -> list[Subject]:
    """Models of both kinds; small ones if quick."""
    if quick:
        return [Subject("GPT, 2 blocks", lambda: gpt(96, 2), (4, 64, 96))]
    return [
        Subject("GPT, 6 blocks", gpt, (8, 256, 192)),
        Subject("ResNet-18", resnet18, (8, 3, 128, 128)),
    ]


def stepper(model: nn.Module, call: Any, x: torch.Tensor) -> Callable[[], float]:
    """A function that runs a step and returns its seconds."""
    target = (torch.zeros(1),)

    def step() -> float:
        for parameter in model.parameters():
            parameter.grad = None
        torch.manual_seed(0)
        begun = time.perf_counter()
        if isinstance(call, rotor.Checkpointable):
            loss = call(x, targets=target)
        else:
            loss = mean_square(call(x), *target)
        loss.backward()
        return time.perf_counter() - begun

    return step


def mean_square(output: Any, zero: torch.Tensor) -> torch.Tensor:
    return output.square().mean() + zero.sum()


def offloaded_only(
    graph: Graph, budget: int, link: Link, options: dict[str, Any], progress: Any
) -> Program:
    """The fastest program that runs every operation once."""
    once = [replace(operation, once=True) for operation in graph.operations]
    found = plan(Graph(graph.storages, None, once), budget, link=link, progress=progress, **options)
    return Program(graph, found.actions, link)


def wrapped(
    model: nn.Module, x: torch.Tensor, limit: int, *, only: bool = False, **settings: Any
) -> Any:
    """A planned model, which runs no operation again if `only`; None if no plan fits."""
    made = rotor.Checkpointable(
        model, mem_limit=limit, engine="graph", loss_fn=mean_square, verbosity=0, **settings
    )
    if only:
        engine = made._driver.engines[0]

        def solve(graph: Graph, budget: int, options: dict[str, Any], progress: Any) -> Program:
            link = engine.settings.offload.known_link(torch.device("cpu"))
            return offloaded_only(graph, budget, link, options, progress)

        engine.solve = lambda: solve
    made.measure(x, targets=(torch.zeros(1),))
    try:
        made.compute_sequence()
    except rotor.InfeasibleError:
        return None
    return made


def quartiles(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{1000 * middle:.0f} ({1000 * low:.0f}-{1000 * high:.0f})"


def rows(subject: Subject, shares: list[float], rounds: int, tier: rotor.DiskTier) -> list[str]:
    """Lines of a table on one model."""
    torch.manual_seed(0)
    plain, x = subject.make(), torch.randn(subject.batch)
    whole = wrapped(copy.deepcopy(plain), x, 1 << 40)
    peak = whole.plan.predicted_bytes
    found = []
    for share in shares:
        limit = int(share * peak)
        contenders: dict[str, Callable[[], float]] = {"plain": stepper(plain, plain, x)}
        plans = {}
        for name in CONTENDERS:
            model = copy.deepcopy(plain)
            given = {} if name == "recompute" else {"offload": tier}
            chk = wrapped(model, x, limit, only=name == "offload", **given)
            if chk is not None:
                contenders[name], plans[name] = stepper(model, chk, x), chk
        for step in contenders.values():
            for _ in range(4):
                step()
        taken: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(rounds):
            for name, step in contenders.items():
                taken[name].append(step())
        cells = [quartiles(taken[name]) if name in taken else "no plan"
                 for name in ("plain", *CONTENDERS)]  # fmt: skip
        predicted = [
            f"{plans[name].plan.program.slowdown - 1:+.1%}" if name in plans else "-"
            for name in CONTENDERS
        ]
        moved = peaks = "-"
        if "tier" in plans:
            plan = plans["tier"].plan
            speed = plan.step.link.write_bytes_per_s / peak * whole.plan.makespan
            moved = f"{format_bytes(plan.program.offloaded_bytes)}, speed {speed:.1f}"
            peaks = f"{plan.measured_bytes} of {plan.predicted_bytes}"
        line = [subject.name, f"{share:.2f}", *cells, *predicted, moved, peaks]
        found.append("| " + " | ".join(line) + " |")
    return found


def main(arguments: argparse.Namespace) -> int:
    warnings.simplefilter("ignore", rotor.MemoryLimitWarning)
    tier = rotor.DiskTier(arguments.folder)
    heads = ("model", "limit", "plain, ms", "recompute, ms", "offload, ms", "both, ms",
             "predicted, recompute", "offload", "both", "written",
             "peak, measured of predicted")  # fmt: skip
    print("| " + " | ".join(heads) + " |")
    print("|---" * len(heads) + "|")
    for subject in subjects(arguments.quick):
        for line in rows(subject, arguments.shares, arguments.rounds, tier):
            print(line, flush=True)
    tier.close()
    return 0


def parsed(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--shares", type=float, nargs="+", default=list(SHARES))
    parser.add_argument("--folder", default=None, help="folder on the disk")
    parser.add_argument("--quick", action="store_true", help="a small model")
    return parser.parse_args(given)


if __name__ == "__main__":
    raise SystemExit(main(parsed(sys.argv[1:])))
