"""An ``nn.Sequential`` with a stage that cannot be captured, on an accelerator."""

import pytest
import torch
from limited_on_sim import compared
from torch import nn
from zoo.models import FeedForward

from rotor.engines.parts.chained import ChainKind

WIDTH, ROWS = 128, 512


class Opaque(nn.Module):
    """Branches on a value between its own operations; draws random numbers, changes buffers."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(2 * WIDTH)

    def forward(self, x):
        y = self.norm(self.up(x)).tanh()
        if y.sum().item() > 1e30:
            y = y * 2
        return x + nn.functional.dropout(self.down(y.sigmoid()), 0.2)


def mixed():
    torch.manual_seed(0)
    block, opaque = FeedForward, Opaque
    return nn.Sequential(
        block(WIDTH),
        opaque(),
        block(WIDTH),
        opaque(),
        opaque(),
        nn.ReLU(inplace=True),
        block(WIDTH),
    )


@pytest.mark.parametrize("share", [0.7, 0.5])
@pytest.mark.filterwarnings("ignore:the limit of .* was not kept in a first step")
def test_bit_equal_within_the_limit(sim, monkeypatch, share):
    monkeypatch.setattr("rotor.engines.sequential.recomputation_of", lambda chain: 9.0)
    data = [torch.randn(ROWS, WIDTH, device="sim") for _ in range(5)]
    limit, plain, ours = compared(sim, mixed, data, share, engine="auto")
    assert min(plain.peaks) > limit
    assert max(ours.peaks[2:]) <= limit
    plan = ours.model.plan
    assert plan.engine == "parts"
    chains = {
        site.name: site.kind.treatment(k)
        for site, k in zip(plan.parts.sites, plan.choice, strict=True)
        if isinstance(site.kind, ChainKind)
    }
    assert list(chains) == ["1", "3 to 4+5"]
    if share == 0.5:
        assert set(chains.values()) != {"kept"}
