"""The committed notebooks: those of the sources, executed, and readable on any host."""

from __future__ import annotations

import base64
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
jupytext = pytest.importorskip("jupytext")

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "tutorials").glob("[0-9]*.py"))
LARGEST_BYTES = 1_000_000
OF_A_MACHINE = re.compile(
    r"(?<![\w.])/(?:home|root|tmp|work|Users|usr|opt|var(?!/tmp')|private)/|[A-Z]:\\"
)
PNG = b"\x89PNG\r\n\x1a\n"


def notebook_of(source: Path) -> Any:
    return nbformat.read(source.with_suffix(".ipynb"), as_version=nbformat.NO_CONVERT)


def code_cells(source: Path) -> list[Any]:
    return [cell for cell in notebook_of(source).cells if cell.cell_type == "code"]


def shown(output: Any) -> dict[str, str]:
    """What an output has, by kind."""
    if output.output_type == "stream":
        return {"text/plain": output.text}
    return dict(output.data)


each_source = pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)


def test_each_source_has_a_notebook_and_each_notebook_a_source():
    notebooks = sorted((ROOT / "tutorials").glob("*.ipynb"))
    assert len(notebooks) >= 6
    assert [path.stem for path in notebooks] == [path.stem for path in SOURCES]


@each_source
def test_the_cells_are_those_of_the_source(source):
    cells = [(cell.cell_type, cell.source) for cell in notebook_of(source).cells]
    expected = [(cell.cell_type, cell.source) for cell in jupytext.read(source).cells]
    assert cells == expected, "make notebooks writes them anew"


@each_source
def test_the_outputs_are_of_one_run_from_top_to_bottom(source):
    cells = code_cells(source)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    kinds = {output.output_type for cell in cells for output in cell.outputs}
    assert kinds <= {"stream", "display_data", "execute_result"}
    printing = [cell for cell in cells if re.search(r"^print\(", cell.source, flags=re.MULTILINE)]
    assert all(cell.outputs for cell in printing)
    assert sum(bool(cell.outputs) for cell in cells) >= len(cells) // 3


@each_source
def test_pictures_are_in_the_notebook(source):
    pictures = 0
    for output in [output for cell in code_cells(source) for output in cell.outputs]:
        data = shown(output)
        assert set(data) <= {"text/plain", "image/png", "image/svg+xml"}
        if "image/png" in data:
            assert base64.b64decode(data["image/png"]).startswith(PNG)
            pictures += 1
        elif "image/svg+xml" in data:
            assert "</svg>" in data["image/svg+xml"]
            pictures += 1
    drawing = sum("plt." in cell.source for cell in code_cells(source))
    assert pictures >= max(1, drawing // 2)


@each_source
def test_any_host_can_show_it(source):
    notebook = notebook_of(source)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert notebook.metadata.kernelspec.name == "python3"
    assert notebook.metadata.language_info.name == "python"
    assert source.with_suffix(".ipynb").stat().st_size < LARGEST_BYTES
    assert "widgets" not in notebook.metadata


@each_source
def test_the_outputs_tell_nothing_of_a_machine(source):
    for cell in code_cells(source):
        for output in cell.outputs:
            text = shown(output).get("text/plain", "")
            assert OF_A_MACHINE.findall(text) == [], text[:400]
            assert "\x1b[" not in text


def test_the_readme_links_them():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\((tutorials/\d\d_\w+\.ipynb)\)", readme))
    assert linked == {f"tutorials/{source.stem}.ipynb" for source in SOURCES}


def test_a_word_writes_them_anew():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipe = re.search(r"^notebooks:.*\n\t(.+)$", makefile, flags=re.MULTILINE)
    assert recipe is not None
    script = ROOT / recipe[1].split()[-1]
    assert script.is_file()


def made_by() -> Any:
    path = ROOT / "tutorials" / "make_notebooks.py"
    spec = importlib.util.spec_from_file_location("make_notebooks", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_makes_them_executes_and_leaves_nothing_of_the_machine(tmp_path, monkeypatch):
    pytest.importorskip("nbclient")
    monkeypatch.setenv("ROTOR_CACHE_DIR", str(tmp_path))
    source = tmp_path / "01_small.py"
    source.write_text(
        "# %% [markdown]\n# # Small\n\n# %%\nimport os, tempfile\n\n"
        "for _ in range(2):\n"
        "    print(os.getcwd(), tempfile.mkdtemp() + '/a/plan.json', flush=True)\n\n"
        "# %%\n1 + 1\n",
        encoding="utf-8",
    )
    notebook = made_by().executed(source)
    first, second = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [output.text for output in first.outputs] == [". plan.json\n" * 2]
    assert second.outputs[0].data == {"text/plain": "2"}
    assert (first.execution_count, second.execution_count) == (1, 2)
    nbformat.validate(notebook)
