"""Experiments: files, figures, resuming, damage, interruption."""

from __future__ import annotations

import csv
import json
import math
import multiprocessing
import sys
from pathlib import Path

import numpy as np
import pytest

from rotor import experiments
from rotor.chain import check_header, read_json
from rotor.errors import MalformedLogError
from rotor.experiments import adversarial, linear, static, sweeps
from rotor.experiments.cells import Cell, Store, run_cells
from rotor.experiments.output import VERSION, find_logs
from rotor.simrd import LogWriter, networks

BEGINNINGS = {"pdf": b"%PDF", "png": b"\x89PNG", "svg": b"<?xml"}
EVERY = tuple(BEGINNINGS)


@pytest.fixture(scope="module")
def logs(tmp_path_factory) -> Path:
    """Two small logs."""
    directory = tmp_path_factory.mktemp("logs")
    (directory / "line-12.log").write_bytes(networks.linear_text(12))
    networks.random_program(150, pool=10, path=directory / "net-1.log")
    (directory / "notes.txt").write_text("no log", encoding="utf-8")
    return directory


def files_of(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


def pareto(logs: Path, **settings) -> sweeps.Config:
    return sweeps.Config("pareto", (str(logs),), ratios=(0.3, 0.6, 1.0), trials=3, **settings)


def test_every_experiment_has_a_module():
    assert experiments.names() == [
        *("pareto", "ablation", "banishing", "accesses", "linear", "adversarial", "static")
    ]
    for name in experiments.names():
        module = experiments.get(name)
        assert callable(module.run)
        assert module.Config.__dataclass_params__.frozen
    with pytest.raises(ValueError, match="no experiment is named 'x', expected one of pareto"):
        experiments.get("x")


def test_pareto_writes_data_summary_and_figures(logs, tmp_path):
    output = sweeps.run(pareto(logs), tmp_path, formats=EVERY)
    found = files_of(tmp_path)
    assert {name for name in found if "/cells/" not in name} == {
        *("data/pareto.json", "data/pareto.csv", "summary/pareto.txt"),
        *(f"graph/pareto.{ending}" for ending in EVERY),
    }
    assert {path.relative_to(tmp_path).as_posix() for path in output.files} == {
        name for name in found if "/cells/" not in name
    }
    for ending, beginning in BEGINNINGS.items():
        assert found[f"graph/pareto.{ending}"].startswith(beginning)
    assert found["summary/pareto.txt"].decode() == output.text + "\n"
    for word in ("DTREqClass", "line", "net", "OOM"):
        assert word in output.text
    written = read_json(tmp_path / "data" / "pareto.json")
    data = check_header(written, "rotor.experiment.pareto", VERSION)
    assert [log["title"] for log in data["results"]] == ["line", "net"]
    curves = data["results"][0]["groups"][""]
    assert len(curves) == 7
    rows = list(csv.DictReader(found["data/pareto.csv"].decode().splitlines()))
    assert len(rows) == 2 * 3 * (6 + 3)
    statuses = {row["status"] for row in rows}
    assert "ok" in statuses
    assert statuses - {"ok"}
    for row in rows:
        assert (row["slowdown"] != "") == (row["status"] == "ok")
    # A failed run has no slow-down anywhere: what its clock says is part of a run.
    for log in data["results"]:
        for curve in log["groups"][""]:
            for point in curve["points"]:
                assert (point["slowdown"] is None) == (point["succeeded"] == 0)
                if point["succeeded"]:
                    assert 1 <= point["least"] <= point["slowdown"] <= point["most"]


@pytest.mark.slow
def test_the_same_settings_give_the_same_bytes(logs, tmp_path):
    config = pareto(logs)
    sweeps.run(config, tmp_path / "a", formats=EVERY)
    sweeps.run(config, tmp_path / "b", formats=EVERY, jobs=2)
    sweeps.run(config, tmp_path / "a", formats=EVERY, fresh=True)
    first, second = files_of(tmp_path / "a"), files_of(tmp_path / "b")
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []


def count_runs(monkeypatch) -> list[str]:
    calls: list[str] = []
    simulate = sweeps.simulate

    def counted(log, heuristic, **settings):
        calls.append(heuristic)
        return simulate(log, heuristic, **settings)

    monkeypatch.setattr(sweeps, "simulate", counted)
    return calls


def test_finished_cells_are_read_back(logs, tmp_path, monkeypatch):
    calls = count_runs(monkeypatch)
    sweeps.run(pareto(logs), tmp_path, formats=())
    before = files_of(tmp_path)
    assert len(calls) == 2 * 3 * (6 + 3)
    calls.clear()
    sweeps.run(pareto(logs), tmp_path, formats=())
    assert calls == []
    assert files_of(tmp_path) == before
    sweeps.run(pareto(logs, overhead_limit=3.0), tmp_path, formats=())
    assert len(calls) == 2 * 3 * (6 + 3)
    calls.clear()
    sweeps.run(pareto(logs), tmp_path, formats=(), fresh=True)
    assert len(calls) == 2 * 3 * (6 + 3)


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"[]", b'{"format": "rotor.cell", "version": 2}', b"\xff\xfe", b"null"],
    ids=["empty", "cut", "list", "version", "bytes", "null"],
)
def test_a_damaged_cell_is_not_there(logs, tmp_path, monkeypatch, damage):
    sweeps.run(pareto(logs), tmp_path, formats=())
    before = files_of(tmp_path)
    cells = sorted((tmp_path / "data" / "cells" / "pareto").iterdir())
    simulations = [path for path in cells if "simulation" in path.read_text(encoding="utf-8")]
    simulations[3].write_bytes(damage)
    calls = count_runs(monkeypatch)
    sweeps.run(pareto(logs), tmp_path, formats=())
    assert len(calls) == 1
    assert files_of(tmp_path) == before


def test_a_cell_that_lacks_something_is_not_there(tmp_path):
    store = Store(tmp_path)
    old = Cell(dict, {}, {"kind": "a"}, fields=("x",))
    store.put(old, {"x": 1})
    assert store.get(old) == {"x": 1}
    assert store.get(Cell(dict, {}, {"kind": "a"}, fields=("x", "y"))) is None


def test_an_altered_cell_is_not_there(tmp_path):
    store = Store(tmp_path)
    cell = Cell(dict, {}, {"kind": "a"})
    store.put(cell, {"n_remat": 12})
    text = store.path(cell).read_text(encoding="utf-8")
    store.path(cell).write_text(text.replace("12", "13"), encoding="utf-8")
    assert store.get(cell) is None


def test_the_cell_of_another_setting_is_not_there(tmp_path):
    store = Store(tmp_path)
    cell = Cell(dict, {}, {"kind": "a"})
    other = Cell(dict, {}, {"kind": "b"})
    store.put(cell, {"x": 1})
    store.path(cell).rename(store.path(other))
    assert store.get(other) is None
    assert store.get(cell) is None


def test_an_interrupted_run_goes_on(logs, tmp_path, monkeypatch):
    sweeps.run(pareto(logs), tmp_path / "whole", formats=())
    simulate = sweeps.simulate
    done = 0

    def interrupted(log, heuristic, **settings):
        nonlocal done
        if done == 7:
            raise KeyboardInterrupt
        done += 1
        return simulate(log, heuristic, **settings)

    monkeypatch.setattr(sweeps, "simulate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sweeps.run(pareto(logs), tmp_path / "cut", formats=())
    kept = files_of(tmp_path / "cut")
    assert len(kept) == 2 + 7
    for text in kept.values():
        assert json.loads(text)["format"] == "rotor.cell"
    monkeypatch.setattr(sweeps, "simulate", simulate)
    calls = count_runs(monkeypatch)
    sweeps.run(pareto(logs), tmp_path / "cut", formats=())
    assert len(calls) == 2 * 3 * (6 + 3) - 7
    assert files_of(tmp_path / "cut") == files_of(tmp_path / "whole")


def linear_cells(count: int) -> list[Cell]:
    cells = []
    for n in range(4, 4 + count):
        settings = {
            **{"n": n, "budget": n, "heuristic": "LRU", "runtime": "V2Eager"},
            **{"most_extra": 10.0, "seed": 0},
        }
        cells.append(Cell(linear.linear_cell, settings, {"kind": "test", "n": n}))
    return cells


def test_an_interruption_ends_the_processes(tmp_path, monkeypatch):
    store = Store(tmp_path)
    put = Store.put

    def interrupted(self, cell, result):
        put(self, cell, result)
        if len(list(tmp_path.iterdir())) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Store, "put", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_cells(linear_cells(12), store, jobs=2, description="test")
    assert multiprocessing.active_children() == []
    assert len(list(tmp_path.iterdir())) == 2
    monkeypatch.setattr(Store, "put", put)
    results = run_cells(linear_cells(12), store, jobs=2, description="test")
    assert [result["base_compute"] for result in results] == [2 * n for n in range(4, 16)]
    assert len(list(tmp_path.iterdir())) == 12


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_error_says_which_cell_it_was_and_keeps_the_others(tmp_path, jobs):
    cells = linear_cells(2)
    broken = Cell(
        linear.linear_cell, {**cells[0].arguments, "heuristic": "nope"}, {"kind": "broken"}
    )
    with pytest.raises(ValueError, match="no heuristic is named 'nope'") as caught:
        run_cells([cells[0], broken], Store(tmp_path), jobs=jobs, description="test")
    assert any('{"kind": "broken"}' in note for note in caught.value.__notes__)
    assert multiprocessing.active_children() == []


def test_equal_cells_run_once(tmp_path):
    (cell,) = linear_cells(1)
    results = run_cells([cell, cell], Store(tmp_path), jobs=1, description="test")
    assert results[0] == results[1]
    assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(ValueError, match="jobs = 0"):
        run_cells([cell], Store(tmp_path), jobs=0, description="test")


def point(ratio, *statuses):
    return {"ratio": ratio, "statuses": list(statuses), "succeeded": statuses.count("ok")}


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([point(0.1, "ok"), point(0.2, "ok")], None),
        ([point(0.1, "oom"), point(0.2, "ok")], {"ratio": 0.2, "kind": "oom"}),
        (
            [point(0.1, "oom"), point(0.2, "thrash"), point(0.3, "ok")],
            {"ratio": 0.3, "kind": "thrash"},
        ),
        (
            [point(0.1, "thrash"), point(0.2, "oom"), point(0.3, "ok")],
            {"ratio": 0.3, "kind": "oom"},
        ),
        (
            [point(0.1, "oom"), point(0.2, "ok"), point(0.3, "thrash")],
            {"ratio": 0.2, "kind": "oom"},
        ),
        ([point(0.1, "oom", "thrash"), point(0.2, "ok", "oom")], {"ratio": 0.2, "kind": "thrash"}),
        ([point(0.1, "oom"), point(0.2, "thrash")], None),
    ],
)
def test_where_a_curve_ends(points, expected):
    assert sweeps.failure_line(points) == expected


@pytest.mark.parametrize("name", ["ablation", "banishing", "accesses"])
def test_the_other_sweeps(logs, tmp_path, name):
    config = sweeps.Config(name, (str(logs),), ratios=(0.5, 1.0), trials=2)
    output = sweeps.run(config, tmp_path, formats=("svg",))
    figures = {path.name for path in output.files if path.suffix == ".svg"}
    suffixes = [f"_{group}" if group else "" for group in sweeps.GROUPS[name]]
    assert figures == {f"{name}{suffix}.svg" for suffix in suffixes}
    rows = rows_of(tmp_path / "data" / f"{name}.csv")
    if name == "accesses":
        fine = [row for row in rows if row["status"] == "ok"]
        assert max(int(row["n_access"]) for row in fine) > 0
        assert "accesses" in output.text
    else:
        assert {row["n_access"] for row in rows} == {""}
    if name == "banishing":
        assert {row["runtime"] for row in rows} == {"V1", "V2EagerOptimized", "no_dealloc"}
    if name == "ablation":
        assert len({row["heuristic"] for row in rows}) == 16


def test_linear_reproduces_its_table(tmp_path):
    config = linear.Config(sizes=(16, 32), heuristics=("DTR", "LRU"), heat_size=20)
    output = linear.run(config, tmp_path, formats=EVERY)
    rows = rows_of(tmp_path / "data" / "linear.csv")
    found = {(row["bound"], row["heuristic"], row["n"]): row["extra"] for row in rows}
    assert found["2 sqrt(n)", "DTR", "16"] == "8"
    assert found["log2(n)", "LRU", "32"] == "225"
    names = {path.name for path in output.files}
    assert {f"linear{part}.{ending}" for part in ("", "_heat") for ending in EVERY} <= names
    assert "memory 2 sqrt(n)" in output.text


def test_references_of_the_linear_network():
    assert linear.chen_extra(64) == 64
    # f(1) = 2, f(2) = 5, f(4) = 12, f(8) = 28
    assert [linear.treeverse_extra(n) for n in (1, 2, 4, 8)] == [1, 3, 8, 20]


def test_residency_keeps_to_the_budget():
    grid = linear.residency(30, 8, "DTR")
    assert grid.shape[0] == 60
    assert grid.shape[1] >= 60
    assert int(grid.sum(axis=0).max()) == 8
    assert grid[:, 0].tolist() == [True] + [False] * 59
    assert np.flatnonzero(grid[:, -1]).tolist()[-1] == 59
    free = linear.residency(5, 100, "DTR")
    assert free.shape == (10, 10)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"bounds": ("x",)}, "no bound is named 'x'"),
        ({"sizes": (1,)}, "at least 2"),
        ({"sizes": ()}, "at least one size"),
        ({"heuristics": ("x",)}, "no heuristic is named 'x'"),
    ],
)
def test_linear_checks_its_configuration(settings, words):
    with pytest.raises(ValueError, match=words):
        linear.Config(**settings)


def test_adversarial_is_above_its_bound(tmp_path):
    config = adversarial.Config(nodes=(16, 48), paths=(3, 4), heuristics=("DTR", "LRU"))
    output = adversarial.run(config, tmp_path, formats=("png",))
    rows = rows_of(tmp_path / "data" / "adversarial.csv")
    assert len(rows) == 8
    for row in rows:
        assert int(row["computations"]) >= float(row["bound"])
        assert row["static_computations"] == row["nodes"]
    assert {path.name for path in output.files} >= {"adversarial.png"}
    with pytest.raises(ValueError, match="3 paths"):
        adversarial.Config(paths=(2,))


def test_static_compares_planners_heuristics_and_checkmate(tmp_path):
    (tmp_path / "line.log").write_bytes(networks.linear_text(6))
    config = static.Config((str(tmp_path / "line.log"),), ratios=(0.7, 0.85, 1.0))
    output = static.run(config, tmp_path, formats=EVERY)
    written = read_json(tmp_path / "data" / "static.json")
    (entry,) = check_header(written, "rotor.experiment.static", VERSION)["results"]
    assert entry["operations"] == 12
    assert set(entry["points"]) == set(config.planners)
    if entry["checkmate"] is not None:
        for mine, simulated in zip(entry["checkmate"], entry["simulated"]["DTR"], strict=True):
            assert mine["status"] == "optimal"
            assert mine["slowdown"] <= simulated["slowdown"]
    else:
        assert "SciPy" in entry["checkmate_skipped"]
    assert {f"static.{ending}" for ending in EVERY} <= {path.name for path in output.files}


def test_static_says_why_checkmate_was_not_asked(logs, tmp_path):
    config = static.Config((str(logs),), ratios=(1.0,), checkmate_seconds=0)
    output = static.run(config, tmp_path / "a", formats=())
    assert "checkmate: not asked for" in output.text
    pytest.importorskip("scipy")
    config = static.Config((str(logs),), ratios=(1.0,), checkmate_operations=3)
    output = static.run(config, tmp_path / "b", formats=())
    assert "at most 3 are solved" in output.text


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"planners": ("x",)}, "no planner is named 'x'"),
        ({"heuristics": ("x",)}, "no heuristic"),
        ({"ratios": (0.0,)}, "ratio = 0.0"),
        ({"checkmate_seconds": -1.0}, "checkmate_seconds"),
    ],
)
def test_static_checks_its_configuration(settings, words):
    with pytest.raises(ValueError, match=words):
        static.Config(("x",), **settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "x"}, "no sweep is named 'x'"),
        ({"ratios": ()}, "no ratios"),
        ({"ratios": (math.nan,)}, "ratio = nan"),
        ({"trials": 0}, "trials = 0"),
    ],
)
def test_sweeps_check_their_configuration(settings, words):
    with pytest.raises(ValueError, match=words):
        sweeps.Config(**({"name": "pareto", "logs": ("x",)} | settings))


def test_logs_are_found_with_their_titles(logs, tmp_path):
    assert [log.title for log in find_logs([logs])] == ["line", "net"]
    assert [log.title for log in find_logs([logs / "net-1.log"])] == ["net"]
    for name in ("a-1.log", "a-2.log"):
        (tmp_path / name).write_bytes(networks.linear_text(2))
    assert [log.title for log in find_logs([tmp_path])] == ["a-1.log", "a-2.log"]
    manifest = {"models": [{"log": "logs/a-1.log", "title": "A", "name": "a"}]}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    assert [log.title for log in find_logs([tmp_path])] == ["A", "a-2.log"]
    (tmp_path / "a-1.log").unlink()
    assert [log.title for log in find_logs([tmp_path])] == ["a"]
    (tmp_path / "manifest.json").write_text('{"models": "\\x"}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"manifest\.json: malformed JSON: Invalid"):
        find_logs([tmp_path])
    (tmp_path / "manifest.json").write_text('{"models": 3}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"manifest\.json is malformed"):
        find_logs([tmp_path])


@pytest.mark.parametrize("title", ["b$_{x$", "5$, or 6$ {", "$\\foo$", "$x^2$"])
def test_a_title_may_have_dollars(title, tmp_path):
    (tmp_path / "a.log").write_bytes(networks.linear_text(4))
    entry = {"log": "a.log", "title": title}
    (tmp_path / "manifest.json").write_text(json.dumps({"models": [entry]}), encoding="utf-8")
    config = sweeps.Config("pareto", (str(tmp_path),), ratios=(0.5,), trials=1)
    assert sweeps.run(config, tmp_path / "out", formats=("svg",)).files


def test_missing_and_malformed_logs(tmp_path):
    with pytest.raises(FileNotFoundError, match="no log"):
        find_logs([tmp_path / "nothing"])
    with pytest.raises(FileNotFoundError, match="has no logs"):
        find_logs([tmp_path])
    with pytest.raises(FileNotFoundError, match="no logs were given"):
        find_logs([])
    (tmp_path / "bad.log").write_text("{}\n", encoding="utf-8")
    with pytest.raises(MalformedLogError, match="line 1"):
        sweeps.run(pareto(tmp_path), tmp_path / "out", formats=())


def test_a_changed_log_is_another_log(tmp_path, monkeypatch):
    (tmp_path / "a.log").write_bytes(networks.linear_text(6))
    config = sweeps.Config("banishing", (str(tmp_path / "a.log"),), ratios=(1.0,))
    sweeps.run(config, tmp_path / "out", formats=())
    calls = count_runs(monkeypatch)
    (tmp_path / "a.log").write_bytes(networks.linear_text(7))
    sweeps.run(config, tmp_path / "out", formats=())
    assert len(calls) == 3


def test_ignored_releases_are_counted(tmp_path):
    writer = LogWriter()
    writer.call("op", [], ["a"], 1, bytes=[1], aliases=[-1])
    writer.release("stranger")
    (tmp_path / "a.log").write_bytes(writer.getvalue())
    config = sweeps.Config("banishing", (str(tmp_path / "a.log"),), ratios=(1.0,))
    output = sweeps.run(config, tmp_path / "out", formats=())
    assert "1 releases of undefined names were ignored" in output.text


def test_figures_name_the_extra(logs, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="install matplotlib"):
        sweeps.run(pareto(logs), tmp_path, formats=("pdf",))
    assert list(tmp_path.iterdir()) == []


def test_unknown_formats_are_refused_first(logs, tmp_path):
    with pytest.raises(ValueError, match="no figure format is named 'gif'"):
        sweeps.run(pareto(logs), tmp_path, formats=("gif",))
    assert list(tmp_path.iterdir()) == []
