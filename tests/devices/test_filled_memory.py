"""Models that fill uninitialised memory by parts: a proof compares what it makes of it rightly."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from training import same
from unrepeatable import planned, sample, step
from zoo.models import Row

from rotor.common.checksums import checksum
from rotor.engines.graph.costs.repeating import is_unspecified

WIDTH = 32


def _by_slices(h: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(h)
    out[..., ::2], out[..., 1::2] = h[..., :WIDTH].cos(), h[..., WIDTH:].sin()
    return out


def _in_a_part(h: torch.Tensor) -> torch.Tensor:
    out = h.new_empty(2 * h.shape[0], h.shape[1])
    out[::2] = h.sin()
    return out[::2]


def _transposed(h: torch.Tensor) -> torch.Tensor:
    out = torch.empty_strided(h.shape, (1, h.shape[0]))
    out[::2], out[1::2] = h[1::2], h[::2].sin()
    return out


def _by_indices(h: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(h.shape[0] - 1, -1, -1)
    return torch.empty(h.shape).index_copy(0, rows, h.sin())


def _masked(h: torch.Tensor) -> torch.Tensor:
    mask = torch.arange(h.shape[0])[:, None] % 2 == 0
    return torch.where(mask, torch.where(mask, h.sin(), torch.empty_like(h)), h)


def _padded(h: torch.Tensor) -> torch.Tensor:
    return F.pad(h[None], (3, 4), mode="circular")[0, :, 2:-5]


class Layer(nn.Module):
    """A layer with a function between its two products."""

    def __init__(self, fill) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.fill = fill

    def forward(self, x):
        """Return the result."""
        h = F.gelu(self.up(x))
        return x + self.down(self.fill(h) * h)


FILLS = [_by_slices, _in_a_part, _transposed, _by_indices, _masked, _padded]


@pytest.mark.parametrize("fill", FILLS, ids=lambda fill: fill.__name__[1:])
def test_memory_that_is_filled_by_parts_is_computed_again(fill):
    model, x = Row(*(Layer(fill) for _ in range(4))), sample(256)
    wanted = step(model, x)
    chk, _ = planned(model, x, 1.15, engine="graph")
    assert max(chk.program.runs) > 1
    for filling in (float("nan"), 1.0, -1.0):
        memory = [torch.full((1 << k,), filling) for k in range(12, 17)]
        del memory
        assert same(step(chk, x), wanted)
    assert "bit for bit" in chk.report()


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_circular_padding_is_computed_again(dimensions):
    pad = getattr(nn, f"CircularPad{dimensions}d")
    convolution = getattr(nn, f"Conv{dimensions}d")
    layers = [m for _ in range(3) for m in (pad(1), convolution(4, 4, 3), nn.Tanh())]
    model, x = Row(*layers), torch.rand(2, 4, *[{1: 400, 2: 24, 3: 9}[dimensions]] * dimensions)
    wanted = step(model, x)
    chk, _ = planned(model, x, 1.3, engine="graph")
    assert max(chk.program.runs) > 1
    assert all(same(step(chk, x), wanted) for _ in range(3))


def test_results_that_are_written_in_part_are_not_compared():
    graph = torch.fx.Graph()
    loss = graph.call_function(torch.ops.aten._ctc_loss.default)
    assert [is_unspecified(loss, (k,)) for k in range(2)] == [False, True]


def test_zeros_without_memory_have_a_checksum():
    zeros = torch._efficientzerotensor((3, 4))
    assert checksum(zeros) == checksum(torch._efficientzerotensor((3, 4)))
