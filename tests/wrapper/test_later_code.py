"""Forwards that return code to run later: no limit holds there, and the first step says so."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import rotor


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))


class Yielding(Layers):
    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
            yield x


class Mapping(Layers):
    def forward(self, x):
        return map(nn.Module.__call__, self.layers, [x] * len(self.layers))


class Generating(Layers):
    def forward(self, x):
        return (layer(x).exp() for layer in self.layers)


def gradients(model, called):
    torch.manual_seed(1)
    sum(y.square().mean() for y in called(torch.randn(8, 16))).backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("kind", [Yielding, Mapping, Generating])
def test_the_first_step_says_that_later_code_is_not_limited(kind):
    torch.manual_seed(0)
    model = kind()
    chk = rotor.Checkpointable(copy.deepcopy(model), mem_limit=100_000, engine="dynamic")
    with pytest.warns(rotor.MemoryLimitWarning, match=r"\(100000 bytes\) is not kept: the forward"):
        found = gradients(chk.module, chk)
    assert all(map(torch.equal, found, gradients(model, model)))
    # It is said once.
    gradients(chk.module, chk)


def test_a_list_of_results_is_limited_in_silence():
    class Listing(Layers):
        def forward(self, x):
            return [torch.tanh(layer(x)) for layer in self.layers]

    gradients(*[rotor.Checkpointable(Listing(), mem_limit=100_000, engine="dynamic")] * 2)
