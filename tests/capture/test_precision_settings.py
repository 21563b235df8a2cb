"""The settings of PyTorch's precision by backend and operator, in every engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import rotor
from rotor import dtr
from rotor._pytorch import dispatch

SETTINGS: dict[str, tuple[Any, str]] = {
    "all": (torch.backends, "tf32"),
    "matmul": (torch.backends.cuda.matmul, "tf32"),
    "conv": (torch.backends.cudnn.conv, "ieee"),
    "mkldnn": (torch.backends.mkldnn.matmul, "ieee"),
}


@pytest.fixture(params=SETTINGS)
def setting(request: pytest.FixtureRequest) -> Iterator[str]:
    """Set one of them, so that the older flags cannot be read."""
    owner, value = SETTINGS[request.param]
    before = owner.fp32_precision
    owner.fp32_precision = value
    yield request.param
    owner.fp32_precision = before


def test_programs_run_within_a_budget(setting: str):
    w = nn.Parameter(torch.linspace(-1, 1, 64 * 64).reshape(64, 64))
    x = torch.linspace(0, 1, 64 * 64).reshape(64, 64)

    def step() -> torch.Tensor:
        h = x
        for _ in range(8):
            h = torch.tanh(h @ w)
        (gradient,) = torch.autograd.grad(h.square().mean(), w)
        return gradient

    expected = step()
    flags = dispatch.backend_flags()
    with dtr.budget(140_000) as session:
        found = step()
    assert session.stats.rematerializations > 0
    assert torch.equal(found, expected)
    assert dispatch.backend_flags() == flags


def test_operators_run_again_with_the_settings_they_had():
    """Settings that change between an operator and its replay are put back for the replay."""
    seen: list[str] = []
    x = torch.linspace(0, 1, 40_000)

    @torch.library.custom_op("rotor_tests::precision_seen", mutates_args=())
    def precision_seen(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.backends.mkldnn.matmul.fp32_precision)
        return x * 2

    before = torch.backends.mkldnn.matmul.fp32_precision
    try:
        with dtr.budget(500_000):
            torch.backends.mkldnn.matmul.fp32_precision = "ieee"
            y = precision_seen(x)
            torch.backends.mkldnn.matmul.fp32_precision = "bf16"
            others = [x * k for k in range(4)]
            del others
            seen.clear()
            assert float(y[1]) == float(x[1] * 2)
            assert set(seen) == {"ieee"}
            assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before


@pytest.mark.parametrize("engine", ["chain", "dynamic"])
def test_models_train(setting: str, engine: str):
    _train(engine)


def test_models_train_as_graphs():
    owner, value = SETTINGS["matmul"]
    before = owner.fp32_precision
    owner.fp32_precision = value
    try:
        _train("graph")
    finally:
        owner.fp32_precision = before


def _train(engine: str) -> None:
    gradients = []
    for limited in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
        model: Any = rotor.Checkpointable(net, mem_limit="1MiB", engine=engine) if limited else net
        model(torch.ones(16, 32)).square().mean().backward()
        gradients.append([parameter.grad for parameter in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
