"""The runner of the benchmarks, and the counts that must not grow unseen."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import re
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import common
import dtr_cases
import entries

from rotor.algorithms.curve import Curve
from rotor.report.curves import Point

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


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
ROTOR = "rotor"  # the command line, as a script


def options(**given):
    return argparse.Namespace(**({"gpu": False, "quick": False, "only": []} | given))


def test_every_benchmark_exists():
    names = [one.name for one in entries.BENCHMARKS]
    assert len(set(names)) == len(names)
    listed = {one.script for one in entries.BENCHMARKS} - {ROTOR}
    assert listed <= {path.name for path in FOLDER.glob("*.py")}
    assert {"overlap.py", "sharded.py", "dtr_table.py", "graph_curve.py"} <= listed


def test_what_is_run():
    full, quick = run_all.chosen(options()), run_all.chosen(options(quick=True))
    assert [task.name for task in full] == [task.name for task in quick]
    assert all(" " in task.question for task in full)
    by_name = {task.name: task for task in full}
    ablation = by_name["dtr_table.py --ablation"]
    assert ablation.command == ["benchmarks/dtr_table.py", "--ablation"]
    assert ablation.environment == {"OMP_NUM_THREADS": "1"}
    assert by_name["truth.py"].environment == {}
    assert by_name["truth.py"].command == ["benchmarks/truth.py"]
    assert by_name["rotor experiment linear"].command[:4] == ["-m", "rotor", "experiment", "linear"]
    assert all(task.limit_s <= 600 for task in quick)
    some = run_all.chosen(options(quick=True, only=["demo"]))
    assert [task.command for task in some] == [
        ["benchmarks/demo.py", "--batch", "8", "--size", "128", "--steps", "3", "--fraction", "0.9"]
    ]
    for one in entries.BENCHMARKS:
        if one.script == ROTOR:
            continue
        source = re.sub(r"\(\s+", "(", (FOLDER / one.script).read_text(encoding="utf-8"))
        words = (*(one.quick or ()), *(one.full or ()), *(one.gpu or ()))
        given = {word for word in words if word.startswith("--")}
        assert all(f'add_argument("{word}"' in source for word in given), one.script
    on_device = run_all.chosen(options(gpu=True))
    assert on_device[0].command == ["-m", "pytest", "-q", "tests/gpu"]
    assert on_device[1].command[:3] == ["benchmarks/predictions.py", "--device", "cuda"]
    assert on_device[2].command[:4] == on_device[0].command
    assert on_device.pop(2).environment == {"TORCH_CUDA_SANITIZER": "1"}
    assert all("--device cuda" in " ".join(task.command) for task in on_device[1:])
    assert all(task.environment == {} for task in on_device)
    assert {"dtr_table.py", "graph_truth.py", "graph_curve.py"} <= {t.name for t in on_device}
    assert sum(task.limit_s for task in on_device) <= run_all.GPU_SECONDS <= 25 * 60


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["truth.py"], ["truth.py"]),
        (["truth"], ["truth.py", "graph_truth.py"]),
        (["dtr_table.py"], ["dtr_table.py"]),
        (["ablation", "demo.py"], ["demo.py", "dtr_table.py --ablation"]),
        (["nothing"], []),
    ],
)
def test_names_that_are_meant(words, names):
    """A whole name is that entry alone, though it is a part of others."""
    assert [task.name for task in run_all.chosen(options(only=words))] == names


ON_DEVICES = [one.script for one in entries.BENCHMARKS if one.gpu is not None]


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


MACHINE = {
    "processor": "Z80",
    "cpus": 2,
    "devices": [{"name": "cpu", "model": "x"}, {"name": "cuda:0", "model": "H1"}],
    "versions": {"rotor": "1", "torch": "9.9", "python": None},
    "commit": "abc",
}


def task(name: str, code: str, limit_s: float = 60, **environment: str):
    return run_all.Task(name, "whether?", ["-c", code], limit_s, environment)


def test_runs_end_in_time_and_are_written(tmp_path, capsys):
    printing = f"import os; print({TEXT!r}, os.environ['SHARE'], {str(FOLDER)!r} + '/x.py')"
    good = run_all.run(task("good", printing, SHARE="7 of 9"), MACHINE)
    bad = run_all.run(task("bad", "print('so far'); raise SystemExit(3)"), MACHINE)
    slow = "import time; print('begun', flush=True); time.sleep(600)"
    late = run_all.run(task("late", slow, 2), MACHINE)
    never = run_all.run(task("never", "print('begun')", 0.5), MACHINE)
    runs = [good, bad, late, never]
    assert [one.status for one in runs] == ["ok", "failed", "cut short", "cut short"]
    assert [one.output for one in runs[1:]] == [["so far"], ["begun"], []]
    assert good.output[-1] == " 7 of 9 benchmarks/x.py"
    assert late.seconds < 60
    assert "so far" in capsys.readouterr().out
    run_all.write(tmp_path / "new", "quick", runs)
    path = tmp_path / "new" / "quick.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    assert (data["format"], data["version"]) == ("rotor.benchmarks", 2)
    assert [one["status"] for one in data["runs"]] == [one.status for one in runs]
    first = data["runs"][0]
    assert (first["machine"], first["environment"]) == (MACHINE, {"SHARE": "7 of 9"})
    assert first["tables"][0]["rows"][0] == [0.9, 1.035, "yes"]
    assert first["began"][:2] == "20"
    page = (tmp_path / "new" / "quick.md").read_text(encoding="utf-8")
    assert "Z80, H1, 2 cores, PyTorch 9.9, commit abc" in page
    assert "| bad | whether? | failed |" in page
    assert "ResNet: plain peak 3 MB" in page
    back = run_all.read(path)
    assert list(back) == ["good", "bad", "late", "never"]
    run_all.write(tmp_path / "new", "again", list(back.values()))
    assert (tmp_path / "new" / "again.json").read_text(encoding="utf-8") == path.read_text("utf-8")
    path.write_text('{"format": "rotor.benchmarks", "version": 1}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"version 1, where .*, version 2, was expected: delete"):
        run_all.read(path)
    assert run_all.read(tmp_path / "none.json") == {}


@pytest.fixture
def started(tmp_path, monkeypatch):
    """`run_all` with entries of its own, which print how often they ran; returns what it wrote."""
    count = tmp_path / "count"
    count.write_text("0", encoding="utf-8")

    def run(task, machine):
        number = int(count.read_text(encoding="utf-8")) + 1
        count.write_text(str(number), encoding="utf-8")
        done = run_all.Run(task.name, task.question, task.command, machine=machine)
        done.began, done.output = "2001-02-03T04:05:06+00:00", [f"{task.name} is {number}"]
        done.status = "failed" if task.name == "c.py" and number < 4 else "ok"
        return done

    chosen = [entries.Benchmark(f"{name}.py", "why so?") for name in "abc"]
    monkeypatch.setattr(run_all, "BENCHMARKS", chosen)
    monkeypatch.setattr(run_all, "run", run)
    monkeypatch.setattr(run_all, "machine", lambda: MACHINE)

    def start(*words: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["run_all.py", *words, "--out", str(tmp_path)])
        with suppress(SystemExit):
            run_all.main()
        return [one.output[0] for one in run_all.read(tmp_path / "full.json").values()]

    return start


def test_files_of_several_runs(started):
    assert started() == ["a.py is 1", "b.py is 2", "c.py is 3"]
    assert started("--missing") == ["a.py is 1", "b.py is 2", "c.py is 4"]
    assert started("--missing") == ["a.py is 1", "b.py is 2", "c.py is 4"]
    assert started("--only", "b.py") == ["a.py is 1", "b.py is 5", "c.py is 4"]
    assert started("--only", "a", "--keep") == ["a.py is 6", "b.py is 5", "c.py is 4"]
    run_all.BENCHMARKS.pop(1)
    assert started("--only", "a") == ["a.py is 7", "c.py is 4"]
    assert started("--keep") == ["a.py is 8", "c.py is 9"]
    assert started() == ["a.py is 10", "c.py is 11"]


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


def test_full_speed_is_reached_when_steps_take_as_long_as_the_last():
    table = script("training_loops")
    assert table.full_speed([1.0] * 9) == 0
    assert table.full_speed([9.0, *[1.0] * 9]) == 1
    assert table.full_speed([9.0, 9.0, *[1.0] * 9]) == 2
    assert table.full_speed([9.0] * 7 + [1.0] * 20) == 7
    rows = table.table([("a loop", *"12345678")], markdown=True).splitlines()
    assert rows[0].startswith("| loop | lines | losses |")
    assert rows[2] == "| a loop | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 |"


def test_commands_that_say_wrong_figures_are_found(monkeypatch, tmp_path):
    commands = script("commands")
    said = {
        "measure": {},
        "curve": {"plain_bytes": 1000, "minimum_bytes": 400},
        "plan": {"plan": {"predicted_bytes": 690}, "schedule": None},
        "fit": {"largest": {"batch": 8}},
    }
    peaks = {(None, None): 1000, (700, None): 695, (700, 8): 650}
    monkeypatch.setattr(commands, "command", lambda name, *_: (said[name], 1.0))
    monkeypatch.setattr(
        commands, "steps_peak", lambda _, limit, batch=None: peaks[limit, batch], raising=True
    )
    rows, faults = commands.check("net", tmp_path)
    assert faults == []
    assert [row[0] for row in rows] == [
        *("net: measure", "net: curve, plain", "net: plan", "net: fit, batch 8")
    ]
    said["curve"]["plain_bytes"] = 800
    peaks[700, None], peaks[700, 8] = 760, 701
    faults = commands.check("net", tmp_path)[1]
    assert [fault.split()[1] for fault in faults] == ["curve,", "plan", "plan:", "fit,"]


@pytest.mark.slow
def test_the_plan_of_a_command_is_what_a_step_needs():
    """The cheapest part of `benchmarks/commands.py`."""
    commands = script("commands")
    limit = commands.steps_peak("unet", None) * 8 // 10
    factory = (f"{commands.FILE}:unet", "--loss", "sum", "--effort", "fast")
    planned, _ = commands.command("plan", *factory, "--limit", limit)
    needed = commands.steps_peak("unet", limit)
    assert needed <= limit
    assert planned["plan"]["predicted_bytes"] == pytest.approx(needed, rel=commands.OFF)


def imported_names() -> list[tuple[str, str, str]]:
    """File, module and name of each import of rotor's in scripts that are not tests."""
    found = []
    for path in sorted([*FOLDER.glob("*.py"), *(FOLDER.parent / "tutorials").glob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rotor"):
                found += [(path.name, node.module, alias.name) for alias in node.names]
    return found


def test_scripts_import_what_exists():
    names = imported_names()
    assert len(names) > 100
    lost = []
    for path, module, name in names:
        owner = importlib.import_module(module)
        is_module = hasattr(owner, "__path__") and importlib.util.find_spec(f"{module}.{name}")
        if not (hasattr(owner, name) or is_module):
            lost.append(f"{path}: {module}.{name}")
    assert lost == []


def test_a_sketch_of_a_curve():
    sketch = script("demo").sketch
    curve = Curve([25, 50, 100], [2.0, 1.5, 1.0])
    plain = Point("plain", 100, 1.0)
    lines = sketch(curve, plain=plain, limit_bytes=50, width=20, height=5).splitlines()
    assert lines[1].startswith(" 200 % │     ─────")
    assert lines[3].strip(" │").startswith("●─────────")
    assert lines[5] == " 100 % │                    P"
    assert lines[-1].strip() == "● within 50 B   P plain, 100 B"
    assert max(map(len, lines)) <= 80
    below = sketch(curve, plain=plain, limit_bytes=20)
    assert "●" not in below
