"""Everything that a user can meet is documented: errors, figures, links."""

from __future__ import annotations

import ast
import doctest
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ERRORS = ROOT / "docs/errors.md"
STATES = {
    *("RuntimeError", "MemoryError", "ImportError", "InfeasibleError", "BudgetError"),
    *("CaptureError", "RecomputationError", "MeterBusyError", "RankError", "warn", "_warn_once"),
    "warn_caller",
}
"""What is about the state of a model or machine; errors about arguments speak for themselves."""
PASSED_ON = {"capture", "unrepeatable", "over", "busy", "the graph has no fake tensors"}
"""Keys of warnings that are given once, whose text is made elsewhere; and a bug of ours."""


TYPED_PAGES = (*("getting-started", "out-of-memory", "own-loops", "graph", "dynamic", "models"),)


def headings() -> list[str]:
    lines = re.findall(r"^### (.*)$", ERRORS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [part for line in lines for part in re.findall(r"`([^`]+)`", line)]


def texts(node: ast.AST) -> list[str]:
    return [
        part.value
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    ]


def name_of(call: ast.Call) -> str:
    return getattr(call.func, "id", None) or getattr(call.func, "attr", "")


def messages() -> list[tuple[str, list[str]]]:
    """Where an error or warning about a state is made, and the fixed parts of its text."""
    found = []
    for path in sorted((ROOT / "rotor").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            call = node.exc if isinstance(node, ast.Raise) else node
            if isinstance(call, ast.Call) and name_of(call) in STATES:
                parts = [text for argument in call.args for text in texts(argument)]
                if parts:
                    found.append((f"{name}:{node.lineno}", parts))
    return found


def test_messages_about_states_are_explained():
    known = headings()
    found = messages()
    assert len(found) > 80
    unexplained = [
        (where, parts)
        for where, parts in found
        if not any(heading in part for heading in known for part in parts)
        and not PASSED_ON.intersection(part.strip() for part in parts)
    ]
    assert unexplained == []


def test_every_class_of_errors_is_explained():
    text = ERRORS.read_text(encoding="utf-8")
    for path in (ROOT / "rotor").rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            is_public = isinstance(node, ast.ClassDef) and not node.name.startswith("_")
            if is_public and re.search("(Error|Warning)$", node.name):
                assert f"{node.name}`" in text, f"{path.name}: {node.name}"


def test_figures_of_the_comparison_are_those_of_the_scripts():
    text = (ROOT / "docs/comparison.md").read_text(encoding="utf-8")
    figures = (ROOT / "docs/figures.md").read_text(encoding="utf-8")
    measured = set(re.findall(r"\b\d+\.\d{2,}\b", text))
    assert len(measured) >= 8
    assert {number for number in measured if number not in figures} == set()


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and MyST make it."""
    text = re.sub(r"[`*]|\{\w+\}", "", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def without_code(text: str) -> str:
    return re.sub(r"^(`{3,}).*?^\1`*$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    text = without_code(page.read_text(encoding="utf-8"))
    found = {slug(line) for line in re.findall(r"^#{1,6} (.*)$", text, flags=re.MULTILINE)}
    return found | set(re.findall(r"^\(([\w-]+)\)=$", text, flags=re.MULTILINE))


def texts_with_links() -> list[tuple[Path, str]]:
    pages = [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
        *(p for p in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in p.parts),
    ]
    pages = [p for p in pages if not p.match("docs/tutorials/[0-9]*.md")]
    found = [(page, without_code(page.read_text(encoding="utf-8"))) for page in pages]
    for path in sorted((ROOT / "tutorials").glob("*.py")):
        lines = path.read_text(encoding="utf-8").splitlines()
        found.append((path, "\n".join(line[2:] for line in lines if line.startswith("# "))))
    return found


def test_links_and_anchors_lead_somewhere():
    broken = []
    for page, text in texts_with_links():
        name = page.relative_to(ROOT).as_posix()
        for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text)):
            if re.match(r"(https?|mailto):", target):
                continue
            path, _, anchor = target.partition("#")
            other = page.parent / path if path else page
            if not other.exists() or (anchor and anchor not in anchors(other)):
                broken.append(f"{name}: {target}")
        for role in re.findall(r"\{doc\}`([^`]+)`", text):
            target = re.sub(r"^.*<(.*)>$", r"\1", role, flags=re.DOTALL)
            folder = ROOT / "docs" if target.startswith("/") else page.parent
            made = (ROOT / "tutorials" / f"{Path(target).name}.py").is_file()
            if not (folder / f"{target.lstrip('/')}.md").is_file() and not made:
                broken.append(f"{name}: {{doc}} {target}")
    assert broken == []


def test_every_page_is_in_a_table_of_contents():
    docs = ROOT / "docs"
    listed = set()
    for page in docs.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        for body in re.findall(r"^```\{toctree\}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            for line in body.splitlines():
                if line == "*":
                    listed.update(path.resolve() for path in page.parent.glob("*.md"))
                elif line and not line.startswith(":"):
                    listed.add((page.parent / f"{line.strip()}.md").resolve())
    pages = {p.resolve() for p in docs.rglob("*.md") if "_build" not in p.parts}
    assert pages - listed == {(docs / "index.md").resolve()}


def modules_with_examples() -> list[str]:
    found = []
    for folder, package in (("rotor", "rotor"), ("models", "rotor.models")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if re.search(r"^\s*>>> ", path.read_text(encoding="utf-8"), flags=re.MULTILINE):
                parts = path.relative_to(ROOT / folder).with_suffix("").parts
                found.append(".".join([package, *(part for part in parts if part != "__init__")]))
    return found


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples_in_docstrings_run(name):
    results = doctest.testmod(importlib.import_module(name))
    assert results.failed == 0


@pytest.mark.slow
def test_examples_have_types(tmp_path):
    """Mypy accepts the code of the README and of the pages for users; untyped bodies too."""
    pytest.importorskip("mypy")
    pages = ["README", *(f"docs/{name}" for name in TYPED_PAGES)]
    for page in pages:
        text = (ROOT / f"{page}.md").read_text(encoding="utf-8")
        blocks = re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
        assert blocks, page
        (tmp_path / f"{page.replace('/', '_').replace('-', '_')}.py").write_text("\n".join(blocks))
    command = [sys.executable, "-m", "mypy", "--no-incremental", "--check-untyped-defs"]
    command += ["--ignore-missing-imports", "--python-version", "3.11", "--config-file", os.devnull]
    command += ["--allow-redefinition"]
    command += ["--disable-error-code", "no-redef", "--disable-error-code", "annotation-unchecked"]
    done = subprocess.run(
        [*command, *map(str, sorted(tmp_path.glob("*.py")))],
        cwd=ROOT,
        env=os.environ | {"MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    found = [line for line in done.stdout.splitlines() if line.startswith(str(tmp_path))]
    assert found == [], done.stdout[-4000:]
    assert done.returncode in (0, 1), done.stderr
