"""Live bytes over time: what meters keep, how it lies beside the prediction, pictures and pages."""

from __future__ import annotations

import json
import re
import sys

import numpy as np
import pytest
import torch
from capture.test_graph_engine import Language, Recurrent, Residual, cross_entropy
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import rotor
from rotor import graph as rg
from rotor import memory
from rotor.common.timeline import PredictedTimeline, Timeline, thinned, timeline_of


def stages() -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(5)])


def chain_step(fraction: float = 0.8):
    """A chain that has been planned below what it would take, metered, and its limit."""
    torch.manual_seed(0)
    x = torch.randn(64, 32)
    chk = rotor.Checkpointable(stages(), x, "1 GB", loss_tmp_memory_usage=1024)
    limit = int(chk.get_expected_memory() * fraction)
    chk.compute_sequence(limit)
    for _ in range(3):
        chk(x).sum().backward()
    return chk, limit


def graph_step(fraction: float = 0.7):
    """The same with a captured graph."""
    torch.manual_seed(0)
    x, target = torch.randint(40, (4, 12)), torch.randint(40, (4, 12))
    # Measured times would choose another program in each run.
    settings = {"effort": "fast", "profile": rg.Machine("this", 1e10, 1e10, 1e-6)}
    chk = rotor.Checkpointable(Language(), loss_fn=cross_entropy, mem_limit="1 GB", **settings)
    chk.measure(x, targets=(target,))
    chk.compute_sequence()
    limit = int(chk.get_expected_memory() * fraction)
    chk.compute_sequence(limit)
    for _ in range(2):
        chk.module.zero_grad()
        chk(x, targets=(target,)).backward()
    return chk, limit


# -- thinning and clocks


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=300),
    st.integers(2, 20).map(lambda half: 2 * half),
)
def test_thinned_timelines_keep_ends_and_peak(levels, most):
    levels = np.array(levels, dtype=np.int64)
    kept = thinned(levels, most)
    assert len(kept) <= most or len(kept) == len(levels) <= most
    assert (np.diff(kept) > 0).all()
    assert (kept[0], kept[-1]) == (0, len(levels) - 1)
    assert levels[kept].max() == levels.max()
    assert levels[kept].min() == levels.min()


def test_short_timelines_are_kept_whole():
    levels = np.array([3, 1, 2])
    assert thinned(levels, 4).tolist() == [0, 1, 2]


def test_moments_become_seconds():
    columns = ([1_000, 3_000, 5_000, 9_000], [0, 8, 8, 2], [0, 8, 8, 10])
    found = timeline_of(*map(np.array, columns), [("loss", 5_000)])
    assert found.seconds.tolist() == [0.0, 2e-6, 4e-6, 8e-6]
    assert found.live_bytes.tolist() == [0, 8, 8, 2]
    assert found.allocated_bytes.tolist() == [0, 8, 8, 10]
    assert found.marks == (("loss", 4e-6),)
    assert (found.peak_bytes, len(found)) == (8, 4)


def test_phases_are_stretched_to_what_was_predicted():
    predicted = PredictedTimeline.of_runs([2e9, 1e9, 3e9], [1, 2, 3], 1)
    assert (predicted.forward_end, predicted.backward_begin) == (2.0, 3.0)
    measured = Timeline(
        np.array([0.0, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0]),
        *[np.zeros(7, dtype=np.int64)] * 2,
        (("loss", 10.0), ("backward", 20.0)),
    )
    on_clock = measured.on_clock_of(predicted)
    assert on_clock.tolist() == [0.0, 1.0, 2.0, 2.5, 3.0, 4.5, 6.0]


def test_a_loss_without_a_time_is_one_moment():
    predicted = PredictedTimeline.of_runs([2e9, 0, 4e9], [1, 2, 3], 1)
    moments = np.array([0.0, 1.0, 1.5, 2.0, 4.0])
    marks = (("loss", 1.0), ("backward", 2.0))
    measured = Timeline(moments, *[np.zeros(5, dtype=np.int64)] * 2, marks)
    on_clock = measured.on_clock_of(predicted)
    assert on_clock[[0, 2, 3, 4]].tolist() == [0.0, 2.0, 2.0, 6.0]
    assert (np.diff(on_clock) >= 0).all()


def test_bytes_given_out_tell_how_far_a_step_has_come():
    # Forward of two operations, loss, backward of one: 10, 20, 5 and 30 bytes.
    predicted = PredictedTimeline.of_runs([1e9, 1e9, 1e9, 4e9], [1] * 4, 2, [10, 20, 5, 30])
    moments = np.array([0.0, 9.0, 9.5, 10.0, 11.0, 12.0, 13.0])
    given = np.array([0, 10, 20, 30, 40, 40, 70])
    marks = (("loss", 10.0), ("backward", 12.0))
    measured = Timeline(moments, np.zeros(7, dtype=np.int64), given, marks)
    on_clock = measured.on_clock_of(predicted)
    # The loss gave out 10 bytes instead of 5: its share of the clock stays what it was.
    assert on_clock.tolist() == [0.0, 1.0, 1.5, 2.0, 3.0, 3.0, 7.0]


# -- meters


def test_a_meter_keeps_the_timeline_when_asked():
    with memory.meter("cpu", timeline=True) as meter:
        a = torch.zeros(1000)
        meter.mark("second")
        b = torch.zeros(500)
        del a
        c = torch.zeros(250)
    found = meter.timeline
    assert found.live_bytes.tolist() == [0, 4000, 4000, 6000, 2000, 3000, 3000]
    assert found.seconds[0] == 0
    assert (np.diff(found.seconds) >= 0).all()
    ((name, at),) = found.marks
    assert name == "second"
    assert found.seconds[1] <= at <= found.seconds[3]
    assert found.peak_bytes == meter.peak_bytes
    assert found.live_bytes[-1] == meter.end_bytes
    del b, c
    with memory.meter("cpu") as meter:
        torch.zeros(10)
    assert meter.timeline is None


def test_long_timelines_are_thinned():
    with memory.meter("cpu", timeline=True) as meter:
        for k in range(3000):
            torch.empty(k % 700 + 1)
    assert len(meter.timeline) <= 4000
    assert meter.timeline.peak_bytes == meter.peak_bytes == 2800


# -- steps


@pytest.mark.parametrize("make", [chain_step, graph_step])
def test_a_metered_step_leaves_its_timeline(make):
    chk, limit = make()
    plan = chk.plan
    measured, predicted = plan.measured_timeline, plan.predicted_timeline
    assert measured.peak_bytes == plan.measured_bytes <= limit
    assert [name for name, _ in measured.marks] == ["loss", "backward"]
    assert predicted.live_bytes.max() == plan.predicted_bytes
    assert len(predicted.seconds) == len(predicted.live_bytes) + 1
    assert predicted.seconds[-1] == pytest.approx(plan.makespan)
    assert 0 < predicted.forward_end <= predicted.backward_begin < predicted.seconds[-1]
    # Beside each other the two tell one story: at no moment is more measured than was predicted
    # as the highest of the phase.
    on_clock = measured.on_clock_of(predicted)
    assert (on_clock[0], on_clock[-1]) == (0.0, predicted.seconds[-1])
    forward = measured.live_bytes[on_clock <= predicted.forward_end]
    starts = predicted.seconds[:-1]
    assert forward.max() <= predicted.live_bytes[starts <= predicted.forward_end].max()


def test_measured_and_predicted_lie_on_each_other():
    chk, _ = graph_step()
    measured, predicted = chk.plan.measured_timeline, chk.plan.predicted_timeline
    runs = np.searchsorted(predicted.seconds, measured.on_clock_of(predicted), side="right") - 1
    live = predicted.live_bytes
    reach = 3
    padded = np.concatenate([np.zeros(reach, dtype=np.int64), live, np.zeros(reach + 1)])
    around = np.max([padded[runs + k] for k in range(2 * reach + 1)], axis=0)
    assert (measured.live_bytes <= around).all()
    assert (measured.live_bytes[2:-2] > 0.5 * padded[runs + reach][2:-2]).mean() > 0.95


# -- pictures


@pytest.mark.parametrize("make", [chain_step, graph_step])
def test_plots(make):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    chk, limit = make()
    ax = chk.plot_timeline()
    lines = {line.get_label(): line for line in ax.get_lines()}
    assert set(lines) == {"predicted", "measured", "limit"}
    peak = max(lines["predicted"].get_ydata()) * 2**20
    assert peak == pytest.approx(chk.get_expected_memory())
    assert max(lines["measured"].get_ydata()) * 2**20 == chk.plan.measured_bytes
    assert lines["limit"].get_ydata()[0] * 2**20 == pytest.approx(limit)
    given = Figure().subplots()
    assert chk.plot_timeline(given) is given
    # A device whose meter tells only the peak.
    chk.plan.measured_timeline = None
    labels = {line.get_label() for line in chk.plot_timeline().get_lines()}
    assert labels == {"predicted", "measured peak", "limit"}


@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
def test_a_model_without_a_graph_has_what_was_measured():
    pytest.importorskip("matplotlib")
    chk = rotor.Checkpointable(Recurrent(), mem_limit="1 GB")
    x = torch.randn(4, 6, 8)
    for _ in range(
        2
    ):  # The dynamic engine measures operators in the first step, the step in the second.
        chk(x).sum().backward()
    labels = {line.get_label() for line in chk.plot_timeline().get_lines()}
    assert "measured" in labels
    assert "limit" in labels


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    chk = rotor.Checkpointable(stages(), torch.randn(4, 32), "1 GB")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="plot_timeline needs matplotlib: `pip install"):
        chk.plot_timeline()


def test_without_a_plan_there_is_nothing_to_plot_or_report(tmp_path):
    chk = rotor.Checkpointable(stages())
    for call in (chk.plot_timeline, chk.report, lambda: chk.report(tmp_path / "a.html")):
        with pytest.raises(ValueError, match="no plan was made"):
            call()
    assert not (tmp_path / "a.html").exists()


# -- pages


def data_of(path) -> dict:
    text = path.read_text(encoding="utf-8")
    assert "http" not in re.sub(r"http://www\.w3\.org/\S+|http-equiv", "", text)
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(found[1])


@pytest.mark.parametrize("make", [chain_step, graph_step])
def test_pages_have_both_timelines(make, tmp_path):
    chk, limit = make()
    path = tmp_path / "plan.html"
    assert str(chk.report(path)) == str(chk.report())
    data = data_of(path)
    plan = chk.plan
    assert data["limit"] == limit
    assert max(data["peak"]) + data["own"] == plan.predicted_bytes
    assert max(level for _, level in data["traced"]) == data["measured"] == plan.measured_bytes
    moments = [at for at, _ in data["traced"]]
    assert moments == sorted(moments)
    assert moments[-1] == pytest.approx(plan.makespan * 1e9, rel=1e-6)
    assert data["ops"][data["program"][data["boundary"]]][2] == 1


def test_the_page_of_a_chain_tells_its_schedule(tmp_path):
    chk, _ = chain_step()
    chk.report(tmp_path / "chain.html")
    data, plan = data_of(tmp_path / "chain.html"), chk.plan
    assert " ".join(data["labels"]) == str(plan.sequence)
    assert [data["ops"][k][1] for k in data["program"]] == [
        "" if op.kind == "L" else chk.names[op.stage] for op in plan.sequence
    ]
    assert sum(op[8] for op in data["ops"]) == len(plan.sequence)
    costs = sum(data["ops"][k][3] for k in data["program"])
    assert costs == pytest.approx(plan.makespan * 1e9, rel=1e-6)
    kinds = {op[9] for op in data["ops"]}
    assert "recomputed" in kinds
    assert len(data["before"]) == len(data["peak"]) == len(plan.sequence)
    text = (tmp_path / "chain.html").read_text(encoding="utf-8")
    assert "<h2>Stages</h2>" in text


def test_pages_of_plans_that_were_not_metered(tmp_path):
    chk = rotor.Checkpointable(stages(), torch.randn(4, 32), "1 GB")
    chk.report(tmp_path / "plan.html")
    data = data_of(tmp_path / "plan.html")
    assert (data["traced"], data["measured"]) == (None, None)
    with pytest.raises(ValueError, match=r"\.html"):
        chk.report(tmp_path / "plan.txt")


# -- programs


def test_programs_are_loaded_by_a_method(tmp_path):
    chk, limit = graph_step()
    chk.program.to_json(tmp_path / "plan.json")
    x, target = torch.randint(40, (4, 12)), torch.randint(40, (4, 12))
    other = rotor.Checkpointable(Language(), loss_fn=cross_entropy, mem_limit=limit, effort="fast")
    with pytest.raises(ValueError, match="nothing was measured"):
        other.load_program(tmp_path / "plan.json")
    other.measure(x, targets=(target,))
    loaded = other.load_program(tmp_path / "plan.json")
    assert loaded == chk.program == other.program
    other(x, targets=(target,)).backward()
    assert other.plan.program is loaded
    assert other.plan.measured_bytes <= limit
    another = rotor.Checkpointable(
        Residual(), loss_fn=cross_entropy, mem_limit=limit, effort="fast"
    )
    another.measure(torch.randn(4, 3, 16, 16), targets=(torch.randint(40, (4,)),))
    with pytest.raises(ValueError, match="another graph"):
        rg.load_program(another, tmp_path / "plan.json")
