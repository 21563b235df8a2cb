"""On CUDA: the graph engine and the dynamic runtime keep their limits, and numbers are equal."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from gpu_models import DEVICE, images, language, recurrent
from torch import nn

import rotor

pytestmark = pytest.mark.skipif(
    not torch.accelerator.is_available(), reason=f"needs a device of type {DEVICE}"
)


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target)


def _plain_step(model: nn.Module, x: Any, target: Any, seed: int) -> torch.Tensor:
    model.zero_grad()
    torch.manual_seed(seed)
    loss = _loss(model(x), target)
    loss.backward()
    return loss.detach()


def _counted(step: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Return the loss of a step, and its peak by the device's own counters.

    A meter here would keep rotor from metering steps and learning workspaces.
    """
    level = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    loss = step()
    return loss, torch.accelerator.max_memory_allocated() - level


def _plain_peak(model: nn.Module, x: Any, target: Any) -> int:
    model.zero_grad()
    return _counted(lambda: _plain_step(model, x, target, 0))[1]


def _planned_step(model: nn.Module, x: Any, target: Any, seed: int) -> torch.Tensor:
    """Return the loss of a step that computes it itself."""
    torch.manual_seed(seed)
    loss = model(x, targets=(target,))
    loss.backward()
    return loss.detach()


def _step_in_budget(model: nn.Module, x: Any, target: Any, seed: int, limit: int) -> Any:
    """Return the loss of a step of the dynamic runtime, its peak, and its evictions."""
    model.zero_grad()
    with rotor.dtr.budget(limit, device=x.device) as session:
        loss, peak = _counted(lambda: _plain_step(model, x, target, seed))
    return loss, peak, session.stats.evictions


def _assert_equal(a: nn.Module, b: nn.Module) -> None:
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    for p, q in zip(a.buffers(), b.buffers(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("make", [language, images])
@pytest.mark.parametrize("fraction", [0.8, 0.5])
def test_graphs_keep_limits(make, fraction):
    model, x, target = make()
    _plain_step(copy.deepcopy(model), x, target, 0)
    limit = int(fraction * _plain_peak(copy.deepcopy(model), x, target))
    chk = rotor.Checkpointable(copy.deepcopy(model), mem_limit=limit, engine="graph", loss_fn=_loss)
    chk.measure(x, targets=(target,))
    for seed in range(3):
        expected = _plain_step(model, x, target, seed)
        chk.zero_grad()
        found, peak = _counted(lambda seed=seed: _planned_step(chk, x, target, seed))
        assert torch.equal(expected, found)
        assert peak <= limit
        _assert_equal(model, chk.module)


@pytest.mark.parametrize("make", [language, images, recurrent])
@pytest.mark.parametrize("fraction", [0.8, 0.65])
def test_budgets_are_kept(make, fraction):
    model, x, target = make()
    _plain_step(copy.deepcopy(model), x, target, 0)
    limit = int(fraction * _plain_peak(copy.deepcopy(model), x, target))
    planned = copy.deepcopy(model)
    for seed in range(3):
        expected = _plain_step(model, x, target, seed)
        found, peak, evictions = _step_in_budget(planned, x, target, seed, limit)
        assert torch.equal(expected, found)
        assert peak <= limit or seed == 0  # Workspaces are learnt in the first step.
        assert evictions > 0
        _assert_equal(model, planned)


@pytest.mark.parametrize("make", [language, recurrent])
def test_the_dynamic_engine(make):
    model, x, target = make()
    _plain_step(copy.deepcopy(model), x, target, 0)
    limit = int(0.7 * _plain_peak(copy.deepcopy(model), x, target))
    chk = rotor.Checkpointable(copy.deepcopy(model), mem_limit=limit, engine="dynamic")
    for seed in range(4):
        expected = _plain_step(model, x, target, seed)
        assert torch.equal(expected, _plain_step(chk, x, target, seed))
        _assert_equal(model, chk.module)
    chk.zero_grad()
    assert _counted(lambda: _plain_step(chk, x, target, 4))[1] <= limit


@contextmanager
def _other_stream():
    """Run in a stream of its own, nothing waited for but its end."""
    stream = torch.Stream(DEVICE)
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        yield
    stream.synchronize()


@pytest.mark.parametrize("make", [language, images])
def test_a_graph_in_another_stream(make):
    with _other_stream():
        model, x, target = make()
        _plain_step(copy.deepcopy(model), x, target, 0)
        limit = int(0.7 * _plain_peak(copy.deepcopy(model), x, target))
        chk = rotor.Checkpointable(
            copy.deepcopy(model), mem_limit=limit, engine="graph", loss_fn=_loss
        )
        chk.measure(x, targets=(target,))
        for seed in range(3):
            expected = _plain_step(model, x, target, seed)
            chk.zero_grad()
            planned, peak = _counted(lambda seed=seed: _planned_step(chk, x, target, seed))
            assert peak <= limit
            assert torch.equal(expected, planned)
            _assert_equal(model, chk.module)


@pytest.mark.parametrize("make", [language, images])
def test_a_budget_in_another_stream(make):
    with _other_stream():
        model, x, target = make()
        _plain_step(copy.deepcopy(model), x, target, 0)
        limit = int(0.7 * _plain_peak(copy.deepcopy(model), x, target))
        planned = copy.deepcopy(model)
        for seed in range(3):
            expected = _plain_step(model, x, target, seed)
            found, peak, _ = _step_in_budget(planned, x, target, seed, limit)
            assert peak <= limit or seed == 0  # Workspaces are learnt in the first step.
            assert torch.equal(expected, found)
            _assert_equal(model, planned)
