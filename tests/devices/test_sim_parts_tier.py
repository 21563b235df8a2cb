"""Models in parts whose programs offload to the host, on an accelerator whose streams are late."""

from __future__ import annotations

import copy

import pytest
import torch
from limited_on_sim import Trained, assert_equal
from torch import nn
from zoo.models import Asking

import rotor
from rotor.engines.parts.plan import fastest
from rotor.graph.assembly import least_bytes, simulate
from rotor.graph.link import Link
from rotor.tier import HostTier

WIDTH, ROWS, NO_MORE, LOSS_BYTES = 64, 512, 1 << 30, 512
pytestmark = [
    pytest.mark.filterwarnings("ignore:no single graph"),
    pytest.mark.filterwarnings("ignore:the limit of .* was not kept in a first step"),
]


def block() -> nn.Module:
    first = nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.2)
    return nn.Sequential(*first, nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.LayerNorm(WIDTH))


def test_steps_are_equal_within_their_limits(sim, monkeypatch):
    """At limits of recomputation, and under random programs: no races, no more than predicted."""
    tier = HostTier()
    tier.least_bytes = 1
    torch.manual_seed(1)
    plain = Asking(*(block() for _ in range(3))).to("sim")
    model = copy.deepcopy(plain)
    torch.manual_seed(0)
    batches = [torch.randn(ROWS, WIDTH, device="sim") for _ in range(3)]
    # Verified steps need a little more: only the memory of the programs is compared here.
    settings = {"mem_limit": "200 MiB", "verify": "off", "verbosity": 0}
    chk = rotor.Checkpointable(model, offload=tier, **settings)
    chk.offload.link, chk.offload.learned = Link(1e12, 1e12, duplex=True), NO_MORE
    state = copy.deepcopy(plain.state_dict())
    expected, races = Trained(sim, plain, batches), sim.races()
    Trained(sim, chk, batches)
    options, bases = chk.plan.parts.options(), chk.plan.parts.bases
    alone = [[o for o in site if not o.tier_bytes] for site in options]
    least = least_bytes(alone, bases)
    most = simulate(alone, bases, fastest(alone)).peak_bytes

    for share in (0.1, 0.4):
        limit = int(least + share * (most - least)) + chk.plan.reserve_bytes
        chk.compute_sequence(mem_limit=limit)
        model.load_state_dict(state)
        found = Trained(sim, chk, batches)
        assert_equal(found, expected)
        assert chk.plan.tier.offloaded_bytes > 0
        assert found.peaks[-1] <= limit

    draw = torch.Generator().manual_seed(0)

    def any_choice(options, *_):
        found = [int(torch.randint(len(o), (), generator=draw)) for o in options]
        return [max(range(len(options[0])), key=lambda k: options[0][k].tier_bytes), *found[1:]]

    for module in ("pieced", "plan"):
        monkeypatch.setattr(f"rotor.engines.parts.{module}.choose_within", any_choice)
    plain.load_state_dict(state)
    expected = Trained(sim, plain, batches[:1])
    for _ in range(3):
        chk.compute_sequence(mem_limit="200 MiB")
        plan, predicted = chk.plan, chk.plan.predicted_bytes
        model.load_state_dict(state)
        found = Trained(sim, chk, batches[:1])
        assert_equal(found, expected)
        assert chk.plan is plan
        assert plan.tier.offloaded_bytes > 0
        assert plan.measured_bytes <= predicted
        assert 0 <= found.peaks[0] - plan.measured_bytes <= LOSS_BYTES
    assert sim.races() == races
    tier.close()
