"""A rank of a split model that fails: its peers fail too, within seconds, and none waits."""

from __future__ import annotations

from pathlib import Path

import pytest
from two_processes import run_processes

WORKER = Path(__file__).with_name("failing_rank.py")
SECONDS = 45
"""Below the time-out of the group, planning and start included."""


def outcomes(folder, layout, way):
    case = f"{layout}@{way}"
    found = [rank[case] for rank in run_processes(str(WORKER), folder, names=[case])]
    assert all(float(seconds) < SECONDS for *_, seconds in found)
    return [(kind, text) for kind, text, _ in found]


@pytest.mark.parametrize(
    "layout", ["tp", *(pytest.param(n, marks=pytest.mark.slow) for n in ("tp_chain", "tp_dynamic"))]
)
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_an_error_of_one_rank(layout, way, tmp_path):
    other, failing = outcomes(tmp_path, layout, way)
    assert failing == ("ValueError", f"a failing {way}")
    assert other[0] in ("RuntimeError", "DistBackendError")


@pytest.mark.parametrize("layout", ["tp", pytest.param("tp_chain", marks=pytest.mark.slow)])
def test_the_least_limit_of_all_holds(layout, tmp_path):
    assert outcomes(tmp_path, layout, "limits") == [("2300000", "")] * 2


def test_a_model_that_one_rank_cannot_try(tmp_path):
    other, failing = outcomes(tmp_path, "tp_chain", "generator")
    assert failing[0] == "Untriable"
    assert "is a running generator" in failing[1]
    assert other[0] == "RankError"
    assert "rank 1 of 2 cannot go on: Untriable" in other[1]


def test_code_of_one_rank_that_breaks_the_graph(tmp_path):
    found = outcomes(tmp_path, "tp_broken_by_one", "graph")
    assert [kind for kind, _ in found] == ["RankError"] * 2
    assert all("rank 0 of 2 cannot go on" in text and "graph_break()" in text for _, text in found)


@pytest.mark.slow
def test_graphs_that_depend_on_the_rank(tmp_path):
    found = outcomes(tmp_path, "own_rows", "graph")
    assert [kind for kind, _ in found] == ["RankError"] * 2
    assert all(
        "such as the rank itself" in text and 'engine="dynamic"' in text for _, text in found
    )


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp", "tp_chain"])
def test_a_limit_that_one_rank_cannot_keep(layout, tmp_path):
    found = outcomes(tmp_path, layout, "planning")
    assert [kind for kind, _ in found] == ["InfeasibleError"] * 2
