import random
import statistics

import pytest
import torch

from rotor import _core
from rotor._pytorch import devices
from rotor.timing import Clock, measure_ns, stable_median


class _FakeTime:
    """A thread clock and a wall clock that go on only when told."""

    def __init__(self, monkeypatch):
        self.cpu_ns = 5
        self.wall_ns = 7
        monkeypatch.setattr(_core, "thread_cpu_ns", lambda: self.cpu_ns)
        monkeypatch.setattr(_core, "clock_ns", lambda: self.wall_ns)

    def spend(self, cpu_ns, wall_ns=None):
        self.cpu_ns += cpu_ns
        self.wall_ns += cpu_ns if wall_ns is None else wall_ns


@pytest.fixture
def fake_time(monkeypatch):
    return _FakeTime(monkeypatch)


def _calls(fake_time, costs):
    made = []

    def call():
        cost = costs[len(made)]
        made.append(cost)
        fake_time.spend(cost)

    return call, made


def test_a_clock_takes_times_in_turn(fake_time):
    clock = Clock("cpu")
    samples = []
    for cost in (10, 20, 30):
        clock.start()
        fake_time.spend(cost, wall_ns=1000)
        samples.append(clock.stop())
        fake_time.spend(999)
    assert samples == [10, 20, 30]
    clock.start()
    fake_time.spend(5)
    clock.start()
    fake_time.spend(6)
    assert clock.stop() == 6
    with pytest.raises(RuntimeError, match=r"call start\(\) first"):
        clock.stop()
    with pytest.raises(RuntimeError, match=r"call start\(\) first"):
        Clock("cpu").stop()


def test_the_cpu_clock_is_that_of_this_thread():
    clock = Clock(torch.device("cpu"))
    clock.start()
    first = _core.thread_cpu_ns()
    sum(range(10_000))
    inner = _core.thread_cpu_ns() - first
    assert clock.stop() >= inner > 0


def test_clocks_of_other_devices_are_refused():
    with pytest.raises(ValueError, match="got 'meta'"):
        Clock("meta")


@pytest.mark.parametrize(
    ("samples", "tolerance", "expected"),
    [
        ([100], 1.0, (100, False)),
        ([100, 100], 1.0, (100, False)),
        ([100, 100, 100], 0.0, (100, True)),
        ([0, 0, 0], 0.0, (0, True)),
        ([90, 100, 110], 0.1, (100, True)),
        ([90, 100, 110], 0.09, (100, False)),
        ([105, 100, 95, 9000, 100], 0.05, (100, True)),
        ([110, 100, 90, 9000, 100], 0.04, (100, False)),
        ([1, 100, 100, 100, 900, 100, 100], 0.0, (100, True)),
        ([1, 2, 3, 4], 0.5, (2, False)),
        ([1, 4, 3, 2], 0.6, (2, True)),
    ],
)
def test_a_median_is_stable_when_its_standard_error_is_small(samples, tolerance, expected):
    assert stable_median(samples, tolerance) == expected


def test_no_samples_have_no_median():
    with pytest.raises(ValueError, match="got none"):
        stable_median([], 0.1)


def test_the_standard_error_is_about_that_of_the_normal_distribution():
    # The median of n normal samples has the standard error sqrt(pi / 2n) sigma.
    generator = random.Random(1)
    for n, sigma in ((25, 5.0), (101, 20.0)):
        error = (3.14159265 / (2 * n)) ** 0.5 * sigma / 1000
        runs = [[round(generator.gauss(1000, sigma) * 1000) for _ in range(n)] for _ in range(400)]
        loose = statistics.mean(stable_median(run, 1.6 * error)[1] for run in runs)
        tight = statistics.mean(stable_median(run, 0.6 * error)[1] for run in runs)
        assert loose > 0.8
        assert tight < 0.2


def test_the_warm_up_is_not_counted(fake_time):
    call, made = _calls(fake_time, [10_000, *[100] * 50])
    assert measure_ns(call, "cpu", min_repeats=4) == 100
    assert len(made) == 1 + 4


def test_calls_are_repeated_until_the_median_is_stable(fake_time):
    noisy = [100, 100, 50, 150, 70, 130, 100, 100, 100, 100, 100, 100]
    call, made = _calls(fake_time, noisy)
    assert measure_ns(call, "cpu", min_repeats=3, max_repeats=11, rel_tolerance=0.01) == 100
    counted = len(made) - 1
    assert 5 < counted < 11
    assert stable_median(made[1:], 0.01)[1]
    assert not stable_median(made[1:-1], 0.01)[1]


def test_repeats_are_bounded(fake_time):
    call, made = _calls(fake_time, [1, *([100, 300] * 20)])
    assert measure_ns(call, "cpu", max_repeats=10) == 200
    assert len(made) == 1 + 10


@pytest.mark.parametrize(("cost", "counted"), [(400_000_000, 2), (5_000_000_000, 1)])
def test_time_is_bounded(fake_time, cost, counted):
    call, made = _calls(fake_time, [cost + k * cost // 10 for k in range(30)])
    measure_ns(call, "cpu", max_seconds=1.0)
    assert len(made) == 1 + counted


@pytest.mark.parametrize(("fewest", "most"), [(0, 5), (6, 5), (-1, 0)])
def test_repeats_that_make_no_sense_are_refused(fewest, most):
    with pytest.raises(ValueError, match="1 <= min_repeats <= max_repeats"):
        measure_ns(lambda: None, "cpu", min_repeats=fewest, max_repeats=most)


def test_a_failing_call_raises_its_own_error():
    def call():
        raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        measure_ns(call, "cpu")


def test_a_real_call_takes_its_thread_time():
    x = torch.randn(64, 64)
    calls = []

    def call():
        calls.append(None)
        return x @ x

    assert measure_ns(call, "cpu", min_repeats=3, max_repeats=3) > 0
    assert len(calls) == 4


def test_cuda_times_come_from_events(monkeypatch):
    log = []

    class Event:
        def __init__(self, device, enable_timing):
            assert device == torch.device("cuda", 1)
            assert enable_timing
            self.at_ms = None

        def record(self, stream):
            log.append(("record", stream))
            self.at_ms = 2.5 * len(log)

        def synchronize(self):
            log.append("synchronize")

        def elapsed_time(self, end):
            return end.at_ms - self.at_ms

    monkeypatch.setattr(torch, "Event", Event)
    stream = "stream of {}".format
    monkeypatch.setattr(torch.accelerator, "current_stream", stream)
    monkeypatch.setattr(devices, "occupy", lambda device: log.append(("busy", str(device))))
    clock = Clock("cuda:1")
    clock.start()
    assert clock.stop() == 2_500_000
    record = "record", "stream of cuda:1"
    assert log == [("busy", "cuda:1"), record, record, "synchronize"]
    with pytest.raises(RuntimeError, match=r"call start\(\) first"):
        clock.stop()
