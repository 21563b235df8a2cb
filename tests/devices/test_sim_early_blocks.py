"""Blocks that a program allocates early, so that holes between others do not cost its limit."""

import copy

import numpy as np
import pytest
import torch
from devices.test_sim_reserved import Reserved
from limited_on_sim import assert_equal, distance
from torch import nn

import rotor
from rotor import _core
from rotor.engines.graph.pooling import Pooling

MIB = 1 << 20


class Uneven(nn.Module):
    """Layers of many widths, whose values are all needed at the end."""

    def __init__(self, widths):
        super().__init__()
        self.layers = nn.ModuleList(map(nn.Linear, widths, widths[1:]))

    def forward(self, value):
        made = []
        for layer in self.layers:
            value = torch.tanh(layer(value))
            made.append(value.mean(1, keepdim=True))
        return torch.cat(made, 1)


MODELS = [
    ((150, 470, 470, 150, 220, 470, 330, 640, 470), 1500),
    ((470, 330, 220, 220, 220, 150, 640, 640, 470), 3100),
    ((150, 330, 640, 330, 640, 220, 330, 150, 330), 3100),
    ((100, 640, 150, 470, 470, 640, 150, 150, 150), 3100),
    ((220, 220, 640, 640, 150, 640, 150, 640, 150), 1500),
    ((220, 150, 330, 640, 100, 100, 470, 100, 220), 3100),
]


def wrapped(sim, number, limit, **options):
    widths, count = MODELS[number]
    sim.set_poison(0)
    sim.set_clock("model")
    sim.set_capacity(2 << 30)
    torch.manual_seed(1)
    model = Uneven(widths).to("sim")
    batches = [torch.randn(count, widths[0], device="sim") for _ in range(3)]
    found = rotor.Checkpointable(
        model,
        mem_limit=limit,
        engine="graph",
        counts="reserved",
        loss_fn=distance,
        planning="before",
        verbosity=0,
        **options,
    )
    found.measure(batches[0], targets=(torch.tensor(0.5, device="sim"),))
    found.compute_sequence()
    return found, batches


def closing_holes(sim, **options):
    """Yield models, batches and limits that suffice without recomputation only by early blocks."""
    for number in range(len(MODELS)):
        model, _ = wrapped(sim, number, 1 << 30)
        assert not model.plan.early_blocks
        limit = model.plan.predicted_bytes - 2 * MIB
        del model
        model, batches = wrapped(sim, number, limit, **options)
        if model.plan.early_blocks and not model.plan.recomputed:
            yield number, model, batches, limit


def on_a_full_device(sim, model, batches, limit):
    sim.empty_cache()
    sim.set_capacity(sim.memory_reserved() + limit)
    return Reserved(sim, model, batches, inside=True)


@pytest.mark.slow
def test_early_blocks_hold_a_limit_without_recomputation(sim):
    """Hold 2 MiB less than the blocks with their holes, on a device that has no more."""
    _, model, batches, limit = next(closing_holes(sim))
    plan = model.plan
    assert plan.predicted_bytes <= limit
    assert "allocated early" in model.report()
    plain = copy.deepcopy(model.module)
    found = on_a_full_device(sim, model, batches, limit)
    assert found.reserved_peak <= limit
    assert sim.memory_stats()["num_alloc_retries"] == 0
    assert plan.emitted.source.count("pool.block(") == len(plan.early_blocks)
    sim.set_capacity(2 << 30)
    assert_equal(found, Reserved(sim, plain, batches))


@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
def test_the_limit_needs_the_blocks(sim, monkeypatch):
    """Miss the limit where the same program does not allocate its blocks."""
    monkeypatch.setattr(Pooling, "block", lambda self, nbytes: None)
    for _, model, batches, limit in closing_holes(sim):
        sim.empty_cache()
        if Reserved(sim, model, batches[:1], inside=True).reserved_peak > limit:
            return
    pytest.fail("all programs held their limits without early blocks")


@pytest.mark.slow
def test_without_early_blocks_the_planner_recomputes(sim, monkeypatch):
    number, model, _, limit = next(closing_holes(sim))
    fewest = model.plan.makespan
    monkeypatch.setattr(_core, "search_early", lambda *given: None)
    assert wrapped(sim, number, limit)[0].plan.makespan > fewest


@pytest.mark.slow
def test_verified_steps_and_recomputation(sim):
    """Hold limits far below the need, and compare what is computed again."""
    need = wrapped(sim, 2, 1 << 30)[0].plan.predicted_bytes
    seen = 0
    for twelfths in (9, 8, 7, 6):
        limit = need * twelfths // 12
        try:
            model, batches = wrapped(sim, 2, limit, verify="always")
        except rotor.InfeasibleError:
            continue
        plain = copy.deepcopy(model.module)
        if not (model.plan.early_blocks and model.plan.recomputed):
            continue
        seen += 1
        found = on_a_full_device(sim, model, batches, limit)
        assert found.reserved_peak <= limit
        sim.set_capacity(2 << 30)
        assert_equal(found, Reserved(sim, plain, batches))
    assert seen


@pytest.mark.slow
def test_accumulated_gradients_and_other_shapes(sim):
    """Give the plain bits in steps that add to gradients, and for another length."""
    _, model, batches, limit = next(closing_holes(sim))
    plain = copy.deepcopy(model.module)
    shorter = [batch[:1100].contiguous() for batch in batches]
    order = [batches[0], shorter[0], batches[1], shorter[1], batches[2]]
    found = Reserved(sim, model, order, inside=True, accumulate=5)
    assert_equal(found, Reserved(sim, plain, order, accumulate=5))
    assert all(plan.measured_bytes <= limit for plan in model.plans.values())


def drawn_program(seed):
    """Return events of a random program, and the number of the first one of each position."""
    rng = np.random.default_rng(seed)
    events, starts, alive = [], [], []
    for _ in range(40):
        starts.append(len(events))
        dying = [k for k in alive if rng.random() < 0.35]
        for _ in range(int(rng.integers(1, 3))):
            alive.append(sum(event >= 0 for event in events))
            events.append(int(rng.choice([300 << 10, *range(2 * MIB, 9 * MIB, 3 * MIB >> 1)])))
        for k in dying:
            alive.remove(k)
            events.append(-1 - k)
    return np.array(events, dtype=np.int64), np.array(starts, dtype=np.int64)


def with_blocks(events, starts, blocks):
    """Return the events with those of early blocks, which are numbered after all others."""
    made = int((events >= 0).sum())
    rows = []
    for position, part in enumerate(np.split(events, starts[1:])):
        for number, (_, end, _) in enumerate(blocks):
            rows += [("free", made + number)] if end == position else []
        for number, (begin, _, nbytes) in enumerate(blocks):
            rows += [("take", made + number, nbytes)] if begin == position else []
        for event in part.tolist():
            rows.append(("free", -1 - event) if event < 0 else ("take", None, event))
    own, numbers, found = 0, {}, []
    for row in rows:
        if row[0] == "free":
            found.append(-1 - numbers[row[1]])
            continue
        key = own if row[1] is None else row[1]
        own += row[1] is None
        numbers[key] = len(numbers)
        found.append(row[2])
    return np.array(found, dtype=np.int64)


def test_random_programs_reserve_what_the_search_says(sim):
    """Compare answers with the device, in whose memory the piece was taken before."""
    sim.set_poison(0)
    sim.set_capacity(1 << 40)
    level = sim.memory_reserved()
    closed = 0
    for seed in range(12):
        orders = [drawn_program(seed), drawn_program(seed)]
        events, starts = orders[0]
        need = _core.fit_piece(events)
        for border in (0, 20, 40):
            for fewer in range(1, 8):
                most = need["reserved_peak_bytes"] - 2 * MIB * fewer
                piece = max(need["bytes"] - 2 * MIB * fewer, 0)
                blocks = _core.search_early(orders, border, piece, most)
                if blocks is None:
                    break
                closed += 1
                for begin, end, nbytes in blocks:
                    assert 0 <= begin < end < 40
                    assert nbytes > MIB
                    assert not begin <= border <= end
                merged = with_blocks(events, starts, blocks)
                taken = [piece, -1] if piece else []
                merged = np.concatenate(
                    [
                        np.array(taken, dtype=np.int64),
                        np.where(merged < 0, merged - bool(piece), merged),
                    ]
                )
                sim.empty_cache()
                assert int(sim.replay(merged)[:, 1].max()) - level <= most
    sim.empty_cache()
    assert closed > 5


def test_a_program_that_fits_needs_no_blocks():
    events, starts = drawn_program(3)
    assert _core.search_early([(events, starts)], 20, 0, 1 << 40) == []
    assert _core.search_early([(events, starts)], 20, 0, MIB) is None


def test_wrong_orders_are_refused():
    """Refuse starts that do not ascend, frees of what was not made, and no orders."""
    events, starts = drawn_program(1)
    with pytest.raises(ValueError, match="1 to 8 orders"):
        _core.search_early([], 0, 0, 1)
    with pytest.raises(TypeError, match="events and starts"):
        _core.search_early([events], 0, 0, 1)
    for other in (starts[::-1].copy(), starts + len(events)):
        with pytest.raises(ValueError):
            _core.search_early([(events, other)], 0, 0, 1)
    with pytest.raises(ValueError):
        _core.search_early([(np.array([-1]), np.array([0]))], 0, 0, 1)
    with pytest.raises(ValueError):
        _core.search_early([(events, starts), (events, starts[:-1])], 0, 0, 1)
