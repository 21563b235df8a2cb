"""Residual blocks in a row, trained plainly and as planned chains, for comparison bit by bit."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from training import same

import rotor

BATCH, WIDTH, INNER = 128, 32, 128


class Block(nn.Module):
    """A residual block; what differs between the models here is `scale`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.begin()

    def begin(self) -> None:
        """Set what the block keeps."""

    def scale(self, h: torch.Tensor) -> Any:
        """A factor for the block's output."""
        return 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.gelu(self.first(x))
        return x + self.second(h) * self.scale(h)

    def state(self) -> Any:
        """What has to be as plain PyTorch leaves it."""
        kept = {k: v for k, v in vars(self).items() if not k.startswith("_") and k != "training"}
        return copy.deepcopy(kept)


Outcome = tuple[list[torch.Tensor], list[list[torch.Tensor]], list[Any]]


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def train(
    net: nn.Module,
    call: Callable[[torch.Tensor], Any],
    *,
    loss: Callable[[Any], torch.Tensor] = lambda y: y.square().mean(),
    steps: int = 3,
) -> Outcome:
    random.seed(6)
    np.random.seed(7)  # noqa: NPY002
    losses, gradients, states = [], [], []
    for step in range(steps):
        net.zero_grad()
        torch.manual_seed(step)
        y = call(torch.randn(BATCH, WIDTH))
        value = loss(y)
        value.backward()
        del y
        losses.append(value.detach())
        gradients.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
        states.append([m.state() for m in net.modules() if isinstance(m, Block)])
    return losses, gradients, states


def check_planned(make: Callable[[], nn.Module], share: float) -> Any:
    """Check that a chain that recomputes trains as its plain net does; return it."""
    net = seeded(make)
    plain = train(net, net)
    net = seeded(make)
    chk = planned(net, share)
    assert chk.plan.schedule.recomputed
    assert same(plain, train(net, chk))
    return chk


def planned(net: nn.Module, share: float, **options: Any) -> Any:
    """The chain of a net at a share of the way from its least limit to no recomputation."""
    chk = rotor.Checkpointable(net, engine="chain", **options)
    torch.manual_seed(9)
    chk.measure(torch.randn(BATCH, WIDTH))
    limits = chk.curve().bytes
    limit = int(limits[0] + share * (limits[-1] - limits[0]))
    chk.compute_sequence(mem_limit=limit)
    return chk
