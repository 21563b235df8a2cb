"""Parts of a model without a single graph, trained with another shape in every batch."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from capture.test_shapes import Block, alike, cnn_loss, plain_peak, step
from torch import nn

import rotor
from rotor.engines.graph import capture
from rotor.engines.parts.kinds import Kind
from rotor.meter import allocator as memory

pytestmark = [
    pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning"),
    pytest.mark.filterwarnings("ignore:no single graph"),
    pytest.mark.filterwarnings("ignore:this step's memory was not measured"),
]


class Cut(nn.Module):
    """Blocks with Python's values between them."""

    def __init__(self, width: int = 32, layers: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, 4, 0.1) for _ in range(layers))
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, None)
            if x.sum().item() > 1e9:
                x = x * 2
        return self.head(x[:, 0])


def batch_of(length: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(4, length, 32)}


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collect the graphs of every capture."""
    found: list[Any] = []
    lower = capture.lower

    def counted(*args: Any, **kwargs: Any) -> Any:
        found.append(lower(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(capture, "lower", counted)
    return found


def test_parts_share_a_capture_and_programs(captured: list[Any]) -> None:
    torch.manual_seed(0)
    model = Cut()
    limit = int(0.6 * plain_peak(model, batch_of(120), cnn_loss))
    chk = rotor.Checkpointable(copy.deepcopy(model), mem_limit=limit)
    counts, kinds = [], []
    for number, length in enumerate((40, 100, 50, 120, 33, 100)):
        batch = batch_of(length)
        assert alike(step(chk, batch, cnn_loss), step(model, batch, cnn_loss)), length
        with memory.meter("cpu") as meter:
            again = step(chk, batch, cnn_loss)
        assert alike(again, step(model, batch, cnn_loss)), length
        assert meter.peak_bytes <= limit, length
        counts.append(len(captured))
        if number:
            kinds.append(chk.plan.parts.sites[0].kind)
    # The whole model is tried first; then the first shape is captured alone.
    assert counts[1:] == [counts[1]] * 5
    assert len({id(kind.captured) for kind in kinds}) == 1
    assert len({kind.values for kind in kinds}) == 4
    assert [kind.is_carried for kind in kinds] == [False, True, True, True, False]


@pytest.mark.slow
def test_parts_search_at_their_own_shape_before_they_refuse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model = Cut()
    chk = rotor.Checkpointable(copy.deepcopy(model), mem_limit="1 GB")
    for length in (40, 60):
        step(chk, batch_of(length), cnn_loss)
    # Of the second shape, the program without recomputation alone is left.
    for kind in {site.kind for site in chk.plan.parts.sites}:
        for orders in kind.orders.values():
            orders[:] = [np.arange(len(kind.lowered.tasks), dtype=np.int32)]
    searched = []
    find_programs = Kind.find_programs

    def noted(self: Kind, *, again: bool = False) -> None:
        searched.extend([self.is_carried] * again)
        find_programs(self, again=again)

    monkeypatch.setattr(Kind, "find_programs", noted)
    batch = batch_of(120)
    chk.mem_limit = int(0.6 * plain_peak(model, batch, cnn_loss))
    for _ in range(3):
        assert alike(step(chk, batch, cnn_loss), step(model, batch, cnn_loss))
    assert searched
    assert searched[0]
    assert chk.plan.measured_bytes <= chk.mem_limit
    assert not chk.plan.parts.sites[0].kind.is_carried


@pytest.mark.slow
def test_a_part_of_a_constant_size_is_captured_for_each(captured: list[Any]) -> None:
    class Fixed(Cut):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x[:, : len(self.blocks) + x.shape[1] % 2])

    torch.manual_seed(0)
    model = Fixed()
    chk = rotor.Checkpointable(copy.deepcopy(model), mem_limit="1 GB")
    for length in (7, 8, 9, 11):
        batch = batch_of(length)
        assert alike(step(chk, batch, cnn_loss), step(model, batch, cnn_loss))
    kinds = [site.kind for site in chk.plan.parts.sites]
    assert all(isinstance(kind, Kind) for kind in kinds)


@pytest.mark.slow
def test_gradients_of_parts_accumulate_over_shapes() -> None:
    torch.manual_seed(0)
    model = Cut()
    limit = int(0.9 * plain_peak(model, batch_of(60), cnn_loss))
    chk = rotor.Checkpointable(copy.deepcopy(model), mem_limit=limit)
    for number, length in enumerate((20, 50, 35, 60, 44)):
        batch = batch_of(length)
        for candidate in (model, chk):
            torch.manual_seed(number)
            cnn_loss(candidate(**batch), batch).backward()
    pairs = zip(model.parameters(), chk.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)
