"""Commands on models: figures, files, JSON; errors in one line."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import data_of, folder_with, run

import rotor
from rotor.algorithms.curve import Curve
from rotor.commands.curve import curve_text
from rotor.graph import Graph, Profile, Program

FACTORY = """
import torch
from torch import nn


class Gated(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.table = nn.Embedding(50, width)
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, ids, scale=None):
        x = self.table(ids)
        x = torch.tanh(self.first(x)) * torch.sigmoid(self.second(x))
        return x if scale is None else x * scale.unsqueeze(-1)


def gated(width=16):
    return Gated(width)


def chain(depth=6, width=32):
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)]
    return nn.Sequential(*layers)


def scores():
    return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 400)), torch.randn(16, 16)


def with_sample():
    return chain(), torch.randn(64, 32)


def number():
    return 3


def two(output, target):
    return output.sum()


def same(output):
    return output


def fails():
    raise KeyError("weights")


def exits():
    raise SystemExit("no data")


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        for _ in range(int(x.sum().abs()) + 1):
            x = self.layer(x)
        return x


def branches():
    return Branches(), torch.randn(2, 4)


class Values(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            if float(x.detach().abs().sum()) >= 0:
                x = x + torch.tanh(layer(x)) * torch.sigmoid(layer(x))
        return x


def chain_of_values():
    return Values(), torch.randn(64, 16)


class Odd(nn.Module):
    def forward(self, x):
        raise AssertionError("never" if self.training else "odd")


def odd():
    return Odd(), torch.randn(2)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    with folder_with("net.py", FACTORY, tmp_path, monkeypatch) as path:
        yield path


CHAIN = ("net.py:with_sample",)
GRAPH = ("net.py:gated", "--input", "16,8", "--dtype", "int64", "--high", 50)


def test_info(capsys):
    data = data_of(capsys, "info")
    assert data["versions"]["rotor"] == rotor.__version__
    assert data["devices"][0]["name"] == "cpu"
    assert data["devices"][0]["free_bytes"] > 0
    assert set(data["extras"]) == {"progress", "plot", "draw", "ilp", "transformers", "lightning"}
    assert isinstance(data["storage_swap"], bool)
    code, out, _ = run(capsys, "info")
    assert code == 0
    assert "limit of control group" in out


def test_info_without_torch(capsys, monkeypatch):
    for name in [name for name in sys.modules if name == "torch"]:
        monkeypatch.setitem(sys.modules, name, None)
    data = data_of(capsys, "info")
    assert (data["versions"]["torch"], data["storage_swap"]) == (None, None)


def test_measuring_a_chain(capsys):
    code, out, err = run(capsys, "measure", *CHAIN, "--out", "chain.json")
    assert code == 0
    assert "chain.json has the measurements" in err
    assert "12 stages" in out.splitlines()[-1]
    chain = rotor.Chain.from_json(Path("chain.json"))
    assert chain.x_bytes == [64 * 32 * 4] * 13
    again = data_of(capsys, "report", "chain.json")
    assert (again["kind"], again["stages"]) == ("rotor.chain", 12)


def test_measuring_a_graph(capsys):
    data = data_of(capsys, "measure", *GRAPH, "--out", "graph.json", "--save", "profile.json")
    graph = Graph.from_dict(data["measured"])
    assert data["inputs"] == ["16,8 int64"]
    assert graph == Graph.load("graph.json")
    assert Profile.load("profile.json").entries
    code, out, _ = run(capsys, "report", "graph.json", "--html", "graph.html")
    assert code == 0
    assert f"{len(graph)} operations" in out
    assert "<html" in Path("graph.html").read_text(encoding="utf-8")


def test_planning_for_the_machine_of_a_profile(capsys, monkeypatch):
    run(capsys, "measure", *GRAPH, "--save", "there.json")
    profile = json.loads(Path("there.json").read_text(encoding="utf-8"))
    # As another machine would have recorded it: half as fast, with little memory.
    doubled = {key: [2 * row[0], *row[1:]] for key, row in profile["entries"].items()}
    del profile["sha256"]  # The change is meant.
    told = profile | {"entries": doubled, "free_bytes": 1_000_000}
    told["environment"] = "('2.99', 'An accelerator', 4)"
    Path("there.json").write_text(json.dumps(told), encoding="utf-8")

    here = Graph.from_dict(data_of(capsys, "measure", *GRAPH)["measured"])

    def runs(*_, **__):
        raise AssertionError("something was run")

    monkeypatch.setattr("rotor.commands.factories.check_forward", runs)
    monkeypatch.setattr("rotor.commands.running.plain_step", runs)
    monkeypatch.setattr("rotor.engines.graph.costs.profile.measure_ns", runs)
    there = Graph.from_dict(
        data_of(capsys, "measure", *GRAPH, "--profile", "there.json")["measured"]
    )
    assert there.total_time == pytest.approx(2 * here.total_time)
    data = data_of(capsys, "curve", *GRAPH, "--profile", "there.json", "--points", 4)
    assert data["free_bytes"] == 1_000_000
    assert data["profile"].startswith("An accelerator, PyTorch 2.99, 4 threads")
    assert data["minimum_bytes"] < data["plain_bytes"]
    assert data["curve"]["seconds"][-1] == pytest.approx(there.total_time)
    code, out, _ = run(capsys, "curve", *GRAPH, "--profile", "there.json", "--points", 4)
    assert code == 0
    assert out.startswith("for An accelerator")
    assert "free on that machine" in out
    # Another shape is estimated by the speeds that were saved.
    other = ("net.py:gated", "--input", "48,8", "--dtype", "int64", "--high", 50)
    assert (
        data_of(capsys, "plan", *other, "--profile", "there.json")["plan"]["limit_bytes"] == 900_000
    )
    del told["free_bytes"]
    Path("there.json").write_text(json.dumps(told), encoding="utf-8")
    code, _, err = run(capsys, "plan", *GRAPH, "--profile", "there.json", "--quiet")
    assert (code, "give --limit" in err) == (2, True)


def test_planning_a_chain_and_reporting_it(capsys):
    chain = (*CHAIN, "--engine", "chain")
    least = data_of(capsys, "curve", *chain)["minimum_bytes"]
    files = ("--out", "plan.json", "--html", "plan.html")
    code, out, err = run(capsys, "plan", *chain, "--limit", least, *files, "--table")
    assert code == 0
    assert "plan.html has the page" in err
    assert "kept by Fe" in out
    data = data_of(capsys, "report", "plan.json", "--html", "again.html")
    assert data["limit_bytes"] == least
    assert data["predicted_bytes"] <= least
    assert data["peak_bytes"] <= data["predicted_bytes"]
    assert data["stages_again"] > 0
    assert data["slowdown"] > 1
    assert "B_0" in data["operations"]
    assert '"program"' in Path("again.html").read_text(encoding="utf-8")


def test_a_saved_program_is_run_by_the_model(capsys):
    data = data_of(capsys, "plan", *GRAPH, "--limit", "1 MB", "--out", "plan.json")
    program = Program.from_json(Path("plan.json"))
    assert data["plan"]["limit_bytes"] == 1_000_000
    report = data_of(capsys, "report", "plan.json", "--html", "plan.html")
    assert report["peak_bytes"] == program.peak_bytes
    assert report["operations"] == len(program.graph)
    from rotor.commands import factories

    made = factories.make("net.py:gated")
    sample = factories.draw(factories.inputs(["16,8"], ["int64"], [50]), factories.device_of("cpu"))
    model = rotor.Checkpointable(made.model, mem_limit="1 MB")
    model.measure(sample)
    assert model.load_program("plan.json").peak_bytes == program.peak_bytes


def test_the_curve_of_a_chain(capsys):
    data = data_of(capsys, "curve", *CHAIN, "--limit", "1 GiB", "--plot", "curve.png")
    curve = Curve.from_dict(data["curve"])
    assert data["minimum_bytes"] == curve.minimum_bytes
    assert data["limit_bytes"] == 2**30
    assert data["limit_seconds"] == curve.seconds[-1]
    assert 64 * 32 * 4 * 6 < data["plain_bytes"] < data["free_bytes"]
    assert curve.bytes[-1] < data["free_bytes"]
    assert Path("curve.png").read_bytes().startswith(b"\x89PNG")
    Path("curve.json").write_text(json.dumps(data["curve"]), encoding="utf-8")
    assert data_of(capsys, "report", "curve.json")["points"] == len(curve.bytes)
    Path("command.json").write_text(json.dumps(data), encoding="utf-8")
    again = data_of(capsys, "report", "command.json")
    assert (again["kind"], again["points"]) == ("rotor.curve", len(curve.bytes))
    assert "plain PyTorch fits; plain needs" in run(capsys, "report", "command.json")[1]


def test_the_json_of_every_command_has_one_head(capsys):
    for command in (
        ("info",),
        ("heuristics",),
        ("experiment", "list"),
        ("measure", *GRAPH),
        ("curve", *GRAPH, "--points", 2),
        ("plan", *GRAPH, "--limit", "1 GiB"),
        ("fit", *GRAPH, "--limit", "2 MiB", "--points", 1, "--max-batch", 32),
    ):
        data = data_of(capsys, *command)
        assert (data["format"], data["version"]) == ("rotor.command", 1)
        assert data["command"] == command[0]
        Path("saved.json").write_text(json.dumps(data), encoding="utf-8")
        code, _, err = run(capsys, "report", "saved.json", "--quiet")
        is_read = command[0] in ("measure", "curve", "plan")
        assert (code, "holds no plan" in err) == ((0, False) if is_read else (2, True))


def test_a_terminal_has_colours_and_the_same_text(capsys, monkeypatch):
    plain = run(capsys, "curve", *CHAIN, "--no-plain", "--limit", "1G")[1]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = run(capsys, "curve", *CHAIN, "--no-plain", "--limit", "1G")[1]
    assert "\x1b[1mAt your 1 GiB" in text
    shown = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    assert shown[0].split() == plain.splitlines()[0].split()


def test_wrong_arguments_fail_without_pytorch():
    lines = [
        ["curve", "none.py:f"],
        ["curve", "net.py:gated", "--input", "3,-1"],
        ["plan", "net.py:gated", "--limit", "1 XB"],
        ["plan", "net.py:gated", "--html", "plan.txt"],
        ["fit", "net.py:gated", "--points", "0"],
        ["measure", "net.py:gated", "--device", "gpu 1"],
        ["measure", "net.py:gated", "--arg", "depth"],
        ["curve", "net.py:gated", "--loss", "hinge"],
        ["curve", "net.py:gated", "--plot", "a.doc"],
        ["curve", "net.py:gated", "--points", "1"],
        ["curve", "net.py:gated", "--profile", "none.json"],
        ["curve", "net.py:gated", "--loss", "none.py:f"],
        ["fit", "net.py:gated", "--max-batch", "4", "--multiple-of", "8"],
        ["fit", "net.py:gated", "--lengths", "normal:3"],
        ["fit", "net.py:gated", "--lengths", "none.txt"],
        ["fit", "net.py:gated", "--input", "2,8", "--dtype", "real"],
        ["fit", "net.py:gated", "--input", "2,8", "--dtype", "int64"],
        ["fit", "net.py:gated", "--input", "2,8", "--dtype", "int64", "--high", "0"],
        ["plan", "net.py:gated", "--input", "2,8", "--dtype", "int8", "--dtype", "int8"],
        ["measure", "net.py:gated", "--save", "a.json", "--profile", "net.py"],
        ["plan", "net.py:gated", "--profile", "net.py", "--engine", "chain"],
        ["run", "none.py"],
        ["run", "--limit", "1 XB", "net.py"],
    ]
    check = (
        "import sys; from rotor.commands.main import main; "
        f"assert [main(line) for line in {lines!r}] == [2] * {len(lines)}; "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == len(lines)


def test_a_tiny_limit_is_questioned(capsys):
    code, _, err = run(capsys, "curve", *CHAIN, "--limit", "700", "--points", 2)
    assert code == 2
    assert "rotor: --limit 700 is 700 bytes, less than 1 MiB: was 700MiB or 700GiB meant?" in err
    code, _, err = run(capsys, "curve", *CHAIN, "--limit", "2G", "--points", 2)
    assert (code, "less than 1 MiB" in err) == (0, False)


def test_a_plan_names_the_loss_and_has_no_inputs_of_its_own_for_it(capsys):
    code, out, _ = run(capsys, "plan", *GRAPH, "--loss", "mse", "--quiet")
    assert code == 0
    assert "for inputs 16x8 int64\n" in out
    assert "planned with the loss mse of the model's output, its targets are zeros" in out


def test_real_numbers_for_ids_are_told_how_ids_are_given(capsys):
    code, _, err = run(capsys, "curve", "net.py:gated", "--input", "16,8")
    assert code == 2
    assert err.rstrip().endswith("For ids give --dtype int64 --high 50")


def test_the_curve_of_a_graph(capsys):
    code, out, _ = run(capsys, "curve", *GRAPH, "--arg", "width=8", "--points", 3, "--limit", 99)
    assert code == 2
    rows = out.splitlines()
    assert rows[0].split() == [
        "memory",
        "of",
        "a",
        "step",
        "%",
        "of",
        "plain",
        "time",
        "x",
        "plain",
    ]
    assert rows[2].split()[:2] == ["99", "B"]
    assert rows[2].endswith("the limit, nothing fits")
    assert sum(row.endswith("  plain PyTorch") for row in rows) == 1
    assert sum("free on this machine" in row for row in rows) == 1
    assert "4 x the output" in rows[-2]
    assert rows[-1].startswith("At your 99 B nothing fits: the least is ")
    assert max(map(len, rows)) <= 80


def test_a_known_loss_is_planned_and_nothing_is_set_aside(capsys):
    unknown = data_of(capsys, "curve", *GRAPH, "--points", 3)
    assert unknown["set_aside_bytes"] == 4 * 16 * 8 * 16 * 4
    Path("loss.py").write_text("def total(output):\n    return output.square().sum()\n")
    for loss in ("cross_entropy", "mse", "sum", "loss.py:total"):
        known = data_of(capsys, "curve", *GRAPH, "--points", 3, "--loss", loss)
        assert (known["loss"], known["set_aside_bytes"]) == (loss, 0)
    least = known["minimum_bytes"]
    assert least < known["plain_bytes"]
    given = ("--points", 3, "--limit", least + 4096, "--loss", "loss.py:total")
    code, out, _ = run(capsys, "curve", *GRAPH, *given)
    assert code == 0
    sentence = out.splitlines()[-1]
    assert re.search(r"^At your .*: 1\.\d\d x the time as a graph; plain needs .*\.$", sentence)
    code, out, _ = run(capsys, "curve", *CHAIN, "--loss", "mse", "--limit", "1GiB")
    assert "plain PyTorch fits" in out.splitlines()[-1]
    assert "for an unknown loss" in run(capsys, "plan", *GRAPH, "--limit", "1GiB")[1]
    code, _, err = run(capsys, "curve", *GRAPH, "--loss", "hinge", "--quiet")
    assert (code, "--loss 'hinge': expected cross_entropy" in err) == (2, True)


def test_curves_are_thinned_and_marked():
    curve = Curve([10 * k for k in range(1, 101)], [1 / k for k in range(1, 101)])
    curve.marks = (("plain", 905), ("the limit", 7), ("plain PyTorch", 8))
    text = curve_text(curve, 5)
    rows = text.splitlines()[2:]
    assert len(rows) == 8
    assert rows[1].split() == ["8", "B", "-", "-", "-", "plain", "PyTorch"]
    assert "nothing fits" in rows[0]
    assert rows[-1].split()[-1] == "1.00"
    curve.marks = (("the limit", 10),)
    assert sum(row.startswith("10 B") for row in curve_text(curve, 5).splitlines()) == 1


def test_fitting(capsys):
    options = ("--limit", "200 KB", "--multiple-of", 16, "--points", 1)
    data = data_of(capsys, "fit", *CHAIN, *options)
    assert data["largest"]["batch"] % 16 == 0
    assert data["largest"]["measured_bytes"] <= 200_000
    assert (data["format"], data["command"]) == ("rotor.command", "fit")
    code, out, err = run(capsys, "fit", "net.py:chain", "--input", "2,32", *options, "--table")
    assert code == 0
    assert "rotor, largest" in out
    assert "least" in out
    assert err.splitlines()[1:] == ["rotor: trying batches"]
    assert re.search(
        r"^batch \d+ -> \d+ at \d\.\d\d of the throughput; fastest is \d+ \(", out, re.M
    )


def test_batches_of_an_unknown_loss_have_room_for_a_cross_entropy(capsys):
    command = ("fit", "net.py:scores", "--limit", "2 MB", "--points", 1, "--untimed")
    batches = {}
    for loss in ("cross_entropy", "sum", None):
        given = () if loss is None else ("--loss", loss)
        batches[loss] = data_of(capsys, *command, *given)["largest"]["batch"]
    assert batches[None] <= batches["cross_entropy"] < batches["sum"]
    assert "yours is unknown" in run(capsys, *command)[1]
    assert "unknown" not in run(capsys, *command, "--loss", "sum")[1]


def test_models_of_rotor_by_name_and_inputs_by_name(capsys):
    named = ("--input", "ids=4,8", "--input", "scale=4,8", "--dtype", "int64", "--dtype", "float32")
    data = data_of(capsys, "measure", "net.py:gated", *named, "--high", 50)
    assert data["inputs"] == ["ids=4,8 int64", "scale=4,8 float32"]
    data = data_of(capsys, "measure", "resnet20", "--input", "2x3x32x32")
    assert data["model"] == "resnet20"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("curve", "missing.py:f", "--input", 3), "no file missing.py"),
        (("curve", "net.py", "--input", 3), "names no callable"),
        (("curve", "net.py:none", "--input", 3), "no callable 'none'; it has Branches, Gated"),
        (("curve", "no.such:f", "--input", 3), "no module 'no.such'"),
        (("curve", "resnet17", "--input", 3), "rotor.models has no callable 'resnet17'"),
        (("measure", "net.py:number"), "gave int, expected an nn.Module"),
        (("measure", "net.py:fails"), "calling net.py:fails failed: KeyError: 'weights'"),
        (("measure", "net.py:odd"), "does not run on this input: AssertionError: odd"),
        (("measure", "net.py:chain"), "without a sample: give --input"),
        (("measure", "net.py:chain", "--arg", "depth"), "expected NAME=VALUE"),
        (("measure", "net.py:chain", "--dtype", "int8"), "give --input too"),
        (("measure", "net.py:chain", "--input", "2,33"), "does not run on this input"),
        (("measure", "net.py:chain", "--input", "2,-3"), "is no shape"),
        (("measure", "net.py:chain", "--input", "2", "--dtype", "real"), "no dtype 'real'"),
        (("measure", "net.py:gated", "--input", "2", "--dtype", "int64"), "--high"),
        (("measure", "net.py:chain", "--input", "2,32", "--device", "gpu 1"), "--device 'gpu 1'"),
        (("measure", "net.py:chain", "--input", "2,32", "--device", "cuda:9"), "0 CUDA devices"),
        (("measure", *CHAIN, "--save", "p.json"), "give --engine graph too"),
        (("measure", *CHAIN, "--profile", "p.json"), "p.json: No such file or directory"),
        (("curve", *CHAIN, "--profile", "other.json"), "rotor.profile"),
        (("plan", *CHAIN, "--profile", "p.json", "--engine", "chain"), "measures stages here"),
        (("measure", *GRAPH, "--save", "a.json", "--profile", "b.json"), "give one"),
        (("plan", *CHAIN, "--limit", "1 XB"), "--limit = '1 XB' cannot be read"),
        (("plan", *CHAIN, "--limit", "1 KB"), "the least limit for which one was found is"),
        (("plan", *CHAIN, "--html", "plan.txt"), "ends in .html"),
        (("plan", *CHAIN, "--out", "no/folder/plan.json"), "no folder no/folder"),
        (("curve", *CHAIN, "--json", "no/c.json"), "--json no/c.json: no folder no"),
        (("curve", *CHAIN, "--plot", "no/c.png"), "no folder no"),
        (("measure", *GRAPH, "--save", "no/p.json"), "no folder no"),
        (("plan", *CHAIN, "--trace", "no/t.json"), "--trace no/t.json: no folder no"),
        (("plan", *CHAIN, "--out", "."), "--out . is a folder"),
        (("plan", *CHAIN, "--out", "net.py"), "--out net.py is read by this command"),
        (("plan", *CHAIN, "--out", "s.json", "--trace", "./s.json"), "is the file of --trace too"),
        (("report", "old.json", "--trace", "old.json"), "is read by this command: name another"),
        (("run", "--json", "wrong.py", "wrong.py"), "--json wrong.py is read by this command"),
        (("info", "--json", "no/i.json"), "--json no/i.json: no folder no"),
        (("report", "old.json", "--html", "no/p.html"), "--html no/p.html: no folder no"),
        (("plan", *CHAIN, "--profile", "wrong.py"), "--profile wrong.py: malformed JSON"),
        (("measure", "net.py:exits"), "calling net.py:exits failed: SystemExit: no data"),
        (("measure", "wrong.py:f"), "running wrong.py failed: SyntaxError"),
        (("measure", "ends.py:f"), "running ends.py failed: SystemExit: 3"),
        (("curve", *CHAIN, "--plot", "curve.doc"), "ends in .png"),
        (("curve", *CHAIN, "--points", "1"), "expected 2 or more"),
        (("plan", *CHAIN, "--loss", "net.py:two"), "does not run on the model's output: TypeError"),
        (("plan", *CHAIN, "--loss", "net.py:same"), "gives a tensor of shape (64, 32) for"),
        (("curve", *CHAIN, "--loss", "net.py:chain"), "--loss net.py:chain does not run on the"),
        (("fit", *CHAIN, "--limit", "1 KB"), "does not fit in 1000 bytes"),
        (("fit", *CHAIN, "--limit", "900 TB"), "free: the answer is verified by a run"),
        (("report", "missing.json"), "missing.json: No such file or directory"),
        (("report", "net.py"), "net.py: malformed JSON"),
        (("report", "other.json"), "holds 'else', expected a file of"),
        (("report", "old.json"), "version 9 is unknown"),
    ],
)
def test_errors_of_the_user_are_one_line_and_exit_with_2(arguments, words, capsys):
    Path("other.json").write_text('{"format": "else"}', encoding="utf-8")
    Path("old.json").write_text('{"format": "rotor.program", "version": 9}', encoding="utf-8")
    Path("wrong.py").write_text("def f(:", encoding="utf-8")
    Path("ends.py").write_text("raise SystemExit(3)", encoding="utf-8")
    code, out, err = run(capsys, *arguments, "--quiet")
    assert (code, out) == (2, "")
    assert words in err
    assert len(err.splitlines()) == 1
    assert "Traceback" not in err


def test_what_may_not_be_written_is_said_before_anything_is_run(capsys, monkeypatch):
    monkeypatch.setattr("os.access", lambda *_: False)
    code, out, err = run(capsys, "plan", *CHAIN, "--html", "plan.html")
    assert (code, out) == (2, "")
    assert err == (
        "rotor: error: --html plan.html: no permission to write it: name a file somewhere else\n"
    )


@pytest.mark.parametrize("model", ["net.py:branches", "net.py:chain_of_values"])
def test_models_without_a_single_plan_have_figures_of_steps(capsys, model):
    for engine in ("auto", "dynamic"):
        given = (model, "--engine", engine, "--quiet")
        code, out, err = run(capsys, "curve", *given, "--points", 3, "--limit", "1MiB")
        assert code == 0
        assert "steps that were run" in out
        assert "Traceback" not in err
        code, out, _ = run(capsys, "plan", *given, "--limit", "1MiB", "--html", "steps.html")
        assert code == 0
        assert "a step, measured: " in out
        assert Path("steps.html").exists()
        code, out, _ = run(capsys, "measure", *given)
        assert (code, "a step, measured: " in out) == (0, True)
        code, out, err = run(capsys, "plan", *given, "--limit", "300")
        assert (code, out) == (2, "")
        assert "does not fit" in err.splitlines()[-1]
        code, _, err = run(capsys, "plan", *given, "--out", "p.json")
        assert (code, "leave --out out" in err) == (2, True)


def test_failures_exit_with_1_and_tracebacks_are_shown_on_demand(capsys, monkeypatch):
    def fails():
        raise RuntimeError("the probe is gone")

    monkeypatch.setattr("rotor.commands.environment.describe", fails)
    code, out, err = run(capsys, "info")
    assert (code, out) == (1, "")
    assert err == "rotor: failed: RuntimeError: the probe is gone (--debug shows where)\n"
    code, _, err = run(capsys, "info", "--debug")
    assert code == 1
    assert "Traceback" in err
    code, _, err = run(capsys, "report", "missing.json", "--debug")
    assert code == 2
    assert "Traceback" in err


def test_json_goes_to_a_file_beside_the_text(capsys):
    code, out, _ = run(capsys, "info", "--json", "info.json")
    assert code == 0
    assert "C compiler" in out
    assert json.loads(Path("info.json").read_text(encoding="utf-8"))["cpus"] >= 1
    assert {h["name"] for h in data_of(capsys, "heuristics")["heuristics"]} >= {"DTR", "LRU"}
    assert "quick" in str(data_of(capsys, "experiment", "list")["configurations"])


@pytest.mark.parametrize(
    "command", ["info", "measure", "curve", "plan", "fit", "report", "simulate", "experiment run"]
)
def test_help_has_the_options_all_commands_share(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run(capsys, *command.split(), "--help")
    assert code == 0
    for option in ("--json", "--quiet", "--debug"):
        assert option in out
    # Text is wrapped, examples are not.
    text, _, lines = out.partition("examples:")
    assert "%%" not in out
    assert max(map(len, text.partition("\n\n")[2].splitlines())) <= 80
    assert all(line.startswith("  rotor ") for line in lines.splitlines() if line)
    assert command == "info" or f"rotor {command} " in out.split("examples:")[1]


def test_a_logger_is_left_as_it_was(capsys):
    import logging

    logger = logging.getLogger("rotor")
    before = (list(logger.handlers), logger.level)
    run(capsys, "measure", *CHAIN)
    assert (list(logger.handlers), logger.level) == before


TRAIN = """
import sys
import torch
from net import Net

model = Net()
for _ in range(2):
    model(torch.randint(1000, (16, 32))).sum().backward()
    model.zero_grad()
print(sys.argv[1:])
"""
PAGE = Path(__file__).resolve().parents[2] / "docs/command-line.md"


def test_the_commands_of_the_page_run(capsys):
    text = PAGE.read_text(encoding="utf-8")
    code = re.search(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert code is not None
    Path("net.py").write_text(code[1], encoding="utf-8")
    Path("train.py").write_text(TRAIN, encoding="utf-8")
    lines = re.findall(r"^\$ rotor (.*)$", text, re.MULTILINE)
    assert {shlex.split(line)[0] for line in lines} >= {"info", "curve", "fit", "measure", "plan"}
    for line in lines:
        status, out, err = run(capsys, *shlex.split(line))
        assert status == 0, f"{line}: {err}"
        assert out or "--json" in line
    assert {"curve.png", "plan.html", "again.html", "there.json", "info.json"} <= set(os.listdir())
