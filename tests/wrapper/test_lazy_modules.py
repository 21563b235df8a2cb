"""Lazy modules, which make their parameters in their first forward."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from training import check_equal

import rotor
from rotor.common.undisturbed import trial


class Looped(nn.Module):
    """Lazy layers in a loop, with dropout that draws between their parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LazyLinear(32) for _ in range(4))
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the result."""
        for layer in self.layers:
            x = self.drop(torch.tanh(layer(x)))
        return x


def loss_of(model: Any, _: int) -> torch.Tensor:
    return model(torch.randn(16, 32)).square().mean()


def in_a_row() -> nn.Sequential:
    return nn.Sequential(
        nn.LazyLinear(32), nn.Tanh(), nn.LazyBatchNorm1d(), nn.Dropout(0.2), nn.LazyLinear(8)
    )


@pytest.mark.parametrize(
    ("make", "engine"),
    [
        *((in_a_row, engine) for engine in ("chain", "auto", "graph", "dynamic")),
        *((Looped, engine) for engine in ("auto", "graph", "dynamic")),
    ],
)
def test_their_first_step_is_plain_and_said_to_be(make: Any, engine: str) -> None:
    with pytest.warns(rotor.MemoryLimitWarning, match="lazy modules make their parameters"):
        check_equal(make, loss_of, accumulates=True, mem_limit="1 MB", engine=engine)


def test_a_sample_is_refused_before_they_are_made() -> None:
    net = in_a_row()
    with pytest.raises(ValueError, match="lazy modules have no parameters yet"):
        rotor.Checkpointable(net, torch.randn(4, 32), mem_limit="1 MB")
    net(torch.randn(4, 32))
    rotor.Checkpointable(net, torch.randn(4, 32), mem_limit="1 MB")


def test_a_trial_leaves_them_lazy() -> None:
    net, x = Looped(), torch.randn(4, 32)
    with trial(net, ((x,), {}), x.device):
        net(x)
    assert all(type(layer) is nn.LazyLinear for layer in net.layers)
    net(x)
    assert all(type(layer) is nn.Linear for layer in net.layers)


@pytest.mark.parametrize("engine", ["auto", "graph", "dynamic"])
@pytest.mark.parametrize(
    ("make", "kind", "shape"),
    [
        (lambda: nn.LazyConv1d(4, 3), nn.Conv1d, (2, 3, 16)),
        (lambda: nn.LazyLinear(8), nn.Linear, (4, 5)),
        (nn.LazyBatchNorm1d, nn.BatchNorm1d, (4, 5)),
    ],
    ids=["convolution", "linear", "batch_norm"],
)
def test_a_lazy_module_that_is_wrapped_itself_becomes_what_it_is(
    engine: str, make: Any, kind: Any, shape: tuple[int, ...]
) -> None:
    x, found = torch.randn(shape, generator=torch.Generator().manual_seed(0)), []
    for is_limited in (False, True):
        torch.manual_seed(0)
        module = make()
        options = {"mem_limit": "1 MB", "engine": engine, "verbosity": -1}
        model = rotor.Checkpointable(module, **options) if is_limited else module
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "lazy modules make their parameters")
            for _ in range(2):
                loss = model(x).square().sum()
                loss.backward()
        gradients = [p.grad.sum().item() for p in module.parameters() if p.grad is not None]
        found.append([loss.item(), *gradients, *model.state_dict()])
        assert type(module) is kind
    assert type(model) is rotor.Checkpointable
    assert isinstance(model, kind)
    assert len(gradients) == 2
    assert found[0] == found[1]
