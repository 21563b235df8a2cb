import gc
import subprocess
import sys
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from rotor import _core, memory
from rotor._pytorch import core, ends, profiler
from rotor.memory import MeterBusyError, Segment, meter
from rotor.meter.segments import counted_levels, levels_of


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_allocations_of_known_size_are_counted_to_the_byte():
    with meter("cpu") as m:
        unnamed = torch.empty(10_000, dtype=torch.uint8)
        del unnamed
        m.mark("a")
        first = torch.empty(1001, dtype=torch.uint8)
        second = torch.empty(7, 11, dtype=torch.float64)
        m.mark("b")
        del first
        third = torch.empty(300, dtype=torch.uint8)
        del third
        m.mark("b")
        m.mark("c")
        view = second[2:]
        del second
        fourth = torch.empty(3, dtype=torch.int32)
        del view
    assert m.segments == [
        Segment("a", 0, 1617, 1617),
        Segment("b", 1617, 1617, 616),
        Segment("b", 616, 616, 616),
        Segment("c", 616, 628, 12),
    ]
    assert m.peak_bytes == 10_000
    assert m.end_bytes == fourth.nbytes


def test_a_workspace_inside_an_operation_is_seen():
    # In float64 a convolution is PyTorch's own: all input patches in one matrix (im2col).
    conv = nn.Conv2d(3, 5, 3, padding=1, dtype=torch.float64)
    x = torch.randn(2, 3, 10, 12, dtype=torch.float64)
    with torch.no_grad(), meter("cpu") as m:
        m.mark("conv")
        y = conv(x)
    columns = 2 * (3 * 3 * 3) * (10 * 12) * 8
    assert m.segments == [Segment("conv", 0, y.nbytes + columns, y.nbytes)]


def _linear_relu():
    batch, inputs, outputs = 8, 16, 32
    model = nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU())
    x = torch.randn(batch, inputs)
    model(x).sum().backward()
    model.zero_grad()
    return model, x, batch * outputs * 4, outputs * inputs * 4, outputs * 4


LINEAR_RELU_SCALAR = 4


def _expected_steps(activation, weight, bias):
    scalar = LINEAR_RELU_SCALAR
    held = activation + scalar
    return [
        # The linear layer's output lives until ReLU has made its own.
        Segment("forward", 0, 2 * activation, activation),
        Segment("loss", activation, held, held),
        # A gradient of the loss, one of the linear layer's output, then those that stay.
        Segment("backward", held, held + scalar + activation + weight + bias, held + weight + bias),
    ]


def test_a_training_step_takes_its_analytic_bytes():
    model, x, activation, weight, bias = _linear_relu()
    with meter("cpu") as m:
        m.mark("forward")
        y = model(x)
        m.mark("loss")
        loss = y.sum()
        m.mark("backward")
        loss.backward()
    assert m.segments == _expected_steps(activation, weight, bias)
    assert m.end_bytes == activation + LINEAR_RELU_SCALAR + weight + bias


class _Nested(torch.autograd.Function):
    """A block recomputed in its backward by a nested autograd.grad."""

    @staticmethod
    def forward(ctx, block, x, *parameters):
        ctx.block = block
        ctx.save_for_backward(x)
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_(ctx.needs_input_grad[1])
        parameters = list(ctx.block.parameters())
        with torch.enable_grad():
            y = ctx.block(x)
        wanted = [x, *parameters] if x.requires_grad else parameters
        found = torch.autograd.grad(y, wanted, grad)
        return (None, *found) if x.requires_grad else (None, None, *found)


def test_a_meter_runs_from_a_forward_to_the_end_of_its_backward():
    model, x, activation, weight, bias = _linear_relu()
    m = meter("cpu")
    m.start()
    m.mark("forward")
    y = _Nested.apply(model, x, *model.parameters())
    m.mark("loss")
    ended = []

    def arrived(grad):
        m.mark("backward")
        ends.at_end_of_backward(lambda: (m.stop(), ended.append(core.in_backward())))

    y.register_hook(arrived)
    y.sum().backward()
    assert ended == [False]
    assert not core.profiler_enabled_here()
    scalar = LINEAR_RELU_SCALAR
    forward, loss, backward = m.segments
    assert forward == Segment("forward", 0, 2 * activation, activation)
    # The gradient of sum() is one scalar, seen as a whole tensor.
    assert loss == Segment("loss", activation, activation + 2 * scalar, activation + 2 * scalar)
    # The block's output again and the gradient of its linear layer's output, both gone at the end.
    assert backward.peak_bytes == loss.end_bytes + 2 * activation + weight + bias
    assert m.end_bytes == backward.end_bytes == loss.end_bytes + weight + bias
    with meter("cpu") as again:
        pass
    assert again.peak_bytes == 0


def test_a_meter_stopped_inside_a_backward_has_its_figures_afterwards():
    x = torch.ones(100, requires_grad=True)
    m = meter("cpu")

    def stop(grad):
        m.mark("hook")
        m.stop()
        assert not m.stop()
        with pytest.raises(RuntimeError, match="inside a backward that has not returned"):
            _ = m.segments
        late.append(torch.empty(5000))

    late = []
    m.start()
    y = x * 2
    y.register_hook(stop)
    y.sum().backward()
    (segment,) = m.segments
    assert segment.start_bytes == segment.end_bytes == m.end_bytes
    assert m.peak_bytes < late[0].nbytes
    assert not core.profiler_enabled_here()


@pytest.mark.parametrize("nested", [False, True])
def test_the_end_of_a_backward_is_reported_outside_it_when_it_fails(nested):
    said = []

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            ends.at_end_of_backward(
                lambda: said.append("done"), lambda: said.append(("failed", core.in_backward()))
            )
            if nested:
                with torch.enable_grad():
                    z = torch.ones(2, requires_grad=True)
                    torch.autograd.grad((z * z).sum(), z)
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        Fails.apply(torch.ones(3, requires_grad=True)).sum().backward()
    assert said == [("failed", False)]


def test_the_end_of_a_backward_is_its_last_act_without_a_profiler():
    said = []
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    y.register_hook(
        lambda grad: ends.at_end_of_backward(
            lambda: said.append((core.in_backward(), x.grad is not None)),
            lambda: said.append("failed"),
        )
    )
    y.sum().backward()
    assert said == [(True, True)]


def test_no_end_of_a_backward_without_one():
    with pytest.raises(RuntimeError, match="backward"):
        ends.at_end_of_backward(lambda: None)


def test_existing_tensors_that_are_told_of_are_seen_when_they_go():
    old = torch.empty(250)
    view = old[:10]
    unknown = torch.empty(1000)
    with meter("cpu", existing=[old, view]) as m:
        m.mark("free")
        del old, unknown
        m.mark("view")
        del view
        m.mark("new")
        new = torch.empty(50)
    assert m.segments == [
        Segment("free", 0, 0, 0),
        Segment("view", 0, 0, -1000),
        Segment("new", -1000, -800, -800),
    ]
    assert m.peak_bytes == 0
    assert m.end_bytes == new.nbytes - 1000


def test_gradients_dropped_within_a_step_are_seen():
    model, x, activation, *_ = _linear_relu()
    model(x).sum().backward()
    gradients = [p.grad for p in model.parameters()]
    size = memory.storage_bytes(gradients)
    m = meter("cpu", existing=gradients)
    del gradients
    with m:
        loss = model(x).sum()
        m.mark("zero")
        model.zero_grad()
        m.mark("backward")
        loss.backward()
    zero, backward = m.segments
    assert zero.end_bytes == zero.start_bytes - size
    assert backward.end_bytes == backward.start_bytes - activation + size


def events_of(*entries):
    """Events, one each nanosecond: address, bytes and perhaps total; names of marks."""
    timed = list(enumerate(entries))
    return profiler.Events.by_time(
        [(at, *entry) for at, entry in timed if not isinstance(entry, str)],
        [(at, entry) for at, entry in timed if isinstance(entry, str)],
    )


def figures_of(levels):
    return levels.segments(), levels.peak_bytes, levels.end_bytes


def test_events_are_sorted_by_time():
    events = profiler.Events.by_time([(4, 7, 70), (1, 5, 50), (9, 7, -70)], [(5, "b"), (1, "a")])
    assert events.address.tolist() == [5, 7, 7]
    assert (events.nbytes.tolist(), events.ns.tolist()) == ([50, 70, -70], [1, 4, 9])
    assert events.marks == (("a", 1, 0), ("b", 5, 2))
    assert events.total_bytes is None
    empty = profiler.Events.by_time([], [(1, "a")])
    assert (len(empty.ns), empty.marks) == (0, (("a", 1, 0),))


def test_levels_do_not_trust_frees_of_what_was_not_allocated_before_their_eyes():
    levels = levels_of(
        events_of(
            (1000, 100),
            (9000, -70),  # allocated before: what the profiler remembers of it may be wrong
            "rotor.mark.x",
            "a range of the user",
            (2000, 50),
            (1000, 30),  # its address again: the 100 bytes were freed unseen
            (2000, -50),
            "rotor.end",
            (3000, 1000),
        )
    )
    assert figures_of(levels) == ([Segment("x", 100, 150, 30)], 150, 30)


def test_levels_know_releases_that_marks_report():
    levels = levels_of(
        events_of(
            "rotor.mark.x",
            (1000, 100),
            "rotor.freed.70",
            "rotor.mark.y",
            "rotor.freed.20",
            (2000, 30),
            (1000, -100),
            "rotor.end",
        ),
        {9000},
    )
    assert levels.after.tolist() == [100, 40, -60]
    assert levels.segments() == [Segment("x", 0, 100, 30), Segment("y", 30, 40, -60)]
    assert (levels.peak_bytes, levels.end_bytes) == (100, -60)
    found = levels.timeline()
    assert found.live_bytes.tolist() == [0, 100, 30, 30, 10, 40, -60, -60]
    assert found.allocated_bytes.tolist() == [0, 100, 100, 100, 100, 130, 130, 130]
    assert found.marks == (("x", 0.0), ("y", 3e-9))


def test_counters_correct_the_levels_of_an_accelerator():
    events = events_of(
        "rotor.mark.x",
        (0, 100),
        "rotor.mark.y",  # another thread has freed 60
        "a range of the user",
        (0, 50),
        (0, -20),
        "rotor.end",
        (0, 9),
    )
    levels = counted_levels(events, [5, 45, 71])
    assert levels.segments() == [Segment("x", 5, 105, 45), Segment("y", 45, 95, 71)]
    assert (levels.peak_bytes, levels.end_bytes) == (105, 71)
    assert levels.at_marks == [5, 45, 45, 71]


def test_blocks_that_others_overlap_were_freed_unseen():
    levels = levels_of(
        events_of((1000, 100), (1100, 100), (1300, 50), (1150, 170), (1000, -100), "rotor.end")
    )
    assert (levels.peak_bytes, levels.end_bytes) == (270, 170)


def test_totals_tell_what_other_threads_free():
    rows = [
        (1000, 100, 700),
        (2000, 50, 750),
        (3000, 10, 660),  # the 100 bytes are gone
        "rotor.mark.x",
        (1000, 30, 690),  # in their place
        (4000, -40, 650),  # from before the start
        (5000, 5, 735),  # another thread has allocated 80
        (6000, 5, 690),  # and 50 are gone, of whichever thread
        (7000, -30, 660),  # freed by this thread
        (8000, 5, 615),  # now 50 of this thread are gone
        "rotor.end",
    ]
    assert figures_of(levels_of(events_of(*rows))) == ([Segment("x", 60, 100, 55)], 150, 55)
    # A block that the meter was told of is not taken for one of another thread.
    told = events_of((100, 5, 9), (200, 5, 94), (700, -80, 14), (300, 1, 10), "rotor.end")
    assert levels_of(told, {700}).end_bytes == 11
    assert levels_of(told).end_bytes == 6


def test_what_threads_of_collectives_free_is_seen(monkeypatch):
    def free_elsewhere(kept):
        thread = threading.Thread(target=kept.clear)
        thread.start()
        thread.join()

    def metered():
        old = torch.empty(300_000)
        with meter("cpu", existing=[old]) as m:
            kept = [torch.empty(100_000), torch.empty(50_000)]
            free_elsewhere(kept)
            del old
            m.mark("then")
            held = torch.empty(1000)
            m.mark("end")
        del held
        return m

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for _ in range(2):
        m = metered()
        assert m.peak_bytes == 600_000
        assert m.end_bytes == 4000 - 1_200_000


def test_a_stale_address_of_an_earlier_session_does_not_count():
    with meter("cpu"):
        kept = [torch.empty(20_000, dtype=torch.uint8) for _ in range(20)]
    kept.clear()
    others = [torch.empty(n, dtype=torch.uint8) for n in range(19_000, 20_000, 50)]
    with meter("cpu") as m:
        others.clear()
    assert (m.peak_bytes, m.end_bytes) == (0, 0)


def test_a_meter_does_not_nest_with_itself_a_profiler_or_a_backward():
    with meter("cpu"), pytest.raises(MeterBusyError, match="another meter is running on cpu"):
        meter("cpu").start()
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu), pytest.raises(MeterBusyError, match="profiler"):
        meter("cpu").start()

    failures = []

    def inside(grad):
        try:
            meter("cpu").start()
        except MeterBusyError as error:
            failures.append(str(error))

    x = torch.ones(2, requires_grad=True)
    x.register_hook(inside)
    x.sum().backward()
    assert failures == ["a meter of the CPU cannot be started inside a backward"]
    with meter("cpu") as m:
        kept = torch.empty(10)
    assert m.end_bytes == kept.nbytes


def test_a_profiler_that_is_only_prepared_is_not_disturbed():
    busy = []
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=1, repeat=1)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, schedule=schedule, acc_events=True) as profiler:
        for _ in range(4):
            try:
                with meter("cpu"):
                    pass
                busy.append(False)
            except MeterBusyError:
                busy.append(True)
            torch.ones(3).sum()
            profiler.step()
    assert busy == [False, True, True, False]
    assert any(event.name == "aten::sum" for event in profiler.events())


def test_a_profiler_of_another_thread_is_respected():
    entered, leave = threading.Event(), threading.Event()

    def profile():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            entered.set()
            leave.wait(30)

    thread = threading.Thread(target=profile)
    thread.start()
    try:
        assert entered.wait(30)
        with pytest.raises(MeterBusyError, match="profiler"):
            meter("cpu").start()
    finally:
        leave.set()
        thread.join()
    with meter("cpu") as m:
        pass
    assert m.segments == []


def test_a_meter_is_used_once_and_in_order():
    m = meter("cpu")
    m.stop()
    with pytest.raises(RuntimeError, match="was not started"):
        _ = m.peak_bytes
    with pytest.raises(RuntimeError, match=r"call start\(\) first"):
        m.mark("early")
    with m:
        with pytest.raises(RuntimeError, match="is still running"):
            _ = m.segments
        with pytest.raises(RuntimeError, match="runs once"):
            m.start()
    m.stop()
    assert m.end_bytes == 0
    with pytest.raises(RuntimeError, match="runs once"):
        m.start()
    with pytest.raises(RuntimeError, match=r"call start\(\) first"):
        m.mark("late")


def test_a_meter_stops_when_the_block_raises():
    m = meter("cpu")
    with pytest.raises(KeyError), m:
        raise KeyError
    assert m.segments == []
    assert not core.profiler_enabled_here()


def test_a_meter_that_is_dropped_stops():
    m = meter("cpu").start()
    assert core.profiler_enabled_here()
    del m
    assert not core.profiler_enabled_here()
    with meter("cpu"):
        pass


def test_a_meter_is_stopped_by_its_own_thread():
    m = meter("cpu").start()
    errors = []

    def stop():
        try:
            m.stop()
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=stop)
    thread.start()
    thread.join()
    assert errors == ["a meter of the CPU must be stopped by the thread that started it"]
    m.stop()
    assert m.end_bytes == 0


def test_many_sessions_keep_no_memory():
    def session():
        with meter("cpu") as m:
            for _ in range(50):
                m.mark("x")
                torch.empty(100)

    for _ in range(30):
        session()
    gc.collect()
    before = _core.probe_memory()["heap_used_bytes"]
    if before <= 0:
        pytest.skip("the C library does not say what its heap holds")
    for _ in range(100):
        session()
    gc.collect()
    # A session has 200 events and marks: keeping them would take several MB.
    assert _core.probe_memory()["heap_used_bytes"] - before < 100 * 1000


def test_metering_is_silent():
    code = """if True:
        import torch
        from rotor.memory import meter
        for _ in range(3):
            old = [torch.empty(10_000) for _ in range(5)]
            with meter("cpu") as m:
                old.clear()
                new = torch.empty(10)
            assert m.end_bytes == new.nbytes
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_missing_private_names_are_said():
    core.check()
    with pytest.raises(ImportError, match=r"lacks torch\._C\._gone, torch\.nn\.gone\.x\. It works"):
        core.check(["_C._profiler", "_C._gone", "nn.gone.x"])


def test_functorch_is_detected():
    seen = []

    def square(x):
        seen.append(core.in_functorch())
        return x * x

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.func.grad(square)(torch.tensor(2.0))
        torch.func.vmap(square)(torch.ones(2))
    square(torch.tensor(2.0))
    assert seen == [True, True, False]


def test_sizes_are_rounded_as_the_allocator_does():
    assert memory.rounded_bytes(1001, "cpu") == 1001
    cuda = torch.device("cuda", 0)
    sizes = [0, 1, 512, 513, 1_000_000]
    assert [memory.rounded_bytes(n, cuda) for n in sizes] == [0, 512, 512, 1024, 1_000_448]


def test_each_storage_counts_once():
    x = torch.empty(10, 10)
    y = torch.empty(3, dtype=torch.uint8)
    assert memory.storage_bytes([x, x[1:], x.t(), x.view(torch.int32), y, torch.empty(0)]) == 403
    assert memory.storage_bytes([]) == 0


@pytest.mark.parametrize("call", [meter, memory.free_bytes, lambda d: memory.rounded_bytes(1, d)])
def test_other_devices_are_refused(call):
    with pytest.raises(ValueError, match=r"such as cuda, got 'meta'"):
        call("meta")


def test_free_memory_of_the_cpu_is_what_the_probe_says(monkeypatch):
    assert memory.free_bytes("cpu") > 0
    monkeypatch.setattr(_core, "probe_memory", lambda: {"free_bytes": 1234})
    assert memory.free_bytes(torch.device("cpu")) == 1234
    monkeypatch.setattr(_core, "probe_memory", lambda: {"free_bytes": -1})
    assert memory.free_bytes("cpu") > 1234


def test_gradients_of_a_wrapper_subclass_count_by_what_is_inside():
    inner = torch.zeros(1024)
    wrapped = TwoTensor(inner, torch.zeros(1024))
    assert memory.storage_bytes([wrapped]) == 2 * inner.nbytes
    with memory.meter("cpu", existing=[wrapped]) as meter:
        del wrapped, inner
    assert meter.end_bytes == -2 * 4096


def test_what_records_itself_is_in_no_trace():
    (trace := profiler.AllocationTrace()).start()
    with torch.profiler.record_function("a collective"):
        trace.mark("mine")
    assert [mark.name for mark in trace.stop().marks] == ["mine"]
    with torch.profiler.profile() as seen:
        torch.empty(1)
    assert seen.events()
