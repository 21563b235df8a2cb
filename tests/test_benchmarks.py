"""The runner of the benchmarks, and the counts that must not grow unseen."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import common
import dtr_cases

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
    names = [one.name for one in run_all.BENCHMARKS]
    assert len(set(names)) == len(names)
    listed = {one.script for one in run_all.BENCHMARKS}
    assert listed <= {path.name for path in FOLDER.glob("*.py")}
    assert {"overlap.py", "sharded.py", "dtr_table.py", "graph_curve.py"} <= listed


def test_what_is_run():
    full, quick = run_all.chosen(options()), run_all.chosen(options(quick=True))
    assert [entry[0] for entry in full] == [entry[0] for entry in quick]
    assert all(" " in question for _, question, _, _ in full)
    by_name = {name: command for name, _, command, _ in full}
    assert by_name.pop("dtr_table.py --ablation") == ["benchmarks/dtr_table.py", "--ablation"]
    assert all(command == [f"benchmarks/{name}"] for name, command in by_name.items())
    assert all(limit <= 600 for *_, limit in quick)
    some = run_all.chosen(options(quick=True, only=["demo"]))
    assert [entry[2] for entry in some] == [
        ["benchmarks/demo.py", "--batch", "8", "--size", "128", "--steps", "3", "--fraction", "0.9"]
    ]
    for one in run_all.BENCHMARKS:
        source = (FOLDER / one.script).read_text(encoding="utf-8")
        words = (*one.quick, *one.full, *(one.gpu or ()))
        given = {word for word in words if word.startswith("--")}
        assert all(f'add_argument("{word}"' in source for word in given), one.script
    on_device = run_all.chosen(options(gpu=True))
    assert on_device[0][2] == ["-m", "pytest", "-q", "tests/gpu"]
    assert all("--device cuda" in " ".join(command) for _, _, command, _ in on_device[1:])
    assert {"dtr_table.py", "graph_truth.py", "graph_curve.py"} <= {entry[0] for entry in on_device}
    assert sum(limit for *_, limit in on_device) <= run_all.GPU_SECONDS < 600


ON_DEVICES = [one.script for one in run_all.BENCHMARKS if one.gpu is not None]


@pytest.mark.parametrize("name", ["cuda:99", "tpu", "meta"])
def test_devices_that_are_not_there(name):
    with pytest.raises(SystemExit, match=f"--device.*{name}"):
        common.open_device(name)
    assert not torch.are_deterministic_algorithms_enabled()


def test_devices_make_steps_repeatable(monkeypatch):
    """On CUDA, which is only pretended here."""
    assert common.open_device("cpu") == torch.device("cpu")
    assert not torch.are_deterministic_algorithms_enabled()
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    try:
        assert common.open_device("cuda") == torch.device("cuda", 0)
        assert common.open_device("cuda:1") == torch.device("cuda", 1)
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.backends.cudnn.deterministic
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)
    assert chosen == [torch.device("cuda", 0), torch.device("cuda", 1)]


@pytest.mark.parametrize("name", ["dtr_table", "dtr_overhead", "graph_truth", "graph_curve"])
def test_scripts_refuse_what_is_no_device(name, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--device", "tpu"])
    with pytest.raises(SystemExit, match="--device takes cpu, cuda"):
        script(name).main()


def test_sizes_on_devices():
    """What is no CPU gets larger batches, and the models of the tables have sizes for it."""
    graphs = script("graph_truth")
    small, large = (graphs.cases(torch.device(name)) for name in ("cpu", "meta"))
    for a, b in zip(small, large, strict=True):
        assert b.batch[0].is_meta
        assert b.batch[0].numel() >= 4 * a.batch[0].numel(), a.name
    assert [case.batch[0].shape[0] for case in graphs.cases(torch.device("cpu"), 4)] == [
        case.batch[0].shape[0] // 4 for case in small
    ]
    assert len(list(large[0].make().parameters())) > len(list(small[0].make().parameters()))
    for program in dtr_cases.PROGRAMS.values():
        sizes = program.size_on(False), program.size_on(False, torch.device("cuda"))
        assert len({*sizes, program.size_on(True)}) == 3


@pytest.mark.parametrize("name", dtr_cases.PROGRAMS)
def test_programs_make_nothing_on_other_devices(name):
    """A tensor on the CPU among those of a GPU would end the script there."""
    with torch.device("meta"):
        large, _ = dtr_cases.PROGRAMS[name].large()
        model, loss = dtr_cases.PROGRAMS[name].tiny()
    assert all(parameter.is_meta for parameter in large.parameters())
    value = loss(model)
    assert value.is_meta
    assert value.shape == ()


def test_the_clock_moves():
    start = common.read_clock(torch.device("cpu"))
    torch.ones(1000).sort()
    assert common.read_clock(torch.device("cpu")) > start


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
    known["devices"] = [{"name": "cpu", "model": "x"}, {"name": "cuda:0", "model": "H1"}]
    run_all.write(tmp_path / "new", "quick", [good, bad, late], known, "2000-01-01T00:00:00")
    data = json.loads((tmp_path / "new" / "quick.json").read_text(encoding="utf-8"))
    assert (data["format"], data["version"]) == ("rotor.benchmarks", 1)
    assert data["machine"] == known
    assert [one["status"] for one in data["runs"]] == ["ok", "failed", "cut short"]
    assert data["runs"][0]["tables"][0]["rows"][0] == [0.9, 1.035, "yes"]
    page = (tmp_path / "new" / "quick.md").read_text(encoding="utf-8")
    assert "commit abc; Z80; H1; rotor 1." in page
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
