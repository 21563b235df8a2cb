"""Plans with a second tier, from the arguments of a model to its steps."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from joint_programs import MemoryTier
from torch import nn
from torch.nn import functional as F
from training import same
from zoo.models import Gated, Row

import rotor
from rotor.graph import Link

WIDTH, ROWS = 64, 256


def net_of(depth: int = 6) -> nn.Module:
    """Layers whose products cost more than to move what they make."""
    return Row(Gated(WIDTH, depth), nn.BatchNorm1d(WIDTH))


class Fast(MemoryTier):
    """Tier in memory of a given speed."""

    least_bytes = 1


def made(model: nn.Module, limit, **settings) -> rotor.Checkpointable:
    return rotor.Checkpointable(
        model,
        mem_limit=limit,
        engine="graph",
        loss_fn=F.mse_loss,
        verbosity=0,
        effort="fast",
        **settings,
    )


def with_link(chk: rotor.Checkpointable, speed: float = 1e12) -> rotor.Checkpointable:
    """Have plans count on a speed, so that they do not depend on this machine."""
    tier = chk.offload.tier
    padding = tier.alignment_bytes if tier.alignment_bytes > 1 else 0
    chk.offload.link = Link(
        speed, speed, least_bytes=1, padding_bytes=padding, host_bytes=chk.offload.limit_bytes
    )
    return chk


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)


def trained(model, call, steps: int = 3, *, accumulate: bool = False):
    x, target = batch()
    found = []
    for k in range(steps):
        torch.manual_seed(k)
        if not accumulate:
            model.zero_grad(set_to_none=True)
        loss = call(x, targets=(target,))
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    return [tensor for step in found for tensor in step] + [b.clone() for b in model.buffers()]


@pytest.fixture(scope="module")
def subject():
    """A model, its unplanned training, and the peak of that."""
    torch.manual_seed(0)
    model = net_of()
    twin = copy.deepcopy(model)
    plain = made(twin, "1 GB", planning="before")
    expected = trained(twin, plain)
    twin = copy.deepcopy(model)
    accumulated = trained(twin, made(twin, "1 GB", planning="before"), accumulate=True)
    return model, expected, plain.plan.predicted_bytes, accumulated


def test_a_fast_tier_replaces_recomputation(subject, tmp_path):
    model, expected, peak, _ = subject
    twin, disk = copy.deepcopy(model), rotor.DiskTier(tmp_path)
    chk = with_link(made(twin, int(0.5 * peak), offload=disk))
    assert same(trained(twin, chk), expected)
    plan = chk.plan
    assert plan.limit_bytes == int(0.5 * peak)
    assert plan.recomputed == 0 < plan.program.offloaded_bytes
    assert plan.predicted_bytes - 512 * 20 <= plan.measured_bytes <= plan.predicted_bytes
    without = made(copy.deepcopy(model), int(0.5 * peak))
    without.measure(batch()[0], targets=(batch()[1],))
    without.compute_sequence()
    assert without.plan.recomputed > 0
    disk.close()


def test_a_slow_tier_is_left_alone(subject):
    model, expected, peak, _ = subject
    twin = copy.deepcopy(model)
    chk = with_link(made(twin, int(0.5 * peak), offload=Fast()), 1.0)
    assert same(trained(twin, chk), expected)
    assert chk.plan.program.offloaded_bytes == 0 < chk.plan.recomputed
    assert "keeping and recomputing is faster" in chk.report()


def test_the_tier_has_a_limit(subject):
    model, expected, peak, _ = subject
    twin = copy.deepcopy(model)
    chk = with_link(
        made(twin, int(0.5 * peak), offload=Fast(), offload_limit="200 KiB", planning="before")
    )
    assert same(trained(twin, chk), expected)
    assert 0 < chk.plan.layout.nbytes <= 200 << 10
    assert chk.plan.program.offloaded_bytes > 0


def test_gradients_are_accumulated(subject, tmp_path):
    """Steps that add to existing gradients are planned with the tier too, and proved."""
    model, _, peak, accumulated = subject
    twin, disk = copy.deepcopy(model), rotor.DiskTier(tmp_path)
    chk = with_link(made(twin, int(0.5 * peak), offload=disk, verify="always"))
    assert same(trained(twin, chk, accumulate=True), accumulated)
    assert chk.plan.step.hands_over
    assert chk.plan.program.offloaded_bytes > 0
    assert chk.plan.measured_bytes <= chk.plan.predicted_bytes
    disk.close()


def test_a_loss_outside_is_learnt(subject, tmp_path):
    model, _, peak, _ = subject
    x, target = batch()
    found = []
    for offload in (None, rotor.DiskTier(tmp_path)):
        twin = copy.deepcopy(model)
        chk = rotor.Checkpointable(
            twin, mem_limit=int(0.7 * peak), engine="graph", verbosity=0, effort="fast",
            offload=offload,
        )  # fmt: skip
        if offload is not None:
            with_link(chk)
        for k in range(3):
            torch.manual_seed(k)
            twin.zero_grad(set_to_none=True)
            F.mse_loss(chk(x), target).backward()
        found.append([p.grad for p in twin.parameters()])
        assert chk.plan.measured_bytes <= chk.plan.limit_bytes
    assert chk.plan.program.offloaded_bytes > 0
    assert same(*found)


class Slow(Fast):
    """Tier that takes ten times as long as plans count on at first, by its own figures."""

    def __init__(self, seconds_per_byte: float) -> None:
        super().__init__()
        self.traffic = rotor.tier.Traffic()
        self.ns = 1e9 * seconds_per_byte

    def write(self, area, offset, source):
        self.traffic.add(len(source), round(self.ns * len(source)), is_write=True)
        return super().write(area, offset, source)

    def read(self, area, offset, target):
        self.traffic.add(len(target), round(self.ns * len(target)), is_write=False)
        return super().read(area, offset, target)


def test_the_speed_is_learnt_from_steps(subject):
    """A tier of much higher speed than planned for is counted on, once steps have shown it."""
    model, expected, peak, _ = subject
    twin = copy.deepcopy(model)
    chk = made(twin, int(0.5 * peak), offload=Slow(1e-12))
    with_link(chk, 1e10)
    found = trained(twin, chk, 3)
    first = chk.plan
    assert same(found, expected)
    assert first.program.offloaded_bytes > 1 << 18
    trained(twin, chk, 2)
    assert chk.plan is not first
    assert chk.offload.learned == 1
    assert chk.offload.link.write_bytes_per_s == pytest.approx(0.75e12, rel=0.1)
    assert chk.plan.limit_bytes == first.limit_bytes
    assert chk.plan.predicted_bytes <= first.limit_bytes


class Sleeping(Fast):
    """Tier whose waits take longer than any plan says."""

    def wait(self, ticket):
        time.sleep(0.002)
        super().wait(ticket)


def test_waits_that_are_longer_than_planned_are_planned_for(subject):
    """Also where the tier does not count its traffic."""
    model, expected, peak, _ = subject
    twin = copy.deepcopy(model)
    chk = with_link(made(twin, int(0.5 * peak), offload=Sleeping()))
    assert same(trained(twin, chk, 3), expected)
    first = chk.plan
    trained(twin, chk, 1)
    assert chk.offload.learned == 1
    assert chk.offload.link.write_bytes_per_s < 1e12
    assert chk.plan is not first
    assert chk.plan.predicted_bytes <= chk.plan.limit_bytes


@pytest.mark.slow
def test_the_largest_batch_with_a_tier(tmp_path):
    """A tier makes room for a larger batch, whose peak is measured."""
    torch.manual_seed(0)
    net, sample = net_of(3), torch.randn(8, WIDTH)
    options = {"multiple_of": 8, "max_batch": 96, "points": 1, "timed": False, "engine": "graph"}
    tier = rotor.DiskTier(tmp_path)
    tier.least_bytes = 1024
    found = rotor.largest_batch(net, sample, "300 KB", offload=tier, **options)
    without = rotor.largest_batch(net, sample, "300 KB", **options)
    assert found.largest.measured_bytes <= 300_000
    assert found.largest.batch >= without.largest.batch
    tier.close()


def test_the_curve_has_the_tier(subject):
    model, _, peak, _ = subject
    x, target = batch()
    chk = with_link(made(copy.deepcopy(model), peak, offload=Fast()))
    chk.measure(x, targets=(target,))
    plain = made(copy.deepcopy(model), peak)
    plain.measure(x, targets=(target,))
    found, without = chk.curve(8), plain.curve(8)
    budget = int(0.5 * peak)
    assert found.at(budget) <= without.at(budget)
    assert found.minimum_bytes <= without.minimum_bytes
