"""Configurations in the format of the prototype, trained on the CPU in small sizes.

The files below ``configurations/`` have the keys, types and spellings of the published ones (of its
last version `pareto_curve`, `full_run` and `table_data`, of its first `get_log`), and sizes that a
CPU trains in seconds.
"""

from __future__ import annotations

import csv
import gc
import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from experiment_served import served_here
from rotor.models import workloads

from rotor import simrd
from rotor.commands.main import main
from rotor.experiments import configuration, process
from rotor.experiments.output import find_logs

FOLDER = Path(__file__).with_name("configurations")
FLOAT = 4
NO_MEANING = "warning: {}: keys that have no meaning here and are ignored: {}"
UNKNOWN = "warning: {}: keys that are unknown and ignored: {}"


class Served:
    """What was asked of workers in this process, and what they said."""

    def __init__(self, monkeypatch) -> None:
        self.requests: list[dict] = []
        self.events: list[list[dict]] = []
        monkeypatch.setattr(process, "ask", served_here(self.requests, self.events))

    def inputs(self, model: str) -> list[tuple[dict, list[str]]]:
        """Return the requests of a model, with the names of the events that followed."""
        asked = [request for request in self.requests if request["request"] == "input"]
        return [
            (request, [event["event"] for event in events])
            for request, events in zip(asked, self.events, strict=True)
            if request["model"] == model
        ]


@pytest.fixture
def served(monkeypatch):
    """Workers in this process; what it holds already is no garbage of theirs."""
    monkeypatch.delenv("ROTOR_WEBHOOK", raising=False)
    gc.freeze()
    return Served(monkeypatch)


def run(capsys, config: str | Path, out: Path, *options: str) -> tuple[str, list[str]]:
    """Run a configuration without figures; its text, and stderr but for the lines of progress."""
    arguments = ["experiment", "run", str(config), "--out", str(out), *options]
    if "--formats" not in options:
        arguments.append("--formats")
    code = main(arguments)
    text, err = capsys.readouterr()
    assert code == 0, err
    lines = [line.removeprefix("rotor: ") for line in err.splitlines()]
    return text, [line for line in lines if not re.search(r": \d+ of \d+ done", line)]


def results_of(out: Path, name: str) -> dict[str, list[dict]]:
    return json.loads((out / "data" / f"{name}.json").read_text())["results"]


def test_slow_down_against_the_budget(served, tmp_path, capsys):
    _, lines = run(capsys, FOLDER / "pareto_curve.json", tmp_path)
    name = "pareto_curve"
    assert lines == [
        NO_MEANING.format(name, "$.dtr_torch_cmd, $.notify, $.sync_gpu (on a CPU)"),
        UNKNOWN.format(name, '$.note_on_report_errors (did you mean "report_errors"?)'),
    ]
    results = results_of(tmp_path, name)
    assert list(results) == ["treelstm", "lstm"]
    for listed in results.values():
        assert [entry["type"] for entry in listed[:2]] == ["baseline", "dtr"]
        for entry in listed:
            assert entry["summary"] != "error", entry
            assert math.isfinite(entry["slowdown"])
            assert entry.get("losses_equal") in (None, True)
    plain, wide, narrow = results["treelstm"]
    assert narrow["specific_params"]["memory_budget"] == 170_000
    assert narrow["summary"]["total_mem"]["max"] <= 0.17 < plain["summary"]["total_mem"]["max"]
    assert narrow["summary"]["evictions"]["min"] > 0
    assert wide["summary"]["evictions"]["max"] == 0
    # Two runs warm up; the three that are counted are in the file.
    for _, events in served.inputs("treelstm"):
        assert (events.count("warm"), events.count("rep")) == (2, 3)
    with (tmp_path / f"data/{name}/cmd-0-baseline-3-none-treelstm.csv").open() as file:
        assert [row["rep"] for row in csv.DictReader(file)] == ["0", "1", "2"]
    assert [request["sample"] for request, _ in served.inputs("lstm") if "sample" in request] == [
        False
    ]

    # Batch sizes of trees are depths, and of sequences lengths.
    tree, sequence = results["treelstm"][0], results["lstm"][0]
    assert (tree["specific_params"]["batch_size"], tree["specific_params"]["input_size"]) == (3, 16)
    nodes, rows, classes = 2 ** (3 + 1) - 1, 16, 5
    read = nodes * rows * 10 * FLOAT + rows * classes * FLOAT
    assert tree["summary"]["input_mem"]["mean"] == pytest.approx(read / 1e6)
    assert sequence["specific_params"]["batch_size"] == 10
    read = 10 * rows * 8 * FLOAT + rows * 8
    assert sequence["summary"]["input_mem"]["mean"] == pytest.approx(read / 1e6)
    # Throughput is of examples, whatever the batch size means.
    median = tree["summary"]["gpu_time"]["median"]
    assert tree["throughput"] == pytest.approx(rows / median * 1000)


def test_logs_without_a_limit_and_counts_of_a_command(served, tmp_path, capsys):
    run(capsys, FOLDER / "full_run.json", tmp_path)
    assert {request["sizes"] for request in served.requests[1:]} == {"published"}
    found = {
        model: [(events.count("warm"), events.count("rep")) for _, events in served.inputs(model)]
        for model in ("lstm_encoder", "gru_encoder", "treelstm")
    }
    assert found == {"lstm_encoder": [(2, 3)] * 2, "gru_encoder": [(0, 2)], "treelstm": [(1, 1)]}
    results = results_of(tmp_path, "full_run")
    for listed in results.values():
        assert [entry["specific_params"]["memory_budget"] for entry in listed] == ["inf"]
    logs = sorted((tmp_path / "nightly_logs").glob("*.log"))
    assert [log.name.split("-")[:3] for log in logs] == [
        ["gru_encoder", "4", "inf"],
        ["lstm_encoder", "4", "inf"],
        ["treelstm", "2", "inf"],
    ]
    assert all(simrd.parse(log).start_count == 1 for log in logs)

    # The list that the prototype writes for its simulator, which ours reads.
    listed = json.loads((tmp_path / "nightly_logs/sim_conf.json").read_text())
    assert list(listed) == ["lstm_encoder", "gru_encoder", "treelstm"]
    (entry,) = listed["treelstm"]
    assert set(entry) == {"name", "title", "desc", "log", "has_start"}
    assert entry["title"] == "treelstm (2)"
    found = find_logs([tmp_path / "nightly_logs/sim_conf.json"])
    assert {log.path.name for log in found} == {log.name for log in logs}


def test_sweeps_of_sizes(served, tmp_path, capsys):
    _, lines = run(capsys, FOLDER / "table_data.json", tmp_path)
    assert lines[1] == UNKNOWN.format("table_data", "$.ignore_kind")
    assert len(lines) == 2
    results = results_of(tmp_path, "table_data")
    for model, sizes in {"resnet20": [1, 2], "treelstm": [2, 3]}.items():
        entries = results[model]
        found = [(entry["type"], entry["specific_params"]["batch_size"]) for entry in entries]
        assert found == [*(("baseline", k) for k in sizes), *(("dtr", k) for k in sizes)]
        assert all(entry["summary"] != "error" for entry in entries)
        assert all(entry["throughput"] > 0 for entry in entries)
    assert [entry["kind"] for entry in results["resnet20"]] == ["", "", *["param_sweep"] * 2]
    sampled = [request["sample"] for request, _ in served.inputs("treelstm")[2:]]
    assert sampled == [True, False]


def test_the_first_version_named_the_depth(served, tmp_path, capsys):
    run(capsys, FOLDER / "get_log.json", tmp_path)
    tree = results_of(tmp_path, "get_log")["treelstm"][0]
    read = 7 * 5 * 10 * FLOAT + 5 * 5 * FLOAT
    assert tree["summary"]["input_mem"]["mean"] == pytest.approx(read / 1e6)
    ratios = served.inputs("resnet20")
    assert [request.get("sample") for request, _ in ratios] == [None, True, False]
    assert len(list((tmp_path / "dtr_logs").glob("*.log"))) == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pareto_curve", "full_run", "table_data", "get_log"])
def test_published_configurations_run_in_processes(name, tmp_path, capsys, monkeypatch):
    """All their models, but the one that a CPU does not train in minutes."""
    monkeypatch.delenv("ROTOR_WEBHOOK", raising=False)
    data = json.loads((FOLDER / f"{name}.json").read_text())
    data["models"] = sorted({*data["dtr_settings"]} - {"default", "resnet1202"})
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps(data))
    run(capsys, path, tmp_path)
    results = results_of(tmp_path, name)
    assert list(results) == data["models"]
    entries = [entry for listed in results.values() for entry in listed]
    assert all(entry["summary"] != "error" for entry in entries)


def test_what_a_configuration_leaves_open_has_published_sizes():
    config = configuration.load(FOLDER / "pareto_curve.json")
    assert config.sizes == "published"
    given = {"batch_size": 64}
    assert workloads.from_published("resnet1202", given) == workloads.published("resnet1202")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
def test_a_dry_run_needs_no_device(served, tmp_path, capsys):
    text, lines = run(capsys, "config_get_log.json", tmp_path / "out", "--dry-run")
    assert "get_log: what would run" in text
    assert lines == []
    assert not (tmp_path / "out").exists()
    rows = [line.split() for line in text.splitlines()]
    (tree,) = [row for row in rows if row[:1] == ["treelstm"]]
    assert tree[-3:] == ["1", "10", "1"]
    assert [request["request"] for request in served.requests] == ["describe"]
    with pytest.raises(ValueError, match="this machine has 0 CUDA devices"):
        main_raising("config_get_log.json", tmp_path / "out")


def main_raising(config: str, out: Path) -> None:
    from rotor.experiments import runs

    runs.run(configuration.load(config), out, formats=())


def test_configurations_are_copied_to_be_changed(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["experiment", "copy", "get_log"]) == 0
    assert capsys.readouterr().out == "config_get_log.json\n"
    assert configuration.load("config_get_log.json") == configuration.load("get_log")
    assert main(["experiment", "copy", "config_get_log.json"]) == 2
    assert "config_get_log.json exists: name another file" in capsys.readouterr().err
    Path("config_get_log.json").write_text("{}")
    assert main(["experiment", "copy", "get_log", "--force"]) == 0
    assert configuration.load("config_get_log.json") == configuration.load("get_log")
    Path("folder").mkdir()
    assert main(["experiment", "copy", "quick", "folder"]) == 0
    assert main(["experiment", "copy", "quick", "folder/mine.json"]) == 0
    assert sorted(path.name for path in Path("folder").iterdir()) == [
        "config_quick.json",
        "mine.json",
    ]
    shutil.rmtree("folder")
    capsys.readouterr()
    assert main(["experiment", "copy", "nothing"]) == 2
    assert "no configuration is named 'nothing'" in capsys.readouterr().err
