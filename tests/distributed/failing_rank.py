"""One of the processes of test_failing_ranks.py: trains a split model, in which one rank fails."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from layout_worker import batch, made
from layouts import LAYOUTS

import rotor

STEPS = 4
LAST = 3
FAILING = 1


class Failing(torch.autograd.Function):
    """A backward that fails."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("a failing backward")


def train(layout: str, way: str, rank: int) -> str:
    """Train within a limit; return the limit."""
    fails = rank == FAILING
    limit = 2_300_000 if way == "limits" and fails else 2_600_000
    limit = 10 if way == "planning" and fails else limit
    engine = "graph" if way == "graph" else LAYOUTS[layout].engine
    plain: Any = made(LAYOUTS[layout])
    if fails and way == "generator":
        first: Any = next(plain.children())
        first.numbers = (number for number in range(STEPS))
        next(first.numbers)
    model = rotor.Checkpointable(plain, mem_limit=limit, engine=engine)
    for step in range(STEPS):
        if fails and (way, step) == ("forward", LAST):
            raise ValueError("a failing forward")
        y = model(batch(step, LAYOUTS[layout]))
        if fails and (way, step) == ("backward", LAST):
            y = Failing.apply(y)
        y.square().mean().backward()
    return str(model.plan.limit_bytes)


def main() -> None:
    """Note what happened, and how long the last call took; end at once, as a script does."""
    rank, folder, (case,) = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    begun = time.monotonic()
    try:
        found = [train(*case.split("@"), rank), ""]
    except Exception as error:
        found = [type(error).__name__, str(error)]
    found.append(str(time.monotonic() - begun))
    (folder / f"{rank}.json").write_text(json.dumps({case: found}), encoding="utf-8")
    os._exit(0)


if __name__ == "__main__":
    main()
