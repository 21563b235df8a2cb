"""Outputs that share memory: what is written to one of them reaches the gradients of the others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from zoo.models import Residual, Row

import rotor

WIDTH = 48


class Split(nn.Module):
    """The input and parts of it, in a dictionary with a list."""

    def __init__(self, take: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.take = take

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        x = x * 2
        return {"whole": x, "parts": [self.take(x)]}


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "columns": lambda x: x[:, 4:12],
    "transposed": lambda x: x.t(),
    "one row": lambda x: x[3],
    "in another shape": lambda x: x.view(-1, 4, WIDTH // 4),
}
WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "whole": lambda whole, part: whole.mul_(3),
    "part": lambda whole, part: part.mul_(3),
    "nothing": lambda whole, part: None,
}


def gradients(net: nn.Module, model: Any, write: Any) -> list[torch.Tensor]:
    found = []
    for seed in range(3):
        net.zero_grad()
        x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(seed))
        output = model(x)
        whole, (part,) = output["whole"], output["parts"]
        write(whole, part)
        (whole.square().mean() + part.sin().sum()).backward()
        found += [p.grad.clone() for p in net.parameters()]
    return found


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("engine", ["graph", "dynamic", "chain"])
def test_gradients_of_outputs_that_share_memory_are_those_of_the_plain_model(engine, view, write):
    torch.manual_seed(0)
    kind = nn.Sequential if engine == "chain" else Row
    net = kind(*(Residual(WIDTH, 4 * WIDTH) for _ in range(3)), Split(VIEWS[view]))
    plain = copy.deepcopy(net)
    model = rotor.Checkpointable(net, mem_limit="2 MB", engine=engine)
    expected = gradients(plain, plain, WRITES[write])
    assert all(map(torch.equal, expected, gradients(net, model, WRITES[write])))


@pytest.mark.parametrize("engine", ["graph", "dynamic", "chain"])
def test_parts_of_an_output_are_views_of_it(engine):
    kind = nn.Sequential if engine == "chain" else Row
    net = kind(Residual(WIDTH, 4 * WIDTH), Split(VIEWS["columns"]))
    output = rotor.Checkpointable(net, mem_limit="2 MB", engine=engine)(torch.randn(64, WIDTH))
    assert output["parts"][0]._base is output["whole"]
