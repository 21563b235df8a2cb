"""The command line: output, exit codes, errors in one line."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

import rotor
from rotor.commands.main import main
from rotor.simrd import LogWriter, Result, heuristics, networks, simulate


@pytest.fixture
def log(tmp_path) -> Path:
    path = tmp_path / "line.log"
    path.write_bytes(networks.linear_text(16))
    return path


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_one_run_is_a_table_of_one_row(log, capsys):
    code, out, err = run(capsys, "simulate", log, "--heuristic", "DTR", "--budget", 8)
    assert (code, err) == (0, "")
    head, columns, _, row = out.splitlines()
    assert head.startswith("line: 64 commands, 32 operations")
    assert columns.split()[:4] == ["heuristic", "ratio", "budget", "status"]
    assert row.split() == ["DTR", "8", "B", "ok", "1.2500", "8", "B", row.split()[-2], "8"]


def test_a_sweep_is_a_row_for_each_cell(log, capsys):
    code, out, _ = run(
        capsys, "simulate", log, "--heuristic", "DTR", "LRU", "--ratio", 0.5, 0.8, 1.0
    )
    assert code == 0
    rows = [line.split()[:2] for line in out.splitlines()[3:]]
    assert rows == [[name, ratio] for name in ("DTR", "LRU") for ratio in ("0.5", "0.8", "1")]


def test_the_default_is_no_budget(log, capsys):
    code, out, _ = run(capsys, "simulate", log)
    assert code == 0
    assert "DTREqClass" in out
    assert "none" in out.splitlines()[3].split()


@pytest.mark.parametrize(
    ("budget", "word", "said"),
    [(2, "OOM", "out of memory at command"), (3, "THRASH", "passed their limit at command")],
)
def test_failures_exit_with_1_and_say_when(log, capsys, budget, word, said):
    code, out, err = run(capsys, "simulate", log, "--budget", budget, "--heuristic", "LRU")
    assert (code, err) == (1, "")
    assert word in out.splitlines()[3].split()
    assert "-" in out.splitlines()[3].split()
    assert said in out
    assert "could not be evicted" in out
    assert "larg" in out


def test_one_failure_of_a_sweep_is_enough(log, capsys):
    code, out, _ = run(capsys, "simulate", log, "--budget", 2, 16)
    assert code == 1
    assert out.splitlines()[4].split()[3] == "ok"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--heuristic", "nope"], "no heuristic is named 'nope', expected one of DTR,"),
        (["--runtime", "nope"], "no runtime is named 'nope', expected one of V1,"),
        (["--runtime", "V1", "--heuristic", "DTR"], "it serves DTRLocal"),
        (["--ratio", "-1"], "ratio = -1.0"),
        (["--ratio", "nan"], "ratio is NaN"),
        (["--ratio", "x"], "invalid float value: 'x'"),
        (["--ratio", "0.5", "--budget", "3"], "not allowed with argument"),
        (["--budget", "3 parsecs"], "budget_bytes = '3 parsecs' cannot be read"),
        (["--overhead-limit", "1"], "overhead_limit = 1.0"),
        (["--seed", "-1"], "seed = -1"),
        (["--stats", "--ratio", "0.5", "0.6"], "--stats and --trace are for one run"),
        (["--unknown"], "unrecognized arguments: --unknown"),
    ],
)
def test_wrong_settings_exit_with_2_and_one_line(log, capsys, arguments, words):
    code, out, err = run(capsys, "simulate", log, *arguments)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert words in err


def test_unreadable_logs_exit_with_2_and_one_line(tmp_path, capsys):
    bad = tmp_path / "bad.log"
    bad.write_text('{"INSTRUCTION":"CALL"}\n', encoding="utf-8")
    empty = tmp_path / "empty.log"
    empty.write_bytes(b"")
    for path, words in (
        (tmp_path / "none.log", "No such file"),
        (tmp_path, "Is a directory"),
        (bad, "line 1"),
        (empty, "empty"),
    ):
        code, out, err = run(capsys, "simulate", path)
        assert (code, out) == (2, "")
        assert len(err.splitlines()) == 1
        assert words in err


def test_warnings_are_lines_on_stderr(tmp_path, capsys):
    writer = LogWriter()
    writer.call("op", [], ["a"], 1, bytes=[1], aliases=[-1])
    writer.release("stranger")
    path = tmp_path / "a.log"
    path.write_bytes(writer.getvalue())
    code, _, err = run(capsys, "simulate", path)
    assert code == 0
    assert err.startswith("rotor: warning: ")
    assert len(err.splitlines()) == 1


def test_json_on_stdout_and_in_a_file(log, tmp_path, capsys):
    code, out, _ = run(capsys, "simulate", log, "--ratio", 0.6, "--json")
    assert code == 0
    expected = simulate(log, ratio=0.6)
    (found,) = json.loads(out)["results"]
    assert Result.from_json(json.dumps(found)).n_remat == expected.n_remat
    target = tmp_path / "results.json"
    code, out, _ = run(capsys, "simulate", log, "--ratio", 0.6, 0.7, "--json", target)
    assert code == 0
    assert "slow-down" in out
    listed = json.loads(target.read_text(encoding="utf-8"))
    assert (listed["format"], listed["version"], listed["command"]) == (
        "rotor.command",
        1,
        "simulate",
    )
    assert [entry["ratio"] for entry in listed["results"]] == [0.6, 0.7]


def test_stats_and_trace_of_one_run(log, tmp_path, capsys):
    trace = tmp_path / "trace.csv"
    code, out, _ = run(
        capsys, "simulate", log, "--budget", 8, "--heuristic", "DTR", "--stats", "--trace", trace
    )
    assert code == 0
    assert "most evicted" in out
    assert "most recomputed" in out
    rows = list(csv.DictReader(trace.read_text(encoding="utf-8").splitlines()))
    computes = [row for row in rows if row["event"] == "compute"]
    assert len(computes) == 32 + 8
    assert computes[0]["name"] == "f0"
    assert max(int(row["memory"]) for row in rows) == 8


def test_accesses_are_counted_on_demand(log, capsys):
    _, out, _ = run(capsys, "simulate", log, "--budget", 8, "--count-accesses")
    assert out.splitlines()[1].split()[-1] == "accesses"
    assert int(out.splitlines()[3].split()[-1]) > 0


def test_options_reach_the_simulator(log, capsys):
    options = ["--rebuild-classes-every", 1, "--sample", "--ignore-small", "--no-dealloc"]
    code, out, _ = run(
        capsys,
        "simulate",
        log,
        "--ratio",
        0.9,
        "--seed",
        5,
        "--overhead-limit",
        "inf",
        *options,
        "--json",
    )
    assert code == 0
    found = Result.from_json(json.dumps(json.loads(out)["results"][0]))
    assert (found.rebuild_classes_every, found.sample, found.ignore_small) == (1, True, True)
    assert (found.no_dealloc, found.seed, found.overhead_limit) == (True, 5, float("inf"))


def test_heuristics_and_runtimes_are_listed(capsys):
    code, out, _ = run(capsys, "heuristics")
    assert code == 0
    listed = [line.split()[0] for line in out.splitlines() if line]
    assert listed[1 : 1 + len(heuristics.names())] == heuristics.names()
    assert "V2EagerOptimized" in listed


def test_version_and_help(capsys):
    assert run(capsys, "--version")[:2] == (0, f"rotor {rotor.__version__}\n")
    code, out, _ = run(capsys, "experiment", "pareto", "--help")
    assert code == 0
    assert "--trials" in out
    code, out, err = run(capsys)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1


def test_an_experiment_writes_and_says_what(log, tmp_path, capsys):
    out_dir = tmp_path / "out"
    arguments = ["experiment", "banishing", "--logs", log, "--out", out_dir]
    code, out, _ = run(
        capsys, *arguments, "--ratios", 0.5, 1, "--jobs", 1, "--formats", "svg", "--fresh"
    )
    assert code == 0
    assert "banishing (V1, DTRUnopt)" in out
    for name in ("data/banishing.json", "summary/banishing.txt", "graph/banishing.svg"):
        assert (out_dir / name).is_file()
        assert str(out_dir / name) in out
    code, again, _ = run(capsys, *arguments, "--ratios", 0.5, 1, "--formats", "--resume")
    assert code == 0
    assert "svg" not in again


def test_experiments_without_logs(tmp_path, capsys):
    arguments = ["--out", tmp_path, "--jobs", 1, "--formats", "--heuristics", "DTR"]
    code, out, _ = run(capsys, "experiment", "linear", *arguments, "--sizes", 16, "--heat-size", 0)
    assert (code, "105" in out, "57" in out) == (0, False, True)
    code, out, _ = run(capsys, "experiment", "adversarial", *arguments, "--nodes", 16, "--paths", 3)
    assert code == 0
    assert (tmp_path / "data" / "adversarial.csv").is_file()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nope"], "invalid choice: 'nope'"),
        (["pareto", "--logs", "x"], "no log x"),
        (["pareto", "--logs", "/nothing/here", "--out", "x"], "no log /nothing/here"),
        (["linear", "--out", "x", "--sizes", "1"], "sizes must be at least 2"),
        (["linear", "--out", "x", "--jobs", "0"], "jobs = 0"),
        (["linear", "--out", "x", "--formats", "gif"], "invalid choice: 'gif'"),
        (["linear", "--out", "x", "--fresh", "--resume"], "not allowed with argument"),
    ],
)
def test_wrong_experiments_exit_with_2_and_one_line(
    tmp_path, monkeypatch, capsys, arguments, words
):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, "experiment", *arguments)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert words in err


def test_an_interruption_is_said_and_exits_with_130(log, tmp_path, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("rotor.commands.simulate.simulate", interrupted)
    code, _, err = run(capsys, "simulate", log)
    assert code == 130
    assert err == "rotor: interrupted\n"
    monkeypatch.setattr("rotor.experiments.get", interrupted)
    code, _, err = run(capsys, "experiment", "linear", "--out", tmp_path, "--formats")
    assert (code, err) == (130, "rotor: interrupted; finished parts of an experiment are kept\n")


def test_the_module_runs_without_torch(log):
    check = (
        "import sys; from rotor.commands.main import main; "
        f"code = main(['simulate', {str(log)!r}, '--ratio', '0.5']); "
        "assert 'torch' not in sys.modules; assert 'matplotlib' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "DTREqClass" in done.stdout
    done = subprocess.run(
        [sys.executable, "-m", "rotor", "simulate", str(log), "--budget", "2"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1


def test_a_reader_that_leaves_is_no_traceback(log):
    command = f"{sys.executable} -m rotor simulate {log} --json | head -c 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stderr == ""


def test_a_closed_stdout_loses_text_and_nothing_else(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["info"]) == 0
    assert sys.stdout is None
