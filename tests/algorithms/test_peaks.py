"""What sets a least limit: the operation at the peak of the least plan, and its bytes in parts."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given, settings
from random_chains import chains
from torch import nn
from zoo.models import Asking, Row

import rotor
from rotor.algorithms import get
from rotor.algorithms.peaks import Peak, peak_of
from rotor.graph import Graph, Operation, plan
from rotor.meter.room import Room, checked_total


def refusal(chk: rotor.Checkpointable) -> rotor.InfeasibleError:
    """The error of a limit in which nothing fits, whose parts are those of the least."""
    with pytest.raises(rotor.InfeasibleError) as caught:
        chk.compute_sequence(mem_limit=1)
    assert sum(caught.value.peak.parts.values()) == caught.value.minimum_bytes
    return caught.value


def test_a_peak_by_hand():
    operations = [
        Operation("f", 1, (), (0,)),
        Operation("g", 1, (0,), (1, 2)),
        Operation("dg", 1, (1,), (3, 5), phase="backward", module="last"),
        Operation("df", 1, (0, 2, 5), (4,), 700, "backward", once=True, module="first"),
    ]
    graph = Graph([100, 50, 40, 30, 20, 10], [False, False, False, True, True, False], operations)
    with pytest.raises(rotor.InfeasibleError) as caught:
        plan(graph, 1)
    assert caught.value.peak == Peak(
        "df in the backward",
        "first",
        {"inputs": 150, Peak.GRADIENTS: 30, "outputs": 20, "workspace": 700},
    )
    assert str(caught.value).endswith(
        "bytes. The least is set by df in the backward of module 'first': 700 B workspace, 150 B "
        "inputs, 30 B gradients that exist by then, 20 B outputs"
    )
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@settings(max_examples=100, deadline=None)
@given(chains())
def test_the_parts_of_a_sequence_add_up(chain):
    sequence = get("no_checkpoint")().solve(chain, 10**9)
    peak = peak_of(sequence)
    assert sum(peak.parts.values()) == sequence.peak_bytes - chain.x_bytes[0]
    assert min(peak.parts.values()) >= 0


def stage_of(count, width):
    """Several layers as one stage."""
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count)]
    return Row(nn.Linear(16, width), *layers, nn.Linear(width, 16))


def test_a_stage_that_saves_most_of_it_is_named_as_one_to_cut():
    inner, last, x = stage_of(8, 16), nn.Linear(16, 16), torch.randn(512, 16)
    chk = rotor.Checkpointable(nn.Sequential(inner, last), x, "1GiB", engine="chain")
    error = refusal(chk)
    assert "cut stage 0 into several, or make" in str(error)
    assert error.peak.module == "0"
    assert (error.culprit, error.bound_bytes) == (error.peak, error.lower_bound_bytes)
    cut = nn.Sequential(nn.Sequential(*inner), last)
    chk = rotor.Checkpointable(cut, x, "1GiB", engine="chain")
    again = refusal(chk)
    assert again.minimum_bytes < 0.7 * error.minimum_bytes
    assert "into several" not in str(again)


def test_a_stage_of_one_large_value_is_not():
    inner, last, x = stage_of(0, 256), nn.Linear(16, 16), torch.randn(512, 16)
    chk = rotor.Checkpointable(nn.Sequential(inner, last), x, "1GiB", engine="chain")
    error = refusal(chk)
    assert error.peak.module == "0"
    assert "into several" not in str(error)


@pytest.mark.parametrize("engine", ["chain", "graph"])
def test_gradients_that_set_the_least_do_not_once_they_exist(engine):
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    chk = rotor.Checkpointable(model, torch.randn(8, 64), "1GiB", engine=engine)
    error = refusal(chk)
    assert error.peak.parts[Peak.GRADIENTS] * 2 > error.minimum_bytes
    assert "No smaller batch lowers gradients: with zero_grad(set_to_none=False)" in str(error)
    chk.train()
    chk(torch.randn(8, 64)).sum().backward()
    chk.zero_grad(set_to_none=False)
    chk.measure(torch.randn(8, 64))
    again = refusal(chk)
    assert again.minimum_bytes < error.minimum_bytes / 2
    assert "No smaller batch" not in str(again)


@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
def test_the_largest_part_is_named():
    first = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 32))
    second = nn.Sequential(nn.Linear(32, 32), nn.Tanh())
    chk = rotor.Checkpointable(Asking(first, second), torch.randn(64, 32), "1GiB")
    error = refusal(chk)
    assert error.peak.module == "0"
    assert "The least is set by backward of module '0': " in str(error)


def test_the_sum_behind_a_total_limit_names_the_peak_once():
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))
    chk = rotor.Checkpointable(model, total_limit="900KB", engine="graph")
    with pytest.raises(rotor.InfeasibleError) as caught:
        chk(torch.randn(512, 256))
    text = str(caught.value)
    assert text.count("The least is set by") == 1
    assert text.count("Nothing is left for a step: 878.9 KiB = ") == 1


@pytest.mark.parametrize("given", ["1GiB", "1KiB"])
def test_the_limit_that_a_step_without_a_plan_exceeds_is_named(given):
    """The total, or the given limit where that is less."""
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))
    chk = rotor.Checkpointable(model, mem_limit=given, total_limit="900KB", engine="dynamic")
    if given == "1KiB":
        chk.total_limit = "64GiB"
    with pytest.raises(rotor.InfeasibleError, match="the forward does not fit") as caught:
        chk(torch.randn(512, 256))
    found = "Nothing is left for a step: 878.9 KiB = " in str(caught.value)
    assert (found, "The limit follows from" in str(caught.value)) == (given == "1GiB", False)


@pytest.mark.parametrize("step_bytes", [1, 10 << 20, 300 << 20])
@pytest.mark.parametrize("total", ["1KiB", "8GiB"])
def test_the_total_that_would_do_leaves_the_bytes_of_the_step(total, step_bytes):
    module, cpu = nn.Linear(256, 256), torch.device("cpu")
    room = Room(module, checked_total(total))
    room.take(cpu)
    left = Room(module, room.total_for(step_bytes)).take(cpu)
    assert step_bytes <= left <= step_bytes + (4 << 20)
