"""First calls of an accelerator's libraries take memory before a measured step, not in it."""

import copy

import pytest
import torch
from devices.test_sim_bits import Branches
from limited_on_sim import Trained, batches, distance
from torch import nn

import rotor
from rotor._pytorch import devices

MIB = 1 << 20


@pytest.mark.parametrize("engine", ["graph", "dynamic"])
def test_the_thread_of_backwards_has_its_handle(sim, monkeypatch, engine):
    """Keep the limit from the first step on, whose backward has a thread of its own."""
    torch.manual_seed(1)
    model = Branches(0.0)
    state = model.state_dict()
    plain = Trained(sim, model.to("sim"), batches())
    limit = max(plain.peaks) * 7 // 10
    del model
    ours = Branches(0.0)
    ours.load_state_dict(state)
    sim.forget_handles()
    monkeypatch.setattr(devices, "_prepared", set())
    sim.set_handles(handle_bytes=MIB)
    wrapped = rotor.Checkpointable(ours.to("sim"), mem_limit=limit, engine=engine, loss_fn=distance)
    data = batches()
    wrapped.measure(data[0], targets=(torch.tensor(0.5, device="sim"),))
    assert sim.handles() == 2
    found = Trained(sim, wrapped, data, inside=True)
    assert sim.handles() == 2
    assert max(found.peaks) <= limit


def convolutions():
    blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(6)]
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1))


def images(count=4):
    torch.manual_seed(0)
    return [torch.randn(4, 3, 64, 64, device="sim") for _ in range(count)]


def searched(sim, engine):
    """Return the limit, and a wrapped model for which each thread is to search its algorithms."""
    torch.manual_seed(1)
    model = convolutions().to("sim")
    plain = Trained(sim, copy.deepcopy(model), images())
    limit = max(plain.peaks) * 7 // 10
    sim.forget_handles()
    sim.set_handles(search_bytes=4 * MIB)
    return limit, rotor.Checkpointable(model, mem_limit=limit, engine=engine, loss_fn=distance)


@pytest.mark.parametrize("engine", ["chain", "graph"])
def test_algorithms_are_searched_before_a_step(sim, engine):
    """Keep the limit from the first step on, whose backward runs convolutions again."""
    limit, wrapped = searched(sim, engine)
    wrapped.measure(images(1)[0], targets=(torch.tensor(0.5, device="sim"),))
    found = sim.searches()
    assert found > 0
    peaks = Trained(sim, wrapped, images(), inside=True).peaks
    assert sim.searches() == found
    assert max(peaks) <= limit


@pytest.mark.filterwarnings("ignore:the limit of .* was not kept in a first step")
@pytest.mark.parametrize("engine", ["chain", "graph"])
def test_a_first_step_is_no_evidence(sim, monkeypatch, engine):
    """Give back what was set aside for memory that is taken once, at an unforeseen time."""
    monkeypatch.setattr(devices, "searches", lambda device: False)
    limit, wrapped = searched(sim, engine)
    wrapped.measure(images(1)[0], targets=(torch.tensor(0.5, device="sim"),))
    peaks = Trained(sim, wrapped, images(), inside=True).peaks
    assert peaks[0] > limit >= max(peaks[1:])
    assert wrapped.plan.reserve_bytes == 0


@pytest.mark.filterwarnings("ignore:a step needed about")
def test_a_reserve_shrinks(sim):
    """Give back what a step needed once, such as a library's in another stream; but only once."""
    torch.manual_seed(1)
    limit = 9 * MIB // 2
    wrapped = rotor.Checkpointable(
        Branches(0.0).to("sim"), mem_limit=limit, engine="graph", loss_fn=distance
    )
    data = batches(1) * 4
    Trained(sim, wrapped, data, inside=True)
    engine = wrapped._driver.engines[0]
    for is_kept in (False, True):
        engine.learn_peak(wrapped.plan, limit + MIB // 8)
        assert wrapped.plan.reserve_bytes >= MIB // 8
        for _ in range(2):
            wrapped.plan.differs = True  # The next step is metered.
            Trained(sim, wrapped, data[:2], inside=True)
        assert bool(wrapped.plan.reserve_bytes) == is_kept


def test_workspaces_of_first_calls_are_not_learnt(sim):
    """Learn what an operator takes from its second run, after which nothing is evicted in vain."""
    torch.manual_seed(1)
    model, value = convolutions().to("sim"), images(1)[0]
    level = sim.memory_allocated()
    sim.reset_peak_memory_stats()
    model(value).sum().backward()
    # A search's block above 1 MiB may keep a rest of as much.
    limit = sim.max_memory_allocated() - level + 2 * MIB
    sim.forget_handles()
    sim.set_handles(search_bytes=4 * MIB)
    evictions = []
    for _ in range(3):
        model.zero_grad()
        with rotor.dtr.budget(limit) as session:
            model(value).sum().backward()
            evictions.append(session.stats.evictions)
    assert sim.searches() > 0
    assert evictions[-1] == 0


def test_searches_are_warned_of(sim, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    wrapped = rotor.Checkpointable(convolutions().to("sim"), mem_limit="4 MiB")
    with pytest.warns(rotor.MemoryLimitWarning, match="benchmark is on"):
        wrapped.measure(images(1)[0])
    wrapped = rotor.Checkpointable(Branches(0.0).to("sim"), mem_limit="4 MiB")
    wrapped.measure(batches(1)[0])
