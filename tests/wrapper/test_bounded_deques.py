"""Deques with a greatest length, which forwards read and append to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest
import torch
from torch import nn
from training import check_equal

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


@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
@pytest.mark.parametrize("change", CHANGES)
def test_a_bounded_deque_holds_what_it_holds_in_plain_training(change):
    check_equal(
        lambda: Remembering(CHANGES[change]),
        lambda model, _: model(torch.randn(128, 32)).square().mean(),
        4,
        state=lambda model: list(model.bank),
        accumulates=True,
        mem_limit="240KiB",
    )
