"""Compares "auto" with the chain and with the graph, on eight Sequentials under four limits each.

Limits are the gradients and shares of what else the chain needs without recomputation. Figures are
the predicted recomputation of each plan, and CPU time of a step, engines in turn, one thread.

    python benchmarks/sequential.py [--quick] [--json rows.json]
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rotor.models import resnet, vgg
from rotor.models.gpt import gpt
from torch import nn

import rotor

SHARES = (0.8, 0.65, 0.5, 0.4)
ROUNDS = 5


class Residual(nn.Module):
    """Adds the input of a body to its output."""

    def __init__(self, *body: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*body)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum."""
        return x + self.body(x)


def _feed_forward(width: int) -> nn.Module:
    return Residual(
        nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
    )


def _convolution(channels: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()
    )


def _normed(width: int) -> nn.Module:
    norm = nn.utils.parametrizations.spectral_norm
    return nn.Sequential(norm(nn.Linear(width, 3 * width)), nn.Tanh(), nn.Linear(3 * width, width))


def _encoder(width: int) -> nn.Module:
    return nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)


def _images(size: int) -> torch.Tensor:
    return torch.randn(4, 3, size, size)


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "resnet18": lambda: (resnet.resnet18(num_classes=10), _images(96)),
    "vgg11": lambda: (vgg.vgg11(num_classes=10), _images(96)),
    "gpt": lambda: (gpt("tiny", dropout=0.0), torch.randint(0, 60, (8, 64))),
    "feed forward": lambda: (
        nn.Sequential(*[_feed_forward(64) for _ in range(8)]),
        torch.randn(512, 64),
    ),
    "encoder": lambda: (nn.Sequential(*[_encoder(64) for _ in range(4)]), torch.randn(8, 64, 64)),
    "convolutions": lambda: (
        nn.Sequential(nn.Conv2d(3, 16, 1), *[_convolution(16) for _ in range(8)]),
        _images(48),
    ),
    "spectral norm": lambda: (
        nn.Sequential(*[_normed(64) for _ in range(6)]),
        torch.randn(512, 64),
    ),
    "dropout": lambda: (
        nn.Sequential(
            *[nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Dropout(0.1)) for _ in range(10)]
        ),
        torch.randn(512, 128),
    ),
}


def _step(model: Any, x: torch.Tensor) -> float:
    model.zero_grad()
    began = time.process_time()
    model(x).float().square().mean().backward()
    return time.process_time() - began


def _slower(plan: Any) -> float:
    if plan.engine == "graph":
        return float(plan.program.slowdown) - 1
    return float(plan.sequence.makespan / plan.chain.ideal_time) - 1


def _trained(model: nn.Module, x: torch.Tensor, limit: int, engine: str) -> Any:
    """Return a model that has a plan from three steps; ``None`` if none fits."""
    chk = rotor.Checkpointable(
        copy.deepcopy(model),
        mem_limit=limit,
        engine=engine,
        **({} if engine == "chain" else {"effort": "fast"}),
    )
    try:
        for _ in range(3):
            _step(chk, x)
    except rotor.InfeasibleError:
        return None
    return chk


def compare(name: str, share: float) -> dict[str, Any]:
    """Return predicted recomputation and time of a step, of each engine, under one limit."""
    torch.manual_seed(0)
    model, x = MODELS[name]()
    measured = rotor.Checkpointable(copy.deepcopy(model), mem_limit="8GB", engine="chain")
    measured.measure(x)
    gradients = sum(p.nbytes for p in model.parameters())
    limit = gradients + int(share * (int(measured.curve().bytes[-1]) - gradients))
    found = {engine: _trained(model, x, limit, engine) for engine in ("chain", "graph", "auto")}
    times: dict[str, list[float]] = {engine: [] for engine, chk in found.items() if chk}
    for _ in range(ROUNDS):
        for engine, seen in times.items():
            seen.append(_step(found[engine], x))
    row: dict[str, Any] = {"model": name, "share": share, "limit": limit}
    for engine, chk in found.items():
        row[engine] = _slower(chk.plan) if chk else None
        row[f"{engine}_s"] = min(times[engine]) if chk else None
    row["runs"] = found["auto"].plan.engine if found["auto"] else None
    return row


def _shown(value: float | None) -> str:
    return "none fits" if value is None else f"{value:+.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two models, two limits")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    names, shares = (list(MODELS)[3:5], SHARES[1:3]) if given.quick else (list(MODELS), SHARES)
    rows, worse = [], 0
    sys.stdout.write(f"{'model':<15}{'limit':>6}{'chain':>11}{'graph':>11}{'auto':>11}  runs\n")
    for name in names:
        for share in shares:
            row = compare(name, share)
            rows.append(row)
            both = [row[engine] for engine in ("chain", "graph") if row[engine] is not None]
            worse += bool(both) and (row["auto"] is None or row["auto"] > min(both) + 0.01)
            shown = "".join(f"{_shown(row[engine]):>11}" for engine in ("chain", "graph", "auto"))
            times = " ".join(
                f"{1e3 * row[f'{engine}_s']:.1f}" if row[f"{engine}_s"] else "-"
                for engine in ("chain", "graph", "auto")
            )
            sys.stdout.write(f"{name:<15}{share:>6.2f}{shown}  {row['runs']} (ms: {times})\n")
            sys.stdout.flush()
    sys.stdout.write(f"{worse} of {len(rows)} are slower than the better one by more than 1 %\n")
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
