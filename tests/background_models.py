"""A model, its steps, and searches that run when a test says so."""

from __future__ import annotations

import torch
from torch import nn

import rotor
from rotor.engines.graph.engine import GraphEngine


class Mixed(nn.Module):
    """Blocks of products, normalization, dropout and cheap functions, with a large output."""

    def __init__(self, width: int = 32, blocks: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList(
            nn.ModuleList([nn.Linear(width, 2 * width), nn.Linear(2 * width, width)])
            for _ in range(blocks)
        )
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(blocks))
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for (up, down), norm in zip(self.blocks, self.norms, strict=True):
            x = x + self.drop(down(torch.tanh(up(norm(x))).exp()))
        return x


def rows(count: int = 256) -> torch.Tensor:
    """A batch."""
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(1))


def limits(model: nn.Module, x: torch.Tensor, share: float = 0.4) -> int:
    """A limit between the least that a plan needs and what everything takes."""
    chk = rotor.Checkpointable(model, x, "1GiB", engine="graph", effort="fast")
    most = chk.get_expected_memory()
    try:
        chk.compute_sequence(1)
    except rotor.InfeasibleError as error:
        return int(error.minimum_bytes + share * (most - error.minimum_bytes))
    raise AssertionError("a plan within one byte")


def train(model: nn.Module, x: torch.Tensor, steps: int, begin: int = 0) -> list[float]:
    """Losses of some steps, each with its own seed."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    losses = []
    for step in range(begin, begin + steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def plain_losses(steps: int) -> list[float]:
    """Losses of the plain model."""
    torch.manual_seed(0)
    return train(Mixed(), rows(), steps)


def wrapped(limit: int | str, model: nn.Module | None = None, **options) -> rotor.Checkpointable:
    """The model, or another one, under a limit."""
    torch.manual_seed(0)
    return rotor.Checkpointable(model or Mixed(), mem_limit=limit, engine="graph", **options)


class SteppedJob:
    """Job that runs when `run` is called."""

    def __init__(self, work) -> None:
        self.work = work
        self.value = None
        self.error = None
        self.is_stopped = False
        self.is_over = False

    def run(self) -> None:
        try:
            self.value = self.work(lambda: self.is_stopped)
        except Exception as error:
            self.error = error
        self.is_over = True

    def is_done(self) -> bool:
        return self.is_over

    def wait(self, timeout=None) -> bool:
        if not self.is_over and (timeout is None or timeout > 0):
            self.run()
        return self.is_over

    def stop(self) -> None:
        self.is_stopped = True

    def result(self):
        if self.error is not None:
            raise self.error
        return self.value


class Stepped:
    """Executor whose work runs in `run`, in the thread of the test."""

    def __init__(self) -> None:
        self.jobs: list[SteppedJob] = []

    def __call__(self, work) -> SteppedJob:
        self.jobs.append(SteppedJob(work))
        return self.jobs[-1]

    def run(self) -> None:
        for job in self.jobs:
            if not job.is_done():
                job.run()


def engine_of(chk: rotor.Checkpointable) -> GraphEngine:
    """The engine of a model."""
    return chk._driver.engines[0]


def stepped(chk: rotor.Checkpointable) -> Stepped:
    """The executor of a model's searches, which from now on run when a test says so."""
    executor = Stepped()
    engine_of(chk).improver.executor = executor
    return executor
