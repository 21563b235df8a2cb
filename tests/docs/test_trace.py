"""Traces: the format, and that they say what the simulator and the meters say."""

from __future__ import annotations

import gzip
import json
import math
import random
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from algorithms.test_timeline import chain_step, graph_step
from graph.test_graph_render import random_graph
from hypothesis import given
from hypothesis import strategies as st
from random_chains import realistic_chain

import rotor
from rotor import algorithms, memory
from rotor.commands import main
from rotor.graph import Graph, Operation, simulate
from rotor.graph.chains import ChainProgram
from rotor.report.trace import write_plan_trace, write_program_trace

PLAN, MEASURED = 1, 2
FATES = {"kept", "checkpoint", "dropped", "recomputed"}
PHASES = ["forward", "loss", "backward"]


def ns(microseconds: float) -> int:
    exact = microseconds * 1000
    assert math.isclose(exact, round(exact), abs_tol=1e-3)
    return round(exact)


def check_event(event: dict) -> None:
    """What the format asks of an event."""
    assert isinstance(event["name"], str)
    assert isinstance(event["pid"], int)
    if event["ph"] == "M":
        key = "sort_index" if event["name"] == "process_sort_index" else "name"
        assert event["name"] in {"process_name", "process_sort_index", "thread_name"}
        assert set(event["args"]) == {key}
        return
    assert isinstance(event["ts"], float)
    assert event["ts"] >= 0
    if event["ph"] == "C":
        assert all(isinstance(value, int) for value in event["args"].values())
        assert len(event["args"]) == 1
        return
    assert event["ph"] == "X"
    assert isinstance(event["tid"], int)
    assert isinstance(event["dur"], float)
    assert event["dur"] >= 0
    assert isinstance(event["cat"], str)
    assert set(event) <= {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args", "cname"}


def checked(path: Path) -> dict:
    """A trace that was written, after every check that holds for all of them."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    trace = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert (trace["format"], trace["version"]) == ("rotor.trace", 1)
    assert trace["displayTimeUnit"] in {"ms", "ns"}
    events = trace["traceEvents"]
    for event in events:
        check_event(event)
    timed = [event for event in events if event["ph"] != "M"]
    assert events[: len(events) - len(timed)] == [e for e in events if e["ph"] == "M"]
    assert all(one["ts"] <= other["ts"] for one, other in pairwise(timed))
    processes = {e["pid"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    assert {event["pid"] for event in timed} == processes
    for process in processes:
        check_nesting(slices(trace, process))
    return trace


def check_nesting(found: list[dict]) -> None:
    """Each slice lies within those that are open, or behind them."""
    opened: list[int] = []
    for event in found:
        begin, end = ns(event["ts"]), ns(event["ts"]) + ns(event["dur"])
        while opened and opened[-1] <= begin:
            opened.pop()
        assert not opened or end <= opened[-1], event
        opened.append(end)


def slices(trace: dict, process: int = PLAN) -> list[dict]:
    return [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == process]


def runs_of(trace: dict) -> list[dict]:
    return [event for event in slices(trace) if "args" in event]


def counter(trace: dict, name: str, process: int = PLAN) -> list[tuple[int, int]]:
    return [
        (ns(event["ts"]), next(iter(event["args"].values())))
        for event in trace["traceEvents"]
        if event["ph"] == "C" and event["name"] == name and event["pid"] == process
    ]


def starts_of(costs: list[int]) -> list[int]:
    starts = [0]
    for cost in costs:
        starts.append(starts[-1] + max(cost, 1))
    return starts


@given(seed=st.integers(0, 10**9), size=st.integers(3, 30))
def test_programs(seed, size, tmp_path_factory):
    rng = random.Random(seed)
    graph = random_graph(rng, size)
    order = list(range(len(graph)))
    again = [k for k in order if graph.operations[k].phase == "forward"][:1]
    program = simulate(graph, order)
    if not graph.operations[again[0]].once:
        first = next((k for k in order if graph.operations[k].phase != "forward"), len(order))
        program = simulate(graph, [*order[:first], *again, *order[first:]])
    path = write_program_trace(program, tmp_path_factory.mktemp("t") / "t.json", 77)
    trace = checked(path)
    costs = [graph.operations[k].cost_ns for k in program.ops]
    starts = starts_of(costs)
    runs = runs_of(trace)
    assert [run["name"] for run in runs] == [graph.operations[k].name for k in program.ops]
    assert [ns(run["ts"]) for run in runs] == starts[:-1]
    assert [ns(run["dur"]) for run in runs] == [max(cost, 1) for cost in costs]
    peaks = program.timeline().peak_bytes.tolist()
    assert counter(trace, "live bytes") == list(zip(starts, [*peaks, peaks[-1]], strict=True))
    before = program.timeline().before_bytes.tolist()
    assert [run["args"]["live_before_bytes"] for run in runs] == before
    assert counter(trace, "limit") == [(0, 77), (starts[-1], 77)]
    phases = [event for event in slices(trace) if event["cat"] == "phase"]
    assert [event["name"] for event in phases] == sorted(
        {graph.operations[k].phase for k in program.ops}, key=PHASES.index
    )
    assert sum(ns(event["dur"]) for event in phases) == starts[-1]


def test_operations_stand_in_their_modules(tmp_path):
    modules = ["a.0", "a.0", "a.1", "", "a.1", "a.0"]
    phases = ["forward"] * 3 + ["loss"] + ["backward"] * 2
    graph = Graph(
        [8] * 6,
        None,
        [
            Operation(f"op{k}", 10, (k - 1,) if k else (), (k,), module=modules[k], phase=phases[k])
            for k in range(6)
        ],
    )
    trace = checked(write_program_trace(simulate(graph, range(6)), tmp_path / "t.json"))
    assert [(event["name"], event["cat"], ns(event["ts"])) for event in slices(trace)] == [
        ("forward", "phase", 0),
        ("a", "module", 0),
        ("0", "module", 0),
        ("op0", "forward,dropped", 0),
        ("op1", "forward,dropped", 10),
        ("1", "module", 20),
        ("op2", "forward,kept", 20),
        ("loss", "phase", 30),
        ("op3", "loss", 30),
        ("backward", "phase", 40),
        ("a", "module", 40),
        ("1", "module", 40),
        ("op4", "backward", 40),
        ("0", "module", 50),
        ("op5", "backward", 50),
    ]
    assert "limit_bytes" not in trace["otherData"]
    assert not counter(trace, "limit")


@given(seed=st.integers(0, 10**9))
def test_schedules(seed, tmp_path_factory):
    rng = random.Random(seed)
    chain = realistic_chain(rng, rng.randint(2, 8))
    least = algorithms.Persistent().curve(chain).minimum_bytes
    sequence = algorithms.Persistent().solve(chain, least)
    path = write_program_trace(
        ChainProgram(sequence), tmp_path_factory.mktemp("t") / "t.json", least
    )
    trace = checked(path)
    runs = runs_of(trace)
    assert [run["name"] for run in runs] == [str(op) for op in sequence]
    levels = (sequence.timeline.peak_bytes - chain.x_bytes[0]).tolist()
    assert [level for _, level in counter(trace, "live bytes")] == [*levels, levels[-1]]
    fates = [run["cat"].partition(",")[2] for run in runs if run["cat"].startswith("forward")]
    assert set(fates) <= FATES
    assert fates.count("recomputed") == len(fates) - len(chain)
    for op, run in zip(sequence, runs, strict=True):
        kept = chain.xbar_bytes if op.kind == "Fe" else chain.x_bytes[1:]
        if op.kind in ("Fe", "Fck", "Fn"):
            first = {"Fe": "kept", "Fck": "checkpoint", "Fn": "dropped"}[op.kind]
            fate = "recomputed" if run["args"]["run"] > 1 else first
            assert run["cat"] == f"forward,{fate}"
            assert run["args"]["makes_bytes"] == kept[op.stage]
    losses = sum(run["cat"] == "loss" for run in runs)
    spent = sum(ns(run["dur"]) for run in runs) - losses
    assert spent == pytest.approx(sequence.makespan * 1e9, abs=len(runs))


def check_step(trace: dict, chk, limit: int) -> None:
    """A plan and its metered step."""
    plan = chk.plan
    predicted, measured = plan.predicted_timeline, plan.measured_timeline
    levels = [level for _, level in counter(trace, "live bytes")]
    assert levels == [*predicted.live_bytes.tolist(), predicted.live_bytes[-1]]
    assert max(levels) == chk.get_expected_memory()
    assert counter(trace, "limit")[0] == (0, limit)
    seen = counter(trace, "live bytes", MEASURED)
    assert [level for _, level in seen] == measured.live_bytes.tolist()
    assert seen[-1][0] == round(measured.seconds[-1] * 1e9)
    beside = counter(trace, "live bytes, measured")
    assert [level for _, level in beside] == measured.live_bytes.tolist()
    assert beside[-1][0] == pytest.approx(predicted.seconds[-1] * 1e9, abs=1)
    names = [event["name"] for event in slices(trace, MEASURED)]
    assert names == [name for name in PHASES if name in names]
    assert {"forward", "backward"} <= set(names)
    assert trace["otherData"] == {
        "limit_bytes": limit,
        "measured_bytes": plan.measured_bytes,
        "device": "cpu",
        "predicted_bytes": chk.get_expected_memory(),
        "own_bytes": plan.executor_bytes,
    }
    assert max(level for _, level in seen) == plan.measured_bytes


def test_the_plan_of_a_chain(tmp_path):
    chk, limit = chain_step()
    assert "limit" in chk.report(tmp_path / "trace.json")
    trace = checked(tmp_path / "trace.json")
    check_step(trace, chk, limit)
    assert "forward,recomputed" in {event["cat"] for event in runs_of(trace)}
    stages = {event["args"]["stage"] for event in runs_of(trace) if "stage" in event["args"]}
    assert stages == set(chk.names)
    chk.report(tmp_path / "trace.json.gz")
    assert checked(tmp_path / "trace.json.gz") == trace
    again = tmp_path / "again.json.gz"
    chk.report(again)
    assert again.read_bytes() == (tmp_path / "trace.json.gz").read_bytes()


def test_the_plan_of_a_graph(tmp_path):
    chk, limit = graph_step()
    chk.report(tmp_path / "trace.json")
    trace = checked(tmp_path / "trace.json")
    check_step(trace, chk, limit)
    modules = {event["name"] for event in slices(trace) if event["cat"] == "module"}
    assert modules
    assert "forward,recomputed" in {event["cat"] for event in runs_of(trace)}


def test_a_step_that_nobody_predicted(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(4)])
    chk = rotor.Checkpointable(model, mem_limit="1 MB", engine="dynamic")
    x = torch.randn(16, 32)
    for _ in range(2):
        chk(x).sum().backward()
    chk.report(tmp_path / "plan.html")
    chk.report(tmp_path / "trace.json")
    trace = checked(tmp_path / "trace.json")
    plan = chk.plan
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert '"program":[]' in page
    assert f'"measured":{plan.measured_bytes}' in page
    assert {event["pid"] for event in trace["traceEvents"]} == {MEASURED}
    seen = counter(trace, "live bytes", MEASURED)
    assert max(level for _, level in seen) == plan.measured_bytes
    assert counter(trace, "limit", MEASURED)[0] == (0, 1_000_000)
    plan.measured_timeline = None
    with pytest.raises(ValueError, match="nothing to trace: no run is predicted"):
        write_plan_trace(plan, tmp_path / "none.json")
    assert not (tmp_path / "none.json").exists()


def test_refusals(tmp_path):
    chk, _ = chain_step()
    with pytest.raises(ValueError, match=r"as a trace, to a \.json or \.json\.gz file, not plan"):
        chk.report(tmp_path / "plan.txt")
    with pytest.raises(ValueError, match="snapshot=True saves a file beside the report"):
        chk.report(snapshot=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_snapshots_are_of_cuda(tmp_path):
    chk, _ = chain_step()
    with pytest.raises(RuntimeError, match=r"PyTorch sees no CUDA device here: on the CPU, report"):
        chk.report(tmp_path / "plan.html", snapshot=True)
    entered = memory.record_history(tmp_path / "step.pickle")
    with pytest.raises(RuntimeError, match="snapshots come from CUDA's allocator"), entered:
        pytest.fail("nothing is recorded")
    assert list(tmp_path.iterdir()) == []


def test_snapshots_stand_beside_the_page(tmp_path, monkeypatch):
    """What is called where there is CUDA."""
    calls = []
    chk, _ = chain_step()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(
        torch.cuda.memory,
        "_record_memory_history",
        lambda enabled="all", **options: calls.append((enabled, options)),
    )
    monkeypatch.setattr(
        torch.cuda.memory, "_dump_snapshot", lambda name: Path(name).write_bytes(b"snapshot")
    )
    with memory.record_history():
        chk.report(tmp_path / "plan.html", snapshot=True)
    assert {path.name for path in tmp_path.iterdir()} == {"plan.html", "plan.pickle"}
    with pytest.raises(MemoryError), memory.record_history(tmp_path / "step.pickle"):
        raise MemoryError
    assert (tmp_path / "step.pickle").read_bytes() == b"snapshot"
    assert [enabled for enabled, _ in calls] == ["all", None] * 2


def test_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    chain = realistic_chain(random.Random(1), 5)
    sequence = algorithms.NoCheckpoint().solve(chain, "1 TB")
    sequence.to_json("plan.json")
    graph = random_graph(random.Random(1))
    program = simulate(graph, range(len(graph)))
    program.to_json("program.json")
    for name, operations in (("plan", len(sequence)), ("program", len(graph))):
        assert main.main(["report", f"{name}.json", "--trace", "trace.json"]) == 0
        assert "trace.json has the trace" in capsys.readouterr().err
        assert len(runs_of(checked(Path("trace.json")))) == operations
    chain.to_json("chain.json")
    graph.save("graph.json")
    for name in ("chain", "graph"):
        assert main.main(["report", f"{name}.json", "--trace", "other.json"]) == 2
        assert f"--trace is for plans, and this is a {name}" in capsys.readouterr().err
    assert main.main(["report", "plan.json", "--trace", "trace.txt"]) == 2
    assert "expected a name that ends in .json or .json.gz" in capsys.readouterr().err
    assert not Path("other.json").exists()
    factory = ["resnet18", "--input", "2,3,64,64", "--limit", "1GiB", "--quiet"]
    assert main.main(["plan", *factory, "--trace", "step.json.gz"]) == 0
    assert runs_of(checked(Path("step.json.gz")))
