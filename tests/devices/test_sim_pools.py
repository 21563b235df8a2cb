"""Private pools: a plan's segments are there before its step, and hold nothing after it."""

import copy
import gc
from functools import partial

import pytest
import torch
from devices.test_sim_reserved import Reserved, prepared
from limited_on_sim import Trained, assert_equal, distance, one_step

import rotor
from rotor._pytorch import devices
from rotor.engines.graph import captured_step
from rotor.engines.graph.code.pricing import outliving_storages
from rotor.engines.graph.costs.profile import Cost, cost_of_row
from rotor.engines.graph.costs.repeating import events_of, orders_within
from rotor.graph.blocks import RESULT, BlockBytes, pool_bytes, program_bytes
from rotor.graph.graph import Graph, Operation
from rotor.graph.program import simulate

MIB = 1 << 20


def planned(sim, name, share, **options):
    """Return a wrapped model that was measured, its batches, its limit and plain training."""
    model, batches = prepared(sim, name)
    plain = Reserved(sim, copy.deepcopy(model), batches)
    limit = int(plain.reserved_peak * share)
    wrapped = rotor.Checkpointable(
        model, mem_limit=limit, counts="reserved", loss_fn=distance, verbosity=0, **options
    )
    wrapped.measure(batches[0], targets=(torch.tensor(0.5, device="sim"),))
    sim.empty_cache()
    return wrapped, batches, limit, plain


def pools_of(sim):
    """Return the segments of private pools, in bytes, and the bytes allocated in them."""
    found = [s for s in sim.memory_snapshot() if s["segment_pool_id"][1]]
    sizes = [segment["total_size"] for segment in found]
    return sorted(sizes), sum(segment["allocated_size"] for segment in found)


def test_a_program_needs_less_in_a_pool(sim):
    """Hold a limit in which the same program does not fit without a pool, and need no more."""
    wrapped, batches, limit, plain = planned(sim, "odd sizes", 0.75)
    level = sim.memory_reserved()
    sim.set_capacity(level + limit)
    sim.reset_peak_memory_stats()
    found = Trained(sim, wrapped, batches, inside=True)
    assert_equal(found, plain)
    pool = wrapped.plan.pool
    assert pool.piece_bytes >= pool.large_bytes > 0
    assert program_bytes(wrapped.plan.program).reserved_peak_bytes > limit
    assert pool.reserved_peak_bytes <= wrapped.plan.predicted_bytes <= limit
    assert sim.memory_reserved() - level <= pool.reserved_peak_bytes
    segments, _ = pools_of(sim)
    assert segments == sorted([pool.piece_bytes] + [2 * MIB] * pool.small_segments)
    assert sum(segments) == pool.pool_bytes
    assert wrapped.plan.meterings == 1


@pytest.fixture
def always_pools(monkeypatch):
    """Let every plan run in a pool, also where it needs less without."""
    found = BlockBytes(1 << 60, 1 << 60)
    monkeypatch.setattr(captured_step, "program_bytes", lambda *_, **__: found)


@pytest.mark.usefixtures("always_pools")
def test_what_outlives_a_step_is_outside(sim):
    """Leave nothing in the pool once the backward has ended: its segments are whole."""
    for name in ("images", "attention"):  # Some gradients come with others of the same operation.
        wrapped, batches, _, plain = planned(sim, name, 0.9)
        assert_equal(Trained(sim, wrapped, batches, inside=True), plain)
        held = [one_step(wrapped, batches[0], True)]
        assert "pool.copied(" in wrapped.plan.emitted.source
        assert all(p.grad is not None for p in wrapped.parameters())
        assert pools_of(sim)[0]
        assert pools_of(sim)[1] == 0
        del wrapped, held


def test_gradients_are_added_to_existing_ones(sim):
    """Hand gradients over within the pool: bit-equal to plain training, two steps for one."""
    model, batches = prepared(sim, "odd sizes")
    plain = Trained(sim, copy.deepcopy(model), batches + batches[:1], accumulate=2)
    wrapped, _, limit, _ = planned(sim, "odd sizes", 0.75)
    sim.reset_peak_memory_stats()
    found = Trained(sim, wrapped, batches + batches[:1], accumulate=2, inside=True)
    assert_equal(found, plain)
    assert wrapped.plan.step.hands_over
    assert wrapped.plan.pool is not None
    assert wrapped.plan.measured_bytes <= limit
    assert pools_of(sim)[1] == 0


def test_segments_are_taken_before_a_step(sim):
    """Refuse a step before it begins, where the device has less than the plan needs."""
    wrapped, batches, _, _ = planned(sim, "odd sizes", 0.75)
    others = torch.empty(40 * MIB, dtype=torch.uint8, device="sim")
    calls = []
    wrapped.module.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    sim.set_capacity(sim.memory_reserved() + 30 * MIB)
    with (
        pytest.warns(rotor.MemoryLimitWarning, match="has less for it"),
        pytest.raises(torch.OutOfMemoryError, match="the step was not begun"),
    ):
        one_step(wrapped, batches[0], True)
    assert not calls
    assert all(p.grad is None for p in wrapped.parameters())
    del others
    sim.set_capacity(2 << 30)
    one_step(wrapped, batches[0], True)


def test_a_pool_goes_with_its_plan(sim):
    """Give all segments back once the model is gone, and those of a former plan at once."""
    wrapped, batches, limit, _ = planned(sim, "odd sizes", 0.75)
    one_step(wrapped, batches[0], True)
    first = pools_of(sim)[0]
    one_step(wrapped, batches[0][:4000].clone(), True)  # Another shape: another plan.
    wrapped.zero_grad()
    assert wrapped.plan.pool is not None
    assert pools_of(sim)[0] not in ([], first)
    assert sum(pools_of(sim)[0]) <= limit
    del wrapped
    # The thread of backwards lets go of its last step some time after the main thread.
    devices.settle_backwards(torch.device("sim", 0))
    gc.collect()
    sim.empty_cache()
    assert pools_of(sim)[0] == []


def test_a_failed_step_leaves_the_pool(sim):
    """Take memory from elsewhere after an error in the backward, in both threads."""
    wrapped, batches, _, _ = planned(sim, "odd sizes", 0.75)
    one_step(wrapped, batches[0], True)
    wrapped.zero_grad()
    gc.collect()
    kept = [torch.empty(1, device="sim")]
    while sim.memory_stats()["inactive_split_bytes.small_pool.current"] > 1 << 18:
        kept.append(torch.empty(1 << 18, dtype=torch.uint8, device="sim"))
    model = copy.deepcopy(wrapped.module)
    sim.set_capacity(sim.memory_reserved())
    with pytest.raises(torch.OutOfMemoryError):
        one_step(wrapped, batches[0], True)
    gc.collect()
    sim.set_capacity(2 << 30)
    devices.settle_backwards(torch.device("sim", 0))
    before = pools_of(sim)[1]
    one_step(model, batches[0], False)  # Its gradients, from the thread of backwards.
    assert wrapped.plan.reserving.pool is not None
    wrapped.plan.emitted.pooling.use(wrapped.plan.reserving)
    with pytest.raises(RuntimeError, match="Tensor"):  # An error within the pool.
        wrapped.plan.emitted.forward([None] * len(wrapped.plan.step.lowered.primals))
    others = torch.empty(3 * MIB, device="sim")
    assert pools_of(sim)[1] == before == 0
    del others, kept


def test_orders_within_an_operation_by_hand(sim):
    """Record allocations, results and frees; name both blocks that may be the freed one."""
    device = torch.device("sim", 0)
    known = torch.empty(4096, dtype=torch.uint8, device=device)

    def makes(scratch_bytes, result_bytes):
        scratch = torch.empty(scratch_bytes, dtype=torch.uint8, device=device)
        result = torch.empty(result_bytes, dtype=torch.uint8, device=device)
        del scratch
        return result

    runs = [partial(makes, 3000, 5 * MIB), partial(makes, 4096, 4096), known.zero_]
    first, second, third = events_of(runs, device)
    assert orders_within(first, [5 * MIB]) == ((3072, RESULT, -1),)
    assert orders_within(second, [4096]) == ((RESULT, 4096, -2), (4096, RESULT, -1))
    assert orders_within(second, [8192]) == ()
    assert orders_within(third, []) == ((),)


@pytest.mark.parametrize("orders", [None, (), ((),), ((3072, RESULT, -1), (RESULT, 5, -2))])
def test_orders_are_kept_on_disk(orders):
    cost = Cost(1, 2, (3, 4), 0, orders)
    assert cost_of_row(cost.to_row(), 2) == cost


def test_a_known_order_is_priced():
    """Count a block that an operation takes before its result, which its workspace lacks."""
    operations = [
        Operation("first", 1, (), (0,), 0),
        Operation("loss", 1, (0,), (1,), phase="loss"),
    ]
    program = simulate(Graph([30 * MIB, 512], [False, False], operations), [0, 1])
    orders = [[[30 * MIB, RESULT, -1]], None]
    assert program_bytes(program).reserved_peak_bytes == 32 * MIB
    assert program_bytes(program, orders=orders).reserved_peak_bytes == 62 * MIB
    assert pool_bytes(program, {1}, orders=orders).pool_bytes == 60 * MIB
    assert pool_bytes(program, {1}, orders=orders).large_bytes == 60 * MIB
    assert pool_bytes(program, {1}).large_bytes == 30 * MIB


def test_orders_are_recorded_when_a_model_is_measured(sim):
    """Record what kernels need beside their results, one block after another."""
    model, batches = prepared(sim, "images")
    wrapped = rotor.Checkpointable(
        model, mem_limit="1GiB", counts="reserved", loss_fn=distance, verbosity=0
    )
    wrapped.measure(batches[0], targets=(torch.tensor(0.5, device="sim"),))
    one_step(wrapped, batches[0], True)
    step = wrapped.plan.step
    tasks = zip(step.lowered.tasks, step.costs, strict=True)
    assert all(cost.orders for task, cost in tasks if task.node is not None)
    assert any(len(order) > 3 for cost in step.costs for order in cost.orders or ())


def test_without_pools_plans_are_as_before(sim, monkeypatch):
    """Plan for the common segments on a device whose module has no pools."""
    monkeypatch.delattr(torch.sim, "MemPool")
    wrapped, batches, limit, plain = planned(sim, "skips", 0.75)
    found = Reserved(sim, wrapped, batches, inside=True)
    assert_equal(found, plain)
    assert wrapped.plan.pool is None
    assert found.reserved_peak <= limit
    assert pools_of(sim)[0] == []


def test_a_plan_has_a_pool_only_if_it_needs_less(sim):
    """Choose the cheaper of both ways."""
    seen = set()
    for name, share in (("chain", 0.75), ("odd sizes", 0.75)):
        wrapped, batches, limit, _ = planned(sim, name, share)
        one_step(wrapped, batches[0], True)
        plan = wrapped.plan
        orders = [cost.orders for cost in plan.step.costs]
        outliving = outliving_storages(plan.step.lowered)
        without = program_bytes(plan.program, orders=orders).reserved_peak_bytes
        within = pool_bytes(plan.program, outliving, orders=orders).reserved_peak_bytes
        assert (plan.pool is not None) == (within < without)
        assert min(without, within) <= plan.predicted_bytes <= limit
        seen.add(plan.pool is not None)
        del wrapped, plan
    assert True in seen
