"""Curve: a falling step function of bytes."""

from __future__ import annotations

import copy
import pickle
import random
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rotor import InfeasibleError
from rotor.algorithms import Curve

POINTS = st.lists(
    st.tuples(st.integers(0, 1 << 50), st.floats(0, 1e6, allow_nan=False)), min_size=1, max_size=30
)


def test_steps() -> None:
    curve = Curve([10, 20, 40], [3.0, 2.0, 1.0])
    assert len(curve) == 3
    assert curve.minimum_bytes == 10
    assert [curve.at(budget) for budget in (10, 19, 20, 39, 40, 1000)] == [3, 3, 2, 2, 1, 1]
    assert curve.at("1 KB") == 1.0
    assert curve.bytes.dtype == np.int64
    assert curve.seconds.dtype == np.float64
    assert "3 points" in repr(curve)


def test_below_the_minimum() -> None:
    with pytest.raises(InfeasibleError, match="9 bytes is below the 10 bytes") as error:
        Curve([10], [1.0]).at(9)
    assert error.value.minimum_bytes == 10


@pytest.mark.parametrize("budget", [0, -1, float("nan")])
def test_refuses_a_wrong_budget(budget: Any) -> None:
    with pytest.raises(ValueError, match="budget_bytes"):
        Curve([10], [1.0]).at(budget)
    with pytest.raises(TypeError, match="budget_bytes"):
        Curve([10], [1.0]).at(True)


@pytest.mark.parametrize(
    ("size", "seconds", "message"),
    [
        ([], [], "at least one point"),
        ([1, 2], [1.0], "two lists of one length"),
        ([[1]], [[1.0]], "two lists of one length"),
        ([2, 1], [2.0, 1.0], "ascending bytes"),
        ([1, 1], [2.0, 1.0], "ascending bytes"),
        ([1, 2], [1.0, 1.0], "ascending bytes"),
        ([1, 2], [1.0, 2.0], "ascending bytes"),
        ([1, 2], [float("inf"), 2.0], "finite"),
        ([1], [float("nan")], "finite"),
    ],
)
def test_refuses_points_out_of_order(size: Any, seconds: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Curve(size, seconds)


def test_is_its_own_copy() -> None:
    size = np.array([1, 2])
    curve = Curve(size, [2.0, 1.0])
    size[0] = 5
    assert curve.minimum_bytes == 1
    with pytest.raises(ValueError, match="read-only"):
        curve.bytes[0] = 0


@given(POINTS, st.integers(0, 1 << 30))
def test_from_points_keeps_the_best(points: list[tuple[int, float]], seed: int) -> None:
    curve = Curve.from_points(points)
    assert {*zip(curve.bytes.tolist(), curve.seconds.tolist(), strict=True)} <= {*points}
    for size, _ in points:
        budget = max(1, size)
        best = min(seconds for other, seconds in points if other <= budget)
        assert curve.at(budget) == best
    shuffled = random.Random(seed).sample(points, len(points))
    assert Curve.from_points(shuffled) == curve


@given(POINTS)
def test_survives_json_pickle_and_copy(points: list[tuple[int, float]]) -> None:
    curve = Curve.from_points(points)
    assert Curve.from_json(curve.to_json()) == curve
    assert pickle.loads(pickle.dumps(curve)) == curve
    assert copy.deepcopy(curve) == curve


def test_compares() -> None:
    curve = Curve([1, 2], [2.0, 1.0])
    assert curve != Curve([1, 3], [2.0, 1.0])
    assert curve != Curve([1, 2], [3.0, 1.0])
    assert curve != Curve([1], [2.0])
    assert curve != "curve"
    with pytest.raises(TypeError, match="unhashable"):
        hash(curve)


def test_json_in_a_file(tmp_path: Any) -> None:
    curve = Curve([1, 2], [2.0, 1.0])
    curve.to_json(tmp_path / "curve.json")
    assert Curve.from_json(tmp_path / "curve.json") == curve


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "rotor.chain"}, "expected JSON of format 'rotor.curve'"),
        ({"version": 7}, "version 7 is unknown"),
        ({"colour": 1}, "has the fields"),
        ({"bytes": None}, "bytes must be a list of numbers"),
        ({"bytes": [1.5]}, "bytes must be a list of numbers"),
        ({"bytes": [True]}, "bytes must be a list of numbers"),
        ({"bytes": [1 << 70]}, "malformed curve"),
        ({"seconds": ["1"]}, "seconds must be a list of numbers"),
        ({"seconds": [1.0, 2.0]}, "two lists of one length"),
    ],
)
def test_refuses_wrong_json(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Curve.from_dict({**Curve([1], [2.0]).to_dict(), **change})


def test_plots() -> None:
    pytest.importorskip("matplotlib")
    curve = Curve([1 << 20, 3 << 20], [2.0, 1.0])
    ax = curve.plot()
    (line,) = ax.get_lines()
    assert line.get_xdata().tolist() == [1.0, 3.0]
    assert line.get_ydata().tolist() == [2000.0, 1000.0]
    assert curve.plot(ax) is ax
    assert len(ax.get_lines()) == 2


def test_plots_marks() -> None:
    pytest.importorskip("matplotlib")
    curve = Curve([1 << 20, 3 << 20], [2.0, 1.0])
    curve.marks = (("plain", 4 << 20), ("the limit", 2 << 20), ("free", 1 << 30))
    ax = curve.plot()
    plain, limit = ax.get_lines()[1:3]
    assert (plain.get_xdata()[0], limit.get_xdata()[0]) == (4.0, 2.0)
    assert plain.get_linestyle() != limit.get_linestyle()
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    # What is far to the right would press the curve together.
    assert labels == ["plain", "the limit", "free: 1 GiB"]


def test_plot_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install matplotlib"):
        Curve([1], [1.0]).plot()
