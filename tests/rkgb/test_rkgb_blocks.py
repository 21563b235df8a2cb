"""Blocks of rk-GB's graphs: cuts, classes, parts; what is printed and drawn."""

from __future__ import annotations

import copy
import html
import random
import re
import types
from pathlib import Path

import pytest
import torch
from rkgb_cases import NAMES, case
from torch import nn

from rotor import rkgb
from rotor.graph import simulate
from rotor.rkgb.blocks import classes, cut
from rotor.rkgb.units import part_of

ROOT = Path(__file__).resolve().parents[2]


# -- blocks


def test_residual_blocks_end_where_everything_goes_through_one_node(resnet):
    result = resnet.result
    assert result.block_names == [
        *("conv1", "bn1", "maxpool", "layer1.0", "layer1.1", "layer2.0", "layer2.1"),
        *("layer3.0", "layer3.1", "layer4.0", "layer4.1", "avgpool", "fc"),
    ]
    assert [len(sg.nodes) for sg in result.S_graph_list] == [1, 1, 1, 5, 5, 7, 5, 7, 5, 7, 5, 1, 1]
    assert [members for members in result.equivalent_classes if len(members) > 1] == [[3, 4]]
    assert len(result.list_ano_S) == len(result.equivalent_classes) == 12


def test_twelve_layers_are_one_class(transformer):
    result = transformer.result
    several = [members for members in result.equivalent_classes if len(members) > 1]
    assert [len(members) for members in several] == [12, 12]
    attention, perceptrons = several
    assert [result.block_names[k] for k in attention] == [
        f"blocks.{k}.attention" for k in range(12)
    ]
    assert [result.block_names[k] for k in perceptrons] == [f"blocks.{k}.mlp" for k in range(12)]
    times = {result.K_graph_list[k].simulate().time_ns for k in attention}
    peaks = {result.K_graph_list[k].simulate().peak_bytes for k in attention}
    assert len(times) == len(peaks) == 1


def test_skip_connections_hold_a_block_together(unet):
    result = unet.result
    largest = max(result.S_graph_list, key=lambda sg: len(sg.nodes))
    merged = [name for node in largest.nodes for name in node.merged]
    assert merged.count("cat") == 4
    assert len(largest.nodes) == 47
    assert sum(len(sg.nodes) for sg in result.S_graph_list) == len(result.S_graph.nodes)


def test_chains_are_cut_after_every_node(perceptron):
    result = perceptron.result
    assert [len(sg.nodes) for sg in result.S_graph_list] == [1] * 7
    # The first has no gradient of its input to compute, and no GELU before it.
    assert result.equivalent_classes == [[0], [1, 2, 3, 4, 5, 6]]


def test_classes_tell_work_apart():
    layers = [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)]
    layers += [nn.Sigmoid(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8, bias=False)]
    layers[4].requires_grad_(False)
    result = rkgb.make_all_graphs(nn.Sequential(*layers), torch.randn(2, 8))
    # 0: no input gradient; 1: as expected; 2: frozen; 3: after a sigmoid; 4: no bias.
    assert result.equivalent_classes == [[0], [1], [2], [3], [4]]
    assert classes(["a", "b", "a", "c", "b"]) == [[0, 2], [1, 4], [3]]


@pytest.mark.parametrize("name", NAMES)
def test_blocks_are_graphs_of_their_own(name):
    result = case(name).result
    total = 0
    for sg, kg in zip(result.S_graph_list, result.K_graph_list, strict=True):
        assert kg.sg is sg
        assert [node.number for node in sg.nodes] == list(range(len(sg.nodes)))
        assert set(sg.output_node.users) == set()
        inside = {sg.init_node, *sg.nodes}
        assert all(set(node.deps) <= inside and set(node.users) <= inside for node in sg.nodes)
        assert len(sg.graph) == len(sg.nodes)
        program = kg.simulate()
        assert program.time_ns == sum(op.cost_ns for op in kg.step.operations)
        assert simulate(kg.graph, range(len(kg.graph))).peak_bytes >= program.peak_bytes
        assert kg.output_kdn_data in kg.loss_kcn.deps_real
        assert kg.dict_kn["loss"] is kg.loss_kcn
        total += program.time_ns
    outside = [node for node in result.K_graph.list_kcn if node.main_target == "__sources__"]
    whole = result.K_graph.simulate().time_ns - round(sum(node.time for node in outside) * 1e9)
    assert total == whole
    hidden = [sg.hidden_inputs for sg in result.S_graph_list]
    before = [sg.hidden_output for sg in result.S_graph_list]
    assert hidden[0] in (["__sources__"], [])
    assert hidden[2] == [before[1]]


def test_blocks_run_one_after_the_other(transformer):
    result, model = transformer.result, transformer.model
    env = {**result.S_graph.dict_constants, "torch": torch, "self": model}
    env |= rkgb.make_inputs(model, transformer.inputs)
    with torch.no_grad():
        exec(result.S_graph.init_node.get_code(), env)
        for sg in result.S_graph_list:
            # Only what a block returns, and what is there from the start, reaches the next.
            exec(sg.get_code(), env)
            inner = {name for node in sg.nodes for name in node.all_targets}
            for name in inner - set(sg.direct_outputs):
                env.pop(name, None)
        expected = copy.deepcopy(model)(*transformer.inputs)
    assert torch.equal(env[result.S_graph.direct_outputs[0]], expected)


def cut_by_search(edges: list[set[int]], outputs: set[int]) -> list[list[int]]:
    """Blocks by taking each node away and looking whether what is before reaches what is after."""
    count = len(edges)
    blocks: list[list[int]] = [[]]
    for node in range(count):
        blocks[-1].append(node)
        reached = set()
        waiting = list(range(node))
        while waiting:
            current = waiting.pop()
            if current in outputs:
                reached.add(count)
            for user in edges[current]:
                if user != node and user not in reached:
                    reached.add(user)
                    waiting.append(user)
        if not any(k > node for k in reached) and edges[node]:
            blocks.append([])
    return [block for block in blocks if block]


@pytest.mark.parametrize("seed", range(40))
def test_cuts_are_articulation_points(seed):
    draw = random.Random(seed)
    count = draw.randrange(2, 14)
    edges: list[set[int]] = [set() for _ in range(count)]
    for k in range(1, count):
        for _ in range(draw.choice([1, 1, 1, 2])):
            edges[max(0, k - draw.choice([1, 1, 1, 2, 4]))].add(k)
    outputs = {k for k in range(count) if not edges[k]}
    nodes = [rkgb.S_node(f"n{k}", number=k, protected=k in outputs) for k in range(count)]
    for k, users in enumerate(edges):
        for user in users:
            nodes[k].users[nodes[user]] = {f"n{k}"}
    assert cut(types.SimpleNamespace(nodes=nodes)) == cut_by_search(edges, outputs)


def test_parts_of_graphs_keep_their_sizes(resnet):
    whole = resnet.result.FB
    forward = [k for k, op in enumerate(whole.operations) if op.phase == "forward"]
    alone = part_of(whole, forward, loss=False)
    assert alone.graph.total_time == pytest.approx(resnet.result.forward.total_time)
    assert [s.bytes for s in alone.graph.storages] == [
        whole.storages[s].bytes for s in alone.storages
    ]
    loss = next(k for k, op in enumerate(whole.operations) if op.phase == "loss")
    others = [k for k in range(len(whole)) if k != loss]
    again = part_of(whole, others, loss=True).graph
    assert [op.name for op in again.operations] == [op.name for op in whole.operations]
    assert again.operations[loss].outputs == whole.operations[loss].outputs
    assert set(again.operations[loss].inputs) >= set(whole.operations[loss].inputs)


# -- what is printed and drawn


def test_what_was_found_is_printed(perceptron, capsys):
    result = rkgb.test_rkgb(perceptron.model, perceptron.inputs)
    text = capsys.readouterr().out
    assert text == result.summary()
    assert f"B_graph: {len(result.B_graph.nodes)} operations" in text
    assert "S_graph: 7 nodes" in text
    assert "K_graph: 15 computations" in text
    assert "7 blocks, cut at articulation points, in 2 classes" in text
    assert "class 1: 6 alike, blocks 1-6 (2, 4, 6, 8, ...): 1 nodes, 2+2+2+2+... comp" in text
    rkgb.make_all_graphs(perceptron.model, perceptron.inputs)
    rkgb.print_inputs(perceptron.model)
    assert capsys.readouterr().out == "input\n"


def boxes(source: str) -> list[str]:
    return re.findall(r'^ +n\d+ \[label="([^"]*)"', source, re.MULTILINE)


def test_drawings_are_what_a_person_would_draw(resnet, tmp_path):
    result = resnet.result
    paths = rkgb.print_all_graphs(result, name=tmp_path / "r" / "resnet", render_format="dot")
    assert [path.name for path in paths] == [
        "resnet_D_graph.dot",
        "resnet_S_graph.dot",
        "resnet_K_graph.dot",
        "resnet_S_graph_list.dot",
        "resnet_K_graph_list.dot",
    ]
    texts = [path.read_text(encoding="utf-8") for path in paths]
    assert all(text.count("{") == text.count("}") for text in texts)
    _, simplified, both, blocks, block_nodes = texts
    labels = boxes(simplified)
    assert len(labels) == 52
    assert labels[0] == "input: 2x3x32x32"
    assert labels[1] == "conv1\\nConv2d\\n2x64x16x16, 128 KiB"
    assert "layer1.0.conv2\\nrelu + Conv2d\\n2x64x8x8, 32 KiB" in labels
    assert "layer1.0.relu\\nadd + ReLU\\n2x64x8x8, 32 KiB" in labels
    assert 'label="block 3: layer1.0, 2 alike"' in simplified
    assert simplified.count("subgraph cluster") == 8
    filled = re.findall(r'label="(layer1[^"\\]*)\\n.*?fillcolor="(#\w+)"', simplified)
    other = re.findall(r'label="(layer2[^"\\]*)\\n.*?fillcolor="(#\w+)"', simplified)
    assert len({color for _, color in filled}) == 1
    assert {color for _, color in filled}.isdisjoint(color for _, color in other)
    assert len(boxes(both)) == len(result.K_graph.list_kcn)
    assert both.count("rank=same") == 51
    assert blocks.count("subgraph cluster") == block_nodes.count("subgraph cluster") == 12
    assert 'label="class 3: block 3, layer1.0, 2 alike"' in blocks


def test_single_graphs_are_drawn(perceptron, tmp_path, monkeypatch):
    result = perceptron.result
    shown: list[str] = []
    monkeypatch.setattr("webbrowser.open", shown.append)
    for graph in (result.D_graph, result.S_graph, result.K_graph):
        path = rkgb.print_graph(graph, tmp_path / type(graph).__name__, render_format="dot")
        assert path.read_text(encoding="utf-8").startswith("digraph")
    assert shown == []
    path = rkgb.print_graph_list(result.S_graph_list, tmp_path / "list", True, "dot")
    assert path.read_text(encoding="utf-8").count("subgraph cluster") == 7
    assert shown == [path.resolve().as_uri()]
    page = rkgb.print_graph(result.S_graph, tmp_path / "s", render_format="html")
    assert page.read_text(encoding="utf-8").startswith("<!doctype html")
    blocks = rkgb.print_graph_list(result.K_graph_list, tmp_path / "k", render_format="dot")
    assert "what follows" in blocks.read_text(encoding="utf-8")
    with pytest.raises(TypeError, match="B_graph cannot be drawn, expected a D_graph"):
        rkgb.print_graph(result.B_graph)
    with pytest.raises(ValueError, match="no blocks to draw"):
        rkgb.print_graph_list([])


def test_the_picture_of_the_docs_is_that_of_the_graph(resnet, tmp_path):
    page = (ROOT / "docs/rkgb-resnet18.svg").read_text(encoding="utf-8")
    paths = rkgb.print_all_graphs(resnet.result, tmp_path / "r", render_format="dot")
    source = paths[1].read_text(encoding="utf-8")
    lines = [line for label in boxes(source) for line in label.split("\\n")]
    lines += re.findall(r'graph \[label="(block[^"]*)"', source)
    drawn = [html.unescape(text) for text in re.findall(r"<text [^>]*>([^<]*)</text>", page)]
    assert sorted(drawn) == sorted(lines)
