"""Published names: rk-GB's graphs, Rockmate; graphs built from modules, programs loaded."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn

import rotor
from rotor import rkgb
from rotor.graph import Graph, Program, build, plan, simulate
from rotor.report import plans
from rotor.wrapper.planfiles import load_program, write_report


class Net(nn.Module):
    """Convolution, BatchNorm in place, dropout; a keyword, a dictionary out."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.drop = nn.Dropout(0.2)

    def forward(self, x, scale=1.0):
        hidden = torch.relu_(self.norm(self.conv(x)))
        hidden = hidden.mean((2, 3)) * scale
        for block in self.blocks:
            hidden = torch.tanh(block(self.drop(hidden)))
        return {"y": hidden}


def loss_of(output, target):
    return nn.functional.cross_entropy(output["y"], target)


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return Net()


@pytest.fixture(scope="module")
def sample():
    return torch.randn(4, 3, 24, 24)


@pytest.fixture(scope="module")
def result(net, sample):
    return rkgb.make_all_graphs(net, sample)


# -- build


def test_building_leaves_the_model_as_it_was(sample):
    torch.manual_seed(1)
    model = Net().eval()
    model.norm.train()
    before = copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    build(model, sample, scale=0.5)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    assert not model.training
    assert model.norm.training
    assert not model.drop.training


def test_a_graph_has_what_the_model_does(net, sample):
    graph = build(net, sample)
    names = [op.name for op in graph.operations]
    assert {"convolution", "native_dropout", "loss", "convolution_backward"} <= set(names)
    modules = {op.name: op.module for op in graph.operations}
    assert modules["convolution"] == "conv"
    assert modules["convolution_backward"] == "conv"
    assert modules["addmm_1"] == "blocks.1"
    phases = [op.phase for op in graph.operations]
    assert phases == sorted(phases, key=["forward", "loss", "backward"].index)
    gradients = sum(s.bytes for s in graph.storages if s.pinned)
    assert gradients >= sum(4 * p.numel() for p in net.parameters())
    program = plan(graph, simulate(graph, range(len(graph))).peak_bytes, effort="fast")
    assert program.slowdown == 1


def test_the_loss_is_part_of_the_graph(net, sample):
    target = torch.tensor([0, 1, 2, 3])
    graph = build(net, sample, loss_fn=loss_of, targets=(target,))
    names = [op.name for op in graph.operations]
    assert "_log_softmax" in names
    assert names.index("_log_softmax") < names.index("loss")
    with pytest.raises(ValueError, match="a loss function and its targets together"):
        build(net, sample, loss_fn=loss_of)
    with pytest.raises(ValueError, match="a loss function and its targets together"):
        build(net, sample, targets=(target,))


def test_wrong_kinds_are_refused_in_words(net, sample):
    with pytest.raises(TypeError, match=r"sample of the model's input has tensors, not 5"):
        rkgb.make_all_graphs(net, 5)
    with pytest.raises(TypeError, match=r"model must be an nn\.Module, got int"):
        rkgb.make_all_graphs(5, sample)
    with pytest.raises(TypeError, match=r"written to a path, such as report\.html, not to 5"):
        plans.checked_path(5)


def test_what_cannot_be_captured_is_refused(sample):
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(24, 24)

        def forward(self, x):
            y = self.layer(x)
            return y if y.sum().item() > 0 else -y

    with pytest.raises(rotor.errors.CaptureError, match=r"item|branch"):
        build(Branching(), sample)


# -- rk-GB


def test_views_of_one_graph(result, net, sample):
    assert (
        result.raw,
        result.forward,
        result.simplified,
        result.forward_and_backward,
        result.partitioned,
    ) == (result.R, result.F, result.S, result.FB, result.P)
    whole = result.FB
    assert [op.name for op in result.F.operations] == [
        op.name for op in whole.operations if op.phase == "forward"
    ]
    once = simulate(whole, range(len(whole)))
    partitioned = simulate(result.P, range(len(result.P)))
    assert len(result.P) < len(whole)
    assert partitioned.time_ns == once.time_ns
    assert partitioned.peak_bytes >= once.peak_bytes
    assert len(result.S) < len(result.F) < len(whole)
    assert result.S.total_time == pytest.approx(result.F.total_time)
    assert {op.phase for op in result.S.operations} == {"forward"}
    assert {op.module for op in result.P.operations} >= {"conv", "norm", "blocks.0", "blocks.2"}


def test_the_raw_graph_has_views_that_cost_nothing(result):
    raw, forward = result.raw, result.forward
    views = [op for op in raw.operations if "view" in op.extra]
    assert {op.name.rstrip("_0123456789") for op in views} >= {"t", "getitem"}
    assert all(op.cost_ns == op.workspace_bytes == 0 for op in views)
    assert all(raw.storages[s].bytes == 0 for op in views for s in op.outputs)
    assert [op.name for op in raw.operations if "view" not in op.extra] == [
        op.name for op in forward.operations
    ]
    assert sum(s.bytes for s in raw.storages) == sum(s.bytes for s in forward.storages)
    one = simulate(raw, range(len(raw)))
    other = simulate(forward, range(len(forward)))
    assert one.time_ns == other.time_ns
    assert one.peak_bytes == other.peak_bytes


def test_graphs_are_printed(result, tmp_path):
    paths = rkgb.print_all_graphs(result, name=tmp_path / "here" / "net", render_format="dot")
    assert [path.name for path in paths] == [
        "net_D_graph.dot",
        "net_S_graph.dot",
        "net_K_graph.dot",
        "net_S_graph_list.dot",
        "net_K_graph_list.dot",
    ]
    assert all(path.read_text(encoding="utf-8").startswith("digraph") for path in paths)
    with pytest.raises(ValueError, match="no format is named 'gif', expected one of svg, pdf"):
        rkgb.print_all_graphs(result, render_format="gif")


def test_published_names(net, sample):
    assert rotor.rkgb is rkgb
    assert isinstance(rkgb.test_rkgb(net, (sample, 0.5)), rkgb.Result)
    assert isinstance(rkgb.make_all_graphs(net, {"x": sample}).F, Graph)
    assert rkgb.all_graphs is rkgb.Result


# -- Rockmate


def test_rockmate_trains_by_its_published_call(sample):
    torch.manual_seed(2)
    model = Net()
    plain = copy.deepcopy(model)
    rk = rotor.Rockmate(model, sample, "1 MB")
    assert isinstance(rk, rotor.Checkpointable)
    assert rk.program.peak_bytes <= 1_000_000
    for _ in range(2):
        torch.manual_seed(3)
        output = rk(sample)
        output["y"].square().sum().backward()
        with pytest.warns(DeprecationWarning, match=r"loss\.backward\(\) runs the whole"):
            rk.backward()
        torch.manual_seed(3)
        plain(sample)["y"].square().sum().backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name)
    assert torch.equal(model.norm.running_mean, plain.norm.running_mean)
    assert set(rk.state_dict()) == set(plain.state_dict())


def test_rockmate_does_not_fall_back(sample):
    class Branching(nn.Module):
        def forward(self, x):
            return x if x.sum().item() > 0 else -x

    with pytest.raises(rotor.errors.CaptureError):
        rotor.Rockmate(nn.Sequential(nn.Conv2d(3, 3, 1), Branching()), sample, "1 MB")


# -- plans read and written


class Deep(nn.Sequential):
    """Layers whose activations outweigh everything else."""

    def __init__(self, width: int = 16) -> None:
        layers = [layer for _ in range(6) for layer in (nn.Linear(width, width), nn.GELU())]
        super().__init__(*layers, nn.Dropout(0.1))


@pytest.fixture(scope="module")
def rows():
    return torch.randn(512, 16)


@pytest.fixture(scope="module")
def planned(rows):
    torch.manual_seed(4)
    chk = rotor.Checkpointable(Deep(), rows, "1 MB", engine="graph")
    plain = simulate(chk.graph, range(len(chk.graph)))
    chk.compute_sequence(mem_limit=plain.peak_bytes * 3 // 4)
    assert chk.program.slowdown > 1
    return chk


def test_a_program_is_loaded_and_run(planned, rows, tmp_path):
    path = tmp_path / "program.json"
    planned.program.to_json(path)
    again = rotor.Checkpointable(copy.deepcopy(planned.module), mem_limit="1 MB", engine="graph")
    with pytest.raises(ValueError, match="nothing was measured"):
        load_program(again, path)
    again.measure(rows)
    program = load_program(again, path)
    assert program == planned.program
    assert again.program is program
    outputs = []
    for model in (planned, again):
        torch.manual_seed(5)
        model.zero_grad()
        output = model(rows)
        output.square().sum().backward()
        outputs.append((output.detach(), [p.grad for p in model.parameters()]))
    assert torch.equal(outputs[0][0], outputs[1][0])
    assert all(torch.equal(a, b) for a, b in zip(outputs[0][1], outputs[1][1], strict=True))


def test_programs_of_other_graphs_are_refused(planned, rows):
    text = planned.program.to_json()
    fewer = rotor.Checkpointable(Deep(), mem_limit="4 MB", engine="graph")
    fewer.measure(rows[:100])
    with pytest.raises(ValueError, match=r"of another graph: storage 0 has \d+ bytes in it"):
        load_program(fewer, text)
    data = json.loads(text)
    data["graph"]["ops"][0]["name"] = "something"
    with pytest.raises(ValueError, match=r"name of operation 0 \(something\) is 'something' in it"):
        load_program(planned, json.dumps(data))
    single = Graph([1], None, [rotor.graph.Operation("one", 1, (), (0,))])
    with pytest.raises(ValueError, match="it has 1 operations, the model has"):
        load_program(planned, Program(single, [0]))
    assert planned.program.to_json() == text


def test_programs_above_the_limit_are_refused(planned, rows):
    plain = simulate(planned.graph, range(len(planned.graph)))
    small = rotor.Checkpointable(Deep(), mem_limit=plain.peak_bytes - 1, engine="graph")
    small.measure(rows)
    with pytest.raises(rotor.InfeasibleError, match="the program needs") as caught:
        load_program(small, plain)
    assert caught.value.minimum_bytes >= plain.peak_bytes
    with pytest.raises(ValueError, match="no plan was made"):
        write_report(small, "unused.html")


def test_reports(planned, tmp_path):
    page = write_report(planned, tmp_path / "report.html").read_text(encoding="utf-8")
    for row in ("limit", "peak, predicted", "peak, measured", "recomputation"):
        assert f"<dt>{row}</dt>" in page
    assert "Recomputed most" in page
    assert ">forward</td>" in page
    chain = rotor.Checkpointable(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(TypeError, match='give engine="graph"'):
        write_report(chain, tmp_path / "chain.html")
