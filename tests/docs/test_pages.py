"""Plan pages: their heading, the plain step behind the plan, code lines, and plain words."""

from __future__ import annotations

import json
import re
import sys
from unittest import mock

import pytest
import torch
from torch import nn

import rotor
from rotor.engines.graph.tracing.lowering import source_line
from rotor.graph import graph
from rotor.report.about import About, command_line
from rotor.units import format_bytes


class Blocks(nn.Module):
    def __init__(self, width: int = 16, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) * torch.sigmoid(x)
        return x


def data_of(page: str) -> dict:
    return json.loads(re.search(r'id="data">(.*?)</script>', page).group(1))


@pytest.fixture(scope="module")
def planned() -> rotor.Checkpointable:
    torch.manual_seed(0)
    sample = torch.randn(256, 16)
    model = rotor.Checkpointable(Blocks(), engine="graph", verbosity=0)
    model.measure(sample)
    model.compute_sequence(mem_limit=model.curve().minimum_bytes * 11 // 10)
    return model


@pytest.fixture(scope="module")
def page(planned, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("page") / "plan.html"
    with mock.patch.object(sys, "argv", ["train.py", "--epochs", "2"]):
        planned.report(path)
    return path.read_text(encoding="utf-8")


def test_a_page_has_model_batch_device_date_and_command(page, planned):
    heading = page.partition("</p>")[0]
    assert "<h1>Blocks within " in heading
    assert "inputs 256x16 float32 \u00b7 CPU, " in heading
    assert re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d", heading)
    assert "<code>python train.py --epochs 2</code>" in heading


def test_the_plain_step_is_behind_the_plan(page, planned):
    found, plan = data_of(page), planned.plan
    assert max(level for _, level in found["plain"]) == plan.unlimited_bytes
    once = sum(max(op.cost_ns, 1) for op in plan.graph.operations)
    assert found["plain"][-1] == [once, 0]
    assert len(found["program"]) > len(plan.graph)


def test_operations_name_their_line(page):
    codes = [op[11] for op in data_of(page)["ops"] if op[0].startswith("tanh")]
    assert codes
    for code in codes:
        assert re.fullmatch(r"docs/test_pages\.py:\d+: x = torch\.tanh\(layer\(x\)\).*", code)


def test_lines_of_pytorch_and_of_the_engines_are_left_out():
    inner = f'  File "{torch.__path__[0]}/nn/modules/linear.py", line 3, in forward\n    f()\n'
    own = '  File "/a/b/net.py", line 7, in forward\n    return self.head(x)\n'
    assert source_line(own + inner) == "b/net.py:7: return self.head(x)"
    assert source_line(inner) == ""
    assert source_line('  File "<stdin>", line 2, in forward\n') == "<stdin>:2"


def test_code_lines_are_kept_in_files(planned):
    saved = json.loads(planned.program.to_json())
    assert graph.Graph.from_dict(saved["graph"]) == planned.plan.graph
    assert any("source" in op for op in saved["graph"]["ops"])


def test_words_are_plain(page):
    text = re.sub(r"<script.*", "", page, flags=re.DOTALL)
    assert "bytes beside the graph" in text
    assert "kept beside the storages" not in text


def test_the_room_for_an_unknown_loss_is_in_report_and_page(page, planned):
    row = re.search(r"set aside for the loss +(.*), unknown until a step has run", planned.report())
    assert row
    output_bytes = 256 * 16 * 4
    assert row.group(1).strip() == format_bytes(4 * output_bytes)
    assert "<dt>set aside for the loss</dt><dd>64 KiB, unknown" in page


@pytest.mark.parametrize("engine", ["graph", "chain"])
def test_a_known_loss_sets_nothing_aside(engine):
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)]
    loss = nn.functional.mse_loss
    model = rotor.Checkpointable(nn.Sequential(*layers), engine=engine, loss_fn=loss, verbosity=0)
    x = torch.randn(8, 16)
    model.measure(x, targets=(x,))
    model.compute_sequence(mem_limit="1MiB")
    assert "set aside for the loss" not in model.report()


def test_reports_say_the_shape_and_the_number_of_plans():
    model = rotor.Checkpointable(Blocks(), mem_limit="1MiB", engine="graph", verbosity=0)
    model(torch.randn(4, 16)).sum().backward()
    assert model.report().endswith("for inputs 4x16 float32")
    for size in (16, 8):
        model(torch.randn(size, 16)).sum().backward()
        model.zero_grad(set_to_none=False)
    count = len(model.plans)
    assert count > 1
    assert f"for inputs 8x16 float32, one of {count} plans (model.plans)" in model.report()


def test_a_chain_has_stages(tmp_path):
    layers = [nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(6)]
    model = rotor.Checkpointable(nn.Sequential(*layers), engine="chain", verbosity=0)
    model.measure(torch.randn(256, 16))
    model.compute_sequence(mem_limit=model.curve().minimum_bytes)
    model.report(tmp_path / "chain.html")
    page = (tmp_path / "chain.html").read_text(encoding="utf-8")
    assert "<h2>Stages</h2>" in page
    assert "<h2>Operations</h2>" not in page
    plain = data_of(page)["plain"]
    assert max(level for _, level in plain) == model.plan.unlimited_bytes


def test_commands_of_notebooks_are_left_out(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/x/ipykernel_launcher.py", "-f", "k.json"])
    assert command_line() == ""
    monkeypatch.setattr("sys.argv", ["/usr/bin/rotor", "plan", "net.py:a b"])
    assert command_line() == "rotor plan 'net.py:a b'"
    monkeypatch.setattr("sys.argv", ["/lib/rotor/__main__.py", "info"])
    assert command_line() == "python -m rotor info"
    monkeypatch.setattr("sys.argv", ["/home/train.py"])
    assert About.now("Net").command == "python train.py"
