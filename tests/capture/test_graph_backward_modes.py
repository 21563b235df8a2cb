"""The backward of a captured graph in another mode or state than its forward, as in PyTorch."""

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


SCALES = [1.0]


class Scaled(torch.autograd.Function):
    """Identity whose backward reads a global list, or an attribute of a layer."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Any) -> torch.Tensor:
        ctx.layer = layer
        return x * SCALES[0]

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor) -> Any:
        return given[0] * (SCALES[0] if ctx.layer is None else ctx.layer.scale), None


class Scaling(nn.Module):
    """Layer whose gradient is scaled by what is set when the backward runs."""

    def __init__(self, read: Callable[[Scaling, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.read, self.scale, self.settings = nn.Linear(32, 32), read, 1.0, [1.0]
        self.register_buffer("factor", torch.ones(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.read(self, torch.tanh(self.linear(x)))

    def set(self, value: float) -> None:
        SCALES[0] = self.scale = value
        self.settings[:] = [value] * (2 if value == 0.5 else 1)
        self.factor = torch.full((32,), value)


def _hooked(hook: Callable[[Scaling, torch.Tensor], torch.Tensor]) -> Any:
    def read(layer: Scaling, x: torch.Tensor) -> torch.Tensor:
        x.register_hook(lambda gradient: hook(layer, gradient))
        return x

    return read


def _noted(layer: Scaling, x: torch.Tensor) -> torch.Tensor:
    scale = layer.scale
    x.register_hook(lambda gradient: gradient * scale)
    return x


READS: dict[str, Any] = {
    "function": lambda layer, x: Scaled.apply(x, None),
    "function of an object": lambda layer, x: Scaled.apply(x, layer),
    "hook": _hooked(lambda layer, gradient: gradient * layer.scale),
    "hook of a list": _hooked(lambda layer, gradient: gradient * sum(layer.settings)),
    "hook of a tensor": _hooked(lambda layer, gradient: gradient * layer.factor),
    "hook of the forward's value": _noted,
}


def gradients_read(
    read: Any, engine: str | None, *, breaks: bool = False, alike: int = 0
) -> list[torch.Tensor]:
    """Return gradients of steps with other values in the backward than in the forward."""
    torch.manual_seed(0)
    SCALES[0] = 1.0
    layer = Scaling(read)
    others = [Scaling(read) for _ in range(alike)]
    net = (Asking if breaks else Row)(nn.Linear(32, 32), *others, layer, nn.Dropout(0.1))
    limit: dict[str, Any] = {"mem_limit": "300 KB", "engine": engine, "verbosity": 0}
    model = net if engine is None else rotor.Checkpointable(net, **limit)
    found = []
    for value in (1.0, 1.0, 1.0, 1.0, 3.0, 0.5):
        net.zero_grad()
        loss = model(torch.randn(256, 32)).square().mean()
        layer.set(value)
        loss.backward()
        layer.set(1.0)
        found += [loss.detach(), *[p.grad.clone() for p in net.parameters() if p.grad is not None]]
    return found


@pytest.mark.parametrize("engine", ["graph", "parts"])
@pytest.mark.parametrize("read", READS)
def test_a_backward_reads_what_is_set_when_it_runs(read: str, engine: str) -> None:
    breaks = engine == "parts"
    plain = gradients_read(READS[read], None, breaks=breaks)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", rotor.MemoryLimitWarning)
        limited = gradients_read(READS[read], "auto" if breaks else engine, breaks=breaks)
    is_told = any("reads other values than in the forward" in str(one.message) for one in said)
    assert is_told == (read != "hook of the forward's value" and not breaks)
    assert len(plain) == len(limited)
    assert all(map(torch.equal, plain, limited))


def test_a_hook_of_one_of_alike_layers_reads_its_own() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rotor.MemoryLimitWarning)
        limited = gradients_read(READS["hook"], "graph", alike=3)
    plain = gradients_read(READS["hook"], None, alike=3)
    assert all(map(torch.equal, plain, limited))


def test_a_backward_that_cannot_run_its_forward_again_says_what_it_reads() -> None:
    def read(layer: Scaling, x: torch.Tensor) -> torch.Tensor:
        x.register_hook(lambda gradient: gradient * layer.scale)
        return x @ torch.linalg.inv(layer.linear.weight)

    text = r"1.scale has changed since the forward, and a backward or a hook of the model"
    with pytest.raises(RuntimeError, match=text):
        gradients_read(read, "graph")
