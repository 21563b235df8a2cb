"""A configuration with every type and kind of command, from the command line to the files."""

from __future__ import annotations

import csv
import json
import math
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from experiment_served import served_here

from rotor import simrd
from rotor.commands.main import main
from rotor.experiments import process

EXTRA = {"batch_size": 16, "extra_params": {"depth": 4, "mem_dim": 48, "in_dim": 16}}
SWEPT = {"batch_size": 16, "extra_params": {"depth": [3, 4], "mem_dim": 48, "in_dim": 16}}
COMMANDS = [
    {"type": "baseline", **SWEPT},
    {"type": "dtr", "kind": "fixed", "memory_budget": ["inf", "20MB"], **EXTRA},
    {"type": "dtr", "kind": "ratio", "ratio": [0.7], **EXTRA},
    {"type": "dtr", "kind": "param_sweep", "memory_budget": ["15MB"], "save_logs": False, **SWEPT},
    {"type": "simrd", "memory_budget": ["20MB"], "ratio": [0.9, 1.0], **EXTRA},
]
KINDS = ["baseline"] * 2 + ["fixed"] * 2 + ["ratio"] + ["param_sweep"] * 2 + ["simrd"] * 3
CONFIGURATION = {
    **{"models": ["treelstm"], "save_logs": True, "log_dest": "kept", "set_seed": True, "seed": 1},
    **{"n_reps": 2, "device": "cpu", "sizes": "small"},
    "dtr_settings": {
        "default": {"use_sampling": False, "ignore_small_tensors": False, "timeout": 300},
        "treelstm": COMMANDS,
    },
}


class Hook:
    """A server that keeps what is posted to it."""

    def __init__(self) -> None:
        posted = self.posted = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                posted.append(json.loads(self.rfile.read(length)))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self.address = f"http://127.0.0.1:{self._server.server_port}/hook"

    def __enter__(self) -> Hook:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture(params=["here", pytest.param("in processes", marks=pytest.mark.slow)])
def requests(request, monkeypatch) -> list[dict] | None:
    """What was asked of workers in this process; None where each is a process of its own."""
    monkeypatch.delenv("ROTOR_WEBHOOK", raising=False)
    if request.param == "in processes":
        return None
    asked: list[dict] = []
    monkeypatch.setattr(process, "ask", served_here(asked))
    return asked


def test_a_whole_experiment(requests, tmp_path, capsys):
    path, out = tmp_path / "config_whole.json", tmp_path / "out"
    number = 2 if requests is None else 1
    path.write_text(json.dumps(CONFIGURATION | {"n_inputs": number}))
    with Hook() as hook:
        arguments = ["experiment", "run", str(path), "--out", str(out), "--formats", "pdf"]
        assert main([*arguments, "--webhook", hook.address]) == 0
        text = capsys.readouterr().out
        (posted,) = hook.posted
    summary = (out / "summary/whole.txt").read_text()
    assert posted["text"] in summary
    assert summary.strip() in text
    data = json.loads((out / "data/whole.json").read_text())
    entries = data["results"]["treelstm"]
    assert [entry["command_id"] for entry in entries] == list(range(len(KINDS)))
    assert not (out / "data/whole_errors.json").exists()

    plain, limited, replayed = entries[:2], entries[2:7], entries[7:]
    for entry in plain:
        assert entry["slowdown"] == 1.0
        assert entry["throughput"] > 0
        low, high = entry["summary"]["total_mem"]["mean_conf"]
        assert 0 < low <= entry["summary"]["total_mem"]["mean"] <= high
        assert len(entry["input_summaries"]) == number
    for entry in limited:
        assert entry["losses_equal"]
        budget = entry["specific_params"]["memory_budget"]
        assert budget == "inf" or entry["summary"]["total_mem"]["max"] <= budget / 1e6
        assert math.isfinite(entry["slowdown"])
    # The ratio is of the baseline's largest memory.
    most = plain[1]["summary"]["total_mem"]["max"]
    ratio = limited[2]["specific_params"]["memory_budget"]
    assert ratio == pytest.approx(0.7 * most * 1e6, abs=1)
    assert limited[2]["summary"]["evictions"]["min"] > 0
    # The simulator replayed the log without a limit, in which nothing was evicted.
    assert [entry["error"] for entry in replayed if "error" in entry] == []
    assert replayed[0]["slowdown"] == 1.0
    assert replayed[2]["slowdown"] <= replayed[1]["slowdown"] < 2

    logs = sorted((out / "kept").iterdir())
    assert len(logs) == 3
    for log in logs:
        parsed = simrd.parse(log)
        assert parsed.start_count == 1
        assert parsed.baseline.n_ops > 50
    files = sorted((out / "data/whole").iterdir())
    assert [file.name.split("-")[2] for file in files] == KINDS[:7]
    with files[2].open() as file:
        rows = list(csv.DictReader(file))
    expected = [(str(k), str(rep)) for k in range(number) for rep in range(2)]
    assert [(row["input"], row["rep"]) for row in rows] == expected
    figures = sorted(figure.name for figure in (out / "graph").iterdir())
    names = ("breakdown", "ratio", "slowdown", "throughput")
    assert figures == [f"whole_{name}.pdf" for name in names]
    assert all((out / "graph" / name).read_bytes().startswith(b"%PDF") for name in figures)

    # Asked again, nothing runs but what says which device there is; the files are the same.
    before = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    count = 0 if requests is None else len(requests)
    assert main(arguments) == 0
    assert {file: file.read_bytes() for file in out.rglob("*") if file.is_file()} == before
    if requests is not None:
        assert count == 1 + number * 7
        assert [request["request"] for request in requests[count:]] == ["describe"]
