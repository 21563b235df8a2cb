"""Parameters that are results of operations, as `torch.func.functional_call` puts them in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import rotor


def trained(wrap: Callable[[nn.Module], Any], build: Callable[[], nn.Module]) -> list[Any]:
    torch.manual_seed(0)
    plain = build()
    model, seen = wrap(plain), []
    for _ in range(3):
        computed = {name: p * 1.5 for name, p in model.named_parameters()}
        output = torch.func.functional_call(model, computed, (torch.randn(64, 32),))
        output.square().mean().backward()
        seen.append(output.tolist())
    return [seen, *[p.grad.tolist() for p in plain.parameters()]]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("engine", ["auto", "dynamic"])
def test_parameters_that_are_results_are_read_without_a_warning(engine):
    limited = trained(
        lambda model: rotor.Checkpointable(model, mem_limit="1MiB", engine=engine), Layers
    )
    assert limited == trained(lambda model: model, Layers)


def test_a_chain_reads_results_without_a_warning():
    def build() -> nn.Module:
        return nn.Sequential(*[m for _ in range(5) for m in (nn.Linear(32, 32), nn.Tanh())])

    limited = trained(lambda model: rotor.Checkpointable(model, mem_limit="1MiB"), build)
    assert limited == trained(lambda model: model, build)
