"""Compares plain steps, recomputation, offloading to a disk, and both, at equal limits.

A GPT-like model and a ResNet train on one thread under shares of plain PyTorch's peak; contenders
run in alternating rounds, and a row has the median of each. The speed of a disk is the number of
times that it writes the bytes of that peak in the time of a plain step. The disk is this machine's,
slowed down to that speed where it is faster. "offload" runs no operation again: the planner is
given the same graph with every operation marked as one that runs once. Rows where the tier loses
are shown as the others are. All plans are made before the first round.

Columns: the limit as a share of plain PyTorch's peak; the speed; milliseconds of a plain step with
quartiles; for each contender the time over plain, measured and (predicted); bytes written in a step
as a share of plain's peak; measured less predicted peak.

    python benchmarks/tier.py [--rounds 9] [--speeds .3 1 3] [--shares .8 .6 .4 .25]
                              [--folder /var/tmp] [--quick]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import rotor
from rotor.graph import Graph, Program, plan
from rotor.tier import Traffic

SHARES = (0.8, 0.6, 0.4, 0.25)
SPEEDS = (0.3, 1.0, 3.0)
CONTENDERS = ("recompute", "offload", "both")


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


def gpt(width: int = 384, depth: int = 4) -> nn.Module:
    """Blocks that are no chain for rotor: the graph is planned."""
    return nn.Sequential(*[Block(width, 6) for _ in range(depth)])


class Unit(nn.Module):
    """A block of a residual network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        inner = F.relu(self.norms[0](self.first(x)))
        return F.relu(x + self.norms[1](self.second(inner)))


def resnet(widths: tuple[int, ...] = (64, 128, 256), depth: int = 2) -> nn.Module:
    """Residual blocks; the resolution is halved between widths."""
    layers: list[nn.Module] = []
    before = 3
    for width in widths:
        layers.append(nn.Conv2d(before, width, 3, stride=2, padding=1))
        layers += [Unit(width) for _ in range(depth)]
        before = width
    return nn.Sequential(*layers)


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
        Subject("GPT, 4 blocks", gpt, (4, 256, 384)),
        Subject("ResNet, 6 blocks", resnet, (8, 3, 96, 96)),
    ]


class Slowed(rotor.Tier):
    """A tier whose transfers, one after another, take at least the time of a slower link.

    Parameters
    ----------
    inner
        The tier.
    bytes_per_s
        Speed of the link.
    """

    def __init__(self, inner: rotor.DiskTier, bytes_per_s: float) -> None:
        self.inner, self.bytes_per_s = inner, bytes_per_s
        self.alignment_bytes, self.least_bytes = inner.alignment_bytes, inner.least_bytes
        self.traffic: Traffic = Traffic()
        self._free_at = 0.0
        self._lock = threading.Lock()

    def _timed(self, ticket: Any) -> tuple[Any, float]:
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + ticket.nbytes / self.bytes_per_s
            return ticket, self._free_at

    def allocate(self, nbytes: int) -> Any:
        """Return an area of the tier."""
        return self.inner.allocate(nbytes)

    def write(self, area: Any, offset: int, source: torch.Tensor) -> Any:
        """Begin to write."""
        return self._timed(self.inner.write(area, offset, source))

    def read(self, area: Any, offset: int, target: torch.Tensor) -> Any:
        """Begin to read."""
        return self._timed(self.inner.read(area, offset, target))

    def wait(self, ticket: Any) -> None:
        """Wait for the tier, and for the slower link."""
        inner, until = ticket
        self.inner.wait(inner)
        time.sleep(max(0.0, until - time.monotonic()))
        ns = max(inner.transfer.busy_ns, round(1e9 * inner.nbytes / self.bytes_per_s))
        self.traffic.add(inner.nbytes, ns, is_write=inner.is_write)

    def release(self, area: Any) -> None:
        """Free an area of the tier."""
        self.inner.release(area)


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


def offloaded_only(graph: Graph, budget: int, options: dict[str, Any], progress: Any) -> Program:
    """The fastest program that runs every operation once."""
    once = [replace(operation, once=True) for operation in graph.operations]
    found = plan(Graph(graph.storages, None, once), budget, progress=progress, **options)
    return Program(graph, found.actions, options["link"])


def wrapped(
    model: nn.Module, x: torch.Tensor, limit: int, *, only: bool = False, **settings: Any
) -> Any:
    """A planned model, which runs no operation again if `only`; None if no plan fits."""
    made = rotor.Checkpointable(
        model, mem_limit=limit, engine="graph", loss_fn=mean_square, verbosity=-1, **settings
    )
    if only:
        made._driver.engines[0].solve = lambda: offloaded_only
    made.measure(x, targets=(torch.zeros(1),))
    try:
        made.compute_sequence()
    except rotor.InfeasibleError:
        return None
    return made


@dataclass
class Cell:
    """A limit, and plans under it; one without the tier is shared by all speeds."""

    subject: str
    share: float
    speed: float
    plain: Callable[[], float]
    plans: dict[str, Any]
    steps: dict[str, Callable[[], float]]
    taken: dict[str, list[float]] = field(default_factory=dict)

    def run(self, rounds: int) -> None:
        """Run all contenders in alternating rounds, after steps that teach the link's speed."""
        contenders = {"plain": self.plain, **self.steps}
        for step in contenders.values():
            for _ in range(6):
                step()
        self.taken = {name: [] for name in contenders}
        for _ in range(rounds):
            for name, step in contenders.items():
                self.taken[name].append(step())

    def row(self) -> str:
        """A row of the table."""
        base = statistics.median(self.taken["plain"])
        low, _, high = statistics.quantiles(self.taken["plain"], n=4)
        cells = [self.subject, f"{self.share:.2f}", f"{self.speed:.1f}"]
        cells.append(f"{1000 * base:.0f} ({1000 * low:.0f}-{1000 * high:.0f})")
        for name in CONTENDERS:
            if name not in self.plans:
                cells.append("no plan")
                continue
            predicted = self.plans[name].plan.program.slowdown - 1
            shown = statistics.median(self.taken[name]) / base - 1
            cells.append(f"{shown:+.0%} ({predicted:+.0%})")
        if "both" in self.plans:
            plan = self.plans["both"].plan
            cells.append(f"{plan.program.offloaded_bytes / plan.limit_bytes * self.share:.0%}")
            cells.append(f"{plan.measured_bytes - plan.predicted_bytes:+d}")
        return line(cells)


def line(cells: Sequence[str]) -> str:
    """A row in columns."""
    widths = (16, 5, 5, 13, 12, 13, 12, 7, 7)
    first, *rest = zip(cells, widths[: len(cells)], strict=True)
    return "  ".join([f"{first[0]:{first[1]}}", *(f"{cell:>{width}}" for cell, width in rest)])


def cells_of(
    subject: Subject, shares: list[float], speeds: list[float], disk: rotor.DiskTier
) -> list[Cell]:
    """The planned models of a subject's rows."""
    torch.manual_seed(0)
    plain, x = subject.make(), torch.randn(subject.batch)
    whole = wrapped(copy.deepcopy(plain), x, 1 << 40)
    peak, seconds = whole.plan.predicted_bytes, whole.plan.makespan
    print(f"{subject.name}: {peak / 1e6:.1f} MB, {seconds:.3f} s a plain step", flush=True)
    found = []
    for share in shares:
        limit = int(share * peak)
        alone = wrapped(copy.deepcopy(plain), x, limit)
        for speed in speeds:
            tier = Slowed(disk, speed * peak / seconds)
            plans = {"recompute": alone}
            for name in CONTENDERS[1:]:
                model = copy.deepcopy(plain)
                plans[name] = wrapped(model, x, limit, only=name == "offload", offload=tier)
            plans = {name: chk for name, chk in plans.items() if chk is not None}
            steps = {name: stepper(chk.module, chk, x) for name, chk in plans.items()}
            found.append(Cell(subject.name, share, speed, stepper(plain, plain, x), plans, steps))
    return found


def main(arguments: argparse.Namespace) -> int:
    warnings.simplefilter("ignore", rotor.MemoryLimitWarning)
    # The disk's thread has the other core.
    torch.set_num_threads(1)
    disk = rotor.DiskTier(arguments.folder)
    cells = [
        cell
        for subject in subjects(arguments.quick)
        for cell in cells_of(subject, arguments.shares, arguments.speeds, disk)
    ]
    print()
    print(line(("model", "limit", "speed", "plain, ms", *CONTENDERS, "written", "peak, B")))
    for cell in cells:
        cell.run(arguments.rounds)
        print(cell.row(), flush=True)
    disk.close()
    return 0


def parsed(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--shares", type=float, nargs="+", default=list(SHARES))
    parser.add_argument("--speeds", type=float, nargs="+", default=list(SPEEDS))
    parser.add_argument("--folder", default=None, help="folder on the disk")
    parser.add_argument("--quick", action="store_true", help="a small model")
    return parser.parse_args(given)


if __name__ == "__main__":
    raise SystemExit(main(parsed(sys.argv[1:])))
