"""Drawing graphs: what becomes of storages, merged operations, DOT, pages."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rotor.graph import Graph, Operation, Program, Storage, plan, render, simulate, summarise
from rotor.graph.contraction import block_of, blocks, contract, forward_part, places
from rotor.report.drawing import FORMATS, to_dot

MODULES = ("", "stem", "layers.0.first", "layers.0.second", "layers.1.first", "head")


def random_graph(rng: random.Random, most: int = 14) -> Graph:
    """Forward, loss and backward with random reads, pins and modules."""
    storages: list[Storage] = []
    operations: list[Operation] = []
    forward = rng.randint(1, most)
    for phase, count in (("forward", forward), ("loss", 1), ("backward", rng.randint(1, most))):
        for _ in range(count):
            known = range(len(storages))
            inputs = tuple(sorted(rng.sample(known, min(len(known), rng.randint(0, 3)))))
            made = range(len(storages), len(storages) + rng.randint(1, 2))
            storages += [Storage(rng.randint(0, 64), rng.random() < 0.1) for _ in made]
            operations.append(
                Operation(
                    name=f"{phase}{len(operations)}",
                    cost_ns=rng.randint(0, 50),
                    inputs=inputs,
                    outputs=tuple(made),
                    workspace_bytes=rng.choice([0, 0, rng.randint(0, 64)]),
                    phase=phase,
                    random=rng.random() < 0.1,
                    once=rng.random() < 0.1,
                    module=rng.choice(MODULES),
                )
            )
    return Graph(storages, None, operations, name="random")


def small_graph() -> Graph:
    """Three layers: the activations 0..2 are read by the backward, 3 is what the loss makes."""
    return Graph(
        [Storage(8), Storage(8), Storage(8), Storage(4), Storage(8), Storage(2, True)],
        None,
        [
            Operation("first", 10, (), (0,), module="layers.0"),
            Operation("second", 20, (0,), (1,), module="layers.1"),
            Operation("third", 5, (1,), (2,), module="layers.1.act"),
            Operation("loss", 1, (2,), (3,), phase="loss"),
            Operation("third_backward", 5, (3, 1), (4,), phase="backward", module="layers.1.act"),
            Operation("first_backward", 9, (4, 0), (5,), phase="backward", module="layers.0"),
        ],
        name="small <graph>",
    )


# -- summaries


def test_fates_without_recomputation():
    graph = small_graph()
    summary = summarise(simulate(graph, range(6)))
    assert [storage.fate for storage in summary.storages] == [
        *("kept", "kept", "kept", "backward", "backward", "backward")
    ]
    assert summary.operations == ("kept", "kept", "kept", "loss", "backward", "backward")
    assert (summary.kept_bytes, summary.dropped_bytes, summary.recomputed_bytes) == (24, 0, 0)
    assert summary.boundary == 3
    assert summary.again == ()


def test_fates_with_recomputation():
    graph = small_graph()
    summary = summarise(simulate(graph, [0, 1, 2, 3, 0, 1, 4, 5]))
    fates = [storage.fate for storage in summary.storages]
    assert fates == ["recomputed", "recomputed", "kept", "backward", "backward", "backward"]
    assert [storage.makings for storage in summary.storages] == [2, 2, 1, 1, 1, 1]
    assert [storage.maker for storage in summary.storages] == list(range(6))
    assert [(entry.operation, entry.runs, entry.extra_ns) for entry in summary.again] == [
        (1, 2, 20),
        (0, 2, 10),
    ]
    assert summary.extra_ns == 30
    assert summary.operations[:3] == ("recomputed", "recomputed", "kept")


def test_what_nobody_needs_again_is_dropped():
    graph = Graph(
        [4, 4, 4],
        [False, False, True],
        [
            Operation("a", 1, (), (0,)),
            Operation("b", 1, (0,), (1,)),
            Operation("c", 1, (1,), (2,), phase="backward"),
        ],
    )
    summary = summarise(simulate(graph, range(3)))
    assert [storage.fate for storage in summary.storages] == ["dropped", "kept", "backward"]
    assert summary.operations == ("dropped", "kept", "backward")
    with pytest.raises(ValueError, match="no fate is named 'lost', expected one of kept, dropped"):
        summary.bytes_of("lost")


@given(st.integers(0, 10**9))
def test_summaries_agree_with_the_program(seed):
    graph = random_graph(random.Random(seed))
    program = simulate(graph, range(len(graph)))
    summary = summarise(program)
    assert "recomputed" not in {storage.fate for storage in summary.storages}
    total = sum(storage.bytes for storage in graph.storages)
    assert total == sum(summary.bytes_of(f) for f in ("kept", "dropped", "recomputed", "backward"))
    # What lies there when the forward ends is what the loss finds.
    live = program.timeline().before_bytes[summary.boundary]
    assert summary.kept_bytes == live


@given(st.integers(0, 10**9))
def test_planned_programs_are_summarised(seed):
    graph = random_graph(random.Random(seed))
    least = Program(graph, range(len(graph))).peak_bytes
    program = plan(graph, least, effort="fast")
    summary = summarise(program)
    assert sum(program.runs > 1) == len(summary.again)
    assert summary.extra_ns == program.time_ns - sum(op.cost_ns for op in graph.operations)
    for fate, runs in zip(summary.operations, program.runs, strict=True):
        assert (fate == "recomputed") == (runs > 1)


# -- contraction


@pytest.mark.parametrize(
    ("module", "block"),
    [
        ("", ""),
        ("stem", "stem"),
        ("layers.3.attention.query", "layers.3"),
        ("layer1.0.conv1", "layer1.0"),
        ("features.denseblock1.denselayer2.conv", "features.denseblock1.denselayer2"),
        ("encoder.norm", "encoder"),
    ],
)
def test_blocks_of_modules(module, block):
    assert block_of(module) == block


@given(st.integers(0, 10**9), st.data())
def test_contracted_graphs_cost_the_same_and_need_no_less(seed, data):
    graph = random_graph(random.Random(seed))
    groups: list[list[int]] = []
    for index, op in enumerate(graph.operations):
        same = groups and graph.operations[groups[-1][0]].phase == op.phase
        if same and data.draw(st.booleans()):
            groups[-1].append(index)
        else:
            groups.append([index])
    small = contract(graph, groups)
    assert [op.extra["operations"] for op in small.operations] == groups
    whole = simulate(graph, range(len(graph)))
    merged = simulate(small, range(len(small)))
    assert merged.time_ns == whole.time_ns
    assert merged.peak_bytes >= whole.peak_bytes
    assert sum(op.cost_ns for op in small.operations if op.phase == "loss") == sum(
        op.cost_ns for op in graph.operations if op.phase == "loss"
    )


@given(st.integers(0, 10**9))
def test_groups_of_one_change_nothing(seed):
    graph = random_graph(random.Random(seed))
    same = contract(graph, [[index] for index in range(len(graph))])
    names = ("name", "cost_ns", "phase", "inputs", "outputs", "workspace_bytes", "random", "once")
    for one, other in zip(graph.operations, same.operations, strict=True):
        assert [getattr(one, name) for name in names] == [getattr(other, name) for name in names]
    assert [s.bytes for s in graph.storages] == [s.bytes for s in same.storages]


@given(seed=st.integers(0, 10**9))
def test_cuts_are_of_one_phase(seed):
    graph = random_graph(random.Random(seed), 30)
    groups = blocks(graph)
    assert [index for group in groups for index in group] == list(range(len(graph)))
    for group in groups:
        assert len({graph.operations[index].phase for index in group}) == 1
    assert len(contract(graph, groups)) == len(groups)


def test_blocks_take_what_lies_between():
    modules = ["", "a.0.x", "", "a.0.y", "", "a.1.x", ""]
    graph = Graph(
        [1] * len(modules),
        None,
        [Operation(f"op{k}", 1, (), (k,), module=m) for k, m in enumerate(modules)],
    )
    assert blocks(graph) == [[0], [1, 2, 3], [4], [5], [6]]
    assert [op.module for op in contract(graph, blocks(graph)).operations] == [
        *("", "a.0", "", "a.1.x", "")
    ]


def test_places_are_what_neighbours_have_in_common():
    modules = ["", "a.0.x", "", "a.0.y", "", "a.1.x", ""]
    phases = ["forward"] * 5 + ["backward"] * 2
    graph = Graph(
        [1] * len(modules),
        None,
        [
            Operation(f"op{k}", 1, (), (k,), module=m, phase=phase)
            for k, (m, phase) in enumerate(zip(modules, phases, strict=True))
        ],
    )
    assert places(graph) == ["", "a.0.x", "a.0", "a.0.y", "", "a.1.x", ""]


def test_contraction_refuses_what_is_no_cut():
    graph = small_graph()
    with pytest.raises(ValueError, match="must be all operations of the graph, in order"):
        contract(graph, [[0, 1], [3, 2], [4, 5]])
    with pytest.raises(ValueError, match="operations of several phases: third"):
        contract(graph, [[0, 1], [2, 3], [4, 5]])


def test_forward_part():
    part = forward_part(small_graph())
    assert [op.name for op in part.operations] == ["first", "second", "third"]
    assert [storage.bytes for storage in part.storages] == [8, 8, 8]
    with pytest.raises(ValueError, match="at least one operation"):
        forward_part(Graph([], None, [Operation("x", 1, (), (), phase="backward")]))


# -- DOT


def test_dot_groups_by_phase_and_module():
    source = to_dot(small_graph())
    assert source.startswith("digraph rotor {")
    assert source.endswith("}\n")
    assert source.count("{") == source.count("}")
    assert 'label="small <graph>"' in source
    assert source.count('label="layers"') == 2  # in the forward and in the backward
    assert 'label="first\\n10.0 ns, 8 B"' in source
    assert 'n0 -> n1 [label="8 B", tooltip="first to second: 8 B"' in source
    assert "n0 -> n1 " in source
    assert "n0 -> n5 " in source
    assert "n1 -> n0" not in source
    assert "legend" not in source


def test_dot_of_a_program_tells_what_runs_again():
    graph = small_graph()
    program = simulate(graph, [0, 1, 2, 3, 0, 1, 4, 5])
    source = to_dot(graph, program=program)
    assert source.count("runs 2 times") == 4  # in the label and in the tooltip of two operations
    assert "recomputed: 8 B" in source
    assert "legend" in source
    assert source == to_dot(graph, program=program)


def test_dot_by_modules():
    graph = small_graph()
    program = simulate(graph, [0, 1, 2, 3, 0, 1, 4, 5])
    source = to_dot(graph, program=program, level="modules")
    assert (
        'label="layers.1\\n2 operations\\n25.0 ns, 16 B\\n1 of them run again, +20.0 ns"' in source
    )
    assert len(re.findall(r"^ +n\d+ \[", source, re.MULTILINE)) == len(blocks(graph))


def test_blocks_run_from_left_to_right_with_the_backward_below():
    """One box for each block and phase; operations without a module join a neighbour."""
    last = 5
    layers = [Operation(f"f{k}", 1, (k - 1,) if k else (), (k,), module=f"h.{k}") for k in range(6)]
    loss = Operation("loss", 1, (last,), (6,), phase="loss")
    backward, made = [], 7
    for k in reversed(range(6)):
        module = f"h.{k}"
        inputs = (made - 1, k)
        backward.append(Operation(f"b{k}", 1, inputs, (made,), phase="backward", module=module))
        backward.append(Operation(f"add{k}", 1, (made,), (made + 1,), phase="backward"))
        made += 2
    graph = Graph([1] * made, None, [*layers, loss, *backward])
    source = to_dot(graph, level="modules")
    assert 'rankdir="LR"' in source
    boxes = re.findall(r'^ +n(\d+) \[label="([^"\\]+)', source, re.MULTILINE)
    assert [name for _, name in boxes] == [
        *(f"h.{k}" for k in range(6)),
        "loss",
        *(f"h.{k}" for k in reversed(range(6))),
    ]
    for k in range(6):
        assert f"{{ rank=same; n{k}; n{12 - k}; }}" in source
    assert re.search(r'n8 -> n7 \[.*dir="back"', source), "the backward runs to the left"
    assert re.search(r'n0 -> n12 \[.*constraint="false"', source)
    assert 'rankdir="TB"' in to_dot(graph, level="operations")


def test_large_graphs_are_drawn_by_modules():
    many = 500
    operations = [
        Operation(f"op{k}", 1, (k - 1,) if k else (), (k,), module=f"layers.{k // 50}")
        for k in range(many)
    ]
    named = to_dot(Graph([1] * many, None, operations))
    assert len(re.findall(r"^ +n\d+ \[", named, re.MULTILINE)) == 10
    everything = to_dot(Graph([1] * many, None, operations), level="operations")
    assert len(re.findall(r"^ +n\d+ \[", everything, re.MULTILINE)) == many
    assert "n0 -> n1 [tooltip=" in everything
    assert 'n0 -> n1 [label="1 B"' in named


def test_names_are_escaped():
    graph = Graph([1], None, [Operation('a "b"\\ <i>', 1, (), (0,), module='m"x</script>')])
    assert '"a \\"b\\"\\\\ <i>' in to_dot(graph)


# -- files


def figures_of(page: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page)
    assert found is not None
    return json.loads(found[1])


def test_pages_hold_everything(tmp_path):
    graph = small_graph()
    program = simulate(graph, [0, 1, 2, 3, 0, 1, 4, 5])
    path = render(
        graph, tmp_path / "g.html", program=program, limit_bytes=99, measured_bytes=[7] * 8
    )
    page = path.read_text(encoding="utf-8")
    data = figures_of(page)
    assert [op[0] for op in data["ops"]] == [op.name for op in graph.operations]
    assert [op[8] for op in data["ops"]] == program.runs.tolist()
    assert [storage[3] for storage in data["storages"]][:2] == ["recomputed", "recomputed"]
    assert data["program"] == program.ops.tolist()
    assert data["peak"] == program.timeline().peak_bytes.tolist()
    assert data["limit"] == 99
    assert data["measured"] == [7] * 8
    assert data["boundary"] == 3
    assert "<title>rotor: small &lt;graph&gt;</title>" in page
    assert "Recomputed most" in page
    assert ">second</td>" in page


def test_pages_need_no_network(tmp_path):
    page = render(small_graph(), tmp_path / "g.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in page
    assert set(re.findall(r"\w+://[^\s\"']+", page)) == set()
    assert not re.search(r"\bsrc=|\bhref=|url\(|@import|fetch\(|XMLHttpRequest|import\(", page)


def test_pages_cannot_be_broken_by_names(tmp_path):
    name = "</script><b>&\u2028"
    graph = Graph([1], None, [Operation(name, 1, (), (0,), module="<i>")], name="</title>")
    page = render(graph, tmp_path / "g.html").read_text(encoding="utf-8")
    assert page.count("</script>") == 2
    assert "<b>" not in page
    assert "<i>" not in page
    assert figures_of(page)["ops"][0][0] == name


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_scripts_of_pages_are_well_formed(tmp_path):
    page = render(small_graph(), tmp_path / "g.html").read_text(encoding="utf-8")
    script = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)[-1]
    (tmp_path / "page.js").write_text(script, encoding="utf-8")
    done = subprocess.run(
        ["node", "--check", str(tmp_path / "page.js")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("format", FORMATS)
def test_the_same_graph_gives_the_same_bytes(format, tmp_path):
    if format not in ("html", "dot"):
        pytest.importorskip("graphviz")
        if shutil.which("dot") is None:
            pytest.skip("needs Graphviz's program dot")
    graph = small_graph()
    program = simulate(graph, [0, 1, 2, 3, 0, 1, 4, 5])
    first = render(graph, tmp_path / f"a.{format}", program=program)
    second = render(graph, tmp_path / "b", program=program, format=format.upper())
    assert first.read_bytes() == second.read_bytes()
    assert set(re.findall(rb"/CreationDate \(D:(\d+)", first.read_bytes())) <= {b"19700101000000"}
    head = {"svg": b"<?xml", "pdf": b"%PDF", "png": b"\x89PNG", "html": b"<!doc", "dot": b"digr"}
    assert first.read_bytes().startswith(head[format])


def test_refusals(tmp_path, monkeypatch):
    graph = small_graph()
    with pytest.raises(ValueError, match="no format is named 'gif', expected one of svg, pdf"):
        render(graph, tmp_path / "g.gif")
    with pytest.raises(ValueError, match="no level is named 'lines', expected one of operations"):
        render(graph, tmp_path / "g.dot", level="lines")
    other = simulate(forward_part(graph), range(3))
    with pytest.raises(ValueError, match="the program is one of another graph"):
        render(graph, tmp_path / "g.html", program=other)
    with pytest.raises(ValueError, match="measured_bytes has 2 levels, expected one number"):
        render(graph, tmp_path / "g.html", measured_bytes=[1, 2])
    monkeypatch.setitem(sys.modules, "graphviz", None)
    with pytest.raises(ImportError, match=r"`pip install graphviz`"):
        render(graph, tmp_path / "g.svg")
    assert list(tmp_path.iterdir()) == []


def test_without_the_program_dot(tmp_path, monkeypatch):
    pytest.importorskip("graphviz")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="Graphviz's program dot, which is not installed"):
        render(small_graph(), tmp_path / "g.svg")


def test_programs_that_were_read_belong_to_their_graph(tmp_path):
    graph = small_graph()
    read = Program.from_json(simulate(graph, range(6)).to_json())
    assert render(graph, tmp_path / "g.html", program=read).stat().st_size > 1000
