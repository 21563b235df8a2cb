"""Everything that a user can meet is documented: errors, figures, links."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ERRORS = ROOT / "docs/errors.md"
STATES = {
    *("RuntimeError", "MemoryError", "ImportError", "InfeasibleError", "BudgetError"),
    *("CaptureError", "MeterBusyError", "RankError", "warn", "_warn_once"),
}
"""What is about the state of a model or machine; errors about arguments speak for themselves."""
ELSEWHERE = ("rotor/integrations",)
"""Their pages have their messages."""
PASSED_ON = {
    "capture",
    "over",
    "busy",
    "the graph has no fake tensors",
}
"""Keys of warnings that are given once, whose text is made elsewhere; and a bug of ours."""


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
        if name.startswith(ELSEWHERE):
            continue
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
