"""The API reference is complete: pages, parameters, what is returned, what is raised."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from numpydoc import docscrape

ROOT = Path(__file__).resolve().parents[2]
PAGES = "\n".join(
    page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs/api").glob("*.md"))
)
REFERENCE_TEXT = re.sub(r"^#.*$", "", PAGES, flags=re.MULTILINE)
MODULES = sorted(
    set(re.findall(r"(?:automodule|currentmodule|py:module):: (rotor[\w.]*)", PAGES))
    - {"rotor._core"}
    - set(re.findall(r"automodule:: (rotor\.integrations[\w.]*)", PAGES))  # need frameworks
)
FEW = 2
"""So many parameters may do with their names, types and the sentence about the function."""
MADE_BY_OTHERS = {"Log", "Session", "Training", "Stats", "Candidate"}
"""Classes that users get and do not make."""
VERBS = re.compile(
    "^(Build|Call|Capture|Compute|Draw|Find|Give|Let|Load|Make|Measure|Plan|Read|Return|Run|Serve|"
    "Simulate|Take|Turn|Write)s? "
)
REFERENCE = re.compile(r"parameters as of `|see the class|attributes? of `|as of `|as its keys")
OWN_ERRORS = re.compile("^[A-Z]\\w*(Error|Warning)$")


def public_names(module: Any) -> list[str]:
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__
        and re.search(rf"\b{name}\b", REFERENCE_TEXT)
    ]


def documented_members(name: str) -> set[str] | None:
    """The members that a page lists for a class; None for all."""
    entry = re.search(rf"auto(?:class|exception):: (?:[\w.]+\.)?{name}\n((?:   :.*\n)*)", PAGES)
    if entry is None:
        return None
    if ":no-members:" in entry[1]:
        return set()
    members = re.search(r":members: (.+)", entry[1])
    return set(re.split(r",\s*", members[1].strip())) if members else None


def public_objects() -> Iterator[tuple[str, Any, type | None]]:
    """Functions, classes and the methods that the pages show; each once."""
    seen = set()
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in public_names(module):
            value = getattr(module, name)
            if id(value) in seen or not (inspect.isfunction(value) or inspect.isclass(value)):
                continue
            seen.add(id(value))
            yield f"{module_name}.{name}", value, None
            if not inspect.isclass(value):
                continue
            shown = documented_members(name)
            for key, member in vars(value).items():
                if key.startswith("_") or (shown is not None and key not in shown):
                    continue
                if isinstance(member, classmethod | staticmethod):
                    member = member.__func__
                elif isinstance(member, property):
                    member = member.fget
                if inspect.isfunction(member):
                    yield f"{module_name}.{name}.{key}", member, value


OBJECTS = list(public_objects())


def inherited_doc(value: Any, owner: type | None) -> bool:
    """Whether a base class has documented this method."""
    if owner is None:
        return False
    return any(
        getattr(vars(base).get(value.__name__), "__doc__", None) for base in owner.__mro__[1:-1]
    )


def parameters(value: Any) -> tuple[list[str], bool]:
    """Names of what a caller gives, and whether there are open keywords beside."""
    try:
        found = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return [], True
    names = [p.name for p in found if p.name not in ("self", "cls") and p.name[0] != "_"]
    return names, any(p.kind is p.VAR_KEYWORD for p in found)


def raised(value: Any) -> set[str]:
    """Names of the exceptions that the body itself raises."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(value)))
    return {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
        for name in [getattr(node.exc.func, "id", getattr(node.exc.func, "attr", ""))]
        if OWN_ERRORS.match(name) and name not in ("NotImplementedError", "AttributeError")
    }


def complaints(where: str, value: Any, owner: type | None) -> list[str]:
    text = inspect.getdoc(value)
    if not text:
        return [f"{where}: no docstring"]
    parsed = docscrape.NumpyDocString(text)
    listed = {
        name.strip().lstrip("*")
        for section in ("Parameters", "Attributes")
        for entry in parsed[section]
        for name in entry.name.split(",")
    }
    names, is_open = parameters(value)
    found = []
    is_class = inspect.isclass(value)
    if parsed["Parameters"]:
        missing = set(names) - listed - {"args", "kwargs"}
        found += [f"{where}: the parameters leave out {name}" for name in sorted(missing)]
        if not is_class and not is_open:
            unknown = {
                n.strip().lstrip("*") for e in parsed["Parameters"] for n in e.name.split(",")
            }
            found += [f"{where}: has no parameter {name}" for name in sorted(unknown - set(names))]
        returns = None if is_class else inspect.signature(value).return_annotation
        if (
            returns not in (None, "None", "Iterator[None]", inspect.Signature.empty)
            and not (parsed["Returns"] or parsed["Yields"])
            and VERBS.match(text)
        ):
            found.append(f"{where}: says what it does, not what it returns")
    elif len(names) > FEW and not inherited_doc(value, owner) and not REFERENCE.search(text):
        is_small = dataclasses.is_dataclass(value) and len(names) <= FEW + 1
        is_known = is_class and (value.__name__ in MADE_BY_OTHERS or is_small)
        unnamed = [n for n in names if n not in listed and not re.search(rf"`{n}\b", text)]
        if unnamed and not is_known and not where.startswith("rotor.models"):
            found.append(f"{where}: no section Parameters, and nothing of {unnamed}")
    if not is_class:
        found += [f"{where}: raises {name}" for name in sorted(raised(value)) if name not in text]
    return found


def test_there_is_something_to_check():
    assert len(MODULES) > 30
    assert len(OBJECTS) > 300


def test_docstrings_say_what_goes_in_and_out():
    found = [line for entry in OBJECTS for line in complaints(*entry)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "module", ["rotor", "rotor.algorithms", "rotor.dtr", "rotor.graph", "rotor.simrd", "rotor.rkgb"]
)
def test_every_public_name_has_a_place_in_the_reference(module):
    names = [
        name
        for name in importlib.import_module(module).__all__
        if not name.startswith("__")
        and not inspect.ismodule(getattr(importlib.import_module(module), name))
    ]
    missing = [name for name in names if not re.search(rf"\b{name}\b", REFERENCE_TEXT)]
    assert missing == []
