"""Pages, traces and timelines of plans with a second tier: an entry for each run, and waits."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
from chromium import Browser
from chromium import program as chromium
from docs.test_browser import colors, contrast, opened, style
from tiers.test_tier_plans import ROWS, WIDTH, Fast, made, net_of, with_link
from torch import nn

import rotor
from rotor.graph import Graph, Link, Operation, Storage, render, simulate, summarise
from rotor.graph.transfers import transfers_of


def small_graph() -> Graph:
    """Two values that wait for the backward, of which one is moved."""
    operations = [
        Operation("left", 100, (), (0,), module="net.0"),
        Operation("right", 100, (), (1,), module="net.1"),
        Operation("loss", 100, (1,), (2,), phase="loss"),
        Operation("back", 100, (2, 1), (3,), phase="backward", module="net.1"),
        Operation("end", 100, (3, 0), (4,), phase="backward", module="net.0"),
    ]
    return Graph(
        [Storage(10), Storage(10), Storage(2), Storage(2), Storage(2, True)], None, operations
    )


def moving_program(speed: float = 10 / 150e-9):
    """The program that moves the first value; each transfer takes 150 ns by default."""
    graph = small_graph()
    finish, fetch = len(graph), len(graph) + len(graph.storages)
    return simulate(graph, [0, 1, finish, 2, fetch, 3, 4], Link(speed, speed))


def test_a_timeline_of_runs_has_the_peaks_of_actions():
    program = moving_program()
    runs = program.timeline(runs_only=True)
    assert len(runs.peak_bytes) == len(runs.before_bytes) == len(program.ops) == 5
    assert runs.peak_bytes.max() == program.timeline().peak_bytes.max() == program.peak_bytes
    # The offload is finished after the second run: its bytes count in the third, where they go.
    assert runs.peak_bytes.tolist() == [10, 20, 20, 24, 14]
    assert runs.before_bytes.tolist() == [0, 10, 10, 22, 12]


def test_a_page_has_an_entry_for_each_run(tmp_path):
    program = moving_program()
    path = render(program.graph, tmp_path / "page.html", program=program, limit_bytes=30)
    page = path.read_text(encoding="utf-8")
    found = json.loads(re.search(r'id="data">(.*?)</script>', page).group(1))
    assert found["program"] == program.ops.tolist()
    assert len(found["peak"]) == len(found["before"]) == len(found["waits"]) == len(program.ops)
    assert max(found["peak"]) == program.peak_bytes
    assert found["waits"] == [0, 0, 50, 0, 50]
    assert [(kind, storage) for kind, storage, _, _ in found["moved"]] == [(0, 0), (1, 0)]
    assert found["storages"][0][3] == "offloaded"
    assert found["ops"][0][9] == "offloaded"
    assert "offloaded and fetched back" in page
    assert summarise(program).operations[:2] == ("offloaded", "kept")
    plain = simulate(program.graph, range(5))
    path = render(plain.graph, tmp_path / "plain.html", program=plain)
    assert "offloaded and fetched back" not in path.read_text(encoding="utf-8")


@pytest.mark.skipif(chromium() is None, reason="needs Chromium")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_offloaded_values_have_a_colour_of_their_own(tmp_path, dark):
    program = moving_program()
    path = render(program.graph, tmp_path / "page.html", program=program, limit_bytes=30)
    with Browser(tmp_path / "profile") as browser:
        opened(browser, path, dark=dark)
        lit = colors(browser, "#timeline")
        for name in ("offloaded-line", "limit", "kept-line"):
            assert lit.get(style(browser, name), 0) > 20, name
        assert colors(browser, "#graph").get(style(browser, "offloaded"), 0) > 500
        legend = browser.evaluate("document.getElementById('timeline-tools').textContent")
        assert "offloaded: written to the second tier, fetched back" in legend
        assert "waits for the tier" in legend
        tones = [style(browser, f"{name}-line") for name in ("offloaded", "dropped", "recomputed")]
        assert len(set(tones)) == 3
        assert contrast(style(browser, "ink"), style(browser, "offloaded")) >= 4.5
        assert contrast(style(browser, "offloaded-line"), style(browser, "paper")) >= 2.5


def test_a_drawing_names_offloaded_values(tmp_path):
    program = moving_program()
    text = render(program.graph, tmp_path / "g.dot", program=program).read_text(encoding="utf-8")
    assert "legend_offloaded" in text
    assert "offloaded: 10 B" in text
    plain = simulate(program.graph, range(5))
    text = render(plain.graph, tmp_path / "p.dot", program=plain).read_text(encoding="utf-8")
    assert "legend_offloaded" not in text


def test_saved_programs_are_reported_with_their_tier(tmp_path):
    program = moving_program()
    path = tmp_path / "program.json"
    program.to_json(path)
    from rotor.commands.main import main

    assert main(["report", str(path), "--html", str(tmp_path / "p.html")]) == 0


def trained_model(tmp_path) -> rotor.Checkpointable:
    torch.manual_seed(0)
    chk = made(net_of(), "1 GB")
    x = torch.randn(ROWS, WIDTH)
    chk.measure(x, targets=(x,))
    chk.compute_sequence()
    limit = int(0.5 * chk.plan.predicted_bytes)
    slow = with_link(made(net_of(), limit, offload=Fast()), 2e9)
    for _ in range(2):
        slow(x, targets=(x,)).backward()
    return slow


def test_plans_are_drawn_with_their_waits(tmp_path):
    chk = trained_model(tmp_path)
    plan, program = chk.plan, chk.plan.program
    assert len(program.actions) > len(program.ops)
    predicted = plan.predicted_timeline
    assert len(predicted.live_bytes) == len(program.ops)
    assert predicted.live_bytes.max() == plan.predicted_bytes
    end = transfers_of(program).end_ns
    assert predicted.seconds[-1] == pytest.approx(end / 1e9) == pytest.approx(plan.makespan)
    chk.report(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    found = json.loads(re.search(r'id="data">(.*?)</script>', page).group(1))
    runs = [max(found["ops"][op][3], 1) for op in found["program"]]
    assert max(found["peak"]) + found["own"] == plan.predicted_bytes
    assert found["moved"]
    chk.report(tmp_path / "plan.json")
    events = json.loads((tmp_path / "plan.json").read_text())["traceEvents"]
    levels = [e["args"]["predicted"] for e in events if e["name"] == "live bytes" and e["pid"] == 1]
    assert max(levels) == plan.predicted_bytes
    slices = [e for e in events if e["ph"] == "X" and "live_bytes" in e.get("args", {})]
    # The page and the trace have the same clock.
    waits = np.array([*found["waits"][1:], 0])
    begins = np.cumsum(np.concatenate([[0], np.array(runs) + waits]))
    assert [round(1000 * e["ts"]) for e in slices] == begins[:-1].tolist()


def test_one_module_without_a_tier_is_drawn_as_before():
    model = rotor.Checkpointable(nn.Linear(4, 4), engine="graph", verbosity=0, mem_limit="1 GB")
    model(torch.randn(3, 4)).sum().backward()
    plan = model.plan
    assert plan.predicted_timeline.seconds[-1] == pytest.approx(plan.makespan)
