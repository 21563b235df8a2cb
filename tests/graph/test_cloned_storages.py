"""Operators that clone the whole storage of a view are measured with all of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rotor


class Written(nn.Module):
    """Writes into a slice of a value, whose view begins within its storage."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x) + 1
        x[:, 3:9] = x[:, 3:9] * 2
        return self.outer(torch.tanh(x))


@pytest.mark.parametrize("planning", ["before", "background"])
def test_a_written_slice_is_as_large_as_its_storage(planning):
    torch.manual_seed(0)
    model, x = Written(), torch.randn(48, 64)
    plain = rotor.Checkpointable(model, x, "1 GB", engine="graph", verbosity=0, planning=planning)
    graph = plain.graph
    copies = [op for op in graph.operations if op.name.startswith("copy")]
    assert copies
    sizes = {graph.storages[s].bytes for op in copies for s in op.outputs}
    assert sizes == {48 * 64 * 4}
    plain(x).sum().backward()
    assert plain.plan.measured_bytes <= plain.plan.predicted_bytes
