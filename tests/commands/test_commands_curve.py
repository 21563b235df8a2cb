"""Curves of commands: those of engine auto for a Sequential, and their pictures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from command_line import data_of, folder_with, run

from rotor.algorithms.curve import Curve
from rotor.commands.curve import CurveFacts, curve_text
from rotor.meter import allocator
from rotor.report.curves import Point, write_curve
from rotor.report.simrd_figures import overhead_grid, static_grid

SEQUENTIAL = """
import torch
from torch import nn


def blocks():
    layer = lambda: nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Dropout(), nn.Linear(128, 32))
    return nn.Sequential(*[Kept(layer()) for _ in range(4)]), torch.randn(256, 32)


class Kept(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    with folder_with("seq.py", SEQUENTIAL, tmp_path, monkeypatch) as path:
        yield path


def test_the_curve_of_a_sequential_is_the_better_of_chain_and_graph(folder, capsys):
    """What engine="auto" runs: below the least of the chain, its graph."""
    found = {
        engine: data_of(capsys, "curve", "seq.py:blocks", "--no-plain", "--engine", engine)
        for engine in ("chain", "graph", "auto")
    }
    least = {engine: data["minimum_bytes"] for engine, data in found.items()}
    assert least["graph"] < least["chain"]
    assert least["auto"] == least["graph"]
    limit = (least["graph"] + least["chain"]) // 2
    code, out, _ = run(capsys, "curve", "seq.py:blocks", "--limit", limit, "--quiet")
    times = re.search(
        r"^At your .*: (\d+\.\d+) x the time as a graph; plain needs ", out, re.MULTILINE
    )
    assert code == 0
    assert times is not None
    code, out, _ = run(capsys, "plan", "seq.py:blocks", "--limit", limit, "--quiet")
    assert float(times.group(1)) > 1
    assert re.search(r"recomputation +\+(\d+\.\d+)%", out) is not None
    assert code == 0


def test_a_picture_of_a_curve_has_percent_of_plain_and_the_limit(tmp_path):
    curve = Curve([10, 20, 40], [3.0, 2.0, 1.0])
    plain = Point("plain PyTorch", 40, 1.0)
    other = Point("gradient checkpointing", 15, 3.5)
    path = tmp_path / "curve.svg"
    write_curve(curve, path, plain=plain, limit_bytes=20, points=[other], title="net")
    first = path.read_bytes()
    write_curve(curve, path, plain=plain, limit_bytes=20, points=[other], title="net")
    assert path.read_bytes() == first
    for limit in (20, 5, 4000):
        (axes,) = axes_of(
            lambda limit=limit: write_curve(curve, path, plain=plain, limit_bytes=limit)
        )
        assert axes.get_xlabel() == "memory of a training step (% of plain PyTorch)"
        assert axes.get_ylabel() == "time of a step (%)"
        labels = axes.get_legend_handles_labels()[1]
        assert [label for label in labels if label.startswith("limit")] == {
            20: ["limit: 20 B, 200 % of the time"],
            5: ["limit: 5 B: nothing fits"],
            4000: ["limit: 3.91 KiB, far to the right"],
        }[limit]


def axes_of(draw) -> list:
    """The axes of the figure that a function draws."""
    from matplotlib.figure import Figure

    found = []
    with pytest.MonkeyPatch.context() as patch:
        made = Figure.subplots
        patch.setattr(Figure, "savefig", lambda *_, **__: None)

        def subplots(figure, *args, **options):
            axes = made(figure, *args, **options)
            found.extend(figure.axes)
            return axes

        patch.setattr(Figure, "subplots", subplots)
        draw()
    return found


def test_figures_of_experiments_name_their_zones_and_failures(tmp_path):
    failure = {"ratio": 0.4, "kind": "thrash"}
    curve = {
        **{"label": "LRU", "ratios": [0.4, 1.0], "values": [1.5, 1.0], "failure": failure},
        **{"least": [1.5, 1.0], "most": [1.5, 1.0], "has_band": False, "is_static": True},
    }
    panel = {"title": "log", "constant_ratio": 0.1, "bottleneck_ratio": 0.2, "curves": [curve]}
    for draw, names in (
        (overhead_grid, {"constants", "largest operation", "LRU", "thrashes below"}),
        (static_grid, {"constants", "largest operation", "LRU"}),
    ):
        (axes,) = axes_of(lambda draw=draw: draw([panel], tmp_path / "figure", []))
        assert set(axes.get_legend_handles_labels()[1]) == names


def test_limits_in_percent_are_of_free_memory(folder, capsys, monkeypatch):
    monkeypatch.setattr(allocator, "free_bytes", lambda _: 80_000_000)
    for given, limit in (("50%", 40_000_000), ("27.5 %", 22_000_000), ("2e6", 2 * 10**6)):
        data = data_of(capsys, "curve", "seq.py:blocks", "--limit", given, "--no-plain")
        assert data["limit_bytes"] == limit
    code, _, err = run(capsys, "plan", "seq.py:blocks", "--limit", "120%")
    assert code == 2
    assert "at most 100% of 80000000" in err
    for command in ("curve", "plan", "fit"):
        for given, words in (("50%", "limit alone takes a %"), ("0.5", "not a whole number")):
            code, _, err = run(capsys, command, "seq.py:blocks", "--total", given)
            assert (code, words in err) == (2, True), err


@pytest.mark.parametrize("command", ["curve", "plan", "fit"])
def test_a_total_that_leaves_nothing_is_named_with_one_that_would_do(folder, capsys, command):
    given = (command, "seq.py:blocks", "--total", "1MiB", "--effort", "fast")
    code, out, err = run(capsys, *given, *(["--no-plain"] if command == "curve" else []))
    found = re.search(r"Nothing is left for a step: 1 MiB = (.*): in all, \S+ [MG]iB", out + err)
    assert (code, found is not None) == (2, True), out + err
    assert re.search(r"still to come - \S+ [MG]iB that are lacking$", found[1])
    assert "nothing fits" not in out
    assert "mem_limit" not in err


def test_a_module_may_stand_for_its_factory(folder, capsys):
    with Path("seq.py").open("a", encoding="utf-8") as file:
        file.write("\n\nmade = blocks()[0]\n")
    data = data_of(capsys, "curve", "seq.py:made", "--input", "256,32", "--no-plain")
    known = data_of(capsys, "curve", "seq.py:blocks", "--no-plain")
    assert data["minimum_bytes"] == known["minimum_bytes"]
    code, _, err = run(capsys, "curve", "seq.py:made", "--input", "256,32", "--arg", "width=3")
    assert (code, "seq.py:made is a module" in err) == (2, True)


def test_times_of_a_curve_are_to_the_scale_of_the_plain_row():
    curve = Curve([100, 200], [3.0, 2.0])
    curve.marks = (("plain PyTorch", 201),)
    text = curve_text(curve, 5, CurveFacts(plain_bytes=201, plain_seconds=4.0))
    rows = [row.split("%")[-1].split() for row in text.splitlines()[2:5]]
    assert rows == [
        ["6.00", "s", "1.50"],
        ["4.00", "s", "1.00"],
        ["4.00", "s", "1.00", "plain", "PyTorch"],
    ]


def test_an_input_above_all_memory_is_refused_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = run(capsys, "curve", "torch.nn:Identity", "--input", "99999999999,99999")
    assert code == 2
    assert "no memory for an input of 99999999999,99999 float32: give a smaller one" in error
