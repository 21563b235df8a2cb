"""Parameters that are written to between forward and backward: an error if one is read again."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import rotor

CHANGED = re.compile("changed (in place|or replaced) between|was written to in place")


class Block(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x)) + self.shift))


class Scaled(nn.Module):
    """Layers whose scale is read by the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[Block() for _ in range(4)])
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * self.scale


def made() -> nn.Module:
    torch.manual_seed(0)
    return Scaled()


def trained(model: nn.Module, called: nn.Module, *names: str) -> list[torch.Tensor]:
    """Gradients of three steps that add 1 to the named parameters before each backward."""
    seen = []
    for _ in range(3):
        model.zero_grad()
        loss = called(torch.ones(64, 64) * 0.1).square().sum()
        with torch.no_grad():
            for name in names:
                model.get_parameter(name).add_(1)
        loss.backward()
        seen += [parameter.grad for parameter in model.parameters()]
    return seen


UNREAD = ("layers.0.first.bias", "layers.0.first.weight", "layers.3.second.bias", "layers.1.shift")


@pytest.mark.parametrize("engine", ["graph", "dynamic", "auto"])
@pytest.mark.parametrize("name", UNREAD)
def test_a_parameter_that_nothing_reads_again_may_change(name, engine):
    plain = made()
    model = made()
    limited = rotor.Checkpointable(model, mem_limit="4 MB", engine=engine, verbosity=-1)
    expected = trained(plain, plain, name)
    assert all(map(torch.equal, expected, trained(model, limited, name)))


@pytest.mark.parametrize("engine", ["chain", "auto"])
def test_a_parameter_of_a_chain_may_change(engine):
    plain, model = made().layers, made().layers
    limited = rotor.Checkpointable(model, mem_limit="4 MB", engine=engine, verbosity=-1)
    expected = trained(plain, plain, "1.shift")
    assert all(map(torch.equal, expected, trained(model, limited, "1.shift")))


@pytest.mark.parametrize(("engine", "limit"), [("graph", 188), ("dynamic", 240), ("chain", 210)])
def test_a_parameter_that_is_read_again_must_not_change(engine, limit):
    model = made().layers
    limited = rotor.Checkpointable(
        model, mem_limit=f"{limit} KiB", engine=engine, verbosity=-1, planning="before"
    )
    with pytest.raises(RuntimeError, match=CHANGED):
        trained(model, limited, *(f"{layer}.first.bias" for layer in range(4)))


@pytest.mark.parametrize("engine", ["graph", "dynamic", "auto"])
def test_a_parameter_that_the_backward_reads_must_not_change(engine):
    for limit in (None, "4 MB"):
        called = model = made()
        if limit is not None:
            called = rotor.Checkpointable(model, mem_limit=limit, engine=engine, verbosity=-1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            trained(model, called, "scale")


def test_a_model_that_inductor_compiles_reads_no_bias_again():
    plain, model = made(), made()
    options = {"mem_limit": "4 MB", "engine": "graph", "backend": "inductor", "verbosity": -1}
    limited = rotor.Checkpointable(model, **options)
    expected = trained(plain, plain, UNREAD[0])
    torch.testing.assert_close(trained(model, limited, UNREAD[0]), expected, rtol=1e-3, atol=1e-4)
