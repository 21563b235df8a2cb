"""Limits that follow from the size of the card: the sum, its parts, and 40 steps that fit."""

import gc
import warnings

import pytest
import torch
from torch import nn

import rotor
from rotor.errors import InfeasibleError, MemoryLimitWarning
from rotor.meter.room import Room

MiB = 1 << 20


@pytest.fixture(autouse=True)
def card(sim):
    sim.set_capacity(1024 * MiB)
    yield
    gc.collect()


class Blocks(nn.Module):
    """Embeddings of 32 MiB, and residual blocks with activations of several times as much."""

    def __init__(self, width=64, depth=4):
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(32768, width) for _ in range(4))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(depth)
        )

    def forward(self, ids):
        x = sum(embedding(ids) for embedding in self.embeddings)
        for block in self.blocks:
            x = x + block(x)
        return x


def batch(rows=32768):
    return torch.randint(32768, (rows,), device="sim")


def train(model, optimizer, steps, *, rows=32768, keep_gradients=False):
    losses = []
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=not keep_gradients)
        loss = model(batch(rows)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().cpu())
    return losses


def held(sim):
    """Return what the process holds at its peak, as a driver counts it."""
    return torch.accelerator.memory_stats("sim")["reserved_bytes.all.peak"]


OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p),
    "amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, 0.01),
    "momentum": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p),
    "adagrad": lambda p: torch.optim.Adagrad(p),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_to_come_are_those_that_come(sim, name):
    model = Blocks().to("sim")
    optimizer = OPTIMIZERS[name](model.parameters())
    room = Room(model, "card")
    room.take(torch.device("sim", 0))
    before = torch.accelerator.memory_allocated("sim")
    train(model, optimizer, 1)
    optimizer.zero_grad()
    grown = torch.accelerator.memory_allocated("sim") - before
    assert abs(room.coming_bytes - grown) <= grown // 100 + 4096
    room.take(torch.device("sim", 0))
    assert room.coming_bytes == 0


def test_an_optimizer_is_not_stepped_to_learn_its_states(sim):
    class Doubled(torch.optim.Optimizer):
        """Optimizer around another one, which it steps."""

        def __init__(self, inner):
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure=None):
            self.inner.step()

    model = Blocks().to("sim")
    train(model, torch.optim.SGD(model.parameters(), 0.0), 1)
    optimizer = Doubled(torch.optim.SGD(model.parameters(), 0.1))
    before = [p.detach().clone() for p in model.parameters()]
    Room(model, "card").take(torch.device("sim", 0))
    assert all(map(torch.equal, before, model.parameters()))
    del optimizer


@pytest.mark.parametrize("engine", ["auto", "dynamic"])
@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_a_step_after_the_optimizers_first_fits_the_card(sim, name, engine):
    """A limit that was taken before Adam had a state left no room for it."""
    plain = Blocks().to("sim")
    sim.reset_peak_memory_stats()
    train(plain, OPTIMIZERS[name](plain.parameters()), 3)
    needed = held(sim)
    del plain
    sim.empty_cache()
    capacity = needed * 7 // 8
    taken = 16 * MiB
    sim.set_capacity(capacity + taken)
    sim.set_taken(taken)
    model = rotor.Checkpointable(Blocks().to("sim"), engine=engine, verbosity=-1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", MemoryLimitWarning)
        train(model, OPTIMIZERS[name](model.parameters()), 8)


def test_the_sum_is_what_the_device_counts(sim):
    sim.set_taken(64 * MiB)
    model = rotor.Checkpointable(Blocks().to("sim"), total_limit="400MiB", verbosity=-1)
    assert model.limits is None
    optimizer = torch.optim.Adam(model.parameters())
    sim.reset_peak_memory_stats()
    train(model, optimizer, 6)
    assert held(sim) + 64 * MiB <= 400 * MiB
    optimizer.zero_grad()
    level = torch.accelerator.memory_allocated("sim")
    parts = model.limits
    assert parts["context"] == 64 * MiB
    assert sum(parts.values()) == 400 * MiB
    assert parts["step"] == model.plan.limit_bytes
    own = parts["parameters"] + parts["optimizer"]
    assert abs(own - level) <= level // 100
    assert model.plan.recomputation > 0
    assert "400 MiB = 64 MiB context + " in model.report()


def test_gradients_that_stay_are_taken_from_the_step(sim):
    sim.set_taken(8 * MiB)
    model = rotor.Checkpointable(Blocks().to("sim"), total_limit="360MiB", verbosity=-1)
    sim.reset_peak_memory_stats()
    train(model, torch.optim.Adam(model.parameters()), 6, keep_gradients=True)
    assert held(sim) + 8 * MiB <= 360 * MiB
    parts = model.limits
    expected = sum(p.nbytes for p in model.parameters())
    assert abs(parts["gradients"] - expected) <= expected // 100


def test_another_model_on_the_card_makes_another_plan(sim):
    model = rotor.Checkpointable(Blocks().to("sim"), total_limit="480MiB", verbosity=-1)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, 4)
    before = model.mem_limit
    other = torch.zeros(192 * MiB, dtype=torch.uint8, device="sim")
    sim.empty_cache()
    sim.reset_peak_memory_stats()
    train(model, optimizer, 4)
    assert model.mem_limit <= before - 180 * MiB
    assert held(sim) <= 480 * MiB
    del other


def test_what_the_parameters_leave_is_too_little(sim):
    model = rotor.Checkpointable(Blocks().to("sim"), total_limit="200MiB", verbosity=-1)
    with pytest.raises(InfeasibleError, match=r"200 MiB = .*Adam, still to come.*in all, .* would"):
        model(batch())


@pytest.mark.parametrize(("capacity", "limit"), [(300, 300), (900, 900), (900, 1 << 30)])
def test_a_limit_above_what_is_free_is_warned_of_with_the_sum(sim, capacity, limit):
    """Whether a step is planned within the limit, or fits as it is."""
    sim.set_capacity(capacity * MiB)
    sim.set_taken(32 * MiB)
    model = rotor.Checkpointable(Blocks().to("sim"), mem_limit=limit * MiB, verbosity=-1)
    wanted = rf"less for it: {capacity} MiB = 32 MiB context \+ "
    with pytest.warns(MemoryLimitWarning, match=wanted):
        model(batch())


def test_the_smaller_of_both_limits_holds(sim):
    for given in ("160MiB", "800MiB"):
        model = rotor.Checkpointable(
            Blocks().to("sim"), mem_limit=given, total_limit="480MiB", verbosity=-1
        )
        model(batch()).sum().backward()
        assert model.mem_limit == 160 * MiB if given == "160MiB" else model.mem_limit < 480 * MiB
        del model


@pytest.mark.parametrize("wrong", ["cards", "0", -1, True])
def test_a_total_that_cannot_be_read_is_an_error(sim, wrong):
    with pytest.raises((ValueError, TypeError), match="total_limit"):
        rotor.Checkpointable(Blocks(), total_limit=wrong)
