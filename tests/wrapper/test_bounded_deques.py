"""Deques with a greatest length, which forwards read and append to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import rotor

Bank = deque[torch.Tensor]
CHANGES: dict[str, Callable[[Bank, torch.Tensor], object]] = {
    "append": lambda bank, x: bank.append(x),
    "appendleft": lambda bank, x: bank.appendleft(x),
    "extend": lambda bank, x: bank.extend([x, x + 1]),
    "none": lambda bank, x: None,
}


class Remembering(nn.Module):
    def __init__(self, change: Callable[[Bank, torch.Tensor], object]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.bank = deque([torch.ones(128, 32)], maxlen=2)
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        self.change(self.bank, x.detach())
        return x * torch.stack(list(self.bank)).mean(0) + len(self.bank) * self.bank[0]


def trained(change: str, wrap: Callable[[nn.Module], Any]) -> list[Any]:
    torch.manual_seed(0)
    plain = Remembering(CHANGES[change])
    model, seen = wrap(plain), []
    for _ in range(4):
        loss = model(torch.randn(128, 32)).square().mean()
        loss.backward()
        seen += [loss.item(), *[t.tolist() for t in plain.bank]]
    return [seen, *[p.grad.tolist() for p in plain.parameters()]]


@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
@pytest.mark.parametrize("change", CHANGES)
def test_a_bounded_deque_holds_what_it_holds_in_plain_training(change):
    limited = trained(change, lambda model: rotor.Checkpointable(model, mem_limit="240KiB"))
    assert limited == trained(change, lambda model: model)
