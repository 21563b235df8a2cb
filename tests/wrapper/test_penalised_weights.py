"""Weights that are penalised outside of the model: how their gradients are added up."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rotor


class Tied(nn.Module):
    """Layers between two uses of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(128, 128) * 0.05)
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(x @ self.weight)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x @ self.weight.t()


def tied_stages() -> nn.Sequential:
    stages = [nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(4)]
    first, last = nn.Linear(128, 128, bias=False), nn.Linear(128, 128, bias=False)
    last.weight = first.weight
    return nn.Sequential(first, *stages, last)


def gradients(model: nn.Module, called: nn.Module, *, early: bool = False) -> list[torch.Tensor]:
    """Return gradients of a loss whose penalty comes after the model, or before it."""
    weight, seen = next(model.parameters()), []
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        model.zero_grad()
        penalty = weight.square().sum() if early else None
        output = called(x).sum()
        (output + (weight.square().sum() if penalty is None else penalty)).backward()
        seen += [parameter.grad for parameter in model.parameters()]
    return seen


@pytest.mark.parametrize("early", [False, True])
def test_a_chain_adds_the_uses_of_several_stages_as_autograd_does(early):
    torch.manual_seed(0)
    model = tied_stages()
    expected = gradients(model, model, early=early)
    limited = rotor.Checkpointable(model, mem_limit="640 KiB", engine="chain", verbosity=-1)
    assert all(map(torch.equal, expected, gradients(model, limited, early=early)))


@pytest.mark.parametrize("engine", ["graph", "dynamic"])
def test_a_graph_adds_up_its_own_uses_first(engine):
    torch.manual_seed(0)
    model = Tied()
    limited = rotor.Checkpointable(model, mem_limit="1 MB", engine=engine, verbosity=-1)
    found = gradients(model, limited)
    torch.testing.assert_close(found, gradients(model, model), rtol=1e-5, atol=1e-5)
    model.zero_grad()
    model(torch.randn(64, 128, generator=torch.Generator().manual_seed(1))).sum().backward()
    assert torch.equal(found[0], 2 * model.weight.detach() + model.weight.grad)
    # A penalty that comes first is added last, as in plain execution.
    early = gradients(model, limited, early=True)
    assert all(map(torch.equal, gradients(model, model, early=True), early))


def test_a_penalty_beyond_the_limit_is_said():
    torch.manual_seed(0)
    model = Tied()
    limited = rotor.Checkpointable(model, mem_limit=1, engine="graph", verbosity=-1)
    with pytest.raises(rotor.InfeasibleError) as error:
        gradients(model, limited)
    least = error.value.minimum_bytes
    limited = rotor.Checkpointable(model, mem_limit=least, engine="graph", verbosity=-1)
    with pytest.warns(rotor.MemoryLimitWarning, match="(was|could) not (be )?kept"):
        gradients(model, limited)
