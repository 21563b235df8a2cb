"""Commands with a second tier of memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import data_of, folder_with, run

from rotor.graph import Program

FACTORY = """
import torch
from torch import nn


def chain(depth=6, width=32):
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)]
    return nn.Sequential(*layers)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)
"""

SCRIPT = """
import torch
from wide import chain, sgd

torch.manual_seed(0)
model = chain(2, 64)
optimizer = sgd(model.parameters())
for _ in range(2):
    loss = model(torch.randn(64, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> None:
    with folder_with("wide.py", FACTORY, tmp_path, monkeypatch):
        yield


@pytest.mark.slow
def test_a_second_tier_holds_no_smaller_batch(capsys, tmp_path):
    given = ("wide.py:chain", "--input", "64,32", "--limit", "200 KB", "--effort", "fast")
    given += ("--max-batch", 512, "--engine", "graph")
    alone = data_of(capsys, "fit", *given)
    both = data_of(capsys, "fit", *given, "--offload", f"disk:{tmp_path}")
    assert both["largest"]["batch"] >= alone["largest"]["batch"] > both["plain"]["batch"]
    assert both["largest"]["measured_bytes"] <= both["largest"]["predicted_bytes"] <= 200_000


def test_a_second_tier_is_planned_with(capsys, tmp_path):
    """A Sequential is then a graph, and a saved program keeps what moves."""
    wide = ("wide.py:chain", "--input", "4096,32", "--offload", f"disk:{tmp_path}")
    data = data_of(capsys, "plan", *wide, "--limit", "5 MB", "--effort", "fast", "--out", "a.json")
    assert data["plan"]["engine"] == "graph"
    assert data["plan"]["predicted_bytes"] <= 5_000_000
    program = Program.from_json(Path("a.json"))
    assert program.peak_bytes <= 5_000_000
    assert data_of(capsys, "report", "a.json")["peak_bytes"] == program.peak_bytes
    assert data_of(capsys, "curve", *wide, "--points", 3, "--effort", "fast", "--no-plain")
    code, _, err = run(
        capsys, "plan", "wide.py:chain", "--input", "8,32", "--offload-limit", "1GiB"
    )
    assert (code, "--offload-limit is for --offload" in err) == (2, True)
    code, _, err = run(capsys, "plan", *wide, "--engine", "chain")
    assert (code, 'engine="chain" has none' in err) == (2, True)


@pytest.mark.filterwarnings("ignore::rotor.MemoryLimitWarning")
def test_parameters_and_states_are_away(capsys, monkeypatch, tmp_path):
    """Limits count them, as does plain's peak; a script's own optimizer is taken."""
    wide = ("wide.py:chain", "--arg", "depth=2", "--arg", "width=64", "--input", "64,64")
    away = (*wide, "--offload", f"disk:{tmp_path}", "--offload-state")
    known = 2 * 64 * 64 * 4
    plan = data_of(capsys, "plan", *away, "Adam", "--limit", "1MiB", "--effort", "fast")["plan"]
    homes = plan["homes"]
    assert [homes[name] for name in ("parameters", "gradients", "states")] == [
        known,
        known,
        2 * known,
    ]
    assert (homes["update_reads"], homes["update_writes"]) == (4 * known, 3 * known)
    curve = data_of(capsys, "curve", *away, "wide.py:sgd", "--points", 2)
    assert homes["resident"] // 3 < curve["homes"]["resident"] < curve["minimum_bytes"]
    assert curve["plain_bytes"] > 2 * known + curve["homes"]["resident"]
    searched = ("--untimed", "--points", 1, "--max-batch", 64, "--multiple-of", 32)
    fit = data_of(capsys, "fit", *away, "adam", *searched, "--limit", "130 KB")
    assert fit["plain"] is None
    assert 4 * known > fit["limit_bytes"] >= fit["largest"]["measured_bytes"]
    Path("train.py").write_text(SCRIPT, encoding="utf-8")
    _, plain, _ = run(capsys, "run", "train.py")
    limited = ("--limit", "1MiB", "--offload", f"disk:{tmp_path}", "--offload-state")
    code, out, err = run(capsys, "run", *limited, "train.py")
    assert (code, out) == (0, plain), err
    for given, text in (
        ((*wide, "--offload-state", "adam"), "--offload-state is for --offload"),
        ((*wide, "--host-limit", "1GiB"), "--host-limit is for --offload"),
        ((*away, "adam", "--host-limit", "1GiB"), "bounds the memory of the host"),
        ((*away, "wide.py:chain"), "calling wide.py:chain failed"),
        ((*away, "rmsprop"), "--offload-state 'rmsprop': expected sgd, adam, adamw, adafactor"),
        ((*away, "none.py:f"), "--offload-state none.py:f: no file none.py"),
    ):
        code, _, err = run(capsys, "plan", *given)
        assert (code, text in err) == (2, True), err
