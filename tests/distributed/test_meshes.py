"""Plans for meshes that are not here: the bytes are those of processes that are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import children
import pytest
from layouts import BATCH
from two_processes import run_processes

from rotor.graph import Machine, Program

HERE = Path(__file__).parent
WORKER = HERE / "layout_worker.py"
CASES = {"split_net": "tp@peak", "split_rows": "sp_without_dropout@peak"}
SHARES = {"split_net": 0.001, "split_rows": 0.005}
"""Gathers and scatters of gloo overlap, by its threads, with what follows them."""


def command(folder: Path, factory: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run ``rotor plan`` for a mesh, with a machine's speeds in a file."""
    machine = Machine("card", 1e13, 1e12, 5e-6, link_bytes_per_second=1e11)
    (folder / "machine.json").write_text(json.dumps(machine.to_dict()), encoding="utf-8")
    given = ["plan", f"{HERE}/layouts.py:{factory}", "--input", ",".join(map(str, BATCH))]
    loss = ["--loss", f"{HERE}/layouts.py:squares"]
    profile = ["--profile", str(folder / "machine.json")]
    return subprocess.run(
        [sys.executable, "-m", "rotor", *given, *loss, *profile, "--quiet", *options],
        capture_output=True,
        text=True,
        timeout=300,
        env=children.environment(),
        check=False,
    )


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("meshes")
    return run_processes(str(WORKER), folder, names=list(CASES.values()))


@pytest.mark.parametrize("factory", CASES)
def test_the_peak_of_a_mesh_that_is_not_here(factory, measured, tmp_path):
    done = command(tmp_path, factory, "--mesh", "dp=1,tp=2", "--limit", "1GiB", "--json")
    assert done.returncode == 0, done.stderr
    planned = Program.from_json(json.dumps(json.loads(done.stdout)["schedule"])).peak_bytes
    for rank in measured:
        (peak,) = map(int, rank[CASES[factory]])
        assert abs(planned - peak) <= SHARES[factory] * peak


def test_a_limit_on_a_large_mesh(tmp_path):
    done = command(tmp_path, "split_net", "--mesh", "dp=16,tp=8", "--limit", "1MiB", "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["plan"]["predicted_bytes"] <= 1 << 20
    program = Program.from_json(json.dumps(data["schedule"]))
    assert len(program.ops) > len(program.graph.operations)


@pytest.mark.parametrize("text", ["tp", "tp=0", "dp=2,tp=", "=4", "tp=-1"])
def test_sizes_that_are_none(text, tmp_path):
    done = command(tmp_path, "split_net", "--mesh", text, "--limit", "1GiB")
    assert done.returncode != 0
    assert "expected names and sizes, such as dp=8,tp=4" in done.stderr


def test_a_mesh_needs_a_profile(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "rotor", "plan", "GPT", "--mesh", "tp=2", "--limit", "1GiB"],
        capture_output=True,
        text=True,
        timeout=300,
        env=children.environment(),
        check=False,
    )
    assert done.returncode != 0
    assert "give --profile too" in done.stderr
