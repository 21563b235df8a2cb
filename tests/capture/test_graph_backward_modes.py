"""The backward of a captured graph in another mode than its forward, as in plain PyTorch."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from zoo.models import Asking, Row, Skip

import rotor


def autocast() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


@contextlib.contextmanager
def without_mkldnn() -> Any:
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(True)


@contextlib.contextmanager
def deterministic() -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "autocast around the backward": (contextlib.nullcontext, autocast),
    "autocast around both": (autocast, autocast),
    "autocast around the forward": (autocast, contextlib.nullcontext),
    "inference mode around the backward": (contextlib.nullcontext, torch.inference_mode),
    "other kernels in the backward": (contextlib.nullcontext, without_mkldnn),
    "other kernels in the forward": (without_mkldnn, contextlib.nullcontext),
    "deterministic mode around the backward": (contextlib.nullcontext, deterministic),
    "deterministic mode around the forward": (deterministic, contextlib.nullcontext),
}


def net_of(breaks: bool) -> nn.Module:
    """Model with dropout and norms; it breaks its graph if asked for."""
    norm = nn.LayerNorm(32)
    parts = lambda: (nn.Linear(32, 96), nn.GELU(), nn.Dropout(0.1), nn.Linear(96, 32))  # noqa: E731
    return (Asking if breaks else Row)(*(Skip(norm, *parts()) for _ in range(5)))


def gradients(mode: str, engine: str | None, *, breaks: bool = False) -> list[torch.Tensor]:
    forward, backward = MODES[mode]
    torch.manual_seed(0)
    net = net_of(breaks)
    limit: dict[str, Any] = {"mem_limit": "900 KB", "engine": engine, "verbosity": 0}
    model = net if engine is None else rotor.Checkpointable(net, **limit)
    x, found = torch.randn(256, 32), []
    for step in range(4):
        if step == 2:
            net.zero_grad()
        with forward():
            loss = model(x).float().square().mean()
        with backward():
            loss.backward()
        found += [loss.detach(), *[p.grad.clone() for p in net.parameters() if p.grad is not None]]
    if engine == "graph" and forward is not autocast:
        assert any(plan.recomputed for plan in model.plans.values())
    return found


@pytest.mark.parametrize("mode", MODES)
def test_a_backward_in_another_mode_gives_plain_gradients(mode: str) -> None:
    plain = gradients(mode, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rotor.MemoryLimitWarning)
        limited = gradients(mode, "graph")
    assert len(plain) == len(limited)
    assert all(map(torch.equal, plain, limited))


@pytest.mark.parametrize("mode", MODES)
def test_a_backward_of_parts_in_another_mode_gives_plain_gradients(mode: str) -> None:
    plain = gradients(mode, None, breaks=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rotor.MemoryLimitWarning)
        limited = gradients(mode, "auto", breaks=True)
    assert len(plain) == len(limited)
    assert all(map(torch.equal, plain, limited))
