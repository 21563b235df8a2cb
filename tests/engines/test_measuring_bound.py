"""The bytes that measuring a chain needs, metered, against the bound of docs/memory-model.md."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from chain_blocks import Block
from torch import nn
from torch.nn.functional import cross_entropy
from training import conv_net, images
from zoo.models import Function

import rotor
from rotor import timing
from rotor.engines.chain import measure
from rotor.meter import allocator

STATES_BYTES = 4 * 5056
"""Four states of PyTorch's generator on the CPU."""


def large() -> nn.Module:
    """A stage with a buffer that is larger than everything else."""
    return Function(lambda self, x: x + self.table[0], table=torch.zeros(100_000))


class Unmetered:
    """An inner meter while another one runs: parts of no bytes."""

    def __init__(self, *_: object, **__: object) -> None:
        self.segments: list[allocator.Segment] = []

    def __enter__(self) -> Unmetered:
        return self

    start = stop = __enter__

    def __exit__(self, *_: object) -> None:
        pass

    def mark(self, name: str) -> None:
        self.segments.append(allocator.Segment(name, 0, 0, 0))


def metered_measure(monkeypatch, chk, x, targets) -> int:
    meter = allocator.meter("cpu")
    with monkeypatch.context() as patch:
        patch.setattr(allocator, "meter", Unmetered)
        patch.setattr(measure, "check_idle", lambda device: None)
        patch.setattr(timing, "is_single", lambda: True)
        with meter:
            chk.measure(x, targets=targets)
    return meter.peak_bytes


def perceptron(*widths: int) -> nn.Sequential:
    layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
    return nn.Sequential(*[module for layer in layers for module in (layer, nn.Tanh())])


LABELS = (torch.zeros(64, dtype=torch.int64),)
# Model, input, targets of a captured loss, and the bytes of copies that the bound allows.
CASES = {
    "convolutions": (conv_net, images, (), 700),
    "wide layers": (lambda: perceptron(1000, 1000, 1000), lambda: torch.randn(4, 1000), (), 0),
    "deep": (lambda: perceptron(*[32] * 6), lambda: torch.randn(4096, 32), (), 0),
    "loss": (lambda: perceptron(64, 256, 2000), lambda: torch.randn(64, 64), LABELS, 0),
    "large input": (lambda: perceptron(8192, 16, 4), lambda: torch.randn(512, 8192), (), 0),
    "flattened input": (
        lambda: nn.Sequential(nn.Flatten(), *perceptron(8192, 16, 4)),
        lambda: torch.randn(512, 64, 128),
        (),
        0,
    ),
    "stages of one's own": (
        lambda: nn.Sequential(*[Block() for _ in range(4)]),
        lambda: torch.randn(128, 32),
        (),
        128 * 32 * 4,
    ),
    "large buffer": (
        lambda: nn.Sequential(nn.Linear(16, 16), large(), large(), nn.Linear(16, 16)),
        lambda: torch.randn(64, 16),
        (),
        400_000,
    ),
}


@pytest.mark.parametrize("has_gradients", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_measuring_keeps_its_bound(name, has_gradients, monkeypatch):
    torch.manual_seed(0)
    make, draw, targets, copies_bytes = CASES[name]
    model, x = make(), draw()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if has_gradients else None

    def chain():
        loss_fn = cross_entropy if targets else None
        return rotor.Checkpointable(model, engine="chain", loss_fn=loss_fn)

    peak_bytes = metered_measure(monkeypatch, chain(), x, targets)
    chk = chain()
    chk.measure(x, targets=targets)
    least_bytes = chk.curve().minimum_bytes
    assert least_bytes // 3 < peak_bytes <= least_bytes + copies_bytes + STATES_BYTES
