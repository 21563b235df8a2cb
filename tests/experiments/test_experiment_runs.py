"""Experiments that train models: processes, files, resuming, statistics, figures."""

from __future__ import annotations

import contextlib
import csv
import http.server
import json
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from experiment_runs import BASELINE, FIXED, RATIO, WORKER, parse, requests_of, run, text_of

from rotor.commands.main import main
from rotor.experiments import analysis, configuration, process, runs
from rotor.experiments.process import Failure, Limits
from rotor.report import experiment_figures


@pytest.fixture
def calls(tmp_path, monkeypatch) -> Path:
    path = tmp_path / "calls.jsonl"
    path.touch()
    monkeypatch.setenv("CALLS", str(path))
    monkeypatch.setattr(process, "WORKER", WORKER)
    return path


# -- processes


def ask(params: dict, calls: Path, **limits) -> process.Answer:
    assert calls.exists()
    request = {"request": "input", "model": "one", "params": params, "seed": 1, "n_reps": 2}
    request |= {"type": "baseline", "batch_size": 3, "log": None}
    settings = {"timeout": 30.0, "attempt_timeout": 20.0, "max_retries": 2, "retry_on_error": False}
    return process.ask(request, Limits(**(settings | limits)), worker=WORKER)


def test_an_answer_is_its_events(calls):
    answer = ask({}, calls)
    assert [event["event"] for event in answer.events] == ["begun", "rep", "rep", "done"]
    assert answer.retries == []


@pytest.mark.parametrize("given", [None, "active"])
def test_threads_of_a_worker_do_not_wait_busily(calls, monkeypatch, given):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", given)
    code = (
        "import json, os; "
        "print(json.dumps({'event': 'done', 'policy': os.environ['OMP_WAIT_POLICY']}))"
    )
    limits = Limits(30.0, 20.0, 0, False)
    answer = process.ask({}, limits, worker=(sys.executable, "-S", "-c", code))
    assert answer.events[-1]["policy"] == (given or "passive")


def test_silence_is_ended_and_tried_again(calls):
    answer = ask({"trouble": "hangs once"}, calls, attempt_timeout=1.0)
    assert answer.events[-1]["event"] == "done"
    assert answer.retries == ["Silent: no sign of life for 1 s, last heard: begun"]


def test_silence_that_lasts_is_a_failure(calls):
    with pytest.raises(Failure, match="Silent") as caught:
        ask({"trouble": "hangs"}, calls, attempt_timeout=0.5, max_retries=1)
    assert len(caught.value.retries) == 1


def test_a_crash_is_tried_again_and_its_last_words_are_kept(calls):
    assert ask({"trouble": "crashes once"}, calls).retries == [
        "Crashed: ended with exit code 3 before it was done, last heard: begun"
    ]
    calls.with_suffix(".crash").unlink()
    with pytest.raises(Failure, match="exit code 3") as caught:
        ask({"trouble": "crashes once"}, calls, max_retries=0)
    assert caught.value.traceback == "broken\n"


def test_an_error_is_tried_again_only_where_that_is_asked(calls):
    with pytest.raises(Failure, match="OutOfMemoryError: too\nlarge") as caught:
        ask({"trouble": "fails once"}, calls)
    assert (caught.value.traceback, caught.value.retries) == ("there", [])
    calls.with_suffix(".fail").unlink()
    answer = ask({"trouble": "fails once"}, calls, retry_on_error=True)
    assert len(answer.retries) == 1


def test_signs_of_life_do_not_prolong_the_time_in_all(calls):
    with pytest.raises(Failure, match=r"Timeout: not done within 0\.6 s"):
        ask({"trouble": "chatters"}, calls, timeout=0.6)


def test_a_device_that_is_not_there_is_an_error(calls):
    with pytest.raises(ValueError, match="experiments cannot run here: ValueError: no cuda:9"):
        process.describe("cuda:9", WORKER)


def test_the_reason_why_nothing_can_run_is_told(calls):
    worker = (*WORKER[:2], "-c", "import no_such_module")
    with pytest.raises(ValueError, match="last words: ModuleNotFoundError: No module named 'no_s"):
        process.describe("cpu", worker)
    assert calls.exists()


# -- runs


def test_a_run_writes_what_was_measured(calls, tmp_path):
    config = parse(
        BASELINE, FIXED, default={"batch_size": 4, "use_sampling": False}, n_inputs=2, n_reps=3
    )
    plain, small, unlimited = run(config, tmp_path / "out")
    assert plain["slowdown"] == 1.0
    assert plain["throughput"] == pytest.approx(4 / 11.0 * 1000)
    assert small["slowdown"] == pytest.approx(16 / 11)
    assert small["summary"]["total_mem"]["max"] == 8.0
    assert unlimited["summary"]["total_mem"]["max"] == 41.0
    assert small["specific_params"]["memory_budget"] == 8_000_000
    assert unlimited["specific_params"]["memory_budget"] == "inf"
    assert small["losses_equal"] is True
    assert small["cpu_slowdown"] == 2.0
    assert small["summary"]["gpu_time"]["min"] == 15.0
    assert len(small["input_summaries"]) == 2
    files = sorted(path.name for path in (tmp_path / "out/data/test").iterdir())
    assert files == [
        "cmd-0-baseline-4-none-one.csv",
        "cmd-1-fixed-4-8000000-one.csv",
        "cmd-2-fixed-4-inf-one.csv",
    ]
    with (tmp_path / "out/data/test" / files[1]).open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [
        *("input", "rep", "num_retries", "time", "gpu_time", "cpu_time", "input_mem", "model_mem"),
        *("total_mem", "sync_time", "base_compute_time", "remat_compute_time", "search_time"),
        *("cost_time", "evictions", "rematerializations", "loss", "memory_budget"),
    ]
    assert [(row["input"], row["rep"]) for row in rows] == [(i, r) for i in "01" for r in "012"]
    assert (rows[0]["cost_time"], rows[0]["loss"]) == ("0.25", "0.5")
    asked = requests_of(calls)
    assert [request["seed"] for request in asked] == [0, 1] * 3
    assert [request["type"] for request in asked] == ["baseline"] * 2 + ["dtr"] * 4
    assert not asked[2]["sample"]


def test_finished_inputs_are_not_run_again(calls, tmp_path):
    config = parse(BASELINE, FIXED, n_inputs=2)
    first = run(config, tmp_path / "out")
    assert len(requests_of(calls)) == 6
    assert run(config, tmp_path / "out") == first
    assert len(requests_of(calls)) == 6
    run(config, tmp_path / "out", fresh=True)
    assert len(requests_of(calls)) == 12


def test_a_changed_configuration_runs_what_is_new(calls, tmp_path):
    run(parse(BASELINE, FIXED), tmp_path / "out")
    changed = parse(BASELINE, FIXED | {"memory_budget": [8_000_000, 9_000_000]})
    with pytest.warns(UserWarning, match=r"another configuration named test \(it differs in dtr_s"):
        run(changed, tmp_path / "out")
    assert len(requests_of(calls)) == 4
    names = sorted(path.name for path in (tmp_path / "out/data/test").iterdir())
    assert names[-1] == "cmd-2-fixed-1-9000000-one.csv"
    assert len(names) == 3


def test_inputs_that_failed_run_again(calls, tmp_path):
    config = parse(BASELINE, BASELINE | {"extra_params": {"trouble": "fails once"}})
    first = run(config, tmp_path / "out")
    assert first[1]["summary"] == "error"
    assert first[1]["error"]["error"] == "OutOfMemoryError"
    errors = json.loads((tmp_path / "out/data/test_errors.json").read_text())["results"]
    assert [(e["model"], e["command_id"]) for e in errors] == [("one", 1)]
    assert (
        "1 baseline trouble=fails once: OutOfMemoryError: too large"
        in (tmp_path / "out/summary/test.txt").read_text()
    )
    again = run(config, tmp_path / "out")
    assert again[1]["slowdown"] == 1.0
    assert len(requests_of(calls)) == 3
    assert not (tmp_path / "out/data/test_errors.json").exists()


def test_an_error_ends_a_run_that_does_not_report_them(calls, tmp_path):
    config = parse(BASELINE, BASELINE | {"extra_params": {"trouble": "fails"}}, report_errors=False)
    with pytest.raises(runs.RunError, match="one: OutOfMemoryError"):
        runs.run(config, tmp_path / "out", formats=())
    assert len(requests_of(calls)) == 2
    assert not (tmp_path / "out/data/test.json").exists()


def test_retries_are_recorded(calls, tmp_path):
    extra = {"trouble": "hangs once", "attempt_timeout": 1.0}
    (entry,) = run(parse(BASELINE | {"extra_params": extra}), tmp_path / "out")
    assert entry["num_retries"] == 1
    assert "memory_budget" not in entry["specific_params"]


def test_a_ratio_is_of_the_baselines_largest_memory(calls, tmp_path):
    config = parse(RATIO | {"batch_size": 4}, n_inputs=3)
    (entry,) = run(config, tmp_path / "out")
    asked = requests_of(calls)
    assert [request["type"] for request in asked] == ["baseline"] * 3 + ["dtr"] * 3
    # The largest of 10, 41 and 42 MB.
    assert {request["budget_bytes"] for request in asked[3:]} == {21_000_000}
    assert entry["slowdown"] == 1.5
    assert entry["specific_params"]["ratio"] == 0.5


def test_a_ratio_shares_the_inputs_of_a_baseline(calls, tmp_path):
    run(parse(RATIO, BASELINE | {"timeout": 9}, RATIO | {"batch_size": 2}), tmp_path / "out")
    assert [request["batch_size"] for request in requests_of(calls)] == [None, 2, None, 2]


def test_a_ratio_without_a_baseline_is_an_error(calls, tmp_path):
    (entry,) = run(parse(RATIO | {"extra_params": {"trouble": "fails"}}), tmp_path / "out")
    assert entry["error"]["message"] == "the baseline failed: OutOfMemoryError: too\nlarge"
    assert len(requests_of(calls)) == 1


def test_a_loss_that_differs_is_told(calls, tmp_path):
    extra = {"extra_params": {"trouble": "differs"}}
    _, entry, _ = run(parse(BASELINE | extra, FIXED | extra), tmp_path / "out")
    assert entry["losses_equal"] is False
    assert "DIFFERS" in (tmp_path / "out/summary/test.txt").read_text()


def test_logs_are_saved_by_the_last_input_and_replayed(calls, tmp_path):
    config = parse(
        FIXED,
        {"type": "simrd", "memory_budget": [20, 15], "ratio": 1.0},
        n_inputs=2,
        save_logs=True,
        log_dest="the logs",
    )
    *_, fits, fails, ratio = run(config, tmp_path / "out")
    asked = requests_of(calls)
    assert [request["log"] is not None for request in asked] == [False, True] * 2
    logs = sorted(path.name for path in (tmp_path / "out/the logs").iterdir())
    assert [name.rpartition("-")[0] for name in logs] == ["one-default-8000000", "one-default-inf"]
    assert fits["slowdown"] == ratio["slowdown"] == 1.0
    assert fits["summary"]["total_mem"]["max"] == 20 / 1e6
    assert fails["error"] == {
        "error": "OOM",
        "message": "simulated: out of memory",
        "traceback": "",
    }
    # A log that is gone is recorded again; its replays are known.
    (tmp_path / "out/the logs" / logs[0]).unlink()
    run(config, tmp_path / "out")
    assert len(requests_of(calls)) == 5


def test_a_replay_without_a_log_is_an_error(calls, tmp_path):
    missing = {"type": "simrd", "ratio": 1, "log": "x.log"}
    _, _, none, gone = run(parse(FIXED, {"type": "simrd", "ratio": 1}, missing), tmp_path / "out")
    assert "no command of this configuration has saved one" in none["error"]["message"]
    assert "x.log" in gone["error"]["message"]
    assert calls.exists()


def test_drawn_seeds_are_kept(calls, tmp_path):
    run(parse(BASELINE, set_seed=False), tmp_path / "out")
    assert requests_of(calls)[0]["seed"] is None


@pytest.mark.parametrize("dry_run", [True, False])
def test_nothing_runs_where_that_is_said(calls, tmp_path, dry_run):
    config = parse(BASELINE, RATIO, active=dry_run)
    output = runs.run(config, tmp_path / "out", dry_run=dry_run)
    assert requests_of(calls) == []
    assert not (tmp_path / "out").exists()
    assert output.text.startswith("test: what would run" if dry_run else "test: not a")


def test_keys_without_a_meaning_are_one_warning(calls, tmp_path):
    config = parse(
        BASELINE | {"use_profiling": True, "use_sampling": True},
        dtr_torch_cmd="python",
        notify=[],
        sync_gpu=True,
    )
    with pytest.warns(UserWarning, match="have no meaning here and are ignored") as caught:
        runs.run(config, tmp_path / "out", formats=())
    assert [str(entry.message) for entry in caught] == [
        "test: keys that have no meaning here and are ignored: $.dtr_torch_cmd, $.notify, "
        "$.dtr_settings.one[0].use_sampling (of a baseline command), $.sync_gpu (on a CPU)"
    ]
    assert len(requests_of(calls)) == 1


def test_unknown_keys_are_one_warning(calls, tmp_path):
    extra = {"depht": 3, **{f"key{number}": 1 for number in range(9)}}
    config = parse(BASELINE | {"batch_sise": 3, "extra_params": extra}, n_rep=3, default={"n": 1})
    with pytest.warns(UserWarning, match="are unknown and ignored") as caught:
        runs.run(config, tmp_path / "out", formats=())
    (entry,) = caught
    assert str(entry.message).startswith(
        'test: keys that are unknown and ignored: $.n_rep (did you mean "n_reps"?), '
        "$.dtr_settings.default.n, "
        '$.dtr_settings.one[0].batch_sise (did you mean "batch_size"?), '
        '$.dtr_settings.one[0].extra_params.depht (did you mean "depth"?), '
    )
    assert str(entry.message).endswith(" and 5 more")
    assert requests_of(calls)[0]["params"] == {}


class _Hook(http.server.BaseHTTPRequestHandler):
    posted: list[dict]
    code = 200

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.posted.append(json.loads(body))
        self.send_response(self.code)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def hook(code: int):
    handler = type("Hook", (_Hook,), {"posted": [], "code": code})
    server = http.server.HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/secret", handler.posted
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_summary_is_posted_at_the_end(calls, tmp_path):
    with hook(200) as (address, posted):
        output = runs.run(parse(BASELINE), tmp_path / "out", formats=(), webhook=address)
    assert posted == [{"text": output.text}]
    assert calls.exists()


def test_a_post_that_fails_is_a_warning_without_the_address(calls, tmp_path):
    with hook(500) as (address, _), pytest.warns(UserWarning, match="not posted") as caught:
        runs.run(parse(BASELINE), tmp_path / "out", formats=(), webhook=address)
    assert "secret" not in str(caught[0].message)
    assert (tmp_path / "out/summary/test.txt").exists()
    with pytest.raises(ValueError, match="expected an address that begins with https://"):
        runs.run(parse(BASELINE), tmp_path / "out", webhook="file:///etc/passwd")
    assert calls.exists()


# -- statistics and figures


def test_statistics_of_a_metric():
    found = analysis.summarize([1.0, 2.0, 3.0, 10.0])
    assert (found["mean"], found["median"], found["min"], found["max"]) == (4.0, 2.5, 1.0, 10.0)
    assert found["std"] == pytest.approx(np.sqrt(50 / 3))
    assert found == analysis.summarize([1.0, 2.0, 3.0, 10.0])
    assert analysis.summarize([3.0])["median_conf"] == [3.0, 3.0]
    assert analysis.summarize([3.0])["std"] == 0.0


def test_bootstrap_intervals_hold_what_they_say():
    generator = np.random.default_rng(0)
    hits = 0
    for _ in range(40):
        low, high = analysis.summarize(generator.normal(5.0, 1.0, 30))["mean_conf"]
        hits += low <= 5.0 <= high
    assert 34 <= hits <= 39
    data = generator.normal(5.0, 1.0, 400)
    low, high = analysis.summarize(data)["mean_conf"]
    half = 1.96 * data.std(ddof=1) / 20
    assert (low, high) == pytest.approx((data.mean() - half, data.mean() + half), abs=0.02)


def test_figures_are_drawn_of_every_kind(calls, tmp_path):
    sweep = {"type": "dtr", "kind": "param_sweep", "memory_budget": 9_000_000}
    config = parse(
        BASELINE | {"batch_size": [1, 2]},
        FIXED | {"batch_size": 1},
        RATIO | {"batch_size": 1, "ratio": [0.4, 0.8]},
        sweep | {"batch_size": [1, 2]},
        FIXED | {"batch_size": 1, "extra_params": {"trouble": "fails"}},
        {"type": "simrd", "batch_size": 1, "memory_budget": 8_000_000, "ratio": [0.9, 1.0]},
        n_reps=2,
        save_logs=True,
    )
    output = runs.run(config, tmp_path / "out", formats=("pdf",))
    figures = [path for path in output.files if path.parent.name == "graph"]
    names = [f"test_{name}.pdf" for name in ("slowdown", "ratio", "throughput", "breakdown")]
    assert [path.name for path in figures] == names
    before = [path.read_bytes() for path in figures]
    assert all(content.startswith(b"%PDF") for content in before)
    runs.run(config, tmp_path / "out", formats=("pdf",))
    assert [path.read_bytes() for path in figures] == before
    # Those that fail run again; a ratio of 0.8 is the 8 MB of another command.
    assert len(requests_of(calls)) == 9 + 2


def test_the_parts_of_a_bar_add_up_to_its_time(calls, tmp_path):
    results = run(parse(BASELINE, FIXED), tmp_path / "out")
    (panel,) = experiment_figures.budget_panels({"one": results})
    assert [bar["label"] for bar in panel["bars"]] == ["baseline", "no limit", "8 MB"]
    assert panel["is_relative"]
    (in_cpu_time,) = experiment_figures.budget_panels({"one": results}, "cpu_time")
    assert sum(in_cpu_time["bars"][2]["parts"].values()) == pytest.approx(2.0)
    assert in_cpu_time["bars"][2]["parts"]["base"] == pytest.approx(2.0 * 9 / 15)
    parts = panel["bars"][2]["parts"]
    assert sum(parts.values()) == pytest.approx(1.5)
    assert parts == pytest.approx(
        {
            "base": 0.9,
            "rematerialization": 0.2,
            "eviction loop": 0.075,
            "cost compute": 0.025,
            "unprofiled": 0.3,
        }
    )
    assert calls.exists()


def test_a_sweep_compares_budgets_at_each_value(calls, tmp_path):
    sweep = {"type": "dtr", "kind": "param_sweep", "memory_budget": [8_000_000, 9_000_000]}
    swept = {"batch_size": 2, "extra_params": {"depth": [3, 4]}}
    results = run(parse(BASELINE | swept, sweep | swept), tmp_path / "out")
    (panel,) = experiment_figures.sweep_panels({"one": results})
    assert panel["labels"] == ["depth 3", "depth 4"]
    assert list(panel["series"]) == ["baseline", "DTR, 8 MB", "DTR, 9 MB"]
    assert panel["series"]["DTR, 8 MB"]["depth 4"]["specific_params"]["depth"] == 4
    assert calls.exists()


# -- the command line


def command(capsys, *arguments: object) -> tuple[int, str, str]:
    code = main(["experiment", *map(str, arguments)])
    return code, *capsys.readouterr()


def test_the_command_line_runs_a_file(calls, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("ROTOR_WEBHOOK", raising=False)
    path = tmp_path / "config_test.json"
    path.write_text(text_of(BASELINE, FIXED))
    out = tmp_path / "out"
    code, text, err = command(capsys, "run", path, "--out", out, "--formats")
    assert (code, err.count(" done ("), err.count("\n")) == (0, 3, 3)
    assert "test: 1 inputs of 1 repetitions" in text
    assert str(out / "summary/test.txt") in text.splitlines()
    code, text, _ = command(capsys, "run", path, "--out", out, "--dry-run")
    assert (code, "what would run" in text) == (0, True)
    assert len(requests_of(calls)) == 3


def test_the_command_line_tells_of_each_input(calls, tmp_path, capsys):
    path = tmp_path / "two.json"
    path.write_text(text_of(BASELINE, FIXED, n_inputs=2))
    command = ["experiment", "run", str(path), "--out", str(tmp_path), "--formats"]
    assert main(command) == 0
    lines = capsys.readouterr().err.splitlines()
    told = [line.rpartition(", ")[0] for line in lines if " done " in line]
    assert told == [
        "rotor: two, baselines: 1 of 2 done (one baseline)",
        "rotor: two, baselines: 2 of 2 done (one baseline)",
        "rotor: two, under a budget: 1 of 4 done (one dtr 7.63 MiB)",
        "rotor: two, under a budget: 2 of 4 done (one dtr 7.63 MiB)",
        "rotor: two, under a budget: 3 of 4 done (one dtr no limit)",
        "rotor: two, under a budget: 4 of 4 done (one dtr no limit)",
    ]
    assert main([*command, "--fresh", "--quiet"]) == 0
    assert " done " not in capsys.readouterr().err


def test_the_command_line_says_what_is_wrong(calls, tmp_path, capsys):
    path = tmp_path / "config_test.json"
    path.write_text(text_of(BASELINE, n_reps=0))
    code, _, err = command(capsys, "run", path, "--out", tmp_path)
    assert (code, "$.n_reps = 0, expected" in err) == (2, True)
    path.write_text(text_of(BASELINE | {"extra_params": {"trouble": "fails"}}, report_errors=False))
    code, _, err = command(capsys, "run", path, "--out", tmp_path, "--formats")
    assert (code, err) == (1, "rotor: one: OutOfMemoryError: too large\n")
    code, _, err = command(capsys, "run", "nothing", "--out", tmp_path)
    assert (code, "no configuration is named 'nothing'" in err) == (2, True)
    assert calls.exists()


def test_experiments_and_configurations_are_listed(capsys):
    code, text, _ = command(capsys, "list")
    assert code == 0
    first = [line.split()[0] for line in text.splitlines() if line]
    assert {"pareto", "static", *configuration.shipped()} <= set(first)
