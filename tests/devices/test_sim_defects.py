"""What a CPU hides: learnt workspaces, times of launches, streams, captures, flags."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import rotor
from rotor import dtr
from rotor._pytorch import devices
from rotor.engines.graph.costs.profile import environment_of, wholes_for
from rotor.timing import Clock, measure_ns

MIB = 1 << 20


def tower(value, weight, count=8):
    for _ in range(count):
        value = torch.tanh(value @ weight)
    return value.square().mean()


def operands(rows=2048, width=256):
    torch.manual_seed(0)
    value = torch.randn(rows, width, device="sim")
    return value, torch.randn(width, width, device="sim", requires_grad=True)


def test_workspaces_are_learnt(sim):
    """Evict nothing where everything fits, once the need of each operator is known."""
    value, weight = operands()
    level = sim.memory_allocated()
    sim.reset_peak_memory_stats()
    expected = torch.autograd.grad(tower(value, weight), weight)[0]
    # The allocator may keep a rest with the next block.
    limit = sim.max_memory_allocated() - level + 2 * MIB
    evictions = []
    for _ in range(3):
        with dtr.budget(limit) as session:
            found = torch.autograd.grad(tower(value, weight), weight)[0]
            evictions.append(session.stats.evictions)
        assert torch.equal(found, expected)
    assert evictions[-1] == 0


@torch.library.custom_op("rotor_sim::scratched", mutates_args=())
def scratched(value: torch.Tensor) -> torch.Tensor:
    """Double, with scratch of four times its size."""
    scratch = value.repeat(4, 1)
    return scratch[: len(value)] * 2


@scratched.register_fake
def _(value):
    return torch.empty_like(value)


scratched.register_autograd(lambda context, gradient: gradient * 2)


def test_learnt_workspaces_are_within_the_budget(sim):
    """Leave room for what an operator takes beside its results."""
    value, weight = operands(512, 128)
    limit = 3 * MIB
    for number in range(3):
        level = sim.memory_allocated()
        sim.reset_peak_memory_stats()
        with dtr.budget(limit) as session:
            found = value
            for _ in range(8):
                found = torch.sin(scratched(found @ weight))
            torch.autograd.grad(found.square().mean(), weight)
            assert session.stats.evictions > 0
        assert sim.max_memory_allocated() - level <= limit or number < 2


class Uneven(nn.Module):
    """Layers of odd widths, so that blocks of many sizes are cut out of freed ones."""

    def __init__(self, *widths):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(widths))

    def forward(self, value):
        for layer in self.layers:
            value = torch.tanh(layer(value))
        return value.square().mean()


@pytest.mark.parametrize("share", [0.9, 0.8, 0.75])
def test_rests_of_large_blocks_are_within_the_budget(sim, share):
    """Count what the allocator keeps with blocks above 1 MiB, which no storage has."""
    model = Uneven(300, 517, 713, 409, 611, 457, 839, 353, 709, 431, 300).to("sim")
    value = torch.randn(1024, 300, device="sim")

    def peak_of_step():
        model.zero_grad()
        level = sim.memory_allocated()
        sim.reset_peak_memory_stats()
        model(value).backward()
        return sim.max_memory_allocated() - level

    peak_of_step()
    limit = int(share * peak_of_step())
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    for _ in range(4):
        model.zero_grad()
        with dtr.budget(limit) as session:
            peak = peak_of_step()
            assert session.stats.evictions > 0
        assert peak <= limit
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            assert torch.equal(parameter.grad, gradient)


def test_bytes_outside_of_operators_are_within_the_budget(sim):
    """Let the budget shrink by what the device has allocated and no operator made."""
    value, weight = operands(512, 128)

    class Holding(torch.autograd.Function):
        """The identity; memory taken unseen, as a library would take it."""

        @staticmethod
        def forward(context, value):
            with torch._C._DisableTorchDispatch():
                held.append(torch.empty(MIB, dtype=torch.uint8, device="sim"))
            return value.view_as(value)

        @staticmethod
        def backward(context, gradient):
            return gradient

    held = []
    level = sim.memory_allocated()
    sim.reset_peak_memory_stats()
    with dtr.budget(4 * MIB) as session:
        found = tower(Holding.apply(value), weight, 16)
        torch.autograd.grad(found, weight)
        assert session.stats.evictions > 0
    assert held
    assert sim.max_memory_allocated() - level <= 4 * MIB


def test_a_budget_that_was_passed_unseen_is_a_warning(sim):
    """Say by how much, if the device's own counter passed the budget."""
    value, weight = operands(64, 128)

    def step():
        with dtr.budget(4 * MIB) as session:
            tower(value, weight, 2)
            with torch._C._DisableTorchDispatch():
                torch.empty(8 * MIB, dtype=torch.uint8, device="sim")
        return session

    with pytest.warns(rotor.MemoryLimitWarning, match="was passed: sim:0 counted 8 MiB"):
        session = step()
    assert session.stats.overflows == 1


def test_checksums_are_within_the_budget(sim):
    """Leave room for the checksums of what is evicted, which are made on the device."""
    value, weight = operands(64, 128)
    limit = 3 * MIB
    for _ in range(3):
        level = sim.memory_allocated()
        sim.reset_peak_memory_stats()
        with dtr.budget(limit, verify="always") as session:
            torch.autograd.grad(tower(value, weight, 120), weight)
            assert session.stats.evictions > 0
        assert session.compared > 0
        assert sim.max_memory_allocated() - level <= limit


@torch.library.custom_op("rotor_sim::seeded", mutates_args=())
def seeded(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Double, and return a seed on the CPU, as memory-efficient attention does."""
    return value * 2, torch.zeros((), dtype=torch.int64, device="cpu")


@seeded.register_fake
def _(value):
    return torch.empty_like(value), torch.zeros((), dtype=torch.int64, device="cpu")


seeded.register_autograd(lambda context, gradient, seed: gradient * 2)


def test_results_beside_a_seed_on_the_cpu_are_evicted(sim):
    value, weight = operands(512, 128)

    def loss():
        found = value
        for _ in range(12):
            found = torch.sin(seeded(found @ weight)[0])
        return found.square().mean()

    expected = torch.autograd.grad(loss(), weight)[0]
    for _ in range(2):
        level = sim.memory_allocated()
        sim.reset_peak_memory_stats()
        with dtr.budget("2.5 MiB") as session:
            found = torch.autograd.grad(loss(), weight)[0]
            assert session.stats.evictions > 0
        assert sim.max_memory_allocated() - level <= 5 * MIB // 2
        assert torch.equal(found, expected)


def test_costs_are_times_of_the_device(sim):
    """Take an operator's cost from the device, whose work outlasts the launch by far."""
    value, weight = operands(64, 64)
    sim.set_clock("model")
    sim.set_compute(gb_per_s=0.0001, launch_ns=1000)
    try:
        with dtr.budget("1 GiB") as session:
            for _ in range(2):
                tower(value, weight)
            sim.synchronize()
            assert session.stats.base_ns < 32 * (16 << 10) / 0.0001
            tower(value, weight)
            base_ns = session.stats.base_ns
    finally:
        sim.set_clock("real")
        sim.set_compute()
    # 16 operations of at least 16 KiB at 100 KB/s, the third time.
    assert base_ns > 16 * (16 << 10) / 0.0001


def test_times_leave_launches_out(sim):
    """Measure the work of a small operator, not the idle device before it."""
    value = torch.zeros(64, device="sim")
    sim.set_clock("model")
    sim.set_compute(gb_per_s=100.0, launch_ns=20_000)
    try:
        found = measure_ns(lambda: value.add_(1), "sim")
    finally:
        sim.set_clock("real")
        sim.set_compute()
    assert found < 5_000


def test_the_runtime_waits_for_nothing(sim, monkeypatch):
    """Keep the queue of the device filled, while times are taken and values are computed again."""
    value, weight = operands()
    waits = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *_: waits.append(1))
    monkeypatch.setattr(Clock, "stop", lambda *_: waits.append(1))
    for _ in range(3):
        waits.clear()
        with dtr.budget("10 MiB") as session:
            torch.autograd.grad(tower(value, weight), weight)
        assert session.stats.rematerializations > 0
    assert not waits


def test_another_stream_within_a_budget_is_refused(sim):
    value, weight = operands()
    side = torch.Stream("sim")
    with (
        dtr.budget("1 GiB"),
        pytest.raises(RuntimeError, match="on another stream than the one"),
        side,
    ):
        torch.tanh(value)
    side.wait_stream(torch.accelerator.current_stream())
    with side, dtr.budget("1 GiB"):
        tower(value, weight)
    torch.accelerator.current_stream().wait_stream(side)


def test_a_capture_is_refused(sim, monkeypatch):
    layer = nn.Linear(4, 4).to("sim")
    wrapped = rotor.Checkpointable(layer, mem_limit="1 MiB", engine="graph")
    monkeypatch.setattr(sim, "is_current_stream_capturing", lambda: True, raising=False)
    with pytest.raises(RuntimeError, match="cannot be captured"):
        wrapped(torch.zeros(2, 4, device="sim"))


def test_costs_depend_on_flags(sim):
    """Keep costs apart that were measured under other flags of an accelerator's libraries."""
    before = environment_of(torch.device("sim", 0))
    on_cpu = environment_of(torch.device("cpu"))
    torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
    try:
        assert environment_of(torch.device("sim", 0)) != before
        assert environment_of(torch.device("cpu")) == on_cpu
    finally:
        torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    try:
        assert environment_of(torch.device("sim", 0)) != before
    finally:
        torch.use_deterministic_algorithms(False)
    assert environment_of(torch.device("sim", 0)) == before


def test_an_allocator_without_counters(sim, monkeypatch):
    """Refuse to measure in words where a pluggable allocator counts nothing."""

    def nothing(device):
        raise RuntimeError("does not yet support getDeviceStats")

    monkeypatch.setattr(devices, "reset_peak", nothing)
    monkeypatch.setattr(devices, "counters", nothing)
    wrapped = rotor.Checkpointable(nn.Linear(4, 4).to("sim"), mem_limit="1 MiB")
    with pytest.raises(RuntimeError, match="counts no bytes"):
        wrapped(torch.zeros(2, 4, device="sim"))


def test_measuring_leaves_no_cached_memory(sim):
    """Give cached memory back after measuring: a limit by what is free counts it as free."""
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]).to("sim")
    value = torch.randn(4096, 512, device="sim")
    sim.empty_cache()
    before = sim.memory_reserved()
    wrapped = rotor.Checkpointable(model, mem_limit="200 MiB", engine="graph")
    wrapped.measure(value)
    assert sim.memory_reserved() - before <= 4 * MIB


@pytest.mark.parametrize(("shape", "expected"), [((64, 1, 8), (0,)), ((64, 2), (0, 1))])
def test_no_index_is_made_up_out_of_bounds(sim, shape, expected):
    """Try no 1 for whole numbers where a dimension has size 1: on a GPU it ends the context."""
    graph = torch.fx.Graph()
    given = graph.placeholder("given")
    given.meta["val"] = torch.empty(shape, device="sim")
    node = graph.call_function(torch.ops.aten.index.Tensor, (given,))
    task = SimpleNamespace(node=node)
    assert wholes_for(task, torch.device("sim", 0)) == expected
    assert wholes_for(task, torch.device("cpu")) == (0, 1)
