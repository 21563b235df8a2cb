"""Costs that are not measured here: rooflines of a machine, and profiles recorded elsewhere."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from capture.test_graph_engine import Language, Residual, cross_entropy
from torch import fx, nn

import rotor
from rotor import graph as rg
from rotor.common import cache
from rotor.engines.graph.costs import estimate as est
from rotor.engines.graph.costs import profile as measuring
from rotor.engines.graph.costs import recorded
from rotor.wrapper.building import capture_step

aten = torch.ops.aten
SLOW = rg.Machine("slow", 1e9, 1e10, 1e-6, low_precision_flops_per_second=4e9)
CUDA = rg.Machine("other", 5e13, 2e12, 4e-6, 4e14, "cuda")
NS = 1_000_000_000


@pytest.fixture
def nothing_runs(monkeypatch):
    def refused(*_, **__):
        raise AssertionError("an operation was run")

    monkeypatch.setattr(measuring.Arguments, "of", refused)
    monkeypatch.setattr(measuring, "measure_ns", refused)


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ROTOR_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def call(target, *args, **kwargs) -> fx.Node:
    """A call on placeholders for the tensors, with the values it gives."""
    graph = fx.Graph()

    def placed(value):
        if isinstance(value, torch.Tensor):
            node = graph.placeholder(f"x{len(graph.nodes)}")
            node.meta["val"] = value
            return node
        if isinstance(value, list):
            return [placed(item) for item in value]
        return value

    node = graph.call_function(target, tuple(placed(v) for v in args), kwargs)
    node.meta["val"] = target(*args, **kwargs)
    return node


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


# -- formulas, by hand


def test_matrix_product():
    node = call(aten.mm.default, meta(8, 16), meta(16, 4))
    assert est.flops_of(node) == 2 * 8 * 16 * 4
    assert est.moved_bytes(node) == 4 * (8 * 16 + 16 * 4 + 8 * 4)


def test_convolution_and_the_halves_of_its_backward():
    x, w = meta(2, 3, 8, 8), meta(5, 3, 3, 3)
    shape = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    node = call(aten.convolution.default, x, w, None, *shape)
    flops = 2 * (2 * 5 * 8 * 8) * (3 * 3 * 3)
    assert est.flops_of(node) == flops
    for mask in ([True, False, False], [False, True, False]):
        half = call(aten.convolution_backward.default, meta(2, 5, 8, 8), x, w, None, *shape, mask)
        assert est.flops_of(half) == flops


def test_attention_of_the_cpu_counts_as_any():
    q = torch.empty(2, 3, 16, 8)
    node = call(aten._scaled_dot_product_flash_attention_for_cpu.default, q, q, q)
    assert est.flops_of(node) == 2 * (2 * 2 * 3 * 16 * 16 * 8)
    out, lse = node.meta["val"]
    backward = call(
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        *(q, q, q, q, out, lse, 0.0, False),
    )
    assert est.flops_of(backward) == 5 * (2 * 2 * 3 * 16 * 16 * 8)


def test_elementwise_operations_and_broadcasts():
    node = call(aten.add.Tensor, meta(6, 7), meta(1, 7).expand(6, 7))
    assert est.flops_of(node) == 42
    assert est.moved_bytes(node) == 4 * (42 + 7 + 42)


def test_gathers_read_what_they_make():
    table, rows = meta(1000, 8), meta(5, dtype=torch.int64)
    node = call(aten.embedding.default, table, rows)
    assert est.moved_bytes(node) == 4 * 40 + 4 * 40 + 8 * 5
    node = call(aten.index.Tensor, table, [rows])
    assert est.moved_bytes(node) == 4 * 40 + 4 * 40 + 8 * 5


def test_several_outputs():
    node = call(aten.max_pool2d_with_indices.default, meta(1, 2, 4, 4), [2, 2])
    assert est.flops_of(node) == 8 + 8
    assert est.moved_bytes(node) == 4 * 32 + 4 * 8 + 8 * 8


def test_precision_is_that_of_the_operands():
    assert est._is_low_precision(call(aten.mm.default, *[meta(2, 2, dtype=torch.bfloat16)] * 2))
    assert not est._is_low_precision(call(aten.mm.default, meta(2, 2), meta(2, 2)))
    rows = meta(5, dtype=torch.int64)
    half = meta(9, 4, dtype=torch.float16)
    assert est._is_low_precision(call(aten.embedding.default, half, rows))
    assert not est._is_low_precision(call(aten.add.Tensor, rows, rows))


def test_roofline():
    assert SLOW.seconds(0, 0) == 1e-6
    assert SLOW.seconds(1_000_000, 10) == 1e-6 + 1e-3
    assert SLOW.seconds(1_000_000, 10, low_precision=True) == 1e-6 + 2.5e-4
    assert SLOW.seconds(10, 1_000_000) == 1e-6 + 1e-4
    ahead = rg.Machine("", 1e9, 1e10, 1e-6, device="cuda")
    assert (ahead.seconds(1_000_000, 10), ahead.seconds(10, 10)) == (1e-3, 1e-6)
    assert rg.Machine("", 1e9, 1e9, 0).seconds(1000, 0, low_precision=True) == 1e-6
    assert (SLOW.rounded_bytes(1), CUDA.rounded_bytes(1), CUDA.rounded_bytes(512)) == (1, 512, 512)


# -- machines


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"flops_per_second": 0}, ValueError),
        ({"flops_per_second": math.inf}, ValueError),
        ({"bytes_per_second": -1.0}, ValueError),
        ({"bytes_per_second": True}, TypeError),
        ({"launch_seconds": math.nan}, ValueError),
        ({"launch_seconds": "1"}, TypeError),
        ({"low_precision_flops_per_second": 0}, ValueError),
        ({"device": "tpu"}, ValueError),
        ({"name": 3}, TypeError),
    ],
)
def test_wrong_figures_are_refused(change, error):
    given = {"name": "m", "flops_per_second": 1, "bytes_per_second": 1, "launch_seconds": 0}
    with pytest.raises(error, match=next(iter(change))):
        rg.Machine(**given | change)


def test_machines_as_json(tmp_path):
    text = CUDA.to_json(tmp_path / "machine.json")
    assert json.loads(text)["format"] == "rotor.machine"
    assert rg.Machine.from_json(text) == rg.Machine.from_json(tmp_path / "machine.json") == CUDA
    data = CUDA.to_dict()
    for change in ({"version": 2}, {"format": "rotor.graph"}, {"device": 1}, {"more": 1}):
        with pytest.raises(ValueError, match=r"version|format|device|more"):
            rg.Machine.from_dict(data | change)
    del data["bytes_per_second"]
    with pytest.raises(ValueError, match="bytes_per_second"):
        rg.Machine.from_dict(data)


def test_a_machine_is_measured():
    found = rg.Machine.measure("cpu")
    assert (found.name, found.device) == ("cpu", "cpu")
    assert found.flops_per_second > 1e6
    assert found.bytes_per_second > 1e6
    assert 0 < found.launch_seconds < 1
    assert rg.Machine.measure("cpu", "mine").name == "mine"
    with pytest.raises(ValueError, match="meta"):
        rg.Machine.measure("meta")


# -- graphs from estimates


def test_nothing_runs_and_the_costs_are_the_formulas(nothing_runs):
    net, x = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)), torch.randn(16, 8)
    graph = rg.build(net, x, profile=SLOW)
    first = graph.operations[0]
    moved = 4 * (16 * 8 + 8 * 32 + 32 + 16 * 32)
    seconds = 1e-6 + max(2 * 16 * 8 * 32 / 1e9, moved / 1e10)
    assert (first.name, first.cost_ns) == ("addmm", round(seconds * NS))
    assert all(op.cost_ns >= 1000 for op in graph.operations if op.phase != "loss")
    assert [op.cost_ns for op in graph.operations if op.phase == "loss"] == [0]
    assert not any(op.workspace_bytes for op in graph.operations if op.phase != "loss")


def test_sizes_are_those_of_the_machine(nothing_runs):
    net, x = nn.Sequential(nn.Linear(8, 33), nn.ReLU(), nn.Linear(33, 5)), torch.randn(3, 8)
    here, there = (rg.build(net, x, profile=machine) for machine in (SLOW, CUDA))
    assert [s.bytes for s in here.storages][:2] == [3 * 33 * 4, 3 * 33 * 4]
    for one, other in zip(here.storages, there.storages, strict=True):
        assert other.bytes == -(-one.bytes // 512) * 512


def test_an_argument_named_profile_stays_the_models(nothing_runs):
    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, profile=None):
            return self.linear(x) * (3.0 if profile == "loud" else 1.0)

    x = torch.randn(2, 4)
    wrapped = rotor.Checkpointable(Takes(), profile=SLOW, mem_limit="1 MB")
    assert torch.equal(wrapped(x, profile="loud"), wrapped.module(x, profile="loud"))
    step = capture_step(Takes(), (x,), {"profile": "loud"}, profile=SLOW)
    cost = step.costs[[task.name for task in step.lowered.tasks].index("mul")]
    assert cost.ns == round(NS * SLOW.seconds(8, 64))


def test_models_of_meta_tensors(nothing_runs):
    with torch.device("meta"):
        model, tokens = Language(dropout=0.0), torch.zeros(4, 12, dtype=torch.int64)
        target = torch.zeros(4, 12, dtype=torch.int64)
    graph = rg.build(model, tokens, profile=CUDA, loss_fn=cross_entropy, targets=(target,))
    everything = rg.simulate(graph, range(len(graph)))
    assert all(storage.bytes % 512 == 0 for storage in graph.storages)
    program = rg.plan(graph, everything.peak_bytes * 8 // 10, effort="fast")
    assert program.peak_bytes <= everything.peak_bytes * 8 // 10
    real = Language(dropout=0.0)
    ones = torch.zeros(4, 12, dtype=torch.int64)
    assert graph.to_dict() == (
        rg.build(real, ones, profile=CUDA, loss_fn=cross_entropy, targets=(ones,)).to_dict()
    )
    assert all(p.is_meta for p in model.parameters())
    with pytest.raises(ValueError, match="meta tensors cannot be measured"):
        rg.build(model, tokens)
    with pytest.raises(ValueError, match="nothing can be trained on"):
        rotor.Checkpointable(model, profile=CUDA).measure(tokens)


@pytest.mark.parametrize("name", ["language", "residual"])
def test_estimates_rank_operations_as_measures_do(name):
    torch.manual_seed(0)
    model, x = {
        "language": lambda: (Language(width=64), torch.randint(40, (8, 64))),
        "residual": lambda: (Residual(), torch.randn(8, 3, 32, 32)),
    }[name]()
    machine = rg.Machine.measure()
    measured, estimated = (
        np.array([op.cost_ns for op in graph.operations])
        for graph in (rg.build(model, x), rg.build(model, x, profile=machine))
    )
    ranks = [np.argsort(np.argsort(costs)) for costs in (measured, estimated)]
    assert np.corrcoef(*ranks)[0, 1] > 0.5


# -- training on a plan that was made from estimates


@pytest.mark.filterwarnings("ignore:the limit of .* was not kept in a first step")
def test_a_plan_from_estimates_keeps_the_measured_peak(nothing_runs):
    torch.manual_seed(0)
    model, x = Residual(), torch.randn(4, 3, 16, 16)
    target = torch.randint(40, (4,))
    probe = rotor.Checkpointable(model, profile=SLOW, loss_fn=cross_entropy, mem_limit="1 GB")
    probe.measure(x, targets=(target,))
    probe.compute_sequence()
    limit = probe.get_expected_memory() * 9 // 10
    chk = rotor.Checkpointable(model, profile=SLOW, loss_fn=cross_entropy, mem_limit=limit)
    for _ in range(4):
        model.zero_grad()
        chk(x, targets=(target,)).backward()
    # The first steps tell what the workspaces need.
    assert chk.plan.measured_bytes <= limit
    assert chk.program.peak_bytes <= limit


def test_a_sequential_with_a_machine_is_a_graph(nothing_runs):
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    chk = rotor.Checkpointable(net, torch.randn(2, 4), "1 MB", profile=SLOW)
    assert len(chk.graph) > 2
    with pytest.raises(ValueError, match="graph"):
        rotor.Checkpointable(net, profile=SLOW, engine="chain")


# -- profiles recorded elsewhere


def test_a_saved_profile_replaces_measuring(own_cache, monkeypatch):
    net, x = nn.Sequential(nn.Linear(8, 32), nn.Tanh()), torch.randn(16, 8)
    with pytest.raises(ValueError, match="nothing was measured"):
        rg.save_profile(own_cache / "profile.json")
    measured = rg.build(net, x)
    path = rg.save_profile(own_cache / "profile.json", machine=SLOW)
    monkeypatch.setenv("ROTOR_CACHE_DIR", str(own_cache / "empty"))
    monkeypatch.setattr(measuring.Arguments, "of", None)
    found = rg.Profile.load(path)
    assert found.machine == SLOW
    assert rg.build(net, x, profile=found).to_dict() == measured.to_dict()
    chk = rotor.Checkpointable(net, x, "1 MB", profile=path)
    assert [op.cost_ns for op in chk.graph.operations] == [op.cost_ns for op in measured.operations]


def test_a_profile_of_a_gpu_serves_a_capture_on_the_cpu(own_cache):
    net, x = nn.Sequential(nn.Linear(8, 32), nn.Tanh()), torch.randn(16, 8)
    rg.build(net, x)
    entries = {
        key: [row[0], 7, *(-(-size // 512) * 512 for size in row[2:])]
        for key, row in cache.load("profile", measuring.environment_of(x.device)).items()
    }
    profile = rg.Profile(repr(("2.0", "Some GPU", 4)), entries)
    assert profile.device == "cuda"
    for device in ("cpu", "meta"):
        graph = rg.build(net.to(device), x.to(device), profile=profile)
        assert all(storage.bytes % 512 == 0 for storage in graph.storages)
        assert all(op.workspace_bytes == 7 for op in graph.operations if op.phase != "loss")


def test_missing_operations_are_counted_or_estimated(own_cache, nothing_runs):
    net, x = nn.Sequential(nn.Linear(8, 32), nn.Tanh()), torch.randn(16, 8)
    empty = rg.Profile(repr(("2.0", "Some GPU", 4)), {})
    with pytest.raises(ValueError, match=r"lacks (\d+) of \1 distinct operations, such as addmm"):
        rg.build(net, x, profile=empty)
    path = rg.Profile(empty.environment, {}, None).save(own_cache / "profile.json")
    found = rg.Profile.load(path, machine=CUDA)
    assert rg.build(net, x, profile=found).to_dict() == rg.build(net, x, profile=CUDA).to_dict()


def test_malformed_profiles_are_refused(own_cache):
    good = rg.Profile(repr(("2.0", "cpu", 4)), {"a": [1, 2]}).to_dict()
    assert rg.Profile.from_dict(good).entries == {"a": [1, 2]}
    for change, message in (
        ({"version": 9}, "version"),
        ({"entries": {"a": [1]}}, "entries"),
        ({"entries": {"a": [1, -2]}}, "entries"),
        ({"environment": "cpu"}, "environment"),
        ({"machine": {"format": "rotor.machine", "version": 1}}, "machine"),
    ):
        with pytest.raises(ValueError, match=message):
            rg.Profile.from_dict(good | change)
    with pytest.raises(ValueError, match="names no file"):
        recorded.source_of(own_cache / "none.json")
    with pytest.raises(TypeError, match="profile is 3"):
        rotor.Checkpointable(Language(), profile=3)
