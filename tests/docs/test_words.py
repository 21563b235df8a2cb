"""The words of docstrings: they name their subject, or begin with a verb."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "rotor"
PATHS = sorted(ROOT.rglob("*.py"))
QUESTIONS = {"What", "Whether", "Where", "How", "Which"}
ARTICLES = {"The", "A", "An"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(source):
    """Yield (line, owner, text) of docstrings, those of attributes included."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | FUNCTIONS[0] | FUNCTIONS[1]):
            continue
        for index, line in enumerate(node.body):
            text = line.value.value if is_literal(line) else None
            if isinstance(text, str):
                yield line.lineno, node if index == 0 else node.body[index - 1], text


def is_literal(line):
    """Return whether a statement is a literal."""
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)


def is_called(owner):
    """Return whether a docstring's owner is a function or method, and no property."""
    if not isinstance(owner, FUNCTIONS):
        return False
    return not any("property" in ast.unparse(mark) for mark in owner.decorator_list)


def faults(source):
    """Return (line, first word) of docstrings with an opening that names no subject or deed."""
    found = []
    for line, owner, text in docstrings(source):
        first = (text.split() or [""])[0].rstrip(",:;.")
        wrong = QUESTIONS | ARTICLES if is_called(owner) else QUESTIONS
        if first in wrong:
            found.append((line, first))
    return found


@pytest.mark.parametrize("path", PATHS, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_open_with_their_subject_or_a_verb(path):
    assert faults(path.read_text(encoding="utf-8")) == []


def test_openings_without_a_subject_are_found():
    source = '''"""What it is."""
LIMIT = 3
"""How many there are."""
class Meter:
    """The meter."""
    @property
    def level(self):
        """Whether it is level."""
    def read(self):
        """The figures."""
    def stop(self):
        """Return the figures."""
'''
    assert faults(source) == [(1, "What"), (3, "How"), (8, "Whether"), (10, "The")]
