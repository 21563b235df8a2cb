"""Compares "auto" with the chain and with the graph, on eight Sequentials under four limits each.

Limits are the gradients and shares of what else the chain needs without recomputation. Figures are
the predicted recomputation of each settled plan, CPU time of a step, engines in turn, one thread,
and that of each engine's first step, from an empty cache directory, in plain steps.

With ``--uncaptured``, three Sequentials with stages that cannot be captured: the chain, the
captured parts with all other stages kept, and the parts with chains of these stages between them.
The peaks are in MiB, as predicted and as measured in the last step.

    python benchmarks/sequential.py [--uncaptured] [--quick] [--json rows.json]
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

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


class Gate(nn.Module):
    """Feed-forward layer that looks at a value: no graph goes through it."""

    def __init__(self, width: int, factor: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, factor * width), nn.Linear(factor * width, width)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the input and the layer's output."""
        y = nn.functional.gelu(self.up(x))
        if y.abs().max().item() > 1e4:
            y = y / 2
        y = nn.functional.dropout(y.tanh(), self.dropout, self.training)
        return x + self.down(y)


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


UNCAPTURED: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "one of eight": lambda: (
        nn.Sequential(*[Gate(64, 4) if i == 3 else _feed_forward(64) for i in range(8)]),
        torch.randn(512, 64),
    ),
    "every other": lambda: (
        nn.Sequential(*[Gate(64, 4) if i % 2 else _feed_forward(64) for i in range(8)]),
        torch.randn(512, 64),
    ),
    "two runs": lambda: (
        nn.Sequential(*[Gate(64, 4, 0.1) if i in (1, 2, 5, 6) else _encoder(64) for i in range(8)]),
        torch.randn(8, 64, 64),
    ),
}

ENGINES = ("chain", "graph", "auto")
WAYS = ("chain", "parts", "mixed")


def _step(model: Any, x: torch.Tensor) -> float:
    model.zero_grad()
    began = time.process_time()
    model(x).float().square().mean().backward()
    return time.process_time() - began


def _slower(plan: Any) -> float:
    if plan.engine == "graph":
        return float(plan.program.slowdown) - 1
    return float(plan.sequence.makespan / plan.chain.ideal_time) - 1


def _trained(
    model: nn.Module, x: torch.Tensor, limit: int, engine: str
) -> tuple[Any, float | None]:
    """Return a model with its settled plan, and its first step's time; nothing if none fits."""
    chk = rotor.Checkpointable(
        copy.deepcopy(model),
        mem_limit=limit,
        engine=engine,
        **({} if engine == "chain" else {"effort": "fast"}),
    )
    with tempfile.TemporaryDirectory() as directory:
        os.environ["ROTOR_CACHE_DIR"] = directory
        try:
            first = _step(chk, x)
            for _ in range(2):
                _step(chk, x)
            chk.wait_for_planning()
            _step(chk, x)
        except rotor.InfeasibleError:
            return None, None
        return chk, first


def _limit(model: nn.Module, x: torch.Tensor, share: float) -> int:
    """Return the gradients, and a share of what else the chain needs without recomputation."""
    measured = rotor.Checkpointable(copy.deepcopy(model), mem_limit="8GB", engine="chain")
    measured.measure(x)
    gradients = sum(p.nbytes for p in model.parameters())
    return gradients + int(share * (int(measured.curve().bytes[-1]) - gradients))


def compare(name: str, share: float) -> dict[str, Any]:
    """Return predicted recomputation and time of a step, of each engine, under one limit."""
    torch.manual_seed(0)
    model, x = MODELS[name]()
    limit = _limit(model, x, share)
    plain = min(_step(model, x) for _ in range(ROUNDS))
    trained = {engine: _trained(model, x, limit, engine) for engine in ENGINES}
    found = {engine: chk for engine, (chk, _) in trained.items()}
    times: dict[str, list[float]] = {engine: [] for engine, chk in found.items() if chk}
    for _ in range(ROUNDS):
        for engine, seen in times.items():
            seen.append(_step(found[engine], x))
    row: dict[str, Any] = {"model": name, "share": share, "limit": limit}
    for engine, chk in found.items():
        row[engine] = _slower(chk.plan) if chk else None
        row[f"{engine}_s"] = min(times[engine]) if chk else None
        row[f"{engine}_first"] = trained[engine][1] / plain if chk else None
    row["runs"] = found["auto"].plan.engine if found["auto"] else None
    return row


def _as(way: str) -> ExitStack:
    """Return the context in which "auto" runs parts where it can, with or without chains."""
    stack = ExitStack()
    if way != "chain":
        stack.enter_context(
            patch("rotor.engines.sequential.recomputation_of", lambda chain: float("inf"))
        )
    if way == "parts":
        stack.enter_context(
            patch("rotor.engines.sequential._ChainParts.stages_of", lambda self, key: None)
        )
    return stack


def _again(chk: Any) -> float:
    """Return the predicted recomputation of a plan, as a share of a step of the chain."""
    plan = chk.plan
    if plan.engine == "chain":
        return _slower(plan)
    again = plan.makespan - plan.unplanned.time_ns / 1e9
    return float(again / chk.build_chain().ideal_time)


def compare_uncaptured(name: str, share: float) -> dict[str, Any]:
    """Return predicted recomputation, peaks and time of a step of each way, under one limit."""
    torch.manual_seed(0)
    model, x = UNCAPTURED[name]()
    limit = _limit(model, x, share)
    found = {}
    for way in WAYS:
        with _as(way):
            found[way], _ = _trained(model, x, limit, "chain" if way == "chain" else "auto")
    for way in WAYS[1:]:
        if found[way] is not None and found[way].plan.engine != "parts":
            found[way] = None
    times: dict[str, list[float]] = {way: [] for way, chk in found.items() if chk}
    for _ in range(ROUNDS):
        for way, seen in times.items():
            seen.append(_step(found[way], x))
    row: dict[str, Any] = {"model": name, "share": share, "limit": limit}
    for way, chk in found.items():
        row[way] = _again(chk) if chk else None
        row[f"{way}_s"] = min(times[way]) if chk else None
        row[f"{way}_bytes"] = [chk.plan.predicted_bytes, chk.plan.measured_bytes] if chk else None
    return row


def _write_uncaptured(names: list[str], shares: tuple[float, ...]) -> list[dict[str, Any]]:
    rows = []
    columns = "".join(f"{way:>11}{'predicted':>11}{'measured':>10}" for way in WAYS)
    sys.stdout.write(f"{'model':<14}{'limit':>6}{'MiB':>7}{columns}\n")
    for name in names:
        for share in shares:
            row = compare_uncaptured(name, share)
            rows.append(row)
            shown = ""
            for way in WAYS:
                peaks = row[f"{way}_bytes"] or [None, None]
                texts = ["-" if size is None else f"{size / 2**20:.2f}" for size in peaks]
                shown += f"{_shown(row[way]):>11}{texts[0]:>11}{texts[1]:>10}"
            times = " ".join(
                f"{1e3 * row[f'{way}_s']:.1f}" if row[f"{way}_s"] else "-" for way in WAYS
            )
            limit = row["limit"] / 2**20
            sys.stdout.write(f"{name:<14}{share:>6.2f}{limit:>7.2f}{shown}  (ms: {times})\n")
            sys.stdout.flush()
    both = [row for row in rows if row["mixed"] is not None]
    better = [row for row in both if row["chain"] is None or row["mixed"] < row["chain"] - 0.01]
    only = sum(row["parts"] is None for row in both)
    over = sum(row[f"{way}_bytes"][1] > row["limit"] for row in rows for way in WAYS if row[way])
    sys.stdout.write(
        f"mixed plans in {len(both)} of {len(rows)} cases, in {only} of them no parts fit without; "
        f"in {len(better)} they recompute less than the chain by more than 1 %; "
        f"{over} measured peaks over the limit\n"
    )
    return rows


def _shown(value: float | None) -> str:
    return "none fits" if value is None else f"{value:+.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two models, two limits")
    parser.add_argument("--uncaptured", action="store_true", help="stages that are not captured")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.uncaptured:
        cases = list(UNCAPTURED)[:2] if given.quick else list(UNCAPTURED)
        rows = _write_uncaptured(cases, SHARES[1:3] if given.quick else SHARES)
        if given.json:
            given.json.write_text(json.dumps(rows, indent=1))
        return
    names, shares = (list(MODELS)[3:5], SHARES[1:3]) if given.quick else (list(MODELS), SHARES)
    rows, worse = [], 0
    sys.stdout.write(f"{'model':<15}{'limit':>6}{'chain':>11}{'graph':>11}{'auto':>11}  runs\n")
    for name in names:
        for share in shares:
            row = compare(name, share)
            rows.append(row)
            both = [row[engine] for engine in ("chain", "graph") if row[engine] is not None]
            worse += bool(both) and (row["auto"] is None or row["auto"] > min(both) + 0.01)
            shown = "".join(f"{_shown(row[engine]):>11}" for engine in ENGINES)
            times = " ".join(
                f"{1e3 * row[f'{engine}_s']:.1f}" if row[f"{engine}_s"] else "-"
                for engine in ENGINES
            )
            firsts = " ".join(f"{row[f'{engine}_first'] or 0:.0f}" for engine in ENGINES)
            sys.stdout.write(
                f"{name:<15}{share:>6.2f}{shown}  {row['runs']} (ms: {times}; first: {firsts})\n"
            )
            sys.stdout.flush()
    sys.stdout.write(f"{worse} of {len(rows)} are slower than the better one by more than 1 %\n")
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
