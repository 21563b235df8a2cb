"""The name: PyPI's "rotor" is another project, so nothing may lead a user there."""

from __future__ import annotations

import ensurepip
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rotor

ROOT = Path(__file__).resolve().parents[2]
OTHERS_LATEST = (1, 0)
"""The newest version of the other project."""
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted(p for p in (ROOT / "docs").rglob("*.md") if "_build" not in p.parts),
    *sorted((ROOT / "tutorials").glob("*.py")),
    *sorted((ROOT / "rotor").rglob("*.py")),
    *sorted((ROOT / "models").rglob("*.py")),
    *sorted((ROOT / "benchmarks").glob("*.py")),
    ROOT / "Makefile",
]
FROM_THE_INDEX = re.compile(r"""(?:pip|uv)\s+(?:\S+\s+)*?install[^\n`]*?\s["']?rotor\b(?!\.)""")
EXTRA = re.compile(r"\brotor\[")
UPGRADE = re.compile(r"\bpip3?\s+install\s+(?:-\S+\s+)*(?:-U|--upgrade)\b[^\n]*rotor")


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def publish() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    path = ROOT / ".github" / "workflows" / "publish.yml"
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_the_version_is_above_the_other_project():
    version = project()["version"]
    assert rotor.__version__ == version
    assert tuple(int(part) for part in version.split(".")[:2]) >= (2, 0) > OTHERS_LATEST
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {version}\n" in citation
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\S+)", changelog, flags=re.MULTILINE)[0] == version


@pytest.mark.parametrize(
    "text", ["pip install rotor", 'pip install -U "rotor[plot]"', "x rotor[a]"]
)
def test_the_patterns_find_what_they_are_for(text):
    assert FROM_THE_INDEX.search(text) or EXTRA.search(text)


@pytest.mark.parametrize(
    "text", ['`pip install ".[plot]"`', "pip install ./rotor.whl", "rotor.dtr"]
)
def test_the_patterns_pass_what_is_right(text):
    assert not any(pattern.search(text) for pattern in (FROM_THE_INDEX, EXTRA, UPGRADE))


def test_no_page_and_no_message_leads_to_the_other_project():
    assert len(PAGES) > 150
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in PAGES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if FROM_THE_INDEX.search(line) or EXTRA.search(line) or UPGRADE.search(line)
    ]
    assert found == []


def test_the_readme_says_it_in_one_line():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = [line for line in readme.splitlines() if "on PyPI" in line and "another" in line]
    assert len(lines) == 1


def test_messages_about_what_is_missing_name_it(monkeypatch):
    from rotor.algorithms import Curve
    from rotor.commands.curve import check_plot
    from rotor.report.figures import check_formats

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for call in (
        lambda: Curve([1], [1.0]).plot(),
        lambda: check_plot("curve.png"),
        lambda: check_formats(["png"]),
    ):
        with pytest.raises(ImportError) as caught:
            call()
        assert "`pip install matplotlib`" in str(caught.value)
        assert '`pip install ".[plot]"`' in str(caught.value)


def test_every_extra_that_a_message_names_exists():
    extras = set(project()["optional-dependencies"])
    for path in PAGES:
        for named in re.findall(r'"\.\[([\w,]+)\]"', path.read_text(encoding="utf-8")):
            assert set(named.split(",")) <= extras, path


def test_the_publish_workflow_has_the_name_from_one_variable(tmp_path):
    """The step that names the distribution, run on a copy of pyproject.toml."""
    workflow = publish()
    assert "vars.DISTRIBUTION" in workflow["env"]["DISTRIBUTION"]
    for job in ("sdist", "wheels"):
        (step,) = [
            step
            for step in workflow["jobs"][job]["steps"]
            if step.get("name") == "Name the distribution"
        ]
        copy = tmp_path / job
        copy.mkdir()
        (copy / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
        environment = os.environ | {"DISTRIBUTION": "train-in-bytes"}
        subprocess.run(["bash", "-ec", step["run"]], cwd=copy, env=environment, check=True)
        text = (copy / "pyproject.toml").read_text(encoding="utf-8")
        settings = tomllib.loads(text)
        assert settings["project"]["name"] == "train-in-bytes"
        assert settings["project"]["scripts"] == {"rotor": "rotor.commands.main:main"}
        extras = settings["project"]["optional-dependencies"]
        assert "train-in-bytes[plot,draw]" in extras["tutorials"]
        assert "rotor[" not in text


@pytest.mark.parametrize("name, accepted", [("rotor", False), ("train-in-bytes", True)])
def test_the_publish_workflow_does_not_publish_under_the_other_name(name, accepted):
    step = publish()["jobs"]["publish"]["steps"][0]
    done = subprocess.run(
        ["bash", "-ec", step["run"]],
        env=os.environ | {"DISTRIBUTION": name},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode == 0) == accepted
    assert accepted or "repository variable DISTRIBUTION" in done.stdout


@pytest.mark.parametrize("keyword", ["license", "license_expression"])
def test_the_license_is_stated_as_each_setuptools_wants_it(monkeypatch, keyword):
    """setuptools before 77 refuses ``license = "BSD-3-Clause"`` in pyproject.toml."""
    import setuptools

    known = {"license": None} | {keyword: None}
    distribution = SimpleNamespace(metadata=SimpleNamespace(**known))
    monkeypatch.setattr(setuptools, "Distribution", lambda: distribution)
    given: dict[str, Any] = {}
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(setuptools, "setup", lambda **keywords: given.update(keywords))
    spec = importlib.util.spec_from_file_location("setup_of_rotor", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert given[keyword] == "BSD-3-Clause"
    assert {"license", "license_expression"} & set(given) == {keyword}
    metadata = project()
    assert not isinstance(metadata.get("license"), str)
    assert "license-files" not in metadata
    assert "license" in metadata["dynamic"]


BUNDLED = sorted((Path(ensurepip.__file__).parent / "_bundled").glob("setuptools-*.whl"))


@pytest.mark.skipif(not BUNDLED, reason="Python 3.12 and later bring no setuptools")
def test_the_setuptools_of_a_fresh_environment_reads_the_metadata():
    done = subprocess.run(
        [sys.executable, "-S", "setup.py", "-q", "--name", "--version", "--license"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(BUNDLED[0]), "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["rotor", rotor.__version__, "BSD-3-Clause"]


def test_an_egg_is_unpacked():
    """``python setup.py install`` makes an egg; an extension cannot be loaded from a zipped one."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert settings["tool"]["setuptools"]["zip-safe"] is False
