"""Plans for meshes that are not here: the bytes are those of processes that are."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import children
import pytest
from layouts import BATCH
from two_processes import run_processes

from rotor.commands.model import mesh_sizes
from rotor.graph import Machine, Program

HERE = Path(__file__).parent
WORKER = HERE / "layout_worker.py"
CASES = {"split_net": "tp@peak", "split_rows": "sp_without_dropout@peak"}
SHARES = {"split_net": 0.001, "split_rows": 0.005}
"""Gathers and scatters of gloo overlap, by its threads, with what follows them."""


def command(
    folder: Path, factory: str, *options: str, name: str = "plan"
) -> subprocess.CompletedProcess[str]:
    """Run ``rotor plan``, or another command, for a mesh, with a machine's speeds in a file."""
    machine = Machine("card", 1e13, 1e12, 5e-6, link_bytes_per_second=1e11)
    (folder / "machine.json").write_text(json.dumps(machine.to_dict()), encoding="utf-8")
    given = [name, f"{HERE}/layouts.py:{factory}", "--input", ",".join(map(str, BATCH))]
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


SLOW = ["split_rows"]


@pytest.mark.parametrize(
    "factory", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES]
)
def test_the_peak_of_a_mesh_that_is_not_here(factory, tmp_path):
    done = command(tmp_path, factory, "--mesh", "dp=1,tp=2", "--limit", "1GiB", "--json")
    assert done.returncode == 0, done.stderr
    planned = Program.from_json(json.dumps(json.loads(done.stdout)["schedule"])).peak_bytes
    for rank in run_processes(str(WORKER), tmp_path, names=[CASES[factory]]):
        (peak,) = map(int, rank[CASES[factory]])
        assert abs(planned - peak) <= SHARES[factory] * peak


def test_a_limit_on_a_large_mesh(tmp_path):
    done = command(tmp_path, "split_net", "--mesh", "dp=16,tp=8", "--limit", "1MiB", "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["plan"]["predicted_bytes"] <= 1 << 20
    program = Program.from_json(json.dumps(data["schedule"]))
    assert len(program.ops) > len(program.graph.operations)


def test_the_largest_batch_on_a_mesh(tmp_path):
    size = ["--max-batch", "16", "--multiple-of", str(BATCH[0])]
    mesh = ["--mesh", "dp=1,tp=2", "--json"]
    done = command(tmp_path, "split_net", *mesh, *size, "--limit", "6MiB", name="fit")
    assert done.returncode == 0, done.stderr
    fitted = json.loads(done.stdout)
    assert fitted["profile"] == "card"
    assert fitted["largest"]["measured_bytes"] is None
    assert fitted["largest"]["batch"] == 2 * BATCH[0]
    assert fitted["largest"]["predicted_bytes"] <= 6 << 20
    assert fitted["plain"]["batch"] == BATCH[0]
    done = command(tmp_path, "split_net", *mesh, "--points", "2", name="curve")
    assert done.returncode == 0, done.stderr
    assert fitted["plain"]["predicted_bytes"] == json.loads(done.stdout)["plain_bytes"]


def test_sizes_of_a_mesh():
    given = argparse.Namespace(mesh="dp=8, tp=4", profile="machine.json")
    assert mesh_sizes(given) == {"dp": 8, "tp": 4}


@pytest.mark.parametrize("text", ["tp", "tp=0", "dp=2,tp=", "=4", "tp=-1"])
def test_sizes_that_are_none(text):
    with pytest.raises(ValueError, match="expected names and sizes, such as dp=8,tp=4"):
        mesh_sizes(argparse.Namespace(mesh=text, profile="machine.json"))


def test_a_mesh_needs_a_profile():
    with pytest.raises(ValueError, match="give --profile too"):
        mesh_sizes(argparse.Namespace(mesh="tp=2", profile=None))
