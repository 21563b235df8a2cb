"""The tutorials run as written, top to bottom, in a kernel of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = sorted((ROOT / "tutorials").glob("[0-9]*.py"))
IN_CI = ("00_more_in_the_same_memory",)
SECONDS = 400


def marked(path: Path) -> object:
    """The first ones in every run, the others in the long one."""
    return pytest.param(path, id=path.stem, marks=() if path.stem in IN_CI else (pytest.mark.slow,))


@pytest.mark.parametrize("path", [marked(path) for path in TUTORIALS])
def test_tutorial_runs(path, tmp_path):
    """Converted by jupytext, executed by nbmake: a cell that raises fails."""
    jupytext = pytest.importorskip("jupytext")
    pytest.importorskip("nbmake")
    pytest.importorskip("matplotlib")
    jupytext.write(jupytext.read(path), tmp_path / f"{path.stem}.ipynb")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "--nbmake", f"--nbmake-timeout={SECONDS}", "-q"]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "ROTOR_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONWARNINGS": "default",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS + 60,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert "1 passed" in done.stdout


def test_all_eight_are_there():
    assert [path.stem for path in TUTORIALS] == [
        "00_more_in_the_same_memory",
        "01_first_steps",
        "02_any_model",
        "03_reading_the_curve",
        "04_dynamic_models",
        "05_simulator_and_experiments",
        "06_many_gpus",
        "07_a_second_tier",
    ]


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_tutorial_is_a_notebook_for_readers(path):
    jupytext = pytest.importorskip("jupytext")
    cells = jupytext.read(path).cells
    assert cells[0].cell_type == "markdown"
    assert cells[0].source.startswith("# ")
    assert sum(cell.cell_type == "code" for cell in cells) >= 4
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    assert "plt." in code, "no picture"
    assert re.findall(r"\w\._[a-z]\w*", code) == [], "private names"
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        assert (path.parent / target.split("#")[0]).exists(), target


def test_the_documentation_has_them_all():
    index = (ROOT / "docs/tutorials/index.md").read_text(encoding="utf-8")
    assert re.findall(r"^(\d\d_\w+)$", index, flags=re.MULTILINE) == [p.stem for p in TUTORIALS]


def test_what_opens_and_runs_them_comes_with_an_extra():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    names = {
        re.split(r"[^\w-]", wanted)[0]
        for wanted in settings["project"]["optional-dependencies"]["tutorials"]
    }
    assert {"jupyterlab", "jupytext", "ipykernel", "nbclient"} <= names


def test_the_documentation_is_built_without_them_too():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(r"^docs-fast:.*\n\t.*sphinx -W .*-D tutorials_execute=0 docs", makefile, re.M)


def test_the_first_one_has_no_helpers():
    """One line makes the difference; nothing else is to be read."""
    jupytext = pytest.importorskip("jupytext")
    cells = [cell.source for cell in jupytext.read(TUTORIALS[0]).cells if cell.cell_type == "code"]
    assert not any("def " in source or "lambda" in source for source in cells)
    assert sum("plt.subplots" in source for source in cells) == 1
