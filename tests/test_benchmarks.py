"""The runner of the benchmarks, and the counts that must not grow unseen."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


def script(name: str):
    """A script of the benchmarks as a module."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


run_all, regressions = script("run_all"), script("regressions")


def options(**given):
    return argparse.Namespace(**({"gpu": False, "quick": False, "only": []} | given))


def test_every_benchmark_exists():
    listed = [one.script for one in run_all.BENCHMARKS]
    assert len(set(listed)) == len(listed)
    assert set(listed) <= {path.name for path in FOLDER.glob("*.py")}


def test_what_is_run():
    full, quick = run_all.chosen(options()), run_all.chosen(options(quick=True))
    assert [entry[0] for entry in full] == [entry[0] for entry in quick]
    assert all(" " in question for _, question, _, _ in full)
    assert all(len(entry[2]) == 1 for entry in full)
    assert all(limit <= 600 for *_, limit in quick)
    some = run_all.chosen(options(quick=True, only=["demo"]))
    assert [entry[2] for entry in some] == [
        ["benchmarks/demo.py", "--batch", "8", "--size", "128", "--steps", "3", "--fraction", "0.9"]
    ]
    for one in run_all.BENCHMARKS:
        source = (FOLDER / one.script).read_text(encoding="utf-8")
        given = {word for word in (*one.quick, *(one.gpu or ())) if word.startswith("--")}
        assert all(f'add_argument("{word}"' in source for word in given), one.script
    on_device = run_all.chosen(options(gpu=True))
    assert on_device[0][2] == ["-m", "pytest", "-q", "tests/gpu"]
    assert all("--device cuda" in " ".join(command) for _, _, command, _ in on_device[1:])
    assert run_all.GPU_SECONDS < 600


TEXT = """
ResNet: plain peak 3 MB
limit  time / plain  equal
-----  ------------  -----
0.900         1.035    yes
0.800         1.076     no

| model | ratio |
|---|---:|
| a b | 0.5 |
| c | +3 % |
done

One solve
profile  stages  solve s
random       20   0.0008
resnet       50        -
gpt          50   0.0223
"""


def test_tables_are_read():
    assert run_all.tables(TEXT.splitlines()) == [
        {
            "title": "ResNet: plain peak 3 MB",
            "columns": ["limit", "time / plain", "equal"],
            "rows": [[0.9, 1.035, "yes"], [0.8, 1.076, "no"]],
        },
        {"title": "", "columns": ["model", "ratio"], "rows": [["a b", 0.5], ["c", "+3 %"]]},
        {
            "title": "One solve",
            "columns": ["profile", "stages", "solve s"],
            "rows": [["random", 20, 0.0008], ["resnet", 50, "-"], ["gpt", 50, 0.0223]],
        },
    ]
    assert run_all.tables(["--", "nothing", "-----"]) == []


def test_runs_end_in_time_and_are_written(tmp_path, capsys):
    good = run_all.run("good", "?", ["-c", f"print({TEXT!r})"], 60)
    bad = run_all.run("bad", "?", ["-c", "print('so far'); raise SystemExit(3)"], 60)
    slow = "import time; print('begun', flush=True); time.sleep(600)"
    late = run_all.run("late", "?", ["-c", slow], 2)
    assert [one.status for one in (good, bad, late)] == ["ok", "failed", "cut short"]
    assert (bad.lines, late.lines) == (["so far"], ["begun"])
    assert late.seconds < 60
    assert "so far" in capsys.readouterr().out
    known = {"versions": {"rotor": "1", "torch": None}, "commit": "abc", "processor": "Z80"}
    run_all.write(tmp_path / "new", "quick", [good, bad, late], known, "2000-01-01T00:00:00")
    data = json.loads((tmp_path / "new" / "quick.json").read_text(encoding="utf-8"))
    assert (data["format"], data["version"]) == ("rotor.benchmarks", 1)
    assert data["machine"] == known
    assert [one["status"] for one in data["runs"]] == ["ok", "failed", "cut short"]
    assert data["runs"][0]["tables"][0]["rows"][0] == [0.9, 1.035, "yes"]
    page = (tmp_path / "new" / "quick.md").read_text(encoding="utf-8")
    assert "commit abc; Z80; rotor 1." in page
    assert "| bad | ? | failed |" in page
    assert "ResNet: plain peak 3 MB" in page


def test_the_machine_is_told():
    known = run_all.machine()
    assert known["versions"]["rotor"]
    assert {"commit", "processor"} <= set(known)


def test_counts_have_not_grown():
    worse, _ = regressions.compare(regressions.read(), regressions.counts())
    assert worse == [], "if that is meant: python benchmarks/regressions.py --update"


def test_what_counts_as_worse(tmp_path):
    count = regressions.Count
    known = {
        "a": count(100, "less"),
        "b": count(100, "less"),
        "c": count(100, "less"),
        "d": count(7, "same"),
        "e": count(0, "less"),
        "gone": count(1, "less"),
        "x, PyTorch 9.9": count(1, "less"),
    }
    found = {
        "a": count(101, "less"),
        "b": count(103, "less"),
        "c": count(50, "less"),
        "d": count(6, "same"),
        "e": count(0, "less"),
        "new": count(1, "less"),
    }
    worse, other = regressions.compare(known, found)
    assert [text.split(":")[0] for text in worse] == ["b", "d", "gone", "new"]
    assert [text.split(":")[0] for text in other] == ["a", "c", "x, PyTorch 9.9"]
    path = tmp_path / "counts.json"
    regressions.write(known, path)
    assert regressions.read(path) == known
    regressions.write(found, path)
    assert regressions.read(path) == {"x, PyTorch 9.9": known["x, PyTorch 9.9"]} | found
    path.write_text('{"format": "rotor.regressions", "version": 2}', encoding="utf-8")
    with pytest.raises(ValueError, match="version 2"):
        regressions.read(path)
