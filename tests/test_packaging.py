"""The sdist and the wheel: what they contain, that they build, and work from another folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = shutil.ignore_patterns(
    ".*", "build", "dist", "_build", "__pycache__", "*.egg-info", "*.so", "*.pyc"
)

SCRIPT = """
import sys
from pathlib import Path

target = Path(sys.argv[1]).resolve()
import rotor
import rotor.models
from rotor import _core, algorithms

for module in (rotor, rotor.models, rotor.models.resnet, _core, algorithms):
    assert Path(module.__file__).resolve().is_relative_to(target), module.__file__
assert "models" not in sys.modules

n = 6
chain = rotor.Chain([1.0] * n, [2.0] * n, [10] * (n + 1), [30] * n, [0] * n, [0] * n)
everything = algorithms.NoCheckpoint().curve(chain).minimum_bytes
sequence = algorithms.Persistent().solve(chain, everything // 2)
assert sequence.peak_bytes <= everything // 2
assert sequence.makespan > chain.ideal_time

import torch
from torch import nn

torch.manual_seed(0)
model = rotor.Checkpointable(
    nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(16, 4), "1 MB"
)
model(torch.randn(16, 4)).sum().backward()
assert model[0].weight.grad is not None
assert len(rotor.resnet.resnet18()) > 5
"""


def run(*command: str, cwd: Path, environment: dict[str, str] | None = None) -> str:
    # A sanitised run of the tests preloads its library, and points to its own build.
    clean = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "PYTHONPATH")}
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**clean, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """The sdist, built from a copy of the tree without what was built there before."""
    folder = tmp_path_factory.mktemp("sdist")
    tree = folder / "tree"
    shutil.copytree(ROOT, tree, ignore=LEFT_OUT)
    run(sys.executable, "-m", "build", "--no-isolation", "--sdist", cwd=tree)
    (archive,) = (tree / "dist").glob("*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def unpacked(sdist, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (tree,) = folder.iterdir()
    return tree


@pytest.fixture(scope="module")
def wheel(unpacked):
    """The wheel, built from the sdist alone."""
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", cwd=unpacked)
    (archive,) = (unpacked / "dist").glob("*.whl")
    return archive


def files_under(folder: str, *suffixes: str) -> set[str]:
    found = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in suffixes
        and "_build" not in path.parts
        and "__pycache__" not in path.parts
    }
    assert found
    return found


def test_the_sdist_has_every_source(unpacked):
    expected = {"setup.py", "pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md", "Makefile"}
    expected |= {"CONTRIBUTING.md"}
    expected |= files_under("csrc", ".c", ".h")
    expected |= files_under("rotor", ".py", ".pyi", ".typed", ".css", ".js", ".json")
    expected |= files_under("models", ".py")
    expected |= files_under("tests", ".py", ".c", ".h", ".json")
    expected |= files_under("benchmarks", ".py")
    expected |= files_under("docs", ".md", ".py")
    present = {p.relative_to(unpacked).as_posix() for p in unpacked.rglob("*") if p.is_file()}
    assert expected - present == set()
    assert not any(name.endswith((".so", ".pyc")) for name in present)


def test_the_wheel_has_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    expected = files_under("rotor", ".py", ".pyi", ".typed", ".css", ".js", ".json")
    expected |= {f"rotor/{name}" for name in files_under("models", ".py")}
    assert expected - names == set()
    extensions = [
        n for n in names if n.startswith("rotor/_core.") and n.endswith((".so", ".dylib"))
    ]
    assert len(extensions) == 1
    others = names - expected - set(extensions)
    assert {name for name in others if ".dist-info/" not in name} == set()


def test_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(archive.read(name).decode("utf-8"))
    assert metadata["Name"] == "rotor"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "BSD-3-Clause"
    required = [r for r in metadata.get_all("Requires-Dist") if "extra ==" not in r]
    assert sorted(r.split(">=")[0] for r in required) == ["numpy", "psutil", "torch"]
    assert "torch>=2.11" in required
    assert metadata.get_payload().startswith("# rotor")


def test_the_version_is_one(wheel):
    import rotor

    assert wheel.name.split("-")[1] == rotor.__version__


def test_an_installed_wheel_works_from_another_folder(wheel, tmp_path):
    target = tmp_path / "target"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    run(
        *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
        *("--no-deps", "--no-index", "--target", str(target), str(wheel)),
        cwd=elsewhere,
    )
    run(
        *(sys.executable, "-c", SCRIPT, str(target)),
        cwd=elsewhere,
        environment={"PYTHONPATH": str(target), "OMP_NUM_THREADS": "1"},
    )
