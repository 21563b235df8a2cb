"""The sdist and the wheel: what they contain, that they build, and work from another folder."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = shutil.ignore_patterns(
    ".*", "build", "dist", "_build", "__pycache__", "*.egg-info", "*.so", "*.pyc"
)


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


def unbuilt_clone(folder: Path) -> Path:
    clone = folder / "clone"
    shutil.copytree(ROOT / "rotor", clone / "rotor", ignore=LEFT_OUT)
    return clone


def test_a_clone_that_is_not_built_has_the_installed_package(tmp_path):
    clone, site = unbuilt_clone(tmp_path), tmp_path / "site"
    shutil.copytree(ROOT / "rotor", site / "rotor", ignore=LEFT_OUT)
    shutil.copytree(ROOT / "models", site / "rotor/models", ignore=LEFT_OUT)
    shutil.copy(importlib.util.find_spec("rotor._core").origin, site / "rotor")
    code = "import rotor.models, rotor.simrd as s; print(rotor.models.__file__, s.__file__)"
    said = run(sys.executable, "-c", code, cwd=clone, environment={"PYTHONPATH": str(site)})
    assert said.split() == [
        str(site / "rotor" / name / "__init__.py") for name in ("models", "simrd")
    ]
    said = run(
        sys.executable, "-m", "rotor", "--version", cwd=clone, environment={"PYTHONPATH": str(site)}
    )
    assert said.startswith("rotor ")


def test_a_clone_without_an_installed_package_says_what_to_do(tmp_path):
    clone = unbuilt_clone(tmp_path)
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import rotor"],
        cwd=clone,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        capture_output=True,
        text=True,
    )
    assert f"run `pip install -e .` in {clone}" in done.stderr
    assert "circular" not in done.stderr


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


def test_the_sdist_has_every_source(sdist):
    expected = {"setup.py", "pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md", "Makefile"}
    expected |= {"CONTRIBUTING.md", "CITATION.cff"}
    expected |= files_under("csrc", ".c", ".h")
    expected |= files_under("rotor", ".py", ".pyi", ".typed", ".css", ".js", ".json", ".gz")
    expected |= files_under("models", ".py")
    expected |= files_under("tests", ".py", ".c", ".h", ".json")
    expected |= files_under("benchmarks", ".py", ".json")
    expected |= files_under("docs", ".md", ".py", ".svg", ".png", ".css", ".js")
    expected |= files_under("tutorials", ".py", ".ipynb")
    with tarfile.open(sdist) as archive:
        present = {member.name.partition("/")[2] for member in archive if member.isfile()}
    assert expected - present == set()
    assert not any(name.endswith((".so", ".pyc")) for name in present)


def test_the_wheel_has_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    expected = files_under("rotor", ".py", ".pyi", ".typed", ".css", ".js", ".json", ".gz")
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


RELATIVE = re.compile(r"\]\((?!https://|#)[^)]*\)")


def described(**variables: str) -> str:
    """The text that a package index shows of this tree."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GITHUB_")} | variables
    command = [sys.executable, "setup.py", "-q", "--long-description"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment | {"PYTHONWARNINGS": "ignore"}, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.decode("utf-8")


def test_links_of_the_readme_work_on_a_package_index():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    relative = re.findall(r"\]\((?!https?:|#)([^)\s]+)\)", readme)
    assert len(relative) > 30
    assert [path for path in relative if not (ROOT / path.partition("#")[0]).exists()] == []
    text = described(GITHUB_REPOSITORY="owner/rotor", GITHUB_SHA="abc123")
    assert RELATIVE.findall(text) == []
    for kind, path in (
        *(("raw", "docs/curve.svg"), ("raw", "docs/plan-page.png"), ("blob", "docs/plan-page.png")),
        ("blob", "docs/out-of-memory.md"),
    ):
        assert f"](https://github.com/owner/rotor/{kind}/abc123/{path})" in text
    assert text.count("](https://") == len(re.findall(r"\]\((?!#)", readme))


def test_without_a_repository_links_of_the_readme_are_words():
    text = described()
    assert RELATIVE.findall(text) == []
    assert "\nOut of memory? goes from the error to a working limit" in text
    assert text.startswith("# rotor\n")


def test_the_version_is_one(wheel):
    import rotor

    assert wheel.name.split("-")[1] == rotor.__version__
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {rotor.__version__}\n" in citation
    assert f"\n## {rotor.__version__} " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_an_installed_wheel_works_without_a_compiler(wheel, tmp_path):
    """In a fresh environment, which sees the packages that rotor needs but not the source."""
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    elsewhere.mkdir()
    run(sys.executable, "-m", "venv", "--without-pip", str(home), cwd=tmp_path)
    python = home / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check")
    options = ("--quiet", "--no-deps", "--no-index", "--only-binary=:all:")
    alone = {"PATH": str(home / "bin"), "CC": "/nonexistent/cc", "CXX": "/nonexistent/c++"}
    run(*pip, "install", *options, str(wheel), cwd=elsewhere, environment=alone)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(home)}))
    assert (packages / "rotor").is_dir()
    # A plain folder: links that editable installs leave in it are not followed.
    (packages / "needed.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    script = str(ROOT / "tests" / "installed.py")
    alone |= {"OMP_NUM_THREADS": "1"}
    run(str(python), script, str(home), cwd=elsewhere, environment=alone)
    version = run(str(home / "bin" / "rotor"), "--version", cwd=elsewhere, environment=alone)
    assert version.split() == ["rotor", wheel.name.split("-")[1]]


def loaded(path: Path):
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_the_citation_has_what_its_format_asks_for():
    citation = loaded(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["cff-version"] == "1.2.0"
    assert citation["license"] == "BSD-3-Clause"
    for work in citation["references"]:
        assert {"type", "title", "authors", "year"} <= set(work), work["title"]
        assert isinstance(work["year"], int)
        assert all({"family-names", "given-names"} == set(author) for author in work["authors"])
    links = {work.get("url", "") for work in citation["references"]}
    assert {"https://hal.science/hal-02352969", "https://arxiv.org/abs/2006.09616"} <= links


def test_workflows_run_the_words_of_the_makefile():
    ci = loaded(ROOT / ".github" / "workflows" / "ci.yml")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    words = set()
    for job in ci["jobs"].values():
        words |= {step["run"].split()[1] for step in job["steps"] if "run" in step}
    assert words == {"test", "test-sanitized", "lint", "docs"}
    assert all(f"\n{word}:" in makefile for word in words)
    publish = loaded(ROOT / ".github" / "workflows" / "publish.yml")["jobs"]
    assert publish["publish"]["needs"] == ["sdist", "wheels"]
    assert publish["publish"]["permissions"] == {"id-token": "write"}


def test_wheels_are_built_for_the_versions_that_are_named():
    with (ROOT / "pyproject.toml").open("rb") as file:
        settings = tomllib.load(file)
    named = {
        text.rpartition(" ")[2].replace(".", "")
        for text in settings["project"]["classifiers"]
        if re.fullmatch(r"Programming Language :: Python :: 3\.\d+", text)
    }
    built = {
        name.removeprefix("cp").removesuffix("-*")
        for name in settings["tool"]["cibuildwheel"]["build"]
    }
    assert built == named
