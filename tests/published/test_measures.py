"""Measures of memory and time, and random states, by the names of the published rotor."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch
from torch import nn

import rotor
from rotor import timing
from rotor.memory import DisplayMemory, MeasureMemory, MemSize

CPU = torch.device("cpu")
MIB = 1 << 20


def test_a_size_is_a_number_that_is_shown_for_people():
    size = MemSize(700 * MIB)
    assert str(size) == "700 MiB"
    assert f"{size:>10}" == "   700 MiB"
    assert repr(size) == str(700 * MIB)
    assert int(size) == size.v == size == MemSize.fromStr("700M")
    assert MemSize.fromStr("1.5G") == 1536 * MIB
    for found, expected in ((size + MemSize(MIB), 701 * MIB), (size - MemSize(MIB), 699 * MIB)):
        assert isinstance(found, MemSize)
        assert found == expected
    assert str(MemSize(0) - size) == "-700 MiB"
    assert hash(MemSize(3)) == hash(MemSize(3))
    with pytest.raises(ValueError, match="cannot be read"):
        MemSize.fromStr("many")


def test_a_call_is_measured_to_the_byte():
    usage = MeasureMemory(CPU)

    def made(rows: int) -> torch.Tensor:
        return torch.ones(rows, 1024).exp()

    result, stays, most = usage.measure(made, 256)
    assert result.shape == (256, 1024)
    assert (stays, most) == (MIB, 2 * MIB)
    assert isinstance(most, MemSize)


LEVELS = """
import torch
from rotor.memory import MeasureMemory

MIB = 1 << 20
usage = MeasureMemory(torch.device("cpu"))
before = usage.current()
kept = torch.ones(64 * MIB // 4)
assert usage.diffFromStart() > 32 * MIB
assert usage.diffFromLast() > 32 * MIB
assert usage.diffFromLast() < 32 * MIB
assert usage.currentValue() > before
del kept
assert usage.maximumValue() > before + 32 * MIB
usage.resetMax()
assert usage.maximumValue() < before + 32 * MIB
assert usage.currentCached() == 0
assert usage.available() > 0
"""


def test_the_level_of_a_process_is_read():
    # The process of the tests may give memory back meanwhile.
    subprocess.run([sys.executable, "-c", LEVELS], check=True, timeout=120)


def test_lines_are_written_where_published_scripts_expect_them(capsys):
    display = DisplayMemory(CPU, maxLabelSize=10)
    display.printCurrentState("start")
    display.printCurrentState("later", time=1.5)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("start ")
    assert "  1.50 TotalMem: " in second
    assert "max reached: " in second
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    display.inspectModule(net)
    net(torch.ones(2, 4, requires_grad=True)).sum().backward()
    words = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert words == [["Fwd", "0"], ["Fwd", "1"], ["Bwd", "1"], ["Bwd", "0"]]


def test_a_timer_counts_milliseconds():
    timer = timing.make_timer(CPU)
    calls: list[int] = []

    def work() -> None:
        calls.append(sum(range(20_000)))

    assert timer.measure(work, iterations=4) > 0
    assert timer.measure_median(work, samples=5, iterations=2) > 0
    assert len(calls) == 14
    timer.start()
    work()
    timer.end()
    spent = timer.elapsed()
    assert 0 < spent < 1000
    timer.start()
    assert timer.elapsedAndReset() >= 0
    timer.end()
    assert timer.elapsed() >= 0
    timer.reset()
    assert timer.elapsed() != timer.elapsed()
    with pytest.raises(RuntimeError, match="call start"):
        timer.end()


@pytest.mark.parametrize("tensors", [torch.ones(2), (torch.ones(1), {"x": [torch.ones(1), 3]}), ()])
def test_random_states_are_restored(tensors):
    state = rotor.RngState(tensors)
    assert torch.equal(state.cpu_state, torch.get_rng_state())
    first = torch.rand(3)
    assert not torch.equal(torch.rand(3), first)
    for _ in range(2):
        state.restore()
        assert torch.equal(torch.rand(3), first)


@pytest.mark.parametrize(
    "function, parameters",
    [
        (MemSize, "v"),
        (MeasureMemory, "device"),
        (MeasureMemory.measure, "self func args"),
        (MeasureMemory.available, "self index"),
        (DisplayMemory, "device maxLabelSize"),
        (DisplayMemory.printCurrentState, "self label time"),
        (timing.make_timer, "device"),
        (timing.Timer.measure_median, "self func samples kwargs"),
        (rotor.RngState, "tensors"),
    ],
)
def test_signatures_are_those_published(function, parameters):
    assert list(inspect.signature(function).parameters) == parameters.split()
