"""Cases: processes forked before, between and during planned steps."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from zoo.cases import (
    BATCH,
    WIDTH,
    Case,
    Loop,
    Residual,
    Step,
    blocks,
    case,
    cases,
    rows,
    scalar,
    usual_step,
)


@contextmanager
def _forking() -> Iterator[None]:
    with warnings.catch_warnings():
        # Some versions of Python warn of any fork beside threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def _forked(act: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What an action gives in a forked process, as float64; and that process ends."""
    ours, theirs = os.pipe()
    with _forking():
        process = os.fork()
    if not process:
        found = b""
        try:
            torch.set_num_threads(1)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = act().detach().double().numpy().tobytes()
        finally:
            os.write(theirs, found)
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        found = pipe.read()
    os.waitpid(process, 0)
    if len(found) != 8:
        raise AssertionError("the forked process gave no loss")
    return torch.frombuffer(bytearray(found), dtype=torch.float64)[0]


def _step_in_a_child(
    case: Case, model: Any, net: nn.Module, optimizer: Any, k: int
) -> torch.Tensor:
    """A training step in a forked process, then one here: both from the same state."""

    def train() -> torch.Tensor:
        return usual_step(case, model, net, optimizer, k)

    with torch.random.fork_rng():
        theirs = _forked(train)
    return train() + theirs


@case
def forked_before_training() -> Case:
    def step(case: Case, model: Any, net: nn.Module, optimizer: Any, k: int) -> torch.Tensor:
        run: Step = usual_step if k else _step_in_a_child
        return run(case, model, net, optimizer, k)

    return Case(blocks, step=step)


@case
def forked_between_steps() -> Case:
    def step(case: Case, model: Any, net: nn.Module, optimizer: Any, k: int) -> torch.Tensor:
        run: Step = _step_in_a_child if k == 2 else usual_step
        return run(case, model, net, optimizer, k)

    return Case(Loop, step=step)


@case
def forked_between_steps_chain() -> Case:
    def step(case: Case, model: Any, net: nn.Module, optimizer: Any, k: int) -> torch.Tensor:
        run: Step = _step_in_a_child if k == 2 else usual_step
        return run(case, model, net, optimizer, k)

    return Case(blocks, step=step)


def _backward_in_a_child(
    case: Case, model: Any, net: nn.Module, optimizer: Any, k: int
) -> torch.Tensor:
    """The backward of one forward, in a forked process and here."""
    optimizer.zero_grad()
    loss = scalar(model(*rows(k)))

    def gradients() -> torch.Tensor:
        loss.backward()
        return torch.stack([p.grad.double().square().sum() for p in net.parameters()]).sum()

    theirs = _forked(gradients) if k == 2 else torch.zeros((), dtype=torch.float64)
    ours = gradients()
    optimizer.step()
    return loss.detach() + ours + theirs


@case
def forked_in_forward() -> Case:
    """A stage whose forward waits for a process that it forks."""

    class Forking(Residual):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with _forking():
                process = os.fork()
            if not process:
                os._exit(0)
            os.waitpid(process, 0)
            return super().forward(x)

    def make() -> nn.Module:
        return nn.Sequential(*blocks(depth=2), Forking(), *blocks(depth=2))

    return Case(make)


class _Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 2 * BATCH

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.linspace(-1, 1, WIDTH) * (index % 7 - 3)


@case
def forked_loader() -> Case:
    """Batches come from worker processes that are forked while the model trains."""

    def step(case: Case, model: Any, net: nn.Module, optimizer: Any, k: int) -> torch.Tensor:
        loader = DataLoader(
            _Rows(), batch_size=BATCH, num_workers=1, multiprocessing_context="fork"
        )
        total = torch.zeros((), dtype=torch.float64)
        with _forking():
            for x in loader:
                optimizer.zero_grad()
                loss = scalar(model(x))
                loss.backward()
                optimizer.step()
                total += loss.detach()
        return total

    # The batches arrive within the step: they are allocated beside the model.
    return Case(blocks, step=step, steps=3, pending=0)


cases(
    forked_before_backward=lambda: Case(Loop, step=_backward_in_a_child),
    forked_before_backward_chain=lambda: Case(blocks, step=_backward_in_a_child),
)
