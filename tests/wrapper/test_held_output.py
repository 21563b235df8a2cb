"""Limits with room for a chain's output only until the backward of the last stage.

They hold for a caller who drops the output before; one who holds it is told so, in numbers.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Collection

import pytest
import torch
import torch._dynamo  # Its import leaves a cycle with the frames that led to it.
from torch import nn
from zoo.models import Residual

import rotor
from rotor import memory

STEPS = 6


def sequential() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), *[Residual(64, 192) for _ in range(5)])


def batch() -> torch.Tensor:
    return torch.randn(512, 64)


def least() -> int:
    """Return the least limit of a chain whose output is held."""
    with pytest.raises(rotor.InfeasibleError) as refusal:
        rotor.Checkpointable(sequential(), batch(), mem_limit=100_000, engine="chain")
    return refusal.value.minimum_bytes


def train(
    model: nn.Module, holding: Collection[int] = (), *, held: str = "output"
) -> tuple[list[int], list[list[str]], list[torch.Tensor]]:
    """Return the peaks and warnings of steps, of which some hold the output, and gradients."""
    peaks, said = [], []
    for i in range(STEPS):
        x = batch()
        model.zero_grad()
        # A step with a meter of rotor's own has no other one.
        meter = memory.meter("cpu") if i > 2 else None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if meter:
                meter.start()
            output = model(x)
            loss = output.square().mean()
            kept = output.detach() if held == "alias" else output
            del output
            if i not in holding:
                del kept
            loss.backward()
            if meter:
                meter.stop()
                peaks.append(meter.peak_bytes)
        kept = loss = None
        said.append([str(w.message) for w in caught if w.category is rotor.MemoryLimitWarning])
    return peaks, said, [p.grad for p in model.parameters()]


def test_a_dropped_output_needs_no_room_in_the_backward() -> None:
    limit = least() - 512 * 64 * 4 // 2
    model = rotor.Checkpointable(sequential(), mem_limit=limit, engine="chain")
    peaks, said, gradients = train(model)
    assert not any(said)
    assert max(peaks) <= limit
    plain = sequential()
    _, _, expected = train(plain)
    assert all(map(torch.equal, gradients, expected))


@pytest.mark.parametrize("held", ["output", "alias"])
def test_a_later_held_output_is_told_in_numbers(held: str) -> None:
    limit = least() - 512 * 64 * 4 // 2
    model = rotor.Checkpointable(sequential(), mem_limit=limit, engine="chain")
    peaks, said, _ = train(model, {3}, held=held)
    assert not any(said[:3])
    assert peaks[0] > limit
    (text,) = said[3]
    assert "output was held" in text
    assert str(limit) in text


def test_an_output_held_from_the_first_step_is_told_with_the_limit_that_would_do() -> None:
    needed = least()
    limit = needed - 512 * 64 * 4 // 2
    model = rotor.Checkpointable(sequential(), mem_limit=limit, engine="chain")
    _, said, _ = train(model, range(STEPS))
    texts = [text for step in said for text in step]
    assert any("output was held" in text for text in texts)
    assert any("would do" in text for text in texts)


def test_a_limit_with_room_for_no_schedule_names_the_least_for_a_held_output() -> None:
    needed = least()
    with pytest.raises(rotor.InfeasibleError) as refusal:
        rotor.Checkpointable(sequential(), batch(), mem_limit=needed // 2, engine="chain")
    assert refusal.value.minimum_bytes == needed
    model = rotor.Checkpointable(sequential(), mem_limit=needed, engine="chain")
    _, said, _ = train(model, range(STEPS))
    assert not any(said)


@pytest.mark.parametrize("engine", ["auto", "chain", "graph"])
def test_a_refusal_that_is_caught_keeps_no_argument(engine: str) -> None:
    model = rotor.Checkpointable(sequential(), mem_limit=10_000, engine=engine)
    gc.collect()
    gc.disable()
    try:
        x = batch()
        seen = weakref.ref(x)
        try:
            model(x)
        except rotor.InfeasibleError:
            pass
        else:
            pytest.fail("the limit is far too low")
        del x
        assert seen() is None
    finally:
        gc.enable()
