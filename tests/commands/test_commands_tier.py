"""Commands with a second tier of memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import data_of, folder_with, run

from rotor.graph import Program

FACTORY = """
from torch import nn


def chain(depth=6, width=32):
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)]
    return nn.Sequential(*layers)
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
