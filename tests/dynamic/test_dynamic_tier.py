"""The dynamic engine with a second tier: bits, bytes, choices, and what failures leave."""

from __future__ import annotations

import gc
import random
import warnings

import pytest
import torch
from dynamic_tiers import (
    ROWS,
    VALUE_BYTES,
    WIDTH,
    Counting,
    Noisy,
    Recurrent,
    dynamic,
    failing_from,
    pair,
    same,
    trained,
)
from torch import nn

import rotor
from rotor import dtr
from rotor.graph import Link
from rotor.tier import TierStore
from rotor.tier.offload import Offload

LIMIT = 7 * VALUE_BYTES
NO_MORE = 3
FAST = Link(1e13, 1e13)
"""Link by which every move takes less time than computing again."""


@pytest.fixture
def disk(tmp_path):
    tier = Counting(tmp_path)
    yield tier
    tier.close()


@pytest.fixture(autouse=True)
def _noise_is_kept():
    """Let operators be kept that do not repeat."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "rotor_tier_tests::noise does not repeat")
        yield
    torch._dynamo.reset()


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(ROWS, WIDTH)


def offloading(model, tier, limit=LIMIT, link=FAST, **settings):
    chk = dynamic(model, limit, offload=tier, **settings)
    chk.offload.link, chk.offload.learned = link, NO_MORE
    return chk


def ready(chk, model, x):
    """Run the step in which operators are tried twice."""
    trained(model, chk, x, 1)
    return chk


def test_what_cannot_be_recomputed_leaves_memory(disk, x):
    model, twin = pair(Noisy)
    expected = trained(twin, twin, x)
    with pytest.raises(rotor.InfeasibleError, match="cannot be evicted"):
        trained(twin, dynamic(twin, LIMIT), x, 1)
    chk = ready(offloading(model, disk), model, x)
    assert same(trained(model, chk, x), expected)
    assert chk.plan.measured_bytes <= LIMIT
    stats = chk.plan.last.stats
    assert stats.writes >= 3
    assert stats.fetches >= 3
    assert stats.written_bytes >= 3 * VALUE_BYTES
    assert stats.fetched_bytes >= 3 * VALUE_BYTES
    assert stats.waited_ns > 0
    assert disk.areas == 0
    report = chk.report()
    assert f"{stats.fetches} values" in report
    assert "fetched from it" in report


def test_the_link_is_measured(disk, x):
    model, twin = pair(Noisy)
    chk = ready(dynamic(model, LIMIT, offload=disk, offload_limit="64MiB"), model, x)
    assert same(trained(model, chk, x), trained(twin, twin, x))
    assert chk.offload.link.host_bytes == 64 << 20
    assert chk.offload.link.read_bytes_per_s > 0


def test_steps_teach_the_speed(disk, x):
    """Count on the speed that steps have shown, where that is another one."""
    model, _ = pair(Noisy)
    chk = offloading(model, disk)
    chk.offload.learned = 0
    trained(model, chk, x, 4)
    assert chk.offload.learned == 1
    assert chk.offload.link.read_bytes_per_s < FAST.read_bytes_per_s / 10


@pytest.mark.parametrize("link", [FAST, Link(1.0, 1.0)])
def test_the_smaller_of_both_costs_is_taken(disk, link):
    """Fetch all where that is fast, and recompute all where it is slow."""
    model, twin = pair(Recurrent)
    x = torch.randn(12, 256, 16, generator=torch.Generator().manual_seed(2))
    plain = dynamic(twin, "1GiB")
    expected = trained(twin, plain, x)
    limit = plain.plan.measured_bytes * 6 // 10
    chk = offloading(model, disk, limit, link)
    assert same(trained(model, chk, x), expected)
    assert chk.plan.measured_bytes <= limit
    stats = chk.plan.last.stats
    assert stats.evictions > 0
    if link is FAST:
        assert stats.fetches > 0
        assert stats.rematerializations < stats.fetches
    else:
        assert stats.writes == stats.fetches == 0
        assert stats.rematerializations > 0


def test_a_limit_of_the_tier_holds(disk, x):
    model, twin = pair(Noisy)
    expected = trained(twin, twin, x)
    room = 5 * (VALUE_BYTES + 4096)
    chk = ready(
        offloading(model, disk, 10 * VALUE_BYTES, Link(1e13, 1e13, host_bytes=room)), model, x
    )
    assert same(trained(model, chk, x), expected)
    assert 0 < disk.most_bytes <= room
    half = VALUE_BYTES // 2
    link = Link(1e13, 1e13, host_bytes=half)
    tight = offloading(model, disk, 5 * VALUE_BYTES, link, offload_limit=half)
    with pytest.raises(rotor.InfeasibleError, match="holds 0 bytes of its limit of 128 KiB"):
        trained(model, tight, x, 1)
    assert disk.areas == 0


def test_values_are_written_once(disk):
    """Fetch a value three times that was written once, and once more after a write to it."""
    store = TierStore(Offload(disk, None, FAST))
    weight = torch.randn(256, 256)
    with dtr.budget(4 * weight.nbytes + (64 << 10), offload=store) as session:
        with torch.no_grad():
            source = weight.exp()
            source.mul_(2)  # in place without a graph: its recipe is given up
            for _ in range(3):
                for _ in range(3):
                    weight.exp().sin()
                big = torch.empty(4, 256, 256).fill_(1)
                del big
                assert torch.equal(source, weight.exp().mul_(2))
        first = session.stats
        assert first.fetches > first.writes > 0
        source.add_(1)
        big = torch.empty(4, 256, 256).fill_(1)
        del big
        assert torch.equal(source, weight.exp().mul_(2).add_(1))
        assert session.stats.writes > first.writes
    assert torch.equal(source, weight.exp().mul_(2).add_(1))
    assert disk.areas == 0


def _random_program(seed, x, weights):
    """Run operations of many kinds on a few values, and return the last ones."""
    rng = random.Random(seed)
    values = [x, x * 1.5]
    for _ in range(24):
        a = values[rng.randrange(len(values))]
        b = values[rng.randrange(len(values))]
        kind = rng.randrange(8)
        made = (
            torch.tanh(a @ weights[rng.randrange(len(weights))])
            if kind < 2
            else nn.functional.dropout(a, 0.3)
            if kind == 2
            else (a * b).sigmoid()
            if kind == 3
            else a.clone().mul_(0.5).add_(b)
            if kind == 4
            else torch.ops.rotor_tier_tests.noise(a.detach()) + b
            if kind == 5
            else torch.cat([a[:, 64:], b[:, :64]], 1)
            if kind == 6
            else a.t().contiguous().t() - b
        )
        values.append(made)
        if len(values) > 6:
            values.pop(rng.randrange(len(values)))
    return sum(value.square().mean() for value in values)


class _Program(nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.seed = seed
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 12 for _ in range(3))

    def forward(self, x):
        return _random_program(self.seed, x, self.weights)


@pytest.mark.parametrize("verify", ["off", "always"])
@pytest.mark.parametrize("seed", range(5))
def test_random_programs(disk, x, seed, verify):
    model, twin = pair(lambda: _Program(seed))
    plain = dynamic(twin, "1GiB")
    ready(plain, twin, x)
    expected = trained(twin, plain, x)
    rate = 10.0 ** (7 + seed)
    limit = plain.plan.measured_bytes * 7 // 10 + (1 << 20)
    chk = ready(offloading(model, disk, limit, Link(rate, rate), verify=verify), model, x)
    assert same(trained(model, chk, x), expected)
    assert chk.plan.measured_bytes <= limit
    assert disk.areas == 0


def test_swapped_and_resized_storages_move_alike(disk, x):
    model, twin = pair(Noisy)
    chk = offloading(model, disk, LIMIT + 2 * VALUE_BYTES, storage_swap=False)
    ready(chk, model, x)
    assert same(trained(model, chk, x), trained(twin, twin, x))
    assert chk.plan.last.stats.fetches > 0


@pytest.mark.filterwarnings("ignore:a forward began while")
def test_pending_steps_and_kept_graphs(disk, x):
    model, twin = pair(Noisy)
    chk = ready(offloading(model, disk), model, x)

    def both(call, owner):
        torch.manual_seed(0)
        trained(owner, owner, x, 1)
        owner.zero_grad(set_to_none=True)
        first, second = call(x).square().mean(), call(x).square().mean()
        second.backward(retain_graph=True)
        again = [p.grad.clone() for p in owner.parameters()]
        first.backward()
        second.backward()
        return [*again, *(p.grad for p in owner.parameters())]

    assert same(both(chk, model), both(twin, twin))
    gc.collect()
    assert disk.areas == 0


def test_dropped_steps_leave_nothing(disk, x):
    model, _ = pair(Noisy)
    chk = ready(offloading(model, disk), model, x)
    loss = chk(x).square().mean()
    assert disk.areas > 0
    del loss
    gc.collect()
    assert disk.areas == 0


class _Failing(Noisy):
    fails = False

    def forward(self, x):
        found = super().forward(x)
        if self.fails:
            raise ArithmeticError("the model has failed")
        return found


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("move", [1, 3, 6])
def test_failed_and_interrupted_moves(disk, x, move, error):
    """Raise in the step, free every area, and run the next step as if nothing had happened."""
    model, twin = pair(Noisy)
    expected = trained(twin, twin, x)
    chk = ready(offloading(model, disk), model, x)
    state = [p.clone() for p in model.parameters()]
    disk.moves, disk.failing = 0, failing_from(move, error)
    with pytest.raises(error, match="broken"):
        trained(model, chk, x, 1)
    disk.failing = lambda moved: None
    gc.collect()
    assert disk.areas == 0
    assert same(state, list(model.parameters()))
    assert same(trained(model, chk, x), expected)
    assert chk.plan.measured_bytes <= LIMIT


def test_exceptions_of_the_model(disk, x):
    model, twin = pair(_Failing)
    chk = ready(offloading(model, disk), model, x)
    model.fails = True
    with pytest.raises(ArithmeticError, match="the model has failed"):
        chk(x)
    model.fails = False
    gc.collect()
    assert disk.areas == 0
    assert same(trained(model, chk, x), trained(twin, twin, x))


def test_a_full_disk(disk, x, monkeypatch):
    model, twin = pair(Noisy)
    chk = ready(offloading(model, disk), model, x)

    def full(nbytes):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "allocate", full)
    with pytest.raises(OSError, match="No space left"):
        trained(model, chk, x, 1)
    monkeypatch.undo()
    gc.collect()
    assert disk.areas == 0
    assert same(trained(model, chk, x), trained(twin, twin, x))


def test_other_bits_are_found(disk, x, monkeypatch):
    model, _ = pair(Noisy)
    chk = offloading(model, disk, LIMIT + VALUE_BYTES, verify="always")
    ready(chk, model, x)
    fetch = TierStore.fetch

    def changed(self, copy):
        made = fetch(self, copy)
        torch.empty(0, dtype=torch.uint8).set_(made)[5] ^= 1
        return made

    monkeypatch.setattr(TierStore, "fetch", changed)
    with pytest.raises(OSError, match="other bits than were written"):
        trained(model, chk, x, 1)
    gc.collect()
    assert disk.areas == 0


class _Breaking(Noisy):
    def forward(self, x):
        if float(x[0, 0]) > 100:
            return x
        return super().forward(x)


def test_models_without_a_graph_get_the_dynamic_engine(disk, x):
    model, twin = pair(_Breaking)
    chk = offloading(model, disk, engine="auto")
    with pytest.warns(rotor.MemoryLimitWarning, match="or moves to the second tier"):
        ready(chk, model, x)
    assert same(trained(model, chk, x), trained(twin, twin, x))
    assert chk.plan.engine == "dynamic"
    assert chk.plan.last.stats.fetches > 0


def test_a_tier_that_does_not_reach_the_device(x):
    model, _ = pair(Noisy)
    chk = dynamic(model, LIMIT, offload="host")
    with pytest.raises(ValueError, match="does not reach the memory of cpu"):
        chk(x)
    with (
        pytest.raises(ValueError, match="does not reach the memory of cpu"),
        dtr.budget("1MiB", offload=TierStore(rotor.tier.HostTier())),
    ):
        pass
