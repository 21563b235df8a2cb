"""The documentation says what is: its code runs, its links lead somewhere, its messages exist."""

from __future__ import annotations

import ast
import doctest
import gc
import importlib
import inspect
import random
import re
import sys
import types
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
import torch
from random_chains import realistic_chain
from torchvision_standins import import_torchvision

import rotor

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted(
        page
        for page in (ROOT / "docs").rglob("*.md")
        if "_build" not in page.parts and not page.match("docs/tutorials/[0-9]*")  # made by Sphinx
    ),
]
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def without_code(text: str) -> str:
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", text)


FRAMEWORKS = {"hugging-face": "accelerate", "lightning": "lightning"}
LONG = ("docs/hugging-face.md",)  # Three frameworks' loops.
WITH_CODE = [page for page in PAGES if FENCE.search(page.read_text(encoding="utf-8"))]


def test_the_main_pages_have_code():
    names = {name_of(page) for page in WITH_CODE}
    assert {"README.md", "docs/getting-started.md", "docs/algorithms/index.md"} <= names


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name_of(page), marks=[pytest.mark.slow] * (name_of(page) in LONG))
        for page in WITH_CODE
    ],
)
def test_code_runs(page, tmp_path, monkeypatch):
    """All Python blocks of a page, one after the other in one namespace."""
    monkeypatch.chdir(tmp_path)
    # The limits on the pages are for a CPU: kernels on CUDA bring workspaces of their own.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    torch.manual_seed(0)
    # What is captured looks its globals up in the module that it names.
    if page.stem in FRAMEWORKS:
        with suppress(ModuleNotFoundError):
            import_torchvision()
        pytest.importorskip(FRAMEWORKS[page.stem])
    module = types.ModuleType(re.sub(r"\W", "_", f"page_{name_of(page)}"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    namespace = vars(module)
    if page.parent.name == "algorithms":
        # Pages of algorithms speak of "a chain" and "a budget".
        namespace["chain"] = realistic_chain(random.Random(0), 8)
        namespace["budget"] = "500 MiB"
    text = page.read_text(encoding="utf-8")
    for block in FENCE.finditer(text):
        line = text.count("\n", 0, block.start(1))
        code = compile("\n" * line + block[1], str(page), "exec")
        with warnings.catch_warnings():
            if page.stem in FRAMEWORKS:
                warnings.simplefilter("ignore")
            # PyTorch's compiler says so between compiled functions, in plain training too.
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
            warnings.simplefilter("error", rotor.MemoryLimitWarning)
            exec(code, namespace)
    # A file that a page leaves open warns here, not in whichever test runs the collector next.
    namespace.clear()
    gc.collect()


def test_stages_are_named_as_the_page_on_models_says():
    text = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    block = FENCE.search(text)
    assert block is not None
    namespace: dict[str, object] = {}
    exec(block[1], namespace)
    expected = re.search(r"chk\.names\s+# (\[.*\])", block[1])
    assert expected is not None
    assert namespace["chk"].names == ast.literal_eval(expected[1])


@pytest.mark.parametrize(
    "module", ["units", "meter.allocator", "common.progress", "timing", "chain"]
)
def test_doctests(module):
    found = importlib.import_module(f"rotor.{module}")
    results = doctest.testmod(found)
    assert results.failed == 0
    assert results.attempted > 0 or ">>>" not in (inspect.getsource(found))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    text = without_code(page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("http://", "https://", "#")):
            assert (page.parent / target.split("#")[0]).exists(), f"{name_of(page)}: {target}"


def test_figures_are_quoted_by_their_scripts():
    text = (ROOT / "docs/figures.md").read_text(encoding="utf-8")
    for script in re.findall(r"`(benchmarks/\w+\.py)`", text):
        assert (ROOT / script).is_file(), script


def test_make_words_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    words = set(re.findall(r"^([a-z][a-z-]*):", makefile, flags=re.MULTILINE))
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for word in re.findall(
            r"`make ([a-z][a-z-]*)`|^    make ([a-z][a-z-]*)", text, re.MULTILINE
        ):
            assert (word[0] or word[1]) in words, f"{name_of(page)}: make {word}"


def test_the_memory_model_has_every_field_of_a_chain():
    text = (ROOT / "docs/memory-model.md").read_text(encoding="utf-8")
    described = set(re.findall(r"^\| `([a-z_]+)` \|", text, flags=re.MULTILINE))
    assert described == set(inspect.signature(rotor.Chain).parameters) - {"names"}


@cache
def messages() -> list[str]:
    """Every piece of text in the sources that may be part of a message."""
    found = []
    for path in [*(ROOT / "rotor").rglob("*.py"), *(ROOT / "models").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    for path in (ROOT / "csrc").rglob("*.c"):
        found += re.findall(r'"((?:\\.|[^"\\\n])*)"', path.read_text(encoding="utf-8"))
    return found


def test_quoted_messages_exist():
    text = (ROOT / "docs/errors.md").read_text(encoding="utf-8")
    headings = re.findall(r"^### (.*)$", text, flags=re.MULTILINE)
    fragments = [fragment for heading in headings for fragment in re.findall(r"`([^`]+)`", heading)]
    assert len(fragments) > 30
    unknown = [part for part in fragments if not any(part in message for message in messages())]
    assert unknown == []
