"""Meters of accelerators: the counters of the device, and nothing but the metered code's bytes."""

import copy
import gc
import threading
import time

import pytest
import torch
from torch import nn
from training import gradients_of, same
from zoo.models import Varying

import rotor
from rotor._pytorch import devices
from rotor.memory import Segment, free_bytes, meter, rounded_bytes

KIB, MIB = 1 << 10, 1 << 20


def test_segments(sim):
    value = torch.zeros(1000, device="sim")
    torch.zeros(MIB, device="sim")  # A peak of before.
    with meter("sim") as m:
        m.mark("a")
        copy = value.clone()
        m.mark("b")
        copy = copy + value.exp()
        del copy
    assert m.segments == [Segment("a", 0, 4096, 4096), Segment("b", 4096, 3 * 4096, 0)]
    assert (m.peak_bytes, m.end_bytes) == (3 * 4096, 0)
    assert m.device == torch.device("sim", 0)


@pytest.mark.parametrize("place", ["main thread", "another thread", "profiler"])
def test_segments_without_a_block(sim, place):
    """Give the same figures by events as by counters, which serve where events cannot."""
    before = sim.memory_allocated()  # Models of other tests may go later.
    torch.zeros(MIB, device="sim")
    value = torch.zeros(1000, device="sim")
    torch.zeros(MIB, device="sim")  # A peak of before.
    found = []

    def measure():
        m = meter("sim", timeline=True).start()
        m.mark("a")
        copy = value.clone()
        m.mark("b")
        copy = copy + value.exp()
        del copy
        m.stop()
        found.append(m)

    if place == "main thread":
        measure()
    elif place == "profiler":
        with torch.profiler.profile():
            measure()
    else:
        thread = threading.Thread(target=measure)
        thread.start()
        thread.join()
    (m,) = found
    assert m.segments == [Segment("a", 0, 4096, 4096), Segment("b", 4096, 3 * 4096, 0)]
    assert (m.peak_bytes, m.end_bytes) == (3 * 4096, 0)
    assert (m.timeline is not None) == (place == "main thread")
    assert (sim.max_memory_allocated() - before > MIB) == (place == "main thread")


def test_a_backward_in_another_thread(sim):
    """See what the thread of backwards allocates, and when."""
    weight = torch.randn(256, 256, device="sim", requires_grad=True)
    with meter("sim", timeline=True) as m:
        m.mark("forward")
        loss = (weight @ weight).sum()
        m.mark("backward")
        loss.backward()
        del loss
    assert m.end_bytes == weight.nbytes
    assert m.peak_bytes == m.segments[1].peak_bytes > 2 * weight.nbytes
    assert m.timeline.peak_bytes == m.peak_bytes


def test_free_bytes(sim):
    sim.set_capacity(64 * MIB)
    before = sim.memory_allocated()
    assert free_bytes("sim") == 64 * MIB - before
    kept = torch.zeros(4 * MIB, dtype=torch.uint8, device="sim")
    assert free_bytes("sim") == 60 * MIB - before  # 16 MiB are reserved and not allocated.
    sim.set_per_process_memory_fraction(0.5)
    assert free_bytes("sim:0") == 32 * MIB - kept.nbytes - before
    assert [rounded_bytes(size, "sim") for size in (0, 1, 513)] == [0, 512, 1024]


def test_cycles_of_others_are_not_collected_inside(sim):
    """Measure a block during which Python's collector would free a tensor of before."""
    gc.collect()
    before = sim.memory_allocated()
    cycle = [torch.zeros(MIB, device="sim")]
    cycle.append(cycle)
    del cycle
    with meter("sim") as m:
        kept = [[[]] for _ in range(100_000)]  # As many new objects as start the collector.
    assert m.end_bytes == 0
    assert gc.isenabled()
    assert len(kept)
    gc.collect()
    assert sim.memory_allocated() == before


def test_the_thread_of_backwards_has_dropped_its_last_node(sim):
    """Measure right after a backward, whose thread frees the last gradient when it likes."""
    value = torch.randn(64 * KIB, device="sim", requires_grad=True)
    for _ in range(300):
        torch.autograd.grad(value.tanh().sum(), value)
        with meter("sim") as m:
            m.mark("one")
            result = value.detach() * 2
            m.mark("two")
        assert m.segments[0].end_bytes == 256 * KIB
        del result


@pytest.mark.parametrize(
    "settle",
    [
        pytest.param(lambda: devices.settle_backwards(torch.device("sim", 0)), id="alone"),
        pytest.param(lambda: meter("sim").start().stop(), id="a meter of a step"),
    ],
)
def test_settling_waits_for_the_thread_of_backwards(sim, settle):
    """Return when that thread has done, and dropped, all that it was given before."""
    started, done = threading.Event(), threading.Event()

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(context, value):
            return value.clone()

        @staticmethod
        def backward(context, gradient):
            started.set()
            time.sleep(0.3)
            done.set()
            return gradient

    value = torch.randn(8, device="sim", requires_grad=True)
    other = threading.Thread(target=lambda: torch.autograd.grad(Slow.apply(value).sum(), value))
    other.start()
    started.wait()
    settle()
    assert done.is_set()
    other.join()


@pytest.mark.parametrize("engine", ["chain", "graph"])
def test_measuring_leaves_peak_statistics(sim, engine):
    """Keep what a user reads from max_memory_allocated()."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).to("sim")
    value = torch.randn(256, 64, device="sim")
    torch.zeros(16 * MIB, device="sim")
    peak = sim.max_memory_allocated()
    rotor.Checkpointable(model, mem_limit="8 MiB", engine=engine).measure(value)
    assert sim.max_memory_allocated() == peak


def sequence():
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)])


@pytest.mark.parametrize(
    ("engine", "make"),
    [("chain", sequence), ("graph", sequence), ("dynamic", lambda: Varying(*sequence()))],
)
@pytest.mark.parametrize("peak_bytes", [16 * MIB, 0])
def test_metered_steps_leave_peak_statistics(sim, engine, make, peak_bytes):
    """Keep a user's peak over metered steps, and theirs where it is the higher one."""
    torch.manual_seed(1)
    wrapped = rotor.Checkpointable(
        make().to("sim"), mem_limit="512 KiB", engine=engine, verbosity=0
    )
    torch.manual_seed(2)
    value = torch.randn(256, 64, device="sim")
    value[0, 0] = 0.5
    if engine != "dynamic":
        wrapped.measure(value)
    level = sim.memory_allocated()
    sim.reset_peak_memory_stats()
    torch.zeros(max(peak_bytes, 1), dtype=torch.uint8, device="sim")
    before = sim.max_memory_allocated()
    for _ in range(4):
        wrapped.zero_grad()
        wrapped(value).square().mean().backward()
    assert wrapped.plan.measured_bytes > 256 * KIB
    assert wrapped.plan.measured_timeline is not None
    if peak_bytes:
        assert sim.max_memory_allocated() == before
    else:
        # What the steps report is what the device has counted.
        seen = wrapped.plan.most_bytes_seen
        assert abs(sim.max_memory_allocated() - level - seen) <= 8 * KIB


def test_a_backward_of_another_thread_is_measured_by_counters(sim):
    """Give a metered step up whose backward another thread runs, and count the next one."""
    value = torch.randn(256, 64, device="sim")

    def wrap():
        wrapped = rotor.Checkpointable(
            sequence().to("sim"), mem_limit="512 KiB", engine="chain", verbosity=0
        )
        wrapped.measure(value)
        return wrapped

    wrapped, other = wrap(), wrap()

    def step():
        loss = wrapped(value).square().mean()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        wrapped.zero_grad()

    step()
    assert wrapped.plan.measured_bytes is None
    step()
    assert wrapped.plan.measured_bytes > 256 * KIB
    assert wrapped.plan.measured_timeline is None
    other(value).square().mean().backward()
    assert other.plan.measured_timeline is not None


@pytest.mark.parametrize("engine", ["chain", "graph"])
def test_a_training_loop_in_another_thread_is_measured(sim, engine):
    """Measure, plan and meter where all of a training runs in a thread that is not the main one."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(6)]
    plain = nn.Sequential(*layers).to("sim")
    model = rotor.Checkpointable(copy.deepcopy(plain), mem_limit="3MiB", engine=engine)
    batch, peaks = torch.randn(1000, 128, device="sim"), []
    plain(batch).square().mean().backward()

    def train():
        for _ in range(4):
            model.zero_grad()
            level = sim.memory_allocated()
            sim.reset_peak_memory_stats()
            model(batch).square().mean().backward()
            peaks.append(sim.max_memory_allocated() - level)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert len(peaks) == 4
    assert max(peaks[1:]) <= 3 * MIB
    assert model.plan.meterings >= 1
    assert model.plan.measured_bytes <= 3 * MIB
    assert same(gradients_of(plain), gradients_of(model))


def test_a_profiler_runs_beside_a_metered_step(sim):
    """Meter a step beside a profiler of the user's, whose trace has its operators and memory."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(6)]
    plain = nn.Sequential(*layers).to("sim")
    batch = torch.randn(1000, 128, device="sim")
    model = rotor.Checkpointable(copy.deepcopy(plain), batch, mem_limit="3MiB", engine="graph")
    plain(batch).square().mean().backward()
    for _ in range(2):
        model.zero_grad()
        with torch.profiler.profile(profile_memory=True) as profiler:
            model(batch).square().mean().backward()
        names = {event.name for event in profiler.events()}
        assert {"aten::tanh", "[memory]"} <= names
    assert 0 < model.plan.measured_bytes <= 3 * MIB
    assert same(gradients_of(plain), gradients_of(model))


def test_a_meter_gives_way_to_a_profiler(sim):
    m = meter("sim").start()
    with torch.profiler.profile() as profiler:
        torch.zeros(1000, device="sim").exp()
        m.stop()
    assert not m.is_here
    assert any(event.name == "aten::exp" for event in profiler.events())
    with meter("sim") as following:
        torch.zeros(1000, device="sim")
    assert following.peak_bytes == 4096
