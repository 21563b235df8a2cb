"""Pinned memory of the host as the second tier of an accelerator whose streams are late."""

from __future__ import annotations

import copy

import dynamic_tiers
import pytest
import torch
from devices.test_sim_reserved import Skips
from dynamic_tiers import VALUE_BYTES, Noisy, Recurrent, dynamic, generator, pair, same
from joint_programs import random_joint_program
from limited_on_sim import Trained, assert_equal, batches
from torch import nn
from zoo.models import Asking, Skip

import rotor
from rotor import graph as rg
from rotor.engines.parts.plan import fastest
from rotor.graph.assembly import least_bytes, simulate
from rotor.graph.link import Link
from rotor.tier import HostTier
from rotor.tier.offload import measure_link

WIDTH, ROWS = 64, 128


def engine(model: nn.Module, **settings) -> rotor.Checkpointable:
    return rotor.Checkpointable(
        model,
        mem_limit="200 MiB",
        engine="graph",
        loss_fn=nn.functional.mse_loss,
        planning="before",
        verbosity=0,
        **settings,
    )


def trained(sim, model, call, x, steps=3, *, has_targets=True):
    """Return losses and gradients of some steps, and the device's peaks in them."""
    found, peaks, target = [], [], torch.zeros_like(x)
    for k in range(steps):
        torch.manual_seed(k)
        generator.manual_seed(k)
        model.zero_grad(set_to_none=True)
        level = sim.memory_allocated()
        sim.reset_peak_memory_stats()
        loss = call(x, targets=(target,)) if has_targets else call(x).square().mean()
        loss.backward()
        peaks.append(sim.max_memory_allocated() - level)
        found += [loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters())]
        del loss
    model.zero_grad(set_to_none=True)
    return found, peaks


def offloading(model, x, seed, tier):
    """A wrapped model that runs a random program with fetches."""
    chk = engine(model, offload=tier)
    step = chk.measure(x, targets=(torch.zeros_like(x),))
    graph = step.graph(0)
    sizes = [storage.bytes for storage in graph.storages]
    actions = random_joint_program(step.lowered, sizes, seed, 0.1 * (seed % 3), 0.8)
    program = rg.Program(graph, actions, step.link)
    assert len(program.actions) > len(program.ops) + 10
    chk.load_plan(program)
    return chk


@pytest.fixture
def tier():
    made = HostTier()
    made.least_bytes = 1
    yield made
    made.close()


@pytest.mark.parametrize("seed", range(3))
def test_steps_are_equal_and_as_large_as_predicted(sim, seed, tier):
    torch.manual_seed(0)
    model = Skips(WIDTH, 4, 0.2).to("sim")
    twin, x = copy.deepcopy(model), torch.randn(ROWS, WIDTH, device="sim")
    chk, races = offloading(model, x, seed, tier), sim.races()
    expected, _ = trained(sim, twin, engine(twin), x)
    # The slab is made at plan time: its first step is as the others.
    found, peaks = trained(sim, model, chk, x)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
    assert chk.plan.program.host_peak_bytes > 0
    assert max(peaks) <= chk.plan.predicted_bytes
    assert sim.races() == races


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def late(value: float) -> torch.Tensor:
    """A tensor whose bytes come when the stream gets there."""
    return torch.full((500,), value).pin_memory().to("sim", non_blocking=True)


def test_a_write_waits_for_the_value(sim, tier):
    area = tier.allocate(2000)
    ticket = tier.write(area, 0, as_bytes(late(3.0)))
    tier.wait(ticket)
    sim.synchronize()
    assert area.slab[:2000].view(torch.float32).eq(3).all()


def test_waits_that_the_computation_has_not_come_to_are_counted_later(sim, tier):
    sim.set_clock("model")
    area = tier.allocate(2000)
    ticket = tier.write(area, 0, torch.ones(2000, dtype=torch.uint8, device="sim"))
    sim.synchronize()
    sim._sleep(10**9)
    tier.wait(ticket)
    assert (tier.traffic.writes, tier.traffic.waited_ns) == (1, 0)
    sim.synchronize()
    tier.release(area)
    # The copy was complete when the computation came to wait for it.
    assert (tier.traffic.writes, tier.traffic.waited_ns) == (1, 0)


def test_memory_is_used_again_after_its_copy(sim, tier):
    area = tier.allocate(2000)
    source = late(3.0)
    address, ticket = source.data_ptr(), tier.write(area, 0, as_bytes(source))
    tier.wait(ticket)
    del ticket, source
    other = torch.full((500,), 5.0, device="sim")
    assert other.data_ptr() == address
    sim.synchronize()
    assert area.slab[:2000].view(torch.float32).eq(3).all()


def test_a_fetch_waits_for_its_write_and_for_its_memory(sim, tier):
    sim.set_poison(0)
    area = tier.allocate(2000)
    source = late(3.0)
    tier.write(area, 0, as_bytes(source))
    # A block that is free for the host, and not yet for the device.
    before = late(9.0)
    address = before.data_ptr()
    del before
    target = torch.empty(500, device="sim")
    assert target.data_ptr() == address
    ticket = tier.read(area, 0, as_bytes(target))
    tier.wait(ticket)
    assert (target + 1).cpu().eq(4).all()


@pytest.mark.parametrize("is_released", [False, True])
def test_bytes_of_the_host_are_overwritten_after_they_were_read(sim, tier, is_released):
    area = tier.allocate(2000)
    sending = tier.write(area, 0, as_bytes(late(3.0)))
    first = torch.empty(500, device="sim")
    reading = tier.read(area, 0, as_bytes(first))
    if is_released:
        tier.release(area)
        again = tier.allocate(1000)
        assert again is area
    writing = tier.write(area, 0, as_bytes(late(7.0)))
    tier.wait(writing)
    torch.zeros(1, device="sim").add_(1)
    tier.wait(reading)
    tier.wait(sending)
    assert first.cpu().eq(3).all()


def test_steps_that_are_dropped_or_pending_keep_their_order(sim, tier):
    torch.manual_seed(0)
    model = Skips(WIDTH, 4, 0.2).to("sim")
    twin, x = copy.deepcopy(model), torch.randn(ROWS, WIDTH, device="sim")
    chk, plain = offloading(model, x, 1, tier), engine(twin)
    target = torch.zeros_like(x)
    plain.measure(x, targets=(target,))
    found = []
    for call in (chk, plain):
        torch.manual_seed(3)
        # One step is never completed, and two are pending at once.
        dropped = call(x, targets=(target,))
        del dropped
        with pytest.warns(rotor.MemoryLimitWarning, match="began while the backward"):
            first, second = call(x, targets=(target,)), call(2 * x, targets=(target,))
        second.backward()
        first.backward()
        found.append([p.grad.cpu() for p in call.parameters()])
        call.zero_grad(set_to_none=True)
        third = call(3 * x, targets=(target,))
        third.backward(retain_graph=True)
        third.backward()
        found[-1] += [p.grad.cpu() for p in call.parameters()]
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_the_disk_does_not_reach_an_accelerator(sim, tmp_path):
    disk = rotor.DiskTier(tmp_path)
    chk = engine(Skips(WIDTH, 4, 0.2).to("sim"), offload=disk)
    x = torch.randn(ROWS, WIDTH, device="sim")
    with pytest.raises(ValueError, match="does not reach the memory of sim"):
        chk.measure(x, targets=(torch.zeros_like(x),))
    disk.close()


def test_the_host_does_not_reach_the_cpu():
    chk = engine(Skips(WIDTH, 4, 0.2), offload="host")
    x = torch.randn(ROWS, WIDTH)
    with pytest.raises(ValueError, match="does not reach the memory of cpu"):
        chk(x, targets=(torch.zeros_like(x),))


@pytest.fixture
def modelled(sim):
    """The device, whose clock counts modelled times and no real ones."""
    sim.set_clock("model")
    sim.set_link(1.0, 1000)
    yield sim
    sim.set_compute()
    sim.set_link(8.0)
    sim.set_clock("real")


def test_the_link_is_measured_on_the_device(modelled, tier):
    link = measure_link(tier, "sim")
    assert link.write_bytes_per_s == pytest.approx(1e9, rel=0.01)
    assert link.read_bytes_per_s == pytest.approx(1e9, rel=0.01)
    assert tier.traffic.writes == tier.traffic.reads == 10 * 32


def test_waits_of_the_device_teach_the_speed(modelled, tier):
    torch.manual_seed(0)
    model, x = Skips(WIDTH, 4, 0.2).to("sim"), torch.randn(ROWS, WIDTH, device="sim")
    chk = offloading(model, x, 1, tier)
    measured = chk.offload.link.write_bytes_per_s
    modelled.set_link(0.02, 1000)
    trained(modelled, model, chk, x, steps=6)
    modelled.synchronize()
    assert tier.traffic.waited_ns > 0
    assert chk.offload.learned == 1
    assert measured == pytest.approx(1e9, rel=0.01)
    assert chk.offload.link.write_bytes_per_s == pytest.approx(0.75 * 0.02e9, rel=0.1)
    assert chk.offload.link.read_bytes_per_s == pytest.approx(0.75 * 0.02e9, rel=0.1)


def test_a_first_step_finds_nothing_cached_by_the_measure_of_the_link(modelled, tier):
    """Where blocks of the allocator end depends on the memory that is cached."""
    modelled.set_compute(gb_per_s=20.0)
    torch.manual_seed(0)
    ends = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 8, 1)
    # Residual blocks, whose values take blocks of more than 1 MiB.
    way = lambda: nn.Conv2d(32, 32, 3, padding=1)  # noqa: E731
    blocks = [Skip(way(), nn.BatchNorm2d(32), nn.ReLU(), way()) for _ in range(3)]
    model = nn.Sequential(ends[0], *blocks, ends[1]).to("sim")
    x = torch.randn(8, 3, 40, 40, device="sim")
    target = torch.zeros(8, 8, 40, 40, device="sim")
    chk = engine(model, offload=HostTier(), effort="fast")
    chk.measure(x, targets=(target,))
    level = modelled.memory_reserved()
    peak = chk.compute_sequence(mem_limit="200 MiB").peak_bytes
    assert modelled.memory_reserved() <= level
    program = chk.compute_sequence(mem_limit=int(0.9 * peak))
    assert program.offloaded_bytes > 0
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        before = modelled.memory_allocated()
        modelled.reset_peak_memory_stats()
        chk(x, targets=(target,)).backward()
        modelled.synchronize()
        assert modelled.max_memory_allocated() - before <= chk.plan.predicted_bytes


# -- the dynamic engine

noise_is_kept = pytest.mark.filterwarnings("ignore:rotor_tier_tests.*noise does not repeat")


def moving(model, limit, tier):
    chk = dynamic(model, limit, offload=tier)
    chk.offload.link = Link(1e13, 1e13, duplex=True)
    return chk


def steps_of(sim, model, call, x, steps=3):
    """Return losses and gradients, and the largest peak after the first step."""
    found, peaks = trained(sim, model, call, x, steps, has_targets=False)
    return found, max(peaks[1:] or peaks)


@noise_is_kept
def test_what_cannot_be_recomputed_leaves_the_device(sim, tier):
    model, twin = (made.to("sim") for made in pair(Noisy))
    x, limit = torch.randn(dynamic_tiers.ROWS, dynamic_tiers.WIDTH).to("sim"), 8 * VALUE_BYTES
    expected, most = steps_of(sim, twin, twin, x)
    assert most > limit
    with pytest.raises(rotor.InfeasibleError):
        steps_of(sim, twin, dynamic(twin, limit), x)
    chk, races = moving(model, limit, tier), sim.races()
    steps_of(sim, model, chk, x, 1)
    found, peak = steps_of(sim, model, chk, x)
    assert same(found, expected)
    assert peak <= limit
    assert chk.plan.last.stats.fetches >= 3
    assert sim.races() == races


@noise_is_kept
def test_a_recurrent_model(sim, tier, monkeypatch):
    """Move all that can move: the device's own times are known only after some runs."""
    monkeypatch.setattr("rotor.dtr.recall.MOVE_WEIGHT", 0.0)
    model, twin = (made.to("sim") for made in pair(Recurrent))
    x = torch.randn(10, 256, 16).to("sim")
    expected, most = steps_of(sim, twin, twin, x)
    limit = most * 7 // 10
    chk, races = moving(model, limit, tier), sim.races()
    steps_of(sim, model, chk, x, 1)
    found, peak = steps_of(sim, model, chk, x)
    assert same(found, expected)
    assert peak <= limit
    assert chk.plan.last.stats.fetches > 0
    assert sim.races() == races


# -- parts

NO_MORE, LOSS_BYTES = 1 << 30, 512


def block() -> nn.Module:
    first = nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.2)
    return nn.Sequential(*first, nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.LayerNorm(WIDTH))


@pytest.mark.filterwarnings("ignore:no single graph")
@pytest.mark.filterwarnings("ignore:the limit of .* was not kept in a first step")
def test_steps_of_parts_are_equal_within_their_limits(sim, tier, monkeypatch):
    """At limits of recomputation, and under random programs: no races, no more than predicted."""
    torch.manual_seed(1)
    plain = Asking(*(block() for _ in range(3))).to("sim")
    model = copy.deepcopy(plain)
    data = batches(3, 512, WIDTH)
    # Verified steps need a little more: only the memory of the programs is compared here.
    settings = {"mem_limit": "200 MiB", "verify": "off", "verbosity": 0}
    chk = rotor.Checkpointable(model, offload=tier, **settings)
    chk.offload.link, chk.offload.learned = Link(1e12, 1e12, duplex=True), NO_MORE
    state = copy.deepcopy(plain.state_dict())
    expected, races = Trained(sim, plain, data), sim.races()
    Trained(sim, chk, data)
    options, bases = chk.plan.parts.options(), chk.plan.parts.bases
    alone = [[o for o in site if not o.tier_bytes] for site in options]
    least = least_bytes(alone, bases)
    most = simulate(alone, bases, fastest(alone)).peak_bytes

    for share in (0.1, 0.4):
        limit = int(least + share * (most - least)) + chk.plan.reserve_bytes
        chk.compute_sequence(mem_limit=limit)
        model.load_state_dict(state)
        found = Trained(sim, chk, data)
        assert_equal(found, expected)
        assert chk.plan.tier.offloaded_bytes > 0
        assert found.peaks[-1] <= limit

    draw = torch.Generator().manual_seed(0)

    def any_choice(options, *_):
        found = [int(torch.randint(len(o), (), generator=draw)) for o in options]
        return [max(range(len(options[0])), key=lambda k: options[0][k].tier_bytes), *found[1:]]

    for module in ("engine", "plan"):
        monkeypatch.setattr(f"rotor.engines.parts.{module}.choose_within", any_choice)
    plain.load_state_dict(state)
    expected = Trained(sim, plain, data[:1])
    for _ in range(3):
        chk.compute_sequence(mem_limit="200 MiB")
        plan, predicted = chk.plan, chk.plan.predicted_bytes
        model.load_state_dict(state)
        found = Trained(sim, chk, data[:1])
        assert_equal(found, expected)
        assert chk.plan is plan
        assert plan.tier.offloaded_bytes > 0
        assert plan.measured_bytes <= predicted
        assert 0 <= found.peaks[0] - plan.measured_bytes <= LOSS_BYTES
    assert sim.races() == races
