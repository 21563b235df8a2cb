"""Gradients have the strides that autograd gives them, whatever the layout of the parameters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import rotor


class Scale(nn.Module):
    """Parameters with one element, with extents of one, and without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.all = nn.Parameter(torch.randn(1, 8, 1, 1)), nn.Parameter(torch.ones(()))
        self.place = nn.Parameter(torch.randn(8, 8, 8).permute(2, 0, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * self.each + self.place * self.all)


def channels_last(value: torch.Tensor) -> torch.Tensor:
    return value.to(memory_format=torch.channels_last) if value.ndim == 4 else value


def transposed(value: torch.Tensor) -> torch.Tensor:
    return value.transpose(0, 1).contiguous().transpose(0, 1) if value.ndim > 1 else value


def expanded(value: torch.Tensor) -> torch.Tensor:
    return value[:1].expand(value.shape) if value.ndim else value


def apart(value: torch.Tensor) -> torch.Tensor:
    return torch.stack([value, value], -1)[..., 0]


LAYOUTS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    channels_last, transposed, expanded, apart,
]  # fmt: skip


def made(layout: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        Scale(),
        nn.ConvTranspose2d(8, 4, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(4, 4, 1),
        nn.Flatten(),
        nn.Linear(256, 1),
        nn.Linear(1, 6),
    )
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(layout(parameter.detach())))
    return model


def trained(model: nn.Module, called: nn.Module, *, adds: bool) -> list[torch.Tensor]:
    x, seen = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(1)), []
    for _ in range(3):
        if not adds:
            model.zero_grad()
        called(x).sum().backward()
        seen += [parameter.grad for parameter in model.parameters()]
        seen += [gradient.clone() for gradient in seen[-len(list(model.parameters())) :]]
    return seen


@pytest.mark.parametrize("engine", ["chain", "graph", "dynamic", "auto"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_have_the_strides_of_autograd(engine, layout):
    for adds in (False, True):
        plain, model = made(layout), made(layout)
        expected = trained(plain, plain, adds=adds)
        limited = rotor.Checkpointable(model, mem_limit="1 MB", engine=engine, verbosity=-1)
        found = trained(model, limited, adds=adds)
        assert all(map(torch.equal, found, expected))
        assert [one.stride() for one in found] == [one.stride() for one in expected]
