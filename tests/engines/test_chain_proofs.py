"""Chains compare what they make again; measure and plan once for what is alike."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from chain_blocks import BATCH, WIDTH, Block, planned, seeded, train
from torch import nn
from training import same

import rotor


class Drifting(Block):
    """Repeats while it is measured; after that a second run in a step gives something else."""

    drifts = 0

    def begin(self) -> None:
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.gelu(self.first(x))
        with torch.no_grad():
            self.seen += 1
        if Drifting.drifts:
            h = h * (1 + 1e-3 * next(TICKS))
        return x + self.second(h)

    def state(self) -> Any:
        return self.seen.clone()


TICKS = itertools.count(1)


@pytest.mark.parametrize("existing", [False, True])
def test_a_value_that_differs_stops_the_step(
    existing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = seeded(lambda: nn.Sequential(*(Block() for _ in range(2)), Drifting(), Block(), Block()))
    chk = planned(net, 0.0)
    chk.compute_sequence(mem_limit=chk.mem_limit + 2_000_000 * existing, algo=_everything_again())
    assert 2 in chk.plan.schedule.recomputed
    x = torch.randn(BATCH, WIDTH)
    if existing:
        chk(x).sum().backward()
    before = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
    seen = net[2].seen.clone()
    monkeypatch.setattr(Drifting, "drifts", 1)
    with pytest.raises(
        rotor.RecomputationError, match=r"Drifting in module '2' .*Run the step again"
    ):
        chk(x).square().mean().backward()
    assert same(before, [p.grad for p in net.parameters()])
    assert torch.equal(net[2].seen, seen)
    monkeypatch.setattr(Drifting, "drifts", 0)
    chk.compute_sequence(mem_limit="10MB", algo=rotor.algorithms.Persistent())
    assert chk.plan.sequence.count_forwards()[2] == 1
    chk(x).square().mean().backward()
    assert "stage 2 is never recomputed: it gave other bits" in chk.report()


def _everything_again() -> Any:
    return rotor.algorithms.RecomputeAll()


def test_proofs_are_reported_and_can_be_left_out() -> None:
    for verify, due in (("first", 3), ("always", 5), (2, 4), ("off", 0)):
        net = seeded(lambda: nn.Sequential(*(Block() for _ in range(4))))
        chk = planned(net, 0.0, verify=verify)
        for _ in range(6):
            chk(torch.randn(BATCH, WIDTH)).square().mean().backward()
        plan = chk.plan
        assert plan.schedule.recomputed
        assert plan.proved.steps >= due if due else plan.proved.steps == 0
        values = f"{len(plan.schedule.recomputed)} recomputed value"
        expected = values if due else 'not proved: verify="off"'
        assert expected in chk.report()


def test_plans_without_recomputation_prove_nothing() -> None:
    net = seeded(lambda: nn.Sequential(*(Block() for _ in range(3))))
    chk = rotor.Checkpointable(net, mem_limit="100MB", verify="always")
    chk(torch.randn(BATCH, WIDTH)).square().mean().backward()
    assert "nothing is recomputed" in chk.report()


# -- paid once


@pytest.mark.parametrize("is_frozen", [False, True])
def test_one_measurement_serves_inputs_with_and_without_gradients(
    is_frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> nn.Module:
        blocks = [Block() for _ in range(8)]
        for block in blocks[: 2 * is_frozen]:
            block.requires_grad_(False)
        return nn.Sequential(*blocks)

    x = torch.randn(BATCH, WIDTH)
    net = seeded(make)
    measured_stages = []
    stage = rotor.inspection.Measuring.stage
    monkeypatch.setattr(
        rotor.inspection.Measuring,
        "stage",
        lambda self, i: measured_stages.append(self.stages[i].name) or stage(self, i),
    )
    chk = rotor.Checkpointable(net, engine="chain")
    chk.measure(x)
    once = len(measured_stages)
    chk.compute_sequence(mem_limit=int(chk.curve().bytes[0]) + BATCH * WIDTH * 8)
    chk(x.requires_grad_()).square().mean().backward()
    assert len(measured_stages) <= once + (4 if is_frozen else 2)
    assert x.grad is not None
    assert chk.plan.measured_bytes <= chk.mem_limit
    measured = chk.inspection_values
    whole = rotor.Checkpointable(seeded(make), engine="chain").measure(x)
    assert [m.name for m in measured.measures] == [m.name for m in whole.measures]
    for name in ("xbar_bytes", "grad_bytes", "pgrad_bytes", "backward_peak_bytes", "flags"):
        assert [getattr(m, name) for m in measured.measures] == [
            getattr(m, name) for m in whole.measures
        ]


def test_the_guess_for_the_loss_never_makes_a_limit_infeasible() -> None:
    def make() -> nn.Module:
        return nn.Sequential(*(Block() for _ in range(4)), nn.Linear(WIDTH, 16 * WIDTH))

    net = seeded(make)
    plain = train(net, net, loss=lambda y: y.sum())
    net = seeded(make)
    x = torch.randn(BATCH, WIDTH)
    chk = rotor.Checkpointable(net, engine="chain", loss_tmp_memory_usage=1)
    chk.measure(x)
    limit = int(chk.curve().bytes[0]) + 100_000
    net = seeded(make)
    chk = rotor.Checkpointable(net, engine="chain")
    chk.measure(x)
    assert limit < int(chk.curve().bytes[0])
    chk.compute_sequence(mem_limit=limit)
    assert "assumed for the loss, not set aside" in chk.report()
    assert same(plain, train(net, chk, loss=lambda y: y.sum()))
    assert chk.plan.measured_bytes <= limit
