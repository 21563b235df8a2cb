"""Training steps whose programs offload: bit-equal, and as large as predicted."""

from __future__ import annotations

import copy
import json
import re

import pytest
import torch
from joint_programs import random_joint_program
from limited_models import UNLIMITED
from torch import nn
from training import same

import rotor
from rotor import graph as rg
from rotor.graph.transfers import transfers_of
from rotor.units import format_bytes

SECTOR = 512


class Mixed(nn.Module):
    """Dropout, BatchNorm, a multi-output operation, in-place ones, views."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(5))
        self.norm = nn.BatchNorm1d(96)
        self.last = nn.LayerNorm(96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k, layer in enumerate(self.layers):
            x = layer(x)
            x = self.norm(x) if k == 1 else x
            x = x.relu_() if k % 2 else nn.functional.gelu(x)
            x = nn.functional.dropout(x, 0.2)
            a, b = x.chunk(2, dim=1)
            top = torch.topk(x, 3, dim=1).values.sum(1, keepdim=True)
            x = torch.cat([b, a.sigmoid()], 1) + top
        return self.last(x)


def pair() -> tuple[nn.Module, nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = Mixed()
    return model, copy.deepcopy(model), torch.randn(64, 96)


def joint(step, seed: int, drop: float, share: float, link: rg.Link) -> rg.Program:
    graph = step.graph(0)
    sizes = [storage.bytes for storage in graph.storages]
    actions = random_joint_program(step.lowered, sizes, seed, drop, share)
    return rg.Program(graph, actions, link)


def trained(model: nn.Module, call, x: torch.Tensor, steps: int = 2) -> list[torch.Tensor]:
    found = []
    for k in range(steps):
        torch.manual_seed(k)
        model.zero_grad(set_to_none=True)
        loss = call(x, targets=(x.sin(),))
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
    return [*found, *(b.clone() for b in model.buffers())]


def graph_engine(model: nn.Module, **settings) -> rotor.Checkpointable:
    return rotor.Checkpointable(
        model,
        mem_limit=UNLIMITED,
        engine="graph",
        loss_fn=nn.functional.mse_loss,
        planning="before",
        **settings,
    )


@pytest.mark.parametrize("seed", range(4))
def test_steps_are_equal_and_as_large_as_predicted(seed, disk):
    model, twin, x = pair()
    plain, chk = graph_engine(twin), graph_engine(model, offload=disk)
    step = chk.measure(x, targets=(x.sin(),))
    program = joint(step, seed, 0.1 * seed, 0.8, step.link)
    fetches = len(program.actions) - len(program.ops)
    assert fetches > 10
    chk.load_plan(program)
    before = disk.traffic.copy()
    assert same(trained(model, chk, x), trained(twin, plain, x))
    plan = chk.plan
    assert plan.program.actions.tolist() == program.actions.tolist()
    moved = disk.traffic.since(before)
    assert moved.written_bytes == 2 * program.offloaded_bytes > 0
    assert moved.read_bytes == 2 * program.fetched_bytes
    assert plan.predicted_bytes - SECTOR * fetches <= plan.measured_bytes <= plan.predicted_bytes


@pytest.fixture
def ran(disk):
    """A model that has run two steps of a random program with fetches."""
    model, _, x = pair()
    chk = graph_engine(model, offload=disk)
    step = chk.measure(x, targets=(x.sin(),))
    chk.load_plan(joint(step, 1, 0.1, 0.8, step.link))
    trained(model, chk, x)
    return chk


def test_reports_name_the_traffic(ran, tmp_path):
    program = ran.plan.program
    text = ran.report()
    assert re.search(rf"written in a step +{format_bytes(program.offloaded_bytes)}\n", text)
    assert re.search(rf"fetched in a step +{format_bytes(program.fetched_bytes)}\n", text)
    assert "disks wear out" in text
    assert "not yet" not in text.split("waits for the tier, measured")[1].splitlines()[0]
    page = tmp_path / "plan.html"
    ran.report(page)
    assert "waits for the tier, predicted" in page.read_text()


def test_traces_have_tracks_of_transfers(ran, tmp_path):
    program = ran.plan.program
    found = transfers_of(program)
    assert found.end_ns == program.time_ns
    assert sum(found.waits_ns) <= program.waited * 1e9 + 1
    assert sum(one.end_ns - one.begin_ns for one in found.moved) == round(program.link_time * 1e9)
    trace = tmp_path / "plan.json"
    ran.report(trace)
    events = json.loads(trace.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"second tier, written", "second tier, fetched"} <= names
    moved = {kind: [e for e in events if e.get("cat") == kind] for kind in ("written", "fetched")}
    assert sum(e["args"]["bytes"] for e in moved["written"]) == program.offloaded_bytes
    assert sum(e["args"]["bytes"] for e in moved["fetched"]) == program.fetched_bytes


def test_plans_are_saved_and_loaded(ran, disk):
    text = ran.program.to_json()
    model, _, x = pair()
    chk = graph_engine(model, offload=disk)
    chk.measure(x, targets=(x.sin(),))
    chk.load_plan(text)
    assert chk.program.actions.tolist() == ran.program.actions.tolist()
    plain = graph_engine(model)
    plain.measure(x, targets=(x.sin(),))
    with pytest.raises(ValueError, match="moves values to a second tier, and the model has none"):
        plain.load_plan(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offload": "tape"}, "unknown offload 'tape'"),
        ({"offload": "disk:"}, "unknown offload"),
        ({"offload_limit": "1GiB"}, "offload is None"),
        ({"offload": "disk", "engine": "chain"}, 'engine="chain" has none'),
        ({"offload": "disk:/dev/null/no"}, "no file for offloaded values"),
    ],
)
def test_unsuited_options_are_refused(options, message):
    with pytest.raises((ValueError, OSError), match=message):
        rotor.Checkpointable(nn.Sequential(nn.Linear(2, 2)), **options)
    with pytest.raises(TypeError, match=r"rotor\.Tier"):
        rotor.Checkpointable(nn.Sequential(nn.Linear(2, 2)), offload=3)


def test_a_sequential_with_a_tier_is_planned_as_a_graph(tmp_path):
    chain = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    assert rotor.Checkpointable(chain).planned_as == "chain"
    chk = rotor.Checkpointable(chain, offload=f"disk:{tmp_path}", offload_limit="1GiB")
    assert chk.planned_as == "graph"
    assert chk.offload.limit_bytes == 1 << 30
    assert copy.deepcopy(chk).offload.tier is not chk.offload.tier
