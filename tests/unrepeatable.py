"""Operators of torch.library that repeat, draw random numbers, or keep state; small models."""

from __future__ import annotations

import random
import warnings

import numpy as np
import torch
from torch import nn

import rotor
from rotor.errors import InfeasibleError

GENERATOR = torch.Generator()
STATE = {"calls": 0, "lies": False}


def operator(name, body):
    """An operator on one tensor, whose gradient is passed on as it is."""
    made = torch.library.custom_op(f"rotor_tests::{name}", mutates_args=())(body)
    made.register_fake(lambda x: torch.empty_like(x))
    made.register_autograd(lambda ctx, gradient: gradient)
    return made


def _repeats(x: torch.Tensor) -> torch.Tensor:
    return x * 1.5


def _default(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand_like(x)


def _own_generator(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(x.shape, generator=GENERATOR)


def _python(x: torch.Tensor) -> torch.Tensor:
    return x + random.random()


def _numpy(x: torch.Tensor) -> torch.Tensor:
    return x + float(np.random.rand())  # noqa: NPY002


def _liar(x: torch.Tensor) -> torch.Tensor:
    STATE["calls"] += 1
    return x + (1e-3 * STATE["calls"] if STATE["lies"] else 0.0)


OPERATORS = {
    "repeats": operator("repeats", _repeats),
    "default": operator("default", _default),
    "own_generator": operator("own_generator", _own_generator),
    "python": operator("python", _python),
    "numpy": operator("numpy", _numpy),
    "liar": operator("liar", _liar),
}


class Block(nn.Module):
    """A layer, batch normalization, an operator, a gate."""

    def __init__(self, name: str, width: int = 32, norm: bool = False) -> None:
        super().__init__()
        self.operator = OPERATORS[name]
        self.layer = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width) if norm else nn.Identity()

    def forward(self, x):
        x = self.operator(torch.tanh(self.norm(self.layer(x))))
        return x * torch.sigmoid(x)


class Stack(nn.Module):
    """Several blocks; with `parts`, a step in Python between them that no graph can have."""

    def __init__(self, name: str, depth: int = 5, norm: bool = False, parts: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(name, norm=norm) for _ in range(depth))
        self.parts = parts

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            if self.parts and x.detach().abs().max().item() > 1e9:
                break
        return x


def seed(number: int = 1) -> None:
    """Seed every generator that the operators draw from."""
    torch.manual_seed(number)
    GENERATOR.manual_seed(number)
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002


def sample(rows: int = 128, width: int = 32) -> torch.Tensor:
    """An input."""
    return torch.rand(rows, width, generator=torch.Generator().manual_seed(7))


def step(model, x) -> tuple[float, list[torch.Tensor]]:
    """The loss and the gradients of one step from seeded generators."""
    model.zero_grad()
    seed()
    loss = model(x).square().mean()
    loss.backward()
    return loss.item(), [p.grad.clone() for p in model.parameters()]


def planned(model, x, factor: float = 1.02, **options):
    """The model under about the least limit, and the warnings of getting there."""
    model.zero_grad()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        chk = rotor.Checkpointable(model, **{"effort": "fast"} | options)
        chk.measure(x)
        try:
            chk.compute_sequence(1)
        except InfeasibleError as error:
            chk.compute_sequence(int(error.minimum_bytes * factor))
    return chk, [str(w.message) for w in caught]


def runs_of(chk, name):
    """How often the operations of an operator run in the plan."""
    return [
        int(runs)
        for operation, runs in zip(chk.graph.operations, chk.program.runs, strict=True)
        if operation.name.startswith(name)
    ]
