"""Graphs and programs: files, validity, prices, against the plain-Python oracle."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import program as oracle
from random_graphs import GRAPHS, SHARED, graphs, training_graph

from rotor.errors import InvalidSequenceError
from rotor.graph import Graph, Operation, Program, Storage, lower_bound, simulate

FAULTS = {
    "number": "no operation of this number",
    "only": "may run once only",
    "phase": "after one of a later phase",
    "order": "in the order of the graph",
    "input": "was not made before it",
    "every": "before every operation of the graph has run",
    "tape": "a tape is read after something that it holds was made again",
}


def chain(count: int = 3, **fields: object) -> Graph:
    operations = [
        Operation(f"op{k}", 10, (k - 1,) if k else (), (k,), **fields) for k in range(count)
    ]
    return Graph([100] * count, None, operations)


@settings(max_examples=600, deadline=None)
@given(st.one_of(graphs(), graphs(plain=False)), st.data())
def test_any_sequence_is_judged_as_by_the_oracle(graph, data):
    size = len(graph)
    ops = list(range(size))
    for _ in range(data.draw(st.integers(0, 4))):
        kind = data.draw(st.sampled_from(["insert", "remove", "swap"]))
        at = data.draw(st.integers(0, max(len(ops) - 1, 0)))
        if kind == "insert":
            ops.insert(at, data.draw(st.integers(0, size - 1)))
        elif ops and kind == "remove":
            del ops[at]
        elif ops:
            ops[at - 1], ops[at] = ops[at], ops[at - 1]
    wrong = oracle.fault(graph, ops)
    if wrong is not None:
        with pytest.raises(InvalidSequenceError, match=FAULTS[wrong[0]]) as caught:
            simulate(graph, ops)
        assert caught.value.position == wrong[1]
        return
    program = simulate(graph, ops)
    time_ns, before, peaks = oracle.price(graph, ops)
    assert program.time_ns == time_ns
    assert program.peak_bytes == max(peaks)
    assert program.timeline().before_bytes.tolist() == before
    assert program.timeline().peak_bytes.tolist() == peaks
    assert program.peak_bytes >= lower_bound(graph)
    assert program.runs.tolist() == [ops.count(k) for k in range(size)]


def test_a_program_by_hand():
    graph = Graph(
        [100, 50, 10],
        [False, False, True],
        [
            Operation("a", 7, (), (0,)),
            Operation("b", 5, (0,), (1,), workspace_bytes=30),
            Operation("c", 3, (1,), (2,), phase="backward"),
        ],
    )
    program = simulate(graph, [0, 1, 0, 1, 2])
    assert program.makespan == pytest.approx(27e-9)
    assert program.slowdown == 27 / 15
    assert program.timeline().before_bytes.tolist() == [0, 100, 0, 100, 50]
    assert program.timeline().peak_bytes.tolist() == [100, 180, 100, 180, 60]
    assert program.peak_bytes == 180
    assert len(program) == 5
    assert repr(program) == "<Program of 5 runs of 3 operations, 2.7e-08 s, 180 bytes>"
    assert repr(graph) == "<Graph of 3 operations and 3 storages, 1.5e-08 s>"
    assert program == simulate(graph, np.array([0, 1, 0, 1, 2]))
    assert hash(program) == hash(simulate(graph, [0, 1, 0, 1, 2]))
    assert program != simulate(graph, [0, 1, 2])
    assert program != 3
    assert graph.producers == (0, 1, 2)


@pytest.mark.parametrize("ops", [[0.5, 1, 2], "abc", [[0, 1, 2]], [None]])
def test_programs_are_lists_of_whole_numbers(ops):
    with pytest.raises(TypeError, match="numbers of operations"):
        simulate(chain(), ops)


def test_numbers_beyond_32_bits_and_empty_programs():
    with pytest.raises(ValueError, match="32 bits"):
        simulate(chain(), [1 << 40])
    with pytest.raises(InvalidSequenceError, match="every operation"):
        simulate(chain(), [])
    with pytest.raises(InvalidSequenceError, match="no operation of this number"):
        simulate(chain(), [-1])


def test_json_keeps_everything(tmp_path):
    graph = Graph(
        [Storage(5, True, {"dtype": "f32"}), Storage(0)],
        None,
        [
            Operation("r", 1, (), (0,), 2, "forward", True, False, "net.0", {"target": "mm"}),
            Operation("l", 1, (0,), (), 0, "loss"),
            Operation("b", 1, (0,), (1,), 0, "backward", once=True),
        ],
        name="small",
        extra={"device": "cpu"},
    )
    assert Graph.from_json(graph.to_json()) == graph
    assert Graph.from_json(graph.to_json()).to_dict() == graph.to_dict()
    path = tmp_path / "graph.json"
    graph.save(path)
    assert Graph.load(path) == graph
    assert pickle.loads(pickle.dumps(graph)) == graph
    assert graph.to_dict()["device"] == "cpu"
    assert graph.to_dict()["ops"][0]["target"] == "mm"
    program = simulate(graph, [0, 1, 2])
    again = Program.from_json(program.to_json(tmp_path / "program.json"))
    assert again == program
    assert again.graph == graph
    assert Program.from_json(tmp_path / "program.json").peak_bytes == program.peak_bytes


@settings(max_examples=50, deadline=None)
@given(graphs())
def test_g_keeps_what_it_can_say(graph):
    text = graph.to_g()
    again = Graph.from_g(text, "again")
    assert again.to_g() == text
    assert [s.bytes for s in again.storages] == [s.bytes for s in graph.storages]
    assert [s.pinned for s in again.storages] == [s.pinned for s in graph.storages]
    assert [op.inputs for op in again.operations] == [op.inputs for op in graph.operations]
    assert [op.cost_ns for op in again.operations] == [op.cost_ns for op in graph.operations]


def test_g_files(tmp_path):
    path = tmp_path / "tiny.g"
    path.write_text("2 1\n8 1\n1.6 4 0 0 1 0\n2.4 0 1 1 0 0\n")
    graph = Graph.load(path)
    assert graph.name == "tiny"
    assert [op.cost_ns for op in graph.operations] == [2, 2]
    assert [op.phase for op in graph.operations] == ["forward", "backward"]
    assert graph.to_g(tmp_path / "again.g") == (tmp_path / "again.g").read_text()


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "empty file"),
        ("2\n", "n_ops and n_storages"),
        ("1 1\n8 1\n", "expected 3 lines"),
        ("1 1\n8\n1 0 0 0 1 0\n", "line 2: expected bytes and pinned"),
        ("1 1\n8 2\n1 0 0 0 1 0\n", "line 2: expected bytes and pinned"),
        ("1 1\nx 1\n1 0 0 0 1 0\n", "line 2: expected whole numbers"),
        ("1 1\n8 1\nx 0 0 0 1 0\n", "'x' is no cost"),
        ("1 1\n8 1\nnan 0 0 0 1 0\n", "out of range"),
        ("1 1\n8 1\n-1 0 0 0 1 0\n", "out of range"),
        ("1 1\n8 1\n1 0 0 0 2 0\n", "line 3: expected cost_ns"),
        ("1 1\n8 1\n1 0 0 5 1 0\n", "line 3: expected cost_ns"),
        ("1 1\n8 1\n1 0 7 0 1 0\n", "line 3: expected cost_ns"),
        ("1 1\n8 1\n1 0 0 -1 1 0\n", "line 3: expected cost_ns"),
        ("1 1\n8 1\n1\n", "line 3: expected cost_ns"),
        ("1 1\n8 1\n1 0 0 0 0\n", "no operation makes storage 0"),
    ],
)
def test_malformed_g_files(tmp_path, text, message):
    path = tmp_path / "bad.g"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Graph.load(path)


def changed(**fields: object) -> str:
    data = chain().to_dict()
    data.update(fields)
    return json.dumps(data)


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "malformed JSON"),
        ("[]", "expected an object"),
        (changed(format="rotor.chain"), "expected JSON of format 'rotor.graph'"),
        (changed(version=3), "version 3 is unknown; this rotor reads 1 and 2"),
        (changed(ops=3), "field 'ops', a list"),
        (changed(ops=[]), "at least one operation"),
        (changed(storages=[3]), "field 'storages', a list"),
        (changed(storages=[{}]), "storage 0 needs the field 'bytes'"),
        (changed(storages=[{"bytes": 1.5}]), "'bytes' is 1.5"),
        (changed(storages=[{"bytes": True}]), "'bytes' is True"),
        (changed(storages=[{"bytes": 1, "pinned": 1}]), "'pinned' is 1"),
        (changed(ops=[{"name": "a"}]), "operation 0 needs the field 'cost_ns'"),
    ],
)
def test_malformed_json(text, message):
    with pytest.raises(ValueError, match=message):
        Graph.from_json(text)


@pytest.mark.parametrize(
    "storages, operations, message",
    [
        ([1], [Operation("a", -1, (), (0,))], "cost_ns of operation 0"),
        ([1], [Operation("a", 1 << 50, (), (0,))], "cost_ns of operation 0"),
        ([-1], [Operation("a", 1, (), (0,))], "bytes of storage 0 = -1"),
        ([1], [Operation("a", 1, (), (0,), -3)], "workspace_bytes of operation 0"),
        ([1], [Operation("a", 1, (), (0,), phase="sideways")], "'sideways', expected one of"),
        ([1], [Operation("a", 1, (), (1,))], "names storage 1, there are 1"),
        ([1], [Operation("a", 1, (0,), (0,))], "reads storage 0 before"),
        ([1], [Operation("a", 1, (), (0, 0))], "makes storage 0, which 0 made"),
        ([1, 2], [Operation("a", 1, (), (0,))], "no operation makes storage 1"),
    ],
)
def test_impossible_graphs(storages, operations, message):
    with pytest.raises(ValueError, match=message):
        Graph(storages, None, operations)


def test_operations_come_in_the_order_of_phases():
    operations = [Operation("b", 1, (), (0,), 0, "backward"), Operation("f", 1, (0,), ())]
    with pytest.raises(ValueError, match="expected forward, loss, backward in order"):
        Graph([1], None, operations)


def test_types_of_graphs():
    with pytest.raises(TypeError, match="must be a whole number"):
        Graph([1.5], None, [Operation("a", 1, (), (0,))])
    with pytest.raises(TypeError, match="must be a whole number"):
        Graph([1], None, [Operation("a", 1, (), ("x",))])
    with pytest.raises(ValueError, match="pinned has 2 entries, expected 1"):
        Graph([1], [True, False], [Operation("a", 1, (), (0,))])
    assert Graph([np.int64(1)], [True], [Operation("a", 1, (), (0,))]).storages[0].pinned


def test_malformed_programs():
    good = json.loads(simulate(chain(), [0, 1, 2]).to_json())
    for field, value, message in (
        ("ops", None, "needs the fields"),
        ("ops", [0.5], "malformed program"),
        ("version", 9, "version 9"),
        ("ops", [0, 1], "every operation"),
    ):
        with pytest.raises(ValueError, match=message):
            Program.from_dict({**good, field: value})


def test_lower_bound():
    graph = Graph(
        [100, 50, 10, 7],
        [False, True, True, False],
        [
            Operation("a", 1, (), (0, 1)),
            Operation("b", 1, (0,), (2,), workspace_bytes=4, phase="backward"),
            Operation("c", 1, (2,), (3,), phase="backward"),
        ],
    )
    assert lower_bound(graph) == 100 + 50 + 10 + 4
    assert lower_bound(training_graph(1, 6)) <= simulate(training_graph(1, 6), range(12)).peak_bytes


@pytest.mark.parametrize("name", SHARED)
def test_shared_graphs(name):
    graph = Graph.load(GRAPHS / f"{name}.g")
    program = simulate(graph, range(len(graph)))
    assert program.slowdown == 1.0
    assert lower_bound(graph) < program.peak_bytes
    assert Graph.from_json(graph.to_json()) == graph
