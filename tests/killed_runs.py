"""Runs that are killed at places of their third step: ``python killed_runs.py FOLDER``.

Each place has a folder, and a process that SIGKILL ends there. A line says how it has ended.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path

import numpy
import torch
from torch import nn, optim

import rotor
from rotor import tier
from rotor.tier import DiskTier, recovery
from rotor.tier.homes import Home

PLACES = {
    "before the first step": 0,
    "forward": 2,
    "backward": 2,
    "first write": 2,
    "half a write": 2,
    "late write": 2,
    "begin of a record": 2,
    "half a record": 2,
    "complete record": 3,
    "after the step": 3,
    "an error": 3,
}
"""Places, and the number of steps that are finished there; an error is not caught, nor a kill."""


class Net(nn.Module):
    """Parameters of two pieces and of none, with buffers."""

    def __init__(self, width: int = 400) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)
        self.second = nn.Linear(width, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.norm(self.first(x)))).square().mean()


def made() -> tuple[nn.Module, optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    groups = [
        {"params": model.first.parameters(), "lr": 1e-3},
        {"params": [*model.norm.parameters(), *model.second.parameters()]},
    ]
    return model, optim.AdamW(groups, lr=1e-2)


def batch(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 400, generator=generator)


def wrapped(model: nn.Module, optimizer: optim.Optimizer, tier: object) -> rotor.Checkpointable:
    settings = {"mem_limit": "8MiB", "offload": tier, "offload_state": optimizer}
    return rotor.Checkpointable(model, **settings, planning="before")


class Random(nn.Module):
    """Model with dropout in front of another."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.dropout = inner, nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.dropout(x))


def objects_for(optimizer: optim.Optimizer) -> dict[str, object]:
    """Return what a loop has beside an optimizer."""
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)
    schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    return {"schedule": schedule, "scaler": scaler, "order": torch.Generator().manual_seed(3)}


def random_steps(call, optimizer, schedule, scaler, order, count: int) -> list[float]:
    """Run steps on batches that every generator has a part in; return their losses."""
    losses = []
    for _ in range(count):
        x = torch.randn(8, 400) * random.random() + numpy.random.random()  # noqa: NPY002
        loss = call(x[torch.randperm(8, generator=order)])
        losses.append(loss.item())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()
    return losses


def seed_all() -> None:
    torch.manual_seed(5)
    random.seed(5)
    numpy.random.seed(5)  # noqa: NPY002


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at(owner: object, name: str, number: int = 1, half: object = None) -> None:
    """Kill the process at a call of a method, after a half of it."""
    real, calls = getattr(owner, name), []

    def method(*args, **kwargs):
        calls.append(args)
        if len(calls) == number:
            if half is not None:
                half(*args)
            killed()
        return real(*args, **kwargs)

    setattr(owner, name, method)


def half_of_it(tier, area, offset, source) -> None:
    with (tier.directory / recovery.VALUES).open("r+b") as file:
        file.seek(area.begin + offset)
        file.write(bytes(len(source) // 2))


def half_a_head(file, head, begin) -> None:
    os.lseek(file, begin, os.SEEK_SET)
    os.write(file, head[: len(head) // 2])


def run(place: str, folder: Path) -> None:
    model, optimizer = made()
    if place == "with others":
        model = Random(model)
    chk = wrapped(model, optimizer, f"disk:{folder}")
    if place == "with others":
        others = objects_for(optimizer)
        seed_all()
        tier.keep(optimizer, **others)
        kill_at(type(others["schedule"]), "step", 3)
        random_steps(model, optimizer, **others, count=4)
    if place == "before the first step":
        killed()
    # Captures take most of the time; steps of the model itself move the same homes.
    call = chk if place in ("forward", "backward") else model
    for number in range(3):
        if number == 2 and place == "forward":
            kill_at(DiskTier, "read")
        loss = call(batch(number))
        if number == 2 and place == "backward":
            kill_at(DiskTier, "write")
        loss.backward()
        if number == 2:
            {
                "first write": lambda: kill_at(DiskTier, "write"),
                "half a write": lambda: kill_at(DiskTier, "write", 2, half_of_it),
                "late write": lambda: kill_at(DiskTier, "write", 9),
                "begin of a record": lambda: kill_at(os, "pwrite"),
                "half a record": lambda: kill_at(os, "pwrite", 1, half_a_head),
                "complete record": lambda: kill_at(Home, "keep"),
            }.get(place, lambda: None)()
        optimizer.step()
        optimizer.zero_grad()
    if place == "an error":
        raise ZeroDivisionError
    if place != "the end":
        killed()


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    # What is imported here is not imported by each of the others.
    wrapped(*made(), "disk")
    for place in (*PLACES, "the end", "with others"):
        (folder / place).mkdir()
        child = os.fork()
        if child == 0:
            run(place, folder / place)
            return
        print(place, os.WTERMSIG(os.waitpid(child, 0)[1]), sep=": ", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
