"""Compares the dynamic engine by recomputation alone, and with a disk, at equal limits.

Two eager models train under shares of plain PyTorch's peak: a recurrent network, whose values can
be computed again, and one with operators that do not repeat, whose results have to stay in memory
without a tier. A row has the median of alternating rounds, and what a step wrote and fetched; "no"
stands for a limit that was refused.

    python benchmarks/dynamic_tier.py [--rounds 5] [--shares .7 .5] [--folder /var/tmp] [--quick]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from dynamic_tiers import Noise, generator

import rotor
from rotor.units import format_bytes

SHARES = (0.7, 0.5, 0.35)


class Recurrent(nn.Module):
    """An LSTM cell, step by step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTMCell(width, width), nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output after the last step."""
        h = x.new_zeros(x.shape[1], x.shape[2])
        c = h.clone()
        for row in x:
            h, c = self.cell(row, (h, c))
        return self.out(h)


class Noisy(nn.Module):
    """Layers with numbers between them that only an operator knows."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the last layer's result."""
        for layer in self.layers:
            x = Noise.apply(torch.tanh(layer(x)))
        return x


def subjects(quick: bool) -> list[tuple[str, nn.Module, tuple[int, ...]]]:
    """Return names, models and the shapes of batches; small ones if quick."""
    if quick:
        return [
            ("LSTM cell", Recurrent(64), (8, 256, 64)),
            ("does not repeat", Noisy(128, 6), (512, 128)),
        ]
    return [
        ("LSTM cell", Recurrent(256), (30, 512, 256)),
        ("does not repeat", Noisy(512, 12), (4096, 512)),
    ]


def step_of(
    model: nn.Module, call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
) -> float:
    """Run a step, and return its seconds."""
    model.zero_grad(set_to_none=True)
    generator.manual_seed(0)
    begun = time.perf_counter()
    call(x).square().mean().backward()
    return time.perf_counter() - begun


def wrapped(
    model: nn.Module, x: torch.Tensor, limit: int, tier: rotor.Tier | None
) -> rotor.Checkpointable | None:
    """Return a model whose first steps have run; None if the limit is refused."""
    made = rotor.Checkpointable(
        copy.deepcopy(model),
        mem_limit=limit,
        engine="dynamic",
        offload=tier,
        verify="off",
        verbosity=-1,
    )
    try:
        for _ in range(2):
            step_of(made.module, made, x)
    except rotor.InfeasibleError:
        return None
    return made


def rows(
    name: str, model: nn.Module, x: torch.Tensor, shares: list[float], rounds: int, tier: rotor.Tier
) -> list[str]:
    """Return the lines of one model."""
    plain = wrapped(model, x, 1 << 40, None)
    assert plain is not None
    peak = plain.plan.measured_bytes
    seconds = statistics.median(step_of(model, model, x) for _ in range(rounds))
    lines = [f"{name}: plain peak {format_bytes(peak)}, plain step {1000 * seconds:.0f} ms"]
    for share in shares:
        limit = round(share * peak)
        found = {k: wrapped(model, x, limit, tier if k else None) for k in (False, True)}
        times: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(rounds):
            for k, call in list(found.items()):
                if call is None:
                    continue
                try:
                    times[k].append(step_of(call.module, call, x))
                except rotor.InfeasibleError:
                    found[k] = None
        cells = [
            "no" if call is None else f"{1000 * statistics.median(times[k]):.0f} ms"
            for k, call in found.items()
        ]
        moved = ""
        ours = found[True]
        if ours is not None:
            stats = ours.plan.last.stats
            measured = format_bytes(ours.plan.measured_bytes)
            moved = (
                f"{format_bytes(stats.written_bytes):>10}{format_bytes(stats.fetched_bytes):>12}"
                f"{stats.rematerializations:>11}{measured:>13}"
            )
        lines.append(f"{share:>6.0%}{format_bytes(limit):>12}{cells[0]:>12}{cells[1]:>12}  {moved}")
    return lines


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shares", type=float, nargs="+", default=list(SHARES))
    parser.add_argument("--folder", default=None)
    parser.add_argument("--quick", action="store_true", help="small models, two rounds")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "rotor_tier_tests::noise does not repeat")
    torch.manual_seed(0)
    tier = rotor.DiskTier(options.folder)
    print(
        f"{'share':>6}{'limit':>12}{'recompute':>12}{'with disk':>12}  {'written':>10}"
        f"{'fetched':>12}{'run again':>11}{'peak':>13}"
    )
    for name, model, shape in subjects(options.quick):
        rounds = 2 if options.quick else options.rounds
        print(*rows(name, model, torch.randn(shape), options.shares, rounds, tier), sep="\n")


if __name__ == "__main__":
    main()
