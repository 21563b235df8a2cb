"""Pages in a real browser: they draw, react, follow the colour scheme, and ask for nothing."""

from __future__ import annotations

import random
from types import SimpleNamespace

import chromium
import numpy as np
import pytest
from graph.test_graph_render import random_graph, small_graph
from random_graphs import training_graph

from rotor import Chain, algorithms
from rotor.common.timeline import Timeline
from rotor.graph import plan, render, simulate
from rotor.graph.chains import ChainProgram
from rotor.report.html import plan_page, program_page

pytestmark = pytest.mark.skipif(chromium.program() is None, reason="needs Chromium")

COLORS_OF = """(selector => {
  const canvas = document.querySelector(selector + " canvas");
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const found = {};
  for (let k = 0; k < pixels.length; k += 4) {
    if (pixels[k + 3] !== 255) continue;
    const key = "#" + [0, 1, 2].map(c => pixels[k + c].toString(16).padStart(2, "0")).join("");
    found[key] = (found[key] || 0) + 1;
  }
  return found;
})"""
FRAME = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium.Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def opened(browser, path, **options) -> None:
    browser.open(path, **options)
    browser.evaluate(FRAME)
    assert browser.complaints() == []
    assert browser.requests() == [path.resolve().as_uri()]


def colors(browser, selector: str) -> dict[str, int]:
    return browser.evaluate(f"{COLORS_OF}({selector!r})")


def style(browser, name: str) -> str:
    text = f"getComputedStyle(document.documentElement).getPropertyValue('--{name}').trim()"
    return browser.evaluate(text)


def press(browser, text: str) -> None:
    browser.evaluate(
        f"[...document.querySelectorAll('button')].find(b => b.textContent === {text!r}).click()"
    )
    browser.evaluate(FRAME)


def box(browser, selector: str) -> tuple[float, float, float, float]:
    found = browser.evaluate(
        f"""(() => {{ const e = document.querySelector({selector!r}); e.scrollIntoView();
        const r = e.getBoundingClientRect(); return [r.left, r.top, r.width, r.height]; }})()"""
    )
    return tuple(found)


def contrast(one: str, other: str) -> float:
    """The ratio of luminances that the guidelines on accessible web content define."""

    def luminance(color: str) -> float:
        parts = [int(color[k : k + 2], 16) / 255 for k in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.fixture(scope="module")
def graph_path(tmp_path_factory):
    graph = small_graph()
    program = simulate(graph, [0, 1, 2, 3, 0, 1, 4, 5])
    path = tmp_path_factory.mktemp("page") / "small.html"
    return render(graph, path, program=program, limit_bytes=60, measured_bytes=40)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_program(browser, graph_path, dark):
    opened(browser, graph_path, dark=dark)
    lit = colors(browser, "#timeline")
    for name in ("live", "recomputed-line", "backward-line", "kept-line", "loss-line"):
        assert lit.get(style(browser, name), 0) > 20, name
    boxes = colors(browser, "#graph")
    for name in ("recomputed", "kept", "loss", "backward"):
        assert boxes.get(style(browser, name), 0) > 500, name
    paper = style(browser, "paper")
    assert contrast(paper, "#000000" if dark else "#ffffff") < 1.3
    for name in ("ink", "soft"):
        assert contrast(style(browser, name), paper) >= 4.5
    for name in ("kept", "dropped", "recomputed", "loss", "backward", "forward"):
        assert contrast(style(browser, "ink"), style(browser, name)) >= 4.5, name
        assert contrast(style(browser, f"{name}-line"), paper) >= 2.5, name


def test_colours_follow_a_change(browser, graph_path):
    opened(browser, graph_path)
    light = colors(browser, "#timeline")
    scheme = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.call("Emulation.setEmulatedMedia", features=scheme)
    browser.evaluate(FRAME)
    dark = colors(browser, "#timeline")
    assert dark.get(style(browser, "live"), 0) == pytest.approx(max(light.values()), rel=0.2)
    assert style(browser, "live") not in light


def test_the_timeline_answers(browser, graph_path):
    opened(browser, graph_path)
    left, top, width, _ = box(browser, "#timeline")
    start, end = left + 74, left + width - 14
    # The runs take 10 20 5 1 10 20 5 9 of 80 ns: the fifth is in the middle.
    middle = start + (end - start) * 41 / 80
    browser.mouse("mouseMoved", middle, top + 60)
    assert browser.evaluate("document.getElementById('tip').textContent").startswith(
        "run 4: first (recomputed)\nmodule: layers.0\nbegins at 36 ns, takes 10 ns"
    )
    browser.click(middle, top + 60)
    details = browser.evaluate("document.getElementById('details').textContent")
    assert details.startswith("first\nmodule: layers.0")
    assert "read by second, first_backward" in details
    left, top, _, _ = box(browser, "#timeline")
    browser.mouse("mouseMoved", middle - 10, top + 60)
    browser.mouse("mousePressed", middle - 10, top + 60, button="left", buttons=1, clickCount=1)
    browser.mouse("mouseMoved", middle + 30, top + 60, button="left", buttons=1)
    browser.mouse("mouseReleased", middle + 30, top + 60, button="left", clickCount=1)
    browser.evaluate(FRAME)
    zoomed = colors(browser, "#timeline")
    assert style(browser, "kept-line") not in zoomed
    press(browser, "whole step")
    assert style(browser, "recomputed-line") in colors(browser, "#timeline")


def test_tables_sort_and_filter(browser, graph_path):
    opened(browser, graph_path)
    rows = "[...document.querySelectorAll('#table .line')].map(e => e.children[0].textContent)"
    assert browser.evaluate(rows) == ["layers.0", "layers.1", "layers.1.act", "(the model)"]
    cells = "[...document.querySelectorAll('#table .line')].map(e => e.children[{}].textContent)"
    assert browser.evaluate(cells.format(2)) == ["19 ns", "20 ns", "10 ns", "1 ns"]
    assert browser.evaluate(cells.format(8)) == ["8 B", "8 B", "0 B", "0 B"]
    press(browser, "operations")
    press(browser, "time")
    assert browser.evaluate(rows)[:2] == ["second", "first"]
    browser.evaluate(
        "(i => { i.value = 'act'; i.dispatchEvent(new Event('input')); })"
        "(document.querySelector('#tools input'))"
    )
    assert sorted(browser.evaluate(rows)) == ["third", "third_backward"]
    assert browser.evaluate("document.querySelector('#table-tools .hint').textContent") == "2 rows"


def test_a_chain(browser, tmp_path):
    chain = Chain([1.0, 2.0, 1.0], [2.0, 4.0, 2.0], [10, 10, 10, 1], [20, 30, 11], [0] * 3, [0] * 3)
    sequence = algorithms.Persistent().solve(chain, 72)
    assert "Fck_0" in str(sequence)
    stages = [["stage", "runs"], ["a <b>", "2"]]
    path = tmp_path / "chain.html"
    path.write_text(
        program_page(ChainProgram(sequence), [("limit", "62 B")], [("All stages", stages)], 62),
        encoding="utf-8",
    )
    opened(browser, path)
    assert style(browser, "recomputed-line") in colors(browser, "#timeline")
    assert browser.evaluate("document.querySelector('.rows td').textContent") == "a <b>"
    assert browser.evaluate("document.getElementById('table')") is None


def test_a_step_that_nobody_predicted(browser, tmp_path):
    timeline = Timeline(
        np.array([0.0, 0.001, 0.002, 0.003]),
        np.array([0, 500, 1000, 0]),
        np.array([0, 500, 1000, 1000]),
        (("loss", 0.001), ("backward", 0.0015)),
    )
    plan = SimpleNamespace(
        limit_bytes=1200, measured_bytes=1000, measured_timeline=timeline, unplanned_timeline=None
    )
    path = tmp_path / "dynamic.html"
    table = ("Last steps", [["step", "peak"], ["1", "1000 B"]])
    path.write_text(plan_page(plan, [["steps", "1"]], [table]), encoding="utf-8")
    opened(browser, path)
    assert colors(browser, "#timeline").get(style(browser, "measured"), 0) > 100
    assert browser.evaluate("document.querySelector('section').hidden")
    left, top, width, _ = box(browser, "#timeline")
    browser.mouse("mouseMoved", left + 74 + (width - 88) * 0.75, top + 60)
    tip = browser.evaluate("document.getElementById('tip').textContent")
    assert tip == "measured after 1.5 ms: 1000 B"
    plan.measured_timeline = None
    path.write_text(plan_page(plan, [["steps", "1"]], [table]), encoding="utf-8")
    opened(browser, path)
    assert browser.evaluate("document.getElementById('timeline')") is None


def test_a_graph_without_a_program(browser, tmp_path):
    opened(browser, render(random_graph(random.Random(3)), tmp_path / "graph.html"))
    assert browser.evaluate("document.getElementById('timeline')") is None
    assert style(browser, "forward") in colors(browser, "#graph")


def test_large_pages_stay_small_inside(browser, tmp_path):
    """Ten thousand operations are drawn on a canvas, and few of their rows are elements."""
    graph = training_graph(0, 5000)
    once = simulate(graph, range(len(graph)))
    program = plan(graph, once.peak_bytes * 7 // 10, effort="fast")
    opened(browser, render(graph, tmp_path / "large.html", program=program, limit_bytes=7))
    count = "document.querySelectorAll('*').length"
    for text in ("unfold all", "all arrows", "fit", "operations"):
        press(browser, text)
    assert browser.evaluate(count) < 1000
    assert browser.evaluate("document.querySelector('#table .spacer').clientHeight") == 240_000
    browser.evaluate("document.querySelector('#table .body').scrollTop = 120000")
    browser.evaluate(FRAME)
    first = "document.querySelector('#table .line').children[0].textContent"
    assert browser.evaluate(first) == graph.operations[4998].name
    assert browser.complaints() == []


def test_narrow_windows(browser, graph_path):
    """Nothing sticks out: tables scroll inside their own frames."""
    size = {"height": 800, "deviceScaleFactor": 1, "mobile": False}
    browser.call("Emulation.setDeviceMetricsOverride", width=420, **size)
    try:
        opened(browser, graph_path)
        assert browser.evaluate("document.documentElement.scrollWidth") <= 420
        tops = (
            "[...document.querySelectorAll('.figures dt')].map(e => e.getBoundingClientRect().top)"
        )
        first, second, third = browser.evaluate(tops)[:3]
        assert first == second < third
        press(browser, "operations")
        assert browser.evaluate("document.documentElement.scrollWidth") <= 420
    finally:
        browser.call("Emulation.setDeviceMetricsOverride", width=1200, **size)
