"""Small odd models and the loops that train them: the registry `ZOO`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

BATCH, WIDTH, HIDDEN = 128, 64, 256

Step = Callable[["Case", Any, nn.Module, torch.optim.Optimizer, int], torch.Tensor]


def rows(_: int = 0, *, batch: int = BATCH, width: int = WIDTH) -> tuple[torch.Tensor]:
    """One input of `batch` rows."""
    return (torch.randn(batch, width),)


def images(_: int = 0, *, batch: int = 8, channels: int = 3) -> tuple[torch.Tensor]:
    """One input of small images."""
    return (torch.randn(batch, channels, 16, 16),)


def tokens(_: int = 0, *, batch: int = 8, length: int = 32) -> tuple[torch.Tensor]:
    """One input of token numbers below 100."""
    return (torch.randint(100, (batch, length)),)


def scalar(output: Any) -> torch.Tensor:
    """A loss that depends on every floating-point tensor of an output that has a gradient."""
    found = [t for t in tensors(output) if t.requires_grad]
    parts = [(t * t).real.mean() if t.is_complex() else (t * t).mean() for t in found if t.numel()]
    return torch.stack([part.double() for part in parts]).sum()


def tensors(value: Any) -> list[torch.Tensor]:
    """Every tensor in nested tuples, lists, dictionaries and dataclasses."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    elif dataclasses.is_dataclass(value):
        value = [getattr(value, f.name) for f in dataclasses.fields(value)]
    if isinstance(value, list | tuple):
        return [t for item in value for t in tensors(item)]
    return []


def usual_step(
    case: Case, model: Any, net: nn.Module, optimizer: torch.optim.Optimizer, k: int
) -> torch.Tensor:
    """One step of the usual training loop; the loss."""
    optimizer.zero_grad()
    output = model(*case.inputs(k), **case.keywords(k))
    loss = case.loss(net, output)
    loss.backward()
    optimizer.step()
    return loss.detach()


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    """An optimizer without a state of its own."""
    return torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.01)


@dataclass(frozen=True)
class Case:
    """A model and its training loop.

    Attributes
    ----------
    make
        Returns the model.
    inputs, keywords
        The arguments of the model's step `k`.
    loss
        The loss of (the plain model, its output).
    step
        One step of training, given (case, model to call, plain model, optimizer, k).
    optimizer
        Returns the optimizer of a model.
    state
        Python values of the model that training changes.
    steps
        Number of steps.
    keeps_gradients
        Whether a step begins with the gradients of the step before it.
    varies
        Whether steps of the same shapes differ in their bytes: the first excess is a warning.
    pending
        Forwards before the first backward, each of which has a limit of its own; 0: the step
        allocates beside the model, and is not metered.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Any, ...]] = rows
    keywords: Callable[[int], dict[str, Any]] = lambda _: {}
    loss: Callable[[nn.Module, Any], torch.Tensor] = lambda _, output: scalar(output)
    step: Step = usual_step
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd
    state: Callable[[nn.Module], Any] = lambda _: None
    steps: int = 5
    keeps_gradients: bool = False
    varies: bool = False
    pending: int = 1


ZOO: dict[str, Callable[[], Case]] = {}


def cases(**made: Callable[[], Case]) -> None:
    """Register cases by their names."""
    assert not ZOO.keys() & made.keys()
    ZOO.update(made)


def case(function: Callable[[], Case]) -> Callable[[], Case]:
    """Register a case by the name of the function that returns it."""
    cases(**{function.__name__: function})
    return function


class Residual(nn.Module):
    """A block of two layers with a skip connection, whose inner function can be replaced."""

    def __init__(self, inner: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.inner = inner or torch.nn.functional.gelu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.inner(self.up(x)))


def blocks(block: Callable[[], nn.Module] = Residual, depth: int = 5) -> nn.Sequential:
    """A Sequential of alike blocks."""
    return nn.Sequential(*[block() for _ in range(depth)])


class Loop(nn.Module):
    """Alike blocks in a loop: no Sequential."""

    def __init__(self, block: Callable[[], nn.Module] = Residual, depth: int = 5) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(depth))

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return x
