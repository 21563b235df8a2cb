"""Sources that are written to while results that were computed from them can be evicted."""

from __future__ import annotations

import copy
import gc
import io
import math

import pytest
import torch
from dynamic_cases import gpt, same, step
from torch import nn

from rotor import dtr, memory, simrd

WIDTH = 1000


def thirteen(scale: torch.Tensor, count: int = 13) -> list[torch.Tensor]:
    """Results of a small source, which is written to after them; then each is read."""
    x = torch.linspace(0, 1, WIDTH).expand(10, WIDTH)
    made = [x * scale]
    for k in range(count - 1):
        made.append((made[-1] + k).sin() * scale)
    scale.mul_(0.5).add_(made[-1].mean())
    read = [value.sum() for value in made]
    scale.add_(1)
    later = (made[2] * scale).sum()
    return [torch.stack(read), later, scale]


@pytest.mark.parametrize("swap", [None, False])
def test_what_a_written_source_gave_stays_in_the_budget(swap):
    expected = thirteen(torch.ones(10, 1))
    with memory.meter("cpu") as meter:
        thirteen(torch.ones(10, 1))
    limit = int(meter.peak_bytes * 0.6)
    with dtr.budget(limit, storage_swap=swap):
        thirteen(torch.ones(10, 1))
    with memory.meter("cpu") as meter, dtr.budget(limit, storage_swap=swap) as session:
        found = thirteen(torch.ones(10, 1))
        gc.collect()
        assert session.counters()["copied_bytes"] == 0
    assert same(expected, found)
    assert meter.peak_bytes <= limit
    assert session.stats.overflows == 0
    assert session.stats.rematerializations > 0


class Averaging(nn.Module):
    """A buffer that every forward reads, and then moves towards what was computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(8))
        self.register_buffer("centre", torch.zeros(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x) - self.centre)
            with torch.no_grad():
                self.centre.lerp_(x.mean(0), 0.1)
        return x


def test_buffers_that_the_forward_moves():
    torch.manual_seed(0)
    model = Averaging()
    x = torch.randn(64, 32)

    def steps(model: nn.Module, count: int, at_end=lambda: None) -> list[torch.Tensor]:
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        losses = []
        for _ in range(count):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            at_end()
        return [torch.tensor(losses), *model.parameters(), *model.buffers()]

    expected = steps(copy.deepcopy(model), 20)
    with memory.meter("cpu") as meter:
        steps(copy.deepcopy(model), 2)
    limit = int(meter.peak_bytes * 0.8)
    for _ in range(2):  # The first teaches what operators take.
        ours = copy.deepcopy(model)
        levels = []
        with memory.meter("cpu") as meter, dtr.budget(limit) as session:
            found = steps(ours, 20, lambda s=session, at=levels: at.append(s.counters()))
    assert same(expected, found)
    assert meter.peak_bytes <= limit
    assert session.stats.evictions > 0
    names = ("current_bytes", "nodes", "records")
    assert all(level[name] == levels[2][name] for level in levels[2:] for name in names)
    assert all(level["copied_bytes"] == 0 for level in levels)


def test_optimizers_copy_no_parameters(monkeypatch):
    torch.manual_seed(0)
    model, loss = gpt(batch=2, length=16)
    copied = []
    take = dtr.Session._copy
    monkeypatch.setattr(dtr.Session, "_copy", lambda s, node: copied.append(node) or take(s, node))
    with dtr.budget("3MB"):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for k in range(3):
            optimizer.zero_grad()
            step(model, loss, k)
            optimizer.step()
    assert copied == []


def test_large_sources_are_not_copied():
    expected = torch.full((WIDTH,), 5.0)
    weight = torch.ones(10 * WIDTH)
    with dtr.budget(60_000) as session:
        part = weight[:WIDTH] + 1
        spare = [torch.full((WIDTH,), float(k)) * 1 for k in range(13)]
        weight.mul_(2)
        assert session.counters()["copied_bytes"] == 0
        assert torch.equal(part + 3, expected)
        assert part.untyped_storage().data_ptr() != 0
        del spare


def test_copies_go_when_the_context_is_left():
    scale = torch.ones(10, 1)
    with memory.meter("cpu") as meter, dtr.budget("1MB") as session:
        y = torch.ones(10, WIDTH) * scale
        scale.zero_()
        assert session.counters()["copied_bytes"] == scale.nbytes
        assert float((y + scale).sum()) == 10 * WIDTH
    assert meter.end_bytes == y.nbytes
    assert session.counters()["records"] > 0


def test_logs_have_the_copy():
    expected = thirteen(torch.ones(10, 1))
    file = io.BytesIO()
    with dtr.budget(250_000, record_log=file):
        found = thirteen(torch.ones(10, 1))
    assert same(expected, found)
    text = file.getvalue()
    assert text.count(b'"rotor::copy"') == 1
    result = simrd.simulate(simrd.parse(text), "DTRAncestors", ratio=0.9, overhead_limit=math.inf)
    assert result.status == "ok"
